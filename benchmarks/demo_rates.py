"""Which learning rate serves each arm of the demo best? Prints a Markdown table.

    python benchmarks/demo_rates.py > docs/records/demo_rates.md

Every setting runs with the demo's rounds, cohorts and three seeds. Rates are compared on the test set, which
favours whichever arm picks from more of them: both arms pick from the same list.
"""

import platform
import sys
import tempfile
from pathlib import Path

import torch

from fedprior import environment
from fedprior.config import Experiment, override
from fedprior.demo import ARMS
from fedprior.report.numbers import across_seeds, percent
from fedprior.run import run

SETTINGS = [
    *(("adamw", lr, 0.0) for lr in (3e-4, 1e-3, 3e-3, 1e-2)),
    *(("sgd", lr, 0.0) for lr in (0.03, 0.1, 0.3)),
    *(("sgd", lr, 0.9) for lr in (0.003, 0.01, 0.03)),
]
SEEDS = 3


def score(arm: tuple[str, ...], setting: tuple[str, float, float], root: Path) -> tuple[float | None, float | None]:
    optimiser, lr, momentum = setting
    values = []
    for seed in range(SEEDS):
        words = [*arm, f"local={optimiser}", f"local.lr={lr}", f"seed={seed}"]
        words += [f"local.momentum={momentum}"] if momentum else []
        values.append(run(override(Experiment(), words), root).result["mean_last10"])
    return across_seeds(values)


def main() -> None:
    torch.set_num_threads(1)
    print("# Learning rates of the demo's arms\n")
    print(
        f"`python benchmarks/demo_rates.py`, {environment.processor()}, Python {platform.python_version()}, ",
        end="",
    )
    print(
        f"torch {torch.__version__}, one thread. Test accuracy, mean of the last 10 of {Experiment().rounds} rounds, ",
        end="",
    )
    print(f"mean ± standard deviation over {SEEDS} seeds.\n")
    print("| optimiser | lr | " + " | ".join(ARMS) + " |")
    print("| --- | --- |" + " --- |" * len(ARMS))
    with tempfile.TemporaryDirectory() as folder:
        for setting in SETTINGS:
            cells = [percent(*score(arm, setting, Path(folder))) for arm in ARMS.values()]
            optimiser, lr, momentum = setting
            name = optimiser + (f", momentum {momentum:g}" if momentum else "")
            print(f"| {name} | {lr:g} | " + " | ".join(cells) + " |", flush=True)
            print(name, lr, cells, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
