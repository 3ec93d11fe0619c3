"""`fedprior prior ...`: train, show, check and explain priors."""

import shlex
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ..errors import UsageError, UserError, unknown
from .common import Json, Threads, emit, percent, table, use_threads

app = typer.Typer(help="Diffusion priors: train, show, check, explain.", no_args_is_help=True)

Source = Annotated[str, typer.Argument(help="An embedded prior (digits), a folder or a hub id.")]


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Within, a file that cannot be written ends in one line."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {out} ({error}); choose another --out") from None


def refuse_unwritable(out: Path) -> None:
    """Raises UserError where no file `out` can be written: working for minutes only to fail then helps nobody."""
    if out.is_dir():
        raise UserError(f"--out {out} is a folder; name a file in it")
    there = next(folder for folder in out.absolute().parents if folder.exists())  # the others will be made
    with writing(out), tempfile.TemporaryFile(dir=there):
        pass


@app.command("train")
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
    from ..priors.train import RECIPES, train_embedded
    from ..progress import for_terminal

    if name not in RECIPES:
        raise unknown("embedded prior", name, RECIPES)
    out = out or Path(f"{name}-prior")
    record = train_embedded(name, out, data=data, seed=seed, log=for_terminal().say)
    print(f"The prior lies in {out}; use it with prior={out}")
    emit({"directory": str(out), **record}, as_json)


@app.command("show")
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
    from .. import store
    from ..priors.check import sample_grid
    from ..priors.embedded import load

    refuse_unwritable(out)
    prior = load(source)
    names = [c.strip() for c in classes.split(",")] if classes else list(prior.defaults.get("classes", ()))
    if not names:
        raise UsageError(f"{source} does not say which classes it knows; name some with --classes 'cat, dog'")
    sheet = sample_grid(prior, names, per_class, seed, (prior.size, prior.size), zoom=max(1, 48 // prior.size))
    with writing(out), store.atomic(out) as temporary:
        sheet.save(temporary, format="PNG")
    print(f"{len(names)} classes x {per_class} images in {out}")
    emit({"image": str(out), "classes": names, "settings": prior.settings}, as_json)


@app.command("check")
def prior_check(
    source: Source = "digits",
    words: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", show_default=False)] = None,
    images: Annotated[int | None, typer.Option(min=20, help="Synthetic images; default: as many as real ones.")] = None,
    real: Annotated[int, typer.Option(min=20, help="Real training images, where the set is not the digits.")] = 5000,
    templates: Annotated[str, typer.Option(help="Prompt templates: single, clip, or a text file.")] = "single",
    fits: Annotated[int, typer.Option(min=1, help="Classifiers of either kind, by seeds in a row.")] = 1,
    inception: Annotated[
        bool, typer.Option("--inception", help="FID and KID by Inception too; needs the extra 'fid'.")
    ] = False,
    out: Annotated[Path, typer.Option(help="HTML page to write.")] = Path("prior-check.html"),
    seed: Annotated[int, typer.Option(min=0)] = 0,
    threads: Threads = 1,
    as_json: Json = False,
) -> None:
    """What a prior's images are worth beside real ones: accuracy, likeness, variety, copies. Words choose the data
    (data=, data.KEY=) and how the prior samples (prior.KEY=)."""
    use_threads(threads)
    from .. import environment
    from ..assemble import load_prior, refuse_strange
    from ..config import Experiment, override
    from ..data import origins
    from ..priors import check, check_page, embedded, prompts
    from ..progress import for_terminal

    given = [word.partition("=")[0].strip() for word in words or []]
    for key, word in zip(given, words or [], strict=True):
        if key.partition(".")[0] not in ("data", "prior", "device"):
            raise UsageError(f"'{word}' plays no part here; say data=, data.KEY=, prior.KEY= or device=")
    experiment = override(Experiment(), [f"prior={source}", *(words or [])])
    choice = experiment.prior
    if choice is None:
        raise UsageError("there is no prior to check; name a prior, such as digits")
    refuse_unwritable(out)
    prior = load_prior(choice, environment.device(experiment.device))
    data, trained_on = experiment.data, prior.defaults.get("trained_on")
    if not {"data", "data.name"} & set(given):
        if trained_on is None:
            raise UsageError(f"{choice.name} does not say which real images to compare with; name them with data=")
        data = replace(data, name=trained_on)
    refuse_idle(given, data.name)
    held = check.real_of(
        data.name, data.path, images=real, image=data.image, label=data.label, size=data.size, seed=seed
    )
    refuse_strange(prior, held.classes)
    if origins.alias(data.name) != trained_on:
        held = held._replace(public=None)  # nobody knows what it was trained on
    folder = embedded.folder(choice.name) if choice.name in embedded.names() else Path(choice.name)
    study = check.study(
        prior,
        held,
        folder=folder if folder.is_dir() else None,
        templates=prompts.templates(templates),
        images=images,
        seed=seed,
        fits=fits,
        with_inception=inception,
        progress=for_terminal(),
    )
    result = study.result
    table(
        f"The same classifier and number of steps, tested on {result['test_images']} real images ({held.words})",
        ["trained on", "images", "accuracy", "each fit"],
        [
            [f"{kind} images", str(result[key]), percent(result[kind]), " ".join(map(percent, result["by_fit"][kind]))]
            for kind, key in (("synthetic", "images"), ("real", "real_images"))
        ],
    )
    for sentence in check_page.verdicts(result, study.classes):
        print(sentence)
    with writing(out):
        check_page.write(study, out, shlex.join(["fedprior", "prior", "check", source, *(words or [])]))
    if "size_MB" in result:
        print(f"The prior takes {result['size_MB']:.2f} MB.")
    print(f"Page: {out}")
    emit(result | {"page": str(out)}, as_json)


def refuse_idle(keys: Sequence[str], name: str) -> None:
    """Raises UsageError for a key `data.KEY` that says nothing of the real images of the data set `name`."""
    from ..data import origins

    known = {origins.EMBEDDED: (), "cifar10": ("path",)}.get(origins.alias(name), ("path", "image", "label", "size"))
    for key in keys:
        head, _, tail = key.partition(".")
        if head == "data" and tail not in ("", "name", *known):
            raise UsageError(f"{key}= plays no part in a check on {name}; leave it out")


@app.command("explain")
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
    from ..priors import explain
    from ..progress import for_terminal

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
