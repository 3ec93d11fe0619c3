"""What it costs that a method keeps state. Prints Markdown.

    python benchmarks/state.py >> docs/benchmarks.md

1. SCAFFOLD's round beside FedAvg's on CCT-2, checkpoint included, in turns within one process on one thread.
2. Memory for 1,000 clients of SCAFFOLD on CCT-2 whose control variates together exceed the bound; every client takes
   part in each of two rounds. Each bound runs in a process of its own, and all must end with the same bits.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from fedprior import environment, nets
from fedprior.checkpoint import Checkpoints, State
from fedprior.data.table import Federation, make
from fedprior.engines.serial import Serial
from fedprior.federate import begin, federate
from fedprior.local import Worker
from fedprior.memory import ClientMemory
from fedprior.method import Method
from fedprior.methods import FedAvg, Moon, Scaffold
from fedprior.net import Net
from fedprior.optim import AdamW
from fedprior.store import weight_digest
from fedprior.traffic import Traffic

BOUNDS = ("0", "100", "inf")  # MB


def federation(clients: int, rows: int) -> Federation:
    g = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (rows, 3, 32, 32), generator=g, dtype=torch.uint8)
    label = torch.arange(rows) % 10
    owned = tuple(torch.randperm(rows, generator=g)[: max(1, rows // clients)] for _ in range(clients))
    return Federation(table=make(image, label), clients=owned, test=make(image, label), classes=tuple("abcdefghij"))


class Arm:
    """A method with its own run directory; each call is one more round, checkpoint included."""

    def __init__(self, method: Method, folder: Path, cohort: int, steps: int) -> None:
        worker = Worker(
            net=Net(method.adapt(nets.build("cct", 10), 0)),
            method=method,
            optimizer=AdamW(lr=5e-4),
            batch_size=64,
            steps=steps,
        )
        self.memory, self.traffic = ClientMemory(folder / "clients", 4000.0), Traffic()
        self.engine = Serial(worker, federation(10, 640), self.memory)
        server = begin(worker.net, method, 0)
        self.loop = federate(server, method, self.engine, cohort=cohort, seed=0, traffic=self.traffic)
        self.checkpoints = Checkpoints(folder)

    def __call__(self) -> float:
        """-> CPU seconds"""
        began = time.process_time()
        result = next(self.loop)
        state = State(result.number + 1, result.server, self.memory.index, self.traffic, {}, 0.0)
        self.checkpoints.save(state, self.memory)
        return time.process_time() - began


def rounds(methods: dict[str, Method], repeats: int, cohort: int = 4, steps: int = 15) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        arms = {name: Arm(method, Path(folder) / name, cohort, steps) for name, method in methods.items()}
        times: dict[str, list[float]] = {name: [] for name in arms}
        for turn in range(repeats + 1):
            for name, arm in arms.items():
                seconds = arm()
                if turn:  # the first round warms up
                    times[name].append(seconds)
    return times


def peak(bound: str, clients: int) -> None:
    """In a process of its own: prints the memory it needed above what it began with, and the digest at the end."""
    method = Scaffold()
    with tempfile.TemporaryDirectory() as folder:
        worker = Worker(net=Net(nets.build("cct", 10)), method=method, optimizer=AdamW(lr=5e-4), batch_size=1, steps=1)
        memory = ClientMemory(Path(folder) / "clients", float(bound))
        engine = Serial(worker, federation(clients, clients), memory)
        loop = federate(begin(worker.net, method, 0), method, engine, cohort=clients, seed=0, traffic=Traffic())
        checkpoints, before, most, began = Checkpoints(Path(folder)), resident(), 0.0, time.monotonic()
        stage = memory.stage

        def watched(round: int, client: int, tree: dict) -> None:  # type: ignore[type-arg]
            nonlocal most
            stage(round, client, tree)
            most = max(most, resident() - before)

        memory.stage = watched  # type: ignore[method-assign]
        for _ in range(2):
            result = next(loop)
            checkpoints.save(State(result.number + 1, result.server, memory.index, Traffic(), {}, 0.0), memory)
        disk = sum(f.stat().st_size for f in Path(folder).rglob("*.safetensors")) / 1e6
        seconds = time.monotonic() - began
    digest = weight_digest({"weights": result.server.weights, "state": result.server.state})
    print(json.dumps({"MB": most, "disk": disk, "seconds": seconds, "digest": digest}))


def resident() -> float:
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0]) * 1024 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peak")
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak:
        peak(options.peak, options.clients)
        return
    times = rounds({"FedAvg": FedAvg(), "SCAFFOLD": Scaffold(), "MOON": Moon()}, options.repeats)
    print(
        f"\n## State\n\n`python benchmarks/state.py`, {environment.processor()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, one thread.\n\nA round of 4 clients x 15 steps of 64 images on CCT-2, AdamW, "
        f"checkpoint written; CPU time, {options.repeats} rounds of each in turns.\n"
    )
    print("| method | seconds a round, median (min to max) | ratio to FedAvg, median over turns | bound |")
    print("| --- | --- | --- | --- |")
    for name, seconds in times.items():
        ratio = statistics.median(s / base for s, base in zip(seconds, times["FedAvg"], strict=True))
        bound = {"FedAvg": "", "SCAFFOLD": "1.10"}.get(name, "")
        span = f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
        print(f"| {name} | {span} | {ratio:.3f} | {bound} |")
    print(
        f"\n{options.clients} clients of SCAFFOLD on CCT-2 (1.13 MB of control variate each), all of them in each of "
        "two rounds, one step each.\n"
    )
    print("| `memory_MB` | memory above the start, peak | on disk | seconds | weights and control variate |")
    print("| --- | --- | --- | --- | --- |")
    for bound in BOUNDS:
        command = [sys.executable, __file__, "--peak", bound, "--clients", str(options.clients)]
        out = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(f"| {bound} | {out['MB']:.0f} MB | {out['disk']:.0f} MB | {out['seconds']:.0f} | {out['digest'][:16]} |")


if __name__ == "__main__":
    main()
