"""Images that somebody wants an answer about: of a file, a folder of photos, class folders or a data set on disk."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import UsageError, UserError
from . import origins, site, sources
from .origins import SPLITS, TESTS, Rows, is_image

BESIDE = (  # endings of files that lie beside images and are none
    {".txt", ".md", ".rst", ".html", ".pdf", ".log", ".csv", ".tsv"}
    | {".json", ".jsonl", ".xml", ".yaml", ".yml", ".toml", ".ini", ".db"}
    | {".parquet", ".npy", ".npz", ".py", ".sh", ".zip", ".gz", ".tar", ".sha256", ".md5"}
)


class Found(NamedTuple):
    """The images of one path, not yet decoded."""

    rows: Rows
    image: str  # their column
    labels: Tensor | None  # int64 [n], numbers of the model's classes, -1 where unknown; None where nothing says them
    remarks: tuple[str, ...]  # what is left aside and why, a line each
    domains: bool  # whether the rows say their domains


def find(path: Path, classes: Sequence[str], image: str = "", label: str = "") -> Found:
    """The images of a file, of a folder with all below it, or of a data set on disk; of several splits the test split.

    Class folders and label columns give labels where a row's class is one of the model's by name (or number, where the
    data have no names); `_label_column` says which column holds them. A folder is taken as splits where its folders of
    images are called train, test, valid, validation or val, all of them, and have class folders. `image` and `label`
    name columns. Raises UserError where there is no image, and for a column named by
    `label` that gives none of the model's classes.
    """
    rows, remarks = _rows(path)
    try:
        pictures = sources.columns(rows, image or None, label or rows.columns.column_names[0])[0]
    except UserError as error:
        raise _reworded(error) from None
    domains = "domain" in rows.columns.column_names
    if not label and rows.columns.column_names == [pictures]:
        return Found(rows, pictures, None, remarks, domains)
    try:
        labels, doubt = _labels(rows, label or _label_column(rows, pictures, classes), classes)
    except UserError as error:
        if label:
            raise _reworded(error) from None
        return Found(rows, pictures, None, (*remarks, f"no accuracy for {path}: {_reworded(error)}"), domains)
    return Found(rows, pictures, labels, (*remarks, f"{path}: {doubt}") if doubt else remarks, domains)


def _reworded(error: UserError) -> UserError:
    """With this command's words for columns."""
    text = re.sub(r"data\.(image|label)=", lambda key: f"--{key[1]} COLUMN", str(error))
    return type(error)(text.replace("data.path=", ""))


def _rows(path: Path) -> tuple[Rows, tuple[str, ...]]:
    """The images of a path, and what is left aside there."""
    if not os.path.exists(path):  # unlike Path's, false for a name that is too long
        raise UserError(f"there is no {path}; name an image, a folder of images or a parquet file")
    if path.is_dir():
        saved = any((path / name).exists() for name in ("dataset_dict.json", "state.json"))
        tables = [] if saved else origins.parquet_files(path)
        pictures = [] if saved or not tables else list(filter(is_image, origins.walk(path)))
        if not saved and not (tables and (not pictures or _hold_images(tables))):
            rows, remarks = _folder(path)
            aside = f"{', '.join(file.name for file in tables)} in {path}: left aside, since no image is in there"
            return rows, (*remarks, aside) if tables else remarks
        remarks = (
            (f"{_some(len(pictures), 'image')} of {path} beside its parquet files: left aside",) if pictures else ()
        )
    elif is_image(path):
        return _pictures([path], path.parent), ()
    elif path.suffix == ".parquet":
        remarks = ()
    else:
        raise UserError(f"{path} is neither an image nor a parquet file; images end in {_endings()}")
    origin = origins.local(path)
    split = next((name for name in TESTS if name in origin.splits), origin.splits[0])
    if split not in TESTS and len(origin.splits) > 1:
        raise UserError(f"{path} has splits {', '.join(origin.splits)} and none called test; name the file of one")
    rows = sources.split(origin, split)
    if others := ", ".join(name for name in origin.splits if name != split):
        count = _some(len(rows.columns), "image")
        remarks = (*remarks, f"of {path} only the split {split} is read ({count}); left aside: {others}")
    return rows, remarks


def _folder(path: Path) -> tuple[Rows, tuple[str, ...]]:
    """The images of a folder that holds nothing but files, and what is left aside there."""
    files = origins.walk(path)
    pictures = [file for file in files if is_image(file)]
    parts = [file.relative_to(path).parts for file in pictures]
    splits = {part[0] for part in parts if len(part) > 1}
    remarks: tuple[str, ...] = ()
    root = path
    if splits <= set(SPLITS) and any(len(part) > 2 for part in parts):
        split = next(name for name in (*TESTS, "train") if name in splits)
        root = path / split
        kept = [file for file in pictures if root in file.parents]
        if aside := len(pictures) - len(kept):
            where = f" in {', '.join(sorted(splits - {split}))}" if splits != {split} else ""
            count = _some(len(kept), "image")
            remarks = (
                f"of {path} only the split {split} is read ({count}); left aside: {_some(aside, 'image')}{where}",
            )
        pictures = kept
    rest = [file for file in files if not is_image(file) and _may_be_image(file) and (root in file.parents)]
    kinds = ", ".join(sorted({file.suffix.lower() or "no ending" for file in rest}))
    if not pictures:
        instead = f", not {kinds}" if rest else ""
        raise UserError(f"there is no image in {path} or below it; images end in {_endings()}{instead}")
    if rest:
        were = "was" if len(rest) == 1 else "were"
        left = f"{_some(len(rest), 'file')} of {root} {were} left out: {kinds}; convert them to .jpg or .png"
        remarks = (*remarks, left)
    return _pictures(pictures, root), remarks


def _may_be_image(file: Path) -> bool:
    return file.suffix.lower() not in BESIDE and file.name.lower() not in ("readme", "license")


def _hold_images(tables: Sequence[Path]) -> bool:
    """Whether a column of some parquet file can hold images; also where one cannot be read, so that it is named."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return any(sources.image_columns(pq.read_schema(file)) for file in tables)
    except (pa.ArrowException, OSError):
        return True


def _some(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _endings() -> str:
    return ", ".join(sorted(origins.suffixes()))


def _pictures(files: Sequence[Path], folder: Path) -> Rows:
    return origins.picture_rows(files, folder, lambda row: os.fsencode(files[row]).decode("utf-8", "backslashreplace"))


def _label_column(rows: Rows, image: str, classes: Sequence[str]) -> str:
    """The column that is sure to hold labels: one that declares its classes, else the one called label, else the one of
    texts that are all classes of the model. Numbers of another name may be ages. Raises UserError where there is none,
    or several could be meant."""
    import pyarrow as pa

    others: list[str] = [column for column in rows.columns.column_names if column not in (image, "domain")]
    if any(sources.declared(rows, column) for column in others):
        return sources.columns(rows, image, None)[1]
    if "label" in others:
        return "label"
    means = site.finder(classes)

    def says_classes(column: str) -> bool:
        kind = rows.columns[column].type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            return False
        words = [word for word in rows.columns[column].unique().to_pylist() if word is not None]
        return bool(words) and all(len(means(word)) == 1 for word in words)

    found = [column for column in others if says_classes(column)]
    if len(found) == 1:
        return found[0]
    wanted = "one that declares its classes, is called label or holds classes of the model and no other text"
    which = f"several columns of the model's classes ({', '.join(found)})" if found else f"no label column ({wanted})"
    raise UserError(f"{rows.where} has {which} among {', '.join(others)}; choose one with data.label=")


def _labels(rows: Rows, column: str, classes: Sequence[str]) -> tuple[Tensor, str]:
    """Each row's number within the model's classes, int64 [n], -1 where it has none; and in words which those are.
    Raises UserError where no row has one."""
    import pyarrow as pa

    if column not in rows.columns.column_names:
        raise UsageError(f"{rows.where} has no column '{column}', only {', '.join(rows.columns.column_names)}")
    there = torch.from_numpy(rows.columns[column].is_valid().to_numpy().copy())
    at = torch.nonzero(there)[:, 0].tolist()
    part = rows._replace(columns=rows.columns.select([column]).take(at), at=lambda row: rows.at(at[row]))
    if not at:
        raise UserError(f"column '{column}' of {rows.where} is empty")
    if pa.types.is_integer(rows.columns[column].type) and not sources.declared(rows, column):
        found, strange = sources.labels(part, column, classes)[0], []
    else:
        own, written = sources.labels(part, column, None)
        means = site.finder(classes)
        which = [means(name) for name in written]
        found = torch.tensor([one[0] if len(one) == 1 else -1 for one in which])[own]
        strange = [written[k] for k in own[found < 0].unique().tolist()]
    if (found < 0).all():
        raise UserError(f"column '{column}' of {rows.where} has '{strange[0]}', which is no class of the model")
    out = torch.full((len(there),), -1)
    out[there] = found
    known = int((out >= 0).sum())
    doubts = [f"{len(there) - len(at)} without a label"] if len(at) < len(there) else []
    if strange:
        named = ", ".join(f"'{name}'" for name in strange[:5]) + (", ..." if len(strange) > 5 else "")
        doubts.append(f"{int((found < 0).sum())} of no class of the model ({named})")
    return out, f"accuracy over {known} of {_some(len(out), 'image')}, {' and '.join(doubts)}" if doubts else ""
