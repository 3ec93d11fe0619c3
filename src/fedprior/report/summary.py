"""The numbers of a report: pure functions over the lines of metrics.jsonl."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..traffic import MB

LAST = 10  # evaluations that the headline averages

Curve = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One setting, over one or several seeds."""

    name: str
    curves: list[Curve]  # one a seed: the lines of metrics.jsonl


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """All that a report shows."""

    title: str
    arms: list[Arm]
    classes: tuple[str, ...]
    before: np.ndarray  # int64 [clients, classes], real rows
    after: np.ndarray | None  # int64 [clients, classes] with synthetic rows; None where there are none
    synthetic: dict[str, np.ndarray]  # class name -> uint8 [n, 3, H, W]
    real: dict[str, np.ndarray]
    config: str  # resolved TOML
    environment: dict[str, str]
    notes: list[str]
    target: float | None  # accuracy in [0, 1]


def evaluated(curve: Curve) -> Curve:
    """The rounds that have an accuracy."""
    return [line for line in curve if line["accuracy"] is not None]


def headline(curve: Curve) -> dict[str, Any]:
    """last, mean_last10 (of the last ten evaluations), best (optimistic: chosen on the test set), rounds."""
    seen = [line["accuracy"] for line in evaluated(curve)]
    if not seen:
        return {"last": None, "mean_last10": None, "best": None, "rounds": len(curve)}
    tail = seen[-LAST:]
    return {
        "last": seen[-1],
        "mean_last10": math.fsum(tail) / len(tail),
        "best": max(seen),
        "rounds": len(curve),
    }


def megabytes(line: dict[str, Any]) -> float:
    """Sent up to this round, both directions, in 1e6 bytes."""
    return float(line["uplink_bytes"] + line["downlink_bytes"]) / MB


def to_target(curve: Curve, target: float) -> dict[str, Any] | None:
    """The first evaluated round that reaches the target accuracy, and the MB sent by then; None if none does."""
    for line in evaluated(curve):
        if line["accuracy"] >= target:
            return {"rounds": line["round"], "MB": megabytes(line)}
    return None


def across_seeds(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """-> (mean, sample standard deviation); the deviation of one value is None, and so is all of nothing."""
    known = [v for v in values if v is not None]
    if not known:
        return None, None
    return statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None


def percent(mean: float | None, spread: float | None = None) -> str:
    if mean is None:
        return "–"
    return f"{100 * mean:.1f} %" + (f" ± {100 * spread:.1f}" if spread is not None else "")


def comparison(arms: Sequence[Arm], target: float | None) -> list[dict[str, str]]:
    """One row an arm, ready to print; the keys are the column heads."""
    rows = []
    for arm in arms:
        heads = [headline(c) for c in arm.curves]
        spread = {k: percent(*across_seeds([h[k] for h in heads])) for k in ("mean_last10", "last", "best")}
        row = {
            "setting": arm.name,
            "mean of last 10": spread["mean_last10"],
            "last": spread["last"],
            "best (optimistic)": spread["best"],
            "seeds": str(len(arm.curves)),
            "rounds": str(heads[0]["rounds"]),
            "MB sent": f"{statistics.fmean(megabytes(c[-1]) for c in arm.curves):.2f}",
        }
        if target is not None:
            row[f"to {percent(target)}"] = reached(arm, target)
        rows.append(row)
    return rows


def reached(arm: Arm, target: float) -> str:
    """Rounds and MB until the target, as a mean over the seeds that got there."""
    hits = [hit for c in arm.curves if (hit := to_target(c, target))]
    if not hits:
        return "not reached"
    some = "" if len(hits) == len(arm.curves) else f" ({len(hits)} of {len(arm.curves)} seeds)"
    rounds, sent = statistics.fmean(h["rounds"] for h in hits), statistics.fmean(h["MB"] for h in hits)
    return f"{rounds:.0f} rounds, {sent:.2f} MB{some}"


def sentences(data: ReportData) -> list[str]:
    """What the numbers say, in words; a gain that is none is called so."""
    out = []
    scores = {arm.name: across_seeds([headline(c)["mean_last10"] for c in arm.curves]) for arm in data.arms}
    ranked = sorted(scores, key=lambda name: -(scores[name][0] or 0))
    seeds = max(len(arm.curves) for arm in data.arms)
    how = "mean of the last 10 rounds" + (f", {seeds} seeds" if seeds > 1 else ", one seed")
    best, spread = scores[ranked[0]]
    out.append(f"{ranked[0]} reached {percent(best, spread)} test accuracy ({how}).")
    if best is not None:
        out += [against(ranked[0], best, spread, name, *scores[name]) for name in ranked[1:]]
    if data.after is not None:
        made = int(data.after.sum() - data.before.sum())
        out.append(
            f"The {len(data.before)} clients hold {int(data.before.sum())} real rows; {made} synthetic ones were added."
        )
    missing = int((data.before == 0).sum(1).mean().round())
    out.append(f"A client lacks {missing} of the {len(data.classes)} classes on average among its real rows.")
    return out


def against(name: str, best: float, spread: float | None, other: str, mean: float | None, dev: float | None) -> str:
    """How far the best arm is ahead of another, measured by the spread over seeds."""
    if mean is None:
        return f"{other} was never evaluated."
    gain, noise = 100 * (best - mean), 100 * math.hypot(spread or 0, dev or 0)
    if spread is None and dev is None:
        verdict = "one seed says nothing about chance"
    elif gain > 3 * noise:
        verdict = "far outside the spread over seeds"
    elif gain > noise:
        verdict = "outside one spread over seeds, but not far"
    else:
        verdict = "within the spread over seeds: no gain is shown"
    return f"{other} reached {percent(mean, dev)}: {gain:.1f} points less than {name}, {verdict}."
