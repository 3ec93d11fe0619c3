import math
from collections import Counter

import pytest
import torch
import toy
from hypothesis import given
from hypothesis import strategies as st

from fedprior.data.table import Shard
from fedprior.methods import Centralised, FedAvg
from fedprior.optim import SGD, AdamW


@given(n=st.integers(1, 200), batch=st.integers(1, 64), steps=st.integers(1, 30))
def test_batches_are_full_exactly_as_many_as_asked_and_even_over_rows(n, batch, steps):
    plan = toy.worker(FedAvg(), steps=steps, batch_size=batch).plan(n, round=3, client=1)
    assert plan.shape == (steps, batch)
    used = Counter(plan.flatten().tolist())
    seen = [used[i] for i in range(n)]
    assert set(used) <= set(range(n))
    assert max(seen) - min(seen) <= 1  # whole shuffled passes, then part of one


@given(n=st.integers(1, 500), epochs=st.floats(0.05, 5))
def test_epochs_cover_the_rows_with_as_few_batches_as_possible(n, epochs):
    steps = toy.worker(FedAvg(), epochs=epochs, batch_size=16).num_steps(n)
    assert steps * 16 >= epochs * n - 1e-6
    assert steps == 1 or (steps - 1) * 16 < epochs * n


def test_half_an_epoch_is_half_the_steps():
    assert toy.worker(FedAvg(), epochs=0.5, batch_size=10).num_steps(100) == 5
    assert toy.worker(FedAvg(), epochs=2.0, batch_size=10).num_steps(100) == 20


def test_batches_depend_on_seed_round_and_client_alone():
    w = toy.worker(FedAvg(), steps=4)
    assert torch.equal(w.plan(50, 2, 3), w.plan(50, 2, 3))
    assert not torch.equal(w.plan(50, 2, 3), w.plan(50, 3, 2))
    assert not torch.equal(w.plan(50, 2, 3), toy.worker(FedAvg(), steps=4, seed=1).plan(50, 2, 3))


@pytest.mark.parametrize("norm", ["gn", "bn"])
def test_training_equals_a_plain_torch_loop(norm):
    """An independent implementation: a module, torch.optim and backward, on the batches of the plan.

    AdamW runs with group norm only: a bias before batch norm has no gradient, and AdamW scales its rounding up.
    """
    data = toy.federation()
    ours, theirs = {
        "gn": (AdamW(lr=0.01), lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.01)),
        "bn": (SGD(lr=0.05, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
    }[norm]
    w = toy.worker(FedAvg(), norm, steps=6, optimizer=ours)
    shard = data.shard(2)
    start = w.net.init()
    upload, _ = w.train(2, shard, {"weights": start, "shared": {}}, {}, round=5)

    module = toy.net(norm).module.train()
    opt = theirs(module.parameters())
    for rows in w.plan(len(shard), 5, 2):
        x = (shard["image"][rows].float() / 255 - 0.5) / 0.5
        loss = torch.nn.functional.cross_entropy(module(x)[1], shard["label"][rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
    for name, p in module.named_parameters():
        torch.testing.assert_close(
            upload.tree["method"]["delta"][name] + start["params"][name], p.detach(), rtol=1e-4, atol=1e-5
        )
    for name, b in module.named_buffers():
        torch.testing.assert_close(upload.tree["buffers"][name], b, rtol=1e-4, atol=1e-5)
    if norm == "bn":
        assert upload.tree["buffers"]["body.1.num_batches_tracked"].dtype == torch.int64
        assert upload.tree["buffers"]["body.1.num_batches_tracked"].item() == 6
    assert upload.weight == len(shard)


def test_training_changes_neither_the_message_nor_the_global_generator():
    w, data = toy.worker(FedAvg(), steps=2), toy.federation()
    start = w.net.init()
    before, state = {k: v.clone() for k, v in start["params"].items()}, torch.get_rng_state()
    w.train(0, data.shard(0), {"weights": start, "shared": {}}, {}, round=0)
    assert all(torch.equal(before[k], start["params"][k]) for k in before)
    assert torch.equal(state, torch.get_rng_state())


def test_the_local_optimiser_starts_afresh_each_round_except_where_data_lie_in_one_place():
    data = toy.federation()
    for method, same in ((FedAvg(), True), (Centralised(), False)):
        w = toy.worker(method, steps=3, optimizer=AdamW(lr=0.01))
        down = {"weights": w.net.init(), "shared": {}}
        first, memory = w.train(0, data.shard(0), down, {}, round=0)
        again, _ = w.train(0, data.shard(0), down, memory, round=0)
        assert (toy.gap(first.tree, again.tree) == 0) == same


def test_weights_by_training_real_or_uniform():
    data = toy.federation()
    table = data.table | {"synthetic": torch.arange(len(data.table["label"])) % 3 == 0}
    shard = Shard(table, data.clients[1])
    sizes = {by: toy.worker(FedAvg(), weight_by=by).size(shard) for by in ("training", "real", "uniform")}
    real = sum(int(r) % 3 != 0 for r in data.clients[1])
    assert sizes == {"training": len(shard), "real": real, "uniform": 1}


def test_augmentation_changes_training_but_not_between_two_runs():
    runs = [toy.go(FedAvg(), rounds=1, augment=a)[0].server.weights for a in (False, True, True)]
    assert toy.gap(runs[1], runs[2]) == 0
    assert toy.gap(runs[0], runs[1]) > 0


def test_bf16_stays_close_to_fp32_and_returns_float32():
    data = toy.federation()
    out = {}
    for precision in ("fp32", "bf16"):
        net = toy.net("gn")
        net.precision = precision
        out[precision] = net(net.init(), data.test["image"][:8])
    assert out["bf16"].logits.dtype == torch.float32
    assert 0 < (out["fp32"].logits - out["bf16"].logits).abs().max() < 0.05


def test_the_reported_loss_is_the_mean_over_steps():
    w, data = toy.worker(FedAvg(), steps=1), toy.federation()
    upload, _ = w.train(0, data.shard(0), {"weights": w.net.init(), "shared": {}}, {}, round=0)
    rows = w.plan(30, 0, 0)[0]
    logits = toy.net().module.train()((data.shard(0)["image"][rows].float() / 255 - 0.5) / 0.5)[1]
    want = torch.nn.functional.cross_entropy(logits, data.shard(0)["label"][rows]).item()
    assert math.isclose(upload.loss, want, rel_tol=1e-4)


@pytest.mark.parametrize("n", [1, 3])
def test_a_client_smaller_than_a_batch_still_trains_on_full_batches(n):
    data = toy.federation(sizes=(n, 30))
    upload, _ = toy.worker(FedAvg(), steps=2).train(
        0, data.shard(0), {"weights": toy.net().init(), "shared": {}}, {}, 0
    )
    assert upload.steps == 2
    assert upload.weight == n
