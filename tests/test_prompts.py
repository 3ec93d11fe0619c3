from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedprior.errors import UserError
from fedprior.priors import prompts

CLIP_WRITTEN_OUT = """\
a photo of a {}.
a blurry photo of a {}.
a black and white photo of a {}.
a low contrast photo of a {}.
a high contrast photo of a {}.
a bad photo of a {}.
a good photo of a {}.
a photo of a small {}.
a photo of a big {}.
a photo of the {}.
a blurry photo of the {}.
a black and white photo of the {}.
a low contrast photo of the {}.
a high contrast photo of the {}.
a bad photo of the {}.
a good photo of the {}.
a photo of the small {}.
a photo of the big {}.
"""


def test_the_clip_list_is_the_published_one():
    assert list(prompts.CLIP) == CLIP_WRITTEN_OUT.splitlines()


def test_choices_by_name():
    assert prompts.templates("single") == ("a photo of a {}",)
    assert prompts.templates("clip") == prompts.templates("diverse") == prompts.CLIP


def test_a_file_gives_its_lines_without_comments_and_blank_ones(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("# mine\n\n  une photo d'un {}  \r\nein großes {}\n   # end\n", encoding="utf-8")
    assert prompts.templates(path) == prompts.templates(str(path)) == ("une photo d'un {}", "ein großes {}")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a {}\na photo\n", "line 2: 'a photo' needs exactly one {}"),
        ("# x\n\n{} and {}\n", "line 3: '{} and {}' needs exactly one {}"),
        ("a {0}\n", "line 1"),
        ("a {} {name}\n", "line 1"),
        ("a {}\n\na {} \n", "line 3: 'a {}' is already on line 1"),
        ("# nothing\n\n", "holds no prompt template"),
    ],
)
def test_a_bad_template_is_named_by_file_and_line(tmp_path, text, says):
    path = tmp_path / "mine.txt"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        prompts.templates(path)
    assert says in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_names_the_valid_choices(tmp_path):
    with pytest.raises(
        UserError, match=r"no prompt templates at 'sinlge'; choose single, clip, diverse or a text file"
    ):
        prompts.templates("sinlge")


def test_a_file_in_another_encoding_is_refused(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_bytes("ein großes {}".encode("latin-1"))
    with pytest.raises(UserError, match="not UTF-8"):
        prompts.templates(path)


def test_a_prompt_is_the_template_with_the_readable_class_name():
    assert prompts.prompt("airplane", "a photo of a {}") == "a photo of a airplane"
    assert prompts.prompt("aquarium_fish", "a photo of the big {}.") == "a photo of the big aquarium fish."


@given(st.text(max_size=20), st.sampled_from(prompts.CLIP))
def test_any_class_name_lands_in_the_slot_as_it_is(name, template):
    before, after = template.split("{}")
    assert prompts.prompt(name, template) == before + name.replace("_", " ") + after


def test_templates_are_drawn_uniformly_and_by_seed_and_key_alone():
    n = 9000
    drawn = [prompts.draw(prompts.CLIP, 3, 7, i) for i in range(n)]
    assert drawn == [prompts.draw(prompts.CLIP, 3, 7, i) for i in range(n)]
    assert drawn != [prompts.draw(prompts.CLIP, 4, 7, i) for i in range(n)]
    assert drawn != [prompts.draw(prompts.CLIP, 3, 8, i) for i in range(n)]
    count = Counter(drawn)
    chi_square = sum((count[t] - n / 18) ** 2 / (n / 18) for t in range(18))
    assert sum(count.values()) == sum(count[t] for t in range(18))
    assert chi_square < 40.8  # 99.9 % quantile at 17 degrees of freedom
