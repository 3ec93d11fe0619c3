"""A run directory: what is written, when, and how it is read again."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from . import environment, store
from .config import Experiment, to_toml
from .errors import UserError
from .tree import Tree

SCHEMA_VERSION = 1


class Record:
    """Writes a run directory. `metrics.jsonl` holds what the same run gives again to the byte; times are apart."""

    def __init__(self, folder: Path, experiment: Experiment) -> None:
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"{folder} is not empty; choose another name= or remove it first")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        store.write_text(folder / "config.toml", to_toml(experiment))
        self.manifest: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "status": "running"}
        self.status("running")

    def status(self, status: str, **more: Any) -> None:
        """Says in manifest.json how the run stands: running, done, failed or interrupted."""
        self.manifest |= {"status": status, **more}
        self.manifest |= {"versions": environment.versions(), "hardware": environment.hardware()}
        store.write_json(self.folder / "manifest.json", self.manifest)

    def round(self, metrics: dict[str, Any], timings: dict[str, Any]) -> None:
        """One line each, on disk before this returns."""
        for name, line in (("metrics", metrics), ("timings", timings)):
            with (self.folder / f"{name}.jsonl").open("a", encoding="utf-8") as f:
                f.write(json.dumps(line, allow_nan=False) + "\n")
                f.flush()
                os.fsync(f.fileno())

    def weights(self, weights: Tree, about: dict[str, str]) -> None:
        """The global model as an ordinary state dict in safetensors."""
        flat = {k: v.detach().cpu().contiguous() for part in weights.values() for k, v in part.items()}
        with store.atomic(self.folder / "model.safetensors") as temporary:
            save_file(flat, temporary, metadata=about)

    def clients(self, columns: dict[str, np.ndarray | list[Any]]) -> None:
        """One row a client."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        with store.atomic(self.folder / "clients.parquet") as temporary:
            pq.write_table(pa.table(dict(columns)), temporary)

    def examples(self, classes: Sequence[str], images: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """A few images of each kind and class, uint8 [n, 3, H, W], for the report."""
        flat = {f"{kind}/{name}": x.cpu().contiguous() for kind, part in images.items() for name, x in part.items()}
        with store.atomic(self.folder / "examples.safetensors") as temporary:
            save_file(flat, temporary, metadata={"classes": json.dumps(list(classes))})

    def result(self, result: dict[str, Any]) -> None:
        store.write_json(self.folder / "result.json", {"schema_version": SCHEMA_VERSION} | result)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        raise UserError(f"{folder} holds no metrics.jsonl; name a run directory, e.g. runs/digits-fedavg")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def free_folder(root: Path, name: str) -> Path:
    """root/name, or root/name-2, -3, ... the first that is not in use."""
    n = 1
    while (folder := root / (name if n == 1 else f"{name}-{n}")).exists():
        n += 1
    return folder


def weight_digest(weights: Tree) -> str:
    """SHA-256 over names and values of all weights: equal digests mean equal models."""
    parts: list[bytes | str] = []
    for group in weights.values():
        for name, x in sorted(group.items()):
            parts += [
                name,
                x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() if x.ndim else str(x.item()),
            ]
    return store.digest(*parts)
