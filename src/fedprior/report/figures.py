"""Figures as inline SVG, and images as PNG inside the page. The same numbers give the same bytes."""

import base64
import io
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Sequence
from html import escape
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator
from PIL import Image

from .numbers import Arm, class_means, evaluated, judged, level, megabytes, shares
from .summary import means, mixed_up

# Okabe and Ito's palette, told apart with every common colour blindness; yellow is left out as too faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", "-.", ":")
REAL, SYNTHETIC = "#33415C", "#F0A830"
COUNTS = LinearSegmentedColormap.from_list("counts", ["#FFFFFF", "#BBD7EA", "#4A93C4", "#0A4A7F", "#06233F"])
UNITS = (("hours", 3600), ("minutes", 60), ("seconds", 1))
FEW_CLASSES = 20  # more are drawn without their names
NAME = 20  # characters of a class name on an axis
FEW_CLIENTS = 40  # more are drawn as a heat map
WIDTH = 4.8  # inches of a panel: two side by side on a desk, one on a phone, legible on both
THIRD = 3.9  # of one of three side by side
SHOWN = 8  # images of a class
TILE = 48  # pixels of the side to which a small image is enlarged
STRIP = 400  # pixels of a row of images
LARGEST = 64  # pixels of an image's side on the page
PIXELS = 500_000  # of all images on the page: about 1.5 MB
STYLE = {
    "svg.fonttype": "none",  # text stays text: it can be found and copied, and takes the reader's own font
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib and is wide, so the reader's font fits as well
    "text.parse_math": False,  # a dollar sign in a class name begins no formula
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.labelsize": 10.5,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "legend.fontsize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E6E9EF",
    "axes.axisbelow": True,
    "axes.edgecolor": "#9AA3B2",
    "axes.labelcolor": "#3A4252",
    "axes.titlecolor": "#1D2129",
    "text.color": "#1D2129",
    "xtick.color": "#4A5260",
    "ytick.color": "#4A5260",
}


class Figure(NamedTuple):
    panels: list[str]  # <svg> elements, each with its description
    caption: str


class Strip(NamedTuple):
    """Images of one class side by side."""

    source: str  # a PNG as data URI
    width: int  # pixels on the page
    height: int
    enlarged: bool
    alt: str


class Pictures(NamedTuple):
    rows: list[tuple[str, list[tuple[str, Strip | None]]]]  # class name, (kind, images) for each kind
    caption: str


def colour(i: int) -> str:
    """The colour of the i-th arm in every figure."""
    return COLOURS[i % len(COLOURS)]


def draw(height: float, paint: Callable[[Canvas], None], alt: str, width: float = WIDTH) -> str:
    """An <svg> element, drawn for a panel of this width; `paint` fills a canvas of these inches."""
    # The salt makes the ids of two figures on one page differ, and those of two calls agree.
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": alt}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the reader's font draws the text
        canvas = Canvas(figsize=(width, height), layout="constrained")
        paint(canvas)
        out = io.StringIO()
        canvas.savefig(out, format="svg", transparent=True)
    return inline(out.getvalue(), alt)


def inline(svg: str, alt: str) -> str:
    """A stand-alone SVG document made part of an HTML page: no namespaces, no date, no ids that nothing refers to. What
    stands between tags are words, and stays."""
    svg = svg[svg.index("<svg") :].rstrip()
    svg = re.sub(r"\s*<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', svg))
    svg = re.sub("<[^>]*>", lambda m: tidy(m[0], used), svg)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(alt)}" ', 1)


def tidy(tag: str, used: set[str]) -> str:
    """A tag of an SVG document as it stands in a page; of ids, those in use are left."""
    tag = re.sub(r' xmlns(:\w+)?="[^"]*"', "", tag).replace(" xlink:href=", " href=")
    tag = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in used else "", tag)
    tag = re.sub(r"""^(<text style="[^"]*)'DejaVu Sans'""", r"\1system-ui", tag)
    return re.sub(r' (?:d|x|y|transform|width|height)="[^"]*"', lambda m: short(m[0]), tag)


def short(attribute: str) -> str:
    """Coordinates with two decimals: a hundredth of a point cannot be seen."""
    return re.sub(r"\d+\.\d{3,}", lambda m: f"{float(m[0]):.2f}", attribute)


def distribution(before: np.ndarray, after: np.ndarray | None, classes: Sequence[str]) -> Figure:
    """Rows of each class at each client, before and after the prior's images (Gen-FedSD, Fig. 2).

    `before` and `after` int64 [clients, classes].
    """
    top = max(int(before.max()), int(after.max()) if after is not None else 0, 1)
    stages = [("real rows", before)] + ([("real and synthetic rows", after)] if after is not None else [])
    few = len(classes) <= FEW_CLASSES and len(before) <= FEW_CLIENTS
    names = 5.5 * max(len(brief(name)) for name in classes)  # points that the class names take
    widest = min(0.9 * (72 * WIDTH - 40 - names) / len(before), 17.0)  # so that neighbours do not overlap
    panels = []
    for title, rows in stages:

        def fill(canvas: Canvas, title: str = title, rows: np.ndarray = rows) -> None:
            ax = canvas.subplots()
            if few:
                bubbles(ax, before, rows, widest**2 / top)
            else:
                heat(ax, rows, top)
            ax.set_title(title.capitalize(), loc="left", fontweight="bold")
            ax.set_xlabel("client")
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
            ax.set_xlim(-0.7, len(rows) - 0.3)
            ax.set_ylim(len(classes) - 0.4, -0.6)
            name_classes(ax, classes)

        owned = (rows > 0).sum(1)
        alt = (
            f"{title.capitalize()} of {len(classes)} classes at {len(rows)} clients: {int(rows.sum())} in all, "
            f"{owned.mean():.1f} classes a client on average, from {owned.min()} to {owned.max()}."
        )
        panels.append(draw(1.0 + 0.25 * min(max(len(classes), 4), 20), fill, alt))
    if not few:
        return Figure(panels, "The darker, the more rows; white: none. The scale is that of a square root.")
    mixed = " Orange: added by the prior; the others: real." if after is not None else ""
    return Figure(panels, f"The area of a dot is the number of rows; the largest stands for {top:,}.{mixed}")


def bubbles(ax: Axes, real: np.ndarray, rows: np.ndarray, area: float) -> None:
    """A dot a client and class: all its rows as area, in square points a row, the real ones as a dark dot inside."""
    for counts, shade in ((np.where(rows > real, rows, 0), SYNTHETIC), (real, REAL)):
        x, y = np.nonzero(counts)
        ax.scatter(x, y, s=np.maximum(area * counts[x, y], 1.5), c=shade, linewidths=0)


def heat(ax: Axes, rows: np.ndarray, top: int) -> None:
    """A cell a client and class, darker the more rows."""
    shown = ax.imshow(rows.T, aspect="auto", cmap=COUNTS, norm=PowerNorm(0.5, 0, top), interpolation="nearest")
    ax.grid(visible=False)
    bar = ax.figure.colorbar(shown, ax=ax, shrink=0.9, pad=0.02, aspect=28)
    bar.set_ticks(sorted({0, round(top / 16), round(top / 4), top}))
    bar.outline.set_visible(False)


def brief(name: str) -> str:
    """A class name that leaves room for what it names; tables have it in full."""
    return name if len(name) <= NAME else f"{name[: NAME - 1]}…"


def name_classes(ax: Axes, classes: Sequence[str]) -> None:
    """Class names on the vertical axis, or numbers where there are too many to read."""
    if len(classes) <= FEW_CLASSES:
        ax.set_yticks(range(len(classes)), [brief(name) for name in classes])
        ax.tick_params(axis="y", length=0)
    else:
        ax.set_ylabel("class")


def training(arms: Sequence[Arm]) -> Figure:
    """Accuracy against rounds, against megabytes where anything was sent, and against time where that is known. Every
    curve has evaluations."""
    axes: list[tuple[str, Callable[[dict[str, Any]], float]]] = [("round", lambda line: float(line["round"]))]
    if any(megabytes(curve[-1]) for arm in arms for curve in arm.curves):
        axes.append(("MB sent, up and down", megabytes))
    caption = whose(arms)
    if all("seconds" in line for arm in arms for curve in arm.curves for line in curve):
        longest = max(float(curve[-1]["seconds"]) for arm in arms for curve in arm.curves)
        unit, size = next((unit, size) for unit, size in UNITS if longest >= 3 * size or size == 1)
        axes.append((unit, lambda line: float(line["seconds"]) / size))
        caption += " Time counts from the start of a run, with the making (or finding) of images."
    several = any(len(arm.curves) > 1 for arm in arms)
    width = WIDTH if len(axes) < 3 else THIRD
    panels = [curves(arms, x, label, width) for label, x in axes]
    return Figure(panels, caption + (" Line: mean over seeds; band: lowest to highest seed." if several else ""))


def whose(arms: Sequence[Arm]) -> str:
    """Whose accuracy is shown, as a sentence."""
    every, some = means(arms)
    whom = "" if all(arm.own for arm in arms) else " of the global model"
    told = f"{judged(arms).accuracy.capitalize()}{whom}" + (f", {every}" if every else "")
    return "; ".join([told, *some]) + "."


def curves(arms: Sequence[Arm], x: Callable[[dict[str, Any]], float], label: str, width: float = WIDTH) -> str:
    """One line an arm, the mean over its seeds, and a band from the lowest to the highest seed."""
    lines = [series(arm, x) for arm in arms]

    def paint(canvas: Canvas) -> None:
        ax = canvas.subplots()
        for i, (arm, (xs, ys)) in enumerate(zip(arms, lines, strict=True)):
            dot = "o" if len(xs) == 1 else ""
            style = STYLES[i % len(STYLES)]
            ax.plot(xs, ys.mean(0), color=colour(i), linestyle=style, marker=dot, linewidth=2, label=arm.name)
            if len(ys) > 1:
                ax.fill_between(xs, ys.min(0), ys.max(0), color=colour(i), alpha=0.16, linewidth=0)
        ax.set_xlabel(label)
        ax.set_ylabel(f"{judged(arms).accuracy} (%)")
        ax.set_ylim(0, 102)  # a line at 100 % is drawn in full
        ax.margins(x=0.02)
        ax.set_xlim(left=0)
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=label == "round"))
        legend(canvas, ax, arms, width)

    ends = ", ".join(f"{arm.name} ends at {ys[:, -1].mean():.1f} %" for arm, (_, ys) in zip(arms, lines, strict=True))
    alt = f"Line chart of {judged(arms).accuracy} against {label}: {ends}."
    return draw(0.6 + 0.56 * width + legend_height(arms, width), paint, alt, width)


def series(arm: Arm, x: Callable[[dict[str, Any]], float]) -> tuple[np.ndarray, np.ndarray]:
    """-> (mean x [n], accuracies in percent [seeds, n]) at the n rounds that all seeds evaluated."""
    by_round = [{line["round"]: line for line in evaluated(curve)} for curve in arm.curves]
    rounds = [r for r in by_round[0] if all(r in lines for lines in by_round)]
    xs = np.array([[x(lines[r]) for r in rounds] for lines in by_round]).mean(0)
    return xs, 100 * np.array([[lines[r]["accuracy"] for r in rounds] for lines in by_round])


def legend(canvas: Canvas, ax: Axes, arms: Sequence[Arm], width: float = WIDTH) -> None:
    """Names of the arms above the axes, where they hide nothing."""
    handles, names = ax.get_legend_handles_labels()
    folded = [folded_name(name, width) for name in names]
    canvas.legend(handles, folded, frameon=False, loc="outside upper left", ncols=legend_columns(arms, width))


def folded_name(name: str, width: float) -> str:
    """A name in lines that fit a panel of this width beside the mark of its curve."""
    return textwrap.fill(name, int(10.5 * width), break_on_hyphens=False)


def legend_columns(arms: Sequence[Arm], width: float) -> int:
    return 2 if max(len(arm.name) for arm in arms) < 4.5 * width else 1


def legend_height(arms: Sequence[Arm], width: float = WIDTH) -> float:
    """Inches that the names of the arms take."""
    lines = sum(1 + folded_name(arm.name, width).count("\n") for arm in arms)
    return 0.24 * math.ceil(lines / legend_columns(arms, width))


def per_class(arms: Sequence[Arm], classes: Sequence[str]) -> Figure:
    """Accuracy of each class at the last evaluation, mean over seeds; of many classes, sorted by accuracy."""
    means = [class_means(arm) for arm in arms]
    few = len(classes) <= FEW_CLASSES
    each = 0.8 / len(arms)

    def bars(canvas: Canvas) -> None:
        ax = canvas.subplots()
        for i, (arm, values) in enumerate(zip(arms, means, strict=True)):
            at = np.arange(len(classes)) + (i - (len(arms) - 1) / 2) * each
            ax.barh(at, values, each, color=colour(i), label=arm.name)
        ax.set_ylim(len(classes) - 0.4, -0.6)
        ax.set_xlim(0, 100)
        ax.set_xlabel(f"{judged(arms).accuracy} (%)")
        ax.grid(visible=False, axis="y")
        name_classes(ax, classes)
        legend(canvas, ax, arms)

    def ranks(canvas: Canvas) -> None:
        ax = canvas.subplots()
        for i, (arm, values) in enumerate(zip(arms, means, strict=True)):
            known = np.sort(values[~np.isnan(values)])
            style = STYLES[i % len(STYLES)]
            at = np.arange(1, len(known) + 1)
            ax.plot(at, known, color=colour(i), linestyle=style, linewidth=2, drawstyle="steps-mid", label=arm.name)
        ax.set_ylim(0, 102)  # a line at 100 % is drawn in full
        ax.margins(x=0.02)
        ax.set_xlabel("classes, from worst to best")
        ax.set_ylabel(f"{judged(arms).accuracy} (%)")
        legend(canvas, ax, arms)

    spans = "; ".join(f"{arm.name} {span(values, classes)}" for arm, values in zip(arms, means, strict=True))
    alt = f"Accuracy of each of {len(classes)} classes: {spans}."
    mean = " Mean over seeds." if any(len(arm.curves) > 1 for arm in arms) else ""
    if few:
        height = 0.75 + legend_height(arms) + len(classes) * (0.14 + 0.13 * len(arms))
        return Figure([draw(height, bars, alt)], f"At the last evaluated round.{mean}")
    return Figure(
        [draw(3.3 + legend_height(arms), ranks, alt)],
        f"At the last evaluated round; each setting sorts its own classes.{mean}",
    )


def span(values: np.ndarray, classes: Sequence[str]) -> str:
    """The worst and the best class in words, and how many are level with each."""
    if np.isnan(values).all():
        return "not known"
    ends = []
    for rate in (np.nanmin(values), np.nanmax(values)):
        first, *others = level(values, rate)
        ends.append(f"{rate:.0f} % ({classes[first]}{f' and {len(others)} more' if others else ''})")
    return f"from {ends[0]} to {ends[1]}"


def clients(arms: Sequence[Arm]) -> Figure:
    """How accuracy is spread over clients: sorted by it, over all seeds. Every arm has a client with accuracy."""
    sorted_ = [np.sort(100 * np.concatenate([h.accuracy[np.isfinite(h.accuracy)] for h in a.clients])) for a in arms]

    def paint(canvas: Canvas) -> None:
        ax = canvas.subplots()
        for i, (arm, values) in enumerate(zip(arms, sorted_, strict=True)):
            at = 100 * (np.arange(len(values)) + 0.5) / len(values)
            dot = "o" if len(values) <= FEW_CLIENTS else ""
            style = STYLES[i % len(STYLES)]
            ax.plot(at, values, color=colour(i), linestyle=style, marker=dot, markersize=4, linewidth=2, label=arm.name)
        ax.set_xlim(0, 100)
        ax.set_ylim(0, 102)
        ax.set_xlabel("clients, from worst to best (%)")
        ax.set_ylabel("accuracy on own mix (%)")
        legend(canvas, ax, arms)

    said = "; ".join(
        f"{arm.name} from {v[0]:.1f} % to {v[-1]:.1f} %, half of them above {np.median(v):.1f} %"
        for arm, v in zip(arms, sorted_, strict=True)
    )
    seeds = " Clients of all seeds together." if any(len(arm.clients) > 1 for arm in arms) else ""
    caption = f"A point is a client; what lies to the left of it sees less.{seeds}"
    return Figure([draw(3.3 + legend_height(arms), paint, f"Accuracy that clients see: {said}.")], caption)


def confusion(arms: Sequence[Arm], classes: Sequence[str]) -> Figure | None:
    """What the judged images of each class are taken for by the last model, one panel an arm; None where it is not
    known."""
    known = [arm for arm in arms if arm.confusion is not None]
    if not known:
        return None
    panels = []
    for arm in known:
        assert arm.confusion is not None
        pairs = [f"{row['class']} ({row[arm.name]})" for row in mixed_up([arm], classes)[:3]]
        most = f" Mixed up most: {'; '.join(pairs)}." if pairs else " None is taken for another."
        title = arm.name if len(arms) > 1 else ""
        panels.append(matrix(shares(arm.confusion), classes, title, f"{arm.name}: what images are taken for.{most}"))
    whom = " Summed over clients' own models." if any(arm.own for arm in known) else ""
    seeds = " Summed over seeds." if any(len(arm.curves) > 1 for arm in known) else ""
    which = f"the {judged(arms).images} of a class (a row) by the class they are taken for (a column)"
    caption = f"Percent of {which}.{whom}{seeds}"
    return Figure(panels, caption)


def matrix(shares: np.ndarray, classes: Sequence[str], title: str, alt: str, rows: str = "class") -> str:
    """Percent of each row as a heat map, float64 [classes, classes], with the numbers where they are few; `rows` says
    what a row is."""
    few = len(classes) <= FEW_CLASSES

    def paint(canvas: Canvas) -> None:
        ax = canvas.subplots()
        ax.imshow(shares, cmap=COUNTS, vmin=0, vmax=100, interpolation="nearest", aspect="auto")
        ax.grid(visible=False)
        name_classes(ax, classes)
        ax.set_title(title, loc="left", fontweight="bold")
        if few:
            ax.set_xticks(
                range(len(classes)), [brief(name) for name in classes], rotation=60, ha="right", rotation_mode="anchor"
            )
            ax.tick_params(axis="x", length=0)
            size = 9 if len(classes) <= 12 else 6
            for (i, j), value in np.ndenumerate(shares):
                if value >= 0.5:
                    shade = "white" if value > 50 else "black"
                    ax.text(j, i, f"{value:.0f}", ha="center", va="center", color=shade, fontsize=size)
        ax.set_xlabel("taken for")
        ax.set_ylabel(rows)

    return draw(4.6, paint, alt)


def pictures(real: dict[str, np.ndarray], synthetic: dict[str, np.ndarray], classes: Sequence[str]) -> Pictures | None:
    """Real images of each class beside those from the prior, uint8 [n, 3, H, W] each; None where there are none."""
    kinds = [(kind, part) for kind, part in (("real", real), ("from the prior", synthetic)) if part]
    there = [name for name in classes if any(name in part for _, part in kinds)]
    if not there:
        return None
    names = there[:FEW_CLASSES]
    own = max(next(iter(kinds[0][1].values())).shape[-2:])
    side = min(own, LARGEST)
    fit = STRIP // (side * enlargement(side))
    many = max(1, min(SHOWN, fit, PIXELS // (side**2 * len(names) * len(kinds))))
    rows: list[tuple[str, list[tuple[str, Strip | None]]]] = [
        (name, [(kind, strip(part[name][:many], f"{name}, {kind}") if name in part else None) for kind, part in kinds])
        for name in names
    ]
    left = f" The first {len(names)} of {len(there)} classes." if len(names) < len(there) else ""
    scale = f"Enlarged {enlargement(side)} times without smoothing." if enlargement(side) > 1 else "At their own size."
    return Pictures(rows, (f"Reduced to {LARGEST} pixels." if own > LARGEST else scale) + left)


def strip(images: np.ndarray, alt: str) -> Strip:
    """Images uint8 [n, 3, H, W] side by side at their own size, at most LARGEST; the page enlarges small ones."""
    tiles = [Image.fromarray(np.ascontiguousarray(x.transpose(1, 2, 0))) for x in images]
    for tile in tiles:
        tile.thumbnail((LARGEST, LARGEST))
    width, height = tiles[0].size
    scale = enlargement(max(width, height))
    gap = max(1, round(4 / scale))
    sheet = Image.new("RGB", (len(tiles) * (width + gap) - gap, height), "white")
    for i, tile in enumerate(tiles):
        sheet.paste(tile, (i * (width + gap), 0))
    out = io.BytesIO()
    sheet.save(out, format="PNG", optimize=True)
    source = f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
    shown = f"{alt}: {len(tiles)} image{'s' if len(tiles) > 1 else ''}"
    return Strip(source, sheet.width * scale, sheet.height * scale, scale > 1, shown)


def enlargement(side: int) -> int:
    """The whole factor that brings a side of this many pixels near TILE."""
    return max(1, round(TILE / side))
