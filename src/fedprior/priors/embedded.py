"""Priors by name: those that ship with fedprior, short names of hub checkpoints, all else by path or id."""

import re
from pathlib import Path
from typing import Any

from ..errors import unknown
from .diffusion import DiffusionPrior, read_sidecar
from .locate import ALIASES


def names() -> tuple[str, ...]:
    """The priors that ship with fedprior."""
    return ("digits", "cifar10")


def folder(name: str) -> Path:
    """The folder of a prior that ships with fedprior. Raises UsageError for another name."""
    if name not in names():
        raise unknown("embedded prior", name, names())
    return Path(__file__).parent / "checkpoints" / name


def sidecar(name_or_path: str | Path) -> dict[str, Any]:
    """What a prior that ships, or a local folder, says of itself (`fedprior.json`); {} for all else."""
    word = str(name_or_path)
    place = folder(word) if word in names() else Path(word).expanduser()
    return read_sidecar(place) if place.is_dir() else {}


def load(name_or_path: str | Path, **options: Any) -> DiffusionPrior:
    """A prior by embedded name, alias, folder, file or hub id; `options` as for `DiffusionPrior.from_pretrained`.

    Raises UsageError for a bare word that is none of these, else as `from_pretrained`.
    """
    word = str(name_or_path)
    if word in names():
        prior = DiffusionPrior.from_pretrained(folder(word), **options)
        prior.name = word  # where the package is installed must not enter a cache key
        return prior
    if re.fullmatch(r"[\w.-]+", word) and word not in ALIASES and not Path(word).exists():
        raise unknown(
            "prior", word, [*names(), *ALIASES, "a folder", "a safetensors file", "a hub id such as owner/model"]
        )
    return DiffusionPrior.from_pretrained(name_or_path, **options)
