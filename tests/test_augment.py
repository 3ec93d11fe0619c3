import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedprior import seeds
from fedprior.data.augment import STATISTICS, crop_flip, normalise


def test_normalise_is_the_formula_and_spans_minus_one_to_one_at_half():
    image = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 3, 16, 16)
    mean, std = STATISTICS["cifar10"]
    want = (image.numpy() / 255 - np.array(mean).reshape(1, 3, 1, 1)) / np.array(std).reshape(1, 3, 1, 1)
    np.testing.assert_allclose(normalise(image, mean, std).numpy(), want, rtol=1e-5, atol=1e-6)
    half = normalise(image, (0.5,) * 3, (0.5,) * 3)
    assert half.min().item() == pytest.approx(-1, abs=1e-6)
    assert half.max().item() == pytest.approx(1, abs=1e-6)


def test_a_float_image_is_refused_since_it_was_scaled_already():
    with pytest.raises(TypeError, match="uint8"):
        normalise(torch.zeros(1, 3, 4, 4), (0.5,) * 3, (0.5,) * 3)


@given(
    seed=st.integers(0, 50),
    h=st.integers(3, 9),
    w=st.integers(3, 9),
    padding=st.integers(0, 4),
    flip=st.booleans(),
)
def test_crop_and_flip_equal_a_loop_over_images(seed, h, w, padding, flip):
    g = torch.Generator().manual_seed(seed)
    image = torch.randint(256, (5, 3, h, w), generator=g, dtype=torch.uint8)
    got = crop_flip(image, seeds.stream(seed, "test"), padding, flip).numpy()
    rng = seeds.stream(seed, "test")
    top, left = rng.integers(0, 2 * padding + 1, 5), rng.integers(0, 2 * padding + 1, 5)
    mirror = rng.integers(0, 2, 5).astype(bool)
    for i in range(5):
        big = np.zeros((3, h + 2 * padding, w + 2 * padding), np.uint8)
        big[:, padding : padding + h, padding : padding + w] = image[i].numpy()
        want = big[:, top[i] : top[i] + h, left[i] : left[i] + w]
        np.testing.assert_array_equal(got[i], want[:, :, ::-1] if flip and mirror[i] else want)
