"""Trackers get the lines of metrics.jsonl, once each, and can do a run no harm. Stand-ins record what they are told."""

import importlib.machinery
import json
import os
import re
import shutil
import subprocess
import sys
import types

import pytest
from accelerate import tracking

from fedprior import track
from fedprior.config import Experiment, from_toml, override, to_dict
from fedprior.errors import UsageError, UserError
from fedprior.node import agreement
from fedprior.progress import Silent
from fedprior.run import run

WORDS = ["rounds=3", "steps=1", "clients=4", "cohort=2", "name=it"]


class Say(Silent):
    def __init__(self):
        self.lines = []

    def say(self, text):
        self.lines.append(text)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """What a run sets there is gone afterwards."""
    for key in track.AT_HOME:
        monkeypatch.setenv(key, "")
        monkeypatch.delenv(key)


@pytest.fixture
def told(monkeypatch):
    """Stand-ins for all trackers, each of which keeps what it is told in a list of its own."""
    held = {name: [] for name in track.TRACKERS}

    def stand_in(name):
        class Run:
            class info:  # as mlflow has it
                run_id = "run-7"

            id, name = "run-7", "run-7"

        class Recorder(tracking.GeneralTracker):
            requires_logging_directory = False
            tracker = Run()

            def __init__(self, *given, **options):
                self.options = options

            def start(self):
                held[name].append(("start", self.options))

            def store_init_configuration(self, values):
                held[name].append(("settings", values))

            def log(self, values, step=None):
                held[name].append((step, values))

            def finish(self):
                held[name].append(("finish", None))

        Recorder.name = name
        return Recorder

    for name in held:
        monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, name, stand_in(name))
    monkeypatch.setattr(track, "refuse_missing", lambda names: None)
    ends = types.SimpleNamespace(finish=lambda: held["trackio"].append(("finish", None)))
    monkeypatch.setitem(sys.modules, "trackio", ends)
    return held


def go(root, *words):
    say = Say()
    return run(override(Experiment(), [*WORDS, *words]), root, say, report=False), say.lines


def steps(told):
    return [step for step, _ in told if isinstance(step, int)]


def test_every_line_is_told_once_in_numbers_and_the_file_is_that_of_a_run_without(told, tmp_path):
    plain, _ = go(tmp_path / "plain")
    outcome, lines = go(tmp_path / "told", "track=wandb, tensorboard")
    for name in ("wandb", "tensorboard"):
        assert [step for step, _ in told[name]] == ["start", "settings", 1, 2, 3, "finish"]
    for file in ("metrics.jsonl", "model.safetensors"):
        assert (tmp_path / "told" / "it" / file).read_bytes() == (tmp_path / "plain" / "it" / file).read_bytes()
    assert not (tmp_path / "plain" / "it" / "tracking.json").exists()
    values, line = told["wandb"][3][1], outcome.curve[1]
    assert values["accuracy"] == line["accuracy"]
    assert values["clients/worst"] == line["clients"]["worst"]
    assert values["per_class/seven"] == line["per_class"][7]
    assert values["downlink_groups/params"] == line["downlink_groups"]["params"]
    assert (values["cohort"], values["dropped"]) == (2, 0)
    assert "round" not in values
    assert all(type(value) is float for value in values.values())
    assert told["wandb"][1][1]["method/name"] == "fedavg"
    assert plain.result["weights"] == outcome.result["weights"]
    assert any("wandb sync" in text for text in lines)


def test_a_run_that_goes_on_tells_the_same_run_of_the_tracker_only_what_it_lacks(told, tmp_path):
    go(tmp_path, "track=mlflow")
    assert "run_id" in told["mlflow"][0][1]
    assert told["mlflow"][0][1]["run_id"] is None
    told["mlflow"].clear()
    _, lines = go(tmp_path, "track=mlflow,trackio", "rounds=5")
    assert not any("failed" in text for text in lines)
    assert told["mlflow"][0] == ("start", {"experiment_name": "fedprior", "run_name": "it", "run_id": "run-7"})
    assert [step for step, _ in told["mlflow"][1:]] == [4, 5, "finish"]
    assert steps(told["trackio"]) == [1, 2, 3, 4, 5]  # it came on the way
    assert told["trackio"][-1][0] == "finish"
    assert from_toml(tmp_path / "it" / "config.toml").track == "mlflow,trackio"


def test_what_was_not_told_before_a_crash_is_told_afterwards(told, tmp_path):
    go(tmp_path, "track=wandb")
    state = tmp_path / "it" / "tracking.json"
    state.write_text(json.dumps({"wandb": {"run": "abc", "rounds": 1}}))
    told["wandb"].clear()
    go(tmp_path, "track=wandb", "rounds=4")
    assert told["wandb"][0][1]["id"] == "abc"
    assert steps(told["wandb"]) == [2, 3, 4]


@pytest.mark.parametrize("hook", ["__init__", "start", "store_init_configuration", "log", "finish"])
def test_a_tracker_that_fails_is_one_line_and_the_others_and_the_run_go_on(hook, told, tmp_path, monkeypatch):
    def broken(self, *given, **options):
        raise RuntimeError("no route to host\nmore")

    monkeypatch.setattr(tracking.LOGGER_TYPE_TO_CLASS["wandb"], hook, broken)
    outcome, lines = go(tmp_path, "track=wandb,mlflow")
    assert [text for text in lines if "failed" in text] == [
        "track=wandb failed (no route to host) and is told nothing more; the run goes on without it"
    ]
    assert outcome.result["rounds"] == 3
    assert steps(told["mlflow"]) == [1, 2, 3]


def test_a_damaged_note_of_what_was_told_leaves_the_tracker_out(told, tmp_path):
    go(tmp_path, "track=wandb")
    (tmp_path / "it" / "tracking.json").write_text("{")
    _, lines = go(tmp_path, "track=wandb", "rounds=4")
    assert sum("failed" in text for text in lines) == 1


def test_trackers_are_closed_when_a_run_breaks(told, tmp_path, monkeypatch):
    from fedprior.checkpoint import Checkpoints

    def full(*given):
        raise OSError("disk full")

    monkeypatch.setattr(Checkpoints, "save", full)
    with pytest.raises(OSError, match="disk full"):
        go(tmp_path, "track=wandb")
    assert told["wandb"][-1][0] == "finish"


def test_what_a_tracker_prints_does_not_reach_stdout(told, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tracking.LOGGER_TYPE_TO_CLASS["wandb"], "start", lambda self: print("hello"))
    go(tmp_path, "track=wandb")
    assert capsys.readouterr().out == ""


def test_trackers_do_not_decide_what_a_run_is():
    plain, told = (override(Experiment(), ["track=" + names]) for names in ("none", "wandb,mlflow"))
    assert agreement(plain) == agreement(told)
    assert "track" not in to_dict(plain)
    assert to_dict(told)["track"] == "wandb,mlflow"
    with pytest.raises(UsageError, match="unknown tracker 'tensorbord'; did you mean tensorboard"):
        override(Experiment(), ["track=wandb,tensorbord"])


def test_a_tracker_that_is_not_installed_is_said_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(track.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"track=trackio needs the package trackio; pip install trackio, or leave it"):
        go(tmp_path, "track=trackio")
    assert not (tmp_path / "it").exists()


def test_nothing_of_a_tracker_is_imported_without_one():
    code = "import fedprior.track, sys; print([m for m in sys.modules if m.startswith(('accelerate', 'torch'))])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_names_are_ones_that_every_tracker_takes():
    assert track.flat({"a b": {"crane (bird)": 1, "x": None, "ü": 2}, "c": "d"}) == {
        "a b/crane _bird_": 1, "a b/ü": 2, "c": "d",
    }  # fmt: skip


@pytest.mark.parametrize("names", [["C++", "C#", "C_"], ["C#", "C__", "C++", "C_ 2"], ["a/b", "a_b", "a:b", "a*b"]])
def test_names_that_a_tracker_would_write_alike_are_told_apart(names):
    line = {"round": 1, "per_class": [0.1 * k for k in range(len(names))], "per_domain": dict.fromkeys(names, 0.5)}
    told = track.scalars(line, names)
    tags = [tag for tag in told if tag.startswith("per_class/")]
    assert [told[tag] for tag in tags] == line["per_class"]
    assert len([tag for tag in told if tag.startswith("per_domain/")]) == len(names)
    assert all(re.fullmatch(r"per_(class|domain)/[\w. -]+", tag) for tag in told)
    assert [f"per_class/{name}" in tags for name in names if re.fullmatch(r"\w+", name)].count(False) == 0
    unmeasured = line | {"per_class": [None, *line["per_class"][1:]]}
    assert [tag for tag in track.scalars(unmeasured, names) if tag in tags] == tags[1:]  # the others keep theirs


def test_who_reads_the_screen_does_not_learn_the_password_of_a_tracker(told, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://jane:p@ss:w0rd@mlflow.example:5000/x")
    _, said = go(tmp_path, "track=mlflow")
    assert "track=mlflow: https://mlflow.example:5000/x" in said

    def refuses(self):
        raise OSError("cannot reach https://jane:p@ss:w0rd@mlflow.example:5000/x or postgresql://jane:w0rd@db/x today")

    monkeypatch.setattr(tracking.LOGGER_TYPE_TO_CLASS["mlflow"], "start", refuses)
    _, said = go(tmp_path / "again", "track=mlflow")
    assert any("cannot reach https://mlflow.example:5000/x or postgresql://db/x today" in line for line in said)
    assert "w0rd" not in "\n".join(said)


def test_accelerates_adapter_hands_everything_to_the_trackers_own_module(tmp_path, monkeypatch):
    asked, logged = [], []

    class Run:
        id = "abc"
        finish = staticmethod(lambda: logged.append("finished"))
        log = staticmethod(lambda values, step: logged.append((step, values["accuracy"])))

    def init(**options):
        asked.append(options)
        return Run()

    settings = {}
    config = types.SimpleNamespace(update=lambda values, **options: settings.update(values))
    wandb = types.ModuleType("wandb")
    wandb.init, wandb.config, wandb.__spec__ = init, config, importlib.machinery.ModuleSpec("wandb", None)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    outcome, _ = go(tmp_path, "track=wandb")
    assert os.environ["WANDB_MODE"] == "offline"
    assert logged == [*((line["round"], line["accuracy"]) for line in outcome.curve), "finished"]
    assert settings["cohort"] == 2
    go(tmp_path, "track=wandb", "rounds=4")
    first = {"project": "mine", "name": "it", "dir": str(tmp_path / "it")}
    assert asked == [first, first | {"id": "abc", "resume": "allow"}]


def test_tensorboard_reads_the_lines_back(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    outcome, _ = go(tmp_path, "track=tensorboard")
    outcome, _ = go(tmp_path, "track=tensorboard", "rounds=5")
    seen = EventAccumulator(str(tmp_path / "it" / "tensorboard"))
    seen.Reload()
    for key, of in [("accuracy", lambda line: line["accuracy"]), ("per_class/one", lambda line: line["per_class"][1])]:
        events = seen.Scalars(key)
        assert [event.step for event in events] == [1, 2, 3, 4, 5]
        assert [event.value for event in events] == pytest.approx([of(line) for line in outcome.curve])


def rounds_on_the_board(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    seen = EventAccumulator(str(folder / "tensorboard"))
    seen.Reload()
    return [event.step for event in seen.Scalars("accuracy")]


def test_tensorboard_drops_what_it_was_told_before_a_kill_that_nobody_noted(tmp_path):
    pytest.importorskip("tensorboard")
    go(tmp_path, "track=tensorboard")
    state = tmp_path / "it" / "tracking.json"
    state.write_text(json.dumps({"tensorboard": {"run": "", "rounds": 1}}))
    go(tmp_path, "track=tensorboard", "rounds=4")
    assert rounds_on_the_board(tmp_path / "it") == [1, 2, 3, 4]


def test_tensorboard_is_told_everything_again_when_its_folder_is_gone(tmp_path):
    pytest.importorskip("tensorboard")
    go(tmp_path, "track=tensorboard")
    shutil.rmtree(tmp_path / "it" / "tensorboard")
    go(tmp_path, "track=tensorboard", "rounds=4")
    assert rounds_on_the_board(tmp_path / "it") == [1, 2, 3, 4]
