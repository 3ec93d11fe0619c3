"""A grid of experiments: every cell is a run directory, so a sweep that was stopped goes on where it stopped."""

import itertools
import os
import re
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from . import store
from .config import OPTIONAL, Experiment
from .errors import UsageError, UserError
from .progress import Progress, Silent
from .record import status

SCHEMA_VERSION = 1
LISTS = ("guide.levels", "guide.components", "prior.lora", "balance.target", "partition.assignment")
"""Keys whose values have commas; their values are told apart by semicolons."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """What varies: labels, and the words that each stands for."""

    name: str
    values: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """`base` are the words of every cell, the first of them a recipe, a file or nothing of the kind. A table has a row
    for each combination of `rows` and a column for each of `columns`; a number in it is a mean over `seeds`."""

    name: str
    base: tuple[str, ...]
    rows: tuple[Axis, ...]
    columns: tuple[Axis, ...] = ()
    seeds: tuple[int, ...] = (0,)
    table: str = ""  # of a paper, a key of sweeps.PUBLISHED
    scale: str = ""  # what is smaller than in the paper, in words

    def __post_init__(self) -> None:
        if not self.rows and not self.columns:
            raise UsageError("nothing varies; give a key several values, such as method=fedavg,scaffold")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise UsageError(f"seed= must be different whole numbers, not {','.join(map(str, self.seeds))}")
        names = [cell.name for cell in self.cells()]
        if twice := {name for name in names if names.count(name) > 1}:
            raise UsageError(f"two cells would be called {min(twice)}; give values that differ")

    def cells(self) -> list["Cell"]:
        """Seed by seed, so that a sweep that is stopped early has whole tables of few seeds."""
        out = []
        for seed in self.seeds:
            for labels in itertools.product(*(axis.values for axis in (*self.rows, *self.columns))):
                values = zip((*self.rows, *self.columns), labels, strict=True)
                words = [word for axis, label in values for word in axis.values[label]]
                name = "-".join([*map(slug, labels), f"seed{seed}"])
                row, column = labels[: len(self.rows)], labels[len(self.rows) :]
                out.append(Cell(name, row, column, seed, (*self.base, *words, f"seed={seed}")))
        return out

    def experiment(self, cell: "Cell") -> Experiment:
        """Raises UsageError for words that mean nothing, or nothing together."""
        from .recipes import spoken

        return replace(spoken(fitting(cell.words)), name=cell.name)


def fitting(words: Sequence[str]) -> list[str]:
    """Without the words that have no meaning in this cell: of a balance, guide or prior that is none here."""
    off = {head for head in OPTIONAL if [w for w in words if w.partition("=")[0] == head][-1:] == [f"{head}=none"]}
    return [word for word in words if word.partition(".")[0] not in off or "." not in word.partition("=")[0]]


class Cell(NamedTuple):
    """One experiment of a sweep."""

    name: str  # of its run directory
    row: tuple[str, ...]
    column: tuple[str, ...]
    seed: int
    words: tuple[str, ...]


def slug(text: str) -> str:
    """A label as part of a directory's name."""
    return re.sub(r"[^\w.+-]+", "_", text).strip("_.") or "_"


def grid(words: Sequence[str], columns: Sequence[str] = (), name: str = "") -> Sweep:
    """A sweep from words some of which have several values: `method=fedavg,scaffold seed=0,1,2`. Values of a key that
    has commas itself are told apart by semicolons. `columns` are the keys that vary along a table's columns; by default
    those of the partition, where others vary too."""
    base: list[str] = []
    axes: list[Axis] = []
    seeds: tuple[int, ...] = (0,)
    for word in words:
        key, equals, text = word.partition("=")
        if key.replace("-", "_") in {axis.name.replace("-", "_") for axis in axes}:
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
    name = name or "-".join([slug(Path(first).stem if first.endswith(".toml") else first), *map(slug, known)])
    return Sweep(name=name, base=tuple(base), rows=rows, columns=across, seeds=seeds)


def headed(axis: Axis) -> Axis:
    """The axis with labels that say what they are values of, for the head of a column."""
    leaf = axis.name.rpartition(".")[2]
    return Axis(name=axis.name, values={f"{leaf}={label}": words for label, words in axis.values.items()})


def several(key: str, text: str) -> list[str]:
    """The values in a word."""
    mark = ";" if ";" in text or key in LISTS else ","
    values = [value.strip() for value in text.split(mark)]
    if len(values) > 1 and ("" in values or len(set(values)) < len(values)):
        raise UsageError(f"{key}={text} has an empty value or one that comes twice")
    return values


def whole(text: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"seed must be whole numbers of at least 0, not '{text}'")
    return int(text)


# on disk


def describe(sweep: Sweep) -> dict[str, Any]:
    """As JSON values."""
    axes = lambda part: [{"name": axis.name, "values": {k: list(v) for k, v in axis.values.items()}} for axis in part]
    return {
        "schema_version": SCHEMA_VERSION,
        "name": sweep.name,
        "base": list(sweep.base),
        "rows": axes(sweep.rows),
        "columns": axes(sweep.columns),
        "seeds": list(sweep.seeds),
        "table": sweep.table,
        "scale": sweep.scale,
    }


def load(folder: Path) -> Sweep:
    """The sweep of a directory. Raises UserError where there is none."""
    path = folder / "sweep.json"
    try:
        said = store.read_json(path)
        axes = lambda part: tuple(
            Axis(name=axis["name"], values={k: tuple(v) for k, v in axis["values"].items()}) for axis in part
        )
        return Sweep(
            name=said["name"],
            base=tuple(said["base"]),
            rows=axes(said["rows"]),
            columns=axes(said["columns"]),
            seeds=tuple(said["seeds"]),
            table=said["table"],
            scale=said["scale"],
        )
    except FileNotFoundError:
        raise UserError(f"{folder} is no sweep (it has no sweep.json); name one such as sweeps/NAME") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} cannot be read ({error!r}); begin the sweep anew under another name=") from None


def reserve(sweep: Sweep, folder: Path) -> None:
    """Makes the directory, or checks that it holds this sweep. More seeds may come to one that is there.

    Raises UserError for another sweep, and UsageError for a cell that is no experiment: before any is run.
    """
    for cell in sweep.cells():
        try:
            sweep.experiment(cell)
        except UsageError as error:
            raise UsageError(f"{cell.name}: {error}") from None
    if (folder / "sweep.json").exists():
        there = load(folder)
        if replace(there, seeds=sweep.seeds, scale=sweep.scale) != sweep:  # its words are no setting
            raise UserError(
                f"{folder} holds another sweep; choose another name=, or `fedprior sweep {folder}` for that one"
            )
        both = tuple(dict.fromkeys([*there.seeds, *sweep.seeds]))
        sweep = replace(sweep, seeds=both)
    elif folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty and no sweep; choose another name=")
    try:
        store.write_json(folder / "sweep.json", describe(sweep))
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({error}); choose another --sweeps") from None


def done(folder: Path, cell: Cell) -> bool:
    run = folder / "cells" / cell.name
    return status(run) == "done" and (run / "result.json").exists()


def reason(folder: Path, cell: Cell) -> str | None:
    """Why a cell failed; None where it did not."""
    path = folder / "failed" / f"{cell.name}.txt"
    return path.read_text(encoding="utf-8").splitlines()[0] if path.exists() else None


# running


class Tally(NamedTuple):
    """How a sweep stands."""

    done: int
    failed: dict[str, str]  # cell -> why
    cells: int


def tally(sweep: Sweep, folder: Path) -> Tally:
    cells = sweep.cells()
    finished = [cell for cell in cells if done(folder, cell)]
    failed = {c.name: why for c in cells if c not in finished and (why := reason(folder, c)) is not None}
    return Tally(len(finished), failed, len(cells))


def carry_out(folder: Path, workers: int, progress: Progress) -> Tally:
    """Runs the cells that are not done, in this process or in `workers` of them. A cell that fails is noted in
    failed/NAME.txt and does not stop the others; the next call tries it again."""
    sweep = load(folder)
    for path in (folder / "failed").glob("*.txt"):
        path.unlink()
    cells = sweep.cells()
    before = sum(done(folder, cell) for cell in cells)
    with progress.task(f"cells of {sweep.name}", len(cells), before) as update:

        def told(name: str) -> None:
            now = tally(sweep, folder)
            note = f"{len(now.failed)} failed, " if now.failed else ""
            update(now.done + len(now.failed), f"{note}last {name}")

        if workers == 1:
            for name in work(folder):
                told(name)
        else:
            for name in hired(folder, workers):
                told(name)
    return tally(sweep, folder)


def work(folder: Path, alone: bool = True, begin: Callable[[str], None] = lambda name: None) -> Iterator[str]:
    """Runs cells that nobody runs or has run -> the name of each when it ends. Several processes may do so at once;
    `alone` says that this is the only one on the machine."""
    sweep = load(folder)
    (folder / "cells").mkdir(parents=True, exist_ok=True)
    for cell in sweep.cells():
        if settled(folder, cell):
            continue
        try:
            with FileLock(folder / "cells" / f".{cell.name}.lock", timeout=0):
                if settled(folder, cell):  # another process was quicker
                    continue
                begin(cell.name)
                attempt(sweep, cell, folder, alone)
                yield cell.name
        except Timeout:
            continue


def settled(folder: Path, cell: Cell) -> bool:
    """Whether a cell is done or has failed."""
    return done(folder, cell) or reason(folder, cell) is not None


def attempt(sweep: Sweep, cell: Cell, folder: Path, alone: bool) -> None:
    from .run import run

    try:
        experiment = sweep.experiment(cell)
        if not alone and experiment.engine == "auto":  # each process has a core of its own and no more
            experiment = replace(experiment, engine="serial")
        run(experiment, folder / "cells", Silent(), report=False)
    except Exception as error:
        line = " ".join(str(error).split()) or type(error).__name__
        line = line if isinstance(error, UserError) else f"{type(error).__name__}: {line}"
        note(folder, cell.name, f"{line}\n{traceback.format_exc()}")


def note(folder: Path, name: str, text: str) -> None:
    store.write_text(folder / "failed" / f"{name}.txt", text)


def hired(folder: Path, workers: int) -> Iterator[str]:
    """Cells as they end in worker processes. One that dies takes its cell with it, and another takes its place."""
    running: dict[subprocess.Popen[str], threading.Thread] = {}
    ended: list[str] = []
    at: dict[int, str] = {}  # by process id, the cell that it is at

    def listen(child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            word, _, name = line.rstrip("\n").partition(" ")
            if word == "begin":
                at[child.pid] = name
            elif word == "end":
                at.pop(child.pid, None)
                ended.append(name)

    def hire() -> None:
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", "import sys; from fedprior.sweep import main; main(sys.argv[1])", str(folder)],
            stdin=subprocess.PIPE,  # nothing comes; its end tells that this process is gone
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
        )
        running[child] = threading.Thread(target=listen, args=(child,), daemon=True)
        running[child].start()

    try:
        for _ in range(workers):
            hire()
        while running:
            time.sleep(0.2)
            for child in [child for child in running if child.poll() is not None]:
                running.pop(child).join(timeout=5)
                if child.returncode and (name := at.pop(child.pid, "")):
                    note(folder, name, f"its process ended with code {child.returncode} (out of memory?)\n")
                    ended.append(name)
                    hire()
                elif child.returncode:
                    raise UserError(f"a worker of the sweep ended with code {child.returncode} before its first cell")
            while ended:
                yield ended.pop(0)
    finally:
        for child in running:
            child.terminate()
        for child in running:
            child.wait()


def main(folder: str) -> None:
    """A worker process: says which cell begins and ends. It ends when the process that started it does, however."""

    def watch() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    out = sys.stdout
    sys.stdout = sys.stderr  # whatever prints must not stand between
    for name in work(Path(folder), alone=False, begin=lambda name: print("begin", name, file=out, flush=True)):
        print("end", name, file=out, flush=True)
