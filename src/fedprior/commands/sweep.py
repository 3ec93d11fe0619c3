"""`fedprior sweep` and `fedprior table`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from ..errors import UsageError, UserError
from .common import Json, emit

if TYPE_CHECKING:
    from ..sweep import Sweep

Metric = Literal["auto", "mean_last10", "last", "best", "rounds_to_target", "MB_to_target", "hours", "synthetic_rows"]
Metrics = Annotated[Metric, typer.Option(help="What the table shows; auto: what the paper's shows, else mean_last10.")]


def sweep(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TABLE | SWEEP_DIRECTORY | RECIPE | FILE.toml] [KEY=VALUE[,VALUE]...]...", show_default=False
        ),
    ] = None,
    sweeps: Annotated[Path, typer.Option("--sweeps", help="Where sweeps' directories go.")] = Path("sweeps"),
    columns: Annotated[list[str] | None, typer.Option(help="A key that varies along the table's columns.")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes; 0: one a core.")] = 1,
    as_json: Json = False,
) -> None:
    """Run a grid of experiments: `sweep gen-fedsd/table1 scale=smoke`, or `sweep method=fedavg,moon seed=0,1,2`.

    The same command goes on with what was stopped, and tries again what failed."""
    from .. import store
    from ..choice import cores
    from ..progress import for_terminal
    from ..report import sweep_page
    from ..sweep_folder import load, reserve
    from ..sweep_run import carry_out
    from ..table_forms import markdown
    from ..tables import costs, of, spending

    made, folder = meant(list(words or []), sweeps, columns or [])
    if made is not None:
        reserve(made, folder)
    whole = load(folder)
    standing = carry_out(folder, workers or cores(), for_terminal())
    result: dict[str, Any] = {"directory": str(folder), "cells": standing.cells, "done": standing.done}
    unwritten = ""
    if standing.done:
        text = markdown(of(folder, metric_of(whole, "auto")))
        spent, page = costs(folder), folder / "report.html"
        print(text)
        try:
            store.write_text(folder / "table.md", text)
            sweep_page.write(folder, metric_of(whole, "auto"), page)
            print(f"{spending(spent)} Report: {page}")
        except OSError as error:
            print(spending(spent))
            unwritten = f"table and report are not written ({error}); mend that, and the same command writes them"
        result |= {"costs": spent, "table": str(folder / "table.md"), "report": str(page)}
    emit(result | {"failed": standing.failed}, as_json)
    if standing.failed:
        listed = "\n".join(f"  {name}: {why}" for name, why in standing.failed.items())
        raise UserError(
            f"{len(standing.failed)} of {standing.cells} cells failed ({folder}/failed has each traceback); the same "
            f"command tries them again:\n{listed}"
        )
    if unwritten:
        raise UserError(unwritten)
    if standing.done < standing.cells:  # another command began cells anew meanwhile
        raise UserError(
            f"{standing.cells - standing.done} of {standing.cells} cells are not done; the same command goes on"
        )


def meant(words: list[str], root: Path, columns: list[str]) -> "tuple[Sweep | None, Path]":
    """-> (the sweep, None for one that is there; its directory)"""
    from ..sweep import grid
    from ..sweeps import SWEEPS, named

    if words and "=" not in words[0] and (Path(words[0]) / "sweep.json").exists():
        if len(words) > 1 or columns:
            raise UsageError(f"{words[0]} goes on as it is; leave out '{' '.join([*words[1:], *columns])}'")
        return None, Path(words[0])
    if words and words[0] in SWEEPS:
        if columns:
            raise UsageError(f"the columns of {words[0]} are the paper's; leave out --columns")
        made = named(words[0], words[1:])
    else:
        if scaled := [word for word in words if word.startswith("scale=")]:
            raise UsageError(f"{scaled[0]} is for a paper's table; choose from {', '.join(SWEEPS)}")
        made = grid(words, columns)
    return made, root / made.name


def metric_of(sweep: "Sweep", metric: Metric) -> Any:
    from ..sweeps import METRIC_OF

    return METRIC_OF.get(sweep.table, "mean_last10") if metric == "auto" else metric


def write(path: Path, text: str) -> None:
    from .. import store

    try:
        store.write_text(path, text)
    except OSError as error:
        raise UserError(f"cannot write {path} ({error}); choose another --out") from None


def table(
    folder: Annotated[Path, typer.Argument(help="A sweep's directory.")],
    metric: Metrics = "auto",
    against: Annotated[
        str, typer.Option(metavar="LABEL", help="Gains over the rows of this label, seed by seed, such as vanilla.")
    ] = "",
    form: Annotated[Literal["md", "latex", "csv"], typer.Option("--format", help="What to print.")] = "md",
    target: Annotated[
        float | None, typer.Option(help="The accuracy in [0, 1] of *_to_target, in the place of the sweep's own.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A file in the place of the screen.")] = None,
) -> None:
    """The results of a sweep as a table: Markdown, LaTeX (booktabs) or CSV."""
    from ..sweep_folder import load
    from ..table_forms import FORMATS
    from ..tables import of

    if target is not None and not 0 < target <= 1:
        raise UsageError(f"--target is an accuracy above 0 and at most 1, not {target}; write 0.8 for 80 %")
    text = FORMATS[form](of(folder, cast(Any, metric_of(load(folder), metric)), against, target))
    if out is None:
        print(text, end="")
        return
    write(out, text)
    print(f"Table: {out}")
