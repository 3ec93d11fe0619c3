"""Arithmetic on trees: nested dicts whose leaves are tensors. Weights, memories and messages are trees."""

import math
from collections.abc import Callable, Container, Iterable
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
    """Zeros of the same shapes and dtypes."""
    return map(torch.zeros_like, a)


def add(a: Tree, b: Tree) -> Tree:
    """a + b, leaf by leaf."""
    return map(torch.add, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    """a - b, leaf by leaf."""
    return map(torch.sub, a, b)


def scale(a: Tree, s: float) -> Tree:
    """s a, leaf by leaf."""
    return map(lambda x: x * s, a)


def norm(a: Tree) -> float:
    """Euclidean norm over all leaves, summed in float64."""
    leaves = flatten(a).values()
    return math.sqrt(math.fsum(x.detach().double().square().sum().item() for x in leaves))


def mean(items: Iterable[tuple[Tree, float]], once: Container[str] = ()) -> Tree:
    """Weighted mean in one pass: holds a single running sum however many items come.

    Groups of the first two levels named in `once` (such as "method/control") count each item once, whatever
    its weight. Sums are float64 and in the order of `items`, so the result does not depend on anything else.
    Leaves keep their dtype. Integer leaves (batch counters) have no mean: the item of the largest weight
    gives them, the earlier one on a tie.

    Raises ValueError when there are no items or the weights do not sum to more than zero.
    """
    sums: dict[str, Tensor] = {}
    like: dict[str, torch.dtype] = {}
    mass, heaviest, n = 0.0, 0.0, 0
    for item, weight in items:
        for path, x in flatten(item).items():
            w = 1.0 if "/".join(path.split("/", 2)[:2]) in once else weight
            if not n:
                like[path] = x.dtype
            if not x.is_floating_point():
                if not n or weight > heaviest:
                    sums[path] = x.clone()
            elif not n:
                sums[path] = x.double() * w
            else:
                sums[path].add_(x, alpha=w)
        mass, heaviest, n = mass + weight, max(heaviest, weight), n + 1
    if not mass > 0:
        raise ValueError("a mean needs at least one item of positive weight")
    for path, s in sums.items():
        if s.is_floating_point():
            sums[path] = (s / (n if "/".join(path.split("/", 2)[:2]) in once else mass)).to(like[path])
    return unflatten(sums)


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
