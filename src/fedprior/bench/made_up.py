"""Data of random numbers in the shape of CIFAR-10, and a prior whose descriptors are random numbers: no download, no
diffusion model."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from .. import seeds as streams
from ..data import table
from ..data.table import Federation, Table
from ..guide import FedDifRC, Guide
from ..priors.base import Prior
from ..progress import Silent

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIDE = 32


def images(rows: int, seed: int = 0) -> Table:
    """A table of noise, uint8 [rows, 3, 32, 32], with the ten classes in turn."""
    pixels = streams.stream(seed, "made-up images").integers(0, 256, (rows, 3, SIDE, SIDE), dtype="uint8")
    return table.make(torch.from_numpy(pixels), torch.arange(rows) % len(CLASSES))


def federation(clients: int, rows: int) -> Federation:
    """So many clients with so many rows each."""
    train = images(clients * rows)
    owned = torch.arange(clients * rows).split(rows)
    return Federation(table=train, clients=owned, test=images(len(CLASSES), seed=1), classes=CLASSES)


class NoisePrior:
    """What a guide asks of a prior, answered by a random generator. Its levels have as many channels as Stable
    Diffusion's descriptors keep, so descriptors are as long: 512 numbers."""

    def __init__(self) -> None:
        self.name, self.revision, self.size = "random numbers", "1", SIDE
        self.settings = {"dtype": "fp32"}
        self.level_widths = {2: 256, 3: 128, 4: 128}

    def generate(self, prompts: Sequence[str], seeds: Sequence[int], size: tuple[int, int]) -> Tensor:
        return torch.zeros(len(prompts), 3, *size, dtype=torch.uint8)

    def features(
        self,
        images: Tensor,
        prompts: Sequence[Sequence[str]],
        *,
        levels: Sequence[int],
        seeds: Sequence[int],
        **how: Any,
    ) -> dict[int, Tensor]:
        """{level: float32 [n, P, C, 1, 1]}"""
        g = torch.Generator().manual_seed(seeds[0])
        shape = len(images), len(prompts[0])
        return {level: torch.randn(*shape, self.level_widths[level], 1, 1, generator=g) for level in levels}


@contextmanager
def described(config: FedDifRC, data: Federation) -> Iterator[Guide]:
    """A guide that has described all rows, in a cache that is gone afterwards."""
    before = os.environ.get("FEDPRIOR_CACHE")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ["FEDPRIOR_CACHE"] = folder  # worker processes see it too
        try:
            guide = Guide(config=config, prior=cast(Prior, NoisePrior()), classes=data.classes)
            guide.describe(data, Silent())
            yield guide
        finally:
            os.environ.pop("FEDPRIOR_CACHE")
            if before is not None:
                os.environ["FEDPRIOR_CACHE"] = before
