"""`fedprior generate` and `fedprior prompts ...`: synthetic images."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UsageError
from .common import Json, Words, emit, experiment_of, table

if TYPE_CHECKING:
    from ..prepare.images import Part

prompts_app = typer.Typer(help="What priors are asked for.", no_args_is_help=True)


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
    from .. import assemble, hub
    from ..plan import generation
    from ..prepare import publish
    from ..progress import for_terminal

    share = share_of(part)
    if push:
        hub.check_name(push)
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
    if dry_run and (share or merge):
        option = "--part" if share else "--merge"
        raise UsageError(f"--dry-run takes over nothing and counts the images of all parts; leave out {option}")
    progress = for_terminal()
    federation, _ = assemble.split(experiment)
    device = assemble.set_up(experiment)
    if dry_run:
        plan = generation(experiment, federation, device)
        if push:
            folder = assemble.image_folder(experiment, federation, assemble.prior_for(experiment, federation, device))
            held = publish.held(folder)
            plan["push"] = {file.name: file.bytes for file in publish.listed(folder, held, words_of("generate", words))}
            plan["damaged"] = held.damaged
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
        made, folders = assemble.fill_part(experiment, federation, folder, share, progress)
        where = f", in {place(folders)}" if folders else ""
        print(f"Part {share.number} of {share.of} is there: {made} images made now{where}.")
        emit(result | {"generated": made, **named(folders), "part": list(share)}, as_json)
        return
    if experiment.balance is not None:
        _, report = assemble.balance(experiment, federation, device, progress, prior)
        print(f"{report.generated} images made, {report.reused} were there, {report.faulty} faulty ones left out.")
        if report.removed:
            print(f"Filters removed {report.removed} images, in whose place others were made.")
        if report.dropped:
            print(f"{report.dropped} real rows would be left out of a run, as the rule says.")
        if report.folders:
            once = len(report.folders) == 1  # of several, each is a client's own
            how = f"; open them with datasets.load_dataset('{report.folders[0]}')" if once else ""
            print(f"They lie in {place(report.folders)}{how}.")
        result |= {"generated": report.generated, "reused": report.reused, "faulty": report.faulty}
        result |= {"removed": report.removed, "dropped": report.dropped}
        result |= {"rows": report.rows, **named(report.folders)}
    if assemble.images_for_server(experiment, federation, device, progress, prior) is not None:
        print(f"The server's {result['server_images']} images are there.")
    if push:
        held = publish.held(folder)
        where = publish.push(folder, held, push, words_of("generate", words), private=not public)
        print(f"Pushed to {where}, {'for everybody' if public else 'private'}.")
        tell_damaged(held.damaged)
        result |= {"pushed": where, "damaged": held.damaged}
    emit(result, as_json)


def place(folders: tuple[Path, ...]) -> str:
    """Where images lie, in words."""
    return str(folders[0]) if len(folders) == 1 else f"{len(folders)} folders of {folders[0].parent}, one a prior"


def named(folders: tuple[Path, ...]) -> dict[str, Any]:
    """Where images lie, as JSON: `folder` is one that holds them all, if there is one."""
    return {"folder": str(folders[0]) if len(folders) == 1 else None, "folders": [str(path) for path in folders]}


def tell_damaged(names: list[str]) -> None:
    for name in names:
        print(f"{name} is damaged or cannot be read, and is left out; a run that needs its images makes them again.")


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
    print(asked(plan))
    if plan["dropped"]:
        print(f"{plan['dropped']} real rows would be left out.")
    if plan["generation_seconds"] is None:
        print(f"What the prior takes is not known: {plan['note']}")
    else:
        print(f"The others would take about {clock(plan['generation_seconds'])} on this machine.")
    for name, size in plan.get("push", {}).items():
        print(f"would push {name} ({size / 1e6:.2f} MB) to {push}")
    tell_damaged(plan.get("damaged", []))


def asked(plan: dict[str, Any]) -> str:
    """The images of a plan in one line, whether for a run or for `generate` alone."""
    server = f", {plan['server_images']} of them for the server" if plan["server_images"] else ""
    there = f" {plan['stored']} are there." if plan["stored"] is not None and plan["images"] else ""
    return f"{plan['images']} distinct images{server}, about {plan['disk_MB']:.1f} MB on disk.{there}"


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
