"""Small nets, data and runs that several test files share."""

from itertools import islice

import numpy as np
import torch
from torch import nn

from fedprior import tree
from fedprior.data.table import Federation, make
from fedprior.engines.serial import Serial
from fedprior.federate import begin, federate
from fedprior.local import Worker
from fedprior.method import Method
from fedprior.net import Net
from fedprior.optim import SGD
from fedprior.traffic import Traffic

CLASSES = ("ant", "bee", "cat", "dog")


class TinyCNN(nn.Module):
    """Batch norm and a linear head on 8 x 8 images."""

    width = 8

    def __init__(self, norm: str = "bn") -> None:
        super().__init__()
        layer = nn.BatchNorm2d(8) if norm == "bn" else nn.GroupNorm(2, 8)
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), layer, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.head = nn.Linear(8, len(CLASSES))

    def forward(self, x):
        z = self.body(x)
        return z, self.head(z)


def net(norm: str = "bn", seed: int = 0, method: Method | None = None) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = TinyCNN(norm)
    return Net((method or Method()).adapt(module, seed))


def images(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Images whose class shows in their colour, and labels."""
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(len(CLASSES), (n,), generator=g)
    colour = torch.randint(40, 216, (len(CLASSES), 3, 1, 1), generator=torch.Generator().manual_seed(1))
    noise = torch.randint(-30, 31, (n, 3, 8, 8), generator=g)
    return (colour[label] + noise).clamp(0, 255).to(torch.uint8), label


def federation(sizes=(30, 20, 25, 35, 10, 40), seed: int = 0) -> Federation:
    image, label = images(sum(sizes), seed)
    rows = torch.arange(sum(sizes)).split(list(sizes))
    return Federation(table=make(image, label), clients=tuple(rows), test=make(*images(50, seed + 1)), classes=CLASSES)


def worker(method, norm: str = "bn", **options) -> Worker:
    defaults = {"optimizer": SGD(lr=0.05), "batch_size": 8, "epochs": None if "steps" in options else 1.0}
    return Worker(net=net(norm, method=method), method=method, **(defaults | options))


def go(
    method,
    rounds: int = 3,
    cohort: int = 4,
    data: Federation | None = None,
    engine=Serial,
    rules=None,
    memory=None,
    **options,
):
    """-> (last round's result, engine, traffic); `rules` are further arguments of federate, the rest the worker's"""
    w = worker(method, **options)
    e, traffic = engine(w, data or federation(), memory), Traffic()
    start = begin(w.net, method, w.seed, w.bn_stats)
    loop = federate(start, method, e, cohort=cohort, seed=w.seed, traffic=traffic, **(rules or {}))
    return list(islice(loop, rounds))[-1], e, traffic


def gap(a, b) -> float:
    """Largest absolute difference between two trees of the same paths."""
    a, b = tree.flatten(a), tree.flatten(b)
    assert a.keys() == b.keys()
    gaps = [float((a[k].double() - b[k].double()).abs().max()) for k in a if a[k].numel()]
    return float(np.max(gaps)) if gaps else 0.0  # NaN where there is one
