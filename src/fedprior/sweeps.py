"""The tables of both papers as sweeps, at four scales, and the numbers that the papers print.

A scale says what it makes smaller. `full` is the paper's; `gpu-hour` and `cpu-hour` are meant to take about an hour on
one large GPU or on two cores; `smoke` takes minutes from data that ship.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from .errors import UsageError, unknown
from .sweep import Axis, Sweep, key_of, several, whole
from .tables import Published

SEEDS = (0, 1, 2)


class Scale(NamedTuple):
    base: tuple[str, ...]
    says: str  # what is smaller than in the paper
    seeds: tuple[int, ...] = SEEDS


GEN_FEDSD_METHODS = Axis(
    name="algorithm",
    values={
        "FedAvg": ("method=fedavg",),
        "FedProx": ("method=fedprox", "method.mu=0.001"),
        "FedNova": ("method=fednova",),
        "SCAFFOLD": ("method=scaffold", "method.mode=post"),
    },
)
GEN_FEDSD_DATA = Axis(
    name="data",
    values={
        "vanilla": ("balance=none",),
        "+ no diversity": ("balance.templates=single",),
        "+ diversity": ("balance.templates=clip",),
    },
)


def alphas(*targets: float) -> Axis:
    """Dir(0.5), Dir(0.1) and Dir(0.05), each with the accuracy whose price is asked for, if any."""
    named = zip(("0.5", "0.1", "0.05"), targets or (None,) * 3, strict=True)
    aims = {alpha: (f"target={target}",) if target else () for alpha, target in named}
    return Axis(name="partition", values={f"Dir({a})": (f"partition.alpha={a}", *more) for a, more in aims.items()})


TARGETS = (0.25, 0.2, 0.18)  # of Gen-FedSD's Table 3
EMBEDDED = (
    "an embedded prior of 11.5 MB in the place of Stable Diffusion, the half of the training images that it has not "
    "seen, dealt by a plain Dirichlet to 20 clients of which 5 take part in each of 30 rounds with 30 steps of SGD, a "
    "small CNN, classes filled up to 300 rows at most from pools of 100 images a class"
)
SMOKE = (
    "the embedded digits and their prior, dealt by a plain Dirichlet to 8 clients of which 4 take part in each of 6 "
    "rounds with 8 steps of a small CNN, pools of 20 images a class in 5 sampling steps, two seeds"
)
CPU = ("net=cnn", "steps=30", "rounds=30", "precision=fp32", "balance.pool_size=100", "evaluate_every=1")
TINY = (
    "digits",
    "clients=8",
    "cohort=4",
    "rounds=6",
    "steps=8",
    "balance=max",
    "balance.pool_size=20",
    "prior.steps=5",
)
GPU = ("rounds=25", "steps=50", "prior=sd-turbo", "prior.dtype=fp16", "balance.pool_size=200", "device=cuda")
GPU_SAYS = (
    "25 rounds with 50 steps, SD-Turbo in the place of Stable Diffusion 1.4, pools of 200 images a class; not run yet, "
    "since no GPU was at hand"
)

CIFAR10_SCALES = {
    "full": Scale(("gen-fedsd/cifar10",), ""),
    "gpu-hour": Scale(("gen-fedsd/cifar10", *GPU), GPU_SAYS),
    "cpu-hour": Scale(("cifar10-embedded", *CPU), EMBEDDED),
    "smoke": Scale(TINY, SMOKE, (0, 1)),
}
CIFAR100_SCALES = {
    "full": Scale(("gen-fedsd/cifar100",), ""),
    "gpu-hour": Scale(
        ("gen-fedsd/cifar100", *GPU, "balance.pool_size=50"), GPU_SAYS.replace("pools of 200", "pools of 50")
    ),
    "smoke": Scale(TINY, SMOKE, (0, 1)),
}


def gen_fedsd(table: str, scales: dict[str, Scale], *targets: float) -> Callable[[str], Sweep]:
    def made(scale: str) -> Sweep:
        base, says, seeds = _scale(f"gen-fedsd/{table}", scales, scale)
        return Sweep(
            name=f"gen-fedsd-{table}-{scale}",
            base=base,
            rows=(GEN_FEDSD_METHODS, GEN_FEDSD_DATA),
            columns=(alphas(*targets),),
            seeds=seeds,
            table=f"gen-fedsd/{table}",
            scale=says,
        )

    return made


FEDDIFRC_PARTITIONS = Axis(
    name="partition",
    values={
        **{f"NID1 {a}": ("partition=nid1_official", f"partition.alpha={a}") for a in ("0.05", "0.2", "0.5")},
        "NID2": ("partition=nid2",),
    },
)
FEDDIFRC_METHODS = Axis(
    name="method",
    values={
        "FedAvg": ("method=fedavg", "guide=none"),
        "FedProx": ("method=fedprox", "method.mu=0.01", "guide=none"),
        "MOON": ("method=moon", "method.projection=none", "guide=none"),
        "FedNH": ("method=fednh", "guide=none"),
        "FedDifRC": ("method=fedavg", "guide=feddifrc"),
    },
)
FEDDIFRC_TERMS = Axis(
    name="terms",
    values={
        "none (FedAvg)": ("guide=none",),
        "TDCL": ("guide=feddifrc", "guide.ndcr=0"),
        "NDCR": ("guide=feddifrc", "guide.tdcl=0"),
        "both": ("guide=feddifrc",),
        "both, layer 2 only": ("guide=feddifrc", "guide.levels=2"),
        "both, layer 3 only": ("guide=feddifrc", "guide.levels=3"),
        "both, layers 2,3,4": ("guide=feddifrc", "guide.levels=2,3,4"),
    },
)
GUIDED = (
    "an embedded prior of 11.5 MB in the place of Stable Diffusion 2.1, the half of the training images that it has "
    "not seen, a small CNN without crops and flips, 10 clients of which 5 take part in each of 20 rounds with 30 steps "
    "of SGD; timestep 150, and layer 3 where a row names no others, which suit that prior (the paper's are 300 and "
    "2,3,4)"
)
GUIDED_SMOKE = (
    "the embedded digits and their prior, 10 clients of which 4 take part in each of 6 rounds with 8 steps of a small "
    "CNN, two seeds"
)
FEDDIFRC_SCALES = {
    "full": Scale(("feddifrc/cifar10",), ""),
    "gpu-hour": Scale(
        ("feddifrc/cifar10", "rounds=25", "epochs=2", "device=cuda"),
        "25 rounds with 2 epochs; not run yet, since no GPU was at hand",
    ),
    "cpu-hour": Scale(
        (
            *("feddifrc/cifar10", "data.half=private", "prior=cifar10", "prior.dtype=fp32", "net=cnn"),
            *("augment=false", "rounds=20", "steps=30"),
            *("local=sgd", "local.lr=0.05", "local.momentum=0", "local.weight_decay=0"),
        ),
        GUIDED,
    ),
    "smoke": Scale(
        ("digits", "clients=10", "cohort=4", "rounds=6", "steps=8", "partition.min_size=0"), GUIDED_SMOKE, (0, 1)
    ),
}


def feddifrc(table: str, rows: Axis) -> Callable[[str], Sweep]:
    def made(scale: str) -> Sweep:
        base, says, seeds = _scale(f"feddifrc/{table}", FEDDIFRC_SCALES, scale)
        return Sweep(
            name=f"feddifrc-{table}-{scale}",
            base=base,
            rows=(rows,),
            columns=(FEDDIFRC_PARTITIONS,),
            seeds=seeds,
            table=f"feddifrc/{table}",
            scale=says,
        )

    return made


def _scale(name: str, scales: dict[str, Scale], scale: str) -> Scale:
    if scale not in scales:
        raise unknown(f"scale of {name}", scale, scales)
    return scales[scale]


SWEEPS: dict[str, Callable[[str], Sweep]] = {
    "gen-fedsd/table1": gen_fedsd("table1", CIFAR10_SCALES, *TARGETS),
    "gen-fedsd/table2": gen_fedsd("table2", CIFAR100_SCALES),
    "gen-fedsd/table3": gen_fedsd("table3", CIFAR10_SCALES, *TARGETS),
    "feddifrc/table1": feddifrc("table1", FEDDIFRC_METHODS),
    "feddifrc/ablation": feddifrc("ablation", FEDDIFRC_TERMS),
}
"""Sweeps by name. Gen-FedSD: accuracy on CIFAR-10 (Table 1) and CIFAR-100 (Table 2), MB to a target (Table 3, the cells
of Table 1). FedDifRC: its main table and its ablation on CIFAR-10."""

METRIC_OF = {"gen-fedsd/table3": "MB_to_target"}
"""What a table shows where it is not the accuracy."""


def named(name: str, words: list[str]) -> Sweep:
    """A paper's table with words such as scale=smoke, seed=0,1 and changes for every cell."""
    scale, seeds, more, own = "full", None, [], ""
    for word in words:
        key, _, text = word.partition("=")
        if key == "scale":
            scale = text
        elif key == "seed":
            seeds = tuple(map(whole, several(key, text)))
        elif key == "name":
            own = text
        elif "=" not in word:
            raise UsageError(f"'{word}' is not of the form key=value")
        else:
            more.append(word)
    made = SWEEPS[name](scale)
    for axis in (*made.rows, *made.columns):
        set_there = {word.partition("=")[0] for value in axis.values.values() for word in value}
        if clash := [word for word in more if key_of(word) in set_there]:
            raise UsageError(
                f"'{clash[0]}' is set by the table's axis '{axis.name}'; leave it out, or sweep a grid of your own"
            )
    changed: dict[str, Any] = {"base": (*made.base, *more), "seeds": seeds or made.seeds, "name": own or made.name}
    if [word for word in more if key_of(word) not in PLACES]:
        changed["scale"] = "; ".join(filter(None, [made.scale, f"changed: {' '.join(more)}"]))
    return Sweep(**({f: getattr(made, f) for f in Sweep.__dataclass_fields__} | changed))


PLACES = ("data.path", "device", "engine", "workers", "memory_MB", "prior.offline")
"""Keys that make nothing smaller than in the paper."""

VANILLA = (
    "* The paper's vanilla FedProx and FedNova are far below its FedAvg, which its stated settings cannot explain: "
    "with equal local steps FedNova is FedAvg (docs/papers.md)."
)
SCAFFOLD_NOTE = (
    "* FedZoo-Bench, on which the paper says that it was built, has a control variate of SCAFFOLD ten times too large, "
    "which may be behind these rows (docs/papers.md)."
)
SCAFFOLD_MB = f"{SCAFFOLD_NOTE} Control variates are not in the paper's MB; here they count."


def _table(
    text: str, columns: tuple[str, ...], scaffold: str = SCAFFOLD_NOTE
) -> dict[tuple[tuple[str, ...], tuple[str, ...]], Published]:
    """Lines `algorithm | data | mean spread | ...`; `scaffold` is the note on SCAFFOLD's rows."""
    out: dict[tuple[tuple[str, ...], tuple[str, ...]], Published] = {}
    for line in text.strip().splitlines():
        labels = [part.strip() for part in line.split("|")]
        row, numbers = tuple(labels[: -len(columns)]), labels[-len(columns) :]
        for column, number in zip(columns, numbers, strict=True):
            if number == "?":
                continue
            mean, *spread = map(float, number.split())
            note = ""
            if row[0] in ("FedProx", "FedNova") and row[1:] == ("vanilla",):
                note = VANILLA
            elif row[0] == "SCAFFOLD" and len(row) > 1:
                note = scaffold
            out[row, (column,)] = Published(mean, spread[0] if spread else None, note)
    return out


DIRICHLET = ("Dir(0.5)", "Dir(0.1)", "Dir(0.05)")
NID = ("NID1 0.05", "NID1 0.2", "NID1 0.5", "NID2")
PUBLISHED: dict[tuple[str, str], dict[tuple[tuple[str, ...], tuple[str, ...]], Published]] = {
    ("gen-fedsd/table1", "mean_last10"): _table(
        """
        FedAvg | vanilla | 58.57 0.77 | 37.98 1.53 | 25.78 0.94
        FedAvg | + no diversity | 70.70 0.62 | 58.69 1.71 | 54.38 1.93
        FedAvg | + diversity | 71.41 0.45 | 61.21 1.74 | 56.42 0.35
        FedProx | vanilla | 27.42 1.84 | 20.51 1.79 | 18.05 1.98
        FedProx | + no diversity | 70.26 0.14 | 61.59 0.98 | 54.85 0.95
        FedProx | + diversity | 71.01 0.17 | 61.43 1.27 | 59.41 0.76
        FedNova | vanilla | 28.52 1.01 | 24.61 1.24 | 19.37 2.12
        FedNova | + no diversity | 70.06 0.34 | 61.45 1.29 | 55.85 2.19
        FedNova | + diversity | 71.06 0.10 | 63.82 0.09 | 57.92 0.97
        SCAFFOLD | vanilla | 26.65 0.45 | 17.71 1.71 | 14.14 1.48
        SCAFFOLD | + no diversity | 76.39 0.10 | 67.46 1.17 | 59.04 2.35
        SCAFFOLD | + diversity | 76.61 0.26 | 67.09 0.04 | 61.91 3.31
        """,
        DIRICHLET,
    ),
    ("gen-fedsd/table2", "mean_last10"): _table(
        """
        FedAvg | vanilla | 40.36 0.39 | 30.38 0.78 | 24.52 0.37
        FedAvg | + no diversity | 46.45 0.30 | 36.23 0.78 | 31.42 0.24
        FedAvg | + diversity | 46.91 0.50 | 37.06 0.20 | 31.91 0.25
        FedProx | vanilla | 10.39 1.27 | 8.12 0.72 | 6.57 0.07
        FedProx | + no diversity | 47.36 0.03 | 39.69 0.18 | 35.29 0.80
        FedProx | + diversity | 47.44 0.10 | 39.22 0.31 | 36.14 0.55
        FedNova | vanilla | 8.71 1.31 | 7.48 0.48 | 6.83 0.19
        FedNova | + no diversity | 46.98 0.03 | 39.24 0.41 | 35.86 0.14
        FedNova | + diversity | 47.44 0.50 | 39.83 0.33 | 36.10 0.27
        SCAFFOLD | vanilla | 4.49 0.33 | 3.32 0.05 | 2.63 0.22
        SCAFFOLD | + no diversity | 52.25 0.33 | 42.70 0.61 | 36.79 0.11
        SCAFFOLD | + diversity | 52.43 0.06 | 43.77 0.02 | 38.42 0.02
        """,
        DIRICHLET,
    ),
    ("gen-fedsd/table3", "MB_to_target"): _table(
        "\n".join(
            [
                "FedAvg | vanilla | 567.44 | 408.56 | 340.46",
                "FedProx | vanilla | 1588.84 | 1134.89 | 499.35",
                "FedNova | vanilla | 907.91 | 453.95 | 794.42",
                "SCAFFOLD | vanilla | 794.42 | 1361.87 | 1134.89",
                *(
                    f"{method} | {data} | 22.69 | 22.69 | 22.69"
                    for method in GEN_FEDSD_METHODS.values
                    for data in ("+ no diversity", "+ diversity")
                ),
            ]
        ),
        DIRICHLET,
        SCAFFOLD_MB,
    ),
    ("feddifrc/table1", "mean_last10"): _table(
        """
        FedAvg | 78.27 | 84.65 | 86.11 | 72.60
        FedProx | 78.42 | 84.59 | ? | 72.81
        MOON | 80.79 | 86.10 | ? | 73.35
        FedNH | 80.25 | ? | ? | ?
        FedDifRC | 83.14 | 88.27 | 89.31 | 76.45
        """,
        NID,
    ),
    ("feddifrc/ablation", "mean_last10"): _table(
        """
        none (FedAvg) | 78.27 | 84.65 | 86.11 | 72.60
        TDCL | 81.39 | 86.03 | 88.16 | 75.67
        NDCR | 80.35 | 86.40 | 87.54 | 75.33
        both | 83.14 | 88.27 | 89.31 | 76.45
        both, layer 2 only | ? | 87.28 | ? | 75.73
        both, layer 3 only | ? | 87.81 | ? | 75.61
        both, layers 2,3,4 | ? | 88.27 | ? | 76.45
        """,
        NID,
    ),
}
"""Accuracy in % and MB, by table and metric (docs/papers.md)."""
PUBLISHED["gen-fedsd/table1", "MB_to_target"] = PUBLISHED["gen-fedsd/table3", "MB_to_target"]  # of the same cells
