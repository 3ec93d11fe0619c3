"""Data sets: the embedded digits, sets from the hub, and local copies, decoded once to uint8 images.

A set has training rows and test rows. Its own test split is the test; a set with one split is divided by a
rule that draws nothing. Decoded sets are kept in the cache under a digest of what they were decoded from.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedprior import store
from fedprior.data import table
from fedprior.data.table import Table
from fedprior.errors import UsageError, UserError, unknown

ALIASES = {
    "cifar10": "uoft-cs/cifar10",
    "cifar100": "uoft-cs/cifar100",
    "fashion_mnist": "zalando-datasets/fashion_mnist",
    "mnist": "ylecun/mnist",
    "pacs": "flwrlabs/pacs",
    "tiny_imagenet": "zh-plus/tiny-imagenet",
    "usps": "flwrlabs/usps",
}
EMBEDDED = "digits"
TESTS = ("test", "valid", "validation", "val")  # in order of preference
SPLITS = ("train", *TESTS)
TEST_EVERY = 5  # of a set without a test split, this many rows of a class give one test row
SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
DECODER = "1"  # goes up when the same files would decode to other values

Size = tuple[int, int]  # width, height in pixels


@dataclass(frozen=True)
class Source:
    """A decoded data set. Ids are unique over both tables."""

    name: str
    train: Table  # images uint8 [n, 3, H, W]
    test: Table  # images of the same height and width
    classes: tuple[str, ...]  # readable names, by label


def load(
    name: str,
    *,
    path: str | Path | None = None,
    image: str | None = None,
    label: str | None = None,
    size: int | None = None,
) -> Source:
    """The data set `name`: "digits", a key of ALIASES or a hub id "owner/name".

    `path` is a local copy in its place: a folder with `<split>.parquet` files, one parquet file, a folder of
    class folders (with or without train and test above them), or what `save_to_disk` wrote; no network is
    used then. `image` and `label` name the columns where the features do not tell. Images are RGB; with
    `size` they are resized to [size, size], else all to the commonest size of the training split (the
    largest of equally common ones).

    Where there is no split named test, valid, validation or val, every fifth row of each class (and domain,
    if there is a column `domain`) is a test row. The decoded set is cached.

    Raises UsageError for an unknown name or column and a bad size, UserError for data that cannot be
    reached, read or decoded.
    """
    if size is not None and size < 1:
        raise UsageError(f"data.size must be at least 1, not {size}")
    if path is None and name == EMBEDDED:
        return _embedded(image, label, size)
    origin = _hub(name) if path is None else _local(Path(path).expanduser())
    train, test = _roles(origin)
    content = [origin.digest(split) if split else "" for split in (train, test)]
    key = store.digest(DECODER, _pillow(), *content, image or "", label or "", str(size or ""))
    file = store.cache_folder() / "decoded" / f"{key}.safetensors"
    decoded, built = store.read_or_rebuild(file, _read, lambda: _decode(origin, train, test, image, label, size))
    if built:
        _write(file, decoded)
    return Source(name, decoded.train, decoded.test, decoded.classes)


class _Decoded(NamedTuple):
    train: Table
    test: Table
    classes: tuple[str, ...]


class _Rows(NamedTuple):
    """A split before decoding."""

    columns: Any  # pyarrow.Table
    features: Any  # datasets.Features
    where: str  # for messages


class _Origin(NamedTuple):
    """Where splits come from."""

    where: str
    splits: tuple[str, ...]
    digest: Callable[[str], str]  # of a split's content
    read: Callable[[str], _Rows]


def _embedded(image: str | None, label: str | None, size: int | None) -> Source:
    from fedprior.data import digits

    if image or label:
        raise UsageError(f"data={EMBEDDED} has no columns to name; leave out data.image= and data.label=")
    train, test = digits.train(), digits.test()
    if size is not None:
        train, test = ({**t, "image": _resized(t["image"], (size, size))} for t in (train, test))
    return Source(EMBEDDED, train, test, digits.CLASSES)


def _hub(name: str) -> _Origin:
    hub_id = ALIASES.get(name, name)
    if "/" in name and Path(name).exists():
        raise UsageError(f"'{name}' is a local path; give it as data.path={name}")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", hub_id):
        raise unknown("data set", name, [EMBEDDED, *ALIASES])
    import datasets
    from huggingface_hub.utils import logging as hub_logging

    verbosity = hub_logging.get_verbosity()
    hub_logging.set_verbosity_error()  # it reports every retry; the error below says it once
    try:
        found = datasets.load_dataset(hub_id)
    except Exception as error:  # every layer of the client has its own kinds, and the remedy is the same for all
        reason = str(error).partition("\n")[0].strip().rstrip(".") or type(error).__name__
        raise UserError(
            f"cannot get data set '{hub_id}' from the hub ({reason}); "
            "check the name and the network, or give a local copy with data.path="
        ) from None
    finally:
        hub_logging.set_verbosity(verbosity)
    return _Origin(
        where=hub_id,
        splits=tuple(found),
        digest=lambda split: str(found[split]._fingerprint),
        read=lambda split: _from_dataset(found[split], f"{split} of {hub_id}"),
    )


def _local(path: Path) -> _Origin:
    if not path.exists():
        raise UserError(f"data.path={path}: there is no such file or folder")
    if path.is_file():
        if path.suffix != ".parquet":
            raise UserError(f"data.path={path} is not a parquet file; give one, or a folder")
        return _parquet(path, {"train": [path]})
    if (path / "dataset_dict.json").exists():
        try:
            splits = json.loads((path / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path / 'dataset_dict.json'} is damaged; save the data set again") from None
        return _saved(path, {split: path / split for split in splits})
    if (path / "state.json").exists():
        return _saved(path, {"train": path})
    shards: dict[str, list[Path]] = {}
    for file in sorted(path.glob("*.parquet")) or sorted((path / "data").glob("*.parquet")):  # a clone of a hub set
        split = re.sub(r"-\d+-of-\d+$", "", file.stem)
        shards.setdefault(split, []).append(file)
    return _parquet(path, shards) if shards else _class_folders(path)


def _parquet(path: Path, files: dict[str, list[Path]]) -> _Origin:
    def read(split: str) -> _Rows:
        import datasets
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            columns = pa.concat_tables([pq.ParquetFile(file).read() for file in files[split]])
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"cannot read {_first(files[split])}: {str(error).splitlines()[0]}") from None
        return _Rows(columns, datasets.Features.from_arrow_schema(columns.schema), _first(files[split]))

    return _Origin(str(path), tuple(files), lambda split: _file_digest(files[split], files[split][0].parent), read)


def _saved(path: Path, folders: dict[str, Path]) -> _Origin:
    def read(split: str) -> _Rows:
        import datasets

        try:
            found = datasets.load_from_disk(str(folders[split]))
        except (ValueError, OSError) as error:
            raise UserError(f"cannot read {folders[split]}: {str(error).splitlines()[0]}") from None
        return _from_dataset(found, str(folders[split]))

    def digest(split: str) -> str:
        return _file_digest([f for f in folders[split].rglob("*") if f.is_file()], folders[split])

    return _Origin(str(path), tuple(folders), digest, read)


def _class_folders(path: Path) -> _Origin:
    below = [child.name for child in path.iterdir() if any(map(Path.is_dir, _children(child)))]
    parts = {name: path / name for name in SPLITS if name in below} or {"train": path}
    files = {split: _images(folder) for split, folder in parts.items()}
    if not any(files.values()):
        raise UserError(
            f"data.path={path} has nothing to load; it needs <split>.parquet files, class folders with "
            "images, or what save_to_disk wrote"
        )

    def read(split: str) -> _Rows:
        import datasets
        import pyarrow as pa

        struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        images = pa.array([{"bytes": None, "path": str(file)} for file in files[split]], type=struct)
        labels = pa.array([file.relative_to(parts[split]).parts[0] for file in files[split]], type=pa.string())
        features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
        return _Rows(pa.table({"image": images, "label": labels}), features, str(parts[split]))

    return _Origin(str(path), tuple(parts), lambda split: _file_digest(files[split], parts[split]), read)


def _children(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() and not folder.name.startswith(".") else []


def _images(folder: Path) -> list[Path]:
    return [
        file
        for child in _children(folder)
        if child.is_dir() and not child.name.startswith(".")
        for file in sorted(child.rglob("*"))
        if file.suffix.lower() in SUFFIXES
    ]


def _from_dataset(found: Any, where: str) -> _Rows:
    return _Rows(found.with_format("arrow")[:], found.features, where)


def _first(files: Sequence[Path]) -> str:
    return str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"


def _file_digest(files: Iterable[Path], root: Path) -> str:
    parts = []
    for file in sorted(files):
        with file.open("rb") as f:
            parts += [file.relative_to(root).as_posix(), hashlib.file_digest(f, "sha256").hexdigest()]
    return store.digest(*parts)


def _roles(origin: _Origin) -> tuple[str, str | None]:
    """The names of the training and the test split; None for a test split that has to be made."""
    tests = [split for split in TESTS if split in origin.splits]
    if "train" in origin.splits:
        return "train", tests[0] if tests else None
    if len(origin.splits) == 1 and not tests:
        return origin.splits[0], None
    raise UserError(
        f"{origin.where} has no split 'train', only {', '.join(origin.splits)}; "
        "name the training file or folder 'train'"
    )


def _decode(
    origin: _Origin, train: str, test: str | None, image: str | None, label: str | None, size: int | None
) -> _Decoded:
    rows = origin.read(train)
    image, label = _image_column(rows, image), _label_column(rows, image, label)
    labels, names = _labels(rows, label, None)
    shape = (size, size) if size is not None else _commonest_size(rows, image)
    classes = tuple(name.replace("_", " ").strip() for name in names)
    whole = table.make(_pixels(rows, image, shape), labels)
    if test is None:
        held_out = _every_fifth(labels, rows)
        if not held_out.any():
            raise UserError(f"{rows.where} has too few images for a test split; add a file or folder named test")
        kept, taken = (table.take(whole, torch.nonzero(mask)[:, 0]) for mask in (~held_out, held_out))
        return _Decoded(kept, taken, classes)
    others = origin.read(test)
    for kind, column in (("image column", image), ("label column", label)):
        _known(others, kind, column)
    other_labels, _ = _labels(others, label, names)
    return _Decoded(whole, table.make(_pixels(others, image, shape), other_labels, first_id=len(labels)), classes)


def _known(rows: _Rows, kind: str, column: str) -> str:
    if column not in rows.columns.column_names:
        raise unknown(f"{kind} of {rows.where}", column, rows.columns.column_names)
    return column


def _image_column(rows: _Rows, wanted: str | None) -> str:
    import pyarrow as pa

    def holds_images(column: str) -> bool:
        kind = rows.columns.schema.field(column).type
        return (pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0) or _is_binary(kind)

    if wanted is None:
        return _only("image", [column for column in rows.columns.column_names if holds_images(column)], rows)
    if not holds_images(_known(rows, "image column", wanted)):
        raise UserError(f"column '{wanted}' of {rows.where} holds no images; choose another with data.image=")
    return wanted


def _label_column(rows: _Rows, image: str, wanted: str | None) -> str:
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


def _only(kind: str, found: Sequence[str], rows: _Rows) -> str:
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


def _labels(rows: _Rows, column: str, expected: Sequence[str] | None) -> tuple[Tensor, Sequence[str]]:
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


def _every_fifth(labels: Tensor, rows: _Rows) -> Tensor:
    """Which rows are test rows, bool [n]: the last of every five of a class (and domain), in order."""
    domains = rows.columns["domain"].to_pylist() if "domain" in rows.columns.column_names else [None] * len(labels)
    seen: Counter[tuple[int, object]] = Counter()
    out = torch.zeros(len(labels), dtype=torch.bool)
    for row, group in enumerate(zip(labels.tolist(), domains, strict=True)):
        seen[group] += 1
        out[row] = seen[group] % TEST_EVERY == 0
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


def _opened(rows: _Rows, column: str, use: Callable[[int, Any], None]) -> None:
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


def _commonest_size(rows: _Rows, column: str) -> Size:
    sizes: Counter[Size] = Counter()
    _opened(rows, column, lambda row, image: sizes.update([image.size]))
    return max(sizes, key=lambda size: (sizes[size], size[0] * size[1], size))


def _pixels(rows: _Rows, column: str, size: Size) -> Tensor:
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


def _checksum(tensors: dict[str, Tensor], classes: str) -> str:
    h = hashlib.sha256(classes.encode())
    for name in sorted(tensors):
        h.update(f"{name} {tensors[name].dtype} {list(tensors[name].shape)}".encode())
        h.update(tensors[name].numpy().data)
    return h.hexdigest()


def _write(file: Path, decoded: _Decoded) -> None:
    tensors = {f"{part}.{k}": v for part in ("train", "test") for k, v in getattr(decoded, part).items()}
    classes = json.dumps(decoded.classes)
    try:
        store.save_tensors(tensors, file, {"classes": classes, "digest": _checksum(tensors, classes)})
    except OSError as error:
        raise UserError(f"cannot write the cache ({error}); set FEDPRIOR_CACHE to a folder with space") from None


def _read(file: Path) -> _Decoded:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as f:
            metadata, tensors = f.metadata() or {}, {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged: {error}") from None
    classes = metadata.get("classes", "")
    if metadata.get("digest") != _checksum(tensors, classes):
        raise ValueError(f"{file} is damaged: its digest differs")
    part = lambda name: {k.partition(".")[2]: v for k, v in tensors.items() if k.startswith(f"{name}.")}
    return _Decoded(part("train"), part("test"), tuple(json.loads(classes)))
