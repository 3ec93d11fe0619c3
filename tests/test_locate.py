"""Checkpoints on disk and on a hub: what is found, what is refused, what enters the digest."""

import json
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest
import tiny_pipelines as tiny
import torch
from safetensors.torch import load_file, save_file

from fedprior.errors import UserError
from fedprior.priors import embedded, families, locate
from fedprior.priors.diffusion import DiffusionPrior

WORDS = tiny.WORDS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp("prior") / "sd", "StableDiffusionPipeline")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """The same weights, each part cut into several files."""
    out = tmp_path_factory.mktemp("prior") / "sharded"
    pipeline = tiny.build("StableDiffusionPipeline")
    with tiny.quiet():
        pipeline.save_pretrained(out, safe_serialization=True, max_shard_size="9KB")
    return out


@pytest.fixture
def copy(folder, tmp_path):
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def load(source, **options):
    return DiffusionPrior.from_pretrained(source, **{"steps": 1} | options)


def images(prior):
    return prior.generate(WORDS, range(3), (16, 16))


def refusal(source, **options):
    with pytest.raises(UserError) as error:
        load(source, **options)
    text = str(error.value)
    assert "\n" not in text
    return text


def rename_weights(folder, parts, suffix):
    """Gives the weights of these parts a variant's name."""
    for part in parts:
        for file in (folder / part).glob("*.safetensors"):
            file.rename(file.with_name(file.name.replace(".safetensors", f".{suffix}.safetensors")))


# Folders -------------------------------------------------------------------------------------------------


def test_shards_load_and_enter_the_digest(folder, sharded):
    assert len(list((sharded / "unet").glob("*.safetensors"))) > 2
    assert torch.equal(images(load(sharded)), images(load(folder)))
    shard = sorted((sharded / "unet").glob("*.safetensors"))[1]
    before, data = locate.folder_digest(sharded), shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert locate.folder_digest(sharded) != before
    shard.write_bytes(data)
    assert locate.folder_digest(sharded) == before


@pytest.mark.parametrize("parts", [["unet"], ["unet", "vae", "text_encoder"]])
def test_weights_that_are_there_as_a_variant_only_load_and_enter_the_digest(folder, copy, parts):
    rename_weights(copy, parts, "fp16")
    assert locate.find(copy).variant == "fp16"
    assert torch.equal(images(load(copy)), images(load(folder)))
    before = locate.folder_digest(copy)
    file = copy / "unet" / "diffusion_pytorch_model.fp16.safetensors"
    weights = load_file(file)
    weights["conv_in.bias"] += 1
    save_file(weights, file, metadata={"format": "pt"})
    assert locate.folder_digest(copy) != before
    assert not torch.equal(images(load(copy)), images(load(folder)))


def test_plain_weights_win_over_a_variant_beside_them(folder, copy):
    file = copy / "unet" / "diffusion_pytorch_model.safetensors"
    save_file({k: v * 0 for k, v in load_file(file).items()}, file.with_suffix(".fp16.safetensors"))
    assert locate.find(copy).variant is None
    assert torch.equal(images(load(copy)), images(load(folder)))


def test_a_missing_shard_is_named(sharded, tmp_path):
    copy = Path(shutil.copytree(sharded, tmp_path / "copy"))
    shard = sorted((copy / "unet").glob("*.safetensors"))[1]
    shard.unlink()
    assert f"unet is half downloaded ({shard.name} is missing)" in refusal(copy)
    for other in (copy / "unet").glob("*.safetensors"):
        other.unlink()
    assert "unet is half downloaded (diffusion_pytorch_model-00001-of" in refusal(copy)


def test_an_index_alone_of_another_precision_is_no_half_download(copy):
    index = {"weight_map": {"conv_in.weight": "diffusion_pytorch_model.fp16-00001-of-00002.safetensors"}}
    (copy / "unet" / "diffusion_pytorch_model.safetensors.index.fp16.json").write_text(json.dumps(index))
    assert images(load(copy)).shape == (3, 3, 16, 16)
    (copy / "unet" / "diffusion_pytorch_model.safetensors.index.fp16.json").write_text("{")
    assert "index.fp16.json is damaged" in refusal(copy)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_weights_that_are_cut_off_are_named_before_anything_loads(copy, keep, monkeypatch):
    file = copy / "vae" / "diffusion_pytorch_model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:keep])
    monkeypatch.setattr("fedprior.priors.pipelines.load", lambda *_: pytest.fail("loads"))
    text = refusal(copy)
    assert "vae/diffusion_pytorch_model.safetensors is " in text
    assert text.endswith("fetch or write it again")
    if keep == -1:
        assert f"cut off: {len(data) - 1} of {len(data)} bytes" in text


def test_a_pointer_of_git_lfs_and_a_download_that_did_not_finish_say_so(copy):
    file = copy / "unet" / "diffusion_pytorch_model.safetensors"
    data = file.read_bytes()
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n")
    assert "is a git LFS pointer; run git lfs pull" in refusal(copy)
    file.write_bytes(data)
    left = copy / ".cache" / "huggingface" / "download" / "unet" / "x.incomplete"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"")
    assert "did not finish (x.incomplete is left)" in refusal(copy)


# Single files --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    file = tmp_path_factory.mktemp("single") / "model.safetensors"
    return tiny.write_single(tiny.build("StableDiffusionPipeline"), file)


def configs(folder, out):
    """The folder without its weights."""
    return Path(shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors")))


def test_a_single_file_with_its_base_models_configuration_is_the_folder(folder, single, tmp_path):
    base = configs(folder, tmp_path / "base")
    prior, whole = load(single, config=str(base)), load(folder)
    for part in ("unet", "vae", "text_encoder"):
        ours, theirs = (getattr(p.pipeline, part).state_dict() for p in (prior, whole))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[k], theirs[k]) for k in ours)
    assert torch.equal(images(prior), images(whole))
    assert prior.revision == load(shutil.copy(single, tmp_path / "b.safetensors"), config=str(base)).revision
    changed = tmp_path / "c.safetensors"
    changed.write_bytes(single.read_bytes()[:-1] + b"\0")
    assert load(changed, config=str(base)).revision != prior.revision
    (base / "scheduler" / "scheduler_config.json").write_text(
        (base / "scheduler" / "scheduler_config.json").read_text().replace("0.012", "0.013")
    )
    assert load(single, config=str(base)).revision != prior.revision


def test_a_few_step_single_file_is_told_by_its_name(folder, single, tmp_path):
    file = shutil.copy(single, tmp_path / "sdxl_lightning_8step.safetensors")
    prior = DiffusionPrior.from_pretrained(file, config=str(folder))
    assert (prior.steps, prior.guidance, prior.settings["scheduler"]) == (8, 0.0, "EulerDiscreteScheduler")


def test_a_file_with_a_denoiser_alone_takes_the_place_of_its_base_models(folder, tmp_path):
    other = tiny.build("StableDiffusionPipeline").unet
    with torch.no_grad():
        other.conv_out.bias += 0.5
    file = tmp_path / "sdxl_lightning_4step_unet.safetensors"
    save_file(other.state_dict(), file)
    prior = DiffusionPrior.from_pretrained(file, config=str(folder))
    weights, base = prior.pipeline.unet.state_dict(), load(folder).pipeline.unet.state_dict()
    assert torch.equal(weights["conv_out.bias"], base["conv_out.bias"] + 0.5)
    assert torch.equal(weights["conv_in.weight"], base["conv_in.weight"])
    assert prior.steps == 4
    assert prior.revision != load(folder).revision
    assert "holds a denoiser alone; name the whole checkpoint" in refusal(file)
    xl = tiny.write(tmp_path / "xl", "StableDiffusionXLPipeline")
    assert "is no denoiser for" in refusal(file, config=str(xl))
    assert "holds no weights" in refusal(file, config=str(configs(folder, tmp_path / "empty")))


def test_what_a_single_file_lacks_is_one_clear_line(folder, single, tmp_path):
    for options in ({}, {"config": "sdxl"}, {"config": "acme/base", "offline": True}):
        text = refusal(single, **options)
        assert "model.safetensors needs the configuration and tokenizer of its base model" in text
        assert "offline mode is on and it is not in the cache" in text
        assert text.endswith("prior.config=")
        assert options.get("config", "stable-diffusion-v1-5/stable-diffusion-v1-5") in text
    pickled = tmp_path / "model.ckpt"
    pickled.write_bytes(b"x")
    assert "is no safetensors file" in refusal(pickled)
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(single.read_bytes()[:-5])
    assert "is cut off" in refusal(cut, config=str(folder))
    assert "prior.config names the base model of a single file" in refusal(folder, config=str(folder))
    pixart = tiny.write(tmp_path / "pixart", "PixArtAlphaPipeline")
    assert "cannot be read from a single file" in refusal(single, config=str(pixart))
    assert "no file 'nothing.safetensors'" in refusal("nothing.safetensors")
    assert "no folder" not in refusal("some/where/nothing.safetensors")


def test_a_word_that_names_a_file_here_is_a_prior(folder, single, tmp_path, monkeypatch):
    monkeypatch.chdir(single.parent)
    assert embedded.load("model.safetensors", config=str(folder)).name == "model.safetensors"


# Names ---------------------------------------------------------------------------------------------------


def test_short_names_and_moved_ids_lead_to_other_repositories():
    assert set(locate.ALIASES) == {
        *("sd1.4", "sd1.5", "sd2.1", "sd2.1-base", "sdxl", "sd-turbo", "sdxl-turbo", "lcm"),
        *("pixart-alpha", "pixart-sigma", "sd3.5", "sana"),
    }
    assert not set(locate.ALIASES.values()) & set(locate.MOVED)  # none leads to a place that was left
    assert not set(locate.MOVED.values()) & set(locate.MOVED)
    for old, new in locate.MOVED.items():
        text = refusal(old)
        assert f"it moved to {new}" in text
        assert "name a local folder" in text
    for short, where in locate.ALIASES.items():
        assert f"no folder '{where}'" in refusal(short)


SANA = [  # files of Efficient-Large-Model/Sana_600M_512px_diffusers
    "README.md",
    "model_index.json",
    "scheduler/scheduler_config.json",
    "text_encoder/config.json",
    "text_encoder/model-00001-of-00002.safetensors",
    "text_encoder/model-00002-of-00002.safetensors",
    "text_encoder/model.fp16-00001-of-00002.safetensors",
    "text_encoder/model.fp16-00002-of-00002.safetensors",
    "text_encoder/model.safetensors.index.fp16.json",
    "text_encoder/model.safetensors.index.json",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer.model",
    "transformer/config.json",
    "transformer/diffusion_pytorch_model.safetensors",
    "vae/config.json",
    "vae/diffusion_pytorch_model.bin",
    "vae/diffusion_pytorch_model.fp16.safetensors",
    "vae/diffusion_pytorch_model.safetensors",
    "sana.safetensors",
    "fedprior.json",
]
PARTS = ("scheduler", "text_encoder", "tokenizer", "transformer", "vae")


def test_of_a_repository_only_what_the_pipeline_loads_is_fetched():
    index = {"_class_name": "SanaPipeline"} | {part: ["library", "Class"] for part in PARTS}
    common = {n for n in SANA if n.endswith((".json", ".model")) and ".index." not in n}
    whole = {n for n in SANA if n.endswith(".safetensors") and "fp16" not in n} - {"sana.safetensors"}
    plain = common | whole | {"text_encoder/model.safetensors.index.json"}
    assert set(locate._wanted(SANA, index, "fp32", False, True)) == plain
    assert set(locate._wanted(SANA, index, "fp16", False, True)) == plain  # the transformer has no half precision
    assert set(locate._wanted(SANA, index, "fp32", False, False)) == common
    both = [*SANA, "transformer/diffusion_pytorch_model.fp16.safetensors"]
    half = common | {n for n in both if n.endswith(".safetensors") and "fp16" in n}
    half |= {"text_encoder/model.safetensors.index.fp16.json"}
    assert set(locate._wanted(both, index, "fp16", False, True)) == half
    assert set(locate._wanted(both, index, "bf16", False, True)) == plain


# A hub ---------------------------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"

CLIENT = """
import json, shutil, sys
import huggingface_hub
from fedprior.errors import UserError
from fedprior.priors import locate

def attempt(*words, **options):
    try:
        found = locate.find(*words, **options)
        return {"revision": found.revision, "files": sorted(str(p.relative_to(found.folder))
                for p in found.folder.rglob("*") if p.is_file())}
    except UserError as error:
        return str(error)

room = shutil.disk_usage
shutil.disk_usage = lambda path: room(path)._replace(free=1000)
out = {"full": attempt("acme/tiny")}
shutil.disk_usage = room
out |= {
    "fetched": attempt("acme/tiny"),
    "tagged": attempt("acme/tiny", revision="v1"),
    "offline": attempt("acme/tiny", offline=True),
    "unknown": attempt("acme/nothing"),
    "strange": attempt("acme/tiny", revision="v9"),
    "gated": attempt("acme/gated"),
    "parts": attempt("acme/parts"),
    "elsewhere": attempt("acme/other", offline=True),
}
print(json.dumps(out))
"""


class Hub(BaseHTTPRequestHandler):
    """As much of a hub's interface as a download needs."""

    folder: Path

    def files(self, repository):
        if repository == "acme/parts":
            return ["unet/diffusion_pytorch_model.safetensors"]
        return sorted(p.relative_to(self.folder).as_posix() for p in self.folder.rglob("*") if p.is_file())

    def refuse(self, status, code):
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def reply(self, body, kind="application/json", **headers):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self):
        path = unquote(self.path.partition("?")[0]).strip("/").split("/")
        api = path[:2] == ["api", "models"]
        path = path[2:] if api else path
        repository, revision = "/".join(path[:2]), path[3] if len(path) > 3 else "main"
        if repository == "acme/gated":
            return self.refuse(403, "GatedRepo")
        if repository not in ("acme/tiny", "acme/parts"):
            return self.refuse(404, "RepoNotFound")
        if revision not in ("main", "v1", COMMIT):
            return self.refuse(404, "RevisionNotFound")
        if api and "tree" in path[2:3]:
            sizes = {n: (self.folder / n).stat().st_size for n in self.files(repository)}
            rows = [{"type": "file", "path": n, "size": size, "oid": n} for n, size in sizes.items()]
            return self.reply(json.dumps(rows).encode())
        if api:
            siblings = [{"rfilename": n} for n in self.files(repository)]
            return self.reply(json.dumps({"id": repository, "sha": COMMIT, "siblings": siblings}).encode())
        data = (self.folder / "/".join(path[4:])).read_bytes()
        return self.reply(data, "application/octet-stream", ETag=f'"{path[-1]}-{len(data)}"', X_Repo_Commit=COMMIT)

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


def test_a_hub_checkpoint_is_fetched_once_and_what_goes_wrong_is_one_line(folder, tmp_path):
    shown = Path(shutil.copytree(folder, tmp_path / "shown"))
    (shown / "fedprior.json").write_text('{"steps": 3}')
    (shown / "unet" / "diffusion_pytorch_model.bin").write_bytes(b"pickle")
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Hub,), {"folder": shown}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": "",
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", CLIENT], capture_output=True, text=True, env=environment, timeout=120
        )
    finally:
        server.shutdown()
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout.splitlines()[-1])
    assert "is a download of 0.0 GB" in out["full"]
    assert "HF_HOME" in out["full"]
    expected = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} | {"fedprior.json"}
    assert out["fetched"] == {"revision": COMMIT, "files": sorted(expected)}  # no pickle
    assert out["tagged"] == out["offline"] == out["fetched"]
    assert "no such repository, or it needs a login" in out["unknown"]
    assert "at revision v9: no such revision" in out["strange"]
    assert "its licence must be accepted on the hub first" in out["gated"]
    assert "acme/parts is no whole checkpoint (it has no model_index.json)" in out["parts"]
    assert "offline mode is on and it is not in the cache" in out["elsewhere"]
    assert all("\n" not in text for text in out.values() if isinstance(text, str))


def test_an_address_where_nobody_answers_is_no_network(tmp_path):
    code = "from fedprior.priors import locate; locate.find('acme/tiny')"
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert "cannot fetch it from the hub: no network, and it is not in the cache" in done.stderr


def test_a_snapshot_of_a_download_that_stopped_says_so(folder, tmp_path, monkeypatch):
    repository = tmp_path / "hub" / "models--acme--tiny"
    snapshot = Path(shutil.copytree(folder, repository / "snapshots" / COMMIT))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert locate.find("acme/tiny", offline=True).revision == COMMIT
    (repository / "blobs").mkdir()
    (repository / "blobs" / "abc.incomplete").write_bytes(b"")
    assert locate.find("acme/tiny", offline=True).revision == COMMIT  # of another file, since all are there
    next((snapshot / "unet").glob("*.safetensors")).unlink()
    assert "unet holds no weights, a download did not finish" in refusal("acme/tiny", offline=True)


def test_every_layout_can_be_named_in_a_model_index():
    import diffusers

    for layout in families.FAMILIES:
        assert hasattr(diffusers, layout)
