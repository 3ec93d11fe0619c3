"""Processes of their own: for memory, whose peak no process can take back."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import UserError


def in_child(what: str, function: Callable[..., Any], *question: Any) -> Any:
    """What a module's function answers in a new process; question and answer are JSON.

    Raises UserError, which names `what` is measured, when the process ends early.
    """
    name, module = function.__name__, function.__module__
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"from {__name__} import answer; from {module} import {name}; answer({name})"],
        input=json.dumps(question, default=str),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["it was killed; is memory short?"])[-1]
        raise UserError(f"the process that measures {what} ended early: {why}")
    return json.loads(done.stdout.splitlines()[-1])


def answer(function: Callable[..., Any]) -> None:
    """The child: prints what the function says to the question on standard input."""
    print(json.dumps(function(*json.load(sys.stdin))))


def peak_megabytes() -> float:
    """MB (1e6 bytes) of memory that this process took at its peak."""
    if sys.platform == "win32":
        import psutil

        return float(psutil.Process().memory_info().peak_wset) / 1e6
    status = Path("/proc/self/status")
    if status.exists():  # getrusage begins with the peak of the process that started this one
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024 / 1e6
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # macOS counts bytes
