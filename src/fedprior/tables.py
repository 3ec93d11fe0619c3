"""A sweep's results as a table: means and spreads over seeds, what the best is not significantly better than, and a
paper's number beside ours."""

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from . import store
from .errors import UserError
from .record import metrics
from .report import summary
from .sweep import Cell, Sweep, done, load

Metric = Literal["mean_last10", "last", "best", "rounds_to_target", "MB_to_target"]
LEVEL = 0.05  # of the paired test
METRICS: dict[str, str] = {
    "mean_last10": "test accuracy in %, mean of the last ten rounds",
    "last": "test accuracy in % after the last round",
    "best": "best test accuracy in % of any round (optimistic: chosen on the test set)",
    "rounds_to_target": "rounds until the target accuracy",
    "MB_to_target": "MB (1e6 bytes, both directions) until the target accuracy",
}


class Published(NamedTuple):
    """A paper's number for a cell, in the units of the table; `note` where it is known to be inconsistent."""

    mean: float
    spread: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Entry:
    """One cell of a table."""

    values: dict[int, float | None]  # by seed; None where a target was not reached
    missing: int  # seeds that are not done
    mean: float | None
    spread: float | None
    strong: bool = False  # the best of its column, or not significantly worse
    published: Published | None = None


class Table(NamedTuple):
    """A sweep in numbers: an entry for every row and column."""

    title: str
    metric: str
    rows: list[tuple[str, ...]]
    columns: list[tuple[str, ...]]
    heads: tuple[str, ...]  # names of the rows' labels
    entries: dict[tuple[tuple[str, ...], tuple[str, ...]], Entry]
    notes: list[str]


def of(folder: Path, metric: Metric = "mean_last10") -> Table:
    """The table of a sweep's directory, as far as it is done. Raises UserError where nothing is."""
    sweep = load(folder)
    found = {cell: value(folder, sweep, cell, metric) for cell in sweep.cells() if done(folder, cell)}
    if not found:
        raise UserError(f"no cell of {folder} is done; `fedprior sweep {folder}` runs them")
    rows = list(dict.fromkeys(cell.row for cell in sweep.cells()))
    columns = list(dict.fromkeys(cell.column for cell in sweep.cells()))
    published = papers(sweep, metric)
    entries = {}
    for row in rows:
        for column in columns:
            values = {c.seed: v for c, v in found.items() if (c.row, c.column) == (row, column)}
            mean, spread = summary.across_seeds(list(values.values()))
            entries[row, column] = Entry(
                values, len(sweep.seeds) - len(values), mean, spread, published=published.get((row, column))
            )
    lower = metric.endswith("_to_target")
    for column in columns:
        for row in strongest({row: entries[row, column].values for row in rows}, lower):
            entries[row, column] = _strong(entries[row, column])
    heads = tuple(axis.name for axis in sweep.rows)
    return Table(sweep.name, metric, rows, columns, heads, entries, notes(sweep, metric, entries))


def _strong(entry: Entry) -> Entry:
    return Entry(entry.values, entry.missing, entry.mean, entry.spread, True, entry.published)


def value(folder: Path, sweep: Sweep, cell: Cell, metric: Metric) -> float | None:
    """A cell's number in the units of the table."""
    run = folder / "cells" / cell.name
    if metric in ("mean_last10", "last", "best"):
        head = summary.headline(metrics(run))[metric]
        return None if head is None else 100 * float(head)
    target = store.read_json(run / "result.json").get("target")
    if target is None:
        raise UserError(f"--metric {metric} needs target= in the sweep's settings")
    hit = summary.to_target(metrics(run), float(target))
    return None if hit is None else float(hit["rounds" if metric == "rounds_to_target" else "MB"])


def strongest(
    values: Mapping[tuple[str, ...], Mapping[int, float | None]], lower: bool = False
) -> list[tuple[str, ...]]:
    """The row with the best mean, and those that are not significantly worse.

    Seeds are blocks that every row has been in: a row is worse when the difference of its mean to the best one's is
    more than chance at 5 % (two-sided t-test, error from the residuals of an analysis of variance over rows and seeds;
    with two rows this is the paired t-test). Rows that lack seeds are no match; with one seed only the best is named.
    """
    known = {row: {seed: v for seed, v in by_seed.items() if v is not None} for row, by_seed in values.items()}
    seeds = max((sorted(v) for v in known.values()), key=len, default=[])
    full = {row: [v[seed] for seed in seeds] for row, v in known.items() if v and sorted(v) == seeds}
    if not full:
        return []
    x = np.array(list(full.values()))  # [rows, seeds]
    means = x.mean(1)
    best = int(means.argmin() if lower else means.argmax())
    worse = differs(x, best).tolist()
    return [row for row, bad in zip(full, worse, strict=True) if not bad]


def differs(x: np.ndarray, best: int) -> np.ndarray:
    """Which rows of x float64 [rows, seeds] have another mean than row `best`, bool [rows]; see `strongest`."""
    from scipy import stats

    rows, seeds = x.shape
    gaps = np.abs(x.mean(1) - x[best].mean())
    if seeds < 2 or rows < 2:
        return np.asarray(np.arange(rows) != best)
    residual = x - x.mean(1, keepdims=True) - x.mean(0, keepdims=True) + x.mean()
    free = (rows - 1) * (seeds - 1)
    error = float((residual**2).sum()) / free
    noise = math.sqrt(2 * error / seeds)
    if noise <= 1e-12 * max(1.0, float(np.abs(x).max())):  # apart by the same amount for every seed, or equal
        return np.asarray(gaps > 1e-9)
    return np.asarray(2 * stats.t.sf(gaps / noise, free) < LEVEL)


def papers(sweep: Sweep, metric: str) -> dict[tuple[tuple[str, ...], tuple[str, ...]], Published]:
    """The paper's numbers by (row, column), where there are any for this metric."""
    from .sweeps import PUBLISHED

    return PUBLISHED.get((sweep.table, metric), {})


def notes(sweep: Sweep, metric: str, entries: Mapping[Any, Entry]) -> list[str]:
    seeds = len(sweep.seeds)
    out = [
        f"{METRICS[metric]}; mean ± sample standard deviation over {seeds} seed{'s' * (seeds > 1)}"
        f" ({', '.join(map(str, sweep.seeds))})."
    ]
    if seeds > 1:
        out.append(
            "Bold: the best of its column, and what is not significantly worse (two-sided t-test at 5 %, seeds as "
            "blocks, the error from the residuals of all rows of the column; not adjusted for the number of rows)."
        )
    else:
        out.append("Bold: the best of its column. One seed cannot tell an effect from chance.")
    if sweep.scale:
        out.append(f"Scale: {sweep.scale}")
    if any(entry.published for entry in entries.values()):
        out.append("In brackets: the paper's number, from its own scale.")
    out += list(dict.fromkeys(e.published.note for e in entries.values() if e.published and e.published.note))
    if missing := sum(entry.missing for entry in entries.values()):
        out.append(f"{missing} of {seeds * len(entries)} cells are not done; their means are over fewer seeds.")
    if any(None in entry.values.values() for entry in entries.values()):
        out.append("Not every seed reached the target; means are over those that did, and such entries are marked.")
    return out


def shown(entry: Entry, metric: str) -> str:
    """E.g. "61.2 ± 1.7"."""
    if entry.mean is None:
        return "not reached" if entry.values else "–"
    places = 0 if metric == "rounds_to_target" else 1 if not metric.startswith("MB") else 2
    text = f"{entry.mean:.{places}f}"
    if entry.spread is not None:
        text += f" ± {entry.spread:.{max(places, 1)}f}"
    reached = [v for v in entry.values.values() if v is not None]
    if len(reached) < len(entry.values):
        text += f" ({len(reached)} of {len(entry.values)} seeds)"
    return text


def beside(entry: Entry) -> str:
    """The paper's number in brackets; "" where there is none."""
    if entry.published is None:
        return ""
    p = entry.published
    return f" [{p.mean:g}" + (f" ± {p.spread:g}" if p.spread is not None else "") + ("*" if p.note else "") + "]"


def column_name(column: tuple[str, ...]) -> str:
    return ", ".join(column) or "all"


def markdown(table: Table) -> str:
    """A GitHub table with its notes below."""
    heads = [*map(_plain, table.heads), *(_plain(column_name(column)) for column in table.columns)]
    lines = [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
    for row in table.rows:
        cells = [_marked(table.entries[row, column], table.metric, "**", "**") for column in table.columns]
        lines.append(f"| {' | '.join([*map(_plain, row), *cells])} |")
    return "\n".join([*lines, "", *(f"- {note}" for note in table.notes)]) + "\n"


def _plain(text: str) -> str:
    return text.replace("|", "\\|")


def _marked(entry: Entry, metric: str, before: str, after: str) -> str:
    text = shown(entry, metric)
    return (f"{before}{text}{after}" if entry.strong else text) + beside(entry)


ESCAPES = str.maketrans(
    {
        **{c: f"\\{c}" for c in "&%$#_{}"},
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "\\": r"\textbackslash{}",
    }
    | {"±": r"$\pm$", "–": "--", "<": "$<$", ">": "$>$", "|": "$|$"}
)


def latex(table: Table) -> str:
    """A booktabs table for a paper; notes as comments."""
    across = [column_name(column).translate(ESCAPES) for column in table.columns]
    lines = [
        *(f"% {note}" for note in table.notes),
        f"\\begin{{tabular}}{{{'l' * len(table.heads)}{'c' * len(across)}}}",
        "\\toprule",
        " & ".join([*(head.translate(ESCAPES) for head in table.heads), *across]) + r" \\",
        "\\midrule",
    ]
    for row in table.rows:
        cells = []
        for column in table.columns:
            entry = table.entries[row, column]
            text = shown(entry, table.metric).translate(ESCAPES)
            cells.append((f"\\textbf{{{text}}}" if entry.strong else text) + beside(entry).translate(ESCAPES))
        lines.append(" & ".join([*(label.translate(ESCAPES) for label in row), *cells]) + r" \\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"]) + "\n"


def comma_separated(table: Table) -> str:
    """One line a cell and seed, and the paper's number: for other programs."""
    out = io.StringIO()
    write = csv.writer(out, lineterminator="\n")
    write.writerow([*table.heads, "column", "seed", table.metric, "published", "published_spread"])
    for row in table.rows:
        for column in table.columns:
            entry = table.entries[row, column]
            p = entry.published
            for seed, number in sorted(entry.values.items()):
                paper = [p.mean, "" if p.spread is None else p.spread] if p else ["", ""]
                write.writerow([*row, column_name(column), seed, "" if number is None else repr(number), *paper])
    return out.getvalue()


FORMATS = {"md": markdown, "latex": latex, "csv": comma_separated}


def costs(folder: Path) -> dict[str, float]:
    """What the cells that are done took: hours of their processes, MB sent in both directions, synthetic rows."""
    sweep = load(folder)
    results = [
        store.read_json(folder / "cells" / cell.name / "result.json") for cell in sweep.cells() if done(folder, cell)
    ]
    return {
        "cells": len(results),
        "hours": sum(float(r["seconds"]) for r in results) / 3600,
        "MB": sum(float(r["uplink_MB"]) + float(r["downlink_MB"]) for r in results),
        "synthetic_rows": sum(int(r.get("synthetic_rows") or 0) for r in results),
    }
