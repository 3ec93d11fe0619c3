"""Is a prior any good? A classifier that saw only its images is tested on real ones, and the images themselves are
held against real ones: do they show what was asked for, are they as alike and as varied, are they copies?"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from .. import nets, seeds, tree
from ..data import digits, table
from ..data.augment import mirrors
from ..data.table import Shard, Table, make
from ..errors import UserError
from ..evaluate import PIXELS, Evaluation, evaluate
from ..local import Worker
from ..methods import FedAvg
from ..net import Net
from ..optim import AdamW
from ..progress import Progress, Silent, Update
from ..schedule import Constant, Cosine, Schedule
from ..tree import Tree
from . import faults, inception, prompts, quality
from .base import Prior

STEPS = 450  # of the digits' classifier; 32 epochs over 900 images in batches of 64
CALL = 256  # images asked of the prior at a time
LOOKED_UP = 2000  # synthetic images whose nearest public one is sought, at most, and as many real ones
PAIRS = 8  # of nearest neighbours that a page shows
SHOWN = 8  # images of a class that a page shows
RARE = 0.01  # of real images are as near to another one as what is called near here
QUANTILES = (0.05, 0.5, 0.95)
Log = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Judge:
    """The small classifier that stands for what can be learnt from images, and how it trains: by AdamW, in batches of
    64."""

    net: str = "cnn"
    steps: int = STEPS
    lr: float = 3e-3
    schedule: Schedule = Constant()
    augment: bool = False  # random crops and, if `flip`, mirror images
    flip: bool = False

    @property
    def settings(self) -> dict[str, object]:
        """As JSON values."""
        schedule = {"name": type(self.schedule).__name__.lower(), **vars(self.schedule)}
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"schedule": schedule}


DIGITS = Judge()
PHOTOS = Judge(steps=2000, schedule=Cosine(over=1, warmup=0.05), augment=True, flip=True)
"""Reaches 0.49 on CIFAR-10's test images from 5000 real ones."""


def judge_of(classes: Sequence[str]) -> Judge:
    """The preset for these classes."""
    return PHOTOS if mirrors(classes) else DIGITS


class Real(NamedTuple):
    """The real images that a prior is held against."""

    train: Table  # their worth is compared with that of synthetic ones
    test: Table  # neither the prior nor a classifier saw these
    public: Table | None  # the prior was trained on these; None where they are not known
    classes: tuple[str, ...]
    words: str = ""  # what they are, for a reader


class Made(NamedTuple):
    """Synthetic images."""

    image: Tensor  # uint8 [n, 3, H, W]
    label: Tensor  # int64 [n], the class that was asked for
    template: Tensor  # int64 [n], number of its prompt's template


class Pair(NamedTuple):
    """An image and the public image nearest to it, uint8 [3, H, W]."""

    image: Tensor
    neighbour: Tensor
    distance: float  # root-mean-square difference in grey levels


class Lookup(NamedTuple):
    """Images and what is nearest to each among the public ones."""

    distance: Tensor  # float64 [n], root-mean-square difference in grey levels
    pairs: list[Pair]  # the closest ones, closest first


class Study(NamedTuple):
    """What a prior was found to be. `result` goes into JSON as it is; the rest is for the page."""

    result: dict[str, Any]
    classes: tuple[str, ...]
    words: str  # what the real images are
    synthetic: dict[str, np.ndarray]  # class name -> uint8 [<= 8, 3, H, W]
    real: dict[str, np.ndarray]
    lookups: tuple[Lookup, Lookup] | None  # of synthetic and of unseen images; None where no public ones are known


# real images
def digits_real() -> Real:
    """The digits. The real training images are the public half, which the embedded prior was trained on."""
    return Real(digits.public(), digits.test(), digits.public(), digits.CLASSES, "scikit-learn's digits, public half")


def cifar10_real(path: str | Path | None = None, *, count: int = 5000, seed: int = 0) -> Real:
    """CIFAR-10: `count` training images of the private half, as many of each class, +-1, and the whole test split.

    Raises UserError when the set cannot be had or has too few images.
    """
    from ..data import sources

    source = sources.load("cifar10", path=path)
    private, public = source.only("private"), source.only("public")
    train = balanced(private.train, count, source.classes, seed)
    return Real(train, private.test, public.train, source.classes, "CIFAR-10, private half of the training split")


def real_of(
    name: str,
    path: str | Path | None = None,
    *,
    images: int = 5000,
    image: str | None = None,
    label: str | None = None,
    size: int | None = None,
    seed: int = 0,
) -> Real:
    """The real images of a data set by name: all of the digits, else `images` training images of it. Of CIFAR-10 the
    private half is taken, and the public half is what the embedded prior was trained on. `image`, `label` and `size`
    are as for `sources.load`, and mean nothing for these two.

    Raises UsageError for an unknown name, UserError for data that cannot be had or has too few images.
    """
    from ..data import origins, sources

    if origins.alias(name) == origins.EMBEDDED and path is None:
        return digits_real()
    if origins.alias(name) == "cifar10":
        return cifar10_real(path, count=images, seed=seed)
    source = sources.load(name, path=path, image=image, label=label, size=size).without_domains()
    train = balanced(source.train, images, source.classes, seed)
    return Real(train, source.test, None, source.classes, f"{name}, training split")


def balanced(rows: Table, count: int, classes: Sequence[str], seed: int) -> Table:
    """`count` rows drawn by seed, as many of each class, +-1. Raises UserError where a class has too few."""
    chosen = []
    for c, name in enumerate(classes):
        among = torch.nonzero(rows["label"] == c)[:, 0]
        wanted = count // len(classes) + (c < count % len(classes))
        if len(among) < wanted:
            raise UserError(f"there are {len(among)} real images of class {name}, not {wanted}; ask for fewer in all")
        chosen.append(among[drawn(len(among), wanted, seed, "check rows", c)])
    return table.take(rows, torch.cat(chosen))


def even_halves(label: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Two disjoint sets of row numbers, int64, in random order; each has half of a class's rows, +-1."""
    order = drawn(len(label), len(label), seed, "check halves")
    by_class = order[label[order].argsort(stable=True)]
    first, second = by_class[::2], by_class[1::2]
    return first[drawn(len(first), len(first), seed, "check first")], second[
        drawn(len(second), len(second), seed, "check second")
    ]


def drawn(n: int, most: int, seed: int, purpose: str, *key: int) -> Tensor:
    """At most `most` different numbers below n in random order, int64."""
    return torch.from_numpy(seeds.stream(seed, purpose, *key).permutation(n)[:most])


# the study
def check(
    prior: Prior,
    train: Table,
    test: Table,
    classes: Sequence[str],
    *,
    public: Table | None = None,
    templates: Sequence[str] = prompts.SINGLE,
    images: int | None = None,
    judge: Judge | None = None,
    seed: int = 0,
    log: Log = print,
) -> dict[str, Any]:
    """`study`'s result for these tables."""
    real = Real(train, test, public, tuple(classes))
    return study(prior, real, templates=templates, images=images, judge=judge, seed=seed, progress=Saying(log)).result


def check_digits(
    prior: Prior, folder: Path | None = None, *, images: int | None = None, seed: int = 0, log: Log = print
) -> dict[str, Any]:
    """`study`'s result for the digits."""
    return study(prior, digits_real(), folder=folder, images=images, seed=seed, progress=Saying(log)).result


def study(
    prior: Prior,
    real: Real,
    *,
    folder: Path | None = None,
    templates: Sequence[str] = prompts.SINGLE,
    images: int | None = None,
    judge: Judge | None = None,
    seed: int = 0,
    fits: int = 1,
    with_inception: bool | None = False,
    progress: Progress = Silent(),
) -> Study:
    """What a prior's images are worth, beside real ones.

    `images` are made once, by `seed` (default: as many as real training images), as many of each class, +-1; `fits`
    classifiers of either kind train by the seeds from `seed` on, all for the same number of steps. `with_inception`
    says whether torch-fidelity's network measures distances too, which takes a CPU most of an hour for 3 x 5000 images;
    None: where it can be had.

    The result has these keys; shares and accuracies are in [0, 1], None stands for what cannot be known:

    - "synthetic", "real": accuracy on the real test images of classifiers trained on synthetic and on real images,
      mean over fits. "by_fit": both for each fit, "per_class": both for each class. "images", "real_images": how many
      each trained on, "test_images". "failed": images left out since they stayed faulty. "chance": of always saying
      the test images' commonest class.
    - "prompts": which synthetic images the first classifier of real ones takes for what was asked for: "recognised" in
      all, "per_class", and "confusion", counts [asked for][taken for].
    - "distances": "fid_cnn" and "kid_cnn" between `images` synthetic and as many real ones in that classifier's
      features, scaled to a mean square of 1, and the floors "fid_cnn_real" and "kid_cnn_real" between real and as many
      other real ones, all of the test set; with Inception also "fid", "kid" and their floors. "note": why not.
    - "diversity": "within_class", the mean distance of two images of a class in the same features, of synthetic and
      "within_class_real", of real test images; "templates", the share of templates that occur; "duplicates", the share
      of images byte-equal to an earlier one of their class; "near_duplicates", the share nearer to another one of their
      class than "near", below which 1 % of as many real training images lie (root-mean-square difference in grey
      levels).
    - "memorisation": quantiles of the distance (grey levels) to the nearest public image, of "synthetic" and of
      "unseen" real test images; "share_near", the share of synthetic images nearer than all but 1 % of the unseen ones
      (blurred images are near to everything); "share_public", the share of "looked_up" synthetic images that are nearer
      to a public image than to any of as many unseen ones: about a half, unless the prior copies. Where images are
      mirrored in training, the nearest is sought among mirror images too.
    - "size_MB" (1e6 bytes) of `folder` if one is given, and how it was measured: "prior", "judge", "templates", "seed".

    Raises ValueError for synthetic rows in the test table, UserError where most images are faulty, and for
    `with_inception=True` where it cannot be had.
    """
    deep, note = inception.wanted(with_inception)
    count = len(real.train["label"]) if images is None else images
    judge = judge or judge_of(real.classes)
    height, width = real.train["image"].shape[-2:]
    with progress.task("generating images", count) as update:
        made = generate(prior, real.classes, count, templates, seed, (height, width), update)
    if 2 * len(made.label) < count:
        raise UserError(
            f"{count - len(made.label)} of {count} images by {prior.name} are blank; use another dtype or prior"
        )
    scores, net, weights = worth(made, real, judge, seed, fits, progress)
    progress.say("comparing images" + (", by Inception too" if deep is not None else ""))
    lookups = looked_up(made, real, judge, seed)
    features, logits = read(net, weights, made.image)
    test_features = read(net, weights, real.test["image"])[0]
    scale = test_features.square().mean().sqrt()  # a net's own scale says nothing about images
    features, test_features = features / scale, test_features / scale
    result = {
        **{kind: float(np.mean([score.accuracy for score in own])) for kind, own in scores.items()},
        "images": len(made.label),
        "real_images": len(real.train["label"]),
        "test_images": len(real.test["label"]),
        "failed": count - len(made.label),
        "chance": float(real.test["label"].bincount().max()) / len(real.test["label"]),
        "by_fit": {kind: [score.accuracy for score in own] for kind, own in scores.items()},
        "per_class": {kind: known(np.mean([s.per_class for s in own], 0)) for kind, own in scores.items()},
        "prompts": recognition(made.label, logits.argmax(1), len(real.classes)),
        "distances": distances(made, features, real, test_features, seed, deep) | ({"note": note} if note else {}),
        "diversity": diversity(made, features, real, test_features, len(templates), seed),
        "memorisation": None if lookups is None else memorisation(made, lookups, real, judge, seed),
        "prior": {"name": prior.name, "revision": prior.revision, "settings": dict(prior.settings)},
        "judge": judge.settings,
        "templates": list(templates),
        "seed": seed,
    }
    if folder is not None:
        result["size_MB"] = folder_megabytes(folder)
    shown = ((made.image, made.label), (real.train["image"], real.train["label"]))
    synthetic, genuine = (of_each_class(*images, real.classes) for images in shown)
    return Study(result, real.classes, real.words, synthetic, genuine, lookups)


def worth(
    made: Made, real: Real, judge: Judge, seed: int, fits: int, progress: Progress
) -> tuple[dict[str, list[Evaluation]], Net, Tree]:
    """-> (evaluations on the test images of classifiers trained on "synthetic" and on "real" ones, one a fit; the
    first one of real images and its weights)."""
    kinds = {"synthetic": (made.image, made.label), "real": (real.train["image"], real.train["label"])}
    scores: dict[str, list[Evaluation]] = {kind: [] for kind in kinds}
    first: list[tuple[Net, Tree]] = []
    with progress.task("training classifiers", 2 * fits) as update:
        for i in range(fits):
            for kind, (image, label) in kinds.items():
                net, weights = fit(image, label, len(real.classes), seed + i, judge=judge)
                scores[kind].append(evaluate(net, weights, real.test, len(real.classes)))
                first += [(net, weights)] if kind == "real" and not first else []
                update(sum(map(len, scores.values())), f"{kind} images: {scores[kind][-1].accuracy:.3f}")
    return scores, *first[0]


def recognition(label: Tensor, found: Tensor, classes: int) -> dict[str, Any]:
    """Of images of these labels that a classifier took for the classes `found`: "recognised", "per_class",
    "confusion"."""
    counts = quality.confusion(label, found, classes)
    with np.errstate(invalid="ignore"):
        share = counts.diagonal().numpy() / counts.sum(1).numpy()
    return {
        "recognised": float(counts.trace()) / len(label),
        "per_class": known(share),
        "confusion": counts.tolist(),
    }


def distances(
    made: Made,
    features: Tensor,
    real: Real,
    test_features: Tensor,
    seed: int,
    deep: Callable[[Tensor], Tensor] | None,
) -> dict[str, Any]:
    """Frechet and kernel distances of synthetic images to one half of the test images, beside those of the other half.

    Equally many of all three, since both distances depend on the number (the first by its bias), and none that the
    classifier was trained on.
    """
    wanted, others = even_halves(real.test["label"], seed)
    n = min(len(others), len(made.label))
    wanted, others = wanted[:n], others[:n]
    out: dict[str, Any] = {"images": n}
    if n < 2:
        return out
    measured = {"_cnn": [features[:n], test_features[wanted], test_features[others]]}
    if deep is not None:
        test = real.test["image"]
        measured[""] = [deep(images) for images in (made.image[:n], test[wanted], test[others])]
    for name, (own, reference, floor) in measured.items():
        for what, distance in (("fid", quality.frechet), ("kid", lambda a, b: quality.kid(a, b, seed))):
            out[f"{what}{name}"] = distance(own, reference)
            out[f"{what}{name}_real"] = distance(floor, reference)
    return out


def diversity(
    made: Made, features: Tensor, real: Real, test_features: Tensor, templates: int, seed: int
) -> dict[str, Any]:
    """How varied synthetic images are, beside real ones."""
    classes, label = len(real.classes), real.train["label"]
    spreads = [quality.spread(*z, classes) for z in ((features, made.label), (test_features, real.test["label"]))]
    n = min(len(made.label), len(label))
    rows = drawn(len(label), n, seed, "check variety")
    apart = quality.nearest_other(quality.pixels(real.train["image"][rows]), label[rows]).distance
    own = quality.nearest_other(quality.pixels(made.image[:n]), made.label[:n]).distance
    near = quality.quantile(apart[apart.isfinite()], RARE) if apart.isfinite().any() else None
    return {
        "within_class": known(spreads[0].nanmean().reshape(1).numpy())[0],
        "within_class_real": known(spreads[1].nanmean().reshape(1).numpy())[0],
        "templates": len(made.template.unique()) / templates,
        "duplicates": float(quality.repeats(made.image, made.label).double().mean()),
        "near_duplicates": None if near is None else quality.below(own, near),
        "near": near,
    }


def looked_up(made: Made, real: Real, judge: Judge, seed: int) -> tuple[Lookup, Lookup] | None:
    """The public images nearest to synthetic and to unseen real ones."""
    if real.public is None:
        return None
    public, unseen = real.public["image"], real.test["image"]
    some = unseen[drawn(len(unseen), LOOKED_UP, seed, "check unseen")]
    out = []
    for images in (made.image[:LOOKED_UP], some):
        found = quality.nearest_image(images, public, judge.flip)
        closest = found.distance.argsort(stable=True)[:PAIRS].tolist()
        pairs = [Pair(images[i], public[found.which[i]], float(found.distance[i])) for i in closest]
        out.append(Lookup(found.distance, pairs))
    return out[0], out[1]


def memorisation(made: Made, lookups: tuple[Lookup, Lookup], real: Real, judge: Judge, seed: int) -> dict[str, Any]:
    """Whether synthetic images lie nearer to the public images than a model that copies none would put them."""
    assert real.public is not None
    public, unseen = real.public["image"], real.test["image"]
    n = min(len(public), len(unseen))
    images = made.image[:LOOKED_UP]
    to_public, to_unseen = (
        quality.nearest_image(images, pool[drawn(len(pool), n, seed, "check pools", i)], judge.flip).distance
        for i, pool in enumerate((public, unseen))
    )
    closer = (to_public < to_unseen).double() + (to_public == to_unseen).double() / 2
    own, others = (lookup.distance for lookup in lookups)
    return {
        "synthetic": [quality.quantile(own, q) for q in QUANTILES],
        "unseen": [quality.quantile(others, q) for q in QUANTILES],
        "share_near": quality.below(own, quality.quantile(others, RARE)),
        "share_public": float(closer.mean()),
        "looked_up": len(images),
    }


def known(values: np.ndarray) -> list[float | None]:
    """Numbers [n] for JSON, which has no NaN."""
    return [None if math.isnan(v) else float(v) for v in values]


def of_each_class(image: Tensor, label: Tensor, classes: Sequence[str]) -> dict[str, np.ndarray]:
    """The first images of each class that has any."""
    first = {name: image[torch.nonzero(label == c)[:SHOWN, 0]].numpy() for c, name in enumerate(classes)}
    return {name: images for name, images in first.items() if len(images)}


def folder_megabytes(folder: Path) -> float:
    """The size of all files in a folder in MB (1e6 bytes)."""
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) / 1e6


# synthetic images
def synthesise(
    prior: Prior,
    classes: Sequence[str],
    count: int,
    templates: Sequence[str],
    seed: int,
    size: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """Images uint8 [n, 3, H, W] and labels int64 [n], classes in turn; n < count if some stayed faulty."""
    made = generate(prior, classes, count, templates, seed, size, lambda done, note: None)
    return made.image, made.label


def generate(
    prior: Prior,
    classes: Sequence[str],
    count: int,
    templates: Sequence[str],
    seed: int,
    size: tuple[int, ...],
    update: Update,
) -> Made:
    """Images of the classes in turn, each with a template of its own; fewer than `count` if some stayed faulty."""
    height, width = size
    label = torch.arange(count) % len(classes)
    template = torch.tensor([prompts.draw(tuple(templates), seed, i) for i in range(count)], dtype=torch.int64)
    chosen = zip(label.tolist(), template.tolist(), strict=True)
    sentences = [prompts.prompt(classes[c], templates[t]) for c, t in chosen]
    image, ok = [torch.zeros((0, 3, height, width), dtype=torch.uint8)], [torch.zeros(0, dtype=torch.bool)]
    for start in range(0, count, CALL):
        part = sentences[start : start + CALL]
        number = lambda i, attempt, start=start: seeds.number(seed, "check image", start + i, attempt)
        made = faults.generate(prior, part, number, (height, width))
        image.append(made.images)
        ok.append(torch.tensor(made.ok, dtype=torch.bool))
        update(start + len(part), "")
    kept = torch.cat(ok)
    return Made(torch.cat(image)[kept], label[kept], template[kept])


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


# the classifier
def accuracy(image: Tensor, label: Tensor, test: Table, classes: int, seed: int, judge: Judge = DIGITS) -> float:
    """Test accuracy of a small classifier trained on these images.

    Raises ValueError for synthetic rows in the test table.
    """
    net, trained = fit(image, label, classes, seed, judge=judge)
    return evaluate(net, trained, test, classes).accuracy


def fit(
    image: Tensor, label: Tensor, classes: int, seed: int, steps: int | None = None, judge: Judge = DIGITS
) -> tuple[Net, Tree]:
    """A small classifier trained on images uint8 [n, 3, H, W] for `steps` steps (default: the judge's), as one client
    trains, and its weights."""
    height, width = image.shape[-2:]
    net = Net(nets.build(judge.net, classes, size=(height, width), seed=seed))
    start = net.init()
    worker = Worker(
        net=net,
        method=FedAvg(),
        optimizer=AdamW(lr=judge.lr),
        batch_size=64,
        schedule=judge.schedule,
        steps=judge.steps if steps is None else steps,
        augment=judge.augment,
        flip=judge.flip,
        seed=seed,
    )
    shard = Shard(make(image, label), torch.arange(len(label)))
    upload, _ = worker.train(0, shard, {"weights": start, "shared": {}}, {}, round=0)
    sent = upload.tree
    return net, {"params": tree.add(start["params"], sent["method"]["delta"]), "buffers": sent["buffers"]}


@torch.inference_mode()
def read(net: Net, weights: Tree, image: Tensor) -> tuple[Tensor, Tensor]:
    """Features [n, D] and logits [n, K] of images uint8 [n, 3, H, W] in evaluation mode."""
    size = max(1, PIXELS // image[0, 0].numel()) if len(image) else 1
    found = [net(weights, part, train=False) for part in image.split(size)]
    return torch.cat([x.features for x in found]), torch.cat([x.logits for x in found])


@dataclass(frozen=True)
class Saying(Silent):
    """Progress as plain lines."""

    log: Log

    def say(self, text: str) -> None:
        self.log(text)

    @contextmanager
    def task(self, name: str, total: int, done: int = 0) -> Iterator[Update]:
        self.log(f"{name}: {total}")
        yield lambda done, note: self.log(note) if note else None
