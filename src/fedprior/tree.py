"""Arithmetic on trees: nested dicts whose leaves are tensors. Weights, memories and messages are trees."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

Tree = dict[str, Any]  # dict[str, Tree | Tensor]; the recursion is not expressible for type checkers


def map(fn: Callable[..., Any], *trees: Tree) -> Tree:
    """Apply `fn` to the leaves at each path; all trees must have the paths of the first."""
    return {
        k: map(fn, *(t[k] for t in trees)) if isinstance(head, dict) else fn(*(t[k] for t in trees))
        for k, head in trees[0].items()
    }


def zeros_like(a: Tree) -> Tree:
    return map(torch.zeros_like, a)


def add(a: Tree, b: Tree) -> Tree:
    return map(torch.add, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    return map(torch.sub, a, b)


def scale(a: Tree, s: float) -> Tree:
    return map(lambda x: x * s, a)


def norm(a: Tree) -> float:
    """Euclidean norm over all leaves, summed in float64."""
    leaves = flatten(a).values()
    return math.sqrt(math.fsum(x.detach().double().square().sum().item() for x in leaves))


def mean(items: Iterable[tuple[Tree, float]]) -> Tree:
    """Weighted mean in one pass: holds a single running sum however many items come.

    Sums are float64 and in the order of `items`, so the result does not depend on anything else.
    Leaves keep their dtype. Integer leaves (batch counters) have no mean: the item of the largest
    weight gives them, the earlier one on a tie.

    Raises ValueError when there are no items or the weights do not sum to more than zero.
    """
    total: Tree | None = None
    mass, heaviest = 0.0, 0.0
    like: Tree = {}
    for item, weight in items:
        if total is None:
            like = item
            total = map(lambda x: x.double() * weight if x.is_floating_point() else x.clone(), item)
            heaviest = weight
        else:
            w, take = weight, weight > heaviest

            def fold(s: Tensor, x: Tensor, w: float = w, take: bool = take) -> Tensor:
                return s.add_(x, alpha=w) if x.is_floating_point() else (x.clone() if take else s)

            total = map(fold, total, item)
            heaviest = max(heaviest, weight)
        mass += weight
    if total is None or not mass > 0:
        raise ValueError("a mean needs at least one item of positive weight")
    return map(lambda s, x: (s / mass).to(x.dtype) if x.is_floating_point() else s, total, like)


def flatten(a: Tree, path: str = "") -> dict[str, Tensor]:
    """{"x": {"y": t}, "z": {}} -> {"x/y": t, "z/": []}: the wire and file format of every tree."""
    flat: dict[str, Tensor] = {}
    for name, b in a.items():
        here = f"{path}/{name}" if path else name
        if not isinstance(b, dict):
            flat[here] = b
        elif b:
            flat |= flatten(b, here)
        else:
            flat[f"{here}/"] = torch.empty(0)
    return flat


def unflatten(flat: dict[str, Tensor]) -> Tree:
    """The inverse of flatten."""
    out: Tree = {}
    for path, leaf in flat.items():
        *parents, name = path.split("/")
        node = out
        for p in parents:
            node = node.setdefault(p, {})
        if name:
            node[name] = leaf
    return out


def num_bytes(a: Tree) -> int:
    """Bytes of all leaves, as sent without compression."""
    return sum(x.numel() * x.element_size() for x in flatten(a).values())
