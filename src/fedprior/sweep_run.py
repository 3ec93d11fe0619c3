"""A sweep on disk, and its cells in one process or several. Every cell is a run directory, so that a sweep that was
stopped goes on where it stopped."""

import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from . import resume, store
from .config import Experiment, from_toml
from .errors import UsageError, UserError
from .progress import Progress, Silent, clean
from .record import status
from .sweep import Axis, Cell, Sweep, key_of

SCHEMA_VERSION = 1
BASE = "base.toml"  # a copy of the settings file that a sweep begins with, so that it needs no other
HARMLESS = {*resume.FREE} - {"rounds", "target", "evaluate_every", "block", "compile"}
"""Keys that change no number of a cell, but for engine=vectorised."""
CHILD = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"  # at once: importing torch takes a while
    "import sys; from fedprior.sweep_run import main; main(sys.argv[1])"
)
"""What a worker process runs. Ctrl-C comes to it too, but who started it decides when to end."""
PATIENCE = 1.0  # seconds between two looks at cells that another process is at


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


# running


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


def carry_out(folder: Path, workers: int, progress: Progress) -> Tally:
    """Runs the cells that are not done, in this process or in `workers` of them. A cell that fails is noted in
    failed/NAME.txt and does not stop the others; the next call tries it again. Cells that another call is at are
    waited for, and taken over when that call ends without them."""
    sweep = load(folder)
    vet(sweep, folder)
    try:
        return _carry_out(sweep, folder, workers, progress)
    except OSError as error:  # of the sweep's own files; a cell's are its own affair
        raise UserError(f"{folder}: {error}; mend that, and the same command goes on") from None


def _carry_out(sweep: Sweep, folder: Path, workers: int, progress: Progress) -> Tally:
    for path in (folder / "failed").glob("*.txt"):
        path.unlink(missing_ok=True)
    cells = sweep.cells()
    for cell in cells:
        if done(folder, cell) and (why := damage(folder / "cells" / cell.name)):
            note(folder, cell.name, f"{why}\n")
    left = [cell for cell in cells if not settled(folder, cell)]
    workers = min(workers, max(len(left), 1))
    before = sum(done(folder, cell) for cell in cells)
    in_ = f" in {workers} processes" if workers > 1 else ""
    progress.say(f"{folder}: {len(cells)} cells, {before} of them done; {len(left)} to run{in_}")
    with progress.task(f"cells of {sweep.name}", len(cells), before) as update:

        def tell(name: str) -> None:
            now = tally(sweep, folder)
            failed = f"{len(now.failed)} failed, " if now.failed else ""
            update(now.done + len(now.failed), f"{failed}last {name}")

        while left:
            for name in work(folder) if workers == 1 else hired(folder, workers):
                tell(name)
            known = set(load(folder).cells())  # somebody may have changed the sweep; such cells are nobody's
            if left := [cell for cell in left if cell in known and not settled(folder, cell)]:
                are = "1 cell is" if len(left) == 1 else f"{len(left)} cells are"
                progress.say(f"{are} at another process, which is waited for")
            while left and not any(free(folder, cell) for cell in left):
                time.sleep(PATIENCE)
                for cell in [cell for cell in left if settled(folder, cell)]:
                    left.remove(cell)
                    tell(cell.name)
    return tally(sweep, folder)


def lock_of(folder: Path, cell: Cell) -> FileLock:
    """Whoever holds it is at the cell."""
    return FileLock(folder / "cells" / f".{cell.name}.lock", timeout=0)


def free(folder: Path, cell: Cell) -> bool:
    """Whether nobody is at a cell."""
    try:
        with lock_of(folder, cell):
            return True
    except Timeout:
        return False


def work(folder: Path, alone: bool = True, begin: Callable[[str], None] = lambda name: None) -> Iterator[str]:
    """Runs cells that nobody runs or has run -> the name of each when it ends. Several processes may do so at once;
    `alone` says that this is the only one on the machine."""
    sweep = load(folder)
    (folder / "cells").mkdir(parents=True, exist_ok=True)
    for cell in sweep.cells():
        if settled(folder, cell):
            continue
        try:
            with lock_of(folder, cell):
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
            experiment = replace(experiment, workers=1)
        run(experiment, folder / "cells", Silent(), report=False)
    except Exception as error:
        line = clean(error) or type(error).__name__
        line = line if isinstance(error, UserError) else f"{type(error).__name__}: {line}"
        note(folder, cell.name, f"{line}\n{traceback.format_exc()}")


def hired(folder: Path, workers: int) -> Iterator[str]:
    """Cells as they end in worker processes. One that dies takes its cell with it, and another takes its place."""
    running: dict[subprocess.Popen[str], threading.Thread] = {}
    ended: list[str] = []
    at: dict[int, str] = {}  # by process id, the cell that it is at
    worked: set[int] = set()  # who began one at all

    def listen(child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            word, _, name = line.rstrip("\n").partition(" ")
            worked.add(child.pid)
            if word == "begin":
                at[child.pid] = name
            elif word == "end":
                at.pop(child.pid, None)
                ended.append(name)

    def hire() -> None:
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", CHILD, folder],
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
                elif child.returncode and child.pid in worked:  # killed between two cells
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
    try:
        for name in work(Path(folder), alone=False, begin=lambda name: print("begin", name, file=out, flush=True)):
            print("end", name, file=out, flush=True)
    except BrokenPipeError:  # nobody listens
        os._exit(1)
    except (UserError, OSError) as error:
        print(f"error: {clean(error)}", file=sys.stderr, flush=True)
        os._exit(1)
