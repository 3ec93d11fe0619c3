"""How many synthetic images each client gets of each class: pure functions of its real class counts."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from fedprior.errors import UsageError, unknown

Counts = NDArray[np.int64]
Pool = Literal["shared", "per_client"]


@dataclass(frozen=True, kw_only=True)
class Balance(ABC):
    """A rule for the number of images, and where a client's images come from.

    `pool="shared"` makes one pool a class, from which every client draws without replacement;
    `pool="per_client"` makes each client its own images, as in Gen-FedSD (arXiv:2405.07925).
    """

    templates: str = "clip"  # "single", "clip" or a text file with one template a line
    pool: Pool = "shared"
    pool_size: int = 0  # images of a class in the shared pool; 0: as many as the neediest client takes
    attempts: int = 5  # seeds tried before a prompt counts as faulty

    def __post_init__(self) -> None:
        if self.pool not in get_args(Pool):
            raise unknown("value for balance.pool", self.pool, get_args(Pool))
        _at_least(0, "pool_size", self.pool_size)
        _at_least(1, "attempts", self.attempts)

    @abstractmethod
    def allocate(self, counts: Counts) -> Counts:
        """Images to make, int64 [clients, classes], from real rows int64 [clients, classes].

        A client without real rows gets none.
        """


@dataclass(frozen=True, kw_only=True)
class BalanceToMax(Balance):
    """Gen-FedSD (arXiv:2405.07925, Algorithm 1): every class becomes as large as the client's largest.

    m[k, y] = n_max[k] - n[k, y]. This balances each client; it meets the global distribution only where
    that is balanced too.
    """

    cap: int = 0  # n_max counts as at most this; 0: no limit

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least(0, "cap", self.cap)

    def allocate(self, counts: Counts) -> Counts:
        images: Counts = np.maximum(_largest(counts, self.cap) - counts, 0)
        return images


@dataclass(frozen=True, kw_only=True)
class MissingOnly(Balance):
    """Only a class that the client does not have at all gets images: as many as its largest class holds."""

    cap: int = 0  # n_max counts as at most this; 0: no limit

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least(0, "cap", self.cap)

    def allocate(self, counts: Counts) -> Counts:
        images: Counts = np.where(counts == 0, _largest(counts, self.cap), 0)
        return images


@dataclass(frozen=True, kw_only=True)
class FixedBudget(Balance):
    """At most `budget` images a client, each to the class that then is the smallest, until all are level.

    Classes of the same size take turns by index. FBL (arXiv:2601.14042) keeps a client's total fixed and for
    that also drops real rows of surplus classes; this rule keeps every real row.
    """

    budget: int = 500

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least(0, "budget", self.budget)

    def allocate(self, counts: Counts) -> Counts:
        missing = (_largest(counts) - counts).sum(1)
        return _fill(counts, np.minimum(self.budget, missing))


@dataclass(frozen=True, kw_only=True)
class Ratio(Balance):
    """`ratio` images for each real row of a client (rounded, halves to even), smallest classes first.

    Once the classes are level, further images go to all of them in turn.
    """

    ratio: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.ratio < math.inf:
            raise UsageError(f"balance.ratio must be a number of at least 0, not {self.ratio}")

    def allocate(self, counts: Counts) -> Counts:
        return _fill(counts, np.rint(self.ratio * counts.sum(1)).astype(np.int64))


BALANCES: dict[str, type[Balance]] = {
    "max": BalanceToMax,
    "balance_to_max": BalanceToMax,
    "missing_only": MissingOnly,
    "fixed_budget": FixedBudget,
    "ratio": Ratio,
}
"""Rules by name; of two names for one rule the first is the one written to files."""


class Plan(NamedTuple):
    """What a rule asks for, before anything is made."""

    allocation: Counts  # synthetic rows, int64 [clients, classes]
    pool_sizes: Counts  # distinct images of each class, int64 [classes]
    images: int  # distinct images, all classes together
    rows: int  # synthetic rows, all clients together
    repeats: int  # rows that repeat an image the same client already has: its pool is smaller than its need


def plan(policy: Balance, counts: Counts) -> Plan:
    """The images and rows that `policy` asks for, given real rows int64 [clients, classes].

    No class gets more images than all clients together draw. Raises UsageError when a pool size is given
    although there is no shared pool.
    """
    if policy.pool == "per_client" and policy.pool_size:
        raise UsageError("balance.pool_size needs balance.pool=shared; leave it out or set it to 0")
    allocation = policy.allocate(counts)
    total, most = allocation.sum(0), allocation.max(0, initial=0)
    repeats = 0
    if policy.pool == "per_client":
        sizes = total
    elif policy.pool_size == 0:
        sizes = most
    else:
        sizes = np.minimum(total, policy.pool_size)
        repeats = int(np.maximum(allocation - sizes, 0).sum())
    return Plan(allocation, sizes, int(sizes.sum()), int(total.sum()), repeats)


def _at_least(least: int, key: str, value: int) -> None:
    if value < least:
        raise UsageError(f"balance.{key} must be at least {least}, not {value}")


def _largest(counts: Counts, cap: int = 0) -> Counts:
    """The size of each client's largest class, at most `cap` unless that is 0: [clients, 1]."""
    largest: Counts = counts.max(1, keepdims=True)
    return np.minimum(largest, cap) if cap else largest


def _fill(counts: Counts, budget: Counts) -> Counts:
    """budget[k] images of client k, each to its smallest class, the first of several: [clients, classes].

    Raising a client's j smallest classes to one level costs j * level - (their sum), and no choice of j may
    cost more than the budget; hence the level that all smaller classes reach.
    """
    smallest = np.cumsum(np.sort(counts, 1), 1)
    sizes = np.arange(1, counts.shape[1] + 1)
    level = ((budget[:, None] + smallest) // sizes).min(1, keepdims=True)
    images: Counts = np.maximum(level - counts, 0)
    left = budget - images.sum(1)
    lowest = counts <= level
    images += lowest & (np.cumsum(lowest, 1) <= left[:, None])
    return images
