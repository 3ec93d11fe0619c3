"""The four figures of `fedprior prior explain`, PNG files in the style of the report's."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter
from torch import Tensor

from .. import store
from ..report.figures import COUNTS, FEW_CLASSES, STYLE, colour

DPI = 144
CLIPPED = 1.0  # percent of values at either end of a map's colours
Rows = Sequence[Mapping[str, Any]]


def save(path: Path, size: tuple[float, float], paint: Callable[[Canvas], None]) -> None:
    """A PNG of this width and height in inches; `paint` fills the canvas."""
    with matplotlib.rc_context(STYLE):
        canvas = Canvas(figsize=size, layout="constrained")
        paint(canvas)
        with store.atomic(path) as temporary:
            canvas.savefig(temporary, format="png", dpi=DPI)


def grid(rows: Rows, key: str) -> tuple[list[str], list[int], np.ndarray]:
    """-> (levels, timesteps, values [levels, timesteps])."""
    levels = list(dict.fromkeys(row["level"] for row in rows))
    timesteps = list(dict.fromkeys(row["timestep"] for row in rows))
    values = {(row["level"], row["timestep"]): row[key] for row in rows}
    return levels, timesteps, np.array([[values[level, t] for t in timesteps] for level in levels])


def named(level: str) -> str:
    return f"level {level}" if level.isdigit() else level


def separability(rows: Rows, pixels: Mapping[str, float], chance: float, path: Path) -> None:
    """Linear probe and purity of each level at each timestep, in percent."""
    kinds = (("probe", "Linear probe: test accuracy"), ("purity", "k-means: purity"))

    def paint(canvas: Canvas) -> None:
        for ax, (key, title) in zip(canvas.subplots(1, 2), kinds, strict=True):
            levels, timesteps, values = grid(rows, key)
            top = max(values.max(), pixels[key], chance + 0.01)
            ax.imshow(values, aspect="auto", cmap=COUNTS, vmin=chance, vmax=top)
            for (i, j), value in np.ndenumerate(values):
                dark = value > chance + 0.5 * (top - chance)
                ax.text(j, i, f"{100 * value:.1f}", ha="center", va="center", color="white" if dark else "black")
            ax.set_xticks(range(len(timesteps)), timesteps)
            ax.set_yticks(range(len(levels)), [named(level) for level in levels])
            ax.set_xlabel("timestep")
            ax.set_title(f"{title} (%)\nraw pixels: {100 * pixels[key]:.1f}", loc="left")
            ax.grid(visible=False)
            ax.tick_params(length=0)

    levels, timesteps, _ = grid(rows, "probe")
    save(path, (2 * (1.5 + 0.62 * max(len(timesteps), 4)), 1.4 + 0.42 * len(levels)), paint)


def points(found: Mapping[int, Mapping[str, Tensor]], label: Tensor, classes: Sequence[str], path: Path) -> None:
    """A panel for each level (down) and timestep (across) with one point [n, 2] an image, coloured by class."""
    timesteps, levels = list(found), list(next(iter(found.values())))
    few = len(classes) <= FEW_CLASSES
    shades = matplotlib.colormaps["tab10" if len(classes) <= 10 else "tab20" if few else "hsv"]
    shade = [shades(c if few else c / len(classes)) for c in range(len(classes))]
    marks = [shade[c] for c in label.tolist()]

    def paint(canvas: Canvas) -> None:
        axes = canvas.subplots(len(levels), len(timesteps), squeeze=False)
        for row, level in zip(axes, levels, strict=True):
            for ax, timestep in zip(row, timesteps, strict=True):
                x, y = found[timestep][level].numpy().T
                ax.scatter(x, y, s=5, c=marks, linewidths=0)
                bare(ax)
                ax.spines[:].set_visible(True)
        headings(axes, levels, [f"timestep {t}" for t in timesteps])
        if few:
            dots = [axes[0, 0].scatter([], [], s=30, color=shade[c], label=name) for c, name in enumerate(classes)]
            canvas.legend(handles=dots, loc="outside right upper", frameon=False)

    save(path, (2.4 * len(timesteps) + 1.6, 2.3 * len(levels) + 0.3), paint)


def maps(images: Tensor, found: Mapping[int, Mapping[str, Tensor]], path: Path) -> None:
    """Images uint8 [n, 3, H, W], each with its maps [n, h, w, 3] of every timestep and level as colours, which all
    images of a column share."""
    columns: list[tuple[str, np.ndarray]] = [("image", images.movedim(1, -1).numpy())]
    for timestep, by_level in found.items():
        columns += [(f"level {level}\nt = {timestep}", colours(x.numpy())) for level, x in by_level.items()]

    def paint(canvas: Canvas) -> None:
        axes = canvas.subplots(len(images), len(columns), squeeze=False)
        for j, (title, pictures) in enumerate(columns):
            axes[0, j].set_title(title, fontsize=9)
            for ax, picture in zip(axes[:, j], pictures, strict=True):
                ax.imshow(picture, interpolation="nearest")
                bare(ax)

    save(path, (0.95 * len(columns), 0.95 * len(images) + 0.4), paint)


def colours(x: np.ndarray) -> np.ndarray:
    """Maps [n, h, w, 3] as colours in [0, 1], each component stretched over its own values."""
    low, high = np.percentile(x, [CLIPPED, 100 - CLIPPED], axis=(0, 1, 2))
    return np.asarray(np.clip((x - low) / np.maximum(high - low, 1e-12), 0, 1))


def prompts(rows: Rows, chance: float, path: Path) -> None:
    """Above, the parts of the variance of each level against timesteps; below, what only a class prompt's knowledge of
    an image could make better than chance."""
    parts = tuple((key, key) for key in ("image", "prompt", "interaction"))
    scores = (
        ("own_nearest", "own class's prompt is nearest"),
        ("own_nearest_centred", "same, without prompts' means"),
        ("interaction_probe", "linear probe on the interaction"),
    )
    levels, timesteps, _ = grid(rows, "image")
    above = np.stack([grid(rows, key)[2] for key, _ in parts])
    floor = 10.0 ** np.floor(np.log10(max(above.min(), 1e-6)))

    def paint(canvas: Canvas) -> None:
        axes = canvas.subplots(2, len(levels), sharex=True, sharey="row", squeeze=False)
        for lines, row in ((parts, axes[0]), (scores, axes[1])):
            for number, (key, name) in enumerate(lines):
                for ax, values in zip(row, grid(rows, key)[2], strict=True):
                    ax.plot(values, color=colour(number + 3 * (lines is scores)), marker="o", markersize=4, label=name)
        for ax in axes[0]:
            ax.set_yscale("log")
            ax.set_ylim(floor, 1.5)
            ax.yaxis.set_major_formatter(FuncFormatter(lambda share, at: f"{100 * share:g} %"))
            ax.tick_params(axis="y", which="minor", length=0)
        for ax in axes[1]:
            ax.axhline(chance, color="#4A5260", linestyle=":", label="chance")
            ax.set_ylim(0, 1.02)
            ax.set_xticks(range(len(timesteps)), timesteps, rotation=60)
            ax.set_xlabel("timestep")
        axes[0, 0].set_ylabel("share of variance")
        axes[1, 0].set_ylabel("share of test images")
        for ax, level in zip(axes[0], levels, strict=True):
            ax.set_title(named(level))
        for row in axes:
            row[-1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)

    save(path, (1.9 * len(levels) + 3.2, 5.2), paint)


def headings(axes: np.ndarray, levels: Sequence[str], titles: Sequence[str]) -> None:
    """Names of rows and columns."""
    for ax, title in zip(axes[0], titles, strict=True):
        ax.set_title(title)
    for ax, level in zip(axes[:, 0], levels, strict=True):
        ax.set_ylabel(named(level))


def bare(ax: Axes) -> None:
    """Nothing but what is drawn."""
    ax.set_xticks([])
    ax.set_yticks([])
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)
