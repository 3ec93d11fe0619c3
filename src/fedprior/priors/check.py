"""Is a prior any good? A classifier that saw only its images is tested on real ones."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import nets, seeds, tree
from ..data import digits
from ..data.table import Shard, Table, make
from ..evaluate import evaluate
from ..local import Worker
from ..methods import FedAvg
from ..net import Net
from ..optim import AdamW
from ..tree import Tree
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
    synthetic = accuracy(image, label, test, len(classes), seed)
    log(f"accuracy on {len(test['label'])} real test images: {synthetic:.3f}; training one on the real images")
    real = accuracy(train["image"], train["label"], test, len(classes), seed)
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


def accuracy(image: Tensor, label: Tensor, test: Table, classes: int, seed: int) -> float:
    """Test accuracy of a small CNN after STEPS AdamW steps of 64 of these images: one client's local training.

    Raises ValueError for synthetic rows in the test table.
    """
    net, trained = fit(image, label, classes, seed, STEPS)
    return evaluate(net, trained, test, classes).accuracy


def fit(image: Tensor, label: Tensor, classes: int, seed: int, steps: int) -> tuple[Net, Tree]:
    """A small CNN after `steps` AdamW steps of 64 of these images uint8 [n, 3, H, W], and its weights."""
    height, width = image.shape[-2:]
    net = Net(nets.build("cnn", classes, size=(height, width), seed=seed))
    start = net.init()
    worker = Worker(net=net, method=FedAvg(), optimizer=AdamW(lr=3e-3), batch_size=64, steps=steps, seed=seed)
    shard = Shard(make(image, label), torch.arange(len(label)))
    upload, _ = worker.train(0, shard, {"weights": start, "shared": {}}, {}, round=0)
    return net, start | {"params": tree.add(start["params"], upload.tree["method"]["delta"])}


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
