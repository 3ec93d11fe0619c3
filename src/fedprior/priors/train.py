"""How the embedded priors are made: small latent diffusion models in the Stable Diffusion folder layout.

An autoencoder is trained first, then a denoiser and its text encoder on the cached latents. Everything is
counted in steps, so the same seed, thread count and library versions give the same weights, whether training was
interrupted or not.
"""

import platform
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from .. import seeds, store
from ..data import digits
from ..data.table import Table
from ..errors import UsageError, UserError, unknown
from . import check, prompts
from .architecture import TOKENS, build_models, build_pipeline, build_scheduler, build_tokenizer, save
from .quiet import quiet
from .stages import Average, Keeper, Log, Stage, step

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
PHOTO_FORMS = ("a picture of a {}", "an image of a {}", "a {}", "the {}", "{}")
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
ALSO = {"airplane": ("plane",), "automobile": ("car",)}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is trained, and how. Losses are on pixels in [-1, 1]."""

    captions: Sequence[Sequence[str]]  # of each class
    channels: tuple[int, ...] = (8, 16)  # of the autoencoder's levels; each but the first halves the image
    widths: tuple[int, ...] = (24, 32, 40, 40)  # of the UNet's levels
    hidden: int = 48  # width of the text encoder
    autoencoder_steps: int = 1500
    autoencoder_batch: int = 64
    divergence: float = 0.01  # weight of the divergence of latents from a normal distribution, a number of the image
    colour: float = 0.0  # weight of the squared error of 4 x 4 means: a plain error leaves hues to the last
    likeness: float = 0.0  # weight of the error in features of a classifier trained on the same images
    flips: bool = False  # mirrored images are images of the class too
    steps: int = 2600  # of the denoiser
    batch: int = 128
    peak: float = 2e-3  # learning rate of the denoiser after warm-up
    decay: float = 0.999  # of the denoiser's average
    defaults: dict[str, Any] = field(default_factory=dict)  # sampling and classes, stored beside the weights


class Trained(NamedTuple):
    """What a training run leaves behind."""

    pipeline: Any  # diffusers.StableDiffusionPipeline in float32, averaged weights
    losses: dict[str, list[list[float]]]  # "autoencoder" and "denoiser": [step, mean since the one before]


def digit_captions() -> list[list[str]]:
    """All captions of each class: both template lists and digit forms, in words and numerals."""
    forms = prompts.SINGLE + prompts.CLIP + DIGIT_FORMS
    return [[prompts.prompt(n, f) for f in forms for n in (word, str(i))] for i, word in enumerate(digits.CLASSES)]


def photo_captions(classes: Sequence[str]) -> list[list[str]]:
    """All captions of each class: both template lists and short forms, with and without repaired articles."""
    forms = prompts.SINGLE + prompts.CLIP + PHOTO_FORMS
    plain = [[prompts.prompt(n, f) for f in forms for n in (word, *ALSO.get(word, ()))] for word in classes]
    articled = lambda text, word: text.replace(f" a {word}", f" an {word}") if word[0] in "aeiou" else text
    return [
        list(dict.fromkeys([*own, *(articled(text, word) for text in own)]))
        for word, own in zip(classes, plain, strict=True)
    ]


RECIPES: dict[str, Recipe] = {
    "digits": Recipe(
        captions=digit_captions(),
        defaults={
            "steps": 10,
            "guidance": 1.0,  # more of it loses variety: docs/records/digits_prior.json holds the comparison
            "size": digits.SIZE,
            "trained_on": "digits",
            "classes": list(digits.CLASSES),
        },
    ),
    "cifar10": Recipe(
        captions=photo_captions(CIFAR10),
        channels=(16, 32, 64),
        widths=(64, 96, 96, 96),
        hidden=64,
        autoencoder_steps=24000,
        autoencoder_batch=8,  # learns far faster per CPU second than 32
        divergence=0.001,
        colour=1.0,
        likeness=0.2,
        flips=True,
        steps=17000,
        batch=64,
        peak=1.2e-3,
        decay=0.9995,
        defaults={
            "steps": 12,
            "guidance": 2.0,  # docs/records/cifar10_prior.md
            "size": 32,
            "trained_on": "cifar10",
            "classes": list(CIFAR10),
            "guide": {"timestep": 150, "levels": "3"},  # where prompts point to the right class: docs/prior.md
        },
    ),
}
"""The embedded priors by name."""


def public(name: str, data: str | Path | None = None) -> tuple[Table, str]:
    """The images that a prior may be trained on, and what they are in words. `data` is a local copy of CIFAR-10.

    Raises UserError when the set cannot be had or has other classes, UsageError for a copy of the digits.
    """
    if name == "digits":
        if data is not None:
            raise UsageError("the digits ship with fedprior; leave out --data")
        return digits.public(), "scikit-learn digits, public half"
    from ..data import sources

    found = sources.load("cifar10", path=data, half="public")
    if found.classes != CIFAR10:
        raise UserError(f"the classes of {data} are {', '.join(found.classes[:10])}, not CIFAR-10's; give a copy of it")
    return found.train, "CIFAR-10 training split, public half"


def train_embedded(
    name: str,
    out: Path,
    *,
    data: str | Path | None = None,
    seed: int = 0,
    autoencoder_steps: int | None = None,
    steps: int | None = None,
    log: Log = print,
) -> dict[str, Any]:
    """Train an embedded prior on the public half of its images and write it to the folder `out`, in float16.

    `data` is a local copy of the set, where it does not ship with fedprior. Interrupted, the same call goes on from
    the folder `OUT-training` beside `out`, which goes away at the end.

    Returns the record that also stands in the folder's `fedprior.json` under "training": seed, steps, rows,
    CPU seconds, losses, versions, command. Raises UserError when `out` exists and is not an empty folder.
    """
    if name not in RECIPES:
        raise unknown("embedded prior", name, RECIPES)
    refuse_existing(out)
    images, words = public(name, data)
    recipe = RECIPES[name]
    recipe = replace(
        recipe, autoencoder_steps=autoencoder_steps or recipe.autoencoder_steps, steps=steps or recipe.steps
    )
    work = out.parent / f"{out.name}-training"
    keeper = Keeper(work, store.digest(repr(recipe), str(seed), words, store.raw_bytes(images["image"])))
    trained = train(images["image"], images["label"], recipe, seed=seed, log=log, keeper=keeper)
    record = {
        "data": words,
        "images": len(images["label"]),
        "seed": seed,
        "autoencoder_steps": recipe.autoencoder_steps,
        "steps": recipe.steps,
        "threads": torch.get_num_threads(),
        "cpu_seconds": round(keeper.seconds(), 1),
        "losses": trained.losses,
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("torch", "diffusers", "transformers", "tokenizers")},
        "command": f"fedprior prior train {name} --seed {seed}",
    }
    save(trained.pipeline, out, recipe.defaults | {"training": record})
    shutil.rmtree(work, ignore_errors=True)
    return record


def refuse_existing(out: Path) -> None:
    """Raises UserError unless `out` is free: training for minutes only to fail at saving helps nobody."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not empty; remove it or choose another folder for the prior")


def train(
    image: Tensor, label: Tensor, recipe: Recipe, *, seed: int, log: Log = print, keeper: Keeper | None = None
) -> Trained:
    """Train all parts on images uint8 [n, 3, H, W] with labels [n]; `keeper` lets it go on after an interruption."""
    with quiet(), torch.random.fork_rng(devices=[]):  # the libraries initialise from the global generator
        torch.manual_seed(seeds.number(seed, "prior weights"))
        tokenizer = build_tokenizer([c for of_class in recipe.captions for c in of_class])
        autoencoder, text_encoder, unet = build_models(
            len(tokenizer), tokenizer, image.shape[-1], recipe.channels, recipe.widths, recipe.hidden
        )
    pixels = image.float() / 127.5 - 1
    judge = None
    if recipe.likeness:
        log("training a classifier, whose features the autoencoder is to keep")
        judge = Likeness(image, label, len(recipe.captions), seed)
    losses = {"autoencoder": fit_autoencoder(autoencoder, pixels, recipe, seed, log, judge, keeper)}
    fold_statistics(autoencoder, encode(autoencoder, pixels))
    latents = encode(autoencoder, pixels)
    if recipe.flips:
        latents, label = torch.cat([latents, encode(autoencoder, pixels.flip(-1))]), torch.cat([label, label])
    scheduler = build_scheduler()
    losses["denoiser"] = fit_denoiser(
        unet, text_encoder, tokenizer, scheduler, latents, label, recipe, seed, log, keeper
    )
    return Trained(build_pipeline(autoencoder.eval(), text_encoder.eval(), tokenizer, unet.eval(), scheduler), losses)


def fit_autoencoder(
    model: Any,
    pixels: Tensor,
    recipe: Recipe,
    seed: int,
    log: Log,
    judge: "Likeness | None" = None,
    keeper: Keeper | None = None,
    peak: float = 2e-3,
) -> list[list[float]]:
    """Train on pixels [n, 3, H, W] in [-1, 1]; the loss returned is the mean squared error alone."""
    batch = recipe.autoencoder_batch
    stage = Stage("autoencoder", recipe.autoencoder_steps, seed, list(model.parameters()), peak, log, keeper)
    optimiser = torch.optim.AdamW(stage.parameters, lr=peak, weight_decay=1e-4)
    model.train()
    for rate in stage.run(optimiser, warmup=100):
        x = pixels[torch.randint(len(pixels), (batch,), generator=stage.draws)]
        if recipe.flips:
            mirrored = torch.rand(batch, generator=stage.draws) < 0.5
            x = torch.where(mirrored[:, None, None, None], x.flip(-1), x)
        posterior = model.encode(x).latent_dist
        y = model.decode(posterior.sample(generator=stage.draws)).sample
        error = nn.functional.mse_loss(y, x)
        divergence = posterior.kl().mean() / x[0].numel()
        loss = error + 0.5 * nn.functional.l1_loss(y, x) + recipe.divergence * divergence
        if recipe.colour:
            loss = loss + recipe.colour * nn.functional.avg_pool2d(y - x, 4).square().mean()
        if judge is not None:
            loss = loss + recipe.likeness * judge(y, x)
        step(optimiser, loss, rate)
        stage.done(error.item())
    return stage.losses


def fit_denoiser(
    unet: Any,
    text_encoder: Any,
    tokenizer: Any,
    scheduler: Any,
    latents: Tensor,
    label: Tensor,
    recipe: Recipe,
    seed: int,
    log: Log,
    keeper: Keeper | None = None,
    drop: float = 0.1,
) -> list[list[float]]:
    """Train the UNet and the text encoder on latents [n, 4, h, w]; both end with their averaged weights.

    A share `drop` of the captions is empty, so that classifier-free guidance works.
    """
    batch = recipe.batch
    flat = [c for of_class in recipe.captions for c in of_class] + [""]
    ids = tokenizer(flat, padding="max_length", max_length=TOKENS, truncation=True, return_tensors="pt").input_ids
    count = torch.tensor([len(c) for c in recipe.captions])
    first = count.cumsum(0) - count
    signal, noise_share = scheduler.alphas_cumprod.sqrt(), (1 - scheduler.alphas_cumprod).sqrt()
    parameters = [*text_encoder.parameters(), *unet.parameters()]
    average = Average(parameters, recipe.decay)
    stage = Stage("denoiser", recipe.steps, seed, parameters, recipe.peak, log, keeper, average)
    optimiser = torch.optim.AdamW(parameters, lr=recipe.peak, weight_decay=0.01, betas=(0.9, 0.99))
    draws = stage.draws
    unet.train()
    text_encoder.train()
    for rate in stage.run(optimiser, warmup=200):
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
        stage.done(loss.item())
    average.install()
    return stage.losses


class Likeness:
    """The error of images in the features of a small classifier, relative to how much the features vary."""

    LAYERS = (2, 6)  # of the classifier's body: behind its two convolutions
    STEPS = 4000

    def __init__(self, image: Tensor, label: Tensor, classes: int, seed: int) -> None:
        net, weights = check.fit(image, label, classes, seed, self.STEPS)
        net.module.load_state_dict(weights["params"] | weights["buffers"])
        self.body = list(cast(nn.Sequential, net.module.eval().requires_grad_(False).body))

    def __call__(self, made: Tensor, real: Tensor) -> Tensor:
        """Of images [n, 3, H, W] in [-1, 1], a scalar."""
        with torch.no_grad():
            wanted = self.features(real)
        errors = [(y - x).square().mean() / x.var() for y, x in zip(self.features(made), wanted, strict=True)]
        return torch.stack(errors).mean()

    def features(self, x: Tensor) -> list[Tensor]:
        out = []
        for i, layer in enumerate(self.body[: max(self.LAYERS) + 1]):
            x = layer(x)
            out += [x] if i in self.LAYERS else []
        return out


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
