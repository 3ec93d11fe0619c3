"""Adapters of one client's images: on the digits prior, and on tiny random checkpoints of both layouts."""

import gc
import importlib.util
import shutil
import weakref
from copy import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import reference_guide
import torch

from fedprior import store
from fedprior.data import digits
from fedprior.errors import UsageError, UserError
from fedprior.priors import adapt, edit, embedded, features, prompts
from fedprior.priors.adapt import Lora
from fedprior.priors.diffusion import DiffusionPrior

WORDS = ["a photo of a cat", "a photo of a dog"]
CLASSES = [prompts.prompt(word, prompts.SINGLE[0]) for word in digits.CLASSES]
QUICK = Lora(steps=2, lr=0.1, batch_size=2)
SILENT = lambda line: None


@pytest.fixture(scope="module")
def prior():
    return embedded.load("digits")


def checkpoint(folder, layout):
    return DiffusionPrior.from_pretrained(reference_guide.checkpoint(folder, layout, WORDS), steps=2, guidance=2.0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A random checkpoint of the 1.x layout, which predicts noise."""
    return checkpoint(tmp_path_factory.mktemp("prior"), "1.x")


@pytest.fixture(scope="module")
def newer(tmp_path_factory):
    """A random checkpoint of the 2.x layout, which predicts velocity."""
    return checkpoint(tmp_path_factory.mktemp("prior"), "2.x")


@pytest.fixture(scope="module")
def inverted(prior, tmp_path_factory):
    """The digits prior adapted to dark digits on light ground, and the log lines."""
    table, lines = digits.public(), []
    captions = [CLASSES[y] for y in table["label"].tolist()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDPRIOR_CACHE", str(tmp_path_factory.mktemp("cache")))
        config = Lora(steps=150, lr=0.005, batch_size=5, layers="all")
        own = adapt.adapt(prior, 255 - table["image"], captions, config, seed=0, log=lines.append)
        assert own.pipeline is not None
        assert own.weights()
    return own, lines


@pytest.fixture
def images():
    """Four images of a client, twice as large as the priors' own, and their captions."""
    return torch.randint(256, (4, 3, 32, 32), generator=torch.Generator().manual_seed(1)).byte(), WORDS * 2


def adapted(prior, images, config=QUICK, seed=0, log=SILENT):
    return adapt.adapt(prior, *images, config, seed=seed, log=log)


def made(prior, words=WORDS):
    return prior.generate(words, range(len(words)), (16, 16))


def contents(pipeline):
    """A digest of every tensor of a pipeline, and which of them ask for gradients."""
    parts = [m for m in pipeline.components.values() if isinstance(m, torch.nn.Module)]
    asks = [p.requires_grad for m in parts for p in m.parameters()]
    return store.digest(*(store.raw_bytes(x) for m in parts for x in m.state_dict().values())), asks


def error_of(pipeline, latents, texts, seed):
    """The mean squared error of predicted velocity at fresh noise, by Stable Diffusion's schedule in closed form."""
    draws = torch.Generator().manual_seed(seed)
    alphas = (1 - torch.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2).cumprod(0)
    t = torch.randint(1000, (len(latents),), generator=draws)
    noise = torch.randn(latents.shape, generator=draws)
    a, s = alphas[t].sqrt()[:, None, None, None], (1 - alphas[t]).sqrt()[:, None, None, None]
    with torch.no_grad():
        velocity = pipeline.unet(a * latents + s * noise, t, encoder_hidden_states=texts).sample
    return float((velocity - (a * noise - s * latents)).square().mean())


# What it learns ------------------------------------------------------------------------------------------


def test_images_become_dark_digits_on_light_ground(prior, inverted):
    own, _ = inverted
    truth = 255 - digits.public()["image"]
    # the autoencoder draws no image as light as these: 98 of their 177 grey levels come back
    drawn = 255 * edit.roundtrip(prior.pipeline, truth[:200], 16, 50)
    shape = lambda x: x.float().mean((0, 1)).flatten()
    like = lambda x, y: float(torch.corrcoef(torch.stack([shape(x), shape(y)]))[0, 1])
    before, after = made(prior, CLASSES * 2), made(own, CLASSES * 2)
    assert like(before, truth) < -0.95
    assert like(after, truth) > 0
    assert like(before, drawn) < 0
    assert like(after, drawn) > 0.85
    assert before.float().mean() < drawn.mean() - 20
    assert after.float().mean() == pytest.approx(float(drawn.mean()), abs=4)


def test_the_error_falls_on_images_and_noise_that_it_never_saw(prior, inverted):
    own, lines = inverted
    table = digits.train()
    with torch.no_grad():
        latents, _ = features.to_latents(prior.pipeline, 255 - table["image"][:256], 16, "signed")
    texts = prior.encode([CLASSES[y] for y in table["label"][:256].tolist()])
    assert error_of(own.pipeline, latents, texts, seed=9) < 0.5 * error_of(prior.pipeline, latents, texts, seed=9)
    assert lines[-1].startswith("digits: adapted to 901 images in 150 steps, loss ")


def test_it_trains_on_noised_mean_latents_under_their_own_captions(prior, monkeypatch):
    """Black images under one caption, white ones under the other: each step's input is read back."""
    black_white = torch.stack([torch.zeros(3, 16, 16), torch.full((3, 16, 16), 255.0)]).byte()
    with torch.no_grad():
        latents, _ = features.to_latents(prior.pipeline, black_white, 16, "signed")
    alphas = (1 - torch.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2).cumprod(0)
    client, captions, steps = copy(prior), [], []
    monkeypatch.setattr(client, "encode", lambda own: captions.extend(own) or prior.encode(own), raising=False)
    hook = prior.pipeline.unet.register_forward_pre_hook(lambda _, args: steps.append(args[:2]))
    try:
        adapt.fit(client, black_white, CLASSES[:2], Lora(steps=24, batch_size=16), seed=0, log=SILENT)
    finally:
        hook.remove()
    noised, t = torch.cat([x for x, _ in steps]), torch.cat([t for _, t in steps])
    assert noised.shape == (384, 4, 8, 8)
    a, s = alphas[t].sqrt()[:, None, None, None, None], (1 - alphas[t]).sqrt()[:, None, None, None, None]
    noise = (noised[:, None] - a * latents) / s  # had the image been black, had it been white
    which = noise.square().mean((2, 3, 4)).argmin(1)
    noise = noise[torch.arange(384), which]
    assert abs(noise.mean()) < 0.01
    assert noise.std() == pytest.approx(1, abs=0.01)
    assert 0.4 < which.float().mean() < 0.6
    assert t.float().mean() == pytest.approx(499.5, abs=10)
    dropped = torch.tensor([c == "" for c in captions])
    assert 0.06 < dropped.float().mean() < 0.14
    right = torch.tensor([c == CLASSES[w] for c, w in zip(captions, which.tolist(), strict=True)])
    sure = ~dropped & (t < 600)  # where noise hides the image, the likelier one may be the wrong one
    assert right[sure].all()


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "sample"])
def test_each_target_gives_the_latent_back(kind):
    latent, noise = torch.randn((2, 5, 4, 2, 2), generator=torch.Generator().manual_seed(0))
    signal = torch.linspace(0.1, 0.9, 5)[:, None, None, None]
    share = (1 - signal**2).sqrt()
    seen, target = signal * latent + share * noise, adapt.TARGETS[kind](signal, share, latent, noise)
    solved = {
        "epsilon": (seen - share * target) / signal,
        "v_prediction": signal * seen - share * target,
        "sample": target,
    }
    assert torch.allclose(solved[kind], latent, atol=1e-5)


# What it leaves alone ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["tiny", "newer"])
def test_the_original_stays_as_it_was(layout, request, images):
    tiny = request.getfixturevalue(layout)
    tiny.pipeline.unet.requires_grad_(True)
    before, pictures = contents(tiny.pipeline), made(tiny)
    config = replace(QUICK, train_text_encoder=True)
    with adapted(tiny, images, config) as own:
        assert not torch.equal(made(own), pictures)
        assert torch.equal(made(tiny), pictures)  # both may be used in turn
    assert contents(tiny.pipeline) == before
    assert not any("lora" in name for name, _ in tiny.pipeline.unet.named_modules())


@pytest.mark.parametrize("layers", ["attention", "all"])
def test_only_the_adapted_layers_change_and_by_no_more_than_the_rank(newer, tiny, images, layers):
    tiny = newer if layers == "all" else tiny  # of the layouts, one projects by linear layers, one by convolutions
    own = adapted(tiny, images, replace(QUICK, layers=layers, rank=2))
    old, new = tiny.pipeline.unet.state_dict(), own.pipeline.unet.state_dict()
    assert list(old) == list(new)
    moved = {name for name in old if old[name].data_ptr() != new[name].data_ptr()}
    if layers == "attention":
        ends = ("to_q.weight", "to_k.weight", "to_v.weight", "to_out.0.weight")
        assert moved == {name for name in old if name.endswith(ends)}
    else:
        assert moved == {name for name in old if name.endswith(".weight") and old[name].ndim > 1}
    ranks = [int(torch.linalg.matrix_rank((new[x] - old[x]).flatten(1).double(), rtol=1e-3)) for x in moved]
    assert max(ranks) == 2
    assert sum(rank > 0 for rank in ranks) > 0.8 * len(ranks)  # of one latent pixel, queries and keys do not matter
    for part in ("vae", "text_encoder"):
        assert getattr(own.pipeline, part) is getattr(tiny.pipeline, part)


def test_the_merged_layers_are_those_that_were_trained(tiny, images, monkeypatch):
    trained, inject = [], adapt.with_adapter
    monkeypatch.setattr(adapt, "with_adapter", lambda *args: trained.append(inject(*args)) or trained[-1])
    own = adapted(tiny, images, replace(QUICK, rank=2, alpha=8.0, layers="all", lr=0.03)).pipeline.unet
    x = torch.randn((2, 4, 8, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        there, here, before = (
            unet(x, 500, encoder_hidden_states=tiny.encode(WORDS)).sample
            for unet in (trained[0], own, tiny.pipeline.unet)
        )
    assert torch.allclose(there, here, atol=1e-4)
    assert not torch.allclose(there, before, atol=1e-2)


def test_a_compiled_denoiser_is_adapted_too(tiny, images, monkeypatch):
    """Compiling replaces the `forward` of the instance by a function of that instance."""
    pictures, unet = made(adapted(tiny, images)), tiny.pipeline.unet
    forward = unet.forward
    monkeypatch.setattr(unet, "forward", lambda *args, **kwargs: forward(*args, **kwargs), raising=False)
    shutil.rmtree(store.cache_folder())
    assert torch.equal(made(adapted(tiny, images)), pictures)


def test_no_steps_give_the_originals_images_bit_for_bit(tiny, prior, images):
    for base, words in ((tiny, WORDS), (prior, CLASSES[:2])):
        own = adapted(base, images, Lora(steps=0, layers="all", train_text_encoder=True))
        assert torch.equal(made(own, words), made(base, words))
        assert own.revision != base.revision


def test_it_works_like_the_prior_it_came_from(tiny, images):
    own = adapted(tiny, images)
    assert isinstance(own, DiffusionPrior)
    assert own.settings == tiny.settings
    assert (own.size, own.steps, own.guidance, own.defaults) == (tiny.size, tiny.steps, tiny.guidance, tiny.defaults)
    assert own.level_widths == tiny.level_widths
    long = "a photo of a cat " * 9
    assert own.truncated([long, "a cat"]) == [long]
    assert tiny.name in own.name
    assert "adapted" in own.name
    assert torch.equal(own.encode(WORDS), tiny.encode(WORDS))
    seen = [
        p.features(images[0], [[w] for w in images[1]], timestep=10, levels=[4], seeds=range(4), size=16)[4]
        for p in (tiny, own)
    ]
    assert seen[0].shape == seen[1].shape
    assert not torch.allclose(*seen, atol=1e-3)


def test_the_text_encoder_is_adapted_on_request_alone(tiny, images):
    plain, both = adapted(tiny, images), adapted(tiny, images, replace(QUICK, train_text_encoder=True))
    assert not any(name.startswith("text_encoder") for name in plain.weights())
    assert any(name.startswith("text_encoder") for name in both.weights())
    before = both.original.encode(WORDS)
    assert not torch.equal(both.encode(WORDS), before)
    assert torch.equal(tiny.encode(WORDS), before)


# One result for the same input ---------------------------------------------------------------------------


def test_the_weights_depend_on_the_input_alone(tiny, images, tmp_path, monkeypatch):
    first = adapted(tiny, images).weights()
    monkeypatch.setenv("FEDPRIOR_CACHE", str(tmp_path))
    torch.rand(7)  # moves the global generator
    state = torch.random.get_rng_state()
    again = adapted(tiny, images).weights()
    assert torch.equal(torch.random.get_rng_state(), state)
    assert list(first) == list(again)
    assert all(torch.equal(first[name], again[name]) for name in first)
    other = adapted(tiny, images, seed=1).weights()
    assert not any(torch.equal(first[name], other[name]) for name in first if name.endswith(adapt.DOWN))


def test_a_change_of_any_input_changes_the_revision(tiny, images):
    x, words = images
    brighter = x.clone()
    brighter[0, 0, 0, 0] ^= 1
    retrained, half, larger = copy(tiny), copy(tiny), copy(tiny)
    retrained.revision, half.dtype, larger.size = "another", "bf16", 32
    changed = {"rank": 5, "alpha": 2.0, "steps": 4, "lr": 0.02, "batch_size": 5, "layers": "all"}
    others = [
        *(adapted(tiny, images, replace(QUICK, **{key: value})) for key, value in changed.items()),
        adapted(tiny, images, replace(QUICK, train_text_encoder=True)),
        adapted(tiny, images, seed=1),
        adapted(tiny, (brighter, words)),
        adapted(tiny, (x.flip(0), words)),
        adapted(tiny, (x.reshape(4, 3, 64, 16), words)),
        adapted(tiny, (x, words[::-1])),
        *(adapted(p, images) for p in (retrained, half, larger)),
    ]
    revisions = [own.revision for own in (adapted(tiny, images), *others)]
    assert len(set(revisions)) == len(revisions) == 16
    assert adapted(tiny, (x.clone(), list(words))).revision == revisions[0]


# Memory and files ----------------------------------------------------------------------------------------


def test_nothing_is_trained_before_the_first_image_or_where_the_cache_has_it(tiny, images, monkeypatch):
    calls, fit = [], adapt.fit
    monkeypatch.setattr(adapt, "fit", lambda *args, **how: calls.append(1) or fit(*args, **how))
    own = adapted(tiny, images)
    assert own.settings == tiny.settings
    assert len(own.revision) == 64
    assert calls == []
    first = made(own)
    assert calls == [1]
    assert torch.equal(made(adapted(tiny, images)), first)
    assert calls == [1]


def test_release_gives_the_adapted_layers_back_and_the_next_image_is_the_same(tiny, images):
    with adapted(tiny, images) as own:
        first, layers = made(own), weakref.ref(own.pipeline.unet)
        assert layers() is not None
    gc.collect()
    assert layers() is None
    assert torch.equal(made(own), first)


def test_a_damaged_or_foreign_file_is_trained_again(tiny, images):
    own, other = adapted(tiny, images), adapted(tiny, images, seed=1)
    first = own.weights()
    files = {p.stem: p for p in (store.cache_folder() / "adapters").iterdir()}
    assert list(files) == [own.revision]
    path = files[own.revision]
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    again = own.weights()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert all(torch.equal(first[name], x) for name, x in store.read_tree(path)[0].items())
    truth = other.weights()
    shutil.copy(path, path.with_stem(other.revision))
    assert all(torch.equal(x, truth[name]) for name, x in other.weights().items())


@pytest.mark.parametrize(
    ("layout", "config"),
    [
        ("tiny", replace(QUICK, train_text_encoder=True, layers="all", lr=0.03)),
        ("newer", replace(QUICK, train_text_encoder=True, rank=2, alpha=8.0)),
    ],
)
def test_diffusers_reads_a_saved_adapter_and_makes_the_same_images(layout, config, images, tmp_path, request):
    tiny = request.getfixturevalue(layout)
    own = adapted(tiny, images, config)
    adapt.save(own, tmp_path / "own.safetensors")
    reader = DiffusionPrior.from_pretrained(tiny.name, steps=2, guidance=2.0)
    plain = made(reader)
    reader = DiffusionPrior.from_pretrained(tiny.name, steps=2, guidance=2.0)  # knows no encodings yet
    reader.pipeline.load_lora_weights(tmp_path / "own.safetensors")
    assert (made(own).int() - plain.int()).abs().max() > 8
    assert (made(own).int() - made(reader).int()).abs().max() <= 1  # sums run in another order


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_half_precision_learns_and_stays_half(prior, dtype):
    table = digits.public()
    half = embedded.load("digits", dtype=dtype)
    client = 255 - table["image"][:64], [CLASSES[y] for y in table["label"][:64].tolist()]
    own = adapted(half, client, Lora(steps=10, lr=0.02, batch_size=8, layers="all"))
    assert {p.dtype for p in own.pipeline.unet.parameters()} == {half.pipeline.unet.dtype}
    assert {x.dtype for x in own.weights().values()} == {torch.float32}
    with torch.no_grad():
        latents, _ = features.to_latents(prior.pipeline, client[0], 16, "signed")
    texts = prior.encode(client[1])
    after = error_of(SimpleNamespace(unet=own.pipeline.unet.float()), latents, texts, seed=9)
    assert after < 0.8 * error_of(prior.pipeline, latents, texts, seed=9)


# What cannot work ----------------------------------------------------------------------------------------


def refused(kind, match, call):
    with pytest.raises(kind, match=match) as error:
        call()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rank": 0}, "adapt.rank must be at least 1, not 0"),
        ({"steps": -1}, "adapt.steps must be at least 0"),
        ({"batch_size": 0}, "adapt.batch_size must be at least 1"),
        ({"lr": 0.0}, "adapt.lr must be a number above 0"),
        ({"lr": float("inf")}, "adapt.lr must be a number above 0"),
        ({"alpha": float("nan")}, "adapt.alpha must be a number above 0"),
        ({"layers": "atention"}, "did you mean attention"),
    ],
)
def test_values_out_of_range_are_refused(values, words):
    refused(UsageError, words, lambda: Lora(**values))


def test_images_that_do_not_fit_are_refused(tiny, images):
    x, words = images
    refused(UsageError, "without images", lambda: adapted(tiny, (x[:0], [])))
    refused(UsageError, "4 images need as many prompts, not 3", lambda: adapted(tiny, (x, words[:3])))
    refused(UsageError, "uint8", lambda: adapted(tiny, (x.float(), words)))
    refused(UsageError, "uint8", lambda: adapted(tiny, (x[:, :1], words)))


def unlike(prior, part, **config):
    """The prior with another configuration of its UNet or scheduler."""
    other, kind = copy(prior), copy(getattr(prior.pipeline, part))
    kind.register_to_config(**config)
    other.pipeline = copy(prior.pipeline)
    setattr(other.pipeline, part, kind)
    return other


def test_other_kinds_of_models_are_refused(tiny, images):
    otherwise = "noise or velocity.*adapt=none"
    turbo, transformer = copy(tiny), copy(tiny)
    turbo.name = "stabilityai/sd-turbo"
    transformer.pipeline = SimpleNamespace(transformer=object())
    for few in (
        unlike(tiny, "scheduler", prediction_type="flow_prediction"),
        unlike(tiny, "unet", time_cond_proj_dim=256),
        turbo,
    ):
        refused(UsageError, otherwise, lambda: adapted(few, images))
    layout = "1.x and 2.x layouts.*adapt=none"
    for other in (unlike(tiny, "unet", addition_embed_type="text_time"), transformer, SimpleNamespace(name="other")):
        refused(UsageError, layout, lambda: adapted(other, images))
    assert adapt.check(tiny) is None


def test_without_peft_one_line_names_the_extra(tiny, images, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "peft" else found(name))
    refused(UserError, r"pip install 'fedprior\[lora\]'", lambda: adapted(tiny, images))


def test_training_that_diverges_says_so_and_leaves_no_file(tiny, images):
    refused(UserError, "diverged.*adapt.lr", lambda: made(adapted(tiny, images, replace(QUICK, lr=1e30))))
    assert not (store.cache_folder() / "adapters").exists()


def test_training_that_does_not_fit_into_memory_says_what_to_lower(tiny, images, monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(adapt, "_fit", full)
    refused(UserError, "adapt.batch_size=2; lower it", lambda: made(adapted(tiny, images)))


def test_an_adapter_is_saved_as_safetensors_alone(tiny, images, tmp_path):
    refused(UsageError, "own.safetensors", lambda: adapt.save(adapted(tiny, images), tmp_path / "own.bin"))
