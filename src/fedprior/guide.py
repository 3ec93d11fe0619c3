"""FedDifRC (arXiv:2507.06482): a frozen UNet's view of each image steers local training, under any method.

    loss  method's own + tdcl * TDCL + ndcr * NDCR

    TDCL_i = -log( e^{s(z_i, F_i+)/T} / (e^{s(z_i, F_i+)/T} + sum_j e^{s(z_i, F_ij)/T}) )
    NDCR_i = | z_i/|z_i| - H_i/|H_i| |^2

z is the client's feature, F_i+ and F_ij the descriptors of the same image under the prompt of its own class and of
others, H_i its descriptor under a prompt that names no class. A gradient reaches z alone. docs/papers.md says what the
paper leaves open and what its released code does otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import seeds
from .data import table
from .data.table import Federation, Shard, Table
from .errors import UsageError
from .method import Context
from .net import Output
from .nets.heads import shape_of_head
from .prepare.describe import Describer, Item
from .priors import prompts
from .priors.base import Prior
from .priors.class_names import tiny_imagenet
from .priors.descriptor import Basis, Description
from .priors.encoder import ImageEncoder
from .progress import Progress
from .tree import Tree

ALL_PROMPTS = 20  # up to as many classes, an image is described under the prompts of all
GENERIC, SIMILAR = "a photo of a visual object", "a photo of a similar object"
HEAD = "guide"  # the layer from the net's features to a descriptor's width
EPSILON = 1e-6  # least value of the normaliser U


@dataclass(frozen=True, kw_only=True)
class FedDifRC(Description):
    """`tdcl` and `ndcr` weigh the terms; 0 switches one off.

    TDCL: `temperature`; `negatives` other classes drawn in every step (for more than 20 classes once an image);
    `negatives_from` the same image's other prompts, other images' own prompts, or both; `normaliser` U divides each
    similarity by the mean distance of the batch's features to that descriptor; `anchors` are descriptors, or what they
    must beat: one fixed random vector a class, or the text encoding of a class prompt. `reduction=batch_ratio` and
    `pairing=official` are the released code's: one logarithm of sums over the batch, and negatives dealt to the wrong
    rows.

    NDCR: `consistency` is the distance (`kl_softmax` is the released code's), `noise_prompt` the prompt of H (auto: the
    empty one, or a generic one without labels; class leaks the label), `target=shuffled` a control that pairs each
    image with another one's H.

    `whiten` standardises descriptors, over all images (`component`) or by what prompts change at one image (`prompt`).
    `head=auto` puts a linear layer between features and descriptors where widths differ or targets have signs.
    `template` and `noun` make a class's prompt. `labels=false` is the self-supervised variant: these two terms alone,
    and prompts that do not depend on labels.
    """

    tdcl: float = 1.0
    ndcr: float = 1.0
    temperature: float = 0.04
    negatives: int = 10
    negatives_from: Literal["same_image", "other_images", "both"] = "same_image"
    normaliser: Literal["none", "mean_distance"] = "none"
    reduction: Literal["sample", "batch_ratio"] = "sample"
    pairing: Literal["row", "official"] = "row"
    anchors: Literal["diffusion", "text", "random"] = "diffusion"
    consistency: Literal["l2_normalized", "l2_raw", "mse", "cosine", "kl_softmax"] = "l2_normalized"
    noise_prompt: Literal["auto", "null", "class", "generic"] = "auto"
    target: Literal["own", "shuffled"] = "own"
    whiten: Literal["none", "component", "prompt"] = "none"
    head: Literal["auto", "linear", "none"] = "auto"
    template: str = prompts.SINGLE[0]
    noun: str | None = None
    labels: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("tdcl", "ndcr"):
            if not 0 <= getattr(self, key) < float("inf"):
                raise UsageError(f"guide.{key} must be a number of at least 0, not {getattr(self, key)}")
        if not 0 < self.temperature < float("inf"):
            raise UsageError(f"guide.temperature must be above 0, not {self.temperature}")
        if not self.labels and not self.tdcl and not self.ndcr:
            raise UsageError("guide.labels=false trains on guide.tdcl and guide.ndcr alone; one must be above 0")
        if not self.labels and self.negatives > len(tiny_imagenet()):
            raise UsageError(f"guide.negatives must be at most {len(tiny_imagenet())} with guide.labels=false")
        if self.negatives < 1:
            raise UsageError(f"guide.negatives must be at least 1, not {self.negatives}")
        if self.template.count("{}") != 1:
            raise UsageError(f"guide.template='{self.template}' needs exactly one {{}} where the class name goes")
        if self.whiten != "none" and self.pca != "global":
            raise UsageError(f"guide.whiten={self.whiten} needs guide.pca=global, whose images say what is usual")
        if not self.labels and self.anchors != "diffusion":
            raise UsageError(f"guide.anchors={self.anchors} are one a class, which guide.labels=false does not know")
        if not self.labels and self.noise_prompt == "class":
            raise UsageError("guide.noise_prompt=class needs labels; use null or generic with guide.labels=false")

    def prompt(self, classname: str) -> str:
        """A class's prompt; the noun is appended where the name lacks it, as for fine-grained sets."""
        words = classname.lower().replace("_", " ").split()
        name = f"{classname} {self.noun}" if self.noun and self.noun.lower() not in words else classname
        return prompts.prompt(name, self.template)

    @property
    def noise_words(self) -> str | None:
        """H's prompt; None where it is the prompt of the image's class."""
        if self.noise_prompt == "class":
            return None
        generic = self.noise_prompt == "generic" or (self.noise_prompt == "auto" and not self.labels)
        return GENERIC if generic else ""


GUIDES: dict[str, type[FedDifRC]] = {"feddifrc": FedDifRC}


# the two terms: z [B, d] with a gradient, descriptors without
def similarity(z: Tensor, f: Tensor, config: FedDifRC) -> Tensor:
    """s(z_i, F_ij) / T for z [B, d] and F [B, P, d] -> [B, P]."""
    zn, fn = F.normalize(z, dim=-1), F.normalize(f, dim=-1)
    s = (fn @ zn[:, :, None])[:, :, 0]
    if config.normaliser == "mean_distance":
        with torch.no_grad():
            cosines = zn @ fn.flatten(0, 1).T  # [B, B P]
            distance = (2 - 2 * cosines).clamp(min=0).sqrt().mean(0).view(s.shape)
        s = s / distance.clamp(min=EPSILON)
    return s / config.temperature


def tdcl(z: Tensor, text: Tensor, own: Tensor, group: Tensor, used: Tensor | None, config: FedDifRC) -> Tensor:
    """TDCL, scalar, for z [B, d], descriptors text [B, P, d] of which own [B] is the positive.

    used [B, P] says which prompts count (None: all). group [B] tells which other images are negatives too, where such
    are asked for: those of another group.
    """
    s = similarity(z, text, config)
    positive = s.gather(1, own[:, None])  # [B, 1]
    others = torch.ones_like(s, dtype=torch.bool).scatter(1, own[:, None], False)
    if used is not None:
        others = others & used
    if config.pairing == "official":  # the k-th of all negatives, image by image, meets row k modulo B
        s, others = misdealt(z, text, others, config)
    parts = []
    if config.negatives_from != "other_images":
        parts.append(s.masked_fill(~others, float("-inf")))
    if config.negatives_from != "same_image":
        theirs = text.gather(1, own[:, None, None].expand(-1, 1, text.shape[2]))[:, 0]  # [B, d]
        strange = group[:, None] != group
        far = similarity(z, theirs.expand(len(z), -1, -1), config)
        parts.append(far.masked_fill(~strange, float("-inf")))
    logits = torch.cat([positive, *parts], dim=1)
    if config.reduction == "batch_ratio":
        return logits.flatten().logsumexp(0) - positive.flatten().logsumexp(0)
    return -F.log_softmax(logits, dim=1)[:, 0].mean()


def misdealt(z: Tensor, text: Tensor, others: Tensor, config: FedDifRC) -> tuple[Tensor, Tensor]:
    """The released code's pairing: row i of the result holds the negatives whose running number is i modulo B."""
    rows, each = len(z), min(config.negatives, text.shape[1] - 1)  # as many as `Guide.draw` marks
    picked = others.int().argsort(dim=1, descending=True, stable=True)[:, :each]
    flat = text.gather(1, picked[:, :, None].expand(-1, -1, text.shape[2])).flatten(0, 1)  # [B each, d], by image
    dealt = flat.view(each, rows, text.shape[2]).transpose(0, 1)
    return similarity(z, dealt, config), others.gather(1, picked).flatten().view(each, rows).transpose(0, 1)


def ndcr(z: Tensor, noise: Tensor, kind: str) -> Tensor:
    """NDCR, scalar, mean over the batch, for z and noise [B, d]."""
    if kind == "l2_raw":
        return (z - noise).square().sum(1).mean()
    if kind == "mse":
        return (z - noise).square().mean()
    zn, hn = F.normalize(z, dim=-1), F.normalize(noise, dim=-1)
    if kind == "cosine":
        return 1 - (zn * hn).sum(1).mean()
    if kind == "kl_softmax":
        return F.kl_div(F.log_softmax(zn, 1), F.log_softmax(hn, 1), reduction="batchmean", log_target=True)
    return (zn - hn).square().sum(1).mean()


def standardised(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale; a component that did not vary (beyond rounding) says nothing and becomes zero."""
    return torch.where(scale > EPSILON * scale.max(), x / scale, 0.0)


class Revision(NamedTuple):
    """What is left of a model in a process that does not ask it."""

    revision: str


class Known:
    """What is known of a prior where it is not at hand: enough to find what it made."""

    name: str
    revision: str
    size: int
    settings: dict[str, Any]
    level_widths: dict[int, int]

    def __init__(self, prior: "Prior | Known") -> None:
        self.name, self.revision, self.size = prior.name, prior.revision, prior.size
        self.settings, self.level_widths = dict(prior.settings), prior.level_widths

    def facts(self) -> dict[str, Any]:
        """As JSON values."""
        return vars(self) | {"level_widths": [[level, n] for level, n in self.level_widths.items()]}

    @classmethod
    def of(cls, facts: dict[str, Any]) -> "Known":
        """What `facts` was said of."""
        made = cls.__new__(cls)
        vars(made).update(facts | {"level_widths": dict(facts["level_widths"])})
        return made


@dataclass(kw_only=True)
class Guide:
    """A configuration with its prior and the federation's descriptors: what a worker asks for columns and loss."""

    config: FedDifRC
    prior: Prior
    classes: tuple[str, ...]
    encoder: ImageEncoder | None = None
    describer: Describer = field(init=False)
    _keys: dict[int, list[bytes]] = field(default_factory=dict)  # of each client's rows, static descriptors
    _anchors: Tensor | None = None

    def __post_init__(self) -> None:
        names = self.classes if self.config.labels else tiny_imagenet()
        made = [self.config.prompt(name) for name in names]
        self.describer = Describer(
            prior=self.prior,
            how=self.config,
            prompts_of=self.prompts_of,
            fit_prompts=["", *made[:: -(-len(made) // 10)]],
            made_prompts=made,
            encoder=self.encoder,
        )

    @property
    def width(self) -> int:
        """d, the length of a descriptor."""
        return sum(self.describer.sizes.values())

    # what an image is described under
    @property
    def everything(self) -> bool:
        """Are there few enough classes to describe each image under the prompts of all?"""
        return self.config.labels and len(self.classes) <= ALL_PROMPTS

    @property
    def text(self) -> bool:
        """Are class prompts needed?"""
        return self.config.tdcl > 0 and self.config.anchors == "diffusion"

    def prompts_of(self, image: bytes, label: int) -> list[str]:
        """The text prompts, if any, and as the last one H's."""
        number = int.from_bytes(image[:7])
        words: list[str] = []
        if self.text and self.everything:
            words = list(self.describer.made_prompts)
        elif self.text and self.config.labels:
            rng = seeds.stream(self.config.noise_seed, "negatives", number)
            others = [c for c in range(len(self.classes)) if c != label]
            drawn = rng.choice(others, min(self.config.negatives, len(others)), replace=False).tolist()
            words = [self.config.prompt(self.classes[c]) for c in (label, *drawn)]
        elif self.text:
            rng = seeds.stream(self.config.noise_seed, "nouns", number)
            words = [
                SIMILAR,
                *(
                    prompts.prompt(n, self.config.template)
                    for n in rng.choice(tiny_imagenet(), self.config.negatives, replace=False)
                ),
            ]
        noise = self.config.noise_words
        if self.text:  # always there, so that runs with and without NDCR find the same descriptors
            words.append("" if noise is None else noise)
        elif self.config.ndcr > 0:
            words.append(self.config.prompt(self.classes[label]) if noise is None else noise)
        return words

    # before round 1
    def adapt(self, module: nn.Module, seed: int) -> nn.Module:
        """The net with a linear layer of its own from features to descriptors, where one is wanted."""
        width, signed = shape_of_head(module)[1], self.config.whiten != "none" or self.config.pool == "mean"
        signed = signed or self.config.anchors != "diffusion"
        if self.config.head == "none" and width != self.width:
            raise UsageError(
                f"guide.head=none needs features as wide as a descriptor, but the net has {width} and the prior's "
                f"levels {self.config.levels} have {self.width}; use guide.head=auto or set guide.components="
            )
        if self.config.head == "linear" or (self.config.head == "auto" and (signed or width != self.width)):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seeds.number(seed, "guide head"))
                module.add_module(HEAD, nn.Linear(width, self.width))
        return module

    def describe(self, federation: Federation, progress: Progress) -> int:
        """Computes the descriptors that clients lack -> of how many images."""
        items, missing = self.find(federation)
        if items and self.config.whiten != "none":
            self.describer.basis("global")  # there too, where the descriptors are but not what they were scaled by
        if missing:
            with progress.task(f"descriptors by {self.prior.name}", len(missing)) as update:
                self.describer.fill(items, missing, federation.table["image"], lambda done: update(done, ""))
        return len(missing)

    def find(self, federation: Federation) -> tuple[list[list[Item]], list[Item]]:
        """Notes which descriptors the clients' rows have -> (those, the ones among them that are not there)."""
        if self.config.condition == "dynamic" or not self.prompts_of(bytes(8), 0):
            return [], []
        clients = [k for k, rows in enumerate(federation.clients) if len(rows)]
        items = self.describer.items([federation.shard(k) for k in clients])
        self._keys = {k: [item.key for item in own] for k, own in zip(clients, items, strict=True)}
        return items, self.describer.missing(items)

    def complete(self, federation: Federation) -> bool:
        """Whether all descriptors, and axes that are needed beside them, lie in files."""
        return not self.find(federation)[1] and (self.config.whiten == "none" or self.describer.has_axes())

    def settled(self) -> "Guide":
        """A guide for another process: without the diffusion model, where all descriptors lie in files by now."""
        if self.config.condition == "dynamic":
            return self
        guide = Guide.of(self.config, self.classes, *self.essence())
        guide._keys = self._keys
        return guide

    def essence(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What a process that has the descriptors' files must know besides, as JSON values and tensors; see `of`."""
        facts = {"prior": Known(self.prior).facts(), "encoder": self.encoder.revision if self.encoder else None}
        return facts, {} if self.config.anchors == "diffusion" else {"anchors": self.anchors()}

    @classmethod
    def of(
        cls, config: FedDifRC, classes: tuple[str, ...], facts: dict[str, Any], tensors: Mapping[str, Tensor]
    ) -> "Guide":
        """A guide without the diffusion model, from another one's `essence`."""
        encoder = cast(ImageEncoder, Revision(facts["encoder"])) if facts["encoder"] else None
        guide = cls(config=config, prior=cast(Prior, Known.of(facts["prior"])), classes=classes, encoder=encoder)
        guide._anchors = tensors.get("anchors")
        return guide

    # on the client, before its local training
    def annotate(self, client: int, shard: Shard, ctx: Context, memory: Tree, round: int) -> tuple[Shard, Tree]:
        """-> (the shard with the columns that `loss` reads, what the client remembers of them)."""
        base = table.take(shard.table, shard.rows)
        kept: Tree = {}
        if self.config.condition == "dynamic":
            since = int(memory["guide"]["since"]) if memory.get("guide") else None
            if since is not None and round - since < self.config.refresh_rounds:
                kept = memory["guide"]
                columns = {name: x for name, x in kept.items() if name != "since"}
            else:
                columns = self.conditioned(base, ctx)
                if self.config.refresh_rounds > 1:
                    kept = columns | {"since": torch.tensor(round)}
        elif client in self._keys:
            stores = {level: self.describer.level_store(level) for level in self.describer.sizes}
            found = {level: s.gather(self._keys[client]) for level, s in stores.items()}
            columns = self.columns(found, base["label"].cpu())
        else:
            columns = {}
        if self.config.tdcl > 0:
            own = base["label"] if self.everything or self.config.anchors != "diffusion" else base["label"] * 0
            base["own"] = own
            if self.config.anchors != "diffusion":
                base["text"] = self.anchors().to(own.device).expand(len(own), -1, -1)
        base |= {name: x.to(base["label"].device) for name, x in columns.items()}
        return Shard(base, torch.arange(len(shard), device=shard.rows.device)), kept

    def conditioned(self, base: Table, ctx: Context) -> Table:
        """Columns under the client's own view of its images, by the prior now."""
        image = base["image"].cpu()
        items = self.describer.items([Shard(base | {"image": image}, torch.arange(len(image)))])[0]
        basis = self.describer.basis("global")
        parts: list[dict[int, Tensor]] = []
        for which in torch.arange(len(image)).split(16):
            with torch.no_grad():
                seen = ctx.net(ctx.start, base["image"][which.to(base["image"].device)], train=False).features
            mine = [items[i] for i in which.tolist()]
            described = self.describer.compute(image[which], mine, basis, self.describer.directions(seen))
            parts.append({level: x.cpu() for level, x in described.items()})
        return self.columns({level: torch.cat([p[level] for p in parts]) for level in basis}, base["label"].cpu())

    def columns(self, descriptors: Mapping[int, Tensor], label: Tensor) -> Table:
        """`text` [n, P, d] and `noise` [n, d] from {level: [n, P or P + 1, m]}, float16."""
        joined = torch.cat([self.whitened(x, level) for level, x in descriptors.items()], dim=-1).half()
        out: Table = {}
        if self.text:
            out["text"] = joined[:, :-1]
        if self.config.ndcr > 0 and self.text and self.config.noise_words is None:
            out["noise"] = joined[torch.arange(len(label)), label if self.everything else label * 0]
        elif self.config.ndcr > 0:
            out["noise"] = joined[:, -1]
        return out

    def whitened(self, x: Tensor, level: int) -> Tensor:
        if self.config.whiten == "none":
            return x
        basis: Basis = self.describer.basis("global")[level]
        x = x.float()
        if self.config.whiten == "component" or not self.text:
            return standardised(x - basis.centre, basis.scale)
        text = standardised(x[:, :-1] - x[:, :-1].mean(1, keepdim=True), basis.prompt_scale)
        return torch.cat([text, standardised(x[:, -1:] - basis.centre, basis.scale)], dim=1)

    def anchors(self) -> Tensor:
        """What stands in the place of descriptors under class prompts: float16 [C, d]."""
        if self._anchors is None:
            g = torch.Generator().manual_seed(seeds.number(self.config.noise_seed, "anchors"))
            if self.config.anchors == "random":
                raw = torch.randn(len(self.classes), self.width, generator=g)
            else:
                coded = self.prior.encode([self.config.prompt(name) for name in self.classes]).float().mean(1).cpu()
                raw = (coded - coded.mean(0)) @ torch.randn(coded.shape[1], self.width, generator=g)
            self._anchors = F.normalize(raw, dim=-1).half()
        return self._anchors

    # in every step
    def draw(self, batch: Table, rng: np.random.Generator) -> Table:
        """Which prompts of each row count in this step, `used` bool [B, P]; {} where all do."""
        if "text" not in batch or batch["text"].shape[1] - 1 <= self.config.negatives:
            return {}
        rows, each = batch["text"].shape[:2]
        lot = torch.from_numpy(rng.random((rows, each))).scatter(1, batch["own"].cpu()[:, None], 2.0)
        last = lot.sort(dim=1).values[:, self.config.negatives - 1 : self.config.negatives]
        return {"used": (lot <= last).to(batch["own"].device)}

    def loss(self, loss: Tensor, out: Output, params: Tree, batch: Table) -> Tensor:
        """The method's loss with both terms; without labels, the terms alone."""
        z = out.features
        if f"{HEAD}.weight" in params:
            z = F.linear(z, params[f"{HEAD}.weight"], params[f"{HEAD}.bias"])
        total = loss if self.config.labels else torch.zeros_like(loss)
        if self.config.tdcl > 0:
            group = batch["label"] if self.config.labels else torch.arange(len(z), device=z.device)
            total = total + self.config.tdcl * tdcl(
                z, batch["text"].to(z.dtype), batch["own"], group, batch.get("used"), self.config
            )
        if self.config.ndcr > 0:
            noise = batch["noise"].to(z.dtype)
            noise = noise.roll(1, 0) if self.config.target == "shuffled" else noise
            total = total + self.config.ndcr * ndcr(z, noise, self.config.consistency)
        return total
