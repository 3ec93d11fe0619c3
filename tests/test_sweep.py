"""Sweeps: what a cell is, what survives a kill, and that one failure stops nothing."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from fedprior import store, sweep_folder
from fedprior import sweep_run as running
from fedprior import sweeps as named
from fedprior.cli import main
from fedprior.errors import UsageError, UserError
from fedprior.optim import SGD
from fedprior.progress import Silent
from fedprior.report import sweep_page
from fedprior.report.numbers import Arm
from fedprior.sweep import NOTHING, Axis, Sweep, grid, idle, slug
from fedprior.sweep_folder import describe, load, note, reserve, tally
from fedprior.sweep_run import carry_out
from fedprior.table_forms import column_name

SMALL = ("clients=4", "cohort=2", "rounds=2", "steps=2", "batch_size=8")


def files(folder):
    """What a sweep's cells came to, without times."""
    kept = {}
    for path in sorted(folder.rglob("*")):
        if path.name in ("metrics.jsonl", "model.safetensors", "partition.json", "table.md"):
            kept[path.relative_to(folder).as_posix()] = path.read_bytes()
    return kept


def call(capsys, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["fedprior", *map(str, words)])
    try:
        main()
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    return code, out, err


# what a grid is


def test_words_with_several_values_vary_and_the_partition_s_go_along_the_columns():
    made = grid(["digits", *SMALL, "method=fedavg,scaffold", "partition.alpha=0.1,0.5", "seed=0,1,2"])
    assert [axis.name for axis in made.rows] == ["method"]
    assert [axis.name for axis in made.columns] == ["partition.alpha"]
    assert made.base == ("digits", *SMALL)
    cells = made.cells()
    assert len(cells) == 12
    assert [cell.seed for cell in cells] == [0] * 4 + [1] * 4 + [2] * 4
    first = made.experiment(cells[0])
    assert (first.partition.alpha, first.seed, first.name) == (0.1, 0, "fedavg-alpha_0.1-seed0")


def test_values_with_commas_are_told_apart_by_semicolons():
    made = grid(["guide=feddifrc", "guide.levels=2;3;2,3,4"])
    assert [tuple(made.experiment(cell).guide.wanted) for cell in made.cells()] == [(2,), (3,), (2, 3, 4)]
    assert len(grid(["guide=feddifrc", "guide.levels=2,3", "seed=0,1", "method=fedavg,moon"]).cells()) == 4


def test_only_the_partition_varies_so_it_is_the_rows():
    made = grid(["partition.alpha=0.1,0.5"])
    assert ([axis.name for axis in made.rows], made.columns) == (["partition.alpha"], ())


def test_columns_that_say_the_same_are_one():
    made = grid(["method=fedavg,moon", "partition=iid,dirichlet", "partition.alpha=0.1,0.5"])
    columns = list(dict.fromkeys(cell.column for cell in made.cells()))
    assert columns == [
        ("partition=iid", NOTHING),
        ("partition=dirichlet", "alpha=0.1"),
        ("partition=dirichlet", "alpha=0.5"),
    ]
    assert [column_name(column) for column in columns][:2] == ["partition=iid", "partition=dirichlet, alpha=0.1"]
    assert len(made.cells()) == 6


def test_the_seed_is_the_settings_file_s_where_no_word_gives_one(tmp_path):
    (tmp_path / "own.toml").write_text("seed = 7\n")
    assert grid([str(tmp_path / "own.toml"), "method=fedavg,moon"]).seeds == (7,)
    assert grid([str(tmp_path / "own.toml"), "method=fedavg,moon", "seed=1,2"]).seeds == (1, 2)
    assert grid(["digits", "method=fedavg,moon"]).seeds == (0,)


def test_columns_can_be_said():
    made = grid(["method=fedavg,moon", "steps=1,2", "partition.alpha=0.1,1"], columns=["steps"])
    assert [axis.name for axis in made.columns] == ["steps"]
    assert [axis.name for axis in made.rows] == ["method", "partition.alpha"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "nothing varies"),
        (["seed=0,1"], "nothing varies"),
        (["method=fedavg,"], "empty value"),
        (["method=moon,moon"], "comes twice"),
        (["method=fedavg,moon", "seed=a"], "whole numbers"),
        (["method=fedavg,moon", "seed=0,0"], "comes twice"),
        (["method=fedavg,moon", "seed=0,1", "seed=2"], "has several values already"),
        (["net=cnn,cnn+"], None),
    ],
)
def test_what_is_no_grid_is_one_line(words, why):
    if why is None:
        assert len(grid(words).cells()) == 2
        return
    with pytest.raises(UsageError, match=why):
        grid(words)


def test_labels_that_would_share_a_directory_or_are_too_long_for_one_get_names_of_their_own():
    axis = Axis(name="a", values={"x y": ("steps=1",), "x/y": ("steps=2",), "X/Y": ("steps=3",), "z": ("steps=4",)})
    names = [cell.name for cell in Sweep(name="n", base=(), rows=(axis,)).cells()]
    assert len({name.casefold() for name in names}) == 4
    assert all(name.startswith("x_y-") and name.endswith("-seed0") for name in names[:2])
    assert names[3] == "z-seed0"
    dashes = [Axis(name=n, values={label: (f"{n}={label}",) for label in ("a", "a-b", "b")}) for n in "xy"]
    names = [cell.name for cell in Sweep(name="n", base=(), rows=tuple(dashes)).cells()]
    assert len(set(names)) == 9
    long = Axis(name="data.path", values={f"/{'é' * 300}/{i}": (f"data.path={i}",) for i in range(2)})
    made = Sweep(name="n", base=(), rows=(long,), seeds=(10**9,))
    assert all(len(made.experiment(cell).name.encode()) <= 200 for cell in made.cells())


@pytest.mark.parametrize(("text", "name"), [("Dir(0.5)", "Dir_0.5"), ("+ diversity", "+_diversity"), ("/", "_")])
def test_a_label_becomes_a_name(text, name):
    assert slug(text) == name


def test_words_that_mean_nothing_in_a_cell_but_in_another_are_left_out_there():
    plain, filled = ("digits", "balance=none", "balance.cap=3", "steps=2"), ("digits", "balance=max", "balance.cap=3")
    assert idle([plain, filled]) == [{"balance.cap=3"}, set()]
    assert idle([plain]) == [set()]  # a slip, which the experiment refuses
    assert idle([("balance=none", "balance=max", "balance.cap=3")]) == [set()]  # the last word counts
    made = grid(["method=fedavg,fedprox,feddifrc", "method.mu=0.1", "guide.timestep=100"])
    said = {cell.row[0]: cell.words for cell in made.cells()}
    assert said["fedavg"] == ("method=fedavg", "seed=0")
    assert said["fedprox"] == ("method.mu=0.1", "method=fedprox", "seed=0")
    assert said["feddifrc"] == ("guide.timestep=100", "method=feddifrc", "seed=0")
    assert made.experiment(made.cells()[1]).method.mu == 0.1
    lora = grid(["adapt=none,lora", "balance=max", "balance.pool=per_client"])  # senseless without its inner words
    assert [bool(lora.experiment(cell).adapt) for cell in lora.cells()] == [False, True]


def test_rows_that_say_the_same_are_one():
    made = grid(["balance=none,max", "balance.cap=3,4", "seed=0,1", "partition.alpha=0.1,1"])
    rows = list(dict.fromkeys(cell.row for cell in made.cells()))
    assert rows == [("none", NOTHING), ("max", "3"), ("max", "4")]
    assert len(made.cells()) == 3 * 2 * 2
    assert made.cells()[0].name == "none-alpha_0.1-seed0"
    assert len({repr(made.experiment(cell)) for cell in made.cells()}) == 12


# the papers' tables


@pytest.mark.parametrize("name", named.SWEEPS)
@pytest.mark.parametrize("scale", ["full", "gpu-hour", "cpu-hour", "smoke"])
def test_every_cell_of_every_table_is_an_experiment(name, scale, monkeypatch):
    if (name, scale) == ("gen-fedsd/table2", "cpu-hour"):  # no embedded prior knows a hundred classes
        with pytest.raises(UsageError, match="scale of gen-fedsd/table2"):
            named.named(name, [f"scale={scale}"])
        return
    made = named.named(name, [f"scale={scale}"])
    cells = made.cells()
    assert len(cells) == len(made.seeds) * (36 if "gen-fedsd" in name else 4 * len(made.rows[0].values))
    assert len({repr(made.experiment(cell)) for cell in cells}) == len(cells)
    assert bool(made.scale) == (scale != "full")


def test_the_full_table_is_the_recipe_s_own_settings():
    from fedprior.recipes import RECIPES

    made = named.named("gen-fedsd/table1", [])
    cell = next(c for c in made.cells() if (c.row, c.column, c.seed) == (("FedAvg", "+ diversity"), ("Dir(0.5)",), 0))
    from dataclasses import replace

    assert made.experiment(cell) == replace(RECIPES["gen-fedsd/cifar10"](), name=cell.name)
    assert made.seeds == (0, 1, 2)


def test_the_ablation_that_is_published_is_what_its_page_says():
    """docs/results/feddifrc_ablation.md: plain SGD at 0.05, whatever the recipe has."""
    made = named.named("feddifrc/ablation", ["scale=cpu-hour"])
    for cell in made.cells():
        experiment = made.experiment(cell)
        assert (experiment.local, experiment.rounds, experiment.steps) == (SGD(lr=0.05), 20, 30)
        assert (experiment.clients, experiment.cohort, experiment.augment, experiment.net) == (10, 5, False, "cnn")
        assert experiment.guide is None or experiment.guide.timestep == 150


def test_published_numbers_are_where_the_table_has_cells():
    for (name, _), numbers in named.PUBLISHED.items():
        made = named.SWEEPS[name]("full")
        assert numbers.keys() <= {(cell.row, cell.column) for cell in made.cells()}
    table1 = named.PUBLISHED["gen-fedsd/table1", "mean_last10"]
    assert len(table1) == 36
    assert table1[("SCAFFOLD", "+ diversity"), ("Dir(0.05)",)][:2] == (61.91, 3.31)


def test_changes_of_a_table_are_said_in_its_scale_and_places_are_not():
    assert named.named("gen-fedsd/table1", ["data.path=x", "engine=pool"]).scale == ""
    assert "changed: rounds=3" in named.named("gen-fedsd/table1", ["scale=smoke", "rounds=3"]).scale


# running


def test_a_sweep_runs_its_cells_and_a_second_time_none(tmp_path):
    made = grid([*SMALL, "method=fedavg,local", "seed=0,1"])
    folder = tmp_path / made.name
    reserve(made, folder)
    assert carry_out(folder, 1, Silent())[:2] == (4, {})
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file() and p.name != "sweep.json"}
    reserve(made, folder)
    assert carry_out(folder, 1, Silent())[:2] == (4, {})
    assert {p: p.stat().st_mtime_ns for p in before} == before


def test_more_seeds_join_and_another_sweep_is_refused(tmp_path):
    reserve(grid([*SMALL, "method=fedavg,local", "name=n"]), tmp_path / "n")
    reserve(grid([*SMALL, "method=fedavg,local", "seed=3", "name=n"]), tmp_path / "n")
    assert load(tmp_path / "n").seeds == (0, 3)
    reworded = replace(grid([*SMALL, "method=fedavg,local", "name=n"]), scale="smaller")
    reserve(reworded, tmp_path / "n")  # what is said of the scale is no setting
    assert load(tmp_path / "n").scale == "smaller"
    with pytest.raises(UserError, match="holds another sweep"):
        reserve(grid([*SMALL, "method=fedavg,moon", "name=n"]), tmp_path / "n")


def test_a_cell_that_means_nothing_stops_the_sweep_before_any_is_run(tmp_path):
    with pytest.raises(UsageError, match=r"fedavg-alpha_-1-seed0: .*partition.alpha"):
        reserve(grid([*SMALL, "method=fedavg,local", "partition.alpha=0.5,-1"]), tmp_path / "n")
    assert not (tmp_path / "n").exists()


def test_a_failed_cell_is_listed_stops_nothing_and_is_tried_again(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("sweep", *SMALL, "partition.min_size=1", "clients=4,100000", "method=fedavg,local", "name=it")
    code, out, err = call(capsys, monkeypatch, *words, "--json")
    assert code == 1
    assert "2 of 4 cells failed" in err
    assert "clients=100000 is more than" in err
    assert "Traceback" not in err
    result = json.loads(out.splitlines()[-1])
    assert (result["done"], len(result["failed"])) == (2, 2)
    assert "Traceback" in (tmp_path / "sweeps/it/failed/100000-fedavg-seed0.txt").read_text()
    code, _, _ = call(capsys, monkeypatch, "sweep", "sweeps/it")
    assert code == 1


def test_a_sweep_has_a_page_with_its_table_its_curves_and_what_failed(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("sweep", *SMALL, "method=fedavg,local", "partition.alpha=0.5,1", "seed=0,1", "name=it")
    assert call(capsys, monkeypatch, *words)[0] == 0
    folder = tmp_path / "sweeps" / "it"
    text = (folder / "report.html").read_text()
    for part in ("8 of 8 cells", "Accuracy: alpha=0.5", "★", "Nothing.", "fedavg-alpha_0.5-seed0"):
        assert part in text
    assert "http://" not in text.replace("http://www.w3.org", "")
    (folder / "cells" / "local-alpha_1-seed1" / "result.json").unlink()
    note(folder, "local-alpha_1-seed1", "the disk was full\n")
    assert call(capsys, monkeypatch, "report", folder, "--out", tmp_path / "x.html")[0] == 0
    text = (tmp_path / "x.html").read_text()
    assert "7 of 8 cells" in text
    assert "the disk was full" in text
    code, _, err = call(capsys, monkeypatch, "report", folder, folder / "cells" / "local-alpha_1-seed0")
    assert code == 2
    assert "is a sweep" in err


@pytest.mark.slow
def test_a_sweep_that_is_killed_and_started_again_ends_with_the_same_bytes(tmp_path):
    """Twice, two workers at a time, with all their children; then to the end."""
    words = [*SMALL, "rounds=6", "method=fedavg,scaffold", "balance=none,max", "balance.pool_size=4", "prior.steps=1"]
    command = [sys.executable, "-m", "fedprior.cli", "sweep", *words, "seed=0,1", "name=it", "--workers", "2"]

    def start(root):
        return subprocess.Popen(
            [*command, "--sweeps", root / "sweeps"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "FEDPRIOR_CACHE": str(root / "cache")},
        )

    assert start(tmp_path / "whole").wait() == 0
    cells = tmp_path / "killed" / "sweeps" / "it" / "cells"
    for enough in (2, 5):
        child = start(tmp_path / "killed")
        while sum(1 for _ in cells.glob("*/metrics.jsonl")) < enough and child.poll() is None:
            time.sleep(0.05)
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    assert start(tmp_path / "killed").wait() == 0
    whole, killed = (files(tmp_path / name / "sweeps") for name in ("whole", "killed"))
    assert len(whole) == 8 * 3 + 1
    assert whole == killed


@pytest.mark.slow
def test_workers_end_with_the_process_that_started_them(tmp_path):
    """Killed, so that it cannot tell them."""
    import psutil

    words = [*SMALL, "rounds=100000", "method=fedavg,moon", "name=it", "--workers", "2", "--sweeps", tmp_path]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    parent = subprocess.Popen([sys.executable, "-m", "fedprior.cli", "sweep", *map(str, words)], **quiet)
    while len(list(tmp_path.glob("it/cells/*/metrics.jsonl"))) < 2:
        assert parent.poll() is None
        time.sleep(0.1)
    workers = psutil.Process(parent.pid).children(recursive=True)
    parent.kill()
    parent.wait()
    assert len(workers) == 2
    assert psutil.wait_procs(workers, timeout=30)[1] == []


def test_a_worker_that_dies_takes_one_cell_with_it(tmp_path, monkeypatch):
    """The other cells end, and the dead one is named."""
    made = grid([*SMALL, "method=fedavg,local,moon"])
    folder = tmp_path / made.name
    reserve(made, folder)
    deadly = "import os, sys, fedprior.run as r, fedprior.sweep_run as s; plain = r.run\n"
    deadly += (
        "def run(e, *a, **k):\n    os._exit(7) if e.name.startswith('local') else None\n    return plain(e, *a, **k)\n"
    )
    deadly += "r.run = run; s.main(sys.argv[1])"

    class Deadly(subprocess.Popen):
        def __init__(self, command, **more):
            super().__init__([command[0], "-c", deadly, command[-1]], **more)

    monkeypatch.setattr(running.subprocess, "Popen", Deadly)
    standing = carry_out(folder, 2, Silent())
    assert standing.done == 2
    assert standing.failed == {"local-seed0": "its process ended with code 7 (out of memory?)"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("scale=smoke", "method=fedavg,moon"), "scale=smoke is for a paper's table"),
        (("gen-fedsd/table9", "method=fedavg,moon"), "unknown recipe"),
        (("gen-fedsd/table1", "scale=tiny"), "unknown scale of gen-fedsd/table1 'tiny'"),
        (("gen-fedsd/table1", "--columns", "method"), "leave out --columns"),
        (("method=fedavg,moo", "clients=4", "cohort=2"), "did you mean moon"),
    ],
)
def test_wrong_words_are_one_line(words, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = call(capsys, monkeypatch, "sweep", *words)
    assert code == 2
    assert message in err
    assert not list(tmp_path.iterdir())


def test_a_figure_of_a_sweep_s_page_has_few_lines_and_rows_of_one_kind_together():
    arm = lambda row: Arm(name=", ".join(row), curves=[])
    many = {(a, b): arm((a, b)) for a in ("x", "y", "z") for b in "pqrs"}
    names = [[a.name for a in part] for part in sweep_page.parts_of(many)]
    assert names == [[f"{a}, {b}" for b in "pqrs"] for a in ("x", "y", "z")]
    flat = {(str(i),): arm((str(i),)) for i in range(11)}
    assert [len(part) for part in sweep_page.parts_of(flat)] == [8, 3]
    few = dict(list(many.items())[:7])
    assert [len(part) for part in sweep_page.parts_of(few)] == [7]
    assert sweep_page.parts_of({}) == []


def test_a_figure_of_a_sweep_s_page_has_curves_of_one_kind_of_rows(monkeypatch):
    from fedprior.report import figures

    monkeypatch.setattr(figures, "training", lambda arms: [arm.name for arm in arms])
    monkeypatch.setattr(sweep_page.html, "panels", lambda names: names)
    curve = [{"round": 1, "accuracy": 0.5}]
    kinds = {"a": "test", "b": "validation", "c": "test"}
    arms = {(name,): Arm(name=name, curves=[curve], judged_on=kind) for name, kind in kinds.items()}
    assert sweep_page.figures_of(arms) == [["a", "c"], ["b"]]


def test_a_key_given_twice_or_set_by_a_paper_s_axis_is_refused():
    for words in (["steps=1,2", "steps=3,4"], ["batch_size=8,4", "batch-size=2"]):
        with pytest.raises(UsageError, match="has several values already"):
            grid(words)
    assert next(cell.words for cell in grid(["steps=9", "steps=1,2"]).cells())[:2] == ("steps=9", "steps=1")
    for word in ("target=0.5", "partition.alpha=0.3", "method=moon"):
        with pytest.raises(UsageError, match=f"'{word}' is set by the table's axis"):
            named.named("gen-fedsd/table3", ["scale=smoke", word])


# what changed, is damaged or is another's


def swept(tmp_path, *words):
    """A sweep of two cells that is done."""
    made = grid([*SMALL, "method=fedavg,local", "name=it", *words])
    reserve(made, tmp_path / "it")
    assert carry_out(tmp_path / "it", 1, Silent())[:2] == (2, {})
    return made, tmp_path / "it"


def test_a_settings_file_is_kept_and_one_that_changed_is_refused(tmp_path, monkeypatch, capsys):
    """So that a sweep goes on from anywhere, and never mixes settings."""
    monkeypatch.chdir(tmp_path)
    words = ("sweep", "own.toml", "method=fedavg,local", "name=it", "--sweeps", tmp_path)
    (tmp_path / "own.toml").write_text("clients = 4\ncohort = 2\nrounds = 2\nsteps = 2\n")
    assert call(capsys, monkeypatch, *words)[0] == 0
    assert load(tmp_path / "it").base == (str(tmp_path / "it" / "base.toml"),)
    (tmp_path / "own.toml").write_text("clients = 4\ncohort = 2\nrounds = 3\nsteps = 2\n")
    code, _, err = call(capsys, monkeypatch, *words)
    assert code == 1
    assert "own.toml has changed: rounds: 2 there, 3 here" in err
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "it/cells/local-seed0/result.json").unlink()
    assert call(capsys, monkeypatch, "sweep", tmp_path / "it")[0] == 0
    assert (tmp_path / "it/cells/local-seed0/result.json").exists()


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ("steps=3", "steps: 2 there, 3 here"),
        ("rounds=3", "rounds: 2 there, 3 here"),
        ("target=0.5", "target: none there, 0.5 here"),
        ("evaluate_every=2", "evaluate_every: 1 there, 2 here"),
        ("threads=2", "threads: 1 there, 2 here"),
        ("workers=1", None),
        ("device=cpu", "device: auto there, cpu here"),
        ("engine=vectorised", "engine: auto there, vectorised here"),
        ("engine=pool", None),
        ("memory_MB=5", None),
    ],
)
def test_cells_that_were_made_with_other_settings_are_refused(tmp_path, changed, named):
    """As after an edit of sweep.json, or with another version's recipe."""
    made, folder = swept(tmp_path)
    store.write_json(folder / "sweep.json", describe(replace(made, base=(*made.base, changed))))
    if named is None:
        assert carry_out(folder, 1, Silent()).done == 2
        return
    with pytest.raises(UserError, match=rf"fedavg-seed0 was made with other settings \({named}\)"):
        carry_out(folder, 1, Silent())
    with pytest.raises(UserError, match="was made with other settings"):
        reserve(load(folder), folder)


def test_what_changes_no_number_may_change_and_other_differences_are_named(tmp_path):
    _, folder = swept(tmp_path)
    reserve(grid([*SMALL, "method=fedavg,local", "name=it", "workers=1", "memory-MB=9"]), folder)
    assert load(folder).base[-2:] == ("workers=1", "memory-MB=9")
    assert carry_out(folder, 1, Silent()).done == 2
    for words, why in (
        (["method=fedavg,moon"], "method: fedavg, local there, method: fedavg, moon here"),
        (["method=fedavg,local", "steps=3"], "nothing else there, steps=3 here"),
        (["method=fedavg,local", "device=cpu"], "nothing else there, device=cpu here"),
        (["method=fedavg,local", "engine=vectorised"], "nothing else there, engine=vectorised here"),
        (["method=fedavg,local", "partition.alpha=1,2"], "nothing else there, partition.alpha: alpha=1, alpha=2 here"),
    ):
        with pytest.raises(UserError, match=f"holds another sweep \\({re.escape(why)}\\)"):
            reserve(grid([*SMALL, *words, "name=it"]), folder)
    with pytest.raises(UserError, match="nothing else there, digits here"):
        reserve(grid(["digits", *SMALL, "method=fedavg,local", "name=it"]), folder)
    (tmp_path / "own.toml").write_text("")
    with pytest.raises(UserError, match="another recipe or file"):
        reserve(grid([str(tmp_path / "own.toml"), *SMALL, "method=fedavg,local", "name=it"]), folder)


def test_one_experiment_under_two_labels_is_refused(tmp_path):
    for words in (["rounds=2,02"], ["balance=none,max", "balance.cap=3,4", "--"]):
        columns = ["balance.cap"] if words[-1] == "--" else []
        made = grid([*SMALL[:2], *[word for word in words if word != "--"], "name=it"], columns)
        with pytest.raises(UsageError, match="are one experiment") as error:
            reserve(made, tmp_path / "it")
        assert ("not --columns" in str(error.value)) == bool(columns)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "file", ["metrics.jsonl", "other lines", "result.json", "manifest.json", "clients.parquet", "config.toml"]
)
def test_a_damaged_cell_is_named_with_the_remedy_and_the_others_stand(tmp_path, file, capsys, monkeypatch):
    _, folder = swept(tmp_path)
    torn = folder / "cells" / "local-seed0" / file.replace("other lines", "metrics.jsonl")
    torn.write_bytes(b"\x00{" if file == "config.toml" else torn.read_bytes()[:20] if file != "result.json" else b"")
    if file == "other lines":
        torn.write_text('{"round": 1}\n')
    code, out, err = call(capsys, monkeypatch, "sweep", folder)
    if file == "manifest.json":  # nobody knows that it was done, and so it goes on from its last checkpoint
        assert code == 0
        return
    assert code == 1
    assert "| fedavg |" in out
    assert "Traceback" not in err
    assert "its files are damaged" in err
    assert f"remove {folder / 'cells' / 'local-seed0'} and run the same command" in err
    shutil.rmtree(folder / "cells" / "local-seed0")
    assert call(capsys, monkeypatch, "sweep", folder)[0] == 0


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"base": [1]}, "should be text"),
        ({"base": "digits"}, "base is no list"),
        ({"seeds": [-1]}, "no whole numbers"),
        ({"seeds": "01"}, "no whole numbers"),
        ({"seeds": [True]}, "no whole numbers"),
        ({"schema_version": 99}, "schema_version is 99"),
        ({"rows": [{"name": 3, "values": {"a": ["steps=1"], "b": ["steps=2"]}}]}, "should be text"),
        ({"base": ["base.toml"]}, "base.toml, which is gone"),
    ],
)
def test_a_sweep_s_file_that_makes_no_sense_is_one_line(tmp_path, said, why):
    reserve(grid([*SMALL, "method=fedavg,local", "name=it"]), tmp_path / "it")
    store.write_json(tmp_path / "it/sweep.json", store.read_json(tmp_path / "it/sweep.json") | said)
    with pytest.raises(UserError, match=f"cannot be read.*{why}"):
        load(tmp_path / "it")


def test_a_sweep_that_was_killed_before_its_file_was_there_begins(tmp_path):
    (tmp_path / "own.toml").write_text("clients = 4\ncohort = 2\n")
    (tmp_path / "it").mkdir()
    (tmp_path / "it/base.toml").write_text("")
    reserve(grid([str(tmp_path / "own.toml"), "method=fedavg,local", "name=it"]), tmp_path / "it")
    assert (tmp_path / "it/base.toml").read_text() == (tmp_path / "own.toml").read_text()


def test_seeds_that_come_at_once_are_all_kept(tmp_path, monkeypatch):
    """Another command writes between this one's first look and its own writing."""
    words = [*SMALL, "method=fedavg,local", "name=it"]
    reserve(grid(words), tmp_path / "it")
    plain = sweep_folder.vet

    def meanwhile(*given):
        plain(*given)
        monkeypatch.setattr(sweep_folder, "vet", plain)
        reserve(grid([*words, "seed=2"]), tmp_path / "it")

    monkeypatch.setattr(sweep_folder, "vet", meanwhile)
    reserve(grid([*words, "seed=3"]), tmp_path / "it")
    assert load(tmp_path / "it").seeds == (0, 2, 3)


def test_a_sweep_that_lost_cells_meanwhile_ends(tmp_path, monkeypatch):
    made = grid([*SMALL, "method=fedavg,local", "seed=0,1", "name=it"])
    folder = tmp_path / "it"
    reserve(made, folder)
    plain = running.work

    def fewer(*given):
        store.write_json(folder / "sweep.json", describe(replace(made, seeds=(0,))))
        yield from plain(*given)

    monkeypatch.setattr(running, "work", fewer)
    assert carry_out(folder, 1, Silent())[:2] == (2, {})


def test_what_cannot_be_written_is_one_line_and_the_table_is_told(tmp_path, capsys, monkeypatch):
    _, folder = swept(tmp_path)
    plain = store.write_text

    def full(path, text, mode=0o644):
        if path.name == "report.html":
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(path, text, mode)

    monkeypatch.setattr(store, "write_text", full)
    code, out, err = call(capsys, monkeypatch, "sweep", folder)
    assert code == 1
    assert "| fedavg |" in out
    assert "table and report are not written ([Errno 28] No space left" in err
    (folder / "failed" / "x.txt").mkdir(parents=True)  # cannot be unlinked
    code, _, err = call(capsys, monkeypatch, "sweep", folder)
    assert code == 1
    assert "the same command goes on" in err
    assert "Traceback" not in err


def test_an_empty_note_of_a_failure_is_a_failure(tmp_path):
    made, folder = swept(tmp_path)
    (folder / "failed").mkdir()
    (folder / "failed" / "local-seed0.txt").write_bytes(b"")
    assert tally(made, folder).failed == {"local-seed0": "failed; nothing was noted of why"}
    assert carry_out(folder, 1, Silent())[:2] == (2, {})


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    made = grid([*SMALL, "partition.min_size=1", "clients=100000,4", "name=it"])
    reserve(made, tmp_path / "it")
    plain = store.write_text

    def full(path, text, mode=0o644):
        if path.parent.name == "failed":
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(path, text, mode)

    monkeypatch.setattr(store, "write_text", full)
    with pytest.raises(UserError, match=r"No space left on device\) that 100000-seed0 failed \(clients=100000 is more"):
        carry_out(tmp_path / "it", 1, Silent())


def test_names_that_are_no_directory_s(tmp_path):
    for name in ("../x", "a/b", ".", "x" * 201):
        with pytest.raises(UsageError, match="name="):
            grid(["method=fedavg,local", f"name={name}"])
    (tmp_path / "it").write_text("a file")
    with pytest.raises(UserError, match="is a file"):
        reserve(grid(["method=fedavg,local", "name=it"]), tmp_path / "it")
    (tmp_path / "left").mkdir()
    (tmp_path / "left" / ".sweep.json.abc.tmp").write_text("{")  # of a kill while it was written
    reserve(grid(["method=fedavg,local", "name=left"]), tmp_path / "left")


def test_a_list_is_no_axis_and_neither_is_a_path_with_a_comma():
    made = grid(["track=tensorboard,mlflow", "data.path=a,b", "method=fedavg,local"])
    assert made.base == ("track=tensorboard,mlflow", "data.path=a,b")


def test_cells_at_another_process_are_waited_for_and_taken_over(tmp_path, monkeypatch):
    made = grid([*SMALL, "method=fedavg,local", "name=it"])
    folder = tmp_path / "it"
    reserve(made, folder)
    (folder / "cells").mkdir()
    held = running.lock_of(folder, made.cells()[1])
    held.acquire()
    said, naps = [], []

    def nap(seconds):
        naps.append(tally(load(folder), folder).done)
        if len(naps) == 3:
            held.release()  # the other process was killed

    monkeypatch.setattr(running.time, "sleep", nap)
    voice = Silent()
    voice.say = said.append
    assert carry_out(folder, 1, voice)[:2] == (2, {})
    assert naps == [1, 1, 1]
    assert said == [f"{folder}: 2 cells, 0 of them done; 2 to run", "1 cell is at another process, which is waited for"]


def test_a_sweep_that_another_command_began_anew_is_not_called_done(tmp_path, capsys, monkeypatch):
    _, folder = swept(tmp_path)
    plain = running.carry_out

    def meanwhile(*given):
        plain(*given)
        (folder / "cells" / "local-seed0" / "result.json").unlink()
        return tally(load(folder), folder)

    monkeypatch.setattr(running, "carry_out", meanwhile)
    code, _, err = call(capsys, monkeypatch, "sweep", folder)
    assert code == 1
    assert "1 of 2 cells are not done" in err


def test_no_more_workers_than_cells(tmp_path, monkeypatch):
    _, folder = swept(tmp_path)
    (folder / "cells" / "local-seed0" / "result.json").unlink()
    asked = []
    monkeypatch.setattr(running, "hired", lambda *given: asked.append(given))
    assert carry_out(folder, 8, Silent())[:2] == (2, {})
    assert asked == []  # one cell, and this process runs it


@pytest.mark.slow
@pytest.mark.parametrize("way", [signal.SIGINT, signal.SIGTERM])
def test_a_sweep_that_is_stopped_says_so_in_one_line(tmp_path, way, endless):
    """To the whole group, as a terminal sends Ctrl-C."""
    words = ["sweep", *SMALL, "rounds=100000", "method=fedavg,moon", "name=it", "--workers", "2", "--sweeps", tmp_path]
    child = endless(words, ready=lambda: len(list(tmp_path.glob("it/cells/*/metrics.jsonl"))) == 2)
    os.killpg(child.pid, way)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 128 + way
    assert "Traceback" not in err
    assert "BrokenPipe" not in err
    assert err.splitlines()[-1].startswith("stopped")
