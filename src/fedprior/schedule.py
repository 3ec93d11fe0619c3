"""Learning-rate schedules: the factor on the client's rate is a pure function of (round, step).

Nothing counts or remembers, so a resumed run, a client that was not asked for many rounds, and any engine see
the same rates.
"""

import math
from dataclasses import dataclass
from typing import Protocol

from .errors import UsageError


class Schedule(Protocol):
    """How the local rate changes over rounds and steps."""

    def factor(self, round: int, step: int, steps: int) -> float:
        """What multiplies the rate in local step `step` of `steps` in `round`, all counted from 0."""
        ...


@dataclass(frozen=True, kw_only=True)
class Constant:
    """The same rate throughout."""

    def factor(self, round: int, step: int, steps: int) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Exponential:
    """decay^round, as FedNH's experiments use it with 0.99 (arXiv:2212.02758)."""

    decay: float = 0.99

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise UsageError(f"schedule.decay must be above 0 and at most 1, not {self.decay}")

    def factor(self, round: int, step: int, steps: int) -> float:
        return self.decay**round


@dataclass(frozen=True, kw_only=True)
class Cosine:
    """Rises linearly over `warmup` rounds, then falls along half a cosine to `floor` at round `over`.

    Time is round + step / steps: the rate also changes within a round.
    """

    over: int = 100
    warmup: float = 0.0
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.over < 1:
            raise UsageError(f"schedule.over must be at least 1 round, not {self.over}")
        if not 0 <= self.warmup < self.over:
            raise UsageError(f"schedule.warmup must be from 0 to below over={self.over}, not {self.warmup}")
        if not 0 <= self.floor <= 1:
            raise UsageError(f"schedule.floor is a share of the rate from 0 to 1, not {self.floor}")

    def factor(self, round: int, step: int, steps: int) -> float:
        if self.warmup and (round * steps + step + 1) <= self.warmup * steps:
            return min(1.0, (round + (step + 1) / steps) / self.warmup)  # the first step already moves
        done = min(1.0, (round + step / steps - self.warmup) / (self.over - self.warmup))
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * max(0.0, done))) / 2


SCHEDULES: dict[str, type[Constant] | type[Exponential] | type[Cosine]] = {
    "constant": Constant,
    "exponential": Exponential,
    "cosine": Cosine,
}
