"""What some methods put in place of a net's last layer."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import seeds


def shape_of_head(module: nn.Module) -> tuple[int, int]:
    """-> (K classes, D features)"""
    return int(module.head.out_features), int(module.width)  # type: ignore[union-attr, arg-type]


class Projected(nn.Module):
    """A net whose classifier sits on a two-layer projection of its features (MOON, arXiv:2103.16257, section 4.1).

    The projection is what counts as the features of the whole.
    """

    def __init__(self, base: nn.Module, width: int, seed: int) -> None:
        super().__init__()
        classes, inner = shape_of_head(base)
        base.head = nn.Identity()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seeds.number(seed, "projection"))
            projection = nn.Sequential(nn.Linear(inner, inner), nn.ReLU(), nn.Linear(inner, width))
            head = nn.Linear(width, classes)
        self.base, self.projection, self.head, self.width = base, projection, head, width

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.projection(self.base(x)[0])  # [B, width]
        return z, self.head(z)


class Prototypes(nn.Module):
    """Logits s <z, W_y> of unit features and unit prototypes (FedNH, arXiv:2212.02758, section 3.2)."""

    def __init__(self, classes: int, width: int, scale: float, learn_scale: bool, seed: int) -> None:
        super().__init__()
        self.in_features, self.out_features = width, classes
        self.weight = nn.Parameter(hyperspherical(classes, width, seed))
        self.scale = nn.Parameter(torch.tensor(scale)) if learn_scale else scale

    def forward(self, z: Tensor) -> Tensor:
        return self.scale * F.normalize(z, dim=-1) @ F.normalize(self.weight, dim=-1).T


def hyperspherical(classes: int, width: int, seed: int) -> Tensor:
    """Unit vectors [classes, width] that are as far apart as they can be, turned at random by `seed`.

    With width >= classes - 1 they are the corners of a regular simplex, where every cosine is -1 / (classes - 1),
    the smallest possible largest one. For narrower features no closed form exists: random unit vectors then
    repel each other, by 1000 gradient steps on an ever sharper log-sum-exp of all cosines.
    """
    g = torch.Generator().manual_seed(seeds.number(seed, "prototypes"))
    if classes == 1:
        return F.normalize(torch.randn(1, width, generator=g), dim=-1)
    if width >= classes - 1:
        centred = torch.eye(classes, dtype=torch.float64) - 1 / classes
        corners = torch.linalg.svd(centred).U[:, : classes - 1]  # [K, K-1], rows of equal length
        turn = torch.linalg.qr(torch.randn(width, width, generator=g, dtype=torch.float64)).Q
        return F.normalize(corners @ turn[: classes - 1], dim=-1).float()
    w = F.normalize(torch.randn(classes, width, generator=g, dtype=torch.float64), dim=-1)
    own = torch.eye(classes, dtype=torch.bool)
    for step in range(1000):
        sharpness = 5 * 10 ** (step / 400)  # from even spreading to the closest pairs only
        w.requires_grad_()
        closest = torch.logsumexp((sharpness * w @ w.T).masked_fill(own, -math.inf).flatten(), 0) / sharpness
        (slope,) = torch.autograd.grad(closest, w)
        w = F.normalize((w - 0.5 * classes / sharpness * slope).detach(), dim=-1)
    return w.float()
