"""What a mean of updates costs: `tree.mean` beside the loop over state dicts that a script would have."""

import statistics
from typing import Any

import torch
from torch import Tensor

from .. import nets, tree
from ..net import Net
from ..tree import Tree
from . import made_up
from .turns import clock, in_turns, ratio, seconds


def measure(clients: int = 10, net: str = "cct_2_3x2_32", repeats: int = 30) -> dict[str, Any]:
    """{"ms", "plain_ms", "ratio" (of the two: below 1 `tree.mean` is faster), "clock", "net", "clients", "update_MB",
    "repeats"}: medians over turns, after one to warm up.

    Raises UsageError for an unknown net.
    """
    sent = updates(net, clients)
    states = [(tree.flatten(update), weight) for update, weight in sent]
    laps = in_turns({"fedprior": lambda: tree.mean(sent), "plain": lambda: plain(states)}, repeats)
    return {
        "ms": 1e3 * statistics.median(seconds(laps["fedprior"])),
        "plain_ms": 1e3 * statistics.median(seconds(laps["plain"])),
        "ratio": ratio(laps["fedprior"], laps["plain"]),
        "clock": clock(),
        "net": net,
        "clients": clients,
        "update_MB": tree.num_bytes(sent[0][0]) / 1e6,
        "repeats": repeats,
    }


def updates(net: str, clients: int) -> list[tuple[Tree, float]]:
    """Random updates in the names and shapes of a net's weights, with the weights of clients of 1, 2, ... rows."""
    start = Net(nets.build(net, len(made_up.CLASSES))).init()
    g = torch.Generator().manual_seed(0)

    def moved(x: Tensor) -> Tensor:
        return torch.empty_like(x).normal_(generator=g) if x.is_floating_point() else x.clone()

    return [(tree.map(moved, start), float(k + 1)) for k in range(clients)]


def plain(states: list[tuple[dict[str, Tensor], float]]) -> dict[str, Tensor]:
    """The weighted mean in the tensors' own precision; what is no floating point comes from the first."""
    total = sum(weight for _, weight in states)
    mean = {name: torch.zeros_like(x) if x.is_floating_point() else x for name, x in states[0][0].items()}
    for state, weight in states:
        for name, x in state.items():
            if x.is_floating_point():
                mean[name] += x * (weight / total)
    return mean
