"""Images that no training set may hold: black, constant, blanked by a safety checker, or from NaN."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .base import Prior

FLAT = 2  # grey levels a channel of a constant image may still span after rounding and resizing


class Generated(NamedTuple):
    """Images and how each came about; row i belongs to prompt i."""

    images: Tensor  # uint8 [n, 3, H, W]
    seeds: list[int]  # of the attempt whose image it is
    attempts: list[int]  # how many were made, >= 1
    ok: list[bool]  # False: every attempt was faulty, and the image must not be used


def faulty(images: Tensor) -> Tensor:
    """Whether each image of uint8 [n, 3, H, W] is black or otherwise constant: bool [n].

    A prior turns an image with NaN pixels into a black one, so this finds those as well.
    """
    pixels = images.flatten(2)
    return ((pixels.amax(2).int() - pixels.amin(2).int()) <= FLAT).all(1)


def generate(
    prior: Prior,
    prompts: Sequence[str],
    seed_of: Callable[[int, int], int],
    size: tuple[int, int],
    attempts: int = 5,
) -> Generated:
    """One image for each prompt; a faulty one is made again with the next seed, up to `attempts` in all.

    `seed_of(i, attempt)` is the seed of item i at attempt 0, 1, .... An item that stays faulty is reported by
    `ok`, never raised.
    """
    n = len(prompts)
    made = Generated(torch.zeros((n, 3, *size), dtype=torch.uint8), [0] * n, [0] * n, [False] * n)
    todo = list(range(n))
    for attempt in range(attempts):
        if not todo:
            break
        seeds = [seed_of(i, attempt) for i in todo]
        images = prior.generate([prompts[i] for i in todo], seeds, size)
        bad = faulty(images).tolist()
        made.images[todo] = images
        for i, seed, is_bad in zip(todo, seeds, bad, strict=True):
            made.seeds[i], made.attempts[i], made.ok[i] = seed, attempt + 1, not is_bad
        todo = [i for i, is_bad in zip(todo, bad, strict=True) if is_bad]
    return made
