"""FedAvg (McMahan et al., 2017, arXiv:1602.05629): x+ = sum_k p_k y_k."""

from dataclasses import dataclass

from ..method import Method


@dataclass(frozen=True, kw_only=True)
class FedAvg(Method):
    """The mean of the clients' updates, weighted by the experiment's `weight_by`."""
