"""`fedprior flower`: an experiment over the nodes of a Flower federation."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from ..errors import UsageError
from .common import Json, Words, emit, experiment_of, outcome_table

app = typer.Typer(help="Run an experiment over machines, with Flower.", no_args_is_help=True)

Server = Annotated[
    Path | None,
    typer.Option("--server", help="The server's folder that `fedprior deploy init` wrote; ./server by default."),
]
Connection = Annotated[str, typer.Option(help="A connection of your own Flower configuration, in place of --server.")]
RunsThere = Annotated[str, typer.Option("--runs", help="Where run directories go on the server's machine.")]
Wait = Annotated[float, typer.Option(min=1, help="Seconds without news after which missing nodes are given up.")]
Reply = Annotated[float, typer.Option("--answer", min=1, help="Seconds that nodes have to answer in a round.")]
Budget = Annotated[float, typer.Option(min=1, help="Seconds that a node prepares at a stretch.")]
Over = Annotated[float, typer.Option(min=1, max=10, help="Clients asked for each one needed; the first count.")]


@app.command()
def run(
    words: Words = None,
    server: Server = None,
    connection: Connection = "",
    runs: RunsThere = "",
    wait: Wait = 600,
    answer: Reply = 3600,
    budget: Budget = 600,
    over_select: Over = 1.0,
    detach: Annotated[bool, typer.Option("--detach", help="Return once it is submitted.")] = False,
    as_json: Json = False,
) -> None:
    """Submit an experiment, show its log and end as it ends: 0 only when the run completed."""
    import sys

    from .. import serve, submit
    from ..engines.remote import Patience

    here = Path("server")  # where an administrator has it
    if server is None and not connection and (here / "deploy.toml").exists():
        server = here
    if (server is None) == (not connection):
        raise UsageError("say either --server FOLDER (from `fedprior deploy init`) or --connection NAME")
    experiment = submit.named(experiment_of(words))
    serve.refuse(experiment)
    patience = Patience(wait=wait, answer=answer, budget=budget, over_select=over_select)
    flwr = submit.flwr(server, connection)
    say = lambda line: print(line, file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="fedprior-") as folder:
        submit.write_app(experiment, Path(folder) / "app", patience, runs)
        number = flwr.submit(Path(folder) / "app")
    say(f"run {number} of {experiment.name}; after a crash the same command with name={experiment.name} goes on")
    if detach:
        emit({"run": number, "name": experiment.name}, as_json)
        return
    try:
        result = flwr.follow(number, say)
    except KeyboardInterrupt:
        say(f"run {number} goes on; `flwr stop {number} {flwr.connection}` would end it")
        raise
    outcome_table(result)
    emit(result | {"run": number}, as_json)


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="Where the app goes.")],
    words: Words = None,
    runs: RunsThere = "",
    wait: Wait = 600,
    answer: Reply = 3600,
    budget: Budget = 600,
    over_select: Over = 1.0,
    as_json: Json = False,
) -> None:
    """Write an experiment as an ordinary Flower app, for `flwr run`."""
    from .. import serve, submit
    from ..engines.remote import Patience

    experiment = submit.named(experiment_of(words))
    serve.refuse(experiment)
    submit.write_app(
        experiment, folder, Patience(wait=wait, answer=answer, budget=budget, over_select=over_select), runs
    )
    print(f"{folder} is a Flower app for {experiment.name}; submit it with `flwr run {folder} CONNECTION`")
    emit({"app": str(folder), "name": experiment.name}, as_json)
