"""One warm federated round of a paper's recipe on made-up images: how long, and how near to what the machine can do."""

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, cast

import psutil
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from .. import assemble
from ..choice import choose
from ..data.table import Shard, Table
from ..engines.pool import Pool
from ..engines.serial import Serial
from ..engines.vectorised import Vectorised
from ..errors import UsageError
from ..federate import begin, federate
from ..guide import Guide
from ..local import Worker
from ..method import Context
from ..net import Precision
from ..recipes import RECIPES
from ..traffic import Traffic
from ..tree import Tree
from ..uploads import Upload
from . import made_up, peak
from .turns import in_turns

Recipe = Literal["gen-fedsd", "feddifrc"]
Where = Literal["serial", "pool", "vectorised"]
PARTS = ("forward", "backward", "optimiser")
ROWS = 5000  # of a client at most: what each of ten has of CIFAR-10


class Size(NamedTuple):
    """What fits into a minute on one core."""

    clients: int
    steps: int


SIZES: dict[Recipe, Size] = {"gen-fedsd": Size(2, 20), "feddifrc": Size(2, 6)}


def measure(
    recipe: Recipe = "gen-fedsd",
    *,
    precision: Precision = "fp32",
    steps: int | None = None,
    clients: int | None = None,
    engine: Where = "serial",
    workers: int | None = None,
    repeats: int = 3,
    threads: int = 1,
) -> dict[str, Any]:
    """A round of `clients` clients with `steps` steps each (None: what fits into a minute), medians over `repeats`.

    {"recipe", "net", "precision", "engine", "workers", "clients", "steps", "batch_size", "repeats", "seconds" (wall),
    "cpu_seconds" (all processes), "ms_per_step" and "images_per_second" (wall, all clients), "flops_per_step",
    "gflops" (wall), "peak_gflops" (matrix products, a CPU second), "fraction_of_peak" (FLOPs by what the round's CPU
    seconds would have been enough for), "share_forward", "share_backward", "share_optimiser", "share_outside" (of
    the CPU seconds)}. Raises UsageError for settings that no experiment may have.
    """
    if workers is not None and engine != "pool":
        raise UsageError(f"--workers plays no part with --engine {engine}; add --engine pool")
    usual = SIZES[recipe]
    clients, steps = clients or usual.clients, steps or usual.steps
    experiment = replace(
        RECIPES[f"{recipe}/cifar10"](),
        balance=None,
        clients=clients,
        cohort=clients,
        steps=steps,
        epochs=None,
        precision=precision,
        engine=engine,
        workers=workers,
        threads=threads,
        device="cpu",
    )
    device = assemble.set_up(experiment)
    data = made_up.federation(clients, min(ROWS, steps * experiment.batch_size))
    with ExitStack() as stack:
        guide: Guide | None = None
        if experiment.guide is not None:
            guide = stack.enter_context(made_up.described(experiment.guide, data))
        net = assemble.build_net(experiment, data, device, guide)
        plain, cohort = assemble.build_engine(experiment, net, data, guide=guide)
        flops = flops_per_step(plain)
        chosen = choose(experiment, Serial(clocked(plain.worker), data), cohort).engine
        stack.enter_context(closing(chosen))
        spent: list[dict[str, float]] = []  # of each round
        peaks: list[float] = []
        server = begin(net, experiment.method, experiment.seed)
        rounds = federate(server, experiment.method, chosen, cohort=cohort, seed=experiment.seed, traffic=Traffic())

        def once() -> None:
            before = by_part(chosen)
            next(rounds)
            spent.append({part: total - before[part] for part, total in by_part(chosen).items()})

        laps = in_turns(
            {"round": once, "peak": lambda: peaks.append(peak.gflops(precision))}, repeats, lambda: cpu_seconds(chosen)
        )["round"]
    wall, cpu = (statistics.median(times) for times in zip(*laps, strict=True))
    taken, best = clients * steps, max(peaks)
    shares = {
        part: statistics.median(own[part] / lap.cpu for own, lap in zip(spent[1:], laps, strict=True)) for part in PARTS
    }
    return {
        "recipe": recipe,
        "net": experiment.net,
        "precision": precision,
        "engine": engine,
        "workers": chosen.workers if isinstance(chosen, Pool) else 1,
        "clients": clients,
        "steps": steps,
        "batch_size": experiment.batch_size,
        "repeats": repeats,
        "seconds": wall,
        "cpu_seconds": cpu,
        "ms_per_step": 1e3 * wall / taken,
        "images_per_second": taken * experiment.batch_size / wall,
        "flops_per_step": flops,
        "gflops": taken * flops / wall / 1e9,
        "peak_gflops": best,
        "fraction_of_peak": taken * flops / cpu / 1e9 / best,
        **{f"share_{part}": share for part, share in shares.items()},
        "share_outside": 1 - sum(shares.values()),
    }


@dataclass(frozen=True, kw_only=True)
class Clocked(Worker):
    """A worker that adds up the CPU seconds of each part of its steps. Since it may be in another process, its clients
    remember those of their own steps too."""

    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    @contextmanager
    def counting(self, part: str) -> Iterator[None]:
        began = time.process_time()
        yield
        self.spent[part] += time.process_time() - began

    def train(self, client: int, shard: Shard, down: Tree, memory: Tree, round: int) -> tuple[Upload, Tree]:
        before = torch.tensor([self.spent[part] for part in PARTS], dtype=torch.float64)
        upload, after = super().train(client, shard, down, memory, round)
        own = torch.tensor([self.spent[part] for part in PARTS], dtype=torch.float64) - before
        earlier = memory["clock"]["spent"] if memory else 0.0
        return upload, after | {"clock": {"spent": own + earlier}}

    def objective(self, params: Tree, buffers: Tree, batch: Table, ctx: Context) -> tuple[Tensor, Tree]:
        with self.counting("forward"):
            return super().objective(params, buffers, batch, ctx)

    def slopes(self, loss: Tensor, params: Tree) -> Tree:
        with self.counting("backward"):
            return super().slopes(loss, params)

    def advance(self, carry: Tree, grads: Tree, buffers: Tree, ctx: Context, scale: float) -> Tree:
        with self.counting("optimiser"):
            return super().advance(carry, grads, buffers, ctx, scale)


def clocked(worker: Worker) -> Clocked:
    """The same worker with a clock."""
    return Clocked(**{f.name: getattr(worker, f.name) for f in fields(Worker)})


def by_part(engine: Serial) -> dict[str, float]:
    """CPU seconds of each part of all steps so far, whoever took them."""
    if isinstance(engine, Vectorised):  # whose clients train together, in this process
        return dict(cast(Clocked, engine.worker).spent)
    own = [engine.memory.get(client)["clock"]["spent"].tolist() for client in engine.memory]
    return {part: sum(times[i] for times in own) for i, part in enumerate(PARTS)}


def cpu_seconds(engine: Serial) -> float:
    """Of this process and of an engine's so far."""
    total = time.process_time()
    for process in engine.processes if isinstance(engine, Pool) else []:
        times = psutil.Process(process.child.pid).cpu_times()
        total += times.user + times.system
    return total


def flops_per_step(engine: Serial) -> int:
    """Of matrix products and convolutions, forward and backward, by torch's own counter: a multiply-add counts two."""
    worker = replace(engine.worker, steps=1)
    down = {"weights": worker.net.init(), "shared": {}}
    with FlopCounterMode(display=False) as counter:
        worker.train(0, engine.federation.shard(0), down, {}, 0)
    return int(counter.get_total_flops())
