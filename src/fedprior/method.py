"""What makes one federated method differ from another."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from . import tree
from .data.table import Shard, Table
from .net import Net, Output
from .optim import SGD, Optimizer
from .tree import Tree


class Server(NamedTuple):
    """All the server remembers between rounds."""

    weights: Tree  # {"params": ..., "buffers": ...}
    opt: Tree  # state of the server's optimiser
    state: Tree  # whatever else the method keeps


class Context(NamedTuple):
    """All a client sees while it trains."""

    net: Net
    start: Tree  # the weights that this round's local training began with
    shared: Tree  # what Method.broadcast added to the model
    mine: Tree  # what this client remembers from its earlier rounds


class Result(NamedTuple):
    """What local training produced."""

    weights: Tree
    delta: Tree  # change of the params
    steps: int
    travel: float  # sum of the learning rates of all steps
    length: float  # FedNova's a: weight of all gradients in delta, in units of one step


class Round(NamedTuple):
    number: int  # from 0
    fraction: float  # accepted clients / all clients


@dataclass(frozen=True, kw_only=True)
class Method:
    """FedAvg. Every other method overrides the lines in which it differs.

    Hooks are pure: they read their arguments and return new trees. The three that run inside a
    training step (loss, gradient, project) may be vectorised over clients, so they must not branch
    on tensor values; the others are ordinary Python.
    """

    scope: ClassVar[Literal["global", "personal", "pooled"]] = "global"
    """global: one model, averaged. personal: each client keeps its own. pooled: all data in one place."""

    server: Optimizer = field(default=SGD(lr=1.0), metadata={"config": False})
    """Takes the mean client update as a descent direction; the experiment's `server` key sets it."""

    # server -> client
    def init_server(self, weights: Tree, seed: int) -> Tree:
        """What the method keeps on the server before round 1."""
        return {}

    def init_client(self, weights: Tree) -> Tree:
        """What a client remembers before its first round."""
        return {}

    def broadcast(self, server: Server) -> Tree:
        """What is sent to the clients beside the model."""
        return {}

    def receive(self, weights: Tree, mine: Tree) -> Tree:
        """The weights a client starts from, given the global ones."""
        return weights

    # on the client, in every step
    def loss(self, weights: Tree, batch: Table, ctx: Context) -> tuple[Tensor, Output]:
        """-> (scalar, Output) for a batch."""
        out = ctx.net(weights, batch["image"])
        return F.cross_entropy(out.logits, batch["label"]), out

    def gradient(self, grads: Tree, params: Tree, ctx: Context) -> Tree:
        """The gradient that the local optimiser gets."""
        return grads

    def project(self, params: Tree, lr: float, ctx: Context) -> Tree:
        """The params after the local optimiser's step."""
        return params

    # on the client, after local training
    def finish(self, result: Result, shard: Shard, ctx: Context) -> tuple[Tree, Tree]:
        """-> (upload, what this client remembers)"""
        return {"delta": result.delta}, ctx.mine

    def weight(self, size: float) -> float:
        """The upload's weight in the mean; `size` follows the experiment's `weight_by`."""
        return size

    # client -> server
    def reduce(self, uploads: Iterable[tuple[Tree, float]]) -> Tree:
        """The mean of the uploads, which come in the order of client ids."""
        return tree.mean(uploads)

    def update(self, server: Server, mean: Tree, round: Round) -> Server:
        """The server after a round."""
        direction = tree.scale(mean["delta"], -1.0)
        params, opt = self.server.update(direction, server.opt, server.weights["params"])
        return server._replace(weights=server.weights | {"params": params}, opt=opt)
