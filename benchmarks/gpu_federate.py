"""Speed of federated training on one GPU: the whole Gen-FedSD CIFAR-10 cell. Writes JSON and Markdown as it goes.

    python benchmarks/gpu_federate.py [--data FOLDER] [--graphs] [--compile] [--seconds 440] [--out FOLDER]
    python benchmarks/gpu_federate.py --tiny        # the same on a CPU at toy size, to see that it runs

The cell is the recipe gen-fedsd/cifar10 with crop and flip: 100 clients, 10 a round, 100 rounds, 150 steps of 64
images, CCT-2, AdamW. Its images are made up in the shape of CIFAR-10, unless `--data` names a folder with
train.parquet and test.parquet; it has no synthetic rows, which change no cost. What is measured, in this order: the
GPU's rate of matrix products; one client after another for some seconds; whether both engines compute the same;
evaluation; a probe of stacked clients in several settings, greedily; then the whole cell in the best of them, and
which kernels took the time.

No part begins that does not fit into what is left of `--seconds`; the cell ends early and is extrapolated where it has
to. What failed or was left out is told in "notes". FOLDER is the variable OUT by default, else benchmarks/results.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from peers.photos import CLASSES, channels_first, make_data
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedprior import assemble, environment, store, tree
from fedprior import evaluate as judge
from fedprior.config import Data, Experiment
from fedprior.data import partition, sources
from fedprior.data.augment import cropped
from fedprior.data.table import Federation, Table, make, take
from fedprior.engines.serial import Serial
from fedprior.engines.vectorised import Vectorised
from fedprior.federate import begin, choose, federate
from fedprior.local import Worker
from fedprior.net import Net
from fedprior.recipes import gen_fedsd_cifar10
from fedprior.traffic import Traffic
from fedprior.tree import Tree

PRECISIONS = ("fp32", "tf32", "bf16")
SIGNAL = 20  # grey levels between classes of made-up images
LAST = 20  # seconds that are left for writing and for which kernels took the time


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a stack of clients is computed."""

    precision: str = "fp32"  # one of PRECISIONS; tf32 rounds the factors of products and convolutions in fp32
    search: bool = False  # cuDNN tries its algorithms and takes the fastest
    products: bool = False  # convolutions as matrix products
    graphs: bool = False  # a step is recorded once and replayed
    compile: bool = False

    def __str__(self) -> str:
        return ", ".join([self.precision, *(k for k, on in asdict(self).items() if on is True)])


@dataclass(kw_only=True)
class Sizes:
    """What is made smaller with --tiny."""

    clients: int = 100
    cohort: int = 10
    rounds: int = 100
    steps: int = 150
    batch: int = 64
    rows: int = 50_000
    tested: int = 10_000
    square: int = 8192
    serial_seconds: float = 10.0  # for each precision
    probe_seconds: float = 3.0  # for each setting, after a round that warms up
    same: tuple[int, int, int] = (3, 10, 4)  # rounds, steps and cohort where engines are compared
    kernels_of: int = 10  # steps


TINY = Sizes(
    clients=4,
    cohort=2,
    rounds=2,
    steps=2,
    batch=8,
    rows=120,
    tested=40,
    square=256,
    serial_seconds=0.1,
    probe_seconds=0.1,
    same=(2, 2, 2),
)


class Products(nn.Module):
    """A 3 x 3 convolution as one matrix product, which a stack of clients makes a batched product; no grouped
    convolution, whose kernels may be slow."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.weight = conv.weight

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        wide = F.pad(x, (1, 1, 1, 1)).permute(0, 2, 3, 1)
        patches = torch.cat([wide[:, i : i + h, j : j + w] for i in range(3) for j in range(3)], 3)
        y = patches.reshape(b * h * w, 9 * c) @ self.weight.permute(2, 3, 1, 0).reshape(9 * c, -1)
        return y.view(b, h, w, -1).permute(0, 3, 1, 2)


class Tuned(Vectorised):
    """Stacked clients whose step is compiled, or recorded as one CUDA graph and replayed.

    For clients that take equally many steps at a constant rate, without a guide.
    """

    def __init__(self, worker: Worker, federation: Federation, *, block: int, compile: bool, graphs: bool) -> None:
        super().__init__(worker, federation, block=block, compile=compile)
        self.graphs = graphs
        self.play: Callable[[], None] | None = None

    def batch(self, desks, rows, data, i):  # type: ignore[no-untyped-def]
        if not self.graphs:
            return super().batch(desks, rows, data, i)
        if i == 0:  # all of the round; the graph takes one step after the other from it
            self.data = data
            which = [own[d.plan] for own, d in zip(rows, desks, strict=True)]
            self.draws = {"which": torch.cat(which, 1), "crops": torch.cat([d.crops for d in desks], 2)}
        return self.draws

    def step(self, carry, batch, starts, shared, mine, scales):  # type: ignore[no-untyped-def]
        if not self.graphs:
            return super().step(carry, batch, starts, shared, mine, scales)
        given = {"carry": carry, "batch": batch, "starts": starts, "shared": shared, "mine": mine}
        if self.play is None:
            self.record(given, scales)
        if carry is not self.held["carry"]:  # a round begins
            fill(self.held, given)
            self.at.zero_()
        self.play()
        return self.held["carry"], self.loss

    def record(self, given: Tree, scales: list[float]) -> None:
        """What a step reads and writes gets a place of its own; then a step is recorded there."""
        device = self.worker.net.device
        self.held = tree.map(torch.clone, given)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)  # the step
        self.loss = torch.zeros(len(scales), device=device)

        def whole() -> None:
            held = self.held
            flat = take(self.data, held["batch"]["which"].index_select(0, self.at)[0])
            flat["image"] = cropped(flat["image"], held["batch"]["crops"].index_select(0, self.at)[0])
            batch = {name: x.unflatten(0, (len(scales), -1)) for name, x in flat.items()}
            carry, loss = super(Tuned, self).step(
                held["carry"], batch, held["starts"], held["shared"], held["mine"], scales
            )
            fill(held["carry"], carry)
            self.loss.copy_(loss)
            self.at.add_(1)

        if device.type == "cpu":  # nothing can be recorded, and the rest is the same
            self.play = whole
            return
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                self.at.zero_()
                whole()
        torch.cuda.current_stream().wait_stream(aside)
        self.at.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            whole()
        self.play = graph.replay


def fill(places: Tree, values: Tree) -> None:
    new = tree.flatten(values)
    for name, place in tree.flatten(places).items():
        place.copy_(new[name])


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in a block that takes longer."""

    def late(*_: object) -> None:
        raise TimeoutError(f"it took more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass(kw_only=True)
class Lab:
    """What all parts of the measurement share."""

    sizes: Sizes
    experiment: Experiment
    federation: Federation
    device: torch.device
    folder: Path
    ends: float  # on time.monotonic()
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def left(self) -> float:
        return self.ends - time.monotonic()

    def put(self, name: str, value: Any) -> None:
        self.result[name] = value
        store.write_json(self.folder / "gpu_federate.json", self.result)
        store.write_text(self.folder / "gpu_federate.md", page(self.result))

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
        self.put("notes", [*self.result.get("notes", []), text])

    def attempt(self, name: str, work: Callable[[], Any], needs: float, most: float | None = None) -> Any:
        """The value of a part, None when it was left out or failed. It may take `most` seconds where that is given."""
        if self.left < needs:
            return self.note(f"{name}: left out, it may need {needs:.0f} s and {max(0.0, self.left):.0f} s were left")
        began = time.monotonic()
        try:
            with limit(self.left + LAST if most is None else most):
                value = work()
        except Exception as error:
            first = str(error).strip().partition("\n")[0][:300]
            return self.note(f"{name}: failed after {time.monotonic() - began:.0f} s, {type(error).__name__}: {first}")
        print(f"{name}: {time.monotonic() - began:.1f} s, {self.left:.0f} s left", file=sys.stderr, flush=True)
        return value

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def clock(self) -> float:
        self.sync()
        return time.perf_counter()

    def forget_memory(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def memory(self) -> dict[str, float | None]:
        """Peaks in MB since `forget_memory`."""
        if self.device.type != "cuda":
            return {"allocated_MB": None, "reserved_MB": None}
        of = {"allocated_MB": torch.cuda.max_memory_allocated(), "reserved_MB": torch.cuda.max_memory_reserved()}
        return {name: x / 1e6 for name, x in of.items()}

    def worker(self, setting: Setting, steps: int | None = None, exact: bool = False, double: bool = False) -> Worker:
        """A worker in a setting, which is put in force; `exact` without dropout, `double` in float64."""
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = setting.precision == "tf32"
        torch.backends.cudnn.benchmark = setting.search
        precision: Any = "bf16" if setting.precision == "bf16" else "fp32"
        experiment = replace(self.experiment, precision=precision, steps=steps or self.experiment.steps)
        net = assemble.build_net(experiment, self.federation, self.device)
        for part in net.module.modules() if exact else ():
            for rate in {"p", "rate"} & vars(part).keys():
                setattr(part, rate, 0.0)
        if setting.products:
            for name in ("conv1", "conv2"):
                setattr(net.module, name, Products(getattr(net.module, name)))
        if double:
            net.module.double()
        net = Net(net.module, net.mean, net.std, precision)
        engine, _ = assemble.build_engine(experiment, net, self.federation)
        return engine.worker

    def stacked(self, setting: Setting, block: int | None = None, **options: Any) -> Vectorised:
        worker, block = self.worker(setting, **options), block or self.sizes.cohort
        if not (setting.graphs or setting.compile):
            return Vectorised(worker, self.federation, block=block)
        return Tuned(worker, self.federation, block=block, compile=setting.compile, graphs=setting.graphs)

    def rounds(self, engine: Serial, cohort: int | None = None) -> Iterator[Any]:
        server = begin(engine.worker.net, engine.worker.method, self.experiment.seed)
        return federate(
            server,
            engine.worker.method,
            engine,
            cohort=cohort or self.sizes.cohort,
            seed=self.experiment.seed,
            traffic=Traffic(),
        )

    def rates(self, client_steps: float, seconds: float, precision: str) -> dict[str, Any]:
        """Of training alone; `cell_seconds` says how long all of the cell's steps take at this rate."""
        e, per_second = self.experiment, client_steps / seconds
        assert e.steps is not None
        flops = per_second * self.result["flop"]["client_step"]
        peak = (self.result.get("matmul") or {}).get(precision)
        return {
            "client_steps": client_steps,
            "seconds": seconds,
            "client_steps_per_second": per_second,
            "images_per_second": per_second * e.batch_size,
            "cell_seconds": e.rounds * e.cohort * e.steps / per_second,
            "flop_per_second": flops,
            "share_of_matmul": flops / peak if peak else None,
            **self.memory(),
        }


def images(sizes: Sizes, folder: str | None) -> tuple[Table, Table, tuple[str, ...]]:
    """Training rows, test rows and names of classes."""
    if folder is not None:
        source = sources.load("cifar10", path=folder)
        return source.train, source.test, source.classes
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary)
        make_data(made, sizes.rows, sizes.tested, SIGNAL)
        train, test = (
            make(channels_first(np.load(made / f"{name}.npy")), torch.from_numpy(np.load(made / f"{name}_label.npy")))
            for name in ("train", "test")
        )
    return train, test, tuple(f"class {k}" for k in range(CLASSES))


def build(sizes: Sizes, folder: str | None, device: torch.device) -> tuple[Experiment, Federation]:
    experiment = replace(
        gen_fedsd_cifar10(),
        data=Data(name="cifar10", path=folder),
        clients=sizes.clients,
        cohort=sizes.cohort,
        rounds=sizes.rounds,
        steps=sizes.steps,
        batch_size=sizes.batch,
        augment=True,
    )
    train, test, classes = images(sizes, folder)
    parts = partition.split(experiment.partition, train["label"].numpy(), experiment.clients, experiment.seed)
    clients = tuple(torch.from_numpy(np.asarray(rows)) for rows in parts.clients)
    return experiment, Federation(table=train, clients=clients, test=test, classes=classes).to(device)


def matmul(lab: Lab) -> dict[str, float]:
    """FLOP/s of square matrix products on random numbers, by precision."""
    rates = {}
    for precision in PRECISIONS:
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        a, b = (torch.randn(lab.sizes.square, lab.sizes.square, device=lab.device).to(dtype) for _ in range(2))
        products, seconds = 2, 0.0
        while seconds < 0.3:  # the first turns warm up
            began = lab.clock()
            for _ in range(products):
                a @ b
            seconds = lab.clock() - began
            products *= 2
        rates[precision] = products // 2 * 2 * lab.sizes.square**3 / seconds
    return rates


def flop(lab: Lab) -> dict[str, float]:
    """Of products and convolutions, forward and backward, in a step of one client."""
    worker, shard = lab.worker(Setting()), lab.federation.shard(0)
    ctx = worker.open({"weights": worker.net.init(), "shared": {}}, {})
    which = (torch.arange(worker.batch_size) % len(shard)).to(lab.device)
    with FlopCounterMode(display=False) as counted:
        worker.step(worker.init(ctx, {}), shard.batch(which), ctx)
    e = lab.experiment
    assert e.steps is not None
    each = float(counted.get_total_flops())
    return {"client_step": each, "cell": each * e.rounds * e.cohort * e.steps}


def serial(lab: Lab, precision: str) -> dict[str, Any]:
    """One client after another, for a while."""
    setting = Setting(precision=precision)
    down = {"weights": lab.worker(setting).net.init(), "shared": {}}
    list(Serial(lab.worker(setting, steps=2), lab.federation).train(down, [0], 0))
    engine = Serial(lab.worker(setting), lab.federation)
    lab.forget_memory()
    began, done = lab.clock(), 0
    for client in choose(engine.clients, lab.sizes.cohort, lab.experiment.seed, 0):
        done += sum(upload.steps for upload in engine.train(down, [client], 0))
        if (seconds := lab.clock() - began) > lab.sizes.serial_seconds:
            break
    return lab.rates(done, seconds, precision)


def same(lab: Lab, setting: Setting, double: bool = False, against: Setting | None = None) -> dict[str, Any]:
    """A small federation without dropout, in a setting of stacked clients and with Serial (or another setting)."""
    rounds, steps, cohort = (1, *lab.sizes.same[1:]) if double else lab.sizes.same
    options: dict[str, Any] = {"steps": steps, "exact": True, "double": double}
    ends = []
    for stacked in (against, setting):
        if stacked is None:
            engine = Serial(lab.worker(replace(setting, graphs=False, compile=False), **options), lab.federation)
        else:
            engine = lab.stacked(stacked, cohort, **options)
        start = engine.worker.net.init()
        last = list(islice(lab.rounds(engine, cohort), rounds))[-1]
        ends.append((last.server.weights, engine.evaluate(last.server.weights), last.train_loss))
    (a, seen, loss), (b, other, other_loss) = ends
    gaps = {k: float((a["params"][k] - b["params"][k]).abs().max()) for k in a["params"]}
    moved = max(float((a["params"][k] - start["params"][k]).abs().max()) for k in a["params"])
    where = max(gaps, key=lambda k: gaps[k])
    return {
        "rounds": rounds,
        "steps": steps,
        "largest_weight_difference": gaps[where],
        "of": where,
        "median_weight_difference": sorted(gaps.values())[len(gaps) // 2],  # over parameters' largest ones
        "largest_way": moved,
        "train_loss": [loss, other_loss],
        "accuracy": [seen.accuracy, other.accuracy],
        "accuracy_difference": abs(seen.accuracy - other.accuracy),
    }


def evaluation(lab: Lab) -> dict[str, Any]:
    """Seconds of judging the test images, by precision and images of a batch; the first is what fedprior takes."""
    usual, seconds = judge.PIXELS, {}
    try:
        for precision in ("fp32", "bf16"):
            engine = Serial(lab.worker(Setting(precision=precision)), lab.federation)
            weights = engine.worker.net.init()
            for times in (1, 0.25, 2.5):
                judge.PIXELS = int(usual * times)
                engine.evaluate(weights)
                began = lab.clock()
                engine.evaluate(weights)
                size = min(judge.batch_size(lab.federation.test), len(lab.federation.test["label"]))
                seconds[f"{precision}, {size} a batch"] = lab.clock() - began
    finally:
        judge.PIXELS = usual
    return seconds


def probe(lab: Lab, setting: Setting) -> tuple[Vectorised, dict[str, Any]]:
    """Some rounds of stacked clients, after one that warms up -> (the engine, its rates)"""
    lab.forget_memory()
    engine = lab.stacked(setting)
    loop, began = lab.rounds(engine), lab.clock()
    next(loop)
    start, rounds, seconds = lab.clock(), 0, 0.0
    while seconds < lab.sizes.probe_seconds:
        next(loop)
        rounds, seconds = rounds + 1, lab.clock() - start
    done = rounds * lab.sizes.cohort * lab.sizes.steps
    return engine, {"first_round_seconds": start - began} | lab.rates(done, seconds, setting.precision)


def search(lab: Lab, graphs: bool, compile: bool) -> tuple[Setting, Vectorised] | None:
    """The fastest of the settings that could be run, with its engine."""
    best: tuple[Setting, Vectorised] | None = None
    fastest = 0.0

    def row(setting: Setting, needs: float = 15, most: float | None = None) -> bool:
        nonlocal best, fastest
        got = lab.attempt(f"probe ({setting})", lambda: probe(lab, setting), needs, most)
        if got is None:
            return False
        lab.put("probe", [*lab.result.get("probe", []), {"setting": str(setting)} | got[1]])
        if got[1]["client_steps_per_second"] > fastest:
            best, fastest = (setting, got[0]), got[1]["client_steps_per_second"]
        return True

    def check(setting: Setting) -> None:
        """That a way to launch kernels changes no result."""
        name = f"{setting} against stacked clients launched one by one"
        plain = replace(setting, graphs=False, compile=False)
        if (got := lab.attempt(name, lambda: same(lab, setting, against=plain), 15, most=90)) is not None:
            lab.put("same", lab.result.get("same", {}) | {name: got})

    for precision in PRECISIONS:
        row(Setting(precision=precision))
    for change in ({"search": True}, {"products": True}):
        if best is not None:
            row(replace(best[0], **change))
    if graphs and best is not None:
        recorded = replace(best[0], graphs=True)
        if row(recorded):
            check(replace(recorded, precision="fp32"))
            for precision in PRECISIONS:  # without launches in the way, another may be the fastest
                if precision != recorded.precision:
                    row(replace(recorded, precision=precision))
            row(replace(recorded, precision=best[0].precision, products=not recorded.products))
    if compile and best is not None:
        judged = sum(lab.result["evaluation"].values()) if lab.result.get("evaluation") else 0.0  # more than one takes
        cell = lab.sizes.rounds * (lab.sizes.cohort * lab.sizes.steps / fastest + judged)
        for setting in dict.fromkeys((replace(best[0], compile=True, graphs=False), replace(best[0], compile=True))):
            if row(setting, 40, most=max(40.0, lab.left - 1.1 * cell - 2 * LAST)):
                check(replace(setting, precision="fp32"))
    if best is not None:
        lab.worker(best[0])  # puts the setting in force again
    return best


def cell(lab: Lab, setting: Setting, engine: Vectorised) -> dict[str, Any]:
    """The whole experiment with an evaluation after each round, or as many rounds as there is time for."""
    e = lab.experiment
    assert e.steps is not None
    lab.forget_memory()
    training, judging, accuracy, last = 0.0, 0.0, [], lab.clock()
    for number, done in enumerate(islice(lab.rounds(engine), e.rounds), 1):
        now = lab.clock()
        training += now - last
        accuracy.append(engine.evaluate(done.server.weights).accuracy)
        last = lab.clock()
        judging += last - now
        if number % 10 == 0 or number == e.rounds or lab.left < LAST:
            rates = lab.rates(number * e.cohort * e.steps, training, setting.precision)
            told = {
                "setting": str(setting),
                "rounds": number,
                "rounds_of_cell": e.rounds,
                "wall_seconds": training + judging,
                "evaluation_seconds": judging,
                "evaluation_seconds_each": judging / number,
                "whole_cell_seconds": (training + judging) * e.rounds / number,
                "extrapolated": number < e.rounds,
                "accuracy": accuracy,
            }
            lab.put("cell", told | rates)
        if lab.left < LAST:
            break
    if len(accuracy) < e.rounds:
        lab.note(f"cell: ended after {len(accuracy)} of {e.rounds} rounds, the rest is extrapolated")
    lab.put("ratio", ratios(lab.result))
    return told


def ratios(result: dict[str, Any]) -> dict[str, float]:
    """The cell's rate of training over Serial's, by Serial's precision."""
    ours = result["cell"]["client_steps_per_second"]
    rows = result.get("serial", {}).items()
    return {precision: ours / row["client_steps_per_second"] for precision, row in rows}


def kernels(lab: Lab, setting: Setting) -> dict[str, Any] | None:
    """Which kernels take the time of a step of stacked clients that are launched one by one; None without a GPU."""
    if lab.device.type != "cuda":
        return None
    steps = lab.sizes.kernels_of
    engine = lab.stacked(replace(setting, graphs=False, compile=False), steps=steps)
    down = {"weights": engine.worker.net.init(), "shared": {}}
    cohort = engine.clients[: lab.sizes.cohort]
    list(engine.train(down, cohort, 0))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        list(engine.train(down, cohort, 0))
        lab.sync()
    rows = [x for x in seen.key_averages() if x.self_device_time_total > 0]
    rows.sort(key=lambda x: -x.self_device_time_total)
    return {
        "setting": str(setting),
        "kernels_of_a_step": sum(x.count for x in rows) / steps,
        "milliseconds_of_a_step": sum(x.self_device_time_total for x in rows) / 1000 / steps,
        "longest": [
            {"name": x.key[:90], "count": x.count / steps, "milliseconds": x.self_device_time_total / 1000 / steps}
            for x in rows[:15]
        ],
    }


def page(result: dict[str, Any]) -> str:
    """The result in Markdown."""

    def number(x: float | None) -> str:
        return "" if x is None else f"{x:,.4g}" if abs(x) < 1000 else f"{x:,.0f}"

    def table(head: list[str], rows: list[list[Any]]) -> list[str]:
        lines = [head, ["---"] * len(head), *([r[0], *map(number, r[1:])] for r in rows)]
        return [f"| {' | '.join(map(str, line))} |" for line in lines] + [""]

    columns = {
        "client-steps/s": "client_steps_per_second",
        "images/s": "images_per_second",
        "steps of the cell, s": "cell_seconds",
        "FLOP/s": "flop_per_second",
        "share of matrix products": "share_of_matmul",
        "peak MB": "allocated_MB",
    }

    def rates(rows: dict[str, dict[str, Any]]) -> list[str]:
        return table(["", *columns], [[name, *(row[c] for c in columns.values())] for name, row in rows.items()])

    hardware = result.get("hardware", {})
    lines = ["# Federated training on a GPU", ""]
    lines += [f"{hardware.get('gpu')}, torch {result.get('versions', {}).get('torch')}, {result.get('data')}.", ""]
    if got := result.get("matmul"):
        lines += table(["matrix products", "FLOP/s"], [[k, v] for k, v in got.items()])
    if got := result.get("flop"):
        lines += [f"{got['client_step']:.4g} FLOP a step of one client, {got['cell']:.4g} in the cell.", ""]
    if got := result.get("serial"):
        lines += ["## One client after another (some seconds; the cell is extrapolated)", "", *rates(got)]
    if got := result.get("probe"):
        lines += ["## Stacked clients, probed", "", *rates({row["setting"]: row for row in got})]
    if got := result.get("cell"):
        of = f"{got['rounds']} of {got['rounds_of_cell']} rounds" + ", extrapolated" * got["extrapolated"]
        lines += ["## The cell", "", *rates({f"{got['setting']}; {of}": got})]
        lines += [
            f"Whole cell {got['whole_cell_seconds']:.1f} s; {got['rounds']} rounds took {got['wall_seconds']:.1f} s, "
            f"evaluations {got['evaluation_seconds']:.1f} s; last accuracy {got['accuracy'][-1]:.4f}.",
            "",
        ]
    if got := result.get("ratio"):
        lines += table(["stacked over one after another in", "ratio"], [[k, v] for k, v in got.items()])
    if got := result.get("same"):
        shown = ("largest_weight_difference", "median_weight_difference", "largest_way", "accuracy_difference")
        rows = [[f"{name}; largest in {row['of']}", *(row[c] for c in shown)] for name, row in got.items()]
        lines += ["## Do engines agree (no dropout)", "", *table(["", *(c.replace("_", " ") for c in shown)], rows)]
    if got := result.get("evaluation"):
        lines += table(["evaluation of the test images", "s"], [[k, v] for k, v in got.items()])
    if got := result.get("kernels"):
        lines += [f"## Kernels ({got['setting']})", ""]
        lines += [f"{got['kernels_of_a_step']:.0f} kernels a step, {got['milliseconds_of_a_step']:.3f} ms.", ""]
        lines += table(
            ["longest", "a step", "ms"], [[x["name"], x["count"], x["milliseconds"]] for x in got["longest"]]
        )
    lines += [f"- {text}" for text in result.get("notes", [])]
    return "\n".join(lines) + "\n"


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", metavar="FOLDER", help="with train.parquet and test.parquet of CIFAR-10")
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="where results go")
    parser.add_argument("--seconds", type=float, default=440, help="for everything")
    parser.add_argument("--graphs", action="store_true", help="try CUDA graphs too")
    parser.add_argument("--compile", action="store_true", help="try torch.compile too")
    parser.add_argument("--tiny", action="store_true", help="toy size on a CPU, in seconds")
    asked = parser.parse_args()
    if not asked.tiny and not torch.cuda.is_available():
        sys.exit("this machine has no CUDA device that torch can use; --tiny runs on a CPU")
    device = torch.device("cpu" if asked.tiny else "cuda")
    sizes = TINY if asked.tiny else Sizes()
    torch.set_num_threads(1)  # as fedprior does
    experiment, federation = build(sizes, asked.data, device)
    folder = asked.out or Path(os.environ.get("OUT") or Path(__file__).parent / "results")
    lab = Lab(
        sizes=sizes,
        experiment=experiment,
        federation=federation,
        device=device,
        folder=folder,
        ends=began + asked.seconds,
    )
    lab.put("versions", environment.versions())
    lab.put("hardware", environment.hardware())
    lab.put("data", f"images of {asked.data}" if asked.data else "made-up images in the shape of CIFAR-10")
    lab.put("sizes", asdict(sizes))
    lab.put("matmul", lab.attempt("matmul", lambda: matmul(lab), 10))
    lab.put("flop", flop(lab))
    for precision in PRECISIONS:
        got = lab.attempt(f"serial ({precision})", lambda: serial(lab, precision), 2 * sizes.serial_seconds)
        lab.put("serial", lab.result.get("serial", {}) | ({precision: got} if got else {}))
    for name, double in (("fp32, stacked against serial", False), ("float64, stacked against serial", True)):
        got = lab.attempt(name, lambda: same(lab, Setting(), double), 20)
        lab.put("same", lab.result.get("same", {}) | ({name: got} if got else {}))
    lab.put("evaluation", lab.attempt("evaluation", lambda: evaluation(lab), 15))
    if (best := search(lab, asked.graphs, asked.compile)) is None:
        lab.note("no setting of stacked clients could be run")
    else:
        lab.attempt("cell", lambda: cell(lab, *best), 2 * LAST)
        lab.put("kernels", lab.attempt("kernels", lambda: kernels(lab, best[0]), LAST / 2))
    lab.put("seconds", time.monotonic() - began)
    print((folder / "gpu_federate.md").read_text())


if __name__ == "__main__":
    main()
