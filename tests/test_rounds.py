import math
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
import toy
from test_memory import same

from fedprior import seeds, tree
from fedprior.aggregate import Mean, Median, TrimmedMean
from fedprior.engines.serial import Serial
from fedprior.federate import begin, choose, drop, federate
from fedprior.methods import FedAvg, FedNH, FedProto, Scaffold
from fedprior.traffic import Traffic


def play(
    method, rounds=1, cohort=6, engine=Serial, first=0, traffic=None, server=None, data=None, rules=None, **options
):
    """-> (results of all rounds, engine, traffic)"""
    w = toy.worker(method, **({"steps": 3} | options))
    e = engine(w, data or toy.federation()) if isinstance(engine, type) else engine
    traffic = traffic or Traffic()
    start = server or begin(w.net, method, w.seed, w.bn_stats)
    loop = federate(start, method, e, cohort=cohort, seed=w.seed, traffic=traffic, first=first, **(rules or {}))
    return list(islice(loop, rounds)), e, traffic


def size(part) -> int:
    return tree.num_bytes({"": part})


def uploads(method, clients, round=0, **options):
    """What each of these clients sends from the initial weights, having no memory."""
    w, data = toy.worker(method, **({"steps": 3} | options)), toy.federation()
    server = begin(w.net, method, w.seed, w.bn_stats)
    down = {"weights": server.weights, "shared": method.broadcast(server)}
    return [w.train(k, data.shard(k), down, {}, round)[0] for k in clients]


# drop-out


def test_who_drops_out_is_a_function_of_seed_round_and_client_and_not_of_the_others_asked():
    everyone = range(40)
    for r in range(5):
        gone = drop(everyone, 0.4, 3, r)
        assert gone == drop(everyone, 0.4, 3, r) == sorted(set(gone))
        assert [k for k in gone if k % 3 == 0] == drop(range(0, 40, 3), 0.4, 3, r)
        assert sorted(drop(everyone[::-1], 0.4, 3, r)) == gone
        assert set(drop(everyone, 0.2, 3, r)) <= set(gone)  # a higher rate only adds clients
    assert drop(everyone, 0.4, 3, 0) != drop(everyone, 0.4, 3, 1)
    assert drop(everyone, 0.4, 3, 0) != drop(everyone, 0.4, 4, 0)


def test_clients_drop_out_about_as_often_as_the_rate_says_and_independently():
    rounds, clients, rate = 300, 20, 0.3
    gone = np.zeros((rounds, clients))
    for r in range(rounds):
        gone[r, drop(range(clients), rate, 0, r)] = 1
    sd = math.sqrt(rate * (1 - rate))
    assert abs(gone.mean() - rate) < 4 * sd / math.sqrt(gone.size)
    assert (abs(gone.mean(0) - rate) < 4 * sd / math.sqrt(rounds)).all()  # no client is preferred
    assert (abs(gone.mean(1) - rate) < 4.5 * sd / math.sqrt(clients)).all()  # and no round
    together = (gone[:, 0] * gone[:, 1]).mean()
    assert abs(together - rate**2) < 4 * math.sqrt(rate**2 * (1 - rate**2) / rounds)


def test_at_rate_0_nobody_drops_out_and_at_rate_1_everybody():
    assert drop(range(50), 0.0, 0, 0) == []
    assert drop(range(50), 1.0, 0, 0) == list(range(50))


def test_the_cohort_is_drawn_as_if_nobody_dropped_out():
    kept, _, _ = play(FedAvg(), rounds=4, cohort=3)
    dropped, _, _ = play(FedAvg(), rounds=4, cohort=3, rules={"drop_rate": 0.5})
    assert [r.cohort for r in kept] == [r.cohort for r in dropped] == [choose(range(6), 3, 0, r) for r in range(4)]
    assert any(r.dropped for r in dropped)


def test_a_round_with_drop_out_is_the_mean_of_those_who_answered():
    for r in range(20):
        gone = drop(range(6), 0.4, 0, r)
        if 0 < len(gone) < 6:
            break
    (result,), engine, _ = play(FedAvg(), first=r, rules={"drop_rate": 0.4})
    assert result.dropped == gone
    assert result.accepted == [k for k in range(6) if k not in gone]
    assert result.refused == []
    assert not result.skipped
    sent = uploads(FedAvg(), result.accepted, round=r)
    mean = tree.mean((u.tree["method"]["delta"], u.weight) for u in sent)
    want = tree.add(engine.worker.net.init()["params"], mean)
    assert toy.gap(result.server.weights["params"], want) == 0
    assert result.train_loss == pytest.approx(np.mean([u.loss for u in sent]), rel=1e-12)


def test_a_client_that_drops_out_gets_the_message_and_neither_answers_nor_changes_what_it_remembers():
    rounds, method = 8, Scaffold()
    results, engine, traffic = play(method, rounds=rounds, cohort=4, rules={"drop_rate": 0.4})
    answered = Counter(k for r in results for k in r.accepted)
    gone = Counter(k for r in results for k in r.dropped)
    assert sum(gone.values()) > 0
    assert all(sorted(r.accepted + r.dropped) == r.cohort for r in results)
    params = size(engine.worker.net.init()["params"])
    assert traffic.down["params"] == rounds * 4 * params
    assert traffic.up["delta"] == sum(answered.values()) * params
    last = {k: max(r.number for r in results if k in r.accepted) for k in answered}
    assert engine.memory.index == last


def test_dropping_out_does_not_change_what_a_client_does_when_it_answers():
    for r in range(20):
        gone = drop(range(6), 0.4, 0, r)
        if 0 < len(gone) < 6:
            break
    (whole,), all_heard, _ = play(Scaffold(), first=r)
    (part,), some_heard, _ = play(Scaffold(), first=r, rules={"drop_rate": 0.4})
    assert whole.accepted != part.accepted == list(some_heard.memory)
    assert all(same(some_heard.memory.get(k), all_heard.memory.get(k)) for k in part.accepted)


def test_a_round_in_which_everybody_drops_out_is_skipped_and_changes_nothing():
    before = begin(toy.net(), Scaffold(), 0)
    results, engine, traffic = play(Scaffold(), rounds=3, rules={"drop_rate": 1.0})
    for result in results:
        assert result.skipped
        assert (result.accepted, result.refused, result.train_loss, result.partial) == ([], [], None, {})
        assert result.dropped == result.cohort == list(range(6))
        assert same(result.server._asdict(), before._asdict())
    assert list(engine.memory) == []
    assert traffic.up.total() == 0
    assert traffic.down["params"] == 3 * 6 * size(before.weights["params"])


# stragglers


def test_a_straggler_takes_between_one_and_all_but_one_of_its_steps_evenly_drawn():
    w = toy.worker(FedAvg(), steps=5, straggler_rate=1.0)
    seen = Counter(w.work(30, r, k) for r in range(100) for k in range(10))
    assert set(seen) == {1, 2, 3, 4}
    sd = math.sqrt(1000 * 0.25 * 0.75)
    assert all(abs(n - 250) < 4 * sd for n in seen.values())


def test_clients_straggle_about_as_often_as_the_rate_says():
    w = toy.worker(FedAvg(), steps=5, straggler_rate=0.3)
    late = [w.work(30, r, k) < 5 for r in range(100) for k in range(10)]
    assert abs(np.mean(late) - 0.3) < 4 * math.sqrt(0.3 * 0.7 / 1000)
    assert not any(toy.worker(FedAvg(), steps=5).work(30, r, k) < 5 for r in range(20) for k in range(10))


def test_who_straggles_is_a_function_of_seed_round_and_client():
    def work(**options):
        w = toy.worker(FedAvg(), steps=9, **({"straggler_rate": 0.5} | options))
        return [[w.work(30, r, k) for k in range(10)] for r in range(4)]

    assert work() == work()
    assert work()[0] != work()[1]
    assert work() != work(seed=1)
    few, many = work(straggler_rate=0.2), work(straggler_rate=0.8)
    assert all(m < 9 for a, b in zip(few, many, strict=True) for f, m in zip(a, b, strict=True) if f < 9)


def test_a_client_of_one_step_is_never_a_straggler():
    w = toy.worker(FedAvg(), steps=1, straggler_rate=1.0)
    assert all(w.work(30, r, 0) == 1 for r in range(20))
    (result,), _, _ = play(FedAvg(), steps=1, straggler_rate=1.0)
    assert result.partial == {}


def test_a_straggler_does_the_first_steps_of_its_whole_round_and_is_recorded():
    results, engine, _ = play(FedAvg(), rounds=3, steps=4, straggler_rate=0.5)
    w = engine.worker
    for result in results:
        want = {k: w.work(len(engine.federation.clients[k]), result.number, k) for k in result.cohort}
        assert result.partial == {k: steps for k, steps in want.items() if steps < 4}
        assert all(1 <= steps <= 3 for steps in result.partial.values())
    assert any(r.partial for r in results)
    assert any(len(r.partial) < 6 for r in results)
    client, steps = next(iter(results[0].partial.items()))
    whole = toy.worker(FedAvg(), steps=4).plan(30, 0, client)
    assert torch.equal(w.plan(30, 0, client), whole[:steps])
    late = uploads(FedAvg(), [client], steps=4, straggler_rate=0.5)[0]
    short = uploads(FedAvg(), [client], steps=steps)[0]  # as if the work had been so much from the start
    assert toy.gap(late.tree, short.tree) == 0
    assert late.weight == short.weight == len(engine.federation.clients[client])  # rows count, not steps
    assert (late.steps, late.planned, short.planned) == (steps, 4, steps)


def test_a_straggler_whose_upload_is_refused_is_not_listed_as_partial():
    class Spoiled(Serial):
        def train(self, down, cohort, round):
            for upload in super().train(down, cohort, round):
                yield upload._replace(weight=-1.0) if upload.steps < upload.planned else upload

    (result,), _, _ = play(FedAvg(), steps=4, straggler_rate=0.5, engine=Spoiled)
    assert result.partial == {}
    assert result.refused
    assert result.accepted


# rounds with too few good uploads


class LaterBad(Serial):
    """From round 1 on only clients 0 and 1 send something good."""

    def train(self, down, cohort, round):
        for upload in super().train(down, cohort, round):
            yield upload._replace(weight=-1.0) if round >= 1 and upload.client > 1 else upload


def test_an_abandoned_round_leaves_server_and_clients_as_they_were_although_it_was_sent():
    once, heard, counted = play(Scaffold(), rounds=1, engine=LaterBad)
    results, engine, traffic = play(Scaffold(), rounds=3, engine=LaterBad, rules={"min_cohort": 3})
    assert [r.skipped for r in results] == [False, True, True]
    for result in results[1:]:
        assert result.accepted == [0, 1]
        assert [r.client for r in result.refused] == [2, 3, 4, 5]
        assert same(result.server._asdict(), once[0].server._asdict())
        assert math.isfinite(result.train_loss)
    assert engine.memory.index == heard.memory.index == dict.fromkeys(range(6), 0)
    assert all(same(engine.memory.get(k), heard.memory.get(k)) for k in range(6))
    assert engine.memory.staged == set()  # nothing of the abandoned rounds waits to become current
    assert traffic.up == Counter({k: 3 * n for k, n in counted.up.items()})
    assert traffic.down == Counter({k: 3 * n for k, n in counted.down.items()})
    assert traffic.up["control"] > 0


def test_exactly_as_many_as_min_cohort_are_enough():
    for least, skipped in ((1, False), (2, False), (3, True), (6, True)):
        (result,), engine, _ = play(Scaffold(), first=1, engine=LaterBad, rules={"min_cohort": least})
        assert result.skipped == skipped
        assert list(engine.memory) == ([] if skipped else [0, 1])


def test_a_round_after_an_abandoned_one_goes_on_as_if_that_had_not_been():
    class MiddleBad(Serial):
        def train(self, down, cohort, round):
            for upload in super().train(down, cohort, round):
                yield upload._replace(weight=-1.0) if round == 1 else upload

    results, engine, _ = play(Scaffold(), rounds=3, engine=MiddleBad)
    first, plain, _ = play(Scaffold(), rounds=1)
    third, plain, _ = play(Scaffold(), rounds=1, first=2, engine=plain, server=first[0].server)
    assert same(results[2].server._asdict(), third[0].server._asdict())
    assert all(same(engine.memory.get(k), plain.memory.get(k)) for k in range(6))


def test_who_drops_out_counts_against_min_cohort():
    results, _, _ = play(FedAvg(), rounds=6, rules={"drop_rate": 0.4, "min_cohort": 4})
    assert [r.skipped for r in results] == [6 - len(r.dropped) < 4 for r in results]
    assert {r.skipped for r in results} == {True, False}


# limits on updates


def test_each_update_is_clipped_before_the_mean_and_buffers_are_averaged_unclipped():
    most = 0.05
    (result,), engine, _ = play(FedAvg(), rules={"clip_update_norm": most})
    sent = uploads(FedAvg(), range(6))
    norms = [tree.norm(u.tree["method"]["delta"]) for u in sent]
    assert min(norms) > most
    clipped = [tree.scale(u.tree["method"]["delta"], most / n) for u, n in zip(sent, norms, strict=True)]
    mean = tree.mean((d, u.weight) for d, u in zip(clipped, sent, strict=True))
    start = engine.worker.net.init()["params"]
    assert toy.gap(result.server.weights["params"], tree.add(start, mean)) < 1e-7
    assert tree.norm(tree.sub(result.server.weights["params"], start)) <= most * (1 + 1e-5)
    (free,), _, _ = play(FedAvg())
    assert toy.gap(result.server.weights["buffers"], free.server.weights["buffers"]) == 0
    assert result.accepted == list(range(6))


def test_a_generous_clip_changes_no_bit():
    (free,), _, _ = play(Scaffold())
    (clipped,), _, _ = play(Scaffold(), rules={"clip_update_norm": 1e3})
    assert same(free.server._asdict(), clipped.server._asdict())


def test_clipping_leaves_scaffolds_control_variates_alone():
    (free,), _, _ = play(Scaffold())
    (clipped,), _, _ = play(Scaffold(), rules={"clip_update_norm": 0.01})
    assert same(free.server.state, clipped.server.state)
    assert toy.gap(free.server.weights["params"], clipped.server.weights["params"]) > 0


def changed(change):
    """An engine whose client 2 sends what `change` makes of its upload's tree."""

    class Changed(Serial):
        def train(self, down, cohort, round):
            for upload in super().train(down, cohort, round):
                yield upload._replace(tree=change(upload.tree)) if upload.client == 2 else upload

    return Changed


def test_max_update_norm_looks_at_the_update_and_not_at_buffers():
    big = changed(lambda t: t | {"buffers": {k: x + 10**6 for k, x in t["buffers"].items()}})
    (result,), _, _ = play(FedAvg(), engine=big, rules={"max_update_norm": 100.0})
    assert result.refused == []
    norms = {k: tree.norm(u.tree["method"]["delta"]) for k, u in enumerate(uploads(FedAvg(), range(6)))}
    limit = sorted(norms.values())[3]
    (result,), _, _ = play(FedAvg(), rules={"max_update_norm": limit})
    assert result.accepted == [k for k, n in norms.items() if n <= limit]  # the limit itself is allowed
    assert len(result.accepted) == 4
    assert all("the norm of its update" in r.reason for r in result.refused)


def test_max_update_norm_does_not_count_what_a_method_sends_beside_its_update():
    """FedNH's prototypes are multiplied by row counts, SCAFFOLD's control variates divided by rates."""
    for method in (FedNH(), Scaffold()):
        sent = uploads(method, range(6))
        limit = max(tree.norm(u.tree["method"]["delta"]) for u in sent) * 1.001
        assert max(tree.norm(u.tree["method"]) for u in sent) > limit
        (result,), _, _ = play(method, rules={"max_update_norm": limit})
        assert result.refused == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_in_buffers_or_control_variates_is_refused_with_its_name(bad):
    def poison(group, name):
        def change(t):
            t = {"method": {k: dict(v) for k, v in t["method"].items()}, "buffers": dict(t["buffers"])}
            part = t["buffers"] if group == "buffers" else t["method"][group]
            part[name] = part[name].clone()
            part[name].view(-1)[-1] = bad
            return t

        return changed(change)

    cases = (("buffers", "body.1.running_var"), ("control", "head.weight"), ("delta", "head.bias"))
    for group, name in cases:
        (result,), engine, _ = play(Scaffold(), engine=poison(group, name))
        assert [r.client for r in result.refused] == [2]
        assert f"{group}/{name} has numbers that are not finite" in result.refused[0].reason
        assert all(torch.isfinite(x).all() for x in tree.flatten(result.server._asdict()).values())
        assert list(engine.memory) == [0, 1, 3, 4, 5]


# aggregation rules


@pytest.mark.parametrize("rule", [Median(), TrimmedMean(trim=0.2)])
def test_under_a_robust_rule_one_wild_client_moves_nothing_far_and_counts_as_accepted(rule):
    wild = changed(lambda t: t | {"method": {"delta": tree.scale(t["method"]["delta"], 1e6)}})
    (result,), engine, _ = play(FedAvg(), engine=wild, rules={"aggregate": rule})
    start = engine.worker.net.init()["params"]
    honest = [u.tree["method"]["delta"] for k, u in enumerate(uploads(FedAvg(), range(6))) if k != 2]
    assert result.accepted == list(range(6))
    for name, p in result.server.weights["params"].items():
        stack = torch.stack([d[name] for d in honest])
        moved = p - start[name]
        assert (moved <= stack.amax(0) + 1e-7).all()  # one float32 rounding of weights below 1
        assert (moved >= stack.amin(0) - 1e-7).all()
    (mean,), _, _ = play(FedAvg(), engine=wild, rules={"aggregate": Mean()})
    assert toy.gap(mean.server.weights["params"], start) > 1e3


def test_the_rule_applies_to_params_and_buffers_and_the_mean_is_what_it_is_without_one():
    (plain,), _, _ = play(FedAvg())
    (named,), _, _ = play(FedAvg(), rules={"aggregate": Mean()})
    assert same(plain.server._asdict(), named.server._asdict())
    (result,), engine, _ = play(FedAvg(), rules={"aggregate": Median()})
    start = engine.worker.net.init()["params"]
    sent = [u.tree for u in uploads(FedAvg(), range(6))]
    for name, b in result.server.weights["buffers"].items():
        if b.is_floating_point():
            want = np.median([t["buffers"][name].numpy().astype(np.float64) for t in sent], axis=0)
            np.testing.assert_allclose(b.numpy(), want, rtol=3e-7)
    for name, p in result.server.weights["params"].items():
        want = np.median([t["method"]["delta"][name].numpy().astype(np.float64) for t in sent], axis=0)
        np.testing.assert_allclose(p.numpy(), start[name].numpy() + want, rtol=1e-6, atol=1e-7)


# traffic


def test_scaffold_sends_twice_the_params_both_ways_and_buffers_once():
    results, engine, traffic = play(Scaffold(), rounds=3, cohort=4)
    first = engine.worker.net.init()
    params, buffers = size(first["params"]), size(first["buffers"])
    assert params == 4 * ((8 * 27 + 8) + (8 + 8) + (4 * 8 + 4))
    assert buffers == 4 * (8 + 8) + 8  # mean, variance and an int64 counter
    assert traffic.down == {"params": 12 * params, "buffers": 12 * buffers, "control": 12 * params}
    assert traffic.up == {"delta": 12 * params, "buffers": 12 * buffers, "control": 12 * params}
    assert sum(len(r.accepted) for r in results) == 12


def test_fedavg_sends_the_model_and_nothing_else():
    _, engine, traffic = play(FedAvg(), rounds=2, cohort=3)
    first = engine.worker.net.init()
    params, buffers = size(first["params"]), size(first["buffers"])
    assert traffic.down == {"params": 6 * params, "buffers": 6 * buffers}
    assert traffic.up == {"delta": 6 * params, "buffers": 6 * buffers}


def test_fedproto_sends_prototypes_alone_and_a_flag_more_down_and_a_count_more_up():
    _, _, traffic = play(FedProto(share="prototypes"), rounds=2, cohort=3)
    prototypes = 4 * 4 * 8  # classes x width, float32
    assert +traffic.down == {"prototypes": 6 * prototypes, "known": 6 * 4}
    assert +traffic.up == {"prototypes": 6 * prototypes, "owners": 6 * 16}
    assert traffic.down["params"] == traffic.down["buffers"] == traffic.up["delta"] == traffic.up["buffers"] == 0


def test_fednh_sends_its_head_down_and_prototypes_with_counts_up_in_its_place():
    _, engine, traffic = play(FedNH(), rounds=2, cohort=3)
    first = engine.worker.net.init()
    params, buffers, head = size(first["params"]), size(first["buffers"]), size(first["params"]["head.weight"])
    assert head == 4 * 4 * 8
    assert traffic.down == {"params": 6 * params, "buffers": 6 * buffers}
    up = {"delta": 6 * (params - head), "prototypes": 6 * head, "rows": 6 * 16, "buffers": 6 * buffers}
    assert traffic.up == up
    assert traffic.up.total() - traffic.down.total() == 6 * 16


def test_statistics_that_stay_with_the_clients_are_not_counted_either_way():
    _, _, traffic = play(Scaffold(), rounds=1, bn_stats="local")
    assert traffic.down["buffers"] == traffic.up["buffers"] == 0
    assert traffic.down["params"] == traffic.down["control"] > 0


def test_a_loop_that_begins_at_a_later_round_does_that_rounds_work():
    results, _, traffic = play(FedAvg(), rounds=4, cohort=3, rules={"drop_rate": 0.2}, straggler_rate=0.3)
    head, _, counted = play(FedAvg(), rounds=2, cohort=3, rules={"drop_rate": 0.2}, straggler_rate=0.3)
    tail, _, counted = play(
        FedAvg(),
        rounds=2,
        cohort=3,
        rules={"drop_rate": 0.2},
        straggler_rate=0.3,
        first=2,
        server=head[-1].server,
        traffic=counted,
    )
    for a, b in zip(results, head + tail, strict=True):
        assert same(a.server._asdict(), b.server._asdict())
        assert a._replace(server=None) == b._replace(server=None)
    assert traffic == counted
    assert [r.number for r in tail] == [2, 3]


def test_the_streams_of_cohort_drop_out_and_straggling_are_apart():
    """Were two of them one stream, the same clients would drop out that straggle."""
    draws = {purpose: seeds.stream(0, purpose, 2, 3).random() for purpose in ("drop", "straggler", "batches", "cohort")}
    assert len(set(draws.values())) == 4
    w = toy.worker(FedAvg(), steps=5, straggler_rate=0.5)
    late = {(r, k) for r in range(20) for k in range(20) if w.work(30, r, k) < 5}
    gone = {(r, k) for r in range(20) for k in drop(range(20), 0.5, 0, r)}
    both = len(late & gone) / 400
    assert abs(both - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 400)
