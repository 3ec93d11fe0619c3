"""Trackers: what each round's line of metrics.jsonl is handed to, beside the file.

The lines stay the source. What a tracker was told stands in tracking.json of the run directory, so a run that goes on,
or that gets a tracker on the way, tells it the rounds it lacks, under the same run of the tracker. It is told each
round at least once: a kill after it was told and before that was noted makes the next process tell it again.
TensorBoard then drops the first telling, and is told everything again where its folder is gone; the others are not
asked what they still hold. A tracker that fails says so in one line and is left out; the run does not notice. Nothing
is sent over a network unless the tracker's own environment variables say so.
"""

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from . import store
from .errors import UserError, unknown

if TYPE_CHECKING:
    from .config import Experiment

Tell = Callable[[dict[str, Any]], None]  # takes a line of metrics.jsonl

PROJECT = "fedprior"
AT_HOME = {
    "WANDB_MODE": "offline",
    "WANDB_CONSOLE": "off",  # else it takes over stdout and stderr
    "WANDB_SILENT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GRADIO_ANALYTICS_ENABLED": "False",
}
"""Variables of the environment that keep trackers off the network, and quiet, where nobody set them."""


class Kind(NamedTuple):
    """How accelerate's adapter of a tracker is made, and how its run is found again."""

    options: Callable[[Path, dict[str, Any] | None], dict[str, Any]]  # (run directory, what is known) -> arguments
    identity: Callable[[Any], str]  # of the tracker's run, from the adapter's `tracker`; "" where the place says it
    hint: Callable[[Path], str]  # how a person sees it
    finish: Callable[[Any], None] = lambda adapter: adapter.finish()
    gone: Callable[[Path], bool] = lambda folder: False  # whether what it was told is known to be there no more


def _finish_trackio(adapter: Any) -> None:
    """Through the module, which else ends the run once more when the process does, and says so on stdout."""
    import trackio

    trackio.finish()


def without_password(text: str) -> str:
    """A text whose addresses say neither user nor password."""
    return re.sub(r"(?<=://)[^\s/?#]*@", "", text)


TRACKERS = {
    "tensorboard": Kind(
        lambda folder, known: {
            "run_name": "tensorboard",
            "logging_dir": str(folder),
            **({"purge_step": known["rounds"] + 1} if known else {}),  # told, but not noted
        },
        lambda writer: "",
        lambda folder: f"`tensorboard --logdir {folder.parent}` shows it",
        gone=lambda folder: not any((folder / "tensorboard").glob("events.*")),
    ),
    "wandb": Kind(
        lambda folder, known: {
            "run_name": os.environ.get("WANDB_PROJECT", PROJECT),
            "name": folder.name,
            "dir": str(folder),
            **({"id": known["run"], "resume": "allow"} if known else {}),
        },
        lambda run: str(run.id),
        lambda folder: (
            f"`wandb sync {folder}/wandb/offline-run-*` sends it"
            if os.environ["WANDB_MODE"] == "offline"
            else f"WANDB_MODE={os.environ['WANDB_MODE']}"
        ),
    ),
    "mlflow": Kind(
        lambda folder, known: {
            "experiment_name": PROJECT,
            "run_name": folder.name,
            "run_id": known["run"] if known else None,
        },
        lambda run: str(run.info.run_id),
        lambda folder: without_password(
            os.environ.get("MLFLOW_TRACKING_URI", "`mlflow ui` in the folder that you are in shows it")
        ),
    ),
    "trackio": Kind(
        lambda folder, known: {
            "run_name": PROJECT,
            "name": known["run"] if known else folder.name,
            "resume": "allow" if known else "never",
            "embed": False,
        },
        lambda run: str(run.name),
        lambda folder: f"`trackio show --project {PROJECT}` shows it",
        _finish_trackio,
    ),
}


def named(text: str | None) -> tuple[str, ...]:
    """ "tensorboard,wandb" -> ("tensorboard", "wandb"). Raises UsageError for one that does not exist."""
    names = tuple(dict.fromkeys(word.strip() for word in (text or "").split(",") if word.strip()))
    for name in names:
        if name not in TRACKERS:
            raise unknown("tracker", name, TRACKERS)
    return names


def refuse_missing(text: str | None) -> None:
    """Raises UserError where a tracker is not installed."""
    for name in named(text):
        if importlib.util.find_spec(name) is None:
            raise UserError(f"track={name} needs the package {name}; pip install {name}, or leave it out of track=")


@contextmanager
def follow(
    experiment: "Experiment",
    folder: Path,
    classes: Sequence[str],
    curve: Sequence[dict[str, Any]],
    say: Callable[[str], None],
) -> Iterator[Tell]:
    """Opens the experiment's trackers for a run directory, tells them the lines in `curve` that they lack, and yields
    what tells them each further line. They are closed however the block ends."""
    names = named(experiment.track)
    trackers = Trackers(folder, classes, say)
    if names:
        for key, value in AT_HOME.items():
            os.environ.setdefault(key, value)
    try:
        for name in names:
            trackers.open(name, experiment)
        for line in curve:
            trackers.tell(line)
        yield trackers.tell
    finally:
        trackers.close()


class Trackers:
    """Those of one run directory that have not failed."""

    def __init__(self, folder: Path, classes: Sequence[str], say: Callable[[str], None]) -> None:
        self.folder, self.classes, self.say = folder, classes, say
        self.live: dict[str, Any] = {}  # accelerate's adapters
        self.known: dict[str, dict[str, Any]] = {}  # by tracker: id of its run, number of the last round it was told

    @contextmanager
    def guarded(self, name: str) -> Iterator[None]:
        """Within, whatever goes wrong leaves the tracker out. What trackers print goes to stderr."""
        try:
            with redirect_stdout(sys.stderr):
                yield
        except Exception as error:  # each has errors of its own, and none may reach the run
            said = without_password(next(iter(str(error).strip().splitlines()), ""))
            reason = said[:200].rstrip(".") or type(error).__name__
            if (adapter := self.live.pop(name, None)) is not None:
                with suppress(Exception):  # some refuse a second run while a first one is open
                    TRACKERS[name].finish(adapter)
            self.say(f"track={name} failed ({reason}) and is told nothing more; the run goes on without it")

    def open(self, name: str, experiment: "Experiment") -> None:
        with self.guarded(name):
            from accelerate import PartialState, tracking

            PartialState()  # the adapters' own log asks for it
            if not self.known and (self.folder / "tracking.json").exists():
                self.known = store.read_json(self.folder / "tracking.json")
            kind = TRACKERS[name]
            before = None if kind.gone(self.folder) else self.known.get(name)
            adapter = tracking.LOGGER_TYPE_TO_CLASS[name](**kind.options(self.folder, before))
            self.live[name] = adapter
            adapter.start()
            if before is None:
                from .config import to_dict

                adapter.store_init_configuration(flat(to_dict(experiment)))
                self.note(name, kind.identity(adapter.tracker), 0)
            self.say(f"track={name}: {kind.hint(self.folder)}")

    def tell(self, line: dict[str, Any]) -> None:
        for name, adapter in list(self.live.items()):
            known = self.known[name]
            if line["round"] > known["rounds"]:
                with self.guarded(name):
                    adapter.log(scalars(line, self.classes), step=line["round"])
                    self.note(name, known["run"], line["round"])

    def note(self, name: str, run: str, rounds: int) -> None:
        self.known[name] = {"run": run, "rounds": rounds}
        store.write_json(self.folder / "tracking.json", self.known)

    def close(self) -> None:
        for name, adapter in list(self.live.items()):
            with self.guarded(name):
                TRACKERS[name].finish(adapter)


def scalars(line: dict[str, Any], classes: Sequence[str]) -> dict[str, float]:
    """The numbers in a line: those of a dict as key/name, `per_class` as per_class/class, of other lists their
    lengths. What was not measured is left out."""
    by_class = dict(zip(classes, line["per_class"] or (), strict=False))
    counted = {key: len(value) if isinstance(value, list) else value for key, value in line.items() if key != "round"}
    return {key: float(value) for key, value in flat(counted | {"per_class": by_class}).items()}


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a/b": 1}, without what is None, under names that every tracker takes."""
    out: dict[str, Any] = {}
    for tag, value in zip(tags(list(values)), values.values(), strict=True):
        name = prefix + tag
        if isinstance(value, dict):
            out |= flat(value, f"{name}/")
        elif value is not None:
            out[name] = value
    return out


def tags(names: Sequence[str]) -> list[str]:
    """Different names as ones that every tracker takes, different too: other signs are underscores, and of names that
    are equal then, all but the first get a number in the order in which they come: C++ and C# are "C_" and "C_ 2"."""
    plain = [re.sub(r"[^\w. -]", "_", name) for name in names]
    taken = set(names) & set(plain)  # these stay as they are
    out = []
    for name, tag in zip(names, plain, strict=True):
        n, free = 1, tag
        while name != tag and free in taken:
            n += 1
            free = f"{tag} {n}"
        taken.add(free)
        out.append(free)
    return out
