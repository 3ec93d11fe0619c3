"""Loads the pipeline of a checkpoint that `locate` found."""

from typing import Any

import torch

from .. import store
from ..errors import UserError
from .families import FAMILIES, denoiser
from .locate import Checkpoint
from .quiet import quiet

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def first_line(error: BaseException) -> str:
    """What an error of a library says, short enough to stand within a line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200].rstrip(".")


def precisions(found: Checkpoint, dtype: str) -> dict[str, str]:
    """The precision of each part that does not take `dtype`.

    Half precision breaks some parts of some families, and an autoencoder whose configuration says `force_upcast` (as
    that of Stable Diffusion XL; unsaid, it means nothing, though diffusers then takes it for said).
    """
    own = dict(FAMILIES[found.layout].in_fp16) if dtype == "fp16" else {}
    config = found.folder / "vae" / "config.json"
    if dtype != "fp32" and config.is_file() and store.read_json(config).get("force_upcast"):
        own["vae"] = "fp32"
    return own


def load(found: Checkpoint, dtype: str, safety_checker: bool) -> Any:
    """The checkpoint's pipeline on the CPU, in this precision but for parts that it breaks.

    Raises UserError when its files do not make one, or a package is missing that they need.
    """
    family = FAMILIES[found.layout]
    options, own = dict(family.load), precisions(found, dtype)
    if family.safety and not safety_checker:
        options |= {"safety_checker": None, "requires_safety_checker": False}
    with quiet():
        import diffusers
        from safetensors import SafetensorError

        kind = getattr(diffusers, found.layout)
        whole = found.file is not None and not found.partial
        if whole and not hasattr(kind, "from_single_file"):
            raise UserError(f"a {found.layout} cannot be read from a single file; name a folder in its place")
        try:
            if whole:
                pipeline = kind.from_single_file(
                    str(found.file),
                    config=str(found.folder),
                    dtype=DTYPES[dtype],
                    local_files_only=True,
                    **options,
                )
            else:
                pipeline = kind.from_pretrained(
                    found.folder,
                    dtype={"default": DTYPES[dtype]} | {part: DTYPES[name] for part, name in own.items()},
                    use_safetensors=True,
                    local_files_only=True,
                    variant=found.variant,
                    **options,
                )
        except ImportError as error:
            raise UserError(f"{found.folder} needs a package that is not installed: {first_line(error)}") from error
        except (OSError, ValueError, RuntimeError, KeyError, AttributeError, SafetensorError) as error:
            where = found.file or found.folder
            raise UserError(
                f"cannot load the checkpoint in {where} ({first_line(error)}); fetch or write it again"
            ) from error
        if found.partial:
            _replace_denoiser(pipeline, found)
        for part, name in own.items():  # of a single file all parts come in one precision
            if getattr(pipeline, part).dtype != DTYPES[name]:
                getattr(pipeline, part).to(DTYPES[name])
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _replace_denoiser(pipeline: Any, found: Checkpoint) -> None:
    from safetensors.torch import load_file

    try:
        denoiser(pipeline).load_state_dict(load_file(str(found.file)))
    except RuntimeError as error:  # names or shapes
        raise UserError(f"{found.file} is no denoiser for {found.folder}; name another with prior.config=") from error
