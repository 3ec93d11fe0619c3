"""A sweep's directory: what it holds, whether an experiment's run belongs to it, and how it stands."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from . import resume, store
from .config import Experiment, from_toml
from .errors import UsageError, UserError
from .progress import clean
from .record import status
from .sweep import Axis, Cell, Sweep, key_of

SCHEMA_VERSION = 1
BASE = "base.toml"  # a copy of the settings file that a sweep begins with, so that it needs no other
HARMLESS = {*resume.FREE} - {"rounds", "target", "evaluate_every", "block", "compile"}
"""Keys that change no number of a cell, but for engine=vectorised."""


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
            Axis(name=_text(axis["name"]), values={k: tuple(map(_text, v)) for k, v in axis["values"].items()})
            for axis in part
        )
        if said["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"its schema_version is {said['schema_version']}, and this version knows {SCHEMA_VERSION}")
        if any(type(seed) is not int or seed < 0 for seed in said["seeds"]):
            raise ValueError("its seeds are no whole numbers")
        if not isinstance(said["base"], list):
            raise ValueError("its base is no list")
        base = list(map(_text, said["base"]))
        if base[:1] == [BASE]:
            base[0] = str(folder / BASE)
            if not Path(base[0]).exists():
                raise ValueError(f"it goes with {BASE}, which is gone")
        return Sweep(
            name=said["name"],
            base=tuple(base),
            rows=axes(said["rows"]),
            columns=axes(said["columns"]),
            seeds=tuple(said["seeds"]),
            table=_text(said["table"]),
            scale=_text(said["scale"]),
        )
    except FileNotFoundError:
        raise UserError(f"{folder} is no sweep (it has no sweep.json); name one such as sweeps/NAME") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UsageError) as error:
        raise UserError(f"{path} cannot be read ({clean(error)}); begin the sweep anew under another name=") from None


def _text(value: object) -> str:
    """Raises ValueError for what is no text."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r} should be text")
    return value


def reserve(sweep: Sweep, folder: Path) -> None:
    """Makes the directory, or checks that it holds this sweep. More seeds may come to one that is there, and keys that
    change no number may change.

    Raises UserError for another sweep, and UsageError for a cell that is no experiment: before any is run.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; choose another name= or --sweeps")
    vet(merged(sweep, folder), folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / f".{folder.name}.lock"):  # two that bring seeds at once both keep theirs
            sweep = merged(sweep, folder)
            file = settings(sweep)
            if file is not None and file != folder / BASE and not (folder / "sweep.json").exists():
                store.write_text(folder / BASE, file.read_text(encoding="utf-8"))
                file = folder / BASE
            base = (BASE, *sweep.base[1:]) if file == folder / BASE else sweep.base
            store.write_json(folder / "sweep.json", describe(replace(sweep, base=base)))
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({error}); choose another --sweeps") from None


def merged(sweep: Sweep, folder: Path) -> Sweep:
    """The sweep with the seeds of the one that the directory holds, if any. Raises UserError for another sweep."""
    if (folder / "sweep.json").exists():
        there = load(folder)
        if unlike := difference(there, sweep):
            raise UserError(
                f"{folder} holds another sweep ({unlike}); choose another name=, or `fedprior sweep {folder}` for that "
                "one"
            )
        base = (there.base[0], *sweep.base[1:]) if settings(sweep) else sweep.base
        return replace(sweep, base=base, seeds=tuple(dict.fromkeys([*there.seeds, *sweep.seeds])))
    if folder.exists() and any(path.suffix != ".tmp" and path.name != BASE for path in folder.iterdir()):
        raise UserError(f"{folder} is not empty and no sweep; choose another name=")  # else it was killed just now
    return sweep


def settings(sweep: Sweep) -> Path | None:
    """The file that the sweep's first word names, if it names one."""
    from .recipes import settings_file

    return settings_file(sweep.base[0]) if sweep.base and "=" not in sweep.base[0] else None


def difference(there: Sweep, here: Sweep) -> str:
    """In which settings two sweeps differ, in words; "" where in none. Seeds, harmless keys and what is said of the
    scale are no settings."""
    old, new = settings(there), settings(here)
    if old is not None and new is not None:
        changed = harmful(resume.changes(from_toml(old), from_toml(new)))
        if changed := {key: values for key, values in changed.items() if key != "seed"}:
            return f"{new} has changed: {told(changed)}"
    lasting = lambda s: [w for w in s.base[1 if settings(s) else 0 :] if harmful({key_of(w): (w.partition("=")[2],)})]
    axes = lambda s: [f"{axis.name}: {', '.join(axis.values)}" for axis in (*s.rows, *s.columns)]
    for before, after in ((lasting(there), lasting(here)), (axes(there), axes(here))):
        if before != after:
            only = lambda one, other: ", ".join(word for word in one if word not in other) or "nothing else"
            return f"{only(before, after)} there, {only(after, before)} here"
    if (there.rows, there.columns, there.table) != (here.rows, here.columns, here.table):
        return "rows and columns are not those"
    return "" if (old is None) == (new is None) else "another recipe or file"


def harmful(changed: dict[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    """Of changed keys and their values, those that change a number. The engines in processes or one after another come
    to the same bits, engine=vectorised comes to others (docs/engines.md)."""
    vectorised = lambda key, values: key == "engine" and "vectorised" in values
    return {key: values for key, values in changed.items() if key not in HARMLESS or vectorised(key, values)}


def told(changed: dict[str, tuple[Any, ...]]) -> str:
    """E.g. "rounds: 6 there, 8 here"."""
    return "; ".join(f"{key}: {old} there, {new} here" for key, (old, new) in changed.items())


def vet(sweep: Sweep, folder: Path) -> None:
    """Raises UsageError for a cell that is no experiment or the same as another, UserError for one that was run with
    other settings: where the recipe or something else that a sweep does not hold itself has changed since."""
    seen: dict[str, str] = {}
    for cell in sweep.cells():
        try:
            experiment = sweep.experiment(cell)
        except UsageError as error:
            raise UsageError(f"{cell.name}: {error}") from None
        twin = seen.setdefault(repr(replace(experiment, name="")), cell.name)
        if twin != cell.name and not sweep.table:  # a paper may list one setting twice
            elsewhere = "; keys that mean nothing in some rows vary along rows, not --columns" if sweep.columns else ""
            raise UsageError(
                f"{twin} and {cell.name} are one experiment; leave out what makes no difference{elsewhere}"
            )
        run = folder / "cells" / cell.name
        if (run / "config.toml").exists() and (changed := since(run, experiment)):
            raise UserError(
                f"{run} was made with other settings ({told(changed)}), so its numbers do not belong to this sweep; "
                "choose another name= for a sweep of its own, or remove that directory to have it made again"
            )


def since(run: Path, experiment: Experiment) -> dict[str, tuple[Any, ...]]:
    """What has changed since a run was made; nothing where its settings cannot be read, which `damage` says."""
    try:
        return harmful({**resume.changes(from_toml(run / "config.toml"), experiment)})
    except (UserError, OSError):
        return {}


def done(folder: Path, cell: Cell) -> bool:
    """Whether a cell has its results."""
    run = folder / "cells" / cell.name
    return status(run) == "done" and (run / "result.json").exists() and reason(folder, cell) is None


def reason(folder: Path, cell: Cell) -> str | None:
    """Why a cell failed; None where it did not."""
    path = folder / "failed" / f"{cell.name}.txt"
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"failed, and {path} cannot be read ({error})"
    return lines[0] if lines else "failed; nothing was noted of why"


def damage(run: Path) -> str | None:
    """What of a finished run's directory cannot be read; None where all can."""
    from .report import load as reading

    try:
        from_toml(run / "config.toml")
        resume.result(run)
        reading.arm("", [run])
        store.read_json(run / "manifest.json")
    except Exception as error:  # whatever a torn file brings about in whichever library reads it
        return f"its files are damaged ({clean(error, 200)}); remove {run} and run the same command"
    return None


def note(folder: Path, name: str, text: str) -> None:
    """Says of a cell why it failed. Raises UserError where even that cannot be written."""
    try:
        store.write_text(folder / "failed" / f"{name}.txt", text)
    except OSError as error:
        why = clean(text.partition("\n")[0], 200)
        raise UserError(
            f"cannot write to {folder} ({error}) that {name} failed ({why}); mend that, and the same command goes on"
        ) from None


class Tally(NamedTuple):
    """How a sweep stands."""

    done: int
    failed: dict[str, str]  # cell -> why
    cells: int


def tally(sweep: Sweep, folder: Path) -> Tally:
    """How many cells are done, and which failed and why."""
    cells = sweep.cells()
    failed = {cell.name: why for cell in cells if (why := reason(folder, cell)) is not None}
    return Tally(sum(done(folder, cell) for cell in cells), failed, len(cells))
