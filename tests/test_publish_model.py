"""`fedprior model push` against a stand-in for the hub: what goes there, and what the card says."""

import json
import re
import shutil
import tomllib
from pathlib import Path

import pytest
import yaml
from test_generate_cli import hub  # noqa: F401  (a fixture)
from typer.testing import CliRunner

from fedprior import predict, publish_model
from fedprior.cli import app
from fedprior.config import Experiment, from_toml, override
from fedprior.data import digits
from fedprior.errors import UsageError, UserError
from fedprior.run import run

WORDS = ["rounds=2", "steps=3", "clients=4", "cohort=2", "name=it"]


def call(*words):
    """-> (the JSON line, all that was printed). Raises what the command raises."""
    found = CliRunner().invoke(app, ["model", "push", *map(str, words), "--json"], catch_exceptions=False)
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout.strip().splitlines()[-1]), found.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """-> (run directory, its result, the lines of its metrics)"""
    root = tmp_path_factory.mktemp("runs")
    outcome = run(override(Experiment(), [*WORDS, "method=fedprox"]), root, report=False)
    return root / "it", outcome.result, outcome.curve


def test_everything_goes_to_a_private_model_that_loads_where_nothing_else_is(trained, hub, tmp_path):  # noqa: F811
    folder, result, curve = trained
    said, text = call(folder, "me/digits", "--license", "cc0-1.0")
    assert hub["repositories"] == [("me/digits", {"repo_type": "model", "private": True, "exist_ok": True})]
    assert set(hub["files"]) == {"README.md", "model.safetensors", "config.toml", "result.json"}
    assert said["files"] == {name: len(data) for name, data in hub["files"].items()}
    assert said["pushed"] == "https://hub/models/me/digits"
    assert "private" in text
    (tmp_path / "alone.safetensors").write_bytes(hub["files"]["model.safetensors"])
    test = digits.test()
    hits = predict.load(tmp_path / "alone.safetensors")(test["image"]).argmax(1) == test["label"]
    assert float(hits.double().mean()) == pytest.approx(curve[-1]["accuracy"])
    (tmp_path / "config.toml").write_bytes(hub["files"]["config.toml"])
    assert from_toml(tmp_path / "config.toml") == from_toml(folder / "config.toml")
    assert json.loads(hub["files"]["result.json"])["last"] == result["last"]
    call(folder, "me/digits", "--public")
    assert hub["repositories"][-1][1]["private"] is False


def test_the_card_has_the_hubs_metadata_and_the_true_numbers(trained):
    folder, result, curve = trained
    card = publish_model.card(publish_model.read(folder), "me/digits", "cc0-1.0")
    _, head, body = card.split("---\n", 2)
    meta = yaml.safe_load(head)
    assert (meta["license"], meta["library_name"], meta["metrics"]) == ("cc0-1.0", "fedprior", ["accuracy"])
    assert meta["tags"] == ["federated-learning", "fedprior", "fedprox"]
    assert "datasets" not in meta  # the digits are on no hub
    (scored,) = meta["model-index"][0]["results"]
    assert scored["metrics"][0]["value"] == result["last"] == curve[-1]["accuracy"]
    assert scored["dataset"]["split"] == "test"
    line = curve[-1]
    for words in (
        f"| last round | {100 * result['last']:.2f} |",
        f"| best round (optimistic) | {100 * result['best']:.2f} |",
        f"| clients' own mix of classes, worst | {100 * line['clients']['worst']:.2f} |",
        f"| class seven | {100 * line['per_class'][7]:.2f} |",
        f"{result['uplink_MB']:.3f} MB up",
        "fedprox (mu=",
        "No diffusion model was used.",
        'predict.load(hf_hub_download("me/digits", "model.safetensors"))',
    ):
        assert words in body
    assert "licence" not in body
    assert "has not said under which licence" in publish_model.card(publish_model.read(folder), "me/digits")


def test_the_card_says_what_the_prior_did_and_what_was_judged_on(trained):
    read = publish_model.read(trained[0])
    words = ["data=cifar10", "balance=max", "guide=feddifrc", "prior=sd1.5", "validation=0.2"]
    other = read._replace(
        experiment=override(Experiment(), words),
        result=read.result | {"synthetic_rows": 77, "judged_on": "validation"},
        last=read.last | {"per_domain": {"sketch": 0.125, "photo": None}},
    )
    card = publish_model.card(other, "me/x")
    meta = yaml.safe_load(card.split("---\n")[1])
    assert meta["datasets"] == ["uoft-cs/cifar10"]
    assert "synthetic" in meta["tags"]
    assert meta["model-index"][0]["results"][0]["dataset"]["split"] == "held-out training rows"
    assert (
        "`sd1.5` made images for clients before training (balance=max, 77 synthetic rows in all) and described" in card
    )
    assert "rows of clients that were held out of cifar10, the mean over its domains" in card
    assert "| domain sketch | 12.50 |" in card
    sites = other._replace(experiment=override(Experiment(), ["data=cifar10", "partition=sites"]))
    card = publish_model.card(sites, "me/x")
    assert "datasets" not in yaml.safe_load(card.split("---\n")[1])
    assert "20 sites trained on data of their own" in card


def test_a_model_of_pooled_data_is_not_called_federated(trained):
    read = publish_model.read(trained[0])
    pooled = read._replace(
        experiment=override(Experiment(), ["method=centralised"]),
        about=read.about | {"method": "centralised"},
        result=read.result | {"rounds": 1, "uplink_MB": 0.0, "downlink_MB": 0.0},
    )
    card = publish_model.card(pooled, "me/x")
    assert yaml.safe_load(card.split("---\n")[1])["tags"] == ["fedprior", "centralised"]
    assert "federated" not in card.lower().replace("centralised", "")
    assert "trained on all data in one place with fedprior" in card
    assert "exchanged" not in card
    assert "mean of the last" not in card  # of one round


def test_the_card_averages_as_many_rounds_as_there_were(trained):
    read = publish_model.read(trained[0])
    assert f"| mean of the last 2 rounds | {100 * read.result['mean_last10']:.2f} |" in publish_model.card(read, "me/x")
    longer = read._replace(result=read.result | {"rounds": 40})
    assert "| mean of the last 10 rounds |" in publish_model.card(longer, "me/x")


def test_names_are_words_on_the_card_whatever_they_hold(trained):
    from markdown_it import MarkdownIt

    names = [
        "a|b",
        "new\nline",
        "<img src=x onerror=y>",
        "*bold*",
        "[x](http://y)",
        "_under_score",
        "`c`",
        "a\\b",
        "&lt;",
    ]
    read = publish_model.read(trained[0])
    given = read._replace(
        about=read.about | {"classes": names},
        last=read.last | {"per_class": [0.5] * len(names), "per_domain": {"p|<q>": 0.25}},
    )
    body = publish_model.card(given, "me/x").split("---\n", 2)[2]
    tokens = MarkdownIt("commonmark").enable("table").parse(body)
    inline = [token for token in tokens if token.type == "inline"]
    assert not {child.type for token in inline for child in token.children} & {"html_inline", "link_open", "em_open"}
    assert not [token for token in tokens if token.type == "html_block"]
    texts = ["".join(child.content for child in token.children) for token in inline]
    shown = [" ".join(name.split()) for name in names]
    assert {f"class {name}" for name in shown} | {"domain p|<q>"} <= set(texts)
    assert any(f"classes ({', '.join(shown)})," in text for text in texts)


def test_the_card_says_that_clients_fine_tuned_the_prior(trained):
    words = ["balance=max", "balance.pool=per_client", "adapt=lora"]
    read = publish_model.read(trained[0])
    card = publish_model.card(read._replace(experiment=override(Experiment(), words)), "me/x")
    assert "`digits` was fine-tuned by each client on its own images (adapt=lora) and made images for clients" in card
    assert "near-copies" in card
    assert "near-copies" not in publish_model.card(read._replace(experiment=override(Experiment(), words[:1])), "me/x")


def test_paths_of_this_machine_stay_here(trained):
    read = publish_model.read(trained[0])
    words = ["data=cifar10", "data.path=/home/jane/cifar10", "prior=/srv/models/sd", "prior.lora=~/a.safetensors,b:0.5"]
    result = read.result | {"directory": "/home/jane/runs/it"}
    there = read._replace(experiment=override(Experiment(), words), result=result)
    files = {file.name: file.content for file in publish_model.files(there)}
    values = tomllib.loads(files["config.toml"].decode())
    assert (values["data"]["path"], values["prior"]["name"]) == ("cifar10", "sd")
    assert values["prior"]["lora"] == "a.safetensors,b:0.5"
    assert b"jane" not in files["config.toml"] + files["result.json"]
    assert publish_model.portable({"a": "C:\\Users\\jane\\x.txt", "b": ["/x"], "c": 1, "d": "a/b"}) == {
        "a": "x.txt", "b": ["/x"], "c": 1, "d": "a/b",
    }  # fmt: skip


def test_a_dry_run_lists_files_prints_the_card_and_asks_no_hub(trained, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "HfApi", None)
    said, text = call(trained[0], "me/digits", "--dry-run")
    assert "would push model.safetensors" in text
    assert said["card"] in text
    assert said["files"]["model.safetensors"] == (trained[0] / "model.safetensors").stat().st_size
    assert "pushed" not in said


def test_what_cannot_be_pushed_is_one_line(trained, tmp_path, monkeypatch):
    import huggingface_hub

    class Api:
        def create_repo(self, *given, **options):
            raise OSError("401 Client Error\nmore")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    folder = trained[0]
    run(override(Experiment(), [*WORDS, "rounds=1", "method=local", "name=own"]), tmp_path, report=False)
    for words, kind, message in [
        (
            [folder, "me/x"],
            UserError,
            r"cannot push to me/x \(401 Client Error\); log in .* The run stays where it is$",
        ),
        ([folder, "me"], UsageError, "model push wants user/name, not 'me'"),
        ([folder / "model.safetensors", "me/x"], UserError, "is a file; name its run directory"),
        ([tmp_path / "own", "me/x"], UserError, "has no global model"),
        ([Path("nowhere"), "me/x"], UserError, "there is no nowhere"),
    ]:
        with pytest.raises(kind, match=message) as error:
            call(*words)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("license", ["apache-2.0", "cc-by-4.0", "other", "unknown", "c-uda", "llama3.1"])
def test_a_licence_of_the_hub_stands_in_the_cards_metadata(trained, license):
    text = publish_model.card(publish_model.read(trained[0]), "me/x", license)
    assert yaml.safe_load(text.split("---\n")[1])["license"] == license


@pytest.mark.parametrize("license", ["", "MIT", "Apache 2.0", "mit\n---", "© me", "a: b", "[mit]", "-"])
def test_what_is_no_licence_of_the_hub_is_one_line(trained, license):
    with pytest.raises(UsageError, match=r"^--license wants the hub's word for .* such as apache-2\.0") as error:
        call(trained[0], "me/x", "--dry-run", "--license", license)
    assert "\n" not in str(error.value)


def test_a_directory_whose_files_do_not_belong_together_gets_no_card(trained, tmp_path):
    folder = tmp_path / "it"
    shutil.copytree(trained[0], folder)
    (folder / "result.json").unlink()
    with pytest.raises(UserError, match=r"has no result\.json, .*; `fedprior run .*it` makes it again") as error:
        publish_model.read(folder)
    assert "remove" not in str(error.value)
    shutil.copy(trained[0] / "result.json", folder)
    whole = (folder / "config.toml").read_text()
    for text, message in [
        ("", r"config\.toml does not say method, data, rounds: .*; bring back the file"),
        (
            whole.replace('net = "cnn"', 'net = "resnet10"'),
            r"is not of this model \(net: cnn there, resnet10 here\); br",
        ),
        (re.sub(r"\nmu = [\d.]+", "\nmu = 7.0", whole), r"is not of this model \(method\.mu: .* there, 7\.0 here\)"),
        (whole.replace('precision = "fp32"', 'precision = "bf16"'), r"\(precision: fp32 there, bf16 here\)"),
    ]:
        assert text != whole
        (folder / "config.toml").write_text(text)
        with pytest.raises(UserError, match=message):
            publish_model.read(folder)
    (folder / "config.toml").write_text(whole)
    assert publish_model.read(folder).version
