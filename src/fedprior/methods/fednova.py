"""FedNova (Wang et al., 2020, arXiv:2007.07481, eq. 6 and section 4): average directions, not distances.

d_k = (x - y_k) / a_k;  x+ = x - (sum_k p_k a_k) sum_k p_k d_k

a_k is how far client k would have moved under gradients that are all one: tau steps for plain SGD,
[tau - rho (1 - rho^tau) / (1 - rho)] / (1 - rho) with momentum rho, a+ = (1 - lr mu) a + 1 in each step with a
proximal term. Here it is in units of the learning rate, at the rates really applied, so schedules and clients
that did part of their work are included; at a constant rate that factor cancels.
"""

from dataclasses import dataclass

import torch

from .. import tree
from ..data.table import Shard
from ..method import Context, Method, Result, Round, Server
from ..tree import Tree
from .checks import at_least
from .fedprox import FedProx


@dataclass(frozen=True, kw_only=True)
class FedNova(Method):
    """`mu` adds FedProx's term. Server momentum is `server.momentum`.

    Adaptive local optimisers have a_k = the sum of their rates: a step's length hardly depends on the gradient.
    With a proximal term the step is sum_k p_k tau_k long instead of sum_k p_k a_k, as in the authors' code.
    """

    mu: float = 0.0

    def __post_init__(self) -> None:
        at_least(0, mu=self.mu)

    @property
    def pull(self) -> float:
        return self.mu

    def gradient(self, grads: Tree, params: Tree, ctx: Context) -> Tree:
        return FedProx(mu=self.mu).gradient(grads, params, ctx)

    def finish(self, result: Result, shard: Shard, ctx: Context) -> tuple[Tree, Tree]:
        far = result.travel if self.mu else result.length
        # a rate of 0 leaves nothing to normalise
        direction = tree.scale(result.delta, 1 / result.length if result.length else 0.0)
        return {"delta": direction, "length": torch.tensor(far, dtype=torch.float64)}, ctx.mine

    def update(self, server: Server, mean: Tree, round: Round) -> Server:
        return super().update(server, {"delta": tree.scale(mean["delta"], float(mean["length"]))}, round)
