"""A trained model on images of its own: what a run exported, read back, and what it says of files and folders."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from . import environment, evaluate, nets, record, store
from .config import CHOICES, Experiment, from_toml
from .data import origins, site, sources
from .data.origins import SUFFIXES, TESTS, Rows
from .data.table import Federation
from .errors import UsageError, UserError, unknown
from .evaluate import Evaluation
from .guide import HEAD
from .methods import METHODS
from .net import Net, layout
from .progress import Progress, Silent
from .tree import Tree

ABOUT = ("net", "method", "settings", "classes", "size", "mean", "std", "precision")
MODEL = "model.safetensors"
DEVICES = ("auto", "cpu", "cuda")


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
    that is damaged, is no model of fedprior's or was written by a version that did not say all of ABOUT.
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
        module = _module(said)
        net = Net(module.to(where), said["mean"], said["std"], said["precision"])
        fresh = net.init()
        flat = {name: x for name, x in flat.items() if name in net.names or not name.startswith(f"{HEAD}.")}
        shapes = {name: x.shape for part in fresh.values() for name, x in part.items()}
        if {name: x.shape for name, x in flat.items()} != shapes:
            raise ValueError(f"its tensors are not those of net={said['net']} under method={said['method']}")
        height, width = said["size"]
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{file} cannot be used ({error}); take the version of fedprior that wrote it") from None
    weights = {part: {name: flat[name].to(where) for name in named} for part, named in fresh.items()}
    return Classifier(net, layout(weights), tuple(said["classes"]), (height, width), said)


def _module(said: dict[str, Any]) -> torch.nn.Module:
    """The net of a model file, with initial weights."""
    height, width = said["size"]
    module = nets.build(said["net"], len(said["classes"]), size=(height, width))
    if said["method"] not in METHODS:  # somebody's own; most leave the net as it is
        return module
    return replace(METHODS[said["method"]](), **said["settings"]).adapt(module, 0)


def exported(path: Path) -> Path:
    """The model file of a run directory, or the file itself. Raises UserError where there is none."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise UserError(f"there is no {path}; name a run directory such as runs/digits-fedavg, or its {MODEL}")
    if not (path / "config.toml").exists():
        raise UserError(f"{path} is no run directory (it has no config.toml); name one such as runs/digits-fedavg")
    if (how := record.status(path)) != "done":
        raise UserError(f"{path} did not finish (it is {how}); `fedprior run {path}` goes on with it")
    if not (path / MODEL).exists():
        experiment = from_toml(path / "config.toml")
        method = CHOICES["method"].name_of(experiment.method)
        raise UserError(
            f"{path} has no global model: with method={method} and bn_stats={experiment.bn_stats} each client keeps a "
            "part of it, so there is nothing to use elsewhere"
        )
    return path / MODEL


class Found(NamedTuple):
    """The images of one path, not yet decoded."""

    rows: Rows
    image: str  # their column
    labels: Tensor | None  # int64 [n], numbers of the model's classes; None where nothing says them
    remark: str  # why labels that there seemed to be do not count; "" where they do, or there are none


def find(path: Path, classes: Sequence[str], image: str = "", label: str = "") -> Found:
    """The images of a file, of a folder with all below it, or of a data set on disk; of several splits the test split.

    Class folders and label columns give labels where each row's class is one of the model's by name (or number, where
    the data have no names). `image` and `label` name columns. Raises UserError where there is no image, and for a
    column named by `label` that does not give the model's classes.
    """
    rows = _rows(path)
    try:
        pictures = sources.columns(rows, image or None, label or rows.columns.column_names[0])[0]
    except UserError as error:
        raise _reworded(error) from None
    if not label and rows.columns.column_names == [pictures]:
        return Found(rows, pictures, None, "")
    try:
        column = label or sources.columns(rows, pictures, None)[1]
        return Found(rows, pictures, _labels(rows, column, classes), "")
    except UserError as error:
        if label:
            raise _reworded(error) from None
        return Found(rows, pictures, None, f"no accuracy for {path}: {_reworded(error)}")


def _reworded(error: UserError) -> UserError:
    """With this command's words for columns."""
    text = str(error).replace("data.image=", "--image ").replace("data.label=", "--label ")
    return type(error)(text.replace("data.path=", ""))


def _rows(path: Path) -> Rows:
    if path.is_file() and path.suffix.lower() in SUFFIXES:
        return _pictures([path], path.parent)
    if not path.exists():
        raise UserError(f"there is no {path}; name an image, a folder of images or a parquet file")
    if path.is_dir() and not _is_data_set(path):
        pictures = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
        pictures = [p for p in pictures if not any(part.startswith(".") for part in p.relative_to(path).parts)]
        if not pictures:
            raise UserError(f"there is no image in {path} or below it; images end in {', '.join(sorted(SUFFIXES))}")
        if any(p.parent == path for p in pictures):
            return _pictures(pictures, path)
    elif path.is_file() and path.suffix != ".parquet":
        raise UserError(f"{path} is neither an image nor a parquet file; images end in {', '.join(sorted(SUFFIXES))}")
    origin = origins.local(path)
    split = next((name for name in TESTS if name in origin.splits), origin.splits[0])
    if split not in TESTS and len(origin.splits) > 1:
        raise UserError(f"{path} has splits {', '.join(origin.splits)} and none called test; name the file of one")
    return sources.split(origin, split)


def _is_data_set(folder: Path) -> bool:
    """Whether a folder holds what `origins.local` reads, class folders aside."""
    files = ("dataset_dict.json", "state.json")
    return any((folder / name).exists() for name in files) or any(
        any(folder.glob(pattern)) for pattern in ("*.parquet", "data/*.parquet")
    )


def _pictures(files: Sequence[Path], folder: Path) -> Rows:
    """Image files that no class is known of."""
    import datasets
    import pyarrow as pa

    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    images = pa.array([{"bytes": None, "path": str(file)} for file in files], type=struct)
    features = datasets.Features({"image": datasets.Image()})
    return Rows(pa.table({"image": images}), features, str(folder), lambda row: str(files[row]))


def _labels(rows: Rows, column: str, classes: Sequence[str]) -> Tensor:
    """Each row's number within the model's classes, int64 [n]."""
    import pyarrow as pa

    if column not in rows.columns.column_names:
        raise UsageError(f"{rows.where} has no column '{column}', only {', '.join(rows.columns.column_names)}")
    if pa.types.is_integer(rows.columns[column].type) and not sources.declared(rows, column):
        return sources.labels(rows, column, classes)[0]
    own, written = sources.labels(rows, column, None)
    means = site.finder(classes)
    number = torch.tensor([which[0] if len(which := means(sources.readable(name))) == 1 else -1 for name in written])
    found = number[own]
    if (found < 0).any():
        name = written[int(own[found < 0][0])]
        raise UserError(f"column '{column}' of {rows.where} has '{name}', which is no class of the model")
    return found


class Answer(NamedTuple):
    """What the model says of one image."""

    image: str  # a file, or a row of one
    label: int | None  # its class, where that is known
    top: tuple[int, ...]  # classes, the likeliest first
    probabilities: tuple[float, ...]  # theirs


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
    counted in `tally`. Raises UserError, with file and row, for one that cannot be decoded."""
    rows, size, n = found.rows, batch or classifier.batch, len(found.rows.columns)
    height, width = classifier.size
    with (progress or Silent()).task("images", n) as update:
        for first in range(0, n, size):
            part = rows._replace(columns=rows.columns.slice(first, size), at=lambda row: rows.at(first + row))
            logits = classifier.logits(sources.pixels(part, found.image, (width, height)))
            labels = None if found.labels is None else found.labels[first : first + size]
            if labels is not None:
                tally.add(logits, labels)
            order = logits.argsort(dim=1, descending=True, stable=True)[:, :top]
            chances = logits.softmax(1).gather(1, order)
            for row, (which, p) in enumerate(zip(order.tolist(), chances.tolist(), strict=True)):
                label = None if labels is None else int(labels[row])
                yield Answer(rows.at(first + row), label, tuple(which), tuple(p))
            update(first + len(order), "")


def write(answers: Iterator[Answer], classes: Sequence[str], out: Path, top: int) -> int:
    """Writes a line an image, as CSV or, where `out` ends in .jsonl, as JSON Lines -> how many."""
    import csv

    n = 0
    with store.atomic(out) as temporary, temporary.open("w", encoding="utf-8", newline="") as f:
        table = csv.writer(f)
        if out.suffix == ".csv":
            ranks = [name for k in range(1, top + 1) for name in (f"class_{k}", f"probability_{k}")]
            table.writerow(["image", "label", *ranks])
        for n, answer in enumerate(answers, 1):  # noqa: B007
            if out.suffix == ".csv":
                label = "" if answer.label is None else classes[answer.label]
                pairs = zip(answer.top, answer.probabilities, strict=True)
                table.writerow([answer.image, label, *(x for k, p in pairs for x in (classes[k], p))])
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
    }
