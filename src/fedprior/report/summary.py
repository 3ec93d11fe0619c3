"""The numbers and sentences of a report: pure functions over the lines of metrics.jsonl."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..traffic import MB

LAST = 10  # rounds that the headline averages, as far as they were evaluated
FAR = 3  # combined standard deviations from which a difference is called far outside the spread

Curve = list[dict[str, Any]]
"""The lines of one run's metrics.jsonl, one a round; accuracies are in [0, 1], None where nothing was evaluated."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One setting, over one or several seeds."""

    name: str
    curves: list[Curve]  # one a seed


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """All that a report shows. The first arm is the one that the others are compared with."""

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
    """last, mean_last10 (of the evaluations within the last ten rounds), best (optimistic: chosen on the test set),
    rounds."""
    seen = [line["accuracy"] for line in evaluated(curve)]
    if not seen:
        return {"last": None, "mean_last10": None, "best": None, "rounds": len(curve)}
    final = evaluated(curve)[-1]["round"]
    tail = [line["accuracy"] for line in evaluated(curve) if line["round"] > final - LAST]
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


def score(arm: Arm) -> tuple[float | None, float | None]:
    """The arm's headline: mean and sample standard deviation over seeds of the mean of the last ten rounds."""
    return across_seeds([headline(curve)["mean_last10"] for curve in arm.curves])


def percent(mean: float | None, spread: float | None = None) -> str:
    """E.g. "95.1 % ± 0.2"; a dash where there is no number."""
    if mean is None:
        return "–"
    return f"{100 * mean:.1f} %" + (f" ± {100 * spread:.1f}" if spread is not None else "")


def window(arms: Sequence[Arm]) -> int:
    """How many rounds the headline averages: ten, or fewer where no run has as many."""
    return min(LAST, max(len(curve) for arm in arms for curve in arm.curves))


def seeds(arms: Sequence[Arm]) -> str:
    """E.g. "one seed", "3 seeds" or "1 to 3 seeds"."""
    few, many = min(len(arm.curves) for arm in arms), max(len(arm.curves) for arm in arms)
    if many == 1:
        return "one seed"
    return f"{many} seeds" if few == many else f"{few} to {many} seeds"


def comparison(arms: Sequence[Arm], target: float | None) -> list[dict[str, str]]:
    """One row an arm, ready to print; the keys are the column heads."""
    rows = []
    head = f"mean of last {window(arms)} rounds"
    for arm in arms:
        heads = [headline(c) for c in arm.curves]
        spread = {k: percent(*across_seeds([h[k] for h in heads])) for k in ("mean_last10", "last", "best")}
        row = {
            "setting": arm.name,
            head: spread["mean_last10"],
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
    return f"{counted(rounds, 'round')}, {sent:.2f} MB{some}"


def counted(n: float, noun: str) -> str:
    """E.g. "1 round" or "3,260 rows"."""
    text = f"{n:,.1f}".removesuffix(".0")
    return f"{text} {noun}" if text == "1" else f"{text} {noun}s"


def verdicts(arms: Sequence[Arm]) -> list[str]:
    """What the headline numbers say, in words: each further arm against the first. No gain is called no gain."""
    first, *others = arms
    base, spread = score(first)
    if base is None:
        return [f"{arm.name} was never evaluated." for arm in arms]
    if not others:
        return [f"{first.name} reached {percent(base, spread)} test accuracy."]
    return [against(first.name, base, spread, arm.name, *score(arm)) for arm in others]


def against(
    first: str, base: float, base_spread: float | None, name: str, mean: float | None, spread: float | None
) -> str:
    """How far an arm is ahead of or behind the first one, measured by the spread over seeds."""
    if mean is None:
        return f"{name} was never evaluated; {first} reached {percent(base, base_spread)}."
    gain = mean - base
    size = f"{abs(100 * gain):.1f} points"
    both = f"{name} reached {percent(mean, spread)} test accuracy, {first} {percent(base, base_spread)}"
    if spread is None or base_spread is None:
        more = "more" if gain >= 0 else "less"
        return f"{both}: {size} {more}, but one seed cannot tell an effect from chance."
    noise = math.hypot(spread, base_spread)
    if abs(gain) <= noise:
        return f"{both}: a difference of {size}, within the spread over seeds, so no gain is shown."
    effect = "gain" if gain > 0 else "loss"
    far = "far outside" if abs(gain) > FAR * noise else "outside, but not far outside,"
    return f"{both}: a {effect} of {size}, {far} the spread over seeds."


def holdings(data: ReportData) -> list[str]:
    """What the clients hold before and after the prior's images, in words."""
    clients, classes = data.before.shape
    real = int(data.before.sum())
    out = [
        f"{counted(clients, 'client')} {'holds' if clients == 1 else 'hold'} {counted(real, 'real row')}; "
        f"a client has on average {classes_held(data.before)} of the {classes} classes."
    ]
    if data.after is not None:
        made = int(data.after.sum()) - real
        out.append(
            f"The prior's images add {counted(made, 'synthetic row')}, "
            f"after which a client has on average {classes_held(data.after)} classes."
        )
    return out


def classes_held(rows: np.ndarray) -> str:
    """Classes at a client, mean over the clients, of int64 [clients, classes]."""
    return f"{float((rows > 0).sum(1).mean()):.1f}".removesuffix(".0")


def client_rows(arms: Sequence[Arm]) -> list[dict[str, str]]:
    """What the clients see at the last evaluation, mean over seeds: one row a statistic, one column an arm."""
    heads = {
        "mean": "mean over clients",
        "weighted": "mean by rows",
        "std": "std over clients",
        "p10": "10th percentile",
        "worst": "worst client",
    }
    ends = {arm.name: [evaluated(c)[-1]["clients"] for c in arm.curves if evaluated(c)] for arm in arms}
    return [
        {"accuracy": head} | {name: percent(across_seeds([e[key] for e in seen])[0]) for name, seen in ends.items()}
        for key, head in heads.items()
    ]


def traffic_rows(arms: Sequence[Arm]) -> list[dict[str, str]]:
    """MB over the whole run by direction and tensor group, mean over seeds; groups that sent nothing are left out."""
    rows = []
    for way, key in (("up", "uplink_groups"), ("down", "downlink_groups")):
        for group in dict.fromkeys(g for arm in arms for c in arm.curves for g in c[-1][key]):
            sent = {arm.name: statistics.fmean(c[-1][key].get(group, 0) / MB for c in arm.curves) for arm in arms}
            if any(sent.values()):
                rows.append({"direction and group": f"{way}: {group}"} | {k: f"{v:.3f}" for k, v in sent.items()})
    return rows


def incidents(arms: Sequence[Arm], most: int = 20) -> list[str]:
    """Who did not answer or did part of the work, as one line a run; refused updates and abandoned rounds, one line
    each: the first `most` and how many more."""
    totals, lines = [], []
    for arm in arms:
        for number, curve in enumerate(arm.curves, 1):
            run = arm.name if len(arm.curves) == 1 else f"{arm.name}, run {number} of {len(arm.curves)}"
            totals += attendance(run, curve)
            for line in curve:
                where = f"{run}, round {line['round']}"
                lines += [f"{where}: client {r['client']} refused, {r['reason']}" for r in line["refused"]]
                if line["skipped"]:
                    few = (
                        f"only {counted(line['accepted'], 'good update')}" if line["accepted"] else "no update counted"
                    )
                    lines.append(f"{where}: {few}, the model stayed as it was")
    more = len(lines) - most
    return totals + lines[:most] + ([f"and {more} more"] if more > 0 else [])


def attendance(run: str, curve: Curve) -> list[str]:
    """What clients were asked and did not do, in one line; nothing where all did everything. Runs of earlier versions
    know of no drop-out."""
    asked = sum(len(line["cohort"]) for line in curve)
    dropped, partial = (sum(len(line.get(key, ())) for line in curve) for key in ("dropped", "partial"))
    if not dropped and not partial:
        return []
    return [f"{run}: of {asked} requests {dropped} got no answer and {partial} were done in part"]
