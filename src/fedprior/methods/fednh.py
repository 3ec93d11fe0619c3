"""FedNH (Dai et al., 2023, arXiv:2212.02758): a head of class prototypes that is blended, never trained.

    logits  s <z / |z|, W_y>, W on the unit sphere, s learnt
    client  sends with its update the unit mean feature mu_kc of each class, times its rows n_kc
    server  A_c = normalise(sum_k n_kc mu_kc / sum_k n_kc);  W_c+ = normalise(rho W_c + (1 - rho) A_c)

The rest of the net is averaged without weights. A class that no client of the round has keeps its W_c.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from ..data.table import Shard
from ..errors import UsageError
from ..method import Context, Method, Result, Round, Server
from ..nets.heads import Prototypes, shape_of_head
from ..tree import Tree
from .checks import above_zero
from .prototypes import class_means

HEAD = "head.weight"


@dataclass(frozen=True, kw_only=True)
class FedNH(Method):
    """`rho` is the share of the old prototypes, `scale` the first value of s (20 as for the paper's ResNet; 1 for
    its small CNN), which stays so with `learn_scale=false`.

    The paper's clients clip gradients at norm 10 and lower their rate by 0.99 a round: `clip_gradient=10` and
    `schedule=exponential`.
    """

    rho: float = 0.9
    scale: float = 20.0
    learn_scale: bool = True

    once: ClassVar[frozenset[str]] = frozenset({"prototypes", "rows"})
    needs_mean: ClassVar[str] = "prototypes are means over those who own a class"

    def __post_init__(self) -> None:
        above_zero(scale=self.scale)
        if not 0 <= self.rho <= 1:
            raise UsageError(f"method.rho must be from 0 to 1, not {self.rho}")

    def adapt(self, module: nn.Module, seed: int) -> nn.Module:
        classes, width = shape_of_head(module)
        module.head = Prototypes(classes, width, self.scale, self.learn_scale, seed)
        return module

    def gradient(self, grads: Tree, params: Tree, ctx: Context) -> Tree:
        return grads | {HEAD: torch.zeros_like(grads[HEAD])}

    def project(self, params: Tree, lr: float, ctx: Context) -> Tree:
        return params | {HEAD: ctx.start["params"][HEAD]}  # weight decay would shrink it

    def finish(self, result: Result, shard: Shard, ctx: Context) -> tuple[Tree, Tree]:
        means, rows = class_means(ctx, result.weights, shard, unit=True)
        rest = {k: d for k, d in result.delta.items() if k != HEAD}
        sent = {"delta": rest, "prototypes": F.normalize(means, dim=-1) * rows[:, None], "rows": rows}
        return sent, ctx.mine

    def weight(self, size: float) -> float:
        return 1.0

    def update(self, server: Server, mean: Tree, round: Round) -> Server:
        old = server.weights["params"][HEAD]
        blend = self.rho * old + (1 - self.rho) * F.normalize(mean["prototypes"], dim=-1)
        head = torch.where((mean["rows"] > 0)[:, None], F.normalize(blend, dim=-1), old)
        still = {k: mean["delta"].get(k, torch.zeros_like(p)) for k, p in server.weights["params"].items()}
        server = super().update(server, {"delta": still}, round)
        return server._replace(weights=server.weights | {"params": server.weights["params"] | {HEAD: head}})
