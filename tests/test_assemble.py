"""Every key of an experiment reaches the part that it is about; what the server and a plan are given is right."""

from dataclasses import fields, replace
from itertools import pairwise

import pytest
import torch
import toy
from safetensors.torch import load_file
from torch import nn

from fedprior import assemble, nets, store, tree
from fedprior.aggregate import Median
from fedprior.config import Experiment, override
from fedprior.data import augment, table
from fedprior.data.table import Federation
from fedprior.errors import UsageError, UserError
from fedprior.federate import begin, choose, drop, federate
from fedprior.local import Worker
from fedprior.memory import ClientMemory
from fedprior.method import Method
from fedprior.methods import FedAvg, FedBN, Local, Moon, Scaffold
from fedprior.net import Net, layout
from fedprior.optim import SGD, Adam, AdamW
from fedprior.plan import plan, state_MB
from fedprior.prepare.images import Wording
from fedprior.priors import embedded, prompts
from fedprior.progress import Silent
from fedprior.run import run
from fedprior.schedule import Cosine
from fedprior.traffic import Traffic

CPU = torch.device("cpu")
SIZES = (30, 0, 18, 25, 0, 40)


def experiment(*words, clients=6, cohort=3) -> Experiment:
    return override(Experiment(), [f"clients={clients}", f"cohort={cohort}", *words])


def engine_of(e: Experiment, data: Federation | None = None, memory=None):
    data = data or toy.federation(SIZES)
    return assemble.build_engine(e, assemble.build_net(e, data, CPU), data, memory)


# The net


@pytest.mark.parametrize("name", augment.STATISTICS)
def test_a_known_set_is_normalised_by_its_own_statistics(name):
    data = toy.federation()
    net = assemble.build_net(experiment(f"data={name}"), data, CPU)
    mean, std = augment.STATISTICS[name]
    assert (net.mean, net.std) == (mean, std)
    image = data.test["image"][:5]
    x = (image.float() / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    wanted = net.module.eval()(x)[1]
    # float32 pixels scaled in another order
    torch.testing.assert_close(net(net.init(), image, train=False).logits, wanted, rtol=1e-4, atol=1e-5)


def test_a_set_is_normalised_alike_under_its_short_name_and_its_hub_id():
    for name, hub_id in (("cifar10", "uoft-cs/cifar10"), ("cifar100", "uoft-cs/cifar100")):
        a, b = (assemble.build_net(experiment(f"data={x}"), toy.federation(), CPU) for x in (name, hub_id))
        assert (a.mean, a.std) == (b.mean, b.std) == augment.STATISTICS[name]


def test_the_two_known_sets_have_statistics_of_their_own_and_others_are_brought_to_minus_one_to_one():
    assert len({str(v) for v in augment.STATISTICS.values()}) == len(augment.STATISTICS) == 2
    net = assemble.build_net(experiment(), toy.federation(), CPU)
    assert tuple(net.mean) == tuple(net.std) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_precision_reaches_the_net(precision):
    data = toy.federation()
    net = assemble.build_net(experiment(f"precision={precision}"), data, CPU)
    inner = []
    net.module.head.register_forward_hook(lambda module, given, out: inner.append(out.dtype))
    net(net.init(), data.test["image"][:2])
    assert inner == [torch.bfloat16 if precision == "bf16" else torch.float32]


def test_the_net_fits_the_classes_and_image_size_of_the_data():
    net = assemble.build_net(experiment(), toy.federation(), CPU)
    assert net.classes == len(toy.CLASSES)
    assert net(net.init(), toy.federation().test["image"][:3]).logits.shape == (3, 4)


def test_moon_gets_its_projection_and_fednh_its_prototypes():
    data = toy.federation()
    moon = assemble.build_net(experiment("method=moon", "method.projection=12"), data, CPU)
    assert moon.width == 12
    assert {"projection.0.weight", "projection.2.bias", "head.weight"} <= moon.param_names
    assert assemble.build_net(experiment("method=moon", "method.projection=none"), data, CPU).width == 64
    fednh = assemble.build_net(experiment("method=fednh", "method.scale=7"), data, CPU)
    head = fednh.init()["params"]
    assert head["head.scale"] == 7
    cosines = head["head.weight"] @ head["head.weight"].T
    # four unit vectors that are as far apart as they can be, in float32
    torch.testing.assert_close(cosines, torch.eye(4) * 4 / 3 - 1 / 3, rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", ["fedavg", "moon", "fednh"])
def test_the_seed_alone_decides_all_initial_weights(method):
    data = toy.federation()

    def weights(seed):
        torch.manual_seed(seed + 100)  # the global generator has no part in it
        return assemble.build_net(experiment(f"method={method}", f"seed={seed}"), data, CPU).init()["params"]

    a, b, other = weights(0), weights(0), weights(1)
    assert toy.gap(a, b) == 0
    drawn = {k for k, x in a.items() if x.ndim > 1}
    assert {"head.weight"} < drawn
    assert all(not torch.equal(a[k], other[k]) for k in drawn)


# The worker

FEDERATED = ["method=fedavg", "server=adam", "server.lr=0.02", "local=adamw", "local.lr=0.003", "schedule=cosine"]
FEDERATED += ["schedule.over=9", "persist_optimizer=true", "clip_gradient=2.5", "straggler_rate=0.25", "augment=true"]
FEDERATED += ["bn_stats=local", "weight_by=real", "batch_size=7", "seed=11"]


@pytest.mark.parametrize("work", ["steps=13", "epochs=1.5"])
def test_every_key_of_local_work_reaches_the_worker(work):
    e = experiment(*FEDERATED, work)
    data, memory = replace(toy.federation(SIZES), classes=("0", "1", "2", "3")), ClientMemory()  # digits: no mirroring
    net = assemble.build_net(e, data, CPU)
    guide = assemble.build_guide(experiment("guide=feddifrc"), data, CPU, embedded.load("digits"))
    engine, cohort = assemble.build_engine(e, net, data, memory, guide)
    wanted = {
        "net": net,
        "method": FedAvg(server=Adam(lr=0.02)),
        "optimizer": AdamW(lr=0.003),
        "schedule": Cosine(over=9),
        "persist_optimizer": True,
        "clip_gradient": 2.5,
        "straggler_rate": 0.25,
        "augment": True,
        "flip": False,
        "guide": guide,
        "bn_stats": "local",
        "weight_by": "real",
        "batch_size": 7,
        "steps": 13 if work == "steps=13" else None,
        "epochs": None if work == "steps=13" else 1.5,
        "seed": 11,
    }
    assert {f.name: getattr(engine.worker, f.name) for f in fields(Worker)} == wanted
    usual = {f.name: f.default for f in fields(Worker)}
    assert [k for k in wanted if k not in ("steps", "epochs") and wanted[k] == usual[k]] == []  # no default hides a gap
    assert cohort == 3
    assert engine.memory is memory
    assert engine.federation is data


def test_the_servers_optimiser_takes_the_servers_steps():
    data = toy.federation(SIZES)

    def moved(*words):
        engine, cohort = engine_of(experiment("steps=1", *words), data)
        start = begin(engine.worker.net, engine.worker.method, 0)
        loop = federate(start, engine.worker.method, engine, cohort=cohort, seed=0, traffic=Traffic())
        return tree.sub(next(loop).server.weights["params"], start.weights["params"])

    whole, half = moved(), moved("server=sgd", "server.lr=0.5")
    # both differences carry float32 rounding of weights of order 1
    assert toy.gap(tree.scale(whole, 0.5), half) < 1e-6
    assert toy.gap(whole, half) > 1e-3


# All data in one place


def test_pooled_rows_are_those_of_all_clients_each_once():
    data = toy.federation(SIZES)
    image, label = toy.images(5, 3)
    extra = table.make(image, label, synthetic=True, first_id=1000)
    drawn = [torch.tensor([0, 1, 1]), torch.tensor([], dtype=torch.int64), *[torch.tensor([1, 2])] * 4]
    shared = data.with_rows(extra, drawn)  # images 0 to 2 are drawn, 1 by nearly everybody, 3 and 4 by nobody
    engine, cohort = engine_of(experiment("method=centralised", "steps=4"), shared)
    (rows,) = engine.federation.clients
    assert rows.tolist() == list(range(sum(SIZES) + 3))
    assert (cohort, list(engine.clients)) == (1, [0])
    assert len(shared.clients) == 6  # the federation that was given keeps its clients


@pytest.mark.parametrize("clients", [3, 4])
def test_pooled_training_takes_as_many_steps_as_the_cohort_would(clients):
    data = toy.federation(SIZES)
    engine, _ = engine_of(experiment("method=centralised", "steps=5", cohort=clients), data)
    assert (engine.worker.steps, engine.worker.epochs) == (5 * clients, None)
    engine, _ = engine_of(experiment("method=centralised", "epochs=2", "batch_size=8", cohort=clients), data)
    own = [8, 5, 7, 10]  # 2 n / 8, rounded up, of the clients that have rows
    assert engine.worker.steps == round(clients * sum(own) / 4)
    assert (engine.worker.num_steps(1), engine.worker.epochs) == (engine.worker.steps, None)


# Cohorts


def test_a_cohort_may_be_all_clients_with_data_and_no_larger():
    engine, cohort = engine_of(experiment("steps=1", cohort=4))
    assert cohort == len(engine.clients) == 4
    with pytest.raises(UserError, match=r"cohort=5, but only 4 clients hold data"):
        engine_of(experiment("steps=1", cohort=5))
    engine_of(experiment("steps=1", "method=centralised", cohort=5))  # a pool has no cohort to fill


@pytest.mark.parametrize("method", ["fedavg", "centralised"])
def test_a_federation_without_rows_is_refused(method):
    data = replace(toy.federation((4,)), clients=(torch.arange(0),) * 2)
    with pytest.raises(UserError, match="no client holds any data"):
        engine_of(experiment(f"method={method}", clients=2, cohort=1), data)


# The server's images

SERVER = ["method=ccvr", "method.images_per_class=2"]


class Prepared:
    """The digits' prior at work, once for all tests that look at its images."""

    def __init__(self) -> None:
        self.experiment = experiment(*SERVER)
        self.real, _ = assemble.split(self.experiment)
        self.images = assemble.images_for_server(self.experiment, self.real, CPU, Silent())
        shared = override(self.experiment, ["balance=max", "balance.pool_size=3"])
        self.balanced, self.report = assemble.balance(shared, self.real, CPU, Silent())


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDPRIOR_CACHE", str(tmp_path_factory.mktemp("prior")))
        yield Prepared()


def test_the_server_gets_exactly_as_many_images_of_each_class_and_all_are_flagged(prepared):
    images = prepared.images
    assert images["label"].bincount(minlength=10).tolist() == [2] * 10
    assert images["synthetic"].all()
    assert images["image"].shape == (20, *prepared.real.table["image"].shape[1:])
    assert images["image"].dtype == torch.uint8
    assert len({store.raw_bytes(x) for x in images["image"]}) == 20


def test_the_servers_images_are_those_that_a_shared_pool_begins_with_and_are_not_made_twice(prepared):
    assert (prepared.report.generated, prepared.report.reused) == (10, 20)
    pool = {name: x[prepared.balanced.table["synthetic"]] for name, x in prepared.balanced.table.items()}
    assert len(pool["label"]) == 30
    for k in range(10):
        mine, theirs = (t["image"][t["label"] == k] for t in (prepared.images, pool))
        assert torch.equal(mine, theirs[:2])


def test_a_method_that_wants_no_images_gets_none_and_asks_for_no_prior(prepared, monkeypatch):
    monkeypatch.setattr(assemble, "load_prior", None)  # whoever calls it fails
    assert assemble.images_for_server(experiment("balance=max"), prepared.real, CPU, Silent()) is None


@pytest.mark.parametrize("method", ["ccvr", "gptfl"])
@pytest.mark.parametrize("words", [[], ["balance=missing_only", "balance.templates=single", "balance.attempts=2"]])
def test_the_servers_images_follow_the_methods_number_the_seed_and_the_balances_prompts(
    prepared, monkeypatch, method, words
):
    asked = {}

    def server_images(folder, per_class, progress):
        asked.update(vars(folder), per_class=per_class)
        return prepared.images

    prior = type("Prior", (), {"name": "p", "defaults": {}})()
    monkeypatch.setattr(assemble.synthesis, "server_images", server_images)
    monkeypatch.setattr(assemble, "load_prior", lambda choice, device: prior)
    e = experiment(f"method={method}", "method.images_per_class=7", "seed=4", *words)
    got = assemble.images_for_server(e, prepared.real, CPU, Silent())
    assert toy.gap(got, prepared.images) == 0
    templates = prompts.SINGLE if words else prompts.CLIP
    assert asked == {
        "prior": prior,
        "wording": Wording(classes=prepared.real.classes, templates=templates),
        "size": (16, 16),
        "per_class": 7,
        "seed": 4,
        "attempts": 2 if words else 5,
        "filters": (),
        "distinct": False,
    }


def test_classes_that_the_prior_does_not_know_are_refused_by_name(prepared):
    classes = (*prepared.real.classes[:9], "axolotl")
    strange = replace(prepared.real, classes=classes)
    for wanted in (
        lambda: assemble.images_for_server(prepared.experiment, strange, CPU, Silent()),
        lambda: assemble.balance(experiment("balance=max"), strange, CPU, Silent()),
    ):
        with pytest.raises(UsageError, match="prior=digits does not know 'axolotl'"):
            wanted()
    fewer = replace(prepared.real, classes=prepared.real.classes[:3])
    assert assemble.prior_for(prepared.experiment, fewer, CPU).name == "digits"  # some of the known ones will do


def test_the_priors_own_keys_reach_it(monkeypatch):

    asked = {}
    monkeypatch.setattr(embedded, "load", lambda name, **options: asked.update(name=name, **options))
    words = ["prior=sd1.5", "prior.revision=main", "prior.steps=9", "prior.guidance=2.5", "prior.dtype=fp16"]
    assemble.load_prior(experiment(*words, "prior.batch_size=3").prior, CPU)
    assert asked == {
        "name": "sd1.5",
        "revision": "main",
        "steps": 9,
        "guidance": 2.5,
        "dtype": "fp16",
        "batch_size": 3,
        "device": CPU,
    }


# What a run passes on to its rounds

QUICK = ["rounds=2", "steps=1", "name=it"]


def quick(tmp_path, *words):
    return run(experiment(*QUICK, *words), tmp_path, Silent())


def saved(tmp_path):
    """The model of a run, and the one that it began with."""
    return load_file(tmp_path / "it" / "model.safetensors"), nets.build("cnn", 10, size=16).state_dict()


def first_updates(count=3):
    """What the first cohort's clients change, by their own worker, in the order of their ids."""
    e = experiment(*QUICK)
    data, _ = assemble.split(e)
    engine, _ = engine_of(e, data)
    down = {"weights": engine.worker.net.init(), "shared": {}}
    cohort = choose(engine.clients, count, 0, 0)
    return [engine.worker.train(k, data.shard(k), down, {}, 0)[0].tree["method"]["delta"] for k in cohort]


def test_updates_above_the_longest_that_is_allowed_are_refused(tmp_path):
    norms = sorted(tree.norm(d) for d in first_updates())
    limit = (norms[0] + norms[1]) / 2  # one client of the first cohort is below
    (line, _) = quick(tmp_path, f"max_update_norm={limit}").curve
    assert (line["accepted"], len(line["refused"]), line["skipped"]) == (1, 2, False)
    assert all("is above" in r["reason"] for r in line["refused"])


def test_no_norm_is_too_long_where_none_is_named(tmp_path):
    assert [line["refused"] for line in quick(tmp_path, "local.lr=5").curve] == [[], []]


def test_clipped_updates_move_the_model_no_further_than_the_clip(tmp_path):
    assert min(tree.norm(d) for d in first_updates()) > 0.01
    quick(tmp_path, "rounds=1", "clip_update_norm=0.01")
    after, before = saved(tmp_path)
    moved = tree.norm(tree.sub(after, before))
    # a mean of updates of length 0.01 each; the weights of order 1 are float32
    assert 0.002 < moved < 0.01 * (1 + 1e-4)


def test_the_rule_of_aggregation_is_the_one_that_is_named(tmp_path):
    updates = first_updates()
    outcome = quick(tmp_path, "rounds=1", "aggregate=median")
    after, before = saved(tmp_path)
    for k, x in after.items():
        middle = torch.stack([u[k] for u in updates]).median(0).values  # of three there is a middle one
        torch.testing.assert_close(x, before[k] + middle, rtol=0, atol=1e-6)  # float32 sums of order 1
    assert isinstance(experiment("aggregate=median").aggregate, Median)
    mean = run(experiment(*QUICK, "rounds=1", "name=mean"), tmp_path, Silent())
    assert mean.result["weights"] != outcome.result["weights"]


DROPPING = ["rounds=6", "drop_rate=0.5"]


def who_drops(rounds=6):
    clients = range(6)
    cohorts = [choose(clients, 3, 0, r) for r in range(rounds)]
    return [drop(cohort, 0.5, 0, r) for r, cohort in enumerate(cohorts)]


def test_the_drop_rate_decides_who_does_not_answer(tmp_path):
    curve = quick(tmp_path, *DROPPING).curve
    assert [line["dropped"] for line in curve] == who_drops()
    assert any(line["dropped"] for line in curve)
    assert all(line["accepted"] == 3 - len(line["dropped"]) for line in curve)
    assert [line["skipped"] for line in curve] == [len(d) == 3 for d in who_drops()]


@pytest.mark.parametrize("least", [2, 3])
def test_rounds_with_fewer_good_updates_than_min_cohort_are_abandoned(tmp_path, least):
    curve = quick(tmp_path, *DROPPING, f"min_cohort={least}").curve
    skipped = [3 - len(d) < least for d in who_drops()]
    assert [line["skipped"] for line in curve] == skipped
    assert 0 < sum(skipped) < 6
    for last, line in pairwise(curve):
        assert (line["loss"] == last["loss"]) == line["skipped"]  # an abandoned round changes nothing


def test_min_cohort_does_not_stop_training_in_one_place(tmp_path):
    curve = quick(tmp_path, "method=centralised", "min_cohort=3").curve
    assert [(line["accepted"], line["skipped"]) for line in curve] == [(1, False)] * 2


def test_stragglers_are_listed_with_the_steps_that_they_did(tmp_path):
    curve = quick(tmp_path, "steps=4", "straggler_rate=0.9").curve
    data, _ = assemble.split(experiment())
    worker = engine_of(experiment("steps=4", "straggler_rate=0.9"), data)[0].worker
    for r, line in enumerate(curve):
        done = {k: worker.work(100, r, k) for k in line["cohort"]}
        assert line["partial"] == [{"client": k, "steps": n} for k, n in done.items() if n < 4]
    assert any(line["partial"] for line in curve)


# Memory layout and dropout


def test_layout_places_four_dimensional_tensors_channels_last_and_leaves_the_others_alone():
    weights = {
        "params": {
            "kernel": torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5),
            "matrix": torch.randn(3, 4),
            "turned": torch.randn(3, 4).T,
            "volume": torch.randn(1, 2, 3, 4, 5),
            "bias": torch.randn(3),
        },
        "buffers": {"count": torch.tensor(3)},
        "empty": {},
    }
    kept = weights["params"]["kernel"].clone()
    placed = layout(weights)
    assert not kept.is_contiguous(memory_format=torch.channels_last)
    kernel = placed["params"]["kernel"]
    assert kernel.is_contiguous(memory_format=torch.channels_last)
    assert kernel.stride() == (60, 1, 15, 3)
    assert torch.equal(kernel, kept)
    assert weights["params"]["kernel"].stride() == (60, 20, 5, 1)  # what is given stays
    flat, given = tree.flatten(placed), tree.flatten(weights)
    assert list(flat) == list(given)
    assert all(flat[k] is given[k] for k in flat if k not in ("params/kernel", "empty/"))
    assert layout(placed)["params"]["kernel"] is kernel


class Dropping(nn.Module):
    width = 48

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Dropout(rate))
        self.head = nn.Linear(48, 4)

    def forward(self, x):
        z = self.body(x)
        return z, self.head(z)


def test_what_is_dropped_out_depends_on_client_round_and_seed_and_nothing_else(monkeypatch):
    monkeypatch.setattr(Worker, "plan", lambda self, n, round, client: torch.arange(16).view(2, 8))  # the same batches
    shard = toy.federation((20,)).shard(0)

    def moved(rate=0.5, seed=0, client=0, round=0, noise=0):
        torch.manual_seed(5)
        net = Net(Dropping(rate))
        torch.manual_seed(noise)  # where the global generator stands
        worker = Worker(net=net, method=Method(), optimizer=SGD(lr=0.1), batch_size=8, steps=2, seed=seed)
        upload, _ = worker.train(client, shard, {"weights": net.init(), "shared": {}}, {}, round)
        return upload.tree["method"]["delta"]

    first = moved()
    assert toy.gap(first, moved(noise=1)) == 0
    for change in ({"client": 1}, {"round": 1}, {"seed": 1}):
        assert toy.gap(first, moved(**change)) > 1e-3
        assert toy.gap(moved(rate=0.0), moved(rate=0.0, **change)) == 0  # nothing else differs between them


# Plans

EMPTIES = ["clients=12", "partition.alpha=0.01", "partition.min_size=0"]


@pytest.mark.parametrize("method", ["scaffold", "fedavg"])
def test_a_plan_says_what_all_clients_with_data_will_remember(method):
    e = experiment(*EMPTIES, f"method={method}")
    federation, _ = assemble.split(e)
    held = sum(len(rows) > 0 for rows in federation.clients)
    assert held < 12
    made = plan(e, calibrate=False)
    parameters = sum(p.numel() for p in nets.build("cnn", 10, size=16).parameters())
    assert made["state_MB"] == pytest.approx(held * parameters * 4 / 1e6 if method == "scaffold" else 0)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (Scaffold(), {}),
        (Moon(queue=2, projection=None), {}),
        (FedBN(), {}),
        (Local(), {}),
        (FedAvg(), {"persist_optimizer": True, "optimizer": SGD(lr=0.05, momentum=0.5), "bn_stats": "local"}),
    ],
    ids=["scaffold", "moon", "fedbn", "local", "fedavg"],
)
def test_what_a_plan_says_is_what_the_memory_comes_to(method, options):
    result, engine, _ = toy.go(method, rounds=1, cohort=4, data=toy.federation(SIZES), **options)
    assert len(result.accepted) == 4
    held = sum(tree.num_bytes(engine.memory.get(k)) for k in engine.memory)
    told = state_MB(experiment(f"bn_stats={options.get('bn_stats', 'average')}"), engine)
    assert told == pytest.approx(held / 1e6)
    if isinstance(method, Scaffold):  # control variates exist for what is trained alone
        assert held == 4 * tree.num_bytes(engine.worker.net.init()["params"])


def test_where_all_data_lie_in_one_place_nobody_drops_out_or_straggles(tmp_path):
    words = ["method=centralised", "rounds=3", "steps=2", "clients=6", "cohort=3"]
    plain = run(override(Experiment(), [*words, "name=a"]), tmp_path)
    shaky = run(override(Experiment(), [*words, "name=b", "drop_rate=0.9", "straggler_rate=0.9"]), tmp_path)
    assert plain.result["weights"] == shaky.result["weights"]


@pytest.mark.parametrize(
    ("words", "images"),
    [
        (["method=gptfl", "method.images_per_class=7"], 70),
        (["method=ccvr", "method.images_per_class=3", "balance=max", "balance.pool_size=5"], 50),
        (["method=ccvr", "method.images_per_class=9", "balance=max", "balance.pool_size=5"], 90),
        (["method=ccvr", "method.images_per_class=9", "balance=max", "balance.pool=per_client"], None),
        (["method=centralised"], 0),
    ],
)
def test_a_plan_counts_the_servers_images_once(words, images):
    result = plan(override(Experiment(), words), calibrate=False)
    if images is None:  # no pool is shared, so all are made
        images = result["rows"] + 90
    assert result["images"] == images
    assert result["server_images"] == (10 * override(Experiment(), words).method.images)


def test_prompts_that_name_domains_are_refused_where_the_server_wants_images():
    data = replace(toy.federation(), domains=("sketch", "photo"))
    words = ["balance=max", "balance.templates=domain"]
    assert assemble.wording(experiment(*words), data).domains
    with pytest.raises(UsageError, match=r"balance.templates=domain names domains, .* use templates without {domain}"):
        assemble.wording(experiment(*words, "method=gptfl"), data)
    assert not assemble.wording(experiment("balance=max", "method=gptfl"), data).domains


def test_a_plan_times_centralised_training():
    assert plan(override(Experiment(), ["method=centralised", "rounds=2"]))["training_seconds"] >= 0


def test_generate_makes_the_servers_images_and_a_run_finds_them(capsys, tmp_path):
    from fedprior.cli import app

    words = ["method=ccvr", "method.images_per_class=2", "rounds=1", "steps=1", "clients=6", "cohort=3"]
    with pytest.raises(SystemExit) as ended:
        app(["generate", *words, "--json"])
    assert ended.value.code in (0, None)
    assert "The server's 20 images are there" in capsys.readouterr().out
    made = []
    import fedprior.priors.diffusion as diffusion

    generate = diffusion.DiffusionPrior.generate
    diffusion.DiffusionPrior.generate = lambda self, prompts, *a, **k: (
        made.append(len(prompts)) or generate(self, prompts, *a, **k)
    )
    try:
        run(override(Experiment(), words), tmp_path)
    finally:
        diffusion.DiffusionPrior.generate = generate
    assert made == []


def test_local_statistics_of_a_net_without_batch_norm_are_announced(tmp_path):
    class Said(Silent):
        text = ""

        def say(self, text: str) -> None:
            self.text += text

    said = Said()
    run(override(Experiment(), ["bn_stats=local", "rounds=1", "steps=1", "clients=6", "cohort=3"]), tmp_path, said)
    assert "bn_stats=local changes nothing" in said.text


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedsc", "fedproto", "fednh", "feddisco", "fednova", "local"])
def test_a_plan_says_the_megabytes_that_a_run_sends(tmp_path, method):
    words = [f"method={method}", "rounds=3", "steps=1", "clients=6", "cohort=3"]
    result = run(override(Experiment(), words), tmp_path).result
    sent = result["uplink_MB"] + result["downlink_MB"]
    assert plan(override(Experiment(), words), calibrate=False)["MB"] == pytest.approx(sent)
