"""The figures of `compare.py` as Markdown."""

import math
import statistics
from collections.abc import Callable
from typing import Any

BASE = "fedprior"
Runs = list[dict[str, Any]]


def warm(run: dict[str, Any], which: int) -> float:
    """The median over all rounds but the first: wall (0) or CPU (1) seconds."""
    return statistics.median(row[which] for row in run["rounds"][1:])


MEASURES: dict[str, Callable[[dict[str, Any]], float]] = {
    "a warm round, wall": lambda run: warm(run, 0),
    "a warm round, CPU": lambda run: warm(run, 1),
    "evaluation, wall": lambda run: run["evaluation"][0],
    "evaluation, CPU": lambda run: run["evaluation"][1],
    "start to end": lambda run: run["total"],
    "peak memory": lambda run: run["memory"],
}


def render(figures: dict[str, Any]) -> str:
    hardware, versions = figures["hardware"], figures["versions"]
    lines = [
        "## fedprior beside its peers",
        "",
        f"`{figures['command']}`, {hardware['processor']}, {hardware['cores']} cores, of which every process had one; "
        f"Python {versions['python']}, torch {versions['torch']}, one thread.",
    ]
    if figures["quick"]:
        lines += ["", "**A quick run: far too small for its figures to mean anything.**"]
    for label, found in figures["tasks"].items():
        lines += ["", *section(label, found)]
    lines += ["", "What each was made to do:", ""]
    lines += [f"- {name} ({version(figures, name)}): {about}." for name, about in figures["about"].items()]
    lines += [
        "",
        "All train fedprior's own module, in which pooling comes before ReLU, and read what they need of the data set "
        "before their first round. Clients count alike, and the optimiser starts afresh at every client. Peers "
        "evaluate with the loop that plain has, over their own kind of batches. Memory is PSS summed over the tree of "
        "processes, CPU time is the tree's; ratios are medians over repeats, within which all ran one after another.",
    ]
    return "\n".join(lines) + "\n"


def section(label: str, found: dict[str, Any]) -> list[str]:
    task, repeats = found["task"], {name: good(runs) for name, runs in found["runs"].items()}
    base = repeats.get(BASE, [])
    done = max(map(len, found["runs"].values()))
    lines = [
        f"### {label}: {task['clients']} clients, {task['cohort']} a round, {task['steps']} steps of {task['batch']} "
        f"({task['optimizer']}), {task['rounds']} rounds, {done} repeat{'s' * (done != 1)}",
        "",
        "| | warm round wall s | CPU s | wall x | CPU x | first round s | evaluation wall s | CPU s | start to end s "
        "| peak MiB (processes) | accuracy % |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, runs in repeats.items():
        if not runs:
            lines.append(f"| {name} | failed |" + " |" * 9)
            continue
        cells = [middle(runs, MEASURES["a warm round, wall"]), middle(runs, MEASURES["a warm round, CPU"])]
        cells += [times(runs, base, MEASURES[f"a warm round, {kind}"]) for kind in ("wall", "CPU")]
        cells += [middle(runs, lambda run: run["rounds"][0][0])]
        cells += [middle(runs, MEASURES[f"evaluation, {kind}"]) for kind in ("wall", "CPU")]
        cells += [middle(runs, MEASURES["start to end"])]
        cells += [f"{median(runs, MEASURES['peak memory']):.0f} ({max(run['processes'] for run in runs)})"]
        mean, spread = accuracy(runs)
        cells += [f"{100 * mean:.1f}" + (f" ± {100 * spread:.1f}" if len(runs) > 1 else "")]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return [*lines, "", *checked(found["check"]), "", same_accuracy(repeats), "", *faster(repeats, base)]


def good(runs: Runs) -> Runs:
    return [run for run in runs if "error" not in run]


def median(runs: Runs, measure: Callable[[dict[str, Any]], float]) -> float:
    return statistics.median(map(measure, runs))


def middle(runs: Runs, measure: Callable[[dict[str, Any]], float]) -> str:
    """Median [least-most]."""
    values = [measure(run) for run in runs]
    texts = [short(v) for v in (statistics.median(values), min(values), max(values))]
    return texts[0] if len(values) == 1 else f"{texts[0]} [{texts[1]}-{texts[2]}]"


def short(value: float) -> str:
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if 0 < value < 100 else f"{value:.0f}"


def ratio(runs: Runs, base: Runs, measure: Callable[[dict[str, Any]], float]) -> float:
    """The median over repeats that both have; NaN where there is none."""
    mine = {run["repeat"]: measure(run) for run in base}
    found = [measure(run) / mine[run["repeat"]] for run in runs if run["repeat"] in mine]
    return statistics.median(found) if found else math.nan


def times(runs: Runs, base: Runs, measure: Callable[[dict[str, Any]], float]) -> str:
    value = ratio(runs, base, measure)
    return "" if math.isnan(value) else f"{value:.2f}"


def accuracy(runs: Runs) -> tuple[float, float]:
    """Mean and standard deviation over repeats, each of which has a seed of its own."""
    values = [run["accuracy"] for run in runs]
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def checked(check: dict[str, dict[str, Any]]) -> list[str]:
    """What the runs without augmentation and dropout said."""
    apart = ", ".join(f"{name} {found['apart']:.1e}" for name, found in check.items() if "error" not in found)
    lines = [
        "Checked on two rounds without augmentation and dropout: initial weights and shards are the same, and final "
        f"weights lie apart from plain's, as a share of the way trained (at most 1e-02, but for bf16): {apart}."
    ]
    for name, found in check.items():
        if "error" in found:
            lines += ["", f"**{name} failed:** {' '.join(found['error'].split())[-500:]}"]
        elif not found["agrees"]:
            lines += ["", f"**{name} does not train the same:** {found}"]
    return lines


def same_accuracy(repeats: dict[str, Runs]) -> str:
    found = {name: accuracy(runs) for name, runs in repeats.items() if runs}
    if not found or max(map(len, repeats.values())) < 2:
        return "Accuracies are not compared: that takes two repeats."
    means, spread = [mean for mean, _ in found.values()], max(spread for _, spread in found.values())
    gap = max(means) - min(means)
    verdict = "within" if gap <= spread else "**more than**"
    return f"Mean accuracies lie {100 * gap:.1f} points apart, {verdict} the spread over seeds of {100 * spread:.1f}."


def faster(repeats: dict[str, Runs], base: Runs) -> list[str]:
    """Where a peer needs less than fedprior does."""
    lines = []
    for name, runs in repeats.items():
        ratios = {what: ratio(runs, base, measure) for what, measure in MEASURES.items()}
        less = [f"{what} {value:.2f} x" for what, value in ratios.items() if value < 0.995]
        if less and not name.startswith(BASE):
            lines.append(f"- {name} needs less than fedprior: {', '.join(less)}.")
    return lines or ([f"No contestant needs less than {BASE} of anything measured."] if base else [])


def version(figures: dict[str, Any], name: str) -> str:
    found = [run for task in figures["tasks"].values() for run in (*task["runs"][name], task["check"][name])]
    return next((run["package"] for run in found if "package" in run), "not run")
