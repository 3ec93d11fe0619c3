"""Descriptors of a federation's images, computed once and kept.

A descriptor is found by what it is of: the image's pixels, its prompts and the axes it was projected on. So a subset,
a shuffle, another partition or another run finds those that are there, and what was interrupted goes on. They lie in
files that are mapped into memory, not read, while clients train.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedprior import seeds, store
from fedprior.data.table import Shard
from fedprior.errors import UserError
from fedprior.priors import descriptor
from fedprior.priors.base import Prior
from fedprior.priors.descriptor import Basis, Description
from fedprior.priors.encoder import ImageEncoder
from fedprior.priors.encodings import LOT

FORMAT = "fedprior descriptors 2"  # enters every key; another number leaves older folders alone
BLOCK = 256  # images of a file at most
FLUSH_SECONDS = 60  # a file is written after this time too: what an interruption loses at most
PAIRS = 128  # of image and prompt that are described at a time
BATCH = 64  # rows that share axes with pca=per_batch, as in the released code
TOKENS = 10_240  # of each level that axes are fitted on, at least
LEAST_IMAGES = 16  # that axes are fitted on

PromptsOf = Callable[[bytes, int], Sequence[str]]  # (digest of the pixels, label) -> prompts, as many for every image


def _stored(path: Path, copy: bool = True) -> dict[str, Tensor]:
    """A file's tensors; {} where it is missing, or was damaged and is gone now."""
    found: tuple[dict[str, Tensor], bool] = store.read_or_rebuild(path, lambda p: store.read_tree(p, copy)[0], dict)
    return found[0]


def _keep(path: Path, content: dict[str, Tensor]) -> None:
    try:
        store.write_tree(path, content)
    except OSError as error:
        raise UserError(f"cannot write the cache ({error}); set FEDPRIOR_CACHE to a folder with space") from None


class Item(NamedTuple):
    """One image whose descriptors are wanted."""

    key: bytes  # under which they are kept
    group: str  # which axes
    image: bytes  # digest of the pixels
    row: int  # of the table
    prompts: Sequence[str]


class LevelStore:
    """The descriptors of one level that are in a folder: float16 [P, m] for each key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[Tensor] = []  # [n, P, m], mapped
        self.index: dict[bytes, tuple[int, int]] = {}  # key -> (file, row)
        for path in sorted(folder.glob("*.safetensors"), key=lambda p: (p.stat().st_mtime_ns, p.name)):
            if content := _stored(path, copy=False):
                self.add([key.tobytes() for key in content["keys"].numpy()], content["values"])

    def add(self, keys: Sequence[bytes], values: Tensor) -> None:
        """Of a key that two processes described, the older file counts, now and later."""
        for row, key in enumerate(keys):
            self.index.setdefault(key, (len(self.files), row))
        self.files.append(values)

    def write(self, keys: Sequence[bytes], values: Tensor) -> None:
        """Keeps float [n, P, m]. A file is named by its keys, so who writes the same beside us does no harm.

        Raises UserError for values that float16 does not hold, and where the cache cannot be written.
        """
        path = self.folder / f"{store.digest(*keys)[:32]}.safetensors"
        coded = torch.from_numpy(np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), -1).copy())
        half = values.to(torch.float16)
        if not half.isfinite().all():
            raise UserError("descriptors are too large for float16; use guide.pool=rms or fewer guide.components")
        _keep(path, {"keys": coded, "values": half})
        self.add(keys, store.read_tree(path, copy=False)[0]["values"])

    def gather(self, keys: Sequence[bytes]) -> Tensor:
        """float16 [n, P, m]"""
        where = torch.tensor([self.index[key] for key in keys])
        first = self.files[int(where[0, 0])]
        out = first.new_empty((len(keys), *first.shape[1:]))
        for number in where[:, 0].unique().tolist():
            mine = where[:, 0] == number
            out[mine] = self.files[number][where[mine, 1]]
        return out


@dataclass(kw_only=True)
class Describer:
    """Descriptors by one prior in one way. `encoder` is there with `condition="frozen_encoder"` only.

    `made_prompts` ask the prior for the images of a global basis, which are then read under `fit_prompts`; the first of
    these names no class.
    """

    prior: Prior
    how: Description
    prompts_of: PromptsOf
    fit_prompts: Sequence[str]
    made_prompts: Sequence[str]
    encoder: ImageEncoder | None = None
    _stores: dict[int, LevelStore] = field(default_factory=dict)
    _bases: dict[tuple[str, int], Basis] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[int, int]:
        """Level -> length of its part of a descriptor."""
        return self.how.sizes(self.prior.level_widths)

    @property
    def size(self) -> int:
        """Height and width to which images are resized."""
        return self.how.size or min(self.prior.size, descriptor.NATIVE)

    @property
    def settings(self) -> dict[str, object]:
        """All that changes a descriptor besides image, prompts, axes' rows and level."""
        plain = {f.name: getattr(self.how, f.name) for f in fields(Description)}
        for name in ("levels", "components", "refresh_rounds", "encoder"):
            del plain[name]  # levels have folders of their own, and a path says nothing of an encoder's content
        if self.encoder is None:
            del plain["condition"], plain["gamma"]  # dynamic ones are never kept
        return plain | {
            "size": self.size,
            "dtype": self.prior.settings["dtype"],
            "encoder": self.encoder.revision if self.encoder else "",
            "fit": [self.fit_prompts, self.made_prompts, self.prior.settings] if self.how.pca == "global" else [],
        }

    @property
    def folder(self) -> Path:
        key = store.digest(FORMAT, self.prior.revision, json.dumps(self.settings, sort_keys=True))
        return store.cache_folder() / "descriptors" / key

    def level_store(self, level: int) -> LevelStore:
        if level not in self._stores:
            self._stores[level] = LevelStore(self.folder / f"level-{level}-{self.sizes[level]}")
        return self._stores[level]

    def items(self, shards: Sequence[Shard]) -> list[list[Item]]:
        """What each shard's rows need."""
        digests: dict[int, bytes] = {}
        known: dict[int, Item] = {}  # of rows that several clients hold, where axes are the same for all
        return [self._items(shard, digests, known) for shard in shards]

    def _items(self, shard: Shard, digests: dict[int, bytes], known: dict[int, Item]) -> list[Item]:
        if self.how.pca == "global":
            new = [row for row in shard.rows.tolist() if row not in known]
            made = self._grouped(Shard(shard.table, torch.tensor(new, dtype=torch.int64)), digests)
            known |= dict(zip(new, made, strict=True))
            return [known[row] for row in shard.rows.tolist()]
        return self._grouped(shard, digests)

    def _grouped(self, shard: Shard, digests: dict[int, bytes]) -> list[Item]:
        out = []
        whole = max(1, len(shard))
        for rows in shard.rows.split({"global": whole, "per_client": whole, "per_batch": BATCH}[self.how.pca]):
            numbers = rows.tolist()
            for row in numbers:
                if row not in digests:
                    digests[row] = bytes.fromhex(store.digest(store.raw_bytes(shard.table["image"][row])))
            labels = shard.table["label"][rows].tolist()
            words = [self.prompts_of(digests[row], label) for row, label in zip(numbers, labels, strict=True)]
            group = "global"
            if self.how.pca != "global":  # such axes are fitted on these images under these prompts
                group = store.digest(*(digests[row] for row in numbers), *(w for own in words for w in own))
            for row, own in zip(numbers, words, strict=True):
                key = bytes.fromhex(store.digest(group, digests[row], *own))
                out.append(Item(key, group, digests[row], row, own))
        return out

    def missing(self, items: Sequence[Sequence[Item]]) -> list[Item]:
        """Those that no file holds for every level, each once."""
        stores = [self.level_store(level) for level in self.sizes]
        wanted = {item.key: item for own in items for item in own}
        return [item for item in wanted.values() if not all(item.key in s.index for s in stores)]

    def fill(
        self,
        items: Sequence[Sequence[Item]],
        missing: Sequence[Item],
        images: Tensor,
        progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        """Describes the missing ones of `items`, rows of images uint8 [N, 3, H, W]; `progress` gets how many are done.

        Raises UserError for features that overflow.
        """
        members: dict[str, list[Item]] = {}
        for item in (item for own in items for item in own):
            members.setdefault(item.group, []).append(item)
        done = 0
        for group, part in groupby(missing, key=lambda item: item.group):
            basis = self.basis(group, members[group], images)
            for block, values in self._blocks(list(part), images, basis):
                for level in self.sizes:
                    self.level_store(level).write([item.key for item in block], values[level])
                done += len(block)
                progress(done)

    def _blocks(
        self, items: list[Item], images: Tensor, basis: dict[int, Basis]
    ) -> Iterator[tuple[list[Item], dict[int, Tensor]]]:
        """Blocks of items with their descriptors by level."""
        block: list[Item] = []
        values: dict[int, list[Tensor]] = {level: [] for level in basis}
        began = time.monotonic()
        each = max(LOT, PAIRS // len(items[0].prompts) // LOT * LOT)
        for first in range(0, len(items), each):
            part = items[first : first + each]
            full = part + part[-1:] * (-len(part) % LOT)  # so that an image does not depend on its lot in a single bit
            for level, x in self.compute(images[[item.row for item in full]], full, basis).items():
                values[level].append(x[: len(part)].cpu())
            block += part
            last = first + each >= len(items)
            if last or len(block) + each > BLOCK or time.monotonic() - began > FLUSH_SECONDS:
                yield block, {level: torch.cat(x) for level, x in values.items()}
                block, values, began = [], {level: [] for level in basis}, time.monotonic()

    def compute(
        self, images: Tensor, items: Sequence[Item], basis: dict[int, Basis], condition: Tensor | None = None
    ) -> dict[int, Tensor]:
        """Descriptors {level: float32 [n, P, m]} of images uint8 [n, 3, H, W], by the prior now."""
        maps = self.maps(images, items, condition)
        return {level: descriptor.pooled(x, basis[level], self.how.pool) for level, x in maps.items()}

    def maps(
        self,
        images: Tensor,
        items: Sequence[Item],
        condition: Tensor | None = None,
        levels: Sequence[int] | None = None,
    ) -> dict[int, Tensor]:
        """Feature maps {level: float32 [n, P, C, h, w]} of images uint8 [n, 3, H, W], by default at all levels."""
        if self.encoder is not None:
            condition = self.directions(self.encoder(images))
        return self.prior.features(
            images,
            [item.prompts for item in items],
            timestep=self.how.timestep,
            levels=levels or tuple(self.sizes),
            seeds=[seeds.number(self.how.noise_seed, "image noise", int.from_bytes(item.image[:7])) for item in items],
            size=self.size,
            draws=self.how.draws,
            latent=self.how.latent,
            scaling=self.how.scaling,
            condition=condition,
        )

    def directions(self, features: Tensor) -> Tensor:
        """What features [n, D] add to a prompt: gamma W h / |W h| with a fixed Gaussian W, [n, width of the text]."""
        width = self.prior.encode(self.fit_prompts[:1]).shape[-1]
        g = torch.Generator().manual_seed(seeds.number(self.how.noise_seed, "condition", features.shape[1], width))
        mapped = features @ torch.randn(features.shape[1], width, generator=g).to(features)
        return self.how.gamma * torch.nn.functional.normalize(mapped, dim=-1)

    # axes
    def basis(self, group: str, members: Sequence[Item] = (), images: Tensor | None = None) -> dict[int, Basis]:
        """Level -> axes of a group. The global one is fitted on images that the prior makes, others on the group's
        rows."""
        lacking = []
        for level in self.sizes:
            path = self._basis_file(group, level)
            if (group, level) not in self._bases and (content := _stored(path)):
                self._bases[group, level] = Basis(**content)
            if (group, level) not in self._bases:
                lacking.append(level)
        if lacking:
            made = self._made() if group == "global" else self._chosen(members, images)
            for level, basis in self._fit(*made).items():
                if level in lacking:
                    _keep(self._basis_file(group, level), basis._asdict())
                    self._bases[group, level] = basis
        return {level: self._bases[group, level] for level in self.sizes}

    def has_axes(self) -> bool:
        """Whether the global axes of every level are there, and whole."""
        return all(bool(_stored(self._basis_file("global", level))) for level in self.sizes)

    def _basis_file(self, group: str, level: int) -> Path:
        return self.folder / f"axes-{level}-{self.sizes[level]}" / f"{group[:32]}.safetensors"

    def _made(self) -> tuple[Tensor, list[Item]]:
        """Images of the classes in turn, one of each at least, by the prior, each under all `fit_prompts`."""
        shape = (self.size, self.size)

        def image(i: int) -> Item:
            return Item(b"", "global", seeds.number(self.how.noise_seed, "axes", i).to_bytes(8), i, self.fit_prompts)

        count = self._images_needed(self.prior.generate([self.made_prompts[-1]], [0], shape), [image(0)])
        count = max(count, len(self.made_prompts))
        asked = [self.made_prompts[i % len(self.made_prompts)] for i in range(count)]
        numbers = [seeds.number(self.how.noise_seed, "axes image", i) for i in range(count)]
        return self.prior.generate(asked, numbers, shape), [image(i) for i in range(count)]

    def _chosen(self, members: Sequence[Item], images: Tensor | None) -> tuple[Tensor, list[Item]]:
        """Some of a group's rows, drawn by their number."""
        assert images is not None
        count = self._images_needed(images[[members[0].row]], members[:1])
        count = len(members) if self.how.pca == "per_batch" else count
        order = seeds.stream(self.how.noise_seed, "axes rows", len(members)).permutation(len(members))[:count]
        return images[[members[i].row for i in order]], [members[i] for i in order]

    def _images_needed(self, image: Tensor, item: Sequence[Item]) -> int:
        """Enough for the coarsest level, so that a level's axes do not depend on which others are wanted."""
        coarsest = min(self.prior.level_widths)
        maps = self.maps(image, item, levels=(coarsest,))[coarsest]
        return max(LEAST_IMAGES, -(-TOKENS // maps[0, :, 0].numel()))

    def _fit(self, images: Tensor, items: Sequence[Item]) -> dict[int, Basis]:
        each = max(1, PAIRS // len(items[0].prompts))
        starts = range(0, len(items), each)
        tokens: dict[int, list[Tensor]] = {level: [] for level in self.sizes}
        count = -(-TOKENS // (len(items) * len(items[0].prompts)))
        lots = {level: seeds.stream(self.how.noise_seed, "tokens", level) for level in self.sizes}
        for i in starts:
            for level, x in self.maps(images[i : i + each], items[i : i + each]).items():
                tokens[level].append(descriptor.tokens(x, count, lots[level]))
        axes = {level: descriptor.fit(torch.cat(x), self.sizes[level]) for level, x in tokens.items()}
        seen: dict[int, list[Tensor]] = {level: [] for level in self.sizes}
        for i in starts:
            for level, x in self.compute(images[i : i + each], items[i : i + each], axes).items():
                seen[level].append(x.cpu())
        return {level: descriptor.with_spread(axes[level], torch.cat(x)) for level, x in seen.items()}
