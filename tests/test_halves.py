"""The public and the private half of a photo set: disjoint, balanced, and the same in every copy of the set."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from fedprior import assemble
from fedprior.config import Experiment, override
from fedprior.data import halves, sources
from fedprior.errors import UsageError, UserError


def of_level(level, height=8, width=8):
    """An image whose mean grey level is exactly this multiple of 1/4."""
    whole, quarters = divmod(round(4 * level), 4)
    image = torch.full((1, 3, height, width), whole, dtype=torch.uint8)
    image.view(-1)[: quarters * image.numel() // 4] += 1
    return image


@pytest.mark.parametrize(
    ("level", "public", "private"),
    [(0, 1, 0), (7.75, 1, 0), (8, 0, 0), (8.75, 0, 0), (9, 0, 1), (12, 0, 1), (15, 0, 1), (15.25, 0, 0), (16, 1, 0),
     (255, 0, 1), (248, 0, 0), (250, 0, 1)],
)  # fmt: skip
def test_bands_of_eight_levels_alternate_and_edges_are_nobodys(level, public, private):
    image = of_level(level)
    assert image.float().mean() == level
    assert halves.mask(image, "public").tolist() == [bool(public)]
    assert halves.mask(image, "private").tolist() == [bool(private)]


def test_no_image_is_in_both_and_none_at_all_is_no_error():
    images = torch.randint(256, (500, 3, 4, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    assert not (halves.mask(images, "public") & halves.mask(images, "private")).any()
    assert halves.mask(images[:0], "private").shape == (0,)


@pytest.mark.data
def test_compression_never_moves_a_public_image_into_the_private_half(shared_data):
    """CIFAR-10 exists as PNG and as JPEG; a prior trained on the one serves a federation on the other."""
    import pyarrow.parquet as pq

    rows = pq.read_table(shared_data / "tiny-imagenet" / "train.parquet")["image"].slice(0, 3000).to_pylist()
    small = [
        Image.open(io.BytesIO(row["bytes"])).convert("RGB").resize((32, 32), Image.Resampling.BICUBIC) for row in rows
    ]
    copies = []
    for image in small:
        out = io.BytesIO()
        image.save(out, "JPEG", quality=75)
        copies.append(Image.open(out))
    both = [torch.from_numpy(np.stack([np.asarray(i).transpose(2, 0, 1) for i in each])) for each in (small, copies)]
    moved = halves.mask(both[0], "public") & halves.mask(both[1], "private")
    moved |= halves.mask(both[1], "public") & halves.mask(both[0], "private")
    assert moved.float().mean() <= 0.001


@pytest.fixture(scope="module")
def decoded(tmp_path_factory):
    """A cache in which CIFAR-10 is decoded once."""
    return tmp_path_factory.mktemp("decoded")


@pytest.mark.data
def test_each_half_of_cifar10_has_its_share_of_every_class(shared_data, decoded, monkeypatch):
    monkeypatch.setenv("FEDPRIOR_CACHE", str(decoded))
    whole = sources.load("cifar10", path=shared_data / "cifar10")
    public, private = (whole.only(half).train for half in ("public", "private"))
    assert public["label"].bincount().sub(2520).abs().max() < 100
    assert private["label"].bincount().sub(1890).abs().max() < 100
    assert not set(public["id"].tolist()) & set(private["id"].tolist())
    assert torch.equal(whole.only("private").test["image"], whole.test["image"])


def test_the_digits_are_a_private_half_already():
    with pytest.raises(UsageError, match=r"data=digits holds a private half only; leave out data.half="):
        assemble.split(override(Experiment(), ["data.half=private"]))


LEVELS = (4, 12, 20, 28)  # public, private, public, private


def photos(folder, split, classes=("cat", "dog"), each=20, side=16):
    """Class folders of one-coloured images, public and private ones in turn; -> the folder."""
    for c, name in enumerate(classes):
        (folder / split / name).mkdir(parents=True)
        for i in range(each):
            image = np.full((side, side, 3), LEVELS[(i + c) % 4], np.uint8)
            image[0, 0] += i % 3  # no two alike, and the mean moves by far less than the margin
            image[1, 1] += c
            image[2, 2, 0] += i
            Image.fromarray(image).save(folder / split / name / f"{i:03}.png")
    return folder


def is_public(table):
    """By the level that `photos` gave an image."""
    return (table["image"].flatten(1).float().mean(1).round() // 8) % 2 == 0


def test_a_test_split_that_was_made_is_halved_like_the_rows_it_came_from(tmp_path):
    whole = sources.load("x", path=photos(tmp_path, "train"))
    assert is_public(whole.test).any()
    private = sources.load("x", path=tmp_path, half="private")
    assert not is_public(private.train).any()
    assert not is_public(private.test).any()
    assert set(private.test["id"].tolist()) == set(whole.test["id"][~is_public(whole.test)].tolist())
    photos(tmp_path, "test")
    assert is_public(sources.load("x", path=tmp_path, half="private").test).sum() == 20


def test_a_half_without_a_test_image_is_one_line(tmp_path):
    for c in ("a", "b"):
        (tmp_path / c).mkdir()
        for i in range(5):
            Image.fromarray(np.full((8, 8, 3), LEVELS[i == 0], np.uint8) + np.uint8(i % 4)).save(
                tmp_path / c / f"{i}.png"
            )
    with pytest.raises(UserError, match="no test image of x is in its private half; add a file or folder named test"):
        sources.load("x", path=tmp_path, half="private")


def test_resizing_moves_no_image_into_the_other_half(tmp_path):
    """A bright pixel in the corner counts less or more when an image is shrunk; the half is of the image as it is."""
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "train" / name).mkdir(parents=True)
        for i in range(100):
            image = np.clip(rng.normal(rng.uniform(0, 80), 60, (9, 9, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(image).save(tmp_path / "train" / name / f"{i:03}.png")
    native = sources.load("x", path=tmp_path)
    shrunk = sources.load("x", path=tmp_path, size=3)
    assert not torch.equal(halves.mask(native.train["image"], "private"), halves.mask(shrunk.train["image"], "private"))
    for half in ("private", "public"):
        got = sources.load("x", path=tmp_path, size=3, half=half)
        level = native.train["image"].flatten(1).double().mean(1)
        inside = (level // 8) % 2 == (half == "private")
        if half == "private":
            inside &= (level % 8 >= 1) & (level % 8 <= 7)
        assert got.train["id"].tolist() == native.train["id"][inside].tolist()
        assert torch.equal(got.train["image"], shrunk.train["image"][inside])
        assert got.test["image"].shape[-1] == 3


def knowing(monkeypatch, **defaults):
    """A prior that says this of itself, in place of every other."""
    prior = type("Prior", (), {"name": "p", "size": 16, "defaults": defaults})()
    monkeypatch.setattr(assemble, "load_prior", lambda choice, device: prior)
    return prior


def prior_of(*words):
    experiment = override(Experiment(), [*words, "clients=2", "cohort=2", "partition=iid"])
    return assemble.prior_for(experiment, assemble.split(experiment).federation, torch.device("cpu"))


def test_a_copy_by_any_other_name_is_told_by_classes_and_content(tmp_path, monkeypatch):
    prior = knowing(monkeypatch, trained_on="cifar10", classes=["bird", "cat", "dog"])
    copy = f"data.path={photos(tmp_path / 'all', 'train')}"
    for name in ("mine", "cifar-10", "cifar10", "someone/cifar10"):
        for half in ("all", "public"):
            with pytest.raises(UsageError, match=r"trained on the public half of cifar10; add data.half=private"):
                prior_of(f"data={name}", copy, f"data.half={half}")
        assert prior_of(f"data={name}", copy, "data.half=private") is prior
    private = photos(tmp_path / "none", "train")
    for file in sorted(private.rglob("*.png")):
        if np.asarray(Image.open(file)).mean() // 8 % 2 == 0:
            file.unlink()
    assert prior_of("data=mine", f"data.path={private}") is prior  # nothing of it was trained on
    own = f"data.path={photos(tmp_path / 'own', 'train', side=24)}"
    assert prior_of("data=mine", own) is prior  # photos of another size are no copy
    with pytest.raises(UsageError, match=r"add data\.half=private"):
        prior_of("data=mine", own, "data.size=16")  # but where they are resized, they might be


def test_a_prior_that_names_no_classes_or_no_images_is_told_by_name_alone(tmp_path, monkeypatch):
    copy = f"data.path={photos(tmp_path, 'train')}"
    prior = knowing(monkeypatch, trained_on="laion")
    assert prior_of("data=mine", copy) is prior
    with pytest.raises(UsageError, match="public half of laion"):
        prior_of("data=laion", copy)
    prior = knowing(monkeypatch, classes=["cat", "dog"])
    assert prior_of("data=mine", copy) is prior


@pytest.mark.data
def test_a_prior_and_clients_never_share_images(shared_data, decoded, monkeypatch):
    monkeypatch.setenv("FEDPRIOR_CACHE", str(decoded))
    prior = type("Prior", (), {"name": "p", "defaults": {"trained_on": "cifar10"}})()
    monkeypatch.setattr(assemble, "load_prior", lambda choice, device: prior)
    words = ["data=uoft-cs/cifar10", f"data.path={shared_data / 'cifar10'}", "clients=2", "cohort=2"]
    for half in ("all", "public"):
        experiment = override(Experiment(), [*words, f"data.half={half}"])
        federation, _ = assemble.split(experiment)
        with pytest.raises(UsageError, match=r"trained on the public half of cifar10; add data.half=private"):
            assemble.prior_for(experiment, federation, torch.device("cpu"))
    experiment = override(Experiment(), [*words, "data.half=private"])
    federation, _ = assemble.split(experiment)
    assert assemble.prior_for(experiment, federation, torch.device("cpu")) is prior
    held = torch.cat(federation.clients)
    assert halves.mask(federation.table["image"][held], "private").all()
