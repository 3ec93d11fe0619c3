"""How rows are given to clients: pure functions of (labels, clients, seed, parameters).

Every scheme ends after a fixed number of draws. Where clients come out smaller than `min_size`, the fewest
rows needed move from the largest clients, deterministically; the partition says how many.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .. import seeds, store
from ..errors import UsageError, UserError, unknown

DRAWS = 10  # at most; then repair

Groups = list[np.ndarray]


class Scheme(Protocol):
    """One way to split, with its parameters as fields."""

    def assign(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> Groups:
        """Row numbers of each client."""
        ...


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Which client holds which rows. Raises UserError when a row is given twice or does not exist."""

    name: str
    clients: tuple[np.ndarray, ...]  # ascending row numbers int64 of each client
    rows: int  # in the data set
    seed: int
    parameters: dict[str, Any] = field(default_factory=dict)
    moved: int = 0  # rows that repair moved

    def __post_init__(self) -> None:
        given = np.concatenate([np.empty(0, np.int64), *self.clients])
        if len(given) and not 0 <= given.min() <= given.max() < self.rows:
            raise UserError(f"the partition names rows outside 0..{self.rows - 1}; make it again for these data")
        if len(np.unique(given)) != len(given):
            raise UserError("the partition gives a row to two clients; make it again")

    @property
    def unused(self) -> int:
        """Rows that no client holds."""
        return self.rows - sum(map(len, self.clients))

    @cached_property
    def digest(self) -> str:
        """SHA-256 over scheme, parameters, seed and every client's rows."""
        head = json.dumps([self.name, self.rows, self.seed, self.parameters], sort_keys=True)
        return store.digest(head, *(c.astype("<i8").tobytes() for c in self.clients))

    def counts(self, labels: Sequence[int] | np.ndarray, classes: int) -> np.ndarray:
        """Rows of each class at each client, int64 [clients, classes]."""
        y = np.asarray(labels)
        return np.stack([np.bincount(y[c], minlength=classes) for c in self.clients])

    def statistics(self, labels: Sequence[int] | np.ndarray, classes: int) -> dict[str, int | float]:
        """What the split looks like; `synthetic_to_balance` is what Gen-FedSD would have to add."""
        counts = self.counts(labels, classes)
        sizes, owned, largest = counts.sum(1), (counts > 0).sum(1), counts.max(1)
        return {
            "clients": len(counts),
            "empty_clients": int((sizes == 0).sum()),
            "rows": int(sizes.sum()),
            "unused": self.unused,
            "moved": self.moved,
            "min_size": int(sizes.min()),
            "mean_size": float(sizes.mean()),
            "max_size": int(sizes.max()),
            "mean_classes": float(owned.mean()),
            "clients_missing_classes": int((owned < classes).sum()),
            "mean_largest_class": float(largest.mean()),
            "synthetic_to_balance": int((largest * classes - sizes).sum()),
        }

    def save(self, path: Path) -> None:
        """JSON with the digest inside."""
        body = {k: getattr(self, k) for k in ("name", "rows", "seed", "parameters", "moved", "digest")}
        store.write_text(path, json.dumps(body | {"clients": [c.tolist() for c in self.clients]}) + "\n")


def load(path: Path) -> Partition:
    """A saved partition. Raises UserError when the file is missing or does not match its digest."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        clients = tuple(np.array(c, dtype=np.int64) for c in body.pop("clients"))
        digest = body.pop("digest")
        found = Partition(clients=clients, **body)
    except FileNotFoundError:
        raise UserError(f"there is no partition file {path}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path} is no partition file of fedprior; make it again") from None
    if found.digest != digest:
        raise UserError(f"{path} does not match its digest, so it was changed; make it again")
    return found


def partition(name: str, labels: Any, clients: int, seed: int, **parameters: Any) -> Partition:
    """A partition by the scheme's name, e.g. partition("dirichlet", labels, 100, 0, alpha=0.1).

    `labels` is [n] integers. Raises UsageError for an unknown name or parameter or a value out of range,
    UserError when the data cannot be split so.
    """
    if name not in PARTITIONS:
        raise unknown("partition", name, PARTITIONS)
    known = [f.name for f in fields(PARTITIONS[name])]
    for key in parameters:
        if key not in known:
            raise unknown(f"parameter of {name}", key, known)
    return split(PARTITIONS[name](**parameters), labels, clients, seed)


def split(scheme: Any, labels: Any, clients: int, seed: int) -> Partition:
    """A partition by a scheme of PARTITIONS; see `partition`."""
    y = np.asarray(labels).astype(np.int64)
    name = next(n for n, cls in PARTITIONS.items() if cls is type(scheme))
    least = scheme.min_size
    if clients < 1:
        raise UsageError(f"clients must be at least 1, not {clients}")
    if clients > len(y):
        raise UserError(f"clients={clients} is more than the {len(y)} rows; use fewer clients")
    best: Groups = []
    for attempt in range(DRAWS):
        groups = scheme.assign(y, clients, seeds.stream(seed, "partition", attempt))
        if not best or min(map(len, groups)) > min(map(len, best)):
            best = groups
        if min(map(len, best)) >= least:
            break
    held = sum(map(len, best))
    if least * clients > held:
        raise UserError(
            f"{name} {asdict(scheme)} cannot give {clients} clients {least} rows each out of {held}; the smallest got "
            f"{min(map(len, best))}; lower partition.min_size or clients"
        )
    moved = repair(best, least)
    parts = tuple(np.sort(g).astype(np.int64) for g in best)
    return Partition(name=name, clients=parts, rows=len(y), seed=seed, parameters=asdict(scheme), moved=moved)


def repair(groups: Groups, least: int) -> int:
    """Moves rows, in place, until every client has `least`; from the currently largest client to the first
    starved one. Returns how many moved, which is the fewest possible: what was lacking."""
    sizes = np.array([len(g) for g in groups])
    moved = 0
    for k in np.flatnonzero(sizes < least):
        while (lack := least - sizes[k]) > 0:
            giver = int(sizes.argmax())
            rival = int(np.partition(sizes, -2)[-2]) if len(sizes) > 1 else 0
            give = int(min(lack, max(1, sizes[giver] - rival), sizes[giver] - least))
            groups[k] = np.concatenate([groups[k], groups[giver][-give:]])
            groups[giver] = groups[giver][:-give]
            sizes[k] += give
            sizes[giver] -= give
            moved += give
    return moved


def cut(rows: np.ndarray, shares: np.ndarray) -> Groups:
    """Rows split in proportion to `shares` [clients], which sum to 1."""
    return np.split(rows, (np.cumsum(shares)[:-1] * len(rows)).astype(np.int64))


def dirichlet(rng: np.random.Generator, alpha: float, n: int) -> np.ndarray:
    """Dir(alpha) over n; where alpha is so small that every gamma draw underflows, one of the n takes all."""
    q = rng.dirichlet(np.full(n, alpha))
    return q if np.isfinite(q).all() and q.sum() > 0 else np.eye(n)[rng.integers(n)]


def by_class(labels: np.ndarray, rng: np.random.Generator) -> Groups:
    """Shuffled row numbers of each class."""
    return [rng.permutation(np.flatnonzero(labels == c)) for c in range(int(labels.max()) + 1)]


def join(pieces: list[Groups], clients: int) -> Groups:
    """Each client's pieces of all classes together."""
    return [np.concatenate([np.empty(0, np.int64), *(p[k] for p in pieces)]) for k in range(clients)]


def _require(ok: bool, key: str, want: str, value: object) -> None:
    if not ok:
        raise UsageError(f"partition.{key} must be {want}, not {value}")


@dataclass(frozen=True, kw_only=True)
class Iid:
    """Shuffled rows in pieces whose sizes differ by at most one."""

    min_size: int = 1

    def assign(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> Groups:
        return np.array_split(rng.permutation(len(labels)), clients)


@dataclass(frozen=True, kw_only=True)
class Dirichlet:
    """Per class: each class is cut over the clients by Dir(alpha), sizes as they come (NID1 of FedDifRC's paper)."""

    alpha: float = 0.5
    min_size: int = 1

    def __post_init__(self) -> None:
        _require(0 < self.alpha < float("inf"), "alpha", "a number above 0, e.g. 0.1", self.alpha)

    def assign(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> Groups:
        pieces = [cut(rows, dirichlet(rng, self.alpha, clients)) for rows in by_class(labels, rng)]
        return join(pieces, clients)


@dataclass(frozen=True, kw_only=True)
class DirichletBalanced:
    """Per class with a balance cap: a client that holds its equal share of rows gets none of the further classes.

    This is FedZoo-Bench's `niid-labeldir`, which Gen-FedSD used, and that of NIID-Bench and MOON.
    """

    alpha: float = 0.5
    min_size: int = 15

    def __post_init__(self) -> None:
        _require(0 < self.alpha < float("inf"), "alpha", "a number above 0, e.g. 0.1", self.alpha)

    def assign(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> Groups:
        return capped(by_class(labels, rng), clients, len(labels) / clients, self.alpha, rng)


def capped(classes: Groups, clients: int, cap: float, alpha: float, rng: np.random.Generator) -> Groups:
    """Classes cut over clients by Dir(alpha), leaving out who holds `cap` rows already."""
    pieces: list[Groups] = []
    sizes = np.zeros(clients, dtype=np.int64)
    for rows in classes:
        free = sizes < cap if (sizes < cap).any() else np.ones(clients, dtype=bool)
        q = dirichlet(rng, alpha, clients) * free
        # all of the class's mass may have fallen on full clients; the others then share it evenly
        q = q / q.sum() if q.sum() > 0 else free / free.sum()
        pieces.append(cut(rows, q))
        sizes += [len(p) for p in pieces[-1]]
    return join(pieces, clients)


@dataclass(frozen=True, kw_only=True)
class DirichletClient:
    """Per client: equal sizes, each client's class mix from Dir(alpha), renormalised over classes that are left."""

    alpha: float = 0.5
    min_size: int = 1

    def __post_init__(self) -> None:
        _require(0 < self.alpha < float("inf"), "alpha", "a number above 0, e.g. 0.1", self.alpha)

    def assign(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> Groups:
        stock = by_class(labels, rng)
        left = np.array([len(s) for s in stock])
        mixes = np.stack([dirichlet(rng, self.alpha, len(stock)) for _ in range(clients)])
        goals = [len(part) for part in np.array_split(labels, clients)]
        groups = []
        for k in rng.permutation(clients):
            take = self.draw(mixes[k], left, goals[k], rng)
            ends = left - take
            groups.append((k, np.concatenate([s[e:n] for s, e, n in zip(stock, ends, left, strict=True)])))
            left = ends
        return [rows for _, rows in sorted(groups, key=lambda pair: int(pair[0]))]

    @staticmethod
    def draw(mix: np.ndarray, left: np.ndarray, goal: int, rng: np.random.Generator) -> np.ndarray:
        """How many rows of each class: multinomial by `mix`, again over what is left until `goal` is met."""
        take = np.zeros_like(left)
        while (lack := goal - take.sum()) > 0:
            free = left - take
            q = mix * (free > 0)
            q = q / q.sum() if q.sum() > 0 else (free > 0) / (free > 0).sum()
            take = take + np.minimum(rng.multinomial(lack, q / q.sum()), free)
        return take


@dataclass(frozen=True, kw_only=True)
class Nid1Official:
    """The split of FedDifRC's released code: Dir(alpha) with a cap inside groups of `group` clients, all joined and
    cut again into equal pieces. Neighbours mix, so it is milder than `dirichlet` at the same alpha."""

    alpha: float = 0.5
    group: int = 5
    min_size: int = 1

    def __post_init__(self) -> None:
        _require(0 < self.alpha < float("inf"), "alpha", "a number above 0, e.g. 0.1", self.alpha)
        _require(self.group >= 1, "group", "at least 1", self.group)

    def assign(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> Groups:
        order: Groups = []
        for rows in np.array_split(rng.permutation(len(labels)), -(-clients // self.group)):
            order += self.one_group(labels, rows, rng)
        return np.array_split(np.concatenate(order), clients)

    def one_group(self, labels: np.ndarray, rows: np.ndarray, rng: np.random.Generator) -> Groups:
        """Drawn again, at most DRAWS times, until the smallest has half the average; else the most even draw."""
        mean = len(rows) / self.group
        best: Groups = []
        for _ in range(DRAWS):
            classes = [rows[labels[rows] == c] for c in range(int(labels.max()) + 1)]
            parts = capped(classes, self.group, mean, self.alpha, rng)
            if not best or min(map(len, parts)) > min(map(len, best)):
                best = parts
            if min(map(len, best)) >= mean / 2:
                break
        return best


@dataclass(frozen=True, kw_only=True)
class Nid2:
    """Some clients hold one class each, the others all; those who hold a class share it equally.

    FedDifRC's paper does not define its NID2; this is our reading: 6 of 10 clients with one class and 4 with
    all. With another number of clients the two kinds keep their proportion.
    """

    n_single: int = 6
    n_full: int = 4
    min_size: int = 1

    def __post_init__(self) -> None:
        _require(self.n_single >= 0, "n_single", "at least 0", self.n_single)
        _require(self.n_full >= 1, "n_full", "at least 1", self.n_full)

    def assign(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> Groups:
        single = min(clients - 1, round(clients * self.n_single / (self.n_single + self.n_full)))
        stock = by_class(labels, rng)
        owner = rng.permutation(len(stock))[np.arange(single) % len(stock)]  # the class of each single client
        pieces: list[Groups] = []
        for c, rows in enumerate(stock):
            holders = [*np.flatnonzero(owner == c), *range(single, clients)]
            parts = dict(zip(holders, np.array_split(rows, len(holders)), strict=True))
            pieces.append([parts.get(k, rows[:0]) for k in range(clients)])
        return join(pieces, clients)


@dataclass(frozen=True, kw_only=True)
class Shards:
    """Rows sorted by class and cut into clients x per_client shards, dealt at random (McMahan et al., 2017)."""

    per_client: int = 2
    min_size: int = 1

    def __post_init__(self) -> None:
        _require(self.per_client >= 1, "per_client", "at least 1", self.per_client)

    def assign(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> Groups:
        order = np.concatenate(by_class(labels, rng))
        shards = np.array_split(order, clients * self.per_client)
        deal = rng.permutation(len(shards)).reshape(clients, self.per_client)
        return [np.concatenate([shards[i] for i in hand]) for hand in deal]


@dataclass(frozen=True, kw_only=True)
class Pathological:
    """Every client holds exactly `k` classes, every class goes to as many clients as any other (within one)."""

    k: int = 2
    min_size: int = 1

    def __post_init__(self) -> None:
        _require(self.k >= 1, "k", "at least 1", self.k)

    def assign(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> Groups:
        stock = by_class(labels, rng)
        if self.k > len(stock):
            raise UsageError(f"partition.k={self.k} is more than the {len(stock)} classes; use at most {len(stock)}")
        taken = np.zeros(len(stock), dtype=np.int64)
        hands = []
        for _ in range(clients):
            hand = np.lexsort((rng.random(len(stock)), taken))[: self.k]  # the least used ones, ties by lot
            taken[hand] += 1
            hands.append(hand)
        pieces = [list(np.array_split(s, max(1, int(t)))) for s, t in zip(stock, taken, strict=True)]
        return [np.concatenate([pieces[c].pop() for c in hand]) for hand in hands]


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """Sizes from Dir(alpha), class mix alike."""

    alpha: float = 0.5
    min_size: int = 1

    def __post_init__(self) -> None:
        _require(0 < self.alpha < float("inf"), "alpha", "a number above 0, e.g. 0.1", self.alpha)

    def assign(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> Groups:
        return cut(rng.permutation(len(labels)), dirichlet(rng, self.alpha, clients))


@dataclass(frozen=True, kw_only=True)
class LongTail:
    """Class c keeps n_max x imbalance^(c / (C - 1)) rows, n_max = rows / C; then Dir(alpha) per class.

    imbalance is the smallest class over the largest, as in FedDifRC's code; 1 keeps all.
    """

    imbalance: float = 0.1
    alpha: float = 0.5
    min_size: int = 1

    def __post_init__(self) -> None:
        _require(0 < self.imbalance <= 1, "imbalance", "above 0 and at most 1", self.imbalance)
        _require(0 < self.alpha < float("inf"), "alpha", "a number above 0, e.g. 0.1", self.alpha)

    def assign(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> Groups:
        classes = by_class(labels, rng)
        keep = long_tail(len(labels), len(classes), self.imbalance)
        pieces = [cut(rows[:n], dirichlet(rng, self.alpha, clients)) for rows, n in zip(classes, keep, strict=True)]
        return join(pieces, clients)


def long_tail(rows: int, classes: int, imbalance: float) -> list[int]:
    """Rows that each class keeps."""
    return [int(rows / classes * imbalance ** (c / max(1, classes - 1))) for c in range(classes)]


PARTITIONS: dict[str, Any] = {
    "iid": Iid,
    "dirichlet": Dirichlet,
    "dirichlet_balanced": DirichletBalanced,
    "dirichlet_client": DirichletClient,
    "nid1_official": Nid1Official,
    "nid2": Nid2,
    "shards": Shards,
    "pathological": Pathological,
    "quantity": Quantity,
    "longtail": LongTail,
}
