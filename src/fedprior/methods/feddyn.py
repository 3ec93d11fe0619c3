"""FedDyn (Acar et al., 2021, arXiv:2111.04263, Algorithm 1): local objectives that agree at the optimum.

    client  minimises f_k(w) - <g_k, w> + alpha/2 ||w - x||^2, then g_k <- g_k - alpha (y_k - x)
    server  h <- h - (alpha/N) sum_k (y_k - x);  x+ = mean_k y_k - h / alpha

The mean over the cohort is unweighted. All start at zero, so h stays the mean of all g_k.
"""

from dataclasses import dataclass
from typing import ClassVar

from .. import tree
from ..data.table import Shard
from ..method import Context, Method, Result, Round, Server
from ..net import Net
from ..tree import Tree
from .checks import above_zero


@dataclass(frozen=True, kw_only=True)
class FedDyn(Method):
    """`alpha` weighs the dynamic regulariser, 0.01 as for CIFAR-10 in the authors' code.

    That code also scales alpha by each client's size, which its equal splits do not need; here it is one number.
    It clips gradients at norm 10: `clip_gradient=10`.
    """

    alpha: float = 0.01

    needs_mean: ClassVar[str] = "its h is the mean of the clients' g"
    needs_whole_updates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        above_zero(alpha=self.alpha)

    def init_server(self, net: Net, weights: Tree, seed: int) -> Tree:
        return {"h": tree.zeros_like(weights["params"])}

    def init_client(self, net: Net, weights: Tree) -> Tree:
        return {"g": tree.zeros_like(weights["params"])}

    def gradient(self, grads: Tree, params: Tree, ctx: Context) -> Tree:
        def regularised(d, p, x, g):  # type: ignore[no-untyped-def]
            return d - g + self.alpha * (p - x)

        return tree.map(regularised, grads, params, ctx.start["params"], ctx.mine["g"])

    def finish(self, result: Result, shard: Shard, ctx: Context) -> tuple[Tree, Tree]:
        g = tree.map(lambda g, d: g - self.alpha * d, ctx.mine["g"], result.delta)
        return {"delta": result.delta}, {"g": g}

    def weight(self, size: float) -> float:
        return 1.0

    def update(self, server: Server, mean: Tree, round: Round) -> Server:
        h = tree.map(lambda h, d: h - self.alpha * round.fraction * d, server.state["h"], mean["delta"])
        moved = tree.map(lambda d, h: d - h / self.alpha, mean["delta"], h)
        return super().update(server, {"delta": moved}, round)._replace(state={"h": h})
