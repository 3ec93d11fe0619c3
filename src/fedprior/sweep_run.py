"""A sweep's cells in one process or several. Every cell is a run directory, so that a sweep that was stopped goes on
where it stopped."""

import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from filelock import FileLock, Timeout

from .errors import UserError
from .progress import Progress, Silent, clean
from .sweep import Cell, Sweep
from .sweep_folder import Tally, damage, done, load, note, reason, tally, vet

CHILD = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"  # at once: importing torch takes a while
    "import sys; from fedprior.sweep_run import main; main(sys.argv[1])"
)
"""What a worker process runs. Ctrl-C comes to it too, but who started it decides when to end."""
PATIENCE = 1.0  # seconds between two looks at cells that another process is at


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
    side_by_side = f" in {workers} processes" if workers > 1 else ""
    progress.say(f"{folder}: {len(cells)} cells, {before} of them done; {len(left)} to run{side_by_side}")
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
