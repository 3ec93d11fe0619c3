"""Runs that are killed and go on: the end is the same to the byte."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn

from fedprior import nets, store
from fedprior.checkpoint import read
from fedprior.config import Experiment, override
from fedprior.errors import UserError
from fedprior.methods import METHODS
from fedprior.progress import Silent
from fedprior.record import Record
from fedprior.run import run

ROUNDS = 9
WORDS = [f"rounds={ROUNDS}", "steps=2", "clients=8", "cohort=4", "batch_size=8", "net=tiny", "name=it"]
WORDS += ["partition.alpha=0.5", "evaluate_every=3", "straggler_rate=0.3", "drop_rate=0.2", "local.momentum=0.5"]
OWN = {
    "scaffold": ["method.mode=pre", "memory_MB=0"],
    "moon": ["method.queue=2", "method.projection=8"],
    "fedavgm": ["aggregate=trimmed_mean", "clip_update_norm=1"],
    "fedavg": ["persist_optimizer=true", "schedule=cosine", "schedule.over=9", "bn_stats=local"],
    "gptfl": ["method.images_per_class=4", "method.pretrain_epochs=1"],
    "ccvr": ["method.images_per_class=4"],
    "fednova": ["method.mu=0.1", "server.momentum=0.5"],
}


class Tiny(nn.Module):
    """Batch norm, so that buffers are part of it, and a strided view of 4-d kernels."""

    def __init__(self, classes: int, size: tuple[int, int]) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 1), nn.Dropout(0.1)
        )
        self.width, self.head = 8, nn.Linear(8, classes)

    def forward(self, x):
        z = self.body(x).mean((2, 3))
        return z, self.head(z)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(nets.NETS, "tiny", Tiny)


def words_of(name: str) -> list[str]:
    return [*WORDS, f"method={name}", *OWN.get(name, [])]


def child(experiment: Experiment, root: Path) -> int:
    """A process of its own that runs the experiment -> its id. A fork: importing torch takes longer than a run."""
    if pid := os.fork():
        return pid
    try:
        run(experiment, root, Silent())
        os._exit(0)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)


def lines(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_when(pid: int, folder: Path, count: int, delay: float) -> bool:
    """SIGKILL some moments after the run has `count` rounds safe -> whether it was still alive."""
    while done(folder) < count:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return False
        time.sleep(0.001)
    time.sleep(delay)
    if os.waitpid(pid, os.WNOHANG)[0]:
        return False
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return True


def checkpoints(folder: Path) -> list[Path]:
    """The newest one last."""
    return sorted((folder / "checkpoints").glob("round-*.safetensors"), key=lambda p: int(p.stem.partition("-")[2]))


def done(folder: Path) -> int:
    """Rounds in the newest whole checkpoint; a run may be writing and removing them meanwhile."""
    for path in reversed(checkpoints(folder)):
        with suppress(OSError, ValueError):
            return read(path).done
    return 0


@pytest.mark.parametrize("name", METHODS)
def test_a_run_killed_five_times_and_torn_once_ends_byte_equal(tmp_path, name):
    experiment = override(Experiment(), words_of(name))
    whole = run(experiment, tmp_path / "whole", Silent())
    times = [json.loads(x)["seconds"] for x in (tmp_path / "whole" / "it" / "timings.jsonl").read_text().splitlines()]
    a_round = (times[-1] - times[0]) / (ROUNDS - 1)
    folder, rng = tmp_path / "cut" / "it", random.Random(name)
    kills = 0
    for count in (0, 1, 2, 3, 4, 5):
        alive = kill_when(child(experiment, tmp_path / "cut"), folder, count, rng.random() * a_round)
        kills += alive
        lost = 1 if count <= 3 else 2  # one round is done again at most; the torn checkpoint costs another
        assert lines(folder) - lost <= done(folder) <= lines(folder)
        if count == 3:  # power went while the newest checkpoint was being written
            last = checkpoints(folder)[-1]
            with last.open("rb+") as f:
                f.truncate(rng.randrange(last.stat().st_size))
            assert done(folder) == lines(folder) - 1 or done(folder) == int(last.stem.partition("-")[2]) - 1
    assert kills >= 5
    resumed = run(experiment, tmp_path / "cut", Silent())
    assert resumed.result["weights"] == whole.result["weights"]
    assert resumed.curve == whole.curve
    kept = (folder / "metrics.jsonl").read_bytes()
    assert kept == (tmp_path / "whole" / "it" / "metrics.jsonl").read_bytes()
    if (folder / "model.safetensors").exists():
        assert (folder / "model.safetensors").read_bytes() == (
            tmp_path / "whole" / "it" / "model.safetensors"
        ).read_bytes()
    timings = [json.loads(line)["round"] for line in (folder / "timings.jsonl").read_text().splitlines()]
    assert timings == list(range(1, ROUNDS + 1))
    assert json.loads((folder / "manifest.json").read_text())["status"] == "done"


def test_the_same_command_goes_on_after_a_kill_of_the_real_process(tmp_path):
    words = ["rounds=40", "steps=2", "clients=6", "cohort=3", "name=it", "method=scaffold"]
    command = [sys.executable, "-m", "fedprior.cli", "run", *words, "--runs", str(tmp_path)]
    folder = tmp_path / "it"
    for count in (2, 5):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while lines(folder) < count and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        process.kill()
        process.wait()
        assert count <= lines(folder) < 40
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert "goes on after round" in ended.stderr
    whole = run(override(Experiment(), words), tmp_path / "whole", Silent())
    assert (folder / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "it" / "metrics.jsonl").read_bytes()
    assert json.loads((folder / "result.json").read_text())["weights"] == whole.result["weights"]


def test_more_rounds_go_on_and_equal_a_run_that_had_them_from_the_start(tmp_path):
    words = words_of("scaffold")
    run(override(Experiment(), [*words, "rounds=3"]), tmp_path, Silent())
    longer = run(override(Experiment(), [*words, "rounds=6"]), tmp_path, Silent())
    at_once = run(override(Experiment(), [*words, "rounds=6"]), tmp_path / "at-once", Silent())
    assert longer.result["weights"] == at_once.result["weights"]
    assert longer.curve == at_once.curve
    assert json.loads((tmp_path / "it" / "manifest.json").read_text())["resumed_after"] == [3]
    with pytest.raises(UserError, match="cannot undo"):
        run(override(Experiment(), [*words, "rounds=4"]), tmp_path, Silent())


def test_changed_settings_are_named_and_refused_and_nothing_is_touched(tmp_path):
    words = words_of("fedprox")
    run(override(Experiment(), [*words, "rounds=2"]), tmp_path, Silent())
    before = {p: p.read_bytes() for p in (tmp_path / "it").rglob("*") if p.is_file()}
    with pytest.raises(UserError, match=r"seed: 0 there, 3 here; method\.mu: 0\.01 there, 0\.5 here"):
        run(override(Experiment(), [*words, "rounds=5", "seed=3", "method.mu=0.5"]), tmp_path, Silent())
    assert {p: p.read_bytes() for p in (tmp_path / "it").rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("left", [["checkpoints/lock"], ["checkpoints/lock", ".config.toml.x.tmp"]])
def test_a_run_that_died_before_its_first_line_begins_anew_and_leaves_no_scraps(tmp_path, left):
    for name in left:
        (tmp_path / "it" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "it" / name).touch()
    assert run(override(Experiment(), words_of("fedavg")), tmp_path, Silent()).result["rounds"] == ROUNDS
    assert not list((tmp_path / "it").rglob("*.tmp"))


def test_a_directory_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "it").mkdir()
    (tmp_path / "it" / "thesis.tex").write_text("years")
    with pytest.raises(UserError, match=r"has no config\.toml"):
        run(override(Experiment(), words_of("fedavg")), tmp_path, Silent())
    assert [p.name for p in (tmp_path / "it").iterdir()] == ["thesis.tex"]


def test_one_process_writes_to_a_directory(tmp_path):
    experiment = override(Experiment(), words_of("fedavg"))
    with Record(tmp_path / "it", experiment), pytest.raises(UserError, match="another process is writing"):
        run(experiment, tmp_path, Silent())
    assert run(experiment, tmp_path, Silent()).result["rounds"] == ROUNDS  # the lock is free again


def test_other_data_are_refused(tmp_path, monkeypatch):
    words = words_of("fedavg")
    run(override(Experiment(), [*words, "rounds=2"]), tmp_path, Silent())
    path = tmp_path / "it" / "partition.json"
    body = json.loads(path.read_text())
    from fedprior.data import partition

    parts = partition.load(path)
    other = partition.Partition(**{**{f: getattr(parts, f) for f in parts.__dataclass_fields__}, "seed": 9})
    assert other.digest != body["digest"]
    other.save(path)
    with pytest.raises(UserError, match="the data are not those"):
        run(override(Experiment(), [*words, "rounds=3"]), tmp_path, Silent())


def test_a_damaged_metrics_file_goes_on_from_the_generation_it_still_covers(tmp_path):
    words = words_of("feddyn")
    whole = run(override(Experiment(), [*words, "rounds=5"]), tmp_path / "whole", Silent())
    run(override(Experiment(), [*words, "rounds=4"]), tmp_path, Silent())
    path = tmp_path / "it" / "metrics.jsonl"
    with path.open("rb+") as f:
        f.truncate(path.stat().st_size - 5)  # the last line is torn
    assert run(override(Experiment(), [*words, "rounds=5"]), tmp_path, Silent()).curve == whole.curve


def test_an_unnamed_run_says_which_unfinished_one_it_could_go_on_with(tmp_path):
    class Said(Silent):
        def __init__(self) -> None:
            self.text: list[str] = []

        def say(self, text: str) -> None:
            self.text.append(text)

    experiment = override(Experiment(), [*WORDS, "name="])
    first = Path(run(experiment, tmp_path, Silent()).result["directory"])
    manifest = json.loads((first / "manifest.json").read_text())
    store.write_json(first / "manifest.json", manifest | {"status": "running"})
    said = Said()
    run(experiment, tmp_path, said)
    assert any(f"`fedprior run {first}` goes on with it" in line for line in said.text)


def test_dropout_partial_work_and_persistent_optimisers_survive_a_resume_with_bf16(tmp_path):
    words = [*words_of("fedavg"), "precision=bf16"]
    whole = run(override(Experiment(), words), tmp_path / "whole", Silent())
    run(override(Experiment(), [*words, "rounds=3"]), tmp_path, Silent())
    assert run(override(Experiment(), words), tmp_path, Silent()).result["weights"] == whole.result["weights"]
    assert torch.get_num_threads() == 1


def test_settings_that_come_between_looking_and_locking_are_refused(tmp_path, monkeypatch):
    """Another process finished a run of that name while this one was on its way to the lock."""
    from fedprior import run as module

    words = words_of("fedprox")
    enter = Record.__enter__

    def late(self):
        monkeypatch.undo()
        monkeypatch.setitem(nets.NETS, "tiny", Tiny)
        run(override(Experiment(), [*words, "rounds=2"]), tmp_path, Silent())
        return enter(self)

    monkeypatch.setattr(module.Record, "__enter__", late)
    with pytest.raises(UserError, match="seed: 0 there, 5 here"):
        run(override(Experiment(), [*words, "rounds=2", "seed=5"]), tmp_path, Silent())
    assert json.loads((tmp_path / "it" / "manifest.json").read_text())["status"] == "done"


def test_unnamed_runs_at_once_get_directories_of_their_own(tmp_path):
    experiment = override(Experiment(), [*WORDS, "name=", "rounds=2"])
    with Record(tmp_path / "x", experiment, numbered=True) as a, Record(tmp_path / "x", experiment, numbered=True) as b:
        assert (a.folder.name, b.folder.name) == ("x", "x-2")
    assert list(tmp_path.iterdir()) == []  # neither began


@pytest.mark.parametrize("gone", ["config.toml", "timings.jsonl", "checkpoints", "clients"])
def test_a_directory_that_lost_a_part_is_refused_and_nothing_of_it_is_removed(tmp_path, gone):
    import shutil

    words = words_of("scaffold")
    run(override(Experiment(), [*words, "rounds=3"]), tmp_path, Silent())
    folder = tmp_path / "it"
    if gone == "clients":
        for path in (folder / "checkpoints" / "clients").iterdir():
            path.write_bytes(path.read_bytes()[:100])
    elif gone == "checkpoints":
        shutil.rmtree(folder / gone)
    else:
        (folder / gone).unlink()
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != "lock"}
    with pytest.raises(UserError, match=r"choose another name=") as caught:
        run(override(Experiment(), [*words, "rounds=5"]), tmp_path, Silent())
    assert "\n" not in str(caught.value)
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != "lock"} == before


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[1]", b"{", b""])
def test_a_damaged_manifest_or_result_is_no_traceback_and_harms_no_neighbour(tmp_path, content):
    words = words_of("fedavg")
    whole = run(override(Experiment(), [*words, "rounds=2"]), tmp_path, Silent())
    (tmp_path / "it" / "result.json").write_bytes(content)
    with pytest.raises(UserError, match=r"result\.json cannot be read"):
        run(override(Experiment(), [*words, "rounds=2"]), tmp_path, Silent())
    (tmp_path / "it" / "manifest.json").write_bytes(content)
    run(override(Experiment(), [*words, "rounds=1", "name="]), tmp_path, Silent())  # looks at its neighbours
    assert run(override(Experiment(), [*words, "rounds=2"]), tmp_path, Silent()).result == {
        **whole.result,
        "seconds": pytest.approx(whole.result["seconds"], abs=60),
        "preparation_seconds": pytest.approx(0, abs=60),
    }


def test_a_target_given_later_is_looked_up_in_the_rounds_that_are_there(tmp_path):
    words = [*words_of("fedavg"), "evaluate_every=1"]
    first = run(override(Experiment(), [*words, "rounds=3"]), tmp_path, Silent())
    assert first.result["to_target"] is None
    later = run(override(Experiment(), [*words, "rounds=3", "target=0.01"]), tmp_path, Silent())
    assert later.result["to_target"]["rounds"] == 1
    assert later.curve == first.curve
    assert later.result["weights"] == first.result["weights"]


def test_a_missing_partition_is_written_again_so_that_other_data_are_noticed(tmp_path):
    words = words_of("fedavg")
    run(override(Experiment(), [*words, "rounds=2"]), tmp_path, Silent())
    before = (tmp_path / "it" / "partition.json").read_bytes()
    (tmp_path / "it" / "partition.json").unlink()
    run(override(Experiment(), [*words, "rounds=3"]), tmp_path, Silent())
    assert (tmp_path / "it" / "partition.json").read_bytes() == before


def test_a_full_disk_is_one_line_and_the_run_goes_on_when_there_is_room(tmp_path, monkeypatch):
    from safetensors import SafetensorError

    words = words_of("scaffold")
    whole = run(override(Experiment(), words), tmp_path / "whole", Silent())
    import safetensors.torch as files

    save, calls = files.save_file, []

    def full(*args, **options):
        calls.append(1)
        if len(calls) > 6:
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        save(*args, **options)

    with monkeypatch.context() as disk:
        disk.setattr(files, "save_file", full)
        with pytest.raises(UserError, match=r"the disk of .* is full; free some space") as caught:
            run(override(Experiment(), words), tmp_path, Silent())
    assert "\n" not in str(caught.value)
    assert json.loads((tmp_path / "it" / "manifest.json").read_text())["status"] == "failed"
    again = run(override(Experiment(), words), tmp_path, Silent())
    assert again.result["weights"] == whole.result["weights"]
    assert again.curve == whole.curve


def test_a_place_that_cannot_be_written_is_one_line_before_anything_is_made(monkeypatch):
    from fedprior import assemble

    monkeypatch.setattr(assemble, "split", lambda e: pytest.fail("too late"))
    for name in ("name=", "name=it"):
        with pytest.raises(UserError, match="cannot write to"):
            run(override(Experiment(), [*WORDS, name]), Path("/proc/nowhere"), Silent())


def test_the_time_left_counts_the_rounds_of_this_process_only(capsys):
    import sys as system

    from fedprior.progress import Lines

    now = [0.0]
    import fedprior.progress as progress

    clock = progress.time.monotonic
    progress.time.monotonic = lambda: now[0]
    try:
        with Lines(system.stderr, interval=0.0).task("rounds", 1000, 500) as update:
            now[0] = 10.0
            update(510, "")
    finally:
        progress.time.monotonic = clock
    assert "rounds: 510/1000, 8 min 10 s left" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["status", "cut", "config"])
def test_a_kill_while_more_rounds_are_being_set_up_does_not_make_them_look_done(tmp_path, monkeypatch, where):
    words = words_of("fedavg")
    run(override(Experiment(), [*words, "rounds=2"]), tmp_path, Silent())

    def dies(*args, **options):
        os._exit(9)

    with monkeypatch.context() as patch:
        if where == "config":
            patch.setattr("fedprior.record.to_toml", dies)
        else:
            patch.setattr(Record, where, dies)
        _, how = os.waitpid(child(override(Experiment(), [*words, "rounds=5"]), tmp_path), 0)
        assert os.waitstatus_to_exitcode(how) == 9
    assert len(run(override(Experiment(), [*words, "rounds=5"]), tmp_path, Silent()).curve) == 5


def test_a_dangling_link_is_passed_by_or_refused(tmp_path):
    (tmp_path / "digits-fedavg").symlink_to(tmp_path / "unmounted")
    experiment = override(Experiment(), [*WORDS, "name=", "rounds=1"])
    assert run(experiment, tmp_path, Silent()).result["directory"] == str(tmp_path / "digits-fedavg-2")
    (tmp_path / "root").symlink_to(tmp_path / "unmounted")
    with pytest.raises(UserError, match="is no directory"):
        run(experiment, tmp_path / "root", Silent())


def test_a_run_killed_while_it_prepares_goes_on_under_its_name(tmp_path, monkeypatch):
    from fedprior import run as module

    experiment = override(Experiment(), [*WORDS, "name=", "rounds=2"])
    with monkeypatch.context() as patch:
        patch.setattr(module, "prepare", lambda *a: os._exit(9))
        os.waitpid(child(experiment, tmp_path), 0)
    (folder,) = tmp_path.iterdir()
    words = [*WORDS, "rounds=2", f"name={folder.name}"]
    assert run(override(Experiment(), words), tmp_path, Silent()).result["rounds"] == 2
    with pytest.raises(UserError, match="seed: 0 there, 4 here"):
        run(override(Experiment(), [*words, "seed=4"]), tmp_path, Silent())


def test_a_copied_run_that_is_done_names_itself(tmp_path):
    import shutil

    words = [*words_of("fedavg"), "rounds=1"]
    run(override(Experiment(), words), tmp_path, Silent())
    shutil.copytree(tmp_path / "it", tmp_path / "copy")
    copied = run(override(Experiment(), [*words, "name=copy"]), tmp_path, Silent())
    assert copied.result["directory"] == str(tmp_path / "copy")


@pytest.mark.parametrize(
    "content", ['{"versions": [1], "status": "running"}', '{"resumed_after": 3, "status": "running"}']
)
def test_an_odd_manifest_does_not_stop_a_run(tmp_path, content):
    words = words_of("fedavg")
    run(override(Experiment(), [*words, "rounds=1"]), tmp_path, Silent())
    (tmp_path / "it" / "manifest.json").write_text(content)
    assert len(run(override(Experiment(), [*words, "rounds=2"]), tmp_path, Silent()).curve) == 2
    assert json.loads((tmp_path / "it" / "manifest.json").read_text())["resumed_after"] == [1]
