"""`fedprior generate`, `prompts show` and `prior check` as a person uses them, on the digits."""

import json
from pathlib import Path

import pytest
import torch
from test_synthesis import rows_of
from typer.testing import CliRunner

from fedprior import assemble, store
from fedprior.cli import app
from fedprior.config import Experiment, override
from fedprior.errors import UsageError, UserError
from fedprior.prepare import filters
from fedprior.priors import adapt
from fedprior.progress import Silent

CPU = torch.device("cpu")
WORDS = ["digits", "balance=max", "balance.pool_size=3", "clients=5", "prior.steps=2"]


def call(*words):
    """-> (the JSON line, all that was printed). Raises what the command raises."""
    found = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False)
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    assert found.exit_code == 0, found.output
    lines = found.stdout.strip().splitlines()
    return json.loads(lines[-1]), found.stdout


def shards(cache):
    return {p.name: p.read_bytes() for p in (cache / "synthetic").glob("*/*.parquet")}


def test_a_dry_run_says_what_would_be_made_and_makes_nothing():
    result, text = call("generate", *WORDS, "--dry-run")
    assert result["images"] == 30
    assert result["stored"] == 0
    assert result["generation_seconds"] > 0
    assert result["disk_MB"] == pytest.approx(30 * 16 * 16 * 2.5 / 1e6)
    assert sum(c["synthetic"] for c in result["clients"]) == sum(result["per_class"].values()) == result["rows"]
    for client in result["clients"]:
        assert client["synthetic"] == sum(client["by_class"].values())
    assert "30 distinct images" in text
    assert not (store.cache_folder() / "synthetic").exists()
    call("generate", *WORDS)
    again, text = call("generate", *WORDS, "--dry-run")
    assert (again["stored"], again["generation_seconds"]) == (30, 0.0)
    assert "30 are there" in text


def test_a_dry_run_counts_the_servers_images_that_are_there():
    words = [*WORDS, "method=gptfl", "method.images_per_class=5"]  # three of five in the shared pool too
    call("generate", *WORDS)
    assert call("generate", *words, "--dry-run")[0]["stored"] == 30
    call("generate", *words)
    again, text = call("generate", *words, "--dry-run")
    assert (again["images"], again["stored"], again["generation_seconds"]) == (50, 50, 0.0)
    assert "50 distinct images, 50 of them for the server, about 0.0 MB on disk. 50 are there." in text
    alone, _ = call("generate", *words[:1], *words[3:], "--dry-run")  # without a balance
    assert (alone["images"], alone["stored"]) == (50, 50)


OWN = ["digits", "clients=4", "cohort=2", "balance=missing_only", "balance.cap=2", "balance.pool=per_client"]


def test_only_a_folder_that_holds_all_images_and_nothing_else_is_to_be_opened():
    judged, text = call("generate", *OWN, "prior.steps=2", "balance.confidence=0.01")
    assert judged["folders"] == [judged["folder"]]
    assert f"open them with datasets.load_dataset('{judged['folder']}')" in text.replace("\n", "")
    assert {row["revision"] for file in Path(judged["folder"]).iterdir() for row in rows_of(file)}
    adapted = [*OWN, "prior.steps=1", "adapt=lora", "adapt.steps=1", "adapt.rank=2"]
    made, text = call("generate", *adapted)
    assert made["folder"] is None
    assert len(set(made["folders"])) == len(made["folders"]) > 1
    assert all(Path(folder).is_dir() for folder in made["folders"])
    assert "load_dataset" not in text
    part, _ = call("generate", *adapted, "--part", "2/2")
    assert set(part["folders"]) == set(made["folders"][1::2])
    nothing, text = call("generate", *WORDS[:1], "balance=ratio", "balance.ratio=0", "clients=5")
    assert (nothing["folder"], nothing["folders"]) == (None, [])
    assert "They lie in" not in text


def test_a_dry_run_fits_a_clients_classifier_once(monkeypatch):
    words = ["digits", "clients=2", "cohort=2", "partition.alpha=1", "prior.steps=2"]
    words += ["balance=max", "balance.cap=25", "balance.pool=per_client"]
    made, _ = call("generate", *words)  # the same images are there for who judges them
    asked = []

    class Sure(filters.Confidence):  # each of which would be trained when it is first asked
        def probability(self, images, labels):
            asked.append(self)
            return torch.ones(len(images))

    monkeypatch.setattr(assemble, "Confidence", Sure)
    again, _ = call("generate", *words, "balance.confidence=0.01", "--dry-run")
    assert again["images"] == again["stored"] == made["generated"]
    assert len(asked) > len({id(one) for one in asked}) == 2


def test_parts_on_two_machines_merge_into_what_one_makes(monkeypatch, tmp_path):
    for name, options in (("one", []), ("first", ["--part", "1/2"]), ("second", ["--part", "2/2"])):
        monkeypatch.setenv("FEDPRIOR_CACHE", str(tmp_path / name))
        call("generate", *WORDS, *options)
    both = [shards(tmp_path / name) for name in ("first", "second")]
    assert len(both[0]) == len(both[1]) == 5
    monkeypatch.setenv("FEDPRIOR_CACHE", str(tmp_path / "first"))
    result, _ = call("generate", *WORDS, "--merge", str(tmp_path / "second"))
    assert result["merged"] == [{"taken": 5, "passed": 0, "damaged": 0}]
    assert result["generated"] == 0
    assert shards(tmp_path / "first") == shards(tmp_path / "one") == both[0] | both[1]


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_images_are_the_same_for_every_batch_size(batch, monkeypatch, tmp_path):
    whole = []
    for name, size in (("usual", 32), ("other", batch)):
        monkeypatch.setenv("FEDPRIOR_CACHE", str(tmp_path / name))
        call("generate", *WORDS, f"prior.batch_size={size}")
        whole.append(shards(tmp_path / name))
    assert whole[0] == whole[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--part", "0/4"], "--part wants k/n with k from 1 to n, such as 3/16, not '0/4'"),
        (["--part", "5/4"], "--part wants k/n"),
        (["--part", "x"], "--part wants k/n"),
        (["--public"], "add --push user/name"),
        (["--push", "name"], "--push wants user/name, not 'name'"),
        (["--part", "1/2", "--push", "me/x"], "push once all parts are merged"),
        (
            ["--part", "1/2", "--dry-run"],
            "--dry-run takes over nothing and counts the images of all parts; leave out --p",
        ),
        (["--merge", "elsewhere", "--dry-run"], "leave out --merge"),
        (
            ["balance.pool=per_client", "balance.pool_size=0", "adapt=lora", "--push", "me/x"],
            "neither pushed nor merged",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(words, message):
    with pytest.raises(UsageError) as error:
        call("generate", *WORDS, *words)
    assert "\n" not in str(error.value)
    assert message in str(error.value)


def test_without_a_balance_there_is_nothing_to_generate():
    with pytest.raises(UsageError, match=r"nothing to generate with balance=none; add e.g. balance=max"):
        call("generate", "digits")


# Publishing ----------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the hub's client that keeps what it is given."""
    import huggingface_hub

    held = {"repositories": [], "files": {}}

    class Api:
        def create_repo(self, name, **options):
            held["repositories"].append((name, options))

        def create_commit(self, name, operations, *, commit_message, repo_type):
            for one in operations:
                content = one.path_or_fileobj
                held["files"][one.path_in_repo] = content if isinstance(content, bytes) else open(content, "rb").read()  # noqa: SIM115
            return type("Made", (), {"repo_url": f"https://hub/{repo_type}s/{name}"})()

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    return held


def test_pushing_uploads_every_file_and_a_card_and_is_private_by_default(hub, tmp_path):
    result, text = call("generate", *WORDS, "--push", "me/digits")
    assert result["pushed"] == "https://hub/datasets/me/digits"
    assert "private" in text
    assert hub["repositories"] == [("me/digits", {"repo_type": "dataset", "private": True, "exist_ok": True})]
    made = shards(store.cache_folder())
    assert {f"data/{name}": data for name, data in made.items()} == {
        name: data for name, data in hub["files"].items() if name != "README.md"
    }
    card = hub["files"]["README.md"].decode()
    assert card.startswith("---\n")
    for word in (
        "`digits`",
        "30 images of 10 classes",
        "| zero | a photo of a zero. | 3 |",
        "fedprior generate digits",
    ):
        assert word in card
    listed, text = call("generate", *WORDS, "--push", "me/digits", "--dry-run")
    assert listed["push"] == {name: len(data) for name, data in hub["files"].items()}
    assert "would push README.md" in text
    call("generate", *WORDS, "--push", "me/digits", "--public")
    assert hub["repositories"][-1][1]["private"] is False


def test_what_was_pushed_opens_with_datasets(hub, tmp_path):
    import datasets

    call("generate", *WORDS, "--push", "me/digits")
    for name, data in hub["files"].items():
        path = tmp_path / "copy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    loaded = datasets.load_dataset(str(tmp_path / "copy"), cache_dir=str(tmp_path / "hf"))["train"]
    assert len(loaded) == 30
    assert loaded.features["label"].names[0] == "zero"
    assert loaded[0]["image"].size == (16, 16)


def test_a_torn_file_that_these_settings_do_not_need_is_left_out_and_named(hub):
    made, _ = call("generate", *WORDS)
    torn = Path(made["folder"]) / "class-0003_shared_block-00007.parquet"
    torn.write_bytes(next(iter(shards(store.cache_folder()).values()))[:200])
    for options in (["--dry-run"], []):
        result, text = call("generate", *WORDS, "--push", "me/digits", *options)
        assert result["damaged"] == [torn.name]
        assert f"{torn.name} is damaged or cannot be read, and is left out" in text
    assert f"data/{torn.name}" not in hub["files"]
    assert len(hub["files"]) == 11
    assert "30 images of 10 classes" in hub["files"]["README.md"].decode()
    assert torn.exists()


def test_a_hub_that_refuses_is_one_line_and_loses_nothing(monkeypatch):
    import huggingface_hub

    class Api:
        def create_repo(self, *given, **options):
            raise OSError("401 Client Error\nmore")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    with pytest.raises(
        UserError, match=r"cannot push to me/x \(401 Client Error\); log in with .* stay where they are$"
    ):
        call("generate", *WORDS, "--push", "me/x")
    assert len(shards(store.cache_folder())) == 10
    with pytest.raises(UserError, match="no images to push yet; run the same command without --push first"):
        call("generate", *WORDS, "seed=5", "--push", "me/x", "--dry-run")


# Prompts and adaptation ----------------------------------------------------------------------------------


def test_prompts_are_listed_as_they_will_be_asked():
    result, text = call("prompts", "show", *WORDS, "balance.templates=single", "balance.names=repaired")
    assert [row["prompt"] for row in result["prompts"]][8] == "a photo of an eight"
    assert len(result["prompts"]) == 10
    assert "a photo of an eight" in text
    plain, _ = call("prompts", "show", *WORDS, "balance.templates=single")
    assert [row["prompt"] for row in plain["prompts"]][8] == "a photo of a eight"


def test_each_client_adapts_the_prior_to_its_own_real_rows(monkeypatch):
    asked = []

    def adapted(prior, images, words, config, *, seed, log):
        asked.append((images, list(words), config.rank, seed))
        return real(prior, images, words, config, seed=seed, log=log)

    real = adapt.adapt
    monkeypatch.setattr(assemble, "adapt", adapted)
    words = ["balance=missing_only", "balance.cap=2", "balance.pool=per_client", "clients=4", "cohort=2", "adapt=lora"]
    experiment = override(Experiment(), [*words, "adapt.steps=1", "adapt.rank=2", "prior.steps=2", "seed=3"])
    federation, _ = assemble.split(experiment)
    balanced, report = assemble.balance(experiment, federation, CPU, Silent())
    missing = federation.counts() == 0
    assert (balanced.counts(synthetic=True) == 2 * missing).all()
    clients = [k for k in range(4) if missing[k].any()]
    assert len(asked) == len(clients)
    for k, (images, said, rank, seed) in zip(clients, asked, strict=True):
        shard = federation.shard(k)
        assert torch.equal(images, shard["image"])
        assert said == [f"a photo of a {federation.classes[y]}." for y in shard["label"].tolist()]
        assert (rank, seed) == (2, 3)
    folders = report.folders
    assert len(folders) == len(clients)
    revisions = {row["revision"] for folder in folders for path in folder.iterdir() for row in rows_of(path)}
    assert len(revisions) == len(clients)
    asked.clear()
    again, second = assemble.balance(experiment, federation, CPU, Silent())
    assert second.generated == 0
    assert torch.equal(again.table["image"], balanced.table["image"])


def test_adaptation_needs_a_pool_of_each_clients_own():
    for words in (["adapt=lora"], ["adapt=lora", "balance=max"]):
        with pytest.raises(UsageError, match=r"needs a balance with balance.pool=per_client"):
            override(Experiment(), words)


def test_a_clients_own_classifier_judges_images_of_the_classes_that_it_has():
    words = ["balance=max", "balance.cap=20", "balance.pool=per_client", "clients=4", "cohort=2", "partition.alpha=0.3"]
    plain = override(Experiment(), [*words, "prior.steps=2"])
    federation, _ = assemble.split(plain)
    judged = override(plain, ["balance.confidence=0.1"])
    _, without = assemble.balance(plain, federation, CPU, Silent())
    balanced, report = assemble.balance(judged, federation, CPU, Silent())
    assert without.removed == 0
    assert report.removed > 0  # two steps make many poor digits
    assert (balanced.counts() == without.after).all()
    with pytest.raises(UsageError, match=r"asks each client's own classifier, so it needs balance.pool=per_client"):
        override(Experiment(), ["balance=max", "balance.confidence=0.5"])


# Checking ------------------------------------------------------------------------------------------------


def test_a_check_writes_its_page_and_says_what_images_are_worth(tmp_path):
    out = tmp_path / "check.html"
    result, text = call("prior", "check", "digits", "prior.steps=2", "--images", "40", "--out", str(out))
    assert result["images"] == 40
    assert result["real_images"] == 901
    assert result["page"] == str(out)
    assert "A small classifier that saw only the prior's 40 images" in text.replace("\n", " ")
    page = out.read_text()
    assert "fedprior prior check digits prior.steps=2" in page
    assert "<script" not in page


def test_a_check_compares_only_with_data_that_somebody_named(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=r"'balance=max' plays no part here; say data=, data.KEY=, prior.KEY= or dev"):
        call("prior", "check", "digits", "balance=max")
    from fedprior.priors import embedded

    nameless = embedded.load("digits")
    nameless.defaults = {}
    monkeypatch.setattr(assemble, "load_prior", lambda choice, device: nameless)
    with pytest.raises(UsageError, match=r"does not say which real images to compare with; name them with data="):
        call("prior", "check", "somewhere/else")
