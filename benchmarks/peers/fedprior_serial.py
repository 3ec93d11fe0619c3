"""fedprior: the serial engine, fp32 or bf16, weights of all clients alike."""

from itertools import islice

import torch
from clock import Clock, report
from photos import CLASSES, channels_first
from task import own

from fedprior.data.table import Federation, make
from fedprior.engines.serial import Serial
from fedprior.evaluate import evaluate
from fedprior.federate import begin, federate
from fedprior.local import Worker
from fedprior.methods import FedAvg
from fedprior.net import Net
from fedprior.optim import OPTIMIZERS
from fedprior.traffic import Traffic


def main() -> None:
    task = own()
    data = Federation(
        table=make(task.images, task.labels),
        clients=tuple(map(torch.from_numpy, task.shards)),
        test=make(channels_first(task.array("test")), torch.from_numpy(task.array("test_label"))),
        classes=tuple(map(str, range(CLASSES))),
    )
    worker = Worker(
        net=Net(task.module(), precision=task.precision),
        method=FedAvg(),
        optimizer=OPTIMIZERS[task.optimizer](lr=task.lr),
        batch_size=task.batch,
        steps=task.steps,
        augment=not task.exact,
        weight_by="uniform",
        seed=task.seed,
    )
    server = begin(worker.net, worker.method, task.seed)
    loop = federate(server, worker.method, Serial(worker, data), cohort=task.cohort, seed=task.seed, traffic=Traffic())
    clock = Clock()
    for result in islice(loop, task.rounds):
        server = result.server
        clock.round()
    accuracy = evaluate(worker.net, server.weights, data.test, CLASSES).accuracy
    report(task, clock, server.weights["params"].values(), clock.lap(), accuracy, "fedprior")


if __name__ == "__main__":
    main()
