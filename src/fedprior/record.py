"""A run directory: what is written, when, and how it is read again."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from filelock import FileLock, Timeout

from . import environment, store
from .config import Experiment, to_toml
from .errors import UserError
from .tree import Tree

SCHEMA_VERSION = 1


LINES = ("metrics", "timings")
ALWAYS = {"round", "accuracy", "uplink_bytes", "downlink_bytes"}  # keys of a line of metrics.jsonl


class Record:
    """Writes a run directory. `metrics.jsonl` holds what the same run gives again to the byte; times are apart.

    One process at a time writes to a directory: `with Record(...)` makes it and holds its lock. A `numbered` one is
    FOLDER, FOLDER-2, ..., the first that nobody has. A directory that was made for a run that never began is
    removed again.
    """

    def __init__(self, folder: Path, experiment: Experiment, numbered: bool = False) -> None:
        self.folder, self.experiment, self.numbered = folder, experiment, numbered
        self.made_parent = not folder.parent.exists()
        self.manifest: dict[str, Any] = {"schema_version": SCHEMA_VERSION}
        self.started = False  # from then on the manifest says how the run stands
        self.reserved = False

    def __enter__(self) -> Self:
        if self.numbered:
            self.folder = claim(self.folder.parent, self.folder.name)
        self.lock = FileLock(self.folder / "checkpoints" / "lock", timeout=0)
        try:
            (self.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
            self.lock.acquire()
        except Timeout:
            raise UserError(
                f"another process is writing to {self.folder}; wait for it or choose another name="
            ) from None
        except OSError as error:
            raise UserError(f"cannot write to {self.folder} ({error}); choose another name= or --runs") from None
        store.sweep(self.folder)
        return self

    def __exit__(self, *error: object) -> None:
        if not self.started:
            with suppress(OSError):  # whatever holds something stays
                if self.reserved:
                    (self.folder / "config.toml").unlink()
                if [path.name for path in (self.folder / "checkpoints").iterdir()] == ["lock"]:
                    (self.folder / "checkpoints" / "lock").unlink()
                (self.folder / "checkpoints").rmdir()
                self.folder.rmdir()
                if self.made_parent:
                    self.folder.parent.rmdir()
        self.lock.release()

    def reserve(self) -> None:
        """Leaves the settings where there are none, so that a run that is killed while it prepares can go on."""
        if not (self.folder / "config.toml").exists():
            self.reserved = True
            store.write_text(self.folder / "config.toml", to_toml(self.experiment))

    def begin(self) -> None:
        """From the first line."""
        self.started = True
        store.write_text(self.folder / "config.toml", to_toml(self.experiment))
        self.cut({})
        self.status("running")

    def resume(self, lengths: dict[str, int], done: int) -> None:
        """After the lines that a checkpoint counts on, with `done` rounds done."""
        self.started = True
        with suppress(OSError, ValueError):
            self.manifest |= store.read_json(self.folder / "manifest.json")
        self.manifest.pop("error", None)
        # before the new config: with that, and "done" from before, more rounds would look done
        before = self.manifest.get("resumed_after")
        self.status("running", resumed_after=[*(before if isinstance(before, list) else []), done])
        store.write_text(self.folder / "config.toml", to_toml(self.experiment))
        self.cut(lengths)

    def cover(self, lengths: dict[str, int], done: int) -> None:
        """Raises ValueError unless the line files begin with `done` whole lines of these lengths, OSError where they
        cannot be read."""
        for name in LINES:
            head = (self.folder / f"{name}.jsonl").read_bytes()[: lengths.get(name, 0)] if lengths.get(name) else b""
            lines = [json.loads(line) for line in head.splitlines()]
            if len(head) < lengths.get(name, 0) or len(lines) != done:
                raise ValueError(f"{name}.jsonl lacks lines of the {done} rounds")

    def rounds(self) -> int:
        """Whole lines in metrics.jsonl."""
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def lengths(self) -> dict[str, int]:
        """The bytes of the line files."""
        return {name: self._size(name) for name in LINES}

    def _size(self, name: str) -> int:
        path = self.folder / f"{name}.jsonl"
        return path.stat().st_size if path.exists() else 0

    def cut(self, lengths: dict[str, int]) -> None:
        """Leaves the first so many bytes of each line file."""
        for name in LINES:
            if self._size(name) > lengths.get(name, 0):
                with (self.folder / f"{name}.jsonl").open("rb+") as f:
                    f.truncate(lengths.get(name, 0))
                    os.fsync(f.fileno())

    def status(self, status: str, **more: Any) -> None:
        """Says in manifest.json how the run stands: running, done, failed or interrupted."""
        self.manifest |= {"status": status, **more}
        self.manifest |= {"versions": environment.versions(), "hardware": environment.hardware()}
        store.write_json(self.folder / "manifest.json", self.manifest)

    def round(self, metrics: dict[str, Any], timings: dict[str, Any]) -> None:
        """One line each, on disk before this returns."""
        for name, line in zip(LINES, (metrics, timings), strict=True):
            with (self.folder / f"{name}.jsonl").open("a", encoding="utf-8") as f:
                f.write(json.dumps(line, allow_nan=False) + "\n")
                f.flush()
                os.fsync(f.fileno())

    def weights(self, weights: Tree, about: dict[str, Any]) -> None:
        """The global model as an ordinary state dict in safetensors; what it is lies in the metadata as JSON, under
        one key, since the order of several would differ from file to file."""
        flat = {k: v.detach().cpu().contiguous() for part in weights.values() for k, v in part.items()}
        store.save_tensors(flat, self.folder / "model.safetensors", {"about": json.dumps(about)})

    def clients(self, columns: dict[str, np.ndarray | list[Any]]) -> None:
        """One row a client."""
        self._columns("clients", columns)

    def confusion(self, classes: Sequence[str], counts: np.ndarray) -> None:
        """One row a class, `taken_for` its test images by the class that they were taken for; `counts` int64 [classes,
        classes]."""
        self._columns("confusion", {"class": list(classes), "taken_for": list(counts)})

    def _columns(self, name: str, columns: dict[str, np.ndarray | list[Any]]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        with store.atomic(self.folder / f"{name}.parquet") as temporary:
            pq.write_table(pa.table(dict(columns)), temporary)

    def examples(self, classes: Sequence[str], images: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """A few images of each kind and class, uint8 [n, 3, H, W], for the report."""
        flat = {f"{kind}/{name}": x.cpu().contiguous() for kind, part in images.items() for name, x in part.items()}
        store.save_tensors(flat, self.folder / "examples.safetensors", {"classes": json.dumps(list(classes))})

    def result(self, result: dict[str, Any]) -> None:
        store.write_json(self.folder / "result.json", {"schema_version": SCHEMA_VERSION} | result)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    path = folder / "metrics.jsonl"
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if not lines or not all(isinstance(line, dict) and line.keys() >= ALWAYS for line in lines):
            raise ValueError("no lines of rounds")
        return lines
    except FileNotFoundError:
        raise UserError(f"{folder} holds no metrics.jsonl; name a run directory, e.g. runs/digits-fedavg") from None
    except ValueError:
        raise UserError(f"{path} is damaged; run the experiment again under another name=") from None


def timings(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's timings.jsonl; none where it is gone or damaged, since no result depends on it."""
    try:
        text = (folder / "timings.jsonl").read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines()]
    except (OSError, ValueError):
        return []
    return lines if all(isinstance(line, dict) for line in lines) else []


def status(folder: Path) -> str:
    """How a run stands; "unknown" where its manifest cannot be read."""
    try:
        return str(store.read_json(folder / "manifest.json").get("status", "unknown"))
    except (OSError, ValueError):
        return "unknown"


def claim(root: Path, name: str) -> Path:
    """Makes root/name, or root/name-2, ... and returns it: no other process gets the same one."""
    while True:
        folder = free_folder(root, name)
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            if not root.is_dir():
                raise UserError(f"{root} is no directory; choose another --runs") from None
        except OSError as error:
            raise UserError(f"cannot write to {root} ({error}); choose another --runs") from None


def free_folder(root: Path, name: str) -> Path:
    """root/name, or root/name-2, -3, ... the first that is not in use."""
    n = 1
    while os.path.lexists(folder := root / (name if n == 1 else f"{name}-{n}")):  # a dangling link is in use too
        n += 1
    return folder
