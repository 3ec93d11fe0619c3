"""Baseline: all clients' data in one place, with as many gradient steps a round as a cohort takes together."""

from dataclasses import dataclass
from typing import ClassVar

from ..method import Method


@dataclass(frozen=True, kw_only=True)
class Centralised(Method):
    """An upper bound: ordinary training whose optimiser keeps its state; nothing is sent."""

    pooled: ClassVar[bool] = True
