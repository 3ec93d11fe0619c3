"""A table of a sweep as text: Markdown, LaTeX (booktabs), comma-separated values."""

import csv
import io

from .sweep import NOTHING
from .tables import MEASURES, Entry, Labels, Table


def shown(entry: Entry, table: Table) -> str:
    """E.g. "61.2 ± 1.7", of a gain "+8.0 ± 1.6"."""
    if entry.mean is None:
        return "not reached" if entry.values else "–"
    places = MEASURES[table.metric].places
    text = f"{entry.mean:{'+' if table.signed else ''}.{places}f}"
    if entry.spread is not None:
        text += f" ± {entry.spread:.{max(places, 1)}f}"
    reached, seeds = sum(v is not None for v in entry.values.values()), len(entry.values) + entry.missing
    if reached < seeds:
        text += f" ({reached} of {seeds} seeds)"
    return text + entry.marks


def beside(entry: Entry, table: Table) -> str:
    """The paper's number in brackets; "" where there is none."""
    if entry.published is None:
        return ""
    p = entry.published
    number = f"{p.mean:+g}" if table.signed else f"{p.mean:g}"
    return f" [{number}" + (f" ± {p.spread:g}" if p.spread is not None else "") + ("*" if p.note else "") + "]"


def column_name(column: Labels) -> str:
    return ", ".join(label for label in column if label != NOTHING) or "all"


def markdown(table: Table) -> str:
    """A GitHub table with its notes below."""
    heads = [*map(_plain, table.heads), *(_plain(column_name(column)) for column in table.columns)]
    lines = [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
    for row in table.rows:
        cells = [_marked(table.entries[row, column], table) for column in table.columns]
        lines.append(f"| {' | '.join([*map(_plain, row), *cells])} |")
    return "\n".join([*lines, "", *(f"- {note}" for note in table.notes)]) + "\n"


def _plain(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


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
    | {"†": r"$\dagger$", "‡": r"$\ddagger$", "§": r"\S{}", "¶": r"\P{}"}
)


def latex(table: Table) -> str:
    """A booktabs table for a paper; notes as comments."""
    across = [column_name(column).translate(ESCAPES) for column in table.columns]
    lines = [
        *(f"% {' '.join(note.split())}" for note in table.notes),  # on one line, or it would be set
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
        line = " & ".join([*(label.translate(ESCAPES) for label in row), *cells])
        guard = "{}" if line.startswith(("[", "*")) else ""  # which LaTeX takes for an argument of the last line's end
        lines.append(f"{guard}{line} \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"]) + "\n"


def comma_separated(table: Table) -> str:
    """One line a cell and seed, the paper's number, and marks as below a table: for other programs."""
    out = io.StringIO()
    write = csv.writer(out, lineterminator="\n")
    number_of = f"{table.metric}_gain" if table.signed else table.metric
    write.writerow([*table.heads, "column", "seed", number_of, "published", "published_spread", "marks"])
    for row in table.rows:
        for column in table.columns:
            entry = table.entries[row, column]
            p = entry.published
            for seed, number in sorted(entry.values.items()):
                paper = [p.mean, "" if p.spread is None else p.spread] if p else ["", ""]
                own = "" if number is None else repr(number)
                write.writerow([*row, column_name(column), seed, own, *paper, entry.marks])
    return out.getvalue()


FORMATS = {"md": markdown, "latex": latex, "csv": comma_separated}
