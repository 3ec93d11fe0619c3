"""Named experiments: the settings of both papers, as plain functions.

What a paper leaves open is decided in docs/papers.md. Class names with a slash are paper/data set.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from .config import Data, Experiment, PriorChoice, from_toml, override
from .data.partition import PARTITIONS
from .errors import unknown
from .guide import FedDifRC
from .method import Method
from .methods import (
    CCVR,
    GPTFL,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedBN,
    FedDisco,
    FedDyn,
    FedNH,
    FedNova,
    FedProto,
    FedProx,
    FedSC,
    FedYogi,
    Moon,
    Scaffold,
)
from .optim import SGD, AdamW
from .prepare.balance import BALANCES, BalanceToMax


def digits() -> Experiment:
    """The embedded digits over 20 clients, Dirichlet(0.05): seconds on a laptop, no network. No balance by default."""
    return Experiment()


def cifar10_embedded() -> Experiment:
    """Gen-FedSD on real CIFAR-10 with the prior that ships: 20 clients share rows that it has not seen (the private
    half), Dirichlet(0.1). Minutes on a CPU; other sizes and rates than the paper's, so other numbers too."""
    return Experiment(
        data=Data(name="cifar10", half="private"),
        clients=20,
        cohort=5,
        rounds=24,
        partition=PARTITIONS["dirichlet"](alpha=0.1),
        net="cct_2_3x2_32",
        local=SGD(lr=0.05),
        steps=25,
        batch_size=64,
        precision="bf16",
        evaluate_every=3,
        prior=PriorChoice(name="cifar10"),
        balance=BalanceToMax(cap=300),
    )


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
    """FedDifRC on CIFAR-10 (arXiv:2507.06482): 83.14 at NID1(0.05), and 78.27 with plain FedAvg."""
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
        prior=PriorChoice(name="sd2.1", dtype="fp16"),
        guide=FedDifRC(),
    )


def feddifrc_cifar100() -> Experiment:
    """FedDifRC on CIFAR-100 (arXiv:2507.06482)."""
    local = SGD(lr=0.01, momentum=0.9, weight_decay=1e-4)
    return replace(feddifrc_cifar10(), data=Data(name="cifar100"), local=local)


def feddifrc_domains(data: Data, template: str, **domains: object) -> Experiment:
    """FedDifRC under domain shift, in the protocol of its author's later code (F2DC): 10 clients of one domain each,
    all in every round, 100 rounds; the accuracy is the mean of the domains'."""
    return replace(
        feddifrc_cifar10(),
        data=data,
        cohort=10,
        rounds=100,
        partition=PARTITIONS["domains"](**domains),
        guide=FedDifRC(template=template),
    )


def feddifrc_office() -> Experiment:
    """FedDifRC on Office-Caltech-10, four domains over 10 clients by F2DC's fixed map; needs data.path=."""
    return feddifrc_domains(
        Data(name="office_caltech10", size=32),
        "a photo of a {}",
        assignment="caltech10:3,amazon:2,webcam:2,dslr:3",
    )


def feddifrc_pacs() -> Experiment:
    """FedDifRC on PACS, four domains over 10 clients at random, each domain at one of them at least."""
    return feddifrc_domains(Data(name="pacs", size=32), "a photo of a {}")


def feddifrc_digits() -> Experiment:
    """FedDifRC on digits of several domains (MNIST, MNIST-M, USPS, ...), each client with 1 % of its domain; needs
    data.path=."""
    return feddifrc_domains(Data(name="digits_domains", size=32), "a photo of the number {}", fraction=0.01)


# What each paper's tables compare with; a setting that differs from the method's own default is the paper's code's.
GEN_FEDSD_ROWS: dict[str, Method] = {
    "fedprox": FedProx(mu=0.001),  # FedZoo-Bench, on which the paper's code is built
    "fednova": FedNova(),  # with equal steps it equals FedAvg, whatever the paper's table says
    "scaffold": Scaffold(mode="post"),
}
FEDDIFRC_ROWS: dict[str, Method] = {
    "fedavg": FedAvg(),
    "fedavgm": FedAvgM(server=SGD(lr=1.0, momentum=0.97)),
    "fedprox": FedProx(mu=0.01),
    "fednova": FedNova(),
    "scaffold": Scaffold(mode="post"),
    "fedadam": FedAdam(),
    "fedyogi": FedYogi(),
    "fedadagrad": FedAdagrad(),
    "moon": Moon(projection=None),  # its code family contrasts the backbone's own features
    "feddyn": FedDyn(),
    "fedproto": FedProto(share="both"),
    "fednh": FedNH(),
    "fedbn": FedBN(),
    "feddisco": FedDisco(),
    "fedsc": FedSC(),
    "ccvr": CCVR(),
}
SERVER_STAGE: dict[str, Method] = {"gptfl": GPTFL()}
"""A rival of both papers that spends the same prior on the server. It takes no balance."""


def with_method(recipe: Callable[[], Experiment], method: Method) -> Callable[[], Experiment]:
    """The recipe with another method, that method's own server optimiser and no guide."""

    def changed() -> Experiment:
        base = recipe()
        balance = None if isinstance(method, GPTFL) else base.balance
        return replace(base, method=method, server=None, balance=balance, guide=None)

    changed.__doc__ = f"{recipe.__doc__} With {type(method).__name__}."
    return changed


def _recipes() -> dict[str, Callable[[], Experiment]]:
    out: dict[str, Callable[[], Experiment]] = {"digits": digits, "cifar10-embedded": cifar10_embedded}
    for paper, rows, recipes in (
        ("gen-fedsd", GEN_FEDSD_ROWS, {"cifar10": gen_fedsd_cifar10, "cifar100": gen_fedsd_cifar100}),
        ("feddifrc", FEDDIFRC_ROWS, {"cifar10": feddifrc_cifar10, "cifar100": feddifrc_cifar100}),
    ):
        for data, recipe in recipes.items():
            out[f"{paper}/{data}"] = recipe
            for name, method in (rows | SERVER_STAGE).items():
                out[f"{paper}/{data}/{name}"] = with_method(recipe, method)
    out["feddifrc/office_caltech10"], out["feddifrc/pacs"] = feddifrc_office, feddifrc_pacs
    out["feddifrc/digits_domains"] = feddifrc_digits
    return out


RECIPES: dict[str, Callable[[], Experiment]] = _recipes()
"""By name: "paper/data" is the paper's own setting with FedAvg, "paper/data/method" a row of its tables."""


def spoken(words: Sequence[str]) -> Experiment:
    """The experiment that words name: a recipe, a TOML file or a run directory, then changes."""
    base, words = Experiment(), list(words)
    if words and "=" not in words[0]:
        source = words.pop(0)
        path = settings_file(source)
        if path is None:
            base = RECIPES[source]()
        else:
            base = from_toml(path)
            base = replace(base, name="") if Path(source).is_dir() else base  # the directory keeps its name
    return override(base, words)


def settings_file(source: str) -> Path | None:
    """The TOML file that a first word names: itself or a run directory's; None for a recipe. Raises UsageError else."""
    path = Path(source)
    if source in RECIPES:
        return None
    if path.is_dir():
        return path / "config.toml"
    if path.suffix == ".toml" or path.is_file():
        return path
    raise unknown("recipe, file or run directory", source, RECIPES)


FEDDIFRC_ABLATION: dict[str, tuple[str, tuple[str, ...]]] = {
    "none (FedAvg)": ("", ("guide=none",)),
    "TDCL": ("tdcl", ()),
    "NDCR": ("ndcr", ()),
    "both": ("both", ()),
    "both, level 2 only": ("both", ("guide.levels=2",)),
    "both, level 3 only": ("both", ("guide.levels=3",)),
    "both, level 4 only": ("both", ("guide.levels=4",)),
    "both, levels 2,3,4": ("both", ("guide.levels=2,3,4",)),
    "random class anchors in TDCL's place": ("random", ()),
    "text anchors in TDCL's place": ("text", ()),
    "both, random anchors for TDCL": ("both", ("guide.anchors=random",)),
    "NDCR, another image's target": ("ndcr", ("guide.target=shuffled",)),
    "TDCL, black images described": ("tdcl", ("guide.scaling=legacy",)),
    "NDCR, black images described": ("ndcr", ("guide.scaling=legacy",)),
    "both, t = 0": ("both", ("guide.timestep=0",)),
    "both, t = 100": ("both", ("guide.timestep=100",)),
    "both, t = 300": ("both", ("guide.timestep=300",)),
    "both, t = 500": ("both", ("guide.timestep=500",)),
    "both, t = 999": ("both", ("guide.timestep=999",)),
    "both, dynamic condition": ("both", ("guide.condition=dynamic",)),
    "both, 3 negatives": ("both", ("guide.negatives=3",)),
    "both, the paper's settings": ("", ("guide=feddifrc",)),
    "both, the released code's loss": (
        "",
        (
            "guide=feddifrc",
            "guide.consistency=kl_softmax",
            "guide.reduction=batch_ratio",
            "guide.pairing=official",
            "guide.pca=per_batch",
            "guide.pool=l2",
        ),
    ),
}
"""Arms of FedDifRC's ablation: whose searched settings ("tdcl", "ndcr", "both", "random", "text"; "" for none), and the
words that change them. Random and text anchors decide how much is diffusion knowledge and how much is a fixed
prototype."""
