"""Accuracy on real images: in all, by class, and what each client would see of it."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .data.table import Table
from .net import Net
from .tree import Tree

PIXELS = 100 * 32 * 32  # of one batch: larger ones leave the CPU's cache (1.5 times slower at 500 x 32 x 32)
ON_GPU = 40  # times as many, so that a GPU is busy with each


class Evaluation(NamedTuple):
    """What a model recognises of a table of real images."""

    correct: np.ndarray  # int64 [classes], test images of each class recognised
    total: np.ndarray  # int64 [classes], test images of each class
    loss: float  # mean cross-entropy over images
    domain_correct: np.ndarray = np.empty(0, np.int64)  # int64 [domains], test images of each domain recognised
    domain_total: np.ndarray = np.empty(0, np.int64)  # int64 [domains], test images of each domain

    @property
    def accuracy(self) -> float:
        """Over all images; or the mean of the domains' accuracies, so that each domain counts alike (F2DC)."""
        if len(self.domain_total):
            return float(np.nanmean(self.per_domain))
        return float(self.correct.sum() / self.total.sum())

    @property
    def per_domain(self) -> np.ndarray:
        """float64 [domains] in [0, 1]; NaN where the test set has no image of a domain."""
        with np.errstate(invalid="ignore"):
            return np.asarray(self.domain_correct / self.domain_total)

    @property
    def per_class(self) -> np.ndarray:
        """float64 [classes] in [0, 1]; NaN where the test set has no image of a class."""
        with np.errstate(invalid="ignore"):
            return np.asarray(self.correct / self.total)


def evaluate(net: Net, weights: Tree, table: Table, classes: int) -> Evaluation:
    """Top-1 accuracy of a model on a table of real images; by domain too, where it has a column `domain`.

    Raises ValueError when the table is empty or holds a synthetic image.
    """
    check(table)
    return summed(table, *read(net, weights, table), classes)


def check(table: Table) -> None:
    """Raises ValueError for a table that nothing may be evaluated on."""
    if not len(table["label"]):
        raise ValueError("there is nothing to evaluate on")
    if table["synthetic"].any():
        raise ValueError("synthetic images must not enter an evaluation")


def batch_size(table: Table) -> int:
    """Images of a batch."""
    image = table["image"]
    return max(1, PIXELS * (ON_GPU if image.is_cuda else 1) // image[0, 0].numel())


def batches(table: Table, parts: int) -> list[tuple[int, int]]:
    """At most `parts` ranges of rows (first, behind last), about as long, of whole batches."""
    rows, size = len(table["label"]), batch_size(table)
    cuts = [size * round(-(-rows // size) * i / parts) for i in range(parts)] + [rows]
    return [(first, last) for first, last in pairwise(cuts) if first < last]


@torch.inference_mode()
def read(net: Net, weights: Tree, table: Table) -> tuple[Tensor, list[float]]:
    """-> (which images are recognised, bool [n]; the sum of losses of each batch)"""
    size = batch_size(table)
    hits, losses = [], []
    for image, label in zip(table["image"].split(size), table["label"].split(size), strict=True):
        logits = net(weights, image, train=False).logits
        losses.append(F.cross_entropy(logits, label, reduction="sum"))
        hits.append(logits.argmax(1) == label)
    return torch.cat(hits), torch.stack(losses).tolist()


@torch.inference_mode()
def answers(net: Net, weights: Tree, table: Table) -> Tensor:
    """The class that a model takes each image for, int64 [n]. Raises ValueError as `evaluate`."""
    check(table)
    parts = table["image"].split(batch_size(table))  # the batches of `read`, so that no rounding tells the two apart
    return torch.cat([net(weights, image, train=False).logits.argmax(1) for image in parts])


def summed(table: Table, hits: Tensor, losses: Sequence[float], classes: int) -> Evaluation:
    """What `read` found out about a table, in numbers."""
    by_class = _counts(table["label"], hits, classes)
    by_domain = _counts(table["domain"], hits) if "domain" in table else ()
    return Evaluation(*by_class, sum(losses) / len(table["label"]), *by_domain)


@torch.inference_mode()
def embed(net: Net, weights: Tree, table: Table) -> Tensor:
    """Features [n, D] of a table's images in evaluation mode."""
    return torch.cat([net(weights, image, train=False).features for image in table["image"].split(batch_size(table))])


def _counts(group: Tensor, hits: Tensor, least: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """-> (hits, rows) of each group, int64 [groups]"""
    rows = group.bincount(minlength=least)
    return group[hits].bincount(minlength=len(rows)).cpu().numpy(), rows.cpu().numpy()


def accuracy_by_client(per_class: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Each client's expected accuracy on test images mixed like its own real rows, float64 [clients].

    `per_class` [classes] is one model's for all clients, or [clients, classes] is each client's own;
    `counts` int64 [clients, classes] are real rows. Rows of classes that the test set lacks (NaN) do not
    count; NaN for a client that has no others.
    """
    rates = np.broadcast_to(per_class, counts.shape)
    tested = np.where(np.isnan(rates), 0, counts)
    with np.errstate(invalid="ignore"):
        return np.asarray((np.nan_to_num(rates) * tested).sum(1) / tested.sum(1))


def client_accuracies(per_class: np.ndarray, counts: np.ndarray) -> dict[str, float | None]:
    """What the clients see, in numbers: mean, weighted (by real rows), std, p10 (10th percentile) and worst of
    `accuracy_by_client` over the clients that have one; all None when there is none."""
    accuracy = accuracy_by_client(per_class, counts)
    known = np.isfinite(accuracy)
    if not known.any():
        return dict.fromkeys(("mean", "weighted", "std", "p10", "worst"))
    accuracy, sizes = accuracy[known], counts[known].sum(1)
    return {
        "mean": float(accuracy.mean()),
        "weighted": float(np.average(accuracy, weights=sizes)),
        "std": float(accuracy.std()),
        "p10": float(np.percentile(accuracy, 10)),
        "worst": float(accuracy.min()),
    }
