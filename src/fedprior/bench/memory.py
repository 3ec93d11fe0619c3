"""The memory and the disk that a federation's clients take once each of them has something to remember."""

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .. import assemble
from ..config import Experiment, override
from ..errors import UsageError
from ..federate import begin, federate
from ..memory import ClientMemory
from ..recipes import RECIPES
from ..traffic import MB, Traffic
from . import made_up
from .child import in_child, peak_megabytes

FIGURES = ("peak_MB", "before_MB", "disk_MB")


def measure(
    clients: Sequence[int] = (100, 1000), method: str = "scaffold", net: str = "cct_2_3x2_32", repeats: int = 1
) -> dict[str, Any]:
    """{"method", "net", "memory_MB" (the limit in force), "repeats", "runs": [{"clients", "peak_MB" (resident, 1e6
    bytes), "before_MB" (the peak before the first client is asked), "disk_MB" (what clients remember, in files)}]}.

    Each figure is the median over `repeats` processes of their own, which run in turns. Raises UsageError for unknown
    names, less than one client and a method without clients.
    """
    if not clients or min(clients) < 1:
        raise UsageError(f"a federation needs at least 1 client, not {min(clients, default=0)}")
    experiment = settings(1, method, net)
    if experiment.method.pooled:
        raise UsageError(f"method={method} has no clients that could remember; name another with --method")
    assemble.build_net(experiment, made_up.federation(1, 1), torch.device("cpu"))  # a net that does not fit shows here
    found: dict[int, list[dict[str, float]]] = {n: [] for n in clients}
    for _ in range(repeats):
        for n, own in found.items():
            own.append(in_child(f"the memory of {n} clients", ask_all, n, method, net))
    runs = [
        {"clients": n} | {key: statistics.median(x[key] for x in own) for key in FIGURES} for n, own in found.items()
    ]
    return {"method": method, "net": net, "memory_MB": experiment.memory_MB, "repeats": repeats, "runs": runs}


def settings(clients: int, method: str, net: str) -> Experiment:
    """All clients in every round, one step on one image each."""
    base = replace(RECIPES["gen-fedsd/cifar10"](), balance=None, clients=clients, cohort=clients, steps=1, batch_size=1)
    return override(base, [f"method={method}", f"net={net}"])


def ask_all(clients: int, method: str, net: str) -> dict[str, float]:
    """One round of all clients in this process -> FIGURES."""
    torch.set_num_threads(1)
    experiment, data = settings(clients, method, net), made_up.federation(clients, 1)
    model = assemble.build_net(experiment, data, torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        memory = ClientMemory(Path(folder), experiment.memory_MB)
        engine, cohort = assemble.build_engine(experiment, model, data, memory)
        before = peak_megabytes()
        server = begin(model, experiment.method, experiment.seed)
        next(federate(server, experiment.method, engine, cohort=cohort, seed=experiment.seed, traffic=Traffic()))
        disk = sum(file.stat().st_size for file in Path(folder).iterdir()) / MB
    return {"peak_MB": peak_megabytes(), "before_MB": before, "disk_MB": disk}
