"""Random checkpoints with the smallest widths in every layout that a prior may have, for tests without a network.

Prompts speak louder than untrained weights would let them, and autoencoders give images some contrast.
"""

import copy
import inspect
import re
import string

import torch

from fedprior.priors import architecture
from fedprior.priors.quiet import quiet

WORDS = ["a photo of a cat", "a photo of a dog", "a sketch of a bird"]


def _clip(tokenizer, projection=None):
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=architecture.TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **({"projection_dim": projection} if projection else {}),
    )
    return CLIPTextModelWithProjection(config) if projection else CLIPTextModel(config)


def _vae(channels=4, **options):
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=8,
        sample_size=16,
        **{"scaling_factor": 1.0, "force_upcast": False} | options,
    )


def tiny_vae(channels=4):
    """An AutoencoderTiny whose latents are half as large as the image."""
    from diffusers import AutoencoderTiny

    return AutoencoderTiny(
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
        latent_channels=channels,
    )


def _unet(**options):
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        **{
            "sample_size": 8,
            "block_out_channels": (8, 8),
            "layers_per_block": 1,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            "cross_attention_dim": 8,
            "attention_head_dim": 2,
            "norm_num_groups": 2,  # with one channel in a group time would cancel out
        }
        | options
    )


def _pieces(*texts, **special):
    """A fast tokenizer of letters and the words of texts, as T5 and Gemma have one of pieces, that needs no file."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    pieces = [*special.values(), "▁", *string.ascii_letters, *string.digits, *string.punctuation]
    pieces += [f"▁{word}" for text in texts for word in text.split()]
    table = Tokenizer(models.Unigram([(p, -1.0) for p in dict.fromkeys(pieces)], unk_id=2))
    table.pre_tokenizer = pre_tokenizers.Metaspace()
    ends = [("</s>", 1)] if "eos_token" in special else []
    table.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=ends) if ends else None
    return PreTrainedTokenizerFast(tokenizer_object=table, model_max_length=512, **special)


def _t5():
    from transformers import T5Config, T5EncoderModel

    tokenizer = _pieces(pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=16,
        d_kv=4,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        feed_forward_proj="gated-gelu",
    )
    return tokenizer, T5EncoderModel(config)


def _gemma():
    from diffusers import SanaPipeline
    from transformers import Gemma2Config, Gemma2Model

    instruction = inspect.signature(SanaPipeline.__call__).parameters["complex_human_instruction"].default
    tokenizer = _pieces(*instruction, pad_token="<pad>", bos_token="<bos>", unk_token="<unk>")
    config = Gemma2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=4096,
        pad_token_id=0,
    )
    return tokenizer, Gemma2Model(config)


def scheduler(kind="PNDMScheduler", **options):
    """A scheduler over Stable Diffusion's noise schedule, written as its checkpoints do."""
    import diffusers

    own = {"skip_prk_steps": True} if kind == "PNDMScheduler" else {}
    return getattr(diffusers, kind)(
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        steps_offset=1,
        **own,
        **options,
    )


def _stable_diffusion(unet=None, plan=None, vae=None):
    from diffusers import StableDiffusionPipeline

    tokenizer = architecture.build_tokenizer(WORDS)
    return StableDiffusionPipeline(
        vae=vae or _vae(),
        text_encoder=_clip(tokenizer),
        tokenizer=tokenizer,
        unet=unet or _unet(),
        scheduler=plan or scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _xl(plan=None, vae=None, **options):
    from diffusers import StableDiffusionXLPipeline

    tokenizer = architecture.build_tokenizer(WORDS)
    unet = _unet(
        cross_attention_dim=16,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=8 * 6 + 8,
        **options,
    )
    return StableDiffusionXLPipeline(
        vae=vae or _vae(),
        text_encoder=_clip(tokenizer),
        text_encoder_2=_clip(tokenizer, projection=8),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        unet=unet,
        scheduler=plan or scheduler("EulerDiscreteScheduler", timestep_spacing="leading"),
        add_watermarker=False,
    )


def _lcm():
    from diffusers import LatentConsistencyModelPipeline

    parts = _stable_diffusion(_unet(time_cond_proj_dim=8), scheduler("LCMScheduler")).components
    return LatentConsistencyModelPipeline(**parts | {"requires_safety_checker": False})


def _pixart(kind):
    import diffusers

    tokenizer, encoder = _t5()
    transformer = diffusers.PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=4,
        in_channels=4,
        out_channels=8,
        num_layers=1,
        cross_attention_dim=8,
        caption_channels=16,
        sample_size=8,
        use_additional_conditions=False,
    )
    torch.nn.init.normal_(transformer.proj_out.weight, std=0.3)
    plan = diffusers.DPMSolverMultistepScheduler(beta_schedule="linear", beta_start=0.0001, beta_end=0.02)
    return getattr(diffusers, kind)(
        tokenizer=tokenizer, text_encoder=encoder, vae=_vae(), transformer=transformer, scheduler=plan
    )


def _sd3():
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

    clip = architecture.build_tokenizer(WORDS)
    tokenizer, encoder = _t5()
    transformer = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        attention_head_dim=4,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=8,
        pooled_projection_dim=16,
        pos_embed_max_size=8,
    )
    torch.nn.init.normal_(transformer.proj_out.weight, std=0.3)
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_vae(shift_factor=0.06),
        text_encoder=_clip(clip, projection=8),
        tokenizer=clip,
        text_encoder_2=_clip(clip, projection=8),
        tokenizer_2=copy.deepcopy(clip),
        text_encoder_3=encoder,
        tokenizer_3=tokenizer,
    )


def _sana():
    from diffusers import AutoencoderDC, DPMSolverMultistepScheduler, SanaPipeline, SanaTransformer2DModel

    tokenizer, encoder = _gemma()
    transformer = SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_attention_heads=2,
        attention_head_dim=4,
        num_cross_attention_heads=2,
        cross_attention_head_dim=4,
        cross_attention_dim=8,
        caption_channels=16,
        sample_size=16,  # its pipeline takes multiples of 32 pixels only
        patch_size=1,
    )
    vae = AutoencoderDC(
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=0.41407,
    )
    plan = DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    return SanaPipeline(tokenizer=tokenizer, text_encoder=encoder, vae=vae, transformer=transformer, scheduler=plan)


LAYOUTS = {
    "StableDiffusionPipeline": _stable_diffusion,
    "StableDiffusionXLPipeline": _xl,
    "LatentConsistencyModelPipeline": _lcm,
    "PixArtAlphaPipeline": lambda: _pixart("PixArtAlphaPipeline"),
    "PixArtSigmaPipeline": lambda: _pixart("PixArtSigmaPipeline"),
    "StableDiffusion3Pipeline": _sd3,
    "SanaPipeline": _sana,
}


def build(layout, **options):
    """A pipeline of this layout; native size 16, of Sana 32."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        pipeline = LAYOUTS[layout](**options)
        for name in ("unet", "transformer"):
            model = getattr(pipeline, name, None)
            for key, weight in model.named_parameters() if model is not None else ():
                if "attn2.to_out" in key or "context_embedder" in key:
                    weight.data *= 4
    return pipeline


def write(folder, layout, **options):
    """`build`, saved to a folder -> the folder."""
    with quiet():
        build(layout, **options).save_pretrained(folder, safe_serialization=True)
    return folder


# The same weights in one file, by the names of the code that Stable Diffusion was first released with ---------

RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}
UNET = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
    "mid_block.resnets.0": "middle_block.0",
    "mid_block.attentions.0": "middle_block.1",
    "mid_block.resnets.1": "middle_block.2",
}
AUTOENCODER = {
    "mid_block.resnets.0": "mid.block_1",
    "mid_block.attentions.0": "mid.attn_1",
    "mid_block.resnets.1": "mid.block_2",
    "conv_norm_out": "norm_out",
    "conv_shortcut": "nin_shortcut",
    "group_norm": "norm",
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "proj_out",
}


def _renamed(key, table):
    for ours, theirs in table.items():
        key = re.sub(rf"(^|(?<=\.)){re.escape(ours)}(?=\.)", theirs, key)
    return key


def _unet_key(key, blocks=2, layers=1):
    """input_blocks and output_blocks number layers and resamplers of all blocks in one row."""
    if found := re.match(r"(down|up)_blocks\.(\d)\.(resnets|attentions|downsamplers|upsamplers)\.(\d)\.", key):
        way, i, kind, j = found[1], int(found[2]), found[3], int(found[4])
        rest = key[found.end() :]
        if kind == "downsamplers":
            return f"input_blocks.{1 + i * (layers + 1) + layers}.0.op.{rest.removeprefix('conv.')}"
        if kind == "upsamplers":
            return f"output_blocks.{i * (layers + 1) + layers}.{2 if 'Cross' in UP[i] else 1}.{rest}"
        row = 1 + i * (layers + 1) + j if way == "down" else i * (layers + 1) + j
        rest = _renamed(rest, RESNET) if kind == "resnets" else rest
        return f"{'input' if way == 'down' else 'output'}_blocks.{row}.{int(kind == 'attentions')}.{rest}"
    key = _renamed(key, UNET)
    return _renamed(key, RESNET) if key.startswith(("middle_block.0", "middle_block.2")) else key


UP = ("UpBlock2D", "CrossAttnUpBlock2D")


def _vae_key(key, blocks=2):
    if found := re.search(r"(down|up)_blocks\.(\d)\.(resnets|downsamplers|upsamplers)\.(\d)\.", key):
        way, i = found[1], int(found[2])
        number = i if way == "down" else blocks - 1 - i
        inner = f"block.{found[4]}." if found[3] == "resnets" else f"{way}sample."
        key = f"{key[: found.start()]}{way}.{number}.{inner}{key[found.end() :]}"
    return _renamed(key, AUTOENCODER)


def write_single(pipeline, file):
    """A StableDiffusionPipeline's weights as one safetensors file -> the file."""
    from safetensors.torch import save_file

    flat = {f"model.diffusion_model.{_unet_key(k)}": v for k, v in pipeline.unet.state_dict().items()}
    for key, value in pipeline.vae.state_dict().items():
        name = _vae_key(key)
        linear = ".attn_1." in name and ".norm." not in name and name.endswith("weight")
        flat[f"first_stage_model.{name}"] = value[:, :, None, None] if linear else value  # convolutions of one pixel
    for key, value in pipeline.text_encoder.state_dict().items():
        flat[f"cond_stage_model.transformer.text_model.{key.removeprefix('text_model.')}"] = value
    save_file({k: v.contiguous() for k, v in flat.items()}, file)
    return file
