"""FedDifRC's formulas in float64 numpy, written from the equations and tables and not from the package.

Rows are samples. z [B, d] is the classifier's feature, pos [B, d] the diffusion feature under the true class' prompt,
neg[i] [n_i, d] those of the same sample under other prompts. Below stand the small checkpoints that its tests read.
"""

import numpy as np

EPS = 1e-6


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def average_distance(z, f):
    """U(F), the mean over the batch of |z_a/|z_a| - F/|F||, at least 1e-6. z [B, d], f [..., d] -> [...]"""
    gaps = [np.linalg.norm(unit(a) - unit(f), axis=-1) for a in z]
    return np.maximum(EPS, np.mean(gaps, axis=0))


def similarity(z, f, norm="none", batch=None):
    """Cosines of one z [d] with f [n, d], over U(f) where wanted; `batch` holds the rows that U averages: [n]"""
    s = unit(f) @ unit(z)
    return s / average_distance(batch, f) if norm == "mean_distance" else s


def tdcl(z, pos, neg, tau, *, reduction="sample", norm="none", official=False, batch=None):
    """-log(exp(s+/tau) / (exp(s+/tau) + sum exp(s-/tau))), of each sample and then the mean, or once of a batch's sums.

    z and pos [B, d], neg a list of B arrays [n_i, d]. `official` pairs as the released code: anchors tiled (row j has
    anchor j mod B), negatives sample-major (row j has negative j mod n of sample j // n). `batch` [B, d] stands in for
    z in U, which carries no gradient.
    """
    batch, rows = z if batch is None else batch, range(len(z))
    p = np.array([np.exp(similarity(z[i], pos[i : i + 1], norm, batch)[0] / tau) for i in rows])
    q = np.zeros(len(z))
    if official:
        n = len(neg[0])
        for j in range(len(z) * n):
            met = neg[j // n][j % n]
            q[j % len(z)] += np.exp(similarity(z[j % len(z)], met[None], norm, batch)[0] / tau)
    else:
        for i in rows:
            q[i] = np.exp(similarity(z[i], neg[i], norm, batch) / tau).sum()
    if reduction == "batch_ratio":
        return -np.log(p.sum() / (p.sum() + q.sum()))
    return np.mean(np.log(1 + q / p))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def ndcr(z, h, form="l2_normalized"):
    """The distance of z to the denoising feature h, both [B, d]; mean over the batch."""
    u, v = unit(z), unit(h)
    if form == "l2_normalized":
        each = ((u - v) ** 2).sum(-1)
    elif form == "l2_raw":
        each = ((z - h) ** 2).sum(-1)
    elif form == "mse":
        each = ((z - h) ** 2).mean(-1)
    elif form == "cosine":
        each = 1 - (u * v).sum(-1)
    elif form == "kl_softmax":  # the target's softmax against the feature's
        each = (softmax(v) * (np.log(softmax(v)) - np.log(softmax(u)))).sum(-1)
    else:
        raise KeyError(form)
    return each.mean()


def slope(f, x, step=1e-6):
    """df/dx by central differences."""
    out = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        d = np.zeros_like(x)
        d[i] = step
        out[i] = (f(x + d) - f(x - d)) / (2 * step)
    return out


def axes(tokens, m):
    """(mean [C], axes [m, C]) of tokens [N, C]: the covariance's eigenvectors with the largest eigenvalues."""
    mean = tokens.mean(0)
    values, vectors = np.linalg.eigh((tokens - mean).T @ (tokens - mean) / len(tokens))
    return mean, vectors[:, np.argsort(values)[::-1][:m]].T


def pooled(tokens, mean, directions, how="rms"):
    """One level's part of a descriptor: tokens [positions, C] -> [m]."""
    y = (tokens - mean) @ directions.T
    if how == "mean":
        return y.mean(0)
    total = np.sqrt((y**2).sum(0))
    return total / np.sqrt(len(tokens)) if how == "rms" else total


def descriptor(maps, bases, how="rms"):
    """Maps {level: [C, h, w]} and {level: (mean, axes)} -> the levels' parts, joined from the lowest level up."""
    return np.concatenate([pooled(maps[k].reshape(len(maps[k]), -1).T, *bases[k], how) for k in sorted(maps)])


def alphas_cumprod(steps=1000, first=0.00085, last=0.012):
    """The scaled-linear schedule of Stable Diffusion."""
    return np.cumprod(1 - np.linspace(first**0.5, last**0.5, steps) ** 2)


def noised(latent, noise, t):
    """x_t = sqrt(alpha_bar_t) x_0 + sqrt(1 - alpha_bar_t) epsilon"""
    a = alphas_cumprod()[t]
    return np.sqrt(a) * latent + np.sqrt(1 - a) * noise


def condition(h, w, token_norm, gamma):
    """c = gamma W h / |W h| times the mean token norm. h [D], w [D, width]"""
    c = h @ w
    return gamma * c / np.linalg.norm(c) * token_norm


# Small checkpoints ----------------------------------------------------------------------------------------


WIDTHS = {1: 32, 2: 24, 3: 16, 4: 8}  # of their up blocks' outputs
LAYOUTS = {  # prediction, attention_head_dim, use_linear_projection, width of the text
    "1.x": ("epsilon", 8, False, 16),
    "2.x": ("v_prediction", [1, 2, 3, 4], True, 40),
}


def parts(layout, texts):
    """A random VAE, text encoder, tokenizer, UNet and scheduler as in Stable Diffusion, with small widths: images of
    16 pixels, latents of 8. Prompts speak louder than untrained weights would let them."""
    import torch
    from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    from fedprior.priors import architecture

    prediction, heads, linear, hidden = LAYOUTS[layout]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tokenizer = architecture.build_tokenizer(texts)
        vae = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(8, 16),
            latent_channels=4,
            norm_num_groups=8,
            sample_size=16,
            scaling_factor=0.18215,
        )
        text_encoder = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=len(tokenizer),
                hidden_size=hidden,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                max_position_embeddings=architecture.TOKENS,
                bos_token_id=tokenizer.bos_token_id,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
        )
        unet = UNet2DConditionModel(
            sample_size=8,
            block_out_channels=tuple(reversed(WIDTHS.values())),
            layers_per_block=1,
            cross_attention_dim=hidden,
            attention_head_dim=heads,
            use_linear_projection=linear,
            norm_num_groups=8,
        )
        for name, weight in unet.named_parameters():
            if "attn2.to_out" in name:
                weight.data *= 4
    scheduler = DDIMScheduler(
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        clip_sample=False,
        steps_offset=1,
        prediction_type=prediction,
    )
    return vae, text_encoder, tokenizer, unet, scheduler


def checkpoint(folder, layout="1.x", texts=("a photo of a visual similar object ant bee cat dog",)):
    """Writes such a checkpoint to a folder -> the folder."""
    from fedprior.priors import architecture

    architecture.build_pipeline(*parts(layout, texts)).save_pretrained(folder, safe_serialization=True)
    return folder
