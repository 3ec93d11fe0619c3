"""The page of `fedprior prior check`: a verdict in words, then figures, in the frame of the run report."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from .. import environment, store
from ..report import figures, html
from ..report.figures import (
    STRIP,
    Figure,
    Pictures,
    Strip,
    colour,
    draw,
    enlargement,
    matrix,
    strip,
)
from ..report.numbers import Arm, percent, shares
from .check import QUANTILES, Lookup, Study

GOOD, FAIR, POOR = 0.9, 0.6, 0.3  # shares of the way from guessing to real images
LEANING, COPYING = 0.55, 0.75  # shares of images that are nearer to a public than to an unseen image
SYNTHETIC, REAL = "trained on synthetic images", "trained on real images"


def write(study: Study, path: Path, command: str) -> None:
    """Writes the page in one step; `command` is what was typed."""
    store.write_text(path, render(study, command))


def render(study: Study, command: str) -> str:
    """The page as text; the same study gives the same bytes on the same machine."""
    result, classes = study.result, study.classes
    return html.page(
        "check.html.j2",
        title=f"How good a prior is {result['prior']['name'].rstrip('/').rpartition('/')[2]}?",
        facts=facts(study),
        cards=cards(result),
        verdicts=verdicts(result, classes),
        per_class=per_class(result, classes),
        pictures=figures.pictures(study.real, study.synthetic, classes),
        confusion=confusion(result, classes),
        likeness=likeness(result),
        note=result["distances"].get("note"),
        variety=variety(result),
        nearest=None if study.lookups is None else nearest(*study.lookups),
        pairs=None if study.lookups is None else pairs(*study.lookups),
        distances=distances(result),
        command=command,
        result=json.dumps(result, indent=2),
        environment=environment.versions() | environment.hardware(),
    )


# words
def facts(study: Study) -> list[str]:
    """The setting at a glance."""
    result = study.result
    images = f"{result['images']:,} synthetic images" + (f", {result['failed']:,} blank" if result["failed"] else "")
    size = [f"{result['size_MB']:.1f} MB"] if "size_MB" in result else []
    return [images, f"{len(study.classes)} classes", *([study.words] if study.words else []), *size]


def cards(result: dict[str, Any]) -> list[dict[str, str]]:
    """The headline in large type."""
    shown = [
        (f"accuracy, {SYNTHETIC}", result["synthetic"], spread(result, "synthetic"), colour(1)),
        (f"accuracy, {REAL}", result["real"], spread(result, "real"), colour(0)),
        ("show what was asked for", result["prompts"]["recognised"], "", colour(2)),
    ]
    if result["memorisation"] is not None:
        shown.append(("nearer to a training image", result["memorisation"]["share_public"], "", colour(3)))
    return [{"name": n, "value": percent(v), "spread": s, "colour": c} for n, v, s, c in shown]


def spread(result: dict[str, Any], kind: str) -> str:
    """The standard deviation over fits, where there are several."""
    own = result["by_fit"][kind]
    return f"±\u00a0{100 * float(np.std(own, ddof=1)):.1f}" if len(own) > 1 else ""


def verdicts(result: dict[str, Any], classes: Sequence[str]) -> list[str]:
    """What the numbers mean, in sentences."""
    sentences = [worth(result), recognised(result, classes), copied(result)]
    return [sentence for sentence in sentences if sentence]


def worth(result: dict[str, Any]) -> str:
    """What images of this quality do for balancing."""
    synthetic, real, chance = result["synthetic"], result["real"], result["chance"]
    said = (
        f"A small classifier that saw only the prior's {result['images']:,} images recognises {percent(synthetic)} of "
        f"{result['test_images']:,} real test images; trained as long on {result['real_images']:,} real images it "
        f"recognises {percent(real)}, and always saying the same class gives {percent(chance)}. "
    )
    if real <= chance:
        return said + "It learnt nothing from real images either, so this says nothing about the prior."
    share = (synthetic - chance) / (real - chance)
    way = f"That is {100 * max(0.0, share):.0f} % of the way"
    if share >= GOOD:
        return (
            said
            + f"{way}: the images can stand in for real ones, and balancing with them should help clients that lack "
            "classes."
        )
    if share >= FAIR:
        return (
            said
            + f"{way}: the images teach most of what real ones do. Balancing should help clients that lack classes; "
            "of a class that a client holds already they teach it little."
        )
    if share >= POOR:
        return (
            said
            + f"{way}: the images teach part of what real ones do. A classifier may learn to tell synthetic from real "
            "images in place of one class from another; compare a balanced with a plain run before you rely on them."
        )
    return said + f"{way}: the images teach little, and balancing with them is unlikely to help."


def recognised(result: dict[str, Any], classes: Sequence[str]) -> str:
    """Whether prompts give what they ask for, and which one goes astray most."""
    found = result["prompts"]
    said = (
        f"The classifier of real images takes {percent(found['recognised'])} of the prior's images for what was asked "
        f"for (of real images it gets {percent(result['by_fit']['real'][0])} right)"
    )
    astray = shares(np.array(found["confusion"], dtype=float)) / 100
    np.fill_diagonal(astray, 0)
    asked, taken = divmod(int(astray.argmax()), len(classes))
    if not astray[asked, taken]:
        return said + "."
    return (
        said
        + f"; most often astray is {classes[asked]}, taken for {classes[taken]} in {percent(astray[asked, taken])}."
    )


def copied(result: dict[str, Any]) -> str:
    """Whether the prior gives its training images back."""
    found = result["memorisation"]
    if found is None:
        return "Which images the prior was trained on is not known here, so copies cannot be looked for."
    share = found["share_public"]
    said = (
        f"{percent(share)} of the prior's images are nearer to an image that it was trained on than to any of as many "
        "that it never saw; half of them would be, had it learnt none by heart. "
    )
    if share >= COPYING:
        return said + "Many look like copies: think of whose images these are before you share them."
    if share >= LEANING:
        return said + "It leans towards its training images; look at the closest pairs below."
    return said + "That is no sign of copying."


# tables
def likeness(result: dict[str, Any]) -> list[dict[str, str]]:
    """Distances to real images, beside those of other real ones."""
    found = result["distances"]
    names = {
        "fid_cnn": "Fréchet distance, small classifier's features",
        "kid_cnn": "kernel distance, small classifier's features",
        "fid": "FID (Inception)",
        "kid": "KID (Inception)",
    }
    return [
        {"measure": name, "prior's images": number(found[key]), "other real images": number(found[f"{key}_real"])}
        for key, name in names.items()
        if key in found
    ]


def variety(result: dict[str, Any]) -> list[dict[str, str]]:
    """How much images of a class differ, and how many repeat another one."""
    found = result["diversity"]
    within = (found["within_class"], found["within_class_real"])
    return [
        {"measure": "mean distance of two images of a class", **two(*(number(v) for v in within))},
        {"measure": "templates that occur", **two(percent(found["templates"]), "")},
        {"measure": "byte-equal to an earlier image of the class", **two(percent(found["duplicates"]), "")},
        {"measure": "near another image of the class", **two(percent(found["near_duplicates"]), percent(0.01))},
    ]


def distances(result: dict[str, Any]) -> list[dict[str, str]]:
    """Quantiles of the distance to the nearest public image."""
    found = result["memorisation"]
    if found is None:
        return []
    rows = [
        {"measure": f"{100 * q:.0f} % are nearer than", **two(f"{own:.1f}", f"{others:.1f}")}
        for q, own, others in zip(QUANTILES, found["synthetic"], found["unseen"], strict=True)
    ]
    return [
        *rows,
        {"measure": "nearer than 99 % of the unseen ones", **two(percent(found["share_near"]), percent(0.01))},
    ]


def two(own: str, real: str) -> dict[str, str]:
    return {"prior's images": own, "real images": real}


def number(value: float | None) -> str:
    """Three significant digits."""
    return "–" if value is None else f"{value:.3g}"


# figures
def per_class(result: dict[str, Any], classes: Sequence[str]) -> Figure:
    """Accuracy of each class, trained on synthetic and on real images."""
    arms = [
        Arm(name=name, curves=[[{"round": 0, "accuracy": result[kind], "per_class": result["per_class"][kind]}]])
        for kind, name in (("real", REAL), ("synthetic", SYNTHETIC))
    ]
    several = len(result["by_fit"]["real"])
    mean = f"; mean of {several} fits" if several > 1 else ""
    return Figure(
        figures.per_class(arms, classes).panels, f"Accuracy on {result['test_images']:,} real test images{mean}."
    )


def confusion(result: dict[str, Any], classes: Sequence[str]) -> Figure:
    """What the classifier of real images takes synthetic ones for, percent of each class asked for."""
    counts = np.array(result["prompts"]["confusion"], dtype=float)
    alt = f"Heat map of {len(classes)} classes asked for against what a classifier of real images takes the images for."
    caption = "Percent of the images asked for (each row), by what a classifier trained on real images takes them for."
    return Figure([matrix(shares(counts), classes, "", alt, rows="asked for")], caption)


def nearest(own: Lookup, unseen: Lookup) -> Figure:
    """The share of images that have a public image within a distance."""

    def paint(canvas: Canvas) -> None:
        ax: Axes = canvas.subplots()
        for name, lookup, shade, style in (
            ("prior's images", own, colour(1), "-"),
            ("real images that it never saw", unseen, colour(0), "--"),
        ):
            x = lookup.distance.sort().values.numpy()
            share = 100 * np.arange(1, len(x) + 1) / len(x)
            ax.plot(x, share, color=shade, linestyle=style, linewidth=2, drawstyle="steps-post", label=name)
        ax.set_xlabel("difference from the nearest public image (grey levels)")
        ax.set_ylabel("images (%)")
        ax.set_ylim(0, 102)
        ax.set_xlim(left=0)
        canvas.legend(*ax.get_legend_handles_labels(), frameon=False, loc="outside upper left")

    medians = [float(lookup.distance.median()) for lookup in (own, unseen)]
    alt = (
        f"Cumulative share of images against the difference from the nearest public image: half of the prior's lie "
        f"within {medians[0]:.1f} grey levels, half of the unseen real ones within {medians[1]:.1f}."
    )
    caption = (
        "A line that rises further left has nearer neighbours. Copies would make the prior's line leave zero far "
        "to the left of the other; blurred images move all of it a little to the left."
    )
    return Figure([draw(3.6, paint, alt)], caption)


def pairs(own: Lookup, unseen: Lookup) -> Pictures:
    """The images that are closest to a public one, above that one."""
    side = max(own.pairs[0].image.shape[-2:])
    fit = max(1, STRIP // (min(side, figures.LARGEST) * enlargement(min(side, figures.LARGEST))))
    rows: list[tuple[str, list[tuple[str, Strip | None]]]] = []
    for name, which in (("image", "image"), ("nearest public image", "neighbour")):
        strips: list[tuple[str, Strip | None]] = []
        for kind, lookup in (("from the prior", own), ("real, never seen by it", unseen)):
            images = torch.stack([getattr(pair, which) for pair in lookup.pairs[:fit]]).numpy()
            strips.append((kind, strip(images, f"{kind}, {name}")))
        rows.append((name, strips))
    listed = [", ".join(f"{pair.distance:.1f}" for pair in lookup.pairs[:fit]) for lookup in (own, unseen)]
    caption = (
        f"The closest pairs, closest first. Differences in grey levels: {listed[0]} (prior); {listed[1]} (unseen)."
    )
    return Pictures(rows, caption)
