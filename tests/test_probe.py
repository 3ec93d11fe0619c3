"""Probes against scikit-learn and closed forms."""

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from fedprior import probe
from fedprior.probe import knn, linear_probe


def blobs(n, d=6, classes=4, gap=10.0, seed=0):
    """Classes `gap` apart along an axis each, unit noise."""
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % classes
    return gap * torch.eye(d)[y] + torch.randn(n, d, generator=g), y


@pytest.mark.parametrize("judge", [linear_probe, knn])
def test_separable_classes_are_all_recognised(judge):
    assert judge(*blobs(80), *blobs(40, seed=1)) == 1.0


@pytest.mark.parametrize("judge", [linear_probe, knn])
def test_labels_drawn_at_random_are_guessed(judge):
    rng = np.random.default_rng(0)
    z = torch.from_numpy(rng.normal(size=(1200, 5))).float()
    y = torch.from_numpy(rng.integers(4, size=1200))
    bound = 4 * (0.25 * 0.75 / 800) ** 0.5  # four standard deviations of the number of right guesses
    assert abs(judge(z[:400], y[:400], z[400:], y[400:]) - 0.25) < bound


@pytest.mark.parametrize("k", [1, 20, 1000])
def test_neighbours_vote_as_scikit_learns_do(k, monkeypatch):
    train_z, train_y = blobs(150, gap=1.0)
    test_z, test_y = blobs(90, gap=1.0, seed=1)
    reference = KNeighborsClassifier(
        min(k, 150), metric="cosine", algorithm="brute", weights=lambda distance: np.exp((1 - distance) / 0.07)
    ).fit(train_z.double(), train_y)
    expected = reference.score(test_z.double(), test_y)
    assert 0.3 < expected < 0.99
    assert knn(train_z, train_y, test_z, test_y, k) == pytest.approx(expected, abs=1e-9)
    monkeypatch.setattr(probe, "CELLS", 7 * 150)  # batches of seven, the last one of six
    assert knn(train_z, train_y, test_z, test_y, k) == pytest.approx(expected, abs=1e-9)


def test_nearer_neighbours_weigh_more():
    train = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.6, -0.8]])  # cosines with the first axis: 1, 0.6, 0.6
    label, one = torch.tensor([0, 1, 1]), torch.tensor([[2.0, 0.0]])
    assert np.exp(1 / 0.07) > 2 * np.exp(0.6 / 0.07)
    assert knn(train, label, one, torch.tensor([0]), k=3) == 1.0


def test_the_linear_probe_does_not_see_units():
    """Features are standardised by the training part: scale and offset of each one change nothing."""
    train_z, train_y = blobs(100, gap=1.5)
    test_z, test_y = blobs(200, gap=1.5, seed=1)
    plain = linear_probe(train_z, train_y, test_z, test_y)
    factor, offset = torch.tensor([1e-3, 1.0, 50.0, 1e3, 7.0, 0.1]), torch.arange(6.0)
    constant = torch.full((300, 1), 3.7)
    train, test = (torch.cat([z * factor + offset, constant[: len(z)]], 1) for z in (train_z, test_z))
    assert 0.4 < plain < 0.95
    assert linear_probe(train, train_y, test, test_y) == plain
    # standardised by the test part, a shift of the test features alone would go unnoticed
    assert linear_probe(train_z, train_y, test_z + 20 * torch.eye(6)[0], test_y) < plain


def test_one_class_or_constant_features_teach_nothing():
    z = torch.ones(8, 3)
    y = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1])
    assert linear_probe(z, y, z, y) == 5 / 8  # the commoner class
    assert linear_probe(z[:5], y[:5], z, y) == 5 / 8


@pytest.mark.parametrize("judge", [linear_probe, knn])
def test_what_cannot_be_judged_is_refused(judge):
    z, y = blobs(12)
    none = torch.zeros(0, 6), torch.zeros(0, dtype=torch.long)
    for words, parts in {
        "training part has no features": (*none, z, y),
        "test part has no features": (z, y, *none),
        "differ in width": (z, y, z[:, :4], y),
        "not finite": (z * float("nan"), y, z, y),
        "n labels": (z, y[:5], z, y),
    }.items():
        with pytest.raises(ValueError, match=words):
            judge(*parts)


def test_no_neighbour_is_no_vote():
    with pytest.raises(ValueError, match="at least 1"):
        knn(*blobs(8), *blobs(8), k=0)
