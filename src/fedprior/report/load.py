"""Run directories read back as the data of a report."""

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from .. import record, resume, store
from ..errors import UserError
from ..methods import METHODS
from . import summary
from .summary import Arm, Curve, Holdings, ReportData


def config(folder: Path) -> dict[str, Any]:
    """A run's resolved experiment as plain values."""
    path = folder / "config.toml"
    if not path.exists():
        raise UserError(f"{folder} is no run directory (it has no config.toml); name one such as runs/digits-fedavg")
    return tomllib.loads(path.read_text(encoding="utf-8"))


def arm_name(values: dict[str, Any]) -> str:
    """E.g. "fedavg" or "fedavg+balance"."""
    return str(values["method"]["name"]) + ("+balance" if values.get("balance", "none") != "none" else "")


SAME = ("seed", "name", *(key for key in resume.FREE if key not in ("rounds", "evaluate_every")))
"""What may differ within an arm: what may change when a run goes on, but for which rounds there are and are judged."""


def group(folders: Sequence[Path]) -> dict[str, list[Path]]:
    """Runs that differ in nothing but `SAME` form one arm. Arms that would share a name are numbered."""
    arms: dict[str, tuple[str, list[Path]]] = {}
    for folder in folders:
        values = config(folder)
        key = json.dumps({k: v for k, v in values.items() if k not in SAME}, sort_keys=True)
        members = arms.setdefault(key, (arm_name(values), []))[1]
        for other in members:
            if config(other)["seed"] == values["seed"]:
                raise UserError(f"{other} and {folder} are the same setting and seed; name one of them")
        members.append(folder)
    out: dict[str, list[Path]] = {}
    for name, members in arms.values():
        n = sum(other == name or other.startswith(f"{name} ") for other in out)
        out[name if not n else f"{name} ({n + 1})"] = members
    return out


HELD_OUT = "Accuracies are on {:.0%} of the rows, held out of each client's rows, and not on the test set."


def report_data(folders: Sequence[Path], title: str = "", notes: Sequence[str] = ()) -> ReportData:
    """What a report shows of one run or of several. Distribution and images are those of the run with most rows.

    Raises UserError when a folder is not a whole run.
    """
    for folder in folders:
        if not (folder / "clients.parquet").exists():
            config(folder)
            raise UserError(f"{folder} did not finish, so there is nothing to report; run it again first")
    try:
        return _report_data(folders, title, notes)
    except (OSError, ValueError, KeyError, IndexError, TypeError, SafetensorError) as error:
        named = " and ".join(str(folder) for folder in folders)
        raise UserError(f"{named} cannot be read ({error!r}); run what is damaged again under another name=") from error


def check_done(folders: Sequence[Path]) -> None:
    """Raises UserError for a run that was stopped or is still going on: parts of it are from an earlier round."""
    for folder in folders:
        if (how := record.status(folder)) in ("running", "interrupted", "failed"):
            raise UserError(f"{folder} did not finish (it is {how}); `fedprior run {folder}` goes on with it")


def _report_data(folders: Sequence[Path], title: str, notes: Sequence[str]) -> ReportData:
    import pyarrow.parquet as pq

    arms = [arm(name, members) for name, members in group(folders).items()]
    tables = [pq.read_table(folder / "clients.parquet") for folder in folders]
    rows = [np.array(t["rows_by_class"].to_pylist(), dtype=np.int64) for t in tables]
    shown = max(range(len(folders)), key=lambda i: int(rows[i].sum()))
    before = np.array(tables[shown]["real_by_class"].to_pylist(), dtype=np.int64)
    classes, images = examples(folders[shown])
    for folder in folders:
        if examples(folder)[0] != classes:
            raise UserError(f"{folder} and {folders[shown]} have different classes; report them apart")
    if len({config(folder).get("validation") for folder in folders}) > 1:
        raise UserError("some of these runs are judged on held-out rows and others on other rows; report them apart")
    manifest = store.read_json(folders[shown] / "manifest.json")
    values = config(folders[shown])
    return ReportData(
        title=title or f"{values['data']['name']}: {' and '.join(arm.name for arm in arms)}",
        arms=arms,
        classes=classes,
        before=before,
        after=rows[shown] if (rows[shown] != before).any() else None,
        synthetic=images["synthetic"],
        real=images["real"],
        config=(folders[shown] / "config.toml").read_text(encoding="utf-8"),
        environment=manifest["versions"] | manifest["hardware"],
        notes=[
            *notes,
            *([HELD_OUT.format(values["validation"])] if values.get("validation") else []),
            *unlike(folders),
        ],
        target=next((t for folder in folders if (t := config(folder).get("target")) is not None), None),
    )


def arm(name: str, folders: Sequence[Path]) -> Arm:
    """One setting's runs, one a seed. What an earlier version did not record is left out."""
    results = [result(folder) for folder in folders]
    timed = [record.timings(folder) for folder in folders]
    matrices = [confusion(folder) for folder in folders]
    known = [m for m in matrices if m is not None]
    values = config(folders[0])
    method = METHODS.get(values["method"]["name"])  # None for somebody's own
    return Arm(
        name=name,
        curves=[curve(folder, lines) for folder, lines in zip(folders, timed, strict=True)],
        runs=[folder.name for folder in folders],
        seeds=[int(config(folder)["seed"]) for folder in folders],
        clients=[holdings(folder) for folder in folders],
        seconds=[summary.spent(t, float(r["seconds"])) if r else {} for t, r in zip(timed, results, strict=True)],
        confusion=np.sum(known, axis=0) if len(known) == len(folders) else None,
        own=any(r.get("models") == "own" for r in results),
        pooled=method is not None and method.pooled,
        judged_on=results[0].get("judged_on") or ("validation" if values.get("validation") else "test"),
        config=flat(values),
    )


def curve(folder: Path, timings: Sequence[dict[str, Any]]) -> Curve:
    """The lines of metrics.jsonl, with the seconds that the run had taken where all are known."""
    lines = record.metrics(folder)
    seconds = {line["round"]: line["seconds"] for line in timings}
    if any(line["round"] not in seconds for line in lines):
        return lines
    return [line | {"seconds": seconds[line["round"]]} for line in lines]


def result(folder: Path) -> dict[str, Any]:
    """result.json; {} where there is none."""
    path = folder / "result.json"
    return store.read_json(path) if path.exists() else {}


def holdings(folder: Path) -> Holdings:
    """clients.parquet as columns."""
    import pyarrow.parquet as pq

    columns = pq.read_table(folder / "clients.parquet").to_pydict()
    return Holdings(
        real=np.array(columns["real_by_class"], dtype=np.int64),
        synthetic=np.array(columns["synthetic"], dtype=np.int64),
        accuracy=np.array(columns["accuracy"], dtype=float),
    )


def confusion(folder: Path) -> np.ndarray | None:
    """int64 [classes, classes], test images by what they were taken for (across); None where nobody counted them."""
    import pyarrow.parquet as pq

    path = folder / "confusion.parquet"
    return np.array(pq.read_table(path)["taken_for"].to_pylist(), dtype=np.int64) if path.exists() else None


def flat(values: dict[str, Any], head: str = "") -> dict[str, Any]:
    """A config by the keys of the command line: {"method": {"name": "fedprox", "mu": 0.1}} gives "method" and
    "method.mu"."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        whole = f"{head}.{key}" if head and key != "name" else head or key
        out |= flat(value, whole) if isinstance(value, dict) else {whole: value}
    return out


def unlike(folders: Sequence[Path]) -> list[str]:
    """In which versions and hardware runs differ, as a sentence; nothing where they do not."""
    manifests = [store.read_json(folder / "manifest.json") for folder in folders]
    found = [m["versions"] | m["hardware"] for m in manifests]
    names = [n for n in dict.fromkeys(n for one in found for n in one) if len({one.get(n) for one in found}) > 1]
    return [f"The runs were not all made alike; they differ in {summary.joined(names)}."] if names else []


def examples(folder: Path) -> tuple[tuple[str, ...], dict[str, dict[str, np.ndarray]]]:
    """-> (class names, {"real" | "synthetic": {class: uint8 [n, 3, H, W]}})"""
    images: dict[str, dict[str, np.ndarray]] = {"real": {}, "synthetic": {}}
    with safe_open(folder / "examples.safetensors", framework="np") as f:
        classes = tuple(json.loads(f.metadata()["classes"]))
        for key in f.keys():  # noqa: SIM118  (the file is not a dict)
            kind, _, name = key.partition("/")
            images[kind][name] = f.get_tensor(key)
    for part in images.values():
        for name in [c for c in classes if c in part]:
            part[name] = part.pop(name)  # back in the order of the classes
    return classes, images
