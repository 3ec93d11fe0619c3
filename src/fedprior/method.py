"""What makes one federated method differ from another."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from . import tree
from .data.table import Shard, Table
from .net import BNStats, Net, Output
from .optim import SGD, Optimizer
from .tree import Tree

Aggregate = Callable[[Iterable[tuple[Tree, float]], frozenset[str]], Tree]
"""(uploads with weights, groups that count each client once) -> one tree; see `aggregate.py`."""


class Server(NamedTuple):
    """All the server remembers between rounds."""

    weights: Tree  # {"params": ..., "buffers": ...}, without what clients keep to themselves
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
    delta: Tree  # change of the params that the server knows
    steps: int
    travel: float  # sum of the learning rates of all steps, as really applied
    length: float  # FedNova's a: displacement under gradients of one, at the rates really applied
    gradient: Tree  # mean over the steps of the gradients of `loss`; {} unless the method sets mean_gradient


class Round(NamedTuple):
    """What the server knows of the round that it updates after."""

    number: int  # from 0
    fraction: float  # accepted clients / all clients


@dataclass(frozen=True, kw_only=True)
class Method:
    """FedAvg. Every other method overrides the lines in which it differs.

    Hooks are pure: they read their arguments and return new trees. The three that run inside a
    training step (loss, gradient, project) may be vectorised over clients, so they must not branch
    on tensor values; the others are ordinary Python.
    """

    pooled: ClassVar[bool] = False
    """All data lie in one place; nothing is sent."""

    mean_gradient: ClassVar[bool] = False
    """Local training adds up the gradients of `loss`, for Result.gradient."""

    once: ClassVar[frozenset[str]] = frozenset()
    """Groups of the upload in which each client counts once, whatever its weight: {"control"}."""

    needs_mean: ClassVar[str] = ""
    """Why the method cannot do with another aggregation rule than the mean; "" where it can."""

    needs_whole_updates: ClassVar[bool] = False
    """Clients remember what they sent, so the server must not scale it down."""

    server: Optimizer = field(default=SGD(lr=1.0), metadata={"config": False})
    """Takes the mean client update as a descent direction; the experiment's `server` key sets it."""

    def check(self, local: Optimizer) -> None:
        """Raises UsageError when the method cannot work with its optimisers."""

    def remark(self, net: Net) -> str:
        """What a person should know about the method with this net; "" for nothing."""
        return ""

    # before round 1
    def adapt(self, module: nn.Module, seed: int) -> nn.Module:
        """The net that the method trains, given the plain one: with another head, for example."""
        return module

    def keeps(self, net: Net) -> frozenset[str]:
        """Names of the params and buffers that never leave a client."""
        return frozenset()

    def kept(self, net: Net, bn_stats: BNStats) -> frozenset[str]:
        """All names that never leave a client: the method's, and with local statistics every buffer."""
        return self.keeps(net) | (net.buffer_names if bn_stats == "local" else frozenset())

    @property
    def images(self) -> int:
        """Images of each class that the server needs from the prior, for `pretrain` or `deploy`."""
        return 0

    def pretrain(self, net: Net, weights: Tree, images: Table, seed: int) -> Tree:
        """The server's weights before round 1, given the initial ones and the prior's images."""
        return weights

    # server -> client
    def init_server(self, net: Net, weights: Tree, seed: int) -> Tree:
        """What the method keeps on the server before round 1."""
        return {}

    def init_client(self, net: Net, weights: Tree) -> Tree:
        """What a client remembers before its first round, given all the weights it begins with."""
        return {}

    def broadcast(self, server: Server) -> Tree:
        """What is sent to the clients beside the model."""
        return {}

    # on the client, in every step
    def loss(self, weights: Tree, batch: Table, ctx: Context) -> tuple[Tensor, Output]:
        """-> (scalar, Output) for a batch."""
        out = ctx.net(weights, batch["image"])
        return F.cross_entropy(out.logits, batch["label"]), out

    def gradient(self, grads: Tree, params: Tree, ctx: Context) -> Tree:
        """The gradient that the local optimiser gets."""
        return grads

    @property
    def pull(self) -> float:
        """The strength of a proximal term in `gradient`, for Result.length."""
        return 0.0

    def project(self, params: Tree, lr: float, ctx: Context) -> Tree:
        """The params after the local optimiser's step at rate `lr`."""
        return params

    # on the client, after local training
    def finish(self, result: Result, shard: Shard, ctx: Context) -> tuple[Tree, Tree]:
        """-> (upload, what this client remembers)"""
        return {"delta": result.delta}, ctx.mine

    def weight(self, size: float) -> float:
        """The upload's weight in the mean; `size` follows the experiment's `weight_by`."""
        return size

    # client -> server
    def reduce(self, uploads: Iterable[tuple[Tree, float]], aggregate: Aggregate) -> Tree:
        """One tree from the uploads {"method": ..., "buffers": ...}, which come in the order of client ids."""
        return aggregate(uploads, frozenset(f"method/{group}" for group in self.once))

    def update(self, server: Server, mean: Tree, round: Round) -> Server:
        """The server after a round, given the method's part of what `reduce` made."""
        direction = tree.scale(mean["delta"], -1.0)
        params, opt = self.server.update(direction, server.opt, server.weights["params"])
        return server._replace(weights=server.weights | {"params": params}, opt=opt)

    # when the model is judged or saved
    def deploy(self, net: Net, weights: Tree, images: Table | None, seed: int) -> Tree:
        """The global model to evaluate, given the server's weights; training goes on from the latter."""
        return weights
