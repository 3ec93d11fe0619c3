"""Tables of sweeps: numbers by hand, the test of what is bold against scipy and numpy, the three forms."""

import csv
import io
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedprior import store, tables
from fedprior.errors import UserError
from fedprior.sweep import Axis, Sweep, describe
from fedprior.tables import differs, strongest


def swept(folder, accuracies, seeds=(0, 1, 2), table="", target=None, labels=("a", "b")):
    """A sweep's directory whose cells have these accuracies in their only rounds: {(row, column, seed): [..]}."""
    rows = Axis(name="method", values={k: (f"steps={i + 1}",) for i, k in enumerate(labels)})
    columns = Axis(name="partition", values={"p|q": ("rounds=1",), "r": ("rounds=2",)})
    made = Sweep(name="n", base=(), rows=(rows,), columns=(columns,), seeds=seeds, table=table)
    store.write_json(folder / "sweep.json", describe(made))
    for cell in made.cells():
        found = accuracies.get((cell.row[0], cell.column[0], cell.seed))
        if found is None:
            continue
        run = folder / "cells" / cell.name
        run.mkdir(parents=True)
        lines = [
            {"round": i + 1, "accuracy": x, "uplink_bytes": 2e6 * (i + 1), "downlink_bytes": 1e6 * (i + 1)}
            for i, x in enumerate(found)
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        store.write_json(run / "manifest.json", {"status": "done"})
        numbers = {"seconds": 36.0, "uplink_MB": 2.0, "downlink_MB": 1.0, "synthetic_rows": 5, "target": target}
        store.write_json(run / "result.json", numbers)
    return folder


FULL = {
    (row, column, seed): [0.1, base + 0.01 * seed]
    for row, base in (("a", 0.5), ("b", 0.3))
    for column in ("p|q", "r")
    for seed in range(3)
}


def test_a_number_is_the_mean_over_seeds_with_their_sample_deviation(tmp_path):
    table = tables.of(swept(tmp_path, FULL))
    entry = table.entries[("a",), ("r",)]
    means = [100 * (0.1 + 0.5 + 0.01 * s) / 2 for s in range(3)]
    assert entry.mean == pytest.approx(np.mean(means))
    assert entry.spread == pytest.approx(np.std(means, ddof=1))
    assert tables.of(tmp_path, "last").entries[("a",), ("r",)].mean == pytest.approx(51.0)
    assert tables.of(tmp_path, "best").entries[("b",), ("r",)].mean == pytest.approx(31.0)
    assert (entry.strong, table.entries[("b",), ("r",)].strong) == (True, False)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(*[st.floats(0, 100)] * 2), min_size=2, max_size=8))
def test_with_two_rows_the_test_is_the_paired_t_test(pairs):
    x = np.array(pairs).T
    if np.ptp(x[0] - x[1]) < 1e-6:
        return
    best = int(x.mean(1).argmax())
    assert differs(x, best)[1 - best] == (stats.ttest_rel(x[0], x[1]).pvalue < 0.05)
    assert not differs(x, best)[best]


def test_with_more_rows_the_error_is_that_of_a_two_way_analysis():
    """Against the textbook's sums of squares."""
    x = np.array([[61.0, 64.0, 60.0], [58.0, 62.0, 59.5], [40.0, 45.0, 43.0], [60.0, 63.5, 60.5]])
    rows, seeds = x.shape
    total = ((x - x.mean()) ** 2).sum()
    between = seeds * ((x.mean(1) - x.mean()) ** 2).sum() + rows * ((x.mean(0) - x.mean()) ** 2).sum()
    error = (total - between) / ((rows - 1) * (seeds - 1))
    least = stats.t.ppf(0.975, (rows - 1) * (seeds - 1)) * np.sqrt(2 * error / seeds)  # least significant difference
    gaps = x.mean(1).max() - x.mean(1)
    assert differs(x, 0).tolist() == (gaps > least).tolist() == [False, True, True, False]


def test_rows_apart_by_the_same_amount_differ_and_equal_ones_do_not():
    assert differs(np.array([[1.0, 2.0], [0.5, 1.5], [1.0, 2.0]]), 0).tolist() == [False, True, False]


def test_with_one_seed_the_best_alone_is_strong_and_with_a_target_the_lowest():
    values = {("a",): {0: 1.0}, ("b",): {0: 2.0}, ("c",): {}}
    assert strongest(values) == [("b",)]
    assert strongest(values, lower=True) == [("a",)]
    assert strongest({("a",): {}}) == []


def test_a_row_that_lacks_seeds_is_no_match(tmp_path):
    values = {("a",): {0: 1.0, 1: 2.0}, ("b",): {0: 9.0}, ("c",): {0: 1.0, 1: None}}
    assert strongest(values) == [("a",)]


def test_rounds_and_MB_to_a_target(tmp_path):
    found = FULL | {("b", "r", 2): [0.6, 0.7], ("b", "r", 0): [0.55, 0.1]}
    folder = swept(tmp_path, found, target=0.5)
    rounds = tables.of(folder, "rounds_to_target")
    assert rounds.entries[("a",), ("r",)].values == {0: 2.0, 1: 2.0, 2: 2.0}
    assert rounds.entries[("b",), ("r",)].values == {0: 1.0, 1: None, 2: 1.0}
    assert "1 ± 0.0 (2 of 3 seeds)" in tables.markdown(rounds)
    assert "not reached" in tables.markdown(rounds)
    assert tables.of(folder, "MB_to_target").entries[("a",), ("r",)].mean == pytest.approx(6.0)
    with pytest.raises(UserError, match="needs target="):
        tables.of(swept(tmp_path / "none", FULL), "rounds_to_target")


def test_markdown_latex_and_csv_say_the_same(tmp_path):
    table = tables.of(swept(tmp_path, FULL, labels=("a", "b")))
    text = tables.markdown(table)
    assert text.splitlines()[:3] == [
        "| method | p\\|q | r |",
        "| --- | --- | --- |",
        "| a | **30.5 ± 0.5** | **30.5 ± 0.5** |",
    ]
    tex = tables.latex(table)
    assert r"\begin{tabular}{lcc}" in tex
    assert r"method & p$|$q & r \\" in tex
    assert r"a & \textbf{30.5 $\pm$ 0.5} & \textbf{30.5 $\pm$ 0.5} \\" in tex
    assert tex.count("{") == tex.count("}")
    rows = list(csv.DictReader(io.StringIO(tables.comma_separated(table))))
    assert len(rows) == 12
    means = [float(r["mean_last10"]) for r in rows if (r["method"], r["column"]) == ("a", "r")]
    assert np.mean(means) == pytest.approx(30.5)


def test_a_paper_s_number_stands_beside_ours_with_its_note(tmp_path, monkeypatch):
    from fedprior import sweeps

    told = {(("a",), ("r",)): tables.Published(71.41, 0.45, "* is odd"), (("b",), ("r",)): tables.Published(30.0)}
    monkeypatch.setitem(sweeps.PUBLISHED, ("mine", "mean_last10"), told)
    text = tables.markdown(tables.of(swept(tmp_path, FULL, table="mine")))
    assert "**30.5 ± 0.5** [71.41 ± 0.45*]" in text
    assert "20.5 ± 0.5 [30]" in text
    assert "- * is odd" in text
    assert "In brackets" in text


def test_what_is_not_done_is_counted(tmp_path):
    few = {key: value for key, value in FULL.items() if key[2] < 2 and key[:2] != ("b", "r")}
    text = tables.markdown(tables.of(swept(tmp_path, few)))
    assert "6 of 12 cells are not done" in text
    assert "| b | 20.2 ± 0.4 | – |" in text or "| b | 20.3 ± 0.4 | – |" in text
    with pytest.raises(UserError, match="no cell of"):
        tables.of(swept(tmp_path / "none", {}))


def test_costs_are_sums_over_cells(tmp_path):
    assert tables.costs(swept(tmp_path, FULL)) == {
        "cells": 12,
        "hours": pytest.approx(0.12),
        "MB": 36.0,
        "synthetic_rows": 60,
    }


def test_a_folder_that_is_no_sweep_says_so(tmp_path):
    with pytest.raises(UserError, match="is no sweep"):
        tables.of(tmp_path)
    (tmp_path / "sweep.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be read"):
        tables.of(tmp_path)
