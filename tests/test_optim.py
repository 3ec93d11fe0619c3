import math

import numpy as np
import pytest
import torch

from fedprior.errors import UsageError
from fedprior.optim import SERVER_OPTIMIZERS, SGD, Adagrad, Adam, AdamW, Yogi

TWINS = [
    (SGD(lr=0.1), torch.optim.SGD, {"lr": 0.1}),
    (
        SGD(lr=0.1, momentum=0.9, weight_decay=0.01),
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    ),
    (AdamW(lr=0.01, weight_decay=0.1), torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    (
        AdamW(lr=0.01, beta1=0.5, beta2=0.8, eps=1e-3),
        torch.optim.AdamW,
        {"lr": 0.01, "betas": (0.5, 0.8), "eps": 1e-3},
    ),
]


@pytest.mark.parametrize(("ours", "theirs", "options"), TWINS)
def test_ten_steps_equal_torchs_optimiser(ours, theirs, options):
    g = torch.Generator().manual_seed(0)
    params = {"a": torch.randn(3, 4, generator=g), "b": torch.randn(5, generator=g)}
    twin = [torch.nn.Parameter(p.clone()) for p in params.values()]
    opt, state = theirs(twin, **options), ours.init(params)
    for _ in range(10):
        grads = {k: torch.randn(p.shape, generator=g) for k, p in params.items()}
        for p, grad in zip(twin, grads.values(), strict=True):
            p.grad = grad.clone()
        opt.step()
        params, state = ours.update(grads, state, params)
        for p, q in zip(params.values(), twin, strict=True):
            torch.testing.assert_close(p, q.detach(), rtol=2e-6, atol=2e-7)


def test_update_does_not_write_to_its_arguments():
    for optimizer in (SGD(momentum=0.9), AdamW()):
        params, grads = {"a": torch.ones(2)}, {"a": torch.full((2,), 0.5)}
        state = optimizer.init(params)
        _, second = optimizer.update(grads, state, params)
        optimizer.update(grads, second, params)
        assert params["a"].tolist() == [1, 1]
        assert grads["a"].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_sgd_length_is_the_summed_weight_of_constant_gradients(steps):
    optimizer = SGD(lr=0.1, momentum=0.7)
    params, grads = {"a": torch.zeros(1, dtype=torch.float64)}, {"a": torch.ones(1, dtype=torch.float64)}
    state = optimizer.init(params)
    for _ in range(steps):
        params, state = optimizer.update(grads, state, params)
    assert -params["a"].item() == pytest.approx(optimizer.length([0.1] * steps))
    formula = (steps - 0.7 * (1 - 0.7**steps) / 0.3) / 0.3  # FedNova, section 3
    assert optimizer.length([0.1] * steps) == pytest.approx(0.1 * formula)


@pytest.mark.parametrize("bad", [{"lr": -1.0}, {"lr": float("nan")}, {"momentum": 1.0}, {"weight_decay": float("inf")}])
def test_impossible_values_are_refused(bad):
    with pytest.raises(UsageError, match=next(iter(bad))):
        SGD(**bad)


# the server's adaptive optimisers

SECOND = {
    Adam: lambda v, d, beta2: beta2 * v + (1 - beta2) * d**2,
    Yogi: lambda v, d, beta2: v - (1 - beta2) * d**2 * np.sign(v - d**2),
    Adagrad: lambda v, d, beta2: v + d**2,
}


def numpys_adaptive(kind, x, deltas, lr, beta1, beta2, tau, bias_correction=False):
    """Algorithm 2 of arXiv:2003.00295 for mean updates D (not gradients): x after each of them."""
    m, v, out = np.zeros_like(x), np.full_like(x, tau**2), []
    for t, d in enumerate(deltas, start=1):
        m = beta1 * m + (1 - beta1) * d
        v = SECOND[kind](v, d, beta2)
        rate = lr * math.sqrt(1 - beta2**t) / (1 - beta1**t) if bias_correction else lr
        x = x + rate * m / (np.sqrt(v) + tau)
        out.append(x)
    return out


def through(optimizer, x, deltas, scale=1.0):
    """The same from ours, in float64: x after each."""
    params, out = {"a": torch.from_numpy(x)}, []
    state = optimizer.init(params)
    for d in deltas:
        params, state = optimizer.update({"a": torch.from_numpy(-d)}, state, params, scale)
        out.append(params["a"].numpy())
    return out


SETTINGS = {
    "as by default": {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3},
    "other": {"lr": 0.03, "beta1": 0.6, "beta2": 0.5, "tau": 0.1},
    "no momentum": {"lr": 0.5, "beta1": 0.0, "beta2": 0.0, "tau": 0.02},
}


@pytest.mark.parametrize("kind", SECOND)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("bias_correction", [False, True])
def test_the_servers_adaptive_steps_are_the_papers_in_plain_numpy(kind, settings, bias_correction):
    """Updates far above and far below tau: Yogi's v falls after the first and rises after the second."""
    rng, options = np.random.default_rng(0), SETTINGS[settings] | ({"beta2": 0.0} if kind is Adagrad else {})
    x = rng.normal(size=6)
    deltas = [rng.normal(size=6) * size for size in (1.0, 1e-4, 0.3, 0.05)]
    got = through(kind(**options, bias_correction=bias_correction), x, deltas)
    for ours, theirs in zip(
        got, numpys_adaptive(kind, x, deltas, **options, bias_correction=bias_correction), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-14)


def test_two_steps_of_each_by_hand():
    """x = 0, D = 2 then 1, tau = 1, lr = 1, beta1 = beta2 = 0.5: m is 1 and then 1 for all three."""
    options = {"lr": 1.0, "beta1": 0.5, "tau": 1.0}
    two = {
        Adam: (2.5, 1.75),  # 0.5 x 1 + 0.5 x 4, 0.5 x 2.5 + 0.5 x 1
        Yogi: (3.0, 2.5),  # 1 + 0.5 x 4 as 1 < 4, 3 - 0.5 x 1 as 3 > 1
        Adagrad: (5.0, 6.0),  # 1 + 4, + 1
    }
    for kind, (v1, v2) in two.items():
        first = 1 / (math.sqrt(v1) + 1)
        want = [first, first + 1 / (math.sqrt(v2) + 1)]
        more = {} if kind is Adagrad else {"beta2": 0.5}
        got = through(kind(**options, **more), np.zeros(1), [np.array([2.0]), np.array([1.0])])
        assert [x.item() for x in got] == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("kind", SECOND)
def test_v_starts_at_tau_squared_and_m_and_t_at_zero(kind):
    params = {"a": torch.randn(3, generator=torch.Generator().manual_seed(0)), "b": {"c": torch.ones(2, 2)}}
    state = kind(tau=0.25).init(params)
    assert state["v"]["a"].tolist() == [0.0625] * 3
    assert state["v"]["b"]["c"].tolist() == [[0.0625] * 2] * 2
    assert not state["m"]["a"].any()
    assert (state["t"].dtype, state["t"].item()) == (torch.int64, 0)
    after, state = kind(tau=0.25, lr=1.0).update({"a": torch.zeros(3), "b": {"c": torch.zeros(2, 2)}}, state, params)
    assert torch.equal(after["a"], params["a"])  # no update, no step
    assert state["t"].item() == 1


@pytest.mark.parametrize("kind", SECOND)
def test_a_first_step_without_momentum_is_about_the_rate_in_each_coordinates_own_direction(kind):
    """|D| >> tau, v of the order of D^2: that is what makes them adaptive, and the sign the way of the update."""
    got = through(kind(lr=0.1, beta1=0.0, beta2=0.0, tau=1e-6), np.zeros(3), [np.array([3.0, -0.02, 500.0])])[0]
    np.testing.assert_allclose(got, [0.1, -0.1, 0.1], rtol=1e-3)


def test_bias_correction_makes_the_first_step_of_adam_as_long_as_the_rate():
    d = [np.array([0.5, -20.0])]
    got = through(Adam(lr=0.1, tau=1e-9, bias_correction=True), np.zeros(2), d)[0]
    np.testing.assert_allclose(got, [0.1, -0.1], rtol=1e-6)
    plain = through(Adam(lr=0.1, tau=1e-9), np.zeros(2), d)[0]
    np.testing.assert_allclose(plain, [0.1, -0.1], rtol=1e-6)  # (1 - 0.9) / sqrt(1 - 0.99) is 1 by chance
    other = through(Adam(lr=0.1, tau=1e-9, beta2=0.999), np.zeros(2), d)[0]
    np.testing.assert_allclose(other, np.array([0.1, -0.1]) * 0.1 / math.sqrt(0.001), rtol=1e-6)


@pytest.mark.parametrize("optimizer", [kind(lr=0.08) for kind in (SGD, AdamW, Adam, Yogi, Adagrad)], ids=repr)
def test_a_scale_is_another_rate(optimizer):
    """A quarter, which is exact in floating point: the steps are the same to the bit."""
    rng = np.random.default_rng(1)
    x, deltas = rng.normal(size=5), [rng.normal(size=5) for _ in range(3)]
    other = type(optimizer)(lr=0.02)
    for a, b in zip(through(optimizer, x, deltas, scale=0.25), through(other, x, deltas), strict=True):
        np.testing.assert_array_equal(a, b)
    assert abs(through(optimizer, x, deltas)[-1] - a).max() > 1e-3


@pytest.mark.parametrize("kind", SECOND)
def test_the_adaptive_steps_do_not_write_to_their_arguments(kind):
    params, grads = {"a": torch.ones(2)}, {"a": torch.full((2,), 0.5)}
    optimizer = kind()
    state = optimizer.init(params)
    _, second = optimizer.update(grads, state, params)
    kept = {k: (x["a"] if isinstance(x, dict) else x).clone() for k, x in second.items()}
    optimizer.update(grads, second, params)
    assert params["a"].tolist() == [1, 1]
    assert grads["a"].tolist() == [0.5, 0.5]
    assert state["t"].item() == 0
    assert not state["m"]["a"].any()
    assert all(torch.equal(kept[k], x["a"] if isinstance(x, dict) else x) for k, x in second.items())


@pytest.mark.parametrize("kind", [*SECOND, AdamW])
@pytest.mark.parametrize("bad", [{"lr": -1.0}, {"lr": float("nan")}, {"beta1": 1.0}, {"beta2": 1.0}, {"beta1": -0.1}])
def test_impossible_values_of_the_adaptive_ones_are_refused(kind, bad):
    with pytest.raises(UsageError, match=next(iter(bad))):
        kind(**bad)


@pytest.mark.parametrize("kind", SECOND)
@pytest.mark.parametrize("tau", [0.0, -1e-3, float("nan"), float("inf")])
def test_tau_must_be_a_number_above_zero(kind, tau):
    with pytest.raises(UsageError, match="tau"):
        kind(tau=tau)


def test_the_papers_defaults():
    """lr 0.1 and tau 1e-3 stand in section 5 of arXiv:2003.00295, beta1 0.9 and beta2 0.99 too; Adagrad has neither."""
    for kind in (Adam, Yogi):
        o = kind()
        assert (o.lr, o.beta1, o.beta2, o.tau, o.bias_correction) == (0.1, 0.9, 0.99, 1e-3, False)
    assert (Adagrad().beta1, Adagrad().tau) == (0.0, 1e-3)
    assert {name: SERVER_OPTIMIZERS[name] for name in ("adam", "yogi", "adagrad")} == {
        "adam": Adam,
        "yogi": Yogi,
        "adagrad": Adagrad,
    }


# dampening and length


def test_dampening_scales_every_gradient_the_first_one_too():
    rng = np.random.default_rng(0)
    x, v, grads = rng.normal(size=4), np.zeros(4), [rng.normal(size=4) for _ in range(4)]
    params = {"a": torch.from_numpy(x)}
    optimizer = SGD(lr=0.1, momentum=0.8, dampening=0.3, weight_decay=0.05)
    state = optimizer.init(params)
    for g in grads:
        v = 0.8 * v + 0.7 * (g + 0.05 * x)
        x = x - 0.1 * v
        params, state = optimizer.update({"a": torch.from_numpy(g)}, state, params)
        np.testing.assert_allclose(params["a"].numpy(), x, rtol=1e-12)


def test_dampening_as_much_as_momentum_gives_a_moving_average_of_gradients():
    """Under a constant gradient of one, v after t steps is 1 - momentum^t."""
    optimizer = SGD(lr=1.0, momentum=0.9, dampening=0.9)
    params, gradient = {"a": torch.zeros(1, dtype=torch.float64)}, torch.ones(1, dtype=torch.float64)
    state = optimizer.init(params)
    for t in range(1, 6):
        params, state = optimizer.update({"a": gradient}, state, params)
        assert state["velocity"]["a"].item() == pytest.approx(1 - 0.9**t, rel=1e-12)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"dampening": 0.5}, "without momentum"),
        ({"dampening": 1.0, "momentum": 0.5}, "dampening"),
        ({"dampening": -0.1, "momentum": 0.5}, "dampening"),
    ],
)
def test_impossible_dampening_is_refused(options, word):
    with pytest.raises(UsageError, match=word):
        SGD(**options)


RATES = {
    "one": [0.1],
    "equal": [0.1] * 7,
    "falling": [0.2 * 0.8**i for i in range(9)],
    "rising and falling": [0.05, 0.1, 0.2, 0.1, 0.02, 0.0, 0.3],
    "none": [],
}


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("pull", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("momentum", [{}, {"momentum": 0.9}, {"momentum": 0.6, "dampening": 0.4}], ids=str)
def test_sgd_length_is_the_way_gone_under_gradients_of_one_and_a_proximal_pull(rates, pull, momentum):
    """Simulated with the optimiser itself, each step at its own rate, the pull as part of the gradient."""
    optimizer = SGD(lr=0.1, **momentum)
    params = {"a": torch.zeros(1, dtype=torch.float64)}
    state = optimizer.init(params)
    for rate in RATES[rates]:
        gradient = {"a": 1 + pull * params["a"]}  # mu (w - start), start at zero
        params, state = optimizer.update(gradient, state, params, scale=rate / 0.1)
    assert optimizer.length(RATES[rates], pull) == pytest.approx(-params["a"].item(), rel=1e-12, abs=1e-15)


def test_sgd_length_in_fednovas_closed_forms():
    """arXiv:2007.07481, section 3: plain SGD, and SGD with a proximal term."""
    assert SGD().length([0.1] * 5) == pytest.approx(0.5, rel=1e-12)
    assert SGD().length([0.1, 0.2, 0.05]) == pytest.approx(0.35, rel=1e-12)
    alpha = 0.1 * 0.5
    assert SGD().length([0.1] * 8, pull=0.5) == pytest.approx(0.1 * (1 - (1 - alpha) ** 8) / alpha, rel=1e-12)


@pytest.mark.parametrize("kind", [AdamW, *SECOND])
def test_the_length_of_adaptive_steps_is_the_sum_of_their_rates(kind):
    assert kind().length([0.1, 0.02, 0.3]) == pytest.approx(0.42, rel=1e-12)
    assert kind().length([0.1, 0.02, 0.3], pull=2.0) == pytest.approx(0.42, rel=1e-12)


def test_adagrad_has_no_beta2():
    with pytest.raises(UsageError, match="no beta2"):
        Adagrad(beta2=0.9)


@pytest.mark.parametrize("t", [1, 2, 10, 1000])
def test_adamws_bias_correction_is_exact_in_float32(t):
    """1 - 0.999^t by subtraction would be off by 1e-5 at first."""
    params = {"a": torch.zeros(1)}
    state = {"m": {"a": torch.ones(1)}, "v": {"a": torch.ones(1)}, "t": torch.tensor(float(t - 1))}
    moved, _ = AdamW(lr=1.0, weight_decay=0.0, eps=0.0).update({"a": torch.ones(1)}, state, params)
    assert -moved["a"].item() == pytest.approx(math.sqrt(1 - 0.999**t) / (1 - 0.9**t), rel=5e-7)
