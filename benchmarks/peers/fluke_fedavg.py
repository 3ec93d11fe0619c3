"""fluke: its FedAvg with models in memory, on its own FastDataLoader, which takes whole tensors and whole batches.

Batches get fedprior's own crops and flips. Clients forget their optimisers (`persistency=False`), as FedAvg says, and
evaluation after each round is off. Only fluke's public interface is used.
"""

from collections.abc import Sequence

import torch
from clock import Clock, finish
from fluke.algorithms.fedavg import FedAVG
from fluke.client import Client
from fluke.config import OptimizerConfigurator
from fluke.data import FastDataLoader
from fluke.server import Server
from fluke.utils import FederationObserver
from photos import CLASSES
from task import Task, own
from torch import Tensor, nn

from fedprior import seeds


class Rows(FastDataLoader):
    """A client's rows of the present round: one pass over them is the round's work."""

    def __init__(self, task: Task, clock: Clock, client: int) -> None:
        self.task, self.clock, self.client = task, clock, client
        super().__init__(*self.rows(), num_labels=CLASSES, batch_size=task.batch, transforms=self.augment)

    def rows(self) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(self.task.plan(self.client, len(self.clock.rounds)).flatten())
        return self.task.images.index_select(0, rows), self.task.labels[rows]

    def augment(self, image: Tensor) -> Tensor:
        return self.task.prepare(self.task.augmented(image, self.rng))

    def __iter__(self):  # type: ignore[no-untyped-def]
        self.rng = seeds.stream(self.task.seed, "augment", len(self.clock.rounds), self.client)
        self.tensors = self.rows()
        return super().__iter__()


class Chooser(Server):
    task: Task
    clock: Clock

    def get_eligible_clients(self, eligible_perc: float) -> Sequence[Client]:
        return [self.clients[k] for k in self.task.chosen(len(self.clock.rounds))]


class Rounds(FederationObserver):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def end_round(self, round: int) -> None:
        self.clock.round()


def main() -> None:
    task, clock = own(), Clock()
    task.load()
    optimizer = OptimizerConfigurator({"name": {"adamw": "AdamW", "sgd": "SGD"}[task.optimizer], "lr": task.lr})
    clients = [
        Client(k, Rows(task, clock, k), None, optimizer, nn.CrossEntropyLoss(), local_epochs=1, persistency=False)
        for k in range(task.clients)
    ]
    server = Chooser(task.model(), None, clients, weighted=False)
    server.task, server.clock = task, clock
    algorithm = FedAVG(task.clients, None, {}, clients=clients, server=server)
    algorithm.set_callbacks(Rounds(clock))
    clock.start()
    algorithm.run(task.rounds, task.cohort / task.clients)
    finish(task, clock, server.model, "fluke-fl")


if __name__ == "__main__":
    main()
