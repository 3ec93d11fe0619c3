"""Data sets decoded once to uint8 images: the embedded digits, and what `origins` finds.

A set has training rows and test rows. Its own test split is the test; a set with one split is divided by a
rule that draws nothing. Decoded sets are kept in the cache under a digest of what they were decoded from.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedprior import store
from fedprior.data import halves, table
from fedprior.data.halves import Half
from fedprior.data.origins import EMBEDDED, Origin, Rows, hub, local, roles
from fedprior.data.table import Table
from fedprior.errors import UsageError, UserError, unknown

TEST_EVERY = 5  # of a set without a test split, this many images of a class (and domain) give one test image
DECODER = "2"  # goes up when the same files would decode to other values

Size = tuple[int, int]  # width, height in pixels


@dataclass(frozen=True)
class Source:
    """A decoded data set. Ids are unique over both tables, which have a column `domain` where the data have one."""

    name: str
    train: Table  # images uint8 [n, 3, H, W]
    test: Table  # images of the same height and width
    classes: tuple[str, ...]  # readable names, by label
    domains: tuple[str, ...] = ()  # names as in the data, sorted, by domain; empty without a column `domain`
    divided: bool = False  # the set has no test split, so the test rows were taken from the training split

    def without_domains(self) -> "Source":
        plain = lambda part: {name: column for name, column in part.items() if name != "domain"}
        return replace(self, train=plain(self.train), test=plain(self.test), domains=())

    def only(self, half: Half) -> "Source":
        """With the training rows of that half; see `halves`. Test rows that were taken from the training split are
        halved too, since a prior may have seen those. Images must have the set's own size: resizing moves some into
        the other half. Raises UserError where no test row is left."""
        kept = lambda part: table.take(part, torch.nonzero(halves.mask(part["image"], half))[:, 0])
        out = replace(self, train=kept(self.train), test=kept(self.test) if self.divided else self.test)
        if not len(out.test["label"]):
            raise UserError(f"no test image of {self.name} is in its {half} half; add a file or folder named test")
        return out

    def resized(self, side: int) -> "Source":
        """With images of [side, side] pixels."""
        fitted = lambda part: {**part, "image": _resized(part["image"], (side, side))}
        return replace(self, train=fitted(self.train), test=fitted(self.test))


def load(
    name: str,
    *,
    path: str | Path | None = None,
    image: str | None = None,
    label: str | None = None,
    size: int | None = None,
    half: Literal["all"] | Half = "all",
) -> Source:
    """The data set `name`: "digits", a key of ALIASES or a hub id "owner/name".

    `path` is a local copy in its place: a folder with `<split>.parquet` files, one parquet file, a folder of
    class folders (with or without train and test above them), or what `save_to_disk` wrote; no network is
    used then. `image` and `label` name the columns where the features do not tell. Images are RGB; with
    `size` they are resized to [size, size], else all to the commonest size of the training split (the
    largest of equally common ones). With `half` only its rows are kept, by the images before they are resized.

    Where there is no split named test, valid, validation or val, every fifth image of each class (and domain,
    if there is a column `domain`) is a test image; one that comes twice is in one of the parts only. The decoded
    set is cached.

    Raises UsageError for an unknown name or column, a bad size, a half of the embedded digits and a path under
    their name, UserError for data that cannot be reached, read or decoded, and for a class without a name.
    """
    if size is not None and size < 1:
        raise UsageError(f"data.size must be at least 1, not {size}")
    if path is None and name == EMBEDDED:
        if half != "all":
            raise UsageError(f"data={EMBEDDED} holds a private half only; leave out data.half=")
        return _embedded(image, label, size)
    if half != "all" and size is not None:
        return load(name, path=path, image=image, label=label, half=half).resized(size)
    origin = hub(name) if path is None else local(Path(path).expanduser())
    if name == EMBEDDED:
        raise UsageError(f"data={EMBEDDED} ships with fedprior, data.path={path} is another set; name it with data=")
    train, test = roles(origin)
    content = [origin.digest(split) if split else "" for split in (train, test)]
    key = store.digest(DECODER, _pillow(), *content, image or "", label or "", str(size or ""))
    file = store.cache_folder() / "decoded" / f"{key}.safetensors"
    found, built = store.read_or_rebuild(
        file, lambda file: _read(file, name), lambda: _decode(name, origin, train, test, image, label, size)
    )
    if built:
        _write(file, found)
    found = replace(found, divided=test is None)
    return found if half == "all" else found.only(half)


def _embedded(image: str | None, label: str | None, size: int | None) -> Source:
    from fedprior.data import digits

    if image or label:
        raise UsageError(f"data={EMBEDDED} has no columns to name; leave out data.image= and data.label=")
    found = Source(EMBEDDED, digits.train(), digits.test(), digits.CLASSES)
    return found if size is None else found.resized(size)


def _decode(
    name: str, origin: Origin, train: str, test: str | None, image: str | None, label: str | None, size: int | None
) -> Source:
    rows = origin.read(train)
    image, label = _image_column(rows, image), _label_column(rows, image, label)
    labels, names = _labels(rows, label, None)
    shape = (size, size) if size is not None else _commonest_size(rows, image)
    classes = _readable(names, labels, rows, label)
    domains = _domains(rows)
    if test is None:
        known = sorted(set(domains or ()))
        whole = table.make(_pixels(rows, image, shape), labels, domain=_coded(domains, known))
        held_out = _every_fifth(labels, domains, _encoded(rows.columns[image]))
        if not held_out.any():
            raise UserError(f"{rows.where} has too few images for a test split; add a file or folder named test")
        kept, taken = (table.take(whole, torch.nonzero(mask)[:, 0]) for mask in (~held_out, held_out))
        return Source(name, kept, taken, classes, tuple(known))
    others = origin.read(test)
    for kind, column in (("image column", image), ("label column", label)):
        _known(others, kind, column)
    other_labels, _ = _labels(others, label, names)
    other_domains = _domains(others)
    known = sorted({*(domains or ()), *(other_domains or ())})
    return Source(
        name,
        table.make(_pixels(rows, image, shape), labels, domain=_coded(domains, known)),
        table.make(
            _pixels(others, image, shape), other_labels, domain=_coded(other_domains, known), first_id=len(labels)
        ),
        classes,
        tuple(known),
    )


def _known(rows: Rows, kind: str, column: str) -> str:
    if column not in rows.columns.column_names:
        raise unknown(f"{kind} of {rows.where}", column, rows.columns.column_names)
    return column


def _image_column(rows: Rows, wanted: str | None) -> str:
    import pyarrow as pa

    def holds_images(column: str) -> bool:
        kind = rows.columns.schema.field(column).type
        return (pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0) or _is_binary(kind)

    if wanted is None:
        return _only("image", [column for column in rows.columns.column_names if holds_images(column)], rows)
    if not holds_images(_known(rows, "image column", wanted)):
        raise UserError(f"column '{wanted}' of {rows.where} holds no images; choose another with data.image=")
    return wanted


def _label_column(rows: Rows, image: str, wanted: str | None) -> str:
    import datasets
    import pyarrow as pa

    if wanted is not None:
        return _known(rows, "label column", wanted)
    others = [column for column in rows.columns.column_names if column not in (image, "domain")]
    kinds = {column: rows.columns.schema.field(column).type for column in others}
    found = [column for column in others if isinstance(rows.features[column], datasets.ClassLabel)]
    found = found or [c for c, kind in kinds.items() if pa.types.is_integer(kind) or _is_text(kind)]
    usual = [column for column in ("label", "fine_label") if column in found]
    return _only("label", usual[:1] or found, rows)


def _only(kind: str, found: Sequence[str], rows: Rows) -> str:
    if len(found) == 1:
        return found[0]
    which = f"several {kind} columns ({', '.join(found)})" if found else f"no {kind} column"
    columns = ", ".join(rows.columns.column_names)
    raise UserError(f"{rows.where} has {which} among {columns}; choose one with data.{kind}=")


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_binary(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _labels(rows: Rows, column: str, expected: Sequence[str] | None) -> tuple[Tensor, Sequence[str]]:
    """Labels int64 [n] and the class names; `expected` are those of the training split."""
    import datasets
    import pyarrow as pa

    values, feature = rows.columns[column], rows.features[column]
    if len(values) == 0:
        raise UserError(f"{rows.where} has no rows; give a split that has some")
    if values.null_count:
        row = values.is_null().to_pylist().index(True)
        raise UserError(f"row {row} of {rows.where} has no '{column}'; add it or drop the row")
    if _is_text(values.type):
        words = values.to_pylist()
        names = sorted(set(words)) if expected is None else expected
        number = {name: i for i, name in enumerate(names)}
        coded = np.array([number.get(word, -1) for word in words], dtype=np.int64)
    elif pa.types.is_integer(values.type):
        words = coded = values.to_numpy().astype(np.int64)
        own = feature.names if isinstance(feature, datasets.ClassLabel) else None
        if own and expected is not None and list(own) != list(expected):
            raise UserError(f"the classes of {rows.where} are not those of the training split; use one list for both")
        names = expected or own or [str(i) for i in range(int(coded.max()) + 1)]
    else:
        raise UserError(
            f"column '{column}' of {rows.where} holds {values.type}, not whole numbers or text; "
            "choose another with data.label="
        )
    outside = np.flatnonzero((coded < 0) | (coded >= len(names)))
    if len(outside):
        raise UserError(
            f"row {outside[0]} of {rows.where} has {column} {words[outside[0]]!s}, which is not one of the "
            f"{len(names)} classes; correct it or drop the row"
        )
    return torch.from_numpy(coded), names


def _readable(names: Sequence[str], labels: Tensor, rows: Rows, column: str) -> tuple[str, ...]:
    """The class names as a person writes them. Prompts are made of them, so each class needs one."""
    classes = tuple(name.replace("_", " ").strip() for name in names)
    if "" in classes:
        blank = classes.index("")
        held = torch.nonzero(labels == blank).flatten().tolist()
        seen = f" (row {held[0]} is the first that has it)" if held else ""
        raise UserError(
            f"class {blank} in column '{column}' of {rows.where} has no name{seen}; name it, drop its rows or choose "
            "another column with data.label="
        )
    return classes


def _domains(rows: Rows) -> list[str] | None:
    """The name of each row's domain; None where there is no column `domain` of text or whole numbers."""
    import datasets
    import pyarrow as pa

    if "domain" not in rows.columns.column_names:
        return None
    values, feature = rows.columns["domain"], rows.features["domain"]
    if not (_is_text(values.type) or pa.types.is_integer(values.type)):
        return None  # whatever it holds, it names no domains
    numbered = isinstance(feature, datasets.ClassLabel) and pa.types.is_integer(values.type)
    out = []
    for row, value in enumerate(values.to_pylist()):
        if numbered and value is not None:
            value = feature.names[value] if 0 <= value < len(feature.names) else None
        if value is None or not str(value).strip():
            raise UserError(f"row {row} of {rows.where} has no 'domain'; add it, drop the row or rename the column")
        out.append(str(value))
    return out


def _coded(domains: list[str] | None, names: list[str]) -> Tensor | None:
    """Each row's number within `names`, int64 [n]."""
    number = {name: i for i, name in enumerate(names)}
    return None if domains is None else torch.tensor([number[name] for name in domains], dtype=torch.int64)


def _every_fifth(labels: Tensor, domains: list[str] | None, images: Iterator[bytes | str | None]) -> Tensor:
    """Which rows are test rows, bool [n]: the last of every five images of a class (and domain), in order. An image
    that comes again goes where it went first, so that no part knows images of the other."""
    groups = zip(labels.tolist(), domains or [""] * len(labels), strict=True)
    seen: Counter[tuple[int, str]] = Counter()
    part: dict[bytes, bool] = {}  # of the images so far
    out = torch.zeros(len(labels), dtype=torch.bool)
    for row, (group, image) in enumerate(zip(groups, images, strict=True)):
        assert image is not None  # it was decoded before
        content = hashlib.sha256(image if isinstance(image, bytes) else Path(image).read_bytes()).digest()
        if content not in part:
            seen[group] += 1
            part[content] = seen[group] % TEST_EVERY == 0
        out[row] = part[content]
    return out


def _encoded(column: Any) -> Iterator[bytes | str | None]:
    """Each image's bytes, or the path of its file, or None."""
    import pyarrow as pa

    for chunk in column.chunks:
        if not pa.types.is_struct(chunk.type):
            yield from (value.as_py() for value in chunk)
            continue
        parts = dict(zip((field.name for field in chunk.type), chunk.flatten(), strict=True))
        paths = parts.get("path", pa.nulls(len(chunk)))
        for data, path in zip(parts["bytes"], paths, strict=True):
            yield data.as_py() if data.is_valid else path.as_py()


def _opened(rows: Rows, column: str, use: Callable[[int, Any], None]) -> None:
    """Calls `use(row, image)` for every row with the opened, not yet decoded image."""
    from PIL import Image, UnidentifiedImageError

    for row, encoded in enumerate(_encoded(rows.columns[column])):
        if encoded is None:
            raise UserError(f"row {row} of {rows.where} has no image; drop the row")
        try:
            with Image.open(BytesIO(encoded) if isinstance(encoded, bytes) else encoded) as image:
                use(row, image)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            file = f" ({encoded})" if isinstance(encoded, str) else ""
            known = not isinstance(error, UnidentifiedImageError)
            reason = str(error).partition("\n")[0] if known else "it is not an image"
            raise UserError(
                f"the image in row {row} of {rows.where}{file} cannot be decoded: {reason}; replace it or drop the row"
            ) from None


def _commonest_size(rows: Rows, column: str) -> Size:
    sizes: Counter[Size] = Counter()
    _opened(rows, column, lambda row, image: sizes.update([image.size]))
    return max(sizes, key=lambda size: (sizes[size], size[0] * size[1], size))


def _pixels(rows: Rows, column: str, size: Size) -> Tensor:
    """All images, uint8 [n, 3, H, W]."""
    out = np.empty((len(rows.columns), 3, size[1], size[0]), dtype=np.uint8)

    def put(row: int, image: Any) -> None:
        if image.mode[0] in "IF":  # converting would clip, not scale
            raise ValueError(f"it has more than 8 bits a channel (mode {image.mode})")
        out[row] = _fitted(image.convert("RGB"), size)

    _opened(rows, column, put)
    return torch.from_numpy(out)


def _resized(images: Tensor, size: Size) -> Tensor:
    from PIL import Image

    fitted = [_fitted(Image.fromarray(image.permute(1, 2, 0).numpy()), size) for image in images]
    return torch.from_numpy(np.stack(fitted))


def _fitted(image: Any, size: Size) -> np.ndarray:
    """An RGB image as uint8 [3, H, W]; Pillow's bicubic filter widens when it shrinks, so nothing aliases."""
    from PIL import Image

    if image.size != size:
        image = image.resize(size, Image.Resampling.BICUBIC)
    return np.asarray(image).transpose(2, 0, 1)


def _pillow() -> str:
    import PIL

    return PIL.__version__


def _write(file: Path, source: Source) -> None:
    about = {"classes": source.classes, "domains": source.domains}
    try:
        store.write_tree(file, {"train": source.train, "test": source.test}, about)
    except OSError as error:
        raise UserError(f"cannot write the cache ({error}); set FEDPRIOR_CACHE to a folder with space") from None


def _read(file: Path, name: str) -> Source:
    tables, about = store.read_tree(file)
    return Source(name, tables["train"], tables["test"], tuple(about["classes"]), tuple(about["domains"]))
