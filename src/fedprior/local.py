"""Local training of one client. Every engine runs these functions; none has its own."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from . import seeds, tree
from .data.augment import crop_flip
from .data.table import Shard, Table
from .method import Context, Method, Result
from .net import BNStats, Net, layout
from .optim import Optimizer
from .tree import Tree
from .uploads import Upload

WeightBy = Literal["training", "real", "uniform"]


def num_steps(n: int, batch_size: int, steps: int | None, epochs: float | None) -> int:
    """Local steps for n rows: `steps`, or as many full batches as cover `epochs` passes."""
    if steps is not None:
        return steps
    assert epochs is not None
    return max(1, math.ceil(round(epochs * n / batch_size, 9)))


@dataclass(frozen=True, kw_only=True)
class Worker:
    """Net, method and optimiser, and how much local work is done.

    Exactly one of `steps` and `epochs` is given; `epochs` may be a fraction. Batches are always full.
    """

    net: Net
    method: Method
    optimizer: Optimizer
    batch_size: int
    steps: int | None = None
    epochs: float | None = None
    augment: bool = False
    bn_stats: BNStats = "average"
    weight_by: WeightBy = "training"
    seed: int = 0

    def num_steps(self, n: int) -> int:
        """Local steps of a client with n rows."""
        return num_steps(n, self.batch_size, self.steps, self.epochs)

    def plan(self, n: int, round: int, client: int) -> Tensor:
        """Row numbers int64 [steps, batch]: shuffled passes over the n rows, joined end to end."""
        rng = seeds.stream(self.seed, "batches", round, client)
        steps = self.num_steps(n)
        passes = -(-steps * self.batch_size // n)
        rows = np.concatenate([rng.permutation(n) for _ in range(passes)])
        return torch.from_numpy(rows[: steps * self.batch_size].reshape(steps, self.batch_size))

    def train(self, client: int, shard: Shard, down: Tree, memory: Tree, round: int) -> tuple[Upload, Tree]:
        """One client's round -> (upload, memory). `memory` is {} at its first round."""
        ctx = self.open(down, memory)
        carry = self.init(ctx, memory)
        plan = self.plan(len(shard), round, client).to(shard.rows.device)
        crops = seeds.stream(self.seed, "augment", round, client)
        total = torch.zeros((), device=self.net.device)
        with own_generator(seeds.number(self.seed, "dropout", round, client), self.net.device):
            for which in plan:
                batch = shard.batch(which)
                if self.augment:
                    batch["image"] = crop_flip(batch["image"], rng=crops)
                carry, loss = self.step(carry, batch, ctx)
                total += loss
        return self.finish(client, carry, len(plan), float(total) / len(plan), shard, ctx)

    def open(self, down: Tree, memory: Tree) -> Context:
        """What the client knows when its round begins."""
        mine = memory["method"] if memory else self.method.init_client(down["weights"])
        start = layout(self.method.receive(down["weights"], mine))
        if self.bn_stats == "local":  # the server has none: a client's own, at first those of the untrained net
            start = start | {"buffers": memory.get("buffers") or self.net.init()["buffers"]}
        return Context(self.net, start, down["shared"], mine)

    def init(self, ctx: Context, memory: Tree) -> Tree:
        """The state that local steps carry. The optimiser starts afresh, except where all data lie in one place."""
        opt = memory["opt"] if "opt" in memory else self.optimizer.init(ctx.start["params"])
        return {"weights": ctx.start, "opt": opt}

    def step(self, carry: Tree, batch: Table, ctx: Context) -> tuple[Tree, Tensor]:
        """One gradient step -> (carry, loss)."""
        before = carry["weights"]
        params = {k: p.detach().requires_grad_() for k, p in before["params"].items()}
        loss, out = self.method.loss(before | {"params": params}, batch, ctx)
        grads = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
        with torch.no_grad():
            grads = self.method.gradient(grads, before["params"], ctx)
            updated, opt = self.optimizer.update(grads, carry["opt"], before["params"])
            updated = self.method.project(updated, self.optimizer.lr, ctx)
        return {"weights": {"params": updated, "buffers": out.buffers}, "opt": opt}, loss.detach()

    @torch.no_grad()
    def finish(
        self, client: int, carry: Tree, steps: int, loss: float, shard: Shard, ctx: Context
    ) -> tuple[Upload, Tree]:
        """-> (upload, memory)"""
        weights = carry["weights"]
        delta = tree.sub(weights["params"], ctx.start["params"])
        travel, length = steps * self.optimizer.lr, self.optimizer.length(steps)
        sent, mine = self.method.finish(Result(weights, delta, steps, travel, length), shard, ctx)
        up, memory = {"method": sent}, {"method": mine}
        if self.method.scope == "pooled":
            memory["opt"] = carry["opt"]
        if self.bn_stats == "local":
            memory["buffers"] = weights["buffers"]
        elif self.method.scope != "personal":
            up["buffers"] = weights["buffers"]
        return Upload(client, up, self.method.weight(self.size(shard)), loss, steps), memory

    def size(self, shard: Shard) -> float:
        """What weighs this client's update."""
        if self.weight_by == "uniform":
            return 1.0
        if self.weight_by == "real":
            return float((~shard["synthetic"]).sum())
        return float(len(shard))

    def expected(self, down: Tree, shard: Shard) -> Tree:
        """A tree with the names, shapes and dtypes of a good upload: that of a client that did not move."""
        ctx = self.open(down, {})
        carry = self.init(ctx, {})
        return self.finish(0, carry, 1, 0.0, Shard(shard.table, shard.rows[:1]), ctx)[0].tree


@contextmanager
def own_generator(seed: int, device: torch.device) -> Iterator[None]:
    """Dropout and stochastic depth draw from torch's global generator: seed it here, restore it afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
