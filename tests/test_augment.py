import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedprior import seeds
from fedprior.data.augment import PADDING, STATISTICS, cropped, draw_crops, mirrors, normalise, statistics


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
    flip=st.booleans(),
)
def test_crop_and_flip_equal_a_loop_over_images(seed, h, w, flip):
    g = torch.Generator().manual_seed(seed)
    image = torch.randint(256, (5, 3, h, w), generator=g, dtype=torch.uint8)
    got = cropped(image, torch.from_numpy(draw_crops(seeds.stream(seed, "test"), 5, flip))).numpy()
    rng, padding = seeds.stream(seed, "test"), PADDING
    top, left = rng.integers(0, 2 * padding + 1, 5), rng.integers(0, 2 * padding + 1, 5)
    mirror = rng.integers(0, 2, 5).astype(bool)
    for i in range(5):
        big = np.zeros((3, h + 2 * padding, w + 2 * padding), np.uint8)
        big[:, padding : padding + h, padding : padding + w] = image[i].numpy()
        want = big[:, top[i] : top[i] + h, left[i] : left[i] + w]
        np.testing.assert_array_equal(got[i], want[:, :, ::-1] if flip and mirror[i] else want)


IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@pytest.mark.parametrize(
    ("name", "domains", "wanted"),
    [
        ("pacs", ("art_painting", "cartoon", "photo", "sketch"), IMAGENET),
        ("office-caltech10", ("amazon", "caltech10", "dslr", "webcam"), IMAGENET),
        ("digits", ("mnist", "mnist_m", "usps"), IMAGENET),
        ("digits", (), HALF),
        ("usps", (), HALF),
        ("cub200", (), IMAGENET),
        ("CUB-200", (), IMAGENET),
        ("flowers_102", (), IMAGENET),
        ("cars196", (), IMAGENET),
        ("dogs120", (), IMAGENET),
        ("aircraft100", (), IMAGENET),
        ("tiny_imagenet", (), HALF),
        ("fashion_mnist", (), HALF),
        ("cifar10", (), STATISTICS["cifar10"]),
        ("cifar-100", (), STATISTICS["cifar100"]),
    ],
)
def test_sets_with_domains_and_fine_grained_ones_have_imagenets_statistics(name, domains, wanted):
    assert statistics(name, domains) == wanted


def test_aircraft_has_not_the_statistics_of_street_view_numbers():
    assert statistics("aircraft100", ()) != ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970))


@pytest.mark.parametrize(
    ("classes", "mirrored"),
    [
        (tuple("0123456789"), False),
        (("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"), False),
        (("Three", " 8 "), False),
        (("number 3", "number nine"), False),
        (("street view house number 3", "handwritten number 4", "digit 0", "5"), False),
        (("number 10", "number 1"), True),
        (tuple(str(i) for i in range(11)), True),
        (("3", "cat"), True),
        (("class 3", "class 4"), True),
        (("stone", "nine"), True),  # ends in "one"
        (("zero waste", "one"), True),
        (("airplane", "bird"), True),
    ],
)
def test_only_where_all_classes_are_digits_nothing_is_mirrored(classes, mirrored):
    assert mirrors(classes) is mirrored
