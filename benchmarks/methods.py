"""Every method on the embedded digits, plain and balanced. Prints a Markdown page.

    python benchmarks/methods.py > docs/records/methods.md

First all methods with their own defaults, then variants in which one key differs. Partition, net, local optimiser,
steps, rounds, cohorts and seeds are the same for all. Runs lie in --runs (default: a temporary folder) and are not
done again: an interrupted page goes on.
"""

import argparse
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from fedprior import environment
from fedprior.config import Experiment, override
from fedprior.methods import METHODS
from fedprior.report.numbers import across_seeds, headline, percent, to_target
from fedprior.run import run

SETTING = ("partition=dirichlet", "partition.alpha=0.1", "clients=20", "cohort=5", "rounds=60", "target=0.9")
TARGET, SEEDS = 0.9, 3
ARMS = {"plain": ("balance=none",), "balanced": ("balance=max",)}
VARIANTS = (  # one key away from the method's defaults
    "fedavg weight_by=uniform",
    "fedavgm server.lr=0.3",
    "fedavgm server.lr=0.1",
    "fedadam server.lr=0.03",
    "fedadam server.lr=0.01",
    "fedyogi server.lr=0.03",
    "fedyogi server.lr=0.01",
    "fedadagrad server.lr=0.03",
    "fedadagrad server.lr=0.01",
    "moon method.mu=0",
    "moon method.mu=0.1",
    "moon method.projection=none",
    "moon method.projection=none method.mu=0.1",
    "fedproto method.share=both",
    "fednh local.lr=0.03",
    "fednh method.rho=0.5",
    "fednh rounds=150",
    "fedavg rounds=150",
    "scaffold cohort=20",
    "fedavg cohort=20",
)
HEAD = (
    "| method | arm | mean of last 10 | last | best (optimistic) | rounds, MB to 90 % | MB in all |\n"
    "| --- | --- | --- | --- | --- | --- | --- |"
)


def row(method: str, arm: str, words: list[str], root: Path) -> str:
    """All seeds of one setting as a line of the table."""
    key = "".join(c if c.isalnum() else "-" for c in " ".join([method, *words]))
    curves = []
    for seed in range(SEEDS):
        own = [*SETTING, f"method={method}", *words, *ARMS[arm], f"seed={seed}", f"name={key}-{arm}-{seed}"]
        curves.append(run(override(Experiment(), own), root).curve)
    heads = [headline(curve) for curve in curves]
    cells: list[Any] = [" ".join([method, *words]), arm]
    cells += [percent(*across_seeds([h[k] for h in heads])) for k in ("mean_last10", "last", "best")]
    hits = [hit for curve in curves if (hit := to_target(curve, TARGET))]
    some = f" ({len(hits)} of {SEEDS} seeds)" if len(hits) < SEEDS else ""
    mean = [statistics.fmean(h[k] for h in hits) if hits else 0.0 for k in ("rounds", "MB")]
    cells += [f"{mean[0]:.0f}, {mean[1]:.1f}{some}" if hits else "not reached"]
    cells += [f"{(curves[0][-1]['uplink_bytes'] + curves[0][-1]['downlink_bytes']) / 1e6:.1f}"]
    return "| " + " | ".join(cells) + " |"


def show(line: str) -> None:
    print(line, flush=True)
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=Path, default=None)
    root = parser.parse_args().runs or Path(tempfile.mkdtemp())
    torch.set_num_threads(1)
    print("# All methods on the embedded digits\n")
    print(
        f"`python benchmarks/methods.py`, {environment.processor()}, Python {platform.python_version()}, torch "
        f"{torch.__version__}, one thread. {' '.join(SETTING[:-1])}, {SEEDS} seeds, every other key at its default "
        "(20 steps of SGD 0.1). Test accuracy, mean ± standard deviation over seeds; rounds and MB (both directions) "
        f"until {percent(TARGET)}, mean over the seeds that got there. Notes on these numbers are in "
        "[methods.md](../methods.md#results-read-critically).\n"
    )
    print(HEAD)
    for method in METHODS:
        for arm in ARMS:
            show(row(method, arm, [], root))
    print("\n## One key changed, without balance\n")
    print(HEAD)
    for variant in VARIANTS:
        method, *words = variant.split()
        show(row(method, "plain", words, root))


if __name__ == "__main__":
    main()
