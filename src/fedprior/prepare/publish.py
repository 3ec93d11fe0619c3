"""A folder of synthetic images as a data set on the Hugging Face hub, with a card that says what they are."""

from collections import Counter
from typing import NamedTuple

from fedprior.errors import UserError
from fedprior.hub import File, upload
from fedprior.prepare import shards
from fedprior.prepare.images import NO_DOMAIN, ImageFolder

SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"))


class Held(NamedTuple):
    """What lies in a folder."""

    files: list[File]  # in order
    damaged: list[str]  # names of files that are not as they were written, or cannot be read; these stay here
    by_class: Counter[str]  # usable images


def held(folder: ImageFolder) -> Held:
    """Reads all files. Raises UserError where none is whole."""
    found = Held([], [], Counter())
    for path in sorted(folder.path.glob("class-*.parquet")):
        try:
            rows = shards.read(path).select(["class", "ok"]).to_pylist()
        except (ValueError, OSError):
            found.damaged.append(path.name)
            continue
        found.files.append(File(f"data/{path.name}", path, path.stat().st_size))
        found.by_class.update(row["class"] for row in rows if row["ok"])
    if not found.files:
        raise UserError("there are no images to push yet; run the same command without --push first")
    return found


def listed(folder: ImageFolder, found: Held, command: str) -> list[File]:
    """All that `push` would upload."""
    return [File.of("README.md", card(folder, found, command)), *found.files]


def card(folder: ImageFolder, found: Held, command: str) -> str:
    """The README.md of the data set."""
    total, prior, classes = sum(found.by_class.values()), folder.prior, len(found.by_class)
    size = next((name for limit, name in SIZES if total < limit), "n>1M")
    height, width = folder.size
    example = 0 if folder.wording.domains else NO_DOMAIN
    lines = [
        "---",
        "pretty_name: Synthetic images by class",
        "task_categories: [image-classification]",
        "tags: [synthetic, federated-learning, fedprior]",
        f"size_categories: [{size}]",
        "configs:",
        "- config_name: default",
        "  data_files: data/*.parquet",
        "---",
        "",
        "# Synthetic images by class",
        "",
        f"{total} images of {classes} classes, {height} x {width} pixels, made by the text-to-image diffusion model "
        f"`{prior.name}` (revision `{prior.revision}`) with fedprior. No image is a photograph.",
        "",
        f"Made with `{command}`.",
        "",
        "| setting | value |",
        "| --- | --- |",
        *(f"| {key} | {value} |" for key, value in prior.settings.items()),
        f"| seed | {folder.seed} |",
        "",
        "| class | prompt, for example | images |",
        "| --- | --- | --- |",
        *(
            f"| {name} | {folder.wording.prompt(y, folder.wording.templates[0], example)} | {found.by_class[name]} |"
            for y, name in enumerate(folder.wording.classes)
        ),
        "",
        "Each row holds the image, its class, prompt, seed and the settings that made it; rows with `ok = false` are "
        "blank images that no training set should hold.",
        "",
        "The licence of the model that made the images may limit their use. They show what that model learnt from its "
        "own training data, biases included; what is trained on them has to be tested on real images.",
        "",
    ]
    return "\n".join(lines)


def push(folder: ImageFolder, found: Held, repository: str, command: str, *, private: bool = True) -> str:
    """Uploads files and card; -> the address of the data set. Raises what `hub.upload` raises."""
    return upload(
        repository,
        "dataset",
        found.files,
        card(folder, found, command),
        f"{len(found.files)} files of images",
        private=private,
        kept="The images stay where they are",
    )
