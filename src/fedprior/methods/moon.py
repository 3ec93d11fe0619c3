"""MOON (Li et al., 2021, arXiv:2103.16257, eq. 3 and 4): near the global model's features, away from one's own last.

l = -log( e^{cos(z, z_glob)/T} / (e^{cos(z, z_glob)/T} + sum_prev e^{cos(z, z_prev)/T}) );  loss = CE + mu l

z_glob and z_prev come from frozen models: the one received this round and the client's own from its last rounds.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.table import Shard, Table
from ..method import Context, Method, Result
from ..net import Net, Output
from ..nets.heads import Projected
from ..tree import Tree
from .checks import above_zero, at_least


@dataclass(frozen=True, kw_only=True)
class Moon(Method):
    """`projection` is the width of a two-layer head between features and classifier, which the contrast sees
    (256 in the paper; none contrasts the net's own features). `queue` previous models are remembered.

    The initial model counts as a client's first previous one.
    """

    mu: float = 1.0
    temperature: float = 0.5
    projection: int | None = 256
    queue: int = 1

    def __post_init__(self) -> None:
        at_least(0, mu=self.mu)
        above_zero(temperature=self.temperature)
        at_least(1, queue=self.queue, **({} if self.projection is None else {"projection": self.projection}))

    def adapt(self, module: nn.Module, seed: int) -> nn.Module:
        return module if self.projection is None else Projected(module, self.projection, seed)

    def init_client(self, net: Net, weights: Tree) -> Tree:
        first = net.init()
        filled = torch.arange(self.queue, device=net.device) < 1
        return {"previous": {str(i): first for i in range(self.queue)}, "filled": filled}

    def loss(self, weights: Tree, batch: Table, ctx: Context) -> tuple[Tensor, Output]:
        loss, out = super().loss(weights, batch, ctx)
        near = likeness(out.features, ctx.start, batch, ctx)  # [B]
        past = [likeness(out.features, w, batch, ctx) for w in ctx.mine["previous"].values()]
        far = torch.where(ctx.mine["filled"][:, None], torch.stack(past), float("-inf"))  # [queue, B]
        logits = torch.cat([near[None], far]) / self.temperature  # [1 + queue, B]
        return loss - self.mu * F.log_softmax(logits, dim=0)[0].mean(), out

    def finish(self, result: Result, shard: Shard, ctx: Context) -> tuple[Tree, Tree]:
        models = [result.weights, *ctx.mine["previous"].values()][: self.queue]  # newest first
        filled = torch.arange(self.queue, device=ctx.net.device) <= ctx.mine["filled"].sum()
        return {"delta": result.delta}, {"previous": {str(i): w for i, w in enumerate(models)}, "filled": filled}


def likeness(z: Tensor, weights: Tree, batch: Table, ctx: Context) -> Tensor:
    """Cosine of each feature with that of a frozen model, [B]."""
    with torch.no_grad():
        frozen = ctx.net(weights, batch["image"], train=False).features
    return F.cosine_similarity(z, frozen, dim=1)
