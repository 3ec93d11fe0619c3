"""The command line: parses, calls, prints. Exit codes: 0 done, 1 failed, 2 wrong usage; 130 and 143 for what Ctrl-C
and SIGTERM stopped.

Nothing heavy is imported before a command runs, so that `fedprior --help` answers at once.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, ParamSpec, TypeVar

import typer

from .commands import bench, deploy, flower, images, model, priors, sweep
from .commands.common import Json, Runs, Words, emit, experiment_of, outcome_table, percent, table
from .errors import UsageError, UserError

if TYPE_CHECKING:
    from .config import Experiment

P = ParamSpec("P")
T = TypeVar("T")
LONGEST = 5000  # letters of a line of a mistake: paths may be long

app = typer.Typer(
    name="fedprior",
    help="Federated image classification with a diffusion model as a shared prior.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
partition_app = typer.Typer(help="How the data are split over clients.", no_args_is_help=True)
app.add_typer(partition_app, name="partition")
app.add_typer(priors.app, name="prior")
app.add_typer(images.prompts_app, name="prompts")
app.add_typer(bench.app, name="bench")
app.add_typer(flower.app, name="flower")
app.add_typer(deploy.app, name="deploy")
app.add_typer(model.app, name="model")


@app.command()
def demo(
    words: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", show_default=False)] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds an arm.")] = 3,
    runs: Runs = Path("runs"),
    as_json: Json = False,
) -> None:
    """Digits over 20 very unlike clients: FedAvg alone, and with the embedded prior's images."""
    from .demo import demo as run_demo
    from .progress import clock, for_terminal

    result = run_demo(words or [], seeds, runs, for_terminal())
    rows = [
        [name, percent(arm["mean"], arm["std"]), "  ".join(percent(x) for x in arm["seeds"])]
        for name, arm in result["arms"].items()
    ]
    table(result["accuracy"], ["arm", "mean ± std", "seeds"], rows)
    print(f"Took {clock(result['seconds'])}. Report: {result['report']}")
    emit(result, as_json)


@app.command()
def run(words: Words = None, runs: Runs = Path("runs"), as_json: Json = False) -> None:
    """Train one experiment and write its run directory; or go on with a run directory that was stopped."""
    from .progress import for_terminal
    from .recipes import RECIPES
    from .run import run as run_experiment

    experiment = experiment_of(words)
    if words and "=" not in words[0] and words[0] not in RECIPES and Path(words[0]).is_dir() and not experiment.name:
        if runs != Path("runs"):
            raise UsageError(
                f"{words[0]} says where the run is, so --runs has no meaning; with name= it would be a new one"
            )
        given, here = Path(words[0]), Path(words[0]).resolve()
        plain = given.name == here.name and given.parent.resolve() == here.parent  # neither "." nor a link
        runs = given.parent if plain else Path(os.path.relpath(here.parent))
        experiment = replace(experiment, name=here.name)
    try:
        result = run_experiment(experiment, runs, for_terminal()).result
    except KeyboardInterrupt as stop:
        if there := left_behind(experiment, runs):
            stop.add_note(f"`fedprior run {there}` goes on with it")
        raise
    outcome_table(result)
    emit(result, as_json)


def left_behind(experiment: "Experiment", runs: Path) -> Path | None:
    """The directory of a run that was stopped; None where it had not begun, so that nothing is kept."""
    from .record import status
    from .resume import unfinished

    folder = runs / experiment.name if experiment.name else unfinished(runs, experiment)
    return folder if folder is not None and status(folder) == "interrupted" else None


def goes_on(command: Callable[P, T]) -> Callable[P, T]:
    """A command that keeps what it has made when it is stopped, and says that the next call goes on from there."""

    @wraps(command)
    def whole(*given: P.args, **options: P.kwargs) -> T:
        try:
            return command(*given, **options)
        except KeyboardInterrupt as stop:
            stop.add_note("the same command goes on with what was kept")
            raise

    return whole


@app.command()
def plan(
    words: Words = None,
    calibrate: Annotated[bool, typer.Option(help="Time the prior on four images and a client on two steps.")] = True,
    as_json: Json = False,
) -> None:
    """What a run would generate for whom, how many MB it would send and about how long it would take."""
    from .plan import plan as make_plan
    from .progress import clock

    result = make_plan(experiment_of(words), calibrate)
    table(
        "Synthetic rows by class",
        ["class", "rows"],
        [[name, str(n)] for name, n in result["per_class"].items()],
    )
    shown = sorted(result["clients"], key=lambda c: -c["synthetic"])[:20]
    more = len(result["clients"]) - len(shown)
    table(
        "Rows by client" + (f" (the {len(shown)} that get most, of {len(result['clients'])})" if more else ""),
        ["client", "real", "synthetic"],
        [[str(c["client"]), str(c["real"]), str(c["synthetic"])] for c in shown],
    )
    print(images.asked(result))
    print(f"{result['MB']:.3f} MB would travel, both directions and all rounds together.")
    if result["state_MB"]:
        print(f"Clients would remember {result['state_MB']:.1f} MB between rounds, and the disk hold up to twice that.")
    if (described := result["descriptors"])["prompts"]:
        disk = f", {described['disk_MB']:.1f} MB on disk" if described["disk_MB"] is not None else ""
        what = f"{described['images']} images{disk}; {described['stored']} are there"
        anew = described["passes"] and not described["images"]
        print(
            f"{described['passes']} passes of the UNet would describe images under {described['prompts']} prompts each "
            f"({'anew as training goes on' if anew else what})."
        )
    if "note" in result:
        print(f"What the prior takes is not known: {result['note']}")
    if result["seconds"] is not None:
        print(
            f"About {clock(result['generation_seconds'])} for images, {clock(result['description_seconds'])} for "
            f"descriptors and {clock(result['training_seconds'])} for training, evaluation not counted."
        )
    emit(result, as_json)


app.command()(goes_on(images.generate))
app.command()(model.predict)
app.command()(goes_on(sweep.sweep))
app.command("table")(sweep.table)


@app.command()
@goes_on
def describe(words: Words = None, as_json: Json = False) -> None:
    """Compute the descriptors that a guided run would need, so that it starts at once. Can be stopped and go on."""
    from . import assemble
    from .progress import for_terminal

    experiment = experiment_of(words)
    if experiment.guide is None:
        raise UsageError("nothing to describe with guide=none; add guide=feddifrc")
    if experiment.guide.condition == "dynamic":
        raise UsageError("with guide.condition=dynamic images are described as training goes on; nothing can be kept")
    progress = for_terminal()
    device = assemble.set_up(experiment)
    federation, _ = assemble.split(experiment)
    prior = assemble.prior_for(experiment, federation, device)
    guide = assemble.build_guide(experiment, federation, device, prior)
    assert guide is not None
    if experiment.balance is not None:
        federation, _ = assemble.balance(experiment, federation, device, progress, prior)
    made = guide.describe(assemble.gathered(experiment, federation), progress)
    folder = guide.describer.folder
    print(f"{made} images described; the descriptors lie in {folder}.")
    emit(
        {"described": made, "width": guide.width, "prompts": len(guide.prompts_of(bytes(8), 0)), "folder": str(folder)},
        as_json,
    )


@partition_app.command("show")
def partition_show(words: Words = None, as_json: Json = False) -> None:
    """The clients' class counts, their domains where there are any, and what the split looks like in numbers."""
    from . import assemble

    federation, parts = assemble.split(experiment_of(words))
    counts, domains = federation.counts(), federation.domain_counts()
    shown = federation.classes if len(federation.classes) <= 12 else ()
    held = [", ".join(f"{name} {n}" for name, n in zip(federation.domains, row, strict=True) if n) for row in domains]
    table(
        f"{parts.name}, {len(counts)} clients, digest {parts.digest[:12]}",
        ["client", "rows", "classes", *(["domains"] if federation.domains else []), *shown],
        [
            [
                *(str(k), str(row.sum()), str((row > 0).sum())),
                *([held[k]] if federation.domains else []),
                *(str(n) for n in (row if shown else [])),
            ]
            for k, row in enumerate(counts)
        ],
    )
    statistics = parts.statistics(federation.table["label"].numpy(), len(federation.classes))
    overall = {k: v for k, v in statistics.items() if isinstance(v, int | float)}
    for key, value in overall.items():
        print(f"{key.replace('_', ' ')}: {value:g}")
    result: dict[str, Any] = {"name": parts.name, "digest": parts.digest, "statistics": statistics}
    if federation.domains:
        result["domains"] = [dict(zip(federation.domains, row.tolist(), strict=True)) for row in domains]
    emit(result, as_json)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="One or several run directories, or a sweep's.")],
    out: Annotated[
        Path | None,
        typer.Option(help="HTML file; default: report.html in the directory, of several runs in the current one."),
    ] = None,
    as_json: Json = False,
) -> None:
    """One offline HTML page for a run, for several side by side (seeds of one setting are one line), or for a sweep."""
    from . import sweep_folder
    from .report import html, load, sweep_page

    target = out or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    whole = (folders[0] / "sweep.json").exists()
    if whole and len(folders) > 1:
        raise UsageError(f"{folders[0]} is a sweep, which has a page of its own; name it alone, or some of its cells")
    if out is None and len(folders) > 1 and Path.cwd() in [folder.resolve() for folder in folders]:
        raise UsageError("report.html here is the page of the run; add --out FILE.html for one of several runs")
    if not whole:
        load.check_done(folders)
    try:
        if whole:
            sweep_page.write(folders[0], sweep.metric_of(sweep_folder.load(folders[0]), "auto"), target)
        else:
            html.write(load.report_data(folders), target)
    except OSError as error:
        raise UserError(f"cannot write {target} ({error}); choose another --out") from None
    print(f"Report: {target}")
    emit({"report": str(target)}, as_json)


EXTRAS = {"timm": "timm", "lora": "peft", "fid": "torch_fidelity"}  # name -> module


@app.command()
def doctor(as_json: Json = False) -> None:
    """What fedprior finds on this machine."""
    import importlib.util
    import shutil

    from . import environment, store
    from .priors import embedded

    cache = store.cache_folder()
    held = sum(f.stat().st_size for f in cache.rglob("*") if f.is_file()) if cache.exists() else 0
    there = cache if cache.exists() else Path.home()
    result: dict[str, Any] = {
        "versions": environment.versions(),
        "hardware": environment.hardware(),
        "device": str(environment.device("auto")),
        "cache": str(cache),
        "cache_MB": held / 1e6,
        "free_disk_MB": shutil.disk_usage(there).free / 1e6,
        "embedded_priors": {name: embedded.folder(name).is_dir() for name in embedded.names()},
        "extras": {name: importlib.util.find_spec(module) is not None for name, module in EXTRAS.items()},
    }
    rows = [
        [k, v]
        for group in ("versions", "hardware")
        for k, v in result["versions" if group == "versions" else group].items()
    ]
    rows += [["device", result["device"]], ["cache", f"{cache} ({held / 1e6:.1f} MB)"]]
    rows += [["free disk", f"{result['free_disk_MB'] / 1e3:.1f} GB"]]
    rows += [
        [f"prior {name}", "there" if ok else "missing: reinstall fedprior"]
        for name, ok in result["embedded_priors"].items()
    ]
    rows += [
        [f"extra {name}", "there" if ok else f"pip install 'fedprior[{name}]'"] for name, ok in result["extras"].items()
    ]
    table("", ["what", "found"], rows)
    emit(result, as_json)
    missing = [k for k, v in result["versions"].items() if v == "not installed"]
    if missing or not all(result["embedded_priors"].values()):
        raise UserError(f"something is missing: {', '.join(missing) or 'an embedded prior'}; reinstall fedprior")


def main() -> None:
    """Entry point: one line for a person's mistake or wish to stop, a traceback only for ours."""
    try:
        with sigterm_as_ctrl_c():
            app()
    except UserError as error:
        print(f"fedprior: {printable(error)}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except (KeyboardInterrupt, SystemExit) as error:
        stop = interrupt(error)
        if stop is None:
            raise
        print("; ".join(["stopped", *map(printable, getattr(stop, "__notes__", []))]), file=sys.stderr)
        sys.exit(128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT))


class Terminated(KeyboardInterrupt):
    """SIGTERM came: everything ends as with Ctrl-C, so that a run says in its manifest how it stands."""


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Within, the first SIGTERM raises Terminated and further ones are passed over, since supervisors send several.
    Where it is ignored or somebody else answers it, and in other threads than the main one, nothing changes."""

    def terminate(*_: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def interrupt(error: BaseException | None) -> KeyboardInterrupt | None:
    """The interrupt that an error is or, as typer ends on one, came of."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error


def printable(text: object) -> str:
    """One line, and what is listed below it in lines that begin with two spaces; nothing that a terminal would obey."""
    from .progress import clean

    return "\n  ".join(clean(line, LONGEST) for line in str(text).split("\n  "))


if __name__ == "__main__":
    main()
