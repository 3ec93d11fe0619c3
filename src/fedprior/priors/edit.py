"""Real images as a prior would have drawn them: through its autoencoder, or noised and denoised again."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from .features import to_latents
from .quiet import quiet


@torch.no_grad()
def roundtrip(pipeline: Any, images: Tensor, size: int, batch_size: int) -> Tensor:
    """Pixels in [0, 1], float32 [n, 3, size, size], of images uint8 [n, 3, H, W] encoded and decoded again.

    The mean latent is decoded, so nothing is drawn.
    """
    made = []
    for part in images.split(batch_size):
        latents, _ = to_latents(pipeline, part, size, "signed")
        decoded = pipeline.vae.decode((latents / pipeline.vae.config.scaling_factor).to(pipeline.vae.dtype))
        made.append((decoded.sample.float() / 2 + 0.5).clamp(0, 1))
    return torch.cat(made)


def redraw(
    pipeline: Any,
    images: Tensor,
    prompts: Sequence[str],
    seeds: Sequence[int],
    *,
    strength: float,
    steps: int,
    guidance: float,
    size: int,
    batch_size: int,
) -> Tensor:
    """Pixels in [0, 1], float32 [n, 3, size, size], of images uint8 [n, 3, H, W] noised and denoised under their
    prompts (SDEdit, arXiv:2108.01073).

    `strength` in (0, 1] is the share of the noise schedule that is added and taken away again, in that share of
    `steps`. Image i depends on images[i], prompts[i] and seeds[i] alone.
    """
    if int(strength * steps) < 1:
        raise UserError(f"balance.strength={strength:g} of {steps} steps is less than one; raise it or prior.steps")
    with quiet():
        from diffusers import AutoPipelineForImage2Image

        editor = AutoPipelineForImage2Image.from_pipe(pipeline)
        editor.set_progress_bar_config(disable=True)
        made = []
        for first in range(0, len(images), batch_size):
            part = slice(first, first + batch_size)
            with torch.no_grad():
                latents, _ = to_latents(pipeline, images[part], size, "signed")
            made.append(
                editor(
                    list(prompts[part]),
                    image=latents.to(pipeline.unet.dtype),  # as latents, since drawing them again would blur more
                    strength=strength,
                    num_inference_steps=steps,
                    guidance_scale=guidance,
                    generator=[torch.Generator("cpu").manual_seed(s) for s in seeds[part]],
                    output_type="pt",
                ).images
            )
    return torch.cat(made)
