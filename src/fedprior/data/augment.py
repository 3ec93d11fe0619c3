"""What happens to a batch of images on its way into a net: whole uint8 tensors, no loop over images."""

import re
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

PADDING = 4  # pixels of black around an image before it is cut

Statistics = tuple[tuple[float, float, float], tuple[float, float, float]]

STATISTICS: dict[str, Statistics] = {  # per channel mean and standard deviation of pixels in [0, 1]
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "cifar100": ((0.507, 0.487, 0.441), (0.267, 0.256, 0.276)),
}
IMAGENET: Statistics = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF: Statistics = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
FINE_GRAINED = ("cub200", "flowers102", "cars196", "dogs120", "aircraft100")
DIGIT = re.compile(r"(.*\b(number|digit) )?(\d|zero|one|two|three|four|five|six|seven|eight|nine)")


def statistics(name: str, domains: Sequence[str]) -> Statistics:
    """Means and standard deviations for a data set, as FedDifRC's code has them: those of STATISTICS for a name in
    there, ImageNet's for fine-grained sets and sets with domains, else 0.5. (For aircraft that code takes SVHN's,
    which do not fit its photographs.) Dashes, underscores and capitals in a name do not matter."""
    plain = re.sub(r"[-_ ]", "", name.lower())
    if plain in STATISTICS:
        return STATISTICS[plain]
    return IMAGENET if domains or plain in FINE_GRAINED else HALF


def mirrors(classes: Sequence[str]) -> bool:
    """Whether the mirror image of a class's image shows that class: not where all classes are digits, by names such
    as "3", "three" or "street view house number 3"."""
    return not all(DIGIT.fullmatch(name.strip().lower()) for name in classes)


def normalise(image: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """uint8 [B, 3, H, W] -> float32 (x / 255 - mean) / std per channel.

    Raises TypeError for anything but uint8: a float image has been scaled already.
    """
    return scaled(image, *scaling(mean, std, image.device))


def scaling(mean: Sequence[float], std: Sequence[float], device: torch.device) -> tuple[Tensor, Tensor]:
    """What `normalise` multiplies by and then takes away, float32 [1, C, 1, 1] each."""
    m, s = (torch.tensor(v, device=device).view(1, -1, 1, 1) for v in (mean, std))
    return 1 / (255 * s), m / s


def scaled(image: Tensor, factor: Tensor, shift: Tensor) -> Tensor:
    """`normalise` with the constants of `scaling`."""
    if image.dtype != torch.uint8:
        raise TypeError(f"images must be uint8 in 0..255, not {image.dtype}")
    return image.to(torch.float32).mul_(factor).sub_(shift)


def draw_crops(rng: np.random.Generator, images: int, flip: bool = True) -> NDArray[np.int64]:
    """Where images are cut and which of them are mirrored (half of them, with `flip`): top, left, mirrored,
    int64 [3, images]."""
    top, left = (rng.integers(0, 2 * PADDING + 1, images) for _ in range(2))
    return np.stack([top, left, rng.integers(0, 2, images) * flip])


def cropped(image: Tensor, crops: Tensor) -> Tensor:
    """A crop of each zero-padded image, and of some the mirror image, as `draw_crops` has it.

    uint8 [B, C, H, W] -> the same shape and type.
    """
    b, c, h, w = image.shape
    top, left, mirrored = crops
    rows = top[:, None] + torch.arange(h, device=image.device)  # [B, H] in the padded image
    across = torch.arange(w, device=image.device).expand(b, w)
    columns = left[:, None] + torch.where(mirrored[:, None].bool(), across.flip(1), across)  # [B, W]
    wide = w + 2 * PADDING
    flat = (rows[:, :, None] * wide + columns[:, None, :]).view(b, 1, h * w)
    padded = F.pad(image, (PADDING,) * 4).view(b, c, -1)
    return padded.gather(2, flat.expand(b, c, h * w)).view(b, c, h, w)
