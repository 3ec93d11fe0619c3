"""FedDifRC's two terms against numpy, its checks, what its released code does otherwise, and training under it."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import reference_guide as reference
import torch
import torch.nn.functional as F
import toy
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprior import assemble, guide, seeds, store, tree
from fedprior.config import Experiment, override
from fedprior.data import augment
from fedprior.data.table import Federation, make
from fedprior.engines.serial import Serial
from fedprior.errors import UsageError, UserError
from fedprior.federate import begin, federate
from fedprior.guide import FedDifRC, Guide
from fedprior.local import Worker
from fedprior.memory import ClientMemory
from fedprior.method import Method
from fedprior.methods import FedAdam, FedAvg, FedBN, FedNH, FedProto, FedProx, Moon, Scaffold
from fedprior.net import Net, Output
from fedprior.optim import SGD
from fedprior.prepare.balance import BalanceToMax
from fedprior.priors import descriptor, embedded
from fedprior.priors.descriptor import Description
from fedprior.priors.encoder import ImageEncoder
from fedprior.progress import Silent
from fedprior.traffic import Traffic

CPU = torch.device("cpu")
FORMS = ("l2_normalized", "l2_raw", "mse", "cosine", "kl_softmax")
MANY = tuple(f"kind {i}" for i in range(25))


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """A random CLIP image tower in a folder."""
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    where = tmp_path_factory.mktemp("clip")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = CLIPVisionConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=16,
            patch_size=8,
            projection_dim=12,
        )
        CLIPVisionModelWithProjection(config).save_pretrained(where)
    return where


# The terms


def batch_of(seed, rows, prompts, width, positive=False):
    """z [B, d], text [B, P, d] and own [B] in float64."""
    rng = np.random.default_rng(seed)
    draw = (lambda *shape: np.abs(rng.normal(size=shape))) if positive else (lambda *shape: rng.normal(size=shape))
    return draw(rows, width), draw(rows, prompts, width), rng.integers(prompts, size=rows)


def split(text, own, used=None):
    """-> positives [B, d], negatives: a list of [n_i, d]"""
    used = np.ones(text.shape[:2], bool) if used is None else used
    mine = np.arange(text.shape[1])
    neg = [t[(mine != o) & u] for t, o, u in zip(text, own, used, strict=True)]
    return text[np.arange(len(own)), own], neg


def tdcl(z, text, own, config, group=None, used=None):
    """fedprior's term on numpy arrays -> (value, gradient with respect to z)"""
    x = torch.tensor(z, requires_grad=True)
    group = torch.arange(len(z)) if group is None else torch.tensor(group)
    used = None if used is None else torch.tensor(used)
    loss = guide.tdcl(x, torch.tensor(text), torch.tensor(own), group, used, config)
    (slope,) = torch.autograd.grad(loss, x, allow_unused=True, materialize_grads=True)
    return float(loss.detach()), slope.numpy()


def agrees(found, formula, z):
    np.testing.assert_allclose(found[0], formula(z), rtol=1e-6, atol=1e-9)
    slope = reference.slope(formula, z)
    np.testing.assert_allclose(found[1], slope, rtol=1e-4, atol=1e-5 * max(1, np.abs(slope).max()))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 5),
    st.integers(2, 4),
    st.integers(2, 5),
    st.sampled_from([0.04, 0.2, 1.0]),
    st.sampled_from(["sample", "batch_ratio"]),
    st.sampled_from(["none", "mean_distance"]),
    st.sampled_from(["row", "official"]),
)
def test_tdcl_is_the_formula_and_so_is_its_gradient(seed, rows, prompts, width, tau, reduction, norm, pairing):
    config = FedDifRC(temperature=tau, reduction=reduction, normaliser=norm, pairing=pairing)
    z, text, own = batch_of(seed, rows, prompts, width)
    pos, neg = split(text, own)

    def formula(x):
        official = pairing == "official"
        return reference.tdcl(x, pos, neg, tau, reduction=reduction, norm=norm, official=official, batch=z)

    agrees(tdcl(z, text, own, config), formula, z)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(2, 6),
    st.sampled_from(["other_images", "both"]),
    st.sampled_from(["sample", "batch_ratio"]),
    st.sampled_from(["none", "mean_distance"]),
)
def test_other_images_own_prompts_are_negatives_where_their_class_differs(seed, rows, source, reduction, norm):
    config = FedDifRC(temperature=0.3, negatives_from=source, reduction=reduction, normaliser=norm)
    z, text, own = batch_of(seed, rows, 3, 4)
    pos, neg = split(text, own)
    others = [[pos[j] for j in range(rows) if own[j] != own[i]] for i in range(rows)]
    if source == "other_images":
        neg = [np.array(o).reshape(-1, 4) for o in others]
    else:
        neg = [np.concatenate([n, np.array(o).reshape(-1, 4)]) for n, o in zip(neg, others, strict=True)]

    def formula(x):
        return reference.tdcl(x, pos, neg, 0.3, reduction=reduction, norm=norm, batch=z)

    agrees(tdcl(z, text, own, config, group=own), formula, z)


@pytest.mark.parametrize("reduction", ["sample", "batch_ratio"])
@pytest.mark.parametrize("pairing", ["row", "official"])
def test_only_the_drawn_prompts_are_negatives(reduction, pairing):
    config = FedDifRC(temperature=0.3, reduction=reduction, pairing=pairing, negatives=2)
    z, text, own = batch_of(3, 5, 6, 4)
    rng = np.random.default_rng(0)
    used = np.zeros((5, 6), bool)
    for i in range(5):
        used[i, rng.choice([p for p in range(6) if p != own[i]], 2, replace=False)] = True
    pos, neg = split(text, own, used)
    official = pairing == "official"
    agrees(
        tdcl(z, text, own, config, used=used),
        lambda x: reference.tdcl(x, pos, neg, 0.3, reduction=reduction, official=official, batch=z),
        z,
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(2, 8), st.sampled_from(FORMS), st.booleans())
def test_ndcr_is_the_formula_and_so_is_its_gradient(seed, rows, width, form, positive):
    z, text, _ = batch_of(seed, rows, 1, width, positive)
    x, h = torch.tensor(z, requires_grad=True), text[:, 0]
    loss = guide.ndcr(x, torch.tensor(h), form)
    (slope,) = torch.autograd.grad(loss, x)
    np.testing.assert_allclose(float(loss.detach()), reference.ndcr(z, h, form), rtol=1e-8, atol=1e-12)
    wanted = reference.slope(lambda v: reference.ndcr(v, h, form), z)
    np.testing.assert_allclose(slope, wanted, rtol=1e-4, atol=1e-7 * max(1, np.abs(wanted).max()))


# Checks 9 to 11 of the specification


def test_check_9_tdcl_is_cross_entropy_over_the_positive_and_the_negatives():
    z, text, own = batch_of(0, 7, 5, 6)
    for tau in (0.04, 0.5):
        order = [[o, *(p for p in range(5) if p != o)] for o in own]
        sorted_text = torch.tensor(text)[torch.arange(7)[:, None], torch.tensor(order)]
        s = F.cosine_similarity(torch.tensor(z)[:, None], sorted_text, dim=-1) / tau
        wanted = F.cross_entropy(s, torch.zeros(7, dtype=torch.long))
        assert tdcl(z, text, own, FedDifRC(temperature=tau))[0] == pytest.approx(float(wanted), rel=1e-10)


@pytest.mark.parametrize("reduction", ["sample", "batch_ratio"])
@pytest.mark.parametrize("pairing", ["row", "official"])
def test_check_9_without_negatives_it_is_zero(reduction, pairing):
    config = FedDifRC(reduction=reduction, pairing=pairing)
    z, text, own = batch_of(0, 4, 1, 6)
    value, slope = tdcl(z, text, own, config)
    assert value == pytest.approx(0, abs=1e-12)
    np.testing.assert_allclose(slope, 0, atol=1e-12)
    z, text, own = batch_of(0, 4, 3, 6)
    assert tdcl(z, text, own, config, used=np.zeros((4, 3), bool))[0] == pytest.approx(0)


@pytest.mark.parametrize("reduction", ["sample", "batch_ratio"])
def test_check_9_without_strange_images_it_is_zero(reduction):
    z, text, own = batch_of(0, 4, 3, 6)
    alone = FedDifRC(reduction=reduction, negatives_from="other_images")  # all of one class
    value, slope = tdcl(z, text, own, alone, group=[1, 1, 1, 1])
    assert value == pytest.approx(0)
    assert np.isfinite(slope).all()


def rig(z, text, own, noise=None, label=None, **options):
    """Guide.loss on given columns: -> (total, features, logits) that carry gradients; the method's loss is 0."""
    about = Guide.__new__(Guide)
    about.config = FedDifRC(**options)
    features, logits = torch.tensor(z, requires_grad=True), torch.zeros(len(z), 3, requires_grad=True)
    batch = {
        "text": torch.tensor(text),
        "own": torch.tensor(own),
        "label": torch.tensor(own if label is None else label),
    }
    batch |= {} if noise is None else {"noise": torch.tensor(noise)}
    return about.loss(logits.sum() * 0, Output(features, logits, {}), {}, batch), features, logits


def test_check_9_the_gradient_goes_through_the_features_alone():
    z, text, own = batch_of(0, 6, 4, 5)
    total, features, logits = rig(z, text, own, noise=text[:, 0], normaliser="mean_distance")
    for_z, for_logits = torch.autograd.grad(total, [features, logits])
    assert for_z.abs().min() > 0
    assert not for_logits.any()
    pos, neg = split(text, own)  # and not through U: the reference holds it still

    def formula(x):
        return reference.tdcl(x, pos, neg, 0.04, norm="mean_distance", batch=z) + reference.ndcr(x, text[:, 0])

    np.testing.assert_allclose(for_z, reference.slope(formula, z), rtol=1e-4, atol=1e-5)


def test_check_9_permuting_the_negatives_of_other_samples_changes_nothing():
    z, text, own = batch_of(0, 6, 5, 4)
    config = FedDifRC(temperature=0.2)
    value, slope = tdcl(z, text, own, config)
    within = text.copy()
    for i in range(1, 6):  # the order of prompts, the positive's place apart
        others = [p for p in range(5) if p != own[i]]
        within[i, others] = text[i, np.roll(others, 2)]
    again, same = tdcl(z, within, own, config)
    assert again == pytest.approx(value, rel=1e-12)
    np.testing.assert_allclose(same, slope, rtol=1e-9, atol=1e-12)
    strange = text.copy()
    strange[1:] = np.random.default_rng(5).permutation(text[1:].reshape(-1, 4)).reshape(5, 5, 4)
    np.testing.assert_allclose(tdcl(z, strange, own, config)[1][0], slope[0], rtol=1e-9, atol=1e-12)
    official = replace(config, pairing="official")  # where it does change: row 5
    assert np.abs(tdcl(z, strange, own, official)[1][0] - tdcl(z, text, own, official)[1][0]).max() > 1e-3


@pytest.mark.parametrize("form", FORMS)
def test_check_10_ndcr_is_zero_at_its_target(form):
    z = torch.rand(5, 32, dtype=torch.float64, requires_grad=True)
    loss = guide.ndcr(z, z.detach().clone(), form)
    assert float(loss.detach()) == pytest.approx(0, abs=1e-12)
    (slope,) = torch.autograd.grad(loss, z)
    assert slope.abs().max() < 1e-8


@pytest.mark.parametrize("form", FORMS)
def test_check_10_the_normalised_forms_do_not_know_lengths(form):
    z, h = torch.rand(2, 6, 32, dtype=torch.float64)
    scales = torch.rand(6, 1, dtype=torch.float64) + 0.5
    plain, scaled = guide.ndcr(z, h, form), guide.ndcr(z * scales * 7, h / scales, form)
    if form in ("l2_raw", "mse"):
        assert abs(float(plain - scaled)) > 0.1
    else:
        assert float(scaled) == pytest.approx(float(plain), rel=1e-9)
        assert 0 < float(plain) < 2


def test_check_10_the_kl_form_is_at_most_0_0034():
    g = torch.Generator().manual_seed(0)
    for power in (1, 8):  # from dense to sparse vectors
        z, h = torch.rand(2, 64, 512, generator=g, dtype=torch.float64) ** power
        assert 0 < float(guide.ndcr(z, h, "kl_softmax")) <= 0.0034
    corners = torch.eye(512, dtype=torch.float64)
    most = float(guide.ndcr(corners[:2], corners[2:4], "kl_softmax"))
    assert most == pytest.approx((np.e - 1) / (np.e + 511))
    assert 0.0033 < most <= 0.0034


class Wide:
    """A prior with blocks as wide as Stable Diffusion's, whose maps are noise by image and level."""

    name, revision, settings, size = "wide", "0", {"dtype": "fp32"}, 512
    level_widths = {1: 1280, 2: 1280, 3: 640, 4: 320}  # noqa: RUF012

    def features(self, images, prompts, *, levels, **options):
        side = {1: 2, 2: 4, 3: 8, 4: 8}
        g = torch.Generator().manual_seed(int(images.sum()))
        shape = len(images), len(prompts[0])
        return {k: torch.randn(*shape, self.level_widths[k], side[k], side[k], generator=g) for k in levels}


def turned_axes(prior, seed=0):
    """A basis of each level with the axes that Stable Diffusion's widths get."""
    g = torch.Generator().manual_seed(seed)
    out = {}
    for level, m in Description().sizes(prior.level_widths).items():
        axes = torch.linalg.qr(torch.randn(prior.level_widths[level], m, generator=g)).Q.T
        out[level] = descriptor.Basis(torch.zeros(len(axes[0])), axes, torch.zeros(m), torch.ones(m), torch.ones(m))
    return out


def joined(about, maps, basis, pool="rms"):
    """The columns of an image's maps -> descriptors [n, P, d]"""
    found = {k: descriptor.pooled(x, basis[k], pool) for k, x in maps.items()}
    return about.columns(found, torch.zeros(len(maps[4]), dtype=torch.long))["text"]


@pytest.mark.parametrize("pool", ["rms", "l2"])
def test_check_11_a_descriptor_is_512_wide_never_negative_and_blind_to_signs_of_axes(pool):
    prior = Wide()
    about = Guide(config=FedDifRC(ndcr=0, pool=pool), prior=prior, classes=toy.CLASSES)
    assert about.width == 512
    assert about.describer.sizes == {2: 256, 3: 128, 4: 128}
    maps = prior.features(toy.images(2)[0], [about.prompts_of(bytes(8), 0)] * 2, levels=(2, 3, 4))
    basis = turned_axes(prior)
    found = joined(about, maps, basis, pool)
    assert found.shape == (2, 4, 512)
    assert (found >= 0).all()
    assert found.min() > 0
    signs = torch.Generator().manual_seed(4)
    flipped = {
        k: b._replace(axes=b.axes * (torch.randint(2, (len(b.axes), 1), generator=signs) * 2 - 1))
        for k, b in basis.items()
    }
    assert torch.equal(joined(about, maps, flipped, pool), found)


def test_check_11_and_row_9_block_4_is_read_and_makes_the_last_128_entries():
    """Row 9: the released code reshapes the third block's map once more, so the fourth has no effect."""
    prior = Wide()
    about = Guide(config=FedDifRC(ndcr=0), prior=prior, classes=toy.CLASSES)
    maps = prior.features(toy.images(2)[0], [about.prompts_of(bytes(8), 0)] * 2, levels=(2, 3, 4))
    other = maps | {4: maps[4] + 1}
    basis = turned_axes(prior)
    a, b = joined(about, maps, basis), joined(about, other, basis)
    assert torch.equal(a[..., :384], b[..., :384])
    assert (a[..., 384:] != b[..., 384:]).float().mean() > 0.95  # float16 rounds a few to the same

    def faulty(maps):  # 640 channels of 8 x 8 positions read as 320 of 128
        return maps | {4: maps[3].flatten(2).reshape(2, 5, 320, 8, 16)}

    assert torch.equal(joined(about, faulty(maps), basis), joined(about, faulty(other), basis))
    assert (joined(about, faulty(maps), basis)[..., 384:] - a[..., 384:]).abs().max() > 0.05


# What the released code does otherwise


def test_row_2_doubly_scaled_images_collapse():
    """Row 2: with `/255` after `ToTensor` all images are black, and descriptors of different images nearly one."""
    digits, images = embedded.load("digits"), toy.images(24)[0]

    def spread(scaling):
        seen = digits.features(
            images,
            [[""]] * len(images),
            timestep=300,
            levels=(2, 3, 4),
            seeds=[0] * len(images),
            size=16,
            scaling=scaling,
        )
        parts = []
        for x in seen.values():
            basis = descriptor.fit(x.flatten(3).flatten(0, 1).transpose(1, 2).flatten(0, 1), 8)
            parts.append(descriptor.pooled(x, basis, "rms")[:, 0])
        return float(torch.cat(parts, 1).var(0).mean())

    assert spread("legacy") < spread("signed") / 10


def test_row_3_the_kl_form_is_switched_off_at_weight_one():
    """Row 3: about |u - v|^2 / (2 d), so its gradient is a thousandth of the squared distance's, and tiny beside
    cross-entropy's."""
    g = torch.Generator().manual_seed(0)
    z = (torch.rand(64, 512, generator=g, dtype=torch.float64)).requires_grad_()
    h = torch.rand(64, 512, generator=g, dtype=torch.float64) ** 2
    values = {form: guide.ndcr(z, h, form) for form in ("kl_softmax", "l2_normalized")}
    slopes = {form: torch.autograd.grad(value, z)[0].norm() for form, value in values.items()}
    small, large = (float(values[form].detach()) for form in ("kl_softmax", "l2_normalized"))
    assert small == pytest.approx(large / 1024, rel=0.02)
    assert float(slopes["l2_normalized"] / slopes["kl_softmax"]) == pytest.approx(1024, rel=0.05)
    head = torch.nn.Linear(512, 10, dtype=torch.float64)
    entropy = F.cross_entropy(head(z), torch.randint(10, (64,), generator=g))
    assert float(slopes["kl_softmax"] / torch.autograd.grad(entropy, z)[0].norm()) < 0.01


def test_row_4_one_ratio_of_a_batch_is_dominated_by_its_easiest_row():
    """Row 4: one logarithm of sums. The worst row then has hardly any gradient, where per sample it has the largest."""
    z, text, own = batch_of(0, 8, 4, 16)
    z[:] = text[np.arange(8), own]  # all rows meet their positive
    z[0] = text[0, (own[0] + 1) % 4]  # but one, which meets a negative
    value, slope = tdcl(z, text, own, FedDifRC(temperature=0.1))
    ratio, flat = tdcl(z, text, own, FedDifRC(temperature=0.1, reduction="batch_ratio"))
    size, flat_size = np.linalg.norm(slope, axis=1), np.linalg.norm(flat, axis=1)
    assert size[0] > 5 * size[1:].max()
    assert value > 0.5
    assert ratio < value / 2
    assert flat_size[0] < size[0] / 2


def pairs(pairing, mark_text, mark_z):
    """How many of 640 pairs of an anchor and a negative share what is marked, B = 64 and ten negatives each."""
    config = FedDifRC(temperature=1.0, pairing=pairing)
    own = np.zeros(64, dtype=int)
    seen = []

    def spy(z, f, config):
        seen.append((z, f))
        return original(z, f, config)

    original, guide.similarity = guide.similarity, spy
    try:
        tdcl(mark_z, mark_text, own, config)
    finally:
        guide.similarity = original
    z, f = seen[-1]
    f = f if pairing == "official" else f[:, 1:]  # the positive stands first
    assert f.shape[:2] == (64, 10)
    return int(((z[:, None] * f).sum(-1) > 0.5).sum())


def test_row_5_all_negatives_are_the_anchors_own_image_and_not_10_of_640():
    """Row 5: anchors tiled (i mod B), negatives sample-major (j // n), so ten pairs of 640 fit."""
    marks = np.eye(64)
    text = np.repeat(marks[:, None], 11, axis=1)
    assert pairs("row", text, marks) == 640
    assert pairs("official", text, marks) == 10
    assert sum(j % 64 == j // 10 for j in range(640)) == 10


def test_row_6_no_negative_names_the_own_class_and_not_one_in_ten():
    """Row 6: after the mis-pairing about 10 % of negatives carry the anchor's class. Ten classes, nine negatives
    and one repeated, dealt to a batch."""
    rng = np.random.default_rng(0)
    faulty = 0
    for _ in range(5):
        label = rng.integers(10, size=64)
        classes = np.eye(10)
        wrong = [rng.permutation([c for c in range(10) if c != y]) for y in label]
        text = np.stack([classes[[y, *w, w[0]]] for y, w in zip(label, wrong, strict=True)])
        assert pairs("row", text, classes[label]) == 0
        faulty += pairs("official", text, classes[label])
    assert 0.06 < faulty / (5 * 640) < 0.14


def test_row_17_a_zero_is_called_zero():
    """Row 17: the released code calls SVHN's class 0 "number 10", as the raw files do."""
    digits = tuple(str(i) for i in range(10))
    about = Guide(config=FedDifRC(), prior=Wide(), classes=digits)
    assert about.prompts_of(bytes(8), 0)[:10] == [f"a photo of a {i}" for i in digits]
    assert not augment.mirrors(digits)  # row 18


def test_row_24_a_linear_head_stands_between_other_widths():
    """Row 24: the released code needs features 512 wide. TinyCNN's are 8."""
    wide = Guide(config=FedDifRC(), prior=Wide(), classes=toy.CLASSES)
    module = wide.adapt(toy.TinyCNN(), seed=3)
    assert module.guide.weight.shape == (512, 8)
    again, other = (wide.adapt(toy.TinyCNN(), seed=s).guide.weight for s in (3, 4))
    assert torch.equal(again, module.guide.weight)
    assert not torch.equal(other, module.guide.weight)
    net = Net(module)
    assert "guide.weight" in net.param_names
    assert net(net.init(), toy.images(2)[0]).features.shape == (2, 8)
    with pytest.raises(UsageError, match=r"guide\.head=none.*8.*512.*guide\.head=auto") as error:
        Guide(config=FedDifRC(head="none"), prior=Wide(), classes=toy.CLASSES).adapt(toy.TinyCNN(), 0)
    assert "\n" not in str(error.value)


def test_a_head_comes_where_widths_differ_or_targets_have_signs(prior):
    def has(**options):
        about = Guide(config=FedDifRC(levels="4", **options), prior=prior, classes=toy.CLASSES)
        return hasattr(about.adapt(toy.TinyCNN(), 0), "guide")

    assert not has()
    assert has(head="linear")
    assert has(whiten="component")
    assert has(pool="mean")
    assert has(anchors="random")
    assert not has(whiten="component", head="none")
    assert has(components="5")


def test_the_head_maps_features_to_the_descriptors_width():
    _, text, own = batch_of(0, 6, 4, 5)
    g = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(5, 7, generator=g).double(), torch.randn(5, generator=g).double()
    about = Guide.__new__(Guide)
    about.config = FedDifRC(ndcr=0)
    x = np.random.default_rng(1).normal(size=(6, 7))
    batch = {"text": torch.tensor(text), "own": torch.tensor(own), "label": torch.tensor(own)}
    out = Output(torch.tensor(x), torch.zeros(6, 3), {})
    loss = about.loss(torch.zeros(()).double(), out, {"guide.weight": weight, "guide.bias": bias}, batch)
    pos, neg = split(text, own)
    mapped = x @ weight.numpy().T + bias.numpy()
    assert float(loss) == pytest.approx(reference.tdcl(mapped, pos, neg, 0.04), rel=1e-9)


def test_weights_scale_the_terms_and_a_shuffled_target_is_another_images():
    z, text, own = batch_of(0, 6, 4, 5)
    h = text[:, 3]
    pos, neg = split(text, own)
    one, two = reference.tdcl(z, pos, neg, 0.04), reference.ndcr(z, h)
    assert rig(z, text, own, h, tdcl=0.3, ndcr=2.0)[0].item() == pytest.approx(0.3 * one + 2 * two, rel=1e-9)
    assert rig(z, text, own, h, tdcl=0)[0].item() == pytest.approx(two, rel=1e-9)
    shuffled = rig(z, text, own, h, tdcl=0, target="shuffled")[0].item()
    assert shuffled == pytest.approx(reference.ndcr(z, np.roll(h, 1, axis=0)), rel=1e-9)


# Prompts and negatives


def test_up_to_twenty_classes_are_all_described_and_more_are_drawn_for_each_image():
    about = Guide(config=FedDifRC(), prior=Wide(), classes=MANY[:20])
    assert about.prompts_of(bytes(8), 7) == [*(f"a photo of a {c}" for c in MANY[:20]), ""]
    about = Guide(config=FedDifRC(negatives=4), prior=Wide(), classes=MANY)
    drawn = set()
    for i in range(60):
        image, label = bytes([i]) * 8, i % 25
        words = about.prompts_of(image, label)
        assert words == about.prompts_of(image, label)
        assert len(words) == 6
        assert words[0] == f"a photo of a {MANY[label]}"
        assert words[5] == ""
        assert len(set(words)) == 6
        assert set(words[1:5]) <= {f"a photo of a {c}" for c in MANY} - {words[0]}
        drawn |= set(words[1:5])
    assert len(drawn) == 25  # every class serves
    assert len({tuple(about.prompts_of(bytes([i]) * 8, 3)) for i in range(20)}) == 20  # by the image
    all_others = Guide(config=FedDifRC(negatives=99), prior=Wide(), classes=MANY).prompts_of(bytes(8), 3)
    assert sorted(all_others[:25]) == sorted(f"a photo of a {c}" for c in MANY)


def test_only_what_a_term_needs_is_described():
    def words(classes=toy.CLASSES, **options):
        return Guide(config=FedDifRC(**options), prior=Wide(), classes=classes).prompts_of(bytes(8), 2)

    assert words(tdcl=0) == [""]
    assert words(tdcl=0, noise_prompt="class") == ["a photo of a cat"]
    assert words() == [*(f"a photo of a {c}" for c in toy.CLASSES), ""]
    assert words(ndcr=0) == words()  # so that both find the same descriptors
    assert words(noise_prompt="generic")[-1] == "a photo of a visual object"
    assert words(tdcl=0, ndcr=0) == []
    assert words(anchors="random") == [""]
    assert words(anchors="random", ndcr=0) == []


def test_without_labels_no_prompt_depends_on_one():
    about = Guide(config=FedDifRC(labels=False), prior=Wide(), classes=toy.CLASSES)
    words = about.prompts_of(b"12345678", 0)
    assert words == about.prompts_of(b"12345678", 3)
    assert words[0] == "a photo of a similar object"
    assert words[-1] == "a photo of a visual object"
    assert len(words) == 12
    assert not any(c in w.split() for w in words for c in toy.CLASSES)
    assert words[1:11] != about.prompts_of(b"87654321", 0)[1:11]


def test_a_noun_is_appended_where_the_name_lacks_it():
    birds = FedDifRC(noun="bird")
    assert birds.prompt("Black_footed_Albatross") == "a photo of a Black footed Albatross bird"
    assert birds.prompt("Yellow_bird") == "a photo of a Yellow bird"
    assert FedDifRC(template="the {}, blurry").prompt("cat") == "the cat, blurry"


def test_negatives_are_drawn_anew_without_replacement_and_never_the_own():
    about = Guide(config=FedDifRC(negatives=3), prior=Wide(), classes=MANY[:10])
    text, own = torch.zeros(500, 10, 2), torch.arange(500) % 10
    rng = seeds.stream(0, "negatives", 1, 2)
    first, second = (about.draw({"text": text, "own": own}, rng)["used"] for _ in range(2))
    for used in (first, second):
        assert (used.sum(1) == 3).all()
        assert not used.gather(1, own[:, None]).any()
    assert not torch.equal(first, second)
    assert torch.equal(about.draw({"text": text, "own": own}, seeds.stream(0, "negatives", 1, 2))["used"], first)
    share = (first.sum(0) + second.sum(0)) / 900  # of the rows where a class is a negative at all
    assert share.min() > 0.26  # 3 of 9, give or take four standard deviations
    assert share.max() < 0.41
    assert about.draw({"text": text[:, :4], "own": own % 4}, rng) == {}
    assert about.draw({}, rng) == {}


# Training


def guided(prior, config=None, method=None, data=None, encoder=None, norm="bn", **options):
    """A worker under a guide that has described the federation."""
    method, config = method or Method(), config or FedDifRC(levels="4")
    data = data or toy.federation((10, 9, 8, 11))
    about = Guide(config=config, prior=prior, classes=data.classes, encoder=encoder)
    about.describe(data, Silent())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = about.adapt(method.adapt(toy.TinyCNN(norm), 0), 0)
    defaults = {"optimizer": SGD(lr=0.05), "batch_size": 4, "epochs": 1.0}
    return Worker(net=Net(module), method=method, guide=about, **(defaults | options)), data


def rounds(worker, data, count=2, memory=None, start=None, first=0, cohort=2):
    engine = Serial(worker, data, memory)
    server = start or begin(worker.net, worker.method, worker.seed, worker.bn_stats)
    loop = federate(server, worker.method, engine, cohort=cohort, seed=0, traffic=Traffic(), first=first)
    return list(islice(loop, count))[-1]


def finite(weights):
    return all(x.isfinite().all() for x in tree.flatten(weights).values())


def differs(a, b):
    return toy.gap(a.server.weights, b.server.weights)


def test_without_its_terms_guided_training_is_plain_training_to_the_bit(prior):
    worker, data = guided(prior, FedDifRC(levels="4", tdcl=0, ndcr=0))
    plain = replace(worker, guide=None)
    assert plain.net.param_names == toy.net().param_names  # no head
    assert differs(rounds(worker, data, 3), rounds(plain, data, 3)) == 0
    with_terms, _ = guided(prior)
    assert differs(rounds(with_terms, data, 3), rounds(plain, data, 3)) > 1e-4


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (FedProx(mu=0.1), {}),
        (Scaffold(mode="post"), {"optimizer": SGD(lr=0.05, momentum=0.9)}),
        (Scaffold(mode="pre"), {}),
        (Scaffold(mode="sgd"), {}),
        (FedAdam(), {}),
        (Moon(projection=8), {}),
        (Moon(projection=None), {}),
        (FedBN(), {}),
        (FedNH(), {}),
        (FedProto(), {}),
        (FedAvg(), {"bn_stats": "local", "persist_optimizer": True, "clip_gradient": 1.0, "augment": True}),
        (FedAvg(), {"straggler_rate": 0.5}),
    ],
    ids=lambda x: f"{type(x).__name__}-{getattr(x, 'mode', '')}" if isinstance(x, Method) else "",
)
@pytest.mark.parametrize("levels", ["4", "3,4"])
def test_a_guide_goes_with_other_methods(prior, method, options, levels):
    worker, data = guided(prior, FedDifRC(levels=levels), method, **options)
    done = rounds(worker, data)
    assert finite(done.server.weights)
    assert not done.refused
    assert ("guide.weight" in worker.net.param_names) == (levels == "3,4")
    if levels == "4":
        plain = rounds(replace(worker, guide=None), data)
        assert differs(done, plain) > 1e-5 or not tree.flatten(done.server.weights["params"])
    assert differs(done, rounds(worker, data)) == 0


def test_a_guide_enters_the_gradient_before_the_method_does(prior):
    plain, data = guided(prior)
    a = rounds(plain, data)
    assert differs(a, rounds(replace(plain, method=FedProx(mu=0)), data)) == 0
    assert differs(a, rounds(replace(plain, method=FedProx(mu=0.5)), data)) > 1e-5
    post, pre = (rounds(replace(plain, method=Scaffold(mode=mode)), data, 3) for mode in ("post", "sgd"))
    assert differs(post, pre) < 1e-5  # equal for plain SGD, in another order of sums
    assert differs(post, rounds(plain, data, 3)) > 1e-4


def test_scaffolds_full_gradient_knows_no_guide_and_is_refused():
    words = ["method=scaffold", "local=sgd", "guide=feddifrc"]
    override(Experiment(), words)
    with pytest.raises(UsageError, match=r"method\.option=II"):
        override(Experiment(), [*words, "method.mode=pre", "method.option=I"])
    with pytest.raises(UsageError, match=r"guide\.labels=false.*method=moon"):
        override(Experiment(), ["method=moon", "guide=feddifrc", "guide.labels=false"])


def test_synthetic_rows_are_guided_too(prior):
    data = toy.federation((10, 9))
    experiment = override(Experiment(), ["balance=max", "balance.cap=3", "balance.templates=single"])
    assert isinstance(experiment.balance, BalanceToMax)
    full, report = assemble.balance(experiment, data, CPU, Silent(), prior)
    assert report.rows > 0
    worker, _ = guided(prior, data=full)
    shard, _ = worker.guide.annotate(0, full.shard(0), worker.open(down(worker), {}), {}, 0)
    assert len(shard["text"]) == len(full.clients[0]) > 10
    assert shard["synthetic"].any()
    done = rounds(worker, full)
    assert finite(done.server.weights)
    assert not done.refused


def test_where_all_data_lie_in_one_place_they_are_guided_there(prior):
    data = toy.federation((10, 9))
    words = [
        "method=centralised",
        "guide=feddifrc",
        "guide.levels=4",
        "cohort=1",
        "clients=2",
        "batch_size=4",
        "steps=3",
    ]
    experiment = override(Experiment(), words)
    about = assemble.build_guide(experiment, data, CPU, prior)
    assert about.describe(assemble.gathered(experiment, data), Silent()) == 19
    net = assemble.build_net(experiment, data, CPU, about)
    engine, _ = assemble.build_engine(experiment, net, data, guide=about)
    (upload,) = engine.train(down(engine.worker), [0], 0)
    assert finite(upload.tree)
    assert len(about.annotate(0, engine.federation.shard(0), None, {}, 0)[0]["text"]) == 19


def down(worker, weights=None):
    return {"weights": weights or worker.net.init(), "shared": {}}


def batch_for(worker, data, client=0, rows=8):
    ctx = worker.open(down(worker), {})
    shard, _ = worker.guide.annotate(client, data.shard(client), ctx, {}, 0)
    return shard.batch(torch.arange(rows)), ctx


def test_without_labels_the_classifier_does_not_move(prior):
    worker, data = guided(prior, FedDifRC(levels="3,4", labels=False, negatives=3))
    batch, ctx = batch_for(worker, data)
    start = worker.net.init()["params"]
    carry, loss = worker.step(worker.init(ctx, {}), batch, ctx)
    moved = carry["weights"]["params"]
    assert float(loss) > 0
    for name in start:
        assert torch.equal(moved[name], start[name]) == name.startswith("head."), name
    relabelled = batch | {"label": (batch["label"] + 1) % 4}
    again, _ = worker.step(worker.init(ctx, {}), relabelled, ctx)
    assert toy.gap(again["weights"], carry["weights"]) == 0
    assert batch["text"].shape[1] == 4
    assert not batch["own"].any()


def test_the_positive_is_the_own_class_and_h_the_null_prompt(prior):
    worker, data = guided(prior, FedDifRC(levels="2,3,4"))
    shard, _ = worker.guide.annotate(1, data.shard(1), worker.open(down(worker), {}), {}, 0)
    d = worker.guide.describer
    basis = {k: (b.mean.double().numpy(), b.axes.double().numpy()) for k, b in d.basis("global").items()}
    assert torch.equal(shard["own"], shard["label"])
    assert shard["text"].dtype == shard["noise"].dtype == torch.float16
    row = 2
    item = d.items([data.shard(1)])[0][row]
    seed = seeds.number(0, "image noise", int.from_bytes(item.image[:7]))
    words = [f"a photo of a {toy.CLASSES[int(shard['label'][row])]}", ""]
    image = data.shard(1)["image"][row : row + 1]
    maps = prior.features(image, [words], timestep=300, levels=(2, 3, 4), seeds=[seed], size=16)
    positive, null = (
        reference.descriptor({k: x[0, p].double().numpy() for k, x in maps.items()}, basis) for p in (0, 1)
    )
    np.testing.assert_allclose(shard["text"][row, shard["own"][row]], positive, rtol=2e-3, atol=2e-4)
    np.testing.assert_allclose(shard["noise"][row], null, rtol=2e-3, atol=2e-4)
    assert np.abs(positive - null).max() > 0.02


def test_one_step_is_the_gradient_of_all_three_losses(prior):
    worker, data = guided(prior, FedDifRC(levels="3,4", tdcl=0.7, ndcr=1.3), norm="gn")
    batch, ctx = batch_for(worker, data)
    params = {k: p.double().requires_grad_() for k, p in worker.net.init()["params"].items()}
    x = augment.normalise(batch["image"], worker.net.mean, worker.net.std).double()
    module = worker.net.module.double()
    z, logits = torch.func.functional_call(module, params, (x,))
    worker.net.module.float()
    mapped = z @ params["guide.weight"].T + params["guide.bias"]
    text, noise = batch["text"].double(), batch["noise"].double()
    s = F.cosine_similarity(mapped[:, None], text, dim=-1) / 0.04
    u, v = F.normalize(mapped, dim=1), F.normalize(noise, dim=1)
    loss = F.cross_entropy(logits, batch["label"]) + 0.7 * F.cross_entropy(s, batch["label"])
    loss = loss + 1.3 * ((u - v) ** 2).sum(1).mean()
    wanted = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
    carry, found = worker.step(worker.init(ctx, {}), batch, ctx)
    assert float(found) == pytest.approx(loss.item(), rel=1e-5)
    start = worker.net.init()["params"]
    for name, after in carry["weights"]["params"].items():
        torch.testing.assert_close((start[name] - after).double() / 0.05, wanted[name], rtol=1e-3, atol=1e-4)


def test_drawn_negatives_change_from_step_to_step_and_are_reproducible(prior, monkeypatch):
    worker, data = guided(prior, FedDifRC(levels="4", negatives=2), data=toy.federation((30, 20)), steps=6, epochs=None)
    draws, real = [], Guide.draw

    def spy(self, batch, rng):
        found = real(self, batch, rng)
        draws.append((found["used"], batch["own"]))
        return found

    monkeypatch.setattr(Guide, "draw", spy)
    runs = []
    for client, round in ((0, 0), (0, 0), (0, 1), (1, 0)):
        draws.clear()
        worker.train(client, data.shard(client), down(worker), {}, round)
        assert len(draws) == 6
        for used, own in draws:
            assert (used.sum(1) == 2).all()
            assert not used.gather(1, own[:, None]).any()
        runs.append(torch.stack([used for used, _ in draws]))
    assert len(runs[0].flatten(1).unique(dim=0)) == 6
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    assert not torch.equal(runs[0], runs[3])


def test_more_than_twenty_classes_train_on_negatives_of_each_image(prior):
    image, label = toy.images(12)
    data = Federation(
        table=make(image, (label * 7) % 25), clients=(torch.arange(12),), test=make(image, label), classes=MANY
    )
    worker, _ = guided(prior, FedDifRC(levels="4", negatives=3), data=data)
    shard, _ = worker.guide.annotate(0, data.shard(0), worker.open(down(worker), {}), {}, 0)
    assert shard["text"].shape == (12, 4, 8)
    assert not shard["own"].any()
    assert worker.guide.draw(shard.batch(torch.arange(4)), np.random.default_rng(0)) == {}


def test_text_and_random_anchors_take_the_place_of_descriptors(prior):
    for anchors in ("text", "random"):
        worker, data = guided(prior, FedDifRC(levels="4", anchors=anchors))
        shard, _ = worker.guide.annotate(0, data.shard(0), worker.open(down(worker), {}), {}, 0)
        text = shard["text"]
        assert text.shape == (10, 4, 8)
        assert torch.equal(text[0], text[9])  # one a class, whatever the image
        torch.testing.assert_close(text[0].float().norm(dim=1), torch.ones(4), rtol=0, atol=2e-3)
        assert torch.linalg.matrix_rank(text[0].float()) >= 3
        again, _ = guided(prior, FedDifRC(levels="4", anchors=anchors))
        assert torch.equal(again.guide.anchors(), worker.guide.anchors())
        assert finite(rounds(worker, data).server.weights)


# Whitening


@pytest.mark.parametrize("whiten", ["component", "prompt"])
def test_whitening_standardises_by_the_basis_images(prior, whiten, monkeypatch):
    maps, made, features, generate = {}, [], prior.features, prior.generate

    def spy(images, prompts, **options):
        found = features(images, prompts, **options)
        for i, image in enumerate(images):
            maps[store.raw_bytes(image)] = {level: x[i].double().numpy() for level, x in found.items()}
        return found

    monkeypatch.setattr(prior, "features", spy)
    monkeypatch.setattr(prior, "generate", lambda *given: made.append(generate(*given)) or made[-1])
    worker, data = guided(prior, FedDifRC(levels="3,4", whiten=whiten))
    describer = worker.guide.describer
    fitted = [maps[store.raw_bytes(image)] for image in made[-1]]  # the first call only asks for the maps' size
    raw = describer.items([data.shard(0)])[0]
    shard, _ = worker.guide.annotate(0, data.shard(0), worker.open(down(worker), {}), {}, 0)
    at = 0
    for level in (3, 4):
        basis = describer.basis("global")[level]
        mean, axes = basis.mean.double().numpy(), basis.axes.double().numpy()
        base = np.stack(
            [[reference.pooled(p.reshape(len(p), -1).T, mean, axes) for p in own[level]] for own in fitted]
        )  # [images, prompts, m]
        assert base.shape[1] == 5
        x = describer.level_store(level).gather([item.key for item in raw]).double().numpy()
        plain = (x - base.mean((0, 1))) / base.std((0, 1))
        text, noise = plain[:, :4], plain[:, 4]
        if whiten == "prompt":
            within = np.sqrt(((base - base.mean(1, keepdims=True)) ** 2).mean((0, 1)))
            text = (x[:, :4] - x[:, :4].mean(1, keepdims=True)) / within
        m = x.shape[2]
        np.testing.assert_allclose(shard["text"][:, :, at : at + m], text, rtol=0.02, atol=0.02)
        np.testing.assert_allclose(shard["noise"][:, at : at + m], noise, rtol=0.02, atol=0.02)
        at += m


# Conditions


DYNAMIC = FedDifRC(levels="4", condition="dynamic", gamma=0.5)


@pytest.mark.parametrize("condition", ["static", "frozen_encoder", "dynamic"])
def test_each_condition_trains_and_no_gradient_reaches_the_prior(prior, clip, condition):
    encoder = ImageEncoder.from_pretrained(clip) if condition == "frozen_encoder" else None
    config = FedDifRC(levels="4", condition=condition, gamma=0.5, encoder=str(clip) if encoder else None)
    frozen = [prior.pipeline.unet, prior.pipeline.vae.encoder, prior.pipeline.text_encoder]
    frozen += [encoder.model] if encoder else []
    modes = []
    hooks = [p.register_forward_pre_hook(lambda module, given: modes.append(torch.is_grad_enabled())) for p in frozen]
    worker, data = guided(prior, config, encoder=encoder)
    shard, _ = worker.guide.annotate(0, data.shard(0), worker.open(down(worker), {}), {}, 0)
    assert not any(shard[name].requires_grad for name in ("text", "noise"))
    done = rounds(worker, data, 1)
    assert finite(done.server.weights)
    assert not done.refused
    for hook in hooks:
        hook.remove()
    assert modes
    assert not any(modes)
    assert all(p.grad is None for part in frozen for p in part.parameters())


def columns(worker, data, weights, memory=None, round=0, client=0):
    ctx = worker.open(down(worker, weights), {})
    shard, kept = worker.guide.annotate(client, data.shard(client), ctx, memory or {}, round)
    return shard, kept


def test_row_8_dynamic_columns_follow_the_model_that_the_client_starts_with_and_nothing_else(prior):
    """Row 8: in the released code nothing depends on the client's model."""
    worker, data = guided(prior, DYNAMIC)
    start = worker.net.init()
    first, again = columns(worker, data, start)[0], columns(worker, data, start, round=5)[0]
    for name in ("text", "noise"):
        assert torch.equal(first[name], again[name])
    other = tree.map(
        lambda x: x + 0.3 * torch.rand(x.shape, generator=torch.Generator().manual_seed(0)), start["params"]
    )
    moved = columns(worker, data, start | {"params": other})[0]
    for name in ("text", "noise"):
        assert (moved[name].float() - first[name].float()).abs().max() > 0.01
    head = {k: v + 1 if k.startswith("head") else v for k, v in start["params"].items()}
    unmoved = columns(worker, data, start | {"params": head})[0]
    assert torch.equal(unmoved["text"], first["text"])  # c is made of features
    static, _ = guided(prior, FedDifRC(levels="4"))
    assert (columns(static, data, start)[0]["text"].float() - first["text"].float()).abs().max() > 0.01
    a, b = (columns(static, data, w)[0] for w in (start, start | {"params": other}))
    assert torch.equal(a["text"], b["text"])
    none, _ = guided(prior, replace(DYNAMIC, gamma=0.0))
    torch.testing.assert_close(columns(none, data, start)[0]["text"], a["text"], rtol=4e-3, atol=3e-4)


@pytest.mark.parametrize("condition", ["dynamic", "frozen_encoder"])
def test_c_is_as_long_as_gamma_times_a_token_and_the_same_for_each_of_an_images_tokens(prior, clip, condition):
    encoder = ImageEncoder.from_pretrained(clip) if condition == "frozen_encoder" else None
    config = FedDifRC(levels="4", condition=condition, gamma=0.25, encoder=str(clip) if encoder else None)
    data = toy.federation((5, 4))
    seen = []

    def spy(module, given, named):
        seen.append(named["encoder_hidden_states"])

    hook = prior.pipeline.unet.register_forward_pre_hook(spy, with_kwargs=True)
    worker, _ = guided(prior, config, data=data, encoder=encoder)
    if condition == "dynamic":
        seen.clear()
        columns(worker, data, worker.net.init())
        images = data.shard(0)["image"]
        h = worker.net(worker.net.init(), images, train=False).features
    else:
        images = data.table["image"]
        h = encoder(images)
    hook.remove()
    words = [*(f"a photo of a {c}" for c in toy.CLASSES), ""]
    plain = prior.encode(words).numpy()  # [P, tokens, width]
    text = seen[-1].numpy().reshape(-1, 5, *plain.shape[1:])
    assert np.array_equal(text[len(images) :], np.repeat(text[len(images) - 1 :][:1], len(text) - len(images), 0))
    added = text[: len(images)] - plain  # the last one, repeated, fills a lot up
    np.testing.assert_allclose(added, np.broadcast_to(added[:, :, :1], added.shape), atol=1e-5)
    length = np.linalg.norm(plain, axis=-1).mean(1)
    sizes = np.linalg.norm(added[:, :, 0], axis=-1)
    np.testing.assert_allclose(sizes, np.broadcast_to(0.25 * length, sizes.shape), rtol=1e-4)
    # a fixed linear map of h: equal features give equal directions, and the map can be found from the images
    directions = added[:, 0, 0] / sizes[:, :1]
    assert len(np.unique(directions.round(5), axis=0)) == len(images)
    again = worker.guide.describer.directions(h).numpy()
    np.testing.assert_allclose(again, directions * 0.25, atol=1e-4)
    doubled = worker.guide.describer.directions(2 * h).numpy()
    np.testing.assert_allclose(doubled, again, atol=1e-6)
    both = worker.guide.describer.directions(h[:1] / h[:1].norm() + h[1:2] / h[1:2].norm()).numpy()[0]
    rank = np.linalg.matrix_rank(np.stack([again[0], again[1], both]), tol=1e-4)
    assert rank == 2


def test_dynamic_columns_stay_for_as_many_rounds_as_asked(prior):
    worker, data = guided(prior, replace(DYNAMIC, refresh_rounds=2))
    start = worker.net.init()
    moved = start | {"params": tree.map(lambda x: x + 0.2 * torch.ones_like(x), start["params"])}
    first, kept = columns(worker, data, start, round=3)
    again, kept_again = columns(worker, data, moved, {"guide": kept}, round=4)
    fresh, _ = columns(worker, data, moved, {"guide": kept_again}, round=5)
    assert torch.equal(again["text"], first["text"])
    assert torch.equal(again["noise"], first["noise"])
    assert not torch.equal(fresh["text"], first["text"])
    assert torch.equal(fresh["text"], columns(worker, data, moved)[0]["text"])
    always, _ = guided(prior, DYNAMIC)
    assert columns(always, data, start)[1] == {}  # nothing to remember


def test_kept_columns_survive_stop_and_resume_with_the_same_bits(prior, tmp_path):
    data = toy.federation((6, 5))
    worker, _ = guided(prior, replace(DYNAMIC, refresh_rounds=2), data=data)
    whole = rounds(worker, data, 4)
    memory = ClientMemory(tmp_path / "clients")
    half = rounds(worker, data, 1, memory)  # stops within the two rounds
    index = dict(memory.index)
    assert index == {0: 0, 1: 0}
    resumed = ClientMemory(tmp_path / "clients")
    resumed.restore(index)
    other, _ = guided(prior, replace(DYNAMIC, refresh_rounds=2), data=data)
    rest = rounds(other, data, 3, resumed, start=half.server, first=1)
    assert rest.number == whole.number == 3
    assert differs(rest, whole) == 0
    forgetful = rounds(other, data, 3, start=half.server, first=1)
    assert differs(forgetful, whole) > 1e-6  # the memory matters


@pytest.mark.parametrize("condition", ["static", "dynamic"])
def test_an_encoder_has_no_part_in_other_conditions(prior, clip, condition):
    """It is refused, or not used."""
    data = toy.federation((5, 4))
    words = ["guide=feddifrc", "guide.levels=4", f"guide.condition={condition}", f"guide.encoder={clip}"]
    try:
        about = assemble.build_guide(override(Experiment(), words), data, CPU, prior)
    except UsageError:
        return
    plain = assemble.build_guide(override(Experiment(), words[:3]), data, CPU, prior)
    found = []
    for each in (about, plain):
        each.describe(data, Silent())
        worker = Worker(net=toy.net(), method=Method(), optimizer=SGD(lr=0.1), batch_size=4, epochs=1.0, guide=each)
        found.append(columns(worker, data, worker.net.init())[0]["text"].float())
    torch.testing.assert_close(*found, rtol=4e-3, atol=3e-4)


def test_an_encoder_sees_clips_pixels_and_is_known_by_its_weights(clip, tmp_path):
    from transformers import CLIPVisionModelWithProjection

    encoder = ImageEncoder.from_pretrained(clip)
    images = torch.randint(0, 256, (3, 3, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073]).view(3, 1, 1)
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711]).view(3, 1, 1)
    model = CLIPVisionModelWithProjection.from_pretrained(clip).eval()
    with torch.no_grad():
        wanted = model(pixel_values=(images / 255 - mean) / std).image_embeds
    torch.testing.assert_close(encoder(images), wanted, rtol=1e-4, atol=1e-4)
    assert encoder(images[:, :, :8, :8]).shape == (3, 12)
    assert ImageEncoder.from_pretrained(clip).revision == encoder.revision
    with torch.no_grad():
        model.visual_projection.weight[0, 0] += 1
    model.save_pretrained(tmp_path)
    assert ImageEncoder.from_pretrained(tmp_path).revision != encoder.revision
    with pytest.raises(UserError, match=r"cannot load guide\.encoder=.*safetensors") as error:
        ImageEncoder.from_pretrained(tmp_path / "nothing")
    assert "\n" not in str(error.value)


# Settings


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"tdcl": -1.0}, r"guide\.tdcl"),
        ({"ndcr": float("inf")}, r"guide\.ndcr"),
        ({"temperature": 0.0}, r"guide\.temperature"),
        ({"negatives": 0}, r"guide\.negatives"),
        ({"template": "a photo"}, r"guide\.template"),
        ({"whiten": "prompt", "pca": "per_client"}, r"guide\.pca=global"),
        ({"labels": False, "anchors": "text"}, r"guide\.labels=false"),
        ({"labels": False, "noise_prompt": "class"}, r"guide\.labels=false"),
    ],
)
def test_a_wrong_setting_is_one_clear_line(wrong, words):
    with pytest.raises(UsageError, match=words) as error:
        FedDifRC(**wrong)
    assert "\n" not in str(error.value)


def test_the_defaults_are_the_papers():
    config = FedDifRC()
    assert (config.timestep, config.levels, config.temperature, config.negatives) == (300, "2,3,4", 0.04, 10)
    assert (config.tdcl, config.ndcr, config.draws, config.noise_words) == (1, 1, 1, "")
    assert (config.condition, config.gamma, config.pca, config.pool) == ("static", 0.1, "global", "rms")
