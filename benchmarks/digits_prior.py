"""How the digits prior's sampling was chosen, how good it is, and whether it copies. Prints JSON.

    OMP_NUM_THREADS=1 python benchmarks/digits_prior.py > docs/records/digits_prior.json

Sampling is chosen with a second prior that saw two thirds of the public half only; the other third judges. The
real test digits are used for the last section alone. About ten CPU-minutes, most of them for that second prior,
which is kept in the folder given as the only argument, if there is one.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedprior.data import digits, table
from fedprior.data.table import Table
from fedprior.priors import architecture, check, embedded, prompts, train
from fedprior.priors.diffusion import DiffusionPrior

SEEDS = (0, 1, 2)
SETTINGS = [(1.0, 5, "single"), (1.0, 10, "single"), (1.0, 20, "single"), (1.0, 10, "clip")]
SETTINGS += [(1.5, 10, "single"), (2.0, 10, "single"), (3.0, 10, "single"), (7.0, 20, "single")]
IMAGES = 900


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def held_out_prior(folder: Path, seen: Table) -> DiffusionPrior:
    """The second prior; trained where the folder holds none."""
    if not (folder / "model_index.json").exists():
        recipe = train.RECIPES["digits"]
        made = train.train(seen["image"], seen["label"], recipe, seed=0, log=say)
        architecture.save(made.pipeline, folder, recipe.defaults)
    return DiffusionPrior.from_pretrained(folder, batch_size=128)


def score(prior: DiffusionPrior, templates: str, judge: Table, seed: int) -> float:
    chosen = prompts.templates(templates)
    image, label = check.synthesise(prior, digits.CLASSES, IMAGES, chosen, seed, (digits.SIZE, digits.SIZE))
    return check.accuracy(image, label, judge, len(digits.CLASSES), seed)


def nearest(images: Tensor, among: Tensor) -> Tensor:
    """Euclidean distance of each image to the nearest of `among`; one channel, pixels in [0, 1]."""
    flat = [(x[:, 0].float() / 255).flatten(1) for x in (images, among)]
    return torch.cdist(*flat).amin(1)


def copying(prior: DiffusionPrior, seen: Table, unseen: Table) -> dict[str, Any]:
    made, _ = check.synthesise(prior, digits.CLASSES, 600, prompts.SINGLE, 0, (digits.SIZE, digits.SIZE))
    to_made, to_real = nearest(made, seen["image"]), nearest(unseen["image"], seen["image"])
    marks = torch.tensor([0.05, 0.5, 0.95])
    return {
        "how": "distance to the nearest training image of the second prior; quantiles 5 %, 50 %, 95 %",
        "generated": [round(x, 2) for x in to_made.quantile(marks).tolist()],
        "held_out_real": [round(x, 2) for x in to_real.quantile(marks).tolist()],
        "generated_closer_than_the_closest_1_percent_of_real_ones": round(
            float((to_made < to_real.quantile(0.01)).float().mean()), 4
        ),
    }


def main() -> None:
    torch.set_num_threads(1)
    public = digits.public()
    third = torch.arange(len(public["label"])) % 3 == 2
    seen, unseen = (table.take(public, rows.nonzero()[:, 0]) for rows in (~third, third))
    kept = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp()) / "second"
    prior = held_out_prior(kept, seen)
    sampling = []
    for guidance, steps, templates in SETTINGS:
        prior.guidance, prior.steps = guidance, steps
        values = [round(score(prior, templates, unseen, seed), 4) for seed in SEEDS]
        row = {"guidance": guidance, "steps": steps, "templates": templates, "accuracy": values}
        sampling.append(row | {"mean": round(statistics.fmean(values), 4)})
        say(str(sampling[-1]))
    prior.guidance, prior.steps = 1.0, 10
    real = [check.accuracy(seen["image"], seen["label"], unseen, len(digits.CLASSES), s) for s in SEEDS]
    shipped = embedded.load("digits")
    quality = [check.check_digits(shipped, embedded.folder("digits"), seed=s, log=say) for s in SEEDS]
    record = {
        "command": "OMP_NUM_THREADS=1 python benchmarks/digits_prior.py",
        "sampling": {
            "how": f"second prior on {len(seen['label'])} public images; the CNN of `fedprior prior check` on {IMAGES} "
            f"of its images, tested on the other {len(unseen['label'])} public ones; seeds 0, 1, 2",
            "settings": sampling,
            "real_images": [round(x, 4) for x in real],
        },
        "copying": copying(prior, seen, unseen),
        "quality": {
            "how": "fedprior prior check digits, seeds 0, 1, 2: tested on the real test digits",
            "synthetic": [round(q["synthetic"], 4) for q in quality],
            "real": [round(q["real"], 4) for q in quality],
            "images": quality[0]["images"],
            "size_MB": round(quality[0]["size_MB"], 3),
        },
        "training": shipped.defaults["training"],
    }
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
