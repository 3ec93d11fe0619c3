"""A run's model on files of its own: the accuracy is the run's, whatever the files look like."""

import csv
import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import toy
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

from fedprior import assemble, nets, predict
from fedprior.cli import app
from fedprior.config import Experiment, override
from fedprior.data import digits, table
from fedprior.errors import UsageError, UserError
from fedprior.run import run

WORDS = ["rounds=2", "steps=15", "clients=4", "cohort=2", "net=small", "partition=iid"]


class Small(nn.Module):
    """Batch norm, and features enough for digits."""

    def __init__(self, classes, size):
        super().__init__()
        layers = (nn.Conv2d(3, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten())
        self.body, self.width = nn.Sequential(*layers), 256
        self.head = nn.Linear(self.width, classes)

    def forward(self, x):
        z = self.body(x)
        return z, self.head(z)


@pytest.fixture(autouse=True, scope="module")
def small():
    nets.NETS["small"] = Small
    yield
    del nets.NETS["small"]


def go(root, words):
    return run(override(Experiment(), words), root, report=False)


def call(*words):
    """-> (the JSON line, stdout, stderr). Raises what the command raises."""
    found = CliRunner().invoke(app, ["predict", *map(str, words), "--json"], catch_exceptions=False)
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout.strip().splitlines()[-1]), found.stdout, found.stderr


def png(path, image):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)


def encoded(folder, images):
    """Their PNG bytes."""
    out = []
    for i, image in enumerate(images):
        png(folder / f"{i}.png", image)
        out.append({"bytes": (folder / f"{i}.png").read_bytes(), "path": None})
    return out


@pytest.fixture(scope="module")
def trained(tmp_path_factory, small):
    """A run -> (its directory, the lines of its metrics)."""
    root = tmp_path_factory.mktemp("runs")
    outcome = go(root, [*WORDS, "name=it"])
    return root / "it", outcome.curve


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The digits' test images as PNG files in class folders."""
    root, test = tmp_path_factory.mktemp("digits"), digits.test()
    for i, (image, label) in enumerate(zip(test["image"], test["label"].tolist(), strict=True)):
        png(root / digits.CLASSES[label] / f"{i:03}.png", image)
    return root


def test_accuracy_on_the_test_images_is_what_the_run_reports(trained, folder):
    directory, curve = trained
    result, text, _ = call(directory, folder)
    assert result["accuracy"] == curve[-1]["accuracy"]
    assert result["loss"] == pytest.approx(curve[-1]["loss"], rel=1e-5)  # the same images in another order
    assert list(result["per_class"].values()) == curve[-1]["per_class"]
    assert result["images"] == result["labelled"] == len(digits.test()["label"])
    assert 0.3 < result["accuracy"] < 1  # so that many classes are told apart, and some confused
    assert f"{100 * result['accuracy']:.1f} % of {result['labelled']} images with labels are recognised." in text


@pytest.mark.parametrize(
    "words",
    [
        ["method=fednh", "method.learn_scale=false", "method.scale=5"],
        ["method=ccvr"],
        ["method=moon", "method.projection=24"],
        ["precision=bf16"],
    ],
    ids=lambda words: words[0],
)
def test_a_file_alone_gives_the_runs_accuracy_under_methods_that_change_the_net(words, tmp_path, folder, monkeypatch):
    some = table.take(digits.train(), torch.arange(100))  # in place of the prior's, which take long to come
    monkeypatch.setattr(assemble, "prior_for", lambda *given: None)
    monkeypatch.setattr(assemble, "images_for_server", lambda e, *given: some if e.method.images else None)
    outcome = go(tmp_path, [*WORDS, *words, "name=it"])
    alone = tmp_path / "elsewhere" / "m.safetensors"
    alone.parent.mkdir()
    (tmp_path / "it" / "model.safetensors").rename(alone)
    result, _, _ = call(alone, folder)
    assert result["accuracy"] == outcome.result["last"]
    assert result["loss"] == pytest.approx(outcome.curve[-1]["loss"], rel=1e-5)


def test_images_of_all_sizes_are_fitted_and_scaled_as_for_training(tmp_path):
    for part, n in (("train", 60), ("test", 40)):
        images, labels = toy.images(n, seed=n)
        for i, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
            png(tmp_path / "set" / part / toy.CLASSES[label] / f"{i}.png", image[:, : 8 - i % 3, : 8 - i % 2])
    words = [*WORDS, "data=cifar10", f"data.path={tmp_path / 'set'}", "data.size=12", "steps=2", "name=it"]
    outcome = go(tmp_path, words)
    assert predict.load(tmp_path / "it").about["mean"] == [0.4914, 0.4822, 0.4465]
    result, _, _ = call(tmp_path / "it", tmp_path / "set")  # its test split
    assert (result["accuracy"], result["images"]) == (outcome.result["last"], 40)
    assert result["loss"] == pytest.approx(outcome.curve[-1]["loss"], rel=1e-5)


def test_probabilities_are_those_of_the_nets_logits(trained):
    classifier = predict.load(trained[0])
    images = digits.test()["image"][:7]
    p = classifier(images)
    assert (p.dtype, list(p.shape)) == (torch.float32, [7, 10])
    torch.testing.assert_close(p.sum(1), torch.ones(7))
    logits = classifier.logits(images)
    torch.testing.assert_close(p.log() - p[:, :1].log(), logits - logits[:, :1], atol=1e-4, rtol=1e-4)
    assert list(classifier(images[:0]).shape) == [0, 10]
    for wrong in (images.float(), images[:, :1], images[:, :, :8]):
        with pytest.raises(ValueError, match=r"images must be uint8 \[n, 3, 16, 16\], not"):
            classifier(wrong)


def test_two_equal_runs_export_equal_files_with_all_that_loading_needs(trained, tmp_path):
    go(tmp_path, [*WORDS, "name=other"])
    first, second = (d / "model.safetensors" for d in (trained[0], tmp_path / "other"))
    assert first.read_bytes() == second.read_bytes()
    said = predict.load(first).about
    assert said | {"settings": {}} == {
        "net": "small", "method": "fedavg", "settings": {}, "classes": list(digits.CLASSES), "size": [16, 16],
        "mean": [0.5] * 3, "std": [0.5] * 3, "precision": "fp32",
    }  # fmt: skip


def test_a_guides_layer_and_a_method_that_is_not_known_here_do_not_stand_in_the_way(trained, tmp_path):
    file, whole = tmp_path / "m.safetensors", predict.load(trained[0])
    flat = load_file(trained[0] / "model.safetensors") | {"guide.weight": torch.zeros(3, 256)}
    save_file(flat, file, {"about": json.dumps(whole.about | {"method": "mine", "settings": {"strength": 1.0}})})
    image = digits.test()["image"][:5]
    assert torch.equal(predict.load(file)(image), whole(image))


# What is read -------------------------------------------------------------------------------------------


def test_parquet_files_give_the_accuracy_too_and_their_classes_may_be_in_another_order(trained, tmp_path):
    import datasets

    directory, curve = trained
    test = digits.test()
    order = list(reversed(digits.CLASSES))
    names = [digits.CLASSES[y] for y in test["label"].tolist()]
    features = datasets.Features({"image": datasets.Image(), "what": datasets.ClassLabel(names=order)})
    rows = {"image": encoded(tmp_path / "png", test["image"]), "what": [order.index(name) for name in names]}
    (tmp_path / "set").mkdir()
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "set" / "test.parquet")
    datasets.Dataset.from_dict({k: v[:5] for k, v in rows.items()}, features=features).to_parquet(
        tmp_path / "set" / "train.parquet"
    )
    whole, _, _ = call(directory, tmp_path / "set", "--out", tmp_path / "p.jsonl")  # of two splits, the test split
    assert (whole["accuracy"], whole["images"]) == (curve[-1]["accuracy"], len(names))
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert [line["label"] for line in lines] == names
    assert lines[3]["image"] == f"row 3 of {tmp_path / 'set' / 'test.parquet'}"
    hits = sum(line["top"][0]["class"] == line["label"] for line in lines)
    assert hits / len(lines) == whole["accuracy"]
    assert all(a["probability"] >= b["probability"] for line in lines for a, b in zip(line["top"], line["top"][1:]))  # noqa: B905
    few, _, _ = call(directory, tmp_path / "set" / "train.parquet", "--batch", "2")
    assert (few["images"], few["labelled"]) == (5, 5)
    rows["image"][3]["bytes"] = b"torn"
    pq.write_table(pa.table(rows), tmp_path / "torn.parquet")
    with pytest.raises(UserError, match=r"the image in row 3 of .*torn.parquet cannot be decoded"):
        call(directory, tmp_path / "torn.parquet", "--batch", "2")


def test_a_column_that_is_no_label_costs_the_accuracy_only_unless_it_was_named(trained, tmp_path):
    file = tmp_path / "x.parquet"
    images = encoded(tmp_path / "png", digits.test()["image"][:2])
    pq.write_table(pa.table({"image": images, "name": ["a.png", "b.png"]}), file)
    result, _, said = call(trained[0], file)
    assert "accuracy" not in result
    assert [p["label"] for p in result["predictions"]] == [None, None]
    assert f"no accuracy for {file}: column 'name' of {file} has 'a.png', which is no class of the model" in said
    with pytest.raises(UserError, match=r"has 'a\.png', which is no class of the model"):
        call(trained[0], file, "--label", "name")
    with pytest.raises(UsageError, match=r"unknown label column of .* 'what'"):
        call(trained[0], file, "--label", "what")
    pq.write_table(pa.table({"image": images, "other": images, "label": [1, 10]}), file)
    with pytest.raises(UserError, match=r"several image columns \(image, other\) .*; choose one with --image $"):
        call(trained[0], file)
    with pytest.raises(UserError, match=r"row 1 of .* has label 10, which is not one of the 10 classes"):
        call(trained[0], file, "--image", "other", "--label", "label")


def test_single_images_and_folders_are_found_recursively_and_fitted_as_for_training(trained, tmp_path):
    image = digits.test()["image"][0]
    png(tmp_path / "top.png", image)
    large = Image.fromarray(image.permute(1, 2, 0).numpy()).resize((40, 30)).convert("L")
    large.save(tmp_path / "large.jpg")
    png(tmp_path / "in" / "a" / "deep.png", image)
    png(tmp_path / "in" / "b" / "deeper" / "x.png", image)
    png(tmp_path / "in" / ".hidden" / "x.png", image)
    png(tmp_path / "loose" / "first.png", image)
    shutil.copytree(tmp_path / "in", tmp_path / "loose" / "in")
    result, _, _ = call(trained[0], tmp_path / "top.png", tmp_path / "large.jpg", "--top", "99")
    assert [p["image"] for p in result["predictions"]] == [str(tmp_path / "top.png"), str(tmp_path / "large.jpg")]
    classifier = predict.load(trained[0])
    with Image.open(tmp_path / "large.jpg") as opened:
        fitted = opened.convert("RGB").resize((16, 16), Image.Resampling.BICUBIC)
    pixels = torch.tensor(np.array(fitted), dtype=torch.uint8).permute(2, 0, 1)
    expected = dict(zip(digits.CLASSES, classifier(pixels[None])[0].tolist(), strict=True))
    given = {one["class"]: one["probability"] for one in result["predictions"][1]["top"]}
    assert given == pytest.approx(expected, rel=1e-5)
    below, _, said = call(trained[0], tmp_path / "in")
    assert below["images"] == 2
    assert "'a', which is no class of the model" in said
    assert call(trained[0], tmp_path / "loose")[0]["images"] == 3


def test_a_table_of_all_predictions_is_written_whole_or_not_at_all(trained, folder, tmp_path):
    out = tmp_path / "p.csv"
    result, text, _ = call(trained[0], folder / "seven", folder, "--out", out, "--top", "2")
    rows = list(csv.DictReader(out.open(newline="")))
    assert result["images"] == len(rows) == int(text.partition(" predictions are in")[0])
    assert list(rows[0]) == ["image", "label", "class_1", "probability_1", "class_2", "probability_2"]
    labels = [row["label"] for row in rows]
    sevens = len(list((folder / "seven").iterdir()))
    assert labels[:sevens] == [""] * sevens
    assert sorted(labels[sevens:]) == sorted(p.parent.name for p in folder.glob("*/*.png"))
    torn = tmp_path / "bad" / "x.png"
    torn.parent.mkdir()
    torn.write_bytes(b"no image")
    with pytest.raises(UserError, match=r"x.png .*cannot be decoded"):
        call(trained[0], folder / "seven", torn, "--out", tmp_path / "q.csv")
    assert not (tmp_path / "q.csv").exists()


# What cannot be used ------------------------------------------------------------------------------------


def test_a_run_without_a_global_model_says_so(tmp_path, folder):
    go(tmp_path, [*WORDS, "rounds=1", "method=fedproto", "name=own"])
    with pytest.raises(UserError, match=r"own has no global model: with method=fedproto .* each client keeps a part"):
        call(tmp_path / "own", folder)


def test_a_file_of_an_older_version_names_what_is_missing_and_can_be_written_again(trained, tmp_path):
    directory = tmp_path / "it"
    shutil.copytree(trained[0], directory)
    file = directory / "model.safetensors"
    before = file.read_bytes()
    with safe_open(file, framework="pt") as f:
        about = json.loads(f.metadata()["about"])
    old = {key: about[key] for key in ("net", "method", "classes")}
    save_file(load_file(file), file, {"about": json.dumps(old)})
    with pytest.raises(UserError, match="does not say settings, size, mean, std, precision, since an older fedprior"):
        predict.load(directory)
    (directory / "result.json").unlink()  # as the message says
    go(tmp_path, [*WORDS, "name=it"])
    assert file.read_bytes() == before


def test_what_is_no_model_is_one_line(trained, tmp_path):
    file = tmp_path / "m.safetensors"
    with pytest.raises(UserError, match=r"there is no .*nowhere; name a run directory"):
        predict.load(tmp_path / "nowhere")
    with pytest.raises(UserError, match="is no run directory"):
        predict.load(tmp_path)
    file.write_bytes(b"abc")
    with pytest.raises(UserError, match="cannot be read"):
        predict.load(file)
    save_file({"x": torch.zeros(1)}, file)
    with pytest.raises(UserError, match="is no model that fedprior exported"):
        predict.load(file)
    about = predict.load(trained[0]).about
    save_file({"x": torch.zeros(1)}, file, {"about": json.dumps(about)})
    with pytest.raises(UserError, match="its tensors are not those of net=small under method=fedavg"):
        predict.load(file)
    flat = load_file(trained[0] / "model.safetensors")
    flat["head.bias"][0] = torch.nan
    save_file(flat, file, {"about": json.dumps(about)})
    with pytest.raises(UserError, match="no finite numbers"):
        predict.load(file)(digits.test()["image"][:1])


def test_wrong_words_are_one_line(trained, folder, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.txt").write_text("x")
    for words, kind, message in [
        ([folder / "no.png"], UserError, "there is no "),
        ([tmp_path / "empty"], UserError, "there is no image in "),
        ([tmp_path / "x.txt"], UserError, "is neither an image nor a parquet file"),
        ([folder, "--device", "gpu"], UsageError, "unknown device 'gpu'; "),
        ([folder, "--out", tmp_path / "p.txt"], UsageError, "must end in .csv or .jsonl"),
    ]:
        with pytest.raises(kind, match=message) as error:
            call(trained[0], *words)
        assert "\n" not in str(error.value)
