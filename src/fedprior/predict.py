"""A trained model on images of its own: what a run exported, read back, and what it says of files and folders."""

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from . import environment, evaluate, nets, record, store
from .config import CHOICES, Experiment, from_toml
from .data import sources
from .data.pictures import Found
from .data.table import Federation
from .errors import UserError, unknown
from .evaluate import Evaluation
from .guide import HEAD
from .methods import METHODS
from .net import Net, Precision, layout
from .progress import Progress, Silent
from .tree import Tree

ABOUT = ("net", "method", "settings", "classes", "size", "mean", "std", "precision")
MODEL = "model.safetensors"
DEVICES = ("auto", "cpu", "cuda")
LARGEST = 4096  # pixels a side of a model's images; a file that says more is damaged


def about(experiment: Experiment, net: Net, federation: Federation) -> dict[str, Any]:
    """What a model file says of its weights, as JSON values: all that `load` needs, and nothing that equal runs could
    differ in. `size` is (height, width) in pixels; `settings` are the method's, which may have changed the net."""
    method = experiment.method
    return {
        "net": experiment.net,
        "method": CHOICES["method"].name_of(method),
        "settings": {f.name: getattr(method, f.name) for f in fields(method) if f.metadata.get("config", True)},
        "classes": list(federation.classes),
        "size": list(federation.test["image"].shape[2:]),
        "mean": list(net.mean),
        "std": list(net.std),
        "precision": net.precision,
    }


@dataclass(frozen=True)
class Classifier:
    """A model and what it was trained on: `classifier(images)` gives probabilities."""

    net: Net
    weights: Tree
    classes: tuple[str, ...]
    size: tuple[int, int]  # height, width in pixels
    about: dict[str, Any]  # as in the file

    def __call__(self, images: Tensor) -> Tensor:
        """Images uint8 [n, 3, H, W] of `size` -> probabilities float32 [n, classes], on the CPU."""
        return self.logits(images).softmax(1)

    @torch.inference_mode()
    def logits(self, images: Tensor) -> Tensor:
        """The same before the softmax, float32 [n, classes].

        Raises ValueError for images of another shape or type, UserError where the model gives no finite numbers.
        """
        if images.dtype != torch.uint8 or images.ndim != 4 or tuple(images.shape[1:]) != (3, *self.size):
            height, width = self.size
            raise ValueError(f"images must be uint8 [n, 3, {height}, {width}], not {images.dtype} {list(images.shape)}")
        parts = images.to(self.net.device).split(self.batch)
        found = [self.net(self.weights, part, train=False).logits.float().cpu() for part in parts if len(part)]
        out = torch.cat(found) if found else torch.zeros(0, len(self.classes))
        if not out.isfinite().all():
            raise UserError("the model gives no finite numbers for some images: its training diverged")
        return out

    @property
    def batch(self) -> int:
        """Images of a forward pass, as many as a run evaluates at once: another number can change last bits."""
        one = torch.empty((1, 3, *self.size), dtype=torch.uint8, device=self.net.device)
        return evaluate.batch_size({"image": one})


def load(path: str | Path, device: str = "auto") -> Classifier:
    """The global model of a run directory, or a `model.safetensors` alone; no other file is needed then. `device` is
    auto, cpu or cuda.

    Raises UsageError for another device, UserError for a run that is not done or has no global model, and for a file
    that is damaged, is no model of fedprior's or was written by a version that did not say all of ABOUT. Weights in
    another floating type than a run's (a file that somebody halved) are taken into the run's, float32 as a rule; no
    other type is changed.
    """
    if device not in DEVICES:
        raise unknown("device", device, DEVICES)
    file = exported(Path(path).expanduser())
    try:
        with safe_open(file, framework="pt") as opened:
            notes = opened.metadata() or {}
            flat = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  (the file is not a dict)
        said = json.loads(notes.get("about", "null"))
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({str(error).partition(chr(10))[0]}); copy it again") from None
    if not isinstance(said, dict):
        raise UserError(f"{file} is no model that fedprior exported: its metadata say nothing of net and classes")
    if missing := [key for key in ABOUT if key not in said]:
        raise UserError(
            f"{file} does not say {', '.join(missing)}, since an older fedprior wrote it; remove result.json in its "
            "run directory and `fedprior run` the directory: that writes both again, without training"
        )
    where = environment.device(device)
    try:
        _vet(said)
        module = _module(said)
        net = Net(module.to(where), said["mean"], said["std"], said["precision"])
        fresh = net.init()
        flat = {name: x for name, x in flat.items() if name in net.names or not name.startswith(f"{HEAD}.")}
        own = {name: x for part in fresh.values() for name, x in part.items()}
        if {name: x.shape for name, x in flat.items()} != {name: x.shape for name, x in own.items()}:
            raise ValueError(f"its tensors are not those of net={said['net']} under method={said['method']}")
        for name, x in flat.items():
            if x.dtype != own[name].dtype and not (x.is_floating_point() and own[name].is_floating_point()):
                raise ValueError(f"its tensor {name} holds {x.dtype}, not {own[name].dtype}")
        height, width = said["size"]
    except (UserError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, MemoryError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"{file} cannot be used ({reason}); take the file as a run wrote it, and that version of fedprior"
        ) from None
    weights = {part: {name: flat[name].to(where, own[name].dtype) for name in named} for part, named in fresh.items()}
    return Classifier(net, layout(weights), tuple(said["classes"]), (height, width), said)


def _vet(said: dict[str, Any]) -> None:
    """Raises ValueError, with what is wrong, for metadata that no run writes."""

    def numbers(key: str, kinds: tuple[type, ...], n: int) -> bool:
        given = said[key]
        return isinstance(given, list) and len(given) == n and all(type(x) in kinds and math.isfinite(x) for x in given)

    def words(given: Any) -> bool:
        return isinstance(given, list) and bool(given) and all(isinstance(x, str) for x in given)

    precisions = get_args(Precision)
    rules = {
        "net": (isinstance(said["net"], str), "a name"),
        "method": (isinstance(said["method"], str), "a name"),
        "settings": (isinstance(said["settings"], dict), "names and values"),
        "classes": (words(said["classes"]), "names"),
        "size": (
            numbers("size", (int,), 2) and all(1 <= x <= LARGEST for x in said["size"]),
            f"two whole numbers up to {LARGEST}",
        ),
        "mean": (numbers("mean", (int, float), 3), "three numbers"),
        "std": (numbers("std", (int, float), 3) and all(x > 0 for x in said["std"]), "three numbers above 0"),
        "precision": (said["precision"] in precisions, " or ".join(precisions)),
    }
    for key, (right, wanted) in rules.items():
        if not right:
            given = json.dumps(said[key])
            raise ValueError(f"it says {key}: {given[:60]}{'...' * (len(given) > 60)}, which is not {wanted}")


def _module(said: dict[str, Any]) -> torch.nn.Module:
    """The net of a model file, with initial weights."""
    height, width = said["size"]
    module = nets.build(said["net"], len(said["classes"]), size=(height, width))
    if said["method"] not in METHODS:  # somebody's own; most leave the net as it is
        return module
    return replace(METHODS[said["method"]](), **said["settings"]).adapt(module, 0)


def exported(path: Path) -> Path:
    """The model file of a run directory, or the file itself. Raises UserError where there is none."""
    if os.path.isfile(path):  # unlike Path's, false for a name that is too long
        return path
    if not os.path.isdir(path):
        raise UserError(f"there is no {path}; name a run directory such as runs/digits-fedavg, or its {MODEL}")
    if not (path / "config.toml").exists():
        raise UserError(f"{path} is no run directory (it has no config.toml); name one such as runs/digits-fedavg")
    if (how := record.status(path)) != "done":
        raise UserError(f"{path} did not finish (it is {how}); `fedprior run {path}` goes on with it")
    if not (path / MODEL).exists():
        if _models(path) != "own":
            raise UserError(
                f"{path / MODEL} is gone; remove result.json there and `fedprior run {path}`: that writes both again, "
                "without training"
            )
        experiment = from_toml(path / "config.toml")
        method = CHOICES["method"].name_of(experiment.method)
        raise UserError(
            f"{path} has no global model: with method={method} and bn_stats={experiment.bn_stats} each client keeps a "
            "part of it, so there is nothing to use elsewhere"
        )
    return path / MODEL


def _models(folder: Path) -> str:
    """Whose models a run that is done has judged, "own" or "global"; "" where its result cannot be read."""
    try:
        return str(store.read_json(folder / "result.json").get("models", ""))
    except (OSError, ValueError):
        return ""


class Answer(NamedTuple):
    """What the model says of one image."""

    image: str  # a file, or a row of one
    label: int | None  # its class, where that is known
    top: tuple[int, ...]  # classes, the likeliest first; none where there is an error
    probabilities: tuple[float, ...]  # theirs
    error: str = ""  # why the image could not be read


class Tally:
    """Adds up how often the model is right."""

    def __init__(self, classes: int) -> None:
        self.correct, self.total = np.zeros((2, classes), dtype=np.int64)
        self.losses: list[float] = []

    def add(self, logits: Tensor, labels: Tensor) -> None:
        hits = logits.argmax(1) == labels
        self.correct += labels[hits].bincount(minlength=len(self.total)).numpy()
        self.total += labels.bincount(minlength=len(self.total)).numpy()
        self.losses.append(F.cross_entropy(logits, labels, reduction="sum").item())

    def evaluation(self) -> Evaluation | None:
        """None where no image had a label."""
        rows = int(self.total.sum())
        return Evaluation(self.correct, self.total, sum(self.losses) / rows) if rows else None


def answers(
    classifier: Classifier,
    found: Found,
    tally: Tally,
    *,
    top: int = 3,
    batch: int | None = None,
    progress: Progress | None = None,
) -> Iterator[Answer]:
    """What the model says of each image, `batch` decoded at a time and fitted as for training; images with labels are
    counted in `tally`, but for those that cannot be read."""
    rows, size, n = found.rows, batch or classifier.batch, len(found.rows.columns)
    height, width = classifier.size
    with (progress or Silent()).task("images", n) as update:
        for first in range(0, n, size):
            part = rows._replace(columns=rows.columns.slice(first, size), at=lambda row: rows.at(first + row))
            unread: dict[int, str] = {}
            images = sources.pixels(part, found.image, (width, height), unread.__setitem__)
            read = torch.tensor([row not in unread for row in range(len(images))])
            logits = classifier.logits(images[read])
            labels = None if found.labels is None else found.labels[first : first + size]
            if labels is not None:
                known = labels[read] >= 0
                tally.add(logits[known], labels[read][known])
            order = logits.argsort(dim=1, descending=True, stable=True)[:, :top]
            chances = logits.softmax(1).gather(1, order)
            said = zip(order.tolist(), chances.tolist(), strict=True)
            for row in range(len(images)):
                label = None if labels is None or labels[row] < 0 else int(labels[row])
                which, p = ([], []) if row in unread else next(said)
                yield Answer(rows.at(first + row), label, tuple(which), tuple(p), unread.get(row, ""))
            update(first + len(images), "")


def write(answers: Iterator[Answer], classes: Sequence[str], out: Path, top: int) -> int:
    """Writes a line an image, as CSV or, where `out` ends in .jsonl, as JSON Lines -> how many. The column `error` is
    always there, and empty for images that were read."""
    import csv

    n = 0
    with store.atomic(out) as temporary, temporary.open("w", encoding="utf-8", newline="") as f:
        table = csv.writer(f)
        if out.suffix == ".csv":
            ranks = [name for k in range(1, top + 1) for name in (f"class_{k}", f"probability_{k}")]
            table.writerow(["image", "label", *ranks, "error"])
        for n, answer in enumerate(answers, 1):  # noqa: B007
            if out.suffix == ".csv":
                label = "" if answer.label is None else classes[answer.label]
                pairs = zip(answer.top, answer.probabilities, strict=True)
                cells = [x for k, p in pairs for x in (classes[k], p)] or [""] * (2 * top)
                table.writerow([answer.image, label, *cells, answer.error])
            else:
                f.write(json.dumps(spoken(answer, classes), allow_nan=False) + "\n")
    return n


def spoken(answer: Answer, classes: Sequence[str]) -> dict[str, Any]:
    """An answer as JSON, with the names of classes."""
    pairs = zip(answer.top, answer.probabilities, strict=True)
    return {
        "image": answer.image,
        "label": None if answer.label is None else classes[answer.label],
        "top": [{"class": classes[k], "probability": p} for k, p in pairs],
        "error": answer.error or None,
    }
