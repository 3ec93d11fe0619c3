"""What goes wrong between machines, done to a federation on loopback: pytest -m flower tests/test_flower_drills.py

With FIGURES=FILE in the environment the figures of the drills are written there as Markdown."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from cluster import Cluster
from test_flower import NODES, equal, finished, submitted
from test_serve import experiment

from fedprior.engines.remote import Patience
from fedprior.record import metrics

pytestmark = pytest.mark.flower

FAULTY = '''
"""An app whose clients misbehave: {(client, round): what}. What is done once leaves a file behind."""
import os, time
from pathlib import Path

import torch

import fedprior.node
from fedprior.engines import flower
from fedprior.local import Worker

EXPERIMENT = Path(__file__).with_name("experiment.toml")
FAULTS, MARKS = %(faults)r, Path(%(marks)r)
train, check = Worker.train, fedprior.node.check


def faulty(self, client, shard, down, memory, round):
    what, _, value = FAULTS.get((client, round + 1), "").partition(" ")
    mark = MARKS / f"{what}-{client}-{round + 1}"
    if what in ("pause", "exit") and mark.exists():
        what = ""
    if what:
        mark.touch()
    if what == "raise":
        raise RuntimeError("this client cannot train")
    if what == "exit":
        os._exit(9)
    if what in ("pause", "hang"):
        time.sleep(float(value))
    upload, after = train(self, client, shard, down, memory, round)
    delta = upload.tree["method"]["delta"]
    name = next(iter(delta))
    if what == "nan":
        delta[name] = delta[name] * float("nan")
    if what == "shape":
        delta[name] = torch.ones(1)
    return upload, after


Worker.train = faulty
fedprior.node.check = lambda *given: None  # so that the server is asked

client = flower.client_app(EXPERIMENT)
server = flower.server_app(EXPERIMENT)
'''


class Figures:
    def __init__(self):
        self.lines = []

    def __call__(self, text):
        self.lines.append(f"- {text}")
        print(text)


@pytest.fixture(scope="module")
def figure():
    figures = Figures()
    yield figures
    if where := os.environ.get("FIGURES"):
        Path(where).write_text("\n".join(figures.lines) + "\n")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("drills"), nodes=2, node_toml=NODES) as running:
        yield running


def app(folder, faults):
    (folder / "marks").mkdir(exist_ok=True)
    return FAULTY % {"faults": faults, "marks": str(folder / "marks")}


def until(true, seconds=240):
    """-> the seconds that it took."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < seconds, "in vain"
        time.sleep(0.1)
    return time.monotonic() - began


def marked(folder, what):
    return lambda: (folder / "marks" / what).exists()


def lines_of(folder):
    return metrics(folder) if (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").stat().st_size else []


def drill(name, *words):
    return experiment("method=scaffold", "cohort=4", "steps=2", f"name={name}", *words)


def test_a_node_that_is_killed_in_a_round_is_missed_and_comes_back(cluster, figure, tmp_path):
    e = drill("node", "rounds=7")
    run = submitted(cluster, tmp_path, e, app=app(tmp_path, {(2, 2): "pause 60", (0, 4): "pause 60"}))
    folder = cluster.server / "runs" / "node"
    until(marked(tmp_path, "pause-2-2"))
    cluster.kill("site-1")
    ended = until(lambda: len(lines_of(folder)) >= 2)
    cluster.start_node(1, wait=False)
    back = until(lambda: any(line["accepted"] == 4 for line in lines_of(folder)[2:]))
    assert cluster.wait(run, timeout=300) == "finished:completed"
    accepted = [line["accepted"] for line in metrics(folder)]
    assert accepted[:2] == [4, 2]
    assert accepted[-1] == 4
    reasons = {r["client"]: r["reason"] for r in metrics(folder)[1]["refused"]}
    assert reasons.keys() == {2, 3}
    figure(
        f"SuperNode killed while its clients train: after {ended:.0f} s the round ended with the other node's "
        f"2 of 4 clients ('{reasons[2]}'); started again, its clients counted again {back:.0f} s later; accepted by "
        f"round: {accepted}"
    )


def test_a_superlink_and_a_node_that_are_killed_cost_one_round(cluster, figure, tmp_path):
    e = drill("both", "rounds=4")
    text = app(tmp_path, {(2, 3): "pause 60"})
    submitted(cluster, tmp_path, e, app=text)
    until(marked(tmp_path, "pause-2-3"))
    cluster.kill("superlink")
    cluster.kill("site-1")
    began = time.monotonic()
    cluster.start_superlink()
    cluster.start_node(1)
    up = time.monotonic() - began
    assert finished(cluster, tmp_path, e, app=text)[0] == "finished:completed"
    from fedprior import store

    assert store.read_json(cluster.server / "runs" / "both" / "manifest.json")["resumed_after"] == [2]
    equal(cluster, tmp_path, e)
    figure(
        f"SuperLink and a SuperNode killed in round 3 of 4: both served again after {up:.0f} s; submitted again, the "
        f"run went on after round 2 and ended {time.monotonic() - began:.0f} s after the kill; every byte as without"
    )


def server_app(cluster):
    tree = psutil.Process(cluster.processes["superlink"].pid).children(recursive=True)
    return [p for p in tree if any("flwr-serverapp" in word for word in p.cmdline())]


def test_a_server_app_that_is_killed_costs_one_round(cluster, figure, tmp_path):
    e = drill("app", "rounds=3")
    text = app(tmp_path, {(2, 2): "pause 20"})
    run = submitted(cluster, tmp_path, e, app=text)
    until(marked(tmp_path, "pause-2-2"))
    for process in server_app(cluster):
        process.send_signal(signal.SIGKILL)
    began = time.monotonic()
    assert cluster.wait(run, timeout=180) == "finished:failed"
    noticed = time.monotonic() - began
    assert finished(cluster, tmp_path, e, app=text)[0] == "finished:completed"
    equal(cluster, tmp_path, e)
    figure(
        f"ServerApp killed in round 2 of 3: Flower called the run failed after {noticed:.0f} s; submitted again, it "
        "went on after round 1; every byte as without"
    )


def test_a_second_server_app_of_the_same_run_is_refused(cluster, figure, tmp_path):
    e = drill("twice", "rounds=2")
    text = app(tmp_path, {(2, 2): "pause 45"})
    first = submitted(cluster, tmp_path, e, app=text)
    until(marked(tmp_path, "pause-2-2"))
    began = time.monotonic()
    second = submitted(cluster, tmp_path, e, app=text)
    assert cluster.wait(second, timeout=120) == "finished:failed"
    took = time.monotonic() - began
    assert "another process is writing to" in cluster.log(second)
    assert cluster.wait(first, timeout=240) == "finished:completed"
    equal(cluster, tmp_path, e)
    figure(f"two ServerApps of one run: the second was refused {took:.0f} s after submission; the first ended as ever")


def test_clients_that_raise_send_nonsense_die_or_hang_are_named_and_the_run_completes(cluster, figure, tmp_path):
    e = drill("faults", "rounds=6")
    faults = {(0, 1): "raise", (1, 2): "nan", (2, 3): "shape", (3, 4): "exit", (0, 6): "hang 600"}
    patience = Patience(wait=120, answer=100, budget=60)
    run = submitted(cluster, tmp_path, e, patience=patience, app=app(tmp_path, faults))
    assert cluster.wait(run, timeout=600) == "finished:completed"
    lines = metrics(cluster.server / "runs" / "faults")
    refused = [{r["client"]: r["reason"] for r in line["refused"]} for line in lines]
    assert refused[0] == {0: "RuntimeError: this client cannot train"}
    assert list(refused[1]) == [1]
    assert "not finite" in refused[1][1]
    assert list(refused[2]) == [2]
    assert "expected" in refused[2][2]
    assert refused[3].keys() == {2, 3}  # with its process the other client of the node goes
    assert refused[5].keys() == {0, 1}
    assert "gave no answer within" in refused[5][0]
    figure(
        "clients that raise, send NaN or a wrong shape, whose process dies, or that hang: each named with its reason, "
        f"the run completed; accepted of 4 by round: {[line['accepted'] for line in lines]}; a process that died: "
        f"'{refused[3][3]}'"
    )
    cluster.kill("site-0")  # it would hang on
