import pytest
import torch

from fedprior.errors import UsageError
from fedprior.optim import SGD, AdamW

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
