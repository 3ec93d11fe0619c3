"""Which engine runs what, and that a person is told why."""

import numpy as np
import pytest
import toy

from fedprior import choice
from fedprior.commands.common import experiment_of
from fedprior.config import Experiment, override
from fedprior.engines.pool import Pool
from fedprior.engines.serial import Serial
from fedprior.engines.vectorised import Vectorised
from fedprior.errors import UsageError
from fedprior.methods import FedAvg
from fedprior.run import run


def chosen(words=(), cohort=4, worker=None):
    return choice.choose(
        override(Experiment(), list(words)), Serial(worker or toy.worker(FedAvg()), toy.federation()), cohort
    )


@pytest.fixture
def machine(monkeypatch):
    """With so many cores, and training that takes so long."""

    def make(cores, seconds):
        monkeypatch.setattr(choice, "cores", lambda: cores)
        monkeypatch.setattr(choice, "training_seconds", lambda *given: seconds)

    return make


@pytest.mark.parametrize(
    ("cores", "seconds", "cohort", "words", "says"),
    [
        (4, 29.0, 4, [], "engine=serial: about 29 s of training, too little for processes to pay"),
        (4, 90.0, 4, [], "engine=pool with 4 workers: about 1 min 30 s of training on one core"),
        (4, 90.0, 3, [], "engine=pool with 3 workers: about 1 min 30 s of training on one core"),
        (4, 90.0, 4, ["threads=2"], "engine=pool with 2 workers: about 1 min 30 s of training on one core"),
        (4, 90.0, 4, ["threads=3"], "engine=serial: one core"),
        (4, 90.0, 4, ["workers=3"], "engine=pool with 3 workers: about 1 min 30 s of training on one core"),
        (4, 90.0, 1, [], "engine=serial: one client a round"),
        (1, 90.0, 4, [], "engine=serial: one core"),
        (1, 90.0, 4, ["engine=pool", "workers=2"], "engine=pool with 2 workers: as asked"),
        (4, 90.0, 4, ["engine=pool", "workers=1"], "engine=pool with 1 worker: as asked"),
        (4, 90.0, 4, ["engine=serial"], "engine=serial: as asked"),
        (4, 90.0, 4, ["engine=vectorised"], "engine=vectorised with blocks of 4: as asked"),
        (4, 90.0, 4, ["engine=vectorised", "block=2"], "engine=vectorised with blocks of 2: as asked"),
        (4, 90.0, 4, ["engine=vectorised", "block=9"], "engine=vectorised with blocks of 4: as asked"),
    ],
)
def test_auto_weighs_cores_against_work_and_a_name_is_obeyed(cores, seconds, cohort, words, says, machine):
    machine(cores, seconds)
    engine, why = chosen(words, cohort)
    assert why == says
    kind = why.partition("=")[2].partition(" ")[0].rstrip(":")
    assert type(engine) is {"serial": Serial, "pool": Pool, "vectorised": Vectorised}[kind]
    assert getattr(engine, "workers", 0) == (int(why.split()[2]) if kind == "pool" else 0)
    assert getattr(engine, "block", 0) == (int(why.split(":")[0].split()[-1]) if kind == "vectorised" else 0)


def test_what_processes_cannot_take_over_runs_in_this_one(machine):
    class Local(FedAvg):
        pass

    machine(4, 90.0)
    engine, why = chosen(worker=toy.worker(Local()))
    assert type(engine) is Serial
    assert why.startswith("engine=serial: other processes cannot take this experiment over (")


def test_an_estimate_is_the_time_of_a_step_times_their_number(monkeypatch):
    """A step that takes a second of a clock of our own; 6 clients of 20 and 60 rows, batches of 8, two epochs."""
    now = [0.0]
    worker = toy.worker(FedAvg(), epochs=2.0)
    step = type(worker).step

    def slow(self, *given):
        now[0] += 1.0
        return step(self, *given)

    monkeypatch.setattr(type(worker), "step", slow)
    monkeypatch.setattr(choice.time, "perf_counter", lambda: now[0])
    experiment = override(Experiment(), ["rounds=10"])
    engine = Serial(worker, toy.federation())
    assert choice.training_seconds(experiment, engine, [20, 60], cohort=3) == 10 * 3 * (5 + 15) / 2


@pytest.mark.parametrize("key", ["workers", "block"])
def test_no_worker_and_no_block_is_refused(key):
    with pytest.raises(UsageError, match=f"{key} must be at least 1, not 0"):
        override(Experiment(), [f"{key}=0"])


def test_a_run_in_processes_ends_in_the_same_files_and_ends_them(tmp_path, monkeypatch):
    words = ["rounds=2", "steps=3", "clients=5", "cohort=3", "method=scaffold", "augment=true", "net=resnet10_gn"]
    closed = []
    close = Pool.close
    monkeypatch.setattr(Pool, "close", lambda self: (closed.append(len(self.processes)), close(self)))
    for name, more in {"one": ["engine=serial"], "two": ["engine=pool", "workers=2"]}.items():
        run(override(Experiment(), [*words, *more, f"name={name}"]), tmp_path)
    assert closed == [2]
    for file in ("metrics.jsonl", "model.safetensors", "partition.json", "clients.parquet"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), file


def test_a_run_may_go_on_with_another_engine(tmp_path):
    words = ["steps=2", "clients=5", "cohort=3", "method=scaffold", "name=a"]
    run(override(Experiment(), [*words, "rounds=1", "engine=serial"]), tmp_path)
    more = run(override(Experiment(), [*words, "rounds=2", "engine=pool", "workers=1"]), tmp_path).result
    whole = run(override(Experiment(), [*words[:-1], "name=b", "rounds=2"]), tmp_path).result
    assert more["weights"] == whole["weights"]
    assert more["engine"] == "pool with 1 worker"


def test_in_single_precision_stacked_clients_learn_as_much(tmp_path):
    """Real digits; three seeds of one engine differ by more than the engines do for one seed."""
    words = ["digits", "rounds=10", "steps=10", "partition.alpha=1.0"]
    scores = {
        engine: [
            run(experiment_of([*words, f"engine={engine}", f"seed={seed}", f"name={engine}-{seed}"]), tmp_path)
            for seed in range(3)
        ]
        for engine in ("serial", "vectorised")
    }
    a, b = (np.array([one.result["mean_last10"] for one in scores[engine]]) for engine in scores)
    assert a.min() > 0.3
    assert abs(a - b).max() < min(0.02, np.ptp(a))


@pytest.mark.parametrize(
    ("engine", "more"),
    [
        ("pool", []),
        ("pool", ["guide.condition=dynamic"]),
        ("pool", ["guide.anchors=text", "guide.whiten=prompt"]),
        ("vectorised", []),
        ("vectorised", ["guide.pairing=official", "guide.reduction=batch_ratio"]),
        ("vectorised", ["guide.negatives_from=both", "guide.normaliser=mean_distance", "guide.negatives=3"]),
    ],
)
def test_a_guided_run_is_the_same_wherever_its_clients_run(engine, more, tmp_path):
    """Descriptors lie in files that processes find without the diffusion model."""
    words = [*more, "guide=feddifrc", "rounds=2", "steps=2", "batch_size=8", "clients=4", "cohort=2", "workers=2"]
    runs = [
        run(override(Experiment(), [*words, f"engine={kind}", f"name={kind}"]), tmp_path) for kind in ("serial", engine)
    ]
    a, b = ([line["train_loss"] for line in one.curve] for one in runs)
    assert a == b if engine == "pool" else a == pytest.approx(b, rel=1e-4)
