"""FedProx (Li et al., 2020, arXiv:1812.06127): local loss + mu/2 ||w - x||^2 pulls towards the global weights x."""

from dataclasses import dataclass

from .. import tree
from ..method import Context, Method
from ..tree import Tree
from .checks import at_least


@dataclass(frozen=True, kw_only=True)
class FedProx(Method):
    """`mu` weighs the proximal term; 0 is FedAvg, bit for bit."""

    mu: float = 0.01

    def __post_init__(self) -> None:
        at_least(0, mu=self.mu)

    def gradient(self, grads: Tree, params: Tree, ctx: Context) -> Tree:
        if not self.mu:
            return grads
        return tree.map(lambda g, p, x: g + self.mu * (p - x), grads, params, ctx.start["params"])
