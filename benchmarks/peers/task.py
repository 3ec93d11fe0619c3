"""The federated work that every contestant does: net, shards, cohorts, batches, local training.

Whoever runs it reads the settings from the variable PEERS_TASK (JSON). The draws of a run (weights, shards, cohorts,
batches) follow fedprior's own rule, so all contestants take the same steps on the same images in the same order.
The net is fedprior's module, which needs torch alone: peers thus get its cheaper order of pooling and ReLU too.
"""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from photos import CLASSES, SIDE, Photos, channels_first
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fedprior import nets, seeds
from fedprior.data.augment import HALF, cropped, draw_crops, normalise

Batches = Iterable[tuple[Tensor, Tensor]]  # images float32 [B, 3, 32, 32], labels int64 [B]


@dataclass(frozen=True, kw_only=True)
class Task:
    """Settings of a run. `exact` leaves out all that contestants draw on their own (augmentation, dropout), so that
    they must come to the same weights."""

    folder: str  # of the data, and where the record goes
    net: str  # "cct" or "linear"
    optimizer: str  # "adamw" or "sgd"
    lr: float
    steps: int  # of a client in a round
    rounds: int
    clients: int = 20
    cohort: int = 5
    batch: int = 64
    alpha: float = 0.1
    seed: int = 0
    exact: bool = False
    loader: str = "images"  # or "tensors"; only for contestants whose users bring their own loader
    precision: str = "fp32"  # only fedprior's
    channels_last: bool = False  # only for plain loops

    def array(self, name: str) -> np.ndarray:
        return np.load(Path(self.folder) / f"{name}.npy")

    @cached_property
    def photos(self) -> np.ndarray:
        """uint8 [n, 32, 32, 3], as image files give them"""
        return self.array("train")

    @cached_property
    def images(self) -> Tensor:
        """uint8 [n, 3, 32, 32]"""
        return channels_first(self.array("train"))

    @cached_property
    def labels(self) -> Tensor:
        return torch.from_numpy(self.array("train_label"))

    @cached_property
    def shards(self) -> list[np.ndarray]:
        """Row numbers of each client, by Dirichlet(alpha) over each class."""
        label = self.array("train_label")
        for attempt in range(1000):
            rng = seeds.stream(self.seed, "shards", attempt)
            parts: list[list[np.ndarray]] = [[] for _ in range(self.clients)]
            for k in range(CLASSES):
                rows = rng.permutation(np.flatnonzero(label == k))
                cuts = (np.cumsum(rng.dirichlet([self.alpha] * self.clients))[:-1] * len(rows)).astype(int)
                for part, some in zip(parts, np.split(rows, cuts), strict=True):
                    part.append(some)
            shards = [np.sort(np.concatenate(part)) for part in parts]
            if min(map(len, shards)) >= 10:
                return shards
        raise ValueError("no split left every client ten images")

    def load(self) -> None:
        """Reads what training needs, so that no clock runs meanwhile."""
        _ = self.shards, self.labels, self.images if self.loader == "tensors" else self.photos

    def chosen(self, round: int) -> list[int]:
        """The cohort of a round, as fedprior draws it."""
        rng = seeds.stream(self.seed, "cohort", round)
        return sorted(rng.choice(range(self.clients), self.cohort, replace=False).tolist())

    def plan(self, client: int, round: int) -> np.ndarray:
        """Rows int64 [steps, batch] of the table: shuffled passes over the shard, joined, as fedprior draws them."""
        rng, rows = seeds.stream(self.seed, "batches", round, client), self.shards[client]
        passes = -(-self.steps * self.batch // len(rows))
        order = np.concatenate([rng.permutation(len(rows)) for _ in range(passes)])[: self.steps * self.batch]
        return rows[order].reshape(self.steps, self.batch)

    def module(self) -> nn.Module:
        """The net before round 1; its forward gives (features, logits)."""
        if self.net == "linear":
            with torch.random.fork_rng():
                torch.manual_seed(seeds.number(self.seed, "net"))
                return Linear()
        net = nets.build(self.net, CLASSES, size=SIDE, seed=self.seed)
        for part in net.modules() if self.exact else ():
            for rate in {"p", "rate"} & vars(part).keys():
                setattr(part, rate, 0.0)
        return net

    def model(self) -> nn.Module:
        """The same for peers: its forward gives the logits."""
        return Logits(self.module())

    def optimise(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[self.optimizer](params, lr=self.lr)

    def batches(self, client: int, round: int) -> Batches:
        """A client's batches of a round, for peers whose users bring their own loader."""
        if self.loader == "tensors":
            return self.tensors(client, round)
        order = self.plan(client, round).flatten().tolist()
        return DataLoader(Photos(self.photos, self.labels, augment=not self.exact), self.batch, sampler=order)

    def tensors(self, client: int, round: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The same a whole batch at a time, by fedprior's own code, for peers that keep tensors on hand."""
        rng = seeds.stream(self.seed, "augment", round, client)
        for rows in torch.from_numpy(self.plan(client, round)):
            yield self.prepare(self.augmented(self.images.index_select(0, rows), rng)), self.labels[rows]

    def augmented(self, image: Tensor, rng: np.random.Generator) -> Tensor:
        return image if self.exact else cropped(image, torch.from_numpy(draw_crops(rng, len(image))))

    def prepare(self, image: Tensor) -> Tensor:
        x = normalise(image, *HALF)
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last else x

    def train(self, model: nn.Module, client: int, round: int) -> None:
        """What users of the peers write as local training."""
        model.train()
        optimizer = self.optimise(model.parameters())
        for image, label in self.batches(client, round):
            optimizer.zero_grad()
            F.cross_entropy(model(image), label).backward()
            optimizer.step()

    def test(self) -> Batches:
        image, label = self.array("test"), torch.from_numpy(self.array("test_label"))
        if self.loader == "tensors":
            return (
                (self.prepare(x), y) for x, y in zip(channels_first(image).split(100), label.split(100), strict=True)
            )
        return DataLoader(Photos(image, label, augment=False), batch_size=100)

    @torch.inference_mode()
    def accuracy(self, model: nn.Module) -> float:
        """What users of the peers write as evaluation."""
        model.eval()
        hits = [(model(image).argmax(1) == label) for image, label in self.test()]
        return float(torch.cat(hits).float().mean())


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.width = 3 * SIDE * SIDE
        self.head = nn.Linear(self.width, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = x.flatten(1)
        return z, self.head(z)


class Logits(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)[1]
        return logits


@cache
def own() -> Task:
    """The task of this process."""
    torch.set_num_threads(1)
    task = Task(**json.loads(os.environ["PEERS_TASK"]))
    torch.manual_seed(task.seed)
    return task
