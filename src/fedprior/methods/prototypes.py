"""Class means of features: what FedProto, FedNH and FedSC send."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.table import Shard
from ..method import Context
from ..tree import Tree

ROWS = 256  # of a forward pass


def class_means(ctx: Context, weights: Tree, shard: Shard, unit: bool = False) -> tuple[Tensor, Tensor]:
    """-> (mean feature of each class [K, D], rows of each class [K]) over all rows, in evaluation mode.

    Classes without rows have mean zero. With `unit` each feature is brought to length one first.
    """
    classes, width = ctx.net.classes, ctx.net.width
    total = torch.zeros(classes, width, device=ctx.net.device, dtype=ctx.net.dtype)
    for which in torch.arange(len(shard), device=shard.rows.device).split(ROWS):
        batch = shard.batch(which)
        z = ctx.net(weights, batch["image"], train=False).features
        total += F.one_hot(batch["label"], classes).to(z).T @ (F.normalize(z, dim=-1) if unit else z)
    rows = shard["label"].bincount(minlength=classes).to(total)
    return total / rows.clamp(min=1)[:, None], rows


def distance_to(z: Tensor, targets: Tensor, known: Tensor, label: Tensor) -> Tensor:
    """Mean squared difference between features [B, D] and the targets [K, D] of their classes; where the class
    is not `known` [K] it counts as zero."""
    gap = (z - targets[label]) * known[label].to(z)[:, None]
    return gap.square().mean()
