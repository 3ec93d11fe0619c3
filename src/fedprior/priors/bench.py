"""How fast a prior makes images here, beside what a plain script with diffusers does, in one run."""

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import environment
from ..bench.child import in_child, peak_megabytes
from ..errors import UsageError
from . import embedded, families
from .diffusion import DiffusionPrior
from .quiet import quiet

ARMS = ("loop", "batch", "fedprior")
"""`pipe(prompt)` image by image; `pipe([prompts])` in batches; `DiffusionPrior.generate`."""

PROMPTS = tuple(f"a photo of a {name}" for name in ("cat", "dog", "car", "ship", "horse", "bird", "frog", "plane"))


def measure(
    source: str | Path | DiffusionPrior,
    images: int = 32,
    *,
    prompts: Sequence[str] | None = None,
    rounds: int = 3,
    arms: Sequence[str] = ARMS,
    memory: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Images a second and peak memory of each arm, on the same prompts, seeds, steps, guidance and scheduler.

    `source` is a loaded prior or what `embedded.load` takes, with its `options` (batch_size, device, dtype, ...). Arms
    take turns for `rounds` rounds of `images` images each, after a round to warm up; rates are medians over rounds.
    The plain arms have weights in their usual memory layout, and nothing that ours keeps between rounds is kept.

    Returns {"prior", "revision", "settings", "hardware", "images", "rounds", "batch_size", for each arm
    {"images_per_second", "peak_MB" (1e6 bytes; on a GPU what torch allocated, on a CPU the whole process, measured in
    one of its own; None for a loaded prior on a CPU and without `memory`)}, "speedup": {arm: how many times faster
    fedprior is}, "memory": {arm: fedprior's peak divided by the arm's}}. Raises UsageError for an unknown arm or less
    than one image.
    """
    if images < 1 or rounds < 1:
        raise UsageError(f"a benchmark needs at least 1 image and 1 round, not {images} and {rounds}")
    if strange := set(arms) - set(ARMS):
        raise UsageError(f"unknown arm '{min(strange)}'; choose from {', '.join(ARMS)}")
    prior = source if isinstance(source, DiffusionPrior) else embedded.load(source, **options)
    words = list(prompts or _prompts(prior))
    on_gpu = families.denoiser(prior.pipeline).device.type == "cuda"
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    peaks: dict[str, float | None] = dict.fromkeys(arms)
    for turn in range(rounds + 1):
        for arm in arms:
            _prepare(prior, arm)
            count = images if turn else min(images, 1 if arm == "loop" else prior.batch_size)
            took, peak = _timed(prior, lambda: RUNS[arm](prior, words, count))
            if turn:
                seconds[arm].append(took)
                peaks[arm] = max(peaks[arm] or 0, peak) if on_gpu and memory else None
    if memory and not on_gpu and not isinstance(source, DiffusionPrior):
        peaks = {arm: _peak_of_a_process(arm, source, options, words, images) for arm in arms}
    rates = {arm: images / statistics.median(took) for arm, took in seconds.items()}
    rivals = [arm for arm in arms if arm != "fedprior"] if "fedprior" in arms else []
    return {
        "prior": prior.name,
        "revision": prior.revision,
        "settings": prior.settings,
        "hardware": environment.hardware(),
        "images": images,
        "rounds": rounds,
        "batch_size": prior.batch_size,
        **{arm: {"images_per_second": rates[arm], "peak_MB": peaks[arm]} for arm in arms},
        "speedup": {arm: rates["fedprior"] / rates[arm] for arm in rivals},
        "memory": {arm: own / other for arm in rivals if (own := peaks["fedprior"]) and (other := peaks[arm])},
    }


def _prompts(prior: DiffusionPrior) -> list[str]:
    classes = prior.defaults.get("classes")
    return [f"a photo of a {name}" for name in classes] if classes else list(PROMPTS)


def _prepare(prior: DiffusionPrior, arm: str) -> None:
    """Memory layout and caches as the arm would have them at its start."""
    prior.forget()
    if families.of(prior.pipeline).denoiser == "unet" and families.denoiser(prior.pipeline).device.type == "cuda":
        layout = torch.channels_last if arm == "fedprior" else torch.contiguous_format
        prior.pipeline.unet.to(memory_format=layout)
        prior.pipeline.vae.to(memory_format=layout)


def _timed(prior: DiffusionPrior, run: Callable[[], None]) -> tuple[float, float]:
    """-> (seconds, peak MB that torch allocated on a GPU, else 0)"""
    device = families.denoiser(prior.pipeline).device
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    took = time.perf_counter() - start
    return took, torch.cuda.max_memory_allocated(device) / 1e6 if device.type == "cuda" else 0.0


def _plain(prior: DiffusionPrior, prompts: str | list[str], seeds: Sequence[int]) -> None:
    """A call as in the examples of diffusers, with one seed an image."""
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
    with quiet():
        prior.pipeline(
            prompts,
            height=prior.size,
            width=prior.size,
            num_inference_steps=prior.steps,
            guidance_scale=prior.guidance,
            generator=generators[0] if isinstance(prompts, str) else generators,
            **families.of(prior.pipeline).call,
        )


def _loop(prior: DiffusionPrior, words: Sequence[str], count: int) -> None:
    for i in range(count):
        _plain(prior, words[i % len(words)], [i])


def _batches(prior: DiffusionPrior, words: Sequence[str], count: int) -> None:
    for first in range(0, count, prior.batch_size):
        rows = range(first, min(count, first + prior.batch_size))
        _plain(prior, [words[i % len(words)] for i in rows], rows)


def _ours(prior: DiffusionPrior, words: Sequence[str], count: int) -> None:
    prior.generate([words[i % len(words)] for i in range(count)], range(count), (prior.size, prior.size))


RUNS: dict[str, Callable[[DiffusionPrior, Sequence[str], int], None]] = {
    "loop": _loop,
    "batch": _batches,
    "fedprior": _ours,
}


def _peak_of_a_process(
    arm: str, source: str | Path, options: dict[str, Any], words: Sequence[str], images: int
) -> float:
    """MB (1e6 bytes) that a new process took at its peak that loads the prior and runs one arm."""
    asked = arm, str(source), options, list(words), images, torch.get_num_threads()
    return float(in_child(f"the memory of '{arm}'", peak_of, *asked))


def peak_of(arm: str, source: str, options: dict[str, Any], words: Sequence[str], images: int, threads: int) -> float:
    """Loads the prior, runs the arm -> this process's peak."""
    torch.set_num_threads(threads)
    RUNS[arm](embedded.load(source, **options), words, images)
    return peak_megabytes()
