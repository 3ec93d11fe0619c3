"""`fedprior generate`, `fedprior prompts ...` and `fedprior bench ...`: synthetic images."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UsageError
from .common import Json, Threads, Words, emit, experiment_of, table, use_threads

if TYPE_CHECKING:
    from ..prepare.images import Part

prompts_app = typer.Typer(help="What priors are asked for.", no_args_is_help=True)
bench_app = typer.Typer(help="How fast this machine is.", no_args_is_help=True)


def generate(
    words: Words = None,
    part: Annotated[str, typer.Option(help="k/n: only the k-th of n shares, for several GPUs or jobs.")] = "",
    merge: Annotated[
        list[Path] | None, typer.Option(help="Take over what another machine's cache folder holds; may be repeated.")
    ] = None,
    push: Annotated[str, typer.Option(help="user/name: upload the images as a data set to the hub, private.")] = "",
    public: Annotated[bool, typer.Option("--public", help="With --push: let everybody see the data set.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be made, what it costs, and what would be pushed.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Make the synthetic images that a run would need, so that the run starts at once. Can be stopped and go on."""
    from .. import assemble
    from ..plan import generation
    from ..prepare import publish
    from ..progress import for_terminal

    share = share_of(part)
    if push:
        publish.check_name(push)
    elif public:
        raise UsageError("--public says who sees what --push uploads; add --push user/name")
    if push and share:
        raise UsageError("a part alone is not worth pushing; push once all parts are merged")
    experiment = experiment_of(words)
    if experiment.balance is None and not experiment.method.images:
        raise UsageError("nothing to generate with balance=none; add e.g. balance=max")
    if experiment.adapt is not None and (push or merge):
        raise UsageError(
            "images of priors that clients fine-tuned can show their own; they are neither pushed nor merged"
        )
    progress = for_terminal()
    federation, _ = assemble.split(experiment)
    device = assemble.set_up(experiment)
    if dry_run:
        plan = generation(experiment, federation, device)
        if push:
            folder = assemble.image_folder(experiment, federation, assemble.prior_for(experiment, federation, device))
            plan["push"] = {file.name: file.bytes for file in publish.listed(folder, words_of("generate", words))}
        show_plan(plan, push)
        emit(plan, as_json)
        return
    prior = assemble.prior_for(experiment, federation, device)
    folder = assemble.image_folder(experiment, federation, prior)
    result: dict[str, Any] = {"server_images": experiment.method.images * len(federation.classes)}
    for other in merge or []:
        merged = folder.merge(other)
        print(f"{other}: {merged.taken} files taken over, {merged.passed} held nothing new, {merged.damaged} damaged.")
        result["merged"] = [*result.get("merged", []), merged._asdict()]
    if share is not None:
        made = assemble.fill_part(experiment, federation, folder, share, progress)
        print(f"Part {share.number} of {share.of} is there: {made} images made now, in {folder.path}.")
        emit(result | {"generated": made, "folder": str(folder.path), "part": list(share)}, as_json)
        return
    if experiment.balance is not None:
        _, report = assemble.balance(experiment, federation, device, progress, prior)
        print(f"{report.generated} images made, {report.reused} were there, {report.faulty} faulty ones left out.")
        if report.removed:
            print(f"Filters removed {report.removed} images, in whose place others were made.")
        if report.dropped:
            print(f"{report.dropped} real rows would be left out of a run, as the rule says.")
        print(f"They lie in {report.folder}; open them with datasets.load_dataset('{report.folder}').")
        result |= {"generated": report.generated, "reused": report.reused, "faulty": report.faulty}
        result |= {"removed": report.removed, "dropped": report.dropped}
        result |= {"rows": report.rows, "folder": str(report.folder)}
    if assemble.images_for_server(experiment, federation, device, progress, prior) is not None:
        print(f"The server's {result['server_images']} images are there.")
    if push:
        where = publish.push(folder, push, words_of("generate", words), private=not public)
        print(f"Pushed to {where}, {'for everybody' if public else 'private'}.")
        result["pushed"] = where
    emit(result, as_json)


def share_of(part: str) -> "Part | None":
    """The share that a word such as "3/16" means; None for an empty one."""
    from ..prepare.images import Part

    if not part:
        return None
    number, slash, of = part.partition("/")
    if not (slash and number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise UsageError(f"--part wants k/n with k from 1 to n, such as 3/16, not '{part}'")
    return Part(int(number), int(of))


def words_of(name: str, words: list[str] | None) -> str:
    return shlex.join(["fedprior", name, *(words or [])])


def show_plan(plan: dict[str, Any], push: str) -> None:
    """What `generate --dry-run` prints."""
    from ..progress import clock

    names = list(plan["per_class"])
    shown = names if len(names) <= 12 else []
    clients = [c for c in plan["clients"] if c["synthetic"]]
    table(
        "Synthetic rows by client" + (f" (the first {LINES} of {len(clients)})" if len(clients) > LINES else ""),
        ["client", "real", "synthetic", *shown],
        [
            [str(c["client"]), str(c["real"]), str(c["synthetic"]), *(str(c["by_class"][n]) for n in shown)]
            for c in clients[:LINES]
        ],
    )
    table("Synthetic rows by class", ["class", "rows"], [[n, str(k)] for n, k in plan["per_class"].items()])
    there = "" if plan["stored"] is None else f" {plan['stored']} are there."
    print(f"{plan['images']} distinct images, about {plan['disk_MB']:.1f} MB on disk.{there}")
    if plan["dropped"]:
        print(f"{plan['dropped']} real rows would be left out.")
    if plan["generation_seconds"] is None:
        print(f"What the prior takes is not known: {plan['note']}")
    else:
        print(f"The others would take about {clock(plan['generation_seconds'])} on this machine.")
    for name, size in plan.get("push", {}).items():
        print(f"would push {name} ({size / 1e6:.2f} MB) to {push}")


LINES = 40


@prompts_app.command("show")
def prompts_show(words: Words = None, as_json: Json = False) -> None:
    """Every prompt of an experiment: how its classes (and domains) are worded in which templates."""
    from .. import assemble
    from ..data import origins
    from ..prepare.balance import BalanceToMax
    from ..priors import prompts

    experiment = experiment_of(words)
    policy = experiment.balance or BalanceToMax()
    federation, _ = assemble.split(experiment)
    assemble.wording(experiment, federation)
    found = prompts.listing(
        federation.classes,
        prompts.templates(policy.templates),
        names=policy.names,
        dataset=origins.alias(experiment.data.name),
        domains=federation.domains,
        domain_words=policy.domain_words,
    )
    domains = any(row.domain for row in found.rows)
    table(
        f"{len(found.rows)} prompts",
        ["class", "words", *(["domain"] if domains else []), "prompt"],
        [[row.classname, row.words, *([row.domain] if domains else []), row.prompt] for row in found.rows],
    )
    for line in found.odd:
        print(line)
    emit({"prompts": [row._asdict() for row in found.rows], "odd": list(found.odd)}, as_json)


@bench_app.command("generate")
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
    assert choice is not None
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
    emit(result, as_json)


BENCHED = {"loop": "pipe(prompt), one by one", "batch": "pipe(prompts), in batches", "fedprior": "fedprior"}
