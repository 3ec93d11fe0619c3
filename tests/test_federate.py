import numpy as np
import pytest
import torch
import toy
from toy import gap, go

from fedprior import seeds, tree
from fedprior.engines.serial import Serial
from fedprior.federate import choose
from fedprior.method import Method
from fedprior.methods import METHODS, Centralised, FedAvg, FedNH, FedProx, Local
from fedprior.optim import SGD
from fedprior.uploads import Upload


def test_one_round_of_fedavg_is_numpys_weighted_mean_of_the_clients_models():
    data = toy.federation()
    w = toy.worker(FedAvg())
    start = w.net.init()
    cohort = choose(range(6), 4, 0, 0)
    models, sizes = [], []
    for k in cohort:
        upload, _ = w.train(k, data.shard(k), {"weights": start, "shared": {}}, {}, 0)
        models.append(tree.add(start["params"], upload.tree["method"]["delta"]))
        sizes.append(len(data.clients[k]))
    server = go(FedAvg(), rounds=1)[0].server
    for name, got in server.weights["params"].items():
        want = np.average([m[name].double().numpy() for m in models], axis=0, weights=sizes)
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-5, atol=1e-7)


def test_batch_norm_statistics_are_the_weighted_mean_and_counters_keep_their_type():
    data, w = toy.federation(), toy.worker(FedAvg())
    cohort = choose(range(6), 4, 0, 0)
    uploads = [w.train(k, data.shard(k), {"weights": w.net.init(), "shared": {}}, {}, 0)[0] for k in cohort]
    got = go(FedAvg(), rounds=1)[0].server.weights["buffers"]
    want = np.average(
        [u.tree["buffers"]["body.1.running_mean"].numpy() for u in uploads],
        axis=0,
        weights=[u.weight for u in uploads],
    )
    np.testing.assert_allclose(got["body.1.running_mean"].numpy(), want, rtol=1e-5, atol=1e-7)
    assert got["body.1.num_batches_tracked"].dtype == torch.int64
    assert (got["body.1.running_var"] >= 0).all()


def test_local_statistics_stay_with_the_client_and_are_not_counted_as_traffic():
    averaged, _, counted = go(FedAvg(), rounds=2)
    result, engine, traffic = go(FedAvg(), rounds=2, bn_stats="local")
    assert result.server.weights["buffers"] == {}
    assert traffic.up["buffers"] == 0
    assert counted.up["buffers"] > 0
    heard = sorted(engine.memory)
    start = [engine.start(k, result.server.weights)["buffers"] for k in heard]
    assert gap(start[0], start[1]) > 0
    assert start[0].keys() == averaged.server.weights["buffers"].keys()


def test_fedprox_with_mu_0_is_fedavg_bit_for_bit():
    assert gap(go(FedProx(mu=0.0))[0].server.weights, go(FedAvg())[0].server.weights) == 0


def test_fedprox_adds_mu_times_the_distance_to_the_gradient():
    """Against finite differences of mu/2 ||w - x||^2, after the model has moved (AT-A05)."""
    method = FedProx(mu=0.3)
    x = {"a": torch.tensor([1.0, -2.0], dtype=torch.float64)}
    w = {"a": torch.tensor([1.5, 1.0], dtype=torch.float64)}
    context = toy.worker(method).open({"weights": {"params": x, "buffers": {}}, "shared": {}}, {})
    got = method.gradient({"a": torch.zeros(2, dtype=torch.float64)}, w, context)["a"]
    penalty = lambda v: 0.15 * (v - x["a"]).square().sum()
    for i in range(2):
        e = torch.zeros(2, dtype=torch.float64)
        e[i] = 1e-5
        assert got[i].item() == pytest.approx(((penalty(w["a"] + e) - penalty(w["a"] - e)) / 2e-5).item())


def test_fedprox_ends_nearer_to_the_global_model():
    moved = {}
    for mu in (0.0, 1.0, 5.0):
        w, data = toy.worker(FedProx(mu=mu), steps=20), toy.federation()
        upload, _ = w.train(0, data.shard(0), {"weights": w.net.init(), "shared": {}}, {}, 0)
        moved[mu] = tree.norm(upload.tree["method"]["delta"])
    assert moved[0.0] > moved[1.0] > moved[5.0] > 0


@pytest.mark.parametrize("method", [m for m in METHODS.values() if m is not FedNH])  # its head moves on its own
def test_clients_that_do_not_move_leave_the_server_as_it_is(method):
    cohort = 1 if method.pooled else 4
    result, engine, _ = go(method(), cohort=cohort, optimizer=SGD(lr=0.0))
    known = result.server.weights["params"]
    start = engine.worker.net.init()["params"]
    assert gap(known, {k: start[k] for k in known}) == 0


@pytest.mark.parametrize("method", METHODS.values())
@pytest.mark.parametrize("norm", ["bn", "gn"])
def test_every_method_trains_with_and_without_batch_norm_and_repeats_to_the_bit(method, norm):
    cohort = 1 if method.pooled else 4
    runs = [go(method(), rounds=2, cohort=cohort, norm=norm)[0] for _ in range(2)]
    assert gap(runs[0].server.weights, runs[1].server.weights) == 0
    assert runs[0].train_loss == runs[1].train_loss
    other = go(method(), rounds=2, cohort=cohort, norm=norm, seed=1)[0]
    assert other.train_loss != runs[0].train_loss


def test_the_order_in_which_clients_are_asked_does_not_matter():
    class Shuffled(Serial):
        def train(self, down, cohort, round):
            return iter(list(super().train(down, cohort[::-1], round)))

    assert gap(go(FedAvg())[0].server.weights, go(FedAvg(), engine=Shuffled)[0].server.weights) == 0


def test_the_cohort_depends_on_seed_and_round_alone_and_has_no_repeats():
    a = choose(range(50), 10, 3, 7)
    assert a == choose(list(range(50))[::-1], 10, 3, 7) == sorted(set(a))
    assert a != choose(range(50), 10, 3, 8)
    assert a != choose(range(50), 10, 4, 7)
    seen = np.bincount([k for r in range(400) for k in choose(range(20), 5, 0, r)], minlength=20)
    assert seen.sum() == 2000
    assert 60 < seen.min() <= seen.max() < 140  # 100 expected, standard deviation below 9


class Spoiled(Serial):
    """Client 2's update is spoiled in one way."""

    how = staticmethod(lambda upload: upload)

    def train(self, down, cohort, round):
        for upload in super().train(down, cohort, round):
            yield self.how(upload) if upload.client == 2 else upload


def with_delta(upload: Upload, change) -> Upload:
    return upload._replace(tree=upload.tree | {"method": {"delta": change(dict(upload.tree["method"]["delta"]))}})


SPOILS = {
    "not finite": lambda u: with_delta(u, lambda d: d | {"head.bias": torch.full((4,), float("nan"))}),
    "expected torch.float32 [4]": lambda u: with_delta(u, lambda d: d | {"head.bias": torch.zeros(5)}),
    "is torch.float64": lambda u: with_delta(u, lambda d: d | {"head.bias": torch.zeros(4).double()}),
    "missing or unknown": lambda u: with_delta(u, lambda d: {k: v for k, v in d.items() if k != "head.bias"}),
    "weight is -1": lambda u: u._replace(weight=-1.0),
    "weight is nan": lambda u: u._replace(weight=float("nan")),
    "above 100": lambda u: with_delta(u, lambda d: d | {"head.bias": torch.full((4,), 1e6)}),
}


@pytest.mark.parametrize("reason", SPOILS)
def test_a_bad_upload_is_refused_with_client_and_reason_and_the_others_count(reason):
    engine = type("Bad", (Spoiled,), {"how": staticmethod(SPOILS[reason])})
    result, _, _ = go(FedAvg(), rounds=1, cohort=6, engine=engine, rules={"max_update_norm": 100.0})
    assert [r.client for r in result.refused] == [2]
    assert reason in result.refused[0].reason
    assert result.accepted == [0, 1, 3, 4, 5]
    # the same as if client 2 had not been there
    data, w = toy.federation(), toy.worker(FedAvg())
    down = {"weights": w.net.init(), "shared": {}}
    good = [w.train(k, data.shard(k), down, {}, 0)[0] for k in (0, 1, 3, 4, 5)]
    mean = tree.mean((u.tree["method"]["delta"], u.weight) for u in good)
    assert gap(result.server.weights["params"], tree.add(down["weights"]["params"], mean)) < 1e-7


def test_a_round_whose_uploads_are_all_refused_leaves_the_model_untouched():
    class AllBad(Serial):
        def train(self, down, cohort, round):
            for upload in super().train(down, cohort, round):
                yield upload._replace(weight=0.0)

    result, engine, _ = go(FedAvg(), rounds=2, engine=AllBad)
    assert result.accepted == []
    assert result.train_loss is None
    assert gap(result.server.weights, engine.worker.net.init()) == 0


def test_a_client_whose_upload_was_refused_forgets_the_round():
    class Refused(Serial):
        def train(self, down, cohort, round):
            for upload in super().train(down, cohort, round):
                yield upload._replace(weight=-1.0) if upload.client == 0 else upload

    _, engine, _ = go(Local(), rounds=1, cohort=6, engine=Refused)
    assert sorted(engine.memory) == [1, 2, 3, 4, 5]


def test_an_empty_client_is_never_asked():
    data = toy.federation(sizes=(20, 0, 20, 0, 20))
    _, engine, _ = go(FedAvg(), rounds=5, cohort=3, data=data)
    assert list(engine.clients) == [0, 2, 4]


def test_an_error_in_local_training_names_client_and_round():
    class Broken(Method):
        def loss(self, weights, batch, ctx):
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom") as caught:
        go(Broken(), rounds=1)
    assert caught.value.__notes__ == [f"in client {choose(range(6), 4, 0, 0)[0]}, round 1"]


def test_server_momentum_matches_fedavgm_by_hand():
    """v = beta v + mean delta; x += v, with beta 0.9 over two rounds."""
    momentum = go(FedAvg(server=SGD(lr=1.0, momentum=0.9)), rounds=2)[0].server.weights["params"]
    w, data = toy.worker(FedAvg()), toy.federation()
    x, v = w.net.init(), None
    for r in range(2):
        uploads = [w.train(k, data.shard(k), {"weights": x, "shared": {}}, {}, r)[0] for k in choose(range(6), 4, 0, r)]
        mean = tree.mean((u.tree["method"]["delta"], u.weight) for u in uploads)
        buffers = tree.mean((u.tree["buffers"], u.weight) for u in uploads)
        v = mean if v is None else tree.add(tree.scale(v, 0.9), mean)
        x = {"params": tree.add(x["params"], v), "buffers": buffers}
    assert gap(momentum, x["params"]) < 1e-6


def test_local_clients_go_on_from_their_own_weights_and_send_nothing():
    result, engine, traffic = go(Local(), rounds=2, cohort=6)
    assert traffic.up.total() == traffic.down.total() == 0
    assert result.server.weights == {"params": {}, "buffers": {}}
    assert gap(engine.memory.get(0)["kept"], engine.memory.get(1)["kept"]) > 0
    first = go(Local(), rounds=1, cohort=6)[1]
    down = {"weights": result.server.weights, "shared": {}}
    again, _ = engine.worker.train(3, engine.federation.shard(3), down, first.memory.get(3), 1)
    assert again.tree == {"method": {"delta": {}}, "buffers": {}}
    assert gap(first.start(3, down["weights"]), first.memory.get(3)["kept"]) == 0


def test_centralised_on_one_client_equals_training_without_federation():
    _, engine, _ = go(Centralised(), rounds=3, cohort=1, data=toy.federation(sizes=(60,)), norm="gn", steps=4)
    w, data = engine.worker, engine.federation
    params = w.net.init()["params"]
    for r in range(3):
        for rows in w.plan(60, r, 0):
            batch = data.shard(0).batch(rows)
            leaf = {k: p.detach().requires_grad_() for k, p in params.items()}
            logits = w.net({"params": leaf, "buffers": {}}, batch["image"]).logits
            grads = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, batch["label"]), list(leaf.values()))
            params = {k: p.detach() - 0.05 * g for (k, p), g in zip(params.items(), grads, strict=True)}
    result = go(Centralised(), rounds=3, cohort=1, data=data, norm="gn", steps=4)[0]
    assert gap(result.server.weights["params"], params) < 1e-6


def test_streams_differ_by_purpose_and_by_length_of_key():
    draws = {
        key: seeds.stream(*key).integers(2**62)
        for key in [(0, "a"), (0, "b"), (1, "a"), (0, "a", 0), (0, "a", 0, 0), (0, "a", 1)]
    }
    assert len(set(draws.values())) == 6
    assert seeds.number(0, "a", 5) == seeds.number(0, "a", 5) >= 0


def test_the_method_hears_the_round_and_the_share_of_clients_that_counted():
    heard = []

    class Listening(FedAvg):
        def update(self, server, mean, round):
            heard.append(round)
            return super().update(server, mean, round)

    engine = type("Bad", (Spoiled,), {"how": staticmethod(SPOILS["weight is -1"])})
    result, _, traffic = go(Listening(), rounds=2, cohort=6, engine=engine)
    assert heard == [(0, 5 / 6), (1, 5 / 6)]
    assert traffic.up["delta"] == 2 * 6 * tree.num_bytes(result.server.weights["params"])  # a refused upload was sent


def test_two_clients_with_the_same_rows_see_other_crops_and_the_loss_is_over_all_steps():
    data, w = toy.federation(), toy.worker(FedAvg(), steps=2, augment=True)
    down = {"weights": w.net.init(), "shared": {}}
    a, b = (w.train(k, data.shard(0), down, {}, 0)[0] for k in (0, 1))
    assert gap(a.tree["method"], b.tree["method"]) > 0
    plain = toy.worker(FedAvg(), steps=2, optimizer=SGD(lr=0.0), norm="gn")
    both = plain.train(0, data.shard(0), {"weights": plain.net.init(), "shared": {}}, {}, 0)[0].loss
    losses = []
    for rows in plain.plan(30, 0, 0):
        batch = data.shard(0).batch(rows)
        logits = plain.net(plain.net.init(), batch["image"]).logits
        losses.append(torch.nn.functional.cross_entropy(logits, batch["label"]).item())
    assert both == pytest.approx(sum(losses) / 2, rel=1e-5)
    assert losses[0] != losses[1]
