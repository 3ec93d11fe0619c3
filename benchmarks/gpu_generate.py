"""Speed and memory of generation on a GPU for UNets of Stable Diffusion's sizes, with random weights. Prints JSON.

    python benchmarks/gpu_generate.py [--xl] [--seconds 360] > benchmarks/results/gpu_generate.json
    python benchmarks/gpu_generate.py --tiny        # the same on a CPU at toy widths, to see that it runs

Each row of "rows" is one run of `fedprior.priors.bench.measure`: images a second and peak memory of our path beside
`pipe(prompt)` and `pipe([prompts])`, interleaved. Speed does not depend on the weights, so no download is needed. Rows
that would begin after `--seconds` are left out and named in "left_out".
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, PNDMScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from fedprior import environment
from fedprior.priors import architecture, bench
from fedprior.priors.diffusion import DiffusionPrior
from fedprior.priors.quiet import quiet

TOKENS = 77


def text_encoder(width: int, layers: int, heads: int, tokenizer: Any, projection: int | None = None) -> Any:
    config = CLIPTextConfig(
        vocab_size=49408,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        projection_dim=projection or width,
    )
    return CLIPTextModelWithProjection(config) if projection else CLIPTextModel(config)


def autoencoder(tiny: bool, **options: Any) -> Any:
    widths = (32, 32) if tiny else (128, 256, 512, 512)
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * len(widths),
        up_block_types=("UpDecoderBlock2D",) * len(widths),
        block_out_channels=widths,
        layers_per_block=1 if tiny else 2,
        **options,
    )


def scheduler() -> Any:
    return PNDMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", skip_prk_steps=True, steps_offset=1
    )


def stable_diffusion(tiny: bool) -> Any:
    """The sizes of Stable Diffusion 1.x: a UNet of 860 million parameters, 512 pixels."""
    tokenizer = tokens()
    unet = UNet2DConditionModel(
        sample_size=8 if tiny else 64,
        block_out_channels=(32, 32, 32, 32) if tiny else (320, 640, 1280, 1280),
        layers_per_block=1 if tiny else 2,
        attention_head_dim=8,
        cross_attention_dim=32 if tiny else 768,
    )
    encoder = text_encoder(32, 1, 4, tokenizer) if tiny else text_encoder(768, 12, 12, tokenizer)
    vae = autoencoder(tiny, force_upcast=False)
    return architecture.build_pipeline(vae, encoder, tokenizer, unet, scheduler())


def xl(tiny: bool) -> Any:
    """The sizes of Stable Diffusion XL: a UNet of 2.6 billion parameters, 1024 pixels."""
    first, second = tokens(), tokens()
    width, projection = (32, 32) if tiny else (768, 1280)
    unet = UNet2DConditionModel(
        sample_size=8 if tiny else 128,
        block_out_channels=(32, 32, 32) if tiny else (320, 640, 1280),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1 if tiny else 2,
        transformer_layers_per_block=(1, 1, 1) if tiny else (1, 2, 10),
        attention_head_dim=(4, 4, 4) if tiny else (5, 10, 20),
        cross_attention_dim=width + projection,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8 if tiny else 256,
        projection_class_embeddings_input_dim=projection + 6 * (8 if tiny else 256),
    )
    return StableDiffusionXLPipeline(
        vae=autoencoder(tiny, force_upcast=True),
        text_encoder=text_encoder(width, 1 if tiny else 12, 4 if tiny else 12, first),
        text_encoder_2=text_encoder(projection, 1 if tiny else 32, 4 if tiny else 20, second, projection),
        tokenizer=first,
        tokenizer_2=second,
        unet=unet,
        scheduler=scheduler(),
        add_watermarker=False,
    )


def tokens() -> Any:
    tokenizer = architecture.build_tokenizer(bench.PROMPTS)
    tokenizer.model_max_length = TOKENS
    return tokenizer


def written(build: Any, tiny: bool, device: str, folder: Path) -> tuple[Path, int]:
    """Saves a random pipeline in half precision -> (folder, parameters of its UNet)."""
    with torch.device(device):  # random numbers for billions of weights take minutes on a CPU
        pipeline = build(tiny)
    parameters = sum(p.numel() for p in pipeline.unet.parameters())
    with quiet():
        pipeline.to(torch.float32 if tiny else torch.float16).save_pretrained(folder, safe_serialization=True)
    return folder, parameters


# (dtype, batch size, options, arms); the plain loop is slow and measured once a model and precision
ROWS: dict[str, list[tuple[str, int, dict[str, Any], tuple[str, ...]]]] = {
    "sd1": [
        ("fp16", 32, {}, bench.ARMS),
        ("fp16", 8, {}, bench.ARMS[1:]),
        ("fp16", 64, {}, bench.ARMS[1:]),
        ("bf16", 32, {}, bench.ARMS),
        ("fp16", 32, {"guidance_interval": "0.2-0.8"}, bench.ARMS[2:]),
        ("fp16", 32, {"vae": "sliced"}, bench.ARMS[2:]),
        ("fp32", 8, {}, bench.ARMS),
        ("fp16", 32, {"compile": True}, bench.ARMS[2:]),
    ],
    "xl": [
        ("fp16", 8, {}, bench.ARMS),
        ("fp16", 16, {}, bench.ARMS[1:]),
        ("bf16", 8, {}, bench.ARMS[1:]),
    ],
}
BUILDERS = {"sd1": stable_diffusion, "xl": xl}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--xl", action="store_true", help="measure the size of XL too")
    parser.add_argument("--tiny", action="store_true", help="toy widths on a CPU, in seconds")
    parser.add_argument("--seconds", type=float, default=360, help="begin no row after this time")
    asked = parser.parse_args()
    if not asked.tiny and not torch.cuda.is_available():
        sys.exit("this machine has no CUDA device that torch can use; --tiny runs on a CPU")
    device = "cpu" if asked.tiny else "cuda"
    begun, rows, left_out, models = time.monotonic(), [], [], {}
    for model in ("sd1", "xl") if asked.xl else ("sd1",):
        with tempfile.TemporaryDirectory() as temporary:
            folder, models[model] = written(BUILDERS[model], asked.tiny, device, Path(temporary))
            wanted = [row for row in ROWS[model] if not asked.tiny or row[:2] == ROWS[model][0][:2]]
            for dtype, batch_size, options, arms in wanted:
                what = {"model": model, "dtype": dtype, "batch_size": batch_size, **options}
                if time.monotonic() - begun > asked.seconds:
                    left_out.append(what)
                    continue
                if asked.tiny:  # half precision and compiling take their time on a CPU
                    options = {key: value for key, value in options.items() if key != "compile"} | {"steps": 2}
                    dtype, batch_size = "fp32", 16
                prior = DiffusionPrior.from_pretrained(
                    folder, dtype=dtype, batch_size=batch_size, device=device, **options
                )
                prior.name = model
                result = bench.measure(prior, batch_size, rounds=1 if asked.tiny else 2, arms=arms)
                rows.append(what | {"seconds": round(time.monotonic() - begun, 1), "result": result})
                print(json.dumps(what | {a: result[a] for a in arms}), file=sys.stderr, flush=True)
                del prior
                if device == "cuda":
                    torch.cuda.empty_cache()
    report = {"versions": environment.versions(), "hardware": environment.hardware(), "parameters": models}
    print(json.dumps(report | {"rows": rows, "left_out": left_out}, indent=1))


if __name__ == "__main__":
    main()
