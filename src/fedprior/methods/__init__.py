"""All methods by name."""

from ..method import Method
from .centralised import Centralised
from .fedavg import FedAvg
from .fedprox import FedProx
from .local import Local

__all__ = ["METHODS", "Centralised", "FedAvg", "FedProx", "Local"]

METHODS: dict[str, type[Method]] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "local": Local,
    "centralised": Centralised,
}
