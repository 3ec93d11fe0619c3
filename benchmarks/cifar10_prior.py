"""How the CIFAR-10 prior's sampling was chosen, and how good it is. Prints a Markdown page.

    OMP_NUM_THREADS=1 python benchmarks/cifar10_prior.py PRIOR --data FOLDER > docs/records/cifar10_prior.md

Sampling is chosen by the accuracy, on private training rows that no later number is measured on, of a small classifier
that saw 5,000 synthetic images. The test split is used for the last section alone, which `fedprior prior check` prints
too. PRIOR is a folder or the embedded name; FOLDER holds train.parquet and test.parquet.
"""

import argparse
import statistics
import sys
from pathlib import Path

import torch
from arms import about

from fedprior.data import halves, sources, table
from fedprior.priors import check, embedded, prompts
from fedprior.priors.diffusion import DiffusionPrior
from fedprior.priors.features import to_latents
from fedprior.progress import Silent

IMAGES, JUDGES = 5000, 4000
SETTINGS = [
    (1.0, 12, "single"),
    (2.0, 12, "single"),
    (3.0, 12, "single"),
    (2.0, 12, "clip"),
    (2.0, 25, "single"),
]


def psnr(prior: DiffusionPrior, images: torch.Tensor) -> float:
    """Of the autoencoder on images uint8 [n, 3, H, W], in dB, both in [-1, 1]."""
    errors = []
    for part in images.split(250):
        with torch.no_grad():
            latents, _ = to_latents(prior.pipeline, part, prior.size, "signed")
            made = prior.pipeline.vae.decode(latents / prior.pipeline.vae.config.scaling_factor).sample.clamp(-1, 1)
        errors.append((made - (part.float() / 127.5 - 1)).square().mean())
    return float(10 * torch.log10(4 / torch.stack(errors).mean()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("prior")
    parser.add_argument("--data", type=Path, required=True)
    a = parser.parse_args()
    whole = sources.load("cifar10", path=a.data)
    private = whole.only("private").train
    judges = table.take(private, torch.arange(len(private["label"]) - JUDGES, len(private["label"])))
    command = f"python benchmarks/cifar10_prior.py {Path(a.prior).name} --data FOLDER"
    print(f"# The CIFAR-10 prior\n\n{about(command)}.\n\n## Sampling\n")
    print(f"{IMAGES} synthetic images; accuracy on {JUDGES} private training rows, one fit.\n")
    print("| guidance | steps | templates | accuracy |\n| --- | --- | --- | --- |")
    for guidance, steps, templates in SETTINGS:
        prior = embedded.load(a.prior, guidance=guidance, steps=steps, batch_size=96)
        chosen = prompts.templates(templates)
        image, label = check.synthesise(prior, whole.classes, IMAGES, chosen, 0, (prior.size, prior.size))
        found = check.accuracy(image, label, judges, len(whole.classes), 0, check.PHOTOS)
        print(f"| {guidance:g} | {steps} | {templates} | {found:.3f} |", flush=True)
    prior = embedded.load(a.prior, batch_size=96)
    print("\n## Autoencoder\n")
    for name, rows in (("public", halves.mask(whole.train["image"], "public")), ("private", None)):
        images = private["image"] if rows is None else whole.train["image"][rows]
        print(f"- {name} half, the first 2000 images: {psnr(prior, images[:2000]):.2f} dB")
    print(f"- test split: {psnr(prior, whole.test['image']):.2f} dB")
    print("\n## Worth\n", flush=True)
    found = check.study(prior, check.cifar10_real(a.data), fits=3, progress=Silent()).result
    for kind in ("synthetic", "real"):
        each = found["by_fit"][kind]
        shown = ", ".join(f"{x:.3f}" for x in each)
        print(
            f"- a small classifier trained on {found['images']} {kind} images: {statistics.fmean(each):.3f} ({shown})"
        )
    keep = {k: found[k] for k in ("prompts", "distances", "diversity", "memorisation")}
    keep["prompts"] = {k: v for k, v in keep["prompts"].items() if k != "confusion"}
    for name, values in keep.items():
        print(f"- {name}: {values}")
    print(f"done: {command}", file=sys.stderr)


if __name__ == "__main__":
    main()
