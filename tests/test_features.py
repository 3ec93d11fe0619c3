"""What a prior's UNet sees in an image: on tiny random checkpoints of both layouts and on the digits prior."""

import json
from contextlib import contextmanager

import numpy as np
import pytest
import reference_guide as reference
import torch
import toy
from torch.nn.functional import interpolate

from fedprior.errors import UsageError, UserError
from fedprior.priors import embedded, features
from fedprior.priors.diffusion import DiffusionPrior

WORDS = ["", "a photo of a ant", "a photo of a bee"]
T = 300


@pytest.fixture(scope="module")
def priors(tmp_path_factory):
    folders = {name: reference.checkpoint(tmp_path_factory.mktemp("prior"), name) for name in reference.LAYOUTS}
    made = {name: DiffusionPrior.from_pretrained(folder, steps=1) for name, folder in folders.items()}
    return made | {"digits": embedded.load("digits")}


@pytest.fixture(params=["1.x", "2.x", "digits"])
def prior(priors, request):
    return priors[request.param]


@pytest.fixture
def sd(priors):
    return priors["1.x"]


IMAGES = toy.images(4)[0]


def look(prior, images=IMAGES, words=WORDS, *, t=T, levels=(1, 2, 3, 4), seeds=None, size=16, **options):
    """Maps of images that have the words as prompts."""
    seeds = range(len(images)) if seeds is None else seeds
    prompts = [words] * len(images)
    return prior.features(images, prompts, timestep=t, levels=levels, seeds=seeds, size=size, **options)


@contextmanager
def calls(module):
    """The keyword and positional arguments of every call of a module, within."""
    seen = []
    hook = module.register_forward_pre_hook(lambda module, given, named: seen.append((given, named)), with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()


@torch.no_grad()
def full_pass(unet, *given, **named):
    """A forward pass to the end -> (each up block's output, by level; the UNet's own)"""
    seen = {}

    def keep(level):
        return lambda module, given, output: seen.__setitem__(level, output)

    hooks = [block.register_forward_hook(keep(level)) for level, block in enumerate(unet.up_blocks, 1)]
    out = unet(*given, **named).sample
    for hook in hooks:
        hook.remove()
    return seen, out


@torch.no_grad()
def by_hand(prior, image, word, *, t, seed, size, draws=1, latent="sample"):
    """Maps {level: [C, h, w]} of one image [3, H, W] under one prompt."""
    pipe = prior.pipeline
    x = interpolate(image[None].double(), (size, size), mode="bicubic", antialias=True).clamp(0, 255) / 127.5 - 1
    seen = pipe.vae.encode(x.float()).latent_dist
    g = torch.Generator().manual_seed(seed)
    noise = torch.randn(draws, *seen.mean.shape[1:], generator=g)
    z = seen.mean + (seen.std * torch.randn(seen.mean.shape[1:], generator=g) if latent == "sample" else 0)
    z = (z * pipe.vae.config.scaling_factor).numpy().astype(np.float64)
    ids = pipe.tokenizer(word, padding="max_length", max_length=pipe.tokenizer.model_max_length, return_tensors="pt")
    text = pipe.text_encoder(ids.input_ids)[0]
    found = []
    for k in range(draws):
        x_t = torch.from_numpy(reference.noised(z, noise[k].numpy(), t)).float()
        found.append(full_pass(pipe.unet, x_t, t, encoder_hidden_states=text)[0])
    return {level: torch.stack([f[level][0] for f in found]).mean(0) for level in found[0]}


def near(a, b, rtol=1e-3, atol=1e-4):
    """Single precision, with sums in another order through a whole network."""
    assert a.keys() == b.keys()
    for level in a:
        torch.testing.assert_close(a[level], b[level], rtol=rtol, atol=atol)


def distance(a, b):
    """Of two maps, over the size of the first."""
    return float((a - b).norm() / a.norm())


# What comes out


def test_maps_are_those_of_a_whole_forward_pass_to_the_bit(prior):
    unet = prior.pipeline.unet
    with calls(unet) as seen:
        found = look(prior)
    (given, named) = seen[0]
    maps, _ = full_pass(unet, *given, **named)
    for level in (1, 2, 3, 4):
        assert torch.equal(found[level].flatten(0, 1), maps[level])


@pytest.mark.parametrize(
    ("latent", "draws", "t", "size"), [("sample", 1, 300, 16), ("mean", 3, 0, 16), ("sample", 2, 999, 24)]
)
def test_maps_equal_those_made_by_hand(prior, latent, draws, t, size):
    found = look(prior, t=t, size=size, seeds=[7, 8, 9, 10], latent=latent, draws=draws)  # 24: latents not 8 divides
    for i, seed in enumerate([7, 8, 9, 10]):
        for p, word in enumerate(WORDS):
            hand = by_hand(prior, IMAGES[i], word, t=t, seed=seed, size=size, draws=draws, latent=latent)
            near({level: x[i, p] for level, x in found.items()}, hand)


def test_maps_have_the_widths_of_their_levels_and_are_float32(prior):
    found = look(prior)
    assert {level: x.shape[2] for level, x in found.items()} == prior.level_widths
    assert {level: tuple(x.shape[:2]) for level, x in found.items()} == dict.fromkeys((1, 2, 3, 4), (4, 3))
    assert [x.shape[3] for x in found.values()] == sorted(x.shape[3] for x in found.values())  # coarse to fine
    assert all(x.dtype == torch.float32 for x in found.values())


def test_levels_count_from_the_coarsest_and_each_comes_alone_as_with_the_others(sd):
    assert sd.level_widths == reference.WIDTHS
    together = look(sd)
    for levels in ((1,), (2,), (3,), (4,), (4, 2)):
        found = look(sd, levels=levels)
        assert set(found) == set(levels)
        for level in levels:
            assert torch.equal(found[level], together[level])


@pytest.mark.parametrize("last", [1, 2, 3, 4])
def test_the_unet_stops_after_the_last_wanted_block(prior, last):
    unet = prior.pipeline.unet
    behind = [*unet.up_blocks[last:], unet.conv_norm_out, unet.conv_out]
    ran = []
    hooks = [m.register_forward_hook(lambda m, given, out, i=i: ran.append(i)) for i, m in enumerate(behind)]
    with calls(unet.up_blocks[last - 1]) as wanted:
        look(prior, levels=(last,), draws=2)
    for hook in hooks:
        hook.remove()
    assert ran == []
    assert len(wanted) == 2


def test_an_image_is_encoded_once_and_a_prompt_once_whatever_the_number_of_prompts(sd, monkeypatch):
    encoded, texts = [], []
    encode = sd.pipeline.vae.encode
    monkeypatch.setattr(sd.pipeline.vae, "encode", lambda x: encoded.append(len(x)) or encode(x))
    hook = sd.pipeline.text_encoder.register_forward_hook(lambda module, given, out: texts.append(len(out[0])))
    words = [f"a bee cat {i}" for i in range(7)]
    prompts = [words[:5], words[1:6], words[2:7], words[:5]]
    for again in (False, True):
        sd.features(IMAGES, prompts, timestep=T, levels=(2,), seeds=range(4), size=16)
        assert sum(encoded) == (8 if again else 4)
        assert sum(texts) == 16  # seven and their padding, once
    hook.remove()


# Noise and latents


def unet_inputs(prior, **options):
    """x_t [calls, pairs, c, h, w] that the UNet gets."""
    with calls(prior.pipeline.unet) as seen:
        look(prior, levels=(1,), **options)
    return torch.stack([given[0] for given, _ in seen])


def test_draws_are_averaged_over_the_maps_of_each(prior):
    unet = prior.pipeline.unet
    with calls(unet) as seen:
        found = look(prior, draws=3)
    each = [full_pass(unet, *given, **named)[0] for given, named in seen]
    assert len(each) == 3
    assert distance(each[0][2], each[1][2]) > 0.01
    near({k: x.flatten(0, 1) for k, x in found.items()}, {k: sum(e[k] for e in each) / 3 for k in found}, atol=1e-5)


def test_eight_draws_vary_less_than_one(sd):
    """Row 13: the released code takes one unseeded draw of noise; the mean of n varies a n-th as much."""

    def spread(draws):
        x = look(sd, IMAGES[:1].expand(24, -1, -1, -1), WORDS[:1], levels=(3,), draws=draws, latent="mean")[3]
        return float(x.var(0).mean())

    assert spread(8) < spread(1) / 4  # an eighth on average


def test_row_13_noise_is_seeded_and_the_global_generator_untouched(sd):
    state = torch.random.get_rng_state()
    first = look(sd)
    torch.rand(3)
    second = look(sd)
    assert all(torch.equal(first[k], second[k]) for k in first)
    torch.random.set_rng_state(state)
    look(sd)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_latent_is_the_posteriors_mean_or_a_draw_around_it(sd):
    seeds, t = [5] * 32, 100
    image, a = IMAGES[:1], reference.alphas_cumprod()[t]
    vae = sd.pipeline.vae
    with torch.no_grad():
        pixels = interpolate(image.float() / 127.5 - 1, (16, 16), mode="bicubic", antialias=True).clamp(-1, 1)
        seen = vae.encode(pixels).latent_dist
    many = image.expand(32, -1, -1, -1)
    mean = unet_inputs(sd, images=many, words=[""], seeds=seeds, t=t, latent="mean")[0]
    sample = unet_inputs(sd, images=many, words=[""], seeds=seeds, t=t, latent="sample")[0]
    assert torch.equal(sample[0], sample[1])  # one seed, one draw
    factor = vae.config.scaling_factor
    drawn = (sample[0] - mean[0]) / (a**0.5 * factor * seen.std[0])  # the noise cancels
    assert abs(float(drawn.mean())) < 0.2
    assert 0.85 < float(drawn.std()) < 1.15
    noise = (mean[0] - a**0.5 * factor * seen.mean[0]) / (1 - a) ** 0.5
    assert abs(float(noise.mean())) < 0.2
    assert 0.85 < float(noise.std()) < 1.15
    assert abs(float((noise * drawn).mean())) < 0.2  # two draws, not one


def test_row_11_the_timestep_is_used(sd):
    """Row 11: the released option is never read. Ours sets the noise, by the schedule, and what the UNet is told."""
    for t in (0, 300, 999):
        with calls(sd.pipeline.unet) as seen:
            look(sd, IMAGES[:1], [""], t=t, latent="mean", levels=(1,))
        (x, told), _ = seen[0]
        assert int(told) == t
        noise = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
        a = reference.alphas_cumprod()[t]
        rest = (x - (1 - a) ** 0.5 * noise) / a**0.5
        clean, _ = features.to_latents(sd.pipeline, IMAGES[:1], 16, "signed")
        torch.testing.assert_close(rest, clean, rtol=0, atol=1e-4)
    low, high = (look(sd, t=t)[2] for t in (300, 999))
    assert distance(low, high) > 0.05


@pytest.mark.parametrize("latent", ["mean", "sample"])
def test_noise_depends_on_the_seed_alone(sd, monkeypatch, latent):
    seeds = [11, 12, 13, 14]
    first = look(sd, latent=latent, seeds=seeds)
    backwards = look(sd, IMAGES.flip(0), latent=latent, seeds=seeds[::-1])
    near(first, {k: x.flip(0) for k, x in backwards.items()}, rtol=1e-4, atol=1e-5)
    alone = look(sd, IMAGES[1:2], latent=latent, seeds=[12])
    near({k: x[1:2] for k, x in first.items()}, alone, rtol=1e-4, atol=1e-5)
    one_prompt = look(sd, words=WORDS[1:2], latent=latent, seeds=seeds)
    near({k: x[:, 1:2] for k, x in first.items()}, one_prompt, rtol=1e-4, atol=1e-5)
    among_others = look(sd, torch.cat([IMAGES[2:3], toy.images(5, 3)[0]]), latent=latent, seeds=[13, 1, 2, 3, 4, 5])
    near({k: x[2] for k, x in first.items()}, {k: x[0] for k, x in among_others.items()}, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(sd, "batch_size", 1)  # batches of four pairs, which cut through an image's prompts
    near(first, look(sd, latent=latent, seeds=seeds), rtol=1e-4, atol=1e-5)
    other = look(sd, latent=latent, seeds=[12, 12, 13, 14])
    assert distance(first[2][0], other[2][0]) > 0.05


# Pixels


def vae_inputs(prior, monkeypatch, images, **options):
    seen = []
    encode = prior.pipeline.vae.encode
    monkeypatch.setattr(prior.pipeline.vae, "encode", lambda x: seen.append(x.clone()) or encode(x))
    look(prior, images, [""], levels=(1,), **options)
    return torch.cat(seen)


BLACK_AND_WHITE = (torch.arange(64).view(1, 1, 8, 8) // 4 % 2 * 255).expand(1, 3, 8, 8).byte()


@pytest.mark.parametrize("size", [8, 16])
def test_check_12_what_reaches_the_vae_spans_minus_one_to_one(prior, monkeypatch, size):
    x = vae_inputs(prior, monkeypatch, BLACK_AND_WHITE, size=size)
    assert (float(x.min()), float(x.max())) == (-1, 1)
    assert x.shape[-2:] == (size, size)
    if size == 8:  # no resizing: white is white
        assert torch.equal(x[0] > 0, BLACK_AND_WHITE[0] > 0)


def test_row_2_legacy_scaling_is_black(sd, monkeypatch):
    """Row 2: the released code divides by 255 twice, so every image lies in [-1, -0.992]."""
    x = vae_inputs(sd, monkeypatch, BLACK_AND_WHITE, size=8, scaling="legacy")
    assert float(x.min()) == -1
    assert float(x.max()) == pytest.approx(2 / 255 - 1, abs=1e-6)
    assert float(x.max()) < -0.992


def test_a_vae_without_a_posterior_gives_its_latents(priors, monkeypatch):
    from diffusers import AutoencoderTiny

    sd = priors["1.x"]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        vae = AutoencoderTiny(
            encoder_block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8),
            num_encoder_blocks=(1, 1),
            num_decoder_blocks=(1, 1),
            scaling_factor=0.5,
        ).eval()
    monkeypatch.setattr(sd.pipeline, "vae", vae)
    mean, std = features.to_latents(sd.pipeline, IMAGES, 8, "signed")
    with torch.no_grad():
        torch.testing.assert_close(mean, vae.encode(IMAGES.float() / 127.5 - 1).latents * 0.5, rtol=0, atol=1e-5)
    assert not std.any()


# A condition


def test_a_condition_is_added_to_every_token_in_units_of_their_mean_length(prior):
    plain = prior.encode(WORDS).numpy().astype(np.float64)  # [P, tokens, width]
    rng = np.random.default_rng(0)
    h, w, gamma = rng.normal(size=(4, 5)), rng.normal(size=(5, plain.shape[2])), 0.3
    length = np.linalg.norm(plain, axis=-1).mean(1)  # [P]
    units = torch.tensor(np.stack([reference.condition(x, w, 1.0, gamma) for x in h])).float()
    with calls(prior.pipeline.unet) as seen:
        look(prior, levels=(1,), condition=units)
    text = seen[0][1]["encoder_hidden_states"].unflatten(0, (4, 3)).numpy()
    added = text - plain
    np.testing.assert_allclose(added, np.broadcast_to(added[:, :, :1], added.shape), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(added, axis=-1), np.tile(gamma * length[:, None], (4, 1, 16)), rtol=1e-4)
    for i in range(4):
        for p in range(3):
            np.testing.assert_allclose(added[i, p, 0], reference.condition(h[i], w, length[p], gamma), atol=1e-5)


# Half precision


@pytest.mark.parametrize(("dtype", "most"), [("bf16", 0.05), ("fp16", 0.01)])
@pytest.mark.parametrize("layout", ["1.x", "2.x"])
def test_half_precision_lies_near_single(priors, dtype, most, layout, tmp_path):
    half = DiffusionPrior.from_pretrained(priors[layout].name, dtype=dtype)
    assert half.pipeline.unet.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    a, b = look(priors[layout]), look(half, condition=torch.zeros(4, half.encode([""]).shape[2]))
    for level in a:
        assert b[level].dtype == torch.float32
        assert 0 < distance(a[level], b[level]) < most


def test_features_that_overflow_are_one_clear_line(priors):
    spoilt = DiffusionPrior.from_pretrained(priors["1.x"].name, dtype="fp16")
    spoilt.pipeline.unet.up_blocks[1].resnets[0].conv1.weight.data.fill_(6e4)
    with pytest.raises(UserError, match=r"overflow in half precision; use prior\.dtype=fp32"):
        look(spoilt, levels=(2,))


# What cannot be read


def refused(kind, words, act):
    with pytest.raises(kind) as error:
        act()
    text = str(error.value)
    assert "\n" not in text
    for word in words:
        assert word in text


def test_a_level_or_timestep_that_the_model_has_not_is_one_clear_line(prior):
    for level in (0, 5):
        refused(UsageError, ["levels 1, 2, 3, 4", f"not {level}", "guide.levels"], lambda: look(prior, levels=(level,)))
    for t in (1000, -1):
        refused(UsageError, ["from 0 to 999", str(t), "guide.timestep"], lambda: look(prior, t=t))
    assert look(prior, t=999, levels=(1,))[1].isfinite().all()


def test_the_xl_layout_is_one_clear_line(sd, monkeypatch):
    from diffusers import UNet2DConditionModel

    unet = UNet2DConditionModel(
        block_out_channels=(8, 8),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16,
        norm_num_groups=8,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=56,
    )
    monkeypatch.setattr(sd.pipeline, "unet", unet)
    refused(UsageError, ["Stable Diffusion 1.x and 2.x", "prior=", "guide=none"], lambda: look(sd, levels=(1,)))


def test_a_transformer_in_the_place_of_a_unet_is_one_clear_line(sd, tmp_path):
    index = {"_class_name": "FluxPipeline", "transformer": ["diffusers", "FluxTransformer2DModel"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    words = ["FluxPipeline", "StableDiffusionPipeline"]
    refused(UserError, words, lambda: DiffusionPrior.from_pretrained(tmp_path))
    without = type("DiT", (), {"scheduler": sd.pipeline.scheduler, "transformer": sd.pipeline.unet})()
    words = ["Stable Diffusion 1.x and 2.x", "some/dit", "guide=none"]
    refused(UsageError, words, lambda: features.check(without, "some/dit", 300, (1,)))


# What stays behind


def hooks_of(unet):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in unet.modules())


def test_no_hook_stays_behind_even_after_an_exception(sd, monkeypatch):
    unet = sd.pipeline.unet
    before = hooks_of(unet)
    look(sd)
    assert hooks_of(unet) == before

    def stumble(*given, **named):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(unet.up_blocks[2], "forward", stumble)
    with pytest.raises(RuntimeError, match="out of memory"):
        look(sd)
    assert hooks_of(unet) == before
    monkeypatch.undo()
    with torch.no_grad():
        assert unet(torch.zeros(1, 4, 8, 8), 0, encoder_hidden_states=sd.encode([""])).sample.shape == (1, 4, 8, 8)


def test_no_graph_is_built_and_no_parameter_gets_a_gradient(prior):
    condition = torch.zeros(4, prior.encode([""]).shape[2], requires_grad=True)
    with torch.enable_grad():
        found = look(prior, condition=condition)
    assert not any(x.requires_grad for x in found.values())
    assert not prior.encode(["a cat that is new"]).requires_grad
    for part in (prior.pipeline.unet, prior.pipeline.vae, prior.pipeline.text_encoder):
        assert all(p.grad is None for p in part.parameters())
        assert not part.training
