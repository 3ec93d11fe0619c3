"""From an experiment to a Flower app, and from an app to a run's outcome."""

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from . import __version__, store
from .config import Experiment, override, to_toml
from .engines.remote import Patience
from .errors import UserError

RESULT = "fedprior result "  # begins the line of the log that holds the result as JSON
FAILED = "fedprior: "  # begins the line that says why there is none
ENDED = "finished"

APP = '''"""A fedprior experiment as a Flower app: everything but experiment.toml is in the installed package."""

from pathlib import Path

from fedprior.engines import flower

EXPERIMENT = Path(__file__).with_name("experiment.toml")

client = flower.client_app(EXPERIMENT)
server = flower.server_app(EXPERIMENT)
'''


def named(experiment: Experiment) -> Experiment:
    """With a name under which the run can go on after a crash, and with whole paths for what lies on this machine."""
    from .run import default_name

    name = experiment.name or f"{default_name(experiment)}-{time.strftime('%Y%m%d-%H%M%S')}"
    words = []
    for head, keys in PATHS.items():
        part = getattr(experiment, head)
        for key in keys:
            text = getattr(part, key, None)
            path = text if isinstance(text, str) and (head == "data" or os.sep in text) else ""  # else it may be a name
            if path and len(path) < 4096 and Path(path).expanduser().exists():
                words.append(f"{head}.{key}={Path(path).expanduser().resolve()}")
    return replace(override(experiment, words), name=name)


PATHS = {
    "data": ("path",),
    "prior": ("name", "config", "vae"),
    "balance": ("templates", "names", "domain_words", "target", "clip"),
    "guide": ("encoder",),
}
"""Keys whose values may be files or folders."""


def write_app(experiment: Experiment, folder: Path, patience: Patience, runs: str = "") -> None:
    """A Flower app: pyproject.toml, app.py and experiment.toml. `runs` is the folder on the server's machine where run
    directories go; "" stands for FEDPRIOR_RUNS there. Raises UserError where the folder holds something else."""
    import tomli_w

    if folder.is_file() or (folder.exists() and any(path.name not in FILES for path in folder.iterdir())):
        raise UserError(f"{folder} holds other files; name a new folder")
    waits = {key.replace("_", "-"): float(v) for key, v in asdict(patience).items() if key in WAITS}
    project = {
        "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
        "project": {
            "name": "fedprior-run",
            "version": __version__,
            "description": f"fedprior: {experiment.name}",
            "license": "Apache-2.0",
            "dependencies": ["flwr>=1.42"],
        },
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "fedprior",
                    "components": {"serverapp": "app:server", "clientapp": "app:client"},
                    "config": {"runs": runs, **waits},
                }
            }
        },
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        store.write_text(folder / "pyproject.toml", tomli_w.dumps(project))
        store.write_text(folder / "app.py", APP)
        store.write_text(folder / "experiment.toml", to_toml(experiment))
    except OSError as error:
        raise UserError(f"cannot write the app to {folder} ({error}); name another folder") from None


FILES = ("pyproject.toml", "app.py", "experiment.toml", "__pycache__")
WAITS = ("wait", "answer", "budget", "over_select")


@dataclass(frozen=True)
class Flwr:
    """The `flwr` program with the connection and the environment that it is to use."""

    program: str
    connection: str
    environment: Mapping[str, str]

    def call(self, *words: str) -> str:
        """What it prints. Raises UserError with its last line when it fails."""
        done = subprocess.run(
            [self.program, *words], capture_output=True, text=True, env=dict(self.environment), stdin=subprocess.DEVNULL
        )
        if done.returncode:
            raise UserError(f"flwr {words[0]} failed: {trouble(done.stdout + done.stderr)}")
        return done.stdout

    def submit(self, app: Path) -> int:
        """-> the run's id"""
        said = self.call("run", str(app), self.connection, "--format", "json")
        found = re.search(r'"run-id":\s*"?(\d+)', said)
        if not found:
            raise UserError(f"flwr run gave no run id: {plain(said)[-300:]}")
        return int(found[1])

    def status(self, run: int) -> str:
        """pending, starting, running, or finished:completed, finished:failed, finished:stopped. Raises UserError where
        the SuperLink does not say."""
        said = self.call("list", self.connection, "--run-id", str(run), "--format", "json")
        found = re.search(r'"status":\s*"([^"]+)"', said)
        if not found:  # flwr ends with 0 where it cannot connect
            raise UserError(f"flwr list failed: {trouble(said)}")
        return found[1]

    def follow(self, run: int, say: Callable[[str], None], pause: float = 3.0, patience: int = 20) -> dict[str, Any]:
        """Says every line of the log until the run ends -> its result. Raises UserError when it failed, or when the
        SuperLink cannot be asked any more, `patience` times with `pause` seconds between."""
        lines: list[str] = []
        failed = 0
        while True:
            for line in self.stream(run, len(lines)):
                lines.append(line)
                if not line.startswith(RESULT):
                    say(line)
            try:
                status, failed = self.status(run), 0
            except UserError as error:
                failed += 1
                if failed == patience:
                    raise UserError(f"{error}; whether run {run} goes on is not known") from None
                status = ""
            if status.startswith(ENDED):
                return outcome(status, lines, run)
            time.sleep(pause)

    def stream(self, run: int, seen: int) -> Iterator[str]:
        """The lines of a run's log after the first `seen`, until the run ends or the connection does."""
        command = [self.program, "log", str(run), self.connection, "--stream"]
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env=dict(self.environment) | {"PYTHONUNBUFFERED": "1"},
        ) as child:
            assert child.stdout is not None
            for number, line in enumerate(child.stdout):
                if number >= seen:
                    yield line.rstrip("\n")


def outcome(status: str, lines: list[str], run: int) -> dict[str, Any]:
    """The result in a log. Raises UserError where there is none."""
    results = [line.removeprefix(RESULT) for line in lines if line.startswith(RESULT)]
    if status == "finished:completed" and results:
        try:
            found: dict[str, Any] = json.loads(results[-1])
            return found
        except ValueError:
            raise UserError(f"run {run} completed, but its log holds no whole result; its run directory does") from None
    why = [line.removeprefix(FAILED) for line in lines if line.startswith(FAILED)]
    raise UserError(f"run {run} is {status}: {why[-1] if why else 'its log says why'}")


def trouble(said: str) -> str:
    """What flwr complains of, out of its boxes."""
    message = re.search(r'"error-message":\s*"((?:[^"\\]|\\.)*)"', said)
    text = plain(message[1].replace("\\n", " ") if message else said)
    return (text.rpartition("Error ")[2] or text or "it gives no reason")[-400:]


def plain(text: str) -> str:
    """One line without what draws boxes."""
    return " ".join(re.sub(r"[\u2500-\u257f]", " ", text).split())


def flwr(server: Path | None, connection: str) -> Flwr:
    """For a folder that `fedprior deploy init` wrote, or for a connection that the person set up themselves."""
    from .deploy import layout, start

    if server is not None:
        settings = layout.read(server)
        if not isinstance(settings, layout.Server):
            raise UserError(f"{server} is a node's folder; name the server's, beside it")
        return Flwr(start.executable("flwr"), layout.CONNECTION, start.environment(settings))
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    return Flwr(start.executable("flwr"), connection, os.environ | quiet)
