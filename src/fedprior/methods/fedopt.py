"""FedAdam, FedYogi and FedAdagrad (Reddi et al., 2021, arXiv:2003.00295, Algorithm 2): FedAvg with an adaptive server.

D = sum_k p_k (y_k - x); m+ = b1 m + (1 - b1) D; x+ = x + lr m+ / (sqrt(v+) + tau), where

    FedAdam:    v+ = b2 v + (1 - b2) D^2
    FedYogi:    v+ = v - (1 - b2) D^2 sign(v - D^2)
    FedAdagrad: v+ = v + D^2

The steps themselves are `Adam`, `Yogi` and `Adagrad` in optim.py, which any other method can take too. Batch-norm
statistics are averaged and see none of it.
"""

from dataclasses import dataclass, field

from ..errors import UsageError
from ..method import Method
from ..optim import Adagrad, Adam, Optimizer, Yogi


@dataclass(frozen=True, kw_only=True)
class FedAdam(Method):
    """lr 0.1, b1 0.9, b2 0.99, tau 0.001, v starts at tau^2, no bias correction: keys of `server`."""

    server: Optimizer = field(default=Adam(), metadata={"config": False})

    def check(self, local: Optimizer) -> None:
        _needs(self.server, Adam, "fedadam", "adam")


@dataclass(frozen=True, kw_only=True)
class FedYogi(Method):
    """lr 0.1, b1 0.9, b2 0.99, tau 0.001, v starts at tau^2, no bias correction: keys of `server`."""

    server: Optimizer = field(default=Yogi(), metadata={"config": False})

    def check(self, local: Optimizer) -> None:
        _needs(self.server, Yogi, "fedyogi", "yogi")


@dataclass(frozen=True, kw_only=True)
class FedAdagrad(Method):
    """lr 0.1, b1 0, tau 0.001, v starts at tau^2: keys of `server`."""

    server: Optimizer = field(default=Adagrad(), metadata={"config": False})

    def check(self, local: Optimizer) -> None:
        _needs(self.server, Adagrad, "fedadagrad", "adagrad")


def _needs(server: Optimizer, kind: type, method: str, name: str) -> None:
    if not isinstance(server, kind):
        raise UsageError(f"method={method} is FedAvg with server={name}; leave server= out or name another method")
