"""Run directories read back as the data of a report."""

import json
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from .. import record, resume, store
from ..errors import UserError
from ..methods import METHODS
from ..progress import clean
from . import numbers
from .numbers import Arm, Curve, Holdings, ReportData, Shown

KEYS = 2  # that may tell arms of one name apart
LONGEST = 60  # characters of a name that says so


@contextmanager
def reading(what: Path | str) -> Iterator[None]:
    """Raises UserError, one short line however much a damaged file holds, where the block cannot read `what`."""
    try:
        yield
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, SafetensorError) as error:
        why = clean(f"{type(error).__name__}: {error}", 80)
        raise UserError(f"{what} cannot be read ({why}); run that experiment again under another name=") from error


def config(folder: Path) -> dict[str, Any]:
    """A run's resolved experiment as plain values."""
    path = folder / "config.toml"
    if not path.exists():
        raise UserError(f"{folder} is no run directory (it has no config.toml); name one such as runs/digits-fedavg")
    with reading(path):
        return tomllib.loads(path.read_text(encoding="utf-8"))


def arm_name(settings: dict[str, Any]) -> str:
    """Of a config by the keys of the command line: "fedavg", "fedavg+balance" or "fedprox+balance+adapt+guide"."""
    used = [key for key in ("balance", "adapt", "guide") if settings.get(key, "none") != "none"]
    return "+".join([str(settings["method"]), *used])


SAME = ("seed", "name", *(key for key in resume.FREE if key not in ("rounds", "evaluate_every")))
"""What may differ within an arm: what may change when a run goes on, but for which rounds there are and are judged."""


def group(folders: Sequence[Path]) -> dict[str, list[Path]]:
    """Runs that differ in nothing but `SAME` form one arm. Arms that would share a name are told apart by what they
    differ in where that is short, and else numbered."""
    arms: dict[str, list[Path]] = {}
    kin: dict[str, dict[str, dict[str, Any]]] = {}  # arms' settings by what they would be called
    seen: dict[tuple[str, int], Path] = {}
    for folder in folders:
        values = config(folder)
        with reading(folder / "config.toml"):
            settings = {key: value for key, value in flat(values).items() if key not in SAME}
            name, arm, seed = arm_name(settings), json.dumps(settings, sort_keys=True), int(values["seed"])
        if other := seen.get((arm, seed)):
            raise UserError(f"{other} and {folder} are the same setting and seed; name one of them")
        seen[arm, seed] = folder
        arms.setdefault(arm, []).append(folder)
        kin.setdefault(name, {})[arm] = settings
    names: dict[str, str] = {}
    for name, alike in kin.items():
        names |= dict(zip(alike, told_apart(name, list(alike.values())), strict=True))
    return {names[arm]: members for arm, members in arms.items()}


def told_apart(name: str, settings: Sequence[dict[str, Any]]) -> list[str]:
    """A name for each of several arms that would all have this one: with one or two keys that tell them apart, e.g.
    "fedavg (partition.alpha=0.1)", or a number. What belongs to a choice, such as partition.alpha to partition, is left
    out where the choice tells enough."""
    values = {key: [numbers.told(one.get(key)) for one in settings] for key in dict.fromkeys(chain(*settings))}
    differing = [key for key, own in values.items() if len(set(own)) > 1]
    chosen = [key for key in differing if key.rpartition(".")[0] not in differing]
    inner = [key for key in differing if key not in chosen and len({*values[key]} - {numbers.NOTHING}) > 1]
    for keys in (chosen, [*chosen, *inner]):
        labels = [", ".join(f"{key}={values[key][i]}" for key in keys if key in one) for i, one in enumerate(settings)]
        names = [f"{name} ({label})" if label else name for label in labels]
        if len(keys) <= KEYS and len(set(names)) == len(names) and max(map(len, names)) <= LONGEST:
            return names
    return [name, *(f"{name} ({n})" for n in range(2, len(settings) + 1))]


HELD_OUT = "Accuracies are on {:.0%} of the rows, held out of each client's rows, and not on the test set."


def report_data(folders: Sequence[Path], title: str = "", notes: Sequence[str] = ()) -> ReportData:
    """What a report shows of one run or of several. Distribution and images are those of the run with most rows.

    Raises UserError when a folder is not a whole run.
    """
    for folder in folders:
        if not (folder / "clients.parquet").exists():
            config(folder)
            raise UserError(f"{folder} did not finish, so there is nothing to report; run it again first")
    with reading(folders[0] if len(folders) == 1 else f"one of these {len(folders)} runs"):
        return _report_data(folders, title, notes)


def check_done(folders: Sequence[Path]) -> None:
    """Raises UserError for a run that was stopped or is still going on: parts of it are from an earlier round."""
    for folder in folders:
        if (how := record.status(folder)) in ("running", "interrupted", "failed"):
            raise UserError(f"{folder} did not finish (it is {how}); `fedprior run {folder}` goes on with it")


def _report_data(folders: Sequence[Path], title: str, notes: Sequence[str]) -> ReportData:
    groups = group(folders)
    arms = [arm(name, members) for name, members in groups.items()]
    held = [rows(folder) for folder in folders]
    most = max(range(len(folders)), key=lambda i: int(held[i][1].sum()))
    before, after = held[most]
    classes, images = examples(folders[most])
    for folder in folders:
        if examples(folder)[0] != classes:
            raise UserError(f"{folder} and {folders[most]} have different classes; report them apart")
    configs = [config(folder) for folder in folders]
    values = configs[most]
    if len({own.get("validation") for own in configs}) > 1:
        raise UserError("some of these runs are judged on held-out rows and others on other rows; report them apart")
    name = next(name for name, members in groups.items() if folders[most] in members)
    return ReportData(
        title=title or f"{values['data']['name']}: {numbers.joined(list(groups))}",
        arms=arms,
        classes=classes,
        shown=Shown(name, int(values["seed"]), folders[most].name),
        before=before,
        after=after if (after != before).any() else None,
        synthetic=images["synthetic"],
        real=images["real"],
        config=(folders[most] / "config.toml").read_text(encoding="utf-8"),
        environment=versions(folders[most]),
        notes=[
            *notes,
            *([HELD_OUT.format(values["validation"])] if values.get("validation") else []),
            *unlike(folders),
        ],
        target=next((target for own in configs if (target := own.get("target")) is not None), None),
    )


def arm(name: str, folders: Sequence[Path]) -> Arm:
    """One setting's runs, one a seed. What an earlier version did not record is left out."""
    results = [result(folder) for folder in folders]
    timed = [record.timings(folder) for folder in folders]
    matrices = [confusion(folder) for folder in folders]
    known = [m for m in matrices if m is not None]
    configs = [config(folder) for folder in folders]
    seconds = []
    for folder, lines, own in zip(folders, timed, results, strict=True):
        with reading(folder / "result.json"):
            seconds.append(numbers.spent(lines, float(own["seconds"])) if own else {})
    with reading(folders[0] / "config.toml"):
        settings = flat(configs[0])
        method = METHODS.get(settings["method"])  # None for somebody's own
    return Arm(
        name=name,
        curves=[curve(folder, lines) for folder, lines in zip(folders, timed, strict=True)],
        runs=[folder.name for folder in folders],
        seeds=[int(own["seed"]) for own in configs],
        clients=[holdings(folder) for folder in folders],
        seconds=seconds,
        confusion=np.sum(known, axis=0) if len(known) == len(folders) else None,
        own=any(r.get("models") == "own" for r in results),
        pooled=method is not None and method.pooled,
        judged_on=results[0].get("judged_on") or ("validation" if settings.get("validation") else "test"),
        config=settings,
    )


def curve(folder: Path, timings: Sequence[dict[str, Any]]) -> Curve:
    """The lines of metrics.jsonl, with the seconds that the run had taken where all are known."""
    lines = record.metrics(folder)
    with reading(folder / "metrics.jsonl"):
        rounds = [line["round"] for line in lines]
    seconds = {line["round"]: line["seconds"] for line in timings}
    if any(number not in seconds for number in rounds):
        return lines
    return [line | {"seconds": seconds[line["round"]]} for line in lines]


def result(folder: Path) -> dict[str, Any]:
    """result.json; {} where there is none."""
    path = folder / "result.json"
    with reading(path):
        return store.read_json(path) if path.exists() else {}


def columns(path: Path) -> dict[str, list[Any]]:
    """A parquet file."""
    import pyarrow.parquet as pq

    table: dict[str, list[Any]] = pq.read_table(path).to_pydict()
    return table


def holdings(folder: Path) -> Holdings:
    """clients.parquet as columns."""
    path = folder / "clients.parquet"
    with reading(path):
        held = columns(path)
        return Holdings(
            real=np.array(held["real_by_class"], dtype=np.int64),
            synthetic=np.array(held["synthetic"], dtype=np.int64),
            accuracy=np.array(held["accuracy"], dtype=float),
        )


def rows(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """-> int64 [clients, classes] each: real rows; real and synthetic ones."""
    path = folder / "clients.parquet"
    with reading(path):
        held = columns(path)
        return np.array(held["real_by_class"], dtype=np.int64), np.array(held["rows_by_class"], dtype=np.int64)


def confusion(folder: Path) -> np.ndarray | None:
    """int64 [classes, classes], test images by what they were taken for (across); None where nobody counted them."""
    path = folder / "confusion.parquet"
    with reading(path):
        return np.array(columns(path)["taken_for"], dtype=np.int64) if path.exists() else None


def flat(values: dict[str, Any], head: str = "") -> dict[str, Any]:
    """A config by the keys of the command line: {"method": {"name": "fedprox", "mu": 0.1}} gives "method" and
    "method.mu"."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        whole = f"{head}.{key}" if head and key != "name" else head or key
        out |= flat(value, whole) if isinstance(value, dict) else {whole: value}
    return out


def versions(folder: Path) -> dict[str, str]:
    """Versions and hardware of a run, by name."""
    path = folder / "manifest.json"
    with reading(path):
        manifest = store.read_json(path)
        found: dict[str, str] = manifest["versions"] | manifest["hardware"]
        return found


def unlike(folders: Sequence[Path]) -> list[str]:
    """In which versions and hardware runs differ, as a sentence; nothing where they do not."""
    found = [versions(folder) for folder in folders]
    names = [n for n in dict.fromkeys(n for one in found for n in one) if len({one.get(n) for one in found}) > 1]
    return [f"The runs were not all made alike; they differ in {numbers.joined(names)}."] if names else []


def examples(folder: Path) -> tuple[tuple[str, ...], dict[str, dict[str, np.ndarray]]]:
    """-> (class names, {"real" | "synthetic": {class: uint8 [n, 3, H, W]}})"""
    images: dict[str, dict[str, np.ndarray]] = {"real": {}, "synthetic": {}}
    path = folder / "examples.safetensors"
    with reading(path), safe_open(path, framework="np") as f:
        classes = tuple(json.loads(f.metadata()["classes"]))
        for key in f.keys():  # noqa: SIM118  (the file is not a dict)
            kind, _, name = key.partition("/")
            images[kind][name] = f.get_tensor(key)
    for part in images.values():
        for name in [c for c in classes if c in part]:
            part[name] = part.pop(name)  # back in the order of the classes
    return classes, images
