"""What a contestant measures of itself, and the record that it leaves."""

import hashlib
import json
import resource
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import psutil
import torch
from task import Task
from torch import Tensor, nn


class Clock:
    """Wall and CPU seconds of rounds and of the evaluation, over the tree of processes. What reading the clock costs
    is not counted."""

    def __init__(self) -> None:
        self.rounds: list[tuple[float, float]] = []
        self.start()

    def start(self) -> None:
        self.others = cpu_of_children()
        self.cpu, self.wall = time.process_time(), time.perf_counter()

    def lap(self) -> tuple[float, float]:
        """Since the start, which is now again."""
        wall, cpu = time.perf_counter() - self.wall, time.process_time() - self.cpu
        cpu += cpu_of_children() - self.others
        self.start()
        return wall, cpu

    def round(self) -> None:
        """A round has ended, and the next begins."""
        self.rounds.append(self.lap())


def cpu_of_children() -> float:
    own = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = own.ru_utime + own.ru_stime
    for child in psutil.Process().children(recursive=True):
        try:
            t = child.cpu_times()
        except psutil.Error:
            continue
        total += t.user + t.system + t.children_user + t.children_system
    return total


def report(
    task: Task, clock: Clock, weights: Iterable[Tensor], evaluation: tuple[float, float], accuracy: float, package: str
) -> None:
    """Leaves the run's figures and final weights in the task's folder."""
    folder = Path(task.folder)
    np.save(folder / "weights.npy", flat(weights))
    start = flat(task.module().parameters())
    np.save(folder / "start.npy", start)
    record = {
        "rounds": clock.rounds,
        "evaluation": evaluation,
        "accuracy": accuracy,
        "start": digest([start]),
        "shards": digest(task.shards),
        "package": f"{package} {version(package)}",
        "torch": torch.__version__,
    }
    (folder / "record.json").write_text(json.dumps(record))


def finish(task: Task, clock: Clock, model: nn.Module, package: str) -> None:
    """Evaluates a peer's final model, timed on its own, and reports."""
    clock.start()
    accuracy = task.accuracy(model)
    report(task, clock, model.parameters(), clock.lap(), accuracy, package)


def flat(weights: Iterable[Tensor]) -> np.ndarray:
    joined: np.ndarray = torch.cat([w.detach().float().flatten() for w in weights]).numpy()
    return joined


def digest(parts: Iterable[np.ndarray]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part.tobytes())
    return found.hexdigest()[:16]
