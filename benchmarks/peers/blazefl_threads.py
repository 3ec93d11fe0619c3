"""BlazeFL: its thread pool with one thread, the faster of its two pools on one core. The model stays on hand from one
client to the next; the mean is that of its own FedAvg handler, clients alike."""

import threading
from dataclasses import dataclass

from blazefl.contrib import FedAvgBaseServerHandler
from blazefl.core import ThreadPoolClientTrainer, deserialize_model, serialize_model
from clock import Clock, finish
from task import Task, own
from torch import Tensor


@dataclass
class Down:
    weights: Tensor
    round: int


class Trainer(ThreadPoolClientTrainer[Tensor, Down]):
    def __init__(self, task: Task) -> None:
        self.task, self.model = task, task.model()
        self.num_parallels, self.device, self.device_count = 1, "cpu", 0
        self.cache, self.stop_event = [], threading.Event()

    def worker(self, cid: int, device: str, payload: Down, stop_event: threading.Event) -> Tensor:
        deserialize_model(self.model, payload.weights)
        self.task.train(self.model, cid, payload.round)
        return serialize_model(self.model)

    def uplink_package(self) -> list[Tensor]:
        package, self.cache = self.cache, []
        return package


def main() -> None:
    task = own()
    task.load()
    server, trainer = task.model(), Trainer(task)
    clock = Clock()
    for round in range(task.rounds):
        trainer.local_process(Down(serialize_model(server), round), task.chosen(round))
        uploads = trainer.uplink_package()
        deserialize_model(server, FedAvgBaseServerHandler.aggregate(uploads, [1] * len(uploads)))
        clock.round()
    finish(task, clock, server, "blazefl")


if __name__ == "__main__":
    main()
