"""A classifier as a pure function of its weights."""

import copy
from collections.abc import Container, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from . import tree
from .data.augment import scaled, scaling
from .nets.heads import shape_of_head
from .tree import Tree

Precision = Literal["fp32", "bf16"]
BNStats = Literal["average", "local"]  # batch-norm statistics: averaged like weights, or kept by each client


class Output(NamedTuple):
    """What a net makes of a batch of B images."""

    features: Tensor  # [B, D], what the last layer reads
    logits: Tensor  # [B, K]
    buffers: Tree  # batch-norm statistics after this call


class Net:
    """Makes a module whose forward returns (features, logits) free of side effects.

    `mean` and `std` are per channel, for pixels in [0, 1]. With `precision="bf16"` the arithmetic
    runs under autocast; weights, features and logits stay as they are, float32 as a rule. `memory_format` is the layout
    of images: by default channels-last for convolutions, faster on a CPU; a call that is vectorised over weights
    cannot have it.
    """

    def __init__(
        self,
        module: nn.Module,
        mean: Sequence[float] = (0.5, 0.5, 0.5),
        std: Sequence[float] = (0.5, 0.5, 0.5),
        precision: Precision = "fp32",
        memory_format: torch.memory_format | None = None,
    ) -> None:
        self.module, self.mean, self.std, self.precision = module, mean, std, precision
        convolves = any(isinstance(layer, nn.Conv2d) for layer in module.modules())
        self.memory_format = memory_format or (torch.channels_last if convolves else torch.contiguous_format)
        first = next(module.parameters())
        self.device, self.dtype = first.device, first.dtype
        self.constants = scaling(mean, std, self.device)  # there already, so that a call copies nothing to a device

    def to(self, device: torch.device) -> "Net":
        """The same net with weights of its own on a device."""
        return Net(copy.deepcopy(self.module).to(device), self.mean, self.std, self.precision, self.memory_format)

    def stacked(self) -> "Net":
        """The same net for calls that `torch.func.vmap` makes."""
        return Net(self.module, self.mean, self.std, self.precision, torch.contiguous_format)

    @property
    def width(self) -> int:
        """D, the size of the features."""
        return shape_of_head(self.module)[1]

    @property
    def classes(self) -> int:
        """K, the number of logits."""
        return shape_of_head(self.module)[0]

    @property
    def names(self) -> frozenset[str]:
        """Of all params and buffers."""
        return self.param_names | self.buffer_names

    @property
    def param_names(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.module.named_parameters())

    @property
    def buffer_names(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.module.named_buffers())

    @property
    def batch_norm_names(self) -> frozenset[str]:
        """Params and buffers of batch-norm layers."""
        return frozenset(
            f"{path}.{name}" if path else name
            for path, layer in self.module.named_modules()
            if isinstance(layer, nn.modules.batchnorm._BatchNorm)
            for name in layer.state_dict()
        )

    def init(self) -> Tree:
        """The module's own weights as {"params": ..., "buffers": ...}, copied."""
        params = {k: p.detach().clone() for k, p in self.module.named_parameters()}
        buffers = {k: b.detach().clone() for k, b in self.module.named_buffers()}
        return layout({"params": params, "buffers": buffers})

    def __call__(self, weights: Tree, image: Tensor, train: bool = True) -> Output:
        """Image uint8 [B, 3, H, W] -> Output. The given weights are not written to."""
        if self.module.training != train:
            self.module.train(train)
        buffers = {k: b.clone() for k, b in weights["buffers"].items()}  # batch norm writes in place
        x = scaled(image, *self.constants).to(self.dtype).contiguous(memory_format=self.memory_format)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            features, logits = functional_call(self.module, (weights["params"], buffers), (x,))
        return Output(features.to(self.dtype), logits.to(self.dtype), buffers)


def split(weights: Tree, names: Container[str]) -> tuple[Tree, Tree]:
    """-> (the weights without `names`, those of `names`); both keep the groups and the order."""
    rest = {group: {k: x for k, x in part.items() if k not in names} for group, part in weights.items()}
    named = {group: {k: x for k, x in part.items() if k in names} for group, part in weights.items()}
    return rest, named


def layout(weights: Tree) -> Tree:
    """Convolution kernels in channels-last memory: 1.2 times faster on a CPU, and the same bits wherever the
    weights came from (a file or a message has no memory layout)."""

    def place(x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x

    placed: Tree = tree.map(place, weights)
    return placed
