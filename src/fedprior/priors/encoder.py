"""A frozen image encoder whose view of an image conditions the prior: CLIP's image tower."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from .. import store
from ..data.augment import normalise
from ..errors import UserError
from .quiet import quiet

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # CLIP's, per channel


class ImageEncoder:
    """CLIP's image embeddings [n, width], float32."""

    def __init__(self, model: Any, name: str) -> None:
        self.model, self.name = model.eval().requires_grad_(False), name
        self.revision = store.digest(*(store.raw_bytes(x) for x in model.state_dict().values()))

    @classmethod
    def from_pretrained(cls, source: str | Path, device: torch.device | str = "cpu") -> "ImageEncoder":
        """A CLIP checkpoint, a folder or a hub id. Raises UserError when it cannot be had or is no CLIP model."""
        with quiet():
            from transformers import CLIPVisionModelWithProjection

            try:
                model, notes = CLIPVisionModelWithProjection.from_pretrained(
                    str(source), use_safetensors=True, output_loading_info=True
                )
            except Exception as error:  # the hub's HTTP library, and with it the kind of error, differs by version
                why = str(error).strip().splitlines()[0][:200].rstrip(".")
                raise UserError(
                    f"cannot load guide.encoder={source} ({why}); give a CLIP folder or hub id with safetensors"
                ) from error
        if lacking := notes["missing_keys"]:
            raise UserError(
                f"guide.encoder={source} holds no CLIP image tower ({len(lacking)} of its tensors are missing); give a "
                "CLIP folder or hub id with safetensors"
            )
        return cls(model.to(device), str(source))

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Images uint8 [n, 3, H, W] -> [n, width]."""
        side = self.model.config.image_size
        pixels = normalise(images.to(self.model.device), MEAN, STD)
        if pixels.shape[-2:] != (side, side):
            pixels = interpolate(pixels, (side, side), mode="bicubic", antialias=True, align_corners=False)
        embedded: Tensor = self.model(pixel_values=pixels).image_embeds
        return embedded.float()
