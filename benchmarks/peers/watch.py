"""Runs a process on one core and watches its tree from outside: wall time and memory. Linux only."""

import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

SUBREAPER = 36  # prctl: who loses its parent becomes a child of this process
DEATH_SIGNAL = 1  # prctl: what this process gets when its parent ends
PAUSE = 0.25  # seconds between looks


class Seen(NamedTuple):
    wall: float  # seconds from start to end
    memory: float  # MiB, the highest sum over the tree of what is resident, shared pages in parts (PSS)
    processes: int  # at that time
    code: int  # exit status
    words: str  # its last lines


def watch(command: list[str], env: Mapping[str, str], core: int, log: Path, limit: float) -> Seen:
    """Ends whatever is left of the tree."""
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    peak, done = (0.0, 0), threading.Event()

    def look() -> None:
        nonlocal peak
        while not done.wait(PAUSE):
            sizes = [size for child in psutil.Process().children(recursive=True) if (size := resident(child.pid))]
            peak = max(peak, (sum(sizes), len(sizes)))

    with log.open("w") as out:
        began = time.perf_counter()
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out, preexec_fn=lambda: pin(core))
        watcher = threading.Thread(target=look)
        watcher.start()
        try:
            code = process.wait(limit)
            wall = time.perf_counter() - began
        finally:
            done.set()
            watcher.join()
            end(psutil.Process().children(recursive=True))
    return Seen(wall, *peak, code, "\n".join(log.read_text(errors="replace").splitlines()[-8:]))


def pin(core: int) -> None:
    ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
    os.sched_setaffinity(0, {core})


def resident(pid: int) -> float:
    """MiB; 0 for a process that has gone."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0


def end(left: list[psutil.Process]) -> None:
    """Waits for processes of a tree whose root has ended, and ends those that stay."""
    for how in (None, signal.SIGTERM, signal.SIGKILL):
        for child in left if how else ():
            with suppress(psutil.Error):
                child.send_signal(how)
        left = psutil.wait_procs(left, timeout=5)[1]
