"""`fedprior predict` and `fedprior model ...`: what becomes of a trained model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UsageError
from .common import Json, emit, percent, table, use_threads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .. import predict as predicting

app = typer.Typer(help="A run's global model: publish it.", no_args_is_help=True)

SHOWN = 20  # images on the terminal; a file holds all
LONGEST = 5000  # letters of a line there: paths may be long


def predict(
    model: Annotated[Path, typer.Argument(metavar="RUN_DIRECTORY | MODEL.safetensors", show_default=False)],
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Images, folders, parquet files.")],
    top: Annotated[int, typer.Option(min=1, help="Classes an image, the likeliest first.")] = 3,
    batch: Annotated[int | None, typer.Option(min=1, help="Images at a time; by default as many as a run.")] = None,
    image: Annotated[str, typer.Option(help="The column of the images, where it does not show.")] = "",
    label: Annotated[str, typer.Option(help="The column of the labels, where it does not show.")] = "",
    out: Annotated[Path | None, typer.Option(help="A .csv or .jsonl file for all predictions.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    as_json: Json = False,
) -> None:
    """Classify images with a trained model; where class folders or columns give labels, say how often it is right.
    Images that cannot be read are named and left out, and the exit code is 1 then."""
    from .. import predict as predicting
    from ..data.pictures import find
    from ..progress import clean, for_terminal
    from .priors import refuse_unwritable, writing

    use_threads(threads)
    if out is not None:
        if out.suffix not in (".csv", ".jsonl"):
            raise UsageError(f"--out {out} must end in .csv or .jsonl")
        refuse_unwritable(out)
    classifier = predicting.load(model, device)
    classes, progress = classifier.classes, for_terminal()
    top = min(top, len(classes))
    found = [find(path, classes, image, label) for path in paths]  # a wrong path shows before any work
    for one in found:
        for remark in one.remarks:
            progress.say(clean(remark, LONGEST))
    tally, unread = predicting.Tally(len(classes)), 0

    def answers() -> "Iterator[predicting.Answer]":
        nonlocal unread
        for one in found:
            for answer in predicting.answers(classifier, one, tally, top=top, batch=batch, progress=progress):
                if answer.error:
                    unread += 1
                    if unread <= SHOWN:
                        progress.say(clean(f"{answer.image} could not be read: {answer.error}", LONGEST))
                yield answer

    result: dict[str, Any] = {}
    if out is not None:
        with writing(out):
            result = {"images": predicting.write(answers(), classes, out, top), "out": str(out)}
        print(f"{result['images'] - unread} predictions are in {out}.")
    else:
        every = list(answers())
        more = f" (the first {SHOWN} of {len(every)}; --out has all)" if len(every) > SHOWN else ""
        table(
            f"Predictions{more}",
            ["image", *(["label"] if tally.total.any() else []), *map(str, range(1, top + 1))],
            [
                [
                    clean(one.image, LONGEST),
                    *([classes[one.label] if one.label is not None else "-"] if tally.total.any() else []),
                    *(f"{classes[k]} {percent(p)}" for k, p in zip(one.top, one.probabilities, strict=True)),
                    *(["not read"] if one.error else []),
                ]
                for one in every[:SHOWN]
            ],
        )
        result = {"images": len(every), "predictions": [predicting.spoken(one, classes) for one in every]}
    result["unreadable"] = unread
    seen, domains = tally.evaluation(), any(one.domains for one in found)
    if seen is not None:
        by_class = zip(classes, seen.per_class.tolist(), seen.total.tolist(), strict=True)
        rates = [(name, rate, n) for name, rate, n in by_class if n]
        apart = " Each image counts alike; a run with domains gives the mean over them." if domains else ""
        print(f"{percent(seen.accuracy)} of {seen.total.sum()} images with labels are recognised.{apart}")
        table(
            "By class",
            ["class", "accuracy", "images"],
            [[name, percent(rate), str(n)] for name, rate, n in rates],
        )
        per_class = {name: rate for name, rate, _ in rates}
        scores = {"accuracy": seen.accuracy, "loss": seen.loss, "per_class": per_class}
        result |= {"labelled": int(seen.total.sum())} | scores
    emit(result, as_json)
    if unread:
        progress.say(f"{unread} of {result['images']} images could not be read")
        raise typer.Exit(1)


@app.command()
def push(
    folder: Annotated[Path, typer.Argument(metavar="RUN_DIRECTORY", show_default=False)],
    repository: Annotated[str, typer.Argument(metavar="USER/NAME", show_default=False)],
    license: Annotated[str, typer.Option(help="The hub's word for the licence that you give the weights.")] = "unknown",
    public: Annotated[bool, typer.Option("--public", help="Let everybody see the model.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the files and print the card.")] = False,
    as_json: Json = False,
) -> None:
    """Upload a run's global model to the Hugging Face hub, with a model card; private unless you say otherwise."""
    from .. import hub, publish_model

    hub.check_name(repository, "model push")
    trained = publish_model.read(folder)
    text = publish_model.card(trained, repository, license)
    files = [hub.File.of("README.md", text), *publish_model.files(trained)]
    result: dict[str, Any] = {"repository": repository, "private": not public, "card": text}
    result["files"] = {file.name: file.bytes for file in files}
    if dry_run:
        for file in files:
            print(f"would push {file.name} ({file.bytes / 1e6:.3f} MB) to {repository}")
        print(f"\n{text}")
    else:
        result["pushed"] = publish_model.push(trained, repository, text, private=not public)
        print(f"Pushed to {result['pushed']}, {'for everybody' if public else 'private'}.")
    emit(result, as_json)
