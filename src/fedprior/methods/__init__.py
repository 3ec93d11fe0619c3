"""All methods by name."""

from ..method import Method
from .ccvr import CCVR
from .centralised import Centralised
from .fedavg import FedAvg
from .fedavgm import FedAvgM
from .fedbn import FedBN
from .feddisco import FedDisco
from .feddyn import FedDyn
from .fednh import FedNH
from .fednova import FedNova
from .fedopt import FedAdagrad, FedAdam, FedYogi
from .fedproto import FedProto
from .fedprox import FedProx
from .fedsc import FedSC
from .gptfl import GPTFL
from .local import Local
from .moon import Moon
from .scaffold import Scaffold

METHODS: dict[str, type[Method]] = {
    "fedavg": FedAvg,
    "fedavgm": FedAvgM,
    "fedprox": FedProx,
    "fednova": FedNova,
    "scaffold": Scaffold,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "fedadagrad": FedAdagrad,
    "moon": Moon,
    "feddyn": FedDyn,
    "fedproto": FedProto,
    "fednh": FedNH,
    "fedbn": FedBN,
    "feddisco": FedDisco,
    "fedsc": FedSC,
    "ccvr": CCVR,
    "gptfl": GPTFL,
    "local": Local,
    "centralised": Centralised,
}

__all__ = [
    "CCVR",
    "GPTFL",
    "METHODS",
    "Centralised",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedBN",
    "FedDisco",
    "FedDyn",
    "FedNH",
    "FedNova",
    "FedProto",
    "FedProx",
    "FedSC",
    "FedYogi",
    "Local",
    "Moon",
    "Scaffold",
]
