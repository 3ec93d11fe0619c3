"""A grid of experiments: what its cells are. What is on disk stands in `sweep_folder`, how cells run in `sweep_run`."""

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from . import store
from .config import Experiment, check_name, from_toml, takes
from .errors import UsageError, UserError

LISTS = (
    *("guide.levels", "guide.components", "guide.template", "prior.lora", "partition.assignment", "track", "data.path"),
    *("balance.target", "balance.names", "balance.domain_words"),
)
"""Keys whose values have commas; their values are told apart by semicolons."""

NOTHING = "–"  # the label of a row on an axis that means nothing there
LONGEST = 180  # bytes of a cell's name, to which the names of other files add


@dataclass(frozen=True, kw_only=True)
class Axis:
    """What varies: labels, and the words that each stands for."""

    name: str
    values: Mapping[str, tuple[str, ...]]


class Cell(NamedTuple):
    """One experiment of a sweep."""

    name: str  # of its run directory
    row: tuple[str, ...]
    column: tuple[str, ...]
    seed: int
    words: tuple[str, ...]


class Combination(NamedTuple):
    """What the cells of all seeds share."""

    row: tuple[str, ...]
    column: tuple[str, ...]
    words: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """`base` are the words of every cell, the first of them a recipe, a file or nothing of the kind. A table has a row
    for each combination of `rows` and a column for each of `columns`; a number in it is a mean over `seeds`.

    A word such as balance.cap=3 is left out of cells where it has no meaning (balance=none), as long as it has one in
    others. Rows that then say the same are one, whose label on such an axis is `NOTHING`; and so are columns, where
    the word has no meaning in any row of them.
    """

    name: str
    base: tuple[str, ...]
    rows: tuple[Axis, ...]
    columns: tuple[Axis, ...] = ()
    seeds: tuple[int, ...] = (0,)
    table: str = ""  # of a paper, a key of sweeps.PUBLISHED
    scale: str = ""  # what is smaller than in the paper, in words

    def __post_init__(self) -> None:
        check_name(self.name)
        names = [axis.name for axis in (*self.rows, *self.columns)]
        if twice := [name for name in names if names.count(name) > 1 or any(name in a.values for a in self.columns)]:
            raise UsageError(f"'{twice[0]}' is the name of an axis and of something else; a table needs it once")
        if not self.rows and not self.columns:
            raise UsageError("nothing varies; give a key several values, such as method=fedavg,scaffold")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise UsageError(f"seed= must be different whole numbers, not {','.join(map(str, self.seeds))}")

    def cells(self) -> list[Cell]:
        """Seed by seed, so that a sweep that is stopped early has whole tables of few seeds."""
        names = directories([(*c.row, *c.column) for c in self.combinations])
        return [
            Cell(f"{name}-seed{seed}", c.row, c.column, seed, (*c.words, f"seed={seed}"))
            for seed in self.seeds
            for name, c in zip(names, self.combinations, strict=True)
        ]

    @cached_property
    def combinations(self) -> list[Combination]:
        """What varies over rows and columns, each once."""
        axes = (*self.rows, *self.columns)
        labels = list(itertools.product(*(axis.values for axis in axes)))
        said = [[axis.values[label] for axis, label in zip(axes, own, strict=True)] for own in labels]
        words = [(*self.base, *(word for part in parts for word in part)) for parts in said]
        unused = idle(words)
        off = [[bool(part) and none >= set(part) for part in parts] for parts, none in zip(said, unused, strict=True)]
        n = len(self.rows)
        never: dict[tuple[str, ...], list[bool]] = {}  # by column, whether its axes mean nothing in any row
        for own, mine in zip(labels, off, strict=True):
            before = never.get(own[n:], [True] * len(self.columns))
            never[own[n:]] = [a and b for a, b in zip(before, mine[n:], strict=True)]
        out: dict[tuple[tuple[str, ...], tuple[str, ...]], Combination] = {}
        for own, mine, given, none in zip(labels, off, words, unused, strict=True):
            shown = [NOTHING if empty else x for x, empty in zip(own, mine[:n] + never[own[n:]], strict=True)]
            row, column = tuple(shown[:n]), tuple(shown[n:])
            kept = tuple(word for word in given if word not in none)
            out.setdefault((row, column), Combination(row, column, kept))
        return list(out.values())

    def experiment(self, cell: Cell) -> Experiment:
        """Raises UsageError for words that mean nothing, or nothing together."""
        from .recipes import spoken

        return replace(spoken(cell.words), name=cell.name)


def idle(cells: Sequence[Sequence[str]]) -> list[set[str]]:
    """For each cell, those of its words that mean nothing beside the others, but do in some other cell: balance.cap=3
    where balance=none, say. A word without a meaning anywhere is not among them, so that a slip shows."""
    from .recipes import spoken

    dotted = [{word for word in words if "=" in word and "." in key_of(word)} for words in cells]
    meant: list[set[str]] = []
    for words, inner in zip(cells, dotted, strict=True):
        try:
            plain = spoken([word for word in words if word not in inner])
            meant.append({word for word in inner if takes(plain, key_of(word))})
        except UserError:  # it makes sense with all its words, or never
            meant.append(inner)
    used = {key_of(word) for words in meant for word in words}
    return [{w for w in inner - own if key_of(w) in used} for inner, own in zip(dotted, meant, strict=True)]


def key_of(word: str) -> str:
    """The key of a word such as "memory-MB=9", as experiments write it."""
    return word.partition("=")[0].strip().replace("-", "_")


def directories(labels: Sequence[Sequence[str]]) -> list[str]:
    """A name for each combination of labels: the labels, with a few letters of a digest where they are too long or
    would be another's."""
    plain = ["-".join(slug(label) for label in own if label != NOTHING) or "_" for own in labels]
    often = Counter(name.casefold() for name in plain)  # some disks do not tell A from a
    out = []
    for name, own in zip(plain, labels, strict=True):
        if often[name.casefold()] > 1 or len(name.encode()) > LONGEST:
            cut = name.encode()[: LONGEST // 2].decode(errors="ignore")
            name = f"{cut}-{store.digest(*own)[:8]}"
        out.append(name)
    return out


def slug(text: str) -> str:
    """A label as part of a directory's name."""
    return re.sub(r"[^\w.+-]+", "_", text).strip("_.") or "_"


def grid(words: Sequence[str], columns: Sequence[str] = (), name: str = "") -> Sweep:
    """A sweep from words some of which have several values: `method=fedavg,scaffold seed=0,1,2`. Values of a key that
    has commas itself are told apart by semicolons. `columns` are the keys that vary along a table's columns; by default
    those of the partition, where others vary too. The seed is 0, or a settings file's own, where no word gives any."""
    base: list[str] = []
    axes: list[Axis] = []
    seeds: tuple[int, ...] = ()
    for word in words:
        key, equals, text = (part.strip() for part in word.partition("="))
        if key_of(word) in {key_of(axis.name) for axis in axes} or (key == "seed" and seeds):
            raise UsageError(f"{key}= has several values already; give all of them in one word")
        values = several(key, text) if equals else [text]
        if key == "name":
            name = text
        elif key == "seed":
            seeds = tuple(map(whole, values))
        elif len(values) < 2:
            base.append(word)
        else:
            axes.append(Axis(name=key, values={value: (f"{key}={value}",) for value in values}))
    known = [axis.name for axis in axes]
    if strange := [key for key in columns if key not in known]:
        raise UsageError(f"--columns {strange[0]}: that key has one value; those with several are {', '.join(known)}")
    along = list(columns) or [key for key in known if key.partition(".")[0] == "partition"]
    if len(along) == len(known) and not columns:
        along = []
    rows = tuple(axis for axis in axes if axis.name not in along)
    across = tuple(headed(axis) for axis in axes if axis.name in along)
    first = base[0] if base and "=" not in base[0] else "digits"
    seeds = seeds or (own_seed(first),)
    name = name or "-".join([slug(Path(first).stem if first.endswith(".toml") else first), *map(slug, known)])
    return Sweep(name=name, base=tuple(base), rows=rows, columns=across, seeds=seeds)


def own_seed(source: str) -> int:
    """The seed that a settings file or a run directory says; 0 for a recipe."""
    from .recipes import settings_file

    path = settings_file(source)
    return from_toml(path).seed if path else 0


def headed(axis: Axis) -> Axis:
    """The axis with labels that say what they are values of, for the head of a column."""
    leaf = axis.name.rpartition(".")[2]
    return Axis(name=axis.name, values={f"{leaf}={label}": words for label, words in axis.values.items()})


def several(key: str, text: str) -> list[str]:
    """The values in a word."""
    mark = ";" if ";" in text or key_of(key) in LISTS else ","
    values = [value.strip() for value in text.split(mark)]
    if len(values) > 1 and ("" in values or len(set(values)) < len(values)):
        raise UsageError(f"{key}={text} has an empty value or one that comes twice")
    return values


def whole(text: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"seed must be whole numbers of at least 0, not '{text}'")
    return int(text)
