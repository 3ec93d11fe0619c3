"""A table of a sweep as text: Markdown, LaTeX (booktabs), comma-separated values."""

import csv
import io

from .tables import MEASURES, Entry, Labels, Table


def shown(entry: Entry, table: Table) -> str:
    """E.g. "61.2 ± 1.7", of a gain "+8.0 ± 1.6"."""
    if entry.mean is None:
        return "not reached" if entry.values else "–"
    places = MEASURES[table.metric].places
    text = f"{entry.mean:{'+' if table.signed else ''}.{places}f}"
    if entry.spread is not None:
        text += f" ± {entry.spread:.{max(places, 1)}f}"
    reached = [v for v in entry.values.values() if v is not None]
    if len(reached) < len(entry.values):
        text += f" ({len(reached)} of {len(entry.values)} seeds)"
    return text


def beside(entry: Entry, table: Table) -> str:
    """The paper's number in brackets; "" where there is none."""
    if entry.published is None:
        return ""
    p = entry.published
    number = f"{p.mean:+g}" if table.signed else f"{p.mean:g}"
    return f" [{number}" + (f" ± {p.spread:g}" if p.spread is not None else "") + ("*" if p.note else "") + "]"


def column_name(column: Labels) -> str:
    return ", ".join(column) or "all"


def markdown(table: Table) -> str:
    """A GitHub table with its notes below."""
    heads = [*map(_plain, table.heads), *(_plain(column_name(column)) for column in table.columns)]
    lines = [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
    for row in table.rows:
        cells = [_marked(table.entries[row, column], table) for column in table.columns]
        lines.append(f"| {' | '.join([*map(_plain, row), *cells])} |")
    return "\n".join([*lines, "", *(f"- {note}" for note in table.notes)]) + "\n"


def _plain(text: str) -> str:
    return text.replace("|", "\\|")


def _marked(entry: Entry, table: Table) -> str:
    text = shown(entry, table)
    return (f"**{text}**" if entry.strong else text) + beside(entry, table)


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
            text = shown(entry, table).translate(ESCAPES)
            cells.append((f"\\textbf{{{text}}}" if entry.strong else text) + beside(entry, table).translate(ESCAPES))
        lines.append(" & ".join([*(label.translate(ESCAPES) for label in row), *cells]) + r" \\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"]) + "\n"


def comma_separated(table: Table) -> str:
    """One line a cell and seed, and the paper's number: for other programs."""
    out = io.StringIO()
    write = csv.writer(out, lineterminator="\n")
    number_of = f"{table.metric}_gain" if table.signed else table.metric
    write.writerow([*table.heads, "column", "seed", number_of, "published", "published_spread"])
    for row in table.rows:
        for column in table.columns:
            entry = table.entries[row, column]
            p = entry.published
            for seed, number in sorted(entry.values.items()):
                paper = [p.mean, "" if p.spread is None else p.spread] if p else ["", ""]
                write.writerow([*row, column_name(column), seed, "" if number is None else repr(number), *paper])
    return out.getvalue()


FORMATS = {"md": markdown, "latex": latex, "csv": comma_separated}
