import io
import shutil
import stat
import unicodedata
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from test_sources import class_folders, noise, one_line, png, write

from fedprior import store
from fedprior.data import site, sources
from fedprior.errors import UsageError, UserError

CLASSES = ("dog", "red fox", "Crane", "cat")
SIZE = (6, 6)


def named(*names: str) -> dict:
    return {"label": datasets.ClassLabel(names=list(names))}


def images(n: int, seed: int = 0) -> list[bytes]:
    return [png(p) for p in noise(n, seed=seed)]


def rows_of(got: dict) -> np.ndarray:
    return got["image"].permute(0, 2, 3, 1).numpy()


def same(first: dict, second: dict) -> bool:
    return list(first) == list(second) and all(
        torch.equal(first[k], second[k]) and first[k].dtype == second[k].dtype for k in first
    )


def cached() -> list[Path]:
    folder = store.cache_folder() / "sites"
    return sorted(folder.iterdir()) if folder.exists() else []


# --- formats ---------------------------------------------------------------------------------------------


def test_every_format_gives_the_same_table(tmp_path):
    """The rows of a site in the order of its class folders, and beside them a test split that nobody reads."""
    words = ["cat"] * 3 + ["crane"] * 2 + ["red_fox"] * 2
    pixels = noise(7)
    encoded = [png(p) for p in pixels]
    own = ["red_fox", "unused by the rows", "cat", "crane"]
    numbers = [own.index(word) for word in words]
    foreign = {"image": images(2, seed=9), "label": ["wolf", "bear"]}

    text = write(tmp_path / "text.parquet", image=encoded, label=words)
    for i, part in enumerate((slice(0, 2), slice(2, 2), slice(2, 7))):
        shard = tmp_path / "shards" / f"train-0000{i}-of-00003.parquet"
        pq.write_table(pq.read_table(write(shard, named(*own), image=encoded, label=numbers))[part], shard)
    write(tmp_path / "shards" / "test.parquet", **foreign)
    write(tmp_path / "lone" / "2024.parquet", named(*own), image=encoded, label=numbers)
    for root in (tmp_path / "plain", tmp_path / "split" / "train"):
        for i, word in enumerate(words):
            (root / word).mkdir(parents=True, exist_ok=True)
            (root / word / f"{i}.png").write_bytes(encoded[i])
    class_folders(tmp_path / "split" / "test", {"wolf": 2})
    features = datasets.Features({"photo": datasets.Image(), **named(*own)})
    pictures = [Image.fromarray(p) for p in pixels]
    whole = datasets.Dataset.from_dict({"photo": pictures, "label": numbers}, features=features)
    whole.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(train=whole, test=whole.select([0])).save_to_disk(str(tmp_path / "two"))

    expected = {
        "image": torch.from_numpy(pixels).permute(0, 3, 1, 2),
        "label": torch.tensor([3, 3, 3, 2, 2, 1, 1]),
        "synthetic": torch.zeros(7, dtype=torch.bool),
        "id": torch.arange(7),
    }
    for path in (text, *(tmp_path / name for name in ("shards", "lone", "plain", "split", "one", "two"))):
        assert same(site.load(path, CLASSES, SIZE), expected), path
        assert same(site.load(path, CLASSES, SIZE), expected), path  # from the cache


def test_images_are_fitted_to_a_height_and_a_width_as_pillow_does(tmp_path):
    pixels = noise(2, 12)[:, :9]  # 9 high, 12 wide
    grey = png(pixels[1, :, :, 0])
    path = write(tmp_path / "a.parquet", image=[png(pixels[0]), grey, png(pixels[0])], label=["dog"] * 3)
    got = site.load(path, CLASSES, (4, 7))
    assert got["image"].shape == (3, 3, 4, 7)
    for row, encoded in ((0, png(pixels[0])), (1, grey), (2, png(pixels[0]))):  # an image may come twice
        fitted = Image.open(io.BytesIO(encoded)).convert("RGB").resize((7, 4), Image.Resampling.BICUBIC)
        assert np.array_equal(rows_of(got)[row], np.asarray(fitted))
    for wrong in ((0, 7), (4, -1)):
        with pytest.raises(ValueError, match="at least 1 x 1"):
            site.load(path, CLASSES, wrong)


def test_columns_are_chosen_as_for_any_data(tmp_path):
    left, right = images(3), images(3, seed=1)
    path = write(tmp_path / "a.parquet", left=left, right=right, kind=["dog"] * 3, other=["cat"] * 3)
    with pytest.raises(UserError, match=r"several image columns \(left, right\)"):
        site.load(path, CLASSES, SIZE)
    got = site.load(path, CLASSES, SIZE, image="right", label="other")
    assert np.array_equal(rows_of(got), noise(3, seed=1))
    assert got["label"].tolist() == [3] * 3
    with pytest.raises(UsageError, match="'othr'; did you mean other"):
        site.load(path, CLASSES, SIZE, image="right", label="othr")


# --- classes ---------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_whatever_the_order_and_choice_of_a_sites_classes_rows_are_told_by_name(data, tmp_path_factory):
    experiment = data.draw(st.permutations(["an ant", "Bee", "zoo", "sea lake", "Éclair"]))
    own = data.draw(st.lists(st.sampled_from(experiment), min_size=1, unique=True))
    spelt = [
        data.draw(st.sampled_from([name, name.upper(), name.lower(), name.replace(" ", "_"), f" {name} "]))
        for name in own
    ]
    picked = data.draw(st.lists(st.integers(0, len(own) - 1), min_size=1, max_size=8))
    folder = tmp_path_factory.mktemp("site")
    numbered = write(folder / "a.parquet", named(*spelt), image=images(len(picked)), label=picked)
    text = write(folder / "b.parquet", image=images(len(picked)), label=[spelt[i] for i in picked])
    for path in (numbered, text):
        got = site.load(path, tuple(experiment), SIZE)
        assert [experiment[number] for number in got["label"]] == [own[i] for i in picked]
        assert np.array_equal(rows_of(got), noise(len(picked)))


def test_case_tells_classes_apart_where_the_experiment_does_so(tmp_path):
    classes = ("crane", "Crane", "dog", "a b", "a b")
    path = write(tmp_path / "a.parquet", image=images(3), label=["Crane", "crane", "DOG"])
    assert site.load(path, classes, SIZE)["label"].tolist() == [1, 0, 2]
    path = write(tmp_path / "b.parquet", image=images(3), label=["dog", "CRANE", "crane"])
    with pytest.raises(
        UserError, match=r"row 1 of .*b\.parquet .*'CRANE', .*0 \(crane\) or 1 \(Crane\); write"
    ) as raised:
        site.load(path, classes, SIZE)
    one_line(raised)
    path = write(tmp_path / "c.parquet", image=images(3), label=["dog", "dog", "a_b"])
    with pytest.raises(UserError, match=r"row 2 of .*3 \(a b\) or 4 \(a b\); .*numbers"):
        site.load(path, classes, SIZE)


def test_underscores_tell_classes_apart_where_the_experiment_does_so(tmp_path):
    classes = ("red_fox", "red fox", "grey wolf")
    words = ["red fox", "red_fox", "Red_Fox", "RED FOX", "grey_wolf", " red fox "]
    path = write(tmp_path / "a.parquet", image=images(6), label=words)
    assert site.load(path, classes, SIZE)["label"].tolist() == [1, 0, 0, 1, 2, 1]
    path = write(tmp_path / "b.parquet", image=images(2), label=["vulpes", "canis"])
    (tmp_path / "names.txt").write_text("vulpes = red_fox\ncanis = grey_wolf\n")
    assert site.load(path, classes, SIZE, names=tmp_path / "names.txt")["label"].tolist() == [0, 2]


def test_accents_that_a_file_system_took_apart_are_the_same_name(tmp_path):
    class_folders(tmp_path / "set", {unicodedata.normalize("NFD", "Bébé"): 2})
    assert site.load(tmp_path / "set", ("dog", unicodedata.normalize("NFC", "Bébé")), SIZE)["label"].tolist() == [1, 1]


def test_whole_numbers_without_names_are_the_experiments(tmp_path):
    path = write(tmp_path / "a.parquet", image=images(4), label=[3, 0, 3, 1])
    assert site.load(path, CLASSES, SIZE)["label"].tolist() == [3, 0, 3, 1]
    write(tmp_path / "b" / "train-00000-of-00002.parquet", image=images(4), label=[3, 0, 3, 1])
    for wrong in (4, -1, 10**12):
        path = write(tmp_path / "b" / "train-00001-of-00002.parquet", image=images(4), label=[3, 0, wrong, 1])
        with pytest.raises(UserError, match=rf"row 2 of {path} has label {wrong}, .* 4 classes; correct") as raised:
            site.load(path.parent, CLASSES, SIZE)
        one_line(raised)
    numbered = write(tmp_path / "c.parquet", named("0", "1"), image=images(2), label=[0, 1])
    with pytest.raises(UserError, match="unknown class '0'"):  # these are names
        site.load(numbered, CLASSES, SIZE)
    assert site.load(numbered, ("1", "0"), SIZE)["label"].tolist() == [1, 0]


def test_a_class_that_is_not_the_experiments_is_named_with_file_row_and_remedy(tmp_path):
    for i, words in enumerate((["dog", "cat"], [], ["cat", "dog", "reed fox", "wolf", "bear", "reed fox"])):
        path = tmp_path / "set" / f"train-0000{i}-of-00003.parquet"
        whole = pq.read_table(write(path, image=images(len(words) or 1), label=words or ["cat"]))
        pq.write_table(whole[: len(words)], path)
    with pytest.raises(UserError) as raised:
        site.load(tmp_path / "set", CLASSES, SIZE)
    text = one_line(raised)
    assert f"row 2 of {path} is of an unknown class 'reed fox'; did you mean red fox?" in text
    assert "a line 'reed fox = experiment's class', and likewise 'wolf', 'bear')" in text

    class_folders(tmp_path / "folders" / "train", {"dog": 2, "unicycle": 2})
    first = tmp_path / "folders" / "train" / "unicycle" / "000.png"
    with pytest.raises(UserError, match=f"{first}.* unknown class 'unicycle'; choose from Crane, cat, dog, red fox"):
        site.load(tmp_path / "folders", CLASSES, SIZE)

    features = datasets.Features({"photo": datasets.Image(), **named("dog", "wolf")})
    rows = {"photo": [Image.fromarray(p) for p in noise(4)], "label": [0, 0, 1, 1]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(UserError, match=rf"row 2 of {tmp_path / 'saved'} is of an unknown class 'wolf'"):
        site.load(tmp_path / "saved", CLASSES, SIZE)

    many = [f"{i} {i}" for i in range(9)]
    path = write(tmp_path / "many.parquet", image=images(9), label=many)
    with pytest.raises(UserError, match=r"'1 1', '2 2', '3 3', '4 4', '5 5' and 3 more\)"):
        site.load(path, CLASSES, SIZE)
    for blank in ("", " _ "):
        path = write(tmp_path / "blank.parquet", image=images(2), label=["dog", blank])
        with pytest.raises(UserError, match=r"row 1 of .*blank\.parquet has a 'label' without a name"):
            site.load(path, CLASSES, SIZE)
    assert cached() == []


# --- a file of names -------------------------------------------------------------------------------------


def lines(path: Path, *text: str) -> Path:
    path.write_text("\n".join(text), encoding="utf-8")
    return path


def test_a_file_says_what_the_experiment_calls_a_class(tmp_path):
    said = lines(tmp_path / "names", "# ours = theirs", "hound_dog = Dog", "puppy = dog", "", "cat = red_fox")
    words = ["puppy", "cat", "hound_dog", "crane", "cat"]
    expected = [0, 1, 0, 2, 1]  # the file goes before a class of the same name
    text = write(tmp_path / "a.parquet", image=images(5), label=words)
    own = ["cat", "crane", "hound_dog", "puppy"]
    numbered = write(tmp_path / "b.parquet", named(*own), image=images(5), label=[own.index(word) for word in words])
    for path in (text, numbered):
        for names in (said, str(said)):
            assert site.load(path, CLASSES, SIZE, names=names)["label"].tolist() == expected
        with pytest.raises(UserError, match=r"row 0 of .*'puppy'.* likewise 'hound dog'"):
            site.load(path, CLASSES, SIZE)


def test_with_a_file_whole_numbers_are_names(tmp_path):
    path = write(tmp_path / "a.parquet", image=images(4), label=[73211009, 0, 73211009, -5])
    said = lines(tmp_path / "names", "73211009 = cat", "0 = red fox", "-5 = dog")
    assert site.load(path, CLASSES, SIZE, names=said)["label"].tolist() == [3, 1, 3, 0]
    said = lines(tmp_path / "names", "73211009 = cat", "-5 = dog")
    with pytest.raises(UserError, match=r"row 1 of .*a\.parquet is of an unknown class '0'"):
        site.load(path, CLASSES, SIZE, names=said)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("puppy = wolf", r"names: the line for 'puppy' has an unknown class 'wolf'; choose from"),
        ("pupy = dog", r"names, line 2: the data have no class 'pupy'; the nearest is 'puppy'"),
        ("puppy = ", r"names, line 2: 'puppy =' is not of the form 'class = experiment's class'"),
        ("puppy = DOG", None),
        ("puppy = CAT", r"names: the line for 'puppy' has class 'CAT', which may be .* 3 \(cat\) or 4 \(Cat\)"),
    ],
)
def test_lines_that_fit_no_class_are_named(tmp_path, line, text):
    path = write(tmp_path / "a.parquet", image=images(2), label=["puppy", "dog"])
    said = lines(tmp_path / "names", "", line)
    if text is None:
        assert site.load(path, (*CLASSES, "Cat"), SIZE, names=said)["label"].tolist() == [0, 0]
        return
    with pytest.raises(UserError, match=text) as raised:
        site.load(path, (*CLASSES, "Cat"), SIZE, names=said)
    one_line(raised)


def test_a_file_of_names_that_is_not_there_is_never_passed_over(tmp_path):
    path = write(tmp_path / "a.parquet", image=images(2), label=["cat", "dog"])
    said = lines(tmp_path / "names", "")
    site.load(path, CLASSES, SIZE)
    site.load(path, CLASSES, SIZE, names=said)
    said.unlink()
    for gone in (said, tmp_path):
        with pytest.raises(UserError, match=f"cannot read {gone} .*check that it is there") as raised:
            site.load(path, CLASSES, SIZE, names=gone)
        one_line(raised)


# --- what cannot be read ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "load", [lambda path: site.load(path, ("a", "b"), SIZE), lambda path: sources.load("x", path=path)]
)
def test_errors_name_the_shard_and_the_row_in_it(tmp_path, load):
    def shards(**second) -> Path:
        for i, columns in enumerate(({}, {}, second)):
            kept = {"image": images(5), "label": ["a", "b"] * 2 + ["a"], "domain": ["d"] * 5} | columns
            write(tmp_path / f"train-0000{i}-of-00003.parquet", **kept)
        return tmp_path / "train-00002-of-00003.parquet"

    good = images(5)
    for columns, text in (
        (
            {"image": [*good[:3], b"no image", good[4]]},
            "the image in row 3 of {} cannot be decoded: it is not an image",
        ),
        ({"image": [good[0], good[1][:-40], *good[2:]]}, "the image in row 1 of {} cannot be decoded"),
        ({"image": [None, *good[1:]]}, "row 0 of {} has no image"),
        ({"label": ["a", "b", "a", "b", None]}, "row 4 of {} has no 'label'"),
        ({"label": [0, 1, 0, 1, 0]}, "{} has other columns or class names than"),
        ({"label": pa.array(["a", "b", "a", "b", "a"]).dictionary_encode()}, "{} has other columns or class names"),
    ):
        shard = shards(**columns)
        with pytest.raises(UserError) as raised:
            load(tmp_path)
        assert text.format(shard) in one_line(raised)
    shard.write_bytes(b"PAR1 and then nothing")
    with pytest.raises(UserError, match=f"cannot read {shard}: "):
        load(tmp_path)


def test_a_row_without_a_domain_is_named_by_its_shard(tmp_path):
    for i, domains in enumerate((["d"] * 5, ["d", "d", "", "d", "d"])):
        write(tmp_path / f"train-0000{i}-of-00002.parquet", image=images(5), label=["a"] * 5, domain=domains)
    with pytest.raises(UserError, match=r"row 2 of .*train-00001-of-00002\.parquet has no 'domain'"):
        sources.load("x", path=tmp_path)
    assert set(site.load(tmp_path, ("a",), SIZE)) == {"image", "label", "synthetic", "id"}  # no use for it here


def test_shards_that_number_their_classes_differently_are_refused(tmp_path):
    for i, own in enumerate((["dog", "cat"], ["cat", "dog"])):
        write(tmp_path / f"train-0000{i}-of-00002.parquet", named(*own), image=images(5), label=[0, 1, 0, 1, 1])
    for load in (lambda: site.load(tmp_path, CLASSES, SIZE), lambda: sources.load("x", path=tmp_path)):
        with pytest.raises(UserError, match=r"train-00001-of-00002\.parquet has other .*class names than .*00000-of"):
            load()


def test_a_file_in_a_class_folder_that_is_no_image_is_named(tmp_path):
    class_folders(tmp_path / "set", {"cat": 3, "dog": 3})
    bad = tmp_path / "set" / "dog" / "001.png"
    bad.write_bytes(b"")
    with pytest.raises(UserError) as raised:
        site.load(tmp_path / "set", CLASSES, SIZE)
    assert one_line(raised).count(str(bad)) == 1
    assert f"the image in row 4 of {tmp_path / 'set'} ({bad}) cannot be decoded" in one_line(raised)
    bad.unlink()
    bad.symlink_to(tmp_path / "gone.png")
    with pytest.raises(UserError, match=f"cannot read {bad} .*check that it is there") as raised:
        site.load(tmp_path / "set", CLASSES, SIZE)
    one_line(raised)


def test_a_site_without_rows_is_refused(tmp_path):
    full = pq.read_table(write(tmp_path / "a.parquet", image=images(2), label=["cat"] * 2))
    pq.write_table(full[:0], tmp_path / "a.parquet")
    write(tmp_path / "b.parquet", image=[], label=[])  # columns of no type
    (tmp_path / "empty" / "train" / "cat").mkdir(parents=True)
    class_folders(tmp_path / "empty" / "test", {"cat": 2})
    (tmp_path / "nothing" / "cat").mkdir(parents=True)
    for name, text in (
        ("a.parquet", "a.parquet has no rows; give data that have some"),
        ("b.parquet", "b.parquet has no rows; give"),
        ("empty", "train has no rows; give"),
        ("nothing", "has nothing to load; it needs"),
        ("absent", "there is no such file or folder"),
    ):
        with pytest.raises(UserError, match=text) as raised:
            site.load(tmp_path / name, CLASSES, SIZE)
        one_line(raised)


def test_a_folder_of_test_images_alone_is_not_trained_on(tmp_path):
    write(tmp_path / "test.parquet", image=images(2), label=["cat"] * 2)
    with pytest.raises(UserError, match=r"no split 'train', only test; name the training file"):
        site.load(tmp_path, CLASSES, SIZE)


# --- the cache -------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path) -> Path:
    return write(tmp_path / "small.parquet", image=images(4), label=["dog", "cat"] * 2, other=["cat", "dog"] * 2)


def test_a_site_is_decoded_once_wherever_it_lies(small, tmp_path, monkeypatch):
    first = site.load(small, CLASSES, SIZE, label="label")
    monkeypatch.setattr(sources, "pixels", None)
    (tmp_path / "moved").mkdir()
    moved = shutil.copy(small, tmp_path / "moved")
    assert same(site.load(moved, CLASSES, SIZE, label="label"), first)


def test_what_changes_the_table_is_another_entry(small, tmp_path):
    def labels(classes=CLASSES, size=SIZE, **options) -> list[int]:
        return site.load(small, classes, size, **({"label": "label"} | options))["label"].tolist()

    said = lines(tmp_path / "names", "dog = cat")
    seen = [labels(), labels(CLASSES[::-1]), labels(label="other"), labels(names=said)]
    lines(said, "dog = Crane")
    seen.append(labels(names=said))
    assert seen == [[0, 3, 0, 3], [3, 0, 3, 0], [3, 0, 3, 0], [3, 3, 3, 3], [2, 3, 2, 3]]
    assert site.load(small, CLASSES, (3, 5), label="label")["image"].shape[2:] == (3, 5)
    assert site.load(small, CLASSES, (5, 3), label="label")["image"].shape[2:] == (5, 3)
    assert len(cached()) == 7
    write(small, image=images(4, seed=5), label=["dog", "cat"] * 2)
    assert np.array_equal(rows_of(site.load(small, CLASSES, SIZE)), noise(4, seed=5))


def test_a_damaged_entry_is_decoded_again(small, monkeypatch):
    first = site.load(small, CLASSES, SIZE, label="label")
    (file,) = cached()
    whole = file.read_bytes()
    file.write_bytes(whole[:-20] + bytes([whole[-20] ^ 1]) + whole[-19:])
    assert same(site.load(small, CLASSES, SIZE, label="label"), first)
    assert cached() == [file]
    monkeypatch.setattr(sources, "pixels", None)
    assert same(site.load(small, CLASSES, SIZE, label="label"), first)  # the entry is whole again


def test_only_the_owner_can_enter_the_folder_of_decoded_sites(small):
    site.load(small, CLASSES, SIZE, label="label")
    assert stat.S_IMODE((store.cache_folder() / "sites").stat().st_mode) == 0o700


def test_a_cache_that_cannot_be_written_names_the_remedy(small, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDPRIOR_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="set FEDPRIOR_CACHE") as raised:
        site.load(small, CLASSES, SIZE, label="label")
    one_line(raised)
