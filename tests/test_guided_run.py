"""Guidance and held-out rows as a person meets them: words, commands and run directories."""

import json
import os
import re
import signal

import numpy as np
import pytest
import tiny_pipelines
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from fedprior import assemble, nets, probe
from fedprior.cli import app
from fedprior.config import Experiment, from_toml, override, to_toml
from fedprior.data import digits
from fedprior.data.validation import hold_out
from fedprior.errors import UsageError, UserError
from fedprior.evaluate import embed, evaluate
from fedprior.guide import FedDifRC
from fedprior.net import Net
from fedprior.plan import plan
from fedprior.priors import embedded
from fedprior.recipes import FEDDIFRC_ABLATION, RECIPES
from fedprior.run import run


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    return tmp_path_factory.mktemp("described")


@pytest.fixture(autouse=True)
def one_cache(own_cache, described, monkeypatch):
    """What one test describes, the next finds."""
    monkeypatch.setenv("FEDPRIOR_CACHE", str(described))


@pytest.fixture
def empty_cache(one_cache, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDPRIOR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


QUICK = ("rounds=2", "steps=3", "clients=6", "cohort=3", "guide=feddifrc", "guide.levels=2")


def experiment(*words):
    return override(Experiment(), [*QUICK, *words])


def fedprior(*words):
    return CliRunner().invoke(app, list(words), catch_exceptions=False)


# words
def test_method_feddifrc_is_fedavg_with_a_guide():
    assert override(Experiment(), ["method=feddifrc"]) == override(Experiment(), ["guide=feddifrc"])
    assert override(Experiment(), ["guide.tdcl=0.5", "method=feddifrc"]).guide == FedDifRC(tdcl=0.5)


def test_a_guided_experiment_survives_a_toml_file(tmp_path):
    words = ["guide=feddifrc", "guide.levels=2,4", "guide.size=64", "guide.labels=false", "validation=0.25"]
    e = override(Experiment(), words)
    (tmp_path / "e.toml").write_text(to_toml(e))
    assert from_toml(tmp_path / "e.toml") == e
    plain = override(e, ["guide=none"])
    (tmp_path / "plain.toml").write_text(to_toml(plain))
    assert from_toml(tmp_path / "plain.toml", base=e) == plain


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["guide=feddifrc", "prior=none"], "guide needs a prior; name one with prior=, or say guide=none"),
        (["guide=moon"], "unknown guide 'moon'"),
        (["guide=feddifrc", "guide.temprature=1"], "did you mean guide.temperature"),
        (["guide=feddifrc", "guide.levels=5"], "guide.levels must be different numbers from 1 to 4"),
        (["guide=feddifrc", "guide.labels=false", "method=moon"], "method=moon has a loss or net of its own"),
        (["guide=feddifrc", "guide.labels=false", "bn_stats=local"], "bn_stats=local does not go with it"),
        (
            ["guide=feddifrc", "method=scaffold", "method.option=I", "method.mode=pre"],
            "use method.option=II with guide=",
        ),
        (["guide=feddifrc", "guide.labels=false", "guide.tdcl=0", "guide.ndcr=0"], "one must be above 0"),
        (["guide=feddifrc", "guide.labels=false", "guide.negatives=300"], "guide.negatives must be at most 200"),
        (["guide=feddifrc", "guide.levels=²"], "guide.levels must be whole numbers with commas"),
        (["guide=feddifrc", "guide.encoder=clip"], "guide.encoder has no part in guide.condition=static"),
        (["method=feddifrc", "guide=none"], "with guide=none say method=fedavg"),
        (["method=fedifrc"], "feddifrc"),
        (["guide.tdcl=2"], "choose a guide first, e.g. guide=feddifrc"),
        (["validation=1"], "validation is a share of the rows from 0 to below 1, not 1.0"),
    ],
)
def test_a_wrong_word_is_answered_with_the_remedy(words, says):
    with pytest.raises(UsageError, match=re.escape(says)):
        override(Experiment(), words)


def test_the_papers_recipes_are_guided_and_the_rows_of_their_tables_are_not():
    for data in ("cifar10", "cifar100", "office_caltech10", "pacs", "digits_domains"):
        assert isinstance(RECIPES[f"feddifrc/{data}"]().guide, FedDifRC)
    rows = [RECIPES[name]() for name in RECIPES if name.startswith("feddifrc/cifar") and name.count("/") == 2]
    assert len(rows) > 10
    assert all(e.guide is None for e in rows)
    base, plain = RECIPES["feddifrc/cifar10"](), RECIPES["feddifrc/cifar10/fedavg"]()
    assert override(base, ["guide=none"]) == plain
    assert override(RECIPES["feddifrc/cifar10/moon"](), ["guide=feddifrc"]).guide == base.guide  # the prior is there


def test_every_arm_of_the_ablation_is_an_experiment():
    for family, words in FEDDIFRC_ABLATION.values():
        assert family in ("", "tdcl", "ndcr", "both", "random", "text")
        override(Experiment(), ["guide=feddifrc", *words])


# held-out rows
def test_each_client_holds_out_its_share_and_the_test_set_is_not_touched():
    plain = assemble.split(override(Experiment(), ["partition.alpha=0.5"])).federation
    held = hold_out(plain, 0.3, seed=4)
    test = set(held.test["id"].tolist())
    seen: set[int] = set()
    for before, after in zip(plain.clients, held.clients, strict=True):
        gone = set(before.tolist()) - set(after.tolist())
        assert set(after.tolist()) <= set(before.tolist())
        assert len(gone) == min(round(0.3 * len(before)), max(0, len(before) - 1))
        seen |= set(plain.table["id"][sorted(gone)].tolist())
    assert seen == test
    assert not test & set(digits.test()["id"].tolist())
    assert not test & {int(i) for rows in held.clients for i in held.table["id"][rows]}
    assert torch.equal(hold_out(plain, 0.3, seed=4).test["id"], held.test["id"])
    assert not torch.equal(hold_out(plain, 0.3, seed=5).test["id"], held.test["id"])


def test_a_client_keeps_its_only_row_and_nothing_held_out_is_said_at_once():
    data = assemble.split(override(Experiment(), ["clients=600", "cohort=5", "partition=iid"])).federation
    assert all(len(rows) == 1 for rows in hold_out(data, 0.5, seed=0).clients)
    with pytest.raises(UserError, match=r"validation=0.5 holds no row out"):
        assemble.split(override(Experiment(), ["clients=600", "cohort=5", "partition=iid", "validation=0.5"]))


def test_a_run_with_validation_is_judged_on_held_out_rows_and_says_so(tmp_path):
    words = ["rounds=1", "steps=2", "clients=6", "cohort=3", "validation=0.3", "partition=iid"]
    e = override(Experiment(), words)
    outcome = run(e, tmp_path)
    assert outcome.result["judged_on"] == "validation"
    data = assemble.split(e).federation
    weights = load_file(tmp_path / "digits-fedavg" / "model.safetensors")
    net = Net(nets.build("cnn", 10, size=(16, 16), seed=0))
    own = {"params": weights, "buffers": {}}
    assert evaluate(net, own, data.test, 10).accuracy == outcome.result["last"]
    assert run(override(e, ["validation=0"]), tmp_path).result["judged_on"] == "test"
    shown = fedprior("run", *words, "--runs", str(tmp_path / "cli"))
    assert "Accuracy on held-out rows of clients" in " ".join(shown.stdout.split())
    page = (tmp_path / "digits-fedavg" / "report.html").read_text()
    assert "held out of each client" in page


# commands
def test_describing_beforehand_leaves_nothing_to_describe(empty_cache):
    first = fedprior("describe", *QUICK, "--json")
    assert json.loads(first.stdout.splitlines()[-1])["described"] == 600
    again = json.loads(fedprior("describe", *QUICK, "seed=3", "partition=iid", "--json").stdout.splitlines()[-1])
    assert again["described"] == 0  # the same images, however they are split
    assert again["width"] == 40
    assert again["prompts"] == 11


def test_there_may_be_nothing_to_describe():
    for words, says in (
        (["guide=none"], "nothing to describe with guide=none"),
        (["guide=feddifrc", "guide.condition=dynamic"], "described as training goes on"),
    ):
        with pytest.raises(UsageError, match=says):
            fedprior("describe", *words)


def test_the_plan_tells_images_passes_and_disk(empty_cache):
    e = experiment()
    asked = plan(e, calibrate=False)["descriptors"]
    assert asked["images"] == 600
    assert asked["prompts"] == 11
    assert asked["passes"] == 6600
    fedprior("describe", *QUICK)
    files = list(empty_cache.glob("descriptors/*/level-2-40/*.safetensors"))
    written = sum(f.stat().st_size for f in files) / 1e6
    assert asked["disk_MB"] == pytest.approx(written, rel=0.1)  # keys and headers come on top
    after = plan(e, calibrate=False)["descriptors"]
    assert (after["images"], after["stored"], after["passes"]) == (0, 600, 0)
    more = plan(override(e, ["balance=max"]), calibrate=False)
    assert more["descriptors"]["images"] == more["images"] > 0

    def passes(*words):
        return plan(override(e, ["guide.condition=dynamic", *words]), calibrate=False)["descriptors"]["passes"]

    assert passes() == 2 * 3 * 600 * 11 / 6  # rounds x cohort x mean rows x prompts
    assert passes("method=centralised") == 2 * 600 * 11  # everything, in each round
    assert passes("balance=max") == 2 * 3 * (600 + more["rows"]) * 11 / 6  # rows, not images: each client its own
    assert passes("guide.refresh_rounds=2", "cohort=6", "rounds=4") == 4 * 600 * 11 / 2
    kept = plan(override(e, ["guide.condition=dynamic", "guide.refresh_rounds=2"]), calibrate=False)["state_MB"]
    assert kept == pytest.approx(600 * 11 * 40 * 2 / 1e6)
    timed = plan(e)
    assert timed["description_seconds"] == 0
    assert timed["seconds"] >= timed["training_seconds"]


def test_a_plan_without_its_prior_says_why_and_tells_the_rest():
    result = plan(experiment("prior=nobody/nothing"), calibrate=True)
    assert "nobody/nothing" in result["note"]
    assert result["MB"] > 0
    assert result["descriptors"] == {"images": 600, "stored": 0, "prompts": 11, "passes": 6600, "disk_MB": None}
    shown = " ".join(fedprior("plan", *QUICK, "prior=nobody/nothing").stdout.split())
    assert "6600 passes of the UNet would describe images under 11 prompts each (600 images; 0 are there)" in shown
    with pytest.raises(UsageError, match=r"guide.timestep must be from 0 to 999"):
        plan(experiment("guide.timestep=5000"), calibrate=False)


@pytest.mark.parametrize("layout", ["PixArtSigmaPipeline", "StableDiffusion3Pipeline"])
def test_a_checkpoint_without_a_unet_ends_with_one_line_that_says_what_is_supported(tmp_path, layout):
    tiny_pipelines.write(tmp_path / "dit", layout)
    with pytest.raises(
        UsageError, match=r"guidance reads the UNet of Stable Diffusion 1.x and 2.x layouts, and .*dit"
    ) as e:
        run(experiment(f"prior={tmp_path / 'dit'}"), tmp_path / "runs")
    assert "\n" not in str(e.value)
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").iterdir())


# runs
def test_a_guided_run_is_named_so_and_ends_with_the_same_bytes_however_it_came_about(tmp_path):
    a = run(experiment(), tmp_path / "a")
    b = run(experiment("rounds=1", "name=b"), tmp_path)
    b = run(experiment("rounds=2", "name=b"), tmp_path)  # goes on; descriptors are found
    assert a.result["weights"] == b.result["weights"]
    assert (tmp_path / "a" / "digits-fedavg+feddifrc").is_dir()
    assert a.result["weights"] != run(experiment("guide.tdcl=0.5"), tmp_path / "c").result["weights"]
    both = run(experiment("balance=max", "balance.pool_size=2", "method=fedprox"), tmp_path / "d")
    assert both.result["directory"].endswith("digits-fedprox+max+feddifrc")


def test_a_run_that_is_killed_while_images_are_described_goes_on(tmp_path, empty_cache, monkeypatch):
    monkeypatch.setattr("fedprior.prepare.describe.BLOCK", 128)
    words = ("guide.tdcl=0", "name=killed")
    child = os.fork()
    if not child:
        from fedprior.prepare.describe import LevelStore

        write, done = LevelStore.write, []

        def dying(self, keys, values):
            write(self, keys, values)
            done.append(len(keys))
            if len(done) == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        LevelStore.write = dying
        run(experiment(*words), tmp_path)
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert plan(experiment(*words), calibrate=False)["descriptors"]["stored"] == 2 * 128
    killed = run(experiment(*words), tmp_path)
    monkeypatch.setenv("FEDPRIOR_CACHE", str(tmp_path / "fresh"))
    assert killed.result["weights"] == run(experiment(*words, "name=whole"), tmp_path).result["weights"]


def test_without_labels_the_accuracy_is_that_of_a_linear_probe_and_neighbours_stand_beside_it(tmp_path):
    e = experiment("guide.labels=false", "partition=iid", "validation=0.2")
    outcome = run(e, tmp_path)
    data = assemble.split(e).federation
    weights = load_file(tmp_path / "digits-fedavg+feddifrc" / "model.safetensors")
    net = Net(nets.build("cnn", 10, size=(16, 16), seed=0))
    own = {"params": {k: v for k, v in weights.items() if not k.startswith("guide.")}, "buffers": {}}
    held = torch.cat(data.clients).unique()
    bank = {k: v[held] for k, v in data.table.items()}
    z, asked = embed(net, own, bank), embed(net, own, data.test)
    label = bank["label"]
    assert outcome.result["last"] == pytest.approx(probe.linear_probe(z, label, asked, data.test["label"]), abs=1 / 119)
    assert outcome.curve[-1]["knn"] == pytest.approx(probe.knn(z, label, asked, data.test["label"]))
    assert evaluate(net, own, data.test, 10).accuracy == outcome.result["last"]  # the saved model has the probe
    assert outcome.curve[0]["knn"] != outcome.curve[1]["knn"] or outcome.curve[0]["loss"] != outcome.curve[1]["loss"]


@pytest.mark.parametrize(
    "method", ["fedbn", "fedproto", "fednh", "moon", "local", "centralised", "gptfl", "ccvr", "feddyn"]
)
def test_a_guide_goes_with_methods_that_keep_or_change_parts_of_the_net(tmp_path, method):
    outcome = run(experiment(f"method={method}", "rounds=1", "guide.tdcl=0"), tmp_path)
    assert np.isfinite(outcome.curve[-1]["train_loss"])


def test_runs_that_are_judged_on_different_rows_are_not_reported_together(tmp_path):
    words = ["rounds=1", "steps=1", "clients=6", "cohort=3", "partition=iid"]
    folders = [
        run(override(Experiment(), [*words, *more]), tmp_path).result["directory"] for more in ([], ["validation=0.3"])
    ]
    with pytest.raises(UserError, match="report them apart"):
        fedprior("report", *folders)


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDPRIOR_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"cannot write the cache .* set FEDPRIOR_CACHE to a folder with space"):
        fedprior("describe", *QUICK)


def test_an_encoder_that_is_no_clip_model_is_refused(tmp_path):
    from transformers import ViTConfig, ViTModel

    small = ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=16)
    ViTModel(small).save_pretrained(tmp_path / "vit")
    with pytest.raises(UserError, match=r"guide.encoder=.*vit .*CLIP"):
        run(experiment("guide.condition=frozen_encoder", f"guide.encoder={tmp_path / 'vit'}"), tmp_path / "runs")


def test_clients_that_hold_the_same_pool_images_share_what_is_known_of_them():
    data = assemble.split(experiment()).federation
    guide = assemble.build_guide(experiment(), data, torch.device("cpu"), embedded.load("digits"))
    one, two = guide.describer.items([data.shard(0), data.shard(0)])
    assert all(a is b for a, b in zip(one, two, strict=True))
