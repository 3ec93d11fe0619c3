"""The embedded data set: scikit-learn's 1797 handwritten digits, split into a public and a private half.

The public half is what the embedded prior was trained on; it never goes to a client or the test set. The
split draws nothing: within each class the rows are ordered by the SHA-256 of "fedprior digits {row}", the
first half (rounded up) is public, two thirds (rounded up) of the others are training rows, the rest is test.
"""

import hashlib
from functools import cache

import numpy as np
import torch

from . import table
from .table import Table

CLASSES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SIZE = 16  # the 8x8 originals, enlarged: latent models need room for a factor of two


def split() -> dict[str, np.ndarray]:
    """Ascending row numbers int64 of "public", "train" and "test" within scikit-learn's `load_digits`."""
    label = _raw()[1]
    parts: dict[str, list[int]] = {"public": [], "train": [], "test": []}
    for c in range(len(CLASSES)):
        rows = sorted(np.flatnonzero(label == c).tolist(), key=_order)
        half = -(-len(rows) // 2)
        private = rows[half:]
        cut = -(-2 * len(private) // 3)
        parts["public"] += rows[:half]
        parts["train"] += private[:cut]
        parts["test"] += private[cut:]
    return {name: np.array(sorted(rows), dtype=np.int64) for name, rows in parts.items()}


def public() -> Table:
    """The half that priors may be trained on: images uint8 [901, 3, 16, 16], ids the original row numbers."""
    return _part("public")


def train() -> Table:
    """The rows that clients share out: images uint8 [600, 3, 16, 16], ids the original row numbers."""
    return _part("train")


def test() -> Table:
    """The test rows: images uint8 [296, 3, 16, 16], ids the original row numbers."""
    return _part("test")


def _part(name: str) -> Table:
    pixels, label = _raw()
    rows = split()[name]
    grey = torch.from_numpy(pixels[rows]).float()[:, None] * (255 / 16)
    image = torch.nn.functional.interpolate(grey, (SIZE, SIZE), mode="bilinear", align_corners=False)
    made = table.make(image.round().byte().expand(-1, 3, -1, -1).contiguous(), torch.from_numpy(label[rows]))
    return {**made, "id": torch.from_numpy(rows)}


def _order(row: int) -> str:
    return hashlib.sha256(f"fedprior digits {row}".encode()).hexdigest()


@cache
def _raw() -> tuple[np.ndarray, np.ndarray]:
    """Grey values 0..16 as float64 [1797, 8, 8] and labels int64 [1797]."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return bunch.images, bunch.target.astype(np.int64)
