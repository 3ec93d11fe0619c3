"""How fast models are judged: `evaluate` beside the loop that a script would have."""

import statistics
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .. import nets
from ..data.augment import STATISTICS
from ..data.table import Table
from ..evaluate import evaluate
from ..net import Net
from . import made_up
from .turns import Arms, clock, in_turns, ratio, seconds

BATCH = 500  # of the plain loop


def measure(net: str = "cct_2_3x2_32", images: int = 10_000, repeats: int = 2) -> dict[str, Any]:
    """{"images_per_second", "plain_images_per_second", "ratio" (of the two: above 1 `evaluate` is faster), "clock",
    "net", "images", "repeats"}: medians over turns, after one on a single batch to warm up.

    Raises UsageError for an unknown net.
    """
    data = made_up.images(images)
    mean, std = STATISTICS["cifar10"]
    classes = len(made_up.CLASSES)
    ours, module = Net(nets.build(net, classes), mean, std), nets.build(net, classes)
    weights = ours.init()

    def arms(table: Table) -> Arms:
        return {
            "fedprior": lambda: evaluate(ours, weights, table, classes),
            "plain": lambda: plain(module, table, mean, std),
        }

    laps = in_turns(arms(data), repeats, first=arms(made_up.images(BATCH)))
    return {
        "images_per_second": images / statistics.median(seconds(laps["fedprior"])),
        "plain_images_per_second": images / statistics.median(seconds(laps["plain"])),
        "ratio": ratio(laps["plain"], laps["fedprior"]),
        "clock": clock(),
        "net": net,
        "images": images,
        "repeats": repeats,
    }


@torch.no_grad()
def plain(module: nn.Module, data: Table, mean: Sequence[float], std: Sequence[float]) -> tuple[float, float]:
    """Accuracy and mean cross-entropy by `module(x)`, image by image in NCHW memory, batches of 500."""
    module.eval()
    m, s = (torch.tensor(v).view(1, 3, 1, 1) for v in (mean, std))
    hits, loss = 0, 0.0
    for image, label in zip(data["image"].split(BATCH), data["label"].split(BATCH), strict=True):
        logits = module((image.float() / 255 - m) / s)[1]
        hits += int((logits.argmax(1) == label).sum())
        loss += float(F.cross_entropy(logits, label, reduction="sum"))
    return hits / len(data["label"]), loss / len(data["label"])
