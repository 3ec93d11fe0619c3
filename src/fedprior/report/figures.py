"""Figures as inline SVG, or PNG where they hold photographs. The same numbers give the same bytes."""

import base64
import io
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator
from PIL import Image, ImageDraw, ImageFont

from .summary import Arm, evaluated, megabytes

COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#999999",
)  # Okabe-Ito
STYLES = ("-", "--", "-.", ":")
REAL, SYNTHETIC = "#4C566A", "#E69F00"
FEW_CLASSES = 20
STYLE = {
    "svg.hashsalt": "fedprior",
    "svg.fonttype": "path",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E3E6EB",
    "axes.axisbelow": True,
    "axes.edgecolor": "#8A93A3",
    "axes.labelcolor": "#2B3038",
    "text.color": "#2B3038",
    "xtick.color": "#4A5260",
    "ytick.color": "#4A5260",
}


class Figure(NamedTuple):
    title: str
    html: str  # an <svg> or <img> element with its description
    caption: str
    wide: bool = True  # whether it needs the whole width of the page


def draw(width: float, height: float, paint: Callable[[Canvas], None], alt: str) -> str:
    """An <svg> element; `paint` fills a canvas of this size in inches."""
    with matplotlib.rc_context(STYLE):
        canvas = Canvas(figsize=(width, height), layout="constrained")
        paint(canvas)
        out = io.StringIO()
        canvas.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns:(xlink|rdf|dc|cc)="[^"]*"', lambda m: m[0] if m[1] == "xlink" else "", svg)
    label = alt.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def distribution(before: np.ndarray, after: np.ndarray | None, classes: Sequence[str]) -> Figure:
    """Rows of each class at each client, before and after the prior's images (Gen-FedSD, Fig. 2)."""
    stages = [("real rows", before)] + ([("real and synthetic rows", after)] if after is not None else [])
    few = len(classes) <= FEW_CLASSES
    top = max(int(rows.max()) for _, rows in stages) or 1
    clients = len(before)

    def paint(canvas: Canvas) -> None:
        axes = canvas.subplots(1, len(stages), sharey=True, squeeze=False)[0]
        for ax, (name, rows) in zip(axes, stages, strict=True):
            ax.set_title(name, fontsize=11)
            ax.set_xlabel("client")
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
            if few and clients <= 40:
                x, y = np.meshgrid(np.arange(clients), np.arange(len(classes)), indexing="ij")
                size = 260 / max(1, clients / 14) * rows / top
                extra = rows - before
                ax.scatter(x, y, s=size, c=np.where(extra > 0, SYNTHETIC, REAL).ravel(), linewidths=0)
                ax.set_xlim(-1, clients)
            else:
                ax.imshow(rows.T, aspect="auto", cmap="cividis", vmin=0, vmax=top, interpolation="nearest")
                ax.grid(visible=False)
            ax.invert_yaxis()
            if few:
                ax.set_yticks(range(len(classes)), classes)
            else:
                ax.set_ylabel("class")
        if few:
            axes[0].set_ylim(len(classes) - 0.4, -0.6)

    alt = f"Class counts of {clients} clients: {describe_rows(before)} among real rows"
    alt += f"; {describe_rows(after)} with synthetic rows." if after is not None else "."
    marks = "The area of a dot is the number of rows; orange: some are synthetic." if few else "Bright: many rows."
    return Figure("Who holds what", draw(10, 1.4 + 0.24 * min(len(classes), 24), paint, alt), marks)


def describe_rows(rows: np.ndarray) -> str:
    return f"{(rows > 0).sum(1).mean():.1f} classes a client on average"


def curves(arms: Sequence[Arm], x: Callable[[dict[str, Any]], float], label: str, title: str) -> Figure:
    """Accuracy against rounds or megabytes: the mean line over seeds, and a band from lowest to highest."""

    def paint(canvas: Canvas) -> None:
        ax = canvas.subplots()
        for i, arm in enumerate(arms):
            lines = [evaluated(c) for c in arm.curves]
            n = min(len(line) for line in lines)
            xs = [x(point) for point in lines[0][:n]]
            ys = 100 * np.array([[point["accuracy"] for point in line[:n]] for line in lines])
            colour, style = COLOURS[i % len(COLOURS)], STYLES[i % len(STYLES)]
            ax.plot(xs, ys.mean(0), color=colour, linestyle=style, linewidth=2, label=arm.name)
            if len(lines) > 1:
                ax.fill_between(xs, ys.min(0), ys.max(0), color=colour, alpha=0.18, linewidth=0)
        ax.set_xlabel(label)
        ax.set_ylabel("test accuracy (%)")
        ax.set_ylim(0, 100)
        ax.margins(x=0.01)
        ax.legend(frameon=False, loc="lower right")

    ends = ", ".join(f"{arm.name} ends at {final(arm):.1f} %" for arm in arms if any(evaluated(c) for c in arm.curves))
    alt = f"Line chart of test accuracy against {label}: {ends}."
    return Figure(title, draw(5.6, 4.0, paint, alt), "Line: mean over seeds. Band: lowest to highest seed.", wide=False)


def final(arm: Arm) -> float:
    return 100 * float(np.mean([evaluated(c)[-1]["accuracy"] for c in arm.curves if evaluated(c)]))


def against_rounds(arms: Sequence[Arm]) -> Figure:
    return curves(arms, lambda line: line["round"], "round", "Accuracy against rounds")


def against_megabytes(arms: Sequence[Arm]) -> Figure:
    return curves(arms, megabytes, "MB sent, up and down", "Accuracy against traffic")


def per_class(arms: Sequence[Arm], classes: Sequence[str]) -> Figure:
    """Accuracy of each class at the last evaluation, mean over seeds."""
    tables = []
    for arm in arms:
        ends = [evaluated(c)[-1]["per_class"] for c in arm.curves if evaluated(c)]
        tables.append(np.nanmean(np.array([[np.nan if v is None else v for v in e] for e in ends]), axis=0))

    def paint(canvas: Canvas) -> None:
        ax = canvas.subplots()
        wide = 0.8 / len(arms)
        for i, (arm, values) in enumerate(zip(arms, tables, strict=True)):
            at = np.arange(len(classes)) + (i - (len(arms) - 1) / 2) * wide
            ax.bar(at, 100 * values, wide, color=COLOURS[i % len(COLOURS)], label=arm.name)
        ax.set_ylabel("test accuracy (%)")
        ax.set_ylim(0, 100)
        ax.grid(visible=False, axis="x")
        name_classes(ax, classes)
        canvas.legend(frameon=False, loc="outside upper right", ncols=len(arms))

    alt = "Bar chart of the accuracy of each class: " + "; ".join(
        f"{arm.name} from {100 * np.nanmin(v):.0f} % to {100 * np.nanmax(v):.0f} %"
        for arm, v in zip(arms, tables, strict=True)
    )
    return Figure("Accuracy by class", draw(10, 3.4, paint, alt + "."), "At the last round, mean over seeds.")


def name_classes(ax: Axes, classes: Sequence[str]) -> None:
    if len(classes) <= FEW_CLASSES:
        ax.set_xticks(range(len(classes)), classes, rotation=0 if len(classes) <= 10 else 45)
    else:
        ax.set_xlabel("class")


def pictures(real: dict[str, np.ndarray], synthetic: dict[str, np.ndarray], classes: Sequence[str]) -> Figure:
    """Real and synthetic images of each class, enlarged without smoothing."""
    shown = [name for name in classes if name in synthetic or name in real][:FEW_CLASSES]
    sides = [part for part in (real, synthetic) if part]
    side = next(iter(sides[0].values())).shape[-1]
    scale = max(1, round(44 / side))
    cell, label, gap = side * scale, 130, 4
    columns = [max((len(v) for v in part.values()), default=0) for part in sides]
    width = label + sum(c * (cell + gap) + 24 for c in columns)
    sheet = Image.new("RGB", (width, 26 + len(shown) * (cell + gap)), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=14)
    heads = ["real", "from the prior"] if len(sides) == 2 else ["real" if sides[0] is real else "from the prior"]
    left = label
    for part, head, count in zip(sides, heads, columns, strict=True):
        pen.text((left, 4), head, fill="#2B3038", font=font)
        for r, name in enumerate(shown):
            top = 26 + r * (cell + gap)
            pen.text((4, top + cell // 2 - 9), name, fill="#2B3038", font=font)
            for c, image in enumerate(part.get(name, ())):
                tile = Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0)))
                sheet.paste(tile.resize((cell, cell), Image.Resampling.NEAREST), (left + c * (cell + gap), top))
        left += count * (cell + gap) + 24
    out = io.BytesIO()
    sheet.save(out, format="PNG", optimize=True)
    data = base64.b64encode(out.getvalue()).decode()
    alt = f"Image grid, one row a class: {' and '.join(heads)} images of {len(shown)} classes."
    tag = f'<img alt="{alt}" width="{width}" height="{sheet.height}" src="data:image/png;base64,{data}">'
    return Figure("What the images look like", tag, "Enlarged without smoothing.")
