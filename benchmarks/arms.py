"""Runs of many experiments side by side, each done once however often it is asked for."""

import platform
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from fedprior import environment, store
from fedprior.commands.common import experiment_of
from fedprior.config import to_toml
from fedprior.report.numbers import across_seeds, headline, percent
from fedprior.run import run


def one(job: tuple[tuple[str, ...], str]) -> float:
    """The mean accuracy of the last ten rounds of a run, done now or before."""
    torch.set_num_threads(1)
    words, root = job
    name = store.digest(*words)[:24]
    experiment = experiment_of([*words, f"name={name}", "engine=serial"])
    return float(headline(run(experiment, Path(root)).curve)["mean_last10"])


def accuracies(jobs: list[tuple[str, ...]], root: Path, workers: int) -> list[float]:
    """One for each job; jobs that come to the same experiment are run once."""
    settled = [to_toml(experiment_of(list(words))) for words in jobs]
    different = dict(zip(reversed(settled), reversed(jobs), strict=True))
    todo = list(different.items())
    out: dict[str, float] = {}
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for (key, words), value in zip(todo, pool.map(one, [(w, str(root)) for _, w in todo]), strict=True):
            out[key] = value
            print(f"{len(out)}/{len(todo)} {value:.3f} {' '.join(words)}", file=sys.stderr, flush=True)
    return [out[key] for key in settled]


def cell(values: list[float]) -> str:
    """Mean and standard deviation of accuracies over seeds."""
    mean, spread = across_seeds(values)
    return f"{percent(mean)} ± {100 * spread:.1f}" if spread is not None else percent(mean)


def about(command: str) -> str:
    """Command, hardware and versions, for a record."""
    return (
        f"`{command}`, {environment.processor()}, Python {platform.python_version()}, torch {torch.__version__}, one "
        "thread a run"
    )
