"""What all commands share: arguments, tables, the JSON line."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..config import Experiment

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RECIPE | FILE.toml | RUN_DIRECTORY] [KEY=VALUE]...", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
Threads = Annotated[int, typer.Option(min=1, help="CPU threads; one is fastest for small priors.")]
Runs = Annotated[Path, typer.Option("--runs", help="Where run directories go.")]


def experiment_of(words: list[str] | None) -> "Experiment":
    """`recipes.spoken`, imported when a command needs it."""
    from ..recipes import spoken

    return spoken(words or [])


def use_threads(n: int) -> None:
    import torch

    torch.set_num_threads(n)


def emit(value: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(value, allow_nan=False), flush=True)


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Prints a table on stdout, every word as it is; the first column is text, the others are numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    out = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for i, column in enumerate(columns):
        out.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        out.add_row(*row)
    Console(markup=False, emoji=False).print(out)  # a class may be called [b] or :cat:


def outcome_table(result: dict[str, Any]) -> None:
    """Prints what a run came to."""
    from ..progress import clock

    rows = [[key.replace("_", " "), percent(result[key])] for key in ("last", "mean_last10", "best")]
    rows[-1][0] = "best (optimistic)"
    whose = "mean over clients' own models" if result.get("models") == "own" else "global model"
    held = result.get("judged_on") == "validation"
    table("Accuracy on held-out rows of clients" if held else "Test accuracy", ["", whose], rows)
    print(
        f"{result['rounds']} rounds, {result['uplink_MB']:.3f} MB up, {result['downlink_MB']:.3f} MB down, "
        f"{clock(result['seconds'])}. Report: {result['directory']}/report.html"
    )


def percent(value: float | None, spread: float | None = None) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.1f} %" + (f" ± {100 * spread:.1f}" if spread is not None else "")
