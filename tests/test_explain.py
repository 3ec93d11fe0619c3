"""The analysis of a prior: its statistics against brute force and constructed descriptors, and the command."""

import json
import shutil

import numpy as np
import pytest
import test_cli
import torch
from PIL import Image

from fedprior.guide import FedDifRC, Guide
from fedprior.priors import embedded, explain
from fedprior.priors.explain import Reader, Sample
from fedprior.progress import Silent

FILES = {"explain.json", "separability.png", "tsne.png", "maps.png", "prompts.png"}
QUICK = ["--images", "60", "--timesteps", "50", "--levels", "2,3"]
ROW = {
    *("timestep", "level", "width", "probe", "purity", "image", "prompt", "interaction"),
    *("cosine_of_prompts", "cosine_of_images", "own_nearest", "own_nearest_centred", "interaction_probe"),
}


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def doubly_centred(*shape):
    x = normal(*shape, seed=3)
    x = x - x.mean(0, keepdim=True)
    return x - x.mean(1, keepdim=True)


# numbers
def test_shares_of_variance_are_those_of_a_two_way_table():
    f = normal(7, 4, 5).numpy().astype(np.float64) * [1, 2, 3, 4, 5]
    total = image = prompt = both = 0.0
    for d in range(5):
        grand = f[:, :, d].mean()
        for i in range(7):
            for j in range(4):
                u, v = f[i, :, d].mean() - grand, f[:, j, d].mean() - grand
                total += (f[i, j, d] - grand) ** 2
                image += u**2
                prompt += v**2
                both += (f[i, j, d] - grand - u - v) ** 2
    found = explain.shares(torch.from_numpy(f))
    assert found == pytest.approx({"image": image / total, "prompt": prompt / total, "interaction": both / total})
    assert sum(found.values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("f", "whole"),
    [
        (normal(6, 1, 3).expand(6, 4, 3), "image"),
        (normal(1, 4, 3).expand(6, 4, 3), "prompt"),
        (doubly_centred(6, 4, 3), "interaction"),
    ],
)
def test_what_one_cause_alone_moves_is_all_its_own(f, whole):
    expected = {"image": 0.0, "prompt": 0.0, "interaction": 0.0} | {whole: 1.0}
    assert explain.shares(5 + f) == pytest.approx(expected, abs=1e-9)


def test_descriptors_that_do_not_vary_have_no_shares():
    with pytest.raises(ValueError, match="do not vary"):
        explain.shares(torch.ones(3, 2, 4))


def test_mean_cosine_is_over_pairs_of_different_rows():
    f = normal(3, 5, 4).numpy().astype(np.float64)
    cosines = [
        f[i, a] @ f[i, b] / np.linalg.norm(f[i, a]) / np.linalg.norm(f[i, b])
        for i in range(3)
        for a in range(5)
        for b in range(5)
        if a != b
    ]
    assert explain.mean_cosine(torch.from_numpy(f)) == pytest.approx(np.mean(cosines))


def test_the_nearest_prompt_is_found_by_angle():
    prompted = torch.eye(3)[None].expand(4, 3, 3) * torch.tensor([1.0, 10.0, 100.0])[:, None]  # lengths do not count
    plain = torch.tensor([[9.0, 1, 1], [1, 9, 1], [1, 1, 9], [9, 1, 1]])
    assert explain.own_nearest(plain, prompted, torch.tensor([0, 1, 2, 2])) == 0.75


def test_purity_counts_the_commonest_class_of_each_cluster():
    corners = 50 * torch.eye(3).repeat_interleave(8, 0) + normal(24, 3)
    label = torch.arange(3).repeat_interleave(8)
    assert explain.purity(corners, label, 3, seed=0) == 1.0
    mixed = label.clone()
    mixed[[0, 1, 8]] = 2  # 6 of 8, 7 of 8 and 8 of 8
    assert explain.purity(corners, mixed, 3, seed=0) == pytest.approx(21 / 24)
    assert explain.purity(corners, torch.arange(24), 3, seed=0) == pytest.approx(3 / 24)


def scene(interaction, offset, images=64, prompts=4, width=6):
    """Descriptors [n, P, d], those under the empty prompt [n, d] and the sample: each image has a look of its own, a
    prompt moves all by its offset, and all prompts but that of its own class move an image by `interaction` more. All
    numbers are multiples of 1/64, so that sums are exact."""
    label = torch.arange(images) % prompts
    look = (64 * normal(images, width)).round() / 64 + 8
    moved = (16 * offset * normal(prompts, width, seed=1)).round() / 16
    moved = moved - moved.mean(0)
    away = torch.zeros(images, prompts, width)
    away[..., 0] = interaction * (1 - torch.eye(prompts)[label])
    sample = Sample(torch.zeros(images, 3, 8, 8, dtype=torch.uint8), label, images // 2)
    return look, look[:, None] + moved + away, sample


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # scikit-learn's, shares of no variance
def test_a_fixed_anchor_of_each_class_has_no_interaction():
    plain, prompted, sample = scene(interaction=0.0, offset=2.0)
    found = explain.movement(plain, prompted, sample, seed=0)
    assert found["interaction"] == 0
    assert found["interaction_probe"] == 0.25  # nothing to learn from: one class for all, of four
    assert found["own_nearest_centred"] == 0.25  # all prompts are equally near, and the first one is taken
    assert found["image"] + found["prompt"] == pytest.approx(1)


def test_what_prompts_know_of_an_image_is_seen_when_their_means_are_removed():
    plain, prompted, sample = scene(interaction=1.0, offset=4.0)
    found = explain.movement(plain, prompted, sample, seed=0)
    assert found["own_nearest"] < 0.5  # the offset of a prompt hides it
    assert found["own_nearest_centred"] > 0.95
    assert found["interaction_probe"] == 1.0
    assert 0 < found["interaction"] < found["prompt"]


def test_test_rows_change_nothing_that_is_estimated():
    plain, prompted, sample = scene(interaction=1.0, offset=1.0)
    before = explain.movement(plain, prompted, sample, seed=0)
    prompted = torch.cat([prompted[:32], prompted[32:] * 3 + normal(32, 4, 6)])
    after = explain.movement(plain, prompted, sample, seed=0)
    kept = ("image", "prompt", "interaction", "cosine_of_prompts", "cosine_of_images")
    assert [after[key] for key in kept] == [before[key] for key in kept]
    assert after["own_nearest_centred"] < before["own_nearest_centred"]
    # each test row is judged by itself, so shares over two halves have the share over all as their mean
    halves = [torch.cat([torch.arange(32), rows]) for rows in (torch.arange(32, 48), torch.arange(48, 64))]
    prompted[48:] += 9
    parts = [
        explain.movement(plain[rows], prompted[rows], Sample(sample.image[rows], sample.label[rows], 32), seed=0)
        for rows in halves
    ]
    whole = explain.movement(plain, prompted, sample, seed=0)
    for key in ("own_nearest", "own_nearest_centred", "interaction_probe"):
        assert (parts[0][key] + parts[1][key]) / 2 == pytest.approx(whole[key])


# reading
def test_maps_and_descriptors_are_read_on_the_same_axes():
    """A descriptor is the root mean square of a map's components over its positions."""
    image = torch.arange(5 * 3 * 16 * 16).mul(37).remainder(251).byte().view(5, 3, 16, 16)
    config = FedDifRC(timestep=50, levels="2,4")
    prior = embedded.load("digits", steps=2)
    reader = Reader(Guide(config=config, prior=prior, classes=("one", "two")), Sample(image, torch.arange(5) % 2, 3))
    found = reader.descriptors(Silent())
    maps = reader.maps(torch.tensor([4, 1]))
    assert found["joined"].shape == (5, 3, sum(prior.level_widths[level] for level in (2, 4)))
    for level, side in (("2", 4), ("4", 8)):
        assert maps[level].shape == (2, side, side, 3)
        rms = maps[level].square().mean((1, 2)).sqrt()
        assert torch.allclose(rms, found[level][[4, 1], -1, :3], rtol=2e-3, atol=1e-3)
        # a run with this guide finds the same numbers, class prompts first
        text = reader.guide.columns({int(level): found[level]}, torch.zeros(5, dtype=torch.long))
        assert torch.equal(text["noise"].float(), found[level][:, -1])
        assert torch.equal(text["text"].float(), found[level][:, :-1])


def test_images_are_drawn_by_seed_from_the_first_classes():
    from fedprior.data import sources

    source = sources.load("digits")
    a, b, other = (explain.draw(source, 4, 30, seed) for seed in (0, 0, 1))
    assert torch.equal(a.image, b.image)
    assert not torch.equal(a.image, other.image)
    assert (a.fitted, len(a.label), set(a.label.tolist())) == (30, 60, {0, 1, 2, 3})
    known = {bytes(x.numpy().tobytes()) for x in source.train["image"]}
    assert [x.numpy().tobytes() in known for x in a.image] == [True] * 30 + [False] * 30
    assert explain.draw(source, 10, 10**6, 0).fitted == len(source.train["label"])


def test_large_images_are_made_smaller_for_the_probe_on_pixels():
    image = torch.randint(256, (2, 3, 16, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(explain.pixels(image[..., :16]), image[..., :16].flatten(1) / 255)
    assert explain.pixels(image).shape == (2, 3 * 16 * 32)


# the command
def call(capsys, *words):
    """-> (exit code, stdout, stderr)."""
    return test_cli.call(capsys, "prior", "explain", *words)


def test_the_command_writes_the_same_numbers_twice(capsys, tmp_path, monkeypatch):
    first, second, other = (tmp_path / name for name in ("first", "second", "other"))
    code, out, _ = call(capsys, "digits", *QUICK, "--out", first, "--json")
    printed = json.loads(out.strip().splitlines()[-1])
    assert code == 0
    assert {path.name for path in first.iterdir()} == FILES
    assert printed == json.loads((first / "explain.json").read_text()) | {"directory": str(first)}
    assert [(row["timestep"], row["level"]) for row in printed["rows"]] == [(50, "2"), (50, "3"), (50, "joined")]
    assert printed["images"] == printed["prompted_images"] == {"train": 60, "test": 60}
    assert printed["pixels"].keys() == {"probe", "purity"}
    assert len(printed["prompts"]) == 10
    for row in printed["rows"]:
        assert row.keys() == ROW
        assert row["image"] + row["prompt"] + row["interaction"] == pytest.approx(1, abs=1e-5)
        assert all(0 <= row[key] <= 1 for key in ROW - {"timestep", "level", "width"})
    for name in FILES - {"explain.json"}:
        with Image.open(first / name) as picture:
            assert min(picture.size) > 200
            assert len(picture.convert("L").getcolors()) > 20  # something is drawn
    monkeypatch.setenv("FEDPRIOR_CACHE", str(tmp_path / "another cache"))
    assert call(capsys, "digits", *QUICK, "--out", second)[0] == 0
    assert (first / "explain.json").read_bytes() == (second / "explain.json").read_bytes()
    assert call(capsys, "digits", *QUICK, "--out", other, "--seed", 1, "guide.pool=mean")[0] == 0
    assert json.loads((other / "explain.json").read_text())["rows"] != printed["rows"]


def test_of_more_than_ten_classes_ten_are_prompted(capsys, tmp_path):
    prior = shutil.copytree(embedded.folder("digits"), tmp_path / "prior")
    (prior / "fedprior.json").unlink()  # which says that it knows digits alone
    rng = np.random.default_rng(0)
    for number in range(12):
        folder = tmp_path / "data" / f"class{number:02}"
        folder.mkdir(parents=True)
        for i in range(15):
            Image.fromarray(rng.integers(256, size=(16, 16, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    words = [prior, "data=own", f"data.path={tmp_path / 'data'}", "prior.steps=1", "prior.guidance=1"]
    code, out, _ = call(
        capsys, *words, "--timesteps", "50", "--levels", 3, "--images", 100, "--out", tmp_path / "out", "--json"
    )
    found = json.loads(out.strip().splitlines()[-1])
    assert code == 0
    assert found["prompts"] == [f"a photo of a class{n:02}" for n in range(10)]
    assert found["images"] == {"train": 100, "test": 36}
    assert found["prompted_images"] == {"train": 100, "test": 30}
    assert found["chance"] == {"probe": pytest.approx(1 / 12, abs=1e-6), "own_nearest": 0.1}


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["digits", "--levels", "5"], 2, "numbers from 1 to 4"),
        (["digits", "--timesteps", "50,1000"], 2, "from 0 to 999"),
        (["digits", "--timesteps", "50,"], 2, "--timesteps must be different whole numbers"),
        (["digits", "--timesteps", "50,050"], 2, "--timesteps must be different whole numbers"),
        (["digits", "--images", "5"], 2, "raise --images"),
        (["digits", "data=digit"], 2, "digits"),
        (["digits", "data.path=absent"], 1, "absent"),
        (["digits", "guide.pol=mean"], 2, "guide.pool"),
        (["digits", "guide.tdcl=2"], 2, "changes no descriptor"),
        (["digits", "rounds=2"], 2, "changes no descriptor"),
        (["digits", "guide.levels=2"], 2, "--levels"),
        (["digits", "prior.name=digits"], 2, "SOURCE"),
        (["digits", "guide.condition=dynamic"], 2, "static"),
        (["digit"], 2, "did you mean digits"),
        (["digits", "--out", "file"], 1, "choose another --out"),
    ],
)
def test_a_mistake_gives_one_line(capsys, tmp_path, monkeypatch, words, code, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("in the way")
    got, _, err = call(capsys, *words)
    assert got == code
    assert len(err.strip().splitlines()) == 1
    assert message in err
    assert "Traceback" not in err


def test_a_prior_is_shown_images_of_its_own_set_that_it_has_not_seen():
    given = ("1", [1])
    own = explain.experiment_of("cifar10", ["data.path=here"], *given).data
    assert (own.name, own.half, own.path) == ("cifar10", "private", "here")
    other = explain.experiment_of("cifar10", ["data=mine", "data.path=here"], *given).data
    assert (other.name, other.half) == ("mine", "all")
    assert explain.experiment_of("digits", [], *given).data.name == "digits"
