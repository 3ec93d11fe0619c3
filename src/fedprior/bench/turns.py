"""The one stopwatch: what is compared takes turns, so that a machine that slows down slows all of it."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

Arms = Mapping[str, Callable[[], object]]


class Lap(NamedTuple):
    """Seconds of one call."""

    wall: float
    cpu: float  # of all threads, and of whatever else `cpu` of `in_turns` counts


def in_turns(
    arms: Arms, repeats: int, cpu: Callable[[], float] = time.process_time, first: Arms | None = None
) -> dict[str, list[Lap]]:
    """Calls every arm once to warm up (what `first` has in its place), then all of them `repeats` times in turns
    -> {arm: its laps}. `cpu` tells the CPU seconds so far."""
    laps: dict[str, list[Lap]] = {name: [] for name in arms}
    for turn in range(repeats + 1):
        for name, call in (arms if turn or first is None else first).items():
            wall, spent = time.perf_counter(), cpu()
            call()
            lap = Lap(time.perf_counter() - wall, cpu() - spent)
            if turn:
                laps[name].append(lap)
    return laps


def clock() -> str:
    """What comparisons count: "cpu" seconds where this process works on one thread, so that neighbours do not matter;
    with more threads "wall" seconds."""
    return "cpu" if torch.get_num_threads() == 1 else "wall"


def seconds(laps: Sequence[Lap]) -> list[float]:
    """Of each lap by `clock`."""
    return [getattr(lap, clock()) for lap in laps]


def ratio(first: Sequence[Lap], second: Sequence[Lap]) -> float:
    """The median over turns of the first one's seconds divided by the second one's."""
    return statistics.median(a / b for a, b in zip(seconds(first), seconds(second), strict=True))
