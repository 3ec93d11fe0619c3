"""How rows are given to clients: pure functions of (labels or domains, clients, seed, parameters).

Every scheme ends after a fixed number of draws. Where clients come out smaller than `min_size`, the fewest
rows needed move from the largest clients, deterministically; the partition says how many. Schemes whose point
is which classes a client holds are not repaired: they raise UserError instead.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from .. import seeds, store
from ..errors import UsageError, UserError, unknown

DRAWS = 10  # at most; then repair
SLACK = 1e-6  # rows: 0.29 x 100 is 29

Groups = list[np.ndarray]


def _whole(key: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise UsageError(f"{key} must be a whole number of at least {least}, not {value}")


def _number(key: str, value: Any, most: float) -> None:
    real = not isinstance(value, bool) and isinstance(value, int | float | np.number)
    if not real or not 0 < float(value) <= most:
        raise UsageError(f"{key} must be a number above 0 and at most {most:g}, e.g. 0.1, not {value}")


class Columns(NamedTuple):
    """What a scheme sees of the data."""

    labels: np.ndarray  # int64 [n]
    domains: np.ndarray  # int64 [n]; [0] where the data have none
    names: tuple[str, ...]  # of the domains, by number


@dataclass(frozen=True, kw_only=True)
class Scheme(ABC):
    """One way to split, with its parameters as fields. Raises UsageError for a value out of range."""

    min_size: int = 1  # rows; 0 allows empty clients

    partial: ClassVar[bool] = False  # may leave rows out
    exact: ClassVar[bool] = False  # repair would give a client classes or domains that it must not hold
    needs_domains: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _whole("partition.min_size", self.min_size, 0)

    @abstractmethod
    def assign(self, data: Columns, clients: int, rng: np.random.Generator) -> Groups:
        """Row numbers of each client, for n rows of data and `clients` between 1 and n."""


@dataclass(frozen=True, kw_only=True)
class _Skewed(Scheme):
    """What schemes with a Dirichlet draw share."""

    alpha: float = 0.5  # small: few classes a client

    def __post_init__(self) -> None:
        super().__post_init__()
        _number("partition.alpha", self.alpha, most=1e6)  # sums of gamma draws overflow far above


@dataclass(frozen=True, kw_only=True, eq=False)
class Partition:
    """Which client holds which rows; two partitions are the same when their digests are.

    Raises UserError when a row is given twice, does not exist, or is neither given nor counted as unused.
    """

    name: str  # of the scheme, a key of PARTITIONS
    clients: tuple[np.ndarray, ...]  # ascending row numbers int64 of each client
    rows: int  # in the data set
    seed: int
    parameters: dict[str, Any] = field(default_factory=dict)
    moved: int = 0  # rows that repair moved
    unused: int = 0  # rows that no client holds

    def __post_init__(self) -> None:
        given = np.concatenate([np.empty(0, np.int64), *self.clients])
        if len(given) and not 0 <= given.min() <= given.max() < self.rows:
            raise UserError(f"the partition names rows outside 0..{self.rows - 1}; make it again for these data")
        if len(np.unique(given)) != len(given):
            raise UserError("the partition gives a row to two clients; make it again")
        if len(given) + self.unused != self.rows:
            raise UserError(
                f"the partition gives {len(given)} of {self.rows} rows and calls {self.unused} unused; make it again"
            )

    @cached_property
    def digest(self) -> str:
        """SHA-256 over scheme, parameters, seed, counts and every client's rows."""
        head = json.dumps([self.name, self.rows, self.seed, self.parameters, self.moved, self.unused], sort_keys=True)
        return store.digest(head, *(c.astype("<i8").tobytes() for c in self.clients))

    def counts(self, labels: Sequence[int] | np.ndarray, classes: int) -> np.ndarray:
        """Rows of each class at each client, int64 [clients, classes]."""
        y = np.asarray(labels)
        return np.stack([np.bincount(y[c], minlength=classes) for c in self.clients])

    def statistics(self, labels: Sequence[int] | np.ndarray, classes: int) -> dict[str, Any]:
        """What the split looks like: numbers over all clients, and lists [clients] under "per_client".

        `synthetic_to_balance` is how many images Gen-FedSD's rule would add so that every client's classes
        are all as large as its largest; `mean_largest_class` is the mean size of the latter.
        """
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
            "per_client": {
                "size": sizes.tolist(),
                "classes": owned.tolist(),
                "largest_class": largest.tolist(),
            },
        }

    def save(self, path: Path) -> None:
        """JSON with the digest inside, written in one step."""
        body = {k: getattr(self, k) for k in ("name", "rows", "seed", "parameters", "moved", "unused", "digest")}
        store.write_text(path, json.dumps(body | {"clients": [c.tolist() for c in self.clients]}) + "\n")


def load(path: Path) -> Partition:
    """A saved partition. Raises UserError when the file is missing, unsound or does not match its digest."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        clients = tuple(np.array(c, dtype=np.int64) for c in body.pop("clients"))
        digest = body.pop("digest")
        found = Partition(clients=clients, **body)
    except FileNotFoundError:
        raise UserError(f"there is no partition file {path}") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise UserError(f"{path} is no partition file of fedprior; make it again") from None
    if found.digest != digest:
        raise UserError(f"{path} does not match its digest, so it was changed; make it again")
    return found


def partition(
    name: str,
    labels: Any,
    clients: int,
    seed: int,
    *,
    domains: Any = None,
    domain_names: Sequence[str] = (),
    **parameters: Any,
) -> Partition:
    """A partition by the scheme's name, e.g. partition("dirichlet", labels, 100, 0, alpha=0.1).

    `labels` is [n] class numbers, `domains` [n] numbers of domains (only `domains` deals by them), `domain_names`
    what the numbers mean; they are their own names where it is left out. The result is a function of the arguments
    alone. Raises UsageError for an unknown name or parameter or a value out of range, UserError when the data cannot
    be split so.
    """
    if name not in PARTITIONS:
        raise unknown("partition", name, PARTITIONS)
    known = [f.name for f in fields(PARTITIONS[name])]
    for key in parameters:
        if key not in known:
            raise unknown(f"parameter of {name}", key, known)
    return split(PARTITIONS[name](**parameters), labels, clients, seed, domains, domain_names)


def split(
    scheme: Scheme, labels: Any, clients: int, seed: int, domains: Any = None, domain_names: Sequence[str] = ()
) -> Partition:
    """A partition by a scheme of PARTITIONS; see `partition`."""
    _whole("clients", clients, 1)
    _whole("seed", seed, 0)
    y = _numbers("labels", "class", labels)
    if clients > len(y):
        raise UserError(f"clients={clients} is more than the {len(y)} rows; use fewer clients")
    name = next(n for n, cls in PARTITIONS.items() if cls is type(scheme))
    # 1 and 1.0 are the same alpha, so they have the same digest
    values = {f.name: _plain(getattr(scheme, f.name), whole=f.type is int) for f in fields(scheme)}
    groups = _draw(scheme, _columns(name, scheme, y, domains, domain_names), clients, seed)
    held, smallest = sum(map(len, groups)), min(map(len, groups))
    if scheme.min_size * clients > held or (scheme.exact and smallest < scheme.min_size):
        told = ", ".join(f"{k}={v}" for k, v in values.items())
        raise UserError(
            f"partition={name} ({told}) cannot give clients={clients} at least {scheme.min_size} rows each out of "
            f"{held}; in the best draw the smallest got {smallest}; lower partition.min_size or clients"
        )
    moved = repair(groups, scheme.min_size, seeds.stream(seed, "partition", DRAWS))
    return Partition(
        name=name,
        clients=tuple(np.sort(g).astype(np.int64) for g in groups),
        rows=len(y),
        seed=int(seed),
        parameters=values,
        moved=moved,
        unused=len(y) - held if scheme.partial else 0,
    )


def _plain(value: Any, whole: bool) -> int | float | str | None:
    if value is None or isinstance(value, str):
        return value
    return int(value) if whole else float(value)


def _columns(name: str, scheme: Scheme, labels: np.ndarray, domains: Any, names: Sequence[str]) -> Columns:
    if domains is None:
        if scheme.needs_domains:
            raise UserError(f"partition={name} needs data with a column 'domain'; choose another partition=")
        return Columns(labels, np.empty(0, np.int64), ())
    d = _numbers("domains", "domain", domains)
    if len(d) != len(labels):
        raise UserError(f"there are {len(d)} domain numbers for {len(labels)} labels; give one a row")
    known = int(d.max(initial=-1)) + 1
    if names and len(names) < known:
        raise UserError(f"domain number {known - 1} has no name among {', '.join(names)}; name them all")
    return Columns(labels, d, tuple(names) or tuple(str(i) for i in range(known)))


def _numbers(what: str, kind: str, values: Any) -> np.ndarray:
    """int64 [n]"""
    y = np.asarray(values)
    if y.ndim != 1 or (len(y) and (y.dtype.kind not in "iu" or y.min() < 0)):
        raise UserError(f"{what} must be one {kind} number 0, 1, ... a row, not {y.dtype} {list(y.shape)}")
    return y.astype(np.int64)


def _draw(scheme: Scheme, data: Columns, clients: int, seed: int) -> Groups:
    """The first of at most DRAWS draws that reaches the minimum size, else the one with the fewest rows lacking."""
    best: Groups = []
    fewest = math.inf
    for attempt in range(DRAWS):
        groups = scheme.assign(data, clients, seeds.stream(seed, "partition", attempt))
        lacking = sum(max(0, scheme.min_size - len(g)) for g in groups)
        if lacking < fewest:
            best, fewest = groups, lacking
        if not fewest:
            break
    return best


def repair(groups: Groups, least: int, rng: np.random.Generator) -> int:
    """Moves rows, in place, until every client has `least`; always from the currently largest client, any of
    its rows alike. Returns how many moved, which is the fewest possible: what was lacking."""
    sizes = np.array([len(g) for g in groups])
    starved = np.flatnonzero(sizes < least)
    if len(starved):
        # rows come class by class: without this the last class alone would move
        groups[:] = [rng.permutation(g) for g in groups]
    moved = 0
    for k in starved:
        while (lack := least - sizes[k]) > 0:
            giver = int(sizes.argmax())
            rival = int(np.partition(sizes, -2)[-2])
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
    """Shares [n] from Dir(alpha, ..., alpha)."""
    return rng.dirichlet(np.full(n, alpha))


def by_class(labels: np.ndarray, rng: np.random.Generator) -> Groups:
    """Shuffled row numbers of each class that occurs."""
    return [rng.permutation(np.flatnonzero(labels == c)) for c in np.unique(labels)]


def join(pieces: list[Groups], clients: int) -> Groups:
    """Each client's pieces of all classes together."""
    return [np.concatenate([np.empty(0, np.int64), *(p[k] for p in pieces)]) for k in range(clients)]


@dataclass(frozen=True, kw_only=True)
class Iid(Scheme):
    """Shuffled rows in pieces whose sizes differ by at most one."""

    def assign(self, data: Columns, clients: int, rng: np.random.Generator) -> Groups:
        return np.array_split(rng.permutation(len(data.labels)), clients)


@dataclass(frozen=True, kw_only=True)
class Dirichlet(_Skewed):
    """Per class: each class is cut over the clients by Dir(alpha), sizes as they come (NID1 of FedDifRC's paper)."""

    def assign(self, data: Columns, clients: int, rng: np.random.Generator) -> Groups:
        pieces = [cut(rows, dirichlet(rng, self.alpha, clients)) for rows in by_class(data.labels, rng)]
        return join(pieces, clients)


@dataclass(frozen=True, kw_only=True)
class DirichletBalanced(_Skewed):
    """Per class with a balance cap: a client that holds its equal share of rows gets none of the further classes.

    This is FedZoo-Bench's `niid-labeldir`, which Gen-FedSD used, and that of NIID-Bench and MOON. FedZoo draws
    until every client has 15 rows, which for small alpha takes forever; here repair follows after DRAWS draws.
    """

    min_size: int = 15

    def assign(self, data: Columns, clients: int, rng: np.random.Generator) -> Groups:
        return capped(by_class(data.labels, rng), clients, len(data.labels) / clients, self.alpha, rng)


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
class DirichletClient(_Skewed):
    """Per client: equal sizes, each client's class mix from Dir(alpha), renormalised over classes that are left.

    The form of Hsu et al. (2019, arXiv:1909.06335) and TensorFlow Federated.
    """

    def assign(self, data: Columns, clients: int, rng: np.random.Generator) -> Groups:
        stock = by_class(data.labels, rng)
        left = np.array([len(s) for s in stock])
        mixes = np.stack([dirichlet(rng, self.alpha, len(stock)) for _ in range(clients)])
        goals = [len(part) for part in np.array_split(data.labels, clients)]
        groups: Groups = [data.labels[:0]] * clients
        # those who choose last take what is left, so who that is falls by lot
        for k in rng.permutation(clients):
            ends = left - self.draw(mixes[k], left, goals[k], rng)
            groups[k] = np.concatenate([s[e:n] for s, e, n in zip(stock, ends, left, strict=True)])
            left = ends
        return groups

    @staticmethod
    def draw(mix: np.ndarray, left: np.ndarray, goal: int, rng: np.random.Generator) -> np.ndarray:
        """How many rows of each class: multinomial by `mix`, again over what is left until `goal` is met."""
        take = np.zeros_like(left)
        while (lack := goal - take.sum()) > 0:
            free = left - take
            q = mix * (free > 0)
            q = q / q.sum() if q.sum() > 0 else (free > 0) / (free > 0).sum()
            take = take + np.minimum(rng.multinomial(lack, q), free)
        return take


@dataclass(frozen=True, kw_only=True)
class Nid1Official(_Skewed):
    """The split of FedDifRC's released code: Dir(alpha) with a cap inside groups of `group` clients, all joined and
    cut again into equal pieces. Neighbours mix, so it is milder than `dirichlet` at the same alpha."""

    group: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        _whole("partition.group", self.group, 1)

    def assign(self, data: Columns, clients: int, rng: np.random.Generator) -> Groups:
        order: Groups = []
        for rows in np.array_split(rng.permutation(len(data.labels)), -(-clients // self.group)):
            order += self.one_group(data.labels, rows, rng)
        return np.array_split(np.concatenate(order), clients)

    def one_group(self, labels: np.ndarray, rows: np.ndarray, rng: np.random.Generator) -> Groups:
        """Drawn again, at most DRAWS times, until the smallest has half the average; else the most even draw."""
        mean = len(rows) / self.group
        classes = [rows[labels[rows] == c] for c in np.unique(labels)]
        best: Groups = []
        for _ in range(DRAWS):
            parts = capped(classes, self.group, mean, self.alpha, rng)
            if not best or min(map(len, parts)) > min(map(len, best)):
                best = parts
            if min(map(len, best)) >= mean / 2:
                break
        return best


@dataclass(frozen=True, kw_only=True)
class Nid2(Scheme):
    """Some clients hold one class each, the others all; those who hold a class share it equally.

    FedDifRC's paper does not define its NID2; this is our reading: 6 of 10 clients with one class and 4 with
    all. With another number of clients the default 6 and 4 are a proportion; other values are counts. The
    clients with one class come first.
    """

    n_single: int = 6
    n_full: int = 4

    exact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _whole("partition.n_single", self.n_single, 0)
        _whole("partition.n_full", self.n_full, 1)  # else a class could be left without a client

    def assign(self, data: Columns, clients: int, rng: np.random.Generator) -> Groups:
        single = self.singles(clients)
        stock = by_class(data.labels, rng)
        owner = rng.permutation(len(stock))[np.arange(single) % len(stock)]  # the class of each single client
        pieces: list[Groups] = []
        for c, rows in enumerate(stock):
            # the first holders get the odd rows, so the full ones take turns
            holders = [*np.flatnonzero(owner == c), *rng.permutation(np.arange(single, clients))]
            parts = dict(zip(holders, np.array_split(rows, len(holders)), strict=True))
            pieces.append([parts.get(k, rows[:0]) for k in range(clients)])
        return join(pieces, clients)

    def singles(self, clients: int) -> int:
        """How many clients hold one class."""
        both = self.n_single + self.n_full
        if (self.n_single, self.n_full) != (Nid2.n_single, Nid2.n_full) and both != clients:
            raise UsageError(
                f"partition.n_single={self.n_single} and partition.n_full={self.n_full} make {both} clients, not "
                f"clients={clients}; make them add up, or leave both out for 6 of 10"
            )
        return min(clients - 1, round(clients * self.n_single / both))


@dataclass(frozen=True, kw_only=True)
class Shards(Scheme):
    """Rows sorted by class and cut into clients x per_client shards, dealt at random (McMahan et al., 2017)."""

    per_client: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        _whole("partition.per_client", self.per_client, 1)

    def assign(self, data: Columns, clients: int, rng: np.random.Generator) -> Groups:
        order = np.concatenate(by_class(data.labels, rng))
        shards = np.array_split(order, clients * self.per_client)
        deal = rng.permutation(len(shards)).reshape(clients, self.per_client)
        return [np.concatenate([shards[i] for i in hand]) for hand in deal]


@dataclass(frozen=True, kw_only=True)
class Pathological(Scheme):
    """Exactly k classes a client; who holds a class shares it equally, and classes have as many holders each,
    give or take one. A class stays unused only where clients x k is less than the number of classes."""

    k: int = 2

    partial: ClassVar[bool] = True
    exact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _whole("partition.k", self.k, 1)

    def assign(self, data: Columns, clients: int, rng: np.random.Generator) -> Groups:
        stock = by_class(data.labels, rng)
        if self.k > len(stock):
            raise UsageError(f"partition.k={self.k} is more than the {len(stock)} classes; use at most {len(stock)}")
        holders = np.zeros(len(stock), dtype=np.int64)
        hands = []
        for _ in range(clients):
            hand = np.lexsort((rng.random(len(stock)), holders))[: self.k]  # the least held ones, ties by lot
            holders[hand] += 1
            hands.append(hand)
        for c, rows in enumerate(stock):
            if len(rows) < holders[c]:
                raise UserError(
                    f"partition=pathological with partition.k={self.k} and clients={clients} gives class "
                    f"{data.labels[rows[0]]} to {holders[c]} clients, but it has only {len(rows)} rows; lower "
                    "partition.k or clients"
                )
        pieces = [list(np.array_split(s, max(1, n))) for s, n in zip(stock, holders.tolist(), strict=True)]
        return [np.concatenate([pieces[c].pop() for c in hand]) for hand in hands]


@dataclass(frozen=True, kw_only=True)
class Quantity(_Skewed):
    """Sizes from Dir(alpha), class mix alike (NIID-Bench's quantity skew)."""

    def assign(self, data: Columns, clients: int, rng: np.random.Generator) -> Groups:
        return cut(rng.permutation(len(data.labels)), dirichlet(rng, self.alpha, clients))


@dataclass(frozen=True, kw_only=True)
class LongTail(_Skewed):
    """Class c keeps n_max x imbalance^(c / (C - 1)) rows, n_max = rows / C, C the classes that occur; then Dir(alpha)
    per class. imbalance is the smallest class over the largest, as in FedDifRC's code; 1 keeps all."""

    imbalance: float = 0.1

    partial: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _number("partition.imbalance", self.imbalance, most=1)

    def assign(self, data: Columns, clients: int, rng: np.random.Generator) -> Groups:
        classes = by_class(data.labels, rng)
        keep = long_tail(len(data.labels), len(classes), self.imbalance)
        pieces = [cut(rows[:n], dirichlet(rng, self.alpha, clients)) for rows, n in zip(classes, keep, strict=True)]
        return join(pieces, clients)


def long_tail(rows: int, classes: int, imbalance: float) -> list[int]:
    """Rows that each class keeps."""
    return [int(rows / classes * imbalance ** (c / max(1, classes - 1))) for c in range(classes)]


@dataclass(frozen=True, kw_only=True)
class Domains(Scheme):
    """Each client holds rows of one domain, dealt at random, so in the domain's own mix of classes.

    `assignment` says who: "random" gives every domain a client and draws the others' domains; "even" gives all
    domains as many clients, give or take one; counts such as "caltech10:3,amazon:2,webcam:2,dslr:3" are taken in
    this order. `fraction` is the share of its domain's rows that a client gets; None shares out all of them. This is
    the multi-domain setting of F2DC, FedDifRC's successor: 10 clients, 1 % of the digits each, Office-Caltech by the
    counts above.
    """

    assignment: str = "random"
    fraction: float | None = None

    partial: ClassVar[bool] = True
    exact: ClassVar[bool] = True
    needs_domains: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.assignment, str):
            raise UsageError(f"partition.assignment must be a text such as random, not {self.assignment}")
        if self.fraction is not None:
            _number("partition.fraction", self.fraction, most=1)

    def assign(self, data: Columns, clients: int, rng: np.random.Generator) -> Groups:
        owners = self.owners(data, clients, rng)
        groups: Groups = [data.domains[:0]] * clients
        for d in np.unique(owners):
            rows, holders = rng.permutation(np.flatnonzero(data.domains == d)), np.flatnonzero(owners == d)
            for k, part in zip(holders, self.cut(rows, len(holders), data.names[d]), strict=True):
                groups[k] = part
        return groups

    def owners(self, data: Columns, clients: int, rng: np.random.Generator) -> np.ndarray:
        """The domain of each client, int64 [clients]; only domains that have rows."""
        present = np.unique(data.domains)
        if clients < len(present):
            names = ", ".join(data.names[d] for d in present)
            raise UsageError(
                f"clients={clients} is less than the {len(present)} domains ({names}), which need a client each; "
                "raise clients"
            )
        if self.assignment == "random":
            return rng.permutation(np.concatenate([present, rng.choice(present, clients - len(present))]))
        if self.assignment == "even":
            return np.sort(rng.permutation(present)[np.arange(clients) % len(present)])  # who gets one more: by lot
        number = {data.names[d]: d for d in present}
        counts = self.counts(sorted(number))
        if sum(counts.values()) != clients:
            raise UsageError(
                f"partition.assignment={self.assignment} makes {sum(counts.values())} clients, not clients={clients}; "
                "make them agree"
            )
        return np.array([number[name] for name, n in counts.items() for _ in range(n)])

    def counts(self, names: Sequence[str]) -> dict[str, int]:
        """The clients of each domain, as written."""
        out: dict[str, int] = {}
        example = ",".join(f"{name}:2" for name in names)
        for word in self.assignment.split(","):
            name, _, count = (part.strip() for part in word.rpartition(":"))
            if not name:
                raise UsageError(
                    f"partition.assignment={self.assignment} is neither random nor even nor counts of clients; "
                    f"write for example {example}"
                )
            if name not in names:
                raise unknown("domain in partition.assignment", name, names)
            if name in out or not count.isdecimal() or int(count) < 1:
                raise UsageError(
                    f"partition.assignment={self.assignment} does not give '{name}' one number of clients of at least "
                    f"1; write for example {example}"
                )
            out[name] = int(count)
        if absent := [name for name in names if name not in out]:
            raise UsageError(
                f"partition.assignment={self.assignment} leaves out {', '.join(absent)}; name every domain, for "
                f"example {example}"
            )
        return out

    def cut(self, rows: np.ndarray, holders: int, name: str) -> Groups:
        """The shuffled rows of a domain, for those who hold it."""
        if self.fraction is None:
            return np.array_split(rows, holders)
        if self.fraction * holders > 1 + SLACK:
            raise UsageError(
                f"partition.fraction={self.fraction:g} for each of {holders} clients is more than all rows of domain "
                f"'{name}'; use at most {math.floor(1000 / holders) / 1000:g}, or fewer clients"
            )
        each = min(int(self.fraction * len(rows) + SLACK), len(rows) // holders)
        if not each:
            raise UserError(
                f"partition.fraction={self.fraction:g} of the {len(rows)} rows of domain '{name}' is less than one "
                f"row for each of {holders} clients; raise it or lower clients"
            )
        return [rows[k * each : (k + 1) * each] for k in range(holders)]


@dataclass(frozen=True, kw_only=True)
class Sites(Scheme):
    """Each client is a node with data of its own: nothing is split, and the server holds nothing but test rows."""

    def assign(self, data: Columns, clients: int, rng: np.random.Generator) -> Groups:
        raise UsageError(
            "with partition=sites each client's data lie at a node of its own; run it with `fedprior flower run`, or "
            "name another partition to split the data here"
        )

    def of(self, clients: int, seed: int) -> Partition:
        """What a server knows of it."""
        return Partition(name="sites", clients=(np.empty(0, np.int64),) * clients, rows=0, seed=seed)


PARTITIONS: dict[str, Any] = {  # classes of Scheme; their parameters differ, so no type says more
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
    "domains": Domains,
    "sites": Sites,
}
