"""The command line: parses, calls, prints. Exit codes: 0 done, 1 failed, 2 wrong usage.

Nothing heavy is imported before a command runs, so that `fedprior --help` answers at once.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import UsageError, UserError, unknown

if TYPE_CHECKING:
    from .config import Experiment

INTERRUPTED = 130  # what newer versions of typer make of a KeyboardInterrupt

app = typer.Typer(
    name="fedprior",
    help="Federated image classification with a diffusion model as a shared prior.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
partition_app = typer.Typer(help="How the data are split over clients.", no_args_is_help=True)
prior_app = typer.Typer(help="Diffusion priors: train, show, check.", no_args_is_help=True)
app.add_typer(partition_app, name="partition")
app.add_typer(prior_app, name="prior")

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RECIPE | FILE.toml | RUN_DIRECTORY] [KEY=VALUE]...", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
Runs = Annotated[Path, typer.Option("--runs", help="Where run directories go.")]


def experiment_of(words: list[str] | None) -> "Experiment":
    """The experiment that the words name: a recipe, a TOML file or a run directory, then changes."""
    from .config import Experiment, from_toml, override
    from .recipes import RECIPES

    words = list(words or [])
    base = Experiment()
    if words and "=" not in words[0]:
        source = words.pop(0)
        path = Path(source)
        if source in RECIPES:
            base = RECIPES[source]()
        elif path.is_dir():
            base = replace(from_toml(path / "config.toml"), name="")  # the directory keeps its name
        elif path.suffix == ".toml" or path.is_file():
            base = from_toml(path)
        else:
            raise unknown("recipe, file or run directory", source, RECIPES)
    return override(base, words)


def use_threads(n: int) -> None:
    import torch

    torch.set_num_threads(n)


def emit(value: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(value, allow_nan=False), flush=True)


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Prints a table on stdout; the first column is text, the others are numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    out = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for i, column in enumerate(columns):
        out.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        out.add_row(*row)
    Console().print(out)


def percent(value: float | None, spread: float | None = None) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.1f} %" + (f" ± {100 * spread:.1f}" if spread is not None else "")


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
    table("Test accuracy, mean of the last 10 rounds", ["arm", "mean ± std", "seeds"], rows)
    print(f"Took {clock(result['seconds'])}. Report: {result['report']}")
    emit(result, as_json)


@app.command()
def run(words: Words = None, runs: Runs = Path("runs"), as_json: Json = False) -> None:
    """Train one experiment and write its run directory; or go on with a run directory that was stopped."""
    from .progress import clock, for_terminal
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
    result = run_experiment(experiment, runs, for_terminal()).result
    rows = [[key.replace("_", " "), percent(result[key])] for key in ("last", "mean_last10", "best")]
    rows[-1][0] = "best (optimistic)"
    whose = "mean over clients' own models" if result.get("models") == "own" else "global model"
    held = result.get("judged_on") == "validation"
    table("Accuracy on held-out rows of clients" if held else "Test accuracy", ["", whose], rows)
    print(
        f"{result['rounds']} rounds, {result['uplink_MB']:.3f} MB up, {result['downlink_MB']:.3f} MB down, "
        f"{clock(result['seconds'])}. Report: {result['directory']}/report.html"
    )
    emit(result, as_json)


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
    own = f", {result['server_images']} of them for the server" if result["server_images"] else ""
    print(f"{result['images']} distinct images would be generated{own}, about {result['disk_MB']:.1f} MB on disk.")
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


@app.command()
def generate(words: Words = None, as_json: Json = False) -> None:
    """Make the synthetic images that a run would need, so that the run starts at once. Can be stopped and go on."""
    from . import assemble
    from .progress import for_terminal

    experiment = experiment_of(words)
    if experiment.balance is None and not experiment.method.images:
        raise UsageError("nothing to generate with balance=none; add e.g. balance=max")
    progress = for_terminal()
    federation, _ = assemble.split(experiment)
    device = assemble.set_up(experiment)
    result: dict[str, Any] = {"server_images": experiment.method.images * len(federation.classes)}
    if experiment.balance is not None:
        _, report = assemble.balance(experiment, federation, device, progress)
        print(f"{report.generated} images made, {report.reused} were there, {report.faulty} faulty ones left out.")
        print(f"They lie in {report.folder}; open them with datasets.load_dataset('{report.folder}').")
        result |= {"generated": report.generated, "reused": report.reused, "faulty": report.faulty}
        result |= {"rows": report.rows, "folder": str(report.folder)}
    if assemble.images_for_server(experiment, federation, device, progress) is not None:
        print(f"The server's {result['server_images']} images are there.")
    emit(result, as_json)


@app.command()
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


Threads = Annotated[int, typer.Option(min=1, help="CPU threads; one is fastest for small priors.")]
Source = Annotated[str, typer.Argument(help="An embedded prior (digits), a folder or a hub id.")]


@prior_app.command("train")
def prior_train(
    name: Annotated[str, typer.Argument(help="Which embedded prior to train again: digits or cifar10.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the checkpoint; default: NAME-prior.")] = None,
    data: Annotated[Path | None, typer.Option(help="A local copy of CIFAR-10; default: the hub's.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    threads: Threads = 1,
    as_json: Json = False,
) -> None:
    """Train an embedded prior on the public half of its images, reproducibly. Can be stopped and go on."""
    use_threads(threads)
    from .priors.train import RECIPES, train_embedded
    from .progress import for_terminal

    if name not in RECIPES:
        raise unknown("embedded prior", name, RECIPES)
    out = out or Path(f"{name}-prior")
    record = train_embedded(name, out, data=data, seed=seed, log=for_terminal().say)
    print(f"The prior lies in {out}; use it with prior={out}")
    emit({"directory": str(out), **record}, as_json)


@prior_app.command("show")
def prior_show(
    source: Source = "digits",
    out: Annotated[Path, typer.Option(help="PNG to write.")] = Path("prior.png"),
    classes: Annotated[str, typer.Option(help="Class names with commas; default: the prior's own.")] = "",
    per_class: Annotated[int, typer.Option(min=1)] = 10,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    threads: Threads = 1,
    as_json: Json = False,
) -> None:
    """A grid of images by class."""
    use_threads(threads)
    from . import store
    from .priors.check import sample_grid
    from .priors.embedded import load

    prior = load(source)
    names = [c.strip() for c in classes.split(",")] if classes else list(prior.defaults.get("classes", ()))
    if not names:
        raise UsageError(f"{source} does not say which classes it knows; name some with --classes 'cat, dog'")
    with store.atomic(out) as temporary:
        sheet = sample_grid(prior, names, per_class, seed, (prior.size, prior.size), zoom=max(1, 48 // prior.size))
        sheet.save(temporary, format="PNG")
    print(f"{len(names)} classes x {per_class} images in {out}")
    emit({"image": str(out), "classes": names, "settings": prior.settings}, as_json)


@prior_app.command("check")
def prior_check(
    source: Source = "digits",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    threads: Threads = 1,
    as_json: Json = False,
) -> None:
    """Accuracy on real test digits of a small CNN trained only on the prior's images, beside real ones."""
    use_threads(threads)
    from .priors import embedded
    from .priors.check import check_digits
    from .progress import for_terminal

    prior = embedded.load(source)
    folder = embedded.folder(source) if source in embedded.names() else Path(source)
    result = check_digits(prior, folder if folder.is_dir() else None, seed=seed, log=for_terminal().say)
    table(
        "The same CNN and number of steps, tested on real digits",
        ["trained on", "images", "accuracy"],
        [
            ["synthetic images", str(result["images"]), percent(result["synthetic"])],
            ["real images", str(result["real_images"]), percent(result["real"])],
        ],
    )
    if "size_MB" in result:
        print(f"The prior takes {result['size_MB']:.2f} MB.")
    emit(result, as_json)


@prior_app.command("explain")
def prior_explain(
    source: Source,
    words: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", show_default=False)] = None,
    timesteps: Annotated[str, typer.Option(help="Noise levels to read at, with commas.")] = "1,50,100,200,300,500,999",
    levels: Annotated[str, typer.Option(help="Up blocks to read, from 1, the coarsest.")] = "1,2,3,4",
    images: Annotated[int, typer.Option(min=1, help="Training images to fit on, and test images to score on.")] = 1000,
    out: Annotated[Path, typer.Option(help="Folder for explain.json and the figures.")] = Path("prior-explained"),
    seed: Annotated[int, typer.Option(min=0, help="Of the images drawn and of what is fitted to them.")] = 0,
    as_json: Json = False,
) -> None:
    """What descriptors know of real images: classes told apart, and what a class prompt moves in them."""
    from .priors import explain
    from .progress import for_terminal

    steps = explain.numbers(timesteps)
    experiment = explain.experiment_of(source, words or [], levels, steps)
    result = explain.explain(experiment, steps, images, out, seed, for_terminal())
    rows, names = result["rows"], list(dict.fromkeys(row["level"] for row in result["rows"]))
    for key, title in (("probe", "Linear probe, test accuracy"), ("purity", "k-means, purity")):
        values = {(row["timestep"], row["level"]): percent(row[key]) for row in rows}
        table(
            f"{title}; raw pixels {percent(result['pixels'][key])}",
            ["timestep", *(name if name == explain.JOINED else f"level {name}" for name in names)],
            [[str(step), *(values[step, name] for name in names)] for step in steps],
        )
    shown = ("image", "prompt", "interaction", "own_nearest", "own_nearest_centred", "interaction_probe")
    table(
        f"Class prompts: parts of the variance; nearest to the own one (chance "
        f"{percent(result['chance']['own_nearest'])}), as it is and centred; probe on the interaction",
        ["t, level", "image", "prompt", "inter.", "nearest", "centred", "probe"],
        [[f"{row['timestep']}, {row['level']}", *(percent(row[key]) for key in shown)] for row in rows],
    )
    print(f"Figures and numbers are in {out}")
    emit(result | {"directory": str(out)}, as_json)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="One or several run directories.")],
    out: Annotated[Path | None, typer.Option(help="HTML file; default: report.html in the first directory.")] = None,
    as_json: Json = False,
) -> None:
    """One offline HTML page for a run, or for several side by side (seeds of one setting become one line)."""
    from .report import html, load

    load.check_done(folders)
    target = out or folders[0] / "report.html"
    try:
        html.write(load.report_data(folders), target)
    except OSError as error:
        raise UserError(f"cannot write {target} ({error}); choose another --out") from None
    print(f"Report: {target}")
    emit({"report": str(target)}, as_json)


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
        "extras": {"timm": importlib.util.find_spec("timm") is not None},
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
    """Entry point: one line for a person's mistake, a traceback only for ours."""
    try:
        app()
    except UserError as error:
        print(f"fedprior: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except (KeyboardInterrupt, SystemExit) as stop:
        if isinstance(stop, SystemExit) and stop.code != INTERRUPTED:
            raise
        print("fedprior: stopped", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
