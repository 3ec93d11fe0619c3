"""Where a result was made: versions, hardware, threads, and the choice of the device."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from functools import cache
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
    """Installed versions of fedprior (with its commit, where it runs from a checkout), Python and what results depend
    on."""
    found = {"fedprior": __version__, "python": platform.python_version()}
    if own := commit(Path(__file__).parents[2]):
        found["commit"] = own
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


@cache
def commit(root: Path) -> str:
    """The commit that a checkout with this root stands at, with "-dirty" behind it where files differ from that; ""
    where the folder is no checkout, or there is no git."""
    if not (root / ".git").exists():
        return ""
    try:
        said = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"],
            capture_output=True,
            text=True,
            timeout=10,
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},  # others may be working in it
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return said.stdout.strip() if said.returncode == 0 else ""


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
