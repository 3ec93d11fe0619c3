"""GPT-FL (Zhang et al., 2025, arXiv:2306.02210): the server trains on the prior's images, then FedAvg goes on.

No client sees a synthetic image, and nothing but the model travels.
"""

from dataclasses import dataclass

from .. import tree
from ..data.table import Shard, Table
from ..local import Worker
from ..method import Method
from ..net import Net
from ..optim import AdamW
from ..tree import Tree
from .checks import above_zero, at_least


@dataclass(frozen=True, kw_only=True)
class GPTFL(Method):
    """Before round 1 the server takes `pretrain_epochs` passes over `images_per_class` images of each class, with
    AdamW at `pretrain_lr`. (The paper makes more images than the real set has rows, and leaves the choice of the
    optimiser open.)"""

    images_per_class: int = 100
    pretrain_epochs: float = 20.0
    pretrain_lr: float = 1e-3
    pretrain_batch: int = 32

    def __post_init__(self) -> None:
        at_least(1, images_per_class=self.images_per_class, pretrain_batch=self.pretrain_batch)
        above_zero(pretrain_epochs=self.pretrain_epochs, pretrain_lr=self.pretrain_lr)

    @property
    def images(self) -> int:
        return self.images_per_class

    def pretrain(self, net: Net, weights: Tree, images: Table, seed: int) -> Tree:
        import torch

        worker = Worker(
            net=net,
            method=Method(),
            optimizer=AdamW(lr=self.pretrain_lr),
            batch_size=self.pretrain_batch,
            epochs=self.pretrain_epochs,
            seed=seed,
        )
        shard = Shard(images, torch.arange(len(images["label"]), device=net.device))
        upload, _ = worker.train(0, shard, {"weights": weights, "shared": {}}, {}, 0)
        return {
            "params": tree.add(weights["params"], upload.tree["method"]["delta"]),
            "buffers": upload.tree["buffers"],
        }
