"""ResNet-10 as FedDifRC uses it: 3x3 stem without pooling, one basic block in each of four stages."""

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut (1x1 where shape changes)."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        same = inside == outside and stride == 1
        self.shortcut = (
            nn.Sequential()
            if same
            else nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))
        )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class ResNet10(nn.Module):
    """Widths 64-128-256-512, strides 1, 2, 2, 2; 4,903,242 parameters for 10 classes."""

    def __init__(self, classes: int, size: tuple[int, int]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.layers = nn.Sequential(Block(64, 64, 1), Block(64, 128, 2), Block(128, 256, 2), Block(256, 512, 2))
        self.width = 512
        self.head = nn.Linear(self.width, classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.layers(F.relu(self.bn1(self.conv1(x)))).mean((2, 3))  # [B, 512]
        return z, self.head(z)
