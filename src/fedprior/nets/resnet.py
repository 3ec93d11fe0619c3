"""ResNet-10 as FedDifRC uses it: 3x3 stem without pooling, one basic block in each of four stages."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

Norm = Callable[[int], nn.Module]
GROUPS = 32  # of group norm, as in its paper (Wu and He, 2018, arXiv:1803.08494)


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut (1x1 where shape changes)."""

    def __init__(self, inside: int, outside: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = norm(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = norm(outside)
        same = inside == outside and stride == 1
        self.shortcut = (
            nn.Sequential() if same else nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), norm(outside))
        )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class ResNet10(nn.Module):
    """Widths 64-128-256-512, strides 1, 2, 2, 2; 4,903,242 parameters for 10 classes."""

    def __init__(self, classes: int, size: tuple[int, int], norm: Norm = nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
        self.bn1 = norm(64)
        shapes = ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2))
        self.layers = nn.Sequential(*(Block(*shape, norm) for shape in shapes))
        self.width = 512
        self.head = nn.Linear(self.width, classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.layers(F.relu(self.bn1(self.conv1(x)))).mean((2, 3))  # [B, 512]
        return z, self.head(z)


class ResNet10GN(ResNet10):
    """ResNet-10 with group norm for batch norm: as many parameters, and no statistics to average."""

    def __init__(self, classes: int, size: tuple[int, int]) -> None:
        super().__init__(classes, size, lambda channels: nn.GroupNorm(GROUPS, channels))
