"""The federated loop. It exists once."""

from collections.abc import Iterator, Sequence
from itertools import chain, count
from typing import NamedTuple

from . import seeds
from .engines import Engine
from .method import Method, Round, Server
from .net import BNStats, Net
from .traffic import Traffic
from .tree import Tree
from .uploads import Refusal, Upload, check


class RoundResult(NamedTuple):
    """What one round did."""

    number: int  # from 0
    server: Server
    cohort: list[int]  # ascending client ids
    accepted: list[int]
    refused: list[Refusal]
    train_loss: float | None  # mean over accepted clients, None when all were refused


def begin(net: Net, method: Method, seed: int, bn_stats: BNStats = "average") -> Server:
    """The server before round 1. With `bn_stats="local"` it has no batch-norm statistics, nor sends any."""
    weights = net.init()
    if bn_stats == "local":
        weights = weights | {"buffers": {}}
    return Server(weights, method.server.init(weights["params"]), method.init_server(weights, seed))


def choose(clients: Sequence[int], size: int, seed: int, round: int) -> list[int]:
    """The cohort of a round: a function of (seed, round) over the ascending ids, drawn without replacement."""
    rng = seeds.stream(seed, "cohort", round)
    return sorted(rng.choice(sorted(clients), size, replace=False).tolist())


def federate(
    server: Server,
    method: Method,
    engine: Engine,
    *,
    cohort: int,
    seed: int,
    traffic: Traffic,
    max_update_norm: float | None = None,
    first: int = 0,
) -> Iterator[RoundResult]:
    """Yields the server after every round, without end: whoever iterates evaluates, records and stops.

    Uploads are averaged in the order of client ids. A bad one is refused and recorded; a round whose
    uploads are all refused leaves the server as it was. `traffic` is added to as messages pass.
    """
    for r in count(first):
        chosen = choose(engine.clients, cohort, seed, r)
        down = {"weights": server.weights, "shared": method.broadcast(server)}
        inbox = Inbox(engine.expected(down), max_update_norm, traffic if method.scope == "global" else None)
        if inbox.traffic:
            inbox.traffic.sent(down, len(chosen))
        uploads = inbox.sift(engine, down, chosen, r)
        if (head := next(uploads, None)) is not None:
            mean = method.reduce(chain([head], uploads))
            server = method.update(server, mean["method"], Round(r, len(inbox.losses) / engine.total))
            if "buffers" in mean:
                server = server._replace(weights=server.weights | {"buffers": mean["buffers"]})
        engine.commit(list(inbox.losses))
        losses = list(inbox.losses.values())
        loss = sum(losses) / len(losses) if losses else None
        yield RoundResult(r, server, chosen, list(inbox.losses), inbox.refused, loss)


class Inbox:
    """Passes good uploads on, one at a time, and keeps a note of each."""

    def __init__(self, expected: Tree, max_norm: float | None, traffic: Traffic | None) -> None:
        self.expected, self.max_norm, self.traffic = expected, max_norm, traffic
        self.losses: dict[int, float] = {}  # of accepted clients
        self.refused: list[Refusal] = []

    def sift(self, engine: Engine, down: Tree, cohort: list[int], round: int) -> Iterator[tuple[Tree, float]]:
        for upload in engine.train(down, cohort, round):
            if self.traffic:
                self.traffic.received(upload.tree)
            if refusal := check(upload, self.expected, self.max_norm):
                self.refused.append(refusal)
            else:
                self.losses[upload.client] = upload.loss
                yield upload.tree, upload.weight


__all__ = ["Refusal", "RoundResult", "Upload", "begin", "choose", "federate"]
