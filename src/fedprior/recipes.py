"""Named experiments: the settings of both papers, as plain functions.

What a paper leaves open is decided in docs/papers.md. Class names with a slash are paper/data set.
"""

from collections.abc import Callable
from dataclasses import replace

from .config import Data, Experiment, PriorChoice
from .data.partition import PARTITIONS
from .optim import SGD, AdamW
from .prepare.balance import BALANCES


def digits() -> Experiment:
    """The embedded digits over 20 clients, Dirichlet(0.05): seconds on a laptop, no network. No balance by default."""
    return Experiment()


def gen_fedsd_cifar10() -> Experiment:
    """Gen-FedSD, CIFAR-10 (arXiv:2405.07925, Table 4): 71.41 +- 0.45 with FedAvg at Dir(0.5), diverse prompts."""
    return Experiment(
        data=Data(name="cifar10"),
        clients=100,
        cohort=10,
        rounds=100,
        partition=PARTITIONS["dirichlet_balanced"](alpha=0.5),
        net="cct_2_3x2_32",
        local=AdamW(lr=5e-4, weight_decay=3e-2),
        steps=150,
        batch_size=64,
        prior=PriorChoice(name="sd1.4", steps=20, guidance=7.0, dtype="fp16"),
        balance=BALANCES["max"](),
        target=0.25,
    )


def gen_fedsd_cifar100() -> Experiment:
    """Gen-FedSD, CIFAR-100 (arXiv:2405.07925, Table 5): 46.91 +- 0.50 with FedAvg at Dir(0.5), diverse prompts."""
    return replace(
        gen_fedsd_cifar10(),
        data=Data(name="cifar100"),
        rounds=200,
        local=AdamW(lr=6e-4, weight_decay=6e-2),
        steps=100,
        target=None,
    )


def feddifrc_cifar10() -> Experiment:
    """The federated setting of FedDifRC on CIFAR-10 (arXiv:2507.06482) with plain FedAvg: 78.27 at NID1(0.05).

    The guidance itself is not part of this version.
    """
    return Experiment(
        data=Data(name="cifar10"),
        clients=10,
        cohort=5,
        rounds=50,
        partition=PARTITIONS["nid1_official"](alpha=0.05),
        net="resnet10",
        local=SGD(lr=0.01, momentum=0.9, weight_decay=1e-5),
        steps=None,
        epochs=10,
        batch_size=64,
        augment=True,
        prior=None,
    )


def feddifrc_cifar100() -> Experiment:
    """The federated setting of FedDifRC on CIFAR-100 (arXiv:2507.06482) with plain FedAvg."""
    local = SGD(lr=0.01, momentum=0.9, weight_decay=1e-4)
    return replace(feddifrc_cifar10(), data=Data(name="cifar100"), local=local)


RECIPES: dict[str, Callable[[], Experiment]] = {
    "digits": digits,
    "gen-fedsd/cifar10": gen_fedsd_cifar10,
    "gen-fedsd/cifar100": gen_fedsd_cifar100,
    "feddifrc/cifar10": feddifrc_cifar10,
    "feddifrc/cifar100": feddifrc_cifar100,
}
