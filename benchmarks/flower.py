"""What a run over Flower costs beside the same run in one process. Prints Markdown.

    python benchmarks/flower.py > docs/records/flower.md

Two nodes and the server are started on loopback from folders that `fedprior deploy init` writes, with TLS and node
keys, anew for every model. Where the proxy would stand, a relay passes the bytes on and counts them. One client lives
at each node and takes one step on a few digits, so that a round's time is the transport's. "wide-MB" is a net of this
script's own, since none that ships is that large. `--quick` measures the smallest model in two rounds.
"""

import argparse
import importlib.metadata
import inspect
import json
import os
import re
import signal
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple, Self

import psutil
from arms import about
from torch import Tensor, nn

from fedprior import nets, submit
from fedprior.commands.common import experiment_of
from fedprior.config import Experiment
from fedprior.deploy import layout, registry, start
from fedprior.engines.remote import Patience
from fedprior.errors import UserError
from fedprior.progress import Silent
from fedprior.run import run
from fedprior.traffic import MB

NODES = 2
MODELS = ("cct", "mobilenet_v2", "wide-100")
WORDS = (f"clients={NODES}", f"cohort={NODES}", "partition=iid", "data.size=32", "steps=1", "batch_size=8")
ROUNDS, IDLE = 7, 60.0  # seconds
LIMIT = 1800.0  # seconds for one model
SAMPLE, LOOK = 0.2, 0.02  # seconds between samples of memory, and between looks at the run directory
START_UP = (
    "SuperLink answers",
    "both nodes connected",
    "submit: accepted",
    "submit: the ServerApp runs",
    "submit: both nodes have said hello",
    "submit: both nodes ready",
    "submit: first round done",
)
PROGRAMS = {
    "flower-superlink": "SuperLink",
    "flwr-serverapp": "ServerApp",
    "flower-supernode": "SuperNode",
    "flwr-clientapp": "ClientApp",
    "flower-superexec": "SuperExec",
}


class Wide(nn.Module):
    """One hidden layer as wide as it takes for `megabytes` of float32 weights, so that a step costs next to nothing."""

    def __init__(self, classes: int, size: tuple[int, int], megabytes: float) -> None:
        super().__init__()
        pixels = 3 * size[0] * size[1]
        self.width = round((megabytes * 1e6 / 4 - classes) / (pixels + 1 + classes))
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(pixels, self.width), nn.ReLU())
        self.head = nn.Linear(self.width, classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.body(x)  # [B, width]
        return z, self.head(z)


def known(net: str) -> None:
    """Makes "wide-MB" a net like any other in this process."""
    if net.startswith("wide-"):
        megabytes = float(net.removeprefix("wide-"))
        nets.NETS[net] = lambda classes, size: Wide(classes, size, megabytes)


def code(net: str) -> str:
    """What an app has to say in addition, so that its processes know the net too."""
    parts = ["from torch import Tensor, nn\n\nfrom fedprior import nets\n", inspect.getsource(Wide)]
    return "\n\n".join(["", *parts, inspect.getsource(known), f'known("{net}")\n']) if net.startswith("wide-") else ""


# what is counted and noted while it runs


class Relay:
    """Passes connections to `port` of this machine on to `target`, and counts bytes up (towards `target`) and down."""

    def __init__(self, port: int, target: int) -> None:
        self.target, self.lock = target, threading.Lock()
        self.bytes = {"up": 0, "down": 0}
        self.server = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                near, _ = self.server.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self.target))
                except OSError:  # nobody is there yet
                    near.close()
                    continue
                for way, source, sink in (("up", near, far), ("down", far, near)):
                    source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    threading.Thread(target=self.carry, args=(way, source, sink), daemon=True).start()

    def carry(self, way: str, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 18):
                sink.sendall(data)
                with self.lock:
                    self.bytes[way] += len(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)  # the other way may still have something to say

    def count(self) -> dict[str, int]:
        with self.lock:
            return dict(self.bytes)

    def close(self) -> None:
        with suppress(OSError):
            self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()


class Sample(NamedTuple):
    """Of a process at a moment: bytes in memory with shared pages in parts, and whole; CPU seconds so far."""

    time: float
    pss: int
    rss: int
    cpu: float


@dataclass
class Life:
    """A process as it was seen."""

    machine: str  # server, site-0, site-1
    role: str
    samples: list[Sample] = field(default_factory=list)

    def cpu(self, begin: float, end: float) -> float:
        """CPU seconds between two moments."""
        before = [s.cpu for s in self.samples if s.time <= begin]
        return max([s.cpu for s in self.samples if s.time <= end], default=0.0) - max(before, default=0.0)


class Watch:
    """Samples the trees of processes under `roots` (machine: pid) until it is closed."""

    def __init__(self) -> None:
        self.roots: dict[str, int] = {}
        self.lives: dict[tuple[int, float], Life] = {}
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def work(self) -> None:
        while not self.over.wait(SAMPLE):
            now = time.monotonic()
            for machine, pid in list(self.roots.items()):
                with suppress(psutil.Error):
                    for process in psutil.Process(pid).children(recursive=True):
                        self.note(machine, process, now)

    def note(self, machine: str, process: psutil.Process, now: float) -> None:
        with suppress(psutil.Error):  # it has just ended
            role = next((PROGRAMS[n] for w in process.cmdline() if (n := Path(w).name) in PROGRAMS), "")
            memory, times = process.memory_full_info(), process.cpu_times()
            if role:
                life = self.lives.setdefault((process.pid, process.create_time()), Life(machine, role))
                life.role = role  # between fork and exec it was its parent's
                life.samples.append(Sample(now, memory.pss, memory.rss, times.user + times.system))

    def gone(self, role: str) -> bool:
        """Whether processes of a role were there, and none is any more."""
        last = [life.samples[-1].time for life in list(self.lives.values()) if life.role == role]
        return bool(last) and max(last) < time.monotonic() - 10

    def close(self) -> None:
        self.over.set()
        self.thread.join()


class Said(NamedTuple):
    time: float
    text: str


class Deployment:
    """A SuperLink and its nodes, each started by `fedprior deploy start`; all end when the block does."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, public = folder / "deployment", start.free_port(), start.free_port()
        self.sites = layout.init(self.folder, NODES, ("localhost",), public, self.port)
        self.server = self.folder / "server"
        self.relay, self.watch = Relay(public, self.port), Watch()
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.said: dict[str, list[Said]] = {}
        self.seconds: dict[str, float] = {}  # that starting took

    def __enter__(self) -> Self:
        try:
            began = time.monotonic()
            self.start(self.server)
            self.until(self.healthy, "the SuperLink does not answer")
            self.seconds["SuperLink answers"] = time.monotonic() - began
            registry.register(layout.server_of(self.folder))
            began = time.monotonic()
            for site in self.sites:
                self.start(site)
            self.until(self.connected, "a node does not connect")
            self.seconds["both nodes connected"] = time.monotonic() - began
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for process in reversed(self.processes.values()):  # nodes first; each ends what it started
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            process.wait()
        self.relay.close()
        self.watch.close()

    def start(self, folder: Path) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "fedprior.cli", "deploy", "start", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"},
            start_new_session=True,
        )
        self.processes[folder.name], self.said[folder.name] = process, []
        self.watch.roots[folder.name] = process.pid
        threading.Thread(target=self.listen, args=(folder.name,), daemon=True).start()

    def listen(self, name: str) -> None:
        lines = self.processes[name].stdout
        assert lines is not None
        for line in lines:
            self.said[name].append(Said(time.monotonic(), line.rstrip()))

    def until(self, true: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while not true():
            if time.monotonic() > end:
                last = "\n".join(one.text for said in self.said.values() for one in said[-20:])
                raise UserError(f"{what} within {seconds:.0f} s:\n{last}")
            time.sleep(LOOK)

    def healthy(self) -> bool:
        context = ssl.create_default_context(cafile=str(self.server / "ca.crt"))
        try:
            with urllib.request.urlopen(f"https://localhost:{self.port}/health", timeout=5, context=context) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def connected(self) -> bool:
        return all(any("SuperNode ID:" in one.text for one in list(self.said[site.name])) for site in self.sites)


# what is made of it


class Visit(NamedTuple):
    """A message at a node: the moments when it was met, whole there, answered, and the answer sent."""

    kind: str
    met: float
    received: float
    answered: float
    sent: float


def visits(said: Iterable[Said]) -> Iterator[Visit]:
    """From what a SuperNode says. It takes one message at a time."""
    kind, moments = "", []
    for now, text in said:
        if found := re.search(r"Receiving: (\S+) message", text):
            kind, moments = found[1], [now]
        elif kind and re.search(r"Received successfully|Sending: |Sent successfully", text):
            moments.append(now)
            if len(moments) == 4:
                yield Visit(kind, *moments)
                kind, moments = "", []


STAGES = ("server, and until the node looks", "to the node", "process at the node", "to the server", "server takes it")


def stages(begin: float, end: float, met: Iterable[Visit]) -> tuple[float, ...]:
    """A round's seconds in the order of `STAGES`, for the node whose answer was there last."""
    last = max(met, key=lambda visit: visit.sent)
    return tuple(b - a for a, b in pairwise([begin, *last[1:], end]))


def round_seconds(timings: Sequence[dict[str, float]]) -> list[float]:
    """Of each round after the first, without its evaluation, from the lines of timings.jsonl."""
    return [b["seconds"] - a["seconds"] - b["evaluation_seconds"] for a, b in pairwise(timings)]


def together(lives: Iterable[Life]) -> int:
    """The most PSS of processes at one moment; samples of one look share their time."""
    sums: dict[float, int] = {}
    for sample in chain.from_iterable(life.samples for life in lives):
        sums[sample.time] = sums.get(sample.time, 0) + sample.pss
    return max(sums.values(), default=0)


def a_round(totals: Sequence[dict[str, Any]], key: str) -> float:
    """The part of a round after the first in what adds up from round to round."""
    return float(totals[-1][key] - totals[0][key]) / (len(totals) - 1)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a .jsonl file, none where it is not there."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


@dataclass
class Measured:
    """One model's figures. `failed` says why there are none of its rounds."""

    net: str
    megabytes: float
    starting: dict[str, float]
    idle: dict[str, float] = field(default_factory=dict)  # bytes a node and minute
    lives: list[Life] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)  # moments when rounds were done
    wire: list[dict[str, int]] = field(default_factory=list)  # bytes until then
    counted: list[dict[str, Any]] = field(default_factory=list)  # the lines of metrics.jsonl
    flower: list[float] = field(default_factory=list)  # seconds a round
    here: list[float] = field(default_factory=list)  # in one process
    where: list[tuple[float, ...]] = field(default_factory=list)
    same: bool = False  # the metrics of both, to the byte
    failed: str = ""


def experiment(net: str, rounds: int) -> Experiment:
    known(net)
    words = ("digits", f"net={net}", *WORDS, f"rounds={rounds}", f"evaluate_every={rounds}", "engine=serial")
    return experiment_of([*words, f"name={net}"])


def measure(net: str, rounds: int, idle: float) -> Measured:
    """One deployment, one run over it, and the same run here."""
    asked = experiment(net, rounds)
    megabytes = sum(p.numel() * p.element_size() for p in nets.build(net, 10).parameters()) / MB
    with tempfile.TemporaryDirectory(prefix="fedprior-") as name:
        folder = Path(name)
        with Deployment(folder) as deployment:
            found = Measured(net, megabytes, deployment.seconds)
            if idle:
                before = deployment.relay.count()
                time.sleep(idle)
                after = deployment.relay.count()
                found.idle = {way: (after[way] - before[way]) / NODES * 60 / idle for way in after}
            there = over_flower(asked, deployment, found)
            found.lives = list(deployment.watch.lives.values())
        if not found.failed:
            found.flower = round_seconds(lines_of(there / "timings.jsonl"))
            found.counted = lines_of(there / "metrics.jsonl")
            ours = Path(run(asked, folder / "here", Silent()).result["directory"])
            found.here = round_seconds(lines_of(ours / "timings.jsonl"))
            found.same = (ours / "metrics.jsonl").read_bytes() == (there / "metrics.jsonl").read_bytes()
    return found


def over_flower(asked: Experiment, deployment: Deployment, found: Measured) -> Path:
    """Submits it and notes what happens until it ends -> its run directory."""
    app, there = deployment.folder.parent / "app", deployment.server / "runs" / asked.name
    submit.write_app(asked, app, Patience(wait=LIMIT, answer=LIMIT))
    with (app / "app.py").open("a") as f:
        f.write(code(asked.net))
    flwr, began = submit.flwr(deployment.server, ""), time.monotonic()
    seconds = found.starting
    number = flwr.submit(app)
    seconds["submit: accepted"] = time.monotonic() - began
    metrics, length = there / "metrics.jsonl", 0
    signs = {"config.toml": "submit: the ServerApp runs", "manifest.json": "submit: both nodes ready"}
    while not (there / "result.json").exists():
        if deployment.watch.gone("ServerApp") or time.monotonic() > began + LIMIT:
            found.failed = why(flwr, number)
            return there
        for file in [file for file in signs if (there / file).exists()]:
            seconds[signs.pop(file)] = time.monotonic() - began
        if (size := metrics.stat().st_size if metrics.exists() else 0) > length:
            length = size
            found.ends.append(time.monotonic())
            found.wire.append(deployment.relay.count())
        time.sleep(LOOK)
    met = [list(visits(deployment.said[site.name])) for site in deployment.sites]
    hello = max(visit.sent for visit in chain.from_iterable(met) if visit.kind == "query.hello")
    seconds["submit: both nodes have said hello"] = hello - began
    seconds["submit: first round done"] = found.ends[0] - began
    trained = list(zip(*([visit for visit in one if visit.kind == "train"] for one in met), strict=True))
    timings = lines_of(there / "timings.jsonl")
    for (begin, end), pair, line in zip(pairwise(found.ends), trained[1:], timings[1:], strict=True):
        found.where.append(stages(begin, end - line["evaluation_seconds"], pair))
    return there


def why(flwr: submit.Flwr, number: int) -> str:
    """The reason that a run without a result gives, as far as it gives one."""
    status = flwr.status(number)
    if not status.startswith(submit.ENDED):
        return f"its ServerApp is gone, or took more than {LIMIT:.0f} s, and it is {status}"
    try:
        submit.outcome(status, flwr.log(number).splitlines(), number)
    except UserError as error:
        return str(error)
    return "it left no result where it was looked for"


# the record


def span(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)) + "\n"


def heading(rounds: int) -> str:
    memory, load = psutil.virtual_memory().total / 1e9, os.getloadavg()[0]
    return (
        f"{about('python benchmarks/flower.py')}, flwr {importlib.metadata.version('flwr')}; {os.cpu_count()} cores, "
        f"{memory:.0f} GB of memory, load {load:.1f} at the end. The server and {NODES} nodes are on one machine "
        f"(loopback, TLS, node keys, SQLite), with one client at each; {rounds} rounds of `{' '.join(WORDS)}` on "
        "digits. 1 MB is 1e6 bytes.\n"
    )


def report(all_found: Sequence[Measured]) -> Iterator[str]:
    """The record's sections."""
    names = [f"{m.net} ({m.megabytes:.1f} MB)" for m in all_found]
    done = [m for m in all_found if not m.failed]
    yield "## Start-up, seconds\n"
    yield "Each model has a deployment of its own. What begins with `submit` counts from there.\n"
    cell = lambda m, key: f"{m.starting[key]:.1f}" if key in m.starting else ""
    yield table(["", *names], ([key, *(cell(m, key) for m in all_found)] for key in START_UP))
    for m in all_found:
        if m.failed:
            yield f"{m.net}: no round figures, since {m.failed}\n"
    if not done:
        return
    names = [f"{m.net} ({m.megabytes:.1f} MB)" for m in done]
    yield "## A round, seconds\n"
    yield "Median (least to most) of the rounds after the first, without evaluation.\n"
    yield table(
        ("model", "over Flower", "in one process", "difference", "ratio", "metrics of both the same"),
        (
            (
                *(name, span(m.flower), span(m.here)),
                f"{statistics.median(m.flower) - statistics.median(m.here):.2f}",
                f"{statistics.median(m.flower) / statistics.median(m.here):.0f}",
                "yes" if m.same else "NO",
            )
            for name, m in zip(names, done, strict=True)
        ),
    )
    yield "Where it goes, for the node that is done last; medians.\n"
    yield table(["", *names], zip(STAGES, *(medians(m.where) for m in done), strict=True))
    yield "CPU seconds a round, of all processes of a kind.\n"
    yield table(["", *names], ([role, *(f"{cpu(m, role):.2f}" for m in done)] for role in PROGRAMS.values()))
    yield "## Traffic, MB a round\n"
    yield table(
        ("model", "way", "counted", "on the wire", "ratio"),
        (
            (name, way, f"{count / MB:.3f}", f"{wire / MB:.3f}", f"{wire / count:.3f}")
            for name, m in zip(names, done, strict=True)
            for way in ("down", "up")
            for count, wire in [(a_round(m.counted, f"{way}link_bytes"), a_round(m.wire, way))]
        ),
    )
    for m in done:
        if m.idle:
            up, down = m.idle["up"] / 1e3, m.idle["down"] / 1e3
            yield f"A node that waits: {up:.1f} kB up and {down:.1f} kB down a minute.\n"
    yield "## Memory, MB at most\n"
    yield (
        f"PSS (RSS), looked at every {SAMPLE:g} s; of a process, the largest of its kind. PSS counts pages that "
        "several processes share in parts, so a machine of its own needs up to the RSS.\n"
    )
    yield table(["", *names], memory_rows(done))


def medians(rounds: Sequence[tuple[float, ...]]) -> list[str]:
    return [f"{statistics.median(values):.2f}" for values in zip(*rounds, strict=True)]


def cpu(m: Measured, role: str) -> float:
    """Seconds a round."""
    spent = sum(life.cpu(m.ends[0], m.ends[-1]) for life in m.lives if life.role == role)
    return spent / (len(m.ends) - 1)


def memory_rows(done: Sequence[Measured]) -> Iterator[list[str]]:
    for machine, roles in (
        ("server", ("SuperLink", "SuperExec", "ServerApp")),
        ("site", ("SuperNode", "SuperExec", "ClientApp")),
    ):
        title = "node" if machine == "site" else machine
        for role in roles:
            yield [f"{title}: {role}", *(largest(m.lives, machine, role) for m in done)]
        machines = [{life.machine for life in m.lives if life.machine.startswith(machine)} for m in done]
        tops = [
            max(together(life for life in m.lives if life.machine == one) for one in own)
            for m, own in zip(done, machines, strict=True)
        ]
        yield [f"{title}: all together", *(f"{top / MB:.0f}" for top in tops)]


def largest(lives: Iterable[Life], machine: str, role: str) -> str:
    seen = [s for life in lives if life.machine.startswith(machine) and life.role == role for s in life.samples]
    return f"{max(s.pss for s in seen) / MB:.0f} ({max(s.rss for s in seen) / MB:.0f})" if seen else ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=MODELS, help='names of nets, or "wide-MB"')
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--idle", type=float, default=IDLE, help="seconds in which waiting nodes are listened to")
    parser.add_argument("--quick", action="store_true", help="the smallest model, two rounds, 10 seconds of waiting")
    options = parser.parse_args()
    if options.quick:
        options.models, options.rounds, options.idle = MODELS[:1], 2, 10.0
    if options.rounds < 2:
        parser.error("--rounds must be at least 2: the first round is not counted")
    found = []
    for net in options.models:
        print(f"{net} ...", file=sys.stderr, flush=True)
        found.append(measure(net, options.rounds, options.idle if not found else 0.0))
    print("\n".join(["# Over Flower\n", heading(options.rounds), *report(found)]), end="")


if __name__ == "__main__":
    main()
