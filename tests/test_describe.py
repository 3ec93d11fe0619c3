"""Descriptors: what an image's vector is, and that it is computed once, kept, and found again."""

from dataclasses import replace

import numpy as np
import pytest
import reference_guide as reference
import torch
import toy

from fedprior import store
from fedprior.data.table import Federation, Shard, make
from fedprior.errors import UsageError
from fedprior.prepare import describe
from fedprior.prepare.describe import Describer
from fedprior.priors import descriptor
from fedprior.priors.descriptor import Description
from fedprior.priors.diffusion import DiffusionPrior

CLASS_PROMPTS = [f"a photo of a {name}" for name in toy.CLASSES]
FIT_PROMPTS = ["", *CLASS_PROMPTS]
IMAGE, LABEL = toy.images(12)
TABLE = make(IMAGE, LABEL)
ROUNDING = 2**-10  # of float16, relative


def describer(
    prior, prompts_of=lambda image, label: [*CLASS_PROMPTS, ""], encoder=None, fit_prompts=FIT_PROMPTS, **how
):
    return Describer(
        prior=prior,
        how=Description(**how),
        prompts_of=prompts_of,
        fit_prompts=fit_prompts,
        made_prompts=fit_prompts[1:],
        encoder=encoder,
    )


def shard(*rows, table=TABLE):
    return Shard(table, torch.tensor(rows or range(len(table["label"]))))


def fill(d, *shards, progress=lambda done: None):
    """Describes what is missing -> how many images that was."""
    items = d.items(shards)
    missing = d.missing(items)
    d.fill(items, missing, shards[0].table["image"], progress)
    return len(missing)


def values(d, shard, fused=True):
    """What is kept of a shard's rows: float16 [n, P, d], or {level: [n, P, m]}."""
    keys = [item.key for item in d.items([shard])[0]]
    found = {level: d.level_store(level).gather(keys) for level in d.sizes}
    return torch.cat(list(found.values()), -1) if fused else found


def described(prior, *rows, table=TABLE, **options):
    d = describer(prior, **options)
    fill(d, shard(*rows, table=table))
    return values(d, shard(*rows, table=table))


@pytest.fixture
def looked_at(prior, monkeypatch):
    """(images, prompts, seeds) of every call of the prior's features."""
    seen, features = [], prior.features

    def spy(images, prompts, **options):
        seen.append((images, prompts, options["seeds"]))
        return features(images, prompts, **options)

    monkeypatch.setattr(prior, "features", spy)
    return seen


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """Called with a name, it makes an empty cache the current one."""
    return lambda name: monkeypatch.setenv("FEDPRIOR_CACHE", str(tmp_path / name))


def same(a, b):
    """float16 values of the same sums in another order."""
    torch.testing.assert_close(a.float(), b.float(), rtol=4 * ROUNDING, atol=2e-4)


# What a descriptor is


@pytest.mark.parametrize("pool", ["rms", "l2", "mean"])
def test_a_kept_value_is_the_formulas_within_the_rounding_of_float16(prior, looked_at, pool):
    d = describer(prior, pool=pool)
    fill(d, shard())
    kept = values(d, shard()).numpy()
    assert kept.dtype == np.float16
    assert kept.shape == (12, 5, 24 + 16 + 8)
    basis = {k: (b.mean.double().numpy(), b.axes.double().numpy()) for k, b in d.basis("global").items()}
    item = d.items([shard()])[0][3]
    seeds = next(s for images, _, s in looked_at if torch.equal(images[:12], IMAGE))
    maps = prior.features(IMAGE[3:4], [item.prompts], timestep=300, levels=(2, 3, 4), seeds=seeds[3:4], size=16)
    for p in range(5):
        each = {level: x[0, p].double().numpy() for level, x in maps.items()}
        np.testing.assert_allclose(kept[3, p], reference.descriptor(each, basis, pool), rtol=2 * ROUNDING, atol=2e-4)


def test_axes_are_the_principal_components():
    rng = np.random.default_rng(0)
    tokens = rng.normal(size=(400, 20)) @ rng.normal(size=(20, 20)) + rng.normal(size=20)
    mean, axes = reference.axes(tokens, 6)
    basis = descriptor.fit(torch.from_numpy(tokens), 6)
    np.testing.assert_allclose(basis.mean, mean, atol=1e-5)
    np.testing.assert_allclose(np.abs(basis.axes.double().numpy() @ axes.T), np.eye(6), atol=1e-5)


@pytest.mark.parametrize("how", ["rms", "l2", "mean"])
def test_pooling_is_the_formula_and_only_the_mean_knows_signs(how):
    rng = np.random.default_rng(1)
    maps, tokens = rng.normal(size=(3, 2, 10, 4, 5)), rng.normal(size=(300, 10)) * np.arange(1, 11)
    basis = descriptor.fit(torch.from_numpy(tokens), 4)
    found = descriptor.pooled(torch.from_numpy(maps).float(), basis, how)
    mean, axes = basis.mean.double().numpy(), basis.axes.double().numpy()
    wanted = [[reference.pooled(m.reshape(10, -1).T, mean, axes, how) for m in own] for own in maps]
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    turned = descriptor.pooled(torch.from_numpy(maps).float(), basis._replace(axes=basis.axes * -1), how)
    if how == "mean":
        torch.testing.assert_close(turned, -found)
    else:
        assert torch.equal(turned, found)
        assert (found >= 0).all()


def test_tokens_are_positions_of_the_maps_drawn_without_replacement():
    maps = torch.arange(2 * 3 * 4 * 5 * 6).view(2, 3, 4, 5, 6).float()
    every = maps.flatten(3).transpose(2, 3).flatten(0, 2)
    few = descriptor.tokens(maps, 7, np.random.default_rng(0))
    assert few.shape == (2 * 3 * 7, 4)
    assert {tuple(t) for t in few.tolist()} < {tuple(t) for t in every.tolist()}
    assert len(few.unique(dim=0)) == len(few)
    all_of_them = descriptor.tokens(maps, 99, np.random.default_rng(0))
    assert sorted(all_of_them.tolist()) == sorted(every.tolist())


def test_a_basis_knows_its_images_spread_over_images_and_over_prompts():
    x = torch.randn(9, 5, 4, generator=torch.Generator().manual_seed(0)) + torch.arange(4)
    basis = descriptor.with_spread(descriptor.fit(torch.randn(50, 6), 4), x)
    flat = x.numpy().reshape(45, 4).astype(np.float64)
    np.testing.assert_allclose(basis.centre, flat.mean(0), atol=1e-5)
    np.testing.assert_allclose(basis.scale, flat.std(0), atol=1e-5)
    within = x.numpy().astype(np.float64) - x.numpy().mean(1, keepdims=True)
    np.testing.assert_allclose(basis.prompt_scale, np.sqrt((within**2).mean((0, 1))), atol=1e-5)


def test_the_global_basis_asks_for_no_clients_data(prior, looked_at):
    made = []
    generate = prior.generate
    prior.generate = lambda *given: made.append(generate(*given)) or made[-1]
    first = describer(prior)
    fill(first, shard(0, 1, 2))
    pictures = torch.cat(made)
    fitted = [images for images, _, _ in looked_at if not any(torch.equal(x, y) for x in images for y in IMAGE)]
    assert len(fitted) == len(looked_at) - 1  # all calls but the one that described
    assert all(any(torch.equal(x, y) for y in pictures) for images in fitted for x in images)
    basis = first.basis("global")
    store_before = sorted(p.name for p in first.folder.glob("axes-*/*"))
    fill(first, shard(5, 6))
    assert sorted(p.name for p in first.folder.glob("axes-*/*")) == store_before
    again = describer(prior).basis("global")
    assert all(torch.equal(a, b) for level in basis for a, b in zip(basis[level], again[level], strict=True))


def test_a_levels_axes_do_not_depend_on_the_other_levels_that_are_asked_for(prior, elsewhere):
    """Else an ablation over levels depends on which was run first."""
    elsewhere("fused")
    fused = describer(prior).basis("global")[4]
    elsewhere("alone")
    alone = describer(prior, levels="4").basis("global")[4]
    torch.testing.assert_close(alone.mean, fused.mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close((alone.axes @ fused.axes.T).abs(), torch.eye(8), rtol=0, atol=1e-3)


# What changes it, and what does not


def test_check_14_neither_subset_shuffle_partition_nor_order_of_clients_changes_a_kept_value(prior):
    d = describer(prior)
    fill(d, shard())
    all_rows = values(d, shard())
    for rows in ([3, 5], [11, 0, 7, 2], list(range(12))[::-1]):
        other = describer(prior)
        assert fill(other, shard(*rows)) == 0
        assert torch.equal(values(other, shard(*rows)), all_rows[rows])
    for parts in ([[0, 1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11]], [[11, 9, 7], [0, 2, 4, 6, 8, 10], [1, 3, 5]]):
        other = describer(prior)
        assert fill(other, *(shard(*rows) for rows in parts)) == 0
        for rows in parts:
            assert torch.equal(values(other, shard(*rows)), all_rows[rows])


def test_check_14_nor_do_neighbours_in_the_batch_when_it_is_made(prior, elsewhere, monkeypatch):
    elsewhere("first")
    whole = described(prior)
    elsewhere("second")
    same(described(prior, 7, 4), whole[[7, 4]])
    assert fill(describer(prior), shard(4, 7)) == 0
    other = toy.images(5, seed=9)
    mixed = make(torch.cat([other[0], IMAGE[4:5]]), torch.cat([other[1], LABEL[4:5]]), first_id=100)
    elsewhere("third")
    same(described(prior, table=mixed)[5], whole[4])
    elsewhere("fourth")
    d = describer(prior)
    d.basis("global")
    monkeypatch.setattr(describe, "LOT", 1)
    monkeypatch.setattr(describe, "PAIRS", 5)  # one image at a time
    fill(d, shard(9, 8), shard(3, 2, 1))
    same(values(d, shard(9, 2)), whole[[9, 2]])


def test_a_value_is_the_same_to_the_bit_whatever_was_described_beside_it(prior, elsewhere, monkeypatch):
    """Before it is rounded to float16, which would hide most of a difference: two processes that share a cache, or one
    that was killed, describe an image among others."""
    seen: dict[tuple[str, bytes], list[torch.Tensor]] = {}
    write = describe.LevelStore.write

    def noted(self, keys, found):
        for key, value in zip(keys, found, strict=True):
            seen.setdefault((self.folder.name, key), []).append(value.clone())
        write(self, keys, found)

    monkeypatch.setattr(describe.LevelStore, "write", noted)
    image, label = toy.images(60, seed=5)
    table = make(image, label)
    for i, rows in enumerate([range(60), range(59, -1, -1), [7, 4], [3], range(1, 60, 2), range(40)]):
        elsewhere(str(i))
        fill(describer(prior), shard(*rows, table=table))
    assert min(map(len, seen.values())) >= 2
    assert all(torch.equal(values[0], value) for values in seen.values() for value in values)


def test_check_14_nor_do_prompts_of_other_images(prior, elsewhere):
    def prompts_of(image, label):
        return [CLASS_PROMPTS[label], ""]

    def with_strange_others(image, label):
        mine = bytes.fromhex(store.digest(store.raw_bytes(IMAGE[4])))
        return prompts_of(image, label) if image == mine else ["a bee cat", "a dog"]

    elsewhere("first")
    plain = described(prior, prompts_of=prompts_of)
    elsewhere("second")
    strange = described(prior, prompts_of=with_strange_others)
    same(strange[4], plain[4])
    assert (strange[5].float() - plain[5].float()).abs().max() > 0.01


def test_row_16_columns_go_by_the_image_and_not_by_its_place(prior):
    """Row 16: the released code reads the full set's features by position in a random 10 % subset."""
    d = describer(prior)
    fill(d, shard())
    full = values(d, shard())
    rows = np.random.default_rng(0).permutation(12)[:4]
    subset = make(IMAGE[rows], LABEL[rows], first_id=50)  # another table, with other ids and rows
    assert fill(describer(prior), shard(table=subset)) == 0
    assert torch.equal(values(describer(prior), shard(table=subset)), full[rows])
    by_place = full[: len(rows)]
    assert (by_place.float() - full[rows].float()).abs().max() > 0.05


@pytest.mark.parametrize(
    "other",
    [
        {"timestep": 200},
        {"pool": "l2"},
        {"noise_seed": 1},
        {"latent": "sample"},
        {"draws": 2},
        {"scaling": "legacy"},
        {"size": 24},
        {"fit_prompts": FIT_PROMPTS[:3]},
    ],
    ids=lambda other: next(iter(other)),
)
def test_whatever_changes_a_descriptor_has_a_folder_of_its_own(prior, other):
    plain = described(prior, 0, 1)
    changed = describer(prior, **other)
    assert changed.folder != describer(prior).folder
    assert fill(changed, shard(0, 1)) == 2
    assert (values(changed, shard(0, 1)).float() - plain.float()).abs().max() > 0.003
    assert torch.equal(described(prior, 0, 1), plain)


def test_another_revision_another_prompt_and_another_precision_are_described_anew(prior):
    plain = describer(prior)
    fill(plain, shard(0, 1))
    half = DiffusionPrior.from_pretrained(prior.name, steps=1, dtype="bf16")
    assert describer(half).folder != plain.folder
    whole = DiffusionPrior.from_pretrained(prior.name, steps=1)
    assert describer(whole).folder == plain.folder
    half.revision = prior.revision = "another"
    assert describer(prior).folder not in (describer(whole).folder, describer(half).folder)
    assert fill(describer(prior), shard(0, 1)) == 2
    assert fill(describer(whole), shard(0, 1)) == 0
    words = describer(whole, lambda image, label: [*CLASS_PROMPTS, "a photo of a visual object"])
    assert fill(words, shard(0, 1)) == 2
    a, b = values(describer(whole), shard(0, 1)).float(), values(words, shard(0, 1)).float()
    same(a[:, :4], b[:, :4])
    assert (a[:, 4] - b[:, 4]).abs().max() > 0.01


# Axes of a client, and of a batch


def test_row_12_a_global_basis_is_one_for_all_and_one_of_a_batch_is_not(prior, monkeypatch):
    """Row 12: refitted on every batch, as released, an axis means other things in other batches."""
    monkeypatch.setattr(describe, "BATCH", 4)

    def of_image_0(pca, *rows):
        d = describer(prior, pca=pca)
        fill(d, shard(*rows))
        return values(d, shard(*rows))[rows.index(0)].float()

    one, two = (0, 1, 2, 3), (0, 9, 10, 11)
    assert torch.equal(of_image_0("global", *one), of_image_0("global", *two))
    assert (of_image_0("per_batch", *one) - of_image_0("per_batch", *two)).abs().max() > 0.02
    assert (of_image_0("per_batch", *one) - of_image_0("global", *one)).abs().max() > 0.02
    # the first four rows are a batch, so what follows them changes nothing
    assert torch.equal(of_image_0("per_batch", *one), of_image_0("per_batch", *one, 4, 5, 6, 7, 8))
    whole = of_image_0("per_client", *one, 4, 5, 6, 7)
    assert (whole - of_image_0("per_client", *one)).abs().max() > 0.02
    assert (whole - of_image_0("global", *one)).abs().max() > 0.02


def test_a_clients_basis_is_fitted_on_its_own_rows(prior, looked_at):
    made = []
    prior.generate = lambda *given: made.append(given)
    d = describer(prior, pca="per_client")
    fill(d, shard(0, 1, 2, 3), shard(4, 5, 6))
    assert not made
    groups = {item.group for own in d.items([shard(0, 1, 2, 3), shard(4, 5, 6)]) for item in own}
    assert len(groups) == 2
    assert fill(describer(prior, pca="per_client"), shard(0, 1, 2, 3), shard(4, 5, 6)) == 0


def test_a_clients_axes_are_those_of_the_prompts_it_describes_under_whatever_was_described_before(prior, elsewhere):
    elsewhere("alone")
    null = {"prompts_of": lambda image, label: [""], "pca": "per_client"}
    alone = described(prior, *range(8), **null)
    elsewhere("after")
    described(prior, *range(8), pca="per_client")
    same(described(prior, *range(8), **null), alone)


@pytest.mark.parametrize("pca", ["per_client", "per_batch"])
def test_a_client_with_one_image_has_a_basis_too(prior, pca):
    """Fewer tokens than components: 16 positions at level 2, where 24 components are wanted."""
    found = described(prior, 5, pca=pca, prompts_of=lambda image, label: [""])
    assert found.shape == (1, 1, 48)
    assert found.isfinite().all()


# What is kept


def test_a_second_call_describes_nothing_and_a_superset_the_rest_only(prior, looked_at):
    d = describer(prior)
    assert fill(d, shard(0, 1, 2)) == 3
    first = values(d, shard(0, 1, 2))
    looked_at.clear()
    assert fill(d, shard(0, 1, 2)) == 0
    assert fill(describer(prior), shard(2, 0)) == 0
    assert looked_at == []
    said = []
    later = describer(prior)
    assert fill(later, shard(4, 2, 0, 1, 3), shard(1, 4, 3), progress=said.append) == 2
    assert all(any(torch.equal(x, IMAGE[i]) for i in (3, 4)) for images, _, _ in looked_at for x in images)
    assert said[-1] == 2
    assert torch.equal(values(later, shard(0, 1, 2)), first)


def test_equal_images_are_described_once(prior, looked_at):
    twice = make(IMAGE[[0, 1, 0, 1, 0]], LABEL[[0, 1, 0, 1, 0]])
    d = describer(prior)
    assert fill(d, shard(table=twice)) == 2
    kept = values(d, shard(table=twice))
    assert torch.equal(kept[0], kept[2])
    assert not torch.equal(kept[0], kept[1])


def test_two_fresh_caches_get_the_same_bits(prior, elsewhere, tmp_path):
    contents = []
    for name in ("first", "second"):
        elsewhere(name)
        fill(describer(prior), shard(0, 1, 2), shard(3, 4))
        files = sorted((tmp_path / name).rglob("*.safetensors"))
        contents.append({p.relative_to(tmp_path / name): store.read_tree(p)[0] for p in files})
    assert contents[0].keys() == contents[1].keys()
    assert len(contents[0]) == 6  # axes and values of three levels
    for path, content in contents[0].items():
        assert all(torch.equal(x, contents[1][path][name]) for name, x in content.items())


@pytest.mark.parametrize("damage", ["cut", "bit", "empty", "gone"])
@pytest.mark.parametrize("what", ["level", "axes"])
def test_a_damaged_file_is_made_again(prior, damage, what):
    d = describer(prior)
    fill(d, shard(0, 1, 2))
    kept = values(d, shard(0, 1, 2))
    (path,) = d.folder.glob(f"{what}-3-*/*.safetensors")
    data, content = path.read_bytes(), store.read_tree(path)[0]
    if damage == "gone":
        path.unlink()
    else:
        spoilt = bytearray(data)
        spoilt[-1] ^= 1
        path.write_bytes({"cut": data[: len(data) // 2], "bit": bytes(spoilt), "empty": b""}[damage])
    again = describer(prior)
    again.basis("global")
    assert fill(again, shard(0, 1, 2)) == (3 if what == "level" else 0)
    assert torch.equal(values(again, shard(0, 1, 2)), kept)
    assert all(torch.equal(x, content[name]) for name, x in store.read_tree(path)[0].items())


def test_what_was_interrupted_goes_on_where_it_stopped(prior, monkeypatch):
    monkeypatch.setattr(describe, "LOT", 2)
    monkeypatch.setattr(describe, "PAIRS", 10)  # two images at a time
    monkeypatch.setattr(describe, "BLOCK", 4)
    d = describer(prior)
    d.basis("global")
    features, count = prior.features, []

    def stops(images, prompts, **options):
        count.append(len(images))
        if len(count) == 4:
            raise KeyboardInterrupt
        return features(images, prompts, **options)

    monkeypatch.setattr(prior, "features", stops)
    with pytest.raises(KeyboardInterrupt):
        fill(d, shard())
    assert count == [2, 2, 2, 2]
    later = describer(prior)
    count.clear()
    count += [0] * 10  # it does not stop again
    assert fill(later, shard()) == 8  # a block of four was written, two more images were not
    assert sum(count) == 8
    assert later.missing(later.items([shard()])) == []
    monkeypatch.setattr(prior, "features", features)
    same(values(later, shard()), values(describer(prior), shard()))


def test_a_level_alone_is_found_in_what_was_written_for_several(prior, looked_at):
    fused = describer(prior)
    fill(fused, shard())
    looked_at.clear()
    parts = values(fused, shard(), fused=False)
    for level, width in ((2, 24), (3, 16), (4, 8)):
        alone = describer(prior, levels=str(level))
        assert fill(alone, shard(3, 1)) == 0
        assert torch.equal(values(alone, shard(3, 1)), parts[level][[3, 1]])
        assert parts[level].shape[2] == width
    two = describer(prior, levels="4,2")
    assert fill(two, shard()) == 0
    assert torch.equal(values(two, shard()), torch.cat([parts[2], parts[4]], -1))  # from the coarsest level up
    assert looked_at == []
    assert fill(describer(prior, levels="3", components="5"), shard(0)) == 1  # other axes


def test_files_are_mapped_and_not_copied(prior):
    fill(describer(prior), shard())
    later = describer(prior)
    for level in (2, 3, 4):
        (kept,) = later.level_store(level).files
        at = kept.data_ptr()
        with open("/proc/self/maps") as f:
            regions = [line.split() for line in f]
        inside = [r for r in regions if int(r[0].split("-")[0], 16) <= at < int(r[0].split("-")[1], 16)]
        (path,) = later.folder.glob(f"level-{level}-*/*.safetensors")
        assert [r[-1] for r in inside] == [str(path)]


def test_a_federation_with_synthetic_rows_is_described_row_by_row(prior):
    data = Federation(table=TABLE, clients=(torch.arange(4), torch.arange(4, 9)), test=TABLE, classes=toy.CLASSES)
    extra = toy.images(3, seed=5)
    with_extra = data.with_rows(make(*extra, synthetic=True, first_id=12), [torch.tensor([0, 1]), torch.tensor([1, 2])])
    d = describer(prior)
    assert fill(d, *(with_extra.shard(k) for k in range(2))) == 12
    found = values(d, with_extra.shard(1))
    same(found[5], described(prior, 1, table=make(*extra))[0])


# Settings


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"levels": "5"}, "from 1 to 4"),
        ({"levels": "0"}, "whole numbers"),
        ({"levels": "2,2"}, "different numbers"),
        ({"levels": ""}, "whole numbers"),
        ({"components": "3,4"}, "one number for each"),
        ({"draws": 0}, "at least 1"),
        ({"timestep": -1}, "at least 0"),
        ({"size": 20}, "multiple of 8"),
        ({"gamma": float("nan")}, "at least 0"),
        ({"condition": "frozen_encoder"}, r"guide\.encoder"),
        ({"condition": "dynamic", "pca": "per_client"}, r"pca=global"),
    ],
)
def test_a_wrong_setting_is_one_clear_line(wrong, words):
    with pytest.raises(UsageError, match=words) as error:
        Description(**wrong)
    assert "\n" not in str(error.value)


def test_the_size_is_the_priors_own_or_224_whichever_is_smaller(prior):
    assert describer(prior).size == 16
    prior.size = 768
    assert describer(prior).size == 224
    assert describer(prior, size=256).size == 256


def test_a_narrow_level_has_as_many_components_as_channels():
    stable = {1: 1280, 2: 1280, 3: 640, 4: 320}
    assert Description().sizes(stable) == {2: 256, 3: 128, 4: 128}
    assert Description(levels="4, 2").sizes(reference.WIDTHS) == {2: 24, 4: 8}
    assert Description(levels="4,2", components="5,6").sizes(reference.WIDTHS) == {2: 6, 4: 5}
    assert replace(Description(), levels="1").sizes(stable) == {1: 256}
