"""A sweep on disk, and its cells in one process or several. Every cell is a run directory, so that a sweep that was
stopped goes on where it stopped."""

import os
import signal
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
from .sweep import PLACES, Axis, Cell, Sweep

SCHEMA_VERSION = 1
BASE = "base.toml"  # a copy of the settings file that a sweep begins with, so that it needs no other
HARMLESS = {*PLACES, *resume.FREE} - {"rounds", "target", "evaluate_every"}
"""Keys that change no number of a cell that is done."""
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
            Axis(name=axis["name"], values={k: tuple(v) for k, v in axis["values"].items()}) for axis in part
        )
        return Sweep(
            name=said["name"],
            base=tuple(str(folder / BASE) if i == 0 and word == BASE else word for i, word in enumerate(said["base"])),
            rows=axes(said["rows"]),
            columns=axes(said["columns"]),
            seeds=tuple(said["seeds"]),
            table=said["table"],
            scale=said["scale"],
        )
    except FileNotFoundError:
        raise UserError(f"{folder} is no sweep (it has no sweep.json); name one such as sweeps/NAME") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UsageError) as error:
        raise UserError(f"{path} cannot be read ({clean(error)}); begin the sweep anew under another name=") from None


def reserve(sweep: Sweep, folder: Path) -> None:
    """Makes the directory, or checks that it holds this sweep. More seeds may come to one that is there, and what says
    where things are may change.

    Raises UserError for another sweep, and UsageError for a cell that is no experiment: before any is run.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; choose another name= or --sweeps")
    copied = settings(sweep)
    if (folder / "sweep.json").exists():
        there = load(folder)
        if unlike := difference(there, sweep):
            raise UserError(
                f"{folder} holds another sweep ({unlike}); choose another name=, or `fedprior sweep {folder}` for that "
                "one"
            )
        base = (there.base[0], *sweep.base[1:]) if copied else sweep.base
        sweep, copied = replace(sweep, base=base, seeds=tuple(dict.fromkeys([*there.seeds, *sweep.seeds]))), None
    elif folder.exists() and any(path.suffix != ".tmp" for path in folder.iterdir()):  # which a kill leaves
        raise UserError(f"{folder} is not empty and no sweep; choose another name=")
    vet(sweep, folder)
    try:
        if copied is not None:
            store.write_text(folder / BASE, copied.read_text(encoding="utf-8"))
        if copied is not None or sweep.base[:1] == (str(folder / BASE),):
            sweep = replace(sweep, base=(BASE, *sweep.base[1:]))
        store.write_json(folder / "sweep.json", describe(sweep))
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({error}); choose another --sweeps") from None


def settings(sweep: Sweep) -> Path | None:
    """The file that the sweep's first word names, if it names one."""
    from .recipes import settings_file

    return settings_file(sweep.base[0]) if sweep.base and "=" not in sweep.base[0] else None


def difference(there: Sweep, here: Sweep) -> str:
    """In which settings two sweeps differ, in words; "" where in none. Seeds, places and what is said of the scale are
    no settings."""
    old, new = settings(there), settings(here)
    if old is not None and new is not None:
        changed = resume.changes(from_toml(old), from_toml(new))
        if changed:
            return f"{new} has changed: {told(changed)}"
    lasting = lambda s: [w for w in s.base[1 if settings(s) else 0 :] if w.partition("=")[0] not in PLACES]
    axes = lambda s: [f"{axis.name}: {', '.join(axis.values)}" for axis in (*s.rows, *s.columns)]
    for before, after in ((lasting(there), lasting(here)), (axes(there), axes(here))):
        if before != after:
            only = lambda one, other: ", ".join(word for word in one if word not in other) or "nothing else"
            return f"{only(before, after)} there, {only(after, before)} here"
    if (there.rows, there.columns, there.table) != (here.rows, here.columns, here.table):
        return "rows and columns are not those"
    return "" if (old is None) == (new is None) else "another recipe or file"


def told(changed: dict[str, tuple[Any, Any]]) -> str:
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
            raise UsageError(f"{twin} and {cell.name} are the same experiment; leave out what makes no difference")
        run = folder / "cells" / cell.name
        if (run / "config.toml").exists() and (changed := since(run, experiment)):
            raise UserError(
                f"{run} was made with other settings ({told(changed)}), so its numbers do not belong to this sweep; "
                "choose another name= for a sweep of its own, or remove that directory to have it made again"
            )


def since(run: Path, experiment: Experiment) -> dict[str, tuple[Any, Any]]:
    """What has changed since a run was made; nothing where its settings cannot be read, which `damage` says."""
    try:
        changed = resume.changes(from_toml(run / "config.toml"), experiment)
    except (UserError, OSError):
        return {}
    return {key: values for key, values in changed.items() if key not in HARMLESS}


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
            if left := [cell for cell in left if not settled(folder, cell)]:
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
            experiment = replace(experiment, engine="serial")
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
            [sys.executable, "-P", "-c", "import sys; from fedprior.sweep_run import main; main(sys.argv[1])", folder],
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

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it decides when to end
    threading.Thread(target=watch, daemon=True).start()
    out = sys.stdout
    sys.stdout = sys.stderr  # whatever prints must not stand between
    try:
        for name in work(Path(folder), alone=False, begin=lambda name: print("begin", name, file=out, flush=True)):
            print("end", name, file=out, flush=True)
    except BrokenPipeError:  # nobody listens
        os._exit(1)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(1)
