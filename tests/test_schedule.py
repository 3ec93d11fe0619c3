import math
import random
from itertools import pairwise

import pytest
import torch
import toy
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedprior.errors import UsageError
from fedprior.methods import FedAvg
from fedprior.optim import SGD, AdamW
from fedprior.schedule import SCHEDULES, Constant, Cosine, Exponential


def test_constant_is_one_everywhere():
    assert {Constant().factor(r, s, 7) for r in range(5) for s in range(7)} == {1.0}


def test_exponential_is_the_decay_to_the_power_of_the_round_and_the_same_in_all_its_steps():
    for r in (0, 1, 2, 10, 100):
        product = math.prod([0.99] * r)
        for s in range(5):
            assert Exponential().factor(r, s, 5) == pytest.approx(product, rel=1e-12)
    assert Exponential(decay=1.0).factor(50, 0, 1) == 1.0
    assert Exponential(decay=0.5).factor(3, 1, 2) == 0.125


def test_cosine_is_half_a_cosine_over_the_time_in_rounds():
    for r, s, steps in [(0, 0, 4), (0, 3, 4), (2, 1, 4), (7, 0, 1), (9, 4, 5)]:
        want = 0.5 * (1 + math.cos(math.pi * (r + s / steps) / 10))
        assert Cosine(over=10).factor(r, s, steps) == pytest.approx(want, abs=1e-12)
        assert Cosine(over=10, floor=0.2).factor(r, s, steps) == pytest.approx(0.2 + 0.8 * want, abs=1e-12)


def test_cosine_is_one_at_first_half_in_the_middle_and_at_the_floor_from_its_end_on():
    for floor in (0.0, 0.1):
        cosine = Cosine(over=10, floor=floor)
        assert cosine.factor(0, 0, 4) == 1.0
        assert cosine.factor(5, 0, 4) == pytest.approx((1 + floor) / 2, abs=1e-12)
        assert all(cosine.factor(r, s, 4) == floor for r in (10, 11, 500) for s in range(4))
    assert Cosine(over=10, floor=1.0).factor(7, 2, 4) == 1.0


def test_warm_up_rises_by_equal_amounts_from_the_first_step_to_one_and_then_the_cosine_begins():
    cosine = Cosine(over=12, warmup=2.0)
    got = [cosine.factor(r, s, 5) for r in range(12) for s in range(5)]
    assert got[:10] == pytest.approx([(i + 1) / 10 for i in range(10)], abs=1e-12)
    assert got[10] == 1.0
    want = [0.5 * (1 + math.cos(math.pi * i / 50)) for i in range(50)]  # 10 rounds of 5 steps
    assert got[10:] == pytest.approx(want, abs=1e-12)


def test_a_warm_up_of_part_of_a_round_ends_within_it():
    got = [Cosine(over=10, warmup=0.5).factor(0, s, 4) for s in range(4)]
    assert got[:2] == [0.5, 1.0]
    assert got[2] == 1.0  # at time 0.5, where the cosine begins
    assert got[3] == pytest.approx(0.5 * (1 + math.cos(math.pi * 0.25 / 9.5)), abs=1e-12)


cosines = st.builds(
    lambda over, share, floor: Cosine(over=over, warmup=share * over, floor=floor),
    st.integers(1, 40),
    st.one_of(st.just(0.0), st.floats(0.01, 0.95)),
    st.floats(0, 1),
)


@settings(deadline=None)
@given(cosine=cosines, steps=st.integers(1, 12))
@example(cosine=Cosine(over=10, warmup=10 / 3), steps=3)
def test_cosine_never_leaves_0_to_1_starts_above_zero_and_makes_no_jump(cosine, steps):
    """Between two steps it moves at most by the steepest slope of either part: 1 / warmup, and pi/2 over the rest."""
    line = [cosine.factor(r, s, steps) for r in range(cosine.over + 2) for s in range(steps)]
    assert all(0 <= x <= 1 + 1e-12 for x in line)  # 10 / 3 rounds of 3 steps end one rounding above 1
    assert line[0] > 0
    rise = 1 / cosine.warmup / steps if cosine.warmup else 0.0
    fall = math.pi / 2 / (cosine.over - cosine.warmup) / steps
    for before, after in pairwise(line):
        assert -fall - 1e-9 <= after - before <= rise + 1e-9


@settings(deadline=None)
@given(cosine=cosines, steps=st.integers(1, 12))
def test_cosine_rises_until_the_warm_up_ends_and_only_falls_after_it(cosine, steps):
    times = [(r + s / steps, cosine.factor(r, s, steps)) for r in range(cosine.over + 2) for s in range(steps)]
    rising = [x for t, x in times if t + 1 / steps <= cosine.warmup]
    falling = [x for t, x in times if t >= cosine.warmup]
    assert all(a < b + 1e-12 for a, b in pairwise(rising))  # 1e-12 for roundings alone
    assert all(a > b - 1e-12 for a, b in pairwise(falling))
    assert falling[-1] == pytest.approx(cosine.floor, abs=1e-12)


@pytest.mark.parametrize("schedule", [Exponential(decay=0.9), Cosine(over=6), Cosine(over=6, warmup=1.5, floor=0.1)])
def test_the_factor_is_the_same_whatever_was_asked_before(schedule):
    asks = [(r, s, steps) for r in range(8) for steps in (1, 3, 4) for s in range(steps)]
    first = {ask: schedule.factor(*ask) for ask in asks}
    shuffled = asks * 2
    random.Random(0).shuffle(shuffled)
    assert all(schedule.factor(*ask) == first[ask] for ask in shuffled)
    fresh = type(schedule)(**vars(schedule))
    assert all(fresh.factor(*ask) == first[ask] for ask in asks[::-1])


def test_clients_of_unlike_many_steps_have_the_same_rate_at_the_same_share_of_a_round():
    cosine = Cosine(over=8, warmup=2.0, floor=0.1)
    for r in range(9):
        for s in range(3):
            if r < 2:  # a step of the long client ends where that of the short one does
                assert cosine.factor(r, s, 3) == pytest.approx(cosine.factor(r, 4 * s + 3, 12), abs=1e-12)
            else:
                assert cosine.factor(r, s, 3) == pytest.approx(cosine.factor(r, 4 * s, 12), abs=1e-12)


@pytest.mark.parametrize(
    ("schedule", "bad", "key"),
    [
        (Exponential, {"decay": 0.0}, "decay"),
        (Exponential, {"decay": 1.1}, "decay"),
        (Exponential, {"decay": float("nan")}, "decay"),
        (Cosine, {"over": 0}, "over"),
        (Cosine, {"over": 10, "warmup": 10.0}, "warmup"),
        (Cosine, {"warmup": -1.0}, "warmup"),
        (Cosine, {"warmup": float("nan")}, "warmup"),
        (Cosine, {"floor": 1.1}, "floor"),
        (Cosine, {"floor": -0.1}, "floor"),
        (Cosine, {"floor": float("nan")}, "floor"),
    ],
)
def test_impossible_values_are_refused(schedule, bad, key):
    with pytest.raises(UsageError, match=rf"schedule\.{key}"):
        schedule(**bad)


def test_the_schedules_by_name():
    assert {k: s().factor(100, 0, 1) for k, s in SCHEDULES.items()} == {
        "constant": 1.0,
        "exponential": 0.99**100,
        "cosine": 0.0,
    }


TWINS = {
    "sgd": (SGD(lr=0.1, momentum=0.9, weight_decay=0.01), torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
    "adamw": (AdamW(lr=0.01, weight_decay=0.1), torch.optim.AdamW, {"weight_decay": 0.1}),
}


def by_hand(name: str, schedule, data, w, rounds, persist: bool) -> list[dict]:
    """Client 2's params after each of the rounds: a module and torch's optimiser, whose rate is set every step."""
    ours, theirs, options = TWINS[name]
    module = toy.net("gn").module.train()
    opt, out, shard = theirs(module.parameters(), lr=1.0, **options), [], data.shard(2)
    for r in rounds:
        if not persist:
            opt = theirs(module.parameters(), lr=1.0, **options)
        for step, rows in enumerate(w.plan(len(shard), r, 2)):
            for group in opt.param_groups:
                group["lr"] = ours.lr * schedule.factor(r, step, w.num_steps(len(shard)))
            x = (shard["image"][rows].float() / 255 - 0.5) / 0.5
            loss = torch.nn.functional.cross_entropy(module(x)[1], shard["label"][rows])
            opt.zero_grad()
            loss.backward()
            opt.step()
        out.append({k: p.detach().clone() for k, p in module.named_parameters()})
    return out


def by_worker(data, w, rounds) -> list[dict]:
    """The same from a Worker whose client goes on from its own weights."""
    weights, memory, out = w.net.init(), {}, []
    for r in rounds:
        upload, memory = w.train(2, data.shard(2), {"weights": weights, "shared": {}}, memory, r)
        delta = upload.tree["method"]["delta"]
        weights = weights | {"params": {k: p + delta[k] for k, p in weights["params"].items()}}
        out.append(weights["params"])
    return out


@pytest.mark.parametrize("name", TWINS)
@pytest.mark.parametrize("persist", [False, True])
@pytest.mark.parametrize("schedule", [Cosine(over=4, warmup=1.5, floor=0.1), Exponential(decay=0.5)])
def test_training_under_a_schedule_equals_torchs_loop_with_the_rate_set_by_hand_every_step(name, persist, schedule):
    """Over all rounds of the schedule: neither the rate nor (unless told so) the optimiser's state accumulates."""
    data, rounds = toy.federation(), range(4)
    w = toy.worker(FedAvg(), "gn", steps=4, optimizer=TWINS[name][0], schedule=schedule, persist_optimizer=persist)
    ours, theirs = by_worker(data, w, rounds), by_hand(name, schedule, data, w, rounds, persist)
    for a, b in zip(ours, theirs, strict=True):
        assert toy.gap(a, b) < 2e-5  # float32 through up to 16 steps; weights move by some 0.1
    unscheduled = toy.worker(FedAvg(), "gn", steps=4, optimizer=TWINS[name][0], persist_optimizer=persist)
    assert toy.gap(by_worker(data, unscheduled, rounds)[-1], theirs[-1]) > 1e-3  # the schedule makes a difference


@pytest.mark.parametrize("name", TWINS)
def test_a_round_is_the_same_after_others_as_on_its_own(name):
    """A client that is asked for the first time in round 3, and one that trained in rounds 0 to 2 before."""
    data = toy.federation()
    options = {"steps": 3, "optimizer": TWINS[name][0], "schedule": Cosine(over=5, warmup=1.0)}
    down = {"weights": toy.worker(FedAvg()).net.init(), "shared": {}}
    used, memory = toy.worker(FedAvg(), **options), {}
    for r in range(3):
        _, memory = used.train(2, data.shard(2), down, memory, r)
    late, _ = used.train(2, data.shard(2), down, memory, 3)
    alone, _ = toy.worker(FedAvg(), **options).train(2, data.shard(2), down, {}, 3)
    assert toy.gap(late.tree, alone.tree) == 0
    assert late.loss == alone.loss


def test_each_client_of_a_federation_has_the_rates_of_its_own_number_of_steps():
    w = toy.worker(FedAvg(), epochs=1.0, batch_size=8, schedule=Cosine(over=4))
    for n, steps in ((30, 4), (10, 2), (40, 5)):
        assert w.num_steps(n) == steps
        want = [0.5 * (1 + math.cos(math.pi * (1 + s / steps) / 4)) for s in range(steps)]
        assert w.scales(n, 1, steps) == pytest.approx(want, abs=1e-12)


def test_a_straggler_has_the_first_rates_of_a_whole_round():
    w = toy.worker(FedAvg(), steps=6, schedule=Cosine(over=2), straggler_rate=1.0)
    whole = toy.worker(FedAvg(), steps=6, schedule=Cosine(over=2))
    done = w.work(30, 0, 2)
    assert 1 <= done < 6
    assert w.scales(30, 0, done) == whole.scales(30, 0, 6)[:done]


def test_with_a_rate_of_zero_from_the_end_on_nothing_moves():
    data, w = toy.federation(), toy.worker(FedAvg(), steps=2, schedule=Cosine(over=3))
    upload, _ = w.train(0, data.shard(0), {"weights": w.net.init(), "shared": {}}, {}, 3)
    assert not any(x.any() for x in upload.tree["method"]["delta"].values())
