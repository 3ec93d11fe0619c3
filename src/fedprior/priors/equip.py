"""What options do to a loaded pipeline: adapters, another decoder, precision of the decoder, guidance in a part of
the steps."""

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError, UserError
from . import families, locate
from .pipelines import first_line
from .quiet import quiet
from .room import DecoderOutOfMemory

# Adapters ------------------------------------------------------------------------------------------------


def adapters(text: str | None) -> list[tuple[Path, float]]:
    """-> [(safetensors file, weight)] of "a.safetensors,b.safetensors:0.5"; a folder stands for the file that diffusers
    writes into it. Raises UsageError for a weight that is no number, UserError for a missing or pickled file."""
    found = []
    for word in (text or "").split(","):
        path_text, _, tail = word.strip().rpartition(":")
        weight = 1.0
        if path_text and "/" not in tail and "\\" not in tail:
            try:
                weight = float(tail)
            except ValueError:
                raise UsageError(f"prior.lora: '{tail}' is no weight; write FILE.safetensors:0.8") from None
        else:
            path_text = word.strip()
        if not path_text:
            continue
        path = Path(path_text).expanduser()
        path = path / "pytorch_lora_weights.safetensors" if path.is_dir() else path
        if path.suffix != ".safetensors":
            raise UserError(
                f"prior.lora: {path} is no safetensors file, and fedprior reads no other (a pickle can run any code)"
            )
        if not path.is_file():
            raise UserError(f"prior.lora: there is no file {path}; check the path")
        locate.check_whole(path, path.parent)
        found.append((path, weight))
    return found


def add_adapters(pipeline: Any, chosen: list[tuple[Path, float]], name: str) -> list[list[object]]:
    """Adds adapters to the weights of denoiser and text encoders -> [[digest of the file, weight]].

    Raises UserError without peft, and for an adapter that does not fit; UsageError where the family takes none.
    """
    if not chosen:
        return []
    if not hasattr(pipeline, "load_lora_weights"):
        raise UsageError(f"{name} is a {type(pipeline).__name__}, which takes no adapters; leave prior.lora out")
    if importlib.util.find_spec("peft") is None:
        raise UserError("prior.lora needs peft; pip install 'fedprior[lora]'")
    labels = [f"adapter{i}" for i in range(len(chosen))]
    for (path, _), label in zip(chosen, labels, strict=True):
        try:
            with quiet(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # peft wonders at a second adapter
                pipeline.load_lora_weights(
                    path.parent, weight_name=path.name, adapter_name=label, local_files_only=True, use_safetensors=True
                )
        except Exception as error:  # its kind differs by library and version
            raise UserError(f"{path} does not fit {name}: {first_line(error)}") from error
        if label not in {a for own in pipeline.get_list_adapters().values() for a in own}:
            raise UserError(f"{path} holds no adapter for {name}; is it made for another model?")
    pipeline.set_adapters(labels, [weight for _, weight in chosen])
    pipeline.fuse_lora(adapter_names=labels)
    pipeline.unload_lora_weights()
    return [[locate.file_digest(path), weight] for path, weight in chosen]


# The decoder ---------------------------------------------------------------------------------------------


def check_decoder(vae: str) -> None:
    """Raises UserError unless `vae` is full, sliced or the folder of an AutoencoderTiny in safetensors."""
    if vae in ("full", "sliced"):
        return
    folder = Path(vae).expanduser()
    if not folder.is_dir():
        raise UserError(f"prior.vae={vae} is no folder; say full, sliced or the folder of an AutoencoderTiny")
    if not (folder / "config.json").is_file() or "AutoencoderTiny" not in (folder / "config.json").read_text():
        raise UserError(f"prior.vae={vae} holds no AutoencoderTiny; say full, sliced or the folder of one")
    if not (weights := list(folder.glob("*.safetensors"))):
        raise UserError(f"prior.vae={vae} holds no safetensors, and fedprior reads no other weights")
    for file in weights:
        locate.check_whole(file, folder)


def set_decoder(pipeline: Any, vae: str, dtype: torch.dtype, name: str) -> str:
    """Slices the decoder or puts another in its place -> the digest of another's files, else "".

    Raises UserError for an AutoencoderTiny of other latents than the checkpoint's.
    """
    if vae == "full":
        return ""
    if vae == "sliced":
        pipeline.vae.enable_slicing()
        return ""
    folder = Path(vae).expanduser()
    with quiet():
        from diffusers import AutoencoderTiny

        try:
            tiny = AutoencoderTiny.from_pretrained(folder, dtype=dtype, local_files_only=True, use_safetensors=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(f"cannot load the decoder in {folder} ({first_line(error)})") from error
    channels = families.denoiser(pipeline).config.in_channels
    scale = 2 ** (len(tiny.config.decoder_block_out_channels) - 1)
    if (tiny.config.latent_channels, scale) != (channels, pipeline.vae_scale_factor):
        raise UserError(
            f"prior.vae={vae} decodes {tiny.config.latent_channels} latent channels {scale} times enlarged, but {name} "
            f"has {channels} and {pipeline.vae_scale_factor}"
        )
    pipeline.vae = tiny.eval()
    return locate.files_digest(folder, folder.glob("*"))


def guard_decoder(vae: Any) -> None:
    """Latents come in the decoder's precision, and memory that runs out within is not swallowed by the pipeline."""

    def decode(self: Any, latents: Tensor, *args: Any, **kwargs: Any) -> Any:
        try:
            return type(self).decode(self, latents.to(self.dtype), *args, **kwargs)
        except torch.OutOfMemoryError as error:
            raise DecoderOutOfMemory(str(error)) from error

    vae.decode = MethodType(decode, vae)  # bound, so that a deep copy decodes with its own weights


# Guidance in a part of the steps -------------------------------------------------------------------------


def interval(text: str | None) -> tuple[float, float] | None:
    """Shares of the steps, from and to, of "0.2-0.8". Raises UsageError unless 0 <= from < to <= 1."""
    if text is None:
        return None
    try:
        low, high = (float(word) for word in text.split("-"))
        if not 0 <= low < high <= 1:
            raise ValueError
    except ValueError:
        raise UsageError(f"prior.guidance_interval must be shares of the steps such as 0.2-0.8, not '{text}'") from None
    return low, high


@contextmanager
def guided_within(pipeline: Any, limits: tuple[float, float] | None) -> Iterator[None]:
    """Within, a call with classifier-free guidance makes one pass of half the rows in steps outside the limits.

    Step i of n is guided where from <= i / n < to. Pipelines stack rows without prompt on rows with prompt; outside the
    limits the denoiser gets the latter alone and its answer stands for both, so that guidance has nothing to add.
    """
    if limits is None:
        yield
        return
    module = families.denoiser(pipeline)
    at = {"step": 0, "halved": False}

    def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        share = at["step"] / len(pipeline.scheduler.timesteps)
        at["step"] += 1
        at["halved"] = not limits[0] <= share < limits[1]
        if not at["halved"]:
            return None
        rows = len(args[0] if args else kwargs["hidden_states"])
        lower = _mapped(lambda x: x[rows // 2 :] if x.ndim and len(x) == rows else x)
        return lower(args), lower(kwargs)

    def after(_: Any, args: Any, output: Any) -> Any:
        return _mapped(lambda x: torch.cat([x, x]))(output) if at["halved"] else None

    hooks = (module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _mapped(change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """`change` for every tensor within tuples and dicts."""

    def mapped(value: Any) -> Any:
        if isinstance(value, Tensor):
            return change(value)
        if isinstance(value, tuple):
            return tuple(mapped(v) for v in value)
        if isinstance(value, dict):
            return {k: mapped(v) for k, v in value.items()}
        return value

    return mapped
