"""A text-to-image diffusion model as a prior: Stable Diffusion 1.x, 2.x, XL and 3, consistency models, PixArt, Sana.

What differs between these stands in `families`, where a checkpoint lies in `locate`, what options change in `equip`.
"""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from .. import store
from ..errors import UsageError, UserError, unknown
from . import edit, equip, families, features, locate, pipelines, room
from .encodings import LOT, Encodings
from .pipelines import DTYPES
from .quiet import quiet

SMALL = 64  # pixels; up to this native size a CPU makes images in whole lots, and exactly

SCHEDULERS = ("auto", "own", *families.SCHEDULERS)

T = TypeVar("T")


class DiffusionPrior:
    """A frozen text-to-image checkpoint; see `from_pretrained`."""

    def __init__(
        self,
        pipeline: Any,
        *,
        name: str,
        revision: str,
        steps: int,
        guidance: float,
        size: int | None,
        dtype: str,
        batch_size: int,
        defaults: dict[str, Any],
        interval: tuple[float, float] | None = None,
        special: dict[str, object] | None = None,
    ) -> None:
        self.pipeline = pipeline  # a diffusers pipeline in evaluation mode
        self.name, self.revision = name, revision
        self.steps, self.guidance, self.dtype, self.batch_size = steps, guidance, dtype, batch_size
        self.size = size or families.native_size(pipeline)  # native height and width
        self.defaults = defaults  # the checkpoint's fedprior.json; {} without one
        self.interval = interval  # shares of the steps with guidance; None: all
        self.special = special or {}  # settings that a plain checkpoint does not have
        self.log: Callable[[str], None] = logging.getLogger(__name__).warning  # told when a batch did not fit
        on_cpu = families.denoiser(pipeline).device.type == "cpu"
        self.exact = on_cpu and self.size <= SMALL  # images do not depend on their batch in a single bit
        self._encodings = Encodings(pipeline, full_lots=self.exact or not on_cpu)
        self._compiled: tuple[Any, Any] = (None, None)  # a denoiser and its compiled forward
        equip.guard_decoder(pipeline.vae)

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        revision: str | None = None,
        steps: int | None = None,
        guidance: float | None = None,
        dtype: Literal["fp32", "fp16", "bf16"] = "fp32",
        device: torch.device | str = "cpu",
        batch_size: int = 32,
        safety_checker: bool = False,
        scheduler: families.SchedulerName = "auto",
        guidance_interval: str | None = None,
        lora: str | None = None,
        vae: str = "full",
        compile: bool = False,
        config: str | None = None,
        offline: bool = False,
    ) -> "DiffusionPrior":
        """The checkpoint at `source`: an alias, a folder or hub id in the layout of diffusers, or a safetensors file.

        Reads safetensors only and runs no remote code. `revision` is a commit, tag or branch of the hub; the prior's
        own `revision` is the hub's commit or a digest of the files. `config` is the folder or hub id of the base model
        of a single file. `offline` never uses the network.

        Explicit steps, guidance and scheduler win over the folder's `fedprior.json`, that over what a few-step
        checkpoint wants (`families.preset`), and that over the family's own: for Stable Diffusion the settings of
        Gen-FedSD (20 steps of DPM-Solver++, guidance 7). Guidance <= 1 means one pass a step, without the empty
        prompt; `guidance_interval` ("0.2-0.8") restricts it to a share of the steps.

        `lora` adds adapters ("a.safetensors,b.safetensors:0.5"). `vae` is full, sliced (one image at a time, less
        memory) or the folder of an AutoencoderTiny. `compile` compiles the denoiser, which pays after some hundred
        images. A batch that does not fit into memory is halved; `batch_size=0` begins with what fits.

        Raises UserError when the checkpoint is missing, out of reach or damaged, or holds pickled weights
        only, or when the device does not exist; UsageError for a value out of range.
        """
        source = locate.ALIASES.get(source, source) if isinstance(source, str) else source
        _check_options(steps, guidance, dtype, batch_size, scheduler)
        interval = equip.interval(guidance_interval)
        chosen = equip.adapters(lora)
        equip.check_decoder(vae)
        where = _device(device)
        found = locate.find(
            source, revision=revision, config=config, offline=offline, dtype=dtype, safety_checker=safety_checker
        )
        defaults = read_sidecar(found.folder) if found.file is None else {}
        pipeline = pipelines.load(found, dtype, safety_checker)
        name = str(source)
        if interval and families.embeds_guidance(pipeline):
            raise UsageError(f"{name} has guidance as an input in every step; leave prior.guidance_interval out")
        preset = families.preset(str(found.file or source), pipeline)
        wanted = scheduler if scheduler != "auto" else defaults.get("scheduler", preset.scheduler)
        overrides = preset.overrides if wanted == preset.scheduler else {}
        options = families.reschedule(pipeline, wanted, name, overrides)
        steps = steps or defaults.get("steps", preset.steps)
        _check_schedule(pipeline.scheduler, steps, wanted, name)
        added = equip.add_adapters(pipeline, chosen, name)
        decoder = equip.set_decoder(pipeline, vae, DTYPES[dtype], name)
        vae_dtype = next(name for name, kind in DTYPES.items() if kind == pipeline.vae.dtype)
        special = {
            "scheduler_options": options,
            "lora": added,
            "vae": decoder,
            "vae_dtype": vae_dtype if vae_dtype != dtype else "",
            "compile": compile,
        }
        with quiet():  # it warns of half precision on a CPU, which works
            pipeline = pipeline.to(where)
        if where.type == "cuda" and families.of(pipeline).denoiser == "unet":
            pipeline.unet.to(memory_format=torch.channels_last)
            pipeline.vae.to(memory_format=torch.channels_last)
        changed = store.digest(str(added), decoder)[:16] if added or decoder else ""  # other weights, another revision
        prior = cls(
            pipeline,
            name=name,
            revision=f"{found.revision}+{changed}" if changed else found.revision,
            steps=steps,
            guidance=float(defaults.get("guidance", preset.guidance) if guidance is None else guidance),
            size=defaults.get("size"),
            dtype=dtype,
            batch_size=batch_size or 1,
            defaults=defaults,
            interval=interval,
            special={key: value for key, value in special.items() if value},
        )
        if batch_size == 0:
            prior.batch_size = room.batch_size(where, prior.size, lambda: prior.generate(["a photo"], [0], (8, 8)))
        return prior

    @property
    def settings(self) -> dict[str, object]:
        """All that changes an image besides prompt, seed and size."""
        plain: dict[str, object] = {
            "scheduler": type(self.pipeline.scheduler).__name__,
            "steps": self.steps,
            "guidance": self.guidance,
            "dtype": self.dtype,
            "native_size": self.size,
            "safety_checker": getattr(self.pipeline, "safety_checker", None) is not None,
        }
        limits = {"guidance_interval": list(self.interval)} if self.interval and self.guided else {}
        return plain | self.special | limits

    @property
    def guided(self) -> bool:
        """Whether each step makes a second pass, without the prompt."""
        return self.guidance > 1 and not families.embeds_guidance(self.pipeline)

    def generate(self, prompts: Sequence[str], seeds: Sequence[int], size: tuple[int, int]) -> Tensor:
        """Images uint8 [n, 3, H, W] of the given (H, W), unfiltered.

        Image i depends on prompts[i] and seeds[i] alone. On a CPU and up to a native size of 64 pixels it is the same
        to the bit in every batch; elsewhere another batch changes it by one grey level at most. An image with NaN
        pixels comes out black, where `faults.faulty` finds it. Raises UserError when one image alone does not fit into
        memory.
        """
        made = [torch.zeros((0, 3, *size), dtype=torch.uint8)]
        first = 0
        while first < len(prompts):
            made.append(self._fitting(lambda: self._batch(prompts, seeds, size, slice(first, first + self._rows))))
            first += len(made[-1])
        return torch.cat(made)

    def roundtrip(self, images: Tensor) -> Tensor:
        """Images uint8 [n, 3, H, W] encoded and decoded again, same shape."""
        pixels = self._fitting(lambda: edit.roundtrip(self.pipeline, images, self.size, self.batch_size))
        return to_bytes(pixels, (images.shape[2], images.shape[3])).cpu()

    def redraw(self, images: Tensor, prompts: Sequence[str], seeds: Sequence[int], strength: float) -> Tensor:
        """Images uint8 [n, 3, H, W] noised by a share `strength` of the schedule and denoised again, same shape."""
        if families.of(self.pipeline).denoiser != "unet":
            raise UsageError(f"{self.name} has no UNet, which redraws images; say balance.align=roundtrip or none")
        pixels = self._fitting(
            lambda: edit.redraw(
                self.pipeline,
                images,
                prompts,
                seeds,
                strength=strength,
                steps=self.steps,
                guidance=self.guidance,
                size=self.size,
                batch_size=self.batch_size,
            )
        )
        return to_bytes(pixels, (images.shape[2], images.shape[3])).cpu()

    @property
    def level_widths(self) -> dict[int, int]:
        """Channels of each up block's output, by level from 1. Raises UsageError for a checkpoint without such."""
        return features.level_widths(features.readable(self.pipeline, self.name))

    def encode(self, prompts: Sequence[str]) -> Tensor:
        """Encodings of prompts as the denoiser reads them, [n, tokens, width]; each prompt is encoded once."""
        known = self._encodings.of(prompts)
        return torch.stack([known[p]["prompt_embeds"] for p in prompts])

    def forget(self) -> None:
        """Drops the encodings of prompts met so far; they are made again when they are needed."""
        self._encodings.clear()

    def features(
        self,
        images: Tensor,
        prompts: Sequence[Sequence[str]],
        *,
        timestep: int,
        levels: Sequence[int],
        seeds: Sequence[int],
        size: int,
        draws: int = 1,
        latent: features.Latent = "mean",
        scaling: features.Scaling = "signed",
        condition: Tensor | None = None,
    ) -> dict[int, Tensor]:
        """Outputs of the UNet's up blocks, {level: float32 [n, P, C, h, w]}; see `features.extract`.

        Raises UsageError for a checkpoint without such blocks (DiT, XL) and for a level or timestep it has not.
        """
        features.check(self.pipeline, self.name, timestep, levels)
        known = self._encodings.of([p for own in prompts for p in own])
        return self._fitting(
            lambda: features.extract(
                self.pipeline,
                {p: codes["prompt_embeds"] for p, codes in known.items()},
                images,
                prompts,
                timestep=timestep,
                levels=levels,
                seeds=seeds,
                size=size,
                draws=draws,
                latent=latent,
                scaling=scaling,
                condition=condition,
                batch_size=4 * self.batch_size,  # one pass without guidance at a smaller size takes less memory
            )
        )

    def truncated(self, prompts: Sequence[str]) -> list[str]:
        """Those of the prompts that have more tokens than the text encoder reads; their ends have no effect."""
        tokenizer, longest = self._encodings.longest()
        with quiet():
            lengths = [len(ids) for ids in tokenizer(list(prompts)).input_ids]
        return [p for p, n in zip(prompts, lengths, strict=True) if n > longest]

    @property
    def _rows(self) -> int:
        """How many images are made at a time."""
        return max(LOT, self.batch_size // LOT * LOT) if self.exact else self.batch_size

    def _fitting(self, call: Callable[[], T]) -> T:
        """What `call` returns, with batches of half the size as often as memory runs out."""
        while True:
            try:
                return call()
            except (RuntimeError, MemoryError) as error:
                if not room.exhausted(error):
                    raise
                least = LOT if self.exact else 1
                if self._rows <= least:
                    raise UserError(
                        f"{self.name} does not fit into the memory of {families.denoiser(self.pipeline).device} even "
                        f"with {least} image{'s' * (least > 1)} at a time; use prior.dtype=fp16, prior.vae=sliced or "
                        "another prior"
                    ) from error
            before = self._rows
            self.batch_size = max(1, before // 2)
            room.release()  # only now, since the error held what the batch had made so far
            self.log(f"{before} images at a time are more than memory holds; going on with {self._rows}")

    @contextmanager
    def _as_compiled(self) -> Iterator[None]:
        """Within, the denoiser runs compiled, if it is to; hooks that read its blocks need it as it is."""
        denoiser = families.denoiser(self.pipeline)
        if not self.special.get("compile"):
            yield
            return
        if self._compiled[0] is not denoiser:
            self._compiled = (denoiser, torch.compile(denoiser.forward))
        denoiser.forward = self._compiled[1]
        try:
            yield
        finally:
            del denoiser.forward

    def _batch(self, prompts: Sequence[str], seeds: Sequence[int], size: tuple[int, int], part: slice) -> Tensor:
        words, numbers = list(prompts[part]), list(seeds[part])
        count = len(words)
        lot = (
            LOT if self.exact else self._rows if self.special.get("compile") else 1
        )  # a compiled model wants one shape
        padding = -count % lot
        words, numbers = words + words[-1:] * padding, numbers + numbers[-1:] * padding
        with quiet(), self._as_compiled(), equip.guided_within(self.pipeline, self.interval if self.guided else None):
            pixels = self.pipeline(
                **self._encodings.arguments(words, self.guided),
                **({"negative_prompt": None} if self.guided else {}),  # some take "" for one beside its encoding
                height=self.size,
                width=self.size,
                num_inference_steps=self.steps,
                guidance_scale=self.guidance,
                generator=[torch.Generator("cpu").manual_seed(n) for n in numbers],
                output_type="pt",
                **families.of(self.pipeline).call,
            ).images
        return to_bytes(pixels[:count], size).cpu()


def to_bytes(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """Pixels [n, 3, h, w] in [0, 1] -> uint8 [n, 3, H, W], antialiased bicubic; one with NaN turns black."""
    pixels = pixels.float()
    sound = pixels.isfinite().flatten(1).all(1)
    pixels = torch.where(sound[:, None, None, None], pixels, 0.0)
    if pixels.shape[-2:] != size:
        pixels = interpolate(pixels, size, mode="bicubic", antialias=True, align_corners=False)
    return (pixels.clamp(0, 1) * 255).round().byte()


def _check_options(
    steps: int | None, guidance: float | None, dtype: str = "fp32", batch_size: int = 1, scheduler: str = "auto"
) -> None:
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    if steps is not None and steps < 1:
        raise UsageError(f"prior steps must be at least 1, not {steps}")
    if guidance is not None and not 0 <= guidance < float("inf"):
        raise UsageError(f"prior guidance must be a number >= 0 (1 or less switches it off), not {guidance}")
    if batch_size < 0:
        raise UsageError(f"prior batch size must be at least 1, or 0 for as many as fit, not {batch_size}")
    if scheduler not in SCHEDULERS:
        raise unknown("scheduler", scheduler, SCHEDULERS)


def _check_schedule(scheduler: Any, steps: int, wanted: str, name: str) -> None:
    """Raises UsageError for more steps than the scheduler can take."""
    if scheduler.config.get("use_dynamic_shifting"):
        return  # it needs the image's size to begin with, and takes any number
    try:
        deepcopy(scheduler).set_timesteps(steps)  # of a copy, since it keeps them
    except ValueError as error:
        reason = str(error).partition("\n")[0].strip().rstrip(".")
        raise UsageError(
            f"{name} cannot be sampled with prior.steps={steps} and prior.scheduler={wanted} ({reason}); take fewer "
            "steps or another scheduler"
        ) from None


def _device(device: torch.device | str) -> torch.device:
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise UserError("this machine has no CUDA device that torch can use; set the device to cpu")
    return where


def read_sidecar(folder: Path) -> dict[str, Any]:
    """A checkpoint's `fedprior.json`: steps, guidance, scheduler, size, classes, trained_on, and under "balance" and
    "guide" the templates and the timestep and levels that serve it best; "training" records how it was made. {} without
    one. Raises UserError for a damaged one, a value of the wrong kind and an unknown key."""
    path = folder / locate.SIDECAR
    if not path.exists():
        return {}
    try:
        defaults = store.read_json(path)
    except OSError as error:
        raise UserError(f"cannot read {path} ({error}); make it readable or remove it") from None
    except ValueError:
        raise UserError(f"{path} is damaged: it holds no JSON object; correct or remove it") from None
    for key, value in _leaves(defaults):
        if key not in SIDECAR_KEYS:
            raise UserError(f"{path} is damaged: {unknown('key', key, SIDECAR_KEYS)}")
        right, wanted = SIDECAR_KEYS[key]
        if not right(value):
            raise UserError(
                f"{path} is damaged: '{key}' must be {wanted}, not {json.dumps(value)}; correct or remove it"
            )
    return defaults


def _leaves(defaults: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys and values of a sidecar, those of the inner objects as "guide.levels"."""
    for key, value in defaults.items():
        if key in ("balance", "guide") and isinstance(value, dict):
            yield from ((f"{key}.{inner}", held) for inner, held in value.items())
        else:
            yield key, value


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


SIDECAR_KEYS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "steps": (lambda x: _is_whole(x) and x >= 1, "a whole number >= 1"),
    "guidance": (lambda x: (_is_whole(x) or isinstance(x, float)) and 0 <= x < float("inf"), "a number >= 0"),
    "scheduler": (lambda x: x in SCHEDULERS, f"one of {', '.join(SCHEDULERS)}"),
    "size": (lambda x: _is_whole(x) and x > 0 and x % 8 == 0, "a whole number >= 8 that 8 divides"),
    "classes": (lambda x: isinstance(x, list) and bool(x) and all(map(_is_text, x)), "a list of names"),
    "trained_on": (_is_text, "the name of a data set"),
    "training": (_is_object, "an object"),
    "balance": (_is_object, "an object with templates"),
    "balance.templates": (_is_text, "text"),
    "guide": (_is_object, "an object with timestep and levels"),
    "guide.timestep": (_is_whole, "a whole number"),
    "guide.levels": (_is_text, "text, such as 2,3"),
}
"""What a sidecar may hold: whether a value is right, and what it has to be in words."""
