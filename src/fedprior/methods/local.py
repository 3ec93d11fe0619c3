"""Baseline: each client alone. Nothing is sent; accuracy is the mean over the clients' own models."""

from dataclasses import dataclass

from ..method import Method
from ..net import Net


@dataclass(frozen=True, kw_only=True)
class Local(Method):
    """All clients begin with the same weights and then go on from their own, of which they send none."""

    def keeps(self, net: Net) -> frozenset[str]:
        return net.names
