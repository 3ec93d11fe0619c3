import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fedprior import cli
from fedprior.commands import common
from fedprior.errors import UserError

QUICK = ["rounds=2", "steps=2", "clients=6", "cohort=3"]


def call(capsys, *words):
    """-> (exit code, stdout, stderr) of the command line, in this process."""
    argv, sys.argv = sys.argv, ["fedprior", *map(str, words)]
    try:
        cli.main()
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        sys.argv = argv
    out = capsys.readouterr()
    return code, out.out, out.err


def last_json(text):
    return json.loads(text.strip().splitlines()[-1])


def test_run_prints_the_promised_json_and_a_run_directory_runs_again(capsys, tmp_path):
    code, out, _ = call(capsys, "run", *QUICK, "--runs", tmp_path, "--json")
    first = last_json(out)
    assert code == 0
    assert {"last", "mean_last10", "best", "rounds", "uplink_MB", "downlink_MB", "seconds", "directory"} <= first.keys()
    code, out, err = call(capsys, "run", first["directory"], "--json")
    assert last_json(out) == first
    assert "nothing is left to do" in err
    code, out, _ = call(capsys, "run", first["directory"], "name=again", "--runs", tmp_path, "--json")
    again = last_json(out)
    assert again["weights"] == first["weights"]
    assert again["directory"] != first["directory"]
    toml = f"{first['directory']}/config.toml"
    code, out, _ = call(capsys, "run", toml, "rounds=1", "--runs", tmp_path, "--json")
    assert last_json(out)["rounds"] == 1


def test_demo_shows_both_arms_in_table_json_and_page(capsys, tmp_path):
    code, out, _ = call(
        capsys, "demo", "rounds=2", "steps=1", "balance.pool_size=2", "--seeds", 2, "--runs", tmp_path, "--json"
    )
    result = last_json(out)
    assert code == 0
    assert set(result["arms"]) == {"fedavg", "fedavg+balance"}
    for arm in result["arms"].values():
        a, b = arm["seeds"]
        assert arm["mean"] == pytest.approx((a + b) / 2)
        assert arm["std"] == pytest.approx(abs(a - b) / 2**0.5)
    page = Path(result["report"]).read_text(encoding="utf-8")
    assert "fedavg+balance" in page
    assert "±" in out
    assert "Test accuracy, mean of the last 2 rounds" in out


def test_the_demos_table_says_what_its_numbers_are(capsys, tmp_path):
    words = ["rounds=1", "steps=1", "balance.pool_size=2", "validation=0.2", "--seeds", 1, "--runs", tmp_path]
    _, out, _ = call(capsys, "demo", *words)
    assert "Validation accuracy, last round" in out


def test_plan_counts_what_a_run_then_makes_and_sends(capsys, tmp_path):
    words = [*QUICK, "balance=max", "balance.pool_size=2"]
    code, out, _ = call(capsys, "plan", *words, "--json", "--no-calibrate")
    plan = last_json(out)
    assert code == 0
    assert {"images", "clients", "per_class", "seconds", "MB"} <= plan.keys()
    assert not (tmp_path / "runs").exists()
    code, out, _ = call(capsys, "run", *words, "--runs", tmp_path, "--json")
    run = last_json(out)
    assert plan["rows"] == run["synthetic_rows"] == sum(plan["per_class"].values())
    assert plan["rows"] == sum(c["synthetic"] for c in plan["clients"])
    assert plan["MB"] == pytest.approx(run["uplink_MB"] + run["downlink_MB"])


def test_plan_estimates_time_by_trying(capsys):
    _, out, _ = call(capsys, "plan", *QUICK, "balance=max", "--json")
    plan = last_json(out)
    assert plan["generation_seconds"] > 0
    assert plan["training_seconds"] >= 0
    assert plan["seconds"] == pytest.approx(plan["generation_seconds"] + plan["training_seconds"])


def test_a_plan_counts_images_that_are_there_out(capsys):
    words = [*QUICK, "balance=max", "balance.pool_size=2", "prior.steps=2"]
    _, out, _ = call(capsys, "plan", *words, "--json")
    assert last_json(out)["stored"] == 0
    assert "20 distinct images, about 0.0 MB on disk. 0 are there." in out
    call(capsys, "generate", *words)
    _, out, _ = call(capsys, "plan", *words, "--json")
    plan = last_json(out)
    assert (plan["images"], plan["stored"], plan["generation_seconds"]) == (20, 20, 0.0)
    assert plan["seconds"] == plan["training_seconds"]
    assert "20 are there" in out
    _, out, _ = call(capsys, "plan", *words, "--json", "--no-calibrate")
    assert last_json(out)["stored"] is None


def test_generated_images_are_there_when_the_run_starts(capsys, tmp_path):
    words = [*QUICK, "balance=max", "balance.pool_size=2"]
    code, out, _ = call(capsys, "generate", *words, "--json")
    made = last_json(out)
    assert code == 0
    assert made["generated"] > 0
    _, out, _ = call(capsys, "generate", *words, "--json")
    again = last_json(out)
    assert (again["generated"], again["reused"]) == (0, made["generated"])
    from datasets import load_dataset

    rows = load_dataset(made["folder"], split="train")
    assert rows.num_rows >= made["generated"]
    assert rows[0]["image"].size == (16, 16)


def test_partition_show_prints_counts_and_statistics(capsys):
    code, out, _ = call(capsys, "partition", "show", "clients=5", "cohort=2", "partition=iid", "--json")
    shown = last_json(out)
    assert code == 0
    assert shown["statistics"]["rows"] == 600
    assert shown["statistics"]["max_size"] == 120


def test_report_of_two_runs_and_doctor(capsys, tmp_path):
    for method in ("fedavg", "fedprox"):
        call(capsys, "run", *QUICK, f"method={method}", f"name={method}", "--runs", tmp_path)
    out = tmp_path / "both.html"
    code, _, _ = call(capsys, "report", tmp_path / "fedavg", tmp_path / "fedprox", "--out", out)
    assert code == 0
    assert "fedprox" in out.read_text()
    code, text, _ = call(capsys, "doctor", "--json")
    found = last_json(text)
    assert code == 0
    assert found["embedded_priors"] == {"digits": True, "cifar10": True}
    assert found["versions"]["torch"] != "not installed"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["run", "roundz=3"], 2, "did you mean rounds"),
        (["run", "method=fedpro"], 2, "did you mean fedprox"),
        (["run", "gen-fedsd/cifar11"], 2, "did you mean gen-fedsd/cifar10"),
        (["run", "absent.toml"], 2, "there is no file absent.toml"),
        (["run", "data.path=absent"], 1, "absent"),
        (["run", "data=cifar10", "cohort=2"], 1, "data.path="),
        (["run", "partition.alpha=0"], 2, "partition.alpha"),
        (["run", "clients=700"], 1, "use fewer clients"),
        (["generate"], 2, "balance=max"),
        (["demo", "balance=none"], 2, "what the demo compares"),
        (["report", "absent"], 1, "no run directory"),
        (["prior", "check", "absent/folder"], 1, "absent/folder"),
        (["prior", "show", "digit"], 2, "did you mean digits"),
        (["prior", "train", "digit"], 2, "did you mean digits"),
        (["prior", "train", "digits", "--data", "."], 2, "leave out --data"),
        (["prior", "check", "none"], 2, "name a prior"),
        (["prior", "check", "digits", "prior.name=none"], 2, "name a prior"),
        (["prior", "check", "digits", "data.half=private"], 2, "data.half= plays no part in a check on digits"),
        (["prior", "check", "digits", "data.size=32"], 2, "data.size= plays no part"),
        (["prior", "check", "digits", "data.path=x"], 2, "data.path= plays no part"),
        (
            ["prior", "check", "cifar10", "data.path=x", "data.size=8"],
            2,
            "data.size= plays no part in a check on cifar10",
        ),
        (["prior", "check", "cifar10", "data.label=fine"], 2, "data.label= plays no part"),
        (["prior", "check", "digits", "data=own", "data.path=absent"], 1, "data.path=absent"),
        (["prior", "check", "digits", "data.name=own", "data.path=absent"], 1, "data.path=absent"),
        (["prior", "check", "cifar10", "data=digits", "--images", "20"], 2, "prior=cifar10 does not know 'zero'"),
        (["prior", "check", "--out", "."], 1, "--out . is a folder"),
        (["prior", "show", "--out", "."], 1, "--out . is a folder"),
        (["prior", "check", "--out", "/dev/null/x.html"], 1, "cannot write /dev/null/x.html"),
        (["prior", "show", "--out", "/dev/null/x.png"], 1, "cannot write /dev/null/x.png"),
        (["generate", "prior.scheduler=lcm", "prior.steps=60", "balance=max"], 2, "prior.steps=60"),
    ],
)
def test_a_mistake_gives_one_line_and_the_right_exit_code(capsys, tmp_path, monkeypatch, words, code, message):
    monkeypatch.chdir(tmp_path)
    got, _, err = call(capsys, *words)
    lines = [line for line in err.strip().splitlines() if not line.startswith("fedprior 0.")]
    assert got == code
    assert len(lines) == 1
    assert message in lines[0]
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_control_characters_in_a_mistake_do_not_reach_the_terminal(capsys, tmp_path, monkeypatch):
    code, _, err = call(capsys, "predict", tmp_path / "\x1b]0;owned\x07\x1b[31m\nred", tmp_path)
    assert code == 1
    assert err == f"fedprior: there is no {tmp_path}/ ]0;owned [31m red; name a run directory such as " + (
        "runs/digits-fedavg, or its model.safetensors\n"
    )


def test_a_mistake_of_several_lines_keeps_them(capsys, monkeypatch):
    def fails():
        raise UserError(f"2 cells failed:\n  one: \x1b[2J{'long ' * 400}end\n  two: odd\r")

    monkeypatch.setattr(cli, "app", fails)
    code, _, err = call(capsys)
    assert code == 1
    assert err == f"fedprior: 2 cells failed:\n  one: [2J{'long ' * 400}end\n  two: odd\n"


@pytest.mark.parametrize(("way", "engine"), [(signal.SIGINT, "serial"), (signal.SIGTERM, "pool")])
def test_a_run_that_is_stopped_says_in_one_line_how_it_goes_on(tmp_path, way, engine, endless):
    """To the whole group, as a terminal sends Ctrl-C and a supervisor SIGTERM."""
    words = ["run", *QUICK[1:], "rounds=1000000", f"engine={engine}", "workers=2", "--runs", tmp_path]
    child = endless(words, ready=lambda: list(tmp_path.glob("*/metrics.jsonl")))
    os.killpg(child.pid, way)
    out, err = child.communicate(timeout=60)
    folder = tmp_path / "digits-fedavg"
    assert child.returncode == 128 + way
    assert err.splitlines()[-1] == f"stopped; `fedprior run {folder}` goes on with it"
    assert "Traceback" not in err
    assert "Error" not in err
    assert out == ""
    assert json.loads((folder / "manifest.json").read_text())["status"] == "interrupted"


def test_what_is_told_twice_to_stop_still_tidies_up(capsys, monkeypatch):
    tidied = []

    def app():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            tidied.append(True)

    monkeypatch.setattr(cli, "app", app)
    assert call(capsys) == (143, "", "stopped\n")
    assert tidied


@pytest.mark.parametrize(
    ("command", "begins_with"),
    [("sweep", "commands.sweep.meant"), ("generate", "recipes.spoken"), ("describe", "recipes.spoken")],
)
def test_what_the_same_command_goes_on_with_says_so(capsys, monkeypatch, command, begins_with):
    monkeypatch.setattr(f"fedprior.{begins_with}", lambda *given: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    code, _, err = call(capsys, command, "rounds=3")
    assert (code, err) == (143, "stopped; the same command goes on with what was kept\n")
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_was_stopped_before_it_began_promises_nothing(capsys, tmp_path, monkeypatch):
    from fedprior import assemble

    def stopped(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(assemble, "split", stopped)
    code, _, err = call(capsys, "run", *QUICK, "--runs", tmp_path)
    assert (code, err.splitlines()[-1]) == (130, "stopped")
    assert list(tmp_path.iterdir()) == []


def test_who_has_a_way_of_its_own_to_be_ended_keeps_it(capsys, monkeypatch):
    ended = []
    before = signal.signal(signal.SIGTERM, lambda *given: ended.append(given[0]))
    try:
        monkeypatch.setattr(cli, "app", lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert call(capsys)[0] == 0
        assert ended == [signal.SIGTERM]
        worker = threading.Thread(target=call, args=(capsys,))  # where no handler can be set
        worker.start()
        worker.join()
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("command", "file"), [("show", "x.png"), ("check", "x.html")])
def test_a_place_that_cannot_be_written_is_refused_before_the_work(capsys, tmp_path, monkeypatch, command, file):
    from fedprior.priors import embedded

    monkeypatch.setattr(embedded, "load", lambda *given, **options: pytest.fail("the prior was loaded"))
    (tmp_path / "file").write_text("")
    code, _, err = call(capsys, "prior", command, "digits", "--out", tmp_path / "file" / "new" / file)
    assert code == 1
    assert "choose another --out" in err


@pytest.mark.parametrize("command", ["show", "check"])
def test_a_disk_that_fills_up_on_the_way_is_one_line(capsys, tmp_path, monkeypatch, command):
    from fedprior import store
    from fedprior.priors import check

    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "atomic", full)
    monkeypatch.setattr(check, "DIGITS", check.Judge(steps=1))
    brief = ["--per-class", 1] if command == "show" else ["--images", 20, "prior.steps=1"]
    code, _, err = call(capsys, "prior", command, "digits", *brief, "--out", tmp_path / "x")
    assert code == 1
    assert "No space left on device" in err.strip().splitlines()[-1]
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("own", "seen"), [({"trained_on": "digits"}, True), ({"trained_on": "other"}, False), ({}, False)]
)
def test_copies_are_looked_for_only_where_the_prior_says_what_it_was_trained_on(
    capsys, tmp_path, monkeypatch, own, seen
):
    from fedprior.priors import check, embedded

    known = embedded.load("digits").defaults
    monkeypatch.setattr(check, "DIGITS", check.Judge(steps=1))
    load = embedded.load

    def saying(*given, **options):
        prior = load(*given, **options)
        prior.defaults = {"classes": known["classes"], **own}
        return prior

    monkeypatch.setattr(embedded, "load", saying)
    words = ["data=digits", "prior.steps=1", "--images", 20, "--out", tmp_path / "x.html", "--json"]
    code, out, _ = call(capsys, "prior", "check", "digits", *words)
    assert code == 0
    assert (last_json(out)["memorisation"] is not None) == seen
    assert ("that it was trained on" in out) == seen


def test_help_and_import_load_neither_torch_nor_diffusers():
    heavy = "('torch', 'diffusers', 'transformers')"
    code = f"import sys, fedprior, fedprior.cli; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
    code = "import sys, fedprior; fedprior.METHODS; import fedprior.run; print('diffusers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_table_shows_every_word_as_it_is(capsys):
    words = ["[/b]", "[bold]", ":cat:", "fedprior[fid]"]
    common.table("by [class]", ["[name]", "n"], [[word, f"[{word}]"] for word in words])
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("by [class]", "[name]", *words, *(f"[{word}]" for word in words)))


def test_public_names_are_there():
    import fedprior

    assert set(fedprior.METHODS) >= {"fedavg", "fedprox", "local", "centralised"}
    assert fedprior.nets.build("cnn", 10, size=16).width == 64
    assert len(fedprior.partition("iid", [0, 1] * 10, 4, 0).clients) == 4
    assert set(fedprior.__all__) <= set(dir(fedprior))
    with pytest.raises(AttributeError, match="no attribute"):
        fedprior.absent  # noqa: B018


def test_a_plan_without_its_prior_still_tells_the_rest(capsys):
    code, out, _ = call(capsys, "plan", *QUICK, "balance=max", "prior=no/such", "--json")
    plan = last_json(out)
    assert code == 0
    assert plan["images"] > 0
    assert plan["training_seconds"] >= 0
    assert plan["seconds"] is plan["generation_seconds"] is None
    assert "no/such" in plan["note"]


def test_a_report_on_a_run_that_was_stopped_or_damaged_is_one_line(capsys, tmp_path):
    _, out, _ = call(capsys, "run", *QUICK, "--runs", tmp_path, "--json")
    folder = Path(last_json(out)["directory"])
    manifest = json.loads((folder / "manifest.json").read_text())
    for status in ("interrupted", "running", "failed"):
        (folder / "manifest.json").write_text(json.dumps(manifest | {"status": status}))
        code, _, err = call(capsys, "report", folder)
        assert (code, err.count("\n")) == (1, 1)
        assert f"it is {status}" in err
    damages = {
        "manifest.json": [None, b"{", b"{}"],
        "config.toml": [b"= 3", b"\xff\xfe", b""],
        "metrics.jsonl": [b"", b"3\n", b"{"],
        "clients.parquet": [b"PAR1"],
        "examples.safetensors": [None, b"x" * 20],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert call(capsys, "report", folder)[0] == 0
    for name, contents in damages.items():
        whole = (folder / name).read_bytes()
        for content in contents:
            (folder / name).unlink(missing_ok=True)
            if content is not None:
                (folder / name).write_bytes(content)
            code, _, err = call(capsys, "report", folder)
            assert (code, err.count("\n")) == (1, 1), (name, content, err)
        (folder / name).write_bytes(whole)
    code, _, err = call(capsys, "report", folder, "--out", "/proc/nowhere/x.html")
    assert (code, err.count("\n")) == (1, 1)


def test_a_run_directory_and_runs_contradict_each_other(capsys, tmp_path):
    _, out, _ = call(capsys, "run", *QUICK, "--runs", tmp_path, "--json")
    code, _, err = call(capsys, "run", last_json(out)["directory"], "--runs", tmp_path)
    assert code == 2
    assert "--runs has no meaning" in err
