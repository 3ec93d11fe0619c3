"""How many synthetic images each client gets of each class, and how many of its real rows stay: pure functions of the
class counts."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, Self, get_args

import numpy as np
from numpy.typing import NDArray

from fedprior import seeds
from fedprior.errors import UsageError, UserError, unknown
from fedprior.priors import class_names

Counts = NDArray[np.int64]
MOST = 10**9  # that a number of images may be: counts are int64, and no machine makes more
Pool = Literal["shared", "per_client"]
Align = Literal["none", "roundtrip", "half", "noised"]
"""How real rows are brought closer to the prior's images: `roundtrip` passes all of them through the prior's
autoencoder, `half` every second one of a client (drawn), `noised` adds noise to all and lets the prior take it away
under their prompts (SDEdit)."""


@dataclass(frozen=True, kw_only=True)
class Balance(ABC):
    """A rule for the number of images, and where a client's images come from.

    `pool="shared"` makes one pool a class, from which every client draws without replacement;
    `pool="per_client"` makes each client its own images, as in Gen-FedSD (arXiv:2405.07925).
    """

    templates: str = "clip"  # a name in prompts.NAMED, or a text file with one template a line
    names: str = "plain"  # "repaired", or a text file with lines `class = words`
    domain_words: str = ""  # a text file with lines `domain = words` for templates with {domain}; "": a table's
    pool: Pool = "shared"
    pool_size: int = 0  # images of a class in the shared pool; 0: as many as the neediest client takes
    attempts: int = 5  # seeds tried before a prompt counts as faulty
    distinct: bool = False  # images that are byte-equal to an earlier one of their class are replaced
    clip: str = ""  # a CLIP model, folder or hub id: images unlike their prompt are replaced
    clip_threshold: float = 0.2  # cosine of image and prompt below which an image is unlike
    confidence: float = 0.0  # probability of its class by the client's own classifier below which an image is replaced
    align: Align = "none"  # what real rows go through
    strength: float = 0.3  # with align=noised, share of the noise schedule

    def __post_init__(self) -> None:
        if self.pool not in get_args(Pool):
            raise unknown("value for balance.pool", self.pool, get_args(Pool))
        if self.align not in get_args(Align):
            raise unknown("value for balance.align", self.align, get_args(Align))
        if not -1 <= self.clip_threshold <= 1:
            raise UsageError(f"balance.clip_threshold is a cosine from -1 to 1, not {self.clip_threshold}")
        if not 0 <= self.confidence < 1:
            raise UsageError(f"balance.confidence is a probability from 0 to below 1, not {self.confidence}")
        if self.confidence and self.pool != "per_client":
            raise UsageError(
                "balance.confidence asks each client's own classifier, so it needs balance.pool=per_client"
            )
        if not 0 < self.strength <= 1:
            raise UsageError(f"balance.strength must be above 0 and at most 1, not {self.strength}")
        _at_least(0, "pool_size", self.pool_size)
        _at_least(1, "attempts", self.attempts)
        if not self.names:
            raise UsageError("balance.names must be plain, repaired or a text file, not empty")

    @abstractmethod
    def allocate(self, counts: Counts) -> Counts:
        """Images to make, int64 [clients, classes], from real rows int64 [clients, classes].

        A client without real rows gets none.
        """

    def keep(self, counts: Counts) -> Counts:
        """Real rows that stay, int64 [clients, classes], of `counts`: all, unless a rule drops some."""
        return counts

    def of(self, classes: Sequence[str]) -> Self:
        """The rule with everything that names classes turned into numbers, for classes of these names."""
        return self


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
    """At most `budget` images a client, each to the class that then is the smallest, until all are level. Classes of
    the same size take turns by index, and every real row stays.

    With `drop` the client's total is fixed, as in FBL (arXiv:2601.14042: "knowledge filling" and "sampling"; its
    "knowledge drop" is something else): afterwards a client has `budget` rows, or with budget=0 as many as it had,
    and its C classes have floor(rows / C) each, rows mod C of them one more (classes that drop rows first, then by
    index). keep = min(n, target), m = target - keep.
    """

    budget: int = 500  # images a client; with `drop` rows, and 0 stands for as many as the client has
    drop: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least(0, "budget", self.budget)

    def allocate(self, counts: Counts) -> Counts:
        if self.drop:
            images: Counts = np.maximum(self._level(counts) - counts, 0)
            return images
        missing = (_largest(counts) - counts).sum(1)
        return _fill(counts, np.minimum(self.budget, missing))

    def keep(self, counts: Counts) -> Counts:
        return np.minimum(counts, self._level(counts)) if self.drop else counts

    def _level(self, counts: Counts) -> Counts:
        """Rows of each class afterwards, [clients, classes]; none where there were none."""
        held = counts.sum(1, keepdims=True)
        rows = np.where(held > 0, self.budget or held, 0)
        least, left = np.divmod(rows, counts.shape[1])
        surplus_first = np.argsort(counts <= least, axis=1, kind="stable")
        level: Counts = least + (np.argsort(surplus_first, axis=1) < left)
        return level


@dataclass(frozen=True, kw_only=True)
class Ratio(Balance):
    """`ratio` images for each real row of a client (rounded, halves to even), smallest classes first.

    Once the classes are level, further images go to all of them in turn.
    """

    ratio: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.ratio <= MOST:
            raise UsageError(f"balance.ratio must be a number from 0 to {MOST}, not {self.ratio}")

    def allocate(self, counts: Counts) -> Counts:
        wanted = self.ratio * counts.sum(1)
        _refuse_many(wanted, f"balance.ratio={self.ratio:g}")
        return _fill(counts, np.rint(wanted).astype(np.int64))


@dataclass(frozen=True, kw_only=True)
class GlobalTarget(Balance):
    """Every client's classes come to the shares `target` with the fewest images that need no real row dropped.

    With shares p the client's total becomes T[k] = max_y n[k, y] / p[y], and m[k, y] = round(T[k] p[y]) - n[k, y]
    (halves to even). A class with p[y] = 0 gets nothing and limits nothing. Equal shares give Gen-FedSD's rule.

    `target` is "uniform"; "global", the sum of all clients' class counts, which a server can only know if clients
    reveal theirs; shares with commas, one a class in the order of labels; or a text file with a line
    `class = share` for each class. Shares need not sum to 1.
    """

    target: str = "uniform"
    cap: int = 0  # T counts as at most this; 0: no limit

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least(0, "cap", self.cap)
        shares = _numbers(self.target)
        if shares is not None:
            _check_shares(shares, f"balance.target={self.target}")

    def allocate(self, counts: Counts) -> Counts:
        share = self._shares(counts)
        wanted = share > 0
        with np.errstate(over="ignore"):  # the total is infinite then, and capped or refused
            total = (counts[:, wanted] / share[wanted]).max(1, initial=0, keepdims=True)
        if self.cap:
            total = np.minimum(total, self.cap)
        _refuse_many(total, f"balance.target={self.target}")
        images: Counts = np.maximum(np.rint(total * share).astype(np.int64) - counts, 0)
        return images

    def of(self, classes: Sequence[str]) -> Self:
        """Raises UserError for a target that is no file, or for a file that does not give each class a share."""
        if self.target in ("uniform", "global") or _numbers(self.target) is not None:
            return self
        path = Path(self.target)
        found = class_names.pairs(
            path, classes, "class", "share", f"no shares at '{path}'; choose uniform, global, shares with commas or"
        )
        shares = [_number(found.get(name, "")) for name in classes]
        for name, share in zip(classes, shares, strict=True):
            if name not in found:
                raise UserError(f"{path} has no share for class '{name}'; add a line '{name} = 0' or more")
            if share is None or not 0 <= share < math.inf:
                raise UserError(f"{path}: the share of '{name}' must be a number of at least 0, not '{found[name]}'")
        if not any(shares):
            raise UserError(f"{path} gives no class a share above 0; raise one")
        return replace(self, target=",".join(map(repr, shares)))

    def _shares(self, counts: Counts) -> NDArray[np.float64]:
        """float64 [classes], their sum 1, or all 0 where no client has rows."""
        classes = counts.shape[1]
        if self.target == "uniform":
            shares = np.ones(classes)
        elif self.target == "global":
            shares = counts.sum(0).astype(np.float64)
        else:
            given = _numbers(self.target)
            if given is None:
                raise UsageError(f"balance.target={self.target} is neither uniform nor global, nor shares with commas")
            if len(given) != classes:
                raise UsageError(f"balance.target has {len(given)} shares for {classes} classes; give one a class")
            shares = np.array(given)
        normalised: NDArray[np.float64] = shares / (shares.sum() or 1.0)
        return normalised


@dataclass(frozen=True, kw_only=True)
class Discrepancy(Balance):
    """`budget` images a client, to the classes of which it has less than all clients together have.

    m[k] are `budget` seats by largest remainders in proportion to max(0, p[y] - p[k, y]), where p are the shares of
    the classes among all clients' rows and p[k] those among the client's own; of equal remainders the first class
    has precedence. A client whose shares are the global ones gets none.

    The idea is FedPDG's (ICML 2026): generate what a client lacks beside the true global distribution, which need
    not be balanced. FedPDG never sees that distribution: it reads what a client lacks from where the local and
    the global model's predictions differ, as training goes on, and tunes the prior to preferences. Here stand class
    counts in place of predictions, once, before round 1; the server learns the sum of all clients' counts.
    """

    budget: int = 500

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least(0, "budget", self.budget)

    def allocate(self, counts: Counts) -> Counts:
        everyone = counts.sum(0).tolist()
        rows = [_apportioned(self.budget, _lacking(everyone, own)) for own in counts.tolist()]
        return np.array(rows, dtype=np.int64).reshape(counts.shape)


BALANCES: dict[str, type[Balance]] = {
    "max": BalanceToMax,
    "balance_to_max": BalanceToMax,
    "missing_only": MissingOnly,
    "fixed_budget": FixedBudget,
    "ratio": Ratio,
    "global_target": GlobalTarget,
    "discrepancy": Discrepancy,
}
"""Rules by name; of two names for one rule the first is the one written to files."""


class Plan(NamedTuple):
    """What a rule asks for, before anything is made."""

    allocation: Counts  # synthetic rows, int64 [clients, kinds]; a kind is a class, or a class in a domain
    pool_sizes: Counts  # distinct images of each kind, int64 [kinds]
    images: int  # distinct images, all classes together
    rows: int  # synthetic rows, all clients together
    repeats: int  # rows that repeat an image the same client already has: its pool is smaller than its need
    kept: Counts  # real rows that stay, int64 [clients, classes]
    domains: int  # kinds of each class; 0 where domains play no part

    @property
    def by_class(self) -> Counts:
        """Synthetic rows, int64 [clients, classes]."""
        each = max(1, self.domains)
        out: Counts = self.allocation.reshape(len(self.allocation), self.allocation.shape[1] // each, each).sum(2)
        return out


def plan(policy: Balance, counts: Counts, classes: Sequence[str] = (), held: Counts | None = None) -> Plan:
    """The images and rows that `policy` asks for, given real rows int64 [clients, classes].

    A policy that names classes in a file needs `classes`, the names. No class gets more images than all clients
    together draw. Raises UsageError when a pool size is given although there is no shared pool, and what
    `Balance.of` raises.

    With `held`, the rows of each domain int64 [clients, domains], a client's images of a class are shared out over its
    domains in proportion, by largest remainders; kinds are then numbered class by class, domain by domain.
    """
    if policy.pool == "per_client" and policy.pool_size:
        raise UsageError("balance.pool_size needs balance.pool=shared; leave it out or set it to 0")
    if classes:
        policy = policy.of(classes)
    allocation = policy.allocate(counts)
    if held is not None:
        parts = [
            [_apportioned(n, own) for n in row] for row, own in zip(allocation.tolist(), held.tolist(), strict=True)
        ]
        allocation = np.array(parts, dtype=np.int64).reshape(len(counts), -1)
    total, most = allocation.sum(0), allocation.max(0, initial=0)
    repeats = 0
    if policy.pool == "per_client":
        sizes = total
    elif policy.pool_size == 0:
        sizes = most
    else:
        sizes = np.minimum(total, policy.pool_size)
        repeats = int(np.maximum(allocation - sizes, 0).sum())
    return Plan(
        allocation=allocation,
        pool_sizes=sizes,
        images=int(sizes.sum()),
        rows=int(total.sum()),
        repeats=repeats,
        kept=policy.keep(counts),
        domains=0 if held is None else held.shape[1],
    )


def staying(label: NDArray[np.int64], kept: NDArray[np.int64], seed: int, client: int) -> NDArray[np.int64]:
    """Which real rows of a client stay: their positions, ascending, int64 [sum of kept].

    label int64 [n] are the classes of its real rows; kept int64 [classes] of them stay. Rows are drawn by seed, client
    and class alone, not by what they show; where fewer stay, they are among those that would stay otherwise.
    """
    rows = []
    for y, count in enumerate(kept.tolist()):
        own = np.flatnonzero(label == y)
        rows.append(own[seeds.stream(seed, "keep", client, y).permutation(len(own))[:count]])
    return np.sort(np.concatenate([np.zeros(0, np.int64), *rows]))


def _at_least(least: int, key: str, value: int) -> None:
    if value < least:
        raise UsageError(f"balance.{key} must be at least {least}, not {value}")
    if value > MOST:
        raise UsageError(f"balance.{key} must be at most {MOST}, not {value}")


def _refuse_many(rows: NDArray[np.float64], where: str) -> None:
    """Raises UsageError where a client would have more than `MOST`."""
    if (most := rows.max(initial=0)) > MOST:
        raise UsageError(f"{where} asks for {most:.3g} rows of one client, and {MOST} are the most; lower it")


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


def _lacking(everyone: list[int], own: list[int]) -> list[int]:
    """max(0, p - p_own) of each class times (all rows) x (own rows), exactly; zeros for a client without rows."""
    total, held = sum(everyone), sum(own)
    return [max(0, a * held - n * total) for a, n in zip(everyone, own, strict=True)]


def _apportioned(seats: int, weights: list[int]) -> list[int]:
    """`seats` in proportion to weights by largest remainders (Hamilton's method); all 0 where no weight is above 0."""
    whole = sum(weights)
    if not whole:
        return [0] * len(weights)
    out, rest = map(list, zip(*(divmod(seats * weight, whole) for weight in weights), strict=True))
    for y in sorted(range(len(out)), key=lambda y: -rest[y])[: seats - sum(out)]:
        out[y] += 1
    return out


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _numbers(text: str) -> list[float] | None:
    """The numbers between commas; None where there is anything else."""
    found = [_number(part) for part in text.split(",")]
    return [x for x in found if x is not None] if None not in found else None


def _check_shares(shares: list[float], where: str) -> None:
    if not all(0 <= share < math.inf for share in shares) or not any(shares):
        raise UsageError(f"{where} must be numbers of at least 0 and not all 0")
