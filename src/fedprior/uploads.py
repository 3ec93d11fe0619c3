"""What a client sends back, and the reasons to refuse it."""

from typing import NamedTuple

import torch

from . import tree
from .tree import Tree

HEAVIEST = 1e15  # that an upload may weigh: sums of more would lose the light ones
LARGEST_LOSS = 1e30  # that may be averaged


class Upload(NamedTuple):
    client: int
    tree: Tree  # {"method": ..., "buffers": ...}
    weight: float
    loss: float  # mean training loss over the local steps
    steps: int
    planned: int  # steps that the client would have taken with all its work done


class Refusal(NamedTuple):
    client: int
    reason: str


def check(upload: Upload, expected: Tree, max_norm: float | None) -> Refusal | None:
    """None for a good upload: it has the names, shapes and dtypes of `expected`, only finite numbers, a positive
    finite weight, and (with `max_norm`) an `update_norm` of at most `max_norm`."""
    have, want = tree.flatten(upload.tree), tree.flatten(expected)

    def refuse(reason: str) -> Refusal:
        return Refusal(upload.client, reason)

    if have.keys() != want.keys():
        odd = sorted(have.keys() ^ want.keys())
        return refuse(f"{len(odd)} tensors are missing or unknown, the first is {odd[0]}")
    for name, x in have.items():
        y = want[name]
        if x.shape != y.shape or x.dtype != y.dtype:
            return refuse(f"{name} is {x.dtype} {list(x.shape)}, expected {y.dtype} {list(y.shape)}")
        if x.is_floating_point() and not torch.isfinite(x).all():
            return refuse(f"{name} has numbers that are not finite")
    if not abs(upload.loss) < LARGEST_LOSS:
        return refuse("its training loss is not finite; a lower local.lr may help")
    if not 0 < upload.weight < HEAVIEST:
        return refuse(f"its weight is {upload.weight}")
    if max_norm is not None and (norm := update_norm(upload.tree)) > max_norm:
        return refuse(f"the norm of its update {norm:.4g} is above {max_norm:.4g}")
    return None


def update_norm(upload: Tree) -> float:
    """The Euclidean norm of the model update in an upload (`method/delta`, FedNova's per unit of its length)."""
    return tree.norm(upload["method"].get("delta", {}))
