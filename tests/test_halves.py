"""The public and the private half of a photo set: disjoint, balanced, and the same in every copy of the set."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from fedprior import assemble
from fedprior.config import Experiment, override
from fedprior.data import halves, sources
from fedprior.errors import UsageError


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
