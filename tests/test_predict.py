"""A run's model on files of its own: the accuracy is the run's, whatever the files look like."""

import csv
import json
import os
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


def call(*words, code=0):
    """-> (the JSON line, stdout, stderr) of a command that ends with this code. Raises what it raises."""
    found = CliRunner().invoke(app, ["predict", *map(str, words), "--json"], catch_exceptions=False)
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    assert found.exit_code == code, found.output
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
    torn, _, said = call(directory, tmp_path / "torn.parquet", "--batch", "2", code=1)
    assert f"row 3 of {tmp_path / 'torn.parquet'} could not be read: it is not an image" in said
    assert (torn["images"], torn["unreadable"], torn["predictions"][3]["top"]) == (len(names), 1, [])


def test_a_column_that_is_no_label_costs_the_accuracy_only_unless_it_was_named(trained, tmp_path):
    file = tmp_path / "x.parquet"
    images = encoded(tmp_path / "png", digits.test()["image"][:2])
    pq.write_table(pa.table({"image": images, "name": ["a.png", "b.png"]}), file)
    result, _, said = call(trained[0], file)
    assert "accuracy" not in result
    assert [p["label"] for p in result["predictions"]] == [None, None]
    assert f"no accuracy for {file}: {file} has no label column (" in said
    assert "among name; choose one with --label COLUMN" in said
    with pytest.raises(UserError, match=r"has 'a\.png', which is no class of the model"):
        call(trained[0], file, "--label", "name")
    with pytest.raises(UsageError, match=r"unknown label column of .* 'what'"):
        call(trained[0], file, "--label", "what")
    pq.write_table(pa.table({"image": images, "other": images, "label": [1, 10]}), file)
    with pytest.raises(UserError, match=r"several image columns \(image, other\) .*; choose one with --image COLUMN$"):
        call(trained[0], file)
    with pytest.raises(UserError, match=r"row 1 of .* has label 10, which is not one of the 10 classes"):
        call(trained[0], file, "--image", "other", "--label", "label")


@pytest.mark.parametrize(
    ("columns", "words", "labels"),
    [
        ({"age": [3, 7]}, [], None),
        ({"age": [3, 7]}, ["--label", "age"], ["three", "seven"]),
        ({"age": [3, 7], "label": [1, 2]}, [], ["one", "two"]),
        ({"age": [3, 7], "label": ["one", "two"]}, [], ["one", "two"]),
        ({"age": [3, 7], "what": ["one", "Two"]}, [], ["one", "two"]),
        ({"what": ["one", "two"], "note": ["seen at night", ""]}, [], ["one", "two"]),
        ({"what": ["one", None]}, [], ["one", None]),
        ({"note": ["one", "seen at night"]}, [], None),
        ({"note": ["one", "seen at night"]}, ["--label", "note"], ["one", None]),
        ({"what": ["one", "two"], "taken_for": ["two", "one"]}, [], None),
        ({"label": [0.5, 1.5], "age": [3, 7]}, [], None),
    ],
)
def test_only_what_is_sure_to_be_labels_is_taken_for_them(trained, tmp_path, columns, words, labels):
    images = encoded(tmp_path / "png", digits.test()["image"][:2])
    pq.write_table(pa.table({"image": images} | columns), tmp_path / "x.parquet")
    result, _, said = call(trained[0], tmp_path / "x.parquet", *words)
    assert ("accuracy" in result) == (labels is not None)
    assert [one["label"] for one in result["predictions"]] == (labels or [None, None])
    assert ("no accuracy for" in said and "with --label COLUMN" in said) == (labels is None)


def test_a_declared_column_goes_before_numbers_of_another_name(trained, tmp_path):
    import datasets

    features = datasets.Features(
        {"image": datasets.Image(), "age": datasets.Value("int64"), "what": datasets.ClassLabel(names=["two", "one"])}
    )
    rows = {"image": encoded(tmp_path / "png", digits.test()["image"][:2]), "age": [3, 7], "what": [1, 0]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "x.parquet")
    result, _, _ = call(trained[0], tmp_path / "x.parquet")
    assert [one["label"] for one in result["predictions"]] == ["one", "two"]


def test_classes_that_a_person_would_write_alike_are_two_wherever_they_are_named(tmp_path):
    """A one and a seven, called red fox with an underscore and without."""
    test, names = digits.test(), {1: "red_fox", 7: "red fox", 0: "plain"}
    for split, rows in (("train", slice(0, 200)), ("test", slice(200, None))):
        for i, (image, label) in enumerate(zip(test["image"][rows], test["label"][rows].tolist(), strict=True)):
            if label in names:
                png(tmp_path / "set" / split / names[label] / f"{i}.png", image)
    words = ["rounds=3", "steps=20", "clients=2", "cohort=2", "partition=iid", "net=small", "name=foxes"]
    outcome = go(tmp_path, ["data=own", f"data.path={tmp_path / 'set'}", *words])
    result, text, said = call(tmp_path / "foxes", tmp_path / "set" / "test")
    (last,) = outcome.curve[-1:]
    classes = ["plain", "red fox", "red_fox"]
    assert result["accuracy"] == last["accuracy"] > 0.6
    assert result["per_class"] == dict(zip(classes, last["per_class"], strict=True))
    labels = {name: sum(one["label"] == name for one in result["predictions"]) for name in classes}
    assert labels == {name: len(list((tmp_path / "set" / "test" / name).iterdir())) for name in classes}
    assert "accuracy over" not in said
    assert all(f"\n {name} " in text or f"\n{name} " in text for name in classes)


def test_a_model_of_an_older_version_with_two_classes_of_one_name_still_answers(trained, tmp_path):
    with safe_open(trained[0] / "model.safetensors", "pt") as opened:
        about = json.loads(opened.metadata()["about"])
    about["classes"][1] = about["classes"][7]
    tensors = load_file(trained[0] / "model.safetensors")
    save_file(tensors, tmp_path / "old.safetensors", {"about": json.dumps(about)})
    rows = {"image": encoded(tmp_path / "png", digits.test()["image"][:3]), "label": [1, 7, 7]}
    pq.write_table(pa.table(rows), tmp_path / "x.parquet")
    result, text, _ = call(tmp_path / "old.safetensors", tmp_path / "x.parquet")
    assert result["labelled"] == 3
    by_class = [line.split() for line in text.partition("By class")[2].splitlines()]
    assert [words[-1] for words in by_class if words[:1] == ["seven"]] == ["1", "2"]


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


def test_a_table_of_all_predictions_is_written_whole_or_not_at_all(trained, folder, tmp_path, monkeypatch):
    out = tmp_path / "p.csv"
    result, text, _ = call(trained[0], folder / "seven", folder, "--out", out, "--top", "2")
    rows = list(csv.DictReader(out.open(newline="")))
    assert result["images"] == len(rows) == int(text.partition(" predictions are in")[0])
    assert list(rows[0]) == ["image", "label", "class_1", "probability_1", "class_2", "probability_2", "error"]
    assert {row["error"] for row in rows} == {""}
    assert [row["image"] for row in rows] == [
        str(p) for p in (*sorted((folder / "seven").iterdir()), *sorted(folder.glob("*/*.png")))
    ]
    labels = [row["label"] for row in rows]
    sevens = len(list((folder / "seven").iterdir()))
    assert labels[:sevens] == [""] * sevens
    assert sorted(labels[sevens:]) == sorted(p.parent.name for p in folder.glob("*/*.png"))
    logits, calls = predict.Classifier.logits, []

    def diverged(classifier, images):
        calls.append(len(images))
        if len(calls) == 2:
            raise UserError("the model gives no finite numbers")
        return logits(classifier, images)

    monkeypatch.setattr(predict.Classifier, "logits", diverged)
    with pytest.raises(UserError, match="no finite numbers"):
        call(trained[0], folder / "seven", "--batch", "3", "--out", tmp_path / "q.csv")
    assert not (tmp_path / "q.csv").exists()


def test_what_cannot_be_read_is_named_and_all_else_is_answered(trained, folder, tmp_path):
    whole, _, _ = call(trained[0], folder / "two")
    for name in ("one", "two"):
        shutil.copytree(folder / name, tmp_path / "set" / name)
    (tmp_path / "set" / "two" / "000.png").write_bytes(b"")
    (tmp_path / "set" / "two" / "zzz\x1b[31m.jpg").write_bytes(b"no image")
    (tmp_path / "set" / "one" / "gone.png").symlink_to("nowhere.png")
    n = sum(len(list((folder / name).iterdir())) for name in ("one", "two")) + 3
    for batch in ("1", "5", "1000"):
        result, _, said = call(trained[0], tmp_path / "set", "--top", "3", "--batch", batch, code=1)
        assert (result["images"], result["unreadable"], result["labelled"]) == (n, 3, n - 3)
        assert said.rstrip().endswith(f"3 of {n} images could not be read")
        assert f"{tmp_path / 'set' / 'one' / 'gone.png'} could not be read: No such file or directory" in said
        assert "zzz [31m.jpg could not be read: it is not an image" in said
        assert "\x1b" not in said
        errors = [one for one in result["predictions"] if one["error"]]
        assert [one["top"] for one in errors] == [[]] * 3
        twos = [one for one in result["predictions"] if one["label"] == "two" and not one["error"]]
        assert [one["top"][0]["class"] for one in twos] == [one["top"][0]["class"] for one in whole["predictions"]]
    out = tmp_path / "p.csv"
    _, text, _ = call(trained[0], tmp_path / "set", "--out", out, code=1)
    assert f"{n - 3} predictions are in" in text
    rows = list(csv.DictReader(out.open(newline="")))
    bad = {
        row["image"].rpartition("/")[2]: (row["label"], row["class_1"], row["error"]) for row in rows if row["error"]
    }
    assert len(rows) == n
    assert bad == {
        "000.png": ("two", "", "it is not an image"),
        "zzz\x1b[31m.jpg": ("two", "", "it is not an image"),
        "gone.png": ("one", "", "No such file or directory"),
    }
    alone, text, _ = call(trained[0], tmp_path / "set" / "two" / "000.png", code=1)
    assert (alone["images"], alone["unreadable"]) == (1, 1)
    assert "not read" in text


def test_control_characters_of_a_name_do_not_reach_the_terminal(trained, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    shutil.copy(next((folder / "one").iterdir()), tmp_path / "\x1b[31mred\n.png")
    result, text, said = call(trained[0], tmp_path)
    assert "\x1b" not in text + said
    assert "[31mred .png" in text
    assert result["predictions"][0]["image"] == str(tmp_path / "\x1b[31mred\n.png")


def test_a_name_that_is_no_text_is_read_and_written(trained, folder, tmp_path):
    file = os.fsencode(tmp_path) + b"/caf\xe9.png"
    shutil.copy(next((folder / "one").iterdir()), file)
    call(trained[0], tmp_path, "--out", tmp_path / "p.csv")
    (row,) = csv.DictReader((tmp_path / "p.csv").open(newline=""))
    assert row["image"] == str(tmp_path / r"caf\xe9.png")
    result, _, _ = call(trained[0], tmp_path)
    assert result["images"] == 1


def test_only_folders_that_are_all_called_so_are_splits(trained, folder, tmp_path):
    image = next((folder / "one").iterdir())

    def put(*places):
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        for place in places:
            (root / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(image, root / place)
        return root, *call(trained[0], root)

    root, result, _, said = put("test/june/a.png", "holiday/b.png", "holiday/c.png")
    assert result["images"] == 3
    assert "left aside" not in said
    root, result, _, said = put(
        "val/x/a.png", "train/x/b.png", "train/x/c.png", "cover.png", ".git/x.png", "notes/x.txt"
    )
    assert [one["image"] for one in result["predictions"]] == [str(root / "val" / "x" / "a.png")]
    assert f"of {root} only the split val is read (1 image); left aside: 3 images in train" in said
    root, result, _, said = put(
        "train/a.png", "test/b.png"
    )  # no class folders below: nothing says that these are splits
    assert result["images"] == 2
    root, result, _, said = put("test/one/a.png", "test/two/b.png")
    assert (result["images"], result["labelled"]) == (2, 2)
    assert "left aside" not in said


def test_accuracy_is_over_the_images_whose_class_is_known(trained, folder, tmp_path):
    directory, curve = trained
    shutil.copytree(folder, tmp_path / "set")
    (tmp_path / "set" / "unsorted").mkdir()
    for k, file in enumerate(sorted(folder.glob("*/*.png"))[:3]):
        shutil.copy(file, tmp_path / "set" / "unsorted" / f"{k}.png")
    shutil.copy(file, tmp_path / "set" / "cover.png")
    n = len(digits.test()["label"])
    result, _, said = call(directory, tmp_path / "set")
    assert (result["accuracy"], result["labelled"], result["images"]) == (curve[-1]["accuracy"], n, n + 4)
    remark = f"accuracy over {n} of {n + 4} images, 1 without a label and 3 of no class of the model ('unsorted')"
    assert f"{tmp_path / 'set'}: {remark}" in said


def test_links_are_followed_and_what_is_no_picture_is_passed_over(trained, folder, tmp_path):
    root = tmp_path / "set"
    root.mkdir()
    for name in ("one", "two"):
        (root / name).symlink_to(folder / name)
    (root / "loop").symlink_to(".")
    (root / "up").symlink_to("..")
    (root / "__MACOSX" / "one").mkdir(parents=True)
    for file in ("__MACOSX/one/x.png", "._x.png", ".hidden.png"):
        (root / file).write_bytes(b"none")
    (root / "three").mkdir()
    (root / "three" / "sub.png").mkdir()
    result, _, said = call(trained[0], root)
    assert [one["image"] for one in result["predictions"]] == [
        str(root / name / p.name) for name in ("one", "two") for p in sorted((folder / name).iterdir())
    ]
    assert result["labelled"] == result["images"]
    assert "accuracy" not in said


def test_files_that_may_be_images_of_another_kind_are_counted(trained, folder, tmp_path):
    shutil.copy(next((folder / "one").iterdir()), tmp_path / "a.PNG")
    for name in ("b.HEIC", "c.jxl", "notes.txt", "README", "Thumbs.db", ".DS_Store"):
        (tmp_path / name).write_bytes(b"x")
    result, _, said = call(trained[0], tmp_path)
    assert result["images"] == 1
    assert f"2 files of {tmp_path} were left out: .heic, .jxl; convert them to .jpg or .png" in said
    (tmp_path / "a.PNG").unlink()
    with pytest.raises(UserError, match=r"there is no image in .*; images end in .*\.webp, not \.heic, \.jxl"):
        call(trained[0], tmp_path)


def test_a_table_beside_photos_hides_neither(trained, folder, tmp_path):
    files = sorted((folder / "one").iterdir())[:3]
    for file in files:
        shutil.copy(file, tmp_path)
    pq.write_table(pa.table({"name": ["a", "b"]}), tmp_path / "index.parquet")
    pq.write_table(pa.table({"name": ["a", "b"]}), tmp_path / "more.parquet")
    result, _, said = call(trained[0], tmp_path)
    assert [one["image"] for one in result["predictions"]] == [str(tmp_path / file.name) for file in files]
    assert f"index.parquet, more.parquet in {tmp_path}: left aside, since no image is in there" in said
    (tmp_path / "more.parquet").unlink()
    images = encoded(tmp_path / "png", digits.test()["image"][:2])
    shutil.rmtree(tmp_path / "png")
    pq.write_table(pa.table({"image": images}), tmp_path / "index.parquet")
    result, _, said = call(trained[0], tmp_path)
    assert result["images"] == 2
    assert f"3 images of {tmp_path} beside its parquet files: left aside" in said
    for part, n in (("train", 2), ("test", 1)):
        (tmp_path / "set").mkdir(exist_ok=True)
        pq.write_table(pa.table({"image": images[:n]}), tmp_path / "set" / f"{part}.parquet")
    _, _, said = call(trained[0], tmp_path / "set")
    assert f"of {tmp_path / 'set'} only the split test is read (1 image); left aside: train" in said
    for file in files:
        (tmp_path / file.name).unlink()
    pq.write_table(pa.table({"name": ["a", "b"]}), tmp_path / "index.parquet")
    shutil.rmtree(tmp_path / "set")
    with pytest.raises(UserError, match=r"has no image column among name; choose one with --image COLUMN$"):
        call(trained[0], tmp_path)


def test_where_rows_say_domains_the_line_says_that_images_count_alike(trained, tmp_path):
    rows = {"image": encoded(tmp_path / "png", digits.test()["image"][:2]), "label": ["one", "two"]}
    pq.write_table(pa.table(rows | {"domain": ["a", "b"]}), tmp_path / "x.parquet")
    pq.write_table(pa.table(rows), tmp_path / "y.parquet")
    line = "Each image counts alike; a run with domains gives the mean over them."
    assert line in call(trained[0], tmp_path / "x.parquet")[1]
    assert line not in call(trained[0], tmp_path / "y.parquet")[1]


# What cannot be used ------------------------------------------------------------------------------------


def test_a_run_without_a_global_model_says_so(tmp_path, folder):
    go(tmp_path, [*WORDS, "rounds=1", "method=fedproto", "name=own"])
    with pytest.raises(UserError, match=r"own has no global model: with method=fedproto .* each client keeps a part"):
        call(tmp_path / "own", folder)


def test_a_model_that_is_gone_comes_back_as_the_message_says(trained, folder, tmp_path):
    directory = tmp_path / "it"
    shutil.copytree(trained[0], directory)
    before = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").unlink()
    with pytest.raises(
        UserError, match=r"model.safetensors is gone; remove result.json there and `fedprior run"
    ) as said:
        predict.load(directory)
    assert "\n" not in str(said.value)
    (directory / "result.json").unlink()
    go(tmp_path, [*WORDS, "name=it"])
    assert (directory / "model.safetensors").read_bytes() == before


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
    with pytest.raises(UserError, match=r"there is no a*; name a run directory"):
        predict.load("a" * 300)
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
        ([folder / ("a" * 300)], UserError, "there is no .*; name an image"),
        ([tmp_path / "empty"], UserError, "there is no image in "),
        ([tmp_path / "x.txt"], UserError, "is neither an image nor a parquet file"),
        ([folder, "--device", "gpu"], UsageError, "unknown device 'gpu'; "),
        ([folder, "--out", tmp_path / "p.txt"], UsageError, "must end in .csv or .jsonl"),
    ]:
        with pytest.raises(kind, match=message) as error:
            call(trained[0], *words)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", [torch.float16, torch.float64, torch.bfloat16])
def test_weights_of_another_floating_type_become_the_runs(trained, tmp_path, kind):
    flat, whole = load_file(trained[0] / "model.safetensors"), predict.load(trained[0])
    other = {name: x.to(kind) if x.is_floating_point() else x for name, x in flat.items()}
    save_file(other, tmp_path / "m.safetensors", {"about": json.dumps(whole.about)})
    loaded = predict.load(tmp_path / "m.safetensors")
    assert {x.dtype for x in loaded.weights["params"].values()} == {torch.float32}
    images = digits.test()["image"]
    same = (loaded(images).argmax(1) == whole(images).argmax(1)).float().mean()
    assert same == 1 if kind == torch.float64 else same > 0.95


def test_weights_of_another_kind_are_refused(trained, tmp_path):
    flat, about = load_file(trained[0] / "model.safetensors"), predict.load(trained[0]).about
    for name, kind in (
        ("head.bias", torch.int64),
        ("head.bias", torch.complex64),
        ("body.1.num_batches_tracked", torch.float32),
    ):
        other = flat | {name: flat[name].to(kind)}
        save_file(other, tmp_path / "m.safetensors", {"about": json.dumps(about)})
        with pytest.raises(UserError, match=rf"m.safetensors cannot be used \(its tensor {name} holds {kind}, not "):
            predict.load(tmp_path / "m.safetensors")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("size", [16.5, 16]), ("size", [16.0, 16.0]), ("size", [100_000, 100_000]), ("size", [0, 16]), ("size", 16),
        ("mean", None), ("mean", [0.5]), ("mean", ["a", "b", "c"]), ("mean", [float("nan")] * 3),
        ("std", [0.5, 0.0, 0.5]), ("net", {}), ("net", "nowhere"), ("precision", "int4"), ("precision", []),
        ("method", 3), ("settings", []), ("settings", {"nothing": 1}), ("classes", []), ("classes", "abc"),
        ("classes", [1, 2]), ("classes", ["a"]),
    ],
)  # fmt: skip
def test_metadata_that_no_run_writes_are_one_line_with_the_file(trained, tmp_path, key, value):
    file, about = tmp_path / "m.safetensors", predict.load(trained[0]).about
    save_file(load_file(trained[0] / "model.safetensors"), file, {"about": json.dumps(about | {key: value})})
    with pytest.raises(
        UserError, match=r"m.safetensors cannot be used \(.*\); take the file as a run wrote it"
    ) as said:
        predict.load(file)
    assert "\n" not in str(said.value)


def test_a_photo_of_100_megapixels_is_read_and_a_bomb_is_one_line(trained, tmp_path, monkeypatch, recwarn):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)  # Pillow warns above and refuses twice as many
    Image.new("RGB", (40, 40)).save(tmp_path / "a.png")
    Image.new("RGB", (50, 50)).save(tmp_path / "b.png")
    result, _, said = call(trained[0], tmp_path, code=1)
    assert [bool(one["error"]) for one in result["predictions"]] == [False, True]
    assert not [w for w in recwarn if issubclass(w.category, Image.DecompressionBombWarning)]
    assert len(said.strip().splitlines()) == 3  # progress, the image, the count
