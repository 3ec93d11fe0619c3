"""FedDifRC against its own parts, and against anchors that know nothing of diffusion.

    python benchmarks/feddifrc.py search digits      # settings, on rows that clients hold out
    python benchmarks/feddifrc.py ablation digits    # the paper's ablation with them, on the test set
    python benchmarks/feddifrc.py search cifar10 --prior FOLDER --data FOLDER
    python benchmarks/feddifrc.py ablation cifar10 --prior FOLDER --data FOLDER

Each family of arms (TDCL, NDCR, both, random anchors, text anchors) is searched with the same number of trials on the
same splits, all with one seed, then (on digits) the best two with two more. Runs that lie in --runs are not done again,
so a command that was interrupted goes on with it. CIFAR-10 uses 10,000 rows of the half that the prior was not trained
on.
"""

import argparse
import platform
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arms import accuracies

from fedprior import environment, seeds, store
from fedprior.priors import embedded
from fedprior.priors.diffusion import SIDECAR
from fedprior.recipes import FEDDIFRC_ABLATION
from fedprior.report.numbers import across_seeds, percent

RECORDS = Path(__file__).parent.parent / "docs" / "records"
SEEDS = (0, 1, 2)
SEARCH_SEEDS = (100, 101, 102)
VALIDATION = "validation=0.3"
RANDOM_UNET = "NDCR, UNet of random weights"
SETS: dict[str, dict[str, Any]] = {
    "digits": {
        "words": ("data=digits", "cohort=5", "rounds=30", "steps=20", "batch_size=32"),
        "splits": {
            "Dirichlet(0.05), 20 clients": ("partition=dirichlet", "partition.alpha=0.05", "clients=20"),
            "NID2, 10 clients": ("partition=nid2", "clients=10"),
        },
        "families": ("tdcl", "ndcr", "both", "random", "text"),
        "searched": 2,  # splits, from the first
        "trials": 12,
        "finalists": 2,
        "timesteps": (20, 50, 150, 300),
    },
    "cifar10": {
        "words": (
            "data=cifar10",
            "cohort=10",
            "rounds=16",
            "steps=10",
            "batch_size=64",
            "local=adamw",
            "local.lr=2e-3",
        ),
        "splits": {
            "NID1(0.05) official, 10 clients": ("partition=nid1_official", "partition.alpha=0.05", "clients=10"),
            "NID2, 10 clients": ("partition=nid2", "clients=10"),
        },
        "families": ("tdcl", "ndcr", "both", "random"),  # text anchors take those of random ones
        "searched": 1,
        "trials": 4,
        "finalists": 1,
        "timesteps": (50, 300),
        "once": (
            *(f"both, level{levels}" for levels in (" 2 only", " 3 only", " 4 only", "s 2,3,4")),
            "NDCR, another image's target",
            RANDOM_UNET,
            "both, the paper's settings",
        ),
        "more": {  # so few trials may have missed what served on digits
            "NDCR, weight and whitening found on digits": (
                "guide=feddifrc",
                "guide.tdcl=0",
                "guide.ndcr=1",
                "guide.timestep=50",
                "guide.levels=2",
                "guide.whiten=prompt",
            )
        },
        "left out": (
            *(f"both, t = {t}" for t in (0, 100, 300, 500, 999)),
            "both, dynamic condition",
            "both, 3 negatives",
            "both, random anchors for TDCL",
            "TDCL, black images described",
            "NDCR, black images described",
            "both, the released code's loss",
        ),
    },
}
WEIGHTS, TEMPERATURES = (0.03, 0.1, 0.3, 1, 3), (0.04, 0.1, 0.3, 1)
LEVELS = ("2", "3", "4", "2,3,4")
SWEEPS = [name for name in FEDDIFRC_ABLATION if "t = " in name or "black" in name or "condition" in name]
SWEEPS += ["both, 3 negatives", "both, the released code's loss"]
FAMILIES = {  # the words that make an arm, and what is drawn for it
    "tdcl": (("guide=feddifrc", "guide.ndcr=0"), ("tdcl", "temperature", "timestep", "levels", "whiten")),
    "ndcr": (("guide=feddifrc", "guide.tdcl=0"), ("ndcr", "timestep", "levels", "whiten", "noise_prompt")),
    "both": (
        ("guide=feddifrc",),
        ("tdcl", "ndcr", "temperature", "timestep", "levels", "whiten", "noise_prompt"),
    ),
    "random": (("guide=feddifrc", "guide.ndcr=0", "guide.anchors=random"), ("tdcl", "temperature")),
    "text": (("guide=feddifrc", "guide.ndcr=0", "guide.anchors=text"), ("tdcl", "temperature")),
}


def space(kind: str) -> dict[str, Sequence[Any]]:
    return {
        "tdcl": WEIGHTS,
        "ndcr": WEIGHTS,
        "temperature": TEMPERATURES,
        "timestep": SETS[kind]["timesteps"],
        "levels": LEVELS,
        "whiten": ("none", "component", "prompt"),
        "noise_prompt": ("null", "class", "generic") if kind == "digits" else ("null",),
    }


def trials(kind: str, family: str) -> list[tuple[str, ...]]:
    """The paper's own settings, then random ones; each once."""
    words, drawn = FAMILIES[family]
    out = [words]
    rng = seeds.stream(0, f"search {family}")
    while len(out) < SETS[kind]["trials"]:
        values = {key: space(kind)[key][rng.integers(len(space(kind)[key]))] for key in drawn}
        candidate = (*words, *(f"guide.{key}={value}" for key, value in values.items()))
        if candidate not in out:
            out.append(candidate)
    return out


def search(kind: str, base: tuple[str, ...], root: Path, workers: int) -> dict[str, Any]:
    splits = list(SETS[kind]["splits"].values())[: SETS[kind]["searched"]]
    out: dict[str, Any] = {}
    for family in SETS[kind]["families"]:
        candidates = trials(kind, family)

        def score(words: list[tuple[str, ...]], which: Sequence[int]) -> list[float]:
            jobs = [(*base, *split, *w, VALIDATION, f"seed={s}") for w in words for split in splits for s in which]
            found = np.array(accuracies(jobs, root, workers)).reshape(len(words), -1)
            return [float(x) for x in found.mean(1)]

        first = score(candidates, SEARCH_SEEDS[:1])
        best = sorted(range(len(candidates)), key=lambda i: -first[i])[: SETS[kind]["finalists"]]
        final = score([candidates[i] for i in best], SEARCH_SEEDS) if len(best) > 1 else [first[best[0]]]
        winner = candidates[best[int(np.argmax(final))]]
        out[family] = {
            "words": list(winner),
            "validation": max(final),
            "trials": [{"words": list(w), "validation": v} for w, v in zip(candidates, first, strict=True)],
            "finalists": [{"words": list(candidates[i]), "validation": v} for i, v in zip(best, final, strict=True)],
        }
    which = SEARCH_SEEDS if SETS[kind]["finalists"] > 1 else SEARCH_SEEDS[:1]
    plain = [(*base, *split, "guide=none", VALIDATION, f"seed={s}") for split in splits for s in which]
    out["none"] = {"words": ["guide=none"], "validation": statistics.fmean(accuracies(plain, root, workers))}
    return out


def arms(kind: str, found: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """Name of an arm -> its words. An arm of the recipe changes the settings that the search found for its family."""
    searched = {family: tuple(one["words"]) for family, one in found.items()}
    searched.setdefault("text", (*searched["random"], "guide.anchors=text"))
    return {
        name: (*searched[family], *words) if family else words
        for name, (family, words) in FEDDIFRC_ABLATION.items()
        if name not in SETS[kind].get("left out", ())
    }


def ablation(kind: str, base: tuple[str, ...], found: dict[str, Any], root: Path, workers: int) -> str:
    splits, chosen = SETS[kind]["splits"], arms(kind, found)
    random = untrained(base[-1].partition("=")[2], root / "untrained")
    chosen |= SETS[kind].get("more", {})
    chosen[RANDOM_UNET] = (*found["ndcr"]["words"], f"prior={random}")
    once = {*SWEEPS, *SETS[kind].get("once", ())}  # on the first split only
    cells = [(name, split) for name in chosen for k, split in enumerate(splits) if k == 0 or name not in once]
    jobs = [(*base, *splits[split], *chosen[name], f"seed={s}") for name, split in cells for s in SEEDS]
    by_cell = dict(zip(cells, np.array(accuracies(jobs, root, workers)).reshape(-1, len(SEEDS)), strict=True))
    lines = [f"| arm | {' | '.join(splits)} |", "| --- |" + " --- |" * len(splits)]
    first = next(iter(chosen))
    for name in chosen:
        shown = []
        for split in splits:
            if (name, split) not in by_cell:
                shown.append("-")
                continue
            row = by_cell[name, split]
            gain = 100 * (row - by_cell[first, split])
            shown.append(f"{percent(*across_seeds(row.tolist()))} ({gain.mean():+.1f} ± {gain.std(ddof=1):.1f})")
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    lines += ["", "| arm | words |", "| --- | --- |"]
    lines += [f"| {name} | `{' '.join(words).replace(str(random), 'UNTRAINED')}` |" for name, words in chosen.items()]
    return "\n".join(lines)


def untrained(prior: str, out: Path) -> Path:
    """The prior with a UNet of random weights: what is left of guidance when the UNet has learnt nothing."""
    loaded = embedded.load(prior)
    torch.manual_seed(0)
    loaded.pipeline.unet = type(loaded.pipeline.unet).from_config(loaded.pipeline.unet.config)
    loaded.pipeline.save_pretrained(out)
    if loaded.defaults:
        store.write_json(out / SIDECAR, loaded.defaults)
    return out


def subset(data: Path, out: Path) -> Path:
    """10,000 training rows (1,000 a class) of the half that the prior was not trained on, and 2,000 test rows.

    The prior's half is, of each class' files in the order of their names, the first half of numpy's permutation with
    seed 0, class after class.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    train, test = (pq.read_table(data / f"{split}.parquet") for split in ("train", "test"))
    label = np.array(train["label"])
    names = np.array([row["path"].rpartition("/")[2] for row in train["img"].to_pylist()])
    rng, rows = np.random.default_rng(0), []
    for c in range(10):
        own = np.flatnonzero(label == c)
        order = rng.permutation(own[np.argsort(names[own])])
        rows.append(order[len(own) // 2 :][:1000])
    few = [np.flatnonzero(np.array(test["label"]) == c)[:200] for c in range(10)]
    out.mkdir(parents=True, exist_ok=True)
    for split, table, which in (("train", train, rows), ("test", test, few)):
        with store.atomic(out / f"{split}.parquet") as temporary:
            pq.write_table(table.take(pa.array(np.sort(np.concatenate(which)))), temporary)
    return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["search", "ablation"])
    parser.add_argument("set", choices=list(SETS))
    parser.add_argument("--prior", default="digits")
    parser.add_argument("--data", type=Path, help="folder with train.parquet and test.parquet of CIFAR-10")
    parser.add_argument("--runs", type=Path, default=None)
    parser.add_argument("--found", type=Path, default=None, help="the search's record")
    parser.add_argument("--workers", type=int, default=1)
    a = parser.parse_args()
    root = a.runs or Path(tempfile.mkdtemp())
    record = a.found or RECORDS / f"feddifrc_{a.set}_search.json"
    base = SETS[a.set]["words"]
    if a.set == "cifar10":
        if a.data is None:
            parser.error("cifar10 needs --data")
        base = (*base, f"data.path={subset(a.data, root / 'subset')}")
    base = (*base, f"prior={a.prior}")
    about = {
        "command": f"python benchmarks/feddifrc.py {a.what} {a.set}"
        + (" --prior FOLDER --data FOLDER" if a.data else ""),
        "hardware": environment.processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "base": list(SETS[a.set]["words"]),
    }
    if a.what == "search":
        store.write_json(record, about | {"families": search(a.set, base, root, a.workers)})
        print(f"The settings found lie in {record.name}.")
    else:
        found = store.read_json(record)["families"]
        print(f"# FedDifRC's ablation on {a.set}\n")
        where = "{command}`, {hardware}, Python {python}, torch {torch}".format(**about)
        print(
            f"`{where}, one thread a run. {' '.join(SETS[a.set]['words'])}, {len(SEEDS)} seeds. Test accuracy, mean of "
            "the last 10 rounds, mean ± standard deviation over seeds; in brackets the gain over no guidance, paired "
            f"by seed. Settings of each family were searched on held-out rows of clients ([record]({record.name})).\n"
        )
        print(ablation(a.set, base, found, root, a.workers))


if __name__ == "__main__":
    main()
