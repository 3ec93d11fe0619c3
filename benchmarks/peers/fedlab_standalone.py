"""FedLab: its standalone pipeline with the serial trainer. As its documentation says, `train` is overridden for
another optimiser than SGD; the server averages clients alike, as it does by default."""

from clock import Clock, finish
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.core.standalone import StandalonePipeline
from task import own


class Data:
    """Batches by client; the server knows the round."""

    def __init__(self, server: "Server") -> None:
        self.server = server

    def get_dataloader(self, client: int, batch_size: int):  # type: ignore[no-untyped-def]
        return own().batches(client, self.server.round)


class Server(SyncServerHandler):
    def sample_clients(self) -> list[int]:
        return own().chosen(self.round)


class Trainer(SGDSerialClientTrainer):
    def train(self, model_parameters, train_loader):  # type: ignore[no-untyped-def]
        self.set_model(model_parameters)
        self.model.train()
        optimizer = own().optimise(self.model.parameters())
        for image, label in train_loader:
            optimizer.zero_grad()
            self.criterion(self.model(image), label).backward()
            optimizer.step()
        return [self.model_parameters]


class Pipeline(StandalonePipeline):
    clock: Clock

    def evaluate(self) -> None:
        """Called after every round."""
        self.clock.round()


def main() -> None:
    task = own()
    server = Server(task.model(), task.rounds, task.cohort / task.clients, cuda=False)
    trainer = Trainer(task.model(), task.clients, cuda=False)
    trainer.setup_dataset(Data(server))
    trainer.setup_optim(epochs=1, batch_size=task.batch, lr=task.lr)
    pipeline = Pipeline(server, trainer)
    task.load()
    pipeline.clock = Clock()
    pipeline.main()
    finish(task, pipeline.clock, server.model, "fedlab")


if __name__ == "__main__":
    main()
