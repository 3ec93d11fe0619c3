"""How the embedded prior is made: a small latent diffusion model in the Stable Diffusion folder layout.

An autoencoder is trained first, then a denoiser and its text encoder on the cached latents. Everything is
counted in steps, so the same seed, thread count and library versions give the same weights.
"""

import copy
import math
import platform
import shutil
import string
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import seeds, store
from ..data import digits
from ..errors import UserError
from . import prompts
from .quiet import quiet

TOKENS = 16  # the longest caption has 11
DIGIT_FORMS = (
    "a photo of the digit {}",
    "a photo of the number {}",
    "an image of the digit {}",
    "a picture of a {}",
    "a handwritten digit {}",
    "the digit {}",
    "the number {}",
    "a scan of the digit {}",
    "a {}",
    "{}",
)

Log = Callable[[str], None]


class Trained(NamedTuple):
    """What a training run leaves behind."""

    pipeline: Any  # diffusers.StableDiffusionPipeline in float32, averaged weights
    losses: dict[str, list[list[float]]]  # "autoencoder" and "denoiser": [step, mean since the one before]


def train_digits(
    out: Path,
    *,
    seed: int = 0,
    autoencoder_steps: int = 1500,
    steps: int = 2600,
    log: Log = print,
) -> dict[str, Any]:
    """Train the digits prior on the public half of the digits and write it to the folder `out`, in float16.

    Returns the record that also stands in the folder's `fedprior.json` under "training": seed, steps, rows,
    CPU seconds, losses, versions, command. Raises UserError when `out` exists and is not an empty folder.
    """
    refuse_existing(out)
    began = time.process_time()
    public = digits.public()
    trained = train(
        public["image"],
        public["label"],
        digit_captions(),
        seed=seed,
        autoencoder_steps=autoencoder_steps,
        steps=steps,
        log=log,
    )
    record = {
        "data": "scikit-learn digits, public half",
        "images": len(public["label"]),
        "seed": seed,
        "autoencoder_steps": autoencoder_steps,
        "steps": steps,
        "threads": torch.get_num_threads(),
        "cpu_seconds": round(time.process_time() - began, 1),
        "losses": trained.losses,
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("torch", "diffusers", "transformers", "tokenizers")},
        "command": f"fedprior prior train digits --seed {seed}",
    }
    save(trained.pipeline, out, DIGITS_DEFAULTS | {"training": record})
    return record


DIGITS_DEFAULTS = {
    "steps": 10,
    "guidance": 1.0,  # more of it loses variety: docs/records/digits_prior.json holds the comparison
    "size": digits.SIZE,
    "classes": list(digits.CLASSES),
    "template": prompts.SINGLE[0],
}


def digit_captions() -> list[list[str]]:
    """All captions of each class: both template lists and digit forms, in words and numerals."""
    forms = prompts.SINGLE + prompts.CLIP + DIGIT_FORMS
    return [[prompts.prompt(n, f) for f in forms for n in (word, str(i))] for i, word in enumerate(digits.CLASSES)]


def refuse_existing(out: Path) -> None:
    """Raises UserError unless `out` is free: training for minutes only to fail at saving helps nobody."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not empty; remove it or choose another folder for the prior")


def train(
    image: Tensor,
    label: Tensor,
    captions: Sequence[Sequence[str]],
    *,
    seed: int,
    autoencoder_steps: int,
    steps: int,
    log: Log = print,
) -> Trained:
    """Train all parts on images uint8 [n, 3, H, W] with labels [n]; `captions[c]` belong to class c."""
    with quiet(), torch.random.fork_rng(devices=[]):  # the libraries initialise from the global generator
        torch.manual_seed(seeds.number(seed, "prior weights"))
        tokenizer = build_tokenizer([c for of_class in captions for c in of_class])
        autoencoder, text_encoder, unet = build_models(len(tokenizer), tokenizer, image.shape[-1])
    pixels = image.float() / 127.5 - 1
    losses = {"autoencoder": fit_autoencoder(autoencoder, pixels, autoencoder_steps, seed, log)}
    fold_statistics(autoencoder, encode(autoencoder, pixels))
    latents = encode(autoencoder, pixels)
    scheduler = build_scheduler()
    losses["denoiser"] = fit_denoiser(
        unet, text_encoder, tokenizer, scheduler, latents, label, captions, steps, seed, log
    )
    return Trained(build_pipeline(autoencoder.eval(), text_encoder.eval(), tokenizer, unet.eval(), scheduler), losses)


# Parts ---------------------------------------------------------------------------------------------------


def build_tokenizer(texts: Sequence[str]) -> Any:
    """A CLIP tokenizer that knows the words of `texts`; other words fall apart into shorter pieces."""
    from transformers import CLIPTokenizer

    pieces = list(string.ascii_lowercase + string.digits + string.punctuation)
    vocabulary = {p: i for i, p in enumerate(pieces + [p + "</w>" for p in pieces])}
    merges: dict[tuple[str, str], None] = {}
    words = {w.strip(string.punctuation) for t in texts for w in t.replace("-", " ").split()}
    for word in sorted(words - {""}, key=lambda w: (-len(w), w)):  # else "high" would cut up "white"
        left = word[0]
        for i, letter in enumerate(word[1:], 2):
            right = letter + "</w>" * (i == len(word))
            merges[left, right] = None
            left += right
            vocabulary.setdefault(left, len(vocabulary))
    for special in ("<|startoftext|>", "<|endoftext|>"):
        vocabulary[special] = len(vocabulary)
    return CLIPTokenizer(vocab=vocabulary, merges=list(merges), model_max_length=TOKENS)


def build_models(
    words: int,
    tokenizer: Any,
    size: int,
    channels: tuple[int, ...] = (8, 16),
    widths: tuple[int, ...] = (24, 32, 40, 40),
    hidden: int = 48,
) -> tuple[nn.Module, nn.Module, nn.Module]:
    """Autoencoder (four latents, half resolution), text encoder and UNet with four up blocks, untrained."""
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    autoencoder = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * len(channels),
        up_block_types=("UpDecoderBlock2D",) * len(channels),
        block_out_channels=channels,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=size,
        scaling_factor=1.0,
        mid_block_add_attention=False,
        force_upcast=False,
    )
    text_encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=words,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=TOKENS,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    unet = UNet2DConditionModel(
        sample_size=size // 2 ** (len(channels) - 1),
        in_channels=4,
        out_channels=4,
        block_out_channels=widths,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=hidden,
        attention_head_dim=4,
        norm_num_groups=8,
    )
    return autoencoder, text_encoder, unet


def build_scheduler() -> Any:
    """DPM-Solver++ over Stable Diffusion's noise schedule, for a model that predicts velocity."""
    from diffusers import DPMSolverMultistepScheduler

    return DPMSolverMultistepScheduler(
        num_train_timesteps=1000,
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        prediction_type="v_prediction",
        steps_offset=1,
    )


def build_pipeline(vae: nn.Module, text_encoder: nn.Module, tokenizer: Any, unet: nn.Module, scheduler: Any) -> Any:
    """The parts as a StableDiffusionPipeline without safety checker."""
    with quiet():
        from diffusers import StableDiffusionPipeline

    return StableDiffusionPipeline(
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        unet=unet,
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


# Training ------------------------------------------------------------------------------------------------


def fit_autoencoder(
    model: Any, pixels: Tensor, steps: int, seed: int, log: Log, batch: int = 64, peak: float = 2e-3
) -> list[list[float]]:
    """Train on pixels [n, 3, H, W] in [-1, 1]; the loss returned is the mean squared error alone."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=peak, weight_decay=1e-4)
    draws = torch.Generator().manual_seed(seeds.number(seed, "prior autoencoder"))
    report = Progress("autoencoder", steps, log)
    model.train()
    for rate in rates(steps, peak, warmup=100):
        x = pixels[torch.randint(len(pixels), (batch,), generator=draws)]
        posterior = model.encode(x).latent_dist
        y = model.decode(posterior.sample(generator=draws)).sample
        error = nn.functional.mse_loss(y, x)
        divergence = posterior.kl().mean() / x[0].numel()
        loss = error + 0.5 * nn.functional.l1_loss(y, x) + 0.01 * divergence
        step(optimiser, loss, rate)
        report.add(error.item())
    return report.losses


def fit_denoiser(
    unet: Any,
    text_encoder: Any,
    tokenizer: Any,
    scheduler: Any,
    latents: Tensor,
    label: Tensor,
    captions: Sequence[Sequence[str]],
    steps: int,
    seed: int,
    log: Log,
    batch: int = 128,
    peak: float = 2e-3,
    drop: float = 0.1,
) -> list[list[float]]:
    """Train the UNet and the text encoder on latents [n, 4, h, w]; both end with their averaged weights.

    A share `drop` of the captions is empty, so that classifier-free guidance works.
    """
    flat = [c for of_class in captions for c in of_class] + [""]
    ids = tokenizer(flat, padding="max_length", max_length=TOKENS, truncation=True, return_tensors="pt").input_ids
    count = torch.tensor([len(c) for c in captions])
    first = count.cumsum(0) - count
    signal, noise_share = scheduler.alphas_cumprod.sqrt(), (1 - scheduler.alphas_cumprod).sqrt()
    parameters = [*text_encoder.parameters(), *unet.parameters()]
    average = Average(parameters)
    optimiser = torch.optim.AdamW(parameters, lr=peak, weight_decay=0.01, betas=(0.9, 0.99))
    draws = torch.Generator().manual_seed(seeds.number(seed, "prior denoiser"))
    report = Progress("denoiser", steps, log)
    unet.train()
    text_encoder.train()
    for rate in rates(steps, peak, warmup=200):
        rows = torch.randint(len(latents), (batch,), generator=draws)
        y = label[rows]
        caption = first[y] + (torch.rand(batch, generator=draws) * count[y]).long()
        caption[torch.rand(batch, generator=draws) < drop] = len(flat) - 1
        t = timesteps(batch, len(signal), draws)
        a, s = signal[t, None, None, None], noise_share[t, None, None, None]
        z = latents[rows]
        noise = torch.randn(z.shape, generator=draws)
        distinct, position = caption.unique(return_inverse=True)
        text = text_encoder(ids[distinct])[0][position]
        velocity = unet(a * z + s * noise, t, encoder_hidden_states=text).sample
        loss = nn.functional.mse_loss(velocity, a * noise - s * z)
        step(optimiser, loss, rate)
        average.update()
        report.add(loss.item())
    average.install()
    return report.losses


def rates(steps: int, peak: float, warmup: int) -> Iterator[float]:
    """Learning rates: linear warm-up times a cosine from `peak` down to 2 % of it."""
    for i in range(steps):
        yield peak * min(1.0, (i + 1) / warmup) * (0.02 + 0.49 * (1 + math.cos(math.pi * i / steps)))


def step(optimiser: torch.optim.Optimizer, loss: Tensor, rate: float) -> None:
    """One update at the given learning rate with the gradient clipped to norm 1."""
    (group,) = optimiser.param_groups
    group["lr"] = rate
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(group["params"], 1.0)
    optimiser.step()


def timesteps(batch: int, total: int, draws: torch.Generator) -> Tensor:
    """Timesteps int64 [batch], one from each of `batch` equal parts of 0 .. total - 1, in random order."""
    t = (torch.arange(batch) + torch.rand(1, generator=draws)) / batch * total
    return t.long().clamp(max=total - 1)[torch.randperm(batch, generator=draws)]


@torch.no_grad()
def encode(autoencoder: Any, pixels: Tensor) -> Tensor:
    """Mean latents [n, 4, h, w] of pixels [n, 3, H, W]."""
    autoencoder.eval()
    return torch.cat([autoencoder.encode(x).latent_dist.mode() for x in pixels.split(256)])


@torch.no_grad()
def fold_statistics(autoencoder: Any, latents: Tensor) -> None:
    """Make the latents zero-mean and unit-variance in each channel without changing any reconstruction.

    A pipeline knows one scalar scaling factor only, so the shift and scale go into the 1x1 convolutions on
    both sides of the latents.
    """
    mean, deviation = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
    n = len(mean)
    into, out_of = autoencoder.quant_conv, autoencoder.post_quant_conv
    into.weight[:n] /= deviation[:, None, None, None]
    into.bias[:n] = (into.bias[:n] - mean) / deviation
    into.bias[n:] -= 2 * deviation.log()  # the second half are log-variances
    out_of.bias += out_of.weight[:, :, 0, 0] @ mean
    out_of.weight *= deviation[None, :, None, None]


class Average:
    """An exponential moving average of parameters, with a shorter memory in the first steps."""

    def __init__(self, parameters: Sequence[nn.Parameter], decay: float = 0.999) -> None:
        self.parameters, self.decay, self.updates = parameters, decay, 0
        self.values = [p.detach().clone() for p in parameters]

    @torch.no_grad()
    def update(self) -> None:
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(self.values, list(self.parameters), 1 - decay)

    @torch.no_grad()
    def install(self) -> None:
        """Put the averages into the parameters."""
        for p, value in zip(self.parameters, self.values, strict=True):
            p.copy_(value)


class Progress:
    """Collects a loss and says its mean about twenty times over a run."""

    def __init__(self, name: str, steps: int, log: Log) -> None:
        self.name, self.steps, self.log = name, steps, log
        self.every, self.recent = max(1, steps // 20), list[float]()
        self.done, self.began = 0, time.process_time()
        self.losses: list[list[float]] = []

    def add(self, loss: float) -> None:
        self.done += 1
        self.recent.append(loss)
        if self.done % self.every == 0 or self.done == self.steps:
            mean = sum(self.recent) / len(self.recent)
            self.losses.append([self.done, round(mean, 5)])
            seconds = time.process_time() - self.began
            self.log(f"{self.name} {self.done}/{self.steps}  loss {mean:.5f}  {seconds:.0f} s CPU")
            self.recent.clear()


# Saving --------------------------------------------------------------------------------------------------


def save(pipeline: Any, out: Path, sidecar: dict[str, Any]) -> None:
    """Write the pipeline as float16 safetensors with `fedprior.json`; `out` appears whole or not at all."""
    half = {k: copy.deepcopy(v).half() if isinstance(v, nn.Module) else v for k, v in pipeline.components.items()}
    names = ("vae", "text_encoder", "tokenizer", "unet", "scheduler")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as temporary:
        folder = Path(temporary) / out.name
        with quiet():
            build_pipeline(*(half[name] for name in names)).save_pretrained(folder)
        store.write_json(folder / "fedprior.json", sidecar)
        for file in folder.rglob("*"):
            if file.is_file():
                file.chmod(0o644)  # the libraries write weights as 0600
        if out.exists():
            out.rmdir()
        shutil.move(folder, out)
