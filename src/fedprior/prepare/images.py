"""A folder of synthetic images that can be stopped, split over machines, merged and checked.

The folder holds parquet files of up to 256 images that `datasets.load_dataset` opens. Image number `index` of
a class, client and domain depends on nothing but (prior, size, wording, seed, class, client, domain, index), so a
folder can be left half filled, can grow, can be filled by several processes, and can lose a file: what is missing is
made again, what is there stays. (Where a prior's last bits depend on which images share a batch, an image made again
may differ by a grey level.)
"""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedprior import seeds, store
from fedprior.errors import UserError
from fedprior.prepare import filters, shards
from fedprior.prepare.filters import Filter
from fedprior.priors import faults, prompts
from fedprior.priors.base import Prior
from fedprior.traffic import MB

FORMAT = "fedprior synthetic images 2"  # enters every key; another number leaves older folders alone
BLOCK = 256  # images of a file
CALL = 64  # images asked of the prior at a time; an interruption loses two calls at most
SHARED = -1  # the client of images that all clients may draw
NO_DOMAIN = -1
PATIENCE = 16  # by how many the faulty images of a class may outnumber the good ones
STRICT = 20  # images that a filter may remove for one that it keeps
BYTES_PER_PIXEL = 2.5  # of small photographs as PNG, three channels
STALE = 3600.0  # seconds after which a temporary file is nobody's

Update = Callable[[int, int], None]  # (usable images there, usable images needed)


@dataclass(frozen=True, kw_only=True)
class Wording:
    """How a class, and a domain where prompts name one, become words."""

    classes: tuple[str, ...]  # as the data set names them
    templates: tuple[str, ...]
    words: tuple[str, ...] = ()  # of each class; empty: the names as they are, without repaired articles
    domains: tuple[str, ...] = ()  # the phrase of each domain; empty: prompts name no domain

    def prompt(self, label: int, template: str, domain: int = NO_DOMAIN) -> str:
        phrase = self.domains[domain] if domain != NO_DOMAIN and self.domains else None
        word = (self.words or self.classes)[label]
        return prompts.prompt(word, template, repaired=bool(self.words), domain=phrase)

    def prompts(self) -> list[str]:
        """All prompts there are."""
        domains = range(len(self.domains)) if self.domains else [NO_DOMAIN]
        labels = range(len(self.classes))
        return [self.prompt(y, template, d) for y in labels for template in self.templates for d in domains]

    @property
    def key(self) -> list[Any]:
        """What enters the key of a folder; what is as it always was adds nothing."""
        extra = [["words", *self.words]] if self.words else []
        extra += [["domains", *self.domains]] if self.domains else []
        return [self.classes, self.templates, *extra]


class Part(NamedTuple):
    """One of several equal shares of the files, for machines that fill a folder together."""

    number: int  # from 1
    of: int


class Block(NamedTuple):
    """The images of one file."""

    images: Tensor  # uint8 [n, 3, H, W], n <= 256
    ok: Tensor  # bool [n]; the others are blank
    kept: Tensor  # bool [n]; ok, and not removed by a filter: those that may be used


@dataclass
class Stream:
    """The numbered images of one class (and domain), for all clients or for one."""

    label: int
    client: int  # or SHARED
    need: int  # usable images wanted
    domain: int = NO_DOMAIN
    blocks: dict[int, Block] = field(default_factory=dict)  # those read or made so far
    seen: set[bytes] = field(default_factory=set)  # digests of the images so far, where repeats do not count

    @property
    def good(self) -> int:
        return sum(int(b.kept.sum()) for b in self.blocks.values())

    @property
    def removed(self) -> int:
        """By filters."""
        return sum(int((b.ok & ~b.kept).sum()) for b in self.blocks.values())

    @property
    def faulty(self) -> int:
        return sum(int((~b.ok).sum()) for b in self.blocks.values())

    def images(self) -> Tensor:
        """The first `need` usable images, uint8 [need, 3, H, W]."""
        return torch.cat([b.images[b.kept] for _, b in sorted(self.blocks.items())])[: self.need]


class Piece(NamedTuple):
    """Images that a block still lacks: `size` of them from number `start` within it."""

    stream: Stream
    block: int
    start: int
    size: int


class Item(NamedTuple):
    """One image to make."""

    key: tuple[int, ...]  # class, client + 1 (0: shared), index, domain + 1 if any: what template and seeds derive from
    template: str
    prompt: str


class Merged(NamedTuple):
    """What `ImageFolder.merge` did with the files of another folder."""

    taken: int  # they held more than ours
    passed: int  # ours held as much
    damaged: int  # not as they were written


@dataclass(frozen=True, kw_only=True)
class ImageFolder:
    """All images of one prior at one size in one wording with one seed."""

    prior: Prior
    wording: Wording
    size: tuple[int, int]
    seed: int
    attempts: int
    filters: tuple[Filter, ...] = ()  # of images, which stay in the folder even where one removes them
    distinct: bool = False  # byte-equal images of a stream count once

    @property
    def key(self) -> str:
        return store.digest(
            FORMAT,
            self.prior.revision,
            *(json.dumps(value, sort_keys=True) for value in (self.prior.settings, self.size, *self.wording.key)),
            str(self.seed),
            str(self.attempts),
        )

    @property
    def path(self) -> Path:
        return store.cache_folder() / "synthetic" / self.key

    def fill(self, streams: Sequence[Stream], progress: Update, part: Part | None = None) -> int:
        """Reads what is there and makes what is missing until every stream has what it needs.

        -> usable images made. They are written after every call of the prior, while it makes the next ones. With
        `part` only that share of the files is seen to, once: what faulty images leave open is for a call without it.

        Raises UserError when the prior makes hardly anything but faulty images for a class, or the disk has no room.
        """
        store.sweep(self.path, older=STALE)
        total, generated, room = self.wanted(streams, part), 0, False
        with Writer() as writer:
            while True:
                missing = list(self.missing(streams, part))
                lacking = sum(piece.size for piece in missing)
                done = total - lacking
                progress(done, total)
                if not missing:
                    return generated
                if not room:
                    self.refuse_full_disk(lacking)
                    room = True
                for chunk in _chunks(missing):
                    self.refuse_hopeless(chunk)
                    usable = self.make(chunk, writer)
                    generated, done = generated + usable, done + usable
                    progress(done, total)
                if part is not None:
                    return generated

    def wanted(self, streams: Sequence[Stream], part: Part | None) -> int:
        if part is None:
            return sum(stream.need for stream in streams)
        return sum(min(BLOCK, stream.need - block * BLOCK) for stream, block in _own(streams, part))

    def missing(self, streams: Sequence[Stream], part: Part | None) -> Iterator[Piece]:
        """What would give the streams their images if none of the new ones were faulty."""
        if part is None:
            for stream in streams:
                yield from self.lacking(stream)
            return
        for stream, block in _own(streams, part):
            planned, there = min(BLOCK, stream.need - block * BLOCK), len(self.block(stream, block).ok)
            if there < planned:
                yield Piece(stream, block, there, planned - there)

    def lacking(self, stream: Stream) -> Iterator[Piece]:
        lacking, block = stream.need, 0
        while lacking > 0:
            here = self.block(stream, block)
            lacking -= int(here.kept.sum())
            size = min(BLOCK - len(here.ok), lacking)
            if size > 0:
                yield Piece(stream, block, len(here.ok), size)
                lacking -= size
            block += 1

    def block(self, stream: Stream, number: int) -> Block:
        """A block as far as it is there."""
        if number not in stream.blocks:
            path = self.file(stream, number)
            images, ok = store.read_or_rebuild(path, self.load, self.empty)[0]
            words = [self.item(stream, number * BLOCK + i).prompt for i in range(len(ok))] if self.filters else []
            stream.blocks[number] = Block(images, ok, self.filtered(stream, images, ok, words))
        return stream.blocks[number]

    def make(self, chunk: Sequence[Piece], writer: "Writer") -> int:
        """Generates the pieces in one go and hands them to the writer; -> how many images are usable."""
        items = [self.item(p.stream, p.block * BLOCK + p.start + i) for p in chunk for i in range(p.size)]
        made = faults.generate(
            self.prior,
            [item.prompt for item in items],
            lambda i, attempt: seeds.number(self.seed, "synthetic", *items[i].key, attempt),
            self.size,
            self.attempts,
        )
        ok = torch.tensor(made.ok, dtype=torch.bool)
        first = usable = 0
        for p in chunk:
            part = slice(first, first + p.size)
            words = [item.prompt for item in items[part]]
            new = made.images[part], ok[part], self.filtered(p.stream, made.images[part], ok[part], words)
            p.stream.blocks[p.block] = Block(*map(torch.cat, zip(self.block(p.stream, p.block), new, strict=True)))
            usable += int(new[2].sum())
            first += p.size

        def write() -> None:
            rows = [self.row(*each) for each in zip(items, *made, strict=True)]
            first = 0
            for p in chunk:
                self.append(p, rows[first : first + p.size])
                first += p.size

        writer.submit(write)
        return usable

    def filtered(self, stream: Stream, images: Tensor, ok: Tensor, words: Sequence[str]) -> Tensor:
        """Those of a stream's next images that are ok and that the filters keep, bool [n]."""
        kept = ok.clone()
        if self.filters and ok.any():
            said = [prompt for prompt, good in zip(words, ok.tolist(), strict=True) if good]
            kept[ok] = self.asked(images[ok], stream.label, said)
        if self.distinct:
            for i, image in enumerate(images):
                content = hashlib.sha256(image.numpy().tobytes()).digest()
                kept[i] = bool(kept[i]) and content not in stream.seen
                stream.seen.add(content)
        return kept

    def asked(self, images: Tensor, label: int, words: Sequence[str]) -> Tensor:
        """What the filters keep, bool [n]; their answer is stored by content."""
        key = store.digest(filters.digest(self.filters), str(label), store.raw_bytes(images), *words)
        path = store.cache_folder() / "filtered" / f"{key}.safetensors"

        def read(path: Path) -> Tensor:
            keep: Tensor = store.read_tree(path)[0]["keep"]
            return keep

        labels = torch.full((len(images),), label)
        keep, built = store.read_or_rebuild(
            path, read, lambda: filters.apply(self.filters, images, labels, words, label + 1).keep
        )
        if built:
            with _writing("what filters keep"):
                store.write_tree(path, {"keep": keep})
        return keep

    def item(self, stream: Stream, index: int) -> Item:
        key: tuple[int, ...] = (stream.label, stream.client + 1, index)
        key = key if stream.domain == NO_DOMAIN else (*key, stream.domain + 1)
        template = self.wording.templates[prompts.draw(self.wording.templates, self.seed, *key)]
        return Item(key, template, self.wording.prompt(stream.label, template, stream.domain))

    def row(self, item: Item, image: Tensor, seed: int, attempts: int, ok: bool) -> dict[str, Any]:
        """The row of an image in its file: the columns of `shards.schema`."""
        label, client, index = item.key[:3]
        png = shards.png(image)
        return {
            "image": {"bytes": png, "path": f"{label:04}-{index:06}.png"},
            "label": label,
            "class": self.wording.classes[label],
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
            **({"domain": self.wording.domains[item.key[3] - 1]} if len(item.key) > 3 else {}),
        }

    def append(self, piece: Piece, rows: list[dict[str, Any]]) -> None:
        """Adds images to a block's file unless they are there already.

        Another run may fill the same folder meanwhile, so only the file says what it holds. Where that is less
        than this block began with, it stays as it is: a file has no gaps, and a later run makes what it lacks.
        """
        path = self.file(piece.stream, piece.block)
        kept, _ = store.read_or_rebuild(path, lambda file: shards.read(file).to_pylist(), list)
        if piece.start <= len(kept) < piece.start + piece.size:
            self.write(path, kept[: piece.start] + rows)

    def write(self, path: Path, rows: list[dict[str, Any]]) -> None:
        content = shards.packed(path, rows, shards.schema(self.wording.classes, bool(self.wording.domains)))
        with _writing("images"), store.atomic(path) as temporary:
            temporary.write_bytes(content)

    def merge(self, other: Path) -> Merged:
        """Takes over files that another process filled elsewhere: a cache folder, or the folder of these images.

        Of two files for the same images the one that holds more counts; ours where both hold as many. Raises UserError
        where there are no images of these settings, or ours cannot be written.
        """
        candidates = (other / "synthetic" / self.key, other / self.key, other)
        folder = next((f for f in candidates if f.name == self.key and f.is_dir()), None)
        if folder is None:
            raise UserError(
                f"{other} holds no images of these settings (a folder synthetic/{self.key[:12]}...); give the cache "
                "folder of a machine that ran the same command"
            )
        taken = passed = damaged = 0
        for file in sorted(folder.glob("class-*.parquet")):
            try:
                theirs = shards.read(file)
            except (ValueError, OSError):
                damaged += 1
                continue
            own = self.path / file.name
            ours, _ = store.read_or_rebuild(own, lambda path: len(shards.read(path)), lambda: 0)
            if len(theirs) > ours:
                with _writing("images"), store.atomic(own) as temporary:
                    shutil.copyfile(file, temporary)
                taken += 1
            else:
                passed += 1
        return Merged(taken, passed, damaged)

    def file(self, stream: Stream, block: int) -> Path:
        whose = "shared" if stream.client == SHARED else f"client-{stream.client:05}"
        where = "" if stream.domain == NO_DOMAIN else f"domain-{stream.domain:03}_"
        return self.path / f"class-{stream.label:04}_{where}{whose}_block-{block:05}.parquet"

    def load(self, path: Path) -> tuple[Tensor, Tensor]:
        """A file's images uint8 [n, 3, H, W], and which are ok. Raises ValueError or OSError when it is damaged."""
        rows = shards.read(path).to_pylist()
        images = torch.from_numpy(np.stack([shards.pixels(row["image"]["bytes"]) for row in rows]))
        return images.permute(0, 3, 1, 2).contiguous(), torch.tensor([row["ok"] for row in rows])

    def empty(self) -> tuple[Tensor, Tensor]:
        return torch.zeros((0, 3, *self.size), dtype=torch.uint8), torch.zeros(0, dtype=torch.bool)

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
            if stream.removed > STRICT * (stream.good + PATIENCE):
                names = ", ".join(str(one.settings["filter"]) for one in self.filters) or "distinct"
                raise UserError(
                    f"the filter ({names}) removed {stream.removed} of {stream.removed + stream.good} images of class "
                    f"'{self.wording.classes[stream.label]}'; lower its threshold or name a better prior"
                )

    def refuse_full_disk(self, images: int) -> None:
        """Raises UserError when the disk has no room for so many more."""
        needed = megabytes(images, self.size)
        where = next(folder for folder in (self.path, *self.path.parents) if folder.exists())
        if (free := shutil.disk_usage(where).free / MB) < needed:
            raise UserError(
                f"{images} images take about {needed:.0f} MB, and the disk of {where} has {free:.0f} MB; free some "
                "space or set FEDPRIOR_CACHE to a folder with more"
            )


class Writer:
    """Encodes and writes images in a thread, one call of the prior behind it. What was handed over is written even when
    the block is left by an exception."""

    def __enter__(self) -> "Writer":
        self.thread, self.pending = ThreadPoolExecutor(1), list[Future[None]]()
        return self

    def submit(self, write: Callable[[], None]) -> None:
        self.wait()
        self.pending.append(self.thread.submit(write))

    def wait(self) -> None:
        """Until all is written. Raises what the writing raised."""
        while self.pending:
            self.pending.pop().result()

    def __exit__(self, kind: object, *rest: object) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            self.thread.shutdown()


class Rate:
    """Images a second since it began, of those that were made now."""

    def __init__(self) -> None:
        self.began, self.first = time.monotonic(), -1

    def note(self, done: int) -> str:
        if self.first < 0:
            self.first, self.began = done, time.monotonic()
        seconds = time.monotonic() - self.began
        return f"{(done - self.first) / seconds:.1f} images/s" if done > self.first and seconds > 0 else ""


def megabytes(images: int, size: tuple[int, int]) -> float:
    """About what images (H, W) take on disk, in MB (1e6 bytes)."""
    return images * size[0] * size[1] * BYTES_PER_PIXEL / MB


@contextmanager
def _writing(what: str) -> Iterator[None]:
    """A cache that cannot be written becomes one clear line."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {what} ({error}); what is there stays. Free some space or set FEDPRIOR_CACHE to a folder "
            "with more, and go on with the same command"
        ) from None


def _own(streams: Sequence[Stream], part: Part) -> Iterator[tuple[Stream, int]]:
    """A part's files, dealt out in turn."""
    every = [(stream, block) for stream in streams for block in range(-(-stream.need // BLOCK))]
    yield from every[part.number - 1 :: part.of]


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
