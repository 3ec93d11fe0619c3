"""Distances of sets of images, against closed forms, loops in numpy and identities."""

from itertools import combinations

import numpy as np
import pytest
import torch

from fedprior.priors import quality


def rows(seed, *shape):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def orthogonal(seed, d):
    return torch.from_numpy(np.linalg.qr(np.random.default_rng(seed).normal(size=(d, d)))[0])


# Frechet distance -----------------------------------------------------------------------------------------


def test_the_frechet_distance_of_normal_distributions_on_a_line():
    one = lambda m, s: (torch.tensor([m]).double(), torch.tensor([[s**2]]).double())
    assert quality.frechet_of(*one(1.0, 3.0), *one(4.0, 0.5)) == pytest.approx(3**2 + 2.5**2)
    assert quality.frechet_of(*one(1.0, 3.0), *one(1.0, 3.0)) == pytest.approx(0, abs=1e-9)


def test_where_covariances_share_axes_their_standard_deviations_are_compared():
    turn = orthogonal(0, 5)
    s, t = (torch.from_numpy(np.random.default_rng(k).uniform(0, 3, 5)) for k in (1, 2))
    s[2] = 0  # no spread along one axis
    mean, other = rows(3, 5), rows(4, 5)
    found = quality.frechet_of(mean, turn @ s.square().diag() @ turn.T, other, turn @ t.square().diag() @ turn.T)
    assert found == pytest.approx(float((mean - other).square().sum() + (s - t).square().sum()))


def test_where_they_do_not_the_trace_of_the_root_in_two_dimensions_is_known():
    """The root of a 2 x 2 matrix M with positive eigenvalues has the trace sqrt(tr M + 2 sqrt(det M))."""
    a, b = rows(5, 2, 2), rows(6, 2, 2)
    c, k = (a @ a.T).numpy(), (b @ b.T).numpy()
    product = c @ k
    root = np.sqrt(np.trace(product) + 2 * np.sqrt(np.linalg.det(product)))
    zero = torch.zeros(2).double()
    assert quality.frechet_of(zero, a @ a.T, zero, b @ b.T) == pytest.approx(np.trace(c) + np.trace(k) - 2 * root)


def test_moments_are_numpys():
    x = rows(7, 20, 4)
    mean, covariance = quality.moments(x.float())
    assert np.allclose(mean, x.numpy().mean(0), atol=1e-6)
    assert np.allclose(covariance, np.cov(x.numpy(), rowvar=False), atol=1e-5)
    assert mean.dtype == covariance.dtype == torch.float64


def test_identities_of_the_frechet_distance_even_with_fewer_rows_than_components():
    a, b = rows(8, 6, 9), rows(9, 30, 9)
    shift, turn = rows(10, 9), orthogonal(11, 9)
    plain = quality.frechet(a, b)
    assert quality.frechet(a, a) == pytest.approx(0, abs=1e-5)
    assert quality.frechet(a, a + shift) == pytest.approx(float(shift.square().sum()), rel=1e-5)
    assert quality.frechet(b, a) == pytest.approx(plain, rel=1e-6)
    assert quality.frechet(3 * a, 3 * b) == pytest.approx(9 * plain, rel=1e-6)
    assert quality.frechet(a @ turn + shift, b @ turn + shift) == pytest.approx(plain, rel=1e-6)
    assert quality.frechet(a.flip(0), b[torch.randperm(30)]) == pytest.approx(plain, rel=1e-6)
    trace = float(quality.moments(b)[1].trace())
    assert quality.frechet(b, b.mean(0) + 2 * (b - b.mean(0))) == pytest.approx(trace)  # (2 - 1)^2 of each variance
    with pytest.raises(ValueError, match="two rows"):
        quality.frechet(a[:1], b)


# Kernel distance ------------------------------------------------------------------------------------------


def brute_mmd(a, b):
    k = lambda x, y: (float(x @ y) / len(x) + 1) ** 3
    within = [np.mean([k(x[i], x[j]) for i in range(len(x)) for j in range(len(x)) if i != j]) for x in (a, b)]
    return sum(within) - 2 * np.mean([k(x, y) for x in a for y in b])


def test_the_kernel_distance_is_the_sum_over_all_pairs():
    a, b = rows(0, 7, 3), rows(1, 5, 3) + 0.5
    assert quality.mmd(a.float(), b.float()) == pytest.approx(brute_mmd(a.numpy(), b.numpy()), rel=1e-5)
    assert quality.mmd(b, a) == pytest.approx(quality.mmd(a, b))
    assert quality.mmd(a.flip(0), b.flip(0)) == pytest.approx(quality.mmd(a, b))
    with pytest.raises(ValueError, match="two rows"):
        quality.mmd(a, b[:1])


def test_it_is_unbiased():
    """Halves of one population: the mean over many draws is zero to three standard errors, and some lie below."""
    population = rows(2, 4000, 2)
    found = [quality.mmd(part[:5], part[5:]) for part in population.split(10)]
    assert abs(np.mean(found)) < 3 * np.std(found) / np.sqrt(len(found))
    assert min(found) < 0


def test_subsets_average_to_the_whole_and_small_sets_are_taken_whole():
    a, b = rows(3, 12, 4), rows(4, 12, 4) + 0.3
    assert quality.kid(a, b, seed=0) == quality.mmd(a, b)
    found = quality.kid(a, b, seed=0, subsets=3000, size=4)
    spread = np.std([quality.kid(a, b, seed=s, subsets=1, size=4) for s in range(200)]) / np.sqrt(3000)
    assert abs(found - quality.mmd(a, b)) < 4 * spread
    assert quality.kid(a, b, 1, 3, 4) == quality.kid(a, b, 1, 3, 4) != quality.kid(a, b, 2, 3, 4)
    assert abs(quality.kid(a, b[:5], 0, 1) - quality.mmd(a, b[:5])) > 1e-6  # five of either, not all of the larger set


# Variety --------------------------------------------------------------------------------------------------


def test_the_spread_of_a_class_is_the_mean_over_its_pairs():
    z, label = rows(5, 9, 3), torch.tensor([0, 2, 0, 2, 2, 0, 0, 1, 2])
    found = quality.spread(z, label, 4)
    for c in (0, 2):
        own = [z[i] for i in range(9) if label[i] == c]
        assert float(found[c]) == pytest.approx(np.mean([float((x - y).norm()) for x, y in combinations(own, 2)]))
    assert found[1].isnan()
    assert found[3].isnan()


def test_repeats_are_later_byte_equal_images_of_the_same_class():
    image = torch.randint(0, 255, (3, 3, 4, 4), dtype=torch.uint8)
    close = image[0].clone()
    close[2, 3, 3] += 1
    images = torch.stack([image[0], image[1], image[0], image[0], close, image[1]])
    assert quality.repeats(images, torch.tensor([0, 1, 0, 1, 0, 1])).tolist() == [
        False,
        False,
        True,
        False,
        False,
        True,
    ]
    assert quality.repeats(images[:0], torch.zeros(0, dtype=torch.long)).tolist() == []


def test_a_confusion_counts_asked_for_down_and_taken_for_across():
    found = quality.confusion(torch.tensor([0, 0, 2, 2, 2]), torch.tensor([0, 1, 2, 0, 2]), 3)
    assert found.tolist() == [[1, 1, 0], [0, 0, 0], [1, 0, 2]]


# Nearest neighbours ---------------------------------------------------------------------------------------


def images(seed, n, side=4):
    made = np.random.default_rng(seed).integers(0, 256, (n, 3, side, side), dtype=np.uint8)
    return torch.from_numpy(made)


def rms(x, y):
    return float(np.sqrt(np.mean((x.numpy().astype(float) - y.numpy().astype(float)) ** 2)))


def test_distances_of_pixels_are_root_mean_squares_in_grey_levels():
    a = images(0, 5)
    x = quality.pixels(a)
    assert float((x[0] - x[3]).norm()) == pytest.approx(rms(a[0], a[3]), rel=1e-5)
    flat = torch.stack([torch.full((3, 80, 100), v, dtype=torch.uint8) for v in (10, 45)])
    x = quality.pixels(flat)
    assert x.shape == (2, 3 * 32 * 32)  # larger ones are reduced
    assert float((x[0] - x[1]).norm()) == pytest.approx(35, rel=1e-5)


@pytest.mark.parametrize("small_blocks", [False, True])
def test_the_nearest_is_found_by_looking_at_all(monkeypatch, small_blocks):
    if small_blocks:
        monkeypatch.setattr(quality, "CELLS", 20)
        monkeypatch.setattr(quality, "POOL", 3)
    a, b = images(1, 11), images(2, 8)
    b[5] = a[7]
    every = np.array([[rms(x, y) for y in b] for x in a])
    found = quality.nearest_image(a, b)
    assert found.which.tolist() == every.argmin(1).tolist()
    assert np.allclose(found.distance, every.min(1), rtol=1e-6)
    assert found.distance[7] == 0
    mirrored = np.minimum(every, [[rms(x.flip(-1), y) for y in b] for x in a])
    found = quality.nearest_image(a, b, mirrored=True)
    assert found.which.tolist() == mirrored.argmin(1).tolist()
    assert np.allclose(found.distance, mirrored.min(1), rtol=1e-6)
    with pytest.raises(ValueError, match="no images"):
        quality.nearest_image(a, b[:0])
    assert len(quality.nearest_image(a[:0], b).distance) == 0


def test_the_nearest_other_row_has_the_same_label_and_is_not_the_row_itself(monkeypatch):
    monkeypatch.setattr(quality, "CELLS", 10)
    x, label = rows(3, 9, 3).float(), torch.tensor([0, 1, 0, 0, 1, 2, 0, 1, 0])
    x[8] = x[2]
    found = quality.nearest_other(x, label)
    for i in range(9):
        others = [j for j in range(9) if j != i and label[j] == label[i]]
        if others:
            apart = [float((x[i] - x[j]).norm()) for j in others]
            assert found.which[i] == others[int(np.argmin(apart))]
            assert float(found.distance[i]) == pytest.approx(min(apart), abs=1e-6)
    assert found.distance[[2, 8]].tolist() == [0, 0]
    assert found.distance[5].isinf()


def test_quantiles_and_shares():
    x = torch.tensor([4.0, 1.0, 3.0, 2.0])
    assert quality.quantile(x, 0.5) == 2.5
    assert quality.quantile(x, 0.1) == pytest.approx(1.3)
    assert quality.below(x, 3.0) == 0.5
