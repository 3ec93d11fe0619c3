import numpy as np
import pytest
import torch
import toy
from hypothesis import given
from hypothesis import strategies as st

from fedprior.evaluate import accuracy_by_client, client_accuracies, evaluate


def test_accuracy_and_loss_equal_a_plain_loop_over_images():
    net, test = toy.net(), toy.federation().test
    weights = net.init()
    seen = evaluate(net, weights, test, 4)
    module = toy.net().module.eval()
    logits = torch.cat([module((x[None].float() / 255 - 0.5) / 0.5)[1] for x in test["image"]])
    right = logits.argmax(1) == test["label"]
    assert seen.accuracy == pytest.approx(right.float().mean().item())
    assert seen.loss == pytest.approx(torch.nn.functional.cross_entropy(logits, test["label"]).item(), rel=1e-5)
    for k in range(4):
        assert seen.correct[k] == right[test["label"] == k].sum()
        assert seen.total[k] == (test["label"] == k).sum()


def test_evaluating_twice_gives_the_same_and_leaves_statistics_alone():
    net, test = toy.net(), toy.federation().test
    weights = net.init()
    first = evaluate(net, weights, test, 4)
    second = evaluate(net, weights, test, 4)
    assert (first.correct == second.correct).all()
    assert first.loss == second.loss
    assert toy.gap(weights, net.init()) == 0


def test_synthetic_images_and_empty_tables_are_refused():
    net, test = toy.net(), toy.federation().test
    flags = torch.zeros(50, dtype=torch.bool)
    flags[7] = True
    with pytest.raises(ValueError, match="synthetic"):
        evaluate(net, net.init(), test | {"synthetic": flags}, 4)
    with pytest.raises(ValueError, match="nothing"):
        evaluate(net, net.init(), {k: v[:0] for k, v in test.items()}, 4)


@given(st.lists(st.lists(st.integers(0, 20), min_size=3, max_size=3), min_size=1, max_size=6))
def test_a_clients_accuracy_is_what_its_own_class_mix_would_see(counts):
    counts, rates = np.array(counts), np.array([0.5, 1.0, 0.2])
    got = client_accuracies(rates, counts)
    own = [sum(n * r for n, r in zip(row, rates, strict=True)) / row.sum() for row in counts if row.sum()]
    if not own:
        assert set(got.values()) == {None}
        return
    assert got["mean"] == pytest.approx(np.mean(own))
    assert got["worst"] == pytest.approx(min(own))
    assert got["weighted"] == pytest.approx((counts * rates).sum() / counts.sum())
    assert got["worst"] - 1e-12 <= got["p10"] <= got["mean"] + 1e-12


def test_a_class_that_the_test_set_lacks_does_not_count_against_anyone():
    counts = np.array([[2, 2, 0], [0, 4, 0], [0, 0, 5], [0, 0, 0]])
    rates = np.array([0.5, np.nan, 1.0])
    np.testing.assert_array_equal(accuracy_by_client(rates, counts), [0.5, np.nan, 1.0, np.nan])
    got = client_accuracies(rates, counts)
    assert (got["mean"], got["worst"]) == (0.75, 0.5)
    assert got["weighted"] == pytest.approx((4 * 0.5 + 5 * 1.0) / 9)


def test_spread_and_tenth_percentile_over_clients_by_hand():
    got = client_accuracies(np.array([0.0, 0.5, 1.0]), np.eye(3, dtype=int))
    assert got["std"] == pytest.approx((0.5**2 * 2 / 3) ** 0.5)
    assert got["p10"] == pytest.approx(0.1)


def with_domains(table, *domains):
    """The table with one row after the other of each domain in turn."""
    n = len(table["label"])
    return table | {"domain": torch.tensor(domains).repeat(n)[:n]}


def test_with_domains_the_accuracy_is_the_mean_of_theirs_and_all_else_stays():
    net, test = toy.net(), toy.federation().test
    plain = evaluate(net, net.init(), test, 4)
    seen = evaluate(net, net.init(), with_domains(test, 0, 2, 2, 2, 2), 4)  # nothing is of domain 1
    logits = torch.cat([net(net.init(), x[None], train=False).logits for x in test["image"]])
    right = (logits.argmax(1) == test["label"]).tolist()
    first = [hit for i, hit in enumerate(right) if i % 5 == 0]
    rest = [hit for i, hit in enumerate(right) if i % 5]
    rates = sum(first) / len(first), sum(rest) / len(rest)
    assert rates[0] != rates[1]
    np.testing.assert_allclose(seen.per_domain, [rates[0], np.nan, rates[1]])
    assert seen.accuracy == pytest.approx(sum(rates) / 2)
    assert seen.domain_total.tolist() == [10, 0, 40]
    assert seen.domain_correct.sum() == plain.correct.sum()
    assert (seen.correct.tolist(), seen.total.tolist(), seen.loss) == (
        plain.correct.tolist(),
        plain.total.tolist(),
        plain.loss,
    )
    assert plain.accuracy == pytest.approx(sum(right) / 50)
    assert plain.accuracy != pytest.approx(seen.accuracy)
    assert len(plain.per_domain) == 0


def test_of_one_domain_the_mean_is_the_accuracy():
    net, test = toy.net(), toy.federation().test
    plain, seen = (evaluate(net, net.init(), t, 4) for t in (test, with_domains(test, 0)))
    assert seen.accuracy == plain.accuracy == seen.per_domain[0]
