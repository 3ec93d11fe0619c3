import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprior import tree
from fedprior.aggregate import AGGREGATES, Mean, Median, TrimmedMean, clip
from fedprior.errors import UsageError


def uploads(clients: int, seed: int = 0, dtype=torch.float32) -> list:
    """Uploads of two groups, a counter and an empty group, with unlike weights."""
    g = torch.Generator().manual_seed(seed)
    out = []
    for k in range(clients):
        delta = {"w": torch.randn(3, 2, generator=g).to(dtype), "b": torch.randn((), generator=g).to(dtype)}
        control = {"w": torch.randn(3, 2, generator=g).to(dtype)}
        buffers = {"mean": torch.randn(4, generator=g).to(dtype), "seen": torch.tensor(10 + k)}
        out.append(({"method": {"delta": delta, "control": control, "none": {}}, "buffers": buffers}, 1.0 + 2.5 * k))
    return out


def stacks(items: list) -> dict[str, np.ndarray]:
    """{path: float64 [clients, ...]}"""
    flat = [tree.flatten(item) for item, _ in items]
    return {path: np.stack([f[path].double().numpy() for f in flat]) for path in flat[0]}


def compare(got: dict, want: dict[str, np.ndarray]) -> None:
    """All float leaves agree as closely as one rounding to float32 allows."""
    flat = tree.flatten(got)
    assert list(flat) == list(want)
    for path, values in want.items():
        if path != "buffers/seen":
            np.testing.assert_allclose(flat[path].numpy(), values, rtol=3e-7, atol=1e-12, err_msg=path)


@pytest.mark.parametrize("clients", [1, 2, 5])
def test_the_mean_is_numpys_weighted_average(clients):
    items = uploads(clients)
    weights = [w for _, w in items]
    compare(Mean()(iter(items)), {k: np.average(x, axis=0, weights=weights) for k, x in stacks(items).items()})


def test_in_groups_named_once_each_client_counts_the_same_and_elsewhere_by_weight():
    items = uploads(4)
    weights = [w for _, w in items]
    want = {
        k: x.mean(0) if k.startswith("method/control/") else np.average(x, axis=0, weights=weights)
        for k, x in stacks(items).items()
    }
    compare(Mean()(iter(items), frozenset({"method/control"})), want)


def test_a_group_whose_name_only_begins_like_one_named_once_is_weighted():
    items = [({"method": {"control2": {"x": torch.tensor([float(k)])}}}, 1.0 + 2 * k) for k in range(2)]
    assert Mean()(items, frozenset({"method/control"}))["method"]["control2"]["x"].item() == 0.75
    assert Mean()(items, frozenset({"method/control2"}))["method"]["control2"]["x"].item() == 0.5


@pytest.mark.parametrize("clients", [1, 2, 3, 4, 7, 10])
def test_the_median_is_numpys_and_of_an_even_number_the_mean_of_the_middle_two(clients):
    items = uploads(clients)
    compare(Median()(iter(items)), {k: np.median(x, axis=0) for k, x in stacks(items).items()})


# (clients, trim, how many go at either end): trim * clients rounded up, but always one or two remain
CUTS = [
    (1, 0.1, 0),
    (2, 0.1, 0),
    (2, 0.49, 0),
    (3, 0.0, 0),
    (3, 0.1, 1),
    (3, 0.4, 1),
    (4, 0.25, 1),
    (4, 0.4, 1),
    (5, 0.2, 1),
    (5, 0.21, 2),
    (10, 0.1, 1),
    (10, 0.3, 3),
    (10, 0.11, 2),
    (11, 0.1, 2),
    (10, 0.49, 4),
    (100, 0.07, 7),  # 100 * 0.07 is 7.000000000000001 in floating point
]


@pytest.mark.parametrize(("clients", "trim", "cut"), CUTS)
def test_the_trimmed_mean_drops_the_share_rounded_up_at_either_end(clients, trim, cut):
    items = uploads(clients)
    want = {k: np.sort(x, axis=0)[cut : clients - cut].mean(0) for k, x in stacks(items).items()}
    compare(TrimmedMean(trim=trim)(iter(items)), want)


def test_without_trimming_the_trimmed_mean_is_the_mean_of_equal_clients():
    items = uploads(5)
    equal = [(item, 1.0) for item, _ in items]
    compare(TrimmedMean(trim=0.0)(items), {k: x.numpy() for k, x in tree.flatten(Mean()(equal)).items()})


@pytest.mark.parametrize("rule", [Median(), TrimmedMean(trim=0.3)])
def test_robust_rules_do_not_listen_to_weights_nor_to_the_order_of_clients(rule):
    items = uploads(7)
    bragging = [(item, w * 1e6**k) for k, (item, w) in enumerate(items)]
    want = tree.flatten(rule(items))
    for other in (tree.flatten(rule(bragging)), tree.flatten(rule(items[::-1]))):
        assert all(torch.equal(want[k], other[k]) for k in want if k != "buffers/seen")


@pytest.mark.parametrize("rule", [Mean(), Median(), TrimmedMean()])
def test_integers_come_from_the_client_of_largest_weight_and_from_the_first_on_a_tie(rule):
    items = [({"a": {"n": torch.tensor(n)}}, w) for n, w in ((3, 1.0), (7, 5.0), (9, 5.0), (1, 2.0))]
    got = rule(items)["a"]["n"]
    assert got.item() == 7
    assert got.dtype == torch.int64
    flags = [({"a": {"n": torch.tensor([n])}}, w) for n, w in ((False, 1.0), (True, 3.0), (False, 2.0))]
    assert rule(flags)["a"]["n"].tolist() == [True]


@pytest.mark.parametrize("rule", [Mean(), Median(), TrimmedMean(trim=0.3)])
@pytest.mark.parametrize("clients", [1, 4])
def test_the_result_has_the_uploads_names_types_and_shapes_and_leaves_them_alone(rule, clients):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        items = uploads(clients, dtype=dtype)
        before = [{k: x.clone() for k, x in tree.flatten(item).items()} for item, _ in items]
        got = rule(iter(items))
        assert got["method"]["none"] == {}
        flat = tree.flatten(got)
        assert list(flat) == list(before[0])
        for path, x in flat.items():
            assert (x.dtype, x.shape) == (before[0][path].dtype, before[0][path].shape)
            x.zero_()  # what the server does to its tree must not reach an upload
        for (item, _), old in zip(items, before, strict=True):
            assert all(torch.equal(x, old[path]) for path, x in tree.flatten(item).items())


@pytest.mark.parametrize("rule", [Mean(), Median(), TrimmedMean()])
def test_of_one_client_every_rule_gives_back_its_upload(rule):
    items = uploads(1)
    got, want = tree.flatten(rule(items)), tree.flatten(items[0][0])
    assert all(torch.equal(got[k], want[k]) for k in want)


@pytest.mark.parametrize("rule", [Mean(), Median(), TrimmedMean()])
def test_nothing_has_no_aggregate(rule):
    with pytest.raises(ValueError, match=r"nothing to aggregate|at least one"):
        rule([])


@pytest.mark.parametrize("trim", [-0.1, 0.5, 1.0, float("nan")])
def test_an_impossible_trim_is_refused(trim):
    with pytest.raises(UsageError, match=r"aggregate\.trim"):
        TrimmedMean(trim=trim)


def test_the_rules_by_name():
    assert {name: rule() for name, rule in AGGREGATES.items()} == {
        "mean": Mean(),
        "trimmed_mean": TrimmedMean(),
        "median": Median(),
    }


numbers = st.floats(-100, 100, width=32)
huge = st.one_of(st.floats(2.0**20, 2.0**100, width=32), st.floats(-(2.0**100), -(2.0**20), width=32))


@settings(deadline=None)
@given(data=st.data(), honest=st.lists(numbers, min_size=2, max_size=9))
def test_a_minority_of_huge_outliers_does_not_leave_the_range_of_the_honest_by_median_or_trimmed_mean(data, honest):
    """The rules' guarantee: fewer liars than half (median) or at most `cut` (trimmed mean), wherever they stand."""
    clients = len(honest)
    lies = data.draw(st.lists(huge, min_size=1, max_size=clients - 1), label="lies")
    weights = data.draw(st.lists(st.floats(0.1, 1e9), min_size=2 * clients, max_size=2 * clients), label="weights")
    values = data.draw(st.permutations(honest + lies), label="order")
    items = [({"x": torch.tensor([v])}, w) for v, w in zip(values, weights, strict=False)]
    share = math.nextafter(0.5, 0)  # as much as can be cut: (n - 1) // 2 at either end, at least as many as lie
    for rule in (Median(), TrimmedMean(trim=share)):
        got = rule(items)["x"].item()
        assert min(honest) <= got <= max(honest), rule


def test_one_huge_outlier_moves_the_mean_but_neither_the_median_nor_the_trimmed_mean():
    honest = [1.0, 2.0, 3.0, 4.0]
    items = [({"x": torch.tensor([v])}, 1.0) for v in [*honest, 1e9]]
    assert Mean()(items)["x"].item() > 1e8
    assert Median()(items)["x"].item() == 3.0
    assert TrimmedMean(trim=0.2)(items)["x"].item() == 3.0
    assert TrimmedMean(trim=0.0)(items)["x"].item() > 1e8


@pytest.mark.parametrize("most", [1e-3, 0.5, 2.0])
def test_clipping_scales_the_update_to_the_norm_in_its_own_direction(most):
    upload = uploads(1)[0][0]
    delta = upload["method"]["delta"]
    before = {k: x.clone() for k, x in delta.items()}
    norm = math.sqrt(sum(float(x.double().square().sum()) for x in delta.values()))
    assert norm > 2.0
    clipped = clip(upload, most)
    assert tree.norm(clipped["method"]["delta"]) == pytest.approx(most, rel=1e-6)  # float32 leaves
    for name, x in clipped["method"]["delta"].items():
        torch.testing.assert_close(x, before[name] * (most / norm), rtol=1e-6, atol=0)
        assert torch.equal(delta[name], before[name])  # the upload itself is not written to


def test_clipping_leaves_a_short_update_as_it_is_to_the_bit():
    upload = uploads(1)[0][0]
    norm = tree.norm(upload["method"]["delta"])
    before = {k: x.clone() for k, x in tree.flatten(upload).items()}
    for most in (norm, norm * 1.0001, 1e9):
        got = tree.flatten(clip(upload, most))
        assert list(got) == list(before)
        assert all(torch.equal(got[k], before[k]) for k in before)


def test_clipping_touches_no_other_group_and_counts_none_in_the_norm():
    upload = uploads(1)[0][0]
    upload["method"]["control"]["w"] = torch.full((3, 2), 1e6)
    upload["buffers"]["mean"] = torch.full((4,), 1e6)
    assert clip(upload, tree.norm(upload["method"]["delta"])) is upload
    got = clip(upload, 0.1)
    assert list(tree.flatten(got)) == list(tree.flatten(upload))
    assert torch.equal(got["method"]["control"]["w"], upload["method"]["control"]["w"])
    assert got["buffers"] is upload["buffers"]


def test_clipping_an_upload_without_a_model_update_is_nothing():
    for method in ({}, {"delta": {}}, {"prototypes": torch.full((2, 2), 1e6)}):
        upload = {"method": method, "buffers": {}}
        assert clip(upload, 0.1) is upload


def test_clipping_to_zero_gives_an_update_of_zeros():
    got = clip(uploads(1)[0][0], 0.0)["method"]["delta"]
    assert all(not x.any() for x in got.values())
