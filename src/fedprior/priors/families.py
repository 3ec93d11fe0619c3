"""Kinds of checkpoints: what each layout of diffusers needs to encode prompts and sample, and how few-step
checkpoints differ from the rest.

Layouts are told by `model_index.json`, few-step checkpoints by their scheduler's configuration or their name.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal

from ..errors import UsageError

STEPS, GUIDANCE = 20, 7.0  # Gen-FedSD, Table 6

SchedulerName = Literal["auto", "dpm++", "ddim", "euler", "euler_trailing", "lcm", "own"]

TEXT = ("prompt_embeds", "negative_prompt_embeds")
POOLED = (*TEXT, "pooled_prompt_embeds", "negative_pooled_prompt_embeds")
MASKED = (
    "prompt_embeds",
    "prompt_attention_mask",
    "negative_prompt_embeds",
    "negative_prompt_attention_mask",
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """What differs between pipelines."""

    codes: tuple[str, ...] = TEXT  # what `encode_prompt` returns, as call arguments are named
    denoiser: Literal["unet", "transformer"] = "unet"
    steps: int = STEPS
    guidance: float = GUIDANCE
    load: Mapping[str, Any] = field(default_factory=dict)  # options of loading
    encode: Mapping[str, Any] = field(default_factory=dict)  # options of `encode_prompt`
    encode_as_called: tuple[str, ...] = ()  # options of `encode_prompt` that take the defaults of the pipeline's call
    call: Mapping[str, Any] = field(default_factory=dict)  # options of the pipeline's call
    safety: bool = False  # has a safety checker
    reader: str = "tokenizer"  # the tokenizer that decides how much of a prompt is read
    flow: bool = False  # trained by flow matching, which has schedulers of its own
    schedulers: tuple[str, ...] = ("dpm++", "ddim", "euler", "euler_trailing", "lcm", "own")
    auto: str = "dpm++"  # the scheduler that `auto` stands for
    in_fp16: Mapping[str, str] = field(default_factory=dict)  # parts that half precision breaks, and what they take


PIXART = Family(
    codes=MASKED,
    denoiser="transformer",
    guidance=4.5,
    call={"use_resolution_binning": False},  # images are always of the native size
)

FAMILIES: dict[str, Family] = {
    "StableDiffusionPipeline": Family(safety=True),
    "StableDiffusionXLPipeline": Family(
        codes=POOLED,
        load={"add_watermarker": False},  # else images would depend on a package that may be installed
    ),
    "LatentConsistencyModelPipeline": Family(safety=True, schedulers=("lcm", "own"), auto="lcm"),
    "PixArtAlphaPipeline": PIXART,
    "PixArtSigmaPipeline": PIXART,
    "StableDiffusion3Pipeline": Family(
        codes=POOLED,
        denoiser="transformer",
        steps=28,
        encode={"prompt_2": None, "prompt_3": None},
        reader="tokenizer_3",
        flow=True,
        schedulers=("dpm++", "euler", "own"),
        auto="own",
    ),
    "SanaPipeline": Family(
        codes=MASKED,
        denoiser="transformer",
        guidance=4.5,
        encode_as_called=("complex_human_instruction",),
        call={"use_resolution_binning": False},
        flow=True,
        schedulers=("dpm++", "euler", "own"),
        auto="own",
        in_fp16={"text_encoder": "bf16", "vae": "bf16"},  # as the checkpoints' own page says
    ),
}
"""By the name of the pipeline's class. Steps and guidance of a DiT are the defaults of its pipeline."""


def of(pipeline: Any) -> Family:
    return FAMILIES[type(pipeline).__name__]


def denoiser(pipeline: Any) -> Any:
    """The module that predicts noise or velocity."""
    return getattr(pipeline, of(pipeline).denoiser)


def native_size(pipeline: Any) -> int:
    """Height and width in pixels of the latents that the denoiser was trained on."""
    side = denoiser(pipeline).config.sample_size
    return int((side if isinstance(side, int) else side[0]) * pipeline.vae_scale_factor)


def embeds_guidance(pipeline: Any) -> bool:
    """Whether the guidance scale is an input of the denoiser, which then never makes a pass without a prompt."""
    return getattr(denoiser(pipeline).config, "time_cond_proj_dim", None) is not None


# Schedulers ----------------------------------------------------------------------------------------------

SCHEDULERS: dict[str, tuple[str, dict[str, Any]]] = {
    "dpm++": ("DPMSolverMultistepScheduler", {}),
    "ddim": ("DDIMScheduler", {"clip_sample": False, "set_alpha_to_one": False}),  # as Stable Diffusion was trained
    "euler": ("EulerDiscreteScheduler", {}),
    "euler_trailing": ("EulerDiscreteScheduler", {"timestep_spacing": "trailing"}),
    "lcm": ("LCMScheduler", {}),
}
"""The class a name stands for, and what it changes in the checkpoint's own configuration."""

FLOW_SCHEDULERS: dict[str, tuple[str, dict[str, Any]]] = {
    "dpm++": ("DPMSolverMultistepScheduler", {"prediction_type": "flow_prediction", "use_flow_sigmas": True}),
    "euler": ("FlowMatchEulerDiscreteScheduler", {}),
}


def reschedule(pipeline: Any, name: str, name_of_prior: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Gives the pipeline the scheduler `name` -> the options in which it differs from the checkpoint's own.

    Raises UsageError where the family cannot use it.
    """
    import diffusers

    family, own = of(pipeline), pipeline.scheduler
    name = family.auto if name == "auto" else name
    if name not in family.schedulers:
        raise UsageError(
            f"{name_of_prior} cannot be sampled with prior.scheduler={name}; it takes auto or "
            f"{', '.join(family.schedulers)}"
        )
    if name == "own":
        return {}
    kind, changes = (FLOW_SCHEDULERS if family.flow else SCHEDULERS)[name]
    changes = changes | dict(overrides)
    if family.flow:  # the two classes call the same number by different names
        shift = own.config.get("flow_shift", own.config.get("shift", 1.0))
        changes |= {"flow_shift": shift} if name == "dpm++" else {"shift": shift}
    pipeline.scheduler = getattr(diffusers, kind).from_config(own.config, **changes)
    return {key: value for key, value in changes.items() if own.config.get(key) != value}


# Few-step checkpoints ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Preset:
    """How a checkpoint wants to be sampled."""

    steps: int
    guidance: float
    scheduler: str = "auto"
    overrides: Mapping[str, Any] = field(default_factory=dict)  # of the scheduler's configuration


FEW = 4  # steps of a few-step checkpoint that does not say


def preset(name: str, pipeline: Any) -> Preset:
    """The sampling that belongs to a checkpoint; `name` is its id, folder or file.

    Consistency models (LCM) take 4 steps and, where the guidance is an input, the scale 8 of LCM_Dreamshaper's
    page. Turbo and Lightning checkpoints take few steps without guidance: they are told by an Euler scheduler with
    trailing timesteps (zero-SNR checkpoints, which have such ones too, are no few-step ones) or by their name,
    which for Lightning may say the steps ("sdxl_lightning_4step").
    """
    family, own = of(pipeline), pipeline.scheduler
    kind, config = type(own).__name__, own.config
    last = PurePath(name).name.lower()
    if kind == "LCMScheduler" or family.auto == "lcm":
        return Preset(FEW, 8.0 if embeds_guidance(pipeline) else 1.0, "lcm")
    if "lightning" in last:
        told = re.search(r"(\d+)[ _-]?step", last)
        steps = int(told[1]) if told else FEW
        one = {"prediction_type": "sample"} if steps == 1 else {}  # the one-step checkpoint predicts the image
        return Preset(steps, 0.0, "euler_trailing", one)
    trailing = kind.startswith("Euler") and config.get("timestep_spacing") == "trailing"
    if trailing and not config.get("rescale_betas_zero_snr"):
        return Preset(FEW, 0.0, "own")
    if re.search(r"(?<![a-z])turbo(?![a-z])", last):
        return Preset(FEW, 0.0, "own" if family.flow else "euler_trailing")
    return Preset(family.steps, family.guidance)
