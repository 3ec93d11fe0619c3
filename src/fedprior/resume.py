"""What stands in a run directory, and whether an experiment may go on with it."""

from pathlib import Path
from typing import Any

from . import environment, store
from .config import Experiment, from_toml, to_dict
from .data import partition
from .data.partition import Partition
from .errors import UserError
from .progress import Progress
from .record import status

RESULT = ("last", "mean_last10", "best", "rounds", "uplink_MB", "downlink_MB", "seconds", "weights")
"""What every result.json says."""

FREE = ("rounds", "target", "evaluate_every", "memory_MB", "engine", "workers", "block", "compile", "track")
"""Keys that may change when a run goes on: none of them changes a round that is done."""


def look(folder: Path, experiment: Experiment) -> bool:
    """Whether the folder holds this experiment with all the rounds asked for; an empty one, or one that a run of it may
    go on with, is False. Raises UserError when it holds something else."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; choose another name= or --runs")
    if not folder.exists() or not any(folder.iterdir()):
        return False
    if not (folder / "config.toml").exists():
        if (folder / "checkpoints").is_dir() and not any((folder / "checkpoints").glob("round-*")):
            return False  # it died before its first line
        raise UserError(f"{folder} is not empty and has no config.toml; choose another name= or remove it first")
    try:
        saved = from_toml(folder / "config.toml")
    except UserError as error:
        raise UserError(f"{error}; choose another name= to begin anew") from None
    if differing := {k: v for k, v in changes(saved, experiment).items() if k not in FREE}:
        listed = "; ".join(f"{key}: {old} there, {new} here" for key, (old, new) in differing.items())
        raise UserError(
            f"{folder} is a run of other settings ({listed}). Only {', '.join(FREE)} may change on the way; choose "
            "another name= for a run of its own"
        )
    if experiment.rounds < saved.rounds:
        raise UserError(
            f"{folder} was asked for rounds={saved.rounds} before; rounds={experiment.rounds} cannot undo that"
        )
    same = not set(changes(saved, experiment)) & {"rounds", "target"}
    return same and status(folder) == "done" and (folder / "result.json").exists()


def changes(saved: Experiment, experiment: Experiment) -> dict[str, tuple[Any, Any]]:
    """The keys in which two experiments differ, with both values; the name does not count."""
    old, new = _flat(to_dict(saved)), _flat(to_dict(experiment))
    names = [key for key in dict.fromkeys([*old, *new]) if key != "name"]
    return {key: (old.get(key, "none"), new.get(key, "none")) for key in names if old.get(key) != new.get(key)}


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """{"method": {"name": "moon", "mu": 1.0}} -> {"method": "moon", "method.mu": 1.0}"""
    out: dict[str, Any] = {}
    for key, value in values.items():
        inner = value if isinstance(value, dict) else {"name": value}
        out |= {key if k == "name" else f"{key}.{k}": v for k, v in inner.items()}
    return out


def result(folder: Path) -> dict[str, Any]:
    """The result of a run that is done."""
    try:
        stored = store.read_json(folder / "result.json")
        if missing := [key for key in RESULT if key not in stored]:
            raise ValueError(f"it lacks {missing[0]}")
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}/result.json cannot be read ({error}); remove it to finish the run again") from None
    stored.pop("schema_version", None)
    return stored


def unfinished(root: Path, experiment: Experiment) -> Path | None:
    """A directory under `root` with a run of the same settings that is not done, if there is one."""
    if not root.is_dir():
        return None
    for path in sorted(root.glob("*/config.toml")):
        folder = path.parent
        try:
            if status(folder) != "done" and not changes(from_toml(path), experiment):
                return folder
        except UserError:  # of another version, say
            continue
    return None


def same_data(folder: Path, parts: Partition) -> None:
    """Raises UserError when the directory's partition is another one: the data have changed since."""
    path = folder / "partition.json"
    try:
        known = partition.load(path).digest if path.exists() else parts.digest
    except UserError as error:
        raise UserError(f"{error.args[0].partition(';')[0]}; remove it if you are sure of the data") from None
    if known != parts.digest:
        raise UserError(f"the data are not those that {folder} was started with: its partition.json differs")


def warn(folder: Path, progress: Progress) -> None:
    """Says which versions have changed since the run began: its last bits may."""
    try:
        before = dict(store.read_json(folder / "manifest.json").get("versions", {}))
    except (OSError, ValueError, TypeError):
        return
    now = environment.versions()
    for name in ("fedprior", "torch", "numpy"):
        if before.get(name) != now.get(name):
            progress.say(
                f"{name} was {before.get(name)} and is {now.get(name)}: the result may differ in its last bits"
            )
