"""How a prior is checked: what its images are worth beside real ones, and what a page says of them."""

import json
import re
import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import toy
from torch import nn

from fedprior import nets, seeds
from fedprior.data import digits, halves, sources, table
from fedprior.data.sources import Source
from fedprior.errors import UserError
from fedprior.priors import check, check_page, embedded, inception, prompts, quality
from fedprior.priors.check import Judge, Real
from fedprior.priors.diffusion import DiffusionPrior

CLASSES = ("left", "right")
JUDGE = Judge(steps=30)


class Bars:
    """A prior that draws class "left" and "right" as a bright half; `wrong` swaps them, `always` draws one alone."""

    name, revision, settings = "bars", "0", {"steps": 1}

    def __init__(self, wrong=False, always=None, black=lambda seed: False):
        self.wrong, self.always, self.black = wrong, always, black

    def generate(self, prompts, seeds, size):
        images = torch.zeros((len(seeds), 3, *size), dtype=torch.uint8)
        for image, prompt, seed in zip(images, prompts, seeds, strict=True):
            left = ((self.always or prompt).count("left") > 0) != self.wrong
            if not self.black(seed):
                image[..., : size[1] // 2] = 200 if left else 20
                image[..., size[1] // 2 :] = 20 if left else 200
                image[:, 0] += torch.arange(size[1]) * (seed % 7)  # no two need be alike
        return images.to(torch.uint8)


class Copier(Bars):
    """A prior that gives back images of a table."""

    def __init__(self, rows):
        self.rows = rows

    def generate(self, prompts, seeds, size):
        own = [torch.nonzero(self.rows["label"] == ("right" in p))[:, 0] for p in prompts]
        return self.rows["image"][[int(rows[seed % len(rows)]) for rows, seed in zip(own, seeds, strict=True)]]


@pytest.fixture
def linear(monkeypatch):
    """A linear net in place of the CNN; its features are 4 x 4 means."""

    class Linear(nn.Module):
        width = 48

        def __init__(self, classes, size, seed):
            super().__init__()
            self.head = nn.Linear(48, classes, bias=False)
            nn.init.normal_(self.head.weight, std=0.01, generator=torch.Generator().manual_seed(seed))

        def forward(self, x):
            z = nn.functional.adaptive_avg_pool2d(x, 4).flatten(1)
            return z, self.head(z)

    monkeypatch.setattr(nets, "build", lambda name, *given, **more: Linear(*given, **more))


def real(seed, n=24, noise=30):
    """A table of both classes with noise."""
    image = Bars().generate(["left", "right"] * (n // 2), [0] * n, (16, 16))
    rng = np.random.default_rng(seed)
    image = (image + torch.from_numpy(rng.integers(0, noise, image.shape))).clamp(max=255).byte()
    return table.make(image, torch.arange(n) % 2)


@pytest.fixture
def tables(linear):
    return Real(real(1), real(2, 40), real(3, 60), CLASSES, "bars")


def run(prior, tables, **options):
    return check.check(prior, tables.train, tables.test, CLASSES, judge=JUDGE, log=lambda line: None, **options)


# What images are worth ------------------------------------------------------------------------------------


def test_a_good_prior_scores_one_and_a_wrong_one_zero(tables):
    found = run(Bars(), tables)
    counted = {"images": 24, "real_images": 24, "test_images": 40, "failed": 0, "chance": 0.5}
    assert found | counted | {"synthetic": 1.0, "real": 1.0} == found
    found = run(Bars(wrong=True), tables, images=30)
    assert found | counted | {"synthetic": 0.0, "real": 1.0, "images": 30} == found
    assert found["per_class"] == {"synthetic": [0, 0], "real": [1, 1]}
    assert found["by_fit"] == {"synthetic": [0], "real": [1]}


def test_images_that_stay_black_are_left_out_and_counted(tables):
    images, labels = check.synthesise(Bars(), CLASSES, 10, prompts.CLIP, 0, (16, 16))
    assert labels.bincount().tolist() == [5, 5]
    result = run(Bars(black=lambda seed: seed % 2 == 0), tables, images=40)  # one in 32 stays black
    assert result["images"] + result["failed"] == 40
    assert result["synthetic"] == 1.0
    half_black = Bars()
    half_black.generate = lambda p, s, size: (
        Bars.generate(half_black, p, s, size)
        * torch.tensor(["left" in x for x in p], dtype=torch.uint8).view(-1, 1, 1, 1)
    )
    images, labels = check.synthesise(half_black, CLASSES, 10, prompts.CLIP, 0, (16, 16))
    assert labels.tolist() == [0] * 5
    assert len(images) == 5


def test_a_prior_that_makes_mostly_black_images_is_refused(tables):
    with pytest.raises(UserError, match="24 of 24 images by bars are blank; use another dtype or prior"):
        run(Bars(black=lambda seed: True), tables)


def test_images_do_not_depend_on_how_many_are_asked_for_at_a_time(monkeypatch):
    whole = check.synthesise(Bars(), CLASSES, 20, prompts.CLIP, 0, (16, 16))
    monkeypatch.setattr(check, "CALL", 6)
    parts = check.synthesise(Bars(), CLASSES, 20, prompts.CLIP, 0, (16, 16))
    assert all(map(torch.equal, whole, parts))
    number = seeds.number(0, "check image", 13, 0)
    asked = prompts.prompt("right", prompts.CLIP[prompts.draw(prompts.CLIP, 0, 13)])
    assert torch.equal(whole[0][13], Bars().generate([asked], [number], (16, 16))[0])
    assert check.synthesise(Bars(), CLASSES, 0, prompts.CLIP, 0, (16, 16))[0].shape == (0, 3, 16, 16)


def test_synthetic_rows_are_refused_in_the_test_table(tables):
    test = {**tables.test, "synthetic": torch.ones(40, dtype=torch.bool)}
    with pytest.raises(ValueError, match="synthetic"):
        check.check(Bars(), tables.train, test, CLASSES, judge=JUDGE, log=lambda line: None)


def test_several_fits_are_averaged_and_each_has_a_seed_of_its_own(monkeypatch, tables):
    seen = []
    fit = check.fit
    monkeypatch.setattr(check, "fit", lambda *given, **more: seen.append(given[3]) or fit(*given, **more))
    found = check.study(Bars(), tables, judge=Judge(steps=1), seed=4, fits=3).result
    assert seen == [4, 4, 5, 5, 6, 6]
    for kind in ("synthetic", "real"):
        assert len(found["by_fit"][kind]) == 3
        assert found[kind] == pytest.approx(np.mean(found["by_fit"][kind]))
        assert np.mean(found["per_class"][kind]) == pytest.approx(found[kind])  # as many of each class


# The classifier -------------------------------------------------------------------------------------------


def test_a_check_depends_on_its_seed_alone():
    train, test = digits.public(), digits.test()
    scores = [check.accuracy(train["image"], train["label"], test, 10, seed, Judge(steps=5)) for seed in (0, 0, 1)]
    assert scores[0] == scores[1] != scores[2]


def test_the_digits_classifier_takes_plain_adamw_steps():
    train = digits.public()
    _, weights = check.fit(train["image"], train["label"], 10, seed=3, steps=3)
    module = nets.build("cnn", 10, size=16, seed=3)
    optimiser = torch.optim.AdamW(module.parameters(), lr=3e-3)
    order = seeds.stream(3, "batches", 0, 0).permutation(901)
    for which in torch.from_numpy(order[:192]).view(3, 64):
        optimiser.zero_grad()
        logits = module(train["image"][which] / 127.5 - 1)[1]
        nn.functional.cross_entropy(logits, train["label"][which]).backward()
        optimiser.step()
    for name, expected in module.named_parameters():
        assert torch.allclose(weights["params"][name], expected, atol=1e-5), name
    assert check.DIGITS.steps == check.STEPS == 450


def test_the_preset_follows_the_classes():
    assert check.judge_of(digits.CLASSES) == check.DIGITS
    photos = check.judge_of(("cat", "dog"))
    assert photos == check.PHOTOS
    assert photos.augment
    assert photos.flip
    json.dumps(photos.settings)
    assert photos.settings["schedule"] == {"name": "cosine", "over": 1, "warmup": 0.05, "floor": 0.0}


def test_statistics_of_batch_norm_are_those_of_training(monkeypatch):
    monkeypatch.setattr(nets, "build", lambda name, classes, size, seed: toy.TinyCNN())
    image = torch.full((64, 3, 8, 8), 255, dtype=torch.uint8)
    net, weights = check.fit(image, torch.zeros(64, dtype=torch.long), 4, seed=0, steps=2)
    assert not torch.equal(weights["buffers"]["body.1.running_mean"], net.init()["buffers"]["body.1.running_mean"])


def test_reading_is_evaluation_in_batches(monkeypatch):
    image = digits.test()["image"][:50]
    net, weights = check.fit(image, torch.arange(50) % 10, 10, seed=0, steps=1)
    features, logits = check.read(net, weights, image)
    monkeypatch.setattr(check, "PIXELS", 7 * 256)
    again = check.read(net, weights, image)
    assert torch.allclose(features, again[0], atol=1e-5)
    assert torch.allclose(logits, again[1], atol=1e-5)
    assert torch.allclose(logits, net(weights, image, train=False).logits, atol=1e-5)
    assert features.shape == (50, 64)


# Are images like, varied, and no copies? ------------------------------------------------------------------


def test_a_prior_that_ignores_its_prompt_is_found_out(tables):
    found = run(Bars(always="left"), tables)["prompts"]
    assert found == {"recognised": 0.5, "per_class": [1.0, 0.0], "confusion": [[12, 0], [12, 0]]}


def test_distances_are_between_equally_many_and_real_images_have_the_smallest(tables):
    found = check.study(Copier(real(7, 200)), tables, judge=JUDGE, images=60).result["distances"]
    assert found["images"] == 20  # half of the test images
    far = check.study(Bars(always="left"), tables, judge=JUDGE, images=60).result["distances"]
    for key in ("fid_cnn", "kid_cnn"):
        assert found[f"{key}_real"] == far[f"{key}_real"]
        assert found[key] < far[key] / 5
    assert "fid" not in found
    assert check.study(Bars(), tables, judge=JUDGE, images=10).result["distances"]["images"] == 10


def test_halves_share_each_class_out_evenly():
    label = torch.from_numpy(np.random.default_rng(0).integers(0, 4, 101))
    one, other = check.even_halves(label, seed=0)
    assert sorted([*one.tolist(), *other.tolist()]) == list(range(101))
    for c in range(4):
        assert abs(int((label[one] == c).sum()) - int((label[other] == c).sum())) <= 1
    assert not torch.equal(one, check.even_halves(label, seed=1)[0])


def test_a_net_that_is_scaled_measures_the_same_distances(tables, monkeypatch):
    plain = check.study(Bars(), tables, judge=JUDGE).result
    read = check.read
    monkeypatch.setattr(check, "read", lambda *given: (100 * read(*given)[0], read(*given)[1]))
    scaled = check.study(Bars(), tables, judge=JUDGE).result
    for part, key in (("distances", "fid_cnn"), ("distances", "kid_cnn_real"), ("diversity", "within_class")):
        assert scaled[part][key] == pytest.approx(plain[part][key], rel=1e-4)


def test_repeats_and_templates_are_counted(tables):
    one = Copier(table.take(tables.public, torch.tensor([0, 1])))  # the same two images again and again
    found = run(one, tables, templates=prompts.CLIP, images=20)["diversity"]
    assert found["duplicates"] == 0.9
    assert found["near_duplicates"] == 1.0
    assert found["within_class"] == 0
    assert found["within_class_real"] > 0
    drawn = {prompts.draw(prompts.CLIP, 0, i) for i in range(20)}
    assert found["templates"] == len(drawn) / 18 < 1
    varied = run(Copier(real(8, 2000)), tables, images=20)["diversity"]
    assert varied["duplicates"] == 0
    assert varied["within_class"] == pytest.approx(varied["within_class_real"], rel=0.1)


def test_near_is_what_one_in_a_hundred_real_images_is_to_another(tables, monkeypatch):
    monkeypatch.setattr(check, "RARE", 0.5)  # their median
    found = run(Bars(), tables)["diversity"]
    x = tables.train["image"].double()
    apart = (x[:, None] - x[None]).square().mean((2, 3, 4)).sqrt()
    apart[tables.train["label"][:, None] != tables.train["label"]] = torch.inf
    apart.fill_diagonal_(torch.inf)
    assert found["near"] == pytest.approx(float(np.median(apart.min(1).values)), rel=1e-5)


def test_a_copier_is_told_from_a_prior_that_learnt_the_classes(tables):
    copier = run(Copier(tables.public), tables, public=tables.public)["memorisation"]
    assert copier["share_public"] > 0.6  # of 40 public images drawn out of 60, two in three are there to be met
    assert copier["share_near"] == 1
    assert copier["synthetic"] == [0, 0, 0]
    honest = run(Copier(real(9, 2000)), tables, public=tables.public, images=400)["memorisation"]
    assert honest["looked_up"] == 400
    assert 0.35 < honest["share_public"] < 0.65
    assert honest["share_near"] < 0.1
    assert honest["synthetic"] == pytest.approx(honest["unseen"], rel=0.05)
    assert run(Bars(), tables)["memorisation"] is None


def test_a_copier_of_all_public_images_that_are_met_has_a_share_of_one(linear):
    public = real(3, 40)
    tables = Real(real(1), real(2, 40), public, CLASSES)
    assert check.study(Copier(public), tables, judge=JUDGE).result["memorisation"]["share_public"] == 1


def test_the_closest_pairs_are_shown_closest_first(tables):
    own, unseen = check.study(Copier(tables.public), tables, judge=JUDGE).lookups
    assert [pair.distance for pair in own.pairs] == [0] * check.PAIRS
    assert all(torch.equal(pair.image, pair.neighbour) for pair in own.pairs)
    assert len(unseen.distance) == 40
    assert [pair.distance for pair in unseen.pairs] == unseen.distance.sort().values[: check.PAIRS].tolist()
    for pair in unseen.pairs:
        apart = float((pair.image.double() - pair.neighbour.double()).square().mean().sqrt())
        assert apart == pytest.approx(pair.distance, rel=1e-5)


def test_mirrored_copies_are_found_where_training_mirrors(linear):
    public = real(3, 40)
    mirrored = table.make(public["image"].flip(-1), public["label"])
    for flip in (False, True):
        found = check.study(
            Copier(mirrored), Real(real(1), real(2, 40), public, CLASSES), judge=Judge(steps=1, flip=flip)
        )
        assert (found.result["memorisation"]["share_near"] == 1) == flip


def test_results_are_json_without_nan_even_for_classes_that_nothing_is_known_of(linear):
    classes = ("left", "right", "never")
    tables = Real(real(1), real(2, 40), None, classes)
    found = check.study(Bars(), tables, images=4, judge=JUDGE).result
    json.dumps(found, allow_nan=False)
    assert found["per_class"]["real"][2] is None
    assert found["prompts"]["confusion"][2][2] == 0
    one = Real(table.take(tables.train, torch.arange(2)), table.take(tables.test, torch.arange(2)), None, CLASSES)
    found = check.study(Bars(), one, images=2, judge=JUDGE).result
    json.dumps(found, allow_nan=False)
    assert found["diversity"]["near"] is found["diversity"]["within_class"] is None
    assert found["distances"] == {"images": 1, "note": found["distances"]["note"]}


# Inception ------------------------------------------------------------------------------------------------


@pytest.fixture
def fidelity(monkeypatch):
    """torch-fidelity as the check uses it: means of each channel for features."""

    class Extractor(nn.Module):
        def __init__(self, name, features, **options):
            super().__init__()
            assert (name, features, options) == ("inception-v3-compat", ["2048"], {"verbose": False})

        def forward(self, x):
            assert x.dtype == torch.uint8
            return (x.float().mean((2, 3)),)

    monkeypatch.setitem(sys.modules, "torch_fidelity", SimpleNamespace(FeatureExtractorInceptionV3=Extractor))


def test_inceptions_features_measure_the_same_images(tables, fidelity, monkeypatch):
    monkeypatch.setattr(inception, "BATCH", 7)
    found = check.study(Bars(), tables, judge=JUDGE, seed=5, with_inception=None).result["distances"]
    assert "note" not in found
    wanted, others = check.even_halves(tables.test["label"], 5)
    colour = lambda images: images.double().mean((2, 3))
    made = check.synthesise(Bars(), CLASSES, 24, prompts.SINGLE, 5, (16, 16))[0][:20]
    reference = colour(tables.test["image"][wanted])
    assert found["fid"] == pytest.approx(quality.frechet(colour(made), reference), rel=1e-4)
    assert found["fid_real"] == pytest.approx(
        quality.frechet(colour(tables.test["image"][others]), reference), rel=1e-3
    )
    assert found["kid"] == pytest.approx(quality.mmd(colour(made), reference), rel=1e-4)
    assert check.study(Bars(), tables, judge=JUDGE).result["distances"]["note"] == "not asked for"


def test_without_torch_fidelity_there_is_a_note_or_an_error_before_any_work(tables, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_fidelity", None)
    note = check.study(Bars(), tables, judge=JUDGE, with_inception=None).result["distances"]["note"]
    assert "pip install 'fedprior[fid]'" in note
    prior = Bars()
    prior.generate = lambda *given: pytest.fail("the prior was asked")
    with pytest.raises(UserError, match=re.escape("pip install 'fedprior[fid]'")):
        check.study(prior, tables, judge=JUDGE, with_inception=True)


def test_weights_that_cannot_be_had_are_one_line(monkeypatch):
    def offline(*given, **options):
        raise OSError("no route to host\nand more")

    monkeypatch.setitem(sys.modules, "torch_fidelity", SimpleNamespace(FeatureExtractorInceptionV3=offline))
    with pytest.raises(UserError, match=r"weights cannot be had \(no route to host\); go online once"):
        inception.wanted(True)
    assert inception.wanted(None)[0] is None


# Real images ----------------------------------------------------------------------------------------------


def test_real_rows_are_balanced_and_drawn_by_seed():
    rows = table.make(torch.zeros((90, 3, 8, 8), dtype=torch.uint8), torch.arange(90) % 3)
    some = check.balanced(rows, 32, ("a", "b", "c"), seed=0)
    assert some["label"].bincount().tolist() == [11, 11, 10]
    assert len(some["id"].unique()) == 32
    assert torch.equal(some["id"], check.balanced(rows, 32, ("a", "b", "c"), seed=0)["id"])
    assert not torch.equal(some["id"], check.balanced(rows, 32, ("a", "b", "c"), seed=1)["id"])
    with pytest.raises(UserError, match="30 real images of class a, not 31; ask for fewer"):
        check.balanced(rows, 91, ("a", "b", "c"), seed=0)


def test_cifars_real_rows_are_private_and_its_public_ones_the_others(monkeypatch):
    image = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (200, 1, 1, 1), dtype=np.uint8))
    train = table.make(image.expand(200, 3, 8, 8).contiguous(), torch.arange(200) % 2)
    test = table.make(train["image"][:10], train["label"][:10])
    monkeypatch.setattr(sources, "load", lambda name, path: Source(name, train, test, CLASSES, ()))
    found = check.cifar10_real("somewhere", count=20)
    assert halves.mask(found.train["image"], "private").all()
    assert found.train["label"].bincount().tolist() == [10, 10]
    assert halves.mask(found.public["image"], "public").all()
    assert len(found.public["label"]) == int(halves.mask(train["image"], "public").sum())
    assert found.test is test


def test_test_rows_that_were_made_of_cifars_training_rows_are_private_too(monkeypatch):
    image = torch.arange(200, dtype=torch.uint8)[:, None, None, None].expand(200, 3, 8, 8).contiguous()
    whole = table.make(image, torch.arange(200) % 2)
    made = Source("cifar10", whole, whole, CLASSES, divided=True)
    monkeypatch.setattr(sources, "load", lambda name, path: made)
    test = check.cifar10_real("somewhere", count=20).test
    assert torch.equal(test["image"], image[halves.mask(image, "private")])
    assert 0 < len(test["label"]) < 100


def test_columns_and_size_reach_the_images_of_a_set_of_ones_own(monkeypatch):
    asked = {}
    rows = table.make(torch.zeros((40, 3, 8, 8), dtype=torch.uint8), torch.arange(40) % 2)

    def load(name, **given):
        asked.update(given, name=name)
        return Source(name, rows, rows, CLASSES)

    monkeypatch.setattr(sources, "load", load)
    held = check.real_of("own", "there", images=20, image="scan", label="kind", size=8)
    assert asked == {"name": "own", "path": "there", "image": "scan", "label": "kind", "size": 8}
    assert held.public is None


def test_a_check_of_the_shipped_digits_reports_its_size(monkeypatch):
    monkeypatch.setattr(check, "DIGITS", Judge(steps=5))
    prior = DiffusionPrior.from_pretrained(embedded.folder("digits"), steps=1, guidance=0)
    result = check.check_digits(prior, embedded.folder("digits"), images=20, log=lambda line: None)
    assert {"synthetic", "real", "images", "real_images", "failed", "size_MB"} <= set(result)
    assert result["images"] == 20
    assert result["real_images"] == 901
    assert 1 < result["size_MB"] <= 2


def test_the_grid_has_a_row_for_each_class():
    picture = check.sample_grid(Bars(), ("left", "right", "left"), 4, seed=0, size=(8, 10), zoom=2)
    assert picture.size == (2 * 4 * 11, 2 * 3 * 9)
    pixels = np.asarray(picture)
    assert pixels[4, 4].tolist() == [200] * 3  # first row: bright on the left
    assert pixels[18 + 4, 4].tolist() == [20] * 3
    assert pixels[36 + 4, 4].tolist() == [200] * 3
    assert (pixels[16:18] == 255).all()
    assert (pixels[:, 20:22] == 255).all()


# The page -------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Tags, attributes and text of a page; checks that every tag is closed."""

    VOID = ("meta", "img", "path", "use", "rect")

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.open = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_is_whole_offline_and_the_same_every_time(tables, tmp_path):
    study = check.study(Bars(), tables, judge=JUDGE, fits=2)
    check_page.write(study, tmp_path / "check.html", "fedprior prior check bars --seed 0")
    text = (tmp_path / "check.html").read_text()
    assert text == check_page.render(study, "fedprior prior check bars --seed 0")
    page = Page(text)
    assert not any(tag in ("script", "link", "iframe") for tag, _ in page.tags)
    assert all(attrs["src"].startswith("data:image/png;base64,") for tag, attrs in page.tags if tag == "img")
    assert "http" not in re.sub(r'http-equiv="Content-Security-Policy"', "", text)
    assert len([tag for tag, _ in page.tags if tag == "svg"]) == 3
    words = " ".join(" ".join(page.text).split())
    for said in (
        "How good a prior is bars?",
        "24 synthetic images",
        "fedprior prior check bars --seed 0",
        "Inception was",
    ):
        assert said in words
    images = [attrs["alt"] for tag, attrs in page.tags if tag == "img"]
    assert "left, real: 8 images" in images
    assert "from the prior, nearest public image: 8 images" in images


def test_a_page_without_public_images_says_so(tables):
    study = check.study(Bars(), tables._replace(public=None), judge=JUDGE)
    text = check_page.render(study, "x")
    Page(text)
    assert "copies cannot be looked for" in text
    assert "Are they copies?" not in text


def verdict(synthetic, actual=0.9, chance=0.1):
    return check_page.worth(
        {
            "synthetic": synthetic,
            "real": actual,
            "chance": chance,
            "images": 5000,
            "real_images": 5000,
            "test_images": 10,
        }
    )


def test_the_verdict_is_by_the_share_of_the_way_from_guessing_to_real_images():
    for score, way, word in (
        (0.9, 100, "stand in"),
        (0.83, 91, "stand in"),
        (0.81, 89, "most of"),
        (0.59, 61, "most of"),
        (0.5, 50, "part of"),
        (0.3, 25, "teach little"),
        (0.05, 0, "teach little"),
    ):
        assert f"That is {way} % of the way" in verdict(score)
        assert word in verdict(score)
    assert "says nothing about the prior" in verdict(0.2, actual=0.1)
    assert "5,000 images recognises 59.0 % of 10 real test images" in verdict(0.59)


def test_the_page_names_what_is_most_often_astray_and_who_copies():
    counts = [[8, 2, 0], [1, 19, 0], [0, 0, 0]]
    result = {"prompts": {"recognised": 0.9, "confusion": counts}, "by_fit": {"real": [0.7]}}
    assert "astray is a, taken for b in 20.0 %" in check_page.recognised(result, ("a", "b", "c"))
    result["prompts"]["confusion"] = [[1, 0], [0, 1]]
    assert "astray" not in check_page.recognised(result, ("a", "b"))
    for share, word in ((0.5, "no sign of copying"), (0.6, "leans towards"), (0.9, "look like copies")):
        assert word in check_page.copied({"memorisation": {"share_public": share}})
