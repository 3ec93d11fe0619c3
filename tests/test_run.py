import json
import tomllib

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from fedprior import nets
from fedprior.config import Experiment, from_toml, override
from fedprior.data import digits, partition
from fedprior.errors import UserError
from fedprior.evaluate import evaluate
from fedprior.net import Net
from fedprior.progress import Silent
from fedprior.report.load import group, report_data
from fedprior.run import run

QUICK = ["rounds=3", "steps=3", "clients=6", "cohort=3"]


def quick(tmp_path, *words):
    return run(override(Experiment(), [*QUICK, *words]), tmp_path)


def test_the_same_command_twice_gives_the_same_bytes_and_weights(tmp_path):
    a, b = quick(tmp_path, "balance=max", "balance.pool_size=3"), quick(tmp_path, "balance=max", "balance.pool_size=3")
    files = [tmp_path / "digits-fedavg+max" / "metrics.jsonl", tmp_path / "digits-fedavg+max-2" / "metrics.jsonl"]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert a.result["weights"] == b.result["weights"]
    other = quick(tmp_path, "balance=max", "balance.pool_size=3", "seed=1")
    assert other.result["weights"] != a.result["weights"]
    assert other.result["last"] != a.result["last"]


def test_threads_are_set_by_the_experiment_and_one_by_default(tmp_path):
    before = torch.get_num_threads()
    try:
        quick(tmp_path, "threads=2", "rounds=1", "name=two")
        assert json.loads((tmp_path / "two" / "manifest.json").read_text())["hardware"]["threads"] == "2"
        quick(tmp_path, "rounds=1", "name=one")
        assert json.loads((tmp_path / "one" / "manifest.json").read_text())["hardware"]["threads"] == "1"
    finally:
        torch.set_num_threads(before)


def test_a_run_directory_holds_all_that_was_decided_and_found(tmp_path):
    result = quick(tmp_path, "name=mine", "target=0.01").result
    folder = tmp_path / "mine"
    assert {f.name for f in folder.iterdir()} == {
        "config.toml", "manifest.json", "metrics.jsonl", "timings.jsonl", "partition.json",
        "clients.parquet", "confusion.parquet", "examples.safetensors", "model.safetensors", "result.json",
        "report.html", "checkpoints",
    }  # fmt: skip
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["status"] == "done"
    assert manifest["versions"]["torch"] == torch.__version__
    assert manifest["hardware"]["threads"] == str(torch.get_num_threads())
    assert json.loads((folder / "result.json").read_text())["last"] == result["last"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3]
    assert result["to_target"] == {"rounds": 1, "MB": pytest.approx(result["uplink_MB"] * 2 / 3)}
    assert from_toml(folder / "config.toml") == override(Experiment(), [*QUICK, "name=mine", "target=0.01"])
    parts = partition.load(folder / "partition.json")
    clients = pq.read_table(folder / "clients.parquet").to_pydict()
    assert clients["real"] == [len(c) for c in parts.clients]
    assert sum(clients["real"]) == len(digits.train()["label"])


def test_the_saved_model_gives_the_reported_accuracy(tmp_path):
    result = quick(tmp_path, "name=m").result
    net = nets.build("cnn", 10, size=16)
    net.load_state_dict(load_file(tmp_path / "m" / "model.safetensors"))
    wrapped = Net(net)
    assert evaluate(wrapped, wrapped.init(), digits.test(), 10).accuracy == result["last"]


def test_per_client_accuracy_follows_from_the_per_class_one(tmp_path):
    quick(tmp_path, "name=m")
    line = json.loads((tmp_path / "m" / "metrics.jsonl").read_text().splitlines()[-1])
    table = pq.read_table(tmp_path / "m" / "clients.parquet").to_pydict()
    counts = np.array(table["real_by_class"])
    own = (counts * np.array(line["per_class"])).sum(1) / counts.sum(1)
    np.testing.assert_allclose(table["accuracy"], own)
    assert line["clients"]["worst"] == pytest.approx(own.min())
    assert line["clients"]["p10"] == pytest.approx(np.percentile(own, 10))


def test_25_rounds_of_10_clients_of_cct_2_send_567_megabytes():
    """papers.md 7.2, from tensors alone: no training is needed to count them."""
    from fedprior import tree
    from fedprior.traffic import Traffic

    weights = Net(nets.build("cct_2_3x2_32", 10)).init()
    traffic = Traffic()
    for _ in range(25):
        traffic.sent({"weights": weights, "shared": {}}, 10)
        for _ in range(10):
            traffic.received({"method": {"delta": weights["params"]}, "buffers": weights["buffers"]})
    assert (sum(traffic.up.values()) + sum(traffic.down.values())) / 1e6 == pytest.approx(567.446)
    assert traffic.up == {"delta": 250 * tree.num_bytes(weights["params"]), "buffers": 0}


@pytest.mark.parametrize("words", [["method=local"], ["method=centralised"], ["bn_stats=local", "net=resnet10"]])
def test_baselines_and_local_statistics_report_like_the_rest(tmp_path, words):
    result = quick(tmp_path, *words, "rounds=2", "steps=1", "name=b").result
    assert 0 <= result["last"] <= 1
    assert (result["uplink_MB"] > 0) == (words[0] == "bn_stats=local")
    assert (tmp_path / "b" / "report.html").exists()
    own = pq.read_table(tmp_path / "b" / "clients.parquet").to_pydict()["accuracy"]
    line = json.loads((tmp_path / "b" / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["clients"]["worst"] == pytest.approx(min(own))
    assert result["models"] == ("global" if words[0] == "method=centralised" else "own")
    assert line["clients"]["mean"] == pytest.approx(sum(own) / len(own))


def test_centralised_takes_the_steps_of_a_whole_cohort_over_all_rows():
    from fedprior import assemble

    e = override(Experiment(), [*QUICK, "method=centralised"])
    federation, _ = assemble.split(e)
    engine, cohort = assemble.build_engine(e, assemble.build_net(e, federation, torch.device("cpu")), federation)
    assert cohort == 1
    assert engine.worker.steps == 3 * 3
    assert len(engine.federation.clients[0]) == len(digits.train()["label"])


def test_evaluation_every_second_round_still_has_the_last_one(tmp_path):
    curve = quick(tmp_path, "evaluate_every=2").curve
    assert [line["accuracy"] is None for line in curve] == [True, False, False]


def test_a_run_that_breaks_says_so_in_its_manifest_and_keeps_its_rounds(tmp_path, monkeypatch):
    from fedprior.record import Record

    def full(self, metrics, timings):
        raise OSError("disk full")

    monkeypatch.setattr(Record, "round", full)
    with pytest.raises(OSError, match="disk full"):
        quick(tmp_path, "name=broken")
    manifest = json.loads((tmp_path / "broken" / "manifest.json").read_text())
    assert manifest["status"] == "failed"
    assert "disk full" in manifest["error"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.path=nowhere"], "nowhere"),
        (["clients=601", "cohort=3"], "use fewer clients"),
        (["net=cct_2_3x2_32"], "data.size=32"),
        (["device=cuda"], "device=auto"),
        (["prior=no/such/prior", "balance=max"], "no/such/prior"),
    ],
)
def test_what_cannot_work_leaves_nothing_behind(tmp_path, words, message):
    if words == ["device=cuda"] and torch.cuda.is_available():
        words = ["device=mps"]
    with pytest.raises(UserError, match=message):
        quick(tmp_path, *words)
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_in_use_is_refused_and_untouched(tmp_path):
    quick(tmp_path, "name=twice")
    before = (tmp_path / "twice" / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match="choose another name="):
        quick(tmp_path, "name=twice", "seed=5")
    assert (tmp_path / "twice" / "metrics.jsonl").read_bytes() == before


def test_runs_that_differ_in_the_seed_only_form_one_arm(tmp_path):
    for seed in (0, 1):
        for method in ("fedavg", "fedprox"):
            quick(tmp_path, f"method={method}", f"seed={seed}", f"name={method}{seed}")
    folders = [tmp_path / n for n in ("fedavg0", "fedprox0", "fedavg1", "fedprox1")]
    arms = group(folders)
    assert {k: [f.name for f in v] for k, v in arms.items()} == {
        "fedavg": ["fedavg0", "fedavg1"],
        "fedprox": ["fedprox0", "fedprox1"],
    }
    data = report_data(folders)
    assert [len(arm.curves) for arm in data.arms] == [2, 2]
    assert tomllib.loads(data.config)["method"]["name"] == "fedavg"
    with pytest.raises(UserError, match="no run directory"):
        report_data([tmp_path])


def test_weights_by_real_rows_and_uniform_differ_once_rows_are_synthetic(tmp_path):
    digests = {
        quick(tmp_path, "balance=max", "balance.pool_size=2", f"weight_by={by}").result["weights"]
        for by in ("training", "real", "uniform")
    }
    assert len(digests) == 3


def test_silence_is_possible(capsys, tmp_path):
    run(override(Experiment(), QUICK), tmp_path, Silent())
    assert capsys.readouterr() == ("", "")


def test_a_run_that_diverges_refuses_the_updates_and_still_ends(tmp_path):
    for words in (["local.lr=1e15"], ["local.lr=1e15", "method=local"]):
        outcome = quick(tmp_path, *words)
        assert outcome.result["rounds"] == 3
        assert any("not finite" in r["reason"] for line in outcome.curve for r in line["refused"])


def test_centralised_epochs_are_what_the_cohort_would_take_client_by_client():
    from fedprior import assemble

    e = override(Experiment(), ["clients=6", "cohort=3", "epochs=2", "method=centralised", "batch_size=16"])
    federation, _ = assemble.split(e)
    engine, _ = assemble.build_engine(e, assemble.build_net(e, federation, torch.device("cpu")), federation)
    own = [-(-2 * len(rows) // 16) for rows in federation.clients]
    assert engine.worker.steps == round(3 * sum(own) / 6)


def test_a_prior_that_knows_other_classes_is_refused_before_anything_is_made(tmp_path):
    import numpy as np
    from PIL import Image

    for name in ("coat", "shoe"):
        for i in range(10):
            folder = tmp_path / "data" / name
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((16, 16, 3), 20 * i, np.uint8)).save(folder / f"{i}.png")
    with pytest.raises(UserError, match="does not know 'coat'"):
        quick(tmp_path / "runs", "data=own", f"data.path={tmp_path / 'data'}", "balance=max")


def test_the_same_seed_twice_is_no_second_seed(tmp_path):
    for name in ("a", "b"):
        quick(tmp_path, "rounds=1", f"name={name}")
    with pytest.raises(UserError, match="same setting and seed"):
        report_data([tmp_path / "a", tmp_path / "b"])


def test_runs_that_differ_in_what_changes_no_setting_are_seeds_of_one_arm(tmp_path):
    quick(tmp_path, "rounds=1", "name=a")
    quick(tmp_path, "rounds=1", "name=b", "seed=1", "memory_MB=7", "engine=serial", "target=0.5")
    quick(tmp_path, "rounds=1", "name=c", "seed=1", "local.lr=0.2")
    quick(tmp_path, "rounds=1", "name=d", "seed=2", "engine=vectorised", "block=2")
    quick(tmp_path, "rounds=2", "name=e", "seed=1")
    data = report_data([tmp_path / name for name in "abcde"])
    assert [arm.runs for arm in data.arms] == [["a", "b", "d"], ["c"], ["e"]]
    assert data.target == 0.5


def test_an_interrupted_run_says_so(tmp_path, monkeypatch):
    from fedprior.record import Record

    def stop(self, metrics, timings):
        raise KeyboardInterrupt

    monkeypatch.setattr(Record, "round", stop)
    with pytest.raises(KeyboardInterrupt):
        quick(tmp_path, "name=stopped")
    assert json.loads((tmp_path / "stopped" / "manifest.json").read_text())["status"] == "interrupted"
