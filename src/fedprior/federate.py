"""The federated loop. It exists once."""

from collections.abc import Iterator, Sequence
from itertools import chain, count
from typing import NamedTuple

from . import aggregate as rules
from . import seeds
from .engines import Engine
from .method import Aggregate, Method, Round, Server
from .net import BNStats, Net, layout, split
from .traffic import Traffic
from .tree import Tree
from .uploads import Refusal, Upload, check


class RoundResult(NamedTuple):
    """What one round did."""

    number: int  # from 0
    server: Server
    cohort: list[int]  # ascending client ids
    dropped: list[int]  # of the cohort, who did not answer
    partial: dict[int, int]  # steps of accepted clients that did not do all their work
    accepted: list[int]  # whose uploads were good
    refused: list[Refusal]
    skipped: bool  # too few accepted: nothing changed, on the server or at a client
    train_loss: float | None  # mean over accepted clients, None when there are none


def begin(net: Net, method: Method, seed: int, bn_stats: BNStats = "average", weights: Tree | None = None) -> Server:
    """The server before round 1, from the net's own weights or from those given. It has nothing of what clients
    keep to themselves: with `bn_stats="local"` no batch-norm statistics, for example."""
    shared, _ = split(weights or net.init(), method.kept(net, bn_stats))
    return Server(shared, method.server.init(shared["params"]), method.init_server(net, shared, seed))


def choose(clients: Sequence[int], size: int, seed: int, round: int) -> list[int]:
    """The cohort of a round: a function of (seed, round) over the ascending ids, drawn without replacement."""
    rng = seeds.stream(seed, "cohort", round)
    return sorted(rng.choice(sorted(clients), size, replace=False).tolist())


def drop(cohort: Sequence[int], rate: float, seed: int, round: int) -> list[int]:
    """Who of the cohort does not answer: each client with probability `rate`, by (seed, round, client) alone."""
    return [k for k in cohort if seeds.stream(seed, "drop", round, k).random() < rate]


def federate(
    server: Server,
    method: Method,
    engine: Engine,
    *,
    cohort: int,
    seed: int,
    traffic: Traffic,
    aggregate: Aggregate | None = None,
    drop_rate: float = 0.0,
    min_cohort: int = 1,
    max_update_norm: float | None = None,
    clip_update_norm: float | None = None,
    first: int = 0,
) -> Iterator[RoundResult]:
    """Yields the server after every round, from round `first` on without end: whoever iterates evaluates, records
    and stops.

    Uploads are aggregated in the order of client ids. A bad one is refused and recorded; a round with fewer than
    `min_cohort` good ones is abandoned and leaves server and clients as they were. `traffic` is added to as
    messages pass: also what a client got that then dropped out, or sent in vain.
    """
    for r in count(first):
        chosen = choose(engine.clients, cohort, seed, r)
        dropped = drop(chosen, drop_rate, seed, r)
        down = {"weights": server.weights, "shared": method.broadcast(server)}
        inbox = Inbox(engine.expected(down), max_update_norm, clip_update_norm, None if method.pooled else traffic)
        if inbox.traffic:
            inbox.traffic.sent(down, len(chosen))
        uploads = inbox.sift(engine, down, [k for k in chosen if k not in dropped], r)
        mean: Tree | None = None
        if (head := next(uploads, None)) is not None:
            mean = method.reduce(chain([head], uploads), aggregate or rules.Mean())
        accepted = list(inbox.losses)
        skipped = mean is None or len(accepted) < min_cohort
        if mean is not None and not skipped:
            server = method.update(server, mean["method"], Round(r, len(accepted) / engine.total))
            server = server._replace(weights=layout(server.weights | {"buffers": mean["buffers"]}))
        engine.commit([] if skipped else accepted, r)
        loss = sum(inbox.losses.values()) / len(accepted) if accepted else None
        yield RoundResult(r, server, chosen, dropped, inbox.partial, accepted, inbox.refused, skipped, loss)


class Inbox:
    """Passes good uploads on, one at a time, and keeps a note of each."""

    def __init__(
        self, expected: Tree, max_norm: float | None, clip_norm: float | None, traffic: Traffic | None
    ) -> None:
        self.expected, self.max_norm, self.clip_norm, self.traffic = expected, max_norm, clip_norm, traffic
        self.losses: dict[int, float] = {}  # of accepted clients
        self.partial: dict[int, int] = {}
        self.refused: list[Refusal] = []

    def sift(self, engine: Engine, down: Tree, cohort: list[int], round: int) -> Iterator[tuple[Tree, float]]:
        for upload in engine.train(down, cohort, round):
            if isinstance(upload, Refusal):
                self.refused.append(upload)
                continue
            if self.traffic:
                self.traffic.received(upload.tree)
            if refusal := check(upload, self.expected, self.max_norm):
                self.refused.append(refusal)
                continue
            self.losses[upload.client] = upload.loss
            if upload.steps < upload.planned:
                self.partial[upload.client] = upload.steps
            good = upload.tree if self.clip_norm is None else rules.clip(upload.tree, self.clip_norm)
            yield good, upload.weight


__all__ = ["Refusal", "RoundResult", "Upload", "begin", "choose", "drop", "federate"]
