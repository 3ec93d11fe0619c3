"""A prior fine-tuned on one client's real images through low-rank adapters (ReGL, arXiv:2409.14063; LoRA,
arXiv:2106.09685). Off unless it is asked for.

Privacy. An adapter has seen the client's images and can memorise them: images made with it may be near-copies of real
ones. Adapter and images therefore stay at the client: only `pool="per_client"` may use them, and they must never go to
a shared pool or to the server. Nothing here gives a formal guarantee such as differential privacy. Where clients are
simulated on one machine, the adapters of all of them lie in its cache folder.
"""

import copy
import importlib.util
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from .. import seeds, store
from ..errors import UsageError, UserError, unknown
from . import families, features, room
from .base import Prior
from .diffusion import DiffusionPrior
from .encodings import Encodings
from .quiet import quiet
from .train import timesteps

FORMAT = "fedprior adapter 1"  # enters every key
DROP = 0.1  # share of captions that are empty, so that guidance keeps its empty prompt
PATIENCE = 30.0  # seconds between two lines about a training under way

Log = Callable[[str], None]
Layers = Literal["attention", "all"]

UP, DOWN = ".lora_B.weight", ".lora_A.weight"
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "q_proj", "k_proj", "v_proj", "out_proj")  # of UNet and text encoder


@dataclass(frozen=True, kw_only=True)
class Lora:
    """How a client fine-tunes the prior: `steps` of AdamW at rate `lr` on `batch_size` images each.

    Each adapted layer W becomes W + alpha/rank B A with B [out, rank] and A [rank, in]. `layers="attention"` adapts the
    projections of attention, `"all"` every linear and convolution layer: it costs about twice as much and learns what
    attention cannot, such as other brightness. The defaults suit Stable Diffusion; the small embedded priors want `lr`
    between 3e-3 (all) and 1e-2 (attention). `train_text_encoder` adapts the text encoder in the same way.
    """

    rank: int = 4
    alpha: float = 4.0
    steps: int = 100  # 0 leaves the prior as it is
    lr: float = 1e-4
    batch_size: int = 8
    layers: Layers = "attention"
    train_text_encoder: bool = False

    def __post_init__(self) -> None:
        for key, least in (("rank", 1), ("steps", 0), ("batch_size", 1)):
            if getattr(self, key) < least:
                raise UsageError(f"adapt.{key} must be at least {least}, not {getattr(self, key)}")
        for key in ("alpha", "lr"):
            if not 0 < getattr(self, key) < math.inf:
                raise UsageError(f"adapt.{key} must be a number above 0, not {getattr(self, key)}")
        if self.layers not in get_args(Layers):
            raise unknown("value for adapt.layers", self.layers, get_args(Layers))


def check(prior: Prior) -> None:
    """Raises UsageError for a prior that cannot be fine-tuned so, UserError without peft."""
    pipeline: Any = prior.pipeline if isinstance(prior, DiffusionPrior) else None
    unet = getattr(pipeline, "unet", None)
    if unet is None or getattr(unet.config, "addition_embed_type", None) is not None:
        raise UsageError(
            f"adapt=lora fine-tunes the UNet of Stable Diffusion 1.x and 2.x layouts, and {prior.name} has another; "
            "name such a checkpoint with prior=, or say adapt=none"
        )
    plain = families.Preset(families.of(pipeline).steps, families.of(pipeline).guidance)
    few_steps = families.embeds_guidance(pipeline) or families.preset(prior.name, pipeline) != plain
    if few_steps or pipeline.scheduler.config.get("prediction_type") not in TARGETS:
        raise UsageError(
            f"adapt=lora trains a model to predict noise or velocity, and {prior.name} was trained otherwise (to make "
            "images in few steps, or by flow matching); name its base model with prior=, or say adapt=none"
        )
    if importlib.util.find_spec("peft") is None:
        raise UserError("adapt=lora needs peft; pip install 'fedprior[lora]'")


def adapt(
    prior: Prior, images: Tensor, prompts: Sequence[str], config: Lora, *, seed: int, log: Log = print
) -> "AdaptedPrior":
    """The prior fine-tuned on a client's images uint8 [n, 3, H, W], image i under the caption prompts[i].

    This only checks and names the result: training, or reading what an earlier call trained, happens when the first
    image is made. The weights are a function of the prior, the images, the captions, `config` and `seed`.

    Raises UsageError for a prior that cannot be fine-tuned so and for images or captions that do not fit, UserError
    without peft.
    """
    check(prior)
    assert isinstance(prior, DiffusionPrior)
    if images.ndim != 4 or images.shape[1] != 3 or images.dtype != torch.uint8:
        raise UsageError(f"images to adapt to must be uint8 [n, 3, H, W], not {images.dtype} {list(images.shape)}")
    if not len(images):
        raise UsageError("a prior cannot be adapted to a client without images; leave the prior as it is there")
    if len(prompts) != len(images):
        raise UsageError(f"{len(images)} images need as many prompts, not {len(prompts)}")
    return AdaptedPrior(prior, images, tuple(prompts), config, seed, log)


class AdaptedPrior(DiffusionPrior):
    """A prior with one client's adapter in its weights; all that the adapter leaves alone is shared with the original.

    It takes memory from its first image on, until `release` or the end of a `with` block; used again afterwards, it
    reads its adapter from the cache. The original is never changed, and both may be used in turn.
    """

    def __init__(
        self, original: DiffusionPrior, images: Tensor, prompts: tuple[str, ...], config: Lora, seed: int, log: Log
    ) -> None:
        vars(self).update({k: v for k, v in vars(original).items() if k not in ("pipeline", "_encodings")})
        self.original, self.images, self.prompts = original, images, prompts
        self.config, self.seed, self.log = config, seed, log
        self.name = f"{original.name} adapted to {len(images)} images"
        self.revision = store.digest(
            FORMAT,
            original.revision,
            original.dtype,
            str(original.size),
            json.dumps([asdict(config), seed, list(images.shape), prompts]),
            store.raw_bytes(images),
        )

    @cached_property
    def pipeline(self) -> Any:
        """A diffusers pipeline whose adapted layers hold the adapter, in evaluation mode."""
        return merged(self.original.pipeline, self.weights())

    @cached_property
    def _encodings(self) -> Encodings:  # type: ignore[override]  # only the adapted text encoder needs its own
        known = self.original._encodings
        return Encodings(self.pipeline, full_lots=known.full_lots) if self.config.train_text_encoder else known

    def release(self) -> None:
        """Gives the memory of the adapted layers back."""
        for name in ("pipeline", "_encodings"):
            vars(self).pop(name, None)
        room.release()

    def __enter__(self) -> "AdaptedPrior":
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    @property
    def settings(self) -> dict[str, object]:
        """All that changes an image besides prompt, seed and size: those of the original."""
        return self.original.settings

    @property
    def level_widths(self) -> dict[int, int]:
        """Channels of each up block's output, by level from 1."""
        return self.original.level_widths

    def truncated(self, prompts: Sequence[str]) -> list[str]:
        """Those of the prompts that have more tokens than the text encoder reads; their ends have no effect."""
        return self.original.truncated(prompts)

    def weights(self) -> dict[str, Tensor]:
        """The adapter by the names that diffusers gives its parts, float32, from the cache or trained now.

        alpha/rank is part of the `lora_B`, so that a reader which takes alpha for the rank makes the same images.
        """
        path = store.cache_folder() / "adapters" / f"{self.revision}.safetensors"
        return store.read_or_rebuild(path, self._read, lambda: self._train(path))[0]

    def _read(self, path: Path) -> dict[str, Tensor]:
        weights, about = store.read_tree(path)
        if about.get("revision") != self.revision:
            raise ValueError(f"{path} holds another adapter")
        return weights

    def _train(self, path: Path) -> dict[str, Tensor]:
        weights = fit(self.original, self.images, self.prompts, self.config, seed=self.seed, log=self.log)
        store.write_tree(path, weights, {"revision": self.revision})
        return weights


def save(prior: AdaptedPrior, path: Path) -> None:
    """Write the adapter to a .safetensors file that diffusers' `load_lora_weights` reads. It can hold private images;
    see above."""
    if path.suffix != ".safetensors":
        raise UsageError(f"an adapter is a .safetensors file; write it to {path.with_suffix('.safetensors')}")
    store.save_tensors(prior.weights(), path, {"format": "pt"})


# Training ------------------------------------------------------------------------------------------------

TARGETS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "epsilon": lambda signal, share, latent, noise: noise,
    "v_prediction": lambda signal, share, latent, noise: signal * noise - share * latent,
    "sample": lambda signal, share, latent, noise: latent,
}
"""What a UNet predicts from signal * latent + share * noise, by the scheduler's prediction type."""


@torch.enable_grad()  # the first image may be asked for where gradients are off
def fit(
    prior: DiffusionPrior, images: Tensor, prompts: Sequence[str], config: Lora, *, seed: int, log: Log
) -> dict[str, Tensor]:
    """An adapter trained on images uint8 [n, 3, H, W] with the checkpoint's own objective and noise schedule, as
    `AdaptedPrior.weights` gives it. Latents are the autoencoder's means.

    Raises UserError when training diverges or does not fit into memory.
    """
    try:
        return _fit(prior, images, prompts, config, seed, log)
    except (RuntimeError, MemoryError) as error:
        if not room.exhausted(error):
            raise
        raise UserError(
            f"fine-tuning {prior.name} does not fit into memory with adapt.batch_size={config.batch_size}; lower it or "
            "use prior.dtype=bf16"
        ) from error


def _fit(
    prior: DiffusionPrior, images: Tensor, prompts: Sequence[str], config: Lora, seed: int, log: Log
) -> dict[str, Tensor]:
    pipeline = copy.copy(prior.pipeline)
    parts = ["unet", "text_encoder"] if config.train_text_encoder else ["unet"]
    with quiet(), torch.random.fork_rng(devices=[]):  # peft draws from the global generator of the CPU
        torch.manual_seed(seeds.number(seed, "adapter weights"))
        for part in parts:
            setattr(pipeline, part, with_adapter(getattr(pipeline, part), config))
    unet = pipeline.unet
    device, half = unet.device, unet.dtype == torch.float16
    parameters = [p for part in parts for p in getattr(pipeline, part).parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=config.lr)
    scaler = torch.amp.GradScaler(device.type, enabled=half)  # small gradients would vanish in half precision

    draws = torch.Generator().manual_seed(seeds.number(seed, "adapter"))
    rows = torch.randint(len(images), (config.steps, config.batch_size), generator=draws)
    latents = encode(prior, images, rows.unique().tolist(), config.batch_size)
    alphas = pipeline.scheduler.alphas_cumprod.float().cpu()
    target = TARGETS[pipeline.scheduler.config.prediction_type]

    def read(captions: list[str]) -> Tensor:
        if not config.train_text_encoder:
            return prior.encode(captions)
        text: Tensor = pipeline.encode_prompt(captions, device, 1, do_classifier_free_guidance=False)[0]
        return text

    losses: list[float] = []
    said = time.monotonic()
    for own in rows.tolist():
        t = timesteps(len(own), len(alphas), draws)
        dropped = torch.rand(len(own), generator=draws) < DROP
        z = torch.stack([latents[row] for row in own])
        noise = torch.randn(z.shape, generator=draws).to(z)
        alpha = alphas[t].to(z)[:, None, None, None]
        signal, share = alpha.sqrt(), (1 - alpha).sqrt()
        noised = (signal * z + share * noise).to(unet.dtype)
        text = read(["" if gone else prompts[row] for row, gone in zip(own, dropped.tolist(), strict=True)])
        predicted = unet(noised, t.to(device), encoder_hidden_states=text.to(unet.dtype)).sample.float()
        loss = nn.functional.mse_loss(predicted, target(signal, share, z, noise))
        optimiser.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimiser)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimiser)
        scaler.update()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            break
        if time.monotonic() - said > PATIENCE:
            log(f"{prior.name}: adapting, step {len(losses)}/{config.steps}  loss {losses[-1]:.4f}")
            said = time.monotonic()
    if not all(map(math.isfinite, losses)) or not all(p.isfinite().all() for p in parameters):
        raise UserError(
            f"fine-tuning {prior.name} diverged after {len(losses)} steps; lower adapt.lr={config.lr:g} or use "
            "prior.dtype=fp32"
        )
    if losses:
        tenth = -(-len(losses) // 10)
        first, last = (sum(part) / tenth for part in (losses[:tenth], losses[-tenth:]))
        log(f"{prior.name}: adapted to {len(images)} images in {config.steps} steps, loss {first:.4f} to {last:.4f}")
    return {f"{part}.{k}": v for part in parts for k, v in collected(getattr(pipeline, part), config).items()}


@torch.no_grad()
def encode(prior: DiffusionPrior, images: Tensor, rows: Sequence[int], batch_size: int) -> dict[int, Tensor]:
    """{row: latent [c, h, w], float32} of images uint8 [n, 3, H, W]."""
    latents: dict[int, Tensor] = {}
    for first in range(0, len(rows), batch_size):
        part = list(rows[first : first + batch_size])
        coded, _ = features.to_latents(prior.pipeline, images[part], prior.size, "signed")
        latents |= dict(zip(part, coded, strict=True))
    return latents


# Weights -------------------------------------------------------------------------------------------------


def sharing(model: Any) -> Any:
    """A copy of a module whose tensors are the original's memory, frozen: to replace layers in, not to write to."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
    memo |= {id(x): x for x in model.buffers()}
    own = copy.deepcopy(model, memo)
    vars(own).pop("forward", None)  # a compiled one runs the original
    return own


def with_adapter(model: Any, config: Lora) -> Any:
    """A sharing copy of a model with fresh adapters in float32, which alone can be trained."""
    from peft import LoraConfig, inject_adapter_in_model

    names = [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear | nn.Conv2d) and (config.layers == "all" or name.endswith(ATTENTION))
    ]
    how = LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=names)
    adapted = inject_adapter_in_model(how, sharing(model))
    for p in adapted.parameters():
        if p.requires_grad:
            p.data = p.data.float()
    return adapted


def collected(model: Any, config: Lora) -> dict[str, Tensor]:
    """The adapters of a model by the names of the layers, alpha/rank in each `lora_B`."""
    from peft import get_peft_model_state_dict

    found = get_peft_model_state_dict(model, save_embedding_layers=False)
    scale = config.alpha / config.rank
    return {name: (x * scale if name.endswith(UP) else x).detach().cpu().contiguous() for name, x in found.items()}


@torch.no_grad()
def merged(pipeline: Any, weights: dict[str, Tensor]) -> Any:
    """The pipeline with W + B A in the place of each adapted layer's weights W, in their dtype and memory layout;
    the original keeps its own."""
    adapted = copy.copy(pipeline)
    with quiet():
        for part in {name.split(".")[0] for name in weights}:
            setattr(adapted, part, sharing(getattr(pipeline, part)))
    for name, up in weights.items():
        if not name.endswith(UP):
            continue
        path = name.removesuffix(UP)
        part, inside = path.split(".", 1)
        layer, down = getattr(adapted, part).get_submodule(inside), weights[path + DOWN]
        old = layer.weight
        change = (up.flatten(1) @ down.flatten(1)).view(old.shape).to(old.device)
        layer.weight = nn.Parameter(torch.empty_like(old).copy_(old.float() + change), requires_grad=False)
    return adapted
