from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedprior.errors import UsageError, UserError
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
        ("{domain}\n", "line 1: '{domain}' needs exactly one {}"),
        ("{domain} of a {} in {domain}\n", "line 1"),
        ("{Domain} of a {}\n", "line 1"),
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
        UserError, match=r"no prompt templates at 'sinlge'; choose single, clip, diverse, domain, .* or a text file"
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


def test_a_repaired_prompt_has_the_article_that_fits():
    assert prompts.prompt("airplane", "a photo of a {}", repaired=True) == "a photo of an airplane"
    assert prompts.prompt("flip_flops", "a photo of a small {}.", repaired=True) == "a photo of small flip flops."
    assert [prompts.prompt("dog", t, repaired=True) for t in prompts.CLIP] == [
        t.replace("{}", "dog") for t in prompts.CLIP
    ]


def test_a_domain_stands_in_its_slot_whatever_it_and_the_class_are_called():
    template = "{domain} of a {} ({domain})"
    assert prompts.prompt("dog", template, domain="a sketch") == "a sketch of a dog (a sketch)"
    assert prompts.prompt("{domain}", template, domain="{}") == "{} of a {domain} ({})"
    assert (
        prompts.prompt("owl", prompts.DOMAIN[0], repaired=True, domain="an oil painting") == "an oil painting of an owl"
    )
    assert prompts.prompt("dog", "a {}", domain="a sketch") == "a dog"


def test_a_domain_template_without_a_domain_is_refused():
    with pytest.raises(UsageError, match=r"'\{domain\} of a \{\}' needs a domain, and there is none"):
        prompts.prompt("dog", prompts.DOMAIN[0])
    with pytest.raises(
        UsageError,
        match=r"'\{domain\} of a \{\}' names a domain, and this split has none; use data with domains and part",
    ):
        prompts.phrases(prompts.DOMAIN, ())


def test_every_named_set_has_the_class_once_in_each_template():
    for templates in prompts.NAMED.values():
        assert len(set(templates)) == len(templates)
        assert all(t.replace("{domain}", "").count("{}") == 1 for t in templates)
    assert all("{domain}" in t for t in prompts.templates("domain") + prompts.templates("domain_diverse"))


def test_a_file_may_hold_templates_with_and_without_a_domain(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("{domain} with a {}\na photo of a {}\n")
    assert prompts.templates(path) == ("{domain} with a {}", "a photo of a {}")


@pytest.mark.parametrize(
    ("domain", "phrase"),
    [
        ("photo", "a photo"),
        ("sketch", "a black and white pencil sketch"),
        ("art_painting", "an oil painting"),
        ("amazon", "a product photo on a white background"),
        ("Real World", "a photo"),
        ("Real_World", "a photo"),
        ("Clipart", "a clip art image"),
        ("watercolour", "a watercolour"),
        ("ink_drawing", "an ink drawing"),
    ],
)
def test_a_domain_has_a_phrase(domain, phrase):
    assert prompts.phrases(prompts.DOMAIN, [domain]) == (phrase,)


def test_a_phrase_of_the_table_has_an_article_and_no_slot():
    for name, phrase in prompts.PHRASES.items():
        assert name == name.lower().replace("_", " ")
        assert phrase.split()[0] in ("a", "an")
        assert "{" not in phrase


def test_domains_do_not_matter_where_no_template_asks_for_them():
    assert prompts.phrases(prompts.CLIP, ["photo", "sketch"]) == ()


def test_a_file_gives_domains_their_words(tmp_path):
    path = tmp_path / "domains.txt"
    path.write_text("sketch = a drawing in ink\n")
    assert prompts.phrases(prompts.DOMAIN, ["photo", "sketch"], path) == ("a photo", "a drawing in ink")
    with pytest.raises(UsageError, match=r"balance\.domain_words has no use"):
        prompts.phrases(prompts.CLIP, ["photo", "sketch"], path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("skech = x\n", "line 1: the data have no domain 'skech'; the nearest is 'sketch'"),
        ("sketch\n", "line 1: 'sketch' is not of the form 'domain = words'"),
        ("sketch = {}\n", "has a brace"),
    ],
)
def test_a_bad_line_of_domain_words_is_named(tmp_path, text, says):
    path = tmp_path / "domains.txt"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        prompts.phrases(prompts.DOMAIN, ["photo", "sketch"], path)
    assert says in str(error.value)
    assert str(path) in str(error.value)


def test_a_missing_file_of_domain_words_is_named():
    with pytest.raises(UserError, match=r"no words at 'gone\.txt'; give a text file with lines 'domain = words'"):
        prompts.phrases(prompts.DOMAIN, ["photo"], "gone.txt")


def test_a_listing_holds_every_prompt_once():
    found = prompts.listing(["crane", "cat"], ("a {}", "{domain} of a {}"), domains=["photo", "sketch"])
    assert [(r.classname, r.domain, r.template) for r in found.rows] == [
        (c, d, t) for c in ("crane", "cat") for d in ("photo", "sketch") for t in ("a {}", "{domain} of a {}")
    ]
    assert found.rows[3].prompt == "a black and white pencil sketch of a crane"
    assert found.odd == ("'crane' may mean a bird or a machine",)


def test_a_listing_is_what_a_run_asks_for():
    plain = prompts.listing(["aquarium_fish", "apple"], prompts.CLIP, domains=["photo"])
    assert [r.prompt for r in plain.rows] == [
        prompts.prompt(c, t) for c in ("aquarium_fish", "apple") for t in prompts.CLIP
    ]
    assert {r.domain for r in plain.rows} == {""}
    repaired = prompts.listing(["mouse", "apple"], ("a {}",), names="repaired", dataset="cifar100")
    assert [(r.words, r.prompt) for r in repaired.rows] == [
        ("mouse (animal)", "a mouse (animal)"),
        ("apple", "an apple"),
    ]
