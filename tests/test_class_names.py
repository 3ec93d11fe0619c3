import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedprior.errors import UserError
from fedprior.priors import class_names
from fedprior.priors.class_names import article, fitted, odd, wording

IMAGE = "a photo of a {}"


def said(name, template=IMAGE):
    form, words = fitted(template, name)
    return form.replace("{}", words)


@pytest.mark.parametrize(
    ("an", "words"),
    [
        ("an", "airplane apple elephant iPod otter umbrella urn urchin usher uninhabited unidentified oboe"),
        ("an", "hour hourglass honest heirloom honour 8 80 11 18-wheeler X-ray MRI SUV FBI ear eye"),
        ("a", "cat yak unicorn uniform university unique user utensil ukulele urinal uranium European eucalyptus ewer"),
        (
            "a",
            "one one-way onesie once house honey hospital heron herd 3 7 110 180 T-shirt TV UFO USB CD wolf yacht NASA",
        ),
    ],
)
def test_the_article_goes_by_the_sound(an, words):
    assert [(word, article(word)) for word in words.split()] == [(word, an) for word in words.split()]


def test_an_article_looks_at_the_first_word_alone():
    assert article("old unicorn") == "an"
    assert article("uniform (old)") == "a"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("airplane", "a photo of an airplane"),
        ("cat", "a photo of a cat"),
        ("hourglass", "a photo of an hourglass"),
        ("crane (bird)", "a photo of a crane (bird)"),
        ("scissors", "a photo of a pair of scissors"),
        ("swimming trunks", "a photo of a pair of swimming trunks"),
        ("people", "a photo of people"),
        ("cattle", "a photo of cattle"),
        ("ice cream", "a photo of ice cream"),
        ("food containers", "a photo of food containers"),
        ("industrial buildings", "a photo of industrial buildings"),
        ("plate of food", "a photo of a plate of food"),
        ("bus", "a photo of a bus"),
        ("dress", "a photo of a dress"),
        ("cactus", "a photo of a cactus"),
        ("mantis", "a photo of a mantis"),
        ("rhinoceros", "a photo of a rhinoceros"),
        ("lens", "a photo of a lens"),
        ("gas", "a photo of a gas"),
        ("the Eiffel Tower", "a photo of the Eiffel Tower"),
        ("vehicles 2", "a photo of vehicles 2"),
    ],
)
def test_a_name_gets_the_article_that_it_takes(name, sentence):
    assert said(name) == sentence


@pytest.mark.parametrize(
    ("template", "name", "sentence"),
    [
        ("an {}", "cat", "a cat"),
        ("A {} in the wild", "otter", "An otter in the wild"),
        ("a {} in the wild", "people", "people in the wild"),
        ("a photo of the {}.", "airplane", "a photo of the airplane."),
        ("a photo of the {}.", "scissors", "a photo of the scissors."),
        ("a photo of the {}.", "the Mona Lisa", "a photo of the Mona Lisa."),
        ("a photo of a small {}.", "airplane", "a photo of a small airplane."),
        ("a photo of a small {}.", "scissors", "a photo of a small pair of scissors."),
        ("a photo of a small {}.", "people", "a photo of small people."),
        ("a photo of a small {}.", "the Mona Lisa", "a photo of a small Mona Lisa."),
        ("a black and white photo of a {}.", "otter", "a black and white photo of an otter."),
        ("a {} photo", "scissors", "a scissors photo"),
        ("a {} photo", "apple", "an apple photo"),
        ("a photo of {}", "scissors", "a photo of scissors"),
        ("a picture showing {}", "scissors", "a picture showing scissors"),
        ("a dog chasing my {}", "scissors", "a dog chasing my scissors"),
        ("a map of the city with a {}", "airplane", "a map of the city with an airplane"),
        ("{domain} of a {}", "otter", "{domain} of an otter"),
        ("ein {}", "otter", "ein otter"),
        ("{}", "people", "people"),
    ],
)
def test_a_template_is_changed_in_its_article_alone(template, name, sentence):
    assert said(name, template) == sentence


@given(st.sampled_from(["a {}", "the {}", "a photo of a small {}.", "{domain} of a {}"]), st.text())
def test_no_name_is_lost_on_the_way(template, name):
    form, words = fitted(template, name)
    assert form.count("{}") == 1
    assert words.endswith(name) or name.lower().startswith("the")


def test_plain_names_are_read_as_the_papers_read_them():
    names = ["aquarium_fish", "T - shirt / top", "SeaLake", "n01443537", "0", "crane"]
    spaced = ("aquarium fish", "T - shirt / top", "SeaLake", "n01443537", "0", "crane")
    assert wording("plain", names, "tiny_imagenet") == spaced


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("aquarium_fish", "aquarium fish"),
        ("AnnualCrop", "annual crop"),
        ("CDPlayer", "CD player"),
        ("iPod", "iPod"),
        ("T - shirt / top", "t-shirt"),
        ("T-shirt/top", "t-shirt"),
        ("crane_(bird)", "crane (bird)"),
        ("crane (bird)", "crane (bird)"),
        ("tench, Tinca tinca", "tench"),
        ("n01443537", "n01443537"),
        ("The_Eiffel_Tower", "the Eiffel Tower"),
        ("alarm-clock", "alarm clock"),
        ("t-shirt", "t-shirt"),
        ("x-ray", "x-ray"),
        ("747-400", "747-400"),
        ("American  alligator ", "American alligator"),
    ],
)
def test_one_name_is_repaired(name, words):
    assert wording("repaired", [name]) == (words,)


def test_hyphens_separate_words_only_where_nothing_else_does():
    assert wording("repaired", ["go-kart", "baseball-bat"]) == ("go kart", "baseball bat")
    assert wording("repaired", ["go-kart", "baseball_bat"]) == ("go-kart", "baseball bat")
    assert wording("repaired", ["large_man-made_outdoor_things"]) == ("large man-made outdoor things",)


def test_numbers_in_front_go_only_where_all_names_have_one():
    birds = ["001.Black_footed_Albatross", "002.Laysan_Albatross"]
    assert wording("repaired", birds) == ("Black footed Albatross", "Laysan Albatross")
    assert wording("repaired", ["18-wheeler", "car"]) == ("18-wheeler", "car")


def test_digits_are_spelt_out_where_all_classes_are_digits():
    assert wording("repaired", list("0123456789"), "mnist")[::3] == ("zero", "three", "six", "nine")
    assert wording("repaired", ["7", "3"]) == ("seven", "three")
    assert wording("repaired", ["7", "cat"]) == ("7", "cat")
    assert wording("repaired", ["10", "11"]) == ("10", "11")


@pytest.mark.parametrize("dataset", ["cifar100", "uoft-cs/cifar100"])
def test_a_sense_is_given_where_the_set_makes_it_certain(dataset):
    assert wording("repaired", ["mouse", "ray", "bear"], dataset) == ("mouse (animal)", "ray (fish)", "bear")


def test_the_same_word_means_another_thing_in_another_set():
    assert wording("repaired", ["mouse"], "office_caltech10") == ("computer mouse",)
    assert wording("repaired", ["Mouse", "Alarm_Clock", "TV"], "office_home") == ("computer mouse", "alarm clock", "TV")
    assert wording("repaired", ["crane"], "zh-plus/tiny-imagenet") == ("crane (machine)",)  # its synset is n03126707
    assert wording("repaired", ["mouse", "crane"]) == ("mouse", "crane")
    assert wording("repaired", ["Trouser", "Ankle boot"], "fashion_mnist") == ("trousers", "ankle boot")


def test_of_two_classes_with_one_name_each_gets_its_own_sense():
    cranes = ["crane", "drake", "crane"]
    assert wording("repaired", cranes, "imagenet-1k") == ("crane (bird)", "drake (duck)", "crane (machine)")
    assert wording("repaired", ["crane", "drake"], "imagenet100") == ("crane", "drake (duck)")  # which one is unknown
    assert odd(["crane"], ["crane"]) == ("'crane' may mean a bird or a machine",)


def test_no_two_classes_of_a_known_set_are_called_the_same(shared_data):
    import datasets
    import pyarrow.parquet as pq

    for folder, column in [("cifar100", "fine_label"), ("tiny-imagenet", "label"), ("fashion-mnist", "label")]:
        schema = pq.read_schema(shared_data / folder / "train.parquet")
        names = datasets.Features.from_arrow_schema(schema)[column].names
        words = wording("repaired", names, folder)
        assert len(set(words)) == len(names)
        assert odd(names, words) == ()
        table = class_names.KNOWN[folder.replace("-", "_")]
        lower = {name.lower() if folder == "fashion-mnist" else name for name in names}
        assert table.keys() <= lower  # no entry that the set has no class for


def test_the_ids_of_tiny_imagenet_are_its_names(shared_data):
    rows = [line.split("\t") for line in (shared_data / "tiny-imagenet" / "classes.tsv").read_text().splitlines()[1:]]
    by_id, by_name = [r[1] for r in rows], [r[2] for r in rows]
    assert wording("repaired", by_id, "zh-plus/tiny-imagenet") == wording("repaired", by_name, "tiny_imagenet")
    assert wording("repaired", by_id[:7], "tiny_imagenet") == tuple(by_id[:7])
    assert wording("repaired", by_id, "another") == tuple(by_id)


def test_what_words_do_not_describe_is_said():
    assert odd(["n01443537", "12", "dog"], ["n01443537", "12", "dog"]) == (
        "'n01443537' is a WordNet id, which no text encoder knows",
        "'12' has no letter, so nothing says what it shows",
    )
    assert odd(["bag1", "bag2"], ["bag", "bag"]) == (
        "'bag1' is called 'bag', as 1 more",
        "'bag2' is called 'bag', as 1 more",
    )
    assert odd(["mouse"], ["mouse (animal)"]) == ()


def test_a_file_names_classes_and_the_rest_is_repaired(tmp_path):
    path = tmp_path / "names.txt"
    path.write_text("# mine\n\n  aquarium_fish = goldfish in a bowl\nOak tree=old oak \r\n", encoding="utf-8")
    names = ["aquarium fish", "Oak_tree", "SeaLake"]
    assert wording(path, names) == wording(str(path), names) == ("goldfish in a bowl", "old oak", "sea lake")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("cat = a\n\ndgo = hound\n", "line 3: the data have no class name 'dgo'; the nearest is 'dog'"),
        ("cat\n", "line 1: 'cat' is not of the form 'class name = words'"),
        ("cat =\n", "line 1: 'cat =' is not of the form"),
        ("= tabby\n", "line 1"),
        ("cat = tabby = x\n", "line 1"),
        ("cat = tabby\n# x\ncat = tom\n", "line 3: 'cat' is already on line 1"),
        ("cat = a tabby\n", "'a tabby' for 'cat' begins with an article"),
        ("cat = The tabby\n", "begins with an article"),
        ("cat = {}\n", "has a brace"),
    ],
)
def test_a_bad_line_is_named_by_file_and_line(tmp_path, text, says):
    path = tmp_path / "names.txt"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        wording(path, ["cat", "dog"])
    assert says in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_names_the_valid_choices():
    with pytest.raises(
        UserError, match="no class names at 'repaird'; choose plain, repaired or a text file with lines"
    ):
        wording("repaird", ["cat"])


def test_a_file_in_another_encoding_is_refused(tmp_path):
    path = tmp_path / "names.txt"
    path.write_bytes("cat = große Katze".encode("latin-1"))
    with pytest.raises(UserError, match="not UTF-8"):
        wording(path, ["cat"])


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=12), max_size=6))
def test_repair_gives_every_class_one_phrase_on_one_line(names):
    words = wording("repaired", names)
    assert len(words) == len(names)
    assert all(said == " ".join(said.split()) for said in words)
