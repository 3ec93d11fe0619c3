"""FedProto (Tan et al., 2022, arXiv:2105.00243): clients share class prototypes, means of their features.

client  minimises CE + lambda MSE(z_i, prototype of y_i), skipped for classes without a prototype
server  prototype of a class = mean over the clients that own it
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..data.table import Shard, Table
from ..method import Context, Method, Result, Round, Server
from ..net import Net, Output
from ..tree import Tree
from .checks import at_least
from .prototypes import class_means, distance_to


@dataclass(frozen=True, kw_only=True)
class FedProto(Method):
    """`share=prototypes` is the paper: each client keeps its own model, and accuracy is the mean over them.
    `share=both` also averages the models, so that a global one exists.

    `owners=equal` counts each owner once, as the authors' code does; `owners=rows` by its rows of the class.
    """

    strength: float = 1.0
    share: Literal["prototypes", "both"] = "prototypes"
    owners: Literal["equal", "rows"] = "equal"

    once: ClassVar[frozenset[str]] = frozenset({"prototypes", "owners"})
    needs_mean: ClassVar[str] = "prototypes are means over those who own a class"

    def __post_init__(self) -> None:
        at_least(0, strength=self.strength)

    def keeps(self, net: Net) -> frozenset[str]:
        return net.names if self.share == "prototypes" else frozenset()

    def init_server(self, net: Net, weights: Tree, seed: int) -> Tree:
        shape = net.classes, net.width
        return {
            "prototypes": torch.zeros(shape, device=net.device),
            "known": torch.zeros(net.classes, dtype=torch.bool, device=net.device),
        }

    def broadcast(self, server: Server) -> Tree:
        return server.state

    def loss(self, weights: Tree, batch: Table, ctx: Context) -> tuple[Tensor, Output]:
        loss, out = super().loss(weights, batch, ctx)
        far = distance_to(out.features, ctx.shared["prototypes"], ctx.shared["known"], batch["label"])
        return loss + self.strength * far, out

    def finish(self, result: Result, shard: Shard, ctx: Context) -> tuple[Tree, Tree]:
        means, rows = class_means(ctx, result.weights, shard)
        counts = rows if self.owners == "rows" else (rows > 0).to(means)
        sent = {"prototypes": means * counts[:, None], "owners": counts}
        return {"delta": result.delta} | sent, ctx.mine

    def update(self, server: Server, mean: Tree, round: Round) -> Server:
        owned = mean["owners"] > 0  # the others keep what they have
        fresh = mean["prototypes"] / torch.where(owned, mean["owners"], 1.0)[:, None]
        state = {
            "prototypes": torch.where(owned[:, None], fresh, server.state["prototypes"]),
            "known": server.state["known"] | owned,
        }
        return super().update(server, mean, round)._replace(state=state)
