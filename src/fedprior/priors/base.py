"""What fedprior asks of a generative model."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from .features import Latent, Scaling


class Prior(Protocol):
    """A frozen text-to-image model."""

    name: str  # the id or folder it came from
    revision: str  # resolved revision, or a digest of the weights: enters every cache key

    size: int  # native height and width of its images

    @property
    def settings(self) -> dict[str, object]:
        """All that changes an image besides prompt, seed and size: scheduler, steps, guidance, dtype."""
        ...

    def generate(self, prompts: Sequence[str], seeds: Sequence[int], size: tuple[int, int]) -> Tensor:
        """Images uint8 [n, 3, H, W] of this (H, W), unfiltered; image i is a function of prompts[i] and seeds[i]."""
        ...

    def roundtrip(self, images: Tensor) -> Tensor:
        """Images uint8 [n, 3, H, W] encoded and decoded again, same shape."""
        ...

    def redraw(self, images: Tensor, prompts: Sequence[str], seeds: Sequence[int], strength: float) -> Tensor:
        """Images uint8 [n, 3, H, W] noised by a share `strength` of the schedule and denoised again, same shape."""
        ...

    @property
    def level_widths(self) -> dict[int, int]:
        """Channels of each up block's output, by level from 1."""
        ...

    def encode(self, prompts: Sequence[str]) -> Tensor:
        """Encodings of prompts, [n, tokens, width]."""
        ...

    def features(
        self,
        images: Tensor,
        prompts: Sequence[Sequence[str]],
        *,
        timestep: int,
        levels: Sequence[int],
        seeds: Sequence[int],
        size: int,
        draws: int = 1,
        latent: Latent = "mean",
        scaling: Scaling = "signed",
        condition: Tensor | None = None,
    ) -> dict[int, Tensor]:
        """{level: float32 [n, P, C, h, w]} of images uint8 [n, 3, H, W] under P prompts each; image i is a function of
        images[i], prompts[i], seeds[i] and condition[i]."""
        ...
