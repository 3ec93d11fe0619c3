"""Every method on the embedded digits, plain and balanced. Prints a Markdown table.

    python benchmarks/methods.py > docs/records/methods.md

Each method keeps its own defaults; partition, net, local optimiser, steps, rounds, cohorts and seeds are the same for
all. Runs lie in --runs (default: a temporary folder) and are not done again: an interrupted table goes on.
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
from fedprior.report.summary import across_seeds, headline, percent, to_target
from fedprior.run import run

SETTING = ("partition=dirichlet", "partition.alpha=0.1", "clients=20", "cohort=5", "rounds=60", "target=0.9")
SEEDS = 3
# fedbn is left out: the net here has no batch norm, so it would be fedavg
SETTINGS: dict[str, tuple[str, ...]] = {
    name: (f"method={name}",) for name in METHODS if name not in ("local", "centralised", "fedbn")
} | {
    "fedproto, share=both": ("method=fedproto", "method.share=both"),
    "local": ("method=local",),
    "centralised": ("method=centralised",),
}
ARMS = {"plain": ("balance=none",), "balanced": ("balance=max",)}


def cells(words: tuple[str, ...], key: str, root: Path) -> dict[str, Any]:
    """All seeds of one setting -> what the table says of it."""
    curves = []
    for seed in range(SEEDS):
        experiment = override(Experiment(), [*SETTING, *words, f"seed={seed}", f"name={key}-{seed}"])
        curves.append(run(experiment, root).curve)
    heads = [headline(curve) for curve in curves]
    hits = [hit for curve in curves if (hit := to_target(curve, 0.9))]
    return {k: percent(*across_seeds([h[k] for h in heads])) for k in ("mean_last10", "last", "best")} | {
        "target": f"{statistics.fmean(h['rounds'] for h in hits):.0f}, {statistics.fmean(h['MB'] for h in hits):.1f}"
        + (f" ({len(hits)} of {SEEDS} seeds)" if len(hits) < SEEDS else "")
        if hits
        else "–",
        "MB": f"{(curves[0][-1]['uplink_bytes'] + curves[0][-1]['downlink_bytes']) / 1e6:.1f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=Path, default=None)
    root = parser.parse_args().runs or Path(tempfile.mkdtemp())
    torch.set_num_threads(1)
    print(
        f"`python benchmarks/methods.py`, {environment.processor()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, one thread. Embedded digits, {' '.join(SETTING[:-1])}, {SEEDS} seeds, every other "
        "key at its default. Test accuracy, mean ± standard deviation over seeds; rounds and MB (both directions) until "
        "90 %, mean over the seeds that got there.\n"
    )
    print("| method | arm | mean of last 10 | last | best (optimistic) | rounds, MB to 90 % | MB in all |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, words in SETTINGS.items():
        for arm, balance in ARMS.items():
            key = "".join(c if c.isalnum() else "-" for c in f"{name}-{arm}")
            row = cells((*words, *balance), key, root)
            line = f"| {name} | {arm} | {' | '.join(row.values())} |"
            print(line, flush=True)
            print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
