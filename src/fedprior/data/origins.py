"""Where data sets come from: the hub, parquet files, class folders, what `save_to_disk` wrote. Nothing is
decoded here."""

import hashlib
import json
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from fedprior import store
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
SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}


@cache
def suffixes() -> frozenset[str]:
    """How the names of images end, in lower case: SUFFIXES, and .avif where the installed Pillow reads it."""
    from PIL import features

    return frozenset(SUFFIXES | ({".avif"} if features.check("avif") else set()))


def is_image(file: Path) -> bool:
    """By its name."""
    return file.suffix.lower() in suffixes()


def alias(name: str) -> str:
    """The short name of a hub id that has one, else the name itself."""
    return next((short for short, hub_id in ALIASES.items() if hub_id == name), name)


class Rows(NamedTuple):
    """A split before decoding."""

    columns: Any  # pyarrow.Table
    features: Any  # datasets.Features
    where: str  # for messages about all rows
    at: Callable[[int], str]  # for messages about one: its file, and its number there


class Origin(NamedTuple):
    """Where splits come from."""

    where: str
    splits: tuple[str, ...]
    digest: Callable[[str], str]  # of a split's content
    read: Callable[[str], Rows]


def hub(name: str) -> Origin:
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
    return Origin(
        where=hub_id,
        splits=tuple(found),
        digest=lambda split: str(found[split]._fingerprint),
        read=lambda split: _from_dataset(found[split], f"{split} of {hub_id}"),
    )


def local(path: Path) -> Origin:
    if not os.path.exists(path):  # unlike Path's, false for a name that is too long
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
    for file in parquet_files(path):
        split = re.sub(r"-\d+-of-\d+$", "", file.stem)
        shards.setdefault(split, []).append(file)
    return _parquet(path, shards) if shards else _class_folders(path)


def parquet_files(folder: Path) -> list[Path]:
    """Those in the folder itself, else in `data` below it, where a clone of a hub set has them."""
    there = lambda where: sorted(file for file in where.glob("*.parquet") if not _hidden(file))
    return there(folder) or there(folder / "data")


def _parquet(path: Path, files: dict[str, list[Path]]) -> Origin:
    def read(split: str) -> Rows:
        import datasets
        import pyarrow as pa
        import pyarrow.parquet as pq

        shards: list[Any] = []
        features: Any = None
        for file in files[split]:
            try:
                shard = pq.ParquetFile(file).read()
            except (pa.ArrowException, OSError) as error:
                raise UserError(f"cannot read {file}: {str(error).splitlines()[0]}") from None
            declared = datasets.Features.from_arrow_schema(shard.schema)
            if shards and (declared != features or shard.schema != shards[0].schema):  # numbers may be other classes
                first = files[split][0]
                raise UserError(f"{file} has other columns or class names than {first}; write both in the same way")
            features = declared
            shards.append(shard)
        starts = list(accumulate(map(len, shards[:-1]), initial=0))

        def at(row: int) -> str:
            shard = bisect_right(starts, row) - 1  # of several that start there, all but the last are empty
            return f"row {row - starts[shard]} of {files[split][shard]}"

        return Rows(pa.concat_tables(shards), features, _first(files[split]), at)

    return Origin(str(path), tuple(files), lambda split: file_digest(files[split], files[split][0].parent), read)


def _saved(path: Path, folders: dict[str, Path]) -> Origin:
    def read(split: str) -> Rows:
        import datasets

        try:
            found = datasets.load_from_disk(str(folders[split]))
        except (ValueError, OSError) as error:
            raise UserError(f"cannot read {folders[split]}: {str(error).splitlines()[0]}") from None
        return _from_dataset(found, str(folders[split]))

    def digest(split: str) -> str:
        return file_digest([f for f in folders[split].rglob("*") if f.is_file()], folders[split])

    return Origin(str(path), tuple(folders), digest, read)


def _class_folders(path: Path) -> Origin:
    below = [child.name for child in _children(path) if any(map(Path.is_dir, _children(child)))]
    parts = {name: path / name for name in SPLITS if name in below} or {"train": path}
    files = {
        split: [file for file in walk(folder) if is_image(file) and file.parent != folder]
        for split, folder in parts.items()
    }
    if not any(files.values()):
        raise UserError(
            f"data.path={path} has nothing to load; it needs <split>.parquet files, class folders with "
            "images, or what save_to_disk wrote"
        )

    def read(split: str) -> Rows:
        return picture_rows(
            files[split], parts[split], lambda row: f"row {row} of {parts[split]} ({files[split][row]})"
        )

    return Origin(str(path), tuple(parts), lambda split: file_digest(files[split], parts[split]), read)


def picture_rows(files: Sequence[Path], folder: Path, at: Callable[[int], str]) -> Rows:
    """Image files below a folder: a column `image`, and `label`, the folder that each lies in just below `folder`, null
    for those in none; no such column where all are in none. Raises UserError for a folder whose name is no text."""
    import datasets
    import pyarrow as pa

    struct = pa.struct([("bytes", pa.binary()), ("path", pa.binary())])  # a name may be no text
    columns = {"image": pa.array([{"bytes": None, "path": os.fsencode(file)} for file in files], type=struct)}
    features = datasets.Features({"image": datasets.Image()})
    parts = [file.relative_to(folder).parts for file in files]
    labels = [names[0] if len(names) > 1 else None for names in parts]
    if any(label is not None for label in labels):
        try:
            columns["label"] = pa.array(labels, type=pa.string())
        except UnicodeEncodeError as error:
            raise UserError(
                f"the name of the class folder {error.object!r} in {folder} is not UTF-8; rename it"
            ) from None
        features["label"] = datasets.Value("string")
    return Rows(pa.table(columns), features, str(folder), at)


def walk(folder: Path) -> list[Path]:
    """The files below a folder, sorted, through links to folders except those that lead back to where they lie.

    Passed over are hidden names, what a Mac's archives add, and what is no file. A link to nothing is among the files,
    so that it does not go unnoticed. Raises UserError for a folder that cannot be read.
    """
    real = Path(os.path.realpath(folder))
    found: list[Path] = []
    left = [(folder, frozenset({real, *real.parents}))]
    while left:
        here, above = left.pop()
        for entry in _children(here):
            if entry.is_dir():
                real = Path(os.path.realpath(entry))
                if real not in above:
                    left.append((entry, above | {real}))
            elif entry.is_file() or not entry.exists():
                found.append(entry)
    return sorted(found)


def _children(folder: Path) -> list[Path]:
    """What lies in a folder and is not hidden; nothing for what is no folder."""
    try:
        return sorted(child for child in folder.iterdir() if not _hidden(child)) if folder.is_dir() else []
    except OSError as error:
        raise UserError(f"cannot read {folder} ({error.strerror}); check that it may be read") from None


def _hidden(path: Path) -> bool:
    return path.name.startswith(".") or path.name == "__MACOSX"


def _from_dataset(found: Any, where: str) -> Rows:
    return Rows(found.with_format("arrow")[:], found.features, where, lambda row: f"row {row} of {where}")


def _first(files: Sequence[Path]) -> str:
    return str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"


def file_digest(files: Iterable[Path], root: Path) -> str:
    """A digest of the files' content and of their names below `root`. Raises UserError for one that cannot be read."""
    parts = []
    for file in sorted(files):
        try:
            with file.open("rb") as f:
                name = os.fsencode(file.relative_to(root).as_posix())  # which may be no text
                parts += [name, hashlib.file_digest(f, "sha256").hexdigest().encode()]
        except OSError as error:
            raise UserError(f"cannot read {file} ({error.strerror}); check that it is there and may be read") from None
    return store.digest(*parts)


def roles(origin: Origin) -> tuple[str, str | None]:
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
