"""Pages of results against the numbers beside them: means, spreads and gains are computed again, by numpy."""

import csv
import re
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[1] / "docs" / "results"
PAGES = {  # of each table of a page: the file behind it, and the row that gains are over
    "gen_fedsd_table1": [("gen_fedsd_table1", ""), ("gen_fedsd_table1", "vanilla"), ("gen_fedsd_table1_mb", "")],
    "feddifrc_ablation": [("feddifrc_ablation", ""), ("feddifrc_ablation", "none (FedAvg)")],
}
NUMBER = re.compile(r"^\*{0,2}([+-]?\d+\.(\d+)) ± (\d+\.\d+)\*{0,2}(?: \[.*\])?$")


def numbers(path):
    """-> (names of a row's labels, {(labels.., column): numbers by seed}) of one by `fedprior table --format csv`."""
    out = {}
    with path.open(encoding="utf-8") as file:
        lines = csv.DictReader(file)
        labels = lines.fieldnames[: lines.fieldnames.index("column")]
        metric = lines.fieldnames[len(labels) + 2]
        for line in lines:
            key = (*(line[label] for label in labels), line["column"])
            out.setdefault(key, {})[int(line["seed"])] = float(line[metric])
    return labels, out


def tables(text, labels):
    """{(labels.., column): entry} of each table of a page that has these labels at its head."""
    out = []
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.M):
        lines = [[part.strip() for part in line.strip().strip("|").split(" | ")] for line in block.splitlines()]
        n = len(labels)
        if lines[0][:n] == labels:
            entries = ((line, zip(lines[0][n:], line[n:], strict=True)) for line in lines[2:])
            out.append({(*line[:n], head): entry for line, pairs in entries for head, entry in pairs})
    return out


@pytest.mark.parametrize("name", PAGES)
def test_means_spreads_and_gains_follow_from_the_numbers_of_each_seed(name):
    labels, _ = numbers(FOLDER / f"{name}.csv")
    shown = tables((FOLDER / f"{name}.md").read_text(encoding="utf-8"), labels)
    for table, (file, over) in zip(shown, PAGES[name], strict=True):
        _, found = numbers(FOLDER / f"{file}.csv")
        assert set(table) == {key for key in found if over not in key}
        for key, entry in table.items():
            mean, places, spread = NUMBER.match(entry).groups()
            x = np.array([found[key][seed] for seed in range(3)])
            if over:
                base = (*key[: len(labels) - 1], over, key[-1])
                x = x - np.array([found[base][seed] for seed in range(3)])
            rounded = 0.501 * 10.0 ** -len(places)
            assert float(mean) == pytest.approx(x.mean(), abs=rounded), key
            assert float(spread) == pytest.approx(x.std(ddof=1), abs=rounded), key
