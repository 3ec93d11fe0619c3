"""What `fedprior bench` measures: that figures are of the thing they name and follow from one another."""

import json
import os
from dataclasses import replace
from itertools import count, cycle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedprior import assemble, nets, store, tree
from fedprior.bench import aggregation, child, evaluation, made_up, memory, overhead, peak, round, turns
from fedprior.cli import app
from fedprior.commands import bench as commands
from fedprior.data.augment import STATISTICS
from fedprior.engines.serial import Serial
from fedprior.errors import UsageError, UserError
from fedprior.evaluate import evaluate
from fedprior.local import Worker
from fedprior.net import Net
from fedprior.recipes import RECIPES
from fedprior.tree import flatten

CPU = torch.device("cpu")


def call(*words):
    """-> (the JSON line, all that was printed). Raises what the command raises."""
    found = CliRunner().invoke(app, ["bench", *map(str, words), "--json"], catch_exceptions=False)
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout.strip().splitlines()[-1]), found.stdout


def small(guide=None, **changes):
    """A serial engine on little data with the net `cnn`, which takes milliseconds a step."""
    experiment = replace(
        RECIPES["feddifrc/cifar10"](), net="cnn", clients=2, cohort=2, steps=3, epochs=None, batch_size=4, **changes
    )
    data = made_up.federation(2, 8)
    net = assemble.build_net(experiment, data, CPU, guide)
    return assemble.build_engine(experiment, net, data, guide=guide)[0]


# the stopwatch
def test_arms_take_turns_after_one_that_does_not_count():
    calls, spent = [], cycle([0.0, 2.0, 0.0, 7.0])
    laps = turns.in_turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 3, lambda: next(spent))
    assert calls == ["a", "b"] * 4
    assert [[lap.cpu for lap in laps[arm]] for arm in "ab"] == [[2.0] * 3, [7.0] * 3]
    assert all(lap.wall > 0 for own in laps.values() for lap in own)
    calls.clear()
    turns.in_turns({"a": lambda: calls.append("a")}, 2, first={"a": lambda: calls.append("small")})
    assert calls == ["small", "a", "a"]


def test_a_ratio_is_of_turns_and_by_the_clock_that_neighbours_do_not_touch():
    slow, fast = ([turns.Lap(wall, cpu) for wall, cpu in pairs] for pairs in ([(9, 2), (9, 8), (9, 6)], [(1, 1)] * 3))
    assert turns.clock() == "cpu"
    assert turns.ratio(slow, fast) == 6
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert turns.clock() == "wall"
        assert turns.ratio(slow, fast) == 9
    finally:
        torch.set_num_threads(before)


def test_a_child_answers_and_says_what_failed():
    assert child.in_child("nothing", commands.numbers_of, "3, 4") == [3, 4]
    with pytest.raises(UserError, match=r"the process that measures x ended early: .*wants numbers"):
        child.in_child("x", commands.numbers_of, "none")


def test_the_peak_is_the_best_of_all_sizes(monkeypatch):
    seconds = count()
    monkeypatch.setattr(peak, "SIZES", (4, 16, 8))
    monkeypatch.setattr(peak, "time", SimpleNamespace(process_time=lambda: next(seconds)))
    assert peak.gflops("bf16") == 2 * 16**3 / 1e9  # one second each


# data
def test_made_up_data_is_shaped_like_cifar10():
    data = made_up.federation(3, 20)
    assert data.table["image"].shape == (60, 3, 32, 32)
    assert data.counts().tolist() == [[2] * 10] * 3
    assert torch.equal(data.table["image"], made_up.federation(3, 20).table["image"])
    assert not torch.equal(data.table["image"][:20], data.table["image"][20:40])
    assert 126 < data.table["image"].float().mean() < 129


def test_descriptors_have_the_shape_of_stable_diffusions_and_leave_nothing_behind():
    before, data = os.environ["FEDPRIOR_CACHE"], made_up.federation(2, 8)
    with made_up.described(RECIPES["feddifrc/cifar10"]().guide, data) as guide:
        assert guide.width == 512
        shard, _ = guide.annotate(1, data.shard(1), None, {}, 0)
        assert shard["text"].shape == (8, 10, 512)
        assert shard["noise"].shape == (8, 512)
        assert shard["text"].float().std() > 0.1
        assert not torch.equal(shard["text"][0], shard["text"][1])
        inside = store.cache_folder()
        assert inside.exists()
    assert os.environ["FEDPRIOR_CACHE"] == before
    assert not inside.exists()


# overhead
def test_an_idle_round_is_a_whole_one_with_a_megabyte_and_no_training():
    result = next(overhead.idle(50))
    assert len(result.accepted) == 50
    assert not result.refused
    assert tree.num_bytes(result.server.weights) == 1_000_000
    assert tree.norm(result.server.weights["params"]) == 0
    assert overhead.milliseconds(rounds=2, cohort=5) > 0


def test_what_a_start_is_timed_on_works():
    exec(overhead.ROUND[-1], {})
    started = overhead.starts({"quick": ["-c", ""], "slow": ["-c", "import time; time.sleep(0.5)"]}, 1)
    assert started["slow"] > 0.5
    with pytest.raises(Exception, match="non-zero exit status"):
        overhead.starts({"bad": ["-c", "raise SystemExit(3)"]}, 1)


def test_overhead_prints_exactly_what_is_promised(monkeypatch):
    monkeypatch.setattr(overhead, "starts", lambda commands, repeats: {"round": 2.5, "help": 0.25} | {"n": repeats})
    result, text = call("overhead", "--repeats", 2)
    assert result.keys() == {"ms_per_client_round", "startup_seconds"}
    assert result["startup_seconds"] == 2.5
    assert result["ms_per_client_round"] > 0
    assert "0.25 s" in text
    assert "threads: 1" in text
    assert f"torch {torch.__version__.partition('+')[0]}" in text


# a round
def cct_flops(batch):
    """Of a step of CCT-2 by hand: 2 for a multiply-add; the backward pass takes each product twice, but the images
    need no gradient."""
    tokens = batch * 64
    once = 2 * batch * 32 * 32 * 64 * 3 * 9
    thrice = 2 * batch * 16 * 16 * 128 * 64 * 9  # the second convolution, after pooling
    thrice += 2 * 2 * tokens * 128 * (3 * 128 + 128 + 128 + 128)  # linear layers of two blocks
    thrice += 2 * 2 * 2 * batch * 2 * 64 * 64 * 64  # attention: two products, two heads of 64 channels
    thrice += 2 * tokens * 128 * 2 + 2 * batch * 128 * 10  # weights of the pool, the pool, the head
    return 2 * once + 3 * thrice


def test_flops_of_a_step_are_those_of_its_products():
    experiment = replace(RECIPES["gen-fedsd/cifar10"](), clients=1, cohort=1, batch_size=2)
    data = made_up.federation(1, 8)
    engine, _ = assemble.build_engine(experiment, assemble.build_net(experiment, data, CPU), data)
    assert round.flops_per_step(engine) == cct_flops(2)


def test_a_guides_products_are_in_the_step():
    with made_up.described(RECIPES["feddifrc/cifar10"]().guide, made_up.federation(2, 8)) as guide:
        engine = small(guide)
        guided = round.flops_per_step(engine)
        engine.worker = replace(engine.worker, guide=None)
        head = 3 * 2 * 4 * 64 * 512  # from the net's 64 features to descriptors, of four images
        similarities = 2 * 2 * 4 * 10 * 512  # descriptors need no gradient
        assert guided - round.flops_per_step(engine) == head + similarities


def test_a_clock_changes_nothing_and_counts_what_clients_spend():
    engine = small()
    clocked = Serial(round.clocked(engine.worker), engine.federation)
    down = {"weights": engine.worker.net.init(), "shared": {}}
    for number in range(2):
        plain = list(engine.train(down, [0, 1], number))
        watched = list(clocked.train(down, [0, 1], number))
        clocked.commit([0, 1], number)
        for a, b in zip(plain, watched, strict=True):
            assert (a.client, a.loss, a.weight, a.steps) == (b.client, b.loss, b.weight, b.steps)
            ours, theirs = flatten(a.tree), flatten(b.tree)
            assert all(torch.equal(x, theirs[name]) for name, x in ours.items())
    spent = round.by_part(clocked)
    assert spent == pytest.approx(clocked.worker.spent)  # over clients and rounds
    assert min(spent.values()) > 0


@pytest.mark.parametrize("engine", ["serial", "pool", "vectorised"])
def test_figures_of_a_round_follow_from_one_another(engine, monkeypatch):
    monkeypatch.setitem(RECIPES, "gen-fedsd/cifar10", lambda: replace(RECIPES["digits"](), batch_size=8, net="cnn"))
    monkeypatch.setattr(peak, "SIZES", (64,))
    words = ["--engine", engine, "--steps", 5, "--clients", 2, "--repeats", 1]
    result, text = call("round", *words, *(["--workers", 1] if engine == "pool" else []))
    taken = 2 * 5
    assert result["images_per_second"] == pytest.approx(taken * 8 / result["seconds"])
    assert result["ms_per_step"] == pytest.approx(1e3 * result["seconds"] / taken)
    assert result["gflops"] == pytest.approx(taken * result["flops_per_step"] / result["seconds"] / 1e9)
    by_cpu = taken * result["flops_per_step"] / result["cpu_seconds"] / 1e9
    assert result["fraction_of_peak"] == pytest.approx(by_cpu / result["peak_gflops"])
    shares = [result[f"share_{part}"] for part in (*round.PARTS, "outside")]
    assert sum(shares) == pytest.approx(1)
    assert min(shares[:3]) > 0
    assert (result["engine"], result["clients"], result["steps"], result["workers"]) == (engine, 2, 5, 1)
    assert {"versions", "hardware"} <= result.keys()
    assert "2 clients x 5 steps of 8 images" in text


def test_rounds_are_those_of_the_recipes(monkeypatch):
    seen = []

    def stopped(experiment, *given, **named):
        seen.append((experiment, named["guide"]))
        raise UserError("enough")

    monkeypatch.setattr(assemble, "build_engine", stopped)
    for recipe in ("gen-fedsd", "feddifrc"):
        with pytest.raises(UserError, match="enough"):
            round.measure(recipe, precision="bf16", steps=1, clients=1)
    (plain, none), (guided, guide) = seen
    assert none is None
    assert (plain.net, plain.batch_size, plain.local) == ("cct_2_3x2_32", 64, RECIPES["gen-fedsd/cifar10"]().local)
    assert (guided.net, guided.augment, guided.precision, guided.steps) == ("resnet10", True, "bf16", 1)
    assert guide.config == RECIPES["feddifrc/cifar10"]().guide


def test_workers_without_a_pool_are_refused():
    with pytest.raises(UsageError, match="--workers plays no part with --engine serial; add --engine pool"):
        call("round", "--workers", 2)


# evaluation and aggregation
def test_the_plain_loop_judges_as_evaluate_does():
    data, statistics = made_up.images(520), STATISTICS["cifar10"]
    module = nets.build("cnn", 10)
    found = evaluate(net := Net(module, *statistics), net.init(), data, 10)
    accuracy, loss = evaluation.plain(nets.build("cnn", 10), data, *statistics)
    assert accuracy == found.accuracy
    assert loss == pytest.approx(found.loss, rel=1e-5)


def test_evaluations_are_compared_in_images_a_second():
    result, text = call("evaluate", "--images", 300, "--net", "cnn", "--repeats", 1)
    assert result["ratio"] == pytest.approx(result["images_per_second"] / result["plain_images_per_second"])
    assert f"{result['ratio']:.2f} x as fast" in text
    with pytest.raises(UsageError, match="unknown net 'nothing'"):
        call("evaluate", "--net", "nothing")


def test_both_ways_of_aggregating_give_the_weighted_mean():
    sent = aggregation.updates("resnet10", 3)  # it has integer buffers
    flat = [flatten(update) for update, _ in sent]
    ours, theirs = flatten(tree.mean(sent)), aggregation.plain([(x, w) for x, (_, w) in zip(flat, sent, strict=True)])
    assert [weight for _, weight in sent] == [1, 2, 3]
    assert not torch.equal(flat[0]["params/head.weight"], flat[1]["params/head.weight"])
    for name, x in flat[0].items():
        assert ours[name].dtype == theirs[name].dtype == x.dtype
        if x.is_floating_point():
            mean = np.average([own[name].numpy() for own in flat], axis=0, weights=[1, 2, 3])
            for found in (ours, theirs):
                np.testing.assert_allclose(found[name].numpy(), mean, atol=1e-5)


def test_aggregations_are_compared_in_milliseconds():
    result, text = call("aggregate", "--clients", 3, "--net", "cnn", "--repeats", 1)
    assert result["ratio"] == pytest.approx(result["ms"] / result["plain_ms"])
    assert result["update_MB"] == pytest.approx(sum(p.numel() for p in nets.build("cnn", 10).parameters()) * 4 / 1e6)
    assert f"{result['ratio']:.2f} x as long" in text


# memory
def test_every_client_is_asked_once_and_leaves_its_control_variate_on_the_disk(monkeypatch):
    asked = []
    train = Worker.train
    monkeypatch.setattr(Worker, "train", lambda self, client, *a: asked.append(client) or train(self, client, *a))
    found = memory.ask_all(5, "scaffold", "cnn")
    each = sum(p.numel() for p in nets.build("cnn", 10).parameters()) * 4 / 1e6
    assert asked == [0, 1, 2, 3, 4]
    assert 5 * each < found["disk_MB"] < 5 * (each + 0.01)  # names and shapes stand in a file too
    assert 100 < found["before_MB"] <= found["peak_MB"]
    assert memory.ask_all(2, "fedavg", "cnn")["disk_MB"] == 0


def test_federations_have_processes_of_their_own_and_figures_are_medians(monkeypatch):
    asked = []

    def answered(what, function, clients, method, net):
        asked.append(clients)
        return {"peak_MB": clients + len(asked), "before_MB": 1.0, "disk_MB": 2.0}

    monkeypatch.setattr(memory, "in_child", answered)
    result, text = call("memory", "--clients", "10, 20", "--net", "cnn", "--repeats", 3)
    assert asked == [10, 20] * 3
    assert [run["peak_MB"] for run in result["runs"]] == [13, 24]
    assert result["memory_MB"] == 4000
    assert "24.0" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--clients", "ten"], "--clients wants numbers of at least 1 with commas, such as 100,1000, not 'ten'"),
        (["--clients", "0"], "at least 1"),
        (["--method", "scafold"], "did you mean scaffold"),
        (["--method", "centralised"], "has no clients that could remember"),
        (["--net", "cnm"], "unknown net 'cnm'; did you mean cnn"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_one_line(words, message):
    with pytest.raises(UsageError, match=message):
        call("memory", *words)


def test_a_prior_must_be_named():
    with pytest.raises(UsageError, match="no prior to measure; name a prior"):
        call("generate", "none")


def test_all_stand_in_one_group():
    names = {command.name for command in commands.app.registered_commands}
    assert names == {"generate", "overhead", "round", "evaluate", "aggregate", "memory"}
