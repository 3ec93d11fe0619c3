"""Encodings of prompts: each distinct prompt is encoded once, in lots of one size, so that what it is encoded with
changes nothing."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import families
from .quiet import quiet

LOT = 16  # rows at a time; fewer would sum in another order on a CPU
KEPT = 10**9  # bytes of encodings beyond which the oldest are forgotten

Codes = dict[str, Tensor]  # by the name of a call argument, without the dimension of rows


class Encodings:
    """What the text encoders of a pipeline make of prompts."""

    def __init__(self, pipeline: Any, *, full_lots: bool) -> None:
        self.pipeline, self.full_lots = pipeline, full_lots  # full_lots: a short lot is padded
        self._known: dict[str, Codes] = {}
        self._empty: Codes = {}

    def of(self, prompts: Sequence[str]) -> dict[str, Codes]:
        """The encoding of each of the prompts; those met before are not encoded again."""
        new = [p for p in dict.fromkeys(prompts) if p not in self._known]
        for first in range(0, len(new), LOT):
            lot = new[first : first + LOT]
            coded = self._encode(lot, guided=False)
            self._known |= {p: {name: x[i] for name, x in coded.items()} for i, p in enumerate(lot)}
        wanted = {p: self._known[p] for p in prompts}
        size = sum(x.nbytes for codes in wanted.values() for x in codes.values()) // max(1, len(wanted))
        while len(self._known) * size > KEPT and (old := next(iter(self._known))) not in wanted:
            del self._known[old]
        return wanted

    def empty(self) -> Codes:
        """The encoding of no prompt, by the names of the negative arguments."""
        if not self._empty:
            coded = self._encode([""], guided=True)
            self._empty = {name: x[0] for name, x in coded.items() if name.startswith("negative_")}
        return self._empty

    def arguments(self, prompts: Sequence[str], guided: bool) -> Codes:
        """The pipeline's call arguments for a batch of prompts, in the place of the prompts themselves."""
        known = self.of(prompts)
        rows = {name: torch.stack([known[p][name] for p in prompts]) for name in known[prompts[0]]}
        if guided:
            rows |= {name: x.expand(len(prompts), *x.shape) for name, x in self.empty().items()}
        return rows

    def clear(self) -> None:
        self._known.clear()
        self._empty = {}

    def longest(self) -> tuple[Any, int]:
        """-> (the tokenizer that decides how much of a prompt is read, how many tokens that is)."""
        own = families.of(self.pipeline).reader
        tokenizer = getattr(self.pipeline, own) or self.pipeline.tokenizer
        asked = inspect.signature(self.pipeline.__call__).parameters.get("max_sequence_length")
        own_length = int(tokenizer.model_max_length)
        if asked is None or tokenizer is not getattr(self.pipeline, own):
            return tokenizer, own_length
        return tokenizer, int(asked.default)

    @torch.no_grad()
    def _encode(self, prompts: Sequence[str], guided: bool) -> Codes:
        family = families.of(self.pipeline)
        call = inspect.signature(self.pipeline.__call__).parameters
        lot = list(prompts) + [prompts[-1]] * (LOT - len(prompts)) * self.full_lots
        with quiet():  # it warns of long prompts; `truncated` finds them beforehand
            coded = self.pipeline.encode_prompt(
                prompt=lot,
                device=families.denoiser(self.pipeline).device,
                num_images_per_prompt=1,
                do_classifier_free_guidance=guided,
                **family.encode,
                **{name: call[name].default for name in family.encode_as_called},
            )
        named = zip(family.codes, coded, strict=True)
        return {name: x for name, x in named if x is not None and (guided or not name.startswith("negative_"))}
