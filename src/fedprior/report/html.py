"""One offline HTML page: no script, nothing loaded from anywhere."""

from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from .. import store
from ..traffic import MB
from . import figures, summary
from .summary import ReportData


def write(data: ReportData, path: Path) -> None:
    """Writes the page in one step."""
    store.write_text(path, render(data))


def render(data: ReportData) -> str:
    """The page as text; the same data give the same bytes."""
    environment = Environment(
        loader=PackageLoader("fedprior.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(
        data=data,
        sentences=summary.sentences(data),
        rows=summary.comparison(data.arms, data.target),
        clients=client_rows(data),
        traffic=traffic_rows(data),
        incidents=incidents(data),
        figures=all_figures(data),
    )


def all_figures(data: ReportData) -> list[figures.Figure]:
    """The figures that the data allow."""
    out = [figures.distribution(data.before, data.after, data.classes)]
    if all(summary.evaluated(curve) for arm in data.arms for curve in arm.curves):
        out.append(figures.against_rounds(data.arms))
        if any(summary.megabytes(arm.curves[0][-1]) for arm in data.arms):
            out.append(figures.against_megabytes(data.arms))
        out.append(figures.per_class(data.arms, data.classes))
    if data.synthetic or data.real:
        out.append(figures.pictures(data.real, data.synthetic, data.classes))
    return out


def client_rows(data: ReportData) -> list[dict[str, str]]:
    """What the clients see at the last evaluation, mean over seeds."""
    out = []
    for arm in data.arms:
        ends = [summary.evaluated(c)[-1]["clients"] for c in arm.curves if summary.evaluated(c)]
        row = {"setting": arm.name}
        for key, head in (
            ("mean", "mean"),
            ("weighted", "by rows"),
            ("std", "std"),
            ("p10", "10th percentile"),
            ("worst", "worst"),
        ):
            row[head] = summary.percent(summary.across_seeds([e[key] for e in ends])[0])
        out.append(row)
    return out


def traffic_rows(data: ReportData) -> list[dict[str, str]]:
    """MB by direction and tensor group over the whole run (first seed)."""
    out = []
    for arm in data.arms:
        end = arm.curves[0][-1]
        for way, groups in (("up", end["uplink_groups"]), ("down", end["downlink_groups"])):
            out += [
                {"setting": arm.name, "direction": way, "group": k, "MB": f"{v / MB:.3f}"} for k, v in groups.items()
            ]
    return out


def incidents(data: ReportData) -> list[str]:
    """Refused updates and skipped rounds, one line each; the first twenty."""
    lines = []
    for arm in data.arms:
        for curve in arm.curves:
            for line in curve:
                lines += [
                    f"{arm.name}, round {line['round']}: client {r['client']} refused, {r['reason']}"
                    for r in line["refused"]
                ]
                if line["skipped"]:
                    lines.append(f"{arm.name}, round {line['round']}: no update counted, the model stayed as it was")
    more = len(lines) - 20
    return lines[:20] + ([f"and {more} more"] if more > 0 else [])
