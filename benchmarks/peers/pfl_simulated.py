"""pfl-research: FederatedAveraging on the simulated backend, its fastest way on one core.

A user's data set is made when the user is sampled, as whole tensors, with fedprior's own crops and flips on each
batch: pfl has no loader of its own that augments. The metrics that it wants of the first round are not computed.
"""

import torch
import torch.nn.functional as F
from clock import Clock, finish
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from task import Logits, own
from torch import Tensor


class Model(Logits):
    def loss(self, image: Tensor, label: Tensor, eval: bool = False) -> Tensor:
        self.train(not eval)
        return F.cross_entropy(self(image), label)

    def metrics(self, image: Tensor, label: Tensor, eval: bool = False) -> dict[str, Weighted]:
        return {"loss": Weighted(0.0, len(label))}


class Rounds(TrainingProcessCallback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):  # type: ignore[no-untyped-def]
        self.clock.round()
        return False, Metrics()


def main() -> None:
    task = own()
    task.load()
    users = iter([(client, round) for round in range(task.rounds) for client in task.chosen(round)])

    def user_data(user: tuple[int, int]) -> Dataset:
        image, label = zip(*task.tensors(*user), strict=True)
        return Dataset([torch.cat(image), torch.cat(label)], user_id=str(user[0]))

    net = Model(task.module())
    optimizer = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[task.optimizer]
    model = PyTorchModel(net, optimizer, torch.optim.SGD(net.parameters(), lr=1.0))
    clock = Clock()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=task.rounds,
            evaluation_frequency=task.rounds,
            train_cohort_size=task.cohort,
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(training_data=FederatedDataset(user_data, lambda: next(users)), val_data=None),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=task.lr, local_batch_size=task.batch
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=task.batch),
        callbacks=[Rounds(clock)],
        send_metrics_to_platform=False,
    )
    finish(task, clock, net, "pfl")


if __name__ == "__main__":
    main()
