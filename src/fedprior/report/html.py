"""One offline HTML page: no script, nothing loaded from anywhere.

A page is a list of sections, a section a heading and blocks: what `table`, `panels`, `strips` and the others return.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import paired, store
from . import numbers, summary
from .numbers import ReportData

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

    from .figures import Figure, Pictures


class Section(NamedTuple):
    title: str
    blocks: "Sequence[Markup | None]"  # None is left out; so is a section that has nothing else


class Card(NamedTuple):
    """A number in large type."""

    name: str
    value: str
    spread: str  # "" where there is none
    colour: str


def write(data: ReportData, path: Path) -> None:
    """Writes the page in one step."""
    store.write_text(path, render(data))


@cache
def engine() -> "Environment":
    """Templates are those of this folder."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("fedprior.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def page(template: str, **values: Any) -> str:
    """A template of this folder filled in; `environment` are versions by name, as `data.environment`."""
    return engine().get_template(template).render(**values)


def document(
    title: str,
    sections: Sequence[Section],
    environment: Mapping[str, str],
    *,
    facts: Sequence[str] = (),
    cards: Sequence[Card] = (),
    note: str = "",
    sentences: Sequence[str] = (),
) -> str:
    """A whole page: the setting at a glance (`facts`), large numbers with a `note` on what they are, `sentences` that
    sum it up, and sections, which the page lists before the first one."""
    full = [(anchor(s.title), s.title, [b for b in s.blocks if b]) for s in sections if any(s.blocks)]
    return page(
        "page.html.j2",
        title=title,
        sections=full,
        environment=environment,
        facts=facts,
        cards=cards,
        note=note,
        sentences=sentences,
    )


def anchor(title: str) -> str:
    """A title as the id of its section."""
    return "section-" + re.sub(r"\W+", "-", title.lower()).strip("-")


# blocks


def block(macro: str, *values: Any) -> "Markup":
    """What a macro of parts.html.j2 makes of these."""
    from markupsafe import Markup

    return Markup(getattr(engine().get_template("parts.html.j2").module, macro)(*values))


def table(name: str, rows: Sequence[Mapping[str, str]], caption: str) -> "Markup | None":
    """Rows under their keys, the first column as the rows' heads; None without rows. `name` is an id of its own on the
    page."""
    return block("table", name, rows, caption) if rows else None


def panels(figure: "Figure | None") -> "Markup | None":
    return block("panels", figure) if figure else None


def strips(pictures: "Pictures | None") -> "Markup | None":
    return block("strips", pictures) if pictures else None


def prose(sentences: Sequence[str]) -> "Markup | None":
    """A paragraph each."""
    return block("prose", sentences) if sentences else None


def bullets(lines: Sequence[str]) -> "Markup | None":
    return block("bullets", lines) if lines else None


def fold(title: str, *blocks: "Markup | None") -> "Markup | None":
    """Blocks that show when their title is chosen, and on paper."""
    inside = [b for b in blocks if b]
    return block("fold", title, inside) if inside else None


def beside(*blocks: "Markup | None") -> "Markup | None":
    """Blocks side by side where there is room."""
    there = [b for b in blocks if b]
    return there[0] if len(there) == 1 else block("beside", there) if there else None


def listing(text: str) -> "Markup":
    """Text as it is, such as a file."""
    return block("listing", text)


def terms(values: Mapping[str, str]) -> "Markup":
    """Names and what belongs to each."""
    return block("terms", values)


# the report of runs


def render(data: ReportData) -> str:
    """The page as text; the same data give the same bytes."""
    return document(
        data.title,
        sections(data),
        data.environment,
        facts=facts(data),
        cards=cards(data),
        note=note(data),
        sentences=summary.sentences(data),
    )


def sections(data: ReportData) -> list[Section]:
    """What the data allow."""
    from . import figures

    arms, classes, said = data.arms, data.classes, numbers.judged(data.arms)
    few = len(arms) <= summary.CARDS
    fits = few and sum(max(map(len, arm.name.split())) for arm in arms) <= HALF  # a column for each, beside a figure
    trained = all(numbers.evaluated(c) for arm in arms for c in arm.curves)
    seen = all(any((h.accuracy >= 0).any() for h in arm.clients) for arm in arms)  # NaN is not
    per_class = figures.per_class(arms, classes) if trained else None
    confusion = figures.confusion(arms, classes)
    matrices = panels(confusion) if few else fold("Confusion matrices", panels(confusion))
    accuracy = [
        table("results", summary.comparison(arms, data.target), COMPARISON.format(capital(said.accuracy), said.whole)),
        panels(figures.training(arms)) if trained else None,
    ]
    held = [prose(summary.holdings(data)), panels(figures.distribution(data.before, data.after, classes))]
    spread = [
        panels(figures.clients(arms)) if seen else None,
        table("clients", summary.client_rows(arms), f"{CLIENTS.format(said.images)}{over(data, 'mean')}."),
    ]
    worst = table("worst", summary.worst_clients(arms, classes), "The clients that see least, worst first.")
    clients = [*([beside(*spread)] if fits else spread), worst if few else fold("Worst clients", worst)]
    mixed = table("mixed", summary.mixed_up(arms, classes), "Pairs of classes that are mixed up most.")
    first, second = (matrices, mixed) if len(arms) == 1 else (mixed, matrices)
    by_class = [
        *([beside(panels(per_class), first)] if fits else [panels(per_class), first]),
        second,
        table("domains", summary.domain_rows(arms), DOMAINS.format(capital(said.accuracy))),
    ]
    traffic = table("traffic", summary.traffic_rows(arms), TRAFFIC)
    return [
        Section("Accuracy", accuracy),
        Section("Who holds what", held),
        Section("What the clients see", clients),
        Section("Accuracy by class", by_class),
        Section("What the images look like", [strips(figures.pictures(data.real, data.synthetic, classes))]),
        Section("What was refused or left undone", undone(data)),
        Section("What it cost", [traffic, table("time", summary.seconds_rows(arms), TIME.format(over(data, "mean")))]),
        Section("Notes", [bullets(data.notes)]),
        Section("How it was made", made(data)),
    ]


HALF = 45  # characters of the longest words of columns' heads that half a page has room for
COMPARISON = "{}. “Best” is picked by looking at {}, so it is optimistic. MB are 1e6 bytes, up and down."
CLIENTS = "Expected accuracy of each client on {} mixed like its own real rows, at the last evaluated round"
DOMAINS = "{} in other ways, at the last evaluated round."
TRAFFIC = "MB over the whole run by direction and group of tensors, without compression."
SHOWN = (
    "Of {}; the others differ in name, seed, perhaps where and how fast they ran, what is listed above and what "
    "belongs to it."
)
TIME = "Where the time of a run went{}. Images and descriptors that were there already only took finding."
RULE = (
    "Settings are compared seed by seed. A gain or a loss is the mean, ± the sample standard deviation of the paired "
    f"differences over the seeds in both, and is told from chance when a {paired.the_test('seeds')} tells it from 0. "
    f"That takes at least {paired.LEAST} seeds; fewer than {paired.FEW} tell only large differences. Nothing is "
    "adjusted for the number of settings."
)


def undone(data: ReportData) -> "list[Markup | None]":
    """How requests to clients ended; nothing where there were none."""
    incidents = summary.incidents(data.arms)
    asking = [arm for arm in data.arms if not arm.pooled]
    if not incidents and not asking:
        return []
    if not incidents:
        asked = sum(len(line["cohort"]) for arm in asking for curve in arm.curves for line in curve)
        return [prose([f"Nothing: {numbers.counted(asked, 'request')} to clients, and as many good updates in full."])]
    caption = f"How requests ended{over(data, 'summed')}."
    return [
        table("ends", summary.attendance_rows(data.arms), caption) if several(data) and asking else None,
        bullets(incidents),
    ]


def several(data: ReportData) -> bool:
    """Whether the page is of more than one run."""
    return sum(len(arm.curves) for arm in data.arms) > 1


def over(data: ReportData, how: str) -> str:
    """How several seeds were put together; "" where there is one."""
    return f", {how} over seeds" if any(len(arm.curves) > 1 for arm in data.arms) else ""


def made(data: ReportData) -> "list[Markup | None]":
    """Settings, directories, versions and hardware."""
    runs = table("runs", summary.run_rows(data.arms), "The directories that this page was made from.")
    return [
        prose([RULE]) if len(data.arms) > 1 else None,
        table("differences", summary.differences(data.arms), "Settings that differ."),
        fold("Resolved config", prose([SHOWN.format(data.shown.run)]) if several(data) else None, listing(data.config)),
        fold("Runs", runs) if several(data) else None,
        fold("Versions and hardware", terms(data.environment)),
    ]


def facts(data: ReportData) -> list[str]:
    """The setting at a glance."""
    clients = [len(data.before), *(len(held.real) for arm in data.arms for held in arm.clients)]
    return [
        numbers.ranged(clients, "client"),
        f"{len(data.classes)} classes",
        numbers.ranged(numbers.lengths(data.arms), "round"),
        summary.seeds(data.arms),
    ]


def cards(data: ReportData) -> list[Card]:
    """The headline of each arm in large type; none when there are too many arms to read them so."""
    from .figures import colour

    if len(data.arms) > summary.CARDS:
        return []
    out = []
    for i, arm in enumerate(data.arms):
        mean, spread = numbers.score(arm)
        out.append(
            Card(arm.name, numbers.percent(mean), f"± {100 * spread:.1f}" if spread is not None else "", colour(i))
        )
    return out


def note(data: ReportData) -> str:
    """What the large numbers are."""
    rounds, seeds = numbers.lengths(data.arms), summary.seeds(data.arms)
    which = f"{numbers.window(rounds)}, as far as evaluated" if max(rounds) > 1 else "after the last round"
    spread = "; ± is the sample standard deviation over seeds" if seeds != "one seed" else ""
    said = numbers.judged(data.arms)
    what = summary.named(f"{capital(said.accuracy)} on {said.where}", data.arms)
    return f"{what}, {which}, {seeds}{spread}."


def capital(text: str) -> str:
    """With which a sentence may begin."""
    return text[:1].upper() + text[1:]
