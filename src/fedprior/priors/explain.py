"""What a prior's descriptors know: do they tell classes apart, and what does a prompt move in them?

The first is FedDifRC's Figs. 2 to 4 and 6 (arXiv:2507.06482). The second takes the descriptors F_ij of images i under
class prompts j apart in two ways,

    F_ij = mean + u_i + v_j + w_ij

since a prompt that moves all images alike (v) is no more than a fixed anchor of its class, which a random vector could
be as well: only the interaction w holds what the prior knows of an image and a class together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import assemble, seeds, store
from ..config import Experiment, override
from ..data import sources, table
from ..data.origins import EMBEDDED
from ..data.sources import Source
from ..data.table import Federation, Shard, Table
from ..errors import UsageError, UserError
from ..guide import FedDifRC, Guide
from ..prepare.describe import Item
from ..probe import linear_probe
from ..progress import Progress
from . import explain_figures as figures
from . import features, quality
from .base import Prior
from .descriptor import Description
from .embedded import sidecar
from .encoder import ImageEncoder

PROMPTS = 10  # of the first classes
COMPONENTS = 64  # of the interaction, which is as wide as all descriptors of an image together
STARTS = 10  # of k-means
PICTURES = 6  # images whose feature maps are drawn
POINTS = 1000  # of a t-SNE
Row = dict[str, Any]
JOINED = "joined"  # all levels' descriptors one after another


class Sample(NamedTuple):
    """Real images: the first `fitted` are training rows, the others test rows."""

    image: Tensor  # uint8 [n, 3, H, W]
    label: Tensor  # int64 [n]
    fitted: int


# numbers
def effects(f: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Descriptors [n, P, d] -> (mean [d], u [n, d], v [P, d], w [n, P, d]); u, v and w sum to zero over each axis."""
    mean = f.mean((0, 1))
    u, v = f.mean(1) - mean, f.mean(0) - mean
    return mean, u, v, f - mean - u[:, None] - v


def shares(f: Tensor) -> dict[str, float]:
    """Parts of the variance of descriptors [n, P, d], summed over components: of the image, the prompt and their
    interaction; they sum to 1. Raises ValueError for descriptors that do not vary."""
    mean, u, v, w = effects(f.double())
    total = float((f.double() - mean).square().sum())
    if not total:
        raise ValueError("descriptors that do not vary have no parts of variance")
    parts = {
        "image": f.shape[1] * u.square().sum(),
        "prompt": len(f) * v.square().sum(),
        "interaction": w.square().sum(),
    }
    return {name: float(part) / total for name, part in parts.items()}


def mean_cosine(f: Tensor) -> float:
    """Of the pairs of different rows among the last but one axis of [..., n, d], mean over the axes before."""
    unit = F.normalize(f.double(), dim=-1)
    n = f.shape[-2]
    return float(((unit.sum(-2).square().sum(-1) - unit.square().sum((-1, -2))) / (n * (n - 1))).mean())


def own_nearest(plain: Tensor, prompted: Tensor, own: Tensor) -> float:
    """The share of images whose descriptor under the empty prompt [n, d] is nearest (cosine), among those under class
    prompts [n, P, d], to that under the prompt of its own class, number own [n]."""
    cosine = F.normalize(prompted.double(), dim=-1) @ F.normalize(plain.double(), dim=-1)[:, :, None]
    return float((cosine[:, :, 0].argmax(1) == own).double().mean())


def purity(z: Tensor, label: Tensor, classes: int, seed: int) -> float:
    """The share of rows [n, d] that are of the commonest class of their k-means cluster, for as many clusters as
    classes."""
    from sklearn.cluster import KMeans

    found = KMeans(classes, n_init=STARTS, random_state=seed).fit_predict(z.double().numpy())
    counts = torch.zeros(classes, int(label.max()) + 1)
    counts.index_put_((torch.from_numpy(found).long(), label), torch.ones(len(label)), accumulate=True)
    return float(counts.max(1).values.sum()) / len(label)


def interaction_probe(w: Tensor, label: Tensor, fitted: int, seed: int) -> float:
    """Test accuracy of a linear probe for the class from w [n, P, d] of an image, all prompts joined and brought to at
    most 64 principal components; the first `fitted` rows train axes and probe."""
    from sklearn.decomposition import PCA

    flat = w.flatten(1).double().numpy()
    count = min(COMPONENTS, fitted, flat.shape[1])
    pca = PCA(count, svd_solver="randomized", random_state=seed).fit(flat[:fitted])
    z = torch.from_numpy(pca.transform(flat))
    return linear_probe(z[:fitted], label[:fitted], z[fitted:], label[fitted:], seed)


def separability(z: Tensor, sample: Sample, classes: int, seed: int) -> dict[str, float]:
    """How well features [n, d] tell classes apart: {"probe", "purity"} in [0, 1]."""
    k, label = sample.fitted, sample.label
    return {
        "probe": linear_probe(z[:k], label[:k], z[k:], label[k:], seed),
        "purity": purity(z[:k], label[:k], classes, seed),
    }


def movement(plain: Tensor, prompted: Tensor, sample: Sample, seed: int) -> dict[str, float]:
    """What class prompts move in descriptors [n, P, d], and where those under the empty prompt [n, d] lie.

    `own_nearest_centred` is without v, which moves all images alike. Everything that is estimated comes from the
    training rows; both `own_nearest` and `interaction_probe` are of test rows.
    """
    k, own = sample.fitted, sample.label
    plain, prompted = plain.double(), prompted.double()
    v = effects(prompted[:k])[2]
    w = prompted - prompted.mean(1, keepdim=True) - v
    return {
        **shares(prompted[:k]),
        "cosine_of_prompts": mean_cosine(prompted[:k]),
        "cosine_of_images": mean_cosine(prompted[:k].transpose(0, 1)),
        "own_nearest": own_nearest(plain[k:], prompted[k:], own[k:]),
        "own_nearest_centred": own_nearest(plain[k:], prompted[k:] - v, own[k:]),
        "interaction_probe": interaction_probe(w, own, k, seed),
    }


# images and their descriptors
def draw(source: Source, classes: int, images: int, seed: int) -> Sample:
    """At most `images` training and as many test rows of the first `classes` classes, drawn by seed. Raises UsageError
    where a part has fewer rows than there are classes."""
    parts: list[Table] = []
    for name, rows in (("train", source.train), ("test", source.test)):
        among = torch.nonzero(rows["label"] < classes)[:, 0]
        order = seeds.stream(seed, "explain rows", len(parts)).permutation(len(among))[:images]
        if len(order) < classes:
            raise UsageError(f"{len(order)} {name} images are fewer than the {classes} classes; raise --images")
        parts.append(table.take({key: rows[key] for key in ("image", "label")}, among[torch.from_numpy(order)]))
    both = table.concat(*parts)
    return Sample(both["image"], both["label"], len(parts[0]["label"]))


def pixels(image: Tensor) -> Tensor:
    """Images uint8 [n, 3, H, W] as rows [n, 3 h w] in [0, 1], at most 32 x 32."""
    return (quality.reduced(image) / 255).flatten(1)


@dataclass(frozen=True)
class Reader:
    """Reads a sample's descriptors as a run with this guide would, and finds those that it kept. All images belong to
    one client."""

    guide: Guide
    sample: Sample

    @property
    def items(self) -> list[Item]:
        image, label, _ = self.sample
        return self.guide.describer.items([Shard({"image": image, "label": label}, torch.arange(len(image)))])[0]

    def descriptors(self, progress: Progress) -> dict[str, Tensor]:
        """{level or "joined": float32 [n, P, m]}, under the prompts of the guide's classes and then the empty one."""
        describer, items = self.guide.describer, self.items
        missing = describer.missing([items])
        name = f"descriptors by {self.guide.prior.name}, timestep {self.guide.config.timestep}"
        with progress.task(name, len(missing)) as update:
            describer.fill([items], missing, self.sample.image, lambda done: update(done, ""))
        keys = [item.key for item in items]
        found = {str(level): describer.level_store(level).gather(keys).float() for level in describer.sizes}
        return found | {JOINED: torch.cat(list(found.values()), dim=-1)}

    def maps(self, rows: Tensor) -> dict[str, Tensor]:
        """{level: float32 [n, h, w, 3]}, the first three principal components of every position of these rows under
        the empty prompt, on the axes that descriptors have."""
        describer, items = self.guide.describer, self.items
        group = [item for item in items if item.group == items[0].group]
        basis = describer.basis(items[0].group, group, self.sample.image)
        maps = describer.maps(self.sample.image[rows], [items[row] for row in rows.tolist()])
        out = {}
        for level, x in maps.items():
            values = (x[:, -1].movedim(1, -1).cpu() - basis[level].mean) @ basis[level].axes[:3].T
            out[str(level)] = F.pad(values, (0, 3 - values.shape[-1]))
        return out


def embedded(z: Tensor, seed: int) -> Tensor:
    """t-SNE of rows [n, d] in the plane, [n, 2]."""
    from sklearn.manifold import TSNE

    near = min(30.0, (len(z) - 1) / 3)  # scikit-learn's perplexity, less for few rows
    return torch.from_numpy(TSNE(init="pca", perplexity=near, random_state=seed).fit_transform(z.numpy()))


def of_each_class(label: Tensor, count: int) -> Tensor:
    """The first row of each class, for as many classes: int64 [<= count]."""
    return torch.stack([torch.nonzero(label == c)[0, 0] for c in label.unique()[:count]])


# the command
def numbers(text: str) -> list[int]:
    """Timesteps from a list with commas, in its order. Raises UsageError for anything else and for one that comes
    twice."""
    parts = text.replace(" ", "").split(",")
    if not all(part.isdecimal() for part in parts) or len(set(map(int, parts))) < len(parts):
        raise UsageError(f"--timesteps must be different whole numbers with commas, such as 1,50,300, not '{text}'")
    return [int(part) for part in parts]


def experiment_of(source: str, words: Sequence[str], levels: str, timesteps: Sequence[int]) -> Experiment:
    """The experiment whose data, prior and guide are explained. Raises UsageError for words that change no descriptor
    and for those that have an option of their own. A prior that says what it was trained on is shown other images of
    that set."""
    given = [f"prior={source}", "guide=feddifrc", f"guide.levels={levels}", f"guide.timestep={timesteps[0]}", *words]
    trained_on = sidecar(source).get("trained_on", EMBEDDED)
    if trained_on != EMBEDDED and not any(word.startswith(("data=", "data.name=")) for word in words):
        given = [f"data={trained_on}", "data.half=private", *given]  # photos like those it knows, but none of them
    found = override(Experiment(), given)
    own = {"guide.timestep": "--timesteps", "guide.levels": "--levels"} | dict.fromkeys(
        ("prior", "prior.name"), "SOURCE"
    )
    describing = {f"guide.{f.name}" for f in fields(Description)} | {"guide.template", "guide.noun"}
    for key in (word.partition("=")[0].strip().replace("-", "_") for word in words):
        if key in own:
            raise UsageError(f"{key}= is what {own[key]} says here; leave it out")
        if key.partition(".")[0] not in ("data", "prior", "device", "threads") and key not in describing:
            raise UsageError(
                f"{key}= changes no descriptor; say data=, prior.KEY=, device=, threads= or guide.KEY= that do"
            )
    if found.guide is not None and found.guide.condition == "dynamic":
        raise UsageError("guide.condition=dynamic follows a client's model, and here is none; use static")
    return found


@dataclass(frozen=True)
class Subject:
    """A prior, how it describes images, and the images that it is asked about."""

    config: FedDifRC
    prior: Prior
    encoder: ImageEncoder | None
    classes: tuple[str, ...]
    sample: Sample  # of all classes, described under the empty prompt
    asked: Sample  # of the classes whose prompts are asked; the same one where these are all

    def reader(self, timestep: int) -> Reader:
        """Of the asked images under prompts."""
        config, classes = replace(self.config, timestep=timestep), self.classes[:PROMPTS]
        return Reader(Guide(config=config, prior=self.prior, classes=classes, encoder=self.encoder), self.asked)

    def bare_reader(self, timestep: int) -> Reader:
        """Of all images under the empty prompt alone."""
        config = replace(self.config, timestep=timestep, tdcl=0.0)
        return Reader(Guide(config=config, prior=self.prior, classes=self.classes, encoder=self.encoder), self.sample)


def measured(subject: Subject, timestep: int, seed: int, progress: Progress) -> tuple[list[Row], dict[str, Tensor]]:
    """-> (a row for each level and for the joined ones, descriptors [n, m] by level of `sample` under the empty
    prompt)."""
    prompted = subject.reader(timestep).descriptors(progress)
    whole = prompted if subject.asked is subject.sample else subject.bare_reader(timestep).descriptors(progress)
    plain = {level: f[:, -1] for level, f in whole.items()}
    rows: list[Row] = []
    with progress.task(f"analysis, timestep {timestep}", len(prompted)) as update:
        for level, f in prompted.items():
            told = separability(plain[level], subject.sample, len(subject.classes), seed)
            moved = movement(f[:, -1], f[:, :-1], subject.asked, seed)
            rows.append({"timestep": timestep, "level": level, "width": f.shape[-1], **rounded(told | moved)})
            update(len(rows), "")
    return rows, plain


def rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 6) for name, value in values.items()}


def examined(experiment: Experiment, timesteps: Sequence[int], images: int, seed: int) -> Subject:
    """The experiment's prior and images of its data. Raises UsageError for a timestep or level that the prior has not
    and for too few images, UserError for data or a prior that cannot be had."""
    d, config = experiment.data, experiment.guide
    assert config is not None
    device = assemble.set_up(experiment)
    source = sources.load(d.name, path=d.path, image=d.image, label=d.label, size=d.size, half=d.half)
    classes = source.classes
    federation = Federation(table=source.train, clients=(), test=source.test, classes=classes)
    prior = assemble.prior_for(experiment, federation, device)
    for timestep in timesteps:
        features.check(prior.pipeline, prior.name, timestep, tuple(config.wanted))
    sample = draw(source, len(classes), images, seed)
    asked = sample if len(classes) <= PROMPTS else draw(source, PROMPTS, images, seed)
    guide = assemble.build_guide(experiment, federation, device, prior)
    assert guide is not None
    return Subject(config, prior, guide.encoder, classes, sample, asked)


def explain(
    experiment: Experiment, timesteps: Sequence[int], images: int, out: Path, seed: int, progress: Progress
) -> dict[str, Any]:
    """Analyses the experiment's prior and writes explain.json and four figures into `out`.

    Returns what the file holds: `pixels` {"probe", "purity"} and `rows`, one for each timestep and level, with
    `separability` and `movement`; `images` and `prompted_images` say how many training and test images these are of.
    Raises UsageError and UserError as `examined` does, and UserError for a folder that cannot be made.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {out} ({error.strerror}); choose another --out") from None
    subject = examined(experiment, timesteps, images, seed)
    config, sample, asked, classes = subject.config, subject.sample, subject.asked, subject.classes
    shown = {timesteps[0], timesteps[len(timesteps) // 2], timesteps[-1]}
    drawn = min(POINTS, sample.fitted)
    pictured = of_each_class(asked.label, PICTURES)
    rows: list[Row] = []
    points: dict[int, dict[str, Tensor]] = {}
    maps: dict[int, dict[str, Tensor]] = {}
    for timestep in timesteps:
        own, plain = measured(subject, timestep, seed, progress)
        rows += own
        if timestep in shown:
            points[timestep] = {level: embedded(z[:drawn], seed) for level, z in plain.items() if level != JOINED}
            maps[timestep] = subject.reader(timestep).maps(pictured)
    raw = rounded(separability(pixels(sample.image), sample, len(classes), seed))
    prompts = [config.prompt(name) for name in classes[:PROMPTS]]
    result = {
        "prior": subject.prior.name,
        "revision": subject.prior.revision,
        "data": experiment.data.name,
        "how": {f.name: getattr(config, f.name) for f in fields(Description) if f.name != "timestep"},
        "classes": list(classes),
        "prompts": prompts,
        "seed": seed,
        "images": {"train": sample.fitted, "test": len(sample.label) - sample.fitted},
        "prompted_images": {"train": asked.fitted, "test": len(asked.label) - asked.fitted},
        "chance": rounded({"probe": 1 / len(classes), "own_nearest": 1 / len(prompts)}),
        "pixels": raw,
        "rows": rows,
    }
    figures.separability(rows, raw, 1 / len(classes), out / "separability.png")
    figures.points(points, sample.label[:drawn], classes, out / "tsne.png")
    figures.maps(asked.image[pictured], maps, out / "maps.png")
    figures.prompts(rows, 1 / len(prompts), out / "prompts.png")
    store.write_json(out / "explain.json", result)
    return result
