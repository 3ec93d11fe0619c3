"""Small models in the layout of Stable Diffusion, untrained, and their folder."""

import copy
import shutil
import string
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from .. import store
from .quiet import quiet

TOKENS = 16  # the longest caption has 11


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
