"""Filters of synthetic images, none of which is on by default, and an account of what they removed.

A filter is a pure function of images, labels and prompts. What it is made of enters the keys of caches by its digest.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .. import store
from ..data.table import Table
from ..errors import UsageError, UserError
from ..net import Net
from ..priors import check
from ..priors.check import Judge
from ..priors.encoder import ImageEncoder
from ..priors.quiet import quiet
from ..tree import Tree

BATCH = 64  # images that CLIP reads at a time


class Filter(Protocol):
    @property
    def settings(self) -> dict[str, object]:
        """All that changes what it keeps, as JSON values: "filter", its name, first."""
        ...

    def keep(self, images: Tensor, labels: Tensor, prompts: Sequence[str]) -> Tensor:
        """Which images uint8 [n, 3, H, W] of classes int64 [n], made from n prompts, are kept: bool [n]."""
        ...


class Removal(NamedTuple):
    """What one filter did with the images that the filters before it had kept."""

    settings: dict[str, object]
    seen: int
    removed: int
    removed_by_class: list[int]


class Filtered(NamedTuple):
    keep: Tensor  # bool [n]
    removals: list[Removal]  # one a filter, in order


def apply(filters: Sequence[Filter], images: Tensor, labels: Tensor, prompts: Sequence[str], classes: int) -> Filtered:
    """What all filters keep, one after another: each sees only what is left."""
    left, removals = torch.arange(len(labels)), []
    for one in filters:
        kept = one.keep(images[left], labels[left], [prompts[i] for i in left.tolist()])
        gone = labels[left[~kept]].bincount(minlength=classes)
        removals.append(Removal(one.settings, len(left), int(gone.sum()), gone.tolist()))
        left = left[kept]
    keep = torch.zeros(len(labels), dtype=torch.bool)
    keep[left] = True
    return Filtered(keep, removals)


def digest(filters: Sequence[Filter]) -> str:
    """Of what the filters keep, in their order, for the keys of caches."""
    return store.digest(*(json.dumps(one.settings, sort_keys=True) for one in filters))


@dataclass(frozen=True, kw_only=True, eq=False)
class Confidence:
    """Removes images to which a small classifier, trained on a client's or a union's real rows, gives the intended
    class less than `threshold`.

    Classes without a real row cannot be judged, so all their images pass; where there are rows of one class only,
    all pass. The classifier is trained when it is first asked.
    """

    rows: Table  # real ones
    classes: int
    threshold: float = 0.5
    judge: Judge
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise UsageError(f"a confidence threshold is a probability from 0 to 1, not {self.threshold}")
        if not len(self.rows["label"]):
            raise UserError("a confidence filter learns from real rows, and there are none; leave it out")
        if self.rows["synthetic"].any():
            raise ValueError("synthetic rows must not teach the classifier that judges synthetic images")

    @cached_property
    def settings(self) -> dict[str, object]:
        parts = (store.raw_bytes(self.rows[column]) for column in ("image", "label"))
        return {
            "filter": "confidence",
            "threshold": self.threshold,
            "judge": self.judge.settings,
            "classes": self.classes,
            "rows": store.digest(*parts),
            "seed": self.seed,
        }

    @cached_property
    def owned(self) -> Tensor:
        """Which classes have a real row: bool [classes]."""
        return self.rows["label"].bincount(minlength=self.classes) > 0

    @cached_property
    def classifier(self) -> tuple[Net, Tree]:
        return check.fit(self.rows["image"], self.rows["label"], self.classes, self.seed, judge=self.judge)

    def probability(self, images: Tensor, labels: Tensor) -> Tensor:
        """Of the intended class among those that have a real row, float32 [n]; for images of these alone."""
        net, weights = self.classifier
        logits = check.read(net, weights, images)[1].masked_fill(~self.owned, -math.inf)
        return logits.softmax(1).gather(1, labels[:, None])[:, 0]

    def keep(self, images: Tensor, labels: Tensor, prompts: Sequence[str]) -> Tensor:
        kept = torch.ones(len(labels), dtype=torch.bool)
        judged = torch.nonzero(self.owned[labels])[:, 0]
        if len(judged) and int(self.owned.sum()) > 1:
            kept[judged] = self.probability(images[judged], labels[judged]) >= self.threshold
        return kept


@dataclass(frozen=True, kw_only=True, eq=False)
class ClipScore:
    """Removes images whose CLIP embedding is unlike that of their prompt (arXiv:2104.08718): those with a cosine below
    `threshold`."""

    encoder: ImageEncoder
    text: Any  # transformers.CLIPTextModelWithProjection
    tokenizer: Any
    threshold: float

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        threshold: float,
        device: torch.device | str = "cpu",
    ) -> "ClipScore":
        """A CLIP checkpoint, a folder or a hub id with safetensors. Raises UserError when it cannot be had or is no
        CLIP model, UsageError for a threshold that is no cosine."""
        if not -1 <= threshold <= 1:
            raise UsageError(f"a CLIP score is a cosine from -1 to 1, and the threshold {threshold} is none")
        with quiet():
            from transformers import (
                CLIPConfig,
                CLIPTextModelWithProjection,
                CLIPTokenizer,
                CLIPVisionModelWithProjection,
            )

            parts = []
            try:
                tokenizer = CLIPTokenizer.from_pretrained(str(source))
                config = CLIPConfig.from_pretrained(str(source))
                for kind, own in (
                    (CLIPVisionModelWithProjection, config.vision_config),
                    (CLIPTextModelWithProjection, config.text_config),
                ):
                    own.projection_dim = config.projection_dim  # which some checkpoints say for the whole alone
                    parts.append(
                        kind.from_pretrained(str(source), config=own, use_safetensors=True, output_loading_info=True)
                    )
            except Exception as error:  # the hub's HTTP library, and with it the kind of error, differs by version
                why = str(error).strip().splitlines()[0][:200].rstrip(".")
                raise UserError(
                    f"cannot load CLIP from {source} ({why}); give a folder or hub id with safetensors"
                ) from error
        if lacking := sum(len(notes["missing_keys"]) for _, notes in parts):
            raise UserError(
                f"{source} holds no whole CLIP model ({lacking} of its tensors are missing); give one that is"
            )
        (image, _), (text, _) = parts
        encoder = ImageEncoder(image.to(device), str(source))
        return cls(
            encoder=encoder,
            text=text.to(device).eval().requires_grad_(False),
            tokenizer=tokenizer,
            threshold=threshold,
        )

    @cached_property
    def settings(self) -> dict[str, object]:
        words = store.digest(*(store.raw_bytes(x) for x in self.text.state_dict().values()))
        revision = [self.encoder.revision, words]
        return {
            "filter": "clip_score",
            "model": self.encoder.name,
            "revision": revision,
            "threshold": self.threshold,
        }

    @torch.no_grad()
    def scores(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Cosine of each image's and its prompt's embedding, float32 [n]."""
        if not len(images):
            return torch.zeros(0)
        distinct = list(dict.fromkeys(prompts))
        number = {prompt: i for i, prompt in enumerate(distinct)}
        most = self.text.config.max_position_embeddings
        tokens = self.tokenizer(distinct, padding=True, truncation=True, max_length=most, return_tensors="pt")
        ids, mask = (tokens[key].to(self.text.device) for key in ("input_ids", "attention_mask"))
        said = self.text(input_ids=ids, attention_mask=mask).text_embeds.float()
        shown = torch.cat([self.encoder(part) for part in images.split(BATCH)])
        wanted = said[torch.tensor([number[prompt] for prompt in prompts], device=said.device)]
        return torch.nn.functional.cosine_similarity(shown, wanted).cpu()

    def keep(self, images: Tensor, labels: Tensor, prompts: Sequence[str]) -> Tensor:
        scores = self.scores(images, prompts)
        return scores >= self.threshold
