"""The methods against a second implementation of their formulas, round by round."""

from itertools import islice

import numpy as np
import pytest
import reference as ref
import torch
from torch import nn

from fedprior import methods, optim, schedule
from fedprior.data.table import Federation, make
from fedprior.engines.serial import Serial
from fedprior.federate import begin, choose, federate
from fedprior.local import Worker
from fedprior.methods.fedsc import collaborate
from fedprior.net import Net, Output
from fedprior.traffic import Traffic

CLASSES = ("ant", "bee", "cat", "dog")
SIZES = (9, 30, 14, 22, 40, 17)  # 2, 4, 2, 3, 5 and 3 batches of 8
OWNED = ((0,), (0, 1, 2), (1, 2), (0, 3), (0, 1, 2), (1, 2))
# With this seed client 3, who alone has dogs, takes part in rounds 2 and 4 only: it meets its class unknown to the
# others, then known, and in between the others must do without.
COHORT, ROUNDS, SEED = 4, 4, 11
# The package computes in float32: weights of about 1 carry errors of 6e-8 a step, which some 20 steps with sums of
# up to 60 terms add up. What is near zero is itself a difference of such numbers, hence the absolute part.
CLOSE = {"rtol": 1e-5, "atol": 2e-6}


class Module(nn.Module):
    width = 5

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 5), nn.Tanh())
        self.head = nn.Linear(5, len(CLASSES))

    def forward(self, x):
        z = self.body(x.flatten(1))
        return z, self.head(z)


def module() -> Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Module()


def data(sizes=SIZES) -> Federation:
    """2 x 2 images whose class shows in their pixels."""
    g = torch.Generator().manual_seed(0)
    pattern = torch.randint(30, 226, (len(CLASSES), 3, 2, 2), generator=g)
    label = torch.cat([torch.tensor(own)[torch.arange(n) % len(own)] for n, own in zip(sizes, OWNED, strict=True)])
    noise = torch.randint(-30, 31, (len(label), 3, 2, 2), generator=g)
    image = (pattern[label] + noise).to(torch.uint8)
    rows = torch.arange(len(label)).split(list(sizes))
    return Federation(table=make(image, label), clients=tuple(rows), test=make(image, label), classes=CLASSES)


def array(x: torch.Tensor) -> np.ndarray:
    return x.double().numpy()


def arrays(a: dict) -> ref.Params:
    return {k: array(x) for k, x in a.items()}


def same(got, want, what: str, **tolerance) -> None:
    """Trees or tensors of the package against arrays of the reference."""
    if isinstance(got, dict):
        assert got.keys() == want.keys(), what
        for k in got:
            same(got[k], want[k], f"{what}, {k}", **tolerance)
    else:
        np.testing.assert_allclose(array(got), want, **(CLOSE | tolerance), err_msg=what)


PLAIN = (optim.SGD(lr=0.1), ref.SGD(lr=0.1))
MOMENTUM = (optim.SGD(lr=0.1, momentum=0.9, weight_decay=1e-3), ref.SGD(lr=0.1, momentum=0.9, weight_decay=1e-3))
# eps is large, since where a gradient is nearly zero Adam's step would be the sign of a rounding error; beta2 is below
# the usual 0.999, of whose 1 - beta2^t float32 keeps only five digits in the first steps.
ADAMW = (
    optim.AdamW(lr=0.02, beta2=0.98, eps=1e-2, weight_decay=0.1),
    ref.AdamW(lr=0.02, beta2=0.98, eps=1e-2, weight_decay=0.1),
)
BOTH = pytest.mark.parametrize("local", [PLAIN, MOMENTUM], ids=["plain", "momentum"])
ALL = pytest.mark.parametrize("local", [PLAIN, MOMENTUM, ADAMW], ids=["plain", "momentum", "adamw"])


class Pair:
    """One run of the package and what the reference needs to do the same."""

    def __init__(self, method, local, *, cohort=COHORT, federation=None, factor=None, clip=None, **options) -> None:
        method.check(local[0])
        self.data = federation or data()
        self.worker = Worker(
            net=Net(method.adapt(module(), 0)),
            method=method,
            optimizer=local[0],
            batch_size=8,
            epochs=1.0,
            clip_gradient=clip,
            **options,
        )
        self.engine = Serial(self.worker, self.data)
        start = begin(self.worker.net, method, 0)
        self.loop = federate(start, method, self.engine, cohort=cohort, seed=SEED, traffic=Traffic())
        shards = [self.data.shard(k) for k in range(len(self.data.clients))]
        ids = list(range(len(shards)))
        self.world = ref.World(
            images=[s["image"].numpy() for s in shards],
            labels=[s["label"].numpy() for s in shards],
            classes=len(CLASSES),
            start=arrays(self.worker.net.init()["params"]),
            plan=lambda n, r, k: self.worker.plan(n, r, k).numpy(),
            cohort=lambda r: choose(ids, cohort, SEED, r),
            optimizer=local[1],
            clip=clip,
            **({} if factor is None else {"factor": factor}),
        )

    def rounds(self, reference, check=lambda server: None, n: int = ROUNDS):
        """Both go on; the models are compared after every round, then whatever `check` compares."""
        for result in islice(self.loop, n):
            assert not result.refused
            reference.round(result.number)
            same(result.server.weights["params"], reference.x, f"model after round {result.number + 1}")
            check(result.server)

    def memory(self, k: int, part: str = "method") -> dict:
        return self.engine.memory.get(k)[part]


@ALL
def test_fedavg(local):
    pair = Pair(methods.FedAvg(), local)
    pair.rounds(ref.FedAvg(pair.world))


def test_the_setting_has_what_the_prototype_tests_need():
    taking_part = [3 in choose(range(6), COHORT, SEED, r) for r in range(ROUNDS)]
    assert taking_part == [False, True, False, True]
    assert [k for k, own in enumerate(OWNED) if 3 in own] == [3]


@BOTH
@pytest.mark.parametrize("mu", [0.01, 1.0])
def test_fedprox(local, mu):
    pair = Pair(methods.FedProx(mu=mu), local)
    pair.rounds(ref.FedProx(pair.world, mu))


@BOTH
@pytest.mark.parametrize("dampening", [0.0, 0.9])
def test_fedavgm(local, dampening):
    pair = Pair(methods.FedAvgM(server=optim.SGD(lr=0.7, momentum=0.9, dampening=dampening)), local)
    pair.rounds(ref.FedAvgM(pair.world, 0.7, 0.9, dampening))


@BOTH
@pytest.mark.parametrize("correct", [False, True], ids=["as in the paper", "bias corrected"])
@pytest.mark.parametrize(("name", "beta1", "beta2"), [("Adam", 0.9, 0.99), ("Yogi", 0.8, 0.9), ("Adagrad", 0.3, 0.0)])
def test_adaptive_servers(local, correct, name, beta1, beta2):
    server = getattr(optim, name)(lr=0.1, beta1=beta1, beta2=beta2, tau=1e-3, bias_correction=correct)
    pair = Pair(getattr(methods, f"Fed{name}")(server=server), local)
    pair.rounds(ref.FedOpt(pair.world, name, 0.1, beta1, beta2, 1e-3, correct))


# The schedules' factors, written out.
HALVING = (schedule.Exponential(decay=0.5), lambda r, step, steps: 0.5**r)
WARM = (
    schedule.Cosine(over=4, warmup=1),
    lambda r, step, steps: (step + 1) / steps if r == 0 else (1 + np.cos(np.pi * (r - 1 + step / steps) / 3)) / 2,
)
SCHEDULES = pytest.mark.parametrize("scheduled", [HALVING, WARM], ids=["exponential", "cosine"])


@SCHEDULES
@ALL
def test_a_schedule_multiplies_the_rate(local, scheduled):
    pair = Pair(methods.FedAvg(), local, schedule=scheduled[0], factor=scheduled[1])
    pair.rounds(ref.FedAvg(pair.world))


@ALL
@pytest.mark.parametrize("gmf", [0.0, 0.5])
def test_fednova(local, gmf):
    pair = Pair(methods.FedNova(server=optim.SGD(lr=1.0, momentum=gmf)), local)
    pair.rounds(ref.FedNova(pair.world, gmf=gmf))


@SCHEDULES
@pytest.mark.parametrize("mu", [0.0, 0.5])
@pytest.mark.parametrize("gmf", [0.0, 0.5])
def test_fednova_on_a_schedule_counts_the_rates_really_applied(scheduled, mu, gmf):
    method = methods.FedNova(mu=mu, server=optim.SGD(lr=1.0, momentum=gmf))
    pair = Pair(method, PLAIN, schedule=scheduled[0], factor=scheduled[1])
    pair.rounds(ref.FedNova(pair.world, mu=mu, gmf=gmf))


def test_fednova_with_a_proximal_term():
    pair = Pair(methods.FedNova(mu=0.5), PLAIN)
    pair.rounds(ref.FedNova(pair.world, mu=0.5))


def scaffold(pair, **options):
    reference = ref.Scaffold(pair.world, **options)
    atol = 1e-5  # (x - y_k) / sum of rates: a difference of two near numbers, divided by as little as 0.04

    def check(server):
        same(server.state["control"], reference.c, "server control", atol=atol)
        for k in pair.engine.memory:
            same(pair.memory(k)["control"], reference.ck[k], f"control of client {k}", atol=atol)

    pair.rounds(reference, check)
    return reference


@pytest.mark.parametrize("server_scale", ["1/N", "1/sampled"])
@pytest.mark.parametrize(
    ("mode", "option", "local"),
    [
        pytest.param(mode, option, local, id=f"{mode}-{option}-{name}")
        for mode in ("sgd", "post", "pre")
        for option in ("I", "II")
        for name, local in (("plain", PLAIN), ("momentum", MOMENTUM), ("adamw", ADAMW))
        # the package refuses the others: in these the control is not in the units of a step
        if local is PLAIN or (mode != "sgd" and (mode, option) != ("post", "I"))
    ],
)
def test_scaffold(mode, option, local, server_scale):
    pair = Pair(methods.Scaffold(mode=mode, option=option, server_scale=server_scale), local)
    reference = scaffold(pair, mode=mode, option=option, sampled=server_scale == "1/sampled")
    # c is the mean over all clients, who begin at zero; dividing by the cohort makes it N / |S| times that
    most = 6 / COHORT if server_scale == "1/sampled" else 1.0
    for name, c in reference.c.items():
        np.testing.assert_allclose(c, most * np.mean([reference.ck[k][name] for k in range(6)], 0), atol=1e-12)


def test_scaffold_after_the_step_is_scaffold_in_the_gradient_for_plain_sgd():
    ends = [list(islice(Pair(methods.Scaffold(mode=mode), PLAIN).loop, ROUNDS))[-1].server for mode in ("post", "sgd")]
    for field, group in (("weights", "params"), ("state", "control")):
        one, other = (getattr(end, field)[group] for end in ends)
        same(one, arrays(other), group, atol=1e-5)


@SCHEDULES
@pytest.mark.parametrize("mode", ["sgd", "post", "pre"])
def test_scaffold_on_a_schedule_divides_by_the_sum_of_rates(mode, scheduled):
    pair = Pair(methods.Scaffold(mode=mode), PLAIN, schedule=scheduled[0], factor=scheduled[1])
    scaffold(pair, mode=mode)


@BOTH
@pytest.mark.parametrize("alpha", [0.01, 0.5])
def test_feddyn(local, alpha):
    pair = Pair(methods.FedDyn(alpha=alpha), local)
    reference = ref.FedDyn(pair.world, alpha)

    def check(server):
        same(server.state["h"], reference.h, "h")
        for k in pair.engine.memory:
            same(pair.memory(k)["g"], reference.g[k], f"g of client {k}")

    pair.rounds(reference, check)
    for name, h in reference.h.items():
        np.testing.assert_allclose(h, np.mean([reference.g[k][name] for k in range(6)], 0), atol=1e-12)


@BOTH
@pytest.mark.parametrize("queue", [1, 2])
def test_moon(local, queue):
    pair = Pair(methods.Moon(mu=2.0, temperature=0.5, projection=None, queue=queue), local)
    reference = ref.Moon(pair.world, 2.0, 0.5, queue)

    def check(server):
        for k in pair.engine.memory:
            memory = pair.memory(k)
            filled = int(memory["filled"].sum())
            assert filled == len(reference.previous[k])
            for j in range(filled):
                same(memory["previous"][str(j)]["params"], reference.previous[k][j], f"client {k}'s model {j}")

    pair.rounds(reference, check)


@BOTH
@pytest.mark.parametrize("owners", ["equal", "rows"])
@pytest.mark.parametrize("share", ["both", "prototypes"])
def test_fedproto(local, share, owners):
    pair = Pair(methods.FedProto(strength=3.0, share=share, owners=owners), local)
    reference = ref.FedProto(pair.world, 3.0, share == "both", owners == "rows")
    if share == "prototypes":
        reference.x = {}  # the server has no model

    def check(server):
        assert server.state["known"].nonzero().flatten().tolist() == sorted(reference.prototype)
        for c, prototype in reference.prototype.items():
            same(server.state["prototypes"][c], prototype, f"prototype of class {c}")
        if share == "prototypes":
            for k in pair.engine.memory:
                same(pair.memory(k, "kept")["params"], reference.own[k], f"model of client {k}")

    pair.rounds(reference, check)


@BOTH
@pytest.mark.parametrize("learn_scale", [True, False])
def test_fednh(local, learn_scale):
    pair = Pair(methods.FedNH(rho=0.6, scale=5.0, learn_scale=learn_scale), local)
    pair.rounds(ref.FedNH(pair.world, 0.6, None if learn_scale else 5.0))


@BOTH
@pytest.mark.parametrize(
    ("a", "b", "metric", "zeros"),
    [
        (0.3, 0.1, "kl", "none"),
        (1.0, 0.1, "kl", "some"),
        (0.1, 0.05, "l2", "none"),
        (0.5, 0.1, "l2", "some"),
        (0.9, 0.0, "l2", "some"),  # without the relu the sum would be negative
        (5.0, 0.0, "l2", "all"),
    ],
)
def test_feddisco(local, a, b, metric, zeros):
    pair = Pair(methods.FedDisco(a=a, b=b, metric=metric), local)
    reference = ref.FedDisco(pair.world, a, b, metric == "kl")
    seen = []
    pair.rounds(reference, lambda server: seen.append(reference.zeros))
    # the relu bites where this case says it does
    assert (max(seen) > 0) == (zeros != "none")
    assert (min(seen) == COHORT) == (zeros == "all")


@BOTH
@pytest.mark.parametrize("temperature", [0.05, 0.5])
def test_fedsc(local, temperature):
    pair = Pair(methods.FedSC(contrast=0.7, consistency=3.0, temperature=temperature), local)
    reference = ref.FedSC(pair.world, 0.7, 3.0, temperature)
    numbers = iter(range(ROUNDS))

    def check(server):
        cohort = pair.world.cohort(next(numbers))
        owned = [[(k, c) in reference.relational for c in range(len(CLASSES))] for k in cohort]
        assert server.state["owned"].tolist() == owned
        for (k, c), prototype in reference.relational.items():
            same(server.state["relational"][cohort.index(k), c], prototype, f"relational prototype {k}, {c}")
        for c, prototype in reference.consistent.items():
            same(server.state["consistent"][c], prototype, f"consistent prototype of class {c}")

    pair.rounds(reference, check)


@pytest.mark.parametrize("owners", [20, 40])
def test_fedsc_finds_the_nearest_prototype_among_many_alike(owners):
    # far from zero and near each other, as the features of clients that agree: |p|^2 + |q|^2 - 2 p q, which torch's
    # cdist takes above 25 rows, has errors as large as the differences between the squared distances
    g = torch.Generator().manual_seed(0)
    p = torch.rand(1, 512, generator=g) + 1e-3 * torch.randn(owners, 512, generator=g)
    far = (p[:, None].double() - p[None].double()).norm(dim=-1).fill_diagonal_(float("inf"))
    want = (p + p[far.argmin(1)]) / 2
    state = collaborate(p[:, None], torch.ones(owners, 1))
    # another partner changes a coordinate by some 1e-3; rounding changes it by 1e-7
    same(state["relational"][:, 0], array(want), "relational prototypes", rtol=0, atol=1e-6)


@ALL
def test_local(local):
    pair = Pair(methods.Local(), local)
    reference = ref.Local(pair.world)
    reference.x = {}  # the server has no model

    def check(server):
        for k in pair.engine.memory:
            same(pair.memory(k, "kept")["params"], reference.own[k], f"model of client {k}")

    pair.rounds(reference, check)


@ALL
def test_centralised_training_goes_on_with_its_optimiser(local):
    whole = data()
    one = Federation(table=whole.table, clients=(torch.cat(whole.clients),), test=whole.test, classes=CLASSES)
    pair = Pair(methods.Centralised(), local, cohort=1, federation=one)
    pair.rounds(ref.Persistent(pair.world))


@pytest.mark.parametrize("local", [MOMENTUM, ADAMW], ids=["momentum", "adamw"])
def test_a_persistent_optimiser_goes_on_where_its_client_last_stopped(local):
    pair = Pair(methods.FedAvg(), local, persist_optimizer=True)
    pair.rounds(ref.Persistent(pair.world))


class Quadratics(nn.Module):
    """Two numbers w; a client's label says which objective of theirs it has."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, -1.0]))


# f_k(w) = sum a_k (w - b_k)^2 / 2: different curvature, so that several local steps drift.
CURVATURE = torch.tensor([[1.0, 0.5], [4.0, 2.0]])
CENTRE = torch.tensor([[3.0, -2.0], [0.0, 1.0]])
LR, STEPS = 0.1, 5


def quadratic_loss(self, weights, batch, ctx):
    w, k = weights["params"]["w"], batch["label"]
    return (CURVATURE[k] * (w - CENTRE[k]) ** 2).sum(1).mean() / 2, Output(w, w, {})


class QuadraticFedAvg(methods.FedAvg):
    loss = quadratic_loss


class QuadraticScaffold(methods.Scaffold):
    loss = quadratic_loss


def quadratic_run(method, rounds: int):
    """-> the server after each round"""
    image, rows = torch.zeros(8, 3, 1, 1, dtype=torch.uint8), torch.arange(8).split(4)
    table = make(image, torch.arange(8) // 4)
    federation = Federation(table=table, clients=tuple(rows), test=table, classes=("one", "two"))
    worker = Worker(net=Net(Quadratics()), method=method, optimizer=optim.SGD(lr=LR), batch_size=4, steps=STEPS)
    start = begin(worker.net, method, 0)
    loop = federate(start, method, Serial(worker, federation), cohort=2, seed=0, traffic=Traffic())
    return [result.server for result in islice(loop, rounds)]


def test_fedavg_on_two_quadratics_stops_where_the_drift_puts_it_and_scaffold_at_the_optimum():
    a, b = CURVATURE.double(), CENTRE.double()
    optimum = (a * b).sum(0) / a.sum(0)
    # a client's K steps take x to b + q (x - b); FedAvg stops where the mean of that is x
    q = (1 - LR * a) ** STEPS
    stop = ((1 - q) * b).sum(0) / (1 - q).sum(0)
    assert (stop - optimum).abs().min() > 0.1
    torch.testing.assert_close(
        quadratic_run(QuadraticFedAvg(), 60)[-1].weights["params"]["w"].double(), stop, rtol=0, atol=1e-6
    )
    for mode in ("sgd", "post", "pre"):
        end = quadratic_run(QuadraticScaffold(mode=mode), 60)[-1].weights["params"]["w"]
        torch.testing.assert_close(end.double(), optimum, rtol=0, atol=1e-6)


def test_two_rounds_of_scaffold_on_two_quadratics_by_hand():
    first, second = quadratic_run(QuadraticScaffold(), 2)
    a, b = CURVATURE.double(), CENTRE.double()
    q, x = (1 - LR * a) ** STEPS, torch.tensor([1.0, -1.0]).double()
    y = b + q * (x - b)  # no controls yet
    c = (x - y) / (STEPS * LR)
    x1 = y.mean(0)
    torch.testing.assert_close(first.weights["params"]["w"].double(), x1, rtol=0, atol=1e-6)
    torch.testing.assert_close(first.state["control"]["w"].double(), c.mean(0), rtol=0, atol=1e-6)
    # the correction c - c_k moves the point that a client's steps approach to b - (c - c_k) / a
    target = b - (c.mean(0) - c) / a
    x2 = (target + q * (x1 - target)).mean(0)
    torch.testing.assert_close(second.weights["params"]["w"].double(), x2, rtol=0, atol=1e-6)


@BOTH
@pytest.mark.parametrize("clip", [0.05, 0.5])
def test_clipping_bounds_the_gradient_that_the_method_made(local, clip):
    pair = Pair(methods.FedProx(mu=1.0), local, clip=clip)
    pair.rounds(ref.FedProx(pair.world, 1.0))
