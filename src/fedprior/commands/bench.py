"""`fedprior bench ...`: how fast this machine is."""

from typing import Annotated, Any, Literal

import typer

from ..errors import UsageError
from .common import Json, Threads, emit, percent, table, use_threads

app = typer.Typer(help="How fast this machine is.", no_args_is_help=True)

Repeats = Annotated[int, typer.Option(min=1, help="Figures are medians over so many.")]
NetName = Annotated[str, typer.Option(help="A classifier by its name, as net= has it.")]


@app.command("generate")
def bench_generate(
    source: Annotated[str, typer.Argument(help="An embedded prior, an alias, a folder or a hub id.")] = "digits",
    words: Annotated[list[str] | None, typer.Argument(metavar="[prior.KEY=VALUE]...", show_default=False)] = None,
    images: Annotated[int, typer.Option(min=1, help="Images an arm and round.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, in which the arms take turns.")] = 3,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Threads = 1,
    as_json: Json = False,
) -> None:
    """Images a second and peak memory: `pipe(prompt)` one by one, `pipe(prompts)` in batches, and fedprior."""
    from .. import environment
    from ..assemble import prior_options
    from ..config import Experiment, override
    from ..priors import bench

    for word in words or []:
        if not word.startswith("prior."):
            raise UsageError(f"'{word}' plays no part here; say prior.KEY=")
    use_threads(threads)
    choice = override(Experiment(), [f"prior={source}", *(words or [])]).prior
    if choice is None:
        raise UsageError("there is no prior to measure; name a prior, such as digits")
    result = bench.measure(
        choice.name, images, rounds=rounds, device=environment.device(device), **prior_options(choice)
    )
    table(
        f"{images} images by {result['prior']}, {rounds} rounds",
        ["way", "images/s", "peak MB", "fedprior is"],
        [
            [
                label,
                f"{result[arm]['images_per_second']:.1f}",
                "-" if result[arm]["peak_MB"] is None else f"{result[arm]['peak_MB']:.0f}",
                "" if arm == "fedprior" else f"{result['speedup'][arm]:.1f} x as fast",
            ]
            for arm, label in BENCHED.items()
        ],
    )
    say_where()
    emit(result, as_json)


BENCHED = {"loop": "pipe(prompt), one by one", "batch": "pipe(prompts), in batches", "fedprior": "fedprior"}


@app.command("overhead")
def bench_overhead(repeats: Repeats = 5, as_json: Json = False) -> None:
    """What fedprior itself costs: rounds of clients that do nothing with 1 MB of weights, and starting."""
    from ..bench import overhead

    use_threads(1)
    noop = overhead.milliseconds()
    starts = overhead.starts({"round": overhead.ROUND, "help": overhead.HELP}, repeats)
    table(
        f"What fedprior itself costs, {repeats} starts",
        ["what", "figure"],
        [
            ["a round of a client that does nothing, 1 MB of weights", f"{noop:.2f} ms"],
            ["start up to the first federated round, torch included", f"{starts['round']:.2f} s"],
            ["fedprior --help", f"{starts['help']:.2f} s"],
        ],
    )
    say_where()
    emit({"ms_per_client_round": noop, "startup_seconds": starts["round"]}, as_json)


@app.command("round")
def bench_round(
    recipe: Annotated[Literal["gen-fedsd", "feddifrc"], typer.Option(help="Whose net, batch and optimiser.")] = (
        "gen-fedsd"
    ),
    precision: Annotated[Literal["fp32", "bf16"], typer.Option(help="Of the arithmetic.")] = "fp32",
    steps: Annotated[int | None, typer.Option(min=1, help="Of each client; default: what takes seconds.")] = None,
    clients: Annotated[int | None, typer.Option(min=1, help="In the round; default: 2.")] = None,
    engine: Annotated[Literal["serial", "pool", "vectorised"], typer.Option(help="Where clients run.")] = "serial",
    workers: Annotated[int | None, typer.Option(min=1, help="Processes of a pool; default: one a core.")] = None,
    repeats: Repeats = 3,
    threads: Threads = 1,
    as_json: Json = False,
) -> None:
    """One warm federated round on made-up images: seconds, FLOPs, and what share of it is not training."""
    from ..bench import round

    result = round.measure(
        recipe,
        precision=precision,
        steps=steps,
        clients=clients,
        engine=engine,
        workers=workers,
        repeats=repeats,
        threads=threads,
    )
    where = f"{result['workers']} workers" if engine == "pool" else engine
    table(
        f"A round of {recipe}",
        ["what", "figure"],
        [
            ["a round, wall", f"{result['seconds']:.2f} s"],
            ["a round, CPU", f"{result['cpu_seconds']:.2f} s"],
            ["a step", f"{result['ms_per_step']:.1f} ms"],
            ["images", f"{result['images_per_second']:.0f} /s"],
            ["arithmetic of a step", f"{result['flops_per_step'] / 1e9:.2f} GFLOP"],
            ["reached, wall", f"{result['gflops']:.1f} GFLOP/s"],
            ["matrix products here, a core", f"{result['peak_gflops']:.1f} GFLOP/s"],
            ["share of these, by CPU time", percent(result["fraction_of_peak"])],
            *([name, percent(result[f"share_{name}"])] for name in ("forward", "backward", "optimiser")),
            ["outside these three", percent(result["share_outside"])],
        ],
    )
    print(
        f"{result['clients']} clients x {result['steps']} steps of {result['batch_size']} images, {result['net']}, "
        f"{precision}, {where}; medians of {repeats} rounds"
    )
    finish(result, as_json)


@app.command("evaluate")
def bench_evaluate(
    images: Annotated[int, typer.Option(min=1, help="To judge a model on.")] = 10_000,
    net: NetName = "cct_2_3x2_32",
    repeats: Repeats = 2,
    threads: Threads = 1,
    as_json: Json = False,
) -> None:
    """Images a second of an evaluation, beside a plain loop over batches of 500."""
    from ..bench import evaluation

    use_threads(threads)
    result = evaluation.measure(net, images, repeats)
    table(
        f"{net} judged on {images} images, {repeats} turns",
        ["way", "images/s", "fedprior is"],
        [
            [
                "module(x), batches of 500",
                f"{result['plain_images_per_second']:.0f}",
                f"{result['ratio']:.2f} x as fast",
            ],
            ["fedprior", f"{result['images_per_second']:.0f}", ""],
        ],
    )
    finish(result, as_json)


@app.command("aggregate")
def bench_aggregate(
    clients: Annotated[int, typer.Option(min=1, help="Whose updates are averaged.")] = 10,
    net: NetName = "cct_2_3x2_32",
    repeats: Repeats = 30,
    threads: Threads = 1,
    as_json: Json = False,
) -> None:
    """Milliseconds of a mean of updates, beside a plain loop over state dicts."""
    from ..bench import aggregation

    use_threads(threads)
    result = aggregation.measure(clients, net, repeats)
    table(
        f"{clients} updates of {net}, {result['update_MB']:.2f} MB each, {repeats} turns",
        ["way", "ms", "fedprior takes"],
        [
            ["loop over state dicts", f"{result['plain_ms']:.2f}", f"{result['ratio']:.2f} x as long"],
            ["fedprior, sums in float64", f"{result['ms']:.2f}", ""],
        ],
    )
    finish(result, as_json)


@app.command("memory")
def bench_memory(
    clients: Annotated[str, typer.Option(help="Numbers of clients, with commas.")] = "100,1000",
    method: Annotated[str, typer.Option(help="A federated method by its name, as method= has it.")] = "scaffold",
    net: NetName = "cct_2_3x2_32",
    repeats: Repeats = 1,
    as_json: Json = False,
) -> None:
    """Peak memory and disk once every client has been asked, each federation in a process of its own."""
    numbers = numbers_of(clients)
    from ..bench import memory

    use_threads(1)
    result = memory.measure(numbers, method, net, repeats)
    table(
        "Every client asked once",
        ["clients", "MB before", "peak MB", "MB on disk"],
        [
            [str(run["clients"]), *(f"{run[key]:.1f}" for key in ("before_MB", "peak_MB", "disk_MB"))]
            for run in result["runs"]
        ],
    )
    print(f"{method}, {net}, memory_MB={result['memory_MB']:g}")
    finish(result, as_json)


def numbers_of(words: str) -> list[int]:
    """The numbers that words such as "100,1000" mean."""
    parts = [word.strip() for word in words.split(",")]
    if not all(word.isdecimal() and int(word) for word in parts):
        raise UsageError(f"--clients wants numbers of at least 1 with commas, such as 100,1000, not '{words}'")
    return [int(word) for word in parts]


def say_where() -> None:
    """Prints processor, threads and versions."""
    from .. import environment

    versions, hardware = environment.versions(), environment.hardware()
    what = ", ".join(f"{name} {versions[name]}" for name in ("fedprior", "python", "torch"))
    print(f"{hardware['processor']}, threads: {hardware['threads']}, {what}")


def finish(result: dict[str, Any], as_json: bool) -> None:
    """Says where a result was made, in words and in the JSON line."""
    from .. import environment

    say_where()
    emit(result | {"versions": environment.versions(), "hardware": environment.hardware()}, as_json)
