"""A sweep's results as a table: means and spreads over seeds, what the best is not significantly better than, and a
paper's number beside ours."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from . import resume, store
from .errors import UsageError, UserError
from .paired import FEW, LEAST, differs, the_test
from .progress import clock
from .record import metrics
from .report import numbers
from .sweep import NOTHING, Cell, Sweep
from .sweep_folder import done, load

Metric = Literal["mean_last10", "last", "best", "rounds_to_target", "MB_to_target", "hours", "synthetic_rows"]
Labels = tuple[str, ...]


class Measure(NamedTuple):
    """What a number of a table is."""

    says: str
    places: int
    better: Literal["higher", "lower", ""]  # "": a cost that depends on the machine or on what was asked for


MEASURES: dict[Metric, Measure] = {
    "mean_last10": Measure("{} accuracy in %, {}", 1, "higher"),
    "last": Measure("{} accuracy in % after the last round", 1, "higher"),
    "best": Measure("best {} accuracy in % of any round (optimistic: chosen on the rows it is told of)", 1, "higher"),
    "rounds_to_target": Measure("rounds until the target accuracy", 0, "lower"),
    "MB_to_target": Measure("MB (1e6 bytes, both directions) until the target accuracy", 2, "lower"),
    "hours": Measure("hours of a cell's process; who first needs images or descriptors makes them for all", 3, ""),
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
    marks: str = ""  # of KINDS, where others of the table are of another kind, and UNDONE
    published: Published | None = None


KINDS = {
    "†": "mean over clients' own models",
    "§": "on rows held out at clients, not on the test set",
    "¶": "mean over domains",
}
"""What an accuracy may be beside that of one global model on test images."""
UNDONE = "‡"  # updates were refused, or rounds left the model as it was
NAMED = 4  # entries of which that is said in words


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


def of(folder: Path, metric: Metric = "mean_last10", against: str = "", target: float | None = None) -> Table:
    """The table of a sweep's directory, as far as it is done. With `against`, a row's label such as "vanilla" or, where
    several axes have it, "balance=none", each number is the gain over the row that has this label and else the same
    ones, seed by seed. `target` is an accuracy in [0, 1], by default the sweep's own.

    Raises UserError where nothing is done, UsageError for a label that no row has.
    """
    sweep = load(folder)
    runs = {cell: read(folder, cell) for cell in sweep.cells() if done(folder, cell)}
    if not runs:
        raise UserError(f"no cell of {folder} is done; `fedprior sweep {folder}` runs them")
    rows = list(dict.fromkeys(cell.row for cell in sweep.cells()))
    columns = list(dict.fromkeys(cell.column for cell in sweep.cells()))
    published = papers(sweep, metric)
    better = MEASURES[metric].better
    kinds = {cell: kind(run) if better else frozenset() for cell, run in runs.items()}
    common = frozenset.intersection(*kinds.values())
    if "§" in common and len({sweep.experiment(cell).validation for cell in runs}) > 1:  # on rows that differ
        common -= {"§"}
    by_entry: dict[tuple[Labels, Labels], dict[Cell, Run]] = {(row, column): {} for row in rows for column in columns}
    for cell, run in runs.items():
        by_entry[cell.row, cell.column][cell] = run
    entries = {}
    for place, own in by_entry.items():
        values = {cell.seed: value(run, metric, target) for cell, run in own.items()}
        marks = frozenset[str]().union(*(kinds[cell] - common for cell in own))
        marks |= {UNDONE} if better and undone(own.values()) else set()
        entries[place] = entry(values, len(sweep.seeds), published.get(place), marks)
    without: list[Labels] = []
    if against:
        over = baselines(rows, against, [axis.name for axis in sweep.rows])
        without = [row for row, base in over.items() if base is None]
        bases = {row: base for row, base in over.items() if base is not None}
        rows, entries = gains(rows, columns, entries, bases, len(sweep.seeds), bool(better))
    elif better:
        for column in columns:
            alike = {row: e.values for row in rows if not set((e := entries[row, column]).marks) & set(KINDS)}
            alike = {row: v for row, v in alike.items() if all(map(trained, by_entry[row, column].values()))}
            for row in strongest(alike, better == "lower"):
                entries[row, column] = replace(entries[row, column], strong=True)
    judged = sorted({run.result.get("judged_on", "test") for run in runs.values()})
    rounds = numbers.window([len(run.curve) for run in runs.values()])
    if any(line["accuracy"] is None for run in runs.values() for line in run.curve):
        rounds += ", as far as they were evaluated"
    says = MEASURES[metric].says.format(" or ".join(judged), rounds)
    says = ", ".join([says, *(what for mark, what in KINDS.items() if mark in common - {"§"})])  # it is said already
    says = f"gain over {against} in {says}" if against else says
    heads = tuple(axis.name for axis in sweep.rows)
    told = [
        *notes(sweep, metric, entries, says, bool(against), len(sweep.cells()) - len(runs)),
        *([f"Without a row to compare with: {'; '.join(', '.join(row) for row in without)}."] if without else []),
        *(remarks(by_entry, entries) if better else []),
        origin(runs.values()),
    ]
    return Table(sweep.name, metric, rows, columns, heads, entries, told, says, bool(against))


class Run(NamedTuple):
    """What a table needs of a cell that is done."""

    curve: list[dict[str, Any]]  # the lines of metrics.jsonl
    result: dict[str, Any]
    manifest: dict[str, Any]


def read(folder: Path, cell: Cell) -> Run:
    """Raises UserError for files that are damaged."""
    run = folder / "cells" / cell.name
    try:
        return Run(metrics(run), resume.result(run), store.read_json(run / "manifest.json"))
    except (UserError, OSError, ValueError):
        raise UserError(
            f"{run} is damaged; `fedprior sweep {folder}` says how, and makes the table of the others"
        ) from None


def kind(run: Run) -> frozenset[str]:
    """The marks of KINDS that hold for a run's accuracies."""
    holds = {
        "†": run.result.get("models") == "own",
        "§": run.result.get("judged_on") == "validation",
        "¶": any("per_domain" in line for line in run.curve),
    }
    return frozenset(mark for mark, true in holds.items() if true)


def undone(runs: Iterable[Run]) -> tuple[int, int] | None:
    """-> (updates refused, rounds that left the model as it was); None where there are none of both."""
    lines = [line for run in runs for line in run.curve]
    refused = sum(len(line.get("refused", ())) for line in lines)
    skipped = sum(bool(line.get("skipped")) for line in lines)
    return (refused, skipped) if refused or skipped else None


def trained(run: Run) -> bool:
    """Whether a round changed the model; one that stayed as it began is no match for others."""
    return not all(line.get("skipped") for line in run.curve)


def remarks(
    by_entry: Mapping[tuple[Labels, Labels], Mapping[Cell, Run]], entries: Mapping[tuple[Labels, Labels], Entry]
) -> list[str]:
    """What the marks of a table's entries mean; gains have entries for some of the rows that were run."""
    found = {mark for e in entries.values() for mark in e.marks}
    out = [f"{mark} {what}; a number of another kind than the others, and never bold." for mark, what in KINDS.items()]
    out = [line for line in out if line[0] in found]
    parts = []
    for (row, column), own in by_entry.items():
        if UNDONE in found and (counts := undone(own.values())):
            name = ", ".join((*row, *column))
            rounds = sum(len(run.curve) for run in own.values())
            updates = numbers.counted(counts[0], "update")
            parts.append(f"{name}: {updates} refused, {counts[1]} of {rounds} rounds left the model as it was")
    if parts:
        more = f"; and {len(parts) - NAMED} more entries" if len(parts) > NAMED else ""
        out.append(f"{UNDONE} Not all training counted. {'; '.join(parts[:NAMED])}{more}.")
    return out


def entry(
    values: Mapping[int, float | None], seeds: int, published: Published | None = None, marks: Iterable[str] = ()
) -> Entry:
    mean, spread = numbers.across_seeds(list(values.values()))
    return Entry(dict(values), seeds - len(values), mean, spread, published=published, marks="".join(sorted(marks)))


def value(run: Run, metric: Metric, target: float | None = None) -> float | None:
    """A cell's number in the units of the table; None where it never reached the target."""
    if metric in ("mean_last10", "last", "best"):
        head = numbers.headline(run.curve)[metric]
        return None if head is None else 100 * float(head)
    if metric == "hours":
        return float(run.result["seconds"]) / 3600
    if metric == "synthetic_rows":
        return float(run.result.get("synthetic_rows") or 0)
    target = run.result.get("target") if target is None else target
    if target is None:
        raise UserError(f"--metric {metric} needs a target accuracy, such as --target 0.5")
    hit = numbers.to_target(run.curve, float(target))
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


def baselines(rows: Sequence[Labels], said: str, heads: Sequence[str]) -> dict[Labels, Labels | None]:
    """For each row that lacks a label, given alone or after an axis's name, the one that it is measured against: the
    row that has the label and else the same ones or, where the other axes mean nothing beside it, none; None where
    there is no such row. Raises UsageError for a label that is no row's or stands on several axes."""
    head, equals, rest = said.partition("=")
    named = bool(equals) and head in heads
    label = rest if named else said
    at = {i for row in rows for i, one in enumerate(row) if one == label and (not named or heads[i] == head)}
    if not any(heads):
        raise UsageError(
            "--against needs rows to choose from, and in this sweep all that varies goes along the columns"
        )
    if len(at) > 1:
        raise UsageError(f"--against {said}: several axes have that label; say --against {heads[min(at)]}={label}")
    if not at or label == NOTHING:
        known = ", ".join(repr(name) for name in dict.fromkeys(x for row in rows for x in row) if name != NOTHING)
        raise UsageError(f"--against '{said}' must be a label of rows; there are {known}")
    (axis,) = at
    fits = lambda base, row: all(i == axis or b in (r, NOTHING) for i, (b, r) in enumerate(zip(base, row, strict=True)))
    bases = [row for row in rows if row[axis] == label]
    over = {row: [base for base in bases if fits(base, row)] for row in rows if row[axis] != label}
    if not any(over.values()):
        raise UsageError(f"--against {said}: no row has a counterpart that is alike but for this label")
    return {row: next(iter(found), None) for row, found in over.items()}


def gains(
    rows: Sequence[Labels],
    columns: Sequence[Labels],
    entries: Mapping[tuple[Labels, Labels], Entry],
    over: Mapping[Labels, Labels],
    seeds: int,
    tested: bool,
) -> tuple[list[Labels], dict[tuple[Labels, Labels], Entry]]:
    """Rows and entries of differences, over the seeds that both rows have; with `tested` told from chance."""
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
            unlike = (set(own.marks) ^ set(base.marks)) & set(KINDS)
            undone = {UNDONE} & {*own.marks, *base.marks}
            made = entry(values, seeds, paper, unlike | undone)
            known = np.array([v for v in values.values() if v is not None])
            out[row, column] = replace(made, strong=tested and differs(known) and not unlike)
    return kept, out


# what stands below


def papers(sweep: Sweep, metric: str) -> dict[tuple[Labels, Labels], Published]:
    """The paper's numbers by (row, column), where there are any for this metric."""
    from .sweeps import PUBLISHED

    return PUBLISHED.get((sweep.table, metric), {})


def notes(
    sweep: Sweep, metric: Metric, entries: Mapping[tuple[Labels, Labels], Entry], says: str, signed: bool, missing: int
) -> list[str]:
    """Sentences below a table; `missing` cells are not done."""
    seeds = len(sweep.seeds)
    out = [
        f"{says[0].upper()}{says[1:]}; "
        + (f"mean ± sample standard deviation over {seeds} seeds" if seeds > 1 else "one seed")
        + f" ({', '.join(map(str, sweep.seeds))}){', paired by seed' if signed else ''}."
    ]
    tested = f"{the_test('seeds')}, not adjusted for the number of rows"
    shared = compared(entries, signed)
    most = max(shared, default=0)
    all_of_them = "both rows of a gain" if signed else "all rows of a column"
    few = " Few seeds tell only large differences from chance." if most < FEW else ""
    if not MEASURES[metric].better:
        pass
    elif most == 0:
        out.append(f"No seed is done in {all_of_them}, so nothing is bold.")
    elif most < LEAST:
        done_by_all = "" if seeds < LEAST else f", as many as {all_of_them} have,"
        out.append(
            f"{'One seed' if most == 1 else 'Two seeds'}{done_by_all} cannot tell an effect from chance"
            + ("." if signed else "; bold is the best of its column and no more.")
        )
    else:
        bold = "told from zero" if signed else "the best of its column, and what is not significantly worse"
        rest = " Where fewer than three seeds can be compared, nothing is." if signed else ""
        rest = rest or " Where fewer than three seeds can be compared, the best alone is, and without any nothing."
        rest = rest if min(shared) < LEAST else ""
        out.append(f"Bold: {bold} ({tested}).{rest}{few}")
    if sweep.scale:
        out.append(f"Scale: {sweep.scale}.")
    if any(e.published for e in entries.values()):
        out.append(f"In brackets: the paper's {'difference' if signed else 'number'}, from its own scale.")
    out += list(dict.fromkeys(e.published.note for e in entries.values() if e.published and e.published.note))
    if missing:
        bold = "" if signed else ", and bold is by the seeds that all rows of a column have"
        out.append(f"{missing} of {len(sweep.cells())} cells are not done; entries over fewer seeds say so{bold}.")
    if any(None in e.values.values() for e in entries.values()):
        out.append("Not every seed reached the target; means are over those that did, and such entries are marked.")
    return out


def compared(entries: Mapping[tuple[Labels, Labels], Entry], signed: bool) -> list[int]:
    """How many seeds the tests are over: of each gain, or of each column."""
    if signed:
        return [len(e.values) for e in entries.values()]
    columns: dict[Labels, list[set[int]]] = {}
    for (_, column), e in entries.items():
        if e.values and not set(e.marks) & set(KINDS):
            columns.setdefault(column, []).append(set(e.values))
    return [len(set.intersection(*seeds)) for seeds in columns.values()]


def origin(runs: Iterable[Run]) -> str:
    """What made the numbers: versions, commits, hardware, and an engine that rounds in its own way. Without times, so
    that the same cells give the same text."""
    kinds: dict[str, int] = {}
    for run in runs:
        versions, machine = run.manifest.get("versions", {}), run.manifest.get("hardware", {})
        commit = f" at commit {versions['commit']}" if "commit" in versions else ""
        graphics = f", {machine['gpu']}" if machine.get("gpu", "none") != "none" else ""
        graphics += ", engine=vectorised" if run.result.get("engine") == "vectorised" else ""
        kind = (
            f"fedprior {versions.get('fedprior', '?')}{commit}, Python {versions.get('python', '?')}, torch "
            f"{versions.get('torch', '?')}, {machine.get('processor', '?')} ({machine.get('system', '?')}, "
            f"threads a process: {machine.get('threads', '?')}{graphics})"
        )
        kinds[kind] = kinds.get(kind, 0) + 1
    if len(kinds) == 1:
        made = f"Made by {min(kinds)}."
    else:
        made = "Made by: " + "; ".join(f"{numbers.counted(n, 'cell')} by {kind}" for kind, n in kinds.items()) + "."
    return made


def spending(spent: Mapping[str, float]) -> str:
    """`costs` in a sentence."""
    return (
        f"{numbers.counted(spent['cells'], 'cell')} took {clock(3600 * spent['hours'])} of a process, sent "
        f"{spent['MB']:.1f} MB (1e6 bytes, both directions) and trained on "
        f"{numbers.counted(spent['synthetic_rows'], 'synthetic row')}."
    )


def costs(folder: Path) -> dict[str, float]:
    """What the cells that are done took: hours of their processes, MB sent in both directions, synthetic rows."""
    results = [read(folder, cell).result for cell in load(folder).cells() if done(folder, cell)]
    return {
        "cells": len(results),
        "hours": sum(float(r["seconds"]) for r in results) / 3600,
        "MB": sum(float(r["uplink_MB"]) + float(r["downlink_MB"]) for r in results),
        "synthetic_rows": sum(int(r.get("synthetic_rows") or 0) for r in results),
    }
