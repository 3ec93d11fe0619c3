"""Federated image classification with a pretrained text-to-image diffusion model as a shared prior."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "METHODS": "methods",
    "Experiment": "config",
    "RECIPES": "recipes",
    "partition": "data.partition",
    "DiffusionPrior": "priors.diffusion",
    "nets": "nets",
}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    """Public names are imported when first asked for: `import fedprior` loads neither torch nor diffusers."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'fedprior' has no attribute '{name}'")
    module = import_module(f"fedprior.{_PUBLIC[name]}")
    return module if name == "nets" else getattr(module, name)


def __dir__() -> list[str]:
    return __all__
