"""What fedprior itself costs: a client that does nothing, start-up, memory over rounds. Prints Markdown.

    python benchmarks/overhead.py >> docs/benchmarks.md

Clients and starts are timed by what `fedprior bench overhead` calls; memory is that of a run in this process. One
thread.
"""

import resource
import tempfile
from pathlib import Path

import torch

from fedprior import environment
from fedprior.bench import overhead
from fedprior.config import Experiment, override


def rss_megabytes() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1000
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def memory_over_rounds() -> tuple[float, float]:
    """Resident memory after rounds 10 and 50 of the embedded digits."""
    from fedprior.progress import Silent
    from fedprior.record import Record
    from fedprior.run import run

    seen: dict[int, float] = {}
    write = Record.round

    def note(self: Record, metrics: dict, timings: dict) -> None:  # type: ignore[type-arg]
        write(self, metrics, timings)
        seen[metrics["round"]] = rss_megabytes()

    Record.round = note  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        run(override(Experiment(), ["rounds=50", "balance=max", "balance.pool_size=5"]), Path(folder), Silent())
    return seen[10], seen[50]


def main() -> None:
    torch.set_num_threads(1)
    noop = overhead.milliseconds()
    started = overhead.starts(
        {
            "typer": ["-c", "import typer"],
            "help": overhead.HELP,
            "torch": ["-c", "import torch"],
            "round": overhead.ROUND,
        }
    )
    full, times = started["help"], started["help"] / started["typer"]
    at10, at50 = memory_over_rounds()
    print(
        f"\n## Overhead\n\n`python benchmarks/overhead.py`, {environment.processor()}, "
        f"torch {torch.__version__}, one thread.\n"
    )
    print("| what | figure | bound |")
    print("| --- | --- | --- |")
    print(f"| a client that does nothing, 1 MB of weights | {noop:.2f} ms a round | 1 ms |")
    print(f"| `fedprior --help`, whole process | {full:.2f} s, {times:.1f} x `import typer` | 1.5 s |")
    print(f"| up to the first federated round, whole process | {started['round']:.2f} s | |")
    print(f"| for comparison, `import torch` | {started['torch']:.2f} s | |")
    print(f"| memory after round 50 / after round 10 | {at50:.0f} / {at10:.0f} MB = {at50 / at10:.3f} | 1.05 |")


if __name__ == "__main__":
    main()
