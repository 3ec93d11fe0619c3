"""What fedprior asks of a generative model."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Prior(Protocol):
    """A frozen text-to-image model."""

    name: str  # the id or folder it came from
    revision: str  # resolved revision, or a digest of the weights: enters every cache key

    @property
    def settings(self) -> dict[str, object]:
        """All that changes an image besides prompt, seed and size: scheduler, steps, guidance, dtype."""
        ...

    def generate(self, prompts: Sequence[str], seeds: Sequence[int], size: tuple[int, int]) -> Tensor:
        """Images uint8 [n, 3, H, W] of this (H, W), unfiltered; image i is a function of prompts[i] and seeds[i]."""
        ...
