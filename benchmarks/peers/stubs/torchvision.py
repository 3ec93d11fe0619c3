"""Stands in for torchvision, which some contestants import for data sets and models that are not used here."""

import sys
from types import ModuleType

__path__: list[str] = []


class Part(ModuleType):
    """A module in which every name is a class that does nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


for _name in ("datasets", "datasets.utils", "models", "transforms"):
    sys.modules[f"{__name__}.{_name}"] = Part(_name)
datasets, models, transforms = (sys.modules[f"{__name__}.{name}"] for name in ("datasets", "models", "transforms"))
