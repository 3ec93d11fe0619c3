"""One part of a prior in training: its steps, rates and averages, and what it leaves on disk so as to go on."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import seeds, store
from ..errors import UserError

EVERY = 60.0  # seconds between two checkpoints

Log = Callable[[str], None]


def rates(steps: int, peak: float, warmup: int) -> Iterator[float]:
    """Learning rates: linear warm-up times a cosine from `peak` down to 2 % of it."""
    for i in range(steps):
        yield peak * min(1.0, (i + 1) / warmup) * (0.02 + 0.49 * (1 + math.cos(math.pi * i / steps)))


def step(optimiser: torch.optim.Optimizer, loss: Tensor, rate: float) -> None:
    """One update at the given learning rate with the gradient clipped to norm 1."""
    (group,) = optimiser.param_groups
    group["lr"] = rate
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(group["params"], 1.0)
    optimiser.step()


class Average:
    """An exponential moving average of parameters, with a shorter memory in the first steps."""

    def __init__(self, parameters: Sequence[nn.Parameter], decay: float = 0.999) -> None:
        self.parameters, self.decay, self.updates = parameters, decay, 0
        self.values = [p.detach().clone() for p in parameters]

    @torch.no_grad()
    def update(self) -> None:
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(self.values, list(self.parameters), 1 - decay)

    @torch.no_grad()
    def install(self) -> None:
        """Put the averages into the parameters."""
        for p, value in zip(self.parameters, self.values, strict=True):
            p.copy_(value)


class Keeper:
    """The folder of a training run's checkpoints, one file a stage."""

    def __init__(self, folder: Path, key: str) -> None:
        self.folder, self.key = folder, key  # the key stands for everything that decides the weights
        self.began, self.before = time.process_time(), 0.0

    def seconds(self) -> float:
        """Of CPU time spent so far, before interruptions too."""
        return self.before + time.process_time() - self.began

    def read(self, stage: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """What was written of a stage. Raises UserError for a folder of another run."""
        path = self.folder / f"{stage}.safetensors"
        found, built = store.read_or_rebuild(path, store.read_tree, lambda: ({}, {}))
        if built:
            return None
        if found[1]["key"] != self.key:
            raise UserError(
                f"{self.folder} holds the beginning of another training (other data, settings or seed); remove it or "
                "choose another --out"
            )
        self.before, self.began = found[1]["seconds"], time.process_time()
        return found

    def write(self, stage: str, state: dict[str, Any], about: dict[str, Any]) -> None:
        about = about | {"key": self.key, "seconds": self.seconds()}
        store.write_tree(self.folder / f"{stage}.safetensors", state, about)


class Stage:
    """Counts the steps of one part's training, says its loss about twenty times, and keeps what it needs to go on."""

    def __init__(
        self,
        name: str,
        steps: int,
        seed: int,
        parameters: Sequence[nn.Parameter],
        peak: float,
        log: Log,
        keeper: Keeper | None,
        average: Average | None = None,
    ) -> None:
        self.name, self.steps, self.parameters, self.peak, self.log = name, steps, parameters, peak, log
        self.keeper, self.average = keeper, average
        self.draws = torch.Generator().manual_seed(seeds.number(seed, f"prior {name}"))
        self.every, self.recent = max(1, steps // 20), list[float]()
        self.taken, self.losses = 0, list[list[float]]()

    def run(self, optimiser: torch.optim.Optimizer, warmup: int) -> Iterator[float]:
        """The rate of every step that is still to be taken; each must be followed by `done`."""
        self.restore(optimiser)
        began, first, kept = time.process_time(), self.taken, time.monotonic()
        for i, rate in enumerate(rates(self.steps, self.peak, warmup)):
            if i < self.taken:
                continue
            yield rate
            if self.taken % self.every == 0 or self.taken == self.steps:
                speed = (self.taken - first) / max(1e-9, time.process_time() - began)
                left = (self.steps - self.taken) / speed
                self.log(
                    f"{self.name} {self.taken}/{self.steps}  loss {self.losses[-1][1]:.5f}  {left:.0f} s CPU to go"
                )
            if self.keeper and (time.monotonic() - kept > EVERY or self.taken == self.steps):
                self.keep(optimiser)
                kept = time.monotonic()

    def done(self, loss: float) -> None:
        self.taken += 1
        self.recent.append(loss)
        if self.taken % self.every == 0 or self.taken == self.steps:
            self.losses.append([self.taken, round(sum(self.recent) / len(self.recent), 5)])
            self.recent.clear()

    def keep(self, optimiser: torch.optim.Optimizer) -> None:
        assert self.keeper is not None
        number = lambda tensors: {str(i): x for i, x in enumerate(tensors)}
        state: dict[str, Any] = {
            "parameters": number(self.parameters),
            "optimiser": {str(i): own for i, own in optimiser.state_dict()["state"].items()},
            "draws": self.draws.get_state(),
        }
        about: dict[str, Any] = {"taken": self.taken, "losses": self.losses, "recent": self.recent}
        if self.average is not None:
            state["average"] = number(self.average.values)
            about["updates"] = self.average.updates
        self.keeper.write(self.name, state, about)

    @torch.no_grad()
    def restore(self, optimiser: torch.optim.Optimizer) -> None:
        found = self.keeper.read(self.name) if self.keeper else None
        if found is None:
            return
        state, about = found
        self.taken, self.losses, self.recent = about["taken"], about["losses"], about["recent"]
        self.draws.set_state(state["draws"])
        for i, p in enumerate(self.parameters):
            p.copy_(state["parameters"][str(i)])
        own = {int(i): values for i, values in state["optimiser"].items()}
        optimiser.load_state_dict({**optimiser.state_dict(), "state": own})
        if self.average is not None:
            self.average.updates = about["updates"]
            for i, value in enumerate(self.average.values):
                value.copy_(state["average"][str(i)])
        self.log(f"{self.name}: going on from step {self.taken}")
