"""The numbers of a report and how they are written: pure functions over the lines of metrics.jsonl of runs, which form
arms: one setting over one or several seeds."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..progress import clock
from ..traffic import MB

LAST = 10  # rounds that the headline averages, as far as they were evaluated
LEVEL = 1e-9  # accuracies in [0, 1] that are no further apart are the same, summed in another order
PARTS = {  # of a run's time, by the keys of a line of timings.jsonl
    "images from the prior": ("generation_seconds",),
    "descriptors": ("description_seconds",),
    "training": ("training_seconds", "pretraining_seconds"),
    "evaluation": ("evaluation_seconds",),
}
REST = "data, models, checkpoints"
NOTHING = "–"  # where there is no number


class Judged(NamedTuple):
    """How accuracies are called, after what they were measured on."""

    accuracy: str
    images: str
    whole: str  # all of these images
    where: str  # with what they are images of


JUDGED = {
    "test": Judged("test accuracy", "test images", "the test set", "real images"),
    "validation": Judged("validation accuracy", "held-out rows", "the held-out rows", "held-out rows of clients"),
}
"""By `judged_on` of result.json."""

Curve = list[dict[str, Any]]
"""The lines of one run's metrics.jsonl, one a round; accuracies are in [0, 1], None where nothing was evaluated. Where
its timings are there too, each has the `seconds` that the run had taken by then."""


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """One run's clients with their rows and what they see of the last model, one entry a client."""

    real: np.ndarray  # int64 [clients, classes]
    synthetic: np.ndarray  # int64 [clients], rows
    accuracy: np.ndarray  # float64 [clients] in [0, 1], on the client's own mix of classes; NaN without data


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One setting, over one or several seeds. What earlier versions did not record is missing."""

    name: str
    curves: list[Curve]  # one a seed
    runs: list[str] = field(default_factory=list)  # names of the directories, one a seed, as all lists here
    seeds: list[int] = field(default_factory=list)
    clients: list[Holdings] = field(default_factory=list)
    seconds: list[dict[str, float]] = field(default_factory=list)  # by what they went into
    confusion: np.ndarray | None = None  # int64 [classes, classes], taken for (across), summed over seeds
    own: bool = False  # whether accuracies are means over clients' own models
    pooled: bool = False  # whether all data were trained on in one place, so that no client was asked
    judged_on: str = "test"  # or "validation"; the same for all arms of a page
    config: dict[str, Any] = field(default_factory=dict)  # of the first run, by key of the command line


class Shown(NamedTuple):
    """The run of which one alone is shown."""

    arm: str
    seed: int
    run: str  # the name of its directory


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """All that a report shows. The first arm is the one that the others are compared with."""

    title: str
    arms: list[Arm]
    classes: tuple[str, ...]
    shown: Shown  # whose rows, images and config are shown
    before: np.ndarray  # int64 [clients, classes], real rows
    after: np.ndarray | None  # int64 [clients, classes] with synthetic rows; None where there are none
    synthetic: dict[str, np.ndarray]  # class name -> uint8 [n, 3, H, W]
    real: dict[str, np.ndarray]
    config: str  # resolved TOML
    environment: dict[str, str]
    notes: list[str]
    target: float | None  # accuracy in [0, 1]

    @property
    def judged_on(self) -> str:
        """What accuracies were measured on: "test" or "validation"."""
        return self.arms[0].judged_on


def judged(arms: Sequence[Arm]) -> Judged:
    """How the accuracies of a page's arms are called."""
    return JUDGED[arms[0].judged_on]


def lengths(arms: Sequence[Arm]) -> list[int]:
    """Rounds of each run."""
    return [len(curve) for arm in arms for curve in arm.curves]


def evaluated(curve: Curve) -> Curve:
    """The rounds that have an accuracy."""
    return [line for line in curve if line["accuracy"] is not None]


def headline(curve: Curve) -> dict[str, Any]:
    """last, mean_last10 (of the evaluations within the last ten rounds), best (optimistic: chosen on the test set),
    rounds."""
    seen = [line["accuracy"] for line in evaluated(curve)]
    if not seen:
        return {"last": None, "mean_last10": None, "best": None, "rounds": len(curve)}
    final = evaluated(curve)[-1]["round"]
    tail = [line["accuracy"] for line in evaluated(curve) if line["round"] > final - LAST]
    return {
        "last": seen[-1],
        "mean_last10": math.fsum(tail) / len(tail),
        "best": max(seen),
        "rounds": len(curve),
    }


def megabytes(line: dict[str, Any]) -> float:
    """Sent up to this round, both directions, in 1e6 bytes."""
    return float(line["uplink_bytes"] + line["downlink_bytes"]) / MB


def to_target(curve: Curve, target: float) -> dict[str, Any] | None:
    """The first evaluated round that reaches the target accuracy, and the MB sent by then; None if none does."""
    for line in evaluated(curve):
        if line["accuracy"] >= target:
            return {"rounds": line["round"], "MB": megabytes(line)}
    return None


def across_seeds(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """-> (mean, sample standard deviation); the deviation of one value is None, and so is all of nothing."""
    known = [v for v in values if v is not None]
    if not known:
        return None, None
    return statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None


def score(arm: Arm) -> tuple[float | None, float | None]:
    """The arm's headline: mean and sample standard deviation over seeds of the mean of the last ten rounds."""
    return across_seeds([headline(curve)["mean_last10"] for curve in arm.curves])


def paired_gaps(first: Arm, arm: Arm) -> np.ndarray:
    """By how many points an arm's headline exceeds that of the first one, float64 [n], over the seeds that both have
    and evaluated."""
    base, own = (
        {seed: headline(curve)["mean_last10"] for seed, curve in zip(a.seeds, a.curves, strict=False)}
        for a in (first, arm)
    )
    pairs = [(own[seed], base[seed]) for seed in base if seed in own]
    return np.array([100 * (x - y) for x, y in pairs if x is not None and y is not None], dtype=float)


def class_means(arm: Arm) -> np.ndarray:
    """Percent [classes] at the last evaluation, mean over seeds; NaN where the test set lacks a class."""
    ends = [evaluated(curve)[-1]["per_class"] for curve in arm.curves]
    rates = np.array([[np.nan if v is None else v for v in end] for end in ends], dtype=float)
    return np.asarray(100 * rates.mean(0))


def level(rates: np.ndarray, rate: float) -> list[int]:
    """The places of a rate among others, all in percent."""
    return [int(k) for k in np.flatnonzero(np.abs(rates - rate) <= 100 * LEVEL)]


def shares(counts: np.ndarray) -> np.ndarray:
    """Percent of each row, float64 [classes, classes]; zeros for a class without images."""
    return np.asarray(100 * counts / np.maximum(counts.sum(1, keepdims=True), 1))


def spent(timings: Sequence[Mapping[str, Any]], total: float) -> dict[str, float]:
    """A run's seconds by what they went into, from the lines of timings.jsonl and all that it took; {} without lines.
    Of runs of earlier versions evaluation alone is known."""
    if not timings:
        return {}
    told = any("training_seconds" in line for line in timings)
    out = {
        part: math.fsum(line.get(key, 0.0) for line in timings for key in keys)
        for part, keys in PARTS.items()
        if told or part == "evaluation"
    }
    return out | {REST if told else f"training, {REST}": max(0.0, total - math.fsum(out.values()))}


# how numbers are written


def percent(mean: float | None, spread: float | None = None) -> str:
    """E.g. "95.1 % ± 0.2"; a dash where there is no number."""
    if mean is None:
        return NOTHING
    return f"{100 * mean:.1f} %" + (f" ± {100 * spread:.1f}" if spread is not None else "")


def counted(n: float, noun: str) -> str:
    """E.g. "1 round" or "3,260 rows"."""
    text = f"{n:,.1f}".removesuffix(".0")
    return f"{text} {noun}" if text == "1" else f"{text} {noun}s"


def ranged(counts: Sequence[int], noun: str) -> str:
    """E.g. "4 clients" or "4 to 6 clients"."""
    least, most = min(counts), max(counts)
    return counted(most, noun) if least == most else f"{least:,} to {counted(most, noun)}"


def window(rounds: Sequence[int]) -> str:
    """What the headline of runs of so many rounds is: "mean of the last 10 rounds", "mean of the last 3 to 5 rounds" or
    "last round"."""
    few, many = min(LAST, *rounds), min(LAST, max(rounds))
    if many == 1:
        return "last round"
    return f"mean of the last {many} rounds" if few == many else f"mean of the last {few} to {many} rounds"


def lasted(seconds: float) -> str:
    """E.g. "0.42 s", "13.1 s" or "2 h 10 min"."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    return f"{seconds:.1f} s" if seconds < 60 else clock(seconds)


def joined(parts: Sequence[str]) -> str:
    """E.g. "a", "a and b" or "a, b and c"."""
    return " and ".join(part for part in (", ".join(parts[:-1]), parts[-1]) if part)


def told(value: Any) -> str:
    """A value of a config as on the command line."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(told, value)) if isinstance(value, list) else str(value)
