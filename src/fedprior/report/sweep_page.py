"""A sweep on one page: its table, a curve for every row in every column, what it cost and what failed."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from .. import store, table_forms, tables
from ..sweep import Sweep
from ..sweep_folder import Tally, done, load, tally
from . import html, numbers, summary
from .html import Card, Section
from .load import arm
from .numbers import Arm

if TYPE_CHECKING:
    from markupsafe import Markup

CURVES = 8  # rows that a figure shows; with more, lines cannot be told apart


def write(folder: Path, metric: tables.Metric, path: Path) -> None:
    """Writes the page of a sweep's directory. Raises UserError where no cell is done."""
    store.write_text(path, render(folder, metric))


def render(folder: Path, metric: tables.Metric) -> str:
    sweep, standing = load(folder), tally(load(folder), folder)
    table = tables.of(folder, metric)
    arms = curves_of(folder, sweep)
    first = next(folder / "cells" / cell.name for cell in sweep.cells() if done(folder, cell))
    manifest = store.read_json(first / "manifest.json")
    spent = tables.costs(folder)
    return html.document(
        sweep.name,
        [
            Section(
                "Results",
                [
                    html.table("results", rows_of(table), table.says),
                    html.bullets([note.replace("Bold:", "★:") for note in table.notes]),
                ],
            ),
            *(Section(f"Accuracy: {name}", figures_of(own)) for name, own in arms.items()),
            Section("What it cost", [html.prose([tables.spending(spent)])]),
            Section("What failed", failed(standing)),
            Section("How it was made", [html.fold("Cells", html.listing(cells(sweep)))]),
        ],
        manifest["versions"] | manifest["hardware"],
        facts=[
            f"{standing.done} of {standing.cells} cells",
            numbers.counted(len(table.rows), "row"),
            numbers.counted(len(table.columns), "column"),
            numbers.counted(len(sweep.seeds), "seed"),
        ],
        cards=cards(table),
        note=f"The best of each column: {table.says}.",
        sentences=sentences(table, spent),
    )


def rows_of(table: tables.Table) -> list[dict[str, str]]:
    """As the page's table wants them; what is bold elsewhere has a star here, which a reader aloud reads too."""
    out = []
    for row in table.rows:
        line = dict(zip(table.heads, row, strict=True))
        for column in table.columns:
            entry = table.entries[row, column]
            text = table_forms.shown(entry, table) + table_forms.beside(entry, table)
            line[table_forms.column_name(column)] = f"★ {text}" if entry.strong else text
        out.append(line)
    return out


def sentences(table: tables.Table, spent: Mapping[str, float]) -> list[str]:
    """The sweep in three sentences made from its numbers."""
    best = []
    for column in table.columns:
        strong = [row for row in table.rows if table.entries[row, column].strong]
        if strong:
            value = lambda row, column=column: table.entries[row, column].mean or 0.0
            lower = tables.MEASURES[table.metric].better == "lower"
            top = (min if lower else max)(strong, key=value)
            others = len(strong) - 1
            level = f", level with {numbers.counted(others, 'other row')}" if others else ""
            number = table_forms.shown(table.entries[top, column], table)
            best.append(f"{table_forms.column_name(column)}: {', '.join(top)} ({number}{level})")
    missing = sum(entry.missing for entry in table.entries.values())
    return [
        f"The best {'is' if len(best) == 1 else 'are'}, by column, {'; '.join(best)}."
        if best
        else "No row is the best yet.",
        "★ marks the best of a column and what is not significantly worse.",
        f"{missing} cells are not done, so this is not the whole sweep." if missing else tables.spending(spent),
    ]


def cards(table: tables.Table) -> list[Card]:
    from .figures import colour

    out = []
    for i, column in enumerate(table.columns):
        means = [e.mean for row in table.rows if (e := table.entries[row, column]).strong and e.mean is not None]
        if means and len(table.columns) <= summary.CARDS:
            measure = tables.MEASURES[table.metric]
            best = min(means) if measure.better == "lower" else max(means)
            out.append(Card(table_forms.column_name(column), f"{best:.{measure.places}f}", "", colour(i)))
    return out


def curves_of(folder: Path, sweep: Sweep) -> dict[str, dict[tables.Labels, Arm]]:
    """By column, an arm for every row with the runs that are done."""
    out: dict[str, dict[tables.Labels, Arm]] = {}
    for column in dict.fromkeys(cell.column for cell in sweep.cells()):
        arms = {}
        for row in dict.fromkeys(cell.row for cell in sweep.cells()):
            runs = [
                folder / "cells" / cell.name
                for cell in sweep.cells()
                if (cell.row, cell.column) == (row, column) and done(folder, cell)
            ]
            if runs:
                arms[row] = arm(", ".join(row) or "all", runs)
        out[table_forms.column_name(column)] = arms
    return out


def figures_of(arms: Mapping[tables.Labels, Arm]) -> "list[Markup | None]":
    from . import figures

    trained = {row: one for row, one in arms.items() if all(numbers.evaluated(curve) for curve in one.curves)}
    kinds = dict.fromkeys(one.judged_on for one in trained.values())  # each figure is of one kind of rows
    alike = [{row: one for row, one in trained.items() if one.judged_on == kind} for kind in kinds]
    return [html.panels(figures.training(part)) for own in alike for part in parts_of(own)]


def parts_of(arms: Mapping[tables.Labels, Arm]) -> list[list[Arm]]:
    """At most CURVES arms each; where there are more, rows that share their first label stay together."""
    if len(arms) <= CURVES:
        return [list(arms.values())] if arms else []
    kin: dict[tables.Labels, list[Arm]] = {}
    for row, one in arms.items():
        kin.setdefault(row[:1] if len(row) > 1 else (), []).append(one)
    return [own[i : i + CURVES] for own in kin.values() for i in range(0, len(own), CURVES)]


def failed(standing: Tally) -> "list[Markup | None]":
    if not standing.failed:
        return [html.prose(["Nothing."])]
    rows = [{"cell": name, "why": why} for name, why in standing.failed.items()]
    return [html.table("failed", rows, "Cells that failed; the same command tries them again.")]


def cells(sweep: Sweep) -> str:
    return "\n".join(f"{cell.name}: {' '.join(cell.words)}" for cell in sweep.cells())
