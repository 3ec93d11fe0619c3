import base64
import io
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import matplotlib
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner

from fedprior import environment, nets, record
from fedprior.cli import app
from fedprior.config import Experiment, override, to_toml
from fedprior.data import digits
from fedprior.errors import UsageError, UserError
from fedprior.net import Net
from fedprior.report import figures, html, load, numbers, summary
from fedprior.report.numbers import Arm, Holdings, ReportData, Shown
from fedprior.run import run
from fedprior.store import read_json

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
            shown=Shown("fedavg+balance", 1, "balanced-1"),
            synthetic={name: images(2) for name in classes},
            real={name: images(3, seed=1) for name in classes},
            config='name = "<x>"\n',
            environment={"fedprior": "0.1.0", "torch": "2.13.0"},
            notes=["Tried 0.1 & 0.01."],
            target=0.5,
        ),
        **changes,
    )


def held(*accuracies, synthetic=0):
    """Clients with a row of the first class and two of the second, as many as there are accuracies."""
    n = len(accuracies)
    return Holdings(
        real=np.array([[1, 2]] * n), synthetic=np.full(n, synthetic), accuracy=np.array(accuracies, dtype=float)
    )


def whole():
    """Two arms with all that can be known of a run."""
    arms = []
    for number, arm in enumerate(data().arms):
        curves = [[line | {"seconds": 100.0 * line["round"]} for line in curve] for curve in arm.curves]
        spent = {"training": 150.0, "evaluation": 40.0, numbers.REST: 10.0}
        own = [held(0.1, 0.9, np.nan), held(0.3, 0.7, 1.0), held(0.5, 0.6, 0.2, synthetic=number)]
        arms.append(
            replace(
                arm,
                curves=curves,
                runs=[f"{arm.name}-{seed}" for seed in (0, 1, 2)],
                seeds=[0, 1, 2],
                clients=own,
                seconds=[spent] * 3,
                confusion=np.array([[3, 1], [0, 4]]),
                config={"method": "fedavg", "balance": ["none", "max"][number], "seed": number},
            )
        )
    return data(arms=arms)


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
    got = numbers.headline(curve(seen))
    assert got == {"last": 0.5, "mean_last10": pytest.approx(0.5, abs=1e-15), "best": 1.0, "rounds": 12}
    with_gaps = [a for pair in zip([None] * 12, seen, strict=True) for a in pair]  # rounds 2, 4, ... 24
    got = numbers.headline(curve(with_gaps))
    assert got == {"last": 0.5, "mean_last10": pytest.approx(0.7, abs=1e-15), "best": 1.0, "rounds": 24}  # 16 to 24


def test_headline_without_evaluations_has_no_numbers():
    assert numbers.headline(curve([None])) == {"last": None, "mean_last10": None, "best": None, "rounds": 1}


def test_target_is_reached_in_the_first_round_at_or_above_it_and_counts_both_directions():
    assert numbers.to_target(curve([0.1, None, 0.5, 0.4, 0.6]), 0.5) == {"rounds": 3, "MB": 9.0}
    assert numbers.to_target(curve([0.1, 0.4]), 0.5) is None


def test_spread_over_seeds_is_the_sample_standard_deviation():
    assert numbers.across_seeds([0.5, 0.7, 0.9]) == (pytest.approx(0.7), pytest.approx(0.2))
    assert numbers.across_seeds([0.5, None]) == (0.5, None)
    assert numbers.across_seeds([None]) == (None, None)


def test_comparison_row_holds_hand_computed_numbers():
    arm = Arm(name="a", curves=[curve([0.2, 0.4, 0.3]), curve([0.4, 0.6, 0.5])])
    assert summary.comparison([arm], 0.45) == [
        {
            "setting": "a",
            "mean of the last 3 rounds": "40.0 % ± 14.1",  # 0.3 and 0.5
            "last": "40.0 % ± 14.1",
            "best (optimistic)": "50.0 % ± 14.1",  # 0.4 and 0.6
            "seeds": "2",
            "rounds": "3",
            "MB sent": "9.00",
            "to 45.0 %": "2 rounds, 6.00 MB (1 of 2 seeds)",
        }
    ]


def test_the_window_of_the_headline_is_that_of_the_runs():
    one, three, long = (Arm(name=str(n), curves=[curve([0.1] * n)], runs=["r"], seeds=[0]) for n in (1, 3, 12))
    heads = [list(summary.comparison(arms, None)[0])[1:3] for arms in ([one], [three, one], [long, three], [long])]
    assert heads == [
        ["last round", "best (optimistic)"],
        ["mean of the last 1 to 3 rounds", "last"],
        ["mean of the last 3 to 10 rounds", "last"],
        ["mean of the last 10 rounds", "last"],
    ]
    assert "mean of the last 3 to 10 rounds" in summary.run_rows([long, three])[0]
    assert html.note(data(arms=[long, three])) == (
        "Test accuracy on real images, mean of the last 3 to 10 rounds, as far as evaluated, one seed."
    )
    assert html.note(data(arms=[one])) == "Test accuracy on real images, after the last round, one seed."


def test_rounds_to_target_are_averaged_over_the_seeds_that_got_there():
    arm = Arm(name="a", curves=[curve([0.5, 0.5]), curve([0.1, 0.5]), curve([0.1, 0.1])])
    assert summary.reached(arm, 0.5) == "1.5 rounds, 4.50 MB (2 of 3 seeds)"
    assert summary.reached(Arm(name="a", curves=[curve([0.5])]), 0.5) == "1 round, 3.00 MB"
    assert summary.reached(arm, 0.6) == "not reached"


def seeded(name, accuracies, seeds=None):
    """An arm of one round a seed, with this accuracy each."""
    return Arm(name=name, curves=[curve([v]) for v in accuracies], seeds=list(seeds or range(len(accuracies))))


def verdict(ours, base, **more):
    """What is said of arm b with these accuracies against arm a; `seeds` are those of b."""
    (sentence,) = summary.verdicts([seeded("a", base), seeded("b", ours, **more)])
    return sentence


TESTED = "(two-sided paired t-test over {} at 5 %)"


@pytest.mark.parametrize(
    ("gaps", "says"),
    [
        ([8.0, 8.0, 8.0], "a gain of 8.0 ± 0.0 points, told from chance {}."),
        ([-7.7, -8.3, -8.0], "a loss of 8.0 ± 0.3 points, told from chance {}."),
        # 8 / (8 / √3) is 1.73, and must exceed 4.30 with three seeds
        ([0.0, 16.0, 8.0], "a difference of 8.0 ± 8.0 points, not told from chance {}, so no gain is shown."),
        ([0.0, -16.0, -8.0], "a difference of 8.0 ± 8.0 points, not told from chance {}, so no gain is shown."),
        ([-10.0, 10.0, 0.0], "a difference of 0.0 ± 10.0 points, not told from chance {}, so no gain is shown."),
        ([0.01, 0.01, 0.01, 0.01], "a gain of less than 0.1 points, told from chance {}."),
        ([0.0, 0.0, 0.0], "they are equal, so no gain is shown."),
    ],
)
def test_a_difference_is_judged_seed_by_seed_however_far_the_seeds_lie_apart(gaps, says):
    base = [0.3, 0.5, 0.4, 0.6][: len(gaps)]  # spread by more than any of the gaps
    said = verdict([v + gap / 100 for v, gap in zip(base, gaps, strict=True)], base)
    assert said.endswith(f": {says.format(TESTED.format(f'{len(gaps)} seeds'))}")


def test_a_verdict_gives_both_means_with_their_spreads():
    assert verdict([0.4, 0.6, 0.5], [0.3, 0.5, 0.4]).startswith(
        "b reached 50.0 % ± 10.0 test accuracy, a 40.0 % ± 10.0: a gain of 10.0 ± 0.0 points, told"
    )


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), min_size=3, max_size=8))
def test_a_gain_is_called_one_when_the_paired_t_test_says_so(pairs):
    from scipy.stats import ttest_rel

    ours, base = np.array(pairs).T / 1000
    if np.ptp(ours - base) < 1e-6:  # the test has no answer
        return
    effect = f"a {'gain' if ours.mean() > base.mean() else 'loss'} of"
    assert (effect in verdict(ours, base)) == (ttest_rel(ours, base).pvalue < 0.05)


def test_seeds_are_paired_by_their_number_and_those_of_one_arm_alone_are_left_out():
    base = {0: 0.1, 1: 0.9, 2: 0.5, 3: 0.3}
    ours = {3: 0.4, 1: 1.0, 7: 0.0, 0: 0.2}
    says = verdict(ours.values(), base.values(), seeds=ours)
    assert says.endswith(f"a gain of 10.0 ± 0.0 points, told from chance {TESTED.format('the 3 seeds in both')}.")


@pytest.mark.parametrize(
    ("ours", "base", "seeds", "says"),
    [
        ([0.9], [0.1], [0], "80.0 points more, but one seed cannot tell an effect from chance."),
        ([0.1], [0.9], [0], "80.0 points less, but one seed cannot tell an effect from chance."),
        ([0.9, 0.8], [0.1, 0.0], [0, 1], "80.0 points more, but two seeds cannot tell an effect from chance."),
        ([0.9] * 3, [0.1], [0, 1, 2], "80.0 points more, but one seed in both cannot tell an effect from chance."),
        ([0.9] * 3, [0.1] * 3, [1, 2, 3], "80.0 points more, but two seeds in both cannot tell an effect from chance."),
        ([0.9] * 3, [0.1] * 3, [3, 4, 5], "80.0 points more, but no seed is in both to tell an effect from chance."),
        ([0.3004], [0.3], [0], "less than 0.1 points more, but one seed cannot tell an effect from chance."),
        ([0.2, 0.4], [0.1, 0.5], [0, 1], "they are equal, but two seeds cannot tell an effect from chance."),
    ],
)
def test_fewer_than_three_seeds_in_both_claim_nothing(ours, base, seeds, says):
    assert verdict(ours, base, seeds=seeds).endswith(f": {says}")


def test_a_seed_that_was_never_evaluated_is_no_pair():
    arms = [seeded("a", [0.1, 0.2, 0.3]), seeded("b", [0.2, 0.3, None])]
    assert summary.verdicts(arms)[0].endswith("but two seeds in both cannot tell an effect from chance.")


def test_the_headlines_are_paired_and_not_the_last_rounds():
    base = [curve([0.1 * i, 0.2 * i]) for i in (1, 2, 3)]
    ours = [curve([0.1 * i + 0.2, 0.2 * i - 0.1]) for i in (1, 2, 3)]  # 5 points more in the mean
    arms = [Arm(name=n, curves=c, seeds=[0, 1, 2]) for n, c in (("a", base), ("b", ours))]
    assert "a gain of 5.0 ± 0.0 points" in summary.verdicts(arms)[0]


def test_the_page_says_when_a_difference_is_called_a_gain():
    said = " ".join("".join(Page(html.render(whole())).text).split())
    assert "told from chance when a two-sided paired t-test over seeds at 5 % tells" in said
    assert "at least 3 seeds" in said
    assert "± the sample standard deviation of the paired differences" in said
    assert "paired" not in "".join(Page(html.render(data(arms=whole().arms[:1]))).text)


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


def splits(**arms):
    """Data of arms that hold these real rows, a split a seed: [clients, classes] each, and no synthetic ones."""
    held = {
        name: [Holdings(real=np.array(x), synthetic=np.zeros(len(x), int), accuracy=np.ones(len(x))) for x in own]
        for name, own in arms.items()
    }
    made = [
        replace(seeded(name, [0.5] * len(own)), clients=own, runs=[f"{name}{i}" for i in range(len(own))])
        for name, own in held.items()
    ]
    first = next(iter(arms))
    return data(arms=made, before=held[first][0].real, after=None, shown=Shown(first, 0, f"{first}0"))


def test_whose_split_is_shown_is_said_where_runs_have_several():
    one, other, three = [[4, 0], [0, 4]], [[3, 0], [0, 5]], [[4, 0], [0, 2], [0, 2]]
    counts = "2 clients hold 8 real rows; a client has on average 1 of the 2 classes."
    assert summary.holdings(splits(a=[one, one], b=[one, one])) == [counts]
    assert summary.holdings(splits(a=[one, other])) == [
        "Each seed splits the rows anew; shown is seed 0 (run a0).",
        counts,
    ]
    assert summary.holdings(splits(a=[one, other], b=[one, other])) == [
        "Each seed splits the rows anew, alike in every setting; shown is seed 0 (run a0).", counts,
    ]  # fmt: skip
    assert summary.holdings(splits(a=[one], b=[other])) == [
        "The rows are not split alike in every setting; shown is a, seed 0 (run a0).", counts,
    ]  # fmt: skip
    more = splits(a=[one, one], b=[three, three])
    assert summary.holdings(more) == [
        "The rows are not split alike in every setting (2 to 3 clients); shown is a, seed 0 (run a0).", counts,
    ]  # fmt: skip
    fewer = splits(a=[one], b=[[[1, 0], [0, 1], [0, 0]]])
    assert "(2 to 3 clients, 2 to 8 real rows); shown" in summary.holdings(fewer)[0]
    assert html.facts(more)[0] == "2 to 3 clients"
    assert html.facts(splits(a=[one]))[0] == "2 clients"
    assert "not split alike" in html.render(more)


def test_whose_synthetic_rows_are_shown_is_said_where_settings_differ_in_them():
    plain = splits(a=[[[4, 0], [0, 4]]], b=[[[4, 0], [0, 4]]])
    a, b = plain.arms
    b = replace(b, clients=[replace(b.clients[0], synthetic=np.array([4, 4]))])
    both = replace(plain, arms=[a, b], after=np.full((2, 2), 4), shown=Shown("b", 0, "b0"))
    says = "he prior's images add 8 synthetic rows, after which a client has on average 2 classes."
    assert summary.holdings(both)[1] == f"With b, t{says}"
    assert summary.holdings(replace(both, arms=[b]))[1] == f"T{says}"


def test_rounds_at_a_glance_are_a_range_where_runs_have_different_ones():
    arms = [Arm(name="a", curves=[curve([0.1])]), Arm(name="b", curves=[curve([0.1] * 3)])]
    assert html.facts(data(arms=arms))[2] == "1 to 3 rounds"


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
    xs, ys = figures.series(arm, numbers.megabytes)
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


@pytest.mark.parametrize("of", [data, whole])
def test_page_nests_and_is_labelled_throughout(of):
    page = Page(html.render(of()))
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
    used = {attrs["href"] for attrs in [*page.all("use"), *page.all("a")]}
    used |= set(re.findall(r"url\((#[^)]+)\)", html.render(of())))
    assert len(page.all("a")) > 5
    assert {u.lstrip("#") for u in used} <= set(ids)


@pytest.mark.parametrize("of", [data, whole])
def test_page_loads_nothing_and_runs_nothing(of):
    text = html.render(of())
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
    assert rows[0]["mean of the last 2 rounds"] == "20.0 % ± 5.0"  # 0.15, 0.2, 0.25
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


# What a run says of itself


def test_a_run_is_summed_up_in_three_sentences_from_its_numbers():
    arm = Arm(name="a", curves=[curve([0.2, 0.4], per_class=(0.9, 0.25))])
    assert summary.sentences(data(arms=[arm])) == [
        "a reached 30.0 % test accuracy.",
        'The worst client sees 0.0 %, and the hardest class is pick"up with 25.0 %.',
        "It took 2 rounds and 6.00 MB of messages.",
    ]
    both = [replace(arm, seconds=[{"training": 4.0, "evaluation": 1.5}]), Arm(name="b", curves=[curve([0.5])])]
    assert summary.sentences(data(arms=both))[1:] == [
        "The worst client sees 0.0 % with a and 0.0 % with b.",
        "A run took 2 rounds, 6.00 MB of messages and 5.50 s with a; 1 round and 3.00 MB of messages with b.",
    ]
    many = [replace(arm, name=str(i)) for i in range(5)]
    assert len(summary.sentences(data(arms=many))) == 4  # each further arm against the first, the rest is in tables


@pytest.mark.parametrize(
    ("rates", "says"),
    [
        ((0.2, 0.0, 0.0, 0.3), "the hardest classes are b and c with 0.0 % each."),
        ((0.25, 0.25, 0.25, 0.3), "the hardest classes are a, b and c with 25.0 % each."),
        ((0.0, 0.0, 0.0, 0.0, 0.3, None), "4 of 5 classes are never recognised."),
        ((0.5, 0.5, 0.5, 0.5, 0.6), "4 of 5 classes tie at 50.0 % as the hardest."),
    ],
)
def test_classes_that_are_equally_hard_are_all_named_or_counted(rates, says):
    arm = Arm(name="a", curves=[curve([0.5], per_class=rates)])
    classes = tuple("abcdef"[: len(rates)])
    assert summary.left_behind([arm], classes) == [f"The worst client sees 0.0 %, and {says}"]
    (panel,) = figures.per_class([arm], classes).panels
    assert re.search(r"from \d+ % \((b and 1 more|a and [23] more)\) to \d+ % \([de]\)", panel)


def test_the_headline_says_which_mean_it_is():
    local = Arm(name="local", curves=[curve([0.5])], own=True)
    domains = [line(1, 0.5) | {"per_domain": {"photo": 0.2, "sketch": 0.8}}]
    plain, over = Arm(name="a", curves=[curve([0.4])]), Arm(name="d", curves=[domains])
    for arms, sentence, note, caption in [
        ([local], "local reached 50.0 % test accuracy (mean over clients' own models).",
         "Test accuracy on real images (mean over clients' own models), after",
         "Test accuracy, mean over clients' own models."),
        ([over], "d reached 50.0 % test accuracy (mean over domains).",
         "Test accuracy on real images (mean over domains), after",
         "Test accuracy of the global model, mean over domains."),
        ([replace(local, curves=[domains])],
         "local reached 50.0 % test accuracy (mean over clients' own models and domains).",
         "Test accuracy on real images (mean over clients' own models and domains), after",
         "Test accuracy, mean over clients' own models and domains."),
        ([plain, local], "local reached 50.0 % test accuracy (of local, mean over clients' own models), a 40.0 %: 10.0 "
         "points more, but no seed is in both to tell an effect from chance.",
         "Test accuracy on real images (of local, mean over clients' own models), after",
         "Test accuracy of the global model; of local, mean over clients' own models."),
    ]:  # fmt: skip
        assert summary.verdicts(arms) == [sentence]
        assert html.note(data(arms=arms)).startswith(note)
        assert figures.whose(arms) == caption


def test_the_worst_client_of_several_seeds_is_a_mean_and_called_one():
    arm = Arm(name="a", curves=[curve([0.5]), curve([0.5])])
    arm.curves[1][0]["clients"] = arm.curves[1][0]["clients"] | {"worst": 0.3}
    assert summary.left_behind([arm], ("x", "y")) == [
        "The worst client sees 15.0 % (a mean of the seeds' worst clients), and the hardest class is x with 25.0 %, "
        "mean over seeds."
    ]
    other = Arm(name="b", curves=[curve([0.5])])
    assert summary.left_behind([arm, other], ("x", "y")) == [
        "The worst client sees 15.0 % with a and 0.0 % with b (a mean of the seeds' worst clients)."
    ]


@pytest.mark.parametrize(
    ("seconds", "says"), [(0.423, "0.42 s"), (9.994, "9.99 s"), (13.06, "13.1 s"), (7810, "2 h 10 min")]
)
def test_durations_have_three_digits_or_two_units(seconds, says):
    assert numbers.lasted(seconds) == says


def test_worst_clients_come_by_accuracy_over_all_seeds_with_rows_and_classes():
    real = np.array([[0, 5, 1, 2, 0], [3, 0, 0, 0, 0], [1, 1, 1, 1, 9]])
    one = Holdings(real=real, synthetic=np.array([4, 0, 1]), accuracy=np.array([0.5, np.nan, 0.3]))
    two = Holdings(real=real[::-1], synthetic=np.zeros(3, int), accuracy=np.array([0.9, 0.4, 0.1]))
    arm = Arm(name="a", curves=[curve([0.1])] * 2, clients=[one, two], seeds=[7, 8])
    rows = summary.worst_clients([arm], tuple("abcde"))
    assert [row["client"] for row in rows] == [
        f"client {c}" for c in ("2, seed 8", "2, seed 7", "1, seed 8", "0, seed 7", "0, seed 8")
    ]
    assert rows[0] == {
        "client": "client 2, seed 8",
        "real rows": "8",
        "synthetic rows": "0",
        "real rows by class": "b 5, d 2, c 1",
        "accuracy": "10.0 %",
    }
    assert rows[1]["real rows by class"] == "e 9, a 1, b 1 and 2 other classes"
    plain = replace(arm, name="b", clients=[two, two])
    named = summary.worst_clients([arm, plain], tuple("abcde"))
    assert [(row["setting"], row["accuracy"]) for row in named] == [
        ("a", "10.0 %"), ("a", "30.0 %"), ("a", "40.0 %"), ("b", "10.0 %"), ("b", "10.0 %"), ("b", "40.0 %"),
        ("b", "40.0 %"),
    ]  # fmt: skip
    assert [row["synthetic rows"] for row in named] == ["0", "1", "0", "0", "0", "0", ""]


def test_clients_that_see_as_little_as_the_last_one_named_are_counted():
    arm = Arm(name="a", curves=[curve([0.1])], clients=[held(*[0.2] * 7, 0.1, 0.9)], seeds=[0])
    rows = summary.worst_clients([arm], ("x", "y"))
    assert [row["client"] for row in rows] == [*(f"client {k}" for k in (7, 0, 1, 2, 3)), "and 3 more with as much"]
    assert rows[-1] == {
        "client": "and 3 more with as much", "real rows": "", "real rows by class": "", "accuracy": "20.0 %",
    }  # fmt: skip
    both = summary.worst_clients([arm, replace(arm, name="b", clients=[held(0.1, 0.2, 0.3, 0.4)])], ("x", "y"))
    assert [(row["client"], row["setting"]) for row in both[2:]] == [
        ("client 1", "a"), ("and 5 more with as much", "a"), ("client 0", "b"), ("client 1", "b"), ("client 2", "b"),
    ]  # fmt: skip
    assert "and 3 more" in html.render(data(arms=[arm]))


def test_pairs_that_are_mixed_up_as_often_as_the_last_one_named_are_counted():
    counts = np.full((3, 3), 2) + np.diag([4, 4, 4])  # six pairs, a fifth each
    arm, better = Arm(name="a", curves=[], confusion=counts), Arm(name="b", curves=[], confusion=np.eye(3, dtype=int))
    assert summary.mixed_up([arm, better], ("x", "y", "z"))[4:] == [
        {"class": "z, taken for x", "a": "20.0 %", "b": "0.0 %"},
        {"class": "and 1 more with as much", "a": "", "b": ""},
    ]
    assert summary.mixed_up([arm], ("x", "y", "z"))[-1] == {"class": "and 1 more with as much", "a": "20.0 %"}
    counts[2, 1] -= 1
    assert len(summary.mixed_up([arm], ("x", "y", "z"))) == 5


def test_pairs_that_are_mixed_up_are_shares_of_the_class_asked_for():
    counts = np.array([[6, 2, 0], [1, 3, 0], [0, 0, 0]])
    arms = [Arm(name="a", curves=[], confusion=counts), Arm(name="b", curves=[])]
    assert summary.mixed_up(arms, ("x", "y", "z")) == [
        {"class": "x, taken for y", "a": "25.0 %", "b": "–"},
        {"class": "y, taken for x", "a": "25.0 %", "b": "–"},
    ]
    assert summary.mixed_up([arms[1]], ("x", "y", "z")) == []


def test_time_is_parted_by_what_it_went_into_and_what_is_left():
    lines = [
        {"round": 1, "training_seconds": 2.0, "evaluation_seconds": 0.5, "generation_seconds": 10.0},
        {"round": 2, "training_seconds": 3.0, "evaluation_seconds": 0.5},
        {"round": 3, "training_seconds": 1.0, "evaluation_seconds": 0.0, "pretraining_seconds": 1.0},
    ]
    got = numbers.spent(lines, 20.0)
    assert got == {"images from the prior": 10, "descriptors": 0, "training": 7, "evaluation": 1, numbers.REST: 2}
    earlier = [{"round": 1, "seconds": 9.0, "evaluation_seconds": 0.5}]
    assert numbers.spent(earlier, 10.0) == {"evaluation": 0.5, f"training, {numbers.REST}": 9.5}
    assert numbers.spent([], 10.0) == {}
    twice = Arm(name="a", curves=[], seconds=[got, got | {"training": 27.0}])
    assert summary.seconds_rows([twice, Arm(name="b", curves=[])]) == [
        {"time": "images from the prior", "a": "10.0 s (33 %)", "b": "–"},
        {"time": "training", "a": "17.0 s (57 %)", "b": "–"},
        {"time": "evaluation", "a": "1.00 s (3 %)", "b": "–"},
        {"time": numbers.REST, "a": "2.00 s (7 %)", "b": "–"},
        {"time": "in all", "a": "30.0 s", "b": "–"},
    ]
    assert summary.seconds_rows([Arm(name="b", curves=[])]) == []


def test_settings_that_differ_are_those_that_several_arms_have():
    configs = [
        {"seed": 0, "name": "x", "method": "fedavg", "balance": "none", "lr": 0.1, "augment": False},
        {"seed": 1, "name": "y", "method": "fedprox", "method.mu": 1.0, "balance": "max", "balance.pool": "shared",
         "lr": 0.1, "augment": True},
        {"seed": 1, "name": "z", "method": "fedprox", "method.mu": 2.0, "balance": "none", "lr": 0.1, "augment": True},
    ]  # fmt: skip
    arms = [Arm(name=n, curves=[], config=c) for n, c in zip("abc", configs, strict=True)]
    assert summary.differences(arms) == [
        {"key": "method", "a": "fedavg", "b": "fedprox", "c": "fedprox"},
        {"key": "balance", "a": "none", "b": "max", "c": "none"},
        {"key": "augment", "a": "false", "b": "true", "c": "true"},
        {"key": "method.mu", "a": "–", "b": "1.0", "c": "2.0"},
    ]


def test_configs_are_flattened_to_the_keys_of_the_command_line():
    values = {"seed": 1, "name": "n", "method": {"name": "fedprox", "mu": 0.5}, "data": {"name": "digits", "half": ""}}
    assert load.flat(values) == {
        "seed": 1, "name": "n", "method": "fedprox", "method.mu": 0.5, "data": "digits", "data.half": "",
    }  # fmt: skip


def configs(tmp_path, *all_words):
    """Folders with the config of an experiment each."""
    folders = []
    for i, words in enumerate(all_words):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "config.toml").write_text(to_toml(override(Experiment(), words)))
        folders.append(tmp_path / str(i))
    return folders


@pytest.mark.parametrize(
    ("all_words", "names"),
    [
        ([["balance=max"]], ["fedavg+balance"]),
        ([[], ["guide=feddifrc"]], ["fedavg", "fedavg+guide"]),
        (
            [["method=fedprox", "balance=max", "balance.pool=per_client", "adapt=lora", "guide=feddifrc"]],
            ["fedprox+balance+adapt+guide"],
        ),
        (
            [["partition.alpha=0.1"], ["partition.alpha=0.5"], ["method=fedprox"]],
            ["fedavg (partition.alpha=0.1)", "fedavg (partition.alpha=0.5)", "fedprox"],
        ),
        (
            [["clients=5", "local.lr=0.2"], ["clients=6", "local.lr=0.2"], ["clients=6"]],
            [f"fedavg (clients={n}, local.lr={lr})" for n, lr in ((5, 0.2), (6, 0.2), (6, 0.1))],
        ),
        # what belongs to a choice is not told where the choice tells enough, and is told where it does not
        ([["server=adam"], ["server=sgd"]], ["fedavg (server=adam)", "fedavg (server=sgd)"]),
        (
            [["partition.alpha=1"], ["partition.alpha=2"], ["partition=iid"]],
            [
                "fedavg (partition=dirichlet, partition.alpha=1.0)",
                "fedavg (partition=dirichlet, partition.alpha=2.0)",
                "fedavg (partition=iid)",
            ],
        ),
        ([[], ["clients=5", "local.lr=0.2", "steps=3"]], ["fedavg", "fedavg (2)"]),
        ([["seed=1"], ["seed=2", "engine=serial"]], ["fedavg"]),
    ],
)  # fmt: skip
def test_an_arm_is_named_by_what_it_is_made_of_and_where_that_is_alike_by_what_differs(tmp_path, all_words, names):
    assert list(load.group(configs(tmp_path, *all_words))) == names


def test_arms_that_differ_in_a_long_value_are_numbered(tmp_path):
    words = [["data=folder", f"data.path=/{letter * 90}", "name=x"] for letter in "ab"]
    assert list(load.group(configs(tmp_path, *words))) == ["fedavg", "fedavg (2)"]


@pytest.mark.parametrize("width", [figures.THIRD, figures.WIDTH])
def test_a_legend_has_room_for_long_names(width):
    from matplotlib.figure import Figure

    name = "fedprox+balance (partition=quantity_skew, partition.alpha=0.05)"
    assert len(name) > load.LONGEST
    with matplotlib.rc_context(figures.STYLE):
        canvas = Figure(figsize=(width, 3))
        ax = canvas.subplots()
        ax.plot([1], [1], label=name)
        figures.legend(canvas, ax, [Arm(name=name, curves=[])], width)
        canvas.draw_without_rendering()
        box = canvas.legends[0].get_window_extent()
    assert 0 < box.x0 < box.x1 < canvas.bbox.width
    assert canvas.legends[0].get_texts()[0].get_text().split() == name.split()
    assert box.height / canvas.dpi < figures.legend_height([Arm(name=name, curves=[])], width) + 0.15


def test_requests_are_counted_by_how_they_ended():
    bad = [{"client": 1, "reason": "late"}]
    lines = [
        line(1, 0.1) | {"cohort": [0, 1, 2, 3], "dropped": [3], "partial": [{"client": 0, "steps": 1}], "accepted": 3},
        line(2, 0.1, refused=bad, skipped=True) | {"cohort": [1], "accepted": 0},
    ]
    rows = summary.attendance_rows([Arm(name="a", curves=[lines, curve([0.1])])])
    assert [row["a"] for row in rows] == ["7", "5", "1", "1", "1", "1"]


def test_data_in_one_place_were_requested_of_nobody():
    pooled, plain = Arm(name="c", curves=[curve([0.1])], pooled=True), Arm(name="a", curves=[curve([0.1])])
    assert "What was refused or left undone" not in html.render(data(arms=[pooled]))
    assert "Nothing: 2 requests to clients" in html.render(data(arms=[pooled, plain]))
    bad = replace(plain, curves=[[line(1, 0.1, refused=[{"client": 1, "reason": "late"}])]])
    rows = summary.attendance_rows([pooled, bad])
    assert [row["a"] for row in rows] == ["2", "2", "0", "0", "1", "0"]
    assert {row["c"] for row in rows} == {"–"}


def test_domains_and_neighbours_have_a_row_each():
    ends = [line(1, 0.5) | {"per_domain": {"photo": 0.2, "sketch": 0.6}, "knn": 0.3}]
    other = [line(1, 0.5) | {"per_domain": {"photo": 0.4, "sketch": 0.6}, "knn": None}]
    rows = summary.domain_rows([Arm(name="a", curves=[ends, other]), Arm(name="b", curves=[curve([0.5])])])
    assert rows == [
        {"accuracy": "photo", "a": "30.0 % ± 14.1", "b": "–"},
        {"accuracy": "sketch", "a": "60.0 % ± 0.0", "b": "–"},
        {"accuracy": "20 nearest neighbours", "a": "30.0 %", "b": "–"},
    ]


def test_accuracy_is_drawn_against_time_in_a_unit_that_suits_where_every_run_knows_it():
    def panels(*ends):
        arms = [Arm(name="a", curves=[[x | {"seconds": end * x["round"]} for x in curve([0.1, 0.2])]]) for end in ends]
        return figures.training(arms)

    assert len(panels(1.0).panels) == 3
    for last, unit in ((85.0, "seconds"), (95.0, "minutes"), (5_000.0, "minutes"), (5_500.0, "hours")):
        assert f"test accuracy against {unit}" in panels(last, 1.0).panels[-1]
    timed, plain = Arm(name="a", curves=[[line(1, 0.1) | {"seconds": 1.0}]]), Arm(name="b", curves=[curve([0.1])])
    assert len(figures.training([timed, plain]).panels) == 2


def test_whose_accuracy_is_shown_is_said():
    own, plain = Arm(name="local", curves=[], own=True), Arm(name="a", curves=[])
    assert figures.whose([plain]) == "Test accuracy of the global model."
    assert figures.whose([own]) == "Test accuracy, mean over clients' own models."
    assert figures.whose([plain, own]).endswith("of local, mean over clients' own models.")


def test_clients_are_drawn_from_worst_to_best_over_seeds_without_those_that_hold_nothing():
    arm = Arm(name="a", curves=[], clients=[held(0.9, np.nan, 0.2), held(0.5)])
    (panel,) = figures.clients([arm]).panels
    assert "a from 20.0 % to 90.0 %, half of them above 50.0 %" in panel
    assert len(re.findall("<use ", panel.split("aria-label")[1])) >= 3


def test_a_confusion_matrix_shows_percent_of_each_class():
    arm = Arm(name="a", curves=[curve([0.5])], confusion=np.array([[3, 1], [0, 40]]))
    figure = figures.confusion([arm, Arm(name="b", curves=[curve([0.5])])], ("x", "y"))
    (panel,) = figure.panels
    assert re.findall(r">(\d+)</text>", panel) == ["75", "25", "100"]
    assert "x, taken for y (25.0 %)" in panel
    assert figures.confusion([Arm(name="b", curves=[])], ("x", "y")) is None


@pytest.mark.parametrize(
    "name", ['cup id="1"', 'a x="1.23456"', 'a xmlns="b" c', "xlink:href", "a 'DejaVu Sans'", "<!-- a -->", "1.23456"]
)
def test_what_tidies_a_drawing_leaves_its_words_alone(name):
    from html import unescape

    (panel,) = figures.per_class([Arm(name="a", curves=[curve([0.5])])], (name, "other")).panels
    words = [unescape(text) for text in re.findall("<text[^>]*>([^<]*)</text>", panel)]
    assert name in words
    assert not re.search(
        r' xmlns(:\w+)?="|<metadata|<!--| xlink:href=| d="[^"]*\d\.\d{3}', "".join(re.findall("<[^>]*>", panel))
    )


def test_a_page_of_what_was_judged_on_held_out_rows_speaks_of_no_test():
    many = tuple(f"class {i}" for i in range(30))
    full = data(after=None)
    for arms, classes, rates in ((whole().arms, full.classes, (0.25, 0.75)), (whole().arms[:1], many, [0.5] * 30)):
        held_out = [replace(arm, judged_on="validation") for arm in arms]
        ends = [line(1, 0.5, per_class=rates) | {"seconds": 1.0, "per_domain": {"photo": 0.5}}]
        held_out[0] = replace(held_out[0], curves=[ends] * 3, confusion=np.ones((len(classes),) * 2, dtype=int))
        given_data = replace(full, arms=held_out, classes=classes, real={}, synthetic={})
        assert given_data.judged_on == "validation"
        text = html.render(given_data)
        assert not re.search(r"(?<!t-)\btest\b", text, re.IGNORECASE)
        assert text.lower().count("validation accuracy") > 8
        assert "Validation accuracy on held-out rows of clients" in text
        assert "picked by looking at the held-out rows" in text


def test_a_page_is_put_together_from_sections_and_lists_them():
    from markupsafe import Markup

    sections = [
        html.Section("First & foremost", [None, html.prose(["A <b>."]), html.fold("More", html.bullets(["x", "y"]))]),
        html.Section("Empty", [None, html.table("none", [], "nothing"), html.beside(None), html.fold("f", None)]),
        html.Section("Rows", [html.beside(html.table("t", [{"k": "v & w"}], "c"), html.terms({"d": "e"}))]),
        html.Section("Text", [html.listing("a < b"), Markup("<p>own</p>")]),
    ]
    text = html.document("T & U", sections, {"fedprior": "0"}, sentences=["3 % ± 1."])
    page = Page(text)
    assert [attrs["href"] for attrs in page.all("a")] == [
        "#content", "#section-first-foremost", "#section-rows", "#section-text",
    ]  # fmt: skip
    assert page.cells == ["k", "v & w"]
    for part in ("First & foremost", "A <b>.", "a < b", "own", "3\u00a0%\u00a0±\u00a01."):
        assert part in "".join(page.text)
    assert "Empty" not in text
    assert len(page.all("details")) == 1


def test_a_page_with_everything_has_its_parts_in_order():
    text = html.render(whole())
    heads = re.findall("<h2>(.*?)</h2>", text)
    assert heads == [
        "Accuracy",
        "Who holds what",
        "What the clients see",
        "Accuracy by class",
        "What the images look like",
        "What was refused or left undone",
        "What it cost",
        "Notes",
        "How it was made",
    ]
    names = re.findall('<table aria-labelledby="(.*?)"', text)
    assert names == ["results", "clients", "worst", "mixed", "traffic", "time", "differences", "runs"]


# What a run leaves for its report

SMALL = ["rounds=2", "steps=2", "clients=5", "cohort=3", "name=it", "engine=serial"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run directory of two rounds, with synthetic rows."""
    root = tmp_path_factory.mktemp("runs")
    run(override(Experiment(), [*SMALL, "balance=max", "balance.pool_size=2", "prior.steps=1"]), root)
    return root / "it"


def matrix(folder):
    table = pq.read_table(folder / "confusion.parquet").to_pydict()
    assert table["class"] == list(digits.CLASSES)
    return np.array(table["taken_for"])


def test_the_confusion_of_a_run_is_that_of_its_model_image_by_image(finished):
    from safetensors.torch import load_file

    net = nets.build("cnn", 10, size=16)
    net.load_state_dict(load_file(finished / "model.safetensors"))
    wrapped, test = Net(net), digits.test()
    by_hand = np.zeros((10, 10), dtype=int)
    with torch.inference_mode():
        for image, label in zip(test["image"], test["label"], strict=True):
            taken = wrapped(wrapped.init(), image[None], train=False).logits.argmax().item()
            by_hand[label, taken] += 1
    np.testing.assert_array_equal(matrix(finished), by_hand)
    assert by_hand.max(1).min() > 0
    assert len(set(by_hand.argmax(1))) > 2  # more than one class is ever named


@pytest.mark.parametrize(
    ("words", "models"),
    [
        (["engine=pool", "workers=2"], 1),
        (["engine=vectorised"], 1),
        (["method=local"], 5),
        (["method=local", "engine=pool", "workers=2"], 5),
        (["method=ccvr", "prior.steps=1"], 1),
    ],
)
def test_the_confusion_agrees_with_the_last_evaluation_whatever_the_engine_and_method(words, models, tmp_path):
    outcome = run(override(Experiment(), [*SMALL, "rounds=1", "partition=iid", *words]), tmp_path, report=False)
    counts, last = matrix(tmp_path / "it"), outcome.curve[-1]
    rows = np.bincount(digits.test()["label"], minlength=10)
    np.testing.assert_array_equal(counts.sum(1), models * rows)
    assert counts.trace() / counts.sum() == pytest.approx(last["accuracy"], abs=1e-12)
    np.testing.assert_allclose(counts.diagonal() / counts.sum(1), last["per_class"])


def test_clients_models_that_lie_at_nodes_have_no_confusion(tmp_path):
    from local_post import LocalPost

    from fedprior.engines.remote import Patience
    from fedprior.progress import Silent
    from fedprior.serve import serve

    e = override(Experiment(), [*SMALL, "rounds=1", "clients=2", "cohort=2", "method=local", "partition=iid"])
    nodes = {1: {"name": "site-0", "clients": "0-1", "state-dir": str(tmp_path / "site-0")}}
    serve(e, LocalPost(e, nodes), Patience(wait=5.0, answer=5.0, poll=0.001), tmp_path, Silent())
    assert not (tmp_path / "it" / "confusion.parquet").exists()
    text = (tmp_path / "it" / "report.html").read_text()
    assert "Accuracy by class" in text
    assert "taken for" not in text


def test_timings_tell_once_an_attempt_what_was_spent_before_the_first_round(finished, tmp_path):
    folder = tmp_path / "it"
    shutil.copytree(finished, folder)
    run(override(load_toml(folder), ["rounds=4"]), tmp_path)
    lines = record.timings(folder)
    before = {"generation_seconds", "description_seconds"}
    assert [before & line.keys() for line in lines] == [before, set(), before, set()]
    parts = sum(line["training_seconds"] + line["evaluation_seconds"] for line in lines)
    parts += sum(line.get("generation_seconds", 0) for line in lines)
    assert 0 < parts < read_json(folder / "result.json")["seconds"] + 0.001
    assert lines[0]["generation_seconds"] > 0
    (arm,) = load.report_data([folder]).arms
    assert sum(arm.seconds[0].values()) == pytest.approx(read_json(folder / "result.json")["seconds"], abs=0.001)


def load_toml(folder):
    from fedprior.config import from_toml

    return from_toml(folder / "config.toml")


def test_a_report_shows_what_the_directory_holds(finished):
    page = Page(html.render(load.report_data([finished])))
    text = "".join(page.text)
    clients = pq.read_table(finished / "clients.parquet").to_pydict()
    worst = int(np.nanargmin(clients["accuracy"]))
    assert f"client {worst}" in page.cells
    assert f"{100 * clients['accuracy'][worst]:.1f} %" in page.cells
    for part in ("images from the prior", "real rows by class", "Versions and hardware", "Resolved config", "cores"):
        assert part in text
    assert read_json(finished / "manifest.json")["versions"].get("commit", "torch") in text


def test_a_directory_of_an_earlier_version_still_makes_a_page(finished, tmp_path):
    folder = tmp_path / "it"
    shutil.copytree(finished, folder)
    (folder / "confusion.parquet").unlink()
    lines = [{k: line[k] for k in ("round", "seconds", "evaluation_seconds")} for line in record.timings(folder)]
    (folder / "timings.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = read_json(folder / "result.json")
    (folder / "result.json").write_text(json.dumps({k: v for k, v in result.items() if k != "models"}))
    text = html.render(load.report_data([folder]))
    assert f"training, {numbers.REST}" in text
    assert "taken for" not in text
    (folder / "timings.jsonl").write_text("{")
    (folder / "result.json").unlink()
    assert "against seconds" not in html.render(load.report_data([folder]))


def test_runs_that_were_not_made_alike_say_in_what(finished, tmp_path):
    folder = tmp_path / "it"
    shutil.copytree(finished, folder)
    manifest = read_json(folder / "manifest.json")
    manifest["versions"]["torch"], manifest["hardware"]["cores"] = "0.1", "1024"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    config = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(config.replace("seed = 0", "seed = 1", 1))
    notes = load.report_data([finished, folder]).notes
    assert notes == ["The runs were not all made alike; they differ in torch and cores."]
    assert load.report_data([finished]).notes == []


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("result.json", b"{" + b"\xff" * 100_000),
        ("result.json", b'{"seconds": "' + b"a\\n" * 100_000 + b'"}'),
        ("result.json", b'{"rounds": 2}'),
        ("manifest.json", b"[" + b"1, " * 100_000 + b"1]"),
        ("manifest.json", b'{"versions": {}}'),
        ("config.toml", b"x" * 100_000),
        ("config.toml", b"\xff" * 100_000),
        ("config.toml", b"seed = 1"),
        ("clients.parquet", b"PAR1" * 1000),
        ("confusion.parquet", b""),
        ("examples.safetensors", b"\xff" * 100_000),
        ("examples.safetensors", None),
    ],
)
def test_what_cannot_be_read_is_named_in_a_short_line_with_the_remedy(finished, tmp_path, name, content):
    folder = tmp_path / "it"
    shutil.copytree(finished, folder)
    config = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(config.replace("seed = 0", "seed = 1", 1))
    (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        load.report_data([finished, folder])
    said = str(error.value)
    assert said.startswith(f"{folder / name} cannot be read (")
    assert said.endswith("); run that experiment again under another name=")
    assert said.isprintable()
    assert len(said) - len(str(folder / name)) < 200


def test_the_run_that_is_shown_is_the_one_with_most_rows(finished, tmp_path):
    folder = tmp_path / "plain"
    words = [*SMALL, "rounds=1", "seed=3", "name=plain"]
    run(override(Experiment(), words), tmp_path, report=False)
    given_data = load.report_data([folder, finished])
    assert given_data.shown == Shown("fedavg+balance", 0, "it")
    np.testing.assert_array_equal(given_data.before, load.holdings(finished).real)
    assert "Of it; the others differ" in html.render(given_data)
    assert load.report_data([folder]).shown == Shown("fedavg", 3, "plain")


def test_the_commit_is_that_of_the_checkout_and_says_when_files_differ(tmp_path):
    def git(*words):
        own = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        said = subprocess.run(["git", "-C", str(tmp_path), *own, *words], capture_output=True, text=True, check=True)
        return said.stdout.strip()

    def commit():
        return environment.commit.__wrapped__(tmp_path)

    assert commit() == ""
    (tmp_path / "file").write_text("one")
    git("init", "-q")
    git("add", "file")
    git("commit", "-q", "-m", "first")
    git("tag", "-a", "v1", "-m", "a tag is no commit")
    head = git("rev-parse", "HEAD")
    assert commit() == head
    (tmp_path / "file").write_text("two")
    assert commit() == f"{head}-dirty"
    inner = tmp_path / "site-packages"
    inner.mkdir()
    assert environment.commit.__wrapped__(inner) == ""  # somebody else's repository around an installed package


def test_a_run_says_what_it_was_judged_on_and_where_data_were_pooled(finished, tmp_path):
    run(override(Experiment(), [*SMALL, "rounds=1", "validation=0.2", "method=centralised"]), tmp_path, report=False)
    folder = tmp_path / "it"
    for _ in range(2):  # without result.json the settings say it
        given_data = load.report_data([folder])
        assert given_data.judged_on == "validation"
        assert given_data.arms[0].pooled
        (folder / "result.json").unlink(missing_ok=True)
    assert load.report_data([finished]).judged_on == "test"
    assert not load.report_data([finished]).arms[0].pooled


def test_a_comparison_goes_where_one_is_and_replaces_no_page_of_a_run(finished, tmp_path, monkeypatch):
    folders = [tmp_path / "runs" / name for name in ("a", "b")]
    for seed, folder in enumerate(folders):
        shutil.copytree(finished, folder)
        config = (folder / "config.toml").read_text()
        (folder / "config.toml").write_text(config.replace("seed = 0", f"seed = {seed}", 1))
        (folder / "report.html").write_text("own")

    def report(*words):
        return CliRunner().invoke(app, ["report", *map(str, words), "--json"], catch_exceptions=False)

    monkeypatch.chdir(tmp_path)
    said = report(*folders).stdout.splitlines()
    assert said[0] == "Report: report.html"
    assert "2 seeds" in (tmp_path / "report.html").read_text()
    assert [(folder / "report.html").read_text() for folder in folders] == ["own", "own"]
    monkeypatch.chdir(folders[0])
    with pytest.raises(UsageError, match=r"report\.html here is the page of the run; add --out"):
        report(".", folders[1])
    assert report(".").exit_code == 0
    assert "fedprior" in (folders[0] / "report.html").read_text()
