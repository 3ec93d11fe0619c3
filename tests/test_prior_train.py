"""The digits and their split, and how the embedded prior is trained."""

import hashlib
import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from fedprior.data import digits
from fedprior.errors import UsageError, UserError
from fedprior.priors import architecture, check, embedded, prompts, stages, train

# The embedded digits --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def original():
    from sklearn.datasets import load_digits

    return load_digits()


def test_the_three_parts_are_disjoint_cover_everything_and_balance_the_classes(original):
    parts = digits.split()
    assert list(parts) == ["public", "train", "test"]
    together = np.concatenate(list(parts.values()))
    assert np.array_equal(np.sort(together), np.arange(1797))
    size = np.bincount(original.target)
    count = {name: np.bincount(original.target[rows], minlength=10) for name, rows in parts.items()}
    assert np.abs(count["public"] - size / 2).max() < 1
    assert np.abs(count["train"] - size / 3).max() < 1
    assert np.abs(count["test"] - size / 6).max() < 1
    assert all((np.diff(rows) > 0).all() for rows in parts.values())


def test_the_split_is_the_documented_one_and_never_changes():
    texts = {name: ",".join(map(str, rows)) for name, rows in digits.split().items()}
    assert {name: hashlib.sha256(t.encode()).hexdigest()[:16] for name, t in texts.items()} == GOLDEN


GOLDEN = {"public": "f8b6c76f77845e7e", "train": "4ed8fbab3a9912e4", "test": "538bdbbf2e86966e"}


def test_a_class_is_ordered_by_the_hash_of_its_row_numbers(original):
    sevens = [int(r) for r in np.flatnonzero(original.target == 7)]
    sevens.sort(key=lambda r: hashlib.sha256(b"fedprior digits %d" % r).digest())
    parts = {name: set(rows.tolist()) for name, rows in digits.split().items()}
    where = ["public" if r in parts["public"] else "train" if r in parts["train"] else "test" for r in sevens]
    assert where == sorted(where, key=["public", "train", "test"].index)


def test_images_are_the_originals_enlarged_to_grey_colour_images(original):
    test = digits.test()
    assert test["image"].dtype == torch.uint8
    assert test["image"].shape == (296, 3, 16, 16)
    assert torch.equal(test["image"][:, 0], test["image"][:, 1])
    assert torch.equal(test["image"][:, 0], test["image"][:, 2])
    assert np.array_equal(test["label"], original.target[test["id"]])
    assert not test["synthetic"].any()
    old = original.images[test["id"][5]] * 255 / 16
    assert abs(int(test["image"][5, 0, 0, 0]) - old[0, 0]) <= 0.5
    # bilinear at a factor of two: pixel 3 lies a quarter of the way from original pixel 1 to 2
    expected = np.array([0.75, 0.25]) @ old[1:3, 1:3] @ np.array([0.75, 0.25])
    assert abs(int(test["image"][5, 0, 3, 3]) - expected) <= 0.5 + 1e-4


def test_parts_hold_the_rows_of_the_split():
    for name, part in (("public", digits.public()), ("train", digits.train()), ("test", digits.test())):
        assert np.array_equal(part["id"], digits.split()[name])


# Training -------------------------------------------------------------------------------------------------


def weights_digest(folder):
    return [hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(folder.rglob("*.safetensors"))]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Three folders, trained for a few steps with seeds 0, 0 and 1."""
    base = tmp_path_factory.mktemp("trained")
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        torch.rand(3)  # moves the global generator
        train.train_embedded("digits", base / name, seed=seed, autoencoder_steps=2, steps=2, log=lambda line: None)
    return base


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(trained):
    first, again, other = (weights_digest(trained / name) for name in ("first", "again", "other"))
    assert len(first) == 3
    assert first == again
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_a_trained_folder_loads_with_its_defaults_and_record(trained):
    prior = embedded.load(trained / "first")
    assert (prior.steps, prior.guidance, prior.size) == tuple(
        train.RECIPES["digits"].defaults[k] for k in ("steps", "guidance", "size")
    )
    assert prior.generate(["a photo of a two"], [0], (16, 16)).shape == (1, 3, 16, 16)
    record = json.loads((trained / "first" / "fedprior.json").read_text())["training"]
    assert (record["seed"], record["steps"], record["autoencoder_steps"], record["images"]) == (0, 2, 2, 901)
    assert record["cpu_seconds"] > 0
    assert len(record["losses"]["denoiser"]) == 2
    assert check.folder_megabytes(trained / "first") <= 2
    assert all(f.stat().st_mode & 0o777 == 0o644 for f in (trained / "first").rglob("*") if f.is_file())
    assert [f.name for f in trained.iterdir() if f.name.startswith(".")] == []


def test_training_teaches_both_parts():
    public = digits.public()
    result = train.train(
        public["image"][:64],
        public["label"][:64],
        replace(train.RECIPES["digits"], autoencoder_steps=30, steps=20),
        seed=0,
        log=lambda line: None,
    )
    for losses in result.losses.values():
        assert losses[-1][1] < 0.9 * losses[0][1]


def test_training_never_reads_the_private_half(monkeypatch, tmp_path):
    private = set(digits.split()["train"].tolist()) | set(digits.split()["test"].tolist())
    pixels, label = digits._raw()
    spoiled = pixels.copy()
    spoiled[sorted(private)] = 0
    seen = {}
    for name, images in (("whole", pixels), ("spoiled", spoiled)):
        monkeypatch.setattr(digits, "_raw", lambda images=images: (images, label))
        train.train_embedded("digits", tmp_path / name, autoencoder_steps=1, steps=1, log=lambda line: None)
        seen[name] = weights_digest(tmp_path / name)
    assert seen["whole"] == seen["spoiled"]


def test_a_folder_in_use_is_refused_before_training(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for out in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(UserError, match="not empty; remove it or choose another folder"):
            train.train_embedded("digits", out, autoencoder_steps=1, steps=1, log=pytest.fail)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_copy_is_of_the_set_that_the_prior_is_trained_on(tmp_path):
    with pytest.raises(UsageError, match="the digits ship with fedprior; leave out --data"):
        train.train_embedded("digits", tmp_path / "out", data=tmp_path, log=pytest.fail)
    for name in train.CIFAR10:
        (tmp_path / "set" / name).mkdir(parents=True)
        for i in range(5):
            Image.fromarray(np.full((32, 32, 3), 16 + i, np.uint8)).save(tmp_path / "set" / name / f"{i}.png")
    images, _ = train.public("cifar10", tmp_path / "set")
    assert images["label"].bincount().tolist() == [4] * 10
    (tmp_path / "set" / "truck").rename(tmp_path / "set" / "tram")
    with pytest.raises(UserError, match=r"the classes of .*set are airplane, .* tram, not CIFAR-10's") as raised:
        train.train_embedded("cifar10", tmp_path / "out", data=tmp_path / "set", log=pytest.fail)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


class Stop(Exception):
    pass


@pytest.mark.parametrize("stops", [(3,), (2, 5), (8, 12), (1, 9, 15)])
def test_training_that_was_stopped_ends_in_the_same_weights(stops, monkeypatch, tmp_path):
    """Ten steps of either part; a stop falls in the autoencoder's or the denoiser's, between two checkpoints or not."""
    monkeypatch.setattr(stages, "EVERY", 0.0)
    steps = {"autoencoder_steps": 10, "steps": 10}
    train.train_embedded("digits", tmp_path / "whole", **steps, log=lambda line: None)
    taken, said = [0], []
    step = train.step

    def counted(*given):
        taken[0] += 1
        if taken[0] in stops:
            raise Stop
        step(*given)

    monkeypatch.setattr(train, "step", counted)
    for _ in stops:
        with pytest.raises(Stop):
            train.train_embedded("digits", tmp_path / "stopped", **steps, log=said.append)
        assert (tmp_path / "stopped-training").is_dir() == (taken[0] > 1)
        assert not (tmp_path / "stopped").exists()
    record = train.train_embedded("digits", tmp_path / "stopped", **steps, log=said.append)
    assert weights_digest(tmp_path / "stopped") == weights_digest(tmp_path / "whole")
    whole = json.loads((tmp_path / "whole" / "fedprior.json").read_text())["training"]
    assert record["losses"] == whole["losses"]
    assert taken[0] <= 20 + 2 * len(stops)
    assert not (tmp_path / "stopped-training").exists()


def test_the_beginning_of_another_training_is_not_gone_on_with(monkeypatch, tmp_path):
    monkeypatch.setattr(train, "fit_denoiser", lambda *given: (_ for _ in ()).throw(Stop))
    with pytest.raises(Stop):
        train.train_embedded("digits", tmp_path / "out", autoencoder_steps=1, steps=1, log=lambda line: None)
    for other in ({"seed": 1}, {"autoencoder_steps": 2}):
        options = {"autoencoder_steps": 1, "steps": 1} | other
        with pytest.raises(UserError, match=r"out-training holds the beginning of another training .* remove it or"):
            train.train_embedded("digits", tmp_path / "out", **options, log=lambda line: None)


def test_photo_captions_repair_articles_and_fit_the_text_encoder():
    captions = train.RECIPES["cifar10"].captions
    tokenizer = architecture.build_tokenizer([c for of_class in captions for c in of_class])
    assert {"a photo of a airplane", "a photo of an airplane", "a photo of the plane.", "a blurry photo of a car."} <= {
        c for of_class in captions[:2] for c in of_class
    }
    for mine in captions:
        assert len(mine) == len(set(mine))
        assert max(len(tokenizer(c)["input_ids"]) for c in mine) <= architecture.TOKENS
    assert "a photo of an truck" not in captions[9]


def test_losses_beyond_the_plain_error_are_what_they_say():
    """Likeness is the error in a classifier's features over their variance, and 0 for an image itself."""
    image = torch.randint(0, 256, (40, 3, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    label = torch.arange(40) % 4
    likeness = train.Likeness.__new__(train.Likeness)
    net, weights = check.fit(image, label, 4, 0, 5)
    net.module.load_state_dict(weights["params"] | weights["buffers"])
    likeness.body = list(net.module.eval().body)
    real = image[:8].float() / 127.5 - 1
    with torch.no_grad():
        assert likeness(real, real) == 0
        other = likeness(real.flip(0), real)
        layers = [net.module.body[: n + 1] for n in (2, 6)]
        expected = sum(((f(real.flip(0)) - f(real)) ** 2).mean() / f(real).var() for f in layers) / 2
    assert float(other) == pytest.approx(float(expected), rel=1e-5)


def test_captions_cover_both_template_lists_and_fit_the_text_encoder():
    captions = train.digit_captions()
    tokenizer = architecture.build_tokenizer([c for of_class in captions for c in of_class])
    for word, mine in zip(digits.CLASSES, captions, strict=True):
        assert {t.replace("{}", word) for t in prompts.CLIP + prompts.SINGLE} <= set(mine)
        assert f"a photo of the digit {word}" in mine
        assert len(mine) == len(set(mine))
        assert max(len(tokenizer(c)["input_ids"]) for c in mine) <= architecture.TOKENS
        for c in mine:  # every word is one token: no merge of one word cuts up another
            assert len(tokenizer.tokenize(c)) == len(c.replace(".", " .").split())
    everything = [c for mine in captions for c in mine]
    assert len(everything) == len(set(everything))


def test_unknown_words_become_pieces_and_not_an_unknown_token():
    tokenizer = architecture.build_tokenizer(["a photo of a cat"])
    assert "".join(tokenizer.tokenize("zebra")).replace("</w>", "") == "zebra"
    assert tokenizer.unk_token_id not in tokenizer("zebra")["input_ids"][1:-1]


def test_folded_latents_are_normal_and_decode_to_the_same_images():
    tokenizer = architecture.build_tokenizer(["a photo of a cat"])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        vae = architecture.build_models(len(tokenizer), tokenizer, 16, (8, 8), (8, 8, 8, 8), 8)[0].eval()
        pixels = torch.rand(40, 3, 16, 16) * 2 - 1
    with torch.no_grad():
        before = vae.encode(pixels).latent_dist
        images = vae.decode(before.mode()).sample
        train.fold_statistics(vae, before.mode())
        after = vae.encode(pixels).latent_dist
        assert after.mode().mean((0, 2, 3)).abs().max() < 1e-4
        assert (after.mode().std((0, 2, 3)) - 1).abs().max() < 1e-4
        assert (vae.decode(after.mode()).sample - images).abs().max() < 1e-4
        ratio = after.std / before.std
        assert torch.allclose(ratio, 1 / before.mode().std((0, 2, 3))[None, :, None, None].expand_as(ratio), rtol=1e-3)


def test_the_denoiser_is_taught_the_velocity_of_every_latent():
    """A model that knows the one latent c solves x = a c + s n for the noise: its loss against a n - s c is zero."""
    tokenizer = architecture.build_tokenizer(["a photo of a cat"])
    scheduler = architecture.build_scheduler()
    c = 1.7

    class Oracle(nn.Module):
        def __init__(self):
            super().__init__()
            self.zero = nn.Parameter(torch.zeros(1))

        def forward(self, x, t=None, encoder_hidden_states=None):
            if t is None:
                return (self.zero.expand(len(x), 16, 8),)
            a, s = (y[t, None, None, None].sqrt() for y in (scheduler.alphas_cumprod, 1 - scheduler.alphas_cumprod))
            velocity = a * (x - a * c) / s - s * c + 0 * encoder_hidden_states.mean()
            return type("Output", (), {"sample": velocity})

    latents, label = torch.full((5, 4, 2, 2), c), torch.zeros(5, dtype=torch.long)
    parts = (Oracle(), Oracle(), tokenizer, scheduler, latents, label)
    ((step, loss),) = train.fit_denoiser(*parts, train.Recipe(captions=[["a cat"]], steps=1), 0, lambda line: None)
    assert step == 1
    assert loss < 1e-4


def test_the_learning_rate_warms_up_and_falls_to_two_per_cent():
    rates = list(stages.rates(1000, 0.5, warmup=10))
    assert rates[0] == pytest.approx(0.05)
    assert rates[9] == max(rates) == pytest.approx(0.5, rel=1e-3)
    assert rates[500] == pytest.approx(0.5 * 0.51)
    assert rates[-1] == pytest.approx(0.01, rel=1e-2)
    assert all(a > b for a, b in pairwise(rates[9:]))


def test_timesteps_cover_the_range_evenly():
    draws = torch.Generator().manual_seed(0)
    for _ in range(20):
        t = train.timesteps(100, 1000, draws)
        assert sorted((t // 10).tolist()) == list(range(100))
        assert t.tolist() != sorted(t.tolist())


def test_the_average_follows_a_second_implementation():
    p = nn.Parameter(torch.zeros(1))
    average, expected = stages.Average([p], decay=0.9), 0.0
    for i in range(1, 40):
        with torch.no_grad():
            p.fill_(i)
        average.update()
        d = min(0.9, (1 + i) / (10 + i))
        expected = d * expected + (1 - d) * i
    average.install()
    assert p.item() == pytest.approx(expected, rel=1e-5)
