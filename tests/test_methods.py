"""Every method x every property: one list, no special cases beyond what a method is."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import toy
from toy import gap, go

from fedprior import nets, seeds, tree
from fedprior.config import Experiment, override
from fedprior.data.table import Federation, make
from fedprior.engines.serial import Serial
from fedprior.errors import UsageError
from fedprior.federate import begin, choose, federate
from fedprior.local import Worker
from fedprior.method import Context, Method, Round, Server
from fedprior.methods import (
    CCVR,
    GPTFL,
    METHODS,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedBN,
    FedNH,
    FedNova,
    FedProto,
    Moon,
    Scaffold,
)
from fedprior.net import Net
from fedprior.nets.heads import hyperspherical
from fedprior.optim import SGD, Adagrad, Adam, AdamW, Yogi
from fedprior.traffic import Traffic

VARIANTS = [
    *(cls() for cls in METHODS.values()),
    Scaffold(mode="pre"),
    Scaffold(mode="sgd", option="I"),
    FedNova(mu=0.1),
    Moon(projection=None, queue=2),
    FedProto(share="both"),
    FedNH(learn_scale=False),
    FedAvgM(server=SGD(lr=1.0, momentum=0.9, dampening=0.9)),
]


def cohort(method: Method) -> int:
    return 1 if method.pooled else 4


class AnyOrder(Serial):
    """Clients train in an order of its own; uploads come in the order of ids, as the contract says."""

    def train(self, down, cohort, round):
        order = list(cohort)
        random.Random(round).shuffle(order)
        assert order != sorted(order) or len(order) == 1 or round
        uploads = [upload for client in order for upload in super(AnyOrder, self).train(down, [client], round)]
        return iter(sorted(uploads, key=lambda upload: upload.client))


@pytest.mark.parametrize("method", VARIANTS, ids=repr)
def test_the_order_in_which_clients_train_changes_no_bit(method):
    a, ea, ta = go(method, cohort=cohort(method), straggler_rate=0.3)
    b, eb, tb = go(method, cohort=cohort(method), straggler_rate=0.3, engine=AnyOrder)
    assert gap(a.server.weights, b.server.weights) == 0
    assert gap(a.server.state, b.server.state) == 0
    assert list(ea.memory) == list(eb.memory)
    assert all(gap(ea.memory.get(k), eb.memory.get(k)) == 0 for k in ea.memory)
    assert ta == tb


NETS = {"cnn": 16, "resnet10": 16, "resnet10_gn": 16, "cct": 32}


@pytest.fixture(scope="module")
def federations() -> dict[int, Federation]:
    out = {}
    for side in (16, 32):
        g = torch.Generator().manual_seed(side)
        image, label = torch.randint(0, 256, (40, 3, side, side), generator=g, dtype=torch.uint8), torch.arange(40) % 10
        rows = tuple(torch.randperm(40, generator=g).split([4, 9, 3, 14, 10]))
        out[side] = Federation(
            table=make(image, label), clients=rows, test=make(image, label), classes=tuple("abcdefghij")
        )
    return out


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("method", METHODS.values())
def test_every_method_trains_every_kind_of_net(method, name, federations):
    """Batch norm with statistics, group norm, attention with dropout (AT-A03, AT-B03, AT-B04)."""
    m, data = method(), federations[NETS[name]]
    net = Net(m.adapt(nets.build(name, 10, size=NETS[name]), 0))
    engine = Serial(
        Worker(net=net, method=m, optimizer=SGD(lr=0.01, momentum=0.9), batch_size=2, steps=1 + m.pooled), data
    )
    loop = federate(begin(net, m, 0), m, engine, cohort=1 if m.pooled else 2, seed=0, traffic=Traffic())
    first, second = next(loop), next(loop)
    for result in (first, second):
        assert not result.refused
        assert not result.skipped
        for path, x in tree.flatten(result.server._asdict()).items():
            assert not x.is_floating_point() or torch.isfinite(x).all(), path
            if "running_var" in path and "weights" in path:
                assert (x >= 0).all()
    known = result.server.weights["params"]
    assert not known or gap(known, {k: net.init()["params"][k] for k in known}) > 0


@pytest.mark.parametrize("method", VARIANTS, ids=repr)
def test_hooks_write_to_nothing_they_are_given(method):
    """Two rounds from one start, twice: whatever an aliased tensor would change, the second time would show."""
    w, data = toy.worker(method), toy.federation()
    start = begin(w.net, method, 0)
    before = {k: x.clone() for k, x in tree.flatten(start._asdict()).items()}

    def through() -> list[Server]:
        loop = federate(start, method, Serial(w, data), cohort=cohort(method), seed=0, traffic=Traffic())
        return [next(loop).server, next(loop).server]

    a, b = through(), through()
    assert all(torch.equal(before[k], x) for k, x in tree.flatten(start._asdict()).items())
    for x, y in zip(a, b, strict=True):
        assert gap(x._asdict(), y._asdict()) == 0


@pytest.mark.parametrize("method", [m for m in VARIANTS if not m.pooled], ids=repr)
def test_traffic_is_the_bytes_of_what_the_method_names(method):
    """By tensor group: float32 of params and buffers, and what the method adds, counted by shape."""
    _, engine, traffic = go(method, rounds=1)
    net = engine.worker.net
    weights = net.init()
    kept = engine.worker.kept
    params = {k: p for k, p in weights["params"].items() if k not in kept}
    model, buffers = 4 * sum(p.numel() for p in params.values()), 4 * 8 * 2 + 8
    sizes = {"params": model, "buffers": 0 if kept else buffers}
    prototypes = 4 * net.classes * net.width
    down, up = {}, {"delta": model}
    if isinstance(method, Scaffold):
        down, up = {"control": model}, up | {"control": model}
    if isinstance(method, FedNova):
        up |= {"length": 8}
    if isinstance(method, FedProto):
        down = {"prototypes": prototypes, "known": net.classes}
        up |= {"prototypes": prototypes, "owners": 4 * net.classes}
    if isinstance(method, FedNH):
        up |= {"delta": model - prototypes, "prototypes": prototypes, "rows": 4 * net.classes}
    if type(method) is METHODS["fedsc"]:
        down = {"relational": 0, "owned": 0, "consistent": prototypes}  # of no clients yet
        up |= {"prototypes": prototypes, "rows": 4 * net.classes}
    if type(method) is METHODS["feddisco"]:
        up |= {"discrepancy": 8}
    want_down = {k: 4 * v for k, v in (sizes | down).items() if v}
    want_up = {k: 4 * v for k, v in (up | {"buffers": sizes["buffers"]}).items() if v}
    assert {k: v for k, v in traffic.down.items() if v} == want_down
    assert {k: v for k, v in traffic.up.items() if v} == want_up


def test_scaffold_doubles_the_papers_567_megabytes():
    """papers.md 7.2: 25 rounds of 10 clients of CCT-2, control variates included."""
    method = Scaffold()
    net = Net(nets.build("cct", 10))
    server = begin(net, method, 0)
    traffic = Traffic()
    upload = {"method": {"delta": server.weights["params"], "control": server.state["control"]}, "buffers": {}}
    for _ in range(25):
        traffic.sent({"weights": server.weights, "shared": method.broadcast(server)}, 10)
        for _ in range(10):
            traffic.received(upload)
    assert (traffic.up.total() + traffic.down.total()) / 1e6 == pytest.approx(2 * 567.446, abs=1e-3)


# identities


def test_fedavgm_without_momentum_is_fedavg_to_the_bit():
    plain = go(FedAvg())[0].server.weights
    assert gap(go(FedAvgM(server=SGD(lr=1.0, momentum=0.0)))[0].server.weights, plain) == 0
    assert gap(go(FedAvgM())[0].server.weights, plain) > 0


def test_fednova_is_fedavg_for_equal_steps_and_another_for_unequal():
    """With plain SGD, momentum, and a schedule (AT-A06); the direction times its length is one rounding off."""
    for optimizer in (SGD(lr=0.05), SGD(lr=0.05, momentum=0.9), AdamW(lr=0.01)):
        same = [go(m, steps=5, optimizer=optimizer, norm="gn")[0].server.weights for m in (FedNova(), FedAvg())]
        assert gap(*same) < 1e-6
        other = [go(m, epochs=1.0, optimizer=optimizer, norm="gn")[0].server.weights for m in (FedNova(), FedAvg())]
        assert gap(*other) > 1e-4


@pytest.mark.parametrize("kind", [Adam, Yogi])
def test_an_adaptive_server_without_memory_and_with_a_large_tau_is_scaled_fedavg(kind):
    """x + lr D / (|D| + tau) with tau >> |D| is x + (lr / tau) D; Yogi's v jumps to D^2 only from below, so its
    first round alone."""
    tau = 1e3
    server = kind(lr=tau * 0.5, beta1=0.0, beta2=0.0, tau=tau)
    rounds = 3 if kind is Adam else 1
    scaled = go(FedAvg(server=SGD(lr=0.5)), rounds=rounds)[0].server.weights["params"]
    got = go(FedAvg(server=server), rounds=rounds)[0].server.weights["params"]
    factor = 1 if kind is Adam else 0.5  # v stays about tau^2, so the root adds another tau
    start = toy.worker(FedAvg()).net.init()["params"]
    want = tree.map(lambda s, x: s + factor * (x - s), start, scaled)
    assert gap(got, want) < 1e-4 * max(1.0, tree.norm(tree.sub(scaled, start)))


@pytest.mark.parametrize("name", ["fedadam", "fedyogi", "fedadagrad"])
def test_adaptive_servers_leave_batch_norm_statistics_to_the_mean(name):
    adaptive, plain = go(METHODS[name](), rounds=1)[0].server.weights, go(FedAvg(), rounds=1)[0].server.weights
    assert gap(adaptive["buffers"], plain["buffers"]) == 0
    assert gap(adaptive["params"], plain["params"]) > 0


def test_a_named_server_method_is_fedavg_with_that_server():
    words = [["method=fedadam"], ["method=fedavg", "server=adam"]]
    a, b = (override(Experiment(), w) for w in words)
    assert a.method.server == b.method.server == b.server == Adam()
    assert a.server is None  # nothing but the method's own
    assert gap(go(a.method)[0].server.weights, go(b.method)[0].server.weights) == 0
    assert override(Experiment(), ["method=fedadam", "server.lr=0.03"]).method.server == Adam(lr=0.03)
    assert override(a, ["method=fedavg"]).method.server == SGD(lr=1.0)  # a method brings its own
    assert override(b, ["method=fedavg"]).method.server == SGD(lr=1.0)
    assert override(a, ["method=moon", "server=yogi"]).method == Moon(server=Yogi())
    # its name alone is the method's own, where that is of the kind
    assert override(Experiment(), ["server=sgd"]) == Experiment()
    for words in (["method=fedavgm", "server=sgd"], ["server=sgd", "method=fedavgm"]):
        assert override(Experiment(), words).method == FedAvgM()
    assert override(b, ["server=sgd"]).method.server == SGD(lr=1.0)
    for method in (FedAvgM(), FedAdam(), FedAvg()):  # from Python too
        assert replace(Experiment(), method=method).method == method
    assert replace(b, method=Moon()).method.server == Adam()  # which was asked for by name
    assert replace(Experiment(), method=FedAvgM(server=SGD(momentum=0.5))).method.server == SGD(momentum=0.5)
    assert METHODS["fedadagrad"]().server == Adagrad()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["method=fedadam", "server=sgd"], "FedAvg with server=adam"),
        (["method=fedavgm", "server=adam"], "server=sgd"),
        (["method=scaffold", "method.mode=sgd", "local.momentum=0.9"], "for plain SGD"),
        (["method=scaffold", "method.option=I", "local=adamw"], "option=I is a gradient"),
        (["method=moon", "method.temperature=0"], "method.temperature must be a number above 0"),
        (["method=moon", "method.queue=0"], "method.queue must be a number of at least 1"),
        (["method=feddyn", "method.alpha=0"], "method.alpha must be"),
        (["method=fednh", "method.rho=1.5"], "method.rho must be from 0 to 1"),
        (["method=gptfl", "prior=none"], "method=gptfl needs a prior"),
        (["method=fedproto", "method.share=all"], "unknown value for method.share"),
        (["aggregate=trimmed_mean", "aggregate.trim=0.5"], "aggregate.trim must be"),
        (["aggregate=krum"], "unknown aggregation rule 'krum'"),
        (["drop_rate=1"], "drop_rate is a probability"),
        (["min_cohort=6"], "min_cohort=6 is more than cohort=5"),
        (["clip_gradient=0"], "clip_gradient must be above 0"),
        (["schedule=cosine", "schedule.warmup=100"], "schedule.warmup must be"),
        (["memory_MB=-1"], "memory_MB must be"),
        (["name=a/../x"], "no plain directory name"),
        (["name=a=b"], "no plain directory name"),
        (["name=" + "ä" * 101], "name= has 202 bytes"),
        (["method=scaffold", "aggregate=median"], "method=scaffold needs aggregate=mean"),
        (["method=feddyn", "clip_update_norm=1"], "method=feddyn cannot have clip_update_norm"),
        (["method=ccvr", "bn_stats=local"], "has no use for images"),
        (["server=adagrad", "server.beta2=0.9"], "no beta2"),
        (["local.dampening=0.5"], "no meaning without momentum"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_in_one_line(words, message):
    with pytest.raises(UsageError, match=message) as caught:
        override(Experiment(), words)
    assert "\n" not in str(caught.value)


# MOON's projection, FedNH's head, FedBN, and the two that use the prior on the server


def test_moons_projection_is_two_layers_below_the_classifier():
    module = toy.TinyCNN("gn")
    plain = [p.clone() for p in module.body.parameters()]
    net = Net(Moon(projection=16).adapt(module, 3))
    weights = net.init()
    shapes = {k: tuple(p.shape) for k, p in weights["params"].items() if not k.startswith("base.body")}
    assert shapes == {
        "projection.0.weight": (8, 8),
        "projection.0.bias": (8,),
        "projection.2.weight": (16, 8),
        "projection.2.bias": (16,),
        "head.weight": (4, 16),
        "head.bias": (4,),
    }
    image = toy.images(5)[0]
    out, p = net(weights, image, train=False), weights["params"]
    assert all(torch.equal(a, b) for a, b in zip(plain, net.module.base.body.parameters(), strict=True))
    z = net.module.base.body((image.float() / 255 - 0.5) / 0.5)
    hidden = F.relu(z @ p["projection.0.weight"].T + p["projection.0.bias"])
    projected = hidden @ p["projection.2.weight"].T + p["projection.2.bias"]
    torch.testing.assert_close(out.features, projected)
    torch.testing.assert_close(out.logits, projected @ p["head.weight"].T + p["head.bias"])
    assert (net.width, net.classes) == (16, 4)
    again, other = (Net(Moon(projection=16).adapt(toy.TinyCNN("gn"), s)).init()["params"] for s in (3, 4))
    assert torch.equal(again["projection.0.weight"], p["projection.0.weight"])
    assert not torch.equal(other["projection.0.weight"], p["projection.0.weight"])


def test_moons_first_contrast_is_log_2_for_any_batch():
    """In round 1 the global and the previous model are the same, so the two cosines are equal."""
    method = Moon(mu=1.0, projection=None)
    w, data = toy.worker(method, "gn"), toy.federation()
    ctx = w.open({"weights": w.net.init(), "shared": {}}, {})
    batch = data.shard(0).batch(torch.arange(8))
    loss, out = method.loss(ctx.start, batch, ctx)
    assert (loss - F.cross_entropy(out.logits, batch["label"])).item() == pytest.approx(np.log(2), abs=1e-5)


@pytest.mark.parametrize(("classes", "width"), [(10, 64), (10, 9), (4, 8), (100, 128), (2, 1)])
def test_fednhs_first_prototypes_are_a_regular_simplex(classes, width):
    """The largest cosine between any two is the smallest possible: -1 / (C - 1) (AT-A16)."""
    w = hyperspherical(classes, width, seed=0).double()
    torch.testing.assert_close(w.norm(dim=1), torch.ones(classes, dtype=torch.float64), atol=1e-6, rtol=0)
    cosines = (w @ w.T)[~torch.eye(classes, dtype=torch.bool)]
    assert cosines.max().item() == pytest.approx(-1 / (classes - 1), abs=1e-6)
    assert torch.equal(hyperspherical(classes, width, 0), hyperspherical(classes, width, 0))
    assert width == 1 or not torch.equal(hyperspherical(classes, width, 0), hyperspherical(classes, width, 1))


@pytest.mark.parametrize(("classes", "width", "best"), [(6, 3, 0.0), (5, 2, np.cos(2 * np.pi / 5)), (8, 2, 2**-0.5)])
def test_where_features_are_narrow_the_solver_comes_near_the_known_best(classes, width, best):
    """Six points on a sphere form an octahedron; on a circle the best are the corners of a polygon."""
    w = hyperspherical(classes, width, seed=1)
    largest = (w @ w.T)[~torch.eye(classes, dtype=torch.bool)].max().item()
    assert best - 1e-6 <= largest <= best + 1e-3
    random_ones = F.normalize(torch.randn(classes, width, generator=torch.Generator().manual_seed(1)), dim=-1)
    assert largest < (random_ones @ random_ones.T)[~torch.eye(classes, dtype=torch.bool)].max().item()


def test_fednhs_prototypes_stay_put_on_clients_even_with_weight_decay_and_momentum():
    method = FedNH()
    w, data = toy.worker(method, optimizer=SGD(lr=0.5, momentum=0.9, weight_decay=0.1)), toy.federation()
    start = w.net.init()
    carry = w.init(ctx := w.open({"weights": start, "shared": {}}, {}), {})
    for _ in range(3):
        carry, _ = w.step(carry, data.shard(0).batch(torch.arange(8)), ctx)
    assert torch.equal(carry["weights"]["params"]["head.weight"], start["params"]["head.weight"])
    assert not torch.equal(carry["weights"]["params"]["head.scale"], start["params"]["head.scale"])


def test_fedbn_keeps_batch_norm_at_home_and_averages_the_rest():
    result, engine, traffic = go(FedBN(), rounds=2, cohort=6)
    names = {"body.1.weight", "body.1.bias", "body.1.running_mean", "body.1.running_var", "body.1.num_batches_tracked"}
    assert engine.worker.kept == names
    assert not names & set(result.server.weights["params"])
    assert result.server.weights["buffers"] == {}
    assert traffic.up["buffers"] == traffic.down["buffers"] == 0
    own = [engine.start(k, result.server.weights) for k in (0, 1)]
    assert gap(own[0]["buffers"], own[1]["buffers"]) > 0
    assert not torch.equal(own[0]["params"]["body.1.weight"], own[1]["params"]["body.1.weight"])
    assert torch.equal(own[0]["params"]["head.weight"], own[1]["params"]["head.weight"])
    # one round by hand: the shared part is FedAvg's of clients that began with the same net
    first = go(FedBN(), rounds=1, cohort=6)[0].server.weights["params"]
    plain = go(FedAvg(), rounds=1, cohort=6)[0].server.weights["params"]
    assert gap(first, {k: plain[k] for k in first}) == 0


def test_three_rounds_of_fedbn_equal_plain_modules_that_swap_state_dicts():
    """A second implementation: one module a client, torch.optim, unequal sizes and steps, 4 of 6 clients a round."""
    data, rounds = toy.federation(), 3
    w = toy.worker(FedBN(), optimizer=SGD(lr=0.05, momentum=0.9))
    engine = Serial(w, data)
    loop = federate(begin(w.net, FedBN(), 0), FedBN(), engine, cohort=4, seed=0, traffic=Traffic())
    own = {k: toy.net("bn").module.train() for k in range(6)}
    server = {k: x.clone() for k, x in own[0].state_dict().items() if not k.startswith("body.1.")}
    for r in range(rounds):
        chosen, total = choose(range(6), 4, 0, r), {k: torch.zeros_like(x) for k, x in server.items()}
        rows = sum(len(data.clients[k]) for k in chosen)
        for k in chosen:
            own[k].load_state_dict(own[k].state_dict() | server)
            opt, shard = torch.optim.SGD(own[k].parameters(), lr=0.05, momentum=0.9), data.shard(k)
            for which in w.plan(len(shard), r, k):
                x = (shard["image"][which].float() / 255 - 0.5) / 0.5
                opt.zero_grad()
                F.cross_entropy(own[k](x)[1], shard["label"][which]).backward()
                opt.step()
            for name in server:
                total[name] += own[k].state_dict()[name] * (len(shard) / rows)
        server = total
        got = next(loop).server.weights["params"]
        assert got.keys() == server.keys()
        for name, x in server.items():
            torch.testing.assert_close(got[name], x, rtol=1e-4, atol=1e-5)
    for k in engine.memory:
        kept = engine.memory.get(k)["kept"]
        for name, x in (kept["params"] | kept["buffers"]).items():
            torch.testing.assert_close(x, own[k].state_dict()[name], rtol=1e-4, atol=1e-5)


def test_fedbn_says_so_when_there_is_no_batch_norm():
    net = toy.net("gn")
    assert "does what fedavg does" in FedBN().remark(net)
    assert FedBN().remark(toy.net("bn")) == ""
    assert gap(go(FedBN(), norm="gn")[0].server.weights, go(FedAvg(), norm="gn")[0].server.weights) == 0


def server_images(n: int = 40):
    image, label = toy.images(n, seed=5)
    return make(image, label, synthetic=True)


def test_gptfls_server_trains_on_the_priors_images_as_a_plain_torch_loop_would():
    method = GPTFL(images_per_class=10, pretrain_epochs=2.0, pretrain_lr=0.01, pretrain_batch=8)
    net, images = toy.net("gn"), server_images()  # a bias before batch norm has a gradient of rounding alone
    got = method.pretrain(net, net.init(), images, seed=7)
    module = toy.net("gn").module.train()
    opt = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.01)
    rng = seeds.stream(7, "batches", 0, 0)
    rows = np.concatenate([rng.permutation(40), rng.permutation(40)]).reshape(10, 8)
    for which in torch.from_numpy(rows):
        x = (images["image"][which].float() / 255 - 0.5) / 0.5
        loss = F.cross_entropy(module(x)[1], images["label"][which])
        opt.zero_grad()
        loss.backward()
        opt.step()
    for name, p in module.named_parameters():
        torch.testing.assert_close(got["params"][name], p.detach(), rtol=1e-4, atol=1e-5)
    accuracy = (net(got, images["image"], train=False).logits.argmax(1) == images["label"]).float().mean()
    before = (net(net.init(), images["image"], train=False).logits.argmax(1) == images["label"]).float().mean()
    assert accuracy > before


def test_ccvr_refits_the_last_layer_only_to_the_optimum_of_its_objective():
    method = CCVR(images_per_class=10, inverse_penalty=0.5)
    net, images = toy.net("gn"), server_images()
    weights = net.init()
    deployed = method.deploy(net, weights, images, 0)
    changed = {k for k, p in weights["params"].items() if not torch.equal(p, deployed["params"][k])}
    assert changed == {"head.weight", "head.bias"}
    z = net(weights, images["image"], train=False).features.double()
    w = deployed["params"]["head.weight"].double().requires_grad_()
    b = deployed["params"]["head.bias"].double().requires_grad_()
    objective = 0.5 * F.cross_entropy(z @ w.T + b, images["label"], reduction="sum") + w.square().sum() / 2
    slope = torch.autograd.grad(objective, (w, b))
    assert max(g.abs().max().item() for g in slope) < 0.02  # of an objective of about 20
    assert gap(method.deploy(net, weights, images, 0), deployed) == 0


def test_ccvr_with_two_classes_gives_two_rows():
    class Two(toy.TinyCNN):
        def __init__(self) -> None:
            super().__init__("gn")
            self.head = torch.nn.Linear(8, 2)

    net, images = Net(Two()), server_images()
    images = images | {"label": images["label"] % 2}
    deployed = CCVR().deploy(net, net.init(), images, 0)
    assert deployed["params"]["head.weight"].shape == (2, 8)
    from sklearn.linear_model import LogisticRegression

    z = net(net.init(), images["image"], train=False).features.double().numpy()
    want = LogisticRegression(max_iter=1000).fit(z, images["label"].numpy()).predict_proba(z)
    got = net(deployed, images["image"], train=False).logits.softmax(1).numpy()
    np.testing.assert_allclose(got, want, atol=1e-5)


# classes nobody has, clients with one row


@pytest.mark.parametrize("method", [m for m in VARIANTS if not m.pooled], ids=repr)
def test_clients_with_one_row_and_classes_nobody_has_do_no_harm(method):
    image, label = toy.images(30)
    label = label.clamp(max=2)  # class 3 has no rows
    data = Federation(
        table=make(image, label),
        clients=tuple(torch.arange(30).split([1, 12, 2, 15])),
        test=make(image, label),
        classes=toy.CLASSES,
    )
    result, _, _ = go(method, data=data, cohort=3)
    assert not result.refused
    assert all(torch.isfinite(x).all() for x in tree.flatten(result.server.weights).values() if x.is_floating_point())


def test_a_class_that_no_client_of_the_round_has_keeps_fednhs_prototype():
    method = FedNH()
    w = toy.worker(method)
    server = begin(w.net, method, 0)
    head = server.weights["params"]["head.weight"]
    rest = {k: torch.zeros_like(p) for k, p in server.weights["params"].items() if k != "head.weight"}
    mean = {"delta": rest, "prototypes": torch.randn(4, 8), "rows": torch.tensor([3.0, 0.0, 1.0, 0.0])}
    new = method.update(server, mean, Round(0, 0.5)).weights["params"]["head.weight"]
    assert [torch.equal(new[c], head[c]) for c in range(4)] == [False, True, False, True]
    torch.testing.assert_close(new.norm(dim=1), torch.ones(4))


def test_a_method_outside_the_package_is_a_few_lines():
    """Only what differs is written; the loop, traffic and checks come with it."""

    class Half(Method):
        def finish(self, result, shard, ctx: Context):
            return {"delta": tree.scale(result.delta, 0.5)}, ctx.mine

    half, whole = (go(m, rounds=1)[0].server.weights["params"] for m in (Half(), FedAvg()))
    start = toy.net().init()["params"]
    assert gap(tree.scale(tree.sub(half, start), 2.0), tree.sub(whole, start)) < 1e-6
