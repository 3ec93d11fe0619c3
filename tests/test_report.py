import base64
import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import matplotlib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedprior.report import figures, html, summary
from fedprior.report.summary import Arm, ReportData

VOID = {"meta", "img", "br", "link", "input", "hr"}


def line(number, accuracy, *, per_class=(0.25, 0.75), up=1_000_000, down=2_000_000, refused=(), skipped=False):
    """A line of metrics.jsonl; `up` and `down` are bytes a round."""
    seen = accuracy is not None
    shares = {"mean": 0.5, "weighted": 0.6, "std": 0.1, "p10": 0.2, "worst": 0.0}
    return {
        "round": number,
        "accuracy": accuracy,
        "loss": 1.0 if seen else None,
        "clients": shares if seen else None,
        "per_class": list(per_class) if seen else None,
        "train_loss": 0.5,
        "cohort": [0, 1],
        "accepted": 2,
        "refused": list(refused),
        "skipped": skipped,
        "uplink_bytes": number * up,
        "downlink_bytes": number * down,
        "uplink_groups": {"delta": number * up, "buffers": 0},
        "downlink_groups": {"params": number * down, "buffers": 0},
    }


def curve(accuracies, **more):
    return [line(i, a, **more) for i, a in enumerate(accuracies, 1)]


def images(n, side=8, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, 3, side, side), dtype=np.uint8)


def data(**changes):
    """Two arms over three seeds; the classes' names need escaping."""
    classes = ("<b>&", 'pick"up')
    plain = [curve([0.1, 0.2]), curve([0.1, 0.3]), curve([0.1, 0.4])]
    balanced = [curve([0.5, 0.9]), curve([0.5, 0.9]), curve([0.5, 0.9])]
    return replace(
        ReportData(
            title="Two & two",
            arms=[Arm(name="fedavg", curves=plain), Arm(name="fedavg+balance", curves=balanced)],
            classes=classes,
            before=np.array([[4, 0], [1, 3], [0, 2]]),
            after=np.array([[4, 4], [3, 3], [2, 2]]),
            synthetic={name: images(2) for name in classes},
            real={name: images(3, seed=1) for name in classes},
            config='name = "<x>"\n',
            environment={"fedprior": "0.1.0", "torch": "2.13.0"},
            notes=["Tried 0.1 & 0.01."],
            target=0.5,
        ),
        **changes,
    )


class Page(HTMLParser):
    """What a page holds; raises where its tags do not nest."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text, self.cells = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in ("th", "td"):
            self.cells.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, text):
        self.text.append(text)
        if self.open and self.open[-1] in ("th", "td"):
            self.cells[-1] += text

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


# Numbers


def test_headline_averages_the_last_ten_rounds_whether_all_were_evaluated_or_not():
    seen = [1.0, 1.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.5]
    got = summary.headline(curve(seen))
    assert got == {"last": 0.5, "mean_last10": pytest.approx(0.5, abs=1e-15), "best": 1.0, "rounds": 12}
    with_gaps = [a for pair in zip([None] * 12, seen, strict=True) for a in pair]  # rounds 2, 4, ... 24
    got = summary.headline(curve(with_gaps))
    assert got == {"last": 0.5, "mean_last10": pytest.approx(0.7, abs=1e-15), "best": 1.0, "rounds": 24}  # 16 to 24


def test_headline_without_evaluations_has_no_numbers():
    assert summary.headline(curve([None])) == {"last": None, "mean_last10": None, "best": None, "rounds": 1}


def test_target_is_reached_in_the_first_round_at_or_above_it_and_counts_both_directions():
    assert summary.to_target(curve([0.1, None, 0.5, 0.4, 0.6]), 0.5) == {"rounds": 3, "MB": 9.0}
    assert summary.to_target(curve([0.1, 0.4]), 0.5) is None


def test_spread_over_seeds_is_the_sample_standard_deviation():
    assert summary.across_seeds([0.5, 0.7, 0.9]) == (pytest.approx(0.7), pytest.approx(0.2))
    assert summary.across_seeds([0.5, None]) == (0.5, None)
    assert summary.across_seeds([None]) == (None, None)


def test_comparison_row_holds_hand_computed_numbers():
    arm = Arm(name="a", curves=[curve([0.2, 0.4, 0.3]), curve([0.4, 0.6, 0.5])])
    assert summary.comparison([arm], 0.45) == [
        {
            "setting": "a",
            "mean of last 3 rounds": "40.0 % ± 14.1",  # 0.3 and 0.5
            "last": "40.0 % ± 14.1",
            "best (optimistic)": "50.0 % ± 14.1",  # 0.4 and 0.6
            "seeds": "2",
            "rounds": "3",
            "MB sent": "9.00",
            "to 45.0 %": "2 rounds, 6.00 MB (1 of 2 seeds)",
        }
    ]


def test_rounds_to_target_are_averaged_over_the_seeds_that_got_there():
    arm = Arm(name="a", curves=[curve([0.5, 0.5]), curve([0.1, 0.5]), curve([0.1, 0.1])])
    assert summary.reached(arm, 0.5) == "1.5 rounds, 4.50 MB (2 of 3 seeds)"
    assert summary.reached(Arm(name="a", curves=[curve([0.5])]), 0.5) == "1 round, 3.00 MB"
    assert summary.reached(arm, 0.6) == "not reached"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([0.8, 0.9], "a gain of 65.0 points, far outside the spread over seeds."),
        # deviations 0.1414 and 0.0707 combine to 0.158: 0.2 lies outside, but not three times
        ([0.35, 0.45], "a gain of 20.0 points, outside, but not far outside, the spread over seeds."),
        ([0.3, 0.4], "a difference of 15.0 points, within the spread over seeds, so no gain is shown."),
        ([0.1, 0.2], "a difference of 5.0 points, within the spread over seeds, so no gain is shown."),
        ([0.0, 0.0], "a loss of 20.0 points, outside, but not far outside, the spread over seeds."),
    ],
)
def test_verdict_weighs_the_difference_by_the_combined_spread(values, says):
    base = Arm(name="a", curves=[curve([0.1]), curve([0.3])])
    (sentence,) = summary.verdicts([base, Arm(name="b", curves=[curve([v]) for v in values])])
    assert sentence.endswith(says)
    assert sentence.startswith(f"b reached {100 * sum(values) / 2:.1f} % ± ")
    assert "a 20.0 % ± 14.1" in sentence


def test_verdict_of_one_seed_claims_nothing():
    three = Arm(name="b", curves=[curve([0.9])] * 3)
    (sentence,) = summary.verdicts([Arm(name="a", curves=[curve([0.1])]), three])
    assert sentence.endswith("80.0 points more, but one seed cannot tell an effect from chance.")


def test_verdict_names_what_was_never_evaluated():
    none = Arm(name="b", curves=[curve([None])])
    assert summary.verdicts([Arm(name="a", curves=[curve([0.5])]), none]) == [
        "b was never evaluated; a reached 50.0 %."
    ]
    assert summary.verdicts([none]) == ["b was never evaluated."]


def test_holdings_count_rows_and_classes():
    assert summary.holdings(data()) == [
        "3 clients hold 10 real rows; a client has on average 1.3 of the 2 classes.",
        "The prior's images add 8 synthetic rows, after which a client has on average 2 classes.",
    ]


def test_clients_are_summarised_at_the_last_evaluation_over_seeds():
    ends = [[line(1, 0.9), line(2, 0.5), line(3, None)], [line(1, 0.5)]]
    ends[0][1]["clients"] = {"mean": 0.7, "weighted": 0.8, "std": 0.3, "p10": 0.4, "worst": None}
    assert summary.client_rows([Arm(name="a", curves=ends)]) == [
        {"accuracy": "mean over clients", "a": "60.0 %"},
        {"accuracy": "mean by rows", "a": "70.0 %"},
        {"accuracy": "std over clients", "a": "20.0 %"},
        {"accuracy": "10th percentile", "a": "30.0 %"},
        {"accuracy": "worst client", "a": "0.0 %"},
    ]


def test_traffic_is_in_millions_of_bytes_and_leaves_silent_groups_out():
    arms = [Arm(name="a", curves=[curve([0.1, 0.1])]), Arm(name="b", curves=[curve([0.1], up=0)])]
    assert summary.traffic_rows(arms) == [
        {"direction and group": "up: delta", "a": "2.000", "b": "0.000"},
        {"direction and group": "down: params", "a": "4.000", "b": "2.000"},
    ]


def test_incidents_name_run_round_client_and_reason_and_stop_at_the_limit():
    bad = [{"client": 3, "reason": "not finite"}]
    abandoned = line(1, 0.1, refused=bad, skipped=True) | {"accepted": 0}
    arms = [Arm(name="a", curves=[curve([0.1]), [abandoned]])]
    where = "a, run 2 of 2, round 1"
    refused, skipped = (
        f"{where}: client 3 refused, not finite",
        f"{where}: no update counted, the model stayed as it was",
    )
    assert summary.incidents(arms) == [refused, skipped]
    assert summary.incidents(arms, most=1) == [refused, "and 1 more"]
    few = [Arm(name="a", curves=[[line(1, 0.1, skipped=True) | {"accepted": 2}]])]
    assert summary.incidents(few) == ["a, round 1: only 2 good updates, the model stayed as it was"]


# Figures


def test_series_averages_seeds_at_the_rounds_that_all_evaluated():
    arm = Arm(name="a", curves=[curve([0.2, None, 0.4], up=0), curve([0.4, 0.9, 0.8])])
    xs, ys = figures.series(arm, summary.megabytes)
    assert xs.tolist() == [2.5, 7.5]  # 2 and 3 MB, 6 and 9 MB
    assert ys == pytest.approx(np.array([[20, 40], [40, 80]]))


def test_a_class_that_the_test_set_lacks_has_no_accuracy():
    arm = Arm(name="a", curves=[curve([0.5], per_class=(0.2, None)), curve([0.5], per_class=(0.4, None))])
    means = figures.class_means(arm)
    assert means[0] == pytest.approx(30)
    assert np.isnan(means[1])
    (panel,) = figures.per_class([arm], ("x", "y")).panels
    assert "a from 30 % (x) to 30 % (x)" in panel


def dots(svg):
    """[(fill, area)] of the dots of a scatter plot, from the horizontal extent of their outlines."""
    found = []
    for outline, fill in re.findall(r'<path d="([^"]*C[^"]*)"[^>]* style="fill: (#\w+)"', svg):
        xs = [float(x) for x in re.findall(r"(-?[\d.]+) -?[\d.]+", outline)]
        found.append((fill, (max(xs) - min(xs)) ** 2))
    return found


def test_a_dot_a_client_and_class_has_the_number_of_rows_as_area():
    before, after = np.array([[40, 0], [10, 20]]), np.array([[40, 40], [20, 20]])
    plain, mixed = figures.distribution(before, after, ("x", "y")).panels
    real, synthetic = figures.REAL.lower(), figures.SYNTHETIC.lower()
    for svg, colour, counts in ((plain, real, [40, 10, 20]), (mixed, real, [40, 10, 20]), (mixed, synthetic, [40, 20])):
        areas = [area for fill, area in dots(svg) if fill == colour]
        assert sorted(areas) == pytest.approx([n * max(areas) / 40 for n in sorted(counts)], rel=0.02)
    assert not [fill for fill, _ in dots(plain) if fill == synthetic]


def test_many_clients_become_a_heat_map():
    figure = figures.distribution(np.ones((100, 10), dtype=int), None, tuple("abcdefghij"))
    assert not dots(figure.panels[0])
    assert "image/png" in figure.panels[0]


def decode(source):
    head, payload = source.split(",")
    assert head == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(payload))))


def test_image_strip_holds_the_very_pixels_and_is_enlarged_by_a_whole_factor():
    x = images(3, side=8)
    strip = figures.strip(x, "cat, real")
    sheet = decode(strip.source)
    assert sheet.shape == (8, 3 * 8 + 2, 3)
    for i in range(3):
        assert (sheet[:, 9 * i : 9 * i + 8] == x[i].transpose(1, 2, 0)).all()
    assert (strip.width, strip.height) == (6 * 26, 6 * 8)
    assert strip.enlarged
    assert strip.alt == "cat, real: 3 images"


def test_large_images_are_reduced():
    grid = figures.pictures({"cat": images(1, side=224)}, {}, ("cat",))
    assert grid.caption == "Reduced to 64 pixels."
    ((_, ((_, strip),)),) = grid.rows
    assert decode(strip.source).shape == (64, 64, 3)
    assert not strip.enlarged


def test_a_picture_grid_says_which_classes_it_leaves_out():
    classes = tuple(f"c{i}" for i in range(30))
    grid = figures.pictures({name: images(1) for name in classes[5:]}, {}, classes)
    assert [name for name, _ in grid.rows] == list(classes[5:25])
    assert grid.caption == "Enlarged 6 times without smoothing. The first 20 of 25 classes."
    assert figures.pictures({}, {}, classes) is None


# Page


def test_page_nests_and_is_labelled_throughout():
    page = Page(html.render(data()))
    assert page.all("html") == [{"lang": "en"}]
    assert "".join(page.text).count("Two & two · fedprior") == 1
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert page.all("svg")
    assert all(svg["role"] == "img" and svg["aria-label"] for svg in page.all("svg"))
    assert page.all("img")
    assert all(img["alt"] for img in page.all("img"))
    assert page.all("th")
    assert all(th["scope"] in ("col", "row") for th in page.all("th"))
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {attrs["aria-labelledby"] for _, attrs in page.tags if "aria-labelledby" in attrs} <= set(ids)
    used = {attrs["href"] for attrs in page.all("use")} | set(re.findall(r"url\((#[^)]+)\)", html.render(data())))
    assert {u.lstrip("#") for u in used} <= set(ids)


def test_page_loads_nothing_and_runs_nothing():
    text = html.render(data())
    page = Page(text)
    assert not page.all("script")
    assert not page.all("link")
    for _, attrs in page.tags:
        assert not any(name.startswith("on") for name in attrs)
        for name in ("src", "href", "srcset", "xlink:href", "action"):
            assert attrs.get(name, "#").startswith(("#", "data:image/png;base64,"))
    assert not re.search(r"url\((?!#)|@import|https?://", text)


def test_page_shows_the_numbers_of_every_table():
    given_data = data()
    cells = Page(html.render(given_data)).cells
    rows = summary.comparison(given_data.arms, given_data.target)
    assert rows[0]["mean of last 2 rounds"] == "20.0 % ± 5.0"  # 0.15, 0.2, 0.25
    tables = rows, summary.client_rows(given_data.arms), summary.traffic_rows(given_data.arms)
    shown = [cell for table in tables for row in [{k: k for k in table[0]}, *table] for cell in row.values()]
    assert cells == shown


def test_page_shows_config_notes_environment_and_incidents():
    bad = [{"client": 7, "reason": "too <long>"}]
    arms = [Arm(name="a", curves=[[line(1, 0.5, refused=bad)]])]
    text = "".join(Page(html.render(data(arms=arms))).text)
    for part in ('name = "<x>"', "Tried 0.1 & 0.01.", "2.13.0", "client 7 refused, too <long>"):
        assert part in text


def test_class_names_are_escaped():
    text = html.render(data())
    assert "<b>&" not in text
    assert "&lt;b&gt;&amp;" in text


names = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=12)


@settings(max_examples=8, deadline=None)
@given(st.lists(names, min_size=2, max_size=2, unique=True))
def test_any_name_comes_back_from_the_page(two):
    first, second = two
    arms = [Arm(name=first, curves=[curve([0.5])]), Arm(name=second, curves=[curve([0.5])])]
    classes = (second, first)
    both = data(arms=arms, classes=classes, synthetic={c: images(1) for c in classes}, real={})
    page = Page(html.render(both))
    assert {first, second} <= set(page.cells)
    assert {f"{first}, from the prior: 1 image", f"{second}, from the prior: 1 image"} == {
        img["alt"] for img in page.all("img")
    }


def test_the_same_data_give_the_same_bytes_and_leave_matplotlib_as_it_was(tmp_path):
    def settings():
        return {k: v for k, v in matplotlib.rcParams.items() if k != "backend"}  # asking for that one sets it

    settings_before = settings()
    html.write(data(), tmp_path / "a.html")
    html.render(data(title="another one"))
    html.write(data(), tmp_path / "b.html")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    assert settings() == settings_before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.html", "b.html"]


def test_one_seed_without_synthetic_images_or_evaluations_makes_a_page():
    bare = data(
        arms=[Arm(name="a", curves=[curve([None, None], up=0, down=0)])],
        after=None,
        synthetic={},
        real={},
        target=None,
        notes=[],
    )
    page = Page(html.render(bare))
    assert len(page.all("svg")) == 1
    assert not page.all("img")
    assert "a was never evaluated." in "".join(page.text)
    assert "±" not in "".join(page.text)


def test_missing_accuracies_between_evaluations_are_passed_over():
    arms = [Arm(name="a", curves=[curve([None, 0.5, None, 0.6])])]
    page = Page(html.render(data(arms=arms)))
    labels = [svg["aria-label"] for svg in page.all("svg")]
    assert "Line chart of test accuracy against round: a ends at 60.0 %." in labels


def test_no_traffic_no_figure_of_it():
    arms = [Arm(name="local", curves=[curve([0.5, 0.6], up=0, down=0)])]
    assert len(figures.training(arms).panels) == 1
    assert "What travelled" not in html.render(data(arms=arms))


def test_a_hundred_clients_and_classes_with_photographs_stay_below_two_megabytes():
    classes = tuple(f"class {i}" for i in range(100))
    rows = np.random.default_rng(0).integers(0, 50, (100, 100))
    smooth = images(8, side=16).repeat(4, axis=2).repeat(4, axis=3) // 2  # photographs are no pure noise
    shown = {name: smooth + images(8, side=64) // 8 for name in classes[:20]}
    arms = [Arm(name=n, curves=[curve([0.1, 0.2], per_class=[0.2] * 100)] * 3) for n in ("a", "b")]
    big = data(arms=arms, classes=classes, before=rows, after=rows + 1, real=shown, synthetic=shown)
    assert 100_000 < len(html.render(big)) < 2_000_000
