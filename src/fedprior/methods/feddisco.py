"""FedDisco (Ye et al., 2023, arXiv:2305.19229, eq. 5): weights fall with a client's distance from even classes.

p_k ~ ReLU(n_k - a d_k + b), n_k the client's share of the cohort's rows, d_k the discrepancy between its class
shares and 1/C
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from ..data.table import Shard
from ..method import Aggregate, Context, Method, Result
from ..tree import Tree
from .checks import at_least


@dataclass(frozen=True, kw_only=True)
class FedDisco(Method):
    """`metric=kl` takes each client's Kullback-Leibler divergence as a share of the cohort's sum, `l2` the plain
    Euclidean distance; both as in the authors' code. A client sends d_k, one number about its labels.

    Where no weight would be positive, rows alone count.
    """

    a: float = 0.5
    b: float = 0.1
    metric: Literal["kl", "l2"] = "kl"

    needs_mean: ClassVar[str] = "its weights are its point, and robust rules know none"

    def __post_init__(self) -> None:
        at_least(0, a=self.a, b=self.b)

    def finish(self, result: Result, shard: Shard, ctx: Context) -> tuple[Tree, Tree]:
        shares = shard["label"].bincount(minlength=ctx.net.classes).double() / len(shard)
        even = torch.full_like(shares, 1 / len(shares))
        if self.metric == "l2":
            far = (shares - even).norm()
        else:
            far = torch.special.xlogy(shares, shares / even).sum()
        return {"delta": result.delta, "discrepancy": far}, ctx.mine

    def reduce(self, uploads: Iterable[tuple[Tree, float]], aggregate: Aggregate) -> Tree:
        items = list(uploads)
        sizes = torch.tensor([weight for _, weight in items], dtype=torch.float64)
        far = torch.stack([upload["method"]["discrepancy"].cpu() for upload, _ in items])
        if self.metric == "kl":
            far = far / far.sum() if far.sum() > 0 else far
        weights = torch.relu(sizes / sizes.sum() - self.a * far + self.b)
        if not weights.sum() > 0:
            weights = sizes
        pairs = zip(items, weights.tolist(), strict=True)
        return aggregate(((upload, weight) for (upload, _), weight in pairs if weight > 0), frozenset())
