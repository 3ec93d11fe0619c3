"""SCAFFOLD (Karimireddy et al., 2020, arXiv:1910.06378, Algorithm 1): control variates undo the clients' drift.

    step    w <- w - lr (g - c_k + c)
    client  c_k+ = grad f_k(x)                        option I
            c_k+ = c_k - c + (x - y_k) / (K lr)       option II, here with the sum of the rates for K lr
    server  x+ = x + lr_s sum_k p_k (y_k - x);  c+ = c + (1/N) sum_k (c_k+ - c_k)

All start at zero, so c stays the mean of all c_k. Control variates exist for trainable tensors only.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from .. import tree
from ..data.table import Shard
from ..errors import UsageError
from ..method import Context, Method, Result, Round, Server
from ..net import Net
from ..optim import SGD, Optimizer
from ..tree import Tree

ROWS = 256  # of a forward pass for option I


@dataclass(frozen=True, kw_only=True)
class Scaffold(Method):
    """`mode` says where the correction c - c_k enters, which matters once the local optimiser is not plain SGD:

    - `sgd`: in the gradient, as in the paper; plain SGD only.
    - `pre`: in the gradient of any optimiser; option II takes the mean of the raw gradients.
    - `post`: after the optimiser's step, w <- w - lr (c - c_k), as FedZoo-Bench and NIID-Bench do; equals `sgd` for
      plain SGD, and fits momentum, weight decay and AdamW too: c_k is then a mean step in units of the rate.

    `server_scale`: 1/N is the paper's; `1/sampled` divides by the cohort instead, as FedZoo-Bench does, which
    makes c larger than the mean of the c_k by N / sampled.
    """

    mode: Literal["post", "pre", "sgd"] = "post"
    option: Literal["I", "II"] = "II"
    server_scale: Literal["1/N", "1/sampled"] = "1/N"

    once: ClassVar[frozenset[str]] = frozenset({"control"})
    needs_mean: ClassVar[str] = "its control variate is the mean of the clients' own"

    @property
    def mean_gradient(self) -> bool:  # type: ignore[override]
        return self.mode == "pre" and self.option == "II"

    def check(self, local: Optimizer) -> None:
        if self.mode == "sgd" and not (isinstance(local, SGD) and not local.momentum and not local.weight_decay):
            raise UsageError("method.mode=sgd is for plain SGD; use method.mode=post or pre with this local optimiser")
        plain = isinstance(local, SGD) and not local.momentum
        if self.mode == "post" and self.option == "I" and not plain:
            raise UsageError("method.option=I is a gradient, not a step; use method.mode=pre or method.option=II")

    def init_server(self, net: Net, weights: Tree, seed: int) -> Tree:
        return {"control": tree.zeros_like(weights["params"])}

    def init_client(self, net: Net, weights: Tree) -> Tree:
        return {"control": tree.zeros_like(weights["params"])}

    def broadcast(self, server: Server) -> Tree:
        return {"control": server.state["control"]}

    def gradient(self, grads: Tree, params: Tree, ctx: Context) -> Tree:
        return grads if self.mode == "post" else self._shift(grads, 1.0, ctx)

    def project(self, params: Tree, lr: float, ctx: Context) -> Tree:
        return self._shift(params, -lr, ctx) if self.mode == "post" else params

    def _shift(self, values: Tree, by: float, ctx: Context) -> Tree:
        return tree.map(lambda x, c, own: x + by * (c - own), values, ctx.shared["control"], ctx.mine["control"])

    def finish(self, result: Result, shard: Shard, ctx: Context) -> tuple[Tree, Tree]:
        own, common = ctx.mine["control"], ctx.shared["control"]
        if self.option == "I":
            new = full_gradient(ctx, shard)
        elif self.mode == "pre":
            new = result.gradient
        elif not result.travel:  # no rate, no displacement to learn from
            new = own
        else:
            new = tree.map(lambda k, c, d: k - c - d / result.travel, own, common, result.delta)
        return {"delta": result.delta, "control": tree.sub(new, own)}, {"control": new}

    def update(self, server: Server, mean: Tree, round: Round) -> Server:
        share = round.fraction if self.server_scale == "1/N" else 1.0
        control = tree.map(lambda c, d: c + share * d, server.state["control"], mean["control"])
        return super().update(server, mean, round)._replace(state={"control": control})


def full_gradient(ctx: Context, shard: Shard) -> Tree:
    """The gradient of the mean loss over all rows at the round's start, without dropout and with the statistics
    that batch norm has there."""
    params = {k: p.detach().requires_grad_() for k, p in ctx.start["params"].items()}
    total = tree.zeros_like(ctx.start["params"])
    for which in torch.arange(len(shard), device=shard.rows.device).split(ROWS):
        batch = shard.batch(which)
        with torch.enable_grad():
            logits = ctx.net(ctx.start | {"params": params}, batch["image"], train=False).logits
            loss = torch.nn.functional.cross_entropy(logits, batch["label"], reduction="sum")
            grads = torch.autograd.grad(loss, list(params.values()))
        total = tree.add(total, dict(zip(params, grads, strict=True)))
    return tree.scale(total, 1 / len(shard))
