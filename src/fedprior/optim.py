"""Optimisers as pure functions, for clients (on gradients) and for the server (on mean updates).

SGD and AdamW are tested step by step against their twins in `torch.optim`; the server's adaptive ones
(Reddi et al., 2021, arXiv:2003.00295) against their closed forms.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from . import tree
from .errors import UsageError
from .tree import Tree


class Optimizer(Protocol):
    """Steps as pure functions: the state goes in and comes out."""

    @property
    def lr(self) -> float: ...

    def init(self, params: Tree) -> Tree:
        """The state before the first step."""
        ...

    def update(self, grads: Tree, state: Tree, params: Tree, scale: float = 1.0) -> tuple[Tree, Tree]:
        """-> (params, state) after one step at the rate lr * scale; nothing given is written to."""
        ...

    def length(self, rates: Sequence[float], pull: float = 0.0) -> float:
        """How far steps at these rates move under gradients that are all one; each gradient also has `pull` times
        the way gone so far in it (a proximal term). FedNova's a (arXiv:2007.07481), in units of the rate."""
        ...


def _check(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < float("inf"):
            raise UsageError(f"{name} must be a number >= 0, not {value}")


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Gradient descent with heavy-ball momentum: v = momentum v + (1 - dampening) g, from v = 0; weight decay is
    added to the gradient (L2). (torch.optim.SGD does not dampen its first step.)"""

    lr: float = 0.01
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check(lr=self.lr, momentum=self.momentum, dampening=self.dampening, weight_decay=self.weight_decay)
        if max(self.momentum, self.dampening) >= 1:
            raise UsageError(f"momentum and dampening must be below 1, not {self.momentum} and {self.dampening}")
        if self.dampening and not self.momentum:
            raise UsageError("dampening has no meaning without momentum; set momentum too, or dampening=0")

    def init(self, params: Tree) -> Tree:
        return {"velocity": tree.zeros_like(params)} if self.momentum else {}

    def update(self, grads: Tree, state: Tree, params: Tree, scale: float = 1.0) -> tuple[Tree, Tree]:
        if self.weight_decay:
            grads = tree.map(lambda g, p: g.add(p, alpha=self.weight_decay), grads, params)
        if self.dampening:
            grads = tree.scale(grads, 1 - self.dampening)
        if self.momentum:
            grads = tree.map(lambda v, g: torch.add(g, v, alpha=self.momentum), state["velocity"], grads)
            state = {"velocity": grads}
        return tree.map(lambda p, g: p.add(g, alpha=-self.lr * scale), params, grads), state

    def length(self, rates: Sequence[float], pull: float = 0.0) -> float:
        gone = velocity = 0.0
        for rate in rates:
            velocity = self.momentum * velocity + (1 - self.dampening) * (1 - pull * gone)
            gone += rate * velocity
        return gone


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
        first = next(iter(params.values()), torch.empty(0))
        t = torch.zeros((), device=first.device)  # where the params are: stacked clients cannot mix devices
        return {"m": tree.zeros_like(params), "v": tree.zeros_like(params), "t": t}

    def update(self, grads: Tree, state: Tree, params: Tree, scale: float = 1.0) -> tuple[Tree, Tree]:
        t, lr = state["t"] + 1, self.lr * scale
        m = tree.map(lambda m, g: torch.lerp(m, g, 1 - self.beta1), state["m"], grads)
        v = tree.map(lambda v, g: (v * self.beta2).addcmul(g, g, value=1 - self.beta2), state["v"], grads)
        shrink, debias = 1 - lr * self.weight_decay, _one_minus_power(self.beta1, t)
        root = _one_minus_power(self.beta2, t).sqrt()

        def step(p: Tensor, m: Tensor, v: Tensor) -> Tensor:
            moved: Tensor = p * shrink - (lr / debias) * m / (v.sqrt() / root + self.eps)
            return moved

        return tree.map(step, params, m, v), {"m": m, "v": v, "t": t}

    def length(self, rates: Sequence[float], pull: float = 0.0) -> float:
        return math.fsum(rates)  # a step is about as long as its rate, whatever the gradient


def _one_minus_power(base: float, t: Tensor) -> Tensor:
    """1 - base^t without the cancellation that costs float32 five digits while base^t is near 1."""
    return -torch.expm1(t * (math.log(base) if base else -math.inf))


@dataclass(frozen=True, kw_only=True)
class Adaptive(ABC):
    """The server's adaptive step on D, the mean client update (Reddi et al., 2021, arXiv:2003.00295, Algorithm 2):

        m = beta1 m + (1 - beta1) D;  v = second(v, D^2);  x = x + lr m / (sqrt(v) + tau)

    with m = 0 and v = tau^2 at first. No bias correction, as in the paper; with `bias_correction` the step is
    also scaled by sqrt(1 - beta2^t) / (1 - beta1^t), as in Adam.
    """

    lr: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3
    bias_correction: bool = False

    def __post_init__(self) -> None:
        _check(lr=self.lr, beta1=self.beta1, beta2=self.beta2, tau=self.tau)
        if max(self.beta1, self.beta2) >= 1:
            raise UsageError(f"beta1 and beta2 must be below 1, not {self.beta1} and {self.beta2}")
        if not self.tau:
            raise UsageError("tau must be above 0; the paper's choice is 0.001")

    @abstractmethod
    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """The next v."""

    def init(self, params: Tree) -> Tree:
        return {
            "m": tree.zeros_like(params),
            "v": tree.map(lambda p: torch.full_like(p, self.tau**2), params),
            "t": torch.zeros((), dtype=torch.int64),
        }

    def update(self, grads: Tree, state: Tree, params: Tree, scale: float = 1.0) -> tuple[Tree, Tree]:
        t, lr = state["t"] + 1, self.lr * scale
        m = tree.map(lambda m, g: torch.lerp(m, g, 1 - self.beta1), state["m"], grads)
        v = tree.map(lambda v, g: self.second(v, g * g), state["v"], grads)
        if self.bias_correction:
            root = math.sqrt(1 - self.beta2 ** int(t)) if self.beta2 else 1.0
            lr = lr * root / (1 - self.beta1 ** int(t))
        moved = tree.map(lambda p, m, v: p - lr * m / (v.sqrt() + self.tau), params, m, v)
        return moved, {"m": m, "v": v, "t": t}

    def length(self, rates: Sequence[float], pull: float = 0.0) -> float:
        return math.fsum(rates)


@dataclass(frozen=True, kw_only=True)
class Adam(Adaptive):
    """FedAdam's server step: v = beta2 v + (1 - beta2) D^2."""

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return torch.lerp(v, square, 1 - self.beta2)


@dataclass(frozen=True, kw_only=True)
class Yogi(Adaptive):
    """FedYogi's server step: v = v - (1 - beta2) D^2 sign(v - D^2)."""

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * torch.sign(v - square)


@dataclass(frozen=True, kw_only=True)
class Adagrad(Adaptive):
    """FedAdagrad's server step: v = v + D^2. Neither momentum nor beta2 by default."""

    beta1: float = 0.0
    beta2: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta2:
            raise UsageError(f"adagrad sums all squares and has no beta2; leave it at 0, not {self.beta2}")

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square


OPTIMIZERS: dict[str, type[SGD] | type[AdamW]] = {"sgd": SGD, "adamw": AdamW}
SERVER_OPTIMIZERS: dict[str, type[SGD] | type[AdamW] | type[Adaptive]] = {
    **OPTIMIZERS,
    "adam": Adam,
    "yogi": Yogi,
    "adagrad": Adagrad,
}
