"""Is a prior any good? A classifier that saw only its images is tested on real ones."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import nets, seeds
from ..data import digits
from ..data.table import Table
from . import faults, prompts
from .base import Prior

STEPS = 450  # of the classifier; 32 epochs over 900 images in batches of 64
Log = Callable[[str], None]


def check(
    prior: Prior,
    train: Table,
    test: Table,
    classes: Sequence[str],
    *,
    templates: Sequence[str] = prompts.SINGLE,
    images: int | None = None,
    seed: int = 0,
    log: Log = print,
) -> dict[str, Any]:
    """Accuracy on the real `test` table of a small CNN trained on synthetic, and on real (`train`) images.

    Both train for the same number of steps; the synthetic set has `images` images (default: as many as
    `train`), the same number of each class, +-1. Returns {"synthetic", "real": accuracies in [0, 1],
    "images", "real_images": how many each trained on, "failed": images left out since they stayed faulty}.
    """
    count = len(train["label"]) if images is None else images
    log(f"generating {count} images")
    image, label = synthesise(prior, classes, count, templates, seed, tuple(train["image"].shape[-2:]))
    log("training a classifier on the synthetic images")
    synthetic = accuracy(fit(image, label, len(classes), seed, log), test)
    log(f"accuracy on {len(test['label'])} real test images: {synthetic:.3f}; training one on the real images")
    real = accuracy(fit(train["image"], train["label"], len(classes), seed, log), test)
    log(f"accuracy of that one: {real:.3f}")
    return {
        "synthetic": synthetic,
        "real": real,
        "images": len(label),
        "real_images": len(train["label"]),
        "failed": count - len(label),
    }


def check_digits(
    prior: Prior, folder: Path | None = None, *, images: int | None = None, seed: int = 0, log: Log = print
) -> dict[str, Any]:
    """`check` with the digits: the real training images are the public half, which the prior was trained on.

    Adds "size_MB" (1e6 bytes) of the checkpoint's folder if one is given.
    """
    result = check(prior, digits.public(), digits.test(), digits.CLASSES, images=images, seed=seed, log=log)
    return result if folder is None else result | {"size_MB": folder_megabytes(folder)}


def folder_megabytes(folder: Path) -> float:
    """The size of all files in a folder in MB (1e6 bytes)."""
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) / 1e6


def synthesise(
    prior: Prior,
    classes: Sequence[str],
    count: int,
    templates: Sequence[str],
    seed: int,
    size: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """Images uint8 [n, 3, H, W] and labels int64 [n], classes in turn; n < count if some stayed faulty."""
    label = torch.arange(count) % len(classes)
    chosen = [templates[prompts.draw(tuple(templates), seed, i)] for i in range(count)]
    sentences = [prompts.prompt(classes[c], t) for c, t in zip(label.tolist(), chosen, strict=True)]
    height, width = size
    made = faults.generate(prior, sentences, lambda i, a: seeds.number(seed, "check image", i, a), (height, width))
    ok = torch.tensor(made.ok, dtype=torch.bool)
    return made.images[ok], label[ok]


def fit(image: Tensor, label: Tensor, classes: int, seed: int, log: Log, peak: float = 3e-3) -> nn.Module:
    """A small CNN after STEPS AdamW steps of 64 images, each batch shifted by up to one pixel in 16."""
    height, width = image.shape[-2:]
    net = nets.build("cnn", classes, size=(height, width), seed=seed)
    optimiser = torch.optim.AdamW(net.parameters(), lr=peak, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, peak, total_steps=STEPS)
    draws = seeds.stream(seed, "check batches")
    reach = width // 16
    net.train()
    for i in range(STEPS):
        rows = torch.from_numpy(draws.integers(len(label), size=64))
        dy, dx = draws.integers(2 * reach + 1, size=2).tolist()
        x = nn.functional.pad(scaled(image[rows]), (reach,) * 4, mode="replicate")
        x = x[..., dy : dy + height, dx : dx + width]
        loss = nn.functional.cross_entropy(net(x)[1], label[rows], label_smoothing=0.05)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        schedule.step()
        if (i + 1) % 150 == 0:
            log(f"classifier {i + 1}/{STEPS}  loss {loss.item():.3f}")
    return net.eval()


@torch.no_grad()
def accuracy(net: nn.Module, test: Table) -> float:
    """Share of the test images whose class the net ranks first. Raises ValueError for synthetic rows."""
    if test["synthetic"].any():
        raise ValueError("a test table must hold real images only")
    logits = torch.cat([net(scaled(x))[1] for x in test["image"].split(500)])
    return (logits.argmax(1) == test["label"]).float().mean().item()


def scaled(image: Tensor) -> Tensor:
    """uint8 [0, 255] -> float [-1, 1]."""
    return image.float() / 127.5 - 1


def sample_grid(
    prior: Prior, classes: Sequence[str], per_class: int, seed: int, size: tuple[int, int], zoom: int = 1
) -> Any:
    """A PIL image with one row of `per_class` images for each class, one pixel of white between them."""
    from PIL import Image

    sentences = [prompts.prompt(c, prompts.SINGLE[0]) for c in classes for _ in range(per_class)]
    made = faults.generate(prior, sentences, lambda i, a: seeds.number(seed, "grid image", i, a), size)
    height, width = size
    cells = nn.functional.pad(made.images.view(len(classes), per_class, 3, height, width), (0, 1, 0, 1), value=255)
    sheet = cells.permute(0, 3, 1, 4, 2).reshape(len(classes) * (height + 1), per_class * (width + 1), 3)
    picture = Image.fromarray(sheet.numpy())
    return picture.resize((picture.width * zoom, picture.height * zoom), Image.Resampling.NEAREST)
