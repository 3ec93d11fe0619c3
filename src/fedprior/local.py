"""Local training of one client. Every engine runs these functions; none has its own."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from . import seeds, tree
from .data.augment import cropped, draw_crops
from .data.table import Shard, Table
from .guide import HEAD, Guide
from .method import Context, Method, Result
from .net import BNStats, Net, layout, split
from .optim import Optimizer
from .schedule import Constant, Schedule
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
    schedule: Schedule = Constant()
    steps: int | None = None
    epochs: float | None = None
    augment: bool = False
    flip: bool = True  # whether augmenting mirrors
    bn_stats: BNStats = "average"
    weight_by: WeightBy = "training"
    persist_optimizer: bool = False
    clip_gradient: float | None = None
    straggler_rate: float = 0.0
    guide: Guide | None = None
    seed: int = 0

    @cached_property
    def kept(self) -> frozenset[str]:
        """Names of the params and buffers that never leave a client."""
        return self.method.kept(self.net, self.bn_stats)

    @cached_property
    def untrained(self) -> Tree:
        """The net's own weights."""
        return self.net.init()

    def num_steps(self, n: int) -> int:
        """Local steps of a client with n rows that does all its work."""
        return num_steps(n, self.batch_size, self.steps, self.epochs)

    def work(self, n: int, round: int, client: int) -> int:
        """The steps that a client takes in a round: all, or for a straggler 1 to all but one, evenly drawn."""
        steps, rng = self.num_steps(n), seeds.stream(self.seed, "straggler", round, client)
        if steps > 1 and rng.random() < self.straggler_rate:
            return int(rng.integers(1, steps))
        return steps

    def plan(self, n: int, round: int, client: int) -> Tensor:
        """Row numbers int64 [steps, batch]: shuffled passes over the n rows, joined end to end."""
        rng = seeds.stream(self.seed, "batches", round, client)
        steps = self.work(n, round, client)
        passes = -(-steps * self.batch_size // n)
        rows = np.concatenate([rng.permutation(n) for _ in range(passes)])
        return torch.from_numpy(rows[: steps * self.batch_size].reshape(steps, self.batch_size))

    def crops(self, steps: int, shard: Shard, round: int, client: int) -> Tensor | None:
        """Where every image of every batch is cut, int64 [steps, 3, batch]; None without augmentation."""
        if not self.augment:
            return None
        rng = seeds.stream(self.seed, "augment", round, client)
        drawn = [draw_crops(rng, self.batch_size, flip=self.flip) for _ in range(steps)]
        return torch.from_numpy(np.stack(drawn)).to(shard.rows.device)

    def scales(self, n: int, round: int, done: int) -> list[float]:
        """The schedule's factors in the first `done` steps of a client with n rows."""
        steps = self.num_steps(n)
        return [self.schedule.factor(round, step, steps) for step in range(done)]

    def train(self, client: int, shard: Shard, down: Tree, memory: Tree, round: int) -> tuple[Upload, Tree]:
        """One client's round -> (upload, memory). `memory` is {} at its first round."""
        ctx = self.open(down, memory)
        carry = self.init(ctx, memory)
        columns: Tree = {}
        if self.guide is not None:
            shard, columns = self.guide.annotate(client, shard, ctx, memory, round)
        plan = self.plan(len(shard), round, client).to(shard.rows.device)
        scales = self.scales(len(shard), round, len(plan))
        crops = self.crops(len(plan), shard, round, client)
        lots = seeds.stream(self.seed, "negatives", round, client)
        total = torch.zeros((), device=self.net.device)
        with own_generator(seeds.number(self.seed, "dropout", round, client), self.net.device):
            for i, (which, scale) in enumerate(zip(plan, scales, strict=True)):
                batch = shard.batch(which)
                if crops is not None:
                    batch["image"] = cropped(batch["image"], crops[i])
                if self.guide is not None:
                    batch |= self.guide.draw(batch, lots)
                carry, loss = self.step(carry, batch, ctx, scale)
                total += loss
        upload, memory = self.finish(client, carry, scales, float(total) / len(plan), shard, ctx, down)
        return upload, memory | ({"guide": columns} if columns else {})

    def open(self, down: Tree, memory: Tree) -> Context:
        """What the client knows when its round begins."""
        start = layout(self.assemble(down["weights"], memory))
        mine = memory["method"] if memory else self.method.init_client(self.net, start)
        return Context(self.net, start, layout(down["shared"]), layout(mine))

    def assemble(self, weights: Tree, memory: Tree) -> Tree:
        """The server's weights and what the client keeps, at first as in the untrained net."""
        if not self.kept:
            return weights
        own = memory.get("kept") or split(self.untrained, self.kept)[1]
        return {
            group: {k: own[group][k] if k in self.kept else weights[group][k] for k in part}
            for group, part in self.untrained.items()
        }

    def init(self, ctx: Context, memory: Tree) -> Tree:
        """The state that local steps carry. The optimiser starts afresh, unless it is told to persist or all data
        lie in one place."""
        opt = memory["opt"] if "opt" in memory else self.optimizer.init(ctx.start["params"])
        carry = {"weights": ctx.start, "opt": opt}
        return carry | ({"gradient": tree.zeros_like(ctx.start["params"])} if self.method.mean_gradient else {})

    def step(self, carry: Tree, batch: Table, ctx: Context, scale: float = 1.0) -> tuple[Tree, Tensor]:
        """One gradient step at `scale` times the optimiser's rate -> (carry, loss)."""
        params = {k: p.detach().requires_grad_() for k, p in carry["weights"]["params"].items()}
        loss, buffers = self.objective(params, carry["weights"]["buffers"], batch, ctx)
        return self.advance(carry, self.slopes(loss, params), buffers, ctx, scale), loss.detach()

    def objective(self, params: Tree, buffers: Tree, batch: Table, ctx: Context) -> tuple[Tensor, Tree]:
        """-> (loss, buffers after the call)"""
        loss, out = self.method.loss({"params": params, "buffers": buffers}, batch, ctx)
        if self.guide is not None:
            loss = self.guide.loss(loss, out, params, batch)
        return loss, out.buffers

    def slopes(self, loss: Tensor, params: Tree) -> Tree:
        """The gradient of a loss."""
        idle = self.guide is not None or f"{HEAD}.weight" in params  # a guide may use its layer alone, or not at all
        found = torch.autograd.grad(loss, list(params.values()), allow_unused=idle, materialize_grads=idle)
        return dict(zip(params, found, strict=True))

    @torch.no_grad()
    def advance(self, carry: Tree, grads: Tree, buffers: Tree, ctx: Context, scale: float) -> Tree:
        """What local steps carry, after one along `grads`."""
        before, after = carry["weights"]["params"], {}
        if self.method.mean_gradient:
            after["gradient"] = tree.add(carry["gradient"], grads)
        grads = self.method.gradient(grads, before, ctx)
        if self.clip_gradient is not None:
            grads = clip(grads, self.clip_gradient)
        updated, opt = self.optimizer.update(grads, carry["opt"], before, scale)
        updated = self.method.project(updated, self.optimizer.lr * scale, ctx)
        return after | {"weights": {"params": updated, "buffers": buffers}, "opt": opt}

    @torch.no_grad()
    def finish(
        self, client: int, carry: Tree, scales: Sequence[float], loss: float, shard: Shard, ctx: Context, down: Tree
    ) -> tuple[Upload, Tree]:
        """-> (upload, memory) after one step at each of the `scales`."""
        weights, steps = carry["weights"], len(scales)
        public = down["weights"]["params"]
        delta = {k: weights["params"][k] - ctx.start["params"][k] for k in public}
        rates = [self.optimizer.lr * scale for scale in scales]
        length = self.optimizer.length(rates, self.method.pull)
        gradient = tree.scale(carry.get("gradient", {}), 1 / steps)
        result = Result(weights, delta, steps, math.fsum(rates), length, gradient)
        sent, mine = self.method.finish(result, shard, ctx)
        up, memory = {"method": sent}, {"method": mine}
        if self.method.pooled or self.persist_optimizer:
            memory["opt"] = carry["opt"]
        if self.kept:
            memory["kept"] = split(weights, self.kept)[1]
        up["buffers"] = {k: weights["buffers"][k] for k in down["weights"]["buffers"]}
        weight = self.method.weight(self.size(shard))
        return Upload(client, up, weight, loss, steps, self.num_steps(len(shard))), memory

    def size(self, shard: Shard) -> float:
        """What weighs this client's update."""
        if self.weight_by == "uniform":
            return 1.0
        if self.weight_by == "real":
            return float((~shard["synthetic"]).sum())
        return float(len(shard))

    def sample(self, down: Tree, shard: Shard) -> tuple[Upload, Tree]:
        """Upload and memory of a client that did not move: the names, shapes and dtypes of any."""
        ctx = self.open(down, {})
        return self.finish(0, self.init(ctx, {}), [1.0], 0.0, Shard(shard.table, shard.rows[:1]), ctx, down)


def clip(grads: Tree, most: float) -> Tree:
    """The gradients scaled down to a Euclidean norm of at most `most` over all of them, as torch's clip_grad_norm_."""
    norm = torch.stack([g.norm() for g in tree.flatten(grads).values()]).norm()
    factor = (most / (norm + 1e-6)).clamp(max=1.0)
    clipped: Tree = tree.map(lambda g: g * factor, grads)
    return clipped


@contextmanager
def own_generator(seed: int, device: torch.device) -> Iterator[None]:
    """Dropout and stochastic depth draw from torch's global generator: seed it here, restore it afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
