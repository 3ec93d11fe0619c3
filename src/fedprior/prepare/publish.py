"""A folder of synthetic images as a data set on the Hugging Face hub, with a card that says what they are."""

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from fedprior.errors import UsageError, UserError
from fedprior.prepare.images import NO_DOMAIN, ImageFolder

SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"))


class File(NamedTuple):
    """One file of the data set."""

    name: str  # within the repository
    path: Path
    bytes: int


def check_name(repository: str) -> None:
    """Raises UsageError for what is no user/name."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise UsageError(f"--push wants user/name, not '{repository}'")


def files(folder: ImageFolder) -> list[File]:
    """The images' files, in order. Raises UserError where there are none."""
    found = [File(f"data/{p.name}", p, p.stat().st_size) for p in sorted(folder.path.glob("class-*.parquet"))]
    if not found:
        raise UserError("there are no images to push yet; run the same command without --push first")
    return found


def listed(folder: ImageFolder, command: str) -> list[File]:
    """All that `push` would upload."""
    return [File("README.md", Path("README.md"), len(card(folder, command).encode())), *files(folder)]


def card(folder: ImageFolder, command: str) -> str:
    """The README.md of the data set."""
    import pyarrow.parquet as pq

    held: Counter[str] = Counter()
    for file in files(folder):
        rows = pq.ParquetFile(file.path).read(columns=["class", "ok"]).to_pylist()
        held.update(row["class"] for row in rows if row["ok"])
    total, prior = sum(held.values()), folder.prior
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
        f"{total} images of {len(held)} classes, {height} x {width} pixels, made by the text-to-image diffusion model "
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
            f"| {name} | {folder.wording.prompt(y, folder.wording.templates[0], example)} | {held[name]} |"
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


def push(folder: ImageFolder, repository: str, command: str, *, private: bool = True) -> str:
    """Uploads files and card; -> the address of the data set. What is there already and unchanged is not sent again.

    Raises UserError without a login, without a network, or where the hub refuses.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    held = files(folder)
    text = card(folder, command)
    api = HfApi()
    operations = [CommitOperationAdd("README.md", text.encode()), *(CommitOperationAdd(f.name, f.path) for f in held)]
    try:
        api.create_repo(repository, repo_type="dataset", private=private, exist_ok=True)
        made = api.create_commit(
            repository, operations, commit_message=f"{len(held)} files of images", repo_type="dataset"
        )
    except Exception as error:  # every layer of the client has its own kinds, and the remedy is the same for all
        reason = str(error).strip().partition("\n")[0][:200].rstrip(".") or type(error).__name__
        raise UserError(
            f"cannot push to {repository} ({reason}); log in with `hf auth login`, check the name and the network. The "
            "images stay where they are"
        ) from None
    return str(made.repo_url)
