"""The data that one site of a federation trains with: its own files, under the classes and at the image size of the
experiment. Files are found and decoded as `sources` does, but nothing is held out: the server has the test set."""

import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedprior.data import origins, sources, table
from fedprior.data.origins import Rows
from fedprior.data.table import Table
from fedprior.errors import UserError, unknown
from fedprior.priors.class_names import pairs


def load(
    path: str | Path,
    classes: Sequence[str],
    size: tuple[int, int],
    *,
    image: str | None = None,
    label: str | None = None,
    names: str | Path = "",
) -> Table:
    """All training rows of a site: images uint8 [n, 3, height, width] of `size` (height, width) in pixels, labels that
    number `classes` (the experiment's readable class names), ids from 0.

    `path` is a parquet file, a folder with parquet files, a folder of class folders (with or without train above
    them), or what `save_to_disk` wrote. Of several splits only `train` is read, in all its shards: test files beside
    it are left alone. A folder whose one split has another name is read whole, unless that is test, valid, validation
    or val. `image` and `label` name the columns where the features do not tell.

    Classes are told by name, so a site may have them in any order, some of them only, or names without rows that the
    experiment does not know. Underscores count as spaces and surrounding spaces not at all; where no class is written
    so, upper and lower case are the same. `names` is a UTF-8 text file with lines `class = experiment's class` for
    those that the site calls otherwise; several may be one. Whole numbers without names are the experiment's own
    numbers, unless there is such a file: then they are names as well.

    The decoded rows are cached by content, in a folder that only its owner can enter.

    Raises UserError, with file and row, for a row of another class, one without a label and an image that cannot be
    decoded; UserError for data without rows or that cannot be read, and for lines in `names` that fit no class;
    UsageError for a column that is not there; ValueError for a size below one pixel.
    """
    height, width = size
    if height < 1 or width < 1:
        raise ValueError(f"images must be of at least 1 x 1 pixels, not {height} x {width}")
    origin = origins.local(Path(path).expanduser())
    train, _ = origins.roles(origin)
    renamed = Path(names).expanduser() if names else None
    given = origins.file_digest([renamed], renamed.parent) if renamed else ""

    def decode() -> tuple[Table, dict[str, Any]]:
        rows = sources.split(origin, train)
        pictures, column = sources.columns(rows, image, label)
        numbers = _numbers(rows, column, classes, renamed)
        return table.make(sources.pixels(rows, pictures, (width, height)), numbers), {}

    key = [origin.digest(train), image or "", label or "", f"{height} x {width}", given, *classes]
    return sources.cached("sites", key, decode, mode=0o700)[0]


def _numbers(rows: Rows, column: str, classes: Sequence[str], renamed: Path | None) -> Tensor:
    """Each row's number within the experiment's classes, int64 [n]."""
    import pyarrow as pa

    values = rows.columns[column]
    if pa.types.is_integer(values.type) and not sources.declared(rows, column):
        if renamed is None:
            return sources.labels(rows, column, classes)[0]
        words = values.cast(pa.string())
        rows = rows._replace(columns=rows.columns.set_column(rows.columns.column_names.index(column), column, words))
    own, written = sources.labels(rows, column, None)
    called = [sources.readable(name) for name in written]
    find = finder(classes)
    meant = {} if renamed is None else _meant(renamed, called, classes, find)
    found = [meant.get(name) or find(raw) for name, raw in zip(called, written, strict=True)]
    number = np.array([which[0] if len(which) == 1 else -1 for which in found], dtype=np.int64)
    foreign = np.flatnonzero(number[own.numpy()] < 0)
    if len(foreign):
        of = own.numpy()[foreign]
        name, which = called[of[0]], found[of[0]]
        place = rows.at(int(foreign[0]))
        if which:
            raise UserError(f"{place} has {_ambiguous(name, which, classes)}")
        if not name:
            raise UserError(f"{place} has a '{column}' without a name; add it or drop the row")
        others = [called[i] for i in dict.fromkeys(of.tolist()) if called[i] != name and not found[i]]
        raise UserError(
            f"{place} is of an {unknown('class', name, classes)} (or say what it is in the site's file of class names, "
            f"with a line '{name} = experiment's class'{_too(others)})"
        )
    return torch.from_numpy(number)[own]


def finder(classes: Sequence[str]) -> Callable[[str], list[int]]:
    """What gives the numbers of the classes that a name, as the data have it, may mean: those written so, else those
    written so by a person, else those that differ in case."""
    alike: dict[str, list[int]] = {}
    folded: dict[str, list[int]] = {}
    for i, name in enumerate(classes):
        alike.setdefault(name, []).append(i)
        folded.setdefault(_folded(name), []).append(i)

    def find(name: str) -> list[int]:
        said = sources.readable(name)
        return alike.get(name) or alike.get(said) or folded.get(_folded(name)) or folded.get(_folded(said), [])

    return find


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()  # some file systems take the accents of folder names apart


def _meant(
    renamed: Path, called: Sequence[str], classes: Sequence[str], find: Callable[[str], list[int]]
) -> dict[str, list[int]]:
    """The class that each of the site's names stands for by the lines of the file."""
    left, right = "class", "experiment's class"
    out = {}
    for name, said in pairs(renamed, called, left, right, f"no names at '{renamed}'; give").items():
        out[name] = find(said)
        if not out[name]:
            raise UserError(f"{renamed}: the line for '{name}' has an {unknown('class', said, classes)}")
        if len(out[name]) > 1:
            raise UserError(f"{renamed}: the line for '{name}' has {_ambiguous(said, out[name], classes)}")
    return out


def _ambiguous(name: str, which: Sequence[int], classes: Sequence[str]) -> str:
    found = " or ".join(f"{i} ({classes[i]})" for i in which)
    return (
        f"class '{name}', which may be the experiment's class {found}; write it as that does, or give labels as its "
        "numbers"
    )


def _too(others: Sequence[str]) -> str:
    """What else has to be told, for a message."""
    if not others:
        return ""
    listed = ", ".join(f"'{name}'" for name in others[:5])
    return f", and likewise {listed}" + (f" and {len(others) - 5} more" if len(others) > 5 else "")
