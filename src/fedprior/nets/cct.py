"""CCT-2, exactly `cct_2_3x2_32` (Hassani et al., 2021, arXiv:2104.05704), the classifier of Gen-FedSD.

Sizes: B images, N = 64 tokens, D = 128 channels, H = 2 heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UserError

SIDE, TOKENS, WIDTH, HEADS, DEPTH = 32, 64, 128, 2, 2


class Attention(nn.Module):
    """Multi-head self-attention, written as two products and a softmax: faster than the fused CPU kernel in bf16
    at 64 tokens, and it batches over clients."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4)  # each [B, H, N, D/H]
        weights = (q @ k.transpose(-2, -1) * (d // HEADS) ** -0.5).softmax(-1)  # [B, H, N, N]
        out: Tensor = self.proj((self.dropout(weights) @ v).transpose(1, 2).reshape(b, n, d))
        return out


class DropPath(nn.Module):
    """Stochastic depth: leaves a residual branch out for some images, scales it up for the others."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        keep = 1 - self.rate
        return x * (torch.rand(len(x), 1, 1, device=x.device) < keep).to(x.dtype) / keep


class EncoderLayer(nn.Module):
    """The second norm acts on the residual stream itself, as in the published model."""

    def __init__(self, drop_path: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(dropout=0.1)
        self.linear1, self.linear2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop_path = DropPath(drop_path)

    def forward(self, s: Tensor) -> Tensor:
        s = s + self.drop_path(self.attention(self.norm1(s)))
        s = self.norm2(s)
        out: Tensor = s + self.drop_path(self.linear2(F.gelu(self.linear1(s))))
        return out


class CCT(nn.Module):
    """283,723 parameters for 10 classes, 295,333 for 100. Takes 32 x 32 images."""

    def __init__(self, classes: int, size: tuple[int, int]) -> None:
        super().__init__()
        if size != (SIDE, SIDE):
            raise UserError(f"cct_2_3x2_32 needs 32 x 32 images, not {size[0]} x {size[1]}; set data.size=32")
        self.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(64, WIDTH, 3, padding=1, bias=False)
        self.positions = nn.Parameter(torch.empty(1, TOKENS, WIDTH))
        self.layers = nn.Sequential(*(EncoderLayer(0.1 * i / (DEPTH - 1)) for i in range(DEPTH)))
        self.norm = nn.LayerNorm(WIDTH)
        self.pool = nn.Linear(WIDTH, 1)
        self.width = WIDTH
        self.head = nn.Linear(WIDTH, classes)
        self.apply(initialise)
        nn.init.trunc_normal_(self.positions, std=0.2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for conv in (self.conv1, self.conv2):
            x = F.relu(F.max_pool2d(conv(x), 3, 2, 1))  # they commute; pooling first touches a quarter
        s = self.norm(self.layers(x.flatten(2).transpose(1, 2) + self.positions))  # [B, N, D]
        z = (self.pool(s).softmax(1).transpose(1, 2) @ s).squeeze(1)  # [B, D], sequence pooling
        return z, self.head(z)


def initialise(m: nn.Module) -> None:
    """Linear layers: truncated normal of std 0.02, zero bias. Convolutions: Kaiming normal."""
    if isinstance(m, nn.Linear):
        nn.init.trunc_normal_(m.weight, std=0.02)
        if m.bias is not None:
            nn.init.zeros_(m.bias)
    elif isinstance(m, nn.Conv2d):
        nn.init.kaiming_normal_(m.weight)
