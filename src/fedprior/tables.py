"""A sweep's results as a table: means and spreads over seeds, what the best is not significantly better than, and a
paper's number beside ours."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from . import store
from .errors import UsageError, UserError
from .paired import FEW, LEAST, TESTED, differs
from .progress import clock
from .record import metrics
from .report import summary
from .sweep import Cell, Sweep
from .sweep_run import done, load

Metric = Literal["mean_last10", "last", "best", "rounds_to_target", "MB_to_target", "hours", "synthetic_rows"]
Labels = tuple[str, ...]


class Measure(NamedTuple):
    """What a number of a table is."""

    says: str
    places: int
    better: Literal["higher", "lower", ""]  # "": a cost that depends on the machine or on what was asked for


MEASURES: dict[Metric, Measure] = {
    "mean_last10": Measure("{} accuracy in %, mean of the last ten rounds", 1, "higher"),
    "last": Measure("{} accuracy in % after the last round", 1, "higher"),
    "best": Measure("best {} accuracy in % of any round (optimistic: chosen on the rows it is told of)", 1, "higher"),
    "rounds_to_target": Measure("rounds until the target accuracy", 0, "lower"),
    "MB_to_target": Measure("MB (1e6 bytes, both directions) until the target accuracy", 2, "lower"),
    "hours": Measure("hours that the process of a cell took, made images and descriptors included", 3, ""),
    "synthetic_rows": Measure("synthetic images that clients trained on, all clients together", 0, ""),
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
    strong: bool = False  # the best of its column, or not significantly worse; of gains: told from chance
    published: Published | None = None


class Table(NamedTuple):
    """A sweep in numbers: an entry for every row and column."""

    title: str
    metric: Metric
    rows: list[Labels]
    columns: list[Labels]
    heads: Labels  # names of the rows' labels
    entries: dict[tuple[Labels, Labels], Entry]
    notes: list[str]
    says: str  # what the numbers are
    signed: bool = False  # numbers are differences


def of(folder: Path, metric: Metric = "mean_last10", against: str = "") -> Table:
    """The table of a sweep's directory, as far as it is done. With `against`, a row's label such as "vanilla", each
    number is the gain over the row that has this label and else the same ones, seed by seed.

    Raises UserError where nothing is done, UsageError for a label that no row has.
    """
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
            entries[row, column] = entry(values, len(sweep.seeds), published.get((row, column)))
    if against:
        rows, entries = gains(rows, columns, entries, baselines(sweep, against), len(sweep.seeds))
    elif better := MEASURES[metric].better:
        for column in columns:
            for row in strongest({row: entries[row, column].values for row in rows}, better == "lower"):
                entries[row, column] = replace(entries[row, column], strong=True)
    judged = {store.read_json(folder / "cells" / c.name / "result.json").get("judged_on", "test") for c in found}
    says = MEASURES[metric].says.format(" or ".join(sorted(judged)))
    says = f"gain over {against} in {says}" if against else says
    heads = tuple(axis.name for axis in sweep.rows)
    told = [*notes(sweep, metric, entries, says, bool(against)), origin(folder, found)]
    return Table(sweep.name, metric, rows, columns, heads, entries, told, says, bool(against))


def entry(values: Mapping[int, float | None], seeds: int, published: Published | None = None) -> Entry:
    mean, spread = summary.across_seeds(list(values.values()))
    return Entry(dict(values), seeds - len(values), mean, spread, published=published)


def value(folder: Path, sweep: Sweep, cell: Cell, metric: Metric) -> float | None:
    """A cell's number in the units of the table."""
    run = folder / "cells" / cell.name
    if metric in ("mean_last10", "last", "best"):
        head = summary.headline(metrics(run))[metric]
        return None if head is None else 100 * float(head)
    result = store.read_json(run / "result.json")
    if metric == "hours":
        return float(result["seconds"]) / 3600
    if metric == "synthetic_rows":
        return float(result.get("synthetic_rows") or 0)
    target = result.get("target")
    if target is None:
        raise UserError(f"--metric {metric} needs target= in the sweep's settings")
    hit = summary.to_target(metrics(run), float(target))
    return None if hit is None else float(hit["rounds" if metric == "rounds_to_target" else "MB"])


# tests


def strongest(values: Mapping[Labels, Mapping[int, float | None]], lower: bool = False) -> list[Labels]:
    """The row with the best mean, and those that are not significantly worse: by a two-sided paired t-test at 5 %.

    Rows are compared over the seeds that all of them have, of those that have any. A row that did not reach a target
    with one of these seeds is no match. Fewer than three seeds tell next to nothing: then only the best is named.
    """
    begun = {row: by_seed for row, by_seed in values.items() if by_seed}
    seeds = sorted(set.intersection(*(set(by_seed) for by_seed in begun.values()))) if begun else []
    full = {
        row: [float(v) for seed in seeds if (v := by_seed[seed]) is not None and math.isfinite(v)]
        for row, by_seed in begun.items()
    }
    full = {row: x for row, x in full.items() if seeds and len(x) == len(seeds)}
    if not full:
        return []
    means = {row: math.fsum(x) / len(x) for row, x in full.items()}
    best = (min if lower else max)(means, key=lambda row: means[row])
    gaps = {row: np.subtract(x, full[best]) for row, x in full.items()}
    equal = lambda gap: bool((np.abs(gap) <= 1e-9).all())  # such as FedNova and FedAvg, whatever the seeds
    return [row for row, gap in gaps.items() if equal(gap) or (len(seeds) >= LEAST and not differs(gap))]


# gains over a row


def baselines(sweep: Sweep, label: str) -> dict[Labels, Labels]:
    """For each row that has other labels, the one it is measured against. Raises UsageError for a label that is no
    row's or stands on several axes."""
    at = [i for i, axis in enumerate(sweep.rows) if label in axis.values]
    if len(at) != 1:
        known = ", ".join(repr(name) for axis in sweep.rows for name in axis.values)
        raise UsageError(f"--against '{label}' must be the label of rows on one axis; there are {known}")
    rows = dict.fromkeys(cell.row for cell in sweep.cells())
    return {row: (*row[: at[0]], label, *row[at[0] + 1 :]) for row in rows if row[at[0]] != label}


def gains(
    rows: Sequence[Labels],
    columns: Sequence[Labels],
    entries: Mapping[tuple[Labels, Labels], Entry],
    over: Mapping[Labels, Labels],
    seeds: int,
) -> tuple[list[Labels], dict[tuple[Labels, Labels], Entry]]:
    """Rows and entries of differences, over the seeds that both rows have."""
    out = {}
    kept = [row for row in rows if row in over]
    for row in kept:
        for column in columns:
            own, base = entries[row, column], entries[over[row], column]
            pairs = {seed: (v, base.values[seed]) for seed, v in own.values.items() if seed in base.values}
            values = {seed: None if a is None or b is None else a - b for seed, (a, b) in pairs.items()}
            paper = None
            if own.published and base.published:
                note = own.published.note or base.published.note
                paper = Published(round(own.published.mean - base.published.mean, 4), None, note)
            made = entry(values, seeds, paper)
            known = np.array([v for v in values.values() if v is not None])
            out[row, column] = replace(made, strong=differs(known))
    return kept, out


# what stands below


def papers(sweep: Sweep, metric: str) -> dict[tuple[Labels, Labels], Published]:
    """The paper's numbers by (row, column), where there are any for this metric."""
    from .sweeps import PUBLISHED

    return PUBLISHED.get((sweep.table, metric), {})


def notes(sweep: Sweep, metric: Metric, entries: Mapping[Any, Entry], says: str, signed: bool) -> list[str]:
    seeds = len(sweep.seeds)
    out = [
        f"{says[0].upper()}{says[1:]}; "
        + (f"mean ± sample standard deviation over {seeds} seeds" if seeds > 1 else "one seed")
        + f" ({', '.join(map(str, sweep.seeds))}){', paired by seed' if signed else ''}."
    ]
    tested = f"{TESTED}, not adjusted for the number of rows"
    few = " Few seeds tell only large differences from chance." if seeds < FEW else ""
    if seeds < LEAST:
        out.append(
            f"{'One seed' if seeds == 1 else 'Two seeds'} cannot tell an effect from chance"
            + ("." if signed or not MEASURES[metric].better else "; bold is the best of its column and no more.")
        )
    elif signed:
        out.append(f"Bold: told from zero ({tested}).{few}")
    elif MEASURES[metric].better:
        out.append(f"Bold: the best of its column, and what is not significantly worse ({tested}).{few}")
    if sweep.scale:
        out.append(f"Scale: {sweep.scale}.")
    if any(e.published for e in entries.values()):
        out.append(f"In brackets: the paper's {'difference' if signed else 'number'}, from its own scale.")
    out += list(dict.fromkeys(e.published.note for e in entries.values() if e.published and e.published.note))
    if missing := sum(e.missing for e in entries.values()):
        out.append(
            f"{missing} of {seeds * len(entries)} cells are not done; their means are over fewer seeds, and bold is by "
            "the seeds that all rows of a column have."
        )
    if any(None in e.values.values() for e in entries.values()):
        out.append("Not every seed reached the target; means are over those that did, and such entries are marked.")
    return out


def origin(folder: Path, cells: Iterable[Cell]) -> str:
    """What made the numbers: versions, commits, hardware. Without times, so that the same cells give the same text."""
    manifests = [store.read_json(folder / "cells" / cell.name / "manifest.json") for cell in cells]
    kinds: dict[str, int] = {}
    for manifest in manifests:
        versions, machine = manifest.get("versions", {}), manifest.get("hardware", {})
        commit = f" at commit {versions['commit']}" if "commit" in versions else ""
        graphics = f", {machine['gpu']}" if machine.get("gpu", "none") != "none" else ""
        kind = (
            f"fedprior {versions.get('fedprior', '?')}{commit}, Python {versions.get('python', '?')}, torch "
            f"{versions.get('torch', '?')}, {machine.get('processor', '?')} ({machine.get('system', '?')}, "
            f"threads a process: {machine.get('threads', '?')}{graphics})"
        )
        kinds[kind] = kinds.get(kind, 0) + 1
    if len(kinds) == 1:
        made = f"Made by {min(kinds)}."
    else:
        made = "Made by: " + "; ".join(f"{summary.counted(n, 'cell')} by {kind}" for kind, n in kinds.items()) + "."
    return made


def spending(spent: Mapping[str, float]) -> str:
    """`costs` in a sentence."""
    return (
        f"{summary.counted(spent['cells'], 'cell')} took {clock(3600 * spent['hours'])} of a process, sent "
        f"{spent['MB']:.1f} MB (1e6 bytes, both directions) and trained on "
        f"{summary.counted(spent['synthetic_rows'], 'synthetic row')}."
    )


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
