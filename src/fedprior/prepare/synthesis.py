"""Synthetic rows: which images are made, and which client draws which.

The images themselves lie in a folder that `images` fills.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedprior import seeds
from fedprior.data import table
from fedprior.data.table import Federation
from fedprior.prepare.balance import Balance, Counts, Plan, plan, staying
from fedprior.prepare.images import NO_DOMAIN, SHARED, ImageFolder, Part, Stream, Update, Wording
from fedprior.priors import class_names, prompts

Own = Callable[[int], AbstractContextManager[ImageFolder]]
"""The folder of a client's images, which may take memory while it is open."""


class Filled(NamedTuple):
    """What `fill` did."""

    generated: int  # usable images made now
    folders: tuple[Path, ...]  # of the streams' images, each once; each opens with datasets.load_dataset(str(folder))


class Report(NamedTuple):
    """What `synthesise` did."""

    generated: int  # usable images made now
    reused: int  # usable images that were in the folder
    faulty: int  # images left out: every attempt was black or blank
    removed: int  # images left out by filters
    rows: int  # synthetic rows, all clients together
    repeats: int  # of these, rows that repeat an image the same client already has
    dropped: int  # real rows that the rule left out
    folders: tuple[Path, ...]  # of the images, as in `Filled`: several where clients have priors of their own
    before: Counts  # real rows, int64 [clients, classes]
    after: Counts  # all rows, int64 [clients, classes]

    @property
    def origin(self) -> str:
        """Where the rows are from, for a person."""
        return (
            f"{self.generated} new and {self.reused} stored images"
            + (f"; filters removed {self.removed}" if self.removed else "")
            + (f"; {self.dropped} real rows dropped" if self.dropped else "")
        )


def wording(policy: Balance, classes: Sequence[str], domains: Sequence[str], dataset: str) -> Wording:
    """How the policy's prompts name these classes and, where its templates ask for them, these domains.

    Raises UserError for a file that is not as it should be, UsageError for templates that name domains where the
    partition knows none.
    """
    templates = prompts.templates(policy.templates)
    return Wording(
        classes=tuple(classes),
        templates=templates,
        words=() if policy.names == class_names.PLAIN else class_names.wording(policy.names, classes, dataset),
        domains=prompts.phrases(templates, domains, policy.domain_words),
    )


class Needs(NamedTuple):
    """What a policy asks for."""

    federation: Federation  # with the real rows that stay
    plan: Plan
    streams: list[Stream]
    before: Counts  # real rows, int64 [clients, classes]

    @property
    def images(self) -> int:
        return sum(stream.need for stream in self.streams)

    def of(self, clients: Sequence[int]) -> "Needs":
        """What these clients need of it, the others being elsewhere: they have no rows here. Pools stay as large as
        all clients together made them, so that each draws what it would draw beside the others."""
        mine = np.isin(np.arange(len(self.before)), clients)[:, None]
        allocation = np.where(mine, self.plan.allocation, 0)
        drawn = allocation.sum(0)
        each = max(1, self.plan.domains)
        streams = [
            s
            for s in self.streams
            if s.client in clients or (s.client == SHARED and drawn[s.label * each + max(0, s.domain)])
        ]
        whose = self.plan._replace(allocation=allocation, rows=int(allocation.sum()))
        return Needs(self.federation.only(clients), whose, streams, np.where(mine, self.before, 0))


def needs(federation: Federation, words: Wording, policy: Balance, seed: int) -> Needs:
    """Before anything is made. Raises UsageError for a policy that contradicts itself."""
    shares = federation.domain_counts() if words.domains else None
    before = federation.counts(synthetic=False)
    wanted = plan(policy, before, federation.classes, shares)
    return Needs(thinned(federation, wanted.kept, seed), wanted, streams_of(policy, wanted), before)


def synthesise(
    federation: Federation,
    folder: ImageFolder,
    policy: Balance,
    *,
    own: Own | None = None,
    progress: Update | None = None,
) -> tuple[Federation, Report]:
    """The federation with the synthetic rows that `policy` asks for (Gen-FedSD, arXiv:2405.07925, section 4), out
    of `folder`.

    Every client gets exactly the allocated number of each class. From a shared pool it draws without
    replacement; where the pool is smaller than its need, each image comes as often as another, give or take
    one. Real rows stay as they are, unless the rule drops some; synthetic ones follow them, flagged, with ids of
    their own. Where prompts name domains, a client's images of a class are shared out over its domains as its real
    rows are. `own` gives clients folders of their own in place of `folder`, with pool=per_client. `progress` is called
    with (usable images there, usable images needed).

    Raises UserError when the prior makes hardly anything but faulty images for a class, UsageError for a
    policy that contradicts itself.
    """
    return deal(needs(federation, folder.wording, policy, folder.seed), folder, own=own, progress=progress)


def deal(
    wanted: Needs, folder: ImageFolder, *, own: Own | None = None, progress: Update | None = None
) -> tuple[Federation, Report]:
    """Makes what is wanted and gives it to those who want it; see `synthesise`."""
    kept, needed, streams, before = wanted
    generated, folders = fill(folder, streams, progress or (lambda done, total: None), own)
    faulty, removed = sum(s.faulty for s in streams), sum(s.removed for s in streams)
    balanced = kept.with_rows(_table(kept, streams), _rows(streams, needed, folder.seed))
    return balanced, Report(
        generated=generated,
        reused=wanted.images - generated,
        faulty=faulty,
        removed=removed,
        rows=needed.rows,
        repeats=needed.repeats,
        dropped=int((before - kept.counts(synthetic=False)).sum()),
        folders=folders,
        before=before,
        after=balanced.counts(),
    )


def server_images(
    folder: ImageFolder, per_class: int, progress: Callable[[int, int], None] | None = None
) -> table.Table:
    """`per_class` images of each class for the server, as a table: the first ones of the pools that clients would
    share, so that nothing is made twice.

    Raises UserError when the prior makes hardly anything but faulty images for a class.
    """
    labels = range(len(folder.wording.classes))
    streams = with_server([], len(labels), per_class)
    folder.fill(streams, progress or (lambda done, total: None))
    label = torch.arange(len(labels)).repeat_interleave(per_class)
    return table.make(torch.cat([s.images() for s in streams]), label, synthetic=True)


def opened(
    folder: ImageFolder, streams: Sequence[Stream], own: Own | None
) -> list[tuple[AbstractContextManager[ImageFolder], list[Stream]]]:
    """The streams with the folder of their images, which is to be entered: one for all, or one for each client that has
    its own; `folder` keeps what is shared."""
    if own is None:
        return [(nullcontext(folder), list(streams))]
    return [
        (nullcontext(folder) if client == SHARED else own(client), [s for s in streams if s.client == client])
        for client in sorted({s.client for s in streams})
    ]


def fill(
    folder: ImageFolder, streams: Sequence[Stream], progress: Update, own: Own | None = None, part: Part | None = None
) -> Filled:
    """`ImageFolder.fill`, client by client where clients have folders of their own; parts then share out clients."""
    groups = opened(folder, streams, own)
    if own is not None and part is not None:
        groups, part = groups[part.number - 1 :: part.of], None
    total = sum(s.need for _, group in groups for s in group) if part is None else folder.wanted(streams, part)
    generated = before = 0
    paths: list[Path] = []
    for entered, group in groups:
        with entered as one:
            generated += one.fill(group, lambda done, _: progress(before + done, total), part)
            paths += [one.path] if one.path.is_dir() and group else []
        before += sum(s.need for s in group)
    return Filled(generated, tuple(dict.fromkeys(paths)))


def with_server(streams: Sequence[Stream], classes: int, per_class: int) -> list[Stream]:
    """Shared streams that hold the server's images too; the others as they are."""
    shared = {s.label: s for s in streams if s.client == SHARED and s.domain == NO_DOMAIN}
    own = [Stream(y, SHARED, max(per_class, shared[y].need if y in shared else 0)) for y in range(classes)]
    return [*own, *(s for s in streams if shared.get(s.label) is not s)]


def thinned(federation: Federation, kept: Counts, seed: int) -> Federation:
    """The federation whose clients keep that many real rows of each class, int64 [clients, classes], drawn."""
    if (kept == federation.counts(synthetic=False)).all():
        return federation
    label = federation.table["label"]
    clients = [
        rows[torch.from_numpy(staying(label[rows].numpy(), kept[k], seed, k))]
        for k, rows in enumerate(federation.clients)
    ]
    return replace(federation, clients=tuple(clients))


def streams_of(policy: Balance, needed: Plan) -> list[Stream]:
    """One stream a class (and domain), or one a client too, with what it needs; none that needs nothing."""
    each = max(1, needed.domains)
    if policy.pool == "shared":
        wanted = [(kind, SHARED, n) for kind, n in enumerate(needed.pool_sizes.tolist())]
    else:
        wanted = [
            (kind, client, n)
            for kind, column in enumerate(needed.allocation.T.tolist())
            for client, n in enumerate(column)
        ]
    domain_of = lambda kind: kind % each if needed.domains else NO_DOMAIN
    return [Stream(kind // each, client, n, domain_of(kind)) for kind, client, n in wanted if n]


def _table(federation: Federation, streams: Sequence[Stream]) -> table.Table:
    """The streams' images laid end to end. Blocks are let go of on the way, so that images lie in memory once."""
    sizes = [s.need for s in streams]
    images = torch.empty((sum(sizes), 3, *federation.table["image"].shape[2:]), dtype=torch.uint8)
    for stream, place in zip(streams, images.split(sizes) if sizes else (), strict=True):
        place.copy_(stream.images())
    column = lambda values: torch.tensor(values, dtype=torch.int64).repeat_interleave(torch.tensor(sizes).long())
    return table.make(
        images,
        column([s.label for s in streams]),
        domain=column([s.domain for s in streams]) if "domain" in federation.table else None,
        synthetic=True,
        first_id=int(federation.table["id"].max()) + 1,
    )


def _rows(streams: Sequence[Stream], needed: Plan, seed: int) -> list[Tensor]:
    """Each client's row numbers among the streams' images laid end to end: its own ones, or drawn."""
    each = max(1, needed.domains)
    rows: list[list[Tensor]] = [[torch.zeros(0, dtype=torch.int64)] for _ in needed.allocation]
    first = 0
    for stream in streams:
        kind = stream.label * each + max(0, stream.domain)
        for client in range(len(rows)) if stream.client == SHARED else [stream.client]:
            count = int(needed.allocation[client, kind])
            if stream.client == SHARED:
                key = (client, stream.label) if stream.domain == NO_DOMAIN else (client, stream.label, stream.domain)
                which = _draw(count, stream.need, seed, *key)
            else:
                which = np.arange(count)
            rows[client].append(torch.from_numpy(which) + first)
        first += stream.need
    return [torch.cat(parts) for parts in rows]


def _draw(count: int, pool: int, seed: int, *key: int) -> NDArray[np.int64]:
    """`count` numbers below `pool`, int64 [count]: whole permutations in a row, the last one cut."""
    rng = seeds.stream(seed, "draw", *key)
    rounds = [rng.permutation(pool) for _ in range(-(-count // pool))]
    return np.concatenate([np.zeros(0, np.int64), *rounds])[:count]
