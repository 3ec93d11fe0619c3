"""Memory that a batch of images takes: how many fit, and what to do when it was one too many."""

import gc
from collections.abc import Callable
from typing import Any

import psutil
import torch

MOST = 256  # images a batch beyond which nothing is gained
PER_PIXEL = 10_000  # bytes a pixel of an image takes on a CPU in float32: latents, attention maps and decoder
SHARE = 0.8  # of free memory that a batch may fill


class DecoderOutOfMemory(RuntimeError):
    """Stands for torch's error where a pipeline of diffusers would swallow it and fail on what is missing."""


WORDS = (  # of errors that torch raises as plain RuntimeErrors: on a CPU, in CUDA's libraries and driver, on MPS
    "can't allocate memory",
    "not enough memory",
    "_STATUS_ALLOC_FAILED",
    "error: out of memory",
    "backend out of memory",
)


def exhausted(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a GPU or a CPU."""
    return isinstance(error, (torch.OutOfMemoryError, DecoderOutOfMemory, MemoryError)) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in WORDS)
    )


def release() -> None:
    """Gives memory back that nothing uses any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def batch_size(device: torch.device, side: int, one_image: Callable[[], Any]) -> int:
    """How many images of `side` x `side` pixels fit at once beside what is loaded already.

    On a GPU `one_image` makes one image as a trial; on a CPU, whose peak nothing tells, a rule of thumb serves.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        one_image()
        each = torch.cuda.max_memory_allocated(device) - before
        release()
        free = torch.cuda.mem_get_info(device)[0]
    else:
        each = PER_PIXEL * side**2
        free = psutil.virtual_memory().available
    return max(1, min(MOST if device.type == "cuda" else 32, int(SHARE * free / max(1, each))))
