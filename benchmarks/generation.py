"""What synthetic images are worth: by quality, number, rule and alignment. Prints a Markdown page.

    python benchmarks/generation.py cifar10 --data FOLDER     # the recipe cifar10-embedded, plain and balanced
    python benchmarks/generation.py precision --data FOLDER   # the same in bf16 and fp32
    python benchmarks/generation.py rates --data FOLDER       # the same with several rates, on held-out rows
    python benchmarks/generation.py align digits|cifar10 ...  # real rows aligned with synthetic ones, or not
    python benchmarks/generation.py knee digits|cifar10 ...   # accuracy against the number of images, and rules

FOLDER holds train.parquet and test.parquet of CIFAR-10. Runs that lie in --runs are not done again, so a command that
was interrupted goes on with it.
"""

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from arms import about, accuracies, cell

SEEDS = (0, 1, 2)
RATES: dict[str, tuple[str, ...]] = {
    "SGD 0.05": ("local=sgd", "local.lr=0.05"),
    "SGD 0.2": ("local=sgd", "local.lr=0.2"),
    "AdamW 1e-3": ("local=adamw", "local.lr=1e-3"),
}
PHOTOS = (
    "cifar10-embedded",
    "net=cnn",  # ten times as fast as the recipe's
    "local=adamw",
    "local.lr=2e-3",
    "steps=20",
    "rounds=25",
    "cohort=6",
    "precision=fp32",
)
SETS: dict[str, tuple[str, ...]] = {"digits": ("digits",), "cifar10": PHOTOS}
SPLITS: dict[str, dict[str, tuple[str, ...]]] = {
    "digits": {
        "Dirichlet(0.05), 20 clients": ("partition.alpha=0.05",),
        "NID2: six clients of one class, four of all": ("partition=nid2", "clients=10"),
        "each class at one client": ("partition=pathological", "partition.k=1", "clients=10"),
    },
    "cifar10": {
        "Dirichlet(0.1), 30 clients": ("partition.alpha=0.1", "clients=30"),
        "NID2: six clients of one class, four of all": ("partition=nid2", "clients=10"),
        "each class at one client": ("partition=pathological", "partition.k=1", "clients=10"),
    },
}
MAX = ("balance=max", "balance.cap=0")  # the recipe has a cap
ALIGNED: dict[str, tuple[str, ...]] = {
    "no synthetic images": ("balance=none",),
    "align=none": MAX,
    "align=roundtrip": (*MAX, "balance.align=roundtrip"),
    "align=half": (*MAX, "balance.align=half"),
    "align=noised, strength 0.3": (*MAX, "balance.align=noised"),
}
BUDGETS = {"digits": (0, 25, 50, 100, 200, 400, 800, 1600), "cifar10": (0, 25, 100, 400, 1600)}
POOLS = {"digits": (3, 10, 30, 100, 300), "cifar10": (3, 30, 300)}
RULES: dict[str, tuple[str, ...]] = {
    "none": ("balance=none",),
    "max (Gen-FedSD)": MAX,
    "missing_only": ("balance=missing_only",),
    "fixed_budget 500": ("balance=fixed_budget", "balance.budget=500"),
    "fixed_budget, total kept (FBL)": ("balance=fixed_budget", "balance.budget=0", "balance.drop=true"),
    "ratio 1": ("balance=ratio", "balance.ratio=1"),
    "global_target global": ("balance=global_target", "balance.target=global"),
    "discrepancy 500": ("balance=discrepancy", "balance.budget=500"),
}

Arms = Mapping[str, Sequence[str]]


def table(
    base: Sequence[str], arms: Arms, splits: Arms, root: Path, workers: int, first: str, seeds: Sequence[int]
) -> str:
    """One line an arm, one column a split; mean and spread over seeds of the mean accuracy of the last ten rounds."""
    cells = [(arm, split) for arm in arms for split in splits]
    jobs = [(*base, *splits[split], *arms[arm], f"seed={s}") for arm, split in cells for s in seeds]
    found = dict(zip(cells, np.array(accuracies(jobs, root, workers)).reshape(-1, len(seeds)), strict=True))
    lines = [f"| {first} | {' | '.join(splits)} |", "| --- |" + " --- |" * len(splits)]
    lines += [f"| {arm} | " + " | ".join(cell(found[arm, split].tolist()) for split in splits) + " |" for arm in arms]
    return "\n".join(lines)


def capped(arms: Arms, kind: str) -> dict[str, Sequence[str]]:
    """On photos the rules that know a cap have one, so that a few thousand images suffice."""
    knows = lambda words: kind == "cifar10" and {"balance=max", "balance=missing_only"} & set(words)
    return {name: (*words, *(("balance.cap=300",) if knows(words) else ())) for name, words in arms.items()}


def page(what: str, kind: str, base: Sequence[str], root: Path, workers: int, seeds: Sequence[int]) -> str:
    splits = SPLITS[kind]
    arms: Arms = {"FedAvg": ("balance=none",), "FedAvg, balanced": ()}
    if what == "precision":
        arms = {"bf16": ("partition.alpha=0.1",), "fp32": ("precision=fp32",)}  # the first are runs of `cifar10`
        return table(base, arms, {"Dirichlet(0.1), balanced": ()}, root, workers, "precision", seeds)
    if what == "rates":
        return table((*base, "validation=0.1"), arms, RATES, root, workers, "arm", seeds)
    if what == "cifar10":
        splits = {f"Dirichlet({alpha})": (f"partition.alpha={alpha}",) for alpha in ("0.1", "0.05")}
        return table(base, arms, splits, root, workers, "arm", seeds)
    if what == "align":
        return table(base, capped(ALIGNED, kind), splits, root, workers, "real rows", seeds)
    first = dict(list(splits.items())[:1])
    budgets = {str(n): ("balance=fixed_budget", f"balance.budget={n}") for n in BUDGETS[kind]}
    pools = {str(n): (*MAX, f"balance.pool_size={n}") for n in POOLS[kind]}
    parts = [
        "Images a client (`balance=fixed_budget`):",
        table(base, budgets, first, root, workers, "budget", seeds),
        "Distinct images of a class, which all clients share (`balance=max`):",
        table(base, capped(pools, kind), first, root, workers, "pool_size", seeds),
    ]
    if kind == "digits":
        parts += ["Rules:", table(base, RULES, splits, root, workers, "balance", seeds)]
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["cifar10", "precision", "rates", "align", "knee"])
    parser.add_argument("set", nargs="?", choices=list(SETS), default="cifar10")
    parser.add_argument("--data", type=Path, help="folder with train.parquet and test.parquet of CIFAR-10")
    parser.add_argument("--prior", help="in place of the embedded one")
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--workers", type=int, default=1)
    a = parser.parse_args()
    if a.set == "cifar10" and a.data is None:
        parser.error("cifar10 needs --data")
    whole = a.what in ("cifar10", "precision", "rates")  # the recipe as it is
    if whole and a.set != "cifar10":
        parser.error(f"{a.what} is for cifar10 alone")
    words = ("cifar10-embedded",) if whole else SETS[a.set]
    many = a.what in ("align", "knee") and a.set == "cifar10"  # cells
    seeds = SEEDS[:1] if a.what == "rates" else SEEDS[:2] if many else SEEDS
    extra = ((f"data.path={a.data}",) if a.set == "cifar10" else ()) + ((f"prior={a.prior}",) if a.prior else ())
    command = f"python benchmarks/generation.py {a.what}" + ("" if whole else f" {a.set}")
    told = page(a.what, a.set, (*words, *extra), a.runs or Path(tempfile.mkdtemp()), a.workers, seeds)
    judged = "Accuracy on held-out rows of the clients" if a.what == "rates" else "Test accuracy"
    command += " --data FOLDER" if a.data else ""
    print(f"{about(command)}. `{' '.join(words)}`, {len(seeds)} seed{'s' * (len(seeds) > 1)}.")
    print(f"{judged}, mean of the last 10 rounds as far as evaluated, mean ± standard deviation over seeds.\n")
    print(told)


if __name__ == "__main__":
    main()
