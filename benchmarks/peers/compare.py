"""fedprior beside its peers: the same federated work in turns, on one core. Linux only.

    python benchmarks/peers/compare.py --repeats 5 --out runs/peers.md

Prints Markdown and keeps it in FILE, with all figures in a JSON file beside it. Contestants run one after another,
each in a process of its own on one core with one thread; every repeat has a seed of its own and begins with another
contestant. Before anything is timed, all must come to the same weights where they draw nothing on their own (one that
does not is left out), and every timed run ends with the accuracy on 10,000 images. `--quick` runs everything small,
to see that it works.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from photos import make_data
from table import render
from task import Task
from venvs import PEERS, interpreter
from watch import Seen, watch

from fedprior import environment

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Contestant:
    script: str
    peer: str = ""  # whose environment; "" is this one
    options: dict[str, Any] = field(default_factory=dict)
    about: str = ""


CONTESTANTS = {
    "fedprior": Contestant("fedprior_serial.py", about="serial engine, fp32"),
    "fedprior bf16": Contestant("fedprior_serial.py", options={"precision": "bf16"}, about="serial engine, bf16"),
    "plain": Contestant(
        "plain.py", about="no framework: deep copies, a DataLoader of single images through PIL, AdamW of torch.optim"
    ),
    "plain, tuned": Contestant(
        "plain.py",
        options={"loader": "tensors", "channels_last": True},
        about="the same loop by a user who knows: batches from whole tensors, channels-last memory",
    ),
    "Flower": Contestant(
        "flwr_simulation.py", "flwr", about="simulation engine on Ray, one client at a time, plain's loader and loop"
    ),
    "pfl": Contestant(
        "pfl_simulated.py", "pfl", about="simulated backend, data sets from whole tensors, fedprior's crops and flips"
    ),
    "fluke": Contestant(
        "fluke_fedavg.py", "fluke", about="FedAVG in memory, its FastDataLoader, fedprior's crops and flips"
    ),
    "FedLab": Contestant("fedlab_standalone.py", "fedlab", about="standalone pipeline, plain's loader and loop"),
    "BlazeFL": Contestant(
        "blazefl_threads.py", "blazefl", about="thread pool of one, model on hand, plain's loader and loop"
    ),
}
TASKS: dict[str, dict[str, Any]] = {
    "cct": {"net": "cct", "optimizer": "adamw", "lr": 1e-3, "steps": 5, "rounds": 4},
    "tiny": {"net": "linear", "optimizer": "sgd", "lr": 1e-2, "steps": 20, "rounds": 6},
}
SIGNAL = {"cct": 40, "tiny": 15}  # grey levels: what each net learns in its few rounds, but not quite
ROWS, TESTED, LIMIT = 50_000, 10_000, 3600.0
APART = 0.01  # of the way trained: how far final weights may lie from plain's, but for bf16


def run(name: str, task: Task, venvs: Path, core: int) -> dict[str, Any]:
    """All that is known of one contestant's run; `error` says what went wrong."""
    contestant = CONTESTANTS[name]
    folder = Path(task.folder)
    for file in ("record.json", "weights.npy", "start.npy"):
        (folder / file).unlink(missing_ok=True)
    runs_in = interpreter(venvs, contestant.peer) if contestant.peer else sys.executable
    path = [HERE, HERE.parents[1] / "src", *([HERE / "stubs"] if contestant.peer else [])]
    env = os.environ | {
        "PEERS_TASK": json.dumps(asdict(replace(task, **contestant.options))),
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    seen: Seen = watch([runs_in, str(HERE / contestant.script)], env, core, folder / "log", LIMIT)
    if seen.code or not (folder / "record.json").exists():
        return {"error": f"exit status {seen.code}: {seen.words}"}
    record: dict[str, Any] = json.loads((folder / "record.json").read_text())
    return record | {"total": seen.wall, "memory": seen.memory, "processes": seen.processes}


def compare(names: list[str], task: Task, repeats: int, venvs: Path, core: int) -> dict[str, Any]:
    """Figures of one task: the check by name, then the runs by name."""
    check: dict[str, dict[str, Any]] = {}
    reference: np.ndarray | None = None
    short = replace(task, exact=True, rounds=2)
    for name in ("plain", *(name for name in names if name != "plain")):
        said(f"{task.net}: check of {name}")
        found = check[name] = run(name, short, venvs, core)
        if "error" not in found:
            weights, start = (np.load(Path(task.folder) / f"{file}.npy") for file in ("weights", "start"))
            reference = weights if reference is None else reference
            found["apart"] = float(np.linalg.norm(weights - reference) / np.linalg.norm(reference - start))
            bound = APART if CONTESTANTS[name].options.get("precision") != "bf16" else np.inf
            same = all(found[key] == check["plain"].get(key) for key in ("start", "shards", "torch"))
            found["agrees"] = same and found["apart"] <= bound
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    names = [name for name in names if check[name].get("agrees")]  # other figures would mean nothing
    for repeat in range(repeats):
        for name in [*names[repeat % len(names) :], *names[: repeat % len(names)]]:
            said(f"{task.net}: repeat {repeat + 1} of {repeats}, {name}")
            runs[name].append({"repeat": repeat} | run(name, replace(task, seed=repeat), venvs, core))
    return {"task": asdict(task) | {"folder": ""}, "check": check, "runs": runs}


def said(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--venvs", type=Path, default=Path("runs/peers"), help="where the peers' environments are kept")
    words.add_argument("--repeats", type=int, default=5)
    words.add_argument("--only", default="", help=f"of {', '.join(map(key, CONTESTANTS))}, with commas")
    words.add_argument("--task", choices=[*TASKS, "all"], default="all")
    words.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="the core that all run on")
    words.add_argument("--quick", action="store_true", help="small and short, to see that everything runs")
    words.add_argument("--out", type=Path, default=Path("runs/peers.md"))
    args = words.parse_args()
    wanted = set(filter(None, args.only.split(",")))
    if unknown := wanted - set(map(key, CONTESTANTS)):
        words.error(f"no contestant is called {', '.join(unknown)}")
    names = [name for name in CONTESTANTS if not wanted or key(name) in wanted]
    for name in names:
        if (peer := CONTESTANTS[name].peer) in PEERS:
            interpreter(args.venvs.resolve(), peer)
    figures: dict[str, Any] = {
        "command": f"python benchmarks/peers/compare.py --task {args.task} --repeats {args.repeats}"
        + (f" --only {args.only}" if args.only else "")
        + (" --quick" if args.quick else ""),
        "hardware": {"processor": environment.processor(), "cores": os.cpu_count(), "system": platform.platform()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "about": {name: CONTESTANTS[name].about for name in names},
        "quick": args.quick,
        "tasks": {},
    }
    for label in TASKS if args.task == "all" else [args.task]:
        with tempfile.TemporaryDirectory() as folder:
            task = Task(folder=folder, **TASKS[label])
            if args.quick:
                task = replace(task, steps=2, rounds=2)
            make_data(Path(folder), *((3000, 200) if args.quick else (ROWS, TESTED)), SIGNAL[label])
            figures["tasks"][label] = compare(names, task, args.repeats, args.venvs.resolve(), args.core)
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.with_suffix(".json").write_text(json.dumps(figures, indent=1))
    text = render(figures)
    args.out.write_text(text)
    print(text)


def key(name: str) -> str:
    """How a contestant is called on the command line."""
    return name.lower().replace(", ", "-").replace(" ", "-")


if __name__ == "__main__":
    main()
