"""Baseline: each client alone. Nothing is sent; accuracy is the mean over the clients' own models."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..data.table import Shard
from ..method import Context, Method, Result, Round, Server
from ..tree import Tree


@dataclass(frozen=True, kw_only=True)
class Local(Method):
    """All clients begin with the same weights and then go on from their own."""

    scope: ClassVar[Literal["global", "personal", "pooled"]] = "personal"

    def receive(self, weights: Tree, mine: Tree) -> Tree:
        own: Tree = mine.get("weights", weights)
        return own

    def finish(self, result: Result, shard: Shard, ctx: Context) -> tuple[Tree, Tree]:
        return {}, {"weights": result.weights}

    def update(self, server: Server, mean: Tree, round: Round) -> Server:
        return server
