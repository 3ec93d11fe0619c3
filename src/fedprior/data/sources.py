"""Data sets decoded once to uint8 images: the embedded digits, and what `origins` finds.

A set has training rows and test rows. Its own test split is the test; a set with one split is divided by a
rule that draws nothing. Decoded sets are kept in the cache under a digest of what they were decoded from.
"""

import hashlib
import os
import warnings
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
from fedprior.data.origins import EMBEDDED, TESTS, Origin, Rows, hub, local, roles
from fedprior.data.table import Table
from fedprior.errors import UsageError, UserError, unknown
from fedprior.tree import Tree

TEST_EVERY = 5  # of a set without a test split, this many images of a class (and domain) give one test image
DECODER = "4"  # goes up when the same files would decode to other values

CAMERAS = ("JPEG", "MPO", "WEBP", "AVIF")  # formats whose EXIF says how the camera was held; Pillow turns a TIFF itself
ORIENTATION = 0x0112  # its tag
UPRIGHT = {  # what turns a picture upright, by its EXIF orientation; ImageOps.exif_transpose fails on damaged notes
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}

Size = tuple[int, int]  # width, height in pixels


@dataclass(frozen=True)
class Source:
    """A decoded data set. Ids are unique over both tables, which have a column `domain` where the data have one."""

    name: str
    train: Table  # images uint8 [n, 3, H, W]
    test: Table  # images of the same height and width
    classes: tuple[str, ...]  # readable names, by label, no two alike
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
    used then. `image` and `label` name the columns where the features do not tell. Images are RGB, turned upright
    as their EXIF says and on white where they are transparent; with
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

    def decode() -> tuple[Tree, dict[str, Any]]:
        source = _decode(name, origin, train, test, image, label, size)
        return {"train": source.train, "test": source.test}, {"classes": source.classes, "domains": source.domains}

    tables, about = cached("decoded", [*content, image or "", label or "", str(size or "")], decode)
    classes, domains = tuple(about["classes"]), tuple(about["domains"])
    found = Source(name, tables["train"], tables["test"], classes, domains, divided=test is None)
    return found if half == "all" else found.only(half)


def load_test(
    name: str,
    *,
    path: str | Path | None = None,
    image: str | None = None,
    label: str | None = None,
    size: int | None = None,
) -> Source:
    """The test rows of a set, as `load` finds them, and no training rows: what a server needs that judges models. A set
    with one split only is taken whole, whatever it is called; domains are left out.

    Raises what `load` raises, and UserError where none of several splits is a test split.
    """
    if path is None and name == EMBEDDED:
        found = _embedded(image, label, size)
        return replace(found, train=table.take(found.train, torch.zeros(0, dtype=torch.int64)))
    origin = hub(name) if path is None else local(Path(path).expanduser())
    splits = [split for split in TESTS if split in origin.splits] or list(origin.splits)
    if splits[0] not in TESTS and len(splits) > 1:
        raise UserError(
            f"{origin.where} has no split 'test', only {', '.join(splits)}; name the file or folder of test images so"
        )

    def decode() -> tuple[Tree, dict[str, Any]]:
        rows = split(origin, splits[0])
        pictures, column = columns(rows, image, label)
        numbers, names = labels(rows, column, None)
        shape = (size, size) if size is not None else _commonest_size(rows, pictures)
        return {"test": table.make(pixels(rows, pictures, shape), numbers)}, {
            "classes": _classes(names, numbers, rows, column)
        }

    tables, about = cached(
        "decoded", ["test", origin.digest(splits[0]), image or "", label or "", str(size or "")], decode
    )
    none = table.take(tables["test"], torch.zeros(0, dtype=torch.int64))
    return Source(name, none, tables["test"], tuple(about["classes"]))


def cached(
    folder: str, key: Sequence[str], decode: Callable[[], tuple[Tree, dict[str, Any]]], mode: int = 0o777
) -> tuple[Tree, dict[str, Any]]:
    """Tables and JSON values about them, as `decode` makes them from what `key` says. They are kept in that folder of
    the cache, which is made with `mode`."""
    file = store.cache_folder() / folder / f"{store.digest(DECODER, _pillow(), *key)}.safetensors"
    found, built = store.read_or_rebuild(file, store.read_tree, decode)
    if built:
        try:
            file.parent.mkdir(mode=mode, parents=True, exist_ok=True)
            store.write_tree(file, *found)
        except OSError as error:
            raise UserError(f"cannot write the cache ({error}); set FEDPRIOR_CACHE to a folder with space") from None
    return found


def _embedded(image: str | None, label: str | None, size: int | None) -> Source:
    from fedprior.data import digits

    if image or label:
        raise UsageError(f"data={EMBEDDED} has no columns to name; leave out data.image= and data.label=")
    found = Source(EMBEDDED, digits.train(), digits.test(), digits.CLASSES)
    return found if size is None else found.resized(size)


def _decode(
    name: str, origin: Origin, train: str, test: str | None, image: str | None, label: str | None, size: int | None
) -> Source:
    rows = split(origin, train)
    image, label = columns(rows, image, label)
    numbers, names = labels(rows, label, None)
    shape = (size, size) if size is not None else _commonest_size(rows, image)
    classes = _classes(names, numbers, rows, label)
    domains = _domains(rows)
    if test is None:
        known = sorted(set(domains or ()))
        whole = table.make(pixels(rows, image, shape), numbers, domain=_coded(domains, known))
        held_out = _every_fifth(numbers, domains, _encoded(rows.columns[image]))
        if not held_out.any():
            raise UserError(f"{rows.where} has too few images for a test split; add a file or folder named test")
        kept, taken = (table.take(whole, torch.nonzero(mask)[:, 0]) for mask in (~held_out, held_out))
        return Source(name, kept, taken, classes, tuple(known))
    others = split(origin, test)
    for kind, column in (("image column", image), ("label column", label)):
        _known(others, kind, column)
    other_numbers, _ = labels(others, label, names)
    other_domains = _domains(others)
    known = sorted({*(domains or ()), *(other_domains or ())})
    return Source(
        name,
        table.make(pixels(rows, image, shape), numbers, domain=_coded(domains, known)),
        table.make(
            pixels(others, image, shape), other_numbers, domain=_coded(other_domains, known), first_id=len(numbers)
        ),
        classes,
        tuple(known),
    )


def split(origin: Origin, name: str) -> Rows:
    """A split that has rows. Raises UserError for one that has none and for files that cannot be read."""
    rows = origin.read(name)
    if not len(rows.columns):
        raise UserError(f"{rows.where} has no rows; give data that have some")
    return rows


def columns(rows: Rows, image: str | None, label: str | None) -> tuple[str, str]:
    """The columns of the images and of the labels: those that are named, else those that the features tell.

    Raises UsageError for a column that is not there, UserError where none or several could be meant.
    """
    image = _image_column(rows, image)
    return image, _label_column(rows, image, label)


def _known(rows: Rows, kind: str, column: str) -> str:
    if column not in rows.columns.column_names:
        raise unknown(f"{kind} of {rows.where}", column, rows.columns.column_names)
    return column


def image_columns(schema: Any) -> list[str]:
    """The columns of a pyarrow schema that can hold images: bytes, or structs with bytes."""
    import pyarrow as pa

    def holds(kind: Any) -> bool:
        return (pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0) or _is_binary(kind)

    return [field.name for field in schema if holds(field.type)]


def _image_column(rows: Rows, wanted: str | None) -> str:
    found = image_columns(rows.columns.schema)
    if wanted is None:
        return _only("image", found, rows)
    if _known(rows, "image column", wanted) not in found:
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


def labels(rows: Rows, column: str, expected: Sequence[str] | None) -> tuple[Tensor, Sequence[str]]:
    """Each row's number int64 [n] within the class names, and these, as written: `expected`, which are those of the
    training split, else the declared ones, else the sorted texts or the numbers up to the largest.

    Raises UserError, with file and row, for a row without a label and one that no name belongs to, and for a column
    that holds neither text nor whole numbers.
    """
    import pyarrow as pa

    values = rows.columns[column]
    if values.null_count:
        row = values.is_null().to_pylist().index(True)
        raise UserError(f"{rows.at(row)} has no '{column}'; add it or drop the row")
    if _is_text(values.type):
        words = values.to_pylist()
        names = sorted(set(words)) if expected is None else expected
        number = {name: i for i, name in enumerate(names)}
        coded = np.array([number.get(word, -1) for word in words], dtype=np.int64)
    elif pa.types.is_integer(values.type):
        words = coded = values.to_numpy().astype(np.int64)
        own = declared(rows, column)
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
            f"{rows.at(outside[0])} has {column} {words[outside[0]]!s}, which is not one of the "
            f"{len(names)} classes; correct it or drop the row"
        )
    return torch.from_numpy(coded), names


def declared(rows: Rows, column: str) -> Sequence[str] | None:
    """The class names that a column's features give to its numbers; None where they give none."""
    import datasets

    feature = rows.features[column]
    return feature.names if isinstance(feature, datasets.ClassLabel) else None


def readable(name: str) -> str:
    """A class name as a person writes it."""
    return name.replace("_", " ").strip()


def _classes(names: Sequence[str], numbers: Tensor, rows: Rows, column: str) -> tuple[str, ...]:
    """The readable class names; those that a person would write alike stay as the data have them, so that no two are
    equal. Prompts are made of them, so each class needs one."""
    classes = tuple(map(readable, names))
    times = Counter(classes)
    if "" in classes:
        blank = classes.index("")
        held = torch.nonzero(numbers == blank).flatten().tolist()
        seen = f" ({rows.at(held[0])} is the first that has it)" if held else ""
        raise UserError(
            f"class {blank} in column '{column}' of {rows.where} has no name{seen}; name it, drop its rows or choose "
            "another column with data.label="
        )
    return tuple(said if times[said] == 1 else name for said, name in zip(classes, names, strict=True))


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
            raise UserError(f"{rows.at(row)} has no 'domain'; add it, drop the row or rename the column")
        out.append(str(value))
    return out


def _coded(domains: list[str] | None, names: list[str]) -> Tensor | None:
    """Each row's number within `names`, int64 [n]."""
    number = {name: i for i, name in enumerate(names)}
    return None if domains is None else torch.tensor([number[name] for name in domains], dtype=torch.int64)


def _every_fifth(numbers: Tensor, domains: list[str] | None, images: Iterator[bytes | str | None]) -> Tensor:
    """Which rows are test rows, bool [n]: the last of every five images of a class (and domain), in order. An image
    that comes again goes where it went first, so that no part knows images of the other."""
    groups = zip(numbers.tolist(), domains or [""] * len(numbers), strict=True)
    seen: Counter[tuple[int, str]] = Counter()
    part: dict[bytes, bool] = {}  # of the images so far
    out = torch.zeros(len(numbers), dtype=torch.bool)
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
            yield data.as_py() if data.is_valid else os.fsdecode(path.as_py()) if path.is_valid else None


def _opened(
    rows: Rows, column: str, use: Callable[[int, Any], None], failed: Callable[[int, str], None] | None = None
) -> None:
    """Calls `use(row, image)` for every row with the opened, not yet decoded image; where that cannot be done,
    `failed(row, reason)`, or without one raises UserError."""
    from PIL import Image, UnidentifiedImageError

    def miss(row: int, reason: str, encoded: bytes | str | None) -> None:
        if failed is not None:
            return failed(row, reason)
        place = rows.at(row)
        if encoded is None:
            raise UserError(f"{place} has no image; drop the row")
        file = f" ({encoded})" if isinstance(encoded, str) and encoded not in place else ""
        raise UserError(f"the image in {place}{file} cannot be decoded: {reason}; replace it or drop the row")

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")  # a photo of 100 megapixels is no bomb, nor are notes pixels
        for row, encoded in enumerate(_encoded(rows.columns[column])):
            if encoded is None:
                miss(row, "there is no image", None)
                continue
            try:
                with Image.open(BytesIO(encoded) if isinstance(encoded, bytes) else encoded) as image:
                    use(row, image)
            except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
                known = not isinstance(error, UnidentifiedImageError)
                said = getattr(error, "strerror", None) or str(error).partition("\n")[0]
                miss(row, said if known else "it is not an image", encoded)


def _commonest_size(rows: Rows, column: str) -> Size:
    sizes: Counter[Size] = Counter()
    _opened(rows, column, lambda row, image: sizes.update([image.size[::-1] if _turned(image) >= 5 else image.size]))
    return max(sizes, key=lambda size: (sizes[size], size[0] * size[1], size))


def pixels(rows: Rows, column: str, size: Size, failed: Callable[[int, str], None] | None = None) -> Tensor:
    """All images in RGB, upright, on white, and fitted to the size, uint8 [n, 3, H, W].

    One that cannot be decoded is black, and `failed(row, reason)` is called; without that UserError is raised, with
    file and row.
    """
    from PIL import Image

    out = np.zeros((len(rows.columns), 3, size[1], size[0]), dtype=np.uint8)

    def put(row: int, image: Any) -> None:
        if image.mode[0] in "IF":  # converting would clip, not scale
            raise ValueError(f"it has more than 8 bits a channel (mode {image.mode})")
        turn = UPRIGHT.get(_turned(image))
        rgb = _opaque(image)
        out[row] = _fitted(rgb if turn is None else rgb.transpose(Image.Transpose[turn]), size)

    _opened(rows, column, put, failed)
    return torch.from_numpy(out)


def _turned(image: Any) -> int:
    """The EXIF orientation, 2 to 8, of a picture that a camera stored turned or mirrored; 0 for all others."""
    if image.format not in CAMERAS and not (image.format == "PNG" and "exif" in image.info):  # others would be decoded
        return 0
    try:
        orientation = image.getexif().get(ORIENTATION, 1)
    except Exception:  # notes can be damaged in any way while the picture is whole
        return 0
    return orientation if orientation in range(2, 9) else 0


def _opaque(image: Any) -> Any:
    """In RGB; what is transparent shows white."""
    from PIL import Image

    if not image.has_transparency_data:
        return image.convert("RGB")
    over = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", over.size, "white"), over).convert("RGB")


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
