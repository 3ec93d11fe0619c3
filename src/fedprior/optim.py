"""Optimisers as pure functions, for clients (on gradients) and for the server (on mean updates).

Each is tested step by step against its twin in `torch.optim`.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from . import tree
from .errors import UsageError
from .tree import Tree


class Optimizer(Protocol):
    @property
    def lr(self) -> float: ...

    def init(self, params: Tree) -> Tree:
        """The state before the first step."""
        ...

    def update(self, grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        """-> (params, state) after one step; nothing given is written to."""
        ...

    def length(self, steps: int) -> float:
        """Summed weight of all gradients in the displacement after `steps` (FedNova's a, arXiv:2007.07481)."""
        ...


def _check(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < float("inf"):
            raise UsageError(f"{name} must be a number >= 0, not {value}")


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Gradient descent with heavy-ball momentum; weight decay is added to the gradient (L2)."""

    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check(lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        if self.momentum >= 1:
            raise UsageError(f"momentum must be below 1, not {self.momentum}")

    def init(self, params: Tree) -> Tree:
        return {"velocity": tree.zeros_like(params)} if self.momentum else {}

    def update(self, grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        if self.weight_decay:
            grads = tree.map(lambda g, p: g.add(p, alpha=self.weight_decay), grads, params)
        if self.momentum:
            grads = tree.map(lambda v, g: torch.add(g, v, alpha=self.momentum), state["velocity"], grads)
            state = {"velocity": grads}
        return tree.map(lambda p, g: p.add(g, alpha=-self.lr), params, grads), state

    def length(self, steps: int) -> float:
        rho = self.momentum
        return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay (arXiv:1711.05101)."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 1e-2

    def __post_init__(self) -> None:
        _check(lr=self.lr, beta1=self.beta1, beta2=self.beta2, eps=self.eps, weight_decay=self.weight_decay)
        if max(self.beta1, self.beta2) >= 1:
            raise UsageError(f"beta1 and beta2 must be below 1, not {self.beta1} and {self.beta2}")

    def init(self, params: Tree) -> Tree:
        return {"m": tree.zeros_like(params), "v": tree.zeros_like(params), "t": torch.zeros(())}

    def update(self, grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        t = state["t"] + 1
        m = tree.map(lambda m, g: torch.lerp(m, g, 1 - self.beta1), state["m"], grads)
        v = tree.map(lambda v, g: (v * self.beta2).addcmul(g, g, value=1 - self.beta2), state["v"], grads)
        shrink, debias = 1 - self.lr * self.weight_decay, 1 - self.beta1**t
        root = (1 - self.beta2**t).sqrt()

        def step(p: Tensor, m: Tensor, v: Tensor) -> Tensor:
            moved: Tensor = p * shrink - (self.lr / debias) * m / (v.sqrt() / root + self.eps)
            return moved

        return tree.map(step, params, m, v), {"m": m, "v": v, "t": t}

    def length(self, steps: int) -> float:
        return float(steps)


OPTIMIZERS: dict[str, type[SGD] | type[AdamW]] = {"sgd": SGD, "adamw": AdamW}
