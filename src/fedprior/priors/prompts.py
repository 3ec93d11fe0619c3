"""Prompt templates: how a class name becomes the sentence that a prior is asked for."""

from pathlib import Path

from .. import seeds
from ..errors import UserError

SINGLE = ("a photo of a {}",)
"""One template for every image ("without diversity" in Gen-FedSD, section 4.2)."""

CLIP = tuple(
    sentence.format(article)
    for article in ("a", "the")
    for sentence in (
        "a photo of {} {{}}.",
        "a blurry photo of {} {{}}.",
        "a black and white photo of {} {{}}.",
        "a low contrast photo of {} {{}}.",
        "a high contrast photo of {} {{}}.",
        "a bad photo of {} {{}}.",
        "a good photo of {} {{}}.",
        "a photo of {} small {{}}.",
        "a photo of {} big {{}}.",
    )
)
"""The 18 templates that CLIP used on CIFAR-10 and CIFAR-100 ("with diversity" in Gen-FedSD, Table 7)."""

NAMED = {"single": SINGLE, "clip": CLIP, "diverse": CLIP}


def templates(choice: str | Path) -> tuple[str, ...]:
    """The templates called "single" or "clip" (also "diverse"), or those in a UTF-8 text file, one a line.

    Blank lines and lines that start with # do not count. Raises UserError when the file cannot be read or is
    empty, or when a template does not hold exactly one {} or appears twice.
    """
    named = NAMED.get(str(choice))
    return named if named is not None else _read(Path(choice))


def prompt(classname: str, template: str) -> str:
    """The template with the class name in its {}; underscores of the name are read as spaces."""
    return template.replace("{}", classname.replace("_", " "))


def draw(templates: tuple[str, ...], seed: int, *key: int) -> int:
    """The index of a template, drawn uniformly; a pure function of seed and key."""
    return int(seeds.stream(seed, "template", *key).integers(len(templates)))


def _read(path: Path) -> tuple[str, ...]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text; save the prompt templates as UTF-8, one a line") from None
    except OSError:
        raise UserError(
            f"no prompt templates at '{path}'; choose {', '.join(NAMED)} or a text file with one a line"
        ) from None
    first: dict[str, int] = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        if line.count("{}") != 1 or line.count("{") != 1 or line.count("}") != 1:
            raise UserError(f"{path}, line {number}: '{line}' needs exactly one {{}} where the class name goes")
        if line in first:
            raise UserError(f"{path}, line {number}: '{line}' is already on line {first[line]}; remove one of them")
        first[line] = number
    if not first:
        raise UserError(f"{path} holds no prompt template; write at least one line such as '{SINGLE[0]}'")
    return tuple(first)
