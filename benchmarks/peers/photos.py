"""Images in the shape of CIFAR-10, and the loader of single images that users of the peers write."""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import Dataset

from fedprior.data.augment import HALF, PADDING

CLASSES, SIDE = 10, 32


class Photos(Dataset[tuple[Tensor, Tensor]]):
    """One image at a time through PIL, as in the peers' examples: random crop of the padded image, flip, to tensor,
    normalise."""

    def __init__(self, photos: np.ndarray, labels: Tensor, augment: bool) -> None:
        self.photos, self.labels, self.augment = photos, labels, augment
        self.mean, self.std = (torch.tensor(v).view(3, 1, 1) for v in HALF)

    def __len__(self) -> int:
        return len(self.photos)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        image = Image.fromarray(self.photos[i])
        if self.augment:
            left, top = torch.randint(0, 2 * PADDING + 1, (2,)).tolist()
            image = ImageOps.expand(image, PADDING).crop((left, top, left + SIDE, top + SIDE))
            if torch.rand(()) < 0.5:
                image = ImageOps.mirror(image)
        x = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().to(torch.float32).div_(255)
        return x.sub_(self.mean).div_(self.std), self.labels[i]


def channels_first(photos: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(photos.transpose(0, 3, 1, 2)))


def make_data(folder: Path, rows: int, tested: int, signal: float) -> None:
    """Separable classes in the shape of CIFAR-10: each has a colour and a smooth pattern, alike on both sides, of
    about `signal` grey levels under smooth clutter of 10 and noise of 25."""
    rng = np.random.default_rng(0)

    def smooth(n: int, cells: int) -> np.ndarray:
        coarse = torch.from_numpy(rng.standard_normal((n, 3, cells, cells), dtype=np.float32))
        fine = F.interpolate(coarse, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
        return fine.permute(0, 2, 3, 1).numpy()

    pattern = smooth(CLASSES, 2)
    pattern = pattern + pattern[:, :, ::-1] + smooth(CLASSES, 1)
    for name, n in (("train", rows), ("test", tested)):
        label = rng.integers(0, CLASSES, n)
        photos = np.empty((n, SIDE, SIDE, 3), np.uint8)
        for some in np.array_split(np.arange(n), max(1, n // 1000)):
            noise = rng.standard_normal((len(some), SIDE, SIDE, 3), dtype=np.float32)
            values = 128 + signal * pattern[label[some]] + 10 * smooth(len(some), 4) + 25 * noise
            photos[some] = values.clip(0, 255).astype(np.uint8)
        np.save(folder / f"{name}.npy", photos)
        np.save(folder / f"{name}_label.npy", label)
