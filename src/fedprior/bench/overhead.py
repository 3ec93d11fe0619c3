"""What fedprior itself costs: rounds of clients that do nothing, and starting."""

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

import torch
from torch import Tensor, nn

from ..data.table import Federation, Shard, make
from ..engines.serial import Serial
from ..federate import RoundResult, begin, federate
from ..local import Worker
from ..methods import FedAvg
from ..net import Net
from ..optim import SGD
from ..traffic import Traffic
from ..tree import Tree
from ..uploads import Upload
from .turns import in_turns

ROUND = ["-P", "-c", "import fedprior.run; from fedprior.bench.overhead import first; first()"]
HELP = ["-m", "fedprior.cli", "--help"]
"""Words of processes whose start is timed: until a first round has been taken, with all that a run has loaded by then;
and until the command line has shown what it can do."""


class Idle(Worker):
    """Sends an update of the right shape without training."""

    def train(self, client: int, shard: Shard, down: Tree, memory: Tree, round: int) -> tuple[Upload, Tree]:
        ctx = self.open(down, memory)
        return self.finish(client, self.init(ctx, memory), [1.0], 0.0, shard, ctx, down)


class Megabyte(nn.Module):
    """Twenty tensors, 250,000 float32 numbers in all."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(12_500)) for _ in range(20))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.flatten(1), x.flatten(1)


def idle(cohort: int) -> Iterator[RoundResult]:
    """Rounds that hold everything that real ones do (cohort, broadcast, checks, aggregation, server step) but no
    gradient; 100 clients with 1 MB of weights."""
    image, label = torch.zeros(100, 3, 8, 8, dtype=torch.uint8), torch.zeros(100, dtype=torch.int64)
    rows = tuple(torch.arange(100).split(1))
    data = Federation(table=make(image, label), clients=rows, test=make(image, label), classes=("a",))
    worker = Idle(net=Net(Megabyte()), method=FedAvg(), optimizer=SGD(lr=0.1), batch_size=1, steps=1)
    server = begin(worker.net, worker.method, 0)
    return federate(server, worker.method, Serial(worker, data), cohort=cohort, seed=0, traffic=Traffic())


def milliseconds(rounds: int = 30, cohort: int = 50) -> float:
    """CPU ms of a client in a round, the median over rounds: the whole round divided by its clients."""
    times, last = [], time.process_time()
    for _ in islice(idle(cohort), rounds):
        now = time.process_time()
        times.append(1000 * (now - last) / cohort)
        last = now
    return statistics.median(times)


def first() -> None:
    """Takes a first round."""
    next(idle(1))


def starts(commands: Mapping[str, Sequence[str]], repeats: int = 5) -> dict[str, float]:
    """Median wall seconds of whole Python processes with these words, in turns."""

    def run(words: Sequence[str]) -> None:
        subprocess.run([sys.executable, *words], check=True, capture_output=True)

    laps = in_turns({name: partial(run, words) for name, words in commands.items()}, repeats)
    return {name: statistics.median(lap.wall for lap in own) for name, own in laps.items()}
