from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from fedprior.errors import UsageError, UserError
from fedprior.prepare.balance import (
    BALANCES,
    BalanceToMax,
    Discrepancy,
    FixedBudget,
    GlobalTarget,
    MissingOnly,
    Ratio,
    plan,
    staying,
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
    assert GlobalTarget().allocate(WORKED).tolist() == [[0, 150, 250]]


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
    assert (p.kept == n).all()


@given(counts, st.integers(0, 60))
def test_with_dropping_every_client_has_the_budget_in_level_classes(n, budget):
    rule = FixedBudget(budget=budget, drop=True)
    kept, made = rule.keep(n), rule.allocate(n)
    after = kept + made
    assert ((kept >= 0) & (kept <= n) & (made >= 0)).all()
    assert ((made == 0) | (kept == n)).all()  # no class both drops rows and gets images
    for before, row in zip(n.sum(1), after, strict=True):
        assert row.sum() == (0 if before == 0 else budget or before)
        assert row.max() - row.min() <= 1
    assert (rule.keep(after) == after).all()
    assert (rule.allocate(after) == 0).all()


@given(arrays(np.int64, (1, 3), elements=st.integers(0, 6)), st.integers(1, 9))
def test_dropping_drops_no_more_than_level_classes_cost(n, budget):
    if not n.any():
        return
    level = [t for t in product(range(budget + 1), repeat=3) if sum(t) == budget and max(t) - min(t) <= 1]
    fewest = min(sum(max(0, have - want) for have, want in zip(n[0].tolist(), t, strict=True)) for t in level)
    assert (n - FixedBudget(budget=budget, drop=True).keep(n)).sum() == fewest


def test_dropping_by_hand():
    rule = FixedBudget(budget=0, drop=True)
    assert rule.keep(WORKED).tolist() == [[117, 100, 0]]
    assert rule.allocate(WORKED).tolist() == [[0, 17, 116]]
    assert plan(rule, WORKED).kept.tolist() == [[117, 100, 0]]
    assert FixedBudget(budget=7, drop=True).keep(np.array([[1, 1, 9]])).tolist() == [[1, 1, 3]]


@given(arrays(np.int64, st.integers(0, 40), elements=st.integers(0, 2)), st.integers(0, 3))
def test_the_rows_that_stay_are_as_many_as_asked_and_fewer_are_among_more(label, seed):
    held = np.bincount(label, minlength=3)
    less, more = held // 3, (held + 1) // 2
    few, many = (staying(label, kept, seed, 4) for kept in (less, more))
    assert np.bincount(label[few], minlength=3).tolist() == less.tolist()
    assert np.bincount(label[many], minlength=3).tolist() == more.tolist()
    assert set(few.tolist()) <= set(many.tolist())
    assert few.tolist() == sorted(few.tolist())
    assert staying(label, held, seed, 4).tolist() == list(range(len(label)))


def test_which_rows_stay_is_by_chance_and_by_seed_and_client():
    label, kept = np.zeros(30, dtype=np.int64), np.array([10])
    often = np.zeros(30)
    for seed in range(600):
        often[staying(label, kept, seed, 0)] += 1
    assert ((often - 200) ** 2 / (200 * 2 / 3)).sum() < 60  # about chi square, 29 degrees of freedom
    assert staying(label, kept, 1, 0).tolist() != staying(label, kept, 1, 1).tolist()


@given(counts)
def test_a_uniform_target_is_balance_to_max(n):
    images = GlobalTarget().allocate(n)
    assert (images == BalanceToMax().allocate(n)).all()
    assert (GlobalTarget().allocate(n + images) == 0).all()


@given(
    arrays(np.int64, (2, 4), elements=st.integers(0, 30)),
    st.permutations([Fraction(1, 2), Fraction(1, 4), Fraction(1, 4), Fraction(0)]),
)
@example(np.array([[3, 0, 0, 9], [0, 0, 0, 5]]), [Fraction(1, 4), Fraction(1, 2), Fraction(1, 4), Fraction(0)])
def test_a_target_is_the_smallest_total_that_needs_no_row_dropped(n, shares):
    rule = GlobalTarget(target=",".join(str(float(3 * p)) for p in shares))
    for row, images in zip(n.tolist(), rule.allocate(n).tolist(), strict=True):
        quarters = next(
            t for t in range(1000) if all(Fraction(t, 4) * p >= c for p, c in zip(shares, row, strict=True) if p)
        )
        total = Fraction(quarters, 4)
        expected = [round(total * p) - c if p else 0 for p, c in zip(shares, row, strict=True)]
        assert images == expected
        assert min(images) >= 0


@given(counts, st.integers(1, 40))
def test_the_global_target_brings_a_client_near_the_shares_of_all(n, cap):
    images = GlobalTarget(target="global").allocate(n)
    capped = GlobalTarget(target="global", cap=cap).allocate(n)
    p = n.sum(0) / max(1, n.sum())
    for row, made, fewer in zip(n, images, capped, strict=True):
        total = max([c / share for c, share in zip(row, p, strict=True) if share], default=0)
        assert np.abs(row + made - total * p).max() <= 0.5 + 1e-9
        assert (fewer == np.maximum(0, np.rint(min(total, cap) * p) - row)).all()
        assert (made[row == total * p] == 0).all()
    if len(n) == 1:
        assert images.sum() == 0


def test_shares_come_from_a_file_too(tmp_path):
    path = tmp_path / "shares.txt"
    path.write_text("# mine\ntall_oak = 2\ncat = 1\ndog = 0\n")
    rule = GlobalTarget(target=str(path)).of(["cat", "dog", "tall oak"])
    assert rule == GlobalTarget(target="1.0,0.0,2.0")
    assert plan(GlobalTarget(target=str(path)), WORKED, ["cat", "dog", "tall oak"]).allocation.tolist() == [[0, 0, 500]]
    assert GlobalTarget().of(["cat"]) == GlobalTarget()
    assert BalanceToMax().of(["cat"]) == BalanceToMax()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("cat = 1\n", "has no share for class 'dog'; add a line 'dog = 0' or more"),
        ("cat = 1\ndgo = 1\n", "line 2: the data have no class 'dgo'; the nearest is 'dog'"),
        ("cat = 1\ndog = many\n", "the share of 'dog' must be a number of at least 0, not 'many'"),
        ("cat = 1\ndog = -1\n", "the share of 'dog' must be a number of at least 0, not '-1'"),
        ("cat = 1\ndog = nan\n", "the share of 'dog'"),
        ("cat = 0\ndog = 0\n", "gives no class a share above 0"),
        ("cat 1\n", "line 1: 'cat 1' is not of the form 'class = share'"),
    ],
)
def test_a_bad_file_of_shares_is_named(tmp_path, text, says):
    path = tmp_path / "shares.txt"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        GlobalTarget(target=str(path)).of(["cat", "dog"])
    assert says in str(error.value)
    assert str(path) in str(error.value)


def test_a_target_that_is_no_file_names_the_choices():
    with pytest.raises(UserError, match="no shares at 'unifrom'; choose uniform, global, shares with commas or a text"):
        GlobalTarget(target="unifrom").of(["cat"])


@given(arrays(np.int64, (2, 3), elements=st.integers(0, 5)), st.integers(0, 7))
@example(np.array([[4, 0, 0], [0, 1, 1]]), 5)
def test_a_discrepancy_is_shared_out_as_near_as_whole_images_can(n, budget):
    """Largest remainders minimise the squared distance to the exact shares."""
    everyone = n.sum(0).tolist()
    for row, images in zip(n.tolist(), Discrepancy(budget=budget).allocate(n).tolist(), strict=True):
        if not sum(row):
            assert sum(images) == 0
            continue
        lack = [
            max(Fraction(0), Fraction(a, sum(everyone)) - Fraction(c, sum(row)))
            for a, c in zip(everyone, row, strict=True)
        ]
        if not sum(lack):
            assert sum(images) == 0
            continue
        exact = [budget * x / sum(lack) for x in lack]
        distance = lambda m, q=exact: sum((a - b) ** 2 for a, b in zip(m, q, strict=True))
        assert sum(images) == budget
        assert all(m == 0 for m, x in zip(images, lack, strict=True) if not x)
        assert distance(images) == min(distance(m) for m in product(range(budget + 1), repeat=3) if sum(m) == budget)


def test_a_discrepancy_by_hand():
    """All clients: 4, 4, 2 of 10; the first has 4, 0, 0 and lacks 0.4 and 0.2, the second 0, 4, 2 and lacks 0.4."""
    n = np.array([[4, 0, 0], [0, 4, 2], [0, 0, 0]])
    assert Discrepancy(budget=9).allocate(n).tolist() == [[0, 6, 3], [9, 0, 0], [0, 0, 0]]
    assert Discrepancy(budget=10).allocate(n).tolist() == [[0, 7, 3], [10, 0, 0], [0, 0, 0]]
    assert Discrepancy().allocate(np.array([[1, 2], [2, 4]])).tolist() == [[0, 0], [0, 0]]


def test_a_discrepancy_counts_exactly_where_products_pass_64_bits():
    n = np.array([[10**8, 0, 1], [0, 10**8, 10**8]])
    assert Discrepancy(budget=10**6).allocate(n).sum(1).tolist() == [10**6, 10**6]


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
        (lambda: Discrepancy(budget=-1), "balance.budget must be at least 0, not -1"),
        (lambda: GlobalTarget(cap=-1), "balance.cap must be at least 0, not -1"),
        (lambda: GlobalTarget(target="1,-1"), "balance.target=1,-1 must be numbers of at least 0 and not all 0"),
        (lambda: GlobalTarget(target="0,0"), "balance.target=0,0 must be"),
        (lambda: GlobalTarget(target="1,nan"), "balance.target=1,nan must be"),
        (lambda: GlobalTarget(target="1,2").allocate(WORKED), "balance.target has 2 shares for 3 classes"),
        (
            lambda: GlobalTarget(target="unifrom").allocate(WORKED),
            "balance.target=unifrom is neither uniform nor global",
        ),
        (lambda: MissingOnly(names=""), "balance.names must be plain, repaired or a text file, not empty"),
        (lambda: Ratio(ratio=-0.5), "balance.ratio must be a number from 0 to 1000000000, not -0.5"),
        (lambda: Ratio(ratio=1e30), "balance.ratio must be a number from 0 to 1000000000, not 1e+30"),
        (lambda: Ratio(ratio=1e8).allocate(WORKED), "balance.ratio=1e+08 asks for 3.5e+10 rows of one client"),
        (lambda: BalanceToMax(cap=10**20), "balance.cap must be at most 1000000000, not 100000000000000000000"),
        (lambda: BalanceToMax(pool_size=10**20), "balance.pool_size must be at most 1000000000"),
        (lambda: FixedBudget(budget=10**20), "balance.budget must be at most 1000000000"),
        (lambda: Discrepancy(budget=10**20), "balance.budget must be at most 1000000000"),
        (
            lambda: GlobalTarget(target="1e-300,1,1").allocate(WORKED),
            "balance.target=1e-300,1,1 asks for 5e+302 rows of one client, and 1000000000 are the most; lower it",
        ),
        (lambda: GlobalTarget(target="1e-320,0,1").allocate(WORKED), "asks for inf rows of one client"),
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


def test_a_cap_tames_a_target_that_asks_for_too_much():
    assert GlobalTarget(target="1e-320,1,1", cap=300).allocate(WORKED).tolist() == [[0, 50, 150]]


def test_the_short_name_of_gen_fedsd_is_the_one_written_down():
    assert next(name for name, rule in BALANCES.items() if rule is BalanceToMax) == "max"
    assert BALANCES["balance_to_max"] is BalanceToMax
