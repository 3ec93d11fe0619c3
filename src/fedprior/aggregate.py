"""Rules that make one tree of many uploads.

The mean streams: it holds one running sum. The robust rules need all uploads of a round at once; they work
coordinate by coordinate and count every client once, since a weight that a client names is no protection.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import tree
from .errors import UsageError
from .tree import Tree
from .uploads import update_norm


@dataclass(frozen=True, kw_only=True)
class Mean:
    """The weighted mean."""

    def __call__(self, uploads: Iterable[tuple[Tree, float]], once: frozenset[str] = frozenset()) -> Tree:
        return tree.mean(uploads, once)


@dataclass(frozen=True, kw_only=True)
class Median:
    """The coordinate-wise median (Yin et al., 2018, arXiv:1803.01498, Definition 1); of an even number of clients
    the mean of the middle two."""

    def __call__(self, uploads: Iterable[tuple[Tree, float]], once: frozenset[str] = frozenset()) -> Tree:
        return _coordinates(uploads, lambda stack: _middle(stack, (len(stack) - 1) // 2))


@dataclass(frozen=True, kw_only=True)
class TrimmedMean:
    """The mean without the `trim` share of the clients at either end of each coordinate, rounded up to whole
    clients (Yin et al., 2018, arXiv:1803.01498, Definition 2)."""

    trim: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.trim < 0.5:
            raise UsageError(f"aggregate.trim must be from 0 to below 0.5, not {self.trim}")

    def __call__(self, uploads: Iterable[tuple[Tree, float]], once: frozenset[str] = frozenset()) -> Tree:
        def trimmed(stack: Tensor) -> Tensor:
            n = len(stack)
            return _middle(stack, min(math.ceil(round(self.trim * n, 9)), (n - 1) // 2))

        return _coordinates(uploads, trimmed)


def _middle(stack: Tensor, cut: int) -> Tensor:
    """The mean of what is left of [n, ...] when the `cut` smallest and largest of each coordinate are gone."""
    return stack.sort(0).values[cut : len(stack) - cut].mean(0)


def _coordinates(uploads: Iterable[tuple[Tree, float]], rule: Callable[[Tensor], Tensor]) -> Tree:
    """`rule` on each leaf's float64 stack [clients, ...]; integer leaves come from the client of largest weight."""
    items = list(uploads)
    if not items:
        raise ValueError("there is nothing to aggregate")
    heaviest = max(range(len(items)), key=lambda i: items[i][1])  # the first one on a tie

    def combine(*leaves: Tensor) -> Tensor:
        if not leaves[0].is_floating_point():
            return leaves[heaviest].clone()
        return rule(torch.stack([x.double() for x in leaves])).to(leaves[0].dtype)

    combined: Tree = tree.map(combine, *(item for item, _ in items))
    return combined


def clip(upload: Tree, most: float) -> Tree:
    """The upload with its model update (`method/delta`) scaled down to a Euclidean norm of at most `most`."""
    norm, method = update_norm(upload), upload["method"]
    if norm <= most:
        return upload
    return upload | {"method": method | {"delta": tree.scale(method["delta"], most / norm)}}


AGGREGATES: dict[str, type[Mean] | type[Median] | type[TrimmedMean]] = {
    "mean": Mean,
    "trimmed_mean": TrimmedMean,
    "median": Median,
}
