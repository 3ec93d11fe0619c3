"""What fedprior itself costs: a client that does nothing, start-up, memory over rounds. Prints Markdown.

    python benchmarks/overhead.py >> docs/benchmarks.md

Figures are taken in one process on one thread. The no-op client has weights of 1 MB; its round holds everything
that a real round has (cohort, broadcast, checks, aggregation, server step) but no gradient.
"""

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn

from fedprior import environment
from fedprior.config import Experiment, override
from fedprior.data.table import Federation, make
from fedprior.engines.serial import Serial
from fedprior.federate import begin, federate
from fedprior.local import Worker
from fedprior.methods import FedAvg
from fedprior.net import Net
from fedprior.optim import SGD
from fedprior.traffic import Traffic


class Idle(Worker):
    """Sends an update of the right shape without training."""

    def train(self, client, shard, down, memory, round):  # type: ignore[no-untyped-def]
        ctx = self.open(down, memory)
        return self.finish(client, self.init(ctx, memory), [1.0], 0.0, shard, ctx, down)


class Megabyte(nn.Module):
    """Twenty tensors, 250,000 float32 numbers in all."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(12_500)) for _ in range(20))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.flatten(1), x.flatten(1)


def noop_milliseconds(rounds: int = 30, cohort: int = 50) -> float:
    """Median over rounds, divided by the clients of one."""
    image, label = torch.zeros(100, 3, 8, 8, dtype=torch.uint8), torch.zeros(100, dtype=torch.int64)
    rows = tuple(torch.arange(100).split(1))
    data = Federation(table=make(image, label), clients=rows, test=make(image, label), classes=("a",))
    worker = Idle(net=Net(Megabyte()), method=FedAvg(), optimizer=SGD(lr=0.1), batch_size=1, steps=1)
    server = begin(worker.net, worker.method, 0)
    loop = federate(server, worker.method, Serial(worker, data), cohort=cohort, seed=0, traffic=Traffic())
    times, last = [], time.process_time()
    for _ in islice(loop, rounds):
        now = time.process_time()
        times.append(1000 * (now - last) / cohort)
        last = now
    return statistics.median(times)


def startup_seconds(words: list[str], repeats: int = 5) -> float:
    """Median wall time of a whole process."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        subprocess.run([sys.executable, *words], check=True, capture_output=True)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


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
    noop = noop_milliseconds()
    bare, full = startup_seconds(["-c", "import typer"]), startup_seconds(["-m", "fedprior.cli", "--help"])
    torch_import = startup_seconds(["-c", "import torch"])
    at10, at50 = memory_over_rounds()
    print(
        f"\n## Overhead\n\n`python benchmarks/overhead.py`, {environment.processor()}, "
        f"torch {torch.__version__}, one thread.\n"
    )
    print("| what | figure | bound |")
    print("| --- | --- | --- |")
    print(f"| a client that does nothing, 1 MB of weights | {noop:.2f} ms a round | 1 ms |")
    print(f"| `fedprior --help`, whole process | {full:.2f} s, {full / bare:.1f} x `import typer` | 1.5 s |")
    print(f"| for comparison, `import torch` | {torch_import:.2f} s | |")
    print(f"| memory after round 50 / after round 10 | {at50:.0f} / {at10:.0f} MB = {at50 / at10:.3f} | 1.05 |")


if __name__ == "__main__":
    main()
