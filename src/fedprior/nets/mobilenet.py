"""MobileNetV2 (Sandler et al., 2018, arXiv:1801.04381, table 2) with 512 features, as FedDifRC uses it."""

import torch
from torch import Tensor, nn

from ..errors import UserError

STAGES = (  # expansion, channels, repeats, stride of the first
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def convolution(inside: int, outside: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inside, outside, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outside), nn.ReLU6())


class InvertedResidual(nn.Module):
    """1x1 expansion, 3x3 depth-wise, 1x1 linear projection; a shortcut where shapes agree."""

    def __init__(self, inside: int, outside: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inside * expansion
        self.add = stride == 1 and inside == outside
        self.body = nn.Sequential(
            *([convolution(inside, hidden, 1)] if expansion > 1 else []),
            convolution(hidden, hidden, 3, stride, groups=hidden),
            nn.Conv2d(hidden, outside, 1, bias=False),
            nn.BatchNorm2d(outside),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return x + out if self.add else out


class MobileNetV2(nn.Module):
    """Width 1.0, last 1x1 convolution reduced to 512; 1,981,706 parameters for 10 classes."""

    def __init__(self, classes: int, size: tuple[int, int]) -> None:
        super().__init__()
        if min(size) < 32:
            raise UserError(
                f"mobilenet_v2 needs images of at least 32 pixels, not {size[0]} x {size[1]}; set data.size=32"
            )
        layers: list[nn.Module] = [convolution(3, 32, 3, stride=2)]
        inside = 32
        for expansion, channels, repeats, first in STAGES:
            for i in range(repeats):
                layers.append(InvertedResidual(inside, channels, first if i == 0 else 1, expansion))
                inside = channels
        self.width = 512
        self.body = nn.Sequential(*layers, convolution(inside, self.width, 1))
        self.head = nn.Linear(self.width, classes)
        self.apply(initialise)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.body(x).mean((2, 3))  # [B, 512]
        return z, self.head(z)


@torch.no_grad()
def initialise(m: nn.Module) -> None:
    """Convolutions N(0, sqrt(2 / (k * k * out))), linear layers N(0, 0.01)."""
    if isinstance(m, nn.Conv2d):
        m.weight.normal_(0, (2 / (m.kernel_size[0] * m.kernel_size[1] * m.out_channels)) ** 0.5)
    elif isinstance(m, nn.Linear):
        m.weight.normal_(0, 0.01)
        m.bias.zero_()
