"""From feature maps to one vector an image (FedDifRC, arXiv:2507.06482, section 3; docs/papers.md says what is ours).

For each level: PCA over the channels of all positions, then a pool over positions. The levels' vectors are joined:
256 + 128 + 128 = 512 for Stable Diffusion and fewer for a narrower UNet.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import UsageError
from .features import Latent, Scaling

Pool = Literal["rms", "l2", "mean"]
COMPONENTS = {1: 256, 2: 256, 3: 128, 4: 128}  # principal components of each level, at most its channels
NATIVE = 224  # pixels to which images are resized for a prior made for larger ones (the released code's)


@dataclass(frozen=True, kw_only=True)
class Description:
    """How an image is described by a prior: everything that changes a descriptor.

    `levels` are the UNet's up blocks from 1, the coarsest; `draws` of noise are averaged; `latent` is the mean of the
    VAE's posterior or a sample of it (as in the released code; small VAEs may have wide posteriors); `size` defaults to
    the prior's own or 224, whichever is smaller. `pca` says what the axes are fitted on: images that the prior itself
    makes of the classes (`global`: the same for everyone, and no client's data are asked for), each client's own rows,
    or batches of 64 (as in the released code). `pool` over positions is a root mean square, a norm (as released) or a
    mean. `condition` adds an encoding of the image to every token of a prompt, `gamma` times as long as a token: by a
    fixed image encoder (`encoder`, a CLIP checkpoint) or by the model that the client starts a round with, anew every
    `refresh_rounds` rounds.
    """

    timestep: int = 300
    levels: str = "2,3,4"
    components: str | None = None  # one number a level; None: 256 for levels 1 and 2, 128 for 3 and 4
    draws: int = 1
    latent: Latent = "mean"
    size: int | None = None
    scaling: Scaling = "signed"
    pca: Literal["global", "per_client", "per_batch"] = "global"
    pool: Pool = "rms"
    condition: Literal["static", "frozen_encoder", "dynamic"] = "static"
    gamma: float = 0.1
    encoder: str | None = None
    refresh_rounds: int = 1
    noise_seed: int = 0

    def __post_init__(self) -> None:
        _ = self.wanted  # raises for what is not a list of numbers
        for key, least in (("draws", 1), ("refresh_rounds", 1), ("noise_seed", 0), ("timestep", 0)):
            if getattr(self, key) < least:
                raise UsageError(f"guide.{key} must be at least {least}, not {getattr(self, key)}")
        if self.size is not None and (self.size < 8 or self.size % 8):
            raise UsageError(f"guide.size must be a multiple of 8, not {self.size}")
        if not 0 <= self.gamma < float("inf"):
            raise UsageError(f"guide.gamma must be a number of at least 0, not {self.gamma}")
        if self.condition == "frozen_encoder" and self.encoder is None:
            raise UsageError("guide.condition=frozen_encoder needs guide.encoder=, a CLIP folder or hub id")
        if self.condition != "frozen_encoder" and self.encoder is not None:
            raise UsageError(f"guide.encoder has no part in guide.condition={self.condition}; use frozen_encoder")
        if self.condition == "dynamic" and self.pca != "global":
            raise UsageError("guide.condition=dynamic needs guide.pca=global: its axes must not move with the model")

    @property
    def wanted(self) -> dict[int, int]:
        """Level -> principal components, in ascending order of levels."""
        levels = _numbers("levels", self.levels)
        if len(set(levels)) < len(levels) or not set(levels) <= set(COMPONENTS):
            raise UsageError(f"guide.levels must be different numbers from 1 to 4 such as 2,3,4, not {self.levels}")
        sizes = [COMPONENTS[n] for n in levels] if self.components is None else _numbers("components", self.components)
        if len(sizes) != len(levels):
            raise UsageError(f"guide.components={self.components} must be one number for each of levels={self.levels}")
        return dict(sorted(zip(levels, sizes, strict=True)))

    def sizes(self, widths: Mapping[int, int]) -> dict[int, int]:
        """Level -> length of its part of a descriptor, for a UNet with blocks of these widths."""
        return {level: min(most, widths[level]) for level, most in self.wanted.items()}


def _numbers(key: str, text: str) -> list[int]:
    parts = text.replace(" ", "").split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise UsageError(f"guide.{key} must be whole numbers with commas, such as 2,3,4, not '{text}'")
    return [int(part) for part in parts]


class Basis(NamedTuple):
    """The axes of one level, and what descriptors of the images they were fitted on look like."""

    mean: Tensor  # [C], of the tokens
    axes: Tensor  # [m, C], orthonormal
    centre: Tensor  # [m], mean descriptor over images and prompts
    scale: Tensor  # [m], standard deviation over images and prompts
    prompt_scale: Tensor  # [m], of what prompts change at one image: root mean square over images and prompts


def tokens(maps: Tensor, each: int, rng: np.random.Generator) -> Tensor:
    """`each` positions of every map [n, P, C, h, w], drawn without replacement (all, where there are fewer):
    [tokens, C]."""
    flat = maps.flatten(3).flatten(0, 1)  # [n P, C, positions]
    count = min(each, flat.shape[2])
    which = np.stack([rng.permutation(flat.shape[2])[:count] for _ in flat])  # [n P, count]
    index = torch.from_numpy(which).to(flat.device)[:, None].expand(-1, flat.shape[1], -1)
    return flat.gather(2, index).transpose(1, 2).flatten(0, 1)


def fit(sample: Tensor, components: int) -> Basis:
    """PCA of tokens [N, C]; centre and scales are those of no image yet (0 and 1). Fewer tokens than components leave
    the last axes zero."""
    from sklearn.decomposition import PCA

    found = PCA(min(components, len(sample)), svd_solver="covariance_eigh").fit(sample.double().cpu().numpy())
    mean, some = (torch.from_numpy(np.ascontiguousarray(x)).float() for x in (found.mean_, found.components_))
    axes = torch.nn.functional.pad(some, (0, 0, 0, components - len(some)))
    return Basis(mean, axes, torch.zeros(components), torch.ones(components), torch.ones(components))


def with_spread(basis: Basis, descriptors: Tensor) -> Basis:
    """The basis with centre and scales of descriptors [n, P, m]."""
    flat = descriptors.flatten(0, 1)
    within = (descriptors - descriptors.mean(1, keepdim=True)).flatten(0, 1)
    spread = within.square().mean(0).sqrt()
    return basis._replace(centre=flat.mean(0), scale=flat.std(0, correction=0), prompt_scale=spread)


def pooled(maps: Tensor, basis: Basis, how: Pool) -> Tensor:
    """Maps [..., C, h, w] -> [..., m]: each axis' values over all positions, as a root mean square, norm or mean.

    The first two do not depend on an axis' sign and are never negative.
    """
    axes, mean = basis.axes.to(maps), basis.mean.to(maps)
    values: Tensor = axes @ maps.flatten(-2) - (axes @ mean)[:, None]  # [..., m, positions]
    if how == "mean":
        return values.mean(-1)
    norm: Tensor = values.norm(dim=-1)
    return norm / values.shape[-1] ** 0.5 if how == "rms" else norm
