"""Synthetic rows: images are made once, kept in a folder, and drawn from there by the clients.

The folder holds parquet files of up to 256 images that `datasets.load_dataset` opens. Image number `index` of
a class and client depends on nothing but (prior, size, classes, templates, seed, class, client, index), so a
folder can be left half filled, can grow, and can lose a file: what is missing is made again, what is there
stays. (Where a prior's last bits depend on which images share a batch, an image made again may differ by a
grey level.)
"""

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedprior import seeds, store
from fedprior.data import table
from fedprior.data.table import Federation
from fedprior.errors import UserError
from fedprior.prepare.balance import Balance, Counts, Plan, plan
from fedprior.priors import faults, prompts
from fedprior.priors.base import Prior

FORMAT = "fedprior synthetic images 1"  # enters every key; another number leaves older folders alone
BLOCK = 256  # images of a file
CALL = 64  # images asked of the prior at a time: what an interruption loses at most
SHARED = -1  # the client of images that all clients may draw
PATIENCE = 16  # by how many the faulty images of a class may outnumber the good ones


class Report(NamedTuple):
    """What `synthesise` did."""

    generated: int  # usable images made now
    reused: int  # usable images that were in the folder
    faulty: int  # images left out: every attempt was black or blank
    rows: int  # synthetic rows, all clients together
    repeats: int  # of these, rows that repeat an image the same client already has
    folder: Path  # opens with datasets.load_dataset(str(folder))
    before: Counts  # real rows, int64 [clients, classes]
    after: Counts  # all rows, int64 [clients, classes]


def synthesise(
    federation: Federation,
    prior: Prior,
    policy: Balance,
    *,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Federation, Report]:
    """The federation with the synthetic rows that `policy` asks for (Gen-FedSD, arXiv:2405.07925, section 4).

    Every client gets exactly the allocated number of each class. From a shared pool it draws without
    replacement; where the pool is smaller than its need, each image comes as often as another, give or take
    one. Real rows stay as they are; synthetic ones follow them, flagged, with ids of their own. `progress`
    is called with (usable images there, usable images needed).

    Raises UserError when the prior makes hardly anything but faulty images for a class, UsageError for a
    policy that contradicts itself.
    """
    real = federation.counts(synthetic=False)
    needed = plan(policy, real)
    height, width = federation.table["image"].shape[2:]
    folder = ImageFolder(
        prior=prior,
        classes=federation.classes,
        templates=prompts.templates(policy.templates),
        size=(height, width),
        seed=seed,
        attempts=policy.attempts,
    )
    streams = _streams(policy, needed)
    generated = folder.fill(streams, progress or (lambda done, total: None))
    extra = table.make(
        torch.cat([torch.zeros((0, 3, height, width), dtype=torch.uint8), *(s.images() for s in streams)]),
        torch.tensor([s.label for s in streams for _ in range(s.need)], dtype=torch.int64),
        synthetic=True,
        first_id=int(federation.table["id"].max()) + 1,
    )
    balanced = federation.with_rows(extra, _rows(streams, needed.allocation, seed))
    report = Report(
        generated=generated,
        reused=needed.images - generated,
        faulty=sum(s.faulty for s in streams),
        rows=needed.rows,
        repeats=needed.repeats,
        folder=folder.path,
        before=real,
        after=balanced.counts(),
    )
    return balanced, report


def server_images(
    prior: Prior,
    classes: Sequence[str],
    size: tuple[int, int],
    per_class: int,
    policy: Balance,
    *,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> table.Table:
    """`per_class` images of each class for the server, as a table: the first ones of the pools that clients would
    share under `policy`, so that nothing is made twice.

    Raises UserError when the prior makes hardly anything but faulty images for a class.
    """
    folder = ImageFolder(
        prior=prior,
        classes=tuple(classes),
        templates=prompts.templates(policy.templates),
        size=size,
        seed=seed,
        attempts=policy.attempts,
    )
    streams = [Stream(label, SHARED, per_class) for label in range(len(classes))]
    folder.fill(streams, progress or (lambda done, total: None))
    label = torch.arange(len(classes)).repeat_interleave(per_class)
    return table.make(torch.cat([s.images() for s in streams]), label, synthetic=True)


class Block(NamedTuple):
    """The images of one file."""

    images: Tensor  # uint8 [n, 3, H, W], n <= 256
    ok: Tensor  # bool [n]; an image that is not ok is never used


@dataclass
class Stream:
    """The numbered images of one class, for all clients or for one."""

    label: int
    client: int  # or SHARED
    need: int  # usable images wanted
    blocks: dict[int, Block] = field(default_factory=dict)  # those read or made so far

    @property
    def good(self) -> int:
        return sum(int(b.ok.sum()) for b in self.blocks.values())

    @property
    def faulty(self) -> int:
        return sum(int((~b.ok).sum()) for b in self.blocks.values())

    def images(self) -> Tensor:
        """The first `need` usable images, uint8 [need, 3, H, W]."""
        return torch.cat([b.images[b.ok] for _, b in sorted(self.blocks.items())])[: self.need]


class Piece(NamedTuple):
    """Images that a block still lacks: `size` of them from number `start` within it."""

    stream: Stream
    block: int
    start: int
    size: int


@dataclass(frozen=True, kw_only=True)
class ImageFolder:
    """All images of one prior at one size for one list of classes and templates and one seed."""

    prior: Prior
    classes: tuple[str, ...]
    templates: tuple[str, ...]
    size: tuple[int, int]
    seed: int
    attempts: int

    @property
    def key(self) -> str:
        return store.digest(
            FORMAT,
            self.prior.revision,
            *(
                json.dumps(value, sort_keys=True)
                for value in (self.prior.settings, self.size, self.classes, self.templates)
            ),
            str(self.seed),
            str(self.attempts),
        )

    @property
    def path(self) -> Path:
        return store.cache_folder() / "synthetic" / self.key

    def fill(self, streams: Sequence[Stream], progress: Callable[[int, int], None]) -> int:
        """Reads what is there and makes what is missing until every stream has what it needs.

        -> usable images made. They are written after every call of the prior. Raises UserError as
        `synthesise` does.
        """
        total, generated = sum(s.need for s in streams), 0
        while True:
            missing = [piece for stream in streams for piece in self.missing(stream)]
            done = total - sum(piece.size for piece in missing)
            progress(done, total)
            if not missing:
                return generated
            for chunk in _chunks(missing):
                self.refuse_hopeless(chunk)
                usable = self.make(chunk)
                generated, done = generated + usable, done + usable
                progress(done, total)

    def missing(self, stream: Stream) -> Iterator[Piece]:
        """What would give the stream its images if none of the new ones were faulty."""
        lacking, block = stream.need, 0
        while lacking > 0:
            if block not in stream.blocks:
                path = self.file(stream, block)
                stream.blocks[block], _ = store.read_or_rebuild(path, self.load, self.empty)
            here = stream.blocks[block]
            lacking -= int(here.ok.sum())
            size = min(BLOCK - len(here.ok), lacking)
            if size > 0:
                yield Piece(stream, block, len(here.ok), size)
                lacking -= size
            block += 1

    def make(self, chunk: Sequence[Piece]) -> int:
        """Generates the pieces in one go and writes their files; -> how many images are usable."""
        items = [self.item(p.stream, p.block * BLOCK + p.start + i) for p in chunk for i in range(p.size)]
        made = faults.generate(
            self.prior,
            [item.prompt for item in items],
            lambda i, attempt: seeds.number(self.seed, "synthetic", *items[i].key, attempt),
            self.size,
            self.attempts,
        )
        ok = torch.tensor(made.ok, dtype=torch.bool)
        rows = [self.row(*each) for each in zip(items, *made, strict=True)]
        first = 0
        for p in chunk:
            part = slice(first, first + p.size)
            self.append(p, rows[part], Block(made.images[part], ok[part]))
            first += p.size
        return int(ok.sum())

    def item(self, stream: Stream, index: int) -> "Item":
        key = (stream.label, stream.client + 1, index)
        template = self.templates[prompts.draw(self.templates, self.seed, *key)]
        return Item(key, template, prompts.prompt(self.classes[stream.label], template))

    def row(self, item: "Item", image: Tensor, seed: int, attempts: int, ok: bool) -> dict[str, Any]:
        """The row of an image in its file: the columns of `_schema`."""
        label, client, index = item.key
        png = _png(image)
        return {
            "image": {"bytes": png, "path": f"{label:04}-{index:06}.png"},
            "label": label,
            "class": self.classes[label],
            "prompt": item.prompt,
            "template": item.template,
            "index": index,
            "client": client - 1,
            "seed": seed,
            "model": self.prior.name,
            "revision": self.prior.revision,
            **{name: self.prior.settings.get(name) for name in ("scheduler", "steps", "guidance")},
            "attempts": attempts,
            "ok": ok,
            "sha256": hashlib.sha256(png).hexdigest(),
        }

    def append(self, piece: Piece, rows: list[dict[str, Any]], new: Block) -> None:
        """Adds images to a block, and to its file unless they are there already.

        Another run may fill the same folder meanwhile, so only the file says what it holds. Where that is less
        than this block began with, it stays as it is: a file has no gaps, and a later run makes what it lacks.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        stream, old = piece.stream, piece.stream.blocks.get(piece.block, self.empty())
        path = self.file(stream, piece.block)
        kept, _ = store.read_or_rebuild(path, lambda file: _read(file).to_pylist(), list)
        if piece.start <= len(kept) < piece.start + piece.size:
            content = pa.Table.from_pylist(kept[: piece.start] + rows, _schema(self.classes))
            marks = {**content.schema.metadata, b"fedprior": _digest(path, content)}
            with store.atomic(path) as temporary:
                pq.write_table(content.replace_schema_metadata(marks), temporary)
        stream.blocks[piece.block] = Block(torch.cat([old.images, new.images]), torch.cat([old.ok, new.ok]))

    def file(self, stream: Stream, block: int) -> Path:
        whose = "shared" if stream.client == SHARED else f"client-{stream.client:05}"
        return self.path / f"class-{stream.label:04}_{whose}_block-{block:05}.parquet"

    def load(self, path: Path) -> Block:
        """A block from its file. Raises ValueError or OSError when the file is damaged."""
        rows = _read(path).to_pylist()
        images = torch.from_numpy(np.stack([_pixels(row["image"]["bytes"]) for row in rows]))
        return Block(images.permute(0, 3, 1, 2).contiguous(), torch.tensor([row["ok"] for row in rows]))

    def empty(self) -> Block:
        return Block(torch.zeros((0, 3, *self.size), dtype=torch.uint8), torch.zeros(0, dtype=torch.bool))

    def refuse_hopeless(self, chunk: Sequence[Piece]) -> None:
        """Raises UserError when a stream about to be extended has almost nothing but faulty images."""
        for stream in (piece.stream for piece in chunk):
            if stream.faulty > stream.good + PATIENCE:
                example = self.item(stream, 0).prompt
                raise UserError(
                    f"{self.prior.name} made {stream.faulty} blank images of {stream.faulty + stream.good} "
                    f"for prompts such as '{example}'; use prior.dtype=fp32, another prior or other "
                    "balance.templates"
                )


class Item(NamedTuple):
    """One image to make."""

    key: tuple[int, int, int]  # class, client + 1 (0: shared), index: what its template and seeds derive from
    template: str
    prompt: str


def _streams(policy: Balance, needed: Plan) -> list[Stream]:
    """One stream a class, or one a class and client, with what it needs; none that needs nothing."""
    if policy.pool == "shared":
        wanted = [(label, SHARED, n) for label, n in enumerate(needed.pool_sizes.tolist())]
    else:
        wanted = [
            (label, client, n)
            for label, column in enumerate(needed.allocation.T.tolist())
            for client, n in enumerate(column)
        ]
    return [Stream(label, client, n) for label, client, n in wanted if n]


def _rows(streams: Sequence[Stream], allocation: Counts, seed: int) -> list[Tensor]:
    """Each client's row numbers among the streams' images laid end to end: its own ones, or drawn."""
    rows: list[list[Tensor]] = [[torch.zeros(0, dtype=torch.int64)] for _ in allocation]
    first = 0
    for stream in streams:
        for client in range(len(allocation)) if stream.client == SHARED else [stream.client]:
            count = int(allocation[client, stream.label])
            if stream.client == SHARED:
                which = _draw(count, stream.need, seed, client, stream.label)
            else:
                which = np.arange(count)
            rows[client].append(torch.from_numpy(which) + first)
        first += stream.need
    return [torch.cat(parts) for parts in rows]


def _draw(count: int, pool: int, seed: int, client: int, label: int) -> NDArray[np.int64]:
    """`count` numbers below `pool`, int64 [count]: whole permutations in a row, the last one cut."""
    rng = seeds.stream(seed, "draw", client, label)
    rounds = [rng.permutation(pool) for _ in range(-(-count // pool))]
    return np.concatenate([np.zeros(0, np.int64), *rounds])[:count]


def _chunks(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces in order, cut so that every call of the prior but the last is full."""
    chunk: list[Piece] = []
    room = CALL
    for stream, block, start, size in pieces:
        while size:
            now = min(size, room)
            chunk.append(Piece(stream, block, start, now))
            start, size, room = start + now, size - now, room - now
            if not room:
                yield chunk
                chunk, room = [], CALL
    if chunk:
        yield chunk


def _schema(classes: Sequence[str]) -> Any:
    """The Arrow schema of a file, with the features that `datasets` reads: PIL images, named classes."""
    import pyarrow as pa

    plain = {
        "class": "string",
        "prompt": "string",
        "template": "string",
        "index": "int64",
        "client": "int64",
        "seed": "int64",
        "model": "string",
        "revision": "string",
        "scheduler": "string",
        "steps": "int64",
        "guidance": "float64",
        "attempts": "int64",
        "ok": "bool",
        "sha256": "string",
    }
    features: dict[str, Any] = {
        "image": {"_type": "Image"},
        "label": {"names": list(classes), "_type": "ClassLabel"},
        **{name: {"dtype": kind, "_type": "Value"} for name, kind in plain.items()},
    }
    kinds = {"bool": pa.bool_(), "float64": pa.float64(), "int64": pa.int64(), "string": pa.string()}
    columns = [
        ("image", pa.struct({"bytes": pa.binary(), "path": pa.string()})),
        ("label", pa.int64()),
        *((name, kinds[kind]) for name, kind in plain.items()),
    ]
    return pa.schema(columns, metadata={"huggingface": json.dumps({"info": {"features": features}})})


def _read(path: Path) -> Any:
    """The Arrow table in a file of ours. Raises ValueError or OSError when it is not as it was written."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        content = pq.ParquetFile(path).read()
    except pa.ArrowException as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if (content.schema.metadata or {}).get(b"fedprior") != _digest(path, content):
        raise ValueError(f"{path} is damaged")
    return content


def _digest(path: Path, content: Any) -> bytes:
    """Over all columns and the place of the file, so that a renamed or copied file is found out too."""
    rows = json.dumps(content.to_pylist(), default=lambda png: hashlib.sha256(png).hexdigest())
    return store.digest(path.parent.name, path.name, rows).encode()


def _png(image: Tensor) -> bytes:
    """uint8 [3, H, W] -> the bytes of a PNG file."""
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()).save(out, format="PNG")
    return out.getvalue()


def _pixels(png: bytes) -> NDArray[np.uint8]:
    """The bytes of a PNG file -> uint8 [H, W, 3]."""
    from PIL import Image

    with Image.open(io.BytesIO(png)) as image:
        return np.asarray(image.convert("RGB"))
