import io
from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value
from PIL import Image as Pil

from fedprior.data import sources
from fedprior.errors import UsageError, UserError

SETS = [  # folder, train rows, test rows, classes, side, image column, label column
    ("fashion-mnist", 60_000, 10_000, 10, 28, "image", "label"),
    ("office-caltech10", None, None, 10, 64, "image", "label"),
    ("pacs", None, None, 7, 64, "image", "label"),
    ("digits", 9_000, 3_000, 10, 32, "image", "label"),
]
TESTS = [  # folder, test file, rows, classes, side, image column, label column
    ("cifar10", "test", 10_000, 10, 32, "img", "label"),
    ("cifar100", "test", 10_000, 100, 32, "img", "fine_label"),
    ("tiny-imagenet", "valid", 10_000, 200, 64, "image", "label"),
    ("fashion-mnist", "test", 10_000, 10, 28, "image", "label"),
    ("office-caltech10", "train", 2_533, 10, 64, "image", "label"),
    ("pacs", "train", 9_991, 7, 64, "image", "label"),
    ("digits", "test", 3_000, 10, 32, "image", "label"),
]


def png(value, size=(4, 4), mode="RGB"):
    out = io.BytesIO()
    Pil.new(mode, size, value).save(out, "PNG")
    return out.getvalue()


def rows(labels, names=None, size=(4, 4)):
    return Dataset.from_dict(
        {
            "picture": [{"bytes": png((i % 256, 0, 0), size), "path": None} for i in range(len(labels))],
            "kind": labels,
        },
        features=Features({"picture": Image(), "kind": ClassLabel(names=names) if names else Value("int64")}),
    )


def write(folder, **splits):
    folder.mkdir(exist_ok=True)
    for split, dataset in splits.items():
        dataset.to_parquet(folder / f"{split}.parquet")
    return folder


@pytest.mark.data
@pytest.mark.parametrize(("folder", "split", "n", "classes", "side", "image", "label"), TESTS)
def test_a_real_split_is_decoded_to_what_pillow_gives_row_by_row(
    shared_data, tmp_path, folder, split, n, classes, side, image, label
):
    """The split alone, halved: the loader's fifth rows are its test rows."""
    file = shared_data / folder / f"{split}.parquet"
    source_rows = pq.read_table(file)
    few = source_rows.slice(0, 2500)
    pq.write_table(few, tmp_path / "train.parquet")
    got = sources.load("x", path=tmp_path)
    assert source_rows.num_rows == n
    assert len(got.train["label"]) + len(got.test["label"]) == few.num_rows
    assert len(got.classes) == classes
    assert got.train["image"].shape[1:] == (3, side, side)
    order = torch.cat([got.train["id"], got.test["id"]])
    assert sorted(order.tolist()) == list(range(few.num_rows))
    every = torch.cat([got.train["image"], got.test["image"]])[order.argsort()]
    assert torch.equal(
        torch.cat([got.train["label"], got.test["label"]])[order.argsort()], torch.tensor(few[label].to_pylist())
    )
    for row in range(0, few.num_rows, 50):
        with Pil.open(io.BytesIO(few[image][row]["bytes"].as_py())) as opened:
            wanted = opened.convert("RGB")
        if wanted.size != (side, side):
            wanted = wanted.resize((side, side), Pil.Resampling.BICUBIC)
        np.testing.assert_array_equal(every[row].permute(1, 2, 0).numpy(), np.asarray(wanted))


@pytest.mark.data
def test_official_splits_stay_apart_and_names_are_readable(shared_data):
    got = sources.load("digits_five", path=shared_data / "digits")
    assert (len(got.train["label"]), len(got.test["label"])) == (9_000, 3_000)
    assert torch.bincount(got.train["label"]).tolist() == [900] * 10
    assert not set(got.train["id"].tolist()) & set(got.test["id"].tolist())
    assert not got.train["synthetic"].any()


@pytest.mark.data
def test_class_names_have_spaces(shared_data, tmp_path):
    pq.write_table(pq.read_table(shared_data / "cifar100" / "test.parquet").slice(0, 1000), tmp_path / "a.parquet")
    assert sources.load("x", path=tmp_path / "a.parquet").classes[:2] == ("apple", "aquarium fish")


@pytest.mark.data
def test_one_split_gives_a_fifth_of_every_class_and_domain_to_the_test(shared_data):
    file = shared_data / "office-caltech10" / "train.parquet"
    columns = pq.read_table(file)
    got = sources.load("office", path=file.parent)
    pairs = list(zip(columns["domain"].to_pylist(), columns["label"].to_pylist(), strict=True))
    images = [cell["bytes"] for cell in columns["image"].to_pylist()]
    once = {image: i for i, image in enumerate(images)}.values()  # of images that come twice the last
    whole = Counter(pairs[i] for i in once)
    held = Counter(pairs[i] for i in set(once) & set(got.test["id"].tolist()))
    assert {pair: n // 5 for pair, n in whole.items()} == {pair: held[pair] for pair in whole}


def test_class_folders_with_and_without_splits(tmp_path):
    for split in ("train", "test"):
        for i, name in enumerate(("big_cat", "dog")):
            (tmp_path / split / name).mkdir(parents=True)
            for j in range(5):
                Pil.new("RGB", (6, 4), (10 * i, j, 0)).save(tmp_path / split / name / f"{j}.png")
    got = sources.load("x", path=tmp_path)
    assert got.classes == ("big cat", "dog")
    assert got.train["label"].tolist() == [0] * 5 + [1] * 5
    assert got.train["image"].shape == (10, 3, 4, 6)
    assert got.train["image"][7, :, 0, 0].tolist() == [10, 2, 0]
    alone = sources.load("x", path=tmp_path / "train")
    assert (len(alone.train["id"]), alone.test["id"].tolist()) == (8, [4, 9])


@pytest.mark.parametrize("several", [True, False])
def test_what_save_to_disk_wrote(tmp_path, several):
    train, test = rows([0, 1] * 5, ["a", "b"]), rows([1, 0], ["a", "b"])
    (DatasetDict(train=train, test=test) if several else train).save_to_disk(tmp_path / "saved")
    got = sources.load("x", path=tmp_path / "saved")
    assert got.classes == ("a", "b")
    assert got.test["label"].tolist() == ([1, 0] if several else [0, 1])
    assert (len(got.train["label"])) == (10 if several else 8)


def test_values_span_0_to_255_and_grey_is_three_equal_channels(tmp_path):
    data = Dataset.from_dict(
        {
            "image": [{"bytes": png(v, mode="L"), "path": None} for v in (0, 255, 7)],
            "label": [0, 1, 2],
        },
        features=Features({"image": Image(), "label": Value("int64")}),
    )
    got = sources.load("x", path=write(tmp_path, train=data, test=data))
    assert got.train["image"].dtype == torch.uint8
    assert got.train["image"][:3, :, 0, 0].tolist() == [[0] * 3, [255] * 3, [7] * 3]
    assert got.classes == ("0", "1", "2")


def test_mixed_sizes_take_the_commonest_and_size_takes_what_is_asked(tmp_path):
    small, large = rows([0] * 3, ["a"], (4, 4)), rows([0] * 2, ["a"], (8, 8))
    from datasets import concatenate_datasets

    folder = write(tmp_path, train=concatenate_datasets([large, small]), test=large)
    got = sources.load("x", path=folder)
    assert got.train["image"].shape[2:] == got.test["image"].shape[2:] == (4, 4)
    assert sources.load("x", path=folder, size=5).test["image"].shape[2:] == (5, 5)


def test_the_cache_gives_the_first_decode_and_a_damaged_one_is_rebuilt(tmp_path, monkeypatch):
    folder = write(tmp_path / "d", train=rows([0, 1] * 10, ["a", "b"]), test=rows([1, 0], ["a", "b"]))
    first = sources.load("x", path=folder)
    with monkeypatch.context() as m:
        m.setattr(sources, "_decode", lambda *a: pytest.fail("decoded again"))
        again = sources.load("x", path=folder)
    for part in ("train", "test"):
        for name, column in getattr(first, part).items():
            assert torch.equal(column, getattr(again, part)[name]), (part, name)
    (file,) = (sources.store.cache_folder() / "decoded").iterdir()
    good = file.read_bytes()
    for bad in (good[:-9], good[:-1] + bytes([good[-1] ^ 1]), b""):
        file.write_bytes(bad)
        assert torch.equal(sources.load("x", path=folder).train["image"], first.train["image"])
        assert file.stat().st_size == len(good)


def test_changed_data_and_changed_options_are_not_answered_from_the_cache(tmp_path):
    folder = write(tmp_path / "d", train=rows([0, 1] * 10, ["a", "b"]), test=rows([1, 0], ["a", "b"]))
    assert sources.load("x", path=folder).test["label"].tolist() == [1, 0]
    write(folder, test=rows([1, 1], ["a", "b"]))
    assert sources.load("x", path=folder).test["label"].tolist() == [1, 1]
    assert sources.load("x", path=folder, size=2).test["image"].shape[2:] == (2, 2)


def test_the_embedded_digits():
    got = sources.load("digits", size=8)
    assert got.train["image"].shape[1:] == (3, 8, 8)
    assert len(got.classes) == 10


def broken(labels):
    data = rows(labels, ["a", "b"]).to_dict()
    data["picture"][3]["bytes"] = b"no image"
    return Dataset.from_dict(data, features=rows([0], ["a", "b"]).features)


@pytest.mark.parametrize(
    ("splits", "options", "kind", "message"),
    [
        ({"train": rows([0, 1] * 5, ["a", "b"])}, {"label": "kinds"}, UsageError, "kind"),
        ({"train": rows([0, 1] * 5, ["a", "b"])}, {"image": "pic"}, UsageError, "picture"),
        ({"train": rows([0, 1] * 5, ["a", "b"])}, {"image": "kind"}, UserError, "data.image="),
        ({"train": rows([0, 1] * 5, ["a", "b"])}, {"label": "picture"}, UserError, "data.label="),
        ({"train": rows([0, -1, 1], ["a", "b"])}, {}, UserError, "row 1"),
        ({"train": rows([0, 1]), "test": rows([0, 2])}, {}, UserError, "row 1 .*2"),
        ({"train": rows([0, 1], ["a", "b"]), "test": rows([0], ["b", "a"])}, {}, UserError, "classes"),
        ({"train": broken([0, 1] * 5)}, {}, UserError, "row 3"),
        ({"train": rows([0, 1], ["a", "b"])}, {}, UserError, "too few"),
        ({"train": rows([0, 1] * 5), "test": rows([])}, {}, UserError, "no rows"),
        ({"dev": rows([0]), "other": rows([0])}, {}, UserError, "'train'"),
        (
            {"train": rows([0] * 5).rename_column("kind", "u").add_column("v", [1] * 5)},
            {},
            UserError,
            "u, v.*data.label=",
        ),
        ({"train": rows([0] * 5)}, {"size": 0}, UsageError, "data.size"),
    ],
)
def test_an_error_is_one_line_that_names_the_remedy(tmp_path, splits, options, kind, message):
    folder = write(tmp_path, **splits)
    with pytest.raises(kind, match=message) as caught:
        sources.load("x", path=folder, **options)
    assert "\n" not in str(caught.value)
    assert not list(sources.store.cache_folder().rglob("*.safetensors"))


def test_paths_and_names_that_do_not_exist(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        sources.load("x", path=tmp_path / "none")
    with pytest.raises(UserError, match="nothing to load"):
        sources.load("x", path=tmp_path)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(UserError, match="cannot read"):
        sources.load("x", path=tmp_path / "bad.parquet")
    with pytest.raises(UsageError, match="did you mean cifar10"):
        sources.load("cifar")
    with pytest.raises(UserError, match=r"data\.path="):
        sources.load("cifar10")
