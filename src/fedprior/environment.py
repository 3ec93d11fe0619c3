"""Where a result was made: versions, hardware, threads, and the choice of the device."""

import importlib.metadata
import os
import platform
import sys
from pathlib import Path

import torch

from . import __version__
from .errors import UserError

PACKAGES = (
    "torch",
    "numpy",
    "diffusers",
    "transformers",
    "datasets",
    "safetensors",
    "pillow",
    "scikit-learn",
)


def device(name: str) -> torch.device:
    """The device that a name stands for; "auto" takes a GPU where there is one.

    Raises UserError when the named device is not there: nothing ever falls back silently.
    """
    there = {"cpu": True, "cuda": torch.cuda.is_available()}
    if name == "auto":
        return torch.device(next(d for d in ("cuda", "cpu") if there[d]))
    if not there[name]:
        raise UserError(f"device={name} is not available here; use device=cpu, or device=auto to take what is there")
    return torch.device(name)


def versions() -> dict[str, str]:
    """Installed versions of fedprior, Python and what results depend on."""
    found = {"fedprior": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def hardware() -> dict[str, str]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "gpu": gpu,
    }


def processor() -> str:
    """The processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    if sys.platform == "linux" and info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
