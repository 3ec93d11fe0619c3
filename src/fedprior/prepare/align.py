"""Real rows brought closer to the prior's images.

Where a class is real at one client and synthetic at another, a classifier can learn "sharp: my own class, smooth: a
missing one" in place of the classes. Real rows that went through the same autoencoder as the synthetic ones take that
clue away, at the price of some detail.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fedprior import seeds, store
from fedprior.data.table import Federation
from fedprior.errors import UserError
from fedprior.prepare.balance import Align
from fedprior.prepare.images import NO_DOMAIN, Update, Wording
from fedprior.priors.base import Prior

FORMAT = "fedprior aligned images 1"  # enters every key
CALL = 256  # images asked of the prior at a time


def align(
    federation: Federation,
    prior: Prior,
    how: Align,
    strength: float,
    wording: Wording,
    *,
    seed: int,
    progress: Update | None = None,
) -> Federation:
    """The federation with real training rows aligned; ids, labels and the test table stay as they are.

    `strength` in (0, 1] is the share of the noise schedule with `how="noised"`; a row's prompt is its class's (and
    domain's) in the first template. A client's images are kept in the cache by their content, so that what was
    interrupted goes on.
    """
    image, label = federation.table["image"].clone(), federation.table["label"]
    domain = federation.table.get("domain", torch.full_like(label, NO_DOMAIN)) if wording.domains else label * 0 - 1
    sentence = lambda y, d: wording.prompt(y, wording.templates[0], d)
    wanted = [_chosen(federation, k, how, seed) for k in range(len(federation.clients))]
    total, done = sum(map(len, wanted)), 0
    for rows in wanted:
        if progress:
            progress(done, total)
        if len(rows):
            image[rows] = _aligned(
                prior, image[rows], list(map(sentence, label[rows].tolist(), domain[rows].tolist())), how, strength
            )
        done += len(rows)
    if progress:
        progress(done, total)
    return replace(federation, table={**federation.table, "image": image})


def _chosen(federation: Federation, client: int, how: Align, seed: int) -> Tensor:
    """The client's rows to align, int64 [n], ascending."""
    rows = federation.clients[client]
    rows = rows[~federation.table["synthetic"][rows]].sort().values
    if how == "half":
        order = torch.from_numpy(seeds.stream(seed, "align", client).permutation(len(rows)))
        rows = rows[order[: len(rows) // 2].sort().values]
    return rows


def _aligned(prior: Prior, images: Tensor, prompts: Sequence[str], how: Align, strength: float) -> Tensor:
    """uint8 [n, 3, H, W] from the cache, or made now."""
    noised = how == "noised"
    words = [f"{strength:g}", store.digest(*prompts)] if noised else []
    settings = prior.settings if noised else {"dtype": prior.settings["dtype"], "size": prior.size}
    key = store.digest(FORMAT, prior.revision, repr(sorted(settings.items())), store.raw_bytes(images), *words)
    path = store.cache_folder() / "aligned" / f"{key}.safetensors"

    def build() -> Tensor:
        parts = []
        for first in range(0, len(images), CALL):
            part = images[first : first + CALL]
            if noised:
                own = [seeds.number(int(store.digest(store.raw_bytes(x))[:15], 16), "align noise") for x in part]
                parts.append(prior.redraw(part, prompts[first : first + CALL], own, strength))
            else:
                parts.append(prior.roundtrip(part))
        return torch.cat(parts)

    def read(path: Path) -> Tensor:
        image: Tensor = store.read_tree(path)[0]["image"]
        return image

    made, built = store.read_or_rebuild(path, read, build)
    if built:
        try:
            store.write_tree(path, {"image": made})
        except OSError as error:
            raise UserError(f"cannot write the cache ({error}); set FEDPRIOR_CACHE to a folder with space") from None
    return made
