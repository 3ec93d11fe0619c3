"""The first thing a newcomer runs: the same federation, plainly and balanced by the embedded prior."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .config import Experiment, override
from .errors import UsageError
from .progress import Progress
from .record import claim
from .report import html, load, numbers, summary
from .run import run

ARMS: dict[str, tuple[str, ...]] = {
    # The plain arm has the learning rate that served it best in benchmarks/demo_rates.py.
    "fedavg": ("balance=none",),
    "fedavg+balance": ("balance=max",),
}
FIXED = ("balance", "method", "name", "prior")
NOTES = (
    "Both arms see the same clients, cohorts, rounds, steps and starting weights.",
    "The prior was trained on the public half of the digits; no client and no test image is among them.",
)


def demo(words: Sequence[str], seeds: int, root: Path, progress: Progress) -> dict[str, Any]:
    """Runs both arms over the seeds and writes one report.

    Returns {"arms": {name: {"mean", "std", "seeds"}}, "accuracy", "seconds", "report"}: the headline is the mean
    accuracy over the last ten rounds as far as there are so many, then mean and sample standard deviation over the
    seeds; "accuracy" says so in words, such as "Test accuracy, mean of the last 10 rounds".
    """
    for word in words:
        if (key := word.partition("=")[0]) in FIXED:
            raise UsageError(f"{key}= is what the demo compares; use fedprior run {word} instead")
    began = time.monotonic()
    folder = claim(root, "demo")
    scores: dict[str, list[float]] = {name: [] for name in ARMS}
    experiments = []
    for seed in range(seeds):
        for name, arm in ARMS.items():
            base = override(Experiment(), [*arm, *(w for w in words if fits(arm, w))])
            own = replace(base, seed=base.seed + seed, name=f"{name}-seed{base.seed + seed}")
            experiments.append((name, own))
    for name, experiment in experiments:
        progress.say(f"{name}, seed {experiment.seed}")
        scores[name].append(run(experiment, folder, progress).result["mean_last10"])
    runs = [folder / experiment.name for arm in ARMS for name, experiment in experiments if name == arm]
    report = folder / "report.html"
    data = load.report_data(runs, title="What a diffusion prior does for non-IID clients", notes=NOTES)
    html.write(data, report)
    arms = {}
    for name, values in scores.items():
        mean, std = numbers.across_seeds(values)
        arms[name] = {"mean": mean, "std": std, "seeds": values}
    said = html.capital(summary.named(numbers.judged(data.arms).accuracy, data.arms))
    accuracy = f"{said}, {numbers.window(numbers.lengths(data.arms))}"
    return {"arms": arms, "accuracy": accuracy, "seconds": round(time.monotonic() - began, 1), "report": str(report)}


def fits(arm: Sequence[str], word: str) -> bool:
    """Whether a word has a meaning for the arm: what sets the balance has none where there is none."""
    return not (word.startswith("balance.") and "balance=none" in arm)
