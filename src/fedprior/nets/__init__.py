"""Classifiers by name. Every module's forward gives (features [B, width], logits [B, classes])."""

from collections.abc import Callable

import torch
from torch import nn

from .. import seeds
from ..errors import unknown
from .cct import CCT
from .cnn import CNN
from .mobilenet import MobileNetV2
from .resnet import ResNet10, ResNet10GN

NETS: dict[str, Callable[[int, tuple[int, int]], nn.Module]] = {
    "cnn": CNN,
    "cct_2_3x2_32": CCT,
    "cct": CCT,  # short for the one above
    "resnet10": ResNet10,
    "resnet10_gn": ResNet10GN,
    "mobilenet_v2": MobileNetV2,
}


def build(name: str, classes: int, *, size: int | tuple[int, int] = 32, seed: int = 0) -> nn.Module:
    """A net for images [B, 3, H, W] of this size, with initial weights that are a function of `seed` alone.

    "timm/NAME" takes any classifier of timm (extra `fedprior[timm]`). Raises UsageError for an unknown
    name, UserError for a size that the net cannot take.
    """
    height_width = (size, size) if isinstance(size, int) else size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeds.number(seed, "net"))
        if name.startswith("timm/"):
            from .timm import Timm

            return Timm(name.removeprefix("timm/"), classes)
        if name not in NETS:
            raise unknown("net", name, [*NETS, "timm/NAME"])
        return NETS[name](classes, height_width)
