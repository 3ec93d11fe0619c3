"""A small convolutional net for small images: the demo's."""

from torch import Tensor, nn

from ..errors import UserError


class CNN(nn.Module):
    """Two convolutions with group norm, each halving the image; then an average over 2 x 2 regions."""

    def __init__(self, classes: int, size: tuple[int, int]) -> None:
        super().__init__()
        if min(size) < 8:
            raise UserError(f"cnn needs images of at least 8 x 8 pixels, not {size[0]} x {size[1]}; set data.size=16")
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1, bias=False),
            nn.GroupNorm(4, 32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(128, 64),
            nn.ReLU(),
        )
        self.width = 64
        self.head = nn.Linear(self.width, classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.body(x)  # [B, 64]
        return z, self.head(z)
