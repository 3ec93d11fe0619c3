import io
import json
import os
import shutil
import socket
from collections import Counter
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from PIL import features as pillow

from fedprior import store
from fedprior.data import digits, origins, sources
from fedprior.errors import UsageError, UserError


def png(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format="PNG")
    return out.getvalue()


def noise(n: int, side: int = 6, seed: int = 0) -> np.ndarray:
    """RGB images, uint8 [n, side, side, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (n, side, side, 3), dtype=np.uint8)


def write(path: Path, features: dict | None = None, **columns) -> Path:
    """A parquet file; lists of bytes become image structs, `features` are declared as the hub does."""
    made = {}
    for name, values in columns.items():
        if values and isinstance(next((v for v in values if v is not None), None), bytes):
            values = [{"bytes": v, "path": None} for v in values]
            values = pa.array(values, type=pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
        made[name] = values
    table = pa.table(made)
    if features is not None:
        declared = datasets.Features.from_arrow_schema(table.schema) | features
        about = json.dumps({"info": {"features": datasets.Features(declared).to_dict()}})
        table = table.replace_schema_metadata({"huggingface": about})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)
    return path


def chw(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def raw(path: Path, rows: list[int], column: str = "image") -> list[Image.Image]:
    """Images decoded by Pillow alone, past everything the loader does."""
    cells = pq.read_table(path, columns=[column]).column(column).take(rows).to_pylist()
    return [Image.open(io.BytesIO(cell["bytes"])) for cell in cells]


def equal(first: sources.Source, second: sources.Source) -> bool:
    return (first.classes, first.domains) == (second.classes, second.domains) and all(
        a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)
        for a, b in ((first.train, second.train), (first.test, second.test))
    )


def one_line(raised) -> str:
    text = str(raised.value)
    assert "\n" not in text
    return text


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(datasets, "load_dataset", refuse)


# --- the real sets ---------------------------------------------------------------------------------------


@pytest.mark.data
@pytest.mark.parametrize(
    ("file", "column", "rows", "size", "classes"),
    [
        ("cifar10/test", "img", 10_000, 32, {0: "airplane", 9: "truck"}),
        ("cifar100/test", "img", 10_000, 32, {0: "apple", 1: "aquarium fish", 99: "worm"}),
        ("tiny-imagenet/valid", "image", 10_000, 64, {0: "goldfish", 1: "European fire salamander"}),
        ("fashion-mnist/test", "image", 10_000, 28, {0: "T - shirt / top", 9: "Ankle boot"}),
    ],
)
def test_a_real_file_decodes_to_what_pillow_gives(shared_data, file, column, rows, size, classes, no_network):
    path = shared_data / f"{file}.parquet"
    got = sources.load("mine", path=path)
    image = torch.empty(rows, 3, size, size, dtype=torch.uint8)
    for part in (got.train, got.test):
        assert part["image"].dtype == torch.uint8
        image[part["id"]] = part["image"]
    # balanced sets: every fifth image of a class is an exact fifth; in CIFAR-100 some come twice
    assert len(got.train["id"]) == (8_002 if "cifar100" in file else 8_000)
    assert sorted(torch.cat([got.train["id"], got.test["id"]]).tolist()) == list(range(rows))
    assert {i: got.classes[i] for i in classes} == classes
    picked = [0, 1, 17, 4_444, rows - 1]
    for row, direct in zip(picked, raw(path, picked, column), strict=True):
        assert torch.equal(image[row], chw(direct))
    names = pq.read_table(path).column_names
    labels = pq.read_table(path)["fine_label" if "fine_label" in names else "label"].to_numpy()
    assert np.array_equal(got.test["label"].numpy(), labels[got.test["id"].numpy()])


@pytest.mark.data
def test_grey_images_have_three_equal_channels_and_colour_ones_do_not(shared_data):
    got = sources.load("fashion_mnist", path=shared_data / "fashion-mnist" / "test.parquet")
    image = got.test["image"]
    assert torch.equal(image[:, 0], image[:, 1])
    assert torch.equal(image[:, 0], image[:, 2])
    tiny = shared_data / "tiny-imagenet" / "valid.parquet"
    modes = [picture.mode for picture in raw(tiny, list(range(2_000)))]
    assert set(modes) == {"L", "RGB"}
    got = sources.load("tiny_imagenet", path=tiny)
    for part in (got.train, got.test):
        for row, image in zip(part["id"].tolist(), part["image"], strict=True):
            if row < len(modes) and modes[row] == "L":
                assert torch.equal(image[0], image[2])
    colours = (got.train["image"][:, 0] != got.train["image"][:, 2]).flatten(1).any(1)
    assert 0.9 < colours.float().mean() < 1


@pytest.mark.data
def test_mixed_digits_keep_their_own_test_split_and_share_the_largest_of_equally_common_sizes(shared_data):
    folder = shared_data / "digits"
    got = sources.load("digits_domains", path=folder)
    assert got.train["image"].shape == (9_000, 3, 32, 32)  # 3,000 each of 28, 32 and 16 pixels
    assert got.test["image"].shape == (3_000, 3, 32, 32)
    assert got.train["label"].bincount().tolist() == [900] * 10
    assert got.test["label"].bincount().tolist() == [300] * 10
    assert got.classes == tuple("0123456789")
    assert not set(got.train["id"].tolist()) & set(got.test["id"].tolist())
    rows = list(range(30))
    pictures = raw(folder / "test.parquet", rows)
    assert {picture.size for picture in pictures} == {(16, 16), (28, 28), (32, 32)}
    for row, picture in zip(rows, pictures, strict=True):
        expected = chw(picture.convert("RGB").resize((32, 32), Image.Resampling.BICUBIC))
        assert torch.equal(got.test["image"][row], expected)


@pytest.mark.data
@pytest.mark.parametrize(("name", "rows", "classes"), [("pacs", 9_991, 7), ("office-caltech10", 2_533, 10)])
def test_a_set_with_one_split_gives_every_fifth_image_of_each_class_and_domain(shared_data, name, rows, classes):
    path = shared_data / name
    got = sources.load(name, path=path)
    assert len(got.classes) == classes
    raw_columns = pq.read_table(path / "train.parquet", columns=["label", "domain"]).to_pydict()
    groups = list(zip(raw_columns["domain"], raw_columns["label"], strict=True))
    assert len(set(groups)) == 4 * classes
    train, test = got.train["id"].tolist(), got.test["id"].tolist()
    assert sorted(train + test) == list(range(rows))
    assert (train, test) == (sorted(train), sorted(test))
    images = [cell["bytes"] for cell in pq.read_table(path / "train.parquet")["image"].to_pylist()]
    held_out = Counter(group for group, _ in {(groups[row], images[row]) for row in test})
    for group, total in Counter(group for group, _ in set(zip(groups, images, strict=True))).items():
        assert held_out[group] == total // 5
    assert got.train["label"].tolist() == [groups[row][1] for row in train]
    assert torch.equal(got.test["image"][3], chw(raw(path / "train.parquet", [test[3]])[0]))


# --- the embedded set and names --------------------------------------------------------------------------


def test_the_embedded_digits_need_no_files():
    got = sources.load("digits")
    assert got.classes == digits.CLASSES
    assert torch.equal(got.train["image"], digits.train()["image"])
    assert torch.equal(got.test["id"], digits.test()["id"])
    resized = sources.load("digits", size=8)
    assert resized.train["image"].shape[1:] == (3, 8, 8)
    expected = Image.fromarray(got.train["image"][5].permute(1, 2, 0).numpy()).resize((8, 8), Image.BICUBIC)
    assert torch.equal(resized.train["image"][5], chw(expected))
    with pytest.raises(UsageError, match=r"no columns.*data\.label="):
        sources.load("digits", label="domain")


def test_unknown_bare_names_are_answered_with_the_near_ones():
    with pytest.raises(UsageError, match="'cifar'; did you mean cifar10 or cifar100"):
        sources.load("cifar")


def test_a_local_folder_given_as_a_name_is_answered_with_the_path_option(tmp_path, monkeypatch):
    (tmp_path / "my" / "photos").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"data\.path=my/photos"):
        sources.load("my/photos")


@pytest.mark.parametrize("name", ["cifar10", "someone/something"])
def test_without_a_network_the_error_names_the_local_remedy(name, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"data\.path=") as raised:
        sources.load(name)
    assert origins.ALIASES.get(name, name) in one_line(raised)


def test_hub_sets_come_through_the_alias_table_and_are_cached_by_fingerprint(monkeypatch):
    pixels = noise(6)
    asked = []

    def fake(hub_id):
        asked.append(hub_id)
        features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["a_x", "b"])})
        rows = {"img": [Image.fromarray(p) for p in pixels], "label": [0, 1] * 3}
        whole = datasets.Dataset.from_dict(rows, features=features)
        return datasets.DatasetDict(train=whole.select([3, 0, 1]), test=whole.select([4, 5]))

    monkeypatch.setattr(datasets, "load_dataset", fake)
    got = sources.load("cifar10")
    assert asked == ["uoft-cs/cifar10"]
    assert got.name == "cifar10"
    assert got.classes == ("a x", "b")
    assert got.train["label"].tolist() == [1, 0, 1]
    assert np.array_equal(got.train["image"].permute(0, 2, 3, 1).numpy(), pixels[[3, 0, 1]])
    assert np.array_equal(got.test["image"].permute(0, 2, 3, 1).numpy(), pixels[[4, 5]])
    with monkeypatch.context() as patch:
        patch.setattr(sources, "_decode", None)  # the second time nothing is decoded
        assert equal(sources.load("cifar10"), got)
    pixels = noise(6, seed=9)  # a new version of the set
    assert np.array_equal(sources.load("cifar10").train["image"][0].permute(1, 2, 0).numpy(), pixels[3])


# --- local copies ----------------------------------------------------------------------------------------


def class_folders(root: Path, counts: dict[str, int], seed: int = 0) -> dict[str, np.ndarray]:
    out = {}
    for i, (name, n) in enumerate(counts.items()):
        (root / name).mkdir(parents=True)
        out[name] = noise(n, seed=seed + i)
        for j, pixels in enumerate(out[name]):
            (root / name / f"{j:03}.png").write_bytes(png(pixels))
    return out


def test_class_folders_without_splits(tmp_path, no_network):
    pixels = class_folders(tmp_path / "set", {"red_fox": 10, "cat": 7})
    (tmp_path / "set" / "cat" / "notes.txt").write_text("not an image")
    class_folders(tmp_path / "set", {".hidden": 5})
    got = sources.load("photos", path=tmp_path / "set")
    assert got.name == "photos"
    assert got.classes == ("cat", "red fox")
    assert got.test["label"].tolist() == [0, 1, 1]
    assert got.train["label"].tolist() == [0] * 6 + [1] * 8
    assert np.array_equal(got.test["image"][0].permute(1, 2, 0).numpy(), pixels["cat"][4])
    assert np.array_equal(got.test["image"][2].permute(1, 2, 0).numpy(), pixels["red_fox"][9])


@pytest.mark.parametrize("other", ["test", "val"])
def test_class_folders_below_splits(tmp_path, other):
    pixels = class_folders(tmp_path / "train", {"a": 3, "b": 2, "c": 1})
    held_out = class_folders(tmp_path / other, {"b": 2, "c": 1}, seed=50)
    got = sources.load("x", path=tmp_path)
    assert got.classes == ("a", "b", "c")
    assert got.train["label"].tolist() == [0, 0, 0, 1, 1, 2]
    assert got.test["label"].tolist() == [1, 1, 2]
    assert np.array_equal(got.train["image"][4].permute(1, 2, 0).numpy(), pixels["b"][1])
    assert np.array_equal(got.test["image"][2].permute(1, 2, 0).numpy(), held_out["c"][0])


def test_a_test_folder_alone_is_not_trained_on(tmp_path):
    class_folders(tmp_path / "test", {"a": 10, "b": 10})
    with pytest.raises(UserError, match="no split 'train', only test"):
        sources.load("x", path=tmp_path)


def test_what_save_to_disk_wrote(tmp_path, no_network):
    pixels = noise(12)
    features = datasets.Features({"photo": datasets.Image(), "kind": datasets.ClassLabel(names=["u", "v"])})
    rows = {"photo": [Image.fromarray(p) for p in pixels], "kind": [0, 1] * 6}
    whole = datasets.Dataset.from_dict(rows, features=features)
    whole.save_to_disk(str(tmp_path / "one"))
    got = sources.load("x", path=tmp_path / "one")
    assert got.classes == ("u", "v")
    assert got.test["id"].tolist() == [8, 9]
    assert np.array_equal(got.test["image"].permute(0, 2, 3, 1).numpy(), pixels[[8, 9]])
    parts = datasets.DatasetDict(train=whole.select(range(2, 12)), validation=whole.select([1]))
    parts.save_to_disk(str(tmp_path / "two"))
    got = sources.load("x", path=tmp_path / "two")
    assert len(got.train["id"]) == 10
    assert got.test["label"].tolist() == [1]
    assert np.array_equal(got.test["image"][0].permute(1, 2, 0).numpy(), pixels[1])


def test_sharded_parquet_files_are_read_in_order_and_test_goes_before_validation(tmp_path):
    pixels = noise(4)
    for i in range(2):
        write(tmp_path / f"train-0000{i}-of-00002.parquet", image=[png(pixels[i])], label=[i])
    write(tmp_path / "valid.parquet", image=[png(pixels[2])], label=[0])
    assert len(sources.load("x", path=tmp_path).test["id"]) == 1
    write(tmp_path / "test.parquet", image=[png(pixels[3])] * 2, label=[1, 0])
    got = sources.load("x", path=tmp_path)
    assert np.array_equal(got.train["image"].permute(0, 2, 3, 1).numpy(), pixels[:2])
    assert got.train["id"].tolist() == [0, 1]
    assert got.test["id"].tolist() == [2, 3]
    assert got.test["label"].tolist() == [1, 0]


# --- pixels ----------------------------------------------------------------------------------------------


def test_white_is_255_and_black_is_0_in_every_mode(tmp_path):
    def picture(mode: str, colour) -> bytes:
        out = io.BytesIO()
        Image.new(mode, (4, 4), colour).save(out, format="PNG")
        return out.getvalue()

    white = [picture("RGB", (255,) * 3), picture("L", 255), picture("1", 1), picture("RGBA", (255,) * 4)]
    black = [picture("RGB", (0,) * 3), picture("L", 0), picture("1", 0), picture("P", 0)]
    write(tmp_path / "train.parquet", image=white + black, label=[1] * 4 + [0] * 4)
    write(tmp_path / "test.parquet", image=[white[0]], label=[1])
    for size in (None, 3, 8):
        got = sources.load("x", path=tmp_path, size=size)
        assert got.train["image"][:4].min() == 255
        assert got.train["image"][4:].max() == 0


def test_sixteen_bit_images_are_refused_instead_of_clipped(tmp_path):
    deep = png(np.full((4, 4), 40_000, dtype=np.uint16))
    path = write(tmp_path / "train.parquet", image=[png(noise(1, 4)[0]), deep], label=[0, 1])
    with pytest.raises(UserError, match=r"row 1 .*8 bits"):
        sources.load("x", path=path)


def test_the_commonest_size_wins_and_the_test_split_follows_it(tmp_path):
    small, large = noise(3, 4), noise(2, 9)
    write(tmp_path / "train.parquet", image=[png(large[0]), png(small[0]), png(small[1])], label=[0, 0, 1])
    write(tmp_path / "test.parquet", image=[png(large[1])] * 3, label=[0, 1, 0])
    got = sources.load("x", path=tmp_path)
    assert got.train["image"].shape == (3, 3, 4, 4)
    assert got.test["image"].shape == (3, 3, 4, 4)
    assert np.array_equal(got.train["image"][2].permute(1, 2, 0).numpy(), small[1])


def test_height_and_width_are_not_swapped(tmp_path):
    pixels = noise(1, 8)[0][:4, :, :]  # 4 high, 8 wide
    for split, n in (("train", 4), ("test", 1)):
        write(tmp_path / f"{split}.parquet", image=[png(pixels)] * n, label=[0] * n)
    got = sources.load("x", path=tmp_path)
    assert got.train["image"].shape == (4, 3, 4, 8)
    assert np.array_equal(got.train["image"][0].permute(1, 2, 0).numpy(), pixels)


def test_shrinking_does_not_alias(tmp_path):
    stripes = np.zeros((32, 32, 3), dtype=np.uint8)
    stripes[:, ::2] = 255
    for split in ("train", "test"):
        write(tmp_path / f"{split}.parquet", image=[png(stripes)], label=[0])
    got = sources.load("x", path=tmp_path, size=4).train["image"].int()
    assert (got - 127).abs().max() < 12  # without the wider filter a column is nearly black or white


# --- columns, labels, rows -------------------------------------------------------------------------------


def five_images() -> list[bytes]:
    return [png(p) for p in noise(5)]


def test_text_labels_give_sorted_names_and_whole_numbers_give_their_digits(tmp_path):
    path = write(tmp_path / "a.parquet", image=five_images(), label=["zoo", "an_ant ", "zoo", "bee", "zoo"])
    with pytest.raises(UserError, match="too few images for a test split"):
        sources.load("x", path=path)
    many = [png(p) for p in noise(50)]
    path = write(tmp_path / "a.parquet", image=many[:10], label=["zoo", "an_ant ", "zoo", "bee", "zoo"] * 2)
    got = sources.load("x", path=path)
    assert got.classes == ("an ant", "bee", "zoo")
    assert got.test["label"].tolist() == [2]
    path = write(tmp_path / "c.parquet", image=many, label=list("jihgfedcba") * 5)
    assert sources.load("x", path=path).classes == tuple("abcdefghij")
    path = write(tmp_path / "b.parquet", image=many[:10], label=[3] * 10)
    assert sources.load("x", path=path).classes == ("0", "1", "2", "3")


def test_the_label_column_is_the_declared_one(tmp_path):
    named = datasets.ClassLabel(names=["p", "q"])
    columns = {"image": five_images(), "weight": [7] * 5, "domain": [1] * 5, "kind": [1] * 5}
    path = write(tmp_path / "a.parquet", {"kind": named, "domain": named}, **columns)
    assert sources.load("x", path=path).classes == ("p", "q")
    both = {"image": five_images(), "coarse_label": [0] * 5, "fine_label": [1] * 5}
    path = write(tmp_path / "b.parquet", {"coarse_label": named, "fine_label": named}, **both)
    assert sources.load("x", path=path).train["label"].tolist() == [1] * 4
    assert sources.load("x", path=path, label="coarse_label").train["label"].tolist() == [0] * 4


def test_ambiguous_columns_are_named_with_the_option_that_chooses(tmp_path):
    named = datasets.ClassLabel(names=["p", "q"])
    path = write(tmp_path / "a.parquet", {"k": named, "m": named}, image=five_images(), k=[0] * 5, m=[1] * 5)
    with pytest.raises(UserError, match=r"several label columns \(k, m\).*data\.label=") as raised:
        sources.load("x", path=path)
    one_line(raised)
    assert sources.load("x", path=path, label="m").train["label"].tolist() == [1] * 4
    path = write(tmp_path / "b.parquet", left=five_images(), right=five_images()[::-1], label=[0] * 5)
    with pytest.raises(UserError, match=r"several image columns \(left, right\).*data\.image="):
        sources.load("x", path=path)
    got = sources.load("x", path=path, image="right").train["image"][0]
    assert np.array_equal(got.permute(1, 2, 0).numpy(), noise(5)[4])


def test_columns_that_are_not_there_or_hold_something_else(tmp_path):
    path = write(tmp_path / "a.parquet", image=five_images(), label=[0] * 5, score=[0.5] * 5)
    with pytest.raises(UsageError, match="'lable'; did you mean label"):
        sources.load("x", path=path, label="lable")
    with pytest.raises(UsageError, match="'pixels'; choose from image, label, score"):
        sources.load("x", path=path, image="pixels")
    with pytest.raises(UserError, match=r"'score' .*holds double"):
        sources.load("x", path=path, label="score")
    with pytest.raises(UserError, match=r"'label' .*holds no images"):
        sources.load("x", path=path, image="label")
    with pytest.raises(UserError, match=r"no image column.*data\.image="):
        sources.load("x", path=write(tmp_path / "b.parquet", label=[0], other=[1]))
    with pytest.raises(UserError, match=r"no label column.*data\.label="):
        sources.load("x", path=write(tmp_path / "c.parquet", image=five_images(), score=[0.5] * 5))


def test_labels_outside_the_classes_are_named_by_row(tmp_path):
    named = {"label": datasets.ClassLabel(names=["p", "q"])}
    for wrong in (2, -1):
        path = write(tmp_path / "a.parquet", named, image=five_images(), label=[0, 1, 0, wrong, 1])
        with pytest.raises(UserError, match=rf"row 3 .* label {wrong}, which is not one of the 2 classes"):
            sources.load("x", path=path)
    write(tmp_path / "d" / "train.parquet", image=five_images(), label=["a", "b", "a", "b", "a"])
    write(tmp_path / "d" / "test.parquet", image=five_images(), label=["a", "a", "c", "b", "a"])
    with pytest.raises(UserError, match=r"row 2 .*test\.parquet has label c"):
        sources.load("x", path=tmp_path / "d")
    write(tmp_path / "d" / "test.parquet", image=five_images(), labels=["a"] * 5)
    with pytest.raises(UsageError, match=r"label column of .*test\.parquet 'label'; did you mean labels"):
        sources.load("x", path=tmp_path / "d")
    path = write(tmp_path / "e.parquet", image=five_images(), label=[0, None, 0, 0, 0])
    with pytest.raises(UserError, match=r"row 1 .* no 'label'"):
        sources.load("x", path=path)


def test_splits_that_number_their_classes_differently_are_refused(tmp_path):
    for split, names in (("train", ["p", "q"]), ("test", ["q", "p"])):
        named = {"label": datasets.ClassLabel(names=names)}
        write(tmp_path / f"{split}.parquet", named, image=five_images(), label=[0, 1, 0, 1, 1])
    with pytest.raises(UserError, match=r"classes of .*test\.parquet are not those of the training split"):
        sources.load("x", path=tmp_path)


def test_corrupt_and_missing_images_are_named_by_row(tmp_path):
    good = five_images()
    for bad, reason in ((b"not an image", "not an image"), (good[0][:-40], "row 3"), (None, "no image")):
        path = write(tmp_path / "a.parquet", image=[*good[:3], bad, good[4]], label=[0] * 5)
        with pytest.raises(UserError, match=reason) as raised:
            sources.load("x", path=path)
        assert "row 3 of" in one_line(raised)
    class_folders(tmp_path / "set", {"a": 10})
    (tmp_path / "set" / "a" / "004.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"row 4 of .*004\.png\) cannot be decoded"):
        sources.load("x", path=tmp_path / "set")


def test_paths_with_nothing_to_load(tmp_path):
    for path, text in (
        (tmp_path / "absent", "no such file or folder"),
        (tmp_path, "nothing to load"),
        (
            write(tmp_path / "none.parquet", image=five_images(), label=[0] * 5).rename(tmp_path / "a.csv"),
            "not a parquet",
        ),
    ):
        with pytest.raises(UserError, match=text) as raised:
            sources.load("x", path=path)
        assert "data.path=" in one_line(raised)
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(UserError, match=r"cannot read .*broken\.parquet") as raised:
        sources.load("x", path=tmp_path / "broken.parquet")
    one_line(raised)


def test_an_empty_split_is_refused(tmp_path):
    full = pa.parquet.read_table(write(tmp_path / "train.parquet", image=five_images(), label=[0] * 5))
    pq.write_table(full.slice(0, 0), tmp_path / "test.parquet")
    with pytest.raises(UserError, match=r"test\.parquet has no rows"):
        sources.load("x", path=tmp_path)
    with pytest.raises(UserError, match=r"test\.parquet has no rows"):
        sources.load("x", path=tmp_path / "test.parquet")


def test_a_path_under_the_name_of_the_embedded_digits_is_refused(tmp_path):
    class_folders(tmp_path / "cats", {"a": 5, "b": 5})
    with pytest.raises(UsageError, match=r"data.path=.*cats is another set; name it with data=") as raised:
        sources.load("digits", path=tmp_path / "cats")
    one_line(raised)
    with pytest.raises(UserError, match="there is no such file"):
        sources.load("digits", path=tmp_path / "dogs")


def test_a_size_below_one_is_refused():
    with pytest.raises(UsageError, match=r"data\.size must be at least 1, not 0"):
        sources.load("digits", size=0)


def test_an_image_that_comes_again_is_on_one_side_of_the_split_only(tmp_path):
    """Ten different images of one class and five copies: the tests are the fifth and the tenth different one."""
    order = [0, 1, 1, 2, 0, 3, 4, 5, 4, 6, 7, 8, 9, 4, 9]
    pixels = noise(10)
    path = write(tmp_path / "a.parquet", image=[png(pixels[i]) for i in order], label=[0] * 15)
    got = sources.load("x", path=path)
    assert [order[row] for row in got.test["id"]] == [4, 4, 9, 4, 9]
    assert [order[row] for row in got.train["id"]] == [0, 1, 1, 2, 0, 3, 5, 6, 7, 8]
    for i, number in enumerate(order):  # the same from files
        (tmp_path / "set" / "a").mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / "a" / f"{i:02}.png").write_bytes(png(pixels[number]))
    assert equal(sources.load("x", path=tmp_path / "set"), replace(got, classes=("a",)))


def test_a_class_without_a_name_ends_in_one_line_that_says_where_and_what_to_do(tmp_path):
    for blank in ("", "  ", "_"):
        named = {"label": datasets.ClassLabel(names=["p", blank, "q"])}
        path = write(tmp_path / "a.parquet", named, image=five_images(), label=[0, 2, 0, 1, 1])
        with pytest.raises(UserError, match=r"class 1 in column 'label' of .*a\.parquet .*row 3 .*name it") as raised:
            sources.load("x", path=path)
        one_line(raised)
    path = write(tmp_path / "b.parquet", named, image=five_images(), label=[0, 2, 0, 0, 0])  # nobody has it
    with pytest.raises(UserError, match=r"class 1 .*has no name; name it"):
        sources.load("x", path=path)
    path = write(tmp_path / "c.parquet", image=five_images(), label=["p", "p", "p", " ", "q"])
    with pytest.raises(UserError, match=r"class 0 .*row 3 of .*c\.parquet is the first"):
        sources.load("x", path=path)
    assert not (store.cache_folder() / "decoded").exists()


def test_classes_that_a_person_would_write_alike_keep_their_own_names(tmp_path):
    class_folders(tmp_path / "set", {"red_fox": 5, "red fox": 6, "_red_fox": 7, "grey_wolf": 8})
    got = sources.load("x", path=tmp_path / "set")
    assert got.classes == ("_red_fox", "grey wolf", "red fox", "red_fox")
    rows = torch.cat([got.train["label"], got.test["label"]]).bincount().tolist()
    assert dict(zip(got.classes, rows, strict=True)) == {"red_fox": 5, "red fox": 6, "_red_fox": 7, "grey wolf": 8}


# --- domains ---------------------------------------------------------------------------------------------


def test_domains_are_kept_by_sorted_names_whatever_the_column_holds(tmp_path):
    named = {"domain": datasets.ClassLabel(names=["sketch", "photo"])}
    images = [png(p) for p in noise(10)]
    for features, values, names in (
        (None, ["photo", "art_x"] * 5, ("art_x", "photo")),
        (named, [1, 0] * 5, ("photo", "sketch")),
        (None, [7, 12] * 5, ("12", "7")),
    ):
        path = write(tmp_path / "a.parquet", features, image=images, label=[0] * 10, domain=values)
        got = sources.load("x", path=path)
        assert got.domains == names
        told = [named["domain"].names[v] if features else str(v) for v in values]
        for part in (got.train, got.test):
            assert part["domain"].dtype == torch.int64
            assert [names[d] for d in part["domain"]] == [told[row] for row in part["id"]]
        assert got.test["id"].tolist() == [8, 9]
        assert equal(sources.load("x", path=path), got)  # from the cache


def test_each_split_has_the_domains_that_it_says_and_names_are_of_both(tmp_path):
    images = five_images()
    write(tmp_path / "train.parquet", image=images, label=[0] * 5, domain=["b", "c", "b", "c", "c"])
    write(tmp_path / "test.parquet", image=images[:2], label=[0, 0], domain=["d", "a"])
    got = sources.load("x", path=tmp_path)
    assert got.domains == ("a", "b", "c", "d")
    assert got.train["domain"].tolist() == [1, 2, 1, 2, 2]
    assert got.test["domain"].tolist() == [3, 0]
    write(tmp_path / "test.parquet", image=images[:2], label=[0, 0])
    got = sources.load("x", path=tmp_path)
    assert got.domains == ("b", "c")
    assert "domain" not in got.test
    write(tmp_path / "train.parquet", image=images, label=[0] * 5)
    got = sources.load("x", path=tmp_path)
    assert got.domains == ()
    assert "domain" not in got.train


def test_rows_without_a_domain_and_columns_that_hold_something_else_are_named(tmp_path):
    plain = {"image": five_images(), "label": [0] * 5}
    for values in (["a", "b", None, "a", "a"], ["a", "b", " ", "a", "a"]):
        with pytest.raises(UserError, match=r"row 2 of .* has no 'domain'; add it") as raised:
            sources.load("x", path=write(tmp_path / "a.parquet", **plain, domain=values))
        one_line(raised)
    named = {"domain": datasets.ClassLabel(names=["a", "b"])}
    with pytest.raises(UserError, match=r"row 4 of .* has no 'domain'"):
        sources.load("x", path=write(tmp_path / "b.parquet", named, **plain, domain=[0, 0, 1, 1, 2]))
    other = sources.load("x", path=write(tmp_path / "c.parquet", **plain, domain=[0.5] * 5))
    assert other.domains == ()  # a column of that name that holds no names


# --- the cache -------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path) -> Path:
    images = [png(p) for p in noise(10)]
    return write(tmp_path / "small" / "train.parquet", image=images, label=[0, 1] * 5).parent


def cached() -> list[Path]:
    return sorted((store.cache_folder() / "decoded").iterdir())


def test_a_cached_set_equals_the_first_decode_and_is_not_decoded_again(small, tmp_path, monkeypatch):
    first = sources.load("x", path=small)
    monkeypatch.setattr(sources, "_decode", None)
    assert equal(sources.load("x", path=small), first)
    moved = tmp_path / "moved"
    shutil.copytree(small, moved)
    os.utime(moved / "train.parquet", (1, 1))
    renamed = sources.load("y", path=moved)  # known by its content, not by its place, age or name
    assert equal(renamed, first)
    assert renamed.name == "y"


def test_another_content_column_or_size_is_another_entry(small, tmp_path):
    sources.load("x", path=small)
    assert sources.load("x", path=small, size=3).train["image"].shape[-1] == 3
    assert len(cached()) == 2
    write(small / "train.parquet", image=[png(p) for p in noise(10, seed=1)], label=[0, 1] * 5)
    changed = sources.load("x", path=small)
    assert np.array_equal(changed.train["image"][0].permute(1, 2, 0).numpy(), noise(10, seed=1)[0])
    class_folders(tmp_path / "set", {"a": 5, "b": 5})
    sources.load("x", path=tmp_path / "set")
    # the same bytes in the same order, with another label
    (tmp_path / "set" / "a" / "004.png").rename(tmp_path / "set" / "b" / "-.png")
    moved = sources.load("x", path=tmp_path / "set")
    assert moved.train["label"].tolist() == [0] * 4 + [1] * 5


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "other tensors"])
def test_a_damaged_entry_is_decoded_again(small, damage, monkeypatch):
    first = sources.load("x", path=small)
    (file,) = cached()
    whole = file.read_bytes()
    if damage == "flipped":
        at = len(whole) - 300  # within the pixels
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    elif damage == "other tensors":
        from safetensors.torch import save_file

        save_file({"train.image": torch.zeros(2)}, file)
    else:
        file.write_bytes(whole[: {"cut": len(whole) // 2, "empty": 0}[damage]])
    assert equal(sources.load("x", path=small), first)
    assert cached() == [file]
    monkeypatch.setattr(sources, "_decode", None)
    assert equal(sources.load("x", path=small), first)  # the entry is whole again


def test_a_failed_decode_leaves_nothing_behind(tmp_path):
    path = write(tmp_path / "a.parquet", image=[b"bad", *five_images()[1:]], label=[0] * 5)
    with pytest.raises(UserError):
        sources.load("x", path=path)
    assert not (store.cache_folder() / "decoded").exists()


def test_a_cache_that_cannot_be_written_names_the_remedy(small, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDPRIOR_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="set FEDPRIOR_CACHE") as raised:
        sources.load("x", path=small)
    one_line(raised)


UPRIGHT = {  # EXIF orientation -> what a viewer does to the stored pixels [H, W, 3] (EXIF 2.3, tag 0x0112)
    1: lambda x: x,
    2: lambda x: x[:, ::-1],
    3: lambda x: x[::-1, ::-1],
    4: lambda x: x[::-1],
    5: lambda x: x.transpose(1, 0, 2),
    6: lambda x: x.transpose(1, 0, 2)[:, ::-1],
    7: lambda x: x.transpose(1, 0, 2)[::-1, ::-1],
    8: lambda x: x.transpose(1, 0, 2)[::-1],
}


@pytest.mark.parametrize("form", ["webp", "tiff"])  # both without loss; JPEG goes the way of WebP
@pytest.mark.parametrize("orientation", UPRIGHT)
def test_a_picture_is_read_as_a_viewer_shows_it(tmp_path, orientation, form):
    stored = np.random.default_rng(orientation).integers(0, 256, (6, 10, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    for folder in (tmp_path / "train" / "a", tmp_path / "test" / "a"):
        folder.mkdir(parents=True)
        how = {"lossless": True} if form == "webp" else {}
        Image.fromarray(stored).save(folder / f"it.{form}", exif=exif, **how)
    image = sources.load("own", path=tmp_path).train["image"][0].permute(1, 2, 0).numpy()
    assert (image == UPRIGHT[orientation](stored)).all()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_white(tmp_path, mode):
    ink = np.zeros((6, 6, 4), np.uint8)
    ink[2:4, 2:4] = (0, 0, 0, 255)
    ink[0, 0] = (0, 0, 0, 128)  # half seen
    for folder in (tmp_path / "train" / "a", tmp_path / "test" / "a"):
        folder.mkdir(parents=True)
        Image.fromarray(ink).convert(mode).save(folder / "it.png")
    image = sources.load("own", path=tmp_path).train["image"][0]
    assert (image[:, 2:4, 2:4] == 0).all()
    assert (image[:, 5, :] == 255).all()
    if mode != "P":
        assert image[0, 0, 0] == 255 - 128


def test_notes_of_a_png_count_and_damaged_ones_do_not(tmp_path):
    stored = np.random.default_rng(0).integers(0, 256, (6, 10, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    torn = exif.tobytes()[:18]
    for name, notes in (("whole", exif), ("torn", torn), ("none", b"Exif\0\0rubbish")):
        for split in ("train", "test"):
            folder = tmp_path / name / split / "a"
            folder.mkdir(parents=True)
            Image.fromarray(stored).save(folder / "it.png", exif=notes)
    whole = sources.load("x", path=tmp_path / "whole").train["image"][0].permute(1, 2, 0).numpy()
    assert np.array_equal(whole, np.rot90(stored, -1))
    for name in ("torn", "none"):
        found = sources.load("x", path=tmp_path / name).train["image"][0].permute(1, 2, 0).numpy()
        assert np.array_equal(found, stored)


def test_the_commonest_size_is_that_of_upright_pictures(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 8
    for split in ("train", "test"):
        (tmp_path / split / "a").mkdir(parents=True)
        for k in range(3):
            Image.new("RGB", (9, 6)).save(tmp_path / split / "a" / f"{k}.jpg", exif=exif if k else b"")
    assert sources.load("x", path=tmp_path).train["image"].shape == (3, 3, 9, 6)


@pytest.mark.skipif(not pillow.check("avif"), reason="this Pillow reads no AVIF")
def test_avif_is_read_where_pillow_reads_it(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    colour = np.zeros((16, 24, 3), dtype=np.uint8)
    colour[:8] = 255  # the upper half, which is the right one once it is upright
    for split in ("train", "test"):
        (tmp_path / split / "a").mkdir(parents=True)
        Image.fromarray(colour).save(tmp_path / split / "a" / "it.avif", exif=exif)
    image = sources.load("x", path=tmp_path).train["image"][0].float().mean(0)
    assert image.shape == (24, 16)
    assert image[:, 9:].mean() > 240
    assert image[:, :7].mean() < 15


# --- folders ---------------------------------------------------------------------------------------------


def test_what_is_no_picture_is_passed_over_and_links_are_followed(tmp_path):
    class_folders(tmp_path / "set", {"a": 10, "b": 10})
    root = tmp_path / "set"
    plain = sources.load("x", path=root)
    (root / "b").rename(tmp_path / "elsewhere")
    (root / "b").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "deep").mkdir()
    for name in ("007.png", "008.png", "009.png"):
        (tmp_path / "elsewhere" / name).rename(tmp_path / "elsewhere" / "deep" / name)
    (tmp_path / "elsewhere" / "deep").rename(tmp_path / "deep")
    (tmp_path / "elsewhere" / "deep").symlink_to(tmp_path / "deep")
    (tmp_path / "deep" / "back").symlink_to(root)
    (root / "a" / "back").symlink_to("..")
    (root / "loop").symlink_to(".")
    for name in ("a/._000.png", ".hidden/x.png", "__MACOSX/a/000.png", "a/.thumbs/x.png"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"no image")
    (root / "a" / "folder.png").mkdir()
    assert equal(sources.load("x", path=root), plain)


def test_a_link_to_nothing_is_missed(tmp_path):
    class_folders(tmp_path / "set", {"a": 10})
    (tmp_path / "set" / "a" / "gone.png").symlink_to("nowhere.png")
    with pytest.raises(UserError, match=r"cannot read .*gone\.png \(No such file or directory\)") as raised:
        sources.load("x", path=tmp_path / "set")
    one_line(raised)


def test_names_that_are_no_text(tmp_path):
    class_folders(tmp_path / "set", {"a": 10})
    plain = sources.load("x", path=tmp_path / "set")
    first = tmp_path / "set" / "a" / "000.png"
    os.rename(first, os.fsencode(first.parent) + b"/00\xe9.png")  # after 009
    found = sources.load("x", path=tmp_path / "set")
    assert sorted(found.train["image"].flatten(1).tolist() + found.test["image"].flatten(1).tolist()) == sorted(
        plain.train["image"].flatten(1).tolist() + plain.test["image"].flatten(1).tolist()
    )
    os.rename(first.parent, os.fsencode(tmp_path / "set") + b"/caf\xe9")
    with pytest.raises(UserError, match=r"the name of the class folder .*caf.* is not UTF-8; rename it") as raised:
        sources.load("x", path=tmp_path / "set")
    one_line(raised)


def test_a_path_that_is_too_long_is_one_line(tmp_path):
    with pytest.raises(UserError, match="there is no such file or folder"):
        sources.load("x", path=tmp_path / ("a" * 300))
