"""Every family of checkpoints as a prior, few-step ones, and what options do to them, on tiny random pipelines."""

import importlib.util
import json
import shutil

import pytest
import tiny_pipelines as tiny
import torch

from fedprior import assemble
from fedprior.config import Experiment, override
from fedprior.errors import UsageError, UserError
from fedprior.priors import equip, families
from fedprior.priors.diffusion import DiffusionPrior, to_bytes
from fedprior.priors.locate import file_digest

WORDS = tiny.WORDS
DITS = ["PixArtAlphaPipeline", "PixArtSigmaPipeline", "StableDiffusion3Pipeline", "SanaPipeline"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder for each layout, written when it is first asked for."""
    made = {}

    def folder(layout):
        if layout not in made:
            made[layout] = tiny.write(tmp_path_factory.mktemp("prior"), layout)
        return made[layout]

    return folder


@pytest.fixture
def sd(folders):
    return folders("StableDiffusionPipeline")


def load(folder, **options):
    return DiffusionPrior.from_pretrained(folder, **{"steps": 2} | options)


def images(prior, count=3):
    return prior.generate([WORDS[i % 3] for i in range(count)], range(count), (prior.size, prior.size))


def plain(prior, prompts, seeds, **options):
    """What the pipeline makes of prompts by itself."""
    return prior.pipeline(
        prompts,
        height=prior.size,
        width=prior.size,
        num_inference_steps=prior.steps,
        guidance_scale=prior.guidance,
        generator=[torch.Generator().manual_seed(seed) for seed in seeds],
        **{"output_type": "pt"} | options,
    ).images


def one_line(error):
    text = str(error.value)
    assert "\n" not in text
    return text


# Families ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", families.FAMILIES)
def test_an_image_is_what_the_plain_pipeline_makes_and_the_same_in_every_batch(folders, layout):
    prior = load(folders(layout), guidance=3)
    assert prior.size == (32 if layout == "SanaPipeline" else 16)
    seen = []
    families.denoiser(prior.pipeline).register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((args[0] if args else kwargs["hidden_states"]).shape), with_kwargs=True
    )
    made = images(prior, 21)
    assert {shape[-1] for shape in seen} == {families.denoiser(prior.pipeline).config.sample_size}
    binned = {"use_resolution_binning": False} if prior.pipeline.__class__.__name__[:4] in ("PixA", "Sana") else {}
    expected = plain(prior, [WORDS[i % 3] for i in range(16)], range(16), **binned)
    assert torch.equal(made[:16], to_bytes(expected, (prior.size, prior.size)))
    for batch_size in (1, 8, 32):
        prior.batch_size = batch_size
        assert torch.equal(images(prior, 21), made)
    assert torch.equal(prior.generate([WORDS[20 % 3]], [20], (prior.size,) * 2)[0], made[20])
    other = prior.generate([WORDS[1]], [0], (prior.size,) * 2)[0]
    assert not torch.equal(other, made[0])  # the prompt counts
    assert prior.truncated(["a cat", "xylophone " * 100]) == ["xylophone " * 100]


def test_each_distinct_prompt_is_encoded_once_and_the_empty_one_too(folders):
    for layout in ("StableDiffusionPipeline", "StableDiffusion3Pipeline"):
        prior = load(folders(layout), guidance=3)
        lots = []
        prior.pipeline.text_encoder.register_forward_hook(lambda _, given, out, lots=lots: lots.append(len(out[0])))
        images(prior, 40)
        asked = len(lots)
        assert asked == 3  # three prompts in one lot; then "" in the place of a prompt, and in that of none
        images(prior, 40)
        assert len(lots) == asked
        prior.generate(["a new one"], [0], (16, 16))
        assert len(lots) == asked + 1
        assert set(lots) == {16}  # whatever their number, so that company changes nothing


def test_encodings_beyond_their_room_are_forgotten_and_made_again(sd, monkeypatch):
    prior = load(sd)
    made = images(prior)
    monkeypatch.setattr("fedprior.priors.encodings.KEPT", 1)
    words = [f"a photo of a cat {i}" for i in range(30)]
    together = prior.generate(words, range(30), (16, 16))
    assert len(prior._encodings._known) == 30  # all of one call at once
    assert torch.equal(images(prior), made)
    assert len(prior._encodings._known) == 3
    assert torch.equal(prior.generate(words, range(30), (16, 16)), together)


@pytest.mark.parametrize("layout", ["StableDiffusionXLPipeline", *DITS])
def test_features_of_xl_and_transformers_are_refused_in_one_line(folders, layout):
    prior = load(folders(layout))
    line = "guidance reads the UNet of Stable Diffusion 1.x and 2.x layouts, and .* has another"
    with pytest.raises(UsageError, match=line):
        prior.features(torch.zeros(1, 3, 16, 16).byte(), [["a"]], timestep=1, levels=[1], seeds=[0], size=16)
    with pytest.raises(UsageError, match=line) as error:
        _ = prior.level_widths
    one_line(error)
    if layout in DITS:
        with pytest.raises(UsageError, match="has no UNet, which redraws images"):
            prior.redraw(torch.zeros(1, 3, 16, 16).byte(), ["a"], [0], 0.5)


@pytest.mark.parametrize("layout", families.FAMILIES)
def test_a_round_trip_keeps_the_shape_whatever_the_autoencoder(folders, layout):
    given = torch.randint(0, 256, (3, 3, 24, 20), generator=torch.Generator().manual_seed(0)).byte()
    back = load(folders(layout)).roundtrip(given)
    assert back.shape == given.shape
    assert back.dtype == torch.uint8


# Few-step checkpoints and schedulers ---------------------------------------------------------------------

TRAILING = {"timestep_spacing": "trailing"}


@pytest.mark.parametrize(
    ("name", "plan", "expected"),
    [
        ("x", ("EulerDiscreteScheduler", TRAILING), ("EulerDiscreteScheduler", 4, 0.0)),  # sd-turbo, Lightning
        ("x", ("EulerAncestralDiscreteScheduler", TRAILING), ("EulerAncestralDiscreteScheduler", 4, 0.0)),  # sdxl-turbo
        ("x", ("LCMScheduler", {}), ("LCMScheduler", 4, 1.0)),
        ("x", ("EulerDiscreteScheduler", {}), ("DPMSolverMultistepScheduler", 20, 7.0)),
        ("x", ("DDIMScheduler", TRAILING | {"clip_sample": False}), ("DPMSolverMultistepScheduler", 20, 7.0)),
        (
            "x",
            ("EulerDiscreteScheduler", TRAILING | {"rescale_betas_zero_snr": True}),
            ("DPMSolverMultistepScheduler", 20, 7.0),
        ),
        ("my_sd_turbo_v2", ("PNDMScheduler", {}), ("EulerDiscreteScheduler", 4, 0.0)),
        ("turbocharged", ("PNDMScheduler", {}), ("DPMSolverMultistepScheduler", 20, 7.0)),
        ("sdxl_lightning_8step", ("PNDMScheduler", {}), ("EulerDiscreteScheduler", 8, 0.0)),
        ("SDXL-Lightning", ("PNDMScheduler", {}), ("EulerDiscreteScheduler", 4, 0.0)),
    ],
)
def test_few_step_checkpoints_are_told_by_their_scheduler_or_name(tmp_path, name, plan, expected):
    folder = tiny.write(tmp_path / "turbo" / name, "StableDiffusionPipeline", plan=tiny.scheduler(plan[0], **plan[1]))
    prior = DiffusionPrior.from_pretrained(folder)
    assert (type(prior.pipeline.scheduler).__name__, prior.steps, prior.guidance) == expected
    if prior.guidance == 0 and "LCM" not in expected[0]:
        assert prior.pipeline.scheduler.config.timestep_spacing == "trailing"
    calls = []
    prior.pipeline.unet.register_forward_pre_hook(lambda _, args: calls.append(len(args[0])))
    made = images(prior)
    assert calls == [16 if prior.guidance <= 1 else 32] * prior.steps
    assert torch.equal(made, images(prior))  # a scheduler that draws noise draws it by image


def test_the_one_step_lightning_checkpoint_predicts_the_image(tmp_path):
    prior = DiffusionPrior.from_pretrained(
        tiny.write(tmp_path / "sdxl_lightning_1step_x0", "StableDiffusionXLPipeline")
    )
    assert (prior.steps, prior.guidance) == (1, 0.0)
    assert prior.pipeline.scheduler.config.prediction_type == "sample"
    assert prior.settings["scheduler_options"] == {"timestep_spacing": "trailing", "prediction_type": "sample"}


def test_noise_of_a_scheduler_that_draws_it_belongs_to_the_image(tmp_path):
    plan = tiny.scheduler("EulerAncestralDiscreteScheduler", **TRAILING)
    prior = DiffusionPrior.from_pretrained(tiny.write(tmp_path / "a", "StableDiffusionPipeline", plan=plan), steps=3)
    made = images(prior, 18)
    assert torch.equal(prior.generate([WORDS[2]], [17], (16, 16))[0], made[17])
    assert torch.equal(prior.generate([WORDS[2]] * 3, [5, 17, 2], (16, 16))[1], made[17])


def test_a_consistency_models_guidance_is_an_input_and_costs_no_second_pass(folders):
    folder = folders("LatentConsistencyModelPipeline")
    prior = DiffusionPrior.from_pretrained(folder)
    assert (prior.settings["scheduler"], prior.steps, prior.guidance) == ("LCMScheduler", 4, 8.0)
    rows = []
    prior.pipeline.unet.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    made = images(prior)
    assert rows == [16] * 4
    assert not torch.equal(made, images(DiffusionPrior.from_pretrained(folder, guidance=2)))
    for options, word in (
        ({"scheduler": "dpm++"}, "takes auto or lcm, own"),
        ({"guidance_interval": "0-0.5"}, "leave"),
    ):
        with pytest.raises(UsageError, match=word) as error:
            DiffusionPrior.from_pretrained(folder, **options)
        one_line(error)


def test_the_sidecar_wins_over_what_is_told_and_the_caller_over_both(tmp_path):
    plan = tiny.scheduler("EulerDiscreteScheduler", **TRAILING)
    folder = tiny.write(tmp_path / "a", "StableDiffusionPipeline", plan=plan)
    (folder / "fedprior.json").write_text(json.dumps({"steps": 3, "guidance": 2, "scheduler": "ddim"}))
    own = DiffusionPrior.from_pretrained(folder)
    assert (own.settings["scheduler"], own.steps, own.guidance) == ("DDIMScheduler", 3, 2.0)
    asked = DiffusionPrior.from_pretrained(folder, steps=1, guidance=0, scheduler="own")
    assert (asked.settings["scheduler"], asked.steps, asked.guidance) == ("EulerDiscreteScheduler", 1, 0.0)
    (folder / "fedprior.json").write_text(json.dumps({"scheduler": "heun"}))
    with pytest.raises(UserError, match=r"fedprior\.json is damaged"):
        DiffusionPrior.from_pretrained(folder)


def test_a_scheduler_by_name_and_its_options_are_settings(sd):
    found = {}
    for name in ("auto", "dpm++", "ddim", "euler", "euler_trailing", "lcm", "own"):
        prior = load(sd, scheduler=name)
        settings = prior.settings
        found[name] = settings["scheduler"], settings.get("scheduler_options")
        assert images(prior).float().std() > 1
    assert found == {
        "auto": ("DPMSolverMultistepScheduler", None),
        "dpm++": ("DPMSolverMultistepScheduler", None),
        "ddim": ("DDIMScheduler", {"clip_sample": False}),
        "euler": ("EulerDiscreteScheduler", None),
        "euler_trailing": ("EulerDiscreteScheduler", {"timestep_spacing": "trailing"}),
        "lcm": ("LCMScheduler", None),
        "own": ("PNDMScheduler", None),
    }
    with pytest.raises(UsageError, match="unknown scheduler 'dpm'"):
        load(sd, scheduler="dpm")


def test_solvers_of_one_equation_agree_in_the_limit_of_many_steps(folders):
    """Which they would not under another noise schedule or prediction."""
    close = {}
    for layout, names in (
        ("StableDiffusionPipeline", ("dpm++", "ddim", "euler")),
        ("StableDiffusion3Pipeline", ("own", "dpm++", "euler")),
        ("SanaPipeline", ("own", "dpm++", "euler")),
    ):
        made = []
        for name, steps in [*((n, 60) for n in names), (names[-1], 3)]:
            prior = load(folders(layout), scheduler=name, steps=steps, guidance=1)
            prior.exact = False  # one image is enough
            made.append(images(prior, 1).float())
        *made, few = made
        close[layout] = max(float((x - made[0]).abs().mean()) for x in made)
        assert close[layout] < 0.4 * float((few - made[0]).abs().mean()), layout
        assert close[layout] < 3, layout


def test_the_shift_of_a_flow_model_goes_with_every_scheduler(folders):
    for layout, name, key in (("StableDiffusion3Pipeline", "dpm++", "flow_shift"), ("SanaPipeline", "euler", "shift")):
        prior = load(folders(layout), scheduler=name)
        assert prior.pipeline.scheduler.config[key] == 3.0
        assert prior.settings["scheduler_options"][key] == 3.0


@pytest.mark.parametrize("layout", ["StableDiffusion3Pipeline", "SanaPipeline"])
def test_a_flow_model_takes_its_own_schedulers_only(folders, layout):
    with pytest.raises(UsageError, match=r"prior\.scheduler=ddim; it takes auto or dpm\+\+, euler, own") as error:
        load(folders(layout), scheduler="ddim")
    one_line(error)


def test_a_plain_checkpoints_settings_and_revision_have_not_changed(sd):
    prior = DiffusionPrior.from_pretrained(sd)
    assert set(prior.settings) == {"scheduler", "steps", "guidance", "dtype", "native_size", "safety_checker"}
    assert "+" not in prior.revision


# Guidance in a part of the steps -------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["StableDiffusionPipeline", "StableDiffusionXLPipeline", *DITS[1:]])
def test_outside_the_interval_a_step_is_one_pass_and_as_without_guidance(folders, layout):
    rows = []
    prior = load(folders(layout), steps=4, guidance=5, guidance_interval="0.25-0.75")
    count = lambda _, args, kwargs: rows.append(len(args[0] if args else kwargs["hidden_states"]))
    with equip.guided_within(prior.pipeline, None):
        families.denoiser(prior.pipeline).register_forward_pre_hook(count, with_kwargs=True, prepend=True)
    guided = images(prior)
    assert rows == [32] * 4  # what the pipeline asks for; the hook of the interval runs after this one
    inner = []
    part = next(m for m in families.denoiser(prior.pipeline).modules() if isinstance(m, torch.nn.Conv2d))
    part.register_forward_pre_hook(lambda _, args: inner.append(len(args[0])))
    assert torch.equal(images(prior), guided)
    assert inner == [16, 32, 32, 16]
    assert prior.settings["guidance_interval"] == [0.25, 0.75]
    never = images(load(folders(layout), steps=2, guidance=5, guidance_interval="0.9-1"))  # steps lie at 0 and 0.5
    assert torch.equal(never, images(load(folders(layout), steps=2, guidance=1)))
    always = images(load(folders(layout), steps=4, guidance=5, guidance_interval="0-1"))
    assert torch.equal(always, images(load(folders(layout), steps=4, guidance=5)))
    assert not torch.equal(always, guided)


def test_guidance_in_an_interval_is_that_of_a_loop_written_out(sd):
    prior = load(sd, steps=5, guidance=4, guidance_interval="0.2-0.6", scheduler="ddim")
    pipe = prior.pipeline
    text, empty = (pipe.encode_prompt([w] * 16, "cpu", 1, False)[0] for w in (WORDS[0], ""))
    latents = torch.cat([torch.randn((1, 4, 8, 8), generator=torch.Generator().manual_seed(s)) for s in range(16)])
    pipe.scheduler.set_timesteps(5)
    with torch.no_grad():
        for i, t in enumerate(pipe.scheduler.timesteps):
            noise = pipe.unet(latents, t, encoder_hidden_states=text).sample
            if i in (1, 2):
                without = pipe.unet(latents, t, encoder_hidden_states=empty).sample
                noise = without + 4 * (noise - without)
            latents = pipe.scheduler.step(noise, t, latents, eta=0.0).prev_sample
        pixels = pipe.vae.decode(latents).sample / 2 + 0.5
    made = prior.generate([WORDS[0]] * 16, range(16), (16, 16))
    assert (made.int() - to_bytes(pixels, (16, 16)).int()).abs().max() <= 1


@pytest.mark.parametrize("text", ["0.2", "0.8-0.2", "-1-2", "0.2-x", "0.5-0.5", "0-2", ""])
def test_an_interval_that_is_none_is_refused(text):
    with pytest.raises(UsageError, match=r"prior\.guidance_interval must be shares") as error:
        equip.interval(text)
    one_line(error)


def test_without_guidance_an_interval_changes_nothing(sd):
    prior = load(sd, guidance=1, guidance_interval="0.2-0.4")
    assert "guidance_interval" not in prior.settings
    assert torch.equal(images(prior), images(load(sd, guidance=1)))


# Adapters ------------------------------------------------------------------------------------------------


def adapter(folder, seed, layout="StableDiffusionPipeline", rank=2, alpha=6):
    """An adapter of all query projections, written as training scripts of diffusers do -> (file, {layer: B A})."""
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    pipeline = tiny.build(layout)
    model = families.denoiser(pipeline)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, init_lora_weights=False, target_modules=["to_q"]))
    state = get_peft_model_state_dict(model)
    name = {"unet": "unet_lora_layers", "transformer": "transformer_lora_layers"}[families.of(pipeline).denoiser]
    metadata = {name.replace("layers", "adapter_metadata"): model.peft_config["default"].to_dict()}
    type(pipeline).save_lora_weights(folder, **{name: state}, **metadata)
    products = {}
    for key in state:
        if ".lora_A." in key:
            layer = key.split(".lora_A.")[0]
            products[layer] = state[key.replace("lora_A", "lora_B")] @ state[key]
    return folder / "pytorch_lora_weights.safetensors", products


def test_adapters_add_their_weighted_products_to_the_weights(sd, tmp_path):
    one, first = adapter(tmp_path / "one", 1)
    two, second = adapter(tmp_path / "two", 2, alpha=4)
    base = load(sd)
    prior = load(sd, lora=f"{one.parent}:0.5, {two}")
    weights, plain_weights = (dict(p.pipeline.unet.named_parameters()) for p in (prior, base))
    assert set(weights) == set(plain_weights)  # nothing is left of the adapters but their sum
    for layer, product in first.items():
        expected = plain_weights[f"{layer}.weight"] + 0.5 * 3 * product + 1.0 * 2 * second[layer]
        assert torch.allclose(weights[f"{layer}.weight"], expected, atol=1e-5)
    assert torch.equal(weights["conv_in.weight"], plain_weights["conv_in.weight"])
    assert not torch.equal(images(prior), images(base))
    assert prior.settings["lora"] == [[file_digest(one), 0.5], [file_digest(two), 1.0]]
    json.dumps(prior.settings)
    assert prior.revision.split("+")[0] == base.revision != prior.revision
    moved = shutil.copy(one, tmp_path / "other.safetensors")
    assert load(sd, lora=f"{moved}:0.5,{two}").revision == prior.revision  # content counts, and not the name
    assert load(sd, lora=f"{two},{one}:0.25").revision != prior.revision


@pytest.mark.parametrize("layout", ["StableDiffusionXLPipeline", "StableDiffusion3Pipeline", "SanaPipeline"])
def test_other_families_take_adapters_too(folders, tmp_path, layout):
    file, products = adapter(tmp_path, 1, layout)
    weights = dict(families.denoiser(load(folders(layout), lora=str(file)).pipeline).named_parameters())
    before = dict(families.denoiser(load(folders(layout)).pipeline).named_parameters())
    layer, product = next(iter(products.items()))
    assert torch.allclose(weights[f"{layer}.weight"], before[f"{layer}.weight"] + 3 * product, atol=1e-5)


def test_what_is_no_adapter_for_the_checkpoint_is_one_clear_line(sd, folders, tmp_path, monkeypatch):
    file, _ = adapter(tmp_path / "good", 1)
    other, _ = adapter(tmp_path / "other", 1, "StableDiffusion3Pipeline")
    (tmp_path / "old.bin").write_bytes(b"x")
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(file.read_bytes()[:-10])
    cases = [
        (sd, "no/such.safetensors", "there is no file no/such.safetensors"),
        (sd, tmp_path / "old.bin", "is no safetensors file"),
        (sd, cut, "is cut off"),
        (sd, other, "other"),
        (sd, f"{file}:x", "'x' is no weight"),
        (folders("PixArtAlphaPipeline"), file, "takes no adapters"),
    ]
    for folder, lora, words in cases:
        with pytest.raises(UserError, match=words) as error:
            load(folder, lora=str(lora))
        one_line(error)
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "peft" else there(name, *a))
    with pytest.raises(UserError, match=r"pip install 'fedprior\[lora\]'") as error:
        load(sd, lora=str(file))
    one_line(error)


# Decoders and precision ----------------------------------------------------------------------------------


def test_a_tiny_decoder_decodes_the_same_latents(sd, tmp_path):
    vae = tiny.tiny_vae()
    vae.save_pretrained(tmp_path / "taesd")
    prior, base = load(sd, vae=str(tmp_path / "taesd")), load(sd)
    latents = plain(base, WORDS[:1] * 16, range(16), output_type="latent")
    with torch.no_grad():
        expected = vae.decode(latents).sample / 2 + 0.5
    made = prior.generate(WORDS[:1] * 16, range(16), (16, 16))
    assert (made.int() - to_bytes(expected, (16, 16)).int()).abs().max() <= 1
    assert len(prior.settings["vae"]) == 64
    assert prior.revision.startswith(f"{base.revision}+")
    digest = prior.settings["vae"]
    tiny.tiny_vae().save_pretrained(tmp_path / "taesd")  # of other random weights
    assert load(sd, vae=str(tmp_path / "taesd")).settings["vae"] != digest


def test_a_decoder_that_does_not_fit_is_one_clear_line(sd, tmp_path):
    tiny.tiny_vae(channels=8).save_pretrained(tmp_path / "wide")
    cases = {
        "tiled": "is no folder; say full, sliced or",
        str(sd): "holds no AutoencoderTiny",
        str(tmp_path / "wide"): "decodes 8 latent channels 2 times enlarged, but .* has 4 and 2",
    }
    for vae, words in cases.items():
        with pytest.raises(UserError, match=words) as error:
            load(sd, vae=vae)
        one_line(error)


@pytest.mark.parametrize("layout", ["StableDiffusionPipeline", "SanaPipeline"])
def test_a_sliced_decoder_makes_one_image_at_a_time(folders, layout):
    prior = load(folders(layout), vae="sliced")
    rows = []
    prior.pipeline.vae.decoder.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    made = images(prior)
    assert rows == [1] * 16
    assert (made.int() - images(load(folders(layout))).int()).abs().max() <= 1
    assert "vae" not in prior.settings


@pytest.mark.parametrize(
    ("layout", "dtype"), [("StableDiffusionPipeline", "bf16"), *((layout, "fp16") for layout in families.FAMILIES)]
)
def test_half_precision_generates_in_every_family(folders, layout, dtype):
    prior = load(folders(layout), dtype=dtype)
    wanted = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    assert families.denoiser(prior.pipeline).dtype == wanted
    assert images(prior).float().std() > 1


@pytest.mark.parametrize("layout", ["StableDiffusionPipeline", "StableDiffusionXLPipeline"])
def test_an_autoencoder_that_asks_for_it_stays_in_single_precision(tmp_path, layout):
    folder = tiny.write(tmp_path / "a", layout, vae=tiny._vae(force_upcast=True))
    config = json.loads((folder / "vae" / "config.json").read_text())
    assert config["force_upcast"] is True
    for dtype in ("fp16", "bf16"):
        prior = load(folder, dtype=dtype)
        assert prior.pipeline.vae.dtype == torch.float32 != prior.pipeline.unet.dtype
        assert prior.settings["vae_dtype"] == "fp32"
        whole = load(folder)
        assert (images(prior).int() - images(whole).int()).abs().float().mean() < 8
        assert "vae_dtype" not in whole.settings
    del config["force_upcast"]  # as in checkpoints older than the option, whose default it is
    (folder / "vae" / "config.json").write_text(json.dumps(config))
    assert load(folder, dtype="bf16").pipeline.vae.dtype == torch.bfloat16


def test_values_beyond_half_precision_in_an_upcast_autoencoder_are_no_black_images(tmp_path):
    vae = tiny._vae(force_upcast=True)
    with torch.no_grad():
        vae.post_quant_conv.weight *= 1e6  # beyond what float16 holds; the first norm scales it back
    folder = tiny.write(tmp_path / "a", "StableDiffusionPipeline", vae=vae)
    assert images(load(folder, dtype="fp16")).float().std() > 1


def test_a_compiled_denoiser_is_called_with_one_shape_and_is_a_setting(sd, monkeypatch):
    shapes = []

    def compiled(forward):
        return lambda *args, **kwargs: shapes.append(tuple(args[0].shape)) or forward(*args, **kwargs)

    monkeypatch.setattr(torch, "compile", compiled)
    prior = load(sd, compile=True, guidance=1, batch_size=5)
    prior.exact = False
    made = images(prior, 13)
    assert shapes == [(5, 4, 8, 8)] * 6
    look = {"timestep": 1, "levels": [1], "seeds": [0], "size": 16}
    assert prior.features(torch.zeros(1, 3, 16, 16).byte(), [["a"]], **look)[1].shape[:3] == (1, 1, 8)
    assert len(shapes) == 6  # hooks read the denoiser as it is
    assert len(made) == 13
    assert prior.settings["compile"] is True
    assert (made.int() - images(load(sd, guidance=1), 13).int()).abs().max() <= 1


# Memory --------------------------------------------------------------------------------------------------


def starve(module, most, error):
    """Makes a module raise what `error` raises when it gets more rows than `most`."""

    def check(_, args, kwargs):
        if len(args[0] if args else kwargs["hidden_states"]) > most:
            error()

    module.register_forward_pre_hook(check, with_kwargs=True)


def no_memory_on_a_gpu():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def no_memory_on_a_cpu():
    torch.empty(2**50)  # raises as it does where memory is short


@pytest.mark.parametrize("error", [no_memory_on_a_gpu, no_memory_on_a_cpu])
def test_a_batch_that_does_not_fit_is_halved_retried_and_stays_halved(sd, error):
    expected = images(load(sd, guidance=1), 70)
    prior = load(sd, guidance=1, batch_size=64)
    lines, rows = [], []
    prior.log = lines.append
    prior.pipeline.unet.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    starve(prior.pipeline.unet, 16, error)
    assert torch.equal(images(prior, 70), expected)
    assert rows == [64, 32, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16]  # steps of two, 70 images in five lots
    assert lines == [
        "64 images at a time are more than memory holds; going on with 32",
        "32 images at a time are more than memory holds; going on with 16",
    ]
    assert torch.equal(images(prior, 70), expected)
    assert len(lines) == 2


@pytest.mark.parametrize("error", [no_memory_on_a_gpu, no_memory_on_a_cpu])
def test_an_image_that_does_not_fit_alone_is_one_clear_line(sd, error):
    prior = load(sd, guidance=1, batch_size=8)
    prior.exact = False  # as for large checkpoints
    prior.log = (lines := []).append
    starve(prior.pipeline.unet, 0, error)
    with pytest.raises(UserError, match=r"does not fit into the memory of cpu even with 1 image at a time") as raised:
        images(prior)
    assert "prior.vae=sliced" in one_line(raised)
    assert len(lines) == 3


def test_memory_that_runs_out_in_the_decoder_counts_though_the_pipeline_swallows_it(folders):
    prior = load(folders("SanaPipeline"), guidance=1, batch_size=32)
    prior.log = (lines := []).append
    expected = images(prior, 20)
    starve(prior.pipeline.vae.decoder, 16, no_memory_on_a_gpu)
    assert torch.equal(images(prior, 20), expected)
    assert len(lines) == 1


def test_other_errors_are_not_taken_for_a_want_of_memory(sd):
    prior = load(sd)
    starve(prior.pipeline.unet, 0, lambda: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        images(prior)


def test_a_batch_size_of_zero_takes_what_fits(sd, monkeypatch):
    free = lambda available: lambda: type("Memory", (), {"available": available})
    monkeypatch.setattr("psutil.virtual_memory", free(10**12))
    assert load(sd, batch_size=0).batch_size == 32
    monkeypatch.setattr("psutil.virtual_memory", free(3.3 * 10_000 * 16 * 16 / 0.8))
    assert load(sd, batch_size=0).batch_size == 3
    monkeypatch.setattr("psutil.virtual_memory", free(0))
    assert load(sd, batch_size=0).batch_size == 1


# The experiment's keys -----------------------------------------------------------------------------------


def test_every_option_can_be_set_by_a_key(sd, tmp_path):
    file, _ = adapter(tmp_path, 1)
    words = ["steps=3", "guidance=2", "guidance_interval=0-0.5", "scheduler=euler", f"lora={file}:0.3", "vae=sliced"]
    words += ["batch_size=4", "offline=true"]
    choice = override(Experiment(), [f"prior={sd}", *(f"prior.{w}" for w in words)]).prior
    prior = assemble.load_prior(choice, torch.device("cpu"))
    assert prior.settings == {
        "scheduler": "EulerDiscreteScheduler",
        "steps": 3,
        "guidance": 2.0,
        "dtype": "fp32",
        "native_size": 16,
        "safety_checker": False,
        "lora": [[file_digest(file), 0.3]],
        "guidance_interval": [0.0, 0.5],
    }
    assert prior.batch_size == 4
