"""The sentences and tables of a report, made of its numbers: pure functions."""

import statistics
from collections.abc import Sequence

import numpy as np

from ..paired import LEAST as LEAST_SEEDS
from ..paired import differs, the_test
from ..traffic import MB
from .numbers import (
    LEVEL,
    NOTHING,
    PARTS,
    REST,
    Arm,
    Curve,
    ReportData,
    across_seeds,
    class_means,
    counted,
    evaluated,
    headline,
    joined,
    judged,
    lasted,
    lengths,
    level,
    megabytes,
    paired_gaps,
    percent,
    ranged,
    score,
    shares,
    to_target,
    told,
    window,
)

CARDS = 4  # arms whose numbers are said in large type and in sentences; more of them are left to the tables
WORST = 5  # clients, and pairs of classes, that are named
TIED = 3  # equally hard classes that are named; more are counted
LEAST = 0.005  # seconds of a part that is worth a line


def means(arms: Sequence[Arm]) -> tuple[str, list[str]]:
    """What accuracies are means over beside rounds and seeds: of every arm, "" where nothing; and of some, by name."""
    found = {
        "clients' own models": [arm.name for arm in arms if arm.own],
        "domains": [arm.name for arm in arms if any("per_domain" in line for curve in arm.curves for line in curve)],
    }
    every = [what for what, names in found.items() if len(names) == len(arms)]
    some = {what: names for what, names in found.items() if 0 < len(names) < len(arms)}
    told = [f"of {joined(names)}, mean over {what}" for what, names in some.items()]
    return f"mean over {joined(every)}" if every else "", told


def named(accuracy: str, arms: Sequence[Arm]) -> str:
    """E.g. "test accuracy" or "test accuracy (mean over clients' own models)"."""
    every, some = means(arms)
    told = "; ".join([*([every] if every else []), *some])
    return f"{accuracy} ({told})" if told else accuracy


def seeds(arms: Sequence[Arm]) -> str:
    """E.g. "one seed", "3 seeds" or "1 to 3 seeds"."""
    few, many = min(len(arm.curves) for arm in arms), max(len(arm.curves) for arm in arms)
    if many == 1:
        return "one seed"
    return f"{many} seeds" if few == many else f"{few} to {many} seeds"


def comparison(arms: Sequence[Arm], target: float | None) -> list[dict[str, str]]:
    """One row an arm, ready to print; the keys are the column heads."""
    rows = []
    head = window(lengths(arms))
    for arm in arms:
        heads = [headline(c) for c in arm.curves]
        spread = {k: percent(*across_seeds([h[k] for h in heads])) for k in ("mean_last10", "last", "best")}
        row = {
            "setting": arm.name,
            head: spread["mean_last10"],
            **({"last": spread["last"]} if head != window([1]) else {}),
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


def sentences(data: ReportData) -> list[str]:
    """The whole in a few sentences: who is ahead, who is left behind, and at which price."""
    return [*verdicts(data.arms), *left_behind(data.arms, data.classes), *price(data.arms)]


def left_behind(arms: Sequence[Arm], classes: Sequence[str]) -> list[str]:
    """What the worst client sees, and which class is hardest, in a sentence; none where nothing was evaluated, or where
    arms are too many to be told in one."""
    worst = {}
    for arm in arms:
        ends = [evaluated(c)[-1]["clients"]["worst"] for c in arm.curves if evaluated(c)]
        mean, _ = across_seeds(ends)
        if mean is not None:
            worst[arm.name] = mean
    if not worst or len(arms) > CARDS:
        return []
    several = any(len(arm.curves) > 1 for arm in arms)
    mean_of = " (a mean of the seeds' worst clients)" if several else ""
    if len(arms) > 1:
        each = [f"{percent(v)} with {name}" for name, v in worst.items()]
        return [f"The worst client sees {joined(each)}{mean_of}."]
    sees = f"The worst client sees {percent(worst[arms[0].name])}{mean_of}"
    rates = class_means(arms[0])
    if np.isnan(rates).all():
        return [f"{sees}."]
    return [f"{sees}, and {hardest(rates, classes)}{', mean over seeds' if several else ''}."]


def hardest(rates: np.ndarray, classes: Sequence[str]) -> str:
    """Which classes are recognised least, as half a sentence; `rates` percent [classes], not all of them NaN."""
    least, known = float(np.nanmin(rates)), int(np.isfinite(rates).sum())
    tied = [classes[k] for k in level(rates, least)]
    if len(tied) == 1:
        return f"the hardest class is {tied[0]} with {least:.1f} %"
    if len(tied) <= TIED:
        return f"the hardest classes are {joined(tied)} with {least:.1f} % each"
    if least == 0:
        return f"{len(tied)} of {known} classes are never recognised"
    return f"{len(tied)} of {known} classes tie at {least:.1f} % as the hardest"


def price(arms: Sequence[Arm]) -> list[str]:
    """What was sent and how long it took, in a sentence; none where arms are too many to be told in one."""
    if len(arms) > CARDS:
        return []
    costs = []
    for arm in arms:
        cost = [counted(statistics.fmean(len(c) for c in arm.curves), "round")]
        cost += [f"{statistics.fmean(megabytes(c[-1]) for c in arm.curves):.2f} MB of messages"]
        if arm.seconds and all(arm.seconds):
            cost += [lasted(statistics.fmean(sum(s.values()) for s in arm.seconds))]
        costs.append(joined(cost) + (f" with {arm.name}" if len(arms) > 1 else ""))
    what = "A run" if sum(len(arm.curves) for arm in arms) > 1 else "It"
    return [f"{what} took {'; '.join(costs)}."]


def verdicts(arms: Sequence[Arm]) -> list[str]:
    """What the headline numbers say, in words: each further arm against the first. No gain is called no gain."""
    first, *others = arms
    base, spread = score(first)
    if base is None:
        return [f"{arm.name} was never evaluated." for arm in arms]
    if not others:
        return [f"{first.name} reached {percent(base, spread)} {named(judged(arms).accuracy, arms)}."]
    return [against(first, base, spread, arm) for arm in others]


def against(first: Arm, base: float, base_spread: float | None, arm: Arm) -> str:
    """How far an arm is ahead of or behind the first one, seed by seed, and whether that is more than chance."""
    mean, spread = score(arm)
    if mean is None:
        return f"{arm.name} was never evaluated; {first.name} reached {percent(base, base_spread)}."
    accuracy = named(judged([arm]).accuracy, [first, arm])
    both = f"{arm.name} reached {percent(mean, spread)} {accuracy}, {first.name} {percent(base, base_spread)}"
    gaps = paired_gaps(first, arm)
    some = " in both" if len(gaps) < max(len(first.curves), len(arm.curves)) else ""
    if len(gaps) < LEAST_SEEDS:
        gain = 100 * (mean - base)
        more = f"{points(gain)} {'more' if gain > 0 else 'less'}"
        how = "they are equal" if abs(gain) <= 100 * LEVEL else more
        few = ("no seed is in both to", f"one seed{some} cannot", f"two seeds{some} cannot")[len(gaps)]
        return f"{both}: {how}, but {few} tell an effect from chance."
    if np.abs(gaps).max() <= 100 * LEVEL:
        return f"{both}: they are equal, so no gain is shown."
    gain, noise = float(gaps.mean()), float(gaps.std(ddof=1))
    over = f"the {len(gaps)} seeds in both" if some else f"{len(gaps)} seeds"
    tested = f"({the_test(over)})"
    if not differs(gaps):
        return f"{both}: a difference of {points(gain, noise)}, not told from chance {tested}, so no gain is shown."
    return f"{both}: a {'gain' if gain > 0 else 'loss'} of {points(gain, noise)}, told from chance {tested}."


def points(gap: float, noise: float | None = None) -> str:
    """The size of a difference in points, e.g. "8.0 points", with a spread "8.0 ± 0.3 points"."""
    if max(abs(gap), noise or 0.0) < 0.05:
        return "less than 0.1 points"
    return f"{abs(gap):.1f}{f' ± {noise:.1f}' if noise is not None else ''} points"


def holdings(data: ReportData) -> list[str]:
    """What the clients hold before and after the prior's images, in words, and in which run if not in all."""
    clients, classes = data.before.shape
    real = int(data.before.sum())
    out = [
        *whose_split(data),
        f"{counted(clients, 'client')} {'holds' if clients == 1 else 'hold'} {counted(real, 'real row')}; "
        f"a client has on average {classes_held(data.before)} of the {classes} classes.",
    ]
    if data.after is not None:
        made = counted(int(data.after.sum()) - real, "synthetic row")
        held = [[h.synthetic.tolist() for h in arm.clients] for arm in data.arms]
        whose = "The" if all(own == held[0] for own in held) else f"With {data.shown.arm}, the"
        then = f"after which a client has on average {classes_held(data.after)} classes"
        out.append(f"{whose} prior's images add {made}, {then}.")
    return out


def whose_split(data: ReportData) -> list[str]:
    """Which run's split of the real rows is shown, as a sentence; none where all runs have the same."""
    splits = [
        {seed: held.real.tolist() for seed, held in zip(arm.seeds, arm.clients, strict=False)} for arm in data.arms
    ]
    every = [split for by_seed in splits for split in by_seed.values()]
    if all(split == every[0] for split in every):
        return []
    of_seed = {seed: split for by_seed in splits for seed, split in by_seed.items()}
    run = f"seed {data.shown.seed} (run {data.shown.run})"
    if all(split == of_seed[seed] for by_seed in splits for seed, split in by_seed.items()):
        alike = ", alike in every setting" if len(data.arms) > 1 else ""
        return [f"Each seed splits the rows anew{alike}; shown is {run}."]
    sizes = {"client": [len(split) for split in every], "real row": [int(np.sum(split)) for split in every]}
    differ = ", ".join(ranged(counts, noun) for noun, counts in sizes.items() if len(set(counts)) > 1)
    how = f" ({differ})" if differ else ""
    return [f"The rows are not split alike in every setting{how}; shown is {data.shown.arm}, {run}."]


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


def domain_rows(arms: Sequence[Arm]) -> list[dict[str, str]]:
    """Accuracy of each domain at the last evaluation, and of nearest neighbours where they were asked: mean and spread
    over seeds, one column an arm."""
    found: dict[str, dict[str, list[float | None]]] = {}
    for arm in arms:
        for curve in arm.curves:
            if not (seen := evaluated(curve)):
                continue
            said = dict(seen[-1].get("per_domain", {}))
            if "knn" in seen[-1]:
                said["20 nearest neighbours"] = seen[-1]["knn"]
            for name, value in said.items():
                found.setdefault(name, {}).setdefault(arm.name, []).append(value)
    return [
        {"accuracy": name} | {arm.name: percent(*across_seeds(by_arm.get(arm.name, []))) for arm in arms}
        for name, by_arm in found.items()
    ]


def worst_clients(arms: Sequence[Arm], classes: Sequence[str]) -> list[dict[str, str]]:
    """The clients of each arm that see least, over all its seeds, worst first: rows, classes and accuracy. How many
    more see as little as the last one named is said in a row of its own."""
    out = []
    named = WORST if len(arms) == 1 else 3
    for arm in arms:
        every = sorted(
            (float(held.accuracy[k]), i, k)
            for i, held in enumerate(arm.clients)
            for k in range(len(held.accuracy))
            if np.isfinite(held.accuracy[k])
        )
        for accuracy, i, k in every[:named]:
            held = arm.clients[i]
            row = {"client": f"client {k}" + (f", seed {arm.seeds[i]}" if len(arm.clients) > 1 else "")}
            row |= {"setting": arm.name} if len(arms) > 1 else {}
            row |= {"real rows": f"{held.real[k].sum():,}"}
            row |= {"synthetic rows": f"{held.synthetic[k]:,}"} if any(h.synthetic.any() for h in arm.clients) else {}
            out.append(row | {"real rows by class": by_class(held.real[k], classes), "accuracy": percent(accuracy)})
        if more := sum(accuracy - every[named - 1][0] <= LEVEL for accuracy, _, _ in every[named:]):
            out.append({"client": tied(more), "setting": arm.name, "accuracy": out[-1]["accuracy"]})
    heads = dict.fromkeys(head for row in out if "real rows" in row for head in row)
    order = [h for h in ("client", "setting", "real rows", "synthetic rows") if h in heads]
    absent = lambda row: "0" if "real rows" in row else ""  # an arm without synthetic rows lacks their column
    return [{h: row.get(h, absent(row)) for h in [*order, "real rows by class", "accuracy"]} for row in out]


def tied(more: int) -> str:
    """The head of the row after the last one that is named, where others are level with it."""
    return f"and {more} more with as much"


def by_class(rows: np.ndarray, classes: Sequence[str], most: int = 3) -> str:
    """E.g. "four 31, nine 12 and 3 other classes": the classes of a client, the largest first."""
    held = [int(c) for c in np.argsort(-rows, kind="stable") if rows[c]]
    more = len(held) - most
    told = ", ".join(f"{classes[c]} {rows[c]:,}" for c in held[:most])
    return told + (f" and {more} other class{'es' if more > 1 else ''}" if more > 0 else "")


def mixed_up(arms: Sequence[Arm], classes: Sequence[str]) -> list[dict[str, str]]:
    """The pairs of classes that are taken for each other most, under any arm: percent of the images of the first. How
    many more are taken as often as the last one named is said in a row of its own."""
    known = {arm.name: shares(arm.confusion) for arm in arms if arm.confusion is not None}
    if not known:
        return []
    apart = {name: x - np.diag(np.diag(x)) for name, x in known.items()}
    most = np.max(list(apart.values()), axis=0)
    pairs = np.argwhere(most > 0)
    every = sorted(pairs.tolist(), key=lambda pair: -most[*pair])
    rows = [
        {"class": f"{classes[i]}, taken for {classes[j]}"}
        | {arm.name: f"{apart[arm.name][i, j]:.1f} %" if arm.name in apart else NOTHING for arm in arms}
        for i, j in every[:WORST]
    ]
    if more := sum(most[*every[WORST - 1]] - most[*pair] <= 100 * LEVEL for pair in every[WORST:]):
        last = {"class": tied(more)} | {arm.name: rows[-1][arm.name] if len(arms) == 1 else "" for arm in arms}
        rows.append(last)
    return rows


def seconds_rows(arms: Sequence[Arm]) -> list[dict[str, str]]:
    """What the seconds of a run went into, mean over seeds, with its share; parts that nobody spent are left out."""
    known = {arm.name: arm.seconds for arm in arms if arm.seconds and all(arm.seconds)}
    totals = {name: statistics.fmean(sum(s.values()) for s in runs) for name, runs in known.items()}
    if not any(totals.values()):
        return []
    parts = dict.fromkeys(part for runs in known.values() for s in runs for part in s if s[part] >= LEAST)
    rows = []
    for part in [*(p for p in (*PARTS, REST) if p in parts), *(p for p in parts if p not in (*PARTS, REST))]:
        row = {"time": part}
        for arm in arms:
            took = [s[part] for s in known.get(arm.name, []) if part in s]
            mean = statistics.fmean(took) if took else None
            row[arm.name] = NOTHING if mean is None else f"{lasted(mean)} ({100 * mean / totals[arm.name]:.0f} %)"
        rows.append(row)
    return [*rows, {"time": "in all"} | {a.name: lasted(totals[a.name]) if a.name in totals else NOTHING for a in arms}]


def differences(arms: Sequence[Arm]) -> list[dict[str, str]]:
    """The keys of the command line that the arms give different values, one column an arm; a dash where a key has no
    meaning. What only belongs to a choice that others did not make is left to the config."""
    keys = dict.fromkeys(key for arm in arms for key in arm.config if key not in ("name", "seed"))
    rows = [[told(arm.config.get(key)) for arm in arms] for key in keys]
    names = [arm.name for arm in arms]
    return [
        {"key": key} | dict(zip(names, row, strict=True))
        for key, row in zip(keys, rows, strict=True)
        if len({value for value in row if value != NOTHING}) > 1
    ]


def run_rows(arms: Sequence[Arm]) -> list[dict[str, str]]:
    """The directories that the page was made from."""
    return [
        {
            "run": run,
            "setting": arm.name,
            "seed": str(seed),
            "rounds": str(len(curve)),
            window(lengths(arms)): percent(headline(curve)["mean_last10"]),
        }
        for arm in arms
        for run, seed, curve in zip(arm.runs, arm.seeds, arm.curves, strict=False)
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


def attendance_rows(arms: Sequence[Arm]) -> list[dict[str, str]]:
    """How requests to clients ended, summed over seeds, one column an arm; dashes where nobody was asked."""
    counts: dict[str, dict[str, int]] = {}
    for arm in arms:
        lines = [line for curve in arm.curves for line in curve]
        asked = sum(len(line["cohort"]) for line in lines)
        ends = {
            "asked": asked,
            "good updates": sum(line["accepted"] for line in lines),
            "of these after part of the work": sum(len(line.get("partial", ())) for line in lines),
            "no answer": sum(len(line.get("dropped", ())) for line in lines),
            "refused": sum(len(line["refused"]) for line in lines),
            "rounds that left the model as it was": sum(bool(line["skipped"]) for line in lines),
        }
        counts[arm.name] = ends
    heads = dict.fromkeys(head for ends in counts.values() for head in ends)
    pooled = [arm.name for arm in arms if arm.pooled]
    return [
        {"requests to clients": head}
        | {name: NOTHING if name in pooled else f"{ends[head]:,}" for name, ends in counts.items()}
        for head in heads
    ]


def attendance(run: str, curve: Curve) -> list[str]:
    """What clients were asked and did not do, in one line; nothing where all did everything. Runs of earlier versions
    know of no drop-out."""
    asked = sum(len(line["cohort"]) for line in curve)
    dropped, partial = (sum(len(line.get(key, ())) for line in curve) for key in ("dropped", "partial"))
    if not dropped and not partial:
        return []
    return [f"{run}: of {asked} requests {dropped} got no answer and {partial} were done in part"]
