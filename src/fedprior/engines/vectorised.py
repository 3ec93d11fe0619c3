"""Several clients as one program: their weights, batches and memories are stacked, and every step is taken for all.

What a GPU needs when clients are small. Results equal those of `Serial` up to the last bits, except where the net draws
random numbers itself (dropout, stochastic depth): these come from one stream a block, not one a client.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from .. import seeds, tree
from ..data.augment import cropped
from ..data.table import Federation, Shard, Table, take
from ..local import Worker, own_generator
from ..memory import ClientMemory
from ..method import Context
from ..tree import Tree
from ..uploads import Upload
from .serial import Serial

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Desk:
    """One client of a block, before its first step."""

    client: int
    ctx: Context
    carry: Tree
    shard: Shard
    columns: Tree  # what it remembers of its guide
    plan: Tensor  # row numbers int64 [steps, batch]
    scales: list[float]
    crops: Tensor | None  # int64 [steps, 3, batch]
    lots: Any  # stream of a guide's draws


class Vectorised(Serial):
    """At most `block` clients at a time (None: the whole cohort); half as many from when memory runs out.

    With `compile` steps go through `torch.compile`, which takes a minute at first and again for another number of
    clients. Dropout then draws other numbers.
    """

    def __init__(
        self,
        worker: Worker,
        federation: Federation,
        memory: ClientMemory | None = None,
        *,
        block: int | None = None,
        compile: bool = False,
    ) -> None:
        super().__init__(worker, federation, memory)
        self.block = block
        self.stacked = replace(worker, net=worker.net.stacked())
        self.own = 0 if worker.kept else None  # where clients lie in `starts`
        if compile:
            self.losses, self.advance = torch.compile(self.losses), torch.compile(self.advance)  # type: ignore[method-assign]

    def train(self, down: Tree, cohort: Sequence[int], round: int) -> Iterable[Upload]:
        waiting = sorted(cohort)
        while waiting:
            now = waiting[: self.block or len(waiting)]
            try:
                done = self.together(down, now, round)
            except torch.OutOfMemoryError:
                if len(now) == 1:
                    raise
                self.block = -(-len(now) // 2)
                log.warning("%d clients together are more than memory holds; going on with %d", len(now), self.block)
                torch.cuda.empty_cache()
                continue
            for upload, memory in done:
                self.remember(round, upload.client, memory)
                yield upload
            waiting = waiting[len(now) :]

    def together(self, down: Tree, clients: Sequence[int], round: int) -> list[tuple[Upload, Tree]]:
        """A block's round -> uploads and memories in the order of `clients`."""
        desks = sorted((self.desk(k, down, round) for k in clients), key=lambda d: (-len(d.plan), d.client))
        starts = stack([d.ctx.start for d in desks]) if self.worker.kept else plain(desks[0].ctx.start)
        mine, shared = stack([d.ctx.mine for d in desks]), plain(desks[0].ctx.shared)
        carry = stack([d.carry for d in desks])
        rows, data = joined([d.shard for d in desks])
        total = torch.zeros(len(desks), device=self.worker.net.device)
        ended: list[Tree] = []  # from the last desk to the first
        with own_generator(seeds.number(self.worker.seed, "dropout", round, *clients), self.worker.net.device):
            for i in range(len(desks[0].plan)):
                active = sum(i < len(d.plan) for d in desks)
                if active < len(total) - len(ended):
                    ended += [one_of(carry, k) for k in reversed(range(active, len(total) - len(ended)))]
                    carry, mine = part_of(carry, 0, active), part_of(mine, 0, active)
                    starts = part_of(starts, 0, active) if self.worker.kept else starts
                batch = self.batch(desks[:active], rows, data, i)
                carry, losses = self.step(carry, batch, starts, shared, mine, [d.scales[i] for d in desks[:active]])
                total[:active] += losses
        ended += [one_of(carry, k) for k in reversed(range(len(total) - len(ended)))]
        out = {}
        for desk, final, loss in zip(desks, reversed(ended), total.tolist(), strict=True):
            upload, memory = self.worker.finish(
                desk.client, final, desk.scales, loss / len(desk.plan), desk.shard, desk.ctx, down
            )
            out[desk.client] = upload, memory | ({"guide": desk.columns} if desk.columns else {})
        return [out[k] for k in clients]

    def desk(self, client: int, down: Tree, round: int) -> Desk:
        worker, shard, memory = self.worker, self.federation.shard(client), self.memory.get(client)
        ctx = worker.open(down, memory)
        carry: Tree = worker.init(ctx, memory)
        columns: Tree = {}
        if worker.guide is not None:
            shard, columns = worker.guide.annotate(client, shard, ctx, memory, round)
        plan = worker.plan(len(shard), round, client).to(shard.rows.device)
        return Desk(
            client=client,
            ctx=ctx,
            carry=carry,
            shard=shard,
            columns=columns,
            plan=plan,
            scales=worker.scales(len(shard), round, len(plan)),
            crops=worker.crops(len(plan), shard, round, client),
            lots=seeds.stream(worker.seed, "negatives", round, client),
        )

    def batch(self, desks: Sequence[Desk], rows: Sequence[Tensor], data: Table, i: int) -> Table:
        """The i-th batch of each desk, columns [clients, batch, ...]: one gather for all."""
        which = torch.cat([own.index_select(0, d.plan[i]) for own, d in zip(rows, desks, strict=False)])
        flat = take(data, which)
        if desks[0].crops is not None:
            crops = torch.cat([d.crops[i] for d in desks if d.crops is not None], dim=1)
            flat["image"] = cropped(flat["image"], crops)
        batch = {name: x.unflatten(0, (len(desks), -1)) for name, x in flat.items()}
        if self.worker.guide is not None:
            drawn = [
                self.worker.guide.draw({name: x[k] for name, x in batch.items()}, d.lots) for k, d in enumerate(desks)
            ]
            batch |= stack(drawn)
        return batch

    def step(
        self, carry: Tree, batch: Table, starts: Tree, shared: Tree, mine: Tree, scales: Sequence[float]
    ) -> tuple[Tree, Tensor]:
        """`Worker.step` for all -> (carries, losses [clients])."""
        params = {k: p.detach().requires_grad_() for k, p in carry["weights"]["params"].items()}
        losses, buffers = self.losses(params, carry["weights"]["buffers"], batch, starts, shared, mine)
        grads = self.stacked.slopes(losses.sum(), params)  # no client's loss depends on another's weights

        def advance(scale: float, first: int, last: int) -> Tree:
            c, g, b, m = (part_of(x, first, last) for x in (carry, grads, buffers, mine))
            s = part_of(starts, first, last) if self.worker.kept else starts
            return self.advance(c, g, b, s, shared, m, scale)

        parts, first = [], 0
        for scale, run in groupby(scales):  # one run where all take the same steps at the same rates
            last = first + len(list(run))
            parts.append(advance(scale, first, last))
            first = last
        moved = parts[0] if len(parts) == 1 else tree.map(lambda *x: torch.cat(x), *parts)
        return moved, losses.detach()

    def losses(
        self, params: Tree, buffers: Tree, batch: Table, starts: Tree, shared: Tree, mine: Tree
    ) -> tuple[Tensor, Tree]:
        """-> (losses [clients], buffers after the call)"""
        worker = self.stacked

        def objective(params: Tree, buffers: Tree, batch: Table, start: Tree, mine: Tree) -> Any:
            return worker.objective(params, buffers, batch, Context(worker.net, start, shared, mine))

        stacked = vmap(objective, in_dims=(0, 0, 0, self.own, 0), randomness="different")
        losses, after = stacked(params, buffers, batch, starts, mine)
        return losses, after

    def advance(
        self, carry: Tree, grads: Tree, buffers: Tree, starts: Tree, shared: Tree, mine: Tree, scale: float
    ) -> Tree:
        """The carries after one step along `grads`."""
        worker = self.stacked

        def one(carry: Tree, grads: Tree, buffers: Tree, start: Tree, mine: Tree) -> Tree:
            return worker.advance(carry, grads, buffers, Context(worker.net, start, shared, mine), scale)

        moved: Tree = vmap(one, in_dims=(0, 0, 0, self.own, 0))(carry, grads, buffers, starts, mine)
        return moved


def plain(a: Tree) -> Tree:
    """Leaves in plain memory order: some operations cannot look at another one in a stack."""
    return tree.map(lambda x: x.contiguous(), a)


def stack(trees: Sequence[Tree]) -> Tree:
    """Leaves [clients, ...]."""
    return plain(tree.map(lambda *x: torch.stack(x), *trees))


def one_of(stacked: Tree, k: int) -> Tree:
    """A client's part, as a copy."""
    return tree.map(lambda x: x[k].clone(), stacked)


def part_of(stacked: Tree, first: int, last: int) -> Tree:
    return tree.map(lambda x: x[first:last], stacked)


def joined(shards: Sequence[Shard]) -> tuple[list[Tensor], Table]:
    """-> (each shard's row numbers in one table, the table)"""
    if all(shard.table is shards[0].table for shard in shards):
        return [shard.rows for shard in shards], shards[0].table
    sizes = [len(shard) for shard in shards]
    own = [take(shard.table, shard.rows) for shard in shards]
    table = {name: torch.cat([part[name] for part in own]) for name in own[0]}
    return list(torch.arange(sum(sizes), device=shards[0].rows.device).split(sizes)), table
