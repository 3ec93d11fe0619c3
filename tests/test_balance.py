import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from fedprior.errors import UsageError
from fedprior.prepare.balance import (
    BALANCES,
    BalanceToMax,
    FixedBudget,
    MissingOnly,
    Ratio,
    plan,
)

WORKED = np.array([[250, 100, 0]])
counts = arrays(np.int64, array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=6), elements=st.integers(0, 12))


def one_by_one(row, budget, stop_when_level):
    """Images handed out singly, each to the class that then is the smallest, the first of several."""
    now = row.tolist()
    for _ in range(budget):
        smallest = min(range(len(now)), key=lambda y: (now[y], y))
        if stop_when_level and now[smallest] == max(row):
            break
        now[smallest] += 1
    return [a - b for a, b in zip(now, row.tolist(), strict=True)]


def test_the_worked_example_of_the_paper():
    """Gen-FedSD: 250 cats, 100 dogs, 0 frogs -> 0, 150, 250 images."""
    assert BalanceToMax().allocate(WORKED).tolist() == [[0, 150, 250]]
    assert MissingOnly().allocate(WORKED).tolist() == [[0, 0, 250]]
    assert FixedBudget(budget=120).allocate(WORKED).tolist() == [[0, 10, 110]]
    assert Ratio(ratio=0.1).allocate(WORKED).tolist() == [[0, 0, 35]]


def test_a_client_with_one_class_gets_all_others():
    assert BalanceToMax().allocate(np.array([[0, 7, 0, 0]])).tolist() == [[7, 0, 7, 7]]


@given(counts)
def test_balance_to_max_makes_every_class_as_large_as_the_largest(n):
    after = n + BalanceToMax().allocate(n)
    assert (after == n.max(1, keepdims=True)).all()
    assert after.sum() == n.shape[1] * n.max(1).sum()


@given(counts, st.integers(1, 12))
def test_a_cap_lowers_the_target_and_takes_nothing_away(n, cap):
    for k, row in enumerate(n.tolist()):
        target = min(max(row), cap)
        assert BalanceToMax(cap=cap).allocate(n)[k].tolist() == [max(0, target - c) for c in row]
        assert MissingOnly(cap=cap).allocate(n)[k].tolist() == [target if c == 0 else 0 for c in row]


@given(counts)
def test_missing_only_fills_nothing_but_empty_classes(n):
    expected = [[max(row) if c == 0 else 0 for c in row] for row in n.tolist()]
    assert MissingOnly().allocate(n).tolist() == expected


@given(counts, st.integers(0, 80))
@example(np.array([[0, 0, 0, 9]]), 2)
def test_a_fixed_budget_goes_one_by_one_to_the_smallest_class_until_level(n, budget):
    expected = [one_by_one(row, budget, stop_when_level=True) for row in n]
    assert FixedBudget(budget=budget).allocate(n).tolist() == expected


@given(counts, st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.3]))
def test_a_ratio_is_spent_in_full_and_one_by_one_on_the_smallest_class(n, ratio):
    images = Ratio(ratio=ratio).allocate(n)
    assert images.tolist() == [one_by_one(row, round(ratio * int(row.sum())), stop_when_level=False) for row in n]


@given(counts)
def test_an_unlimited_budget_is_balance_to_max(n):
    assert (FixedBudget(budget=10**6).allocate(n) == BalanceToMax().allocate(n)).all()


@pytest.mark.parametrize("name", BALANCES)
@pytest.mark.parametrize("pool", ["shared", "per_client"])
@given(n=counts)
def test_no_rule_gives_images_to_a_client_without_real_rows_or_takes_any_away(name, pool, n):
    n = n.copy()
    n[0] = 0
    p = plan(BALANCES[name](pool=pool), n)
    assert p.allocation.dtype == p.pool_sizes.dtype == np.int64
    assert p.allocation[0].sum() == 0
    assert (p.allocation >= 0).all()
    assert p.repeats == 0


@given(counts, st.integers(1, 15))
def test_a_plan_counts_distinct_images_rows_and_repeats(n, size):
    need = BalanceToMax().allocate(n)
    neediest = plan(BalanceToMax(), n)
    own = plan(BalanceToMax(pool="per_client"), n)
    small = plan(BalanceToMax(pool_size=size), n)
    assert neediest.pool_sizes.tolist() == [max(column) for column in need.T.tolist()]
    assert own.pool_sizes.tolist() == [sum(column) for column in need.T.tolist()]
    assert small.pool_sizes.tolist() == [min(size, sum(column)) for column in need.T.tolist()]
    assert small.repeats == sum(max(0, m - size) for row in need.tolist() for m in row)
    for p in (neediest, own, small):
        assert (p.allocation == need).all()
        assert p.rows == need.sum()
        assert p.images == sum(p.pool_sizes.tolist())


def test_a_pool_size_without_a_shared_pool_is_refused():
    with pytest.raises(UsageError, match=r"balance\.pool_size needs balance\.pool=shared"):
        plan(BalanceToMax(pool="per_client", pool_size=3), WORKED)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: BalanceToMax(cap=-1), "balance.cap must be at least 0, not -1"),
        (lambda: MissingOnly(cap=-2), "balance.cap must be at least 0, not -2"),
        (lambda: FixedBudget(budget=-1), "balance.budget must be at least 0, not -1"),
        (lambda: Ratio(ratio=-0.5), "balance.ratio must be a number of at least 0, not -0.5"),
        (lambda: Ratio(ratio=float("nan")), "balance.ratio"),
        (lambda: Ratio(ratio=float("inf")), "balance.ratio"),
        (lambda: Ratio(attempts=0), "balance.attempts must be at least 1, not 0"),
        (lambda: FixedBudget(pool_size=-1), "balance.pool_size must be at least 0"),
        (lambda: MissingOnly(pool="share"), "unknown value for balance.pool 'share'; did you mean shared?"),
    ],
)
def test_a_bad_value_is_named_by_its_key(make, says):
    with pytest.raises(UsageError) as error:
        make()
    assert says in str(error.value)


def test_the_short_name_of_gen_fedsd_is_the_one_written_down():
    assert next(name for name, rule in BALANCES.items() if rule is BalanceToMax) == "max"
    assert BALANCES["balance_to_max"] is BalanceToMax
