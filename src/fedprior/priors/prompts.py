"""Prompt templates: how a class name becomes the sentence that a prior is asked for."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .. import seeds
from ..errors import UsageError, UserError
from . import class_names

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

DOMAIN = ("{domain} of a {}",)
"""One template for every image of data with domains: "a black and white pencil sketch of a dog"."""

DOMAIN_DIVERSE = (
    "{domain} of a {}.",
    "{domain} of the {}.",
    "{domain} of a small {}.",
    "{domain} of a big {}.",
    "{domain} of a {}, seen from close by.",
    "{domain} of a {}, seen from afar.",
)
"""Variety of size and view alone, since "blurry" or "black and white" would speak of the domain."""

NAMED = {"single": SINGLE, "clip": CLIP, "diverse": CLIP, "domain": DOMAIN, "domain_diverse": DOMAIN_DIVERSE}

PHRASES = {
    # PACS; DomainNet has "sketch" and "painting" too
    "photo": "a photo",
    "sketch": "a black and white pencil sketch",
    "cartoon": "a cartoon",
    "art painting": "an oil painting",
    # Office-Caltech and Office-31
    "amazon": "a product photo on a white background",
    "webcam": "a low resolution webcam photo",
    "dslr": "a high resolution photo",
    "caltech": "a photo",
    "caltech10": "a photo",
    # digits
    "mnist": "a white on black handwritten scan",
    "usps": "a blurry white on black handwritten scan",
    "mnist m": "a handwritten drawing on a colourful background",
    "svhn": "a cropped street photo",
    "syn": "a colourful computer print",
    # DomainNet
    "clipart": "a clip art image",
    "infograph": "an infographic",
    "painting": "a painting",
    "quickdraw": "a quick line drawing",
    "real": "a photo",
    # Office-Home, whose "Clipart" is above
    "art": "an artistic painting",
    "product": "a product photo on a white background",
    "real world": "a photo",
}
"""What {domain} stands for, by a domain's name in small letters with spaces."""


def templates(choice: str | Path) -> tuple[str, ...]:
    """The templates with a name in NAMED, or those in a UTF-8 text file, one a line.

    Each holds one {} for the class name, and may hold one {domain}. Blank lines and lines that start with # do not
    count. Raises UserError when the file cannot be read or is empty, or when a template does not hold exactly one
    {}, has another brace or appears twice.
    """
    named = NAMED.get(str(choice))
    return named if named is not None else _read(Path(choice))


def prompt(classname: str, template: str, repaired: bool = False, domain: str | None = None) -> str:
    """The template with the class name in its {}; underscores of the name are read as spaces.

    With `repaired` the article before {} is made to fit ("a photo of an airplane"). `domain` is what {domain} stands
    for, a phrase with its article as `phrases` gives it. Raises UsageError for a {domain} without one.
    """
    words = classname.replace("_", " ")
    if repaired:
        template, words = class_names.fitted(template, words)
    if "{domain}" not in template:
        return template.replace("{}", words)
    if domain is None:
        raise UsageError(f"template '{template}' needs a domain, and there is none; use templates without {{domain}}")
    said = {"{}": words, "{domain}": domain}
    return re.sub(r"\{\}|\{domain\}", lambda slot: said[slot[0]], template)


def phrases(templates: Sequence[str], domains: Sequence[str], domain_words: str | Path = "") -> tuple[str, ...]:
    """What {domain} stands for in each domain: (), where no template holds it.

    `domain_words` is a UTF-8 text file with lines `domain = words`; a domain that is not in it, or all where it is
    "", has its phrase in PHRASES, else its own name with spaces and an article. Raises UsageError for templates with
    {domain} and data without domains, and for a file that no template has a use for; UserError for a bad file.
    """
    needing = [template for template in templates if "{domain}" in template]
    if domain_words and not needing:
        raise UsageError("no template holds {domain}, so balance.domain_words has no use; leave it out")
    if not needing:
        return ()
    if not domains:
        raise UsageError(
            f"template '{needing[0]}' names a domain, and this split has none; use data with domains and "
            "partition=domains, or templates without {domain}"
        )
    path = Path(domain_words)
    given = class_names.pairs(path, domains, "domain", "words", f"no words at '{path}'; give") if domain_words else {}
    for name, words in given.items():
        if "{" in words or "}" in words:
            raise UserError(f"{path}: '{words}' for '{name}' has a brace; write words alone")
    return tuple(given.get(name) or _phrase(name) for name in domains)


class Row(NamedTuple):
    """One prompt and what it is made of."""

    classname: str  # as the data have it
    words: str
    domain: str  # "" where templates do not ask for one
    template: str
    prompt: str


class Listing(NamedTuple):
    """All prompts, and a line for each class that its words do not describe."""

    rows: tuple[Row, ...]
    odd: tuple[str, ...]


def listing(
    classes: Sequence[str],
    templates: Sequence[str],
    *,
    names: str | Path = class_names.PLAIN,
    dataset: str = "",
    domains: Sequence[str] = (),
    domain_words: str | Path = "",
) -> Listing:
    """Every prompt that can be drawn, by class, then domain, then template. Raises as `wording` and `phrases` do."""
    said = phrases(templates, domains, domain_words)
    words = class_names.wording(names, classes, dataset)
    repaired = str(names) != class_names.PLAIN
    places = list(zip(domains, said, strict=True)) if said else [("", None)]
    rows = tuple(
        Row(name, called, domain, template, prompt(called, template, repaired, phrase))
        for name, called in zip(classes, words, strict=True)
        for domain, phrase in places
        for template in templates
    )
    return Listing(rows, class_names.odd(classes, words))


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
        bare = line.replace("{domain}", "", 1)
        if bare.count("{}") != 1 or bare.count("{") != 1 or bare.count("}") != 1:
            raise UserError(
                f"{path}, line {number}: '{line}' needs exactly one {{}} where the class name goes, and no other brace "
                "but one {domain}"
            )
        if line in first:
            raise UserError(f"{path}, line {number}: '{line}' is already on line {first[line]}; remove one of them")
        first[line] = number
    if not first:
        raise UserError(f"{path} holds no prompt template; write at least one line such as '{SINGLE[0]}'")
    return tuple(first)


def _phrase(domain: str) -> str:
    words = " ".join(domain.replace("_", " ").replace("-", " ").split())
    return PHRASES.get(words.lower()) or f"{class_names.article(words)} {words}"
