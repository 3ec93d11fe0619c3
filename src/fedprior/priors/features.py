"""What a frozen UNet sees in an image: the outputs of its up blocks on the noised latent (FedDifRC,
arXiv:2507.06482, section 3; the reading of blocks goes back to DIFT, arXiv:2306.03881).

Latent and noise of an image are shared by all its prompts, each prompt is encoded once, and the UNet stops after
the last block that is wanted.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from ..errors import UsageError, UserError

Latent = Literal["sample", "mean"]
Scaling = Literal["signed", "legacy"]


def level_widths(unet: Any) -> dict[int, int]:
    """Channels of each up block's output, by level from 1 (the coarsest)."""
    return dict(enumerate(reversed(unet.config.block_out_channels), 1))


def readable(pipeline: Any, name: str) -> Any:
    """The UNet whose blocks are read. Raises UsageError for a model that has none, or another (DiT, XL)."""
    unet = getattr(pipeline, "unet", None)
    if unet is None or getattr(unet.config, "addition_embed_type", None) is not None:
        raise UsageError(
            f"guidance reads the UNet of Stable Diffusion 1.x and 2.x layouts, and {name} has another; name such a "
            "checkpoint with prior=, or say guide=none"
        )
    return unet


def check(pipeline: Any, name: str, timestep: int, levels: Sequence[int]) -> None:
    """Raises UsageError for a model whose blocks cannot be read so, and for a level or timestep it has not."""
    known = level_widths(readable(pipeline, name))
    if strange := [level for level in levels if level not in known]:
        raise UsageError(f"{name} has the levels {', '.join(map(str, known))}, not {strange[0]}; change guide.levels")
    steps = len(pipeline.scheduler.alphas_cumprod)
    if not 0 <= timestep < steps:
        raise UsageError(f"guide.timestep must be from 0 to {steps - 1} with {name}, not {timestep}")


def to_latents(pipeline: Any, images: Tensor, size: int, scaling: Scaling) -> tuple[Tensor, Tensor]:
    """-> (mean, standard deviation) of the scaled latents [n, c, h, w] of images uint8 [n, 3, H, W].

    Pixels go to [-1, 1]. `legacy` divides by 255 twice, as FedDifRC's released code does: every image then lies
    in [-1, -0.992], which is black.
    """
    vae = pipeline.vae
    x = images.to(vae.device, torch.float32) / 255
    x = 2 * (x / 255 if scaling == "legacy" else x) - 1
    if x.shape[-2:] != (size, size):
        x = interpolate(x, (size, size), mode="bicubic", antialias=True, align_corners=False).clamp(-1, 1)
    coded = vae.encode(x.to(vae.dtype))
    factor = vae.config.scaling_factor
    if not hasattr(coded, "latent_dist"):  # AutoencoderTiny, AutoencoderDC
        latents = (coded.latents if hasattr(coded, "latents") else coded.latent).float()
        return latents * factor, torch.zeros_like(latents)
    return coded.latent_dist.mean.float() * factor, coded.latent_dist.std.float() * factor


class _Enough(Exception):
    """Ends a forward pass."""


@contextmanager
def reading(unet: Any, levels: Sequence[int], seen: dict[int, Tensor]) -> Iterator[None]:
    """Within, a forward pass puts the outputs of these up blocks [n, C, h, w] into `seen`, then raises _Enough."""

    def keep(level: int) -> Callable[[Any, Any, Any], None]:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            seen[level] = output[0] if isinstance(output, tuple) else output
            if level == max(levels):
                raise _Enough

        return hook

    hooks = [unet.up_blocks[level - 1].register_forward_hook(keep(level)) for level in levels]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def extract(
    pipeline: Any,
    texts: Mapping[str, Tensor],
    images: Tensor,
    prompts: Sequence[Sequence[str]],
    *,
    timestep: int,
    levels: Sequence[int],
    seeds: Sequence[int],
    size: int,
    draws: int = 1,
    latent: Latent = "mean",
    scaling: Scaling = "signed",
    condition: Tensor | None = None,
    batch_size: int = 32,
) -> dict[int, Tensor]:
    """{level: float32 [n, P, C, h, w]} of images uint8 [n, 3, H, W] under P prompts each, mean over `draws` of noise.

    `texts` holds the encoding [tokens, width] of every prompt. Image i's noise and latent depend on seeds[i] alone.
    `condition` [n, width] is added to every token of image i's prompts, in units of the prompt's mean token norm.
    Raises UserError when half precision overflows.
    """
    unet, each = pipeline.unet, len(prompts[0])
    mean, std = to_latents(pipeline, images, size, scaling)
    draw = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
    noise = torch.stack([torch.randn((draws, *mean.shape[1:]), generator=g) for g in draw]).to(mean)
    if latent == "sample":  # drawn after the noise, which is therefore the same either way
        mean = mean + std * torch.stack([torch.randn(mean.shape[1:], generator=g) for g in draw]).to(mean)
    alpha = pipeline.scheduler.alphas_cumprod[timestep].to(mean)
    noised = (alpha.sqrt() * mean[:, None] + (1 - alpha).sqrt() * noise).to(unet.dtype)  # [n, draws, c, h, w]
    text = torch.stack([texts[p] for own in prompts for p in own])  # [n P, tokens, width]
    if condition is not None:
        length = text.float().norm(dim=-1).mean(1)[:, None, None]
        text = (text + length * condition.to(text).repeat_interleave(each, 0)[:, None]).to(unet.dtype)
    parts: dict[int, list[Tensor]] = {level: [] for level in levels}
    for pairs in torch.arange(len(text), device=mean.device).split(batch_size):
        for draw_number in range(draws):
            seen: dict[int, Tensor] = {}
            with suppress(_Enough), reading(unet, levels, seen):
                unet(noised[pairs // each, draw_number], timestep, encoder_hidden_states=text[pairs])
            for level in levels:
                if draw_number == 0:
                    parts[level].append(seen[level].float() / draws)
                else:
                    parts[level][-1] += seen[level].float() / draws
    maps = {level: torch.cat(found).unflatten(0, (-1, each)) for level, found in parts.items()}
    if not all(x.isfinite().all() for x in maps.values()):
        raise UserError("the prior's features overflow in half precision; use prior.dtype=fp32 (or bf16)")
    return maps
