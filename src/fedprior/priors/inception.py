"""The features that FID and KID are usually measured in: torch-fidelity's Inception network (extra `fedprior[fid]`)."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError

NAME, LAYER = "inception-v3-compat", "2048"  # the network of the papers, and its last pooled features
BATCH = 64
REMEDY = "pip install 'fedprior[fid]', with a torchvision that fits torch"


def wanted(choice: bool | None) -> tuple[Callable[[Tensor], Tensor] | None, str]:
    """-> (the network or None, why there is none). None asks for it where it can be had, True always, False never.

    Raises UserError when it is asked for and cannot be had.
    """
    if choice is False:
        return None, "not asked for"
    try:
        return load(), ""
    except UserError as error:
        if choice:
            raise
        return None, str(error)


def load() -> Callable[[Tensor], Tensor]:
    """Images uint8 [n, 3, H, W] -> features float32 [n, 2048] on the CPU. Raises UserError when the package is missing
    or its weights cannot be had."""
    try:
        library: Any = import_module("torch_fidelity")
    except ImportError as error:
        raise UserError(f"FID on Inception needs torch-fidelity ({error}); {REMEDY}") from None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        model: Any = library.FeatureExtractorInceptionV3(NAME, [LAYER], verbose=False).to(device).eval()
    except Exception as error:  # a download: the kind of error differs by library and version
        why = str(error).strip().splitlines()[0][:200].rstrip(".") if str(error).strip() else type(error).__name__
        raise UserError(
            f"torch-fidelity's weights cannot be had ({why}); go online once, or leave Inception out"
        ) from None

    @torch.inference_mode()
    def features(images: Tensor) -> Tensor:
        found = [model(part.to(device))[0].float().cpu() for part in images.split(BATCH)]
        return torch.cat(found)

    return features
