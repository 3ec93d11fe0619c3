"""Submitting to Flower and following a run, with a stand-in for the `flwr` program."""

import json
import os
import stat
import tomllib

import pytest

from fedprior.config import Experiment, from_toml, override
from fedprior.engines.remote import Patience
from fedprior.errors import UsageError, UserError
from fedprior.submit import RESULT, Flwr, named, plain, write_app

STAND_IN = """#!/usr/bin/env python3
import pathlib, sys
here = pathlib.Path(__file__).parent
with open(here / "calls", "a") as f:
    f.write(" ".join(sys.argv[1:]) + "\\n")
calls = (here / "calls").read_text().splitlines()
kind = sys.argv[1]
number = sum(c.startswith(kind) for c in calls)
path = here / f"{kind}-{number}"
path = path if path.exists() else here / kind
text = path.read_text() if path.exists() else ""
print(text, end="")
sys.exit(1 if text.startswith("Error") else 0)
"""


@pytest.fixture
def flwr(tmp_path):
    program = tmp_path / "flwr"
    program.write_text(STAND_IN)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return Flwr(str(program), "mine", dict(os.environ))


def says(flwr, **texts):
    for name, text in texts.items():
        (__import__("pathlib").Path(flwr.program).parent / name.replace("_", "-")).write_text(text)


def listed(status):
    return json.dumps({"runs": [{"run-id": "7", "status": status}]})


def test_a_run_that_completed_gives_its_result_and_says_the_other_lines(flwr):
    says(flwr, log=f"begins\n{RESULT}{json.dumps({'last': 0.5})}\n", list=listed("finished:completed"))
    said = []
    assert flwr.follow(7, said.append, pause=0) == {"last": 0.5}
    assert said == ["begins"]


@pytest.mark.parametrize("status", ["finished:failed", "finished:stopped"])
def test_a_run_that_failed_is_an_error_with_its_reason(flwr, status):
    says(flwr, log="begins\nfedprior: too few nodes came\nTraceback\n", list=listed(status))
    with pytest.raises(UserError, match=f"run 7 is {status}: too few nodes came"):
        flwr.follow(7, lambda line: None, pause=0)


def test_a_run_that_completed_without_a_result_is_no_success(flwr):
    says(flwr, log="begins\n", list=listed("finished:completed"))
    with pytest.raises(UserError, match="its log says why"):
        flwr.follow(7, lambda line: None, pause=0)


def test_a_log_that_breaks_off_goes_on_and_no_line_is_said_twice(flwr):
    result = f"{RESULT}{json.dumps({'last': 1.0})}\n"
    says(flwr, log_1="a\nb\n", log_2="a\nb\nc\n", log_3=f"a\nb\nc\n{result}")
    says(flwr, list_1=listed("running"), list_2="Error: no connection\n", list_3=listed("finished:completed"))
    said = []
    assert flwr.follow(7, said.append, pause=0) == {"last": 1.0}
    assert said == ["a", "b", "c"]


def test_a_superlink_that_stays_away_ends_the_waiting(flwr):
    says(flwr, list="Error: no connection\n")
    with pytest.raises(UserError, match="flwr list failed: Error: no connection; whether run 7 goes on is not known"):
        flwr.follow(7, lambda line: None, pause=0, patience=3)


def test_a_superlink_that_flwr_cannot_reach_though_it_ends_with_0_is_no_status(flwr):
    says(flwr, list=json.dumps({"success": False, "error-message": "connection refused"}))
    with pytest.raises(UserError, match="connection refused; whether run 7 goes on is not known"):
        flwr.follow(7, lambda line: None, pause=0, patience=2)


def test_a_result_counts_at_the_beginning_of_a_line_only_and_has_to_be_whole(flwr):
    says(flwr, log=f"{RESULT}{{}}\nx {RESULT}{{}} of a site\n", list=listed("finished:completed"))
    assert flwr.follow(7, lambda line: None, pause=0) == {}
    says(flwr, log=f'{RESULT}{{"last": 0.\n')
    with pytest.raises(UserError, match="holds no whole result"):
        flwr.follow(7, lambda line: None, pause=0)


@pytest.mark.parametrize("key", ["wait", "answer", "budget", "over_select"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_patience_is_a_number(key, value):
    with pytest.raises(UsageError, match=f"--{key.replace('_', '-')} must be a number"):
        Patience(**{key: value})


def test_files_of_this_machine_are_named_by_whole_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "digits").mkdir()  # not the prior of that name
    e = named(override(Experiment(), ["data=set", "data.path=mine", "prior=digits"]))
    assert e.data.path == str(tmp_path / "mine")
    assert e.prior.name == "digits"


def test_a_file_is_no_place_for_an_app(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(UserError, match="holds other files; name a new folder"):
        write_app(named(Experiment()), tmp_path / "x", Patience())


def test_submitting_gives_the_run_s_number_and_an_error_its_last_line(flwr, tmp_path):
    says(flwr, run_1='{"success": true, "run-id": "8123"}\n', run_2="Error: it is\n\u2502 closed \u2502\n")
    assert flwr.submit(tmp_path) == 8123
    with pytest.raises(UserError, match="flwr run failed: Error: it is closed"):
        flwr.submit(tmp_path)


def test_an_app_names_flower_alone_and_holds_the_whole_experiment(tmp_path):
    e = named(Experiment())
    write_app(e, tmp_path / "app", Patience(answer=12.0))
    project = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())
    assert project["project"]["dependencies"] == ["flwr>=1.42"]  # nothing is installed at run time
    config = project["tool"]["flwr"]["app"]["config"]
    assert config == {"runs": "", "wait": 600.0, "answer": 12.0, "budget": 600.0, "over-select": 1.0}
    assert from_toml(tmp_path / "app" / "experiment.toml") == e
    write_app(e, tmp_path / "app", Patience())  # over its own files
    (tmp_path / "app" / "mine.txt").write_text("")
    with pytest.raises(UserError, match="holds other files"):
        write_app(e, tmp_path / "app", Patience())


def test_boxes_are_left_out():
    assert plain("\u256d\u2500 Error \u2500\u256e\n\u2502 no  such \u2502") == "Error no such"
