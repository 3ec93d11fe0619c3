"""One offline HTML page: no script, nothing loaded from anywhere."""

from pathlib import Path
from typing import Any

from .. import store
from . import summary
from .summary import ReportData

CARDS = 4  # arms shown as large numbers; more of them are left to the table


def write(data: ReportData, path: Path) -> None:
    """Writes the page in one step."""
    store.write_text(path, render(data))


def page(template: str, **values: Any) -> str:
    """A template of this folder filled in; `environment` are versions by name, as `data.environment`."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    engine = Environment(
        loader=PackageLoader("fedprior.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return engine.get_template(template).render(**values)


def render(data: ReportData) -> str:
    """The page as text; the same data give the same bytes."""
    return page(
        "report.html.j2",
        data=data,
        environment=data.environment,
        facts=facts(data),
        cards=cards(data),
        verdicts=summary.verdicts(data.arms),
        window=summary.window(data.arms),
        seeds=summary.seeds(data.arms),
        far=summary.FAR,
        holdings=summary.holdings(data),
        comparison=summary.comparison(data.arms, data.target),
        clients=summary.client_rows(data.arms),
        traffic=summary.traffic_rows(data.arms),
        incidents=summary.incidents(data.arms),
        **figures(data),
    )


def facts(data: ReportData) -> list[str]:
    """The setting at a glance."""
    clients, classes = data.before.shape
    rounds = max(len(curve) for arm in data.arms for curve in arm.curves)
    counts = [summary.counted(clients, "client"), f"{classes} classes", summary.counted(rounds, "round")]
    return [*counts, summary.seeds(data.arms)]


def cards(data: ReportData) -> list[dict[str, str]]:
    """The headline of each arm in large type; none when there are too many arms to read them so."""
    from .figures import colour

    if len(data.arms) > CARDS:
        return []
    out = []
    for i, arm in enumerate(data.arms):
        mean, spread = summary.score(arm)
        note = f"± {100 * spread:.1f}" if spread is not None else ""
        out.append({"name": arm.name, "value": summary.percent(mean), "spread": note, "colour": colour(i)})
    return out


def figures(data: ReportData) -> dict[str, Any]:
    """The figures that the data allow; None for the others."""
    from . import figures

    trained = [summary.evaluated(c) for arm in data.arms for c in arm.curves]
    out: dict[str, Any] = {"distribution": figures.distribution(data.before, data.after, data.classes)}
    out["training"] = figures.training(data.arms) if all(trained) else None
    out["per_class"] = figures.per_class(data.arms, data.classes) if all(trained) else None
    out["pictures"] = figures.pictures(data.real, data.synthetic, data.classes)
    return out
