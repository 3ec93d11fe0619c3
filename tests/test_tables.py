"""Tables of sweeps: numbers by hand, the test of what is bold against scipy and numpy, the three forms."""

import csv
import io
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedprior import store, tables
from fedprior.errors import UsageError, UserError
from fedprior.paired import differs
from fedprior.resume import RESULT
from fedprior.sweep import NOTHING, Axis, Sweep
from fedprior.sweep_folder import describe
from fedprior.table_forms import comma_separated, latex, markdown
from fedprior.tables import strongest


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
        numbers = dict.fromkeys(RESULT, 0) | {"seconds": 36.0, "uplink_MB": 2.0, "downlink_MB": 1.0}
        store.write_json(run / "result.json", numbers | {"synthetic_rows": 5, "target": target})
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
@given(st.lists(st.tuples(*[st.floats(0, 100)] * 2), min_size=3, max_size=8))
def test_rows_are_told_apart_by_the_paired_t_test(pairs):
    x = np.array(pairs).T
    if np.ptp(x[0] - x[1]) < 1e-6:
        return
    assert differs(x[0] - x[1]) == (stats.ttest_rel(x[0], x[1]).pvalue < 0.05)


def test_a_row_of_great_spread_does_not_hide_the_gap_between_two_of_small():
    rows = {("a",): [61.0, 61.1, 60.9], ("b",): [60.0, 60.1, 59.9], ("c",): [30.0, 62.0, 70.0]}
    values = {row: dict(enumerate(x)) for row, x in rows.items()}
    assert stats.ttest_rel(rows["a",], rows["c",]).pvalue > 0.05
    assert strongest(values) == [("a",), ("c",)]


def test_rows_apart_by_the_same_amount_differ_and_equal_ones_do_not():
    assert differs(np.array([0.5, 0.5, 0.5])) is True
    assert differs(np.zeros(3)) is False


def test_with_fewer_than_three_seeds_the_best_alone_is_strong():
    values = {("a",): {0: 1.0}, ("b",): {0: 2.0}, ("c",): {}}
    assert strongest(values) == [("b",)]
    assert strongest(values, lower=True) == [("a",)]
    assert strongest({("a",): {}}) == []
    assert strongest({("a",): {0: 1.0, 1: 9.0}, ("b",): {0: 2.0, 1: 5.0}}) == [("a",)]  # no test tells them apart
    assert strongest({("a",): {0: 2.0}, ("b",): {0: 2.0}, ("c",): {0: 1.0}}) == [("a",), ("b",)]  # but for equals


def test_rows_are_compared_over_the_seeds_that_all_have():
    """Whichever row has more seeds already is not the best for that."""
    behind = {0: 9.0, 1: 9.1, 2: 8.9}
    ahead = {0: 1.0, 1: 1.1, 2: 0.9, 3: 99.0}
    assert strongest({("a",): ahead, ("b",): behind}) == [("b",)]
    assert strongest({("a",): {0: 1.0}, ("b",): {1: 2.0}}) == []


def test_a_row_that_misses_the_target_or_has_no_number_is_no_match():
    values = {("a",): {0: 5.0, 1: 5.0}, ("b",): {0: 1.0, 1: None}, ("c",): {0: 1.0, 1: float("nan")}}
    assert strongest(values, lower=True) == [("a",)]


def gain_of(folder, against, metric="mean_last10"):
    return tables.of(folder, metric, against)


def test_gains_are_differences_seed_by_seed(tmp_path, monkeypatch):
    from fedprior import sweeps

    told = {(("a",), ("r",)): tables.Published(71.41, 0.45), (("b",), ("r",)): tables.Published(30.0, 1.0, "* is odd")}
    monkeypatch.setitem(sweeps.PUBLISHED, ("mine", "mean_last10"), told)
    own = dict(enumerate([0.62, 0.64, 0.69]))
    found = {k: v for k, v in FULL.items() if k != ("b", "p|q", 2)} | {("a", "r", s): [x] for s, x in own.items()}
    table = gain_of(swept(tmp_path, found, table="mine"), "b")
    assert (table.rows, table.signed) == ([("a",)], True)
    entry = table.entries[("a",), ("r",)]
    other = [np.mean(FULL["b", "r", s]) for s in range(3)]
    gaps = [100 * (own[s] - other[s]) for s in range(3)]
    assert [entry.values[s] for s in range(3)] == pytest.approx(gaps)
    assert (entry.mean, entry.spread) == pytest.approx((np.mean(gaps), np.std(gaps, ddof=1)))
    assert stats.ttest_1samp(gaps, 0).pvalue < 0.05
    assert entry.strong
    assert entry.published == tables.Published(41.41, None, "* is odd")
    few = table.entries[("a",), ("p|q",)]
    assert (sorted(few.values), few.missing, few.strong) == ([0, 1], 1, False)
    text = markdown(table)
    assert f"**+{np.mean(gaps):.1f} ± {np.std(gaps, ddof=1):.1f}** [+41.41*]" in text
    assert "Gain over b in test accuracy" in text
    with pytest.raises(UsageError, match="must be a label of rows; there are 'a', 'b'"):
        gain_of(tmp_path, "c")


def test_costs_are_metrics_without_a_best(tmp_path):
    folder = swept(tmp_path, FULL)
    assert not any(e.strong for e in tables.of(folder, "hours", against="a").entries.values())
    for metric, number in (("hours", 0.01), ("synthetic_rows", 5.0)):
        table = tables.of(folder, metric)
        entry = table.entries[("a",), ("r",)]
        assert (entry.mean, entry.strong) == (pytest.approx(number), False)
        assert "Bold" not in markdown(table)


def test_what_made_the_numbers_stands_below(tmp_path):
    folder = swept(tmp_path, FULL)
    old = folder / "cells" / "a-r-seed0" / "manifest.json"
    kept = store.read_json(old)
    store.write_json(old, kept | {"versions": {"fedprior": "0.0.9", "torch": "2"}, "hardware": {"gpu": "H"}})
    last = tables.of(folder).notes[-1]
    assert "11 cells by fedprior" in last
    assert "1 cell by fedprior 0.0.9" in last
    assert ", H)" in last
    said = tables.spending(tables.costs(folder))
    assert "12 cells took 7 min 12 s of a process, sent 36.0 MB" in said
    assert "60 synthetic rows" in said


def test_a_table_says_on_which_rows_it_was_judged(tmp_path):
    folder = swept(tmp_path, FULL)
    for path in (folder / "cells").glob("*/result.json"):
        store.write_json(path, store.read_json(path) | {"judged_on": "validation"})
    assert tables.of(folder).notes[0].startswith("Validation accuracy in %")


def test_rounds_and_MB_to_a_target(tmp_path):
    found = FULL | {("b", "r", 2): [0.6, 0.7], ("b", "r", 0): [0.55, 0.1]}
    folder = swept(tmp_path, found, target=0.5)
    rounds = tables.of(folder, "rounds_to_target")
    assert rounds.entries[("a",), ("r",)].values == {0: 2.0, 1: 2.0, 2: 2.0}
    assert rounds.entries[("b",), ("r",)].values == {0: 1.0, 1: None, 2: 1.0}
    assert "1 ± 0.0 (2 of 3 seeds)" in markdown(rounds)
    assert "not reached" in markdown(rounds)
    assert tables.of(folder, "MB_to_target").entries[("a",), ("r",)].mean == pytest.approx(6.0)
    without = swept(tmp_path / "none", found)
    with pytest.raises(UserError, match="needs a target accuracy, such as --target"):
        tables.of(without, "rounds_to_target")
    assert tables.of(without, "rounds_to_target", target=0.5).entries == rounds.entries


def test_markdown_latex_and_csv_say_the_same(tmp_path):
    table = tables.of(swept(tmp_path, FULL, labels=("a", "b")))
    text = markdown(table)
    assert text.splitlines()[:3] == [
        "| method | p\\|q | r |",
        "| --- | --- | --- |",
        "| a | **30.5 ± 0.5** | **30.5 ± 0.5** |",
    ]
    tex = latex(table)
    assert r"\begin{tabular}{lcc}" in tex
    assert r"method & p$|$q & r \\" in tex
    assert r"a & \textbf{30.5 $\pm$ 0.5} & \textbf{30.5 $\pm$ 0.5} \\" in tex
    assert tex.count("{") == tex.count("}")
    rows = list(csv.DictReader(io.StringIO(comma_separated(table))))
    assert len(rows) == 12
    means = [float(r["mean_last10"]) for r in rows if (r["method"], r["column"]) == ("a", "r")]
    assert np.mean(means) == pytest.approx(30.5)


def test_a_paper_s_number_stands_beside_ours_with_its_note(tmp_path, monkeypatch):
    from fedprior import sweeps

    told = {(("a",), ("r",)): tables.Published(71.41, 0.45, "* is odd"), (("b",), ("r",)): tables.Published(30.0)}
    monkeypatch.setitem(sweeps.PUBLISHED, ("mine", "mean_last10"), told)
    text = markdown(tables.of(swept(tmp_path, FULL, table="mine")))
    assert "**30.5 ± 0.5** [71.41 ± 0.45*]" in text
    assert "20.5 ± 0.5 [30]" in text
    assert "- * is odd" in text
    assert "In brackets" in text


def test_what_is_not_done_is_counted(tmp_path):
    few = {key: value for key, value in FULL.items() if key[2] < 2 and key[:2] != ("b", "r")}
    text = markdown(tables.of(swept(tmp_path, few)))
    assert "6 of 12 cells are not done" in text
    assert re.search(r"^\| b \| 20\.[23] ± 0\.4 \(2 of 3 seeds\) \| – \|$", text, flags=re.M)
    with pytest.raises(UserError, match="no cell of"):
        tables.of(swept(tmp_path / "none", {}))


def test_entries_over_fewer_seeds_say_so_and_the_test_is_named_by_what_it_had(tmp_path):
    """Two of three seeds tell nothing, though three were asked for."""
    few = {key: value for key, value in FULL.items() if key != ("b", "r", 2)}
    text = markdown(tables.of(swept(tmp_path / "one", few)))
    assert re.search(r"^\| b \| 20\.5 ± 0\.5 \| 20\.[23] ± 0\.4 \(2 of 3 seeds\) \|$", text, flags=re.M)
    assert "Where fewer than three seeds can be compared, the best alone is, and without any nothing." in text
    two = {key: value for key, value in FULL.items() if key[0] == "a" or key[2] < 2}
    text = markdown(tables.of(swept(tmp_path / "two", two)))
    assert "- Two seeds, as many as all rows of a column have, cannot tell an effect from chance; bold is" in text
    assert "t-test" not in text
    apart = {k: v for k, v in FULL.items() if (k[0] == "a") == (k[2] == 0)}
    text = markdown(tables.of(swept(tmp_path / "apart", apart)))
    assert "No seed is done in all rows of a column, so nothing is bold." in text
    assert "**" not in text
    assert "6 of 12 cells are not done" in text
    text = markdown(tables.of(tmp_path / "one", against="a"))
    assert "1 of 12 cells are not done; entries over fewer seeds say so." in text


def change(folder, name, lines=lambda line: line, **result):
    """Changes a cell's result.json and the lines of its metrics.jsonl."""
    run = folder / "cells" / name
    store.write_json(run / "result.json", store.read_json(run / "result.json") | result)
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(lines(line)) + "\n" for line in found))


def test_numbers_of_another_kind_are_marked_and_never_bold(tmp_path):
    folder = swept(tmp_path, FULL)
    for seed in range(3):
        change(folder, f"a-r-seed{seed}", models="own")
    table = tables.of(folder)
    assert {key: e.marks for key, e in table.entries.items() if e.marks} == {(("a",), ("r",)): "†"}
    assert [table.entries[(row,), ("r",)].strong for row in "ab"] == [False, True]  # though a is far better
    assert "† mean over clients' own models; a number of another kind" in markdown(table)
    assert "| a | **30.5 ± 0.5** | 30.5 ± 0.5† |" in markdown(table)
    assert r"30.5 $\pm$ 0.5$\dagger$ \\" in latex(table)
    marks = [(r["method"], r["column"], r["marks"]) for r in csv.DictReader(io.StringIO(comma_separated(table)))]
    assert marks.count(("a", "r", "†")) == 3
    assert sum(bool(mark) for *_, mark in marks) == 3
    gain = tables.of(folder, against="b")
    assert [(gain.entries[("a",), (c,)].marks, gain.entries[("a",), (c,)].strong) for c in ("p|q", "r")] == [
        ("", True),
        ("†", False),
    ]
    assert not any(e.marks for e in tables.of(folder, "hours").entries.values())


def test_what_holds_for_all_is_said_once(tmp_path):
    folder = swept(tmp_path, FULL)
    for path in (folder / "cells").iterdir():
        change(folder, path.name, lambda line: line | {"per_domain": {"x": 0.1}}, judged_on="validation")
    text = markdown(tables.of(folder))
    said = "- Validation accuracy in %, mean of the last 2 rounds, mean over domains; mean"
    assert text.splitlines()[5].startswith(said)
    assert "¶" not in text
    assert "§" not in text
    change(folder, "b-r-seed1", judged_on="test")
    table = tables.of(folder)
    assert table.entries[("b",), ("r",)].marks == "§"
    assert table.entries[("b",), ("p|q",)].marks == "§"


def test_different_shares_of_held_out_rows_are_different_rows(tmp_path):
    folder = swept(tmp_path, FULL)
    for path in (folder / "cells").iterdir():
        change(folder, path.name, judged_on="validation")
    said = store.read_json(folder / "sweep.json")
    for shares in (("0.2", "0.2"), ("0.1", "0.3")):
        one, other = ([f"validation={share}"] for share in shares)
        said["columns"][0]["values"] = {"p|q": one, "r": [*other, "rounds=3"]}
        store.write_json(folder / "sweep.json", said)
        table = tables.of(folder)
        apart = len(set(shares)) == 2
        assert {e.marks for e in table.entries.values()} == {"§" if apart else ""}
        assert any(e.strong for e in table.entries.values()) != apart


def test_training_that_did_not_count_is_told(tmp_path):
    folder = swept(tmp_path, FULL)
    refused = lambda line: line | {"refused": [{"client": 1, "reason": "x"}] * 2, "skipped": line["round"] == 2}
    change(folder, "b-r-seed1", refused)
    table = tables.of(folder)
    assert table.entries[("b",), ("r",)].marks == "‡"
    assert "‡ Not all training counted. b, r: 4 updates refused, 1 of 6 rounds left the model as it was." in table.notes
    assert tables.of(folder, against="a").entries[("b",), ("r",)].marks == "‡"


def test_latex_rows_begin_with_nothing_that_ends_a_line(tmp_path):
    found = {(f"[{row}]" if row == "a" else "*b", *rest): x for (row, *rest), x in FULL.items()}
    tex = latex(tables.of(swept(tmp_path, found, labels=("[a]", "*b"))))
    assert "\n{}[a] & " in tex
    assert "\n{}*b & " in tex


def test_labels_and_notes_of_several_lines_stay_on_one(tmp_path):
    found = {(f"{row}\nx", *rest): x for (row, *rest), x in FULL.items()}
    table = tables.of(swept(tmp_path, found, labels=("a\nx", "b\nx")))._replace(notes=["one\ntwo"])
    assert "| a x | **" in markdown(table)
    assert latex(table).splitlines()[:2] == ["% one two", r"\begin{tabular}{lcc}"]


def test_gains_over_a_row_beside_which_other_axes_mean_nothing():
    rows = [("none", NOTHING), ("max", "3"), ("max", "4")]
    heads = ["balance", "cap"]
    over = {("max", "3"): ("none", NOTHING), ("max", "4"): ("none", NOTHING)}
    assert tables.baselines(rows, "none", heads) == over
    assert tables.baselines(rows, "balance=none", heads) == over
    assert tables.baselines(rows, "3", heads) == {("none", NOTHING): None, ("max", "4"): ("max", "3")}
    with pytest.raises(UsageError, match="all that varies goes along the columns"):
        tables.baselines([()], "none", [])
    both = [("none", "none"), ("none", "x"), ("max", "none"), ("max", "x")]
    with pytest.raises(UsageError, match="several axes have that label; say --against balance=none"):
        tables.baselines(both, "none", ["balance", "guide"])
    assert tables.baselines(both, "guide=none", ["balance", "guide"]) == {
        ("none", "x"): ("none", "none"),
        ("max", "x"): ("max", "none"),
    }
    with pytest.raises(UsageError, match="no row has a counterpart"):
        tables.baselines([("fedavg", NOTHING), ("fedprox", "1")], "fedprox", ["method", "method.mu"])


def test_rows_without_a_counterpart_are_named(tmp_path, monkeypatch):
    folder = swept(tmp_path, FULL)
    assert not any("Without a row" in note for note in tables.of(folder, against="a").notes)
    monkeypatch.setattr(tables, "baselines", lambda *given: {("b",): ("a",), ("a",): None})
    table = tables.of(folder, against="x")
    assert "Without a row to compare with: a." in table.notes
    assert table.rows == [("b",)]


def test_a_model_that_never_trained_is_no_match(tmp_path):
    folder = swept(tmp_path, FULL)
    change(folder, "a-r-seed1", lambda line: line | {"refused": [{}], "skipped": True})
    table = tables.of(folder)
    assert [table.entries[(row,), ("r",)].strong for row in "ab"] == [False, True]
    assert [table.entries[(row,), ("p|q",)].strong for row in "ab"] == [True, False]


def test_the_headline_says_where_not_every_round_was_evaluated(tmp_path):
    folder = swept(tmp_path, FULL)
    assert "mean of the last 2 rounds;" in tables.of(folder).notes[0]
    change(folder, "a-r-seed1", lambda line: line | ({"accuracy": None} if line["round"] == 1 else {}))
    assert "mean of the last 2 rounds, as far as they were evaluated;" in tables.of(folder).notes[0]


def test_an_engine_that_rounds_in_its_own_way_is_told(tmp_path):
    folder = swept(tmp_path, FULL)
    change(folder, "a-r-seed1", engine="vectorised")
    change(folder, "b-r-seed1", engine="pool")
    note = tables.of(folder).notes[-1]
    assert "11 cells by fedprior" in note
    assert "engine=vectorised" in note
    assert "pool" not in note


def test_a_damaged_cell_is_one_line(tmp_path):
    folder = swept(tmp_path, FULL)
    (folder / "cells" / "b-r-seed1" / "metrics.jsonl").write_text("{")
    with pytest.raises(UserError, match="b-r-seed1 is damaged; `fedprior sweep"):
        tables.of(folder)


def test_an_axis_is_called_like_nothing_else():
    axis = lambda name, *labels: Axis(name=name, values=dict.fromkeys(labels, ()))
    with pytest.raises(UsageError, match="'method' is the name of an axis and of something else"):
        Sweep(name="n", base=(), rows=(axis("method", "a", "b"),), columns=(axis("x", "method", "c"),))


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
