"""Starts a server or a node from its folder, and starts it again when it ends by itself.

Flower's processes need this. A SuperNode that was killed is refused for a minute; one that the SuperLink no longer
knows, or whose answer was an error, ends as if all were well; and each leaves processes behind that it started.
"""

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ..errors import UsageError, UserError
from . import layout
from .layout import Node, Server

GRACE = 10.0  # seconds between asking a process to end and ending it
LOOK = 5.0  # seconds between looks for the process that starts apps
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of Linux' prctl


@dataclass(frozen=True)
class Program:
    """A Flower process: what it is called, its command, what it says once it serves, seconds before the next try."""

    name: str
    command: list[str]
    ready: bytes
    delay: float


def start(folder: Path, proxy: bool = False) -> None:
    """Runs a folder's server or node until SIGTERM, SIGINT or SIGHUP. `proxy` acknowledges that something stands before
    a SuperLink that other machines reach.

    Raises UserError when it ends before it served and another try would end in the same way.
    """
    folder = folder.resolve()
    settings = layout.read(folder)
    variables = environment(settings)
    if isinstance(settings, Server):
        layout.connection(settings)
    program = program_of(settings, proxy)
    os.umask(0o077)
    os.chdir(folder)  # relative paths in node.toml count from here
    supervise(program, variables)


def environment(settings: Server | Node) -> dict[str, str]:
    """The variables under which Flower's processes and commands of this folder run.

    Flower's own variables in the shell are left out, so that none of them undoes what is set here.
    """
    folder = settings.folder.resolve()
    variables = {name: value for name, value in os.environ.items() if not name.startswith("FLWR_")}
    search = [str(Path(sys.executable).parent), variables.get("PATH", os.defpath)]
    direct = [variables.get("NO_PROXY", variables.get("no_proxy", "")), "localhost", "127.0.0.1", "::1"]
    variables |= {
        "PATH": os.pathsep.join(search),  # Flower finds its own programs there
        "NO_PROXY": ",".join(filter(None, direct)),  # Flower's processes talk to each other over loopback
        "FLWR_HOME": str(folder / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    variables["no_proxy"] = variables["NO_PROXY"]
    variables.setdefault("FEDPRIOR_CACHE", str(folder / "cache"))
    if isinstance(settings, Server):
        variables["FEDPRIOR_RUNS"] = str(folder / "runs")
    return variables


def program_of(settings: Server | Node, proxy: bool = False) -> Program:
    """The Flower process of a folder; its paths count from there.

    Raises UsageError for a SuperLink that other machines would reach without a proxy before it.
    """
    if isinstance(settings, Node):
        return Program(
            name="SuperNode",
            command=[
                *(executable("flower-supernode"), "--superlink", settings.superlink, "--root-certificates", "ca.crt"),
                *("--auth-supernode-private-key", "node.key", "--node-config", "node.toml"),
                *("--host", "127.0.0.1", "--port", str(free_port())),
            ],
            ready=b"SuperNode ID:",
            delay=15.0,
        )
    if not layout.loopback(settings.host) and not (settings.proxy_acknowledged or proxy):
        raise UsageError(
            f'host = "{settings.host}" lets whoever reaches port {settings.port} submit code; set it to 127.0.0.1, or '
            "say proxy_acknowledged = true or --i-have-a-proxy where a proxy passes only /v1/fleet/"
        )
    return Program(
        name="SuperLink",
        command=[
            *(executable("flower-superlink"), "--host", settings.host, "--port", str(settings.port)),
            *("--database", "state.db", "--ssl-ca-certfile", "ca.crt"),
            *("--ssl-certfile", "server.crt", "--ssl-keyfile", "server.key"),
            *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
        ],
        ready=b"Uvicorn running on",
        delay=3.0,
    )


def executable(name: str) -> str:
    """A program of this installation. Raises UserError where it is not there."""
    path = Path(sys.executable).parent / name
    if not path.is_file():
        raise UserError(f"{path} is not there; pip install 'fedprior[flower]'")
    return str(path)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def supervise(program: Program, variables: dict[str, str]) -> None:
    """Runs a program, again and again after `delay` seconds, until this process is asked to end.

    Whatever it started ends with it. Raises UserError when it ends before it served, unless it was killed or refused.
    """
    asked = _Asked()
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # what a killed process started becomes ours to end
    while True:
        watch = _run(program, variables, asked)
        _end(psutil.Process().children(recursive=True))
        if asked.at:
            return
        if not (watch.ready or watch.refused or watch.code < 0):
            raise UserError(
                f"the {program.name} ended (exit {watch.code}) before it served; what it said is above, and "
                "`fedprior deploy check .` looks for the reason"
            )
        _say(f"the {program.name} {watch.reason()}; it starts again in {program.delay:g} s")
        asked.wait(program.delay)
        if asked.at:
            return


class _Asked:
    """Whether, and when, somebody asked this process to end."""

    def __init__(self) -> None:
        self.at = 0.0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._note)

    def _note(self, *_: Any) -> None:
        self.at = self.at or time.monotonic()

    def wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self.at and time.monotonic() < end:
            time.sleep(0.2)


@dataclass
class _Watch:
    """What was seen of a process: whether it served, was refused, was alone, and how it ended."""

    ready: bool = False
    refused: bool = False
    alone: int = 0
    code: int = 0

    def reason(self) -> str:
        if self.refused:
            return (
                "was refused: its key is not registered or is used by another process, or it was killed less than a "
                "minute ago and still counts as connected"
            )
        if self.alone > 1:
            return "had lost the process that starts apps"
        if self.code < 0:
            return f"was killed (signal {-self.code})"
        return f"ended by itself (exit {self.code}); if this comes again, its key was removed or the clocks differ"


def _run(program: Program, variables: dict[str, str], asked: _Asked) -> _Watch:
    watch = _Watch()
    child = subprocess.Popen(
        program.command,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # a Ctrl-C comes here, and from here as a wish to end
        preexec_fn=lambda: _prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
    )
    assert child.stdout is not None
    pipe = child.stdout.fileno()
    os.set_blocking(pipe, False)
    line, told, looked = b"", False, time.monotonic()
    while True:
        ended = child.poll() is not None
        if select.select([pipe], [], [], 0.0 if ended else 0.5)[0] and (data := os.read(pipe, 1 << 16)):
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
            *lines, line = (line + data).split(b"\n")
            for one in lines:
                watch.ready |= program.ready in one
                watch.refused |= not watch.ready and b"[code: 2004]" in one
        elif ended:
            break
        now = time.monotonic()
        if (asked.at or watch.alone > 1) and not told:
            told = True
            child.terminate()
            looked = now
        elif told and now > looked + GRACE:
            child.kill()
        elif watch.ready and not told and now > looked + LOOK:
            looked = now
            watch.alone = 0 if _starts_apps(child.pid) else watch.alone + 1
    watch.code = child.wait()
    child.stdout.close()
    return watch


def _starts_apps(pid: int) -> bool:
    """Whether a Flower process still has the one beside it without which no app starts."""
    try:
        return any("flower-superexec" in word for p in psutil.Process(pid).children() for word in _words(p))
    except psutil.NoSuchProcess:
        return True  # it has ended as a whole, which is seen elsewhere


def _words(process: psutil.Process) -> list[str]:
    try:
        words: list[str] = process.cmdline()
        return words
    except psutil.Error:  # it is over, or waits to be counted as that
        return []


def _end(processes: list[psutil.Process]) -> None:
    for process in processes:
        process.terminate()
    for process in psutil.wait_procs(processes, timeout=3)[1]:
        process.kill()
    psutil.wait_procs(processes, timeout=3)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _say(text: str) -> None:
    print(f"fedprior: {text}", file=sys.stderr, flush=True)
