import json
import re
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprior import partition, seeds
from fedprior.data import partition as module
from fedprior.errors import UsageError, UserError

BALANCED = np.repeat(np.arange(10), 5000)  # CIFAR-10's labels, as far as counts go
PARAMETERS = {
    "iid": {},
    "dirichlet": {"alpha": 0.1},
    "dirichlet_balanced": {"alpha": 0.1, "min_size": 2},
    "dirichlet_client": {"alpha": 0.1},
    "nid1_official": {"alpha": 0.05},
    "nid2": {},
    "shards": {},
    "pathological": {"k": 2},
    "quantity": {"alpha": 0.3},
    "longtail": {"imbalance": 0.1, "alpha": 0.5},
}
GOLDEN = {  # of numpy's PCG64 streams; a change here changes every published split
    "iid": "002b6fbeb2025468",
    "dirichlet": "3cf69663037a64e0",
    "dirichlet_balanced": "98ef525163d43f2e",
    "dirichlet_client": "2f344c37b468b265",
    "nid1_official": "5042883214736ab0",
    "nid2": "433e756c6590f368",
    "shards": "7debcd780d8119b3",
    "pathological": "73db2a5f818c434f",
    "quantity": "558b35f0a9f9db6d",
    "longtail": "5aa7798235ad108c",
}


def test_every_scheme_is_tried():
    """Here, or where data have domains."""
    split = {name: s for name, s in module.PARTITIONS.items() if s is not module.Sites}  # which splits nothing
    by_class = {name for name, scheme in split.items() if not scheme.needs_domains}
    assert PARAMETERS.keys() == by_class == GOLDEN.keys()


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_what_deals_by_class_does_not_look_at_domains(name):
    labels = BALANCED[::10]
    got = partition(name, labels, 20, 7, domains=labels % 3, domain_names=("a", "b", "c"), **PARAMETERS[name])
    assert got.digest[:16] == GOLDEN[name]


SKEWS = st.sampled_from([0.01, 0.05, 0.1, 0.5, 1.0, 100.0])


def chosen(name, alpha):
    return PARAMETERS[name] | ({"alpha": alpha} if "alpha" in PARAMETERS[name] else {})


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(sorted(PARAMETERS)),
    alpha=SKEWS,
    clients=st.integers(1, 20),
    classes=st.integers(2, 8),
    rows=st.integers(300, 500),
    seed=st.integers(0, 5),
)
def test_each_row_goes_to_one_client_and_no_client_is_too_small(name, alpha, clients, classes, rows, seed):
    labels = np.random.default_rng(seed).permutation(np.arange(rows) % classes)
    parameters = chosen(name, alpha)
    parts = partition(name, labels, clients, seed, **parameters)
    used = Counter(np.concatenate(parts.clients).tolist())
    assert set(used.values()) <= {1}
    assert set(used) <= set(range(rows))
    assert rows - len(used) == parts.unused
    if name != "longtail" and not (name == "pathological" and clients * 2 < classes):
        assert parts.unused == 0
    assert len(parts.clients) == clients
    assert min(map(len, parts.clients)) >= parameters.get("min_size", 1)
    assert all(c.dtype == np.int64 and (np.diff(c) > 0).all() for c in parts.clients)
    assert parts.counts(labels, classes).sum() == rows - parts.unused


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(sorted(PARAMETERS)),
    alpha=SKEWS | st.sampled_from([1e-300, 1e6]),
    clients=st.integers(1, 30),
    labels=st.lists(st.sampled_from([0, 1, 2, 5, 9]), min_size=1, max_size=60),
    least=st.integers(0, 4),
)
def test_any_small_data_are_split_as_promised_or_refused_with_a_remedy(name, alpha, clients, labels, least):
    try:
        parts = partition(name, labels, clients, 0, **chosen(name, alpha) | {"min_size": least})
    except UserError as error:
        refused = str(error)
    else:
        refused = ""
    if refused:
        assert re.search("use fewer clients|lower partition|use at most", refused)
        # what only moves rows around is refused for want of rows alone
        assert name in ("longtail", "pathological", "nid2") or max(least, 1) * clients > len(labels)
        return
    held = np.concatenate(parts.clients)
    assert len(set(held.tolist())) == len(held) == len(labels) - parts.unused
    assert min(map(len, parts.clients)) >= least


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_the_same_arguments_give_the_same_rows_on_every_machine(name):
    state = np.random.get_state()[1].copy()
    parts = partition(name, BALANCED[::10], 20, 7, **PARAMETERS[name])
    assert (np.random.get_state()[1] == state).all()
    np.random.seed(3)
    torch.manual_seed(3)
    assert partition(name, BALANCED[::10], 20, 7, **PARAMETERS[name]).digest == parts.digest
    assert partition(name, BALANCED[::10], 20, 8, **PARAMETERS[name]).digest != parts.digest
    assert parts.digest[:16] == GOLDEN[name]


def test_very_skewed_dirichlet_ends_and_leaves_classes_missing():
    parts = partition("dirichlet_balanced", BALANCED, 100, 0, alpha=0.05)
    statistics = parts.statistics(BALANCED, 10)
    assert statistics["min_size"] == 15
    assert statistics["rows"] == 50_000
    assert statistics["clients_missing_classes"] > 90
    assert 0 < parts.moved < 1000


@pytest.mark.parametrize(
    ("classes", "alpha", "owned", "largest", "synthetic"),
    [
        (10, 0.5, 8.1, 230, 1.8e5),
        (10, 0.1, 4.5, 374, 3.2e5),
        (10, 0.05, 2.7, 446, 4.0e5),
        (100, 0.5, 72, 42, 3.7e5),
        (100, 0.1, 32, 113, 1.1e6),
        (100, 0.05, 20, 163, 1.6e6),
    ],
)
def test_balanced_dirichlet_has_the_known_statistics_of_the_papers_split(classes, alpha, owned, largest, synthetic):
    """A separate simulation of FedZoo's partition: CIFAR-10 and CIFAR-100 over 100 clients, three seeds."""
    labels = np.repeat(np.arange(classes), 50_000 // classes)
    parts = [partition("dirichlet_balanced", labels, 100, seed, alpha=alpha) for seed in range(3)]
    seen = [p.statistics(labels, classes) for p in parts]
    assert np.mean([s["mean_classes"] for s in seen]) == pytest.approx(owned, rel=0.02, abs=0.3)
    assert np.mean([s["mean_largest_class"] for s in seen]) == pytest.approx(largest, rel=0.08)
    assert np.mean([s["synthetic_to_balance"] for s in seen]) == pytest.approx(synthetic, rel=0.08)


def test_the_cap_keeps_clients_near_their_share_and_plain_dirichlet_does_not():
    plain = partition("dirichlet", BALANCED, 20, 0, alpha=0.1).statistics(BALANCED, 10)
    capped = partition("dirichlet_balanced", BALANCED, 20, 0, alpha=0.1).statistics(BALANCED, 10)
    assert capped["max_size"] < 2500 + 5000  # one class more than the share at most
    assert plain["max_size"] > capped["max_size"]


@pytest.mark.parametrize("clients", [10, 13, 100])
def test_official_nid1_gives_every_client_as_many_rows(clients):
    sizes = [len(c) for c in partition("nid1_official", BALANCED, clients, 7, alpha=0.05).clients]
    assert max(sizes) - min(sizes) <= 1
    assert sum(sizes) == 50_000


def test_official_nid1_mixes_neighbours_so_that_no_class_dominates():
    """At alpha = 0.05 the largest share of one class at any of ten clients is known to be 0.51 after the re-cut."""
    for seed in range(5):
        counts = partition("nid1_official", BALANCED, 10, seed, alpha=0.05).counts(BALANCED, 10)
        assert (counts / counts.sum(1, keepdims=True)).max() == pytest.approx(0.51, abs=0.02)


@pytest.mark.parametrize(
    ("rows", "classes", "imbalance", "total"),
    [
        (50_000, 10, 0.1, 20_431),
        (50_000, 10, 0.02, 13_996),
        (50_000, 10, 0.01, 12_406),
        (50_000, 100, 0.1, 19_573),
        (50_000, 100, 0.01, 10_847),
    ],
)
def test_long_tail_keeps_the_published_totals(rows, classes, imbalance, total):
    labels = np.repeat(np.arange(classes), rows // classes)
    parts = partition("longtail", labels, 10, 0, imbalance=imbalance)
    assert rows - parts.unused == total
    kept = parts.counts(labels, classes).sum(0)
    assert (np.diff(kept) <= 0).all()
    assert kept[-1] == pytest.approx(kept[0] * imbalance, abs=1)


@given(k=st.integers(1, 10), clients=st.integers(2, 40))
@settings(max_examples=40, deadline=None)
def test_pathological_clients_hold_exactly_k_classes(k, clients):
    counts = partition("pathological", BALANCED[::50], clients, 1, k=k).counts(BALANCED[::50], 10)
    assert ((counts > 0).sum(1) == k).all()
    users = (counts > 0).sum(0)
    assert users.max() - users.min() <= 1


def test_nid2_has_single_class_clients_and_full_ones():
    for clients, single, full, parameters in [
        (10, 6, 4, {}),
        (20, 12, 8, {}),
        (2, 1, 1, {}),
        (9, 2, 7, {"n_single": 2, "n_full": 7}),
    ]:
        counts = partition("nid2", BALANCED, clients, 0, **parameters).counts(BALANCED, 10)
        assert ((counts > 0).sum(1) == [1] * single + [10] * full).all()
        shares = [c[c > 0] for c in counts.T]  # a class is shared equally by those who hold it
        assert all(c.max() - c.min() <= 1 for c in shares)


def test_shards_deal_two_pieces_of_sorted_rows():
    parts = partition("shards", BALANCED, 100, 0)
    counts = parts.counts(BALANCED, 10)
    assert (counts % 250 == 0).all()  # 200 shards of 250 rows; 250 divides 5000, so each has one class
    assert (counts.sum(1) == 500).all()
    assert len({tuple(row) for row in counts}) > 20  # dealt, not handed out in order


def test_per_client_dirichlet_has_equal_sizes_and_the_mix_that_alpha_says():
    """E[sum of squared shares] under Dir(alpha) over C classes is (alpha + 1) / (C alpha + 1)."""
    for alpha in (0.1, 1.0, 100.0):
        labels = np.repeat(np.arange(10), 20_000)
        parts = partition("dirichlet_client", labels, 200, 0, alpha=alpha)
        counts = parts.counts(labels, 10)
        assert (counts.sum(1) == 1000).all()
        concentration = ((counts / 1000) ** 2).sum(1).mean()
        assert concentration == pytest.approx((alpha + 1) / (10 * alpha + 1), rel=0.1)


def test_quantity_skew_has_unequal_sizes_and_alike_mixes():
    parts = partition("quantity", BALANCED, 10, 0, alpha=0.5)
    counts = parts.counts(BALANCED, 10)
    sizes = counts.sum(1)
    assert sizes.max() > 5 * sizes.min()
    large = counts[sizes > 2000]
    assert (large / large.sum(1, keepdims=True)).std() < 0.02


def test_plain_dirichlet_shares_of_a_class_have_the_variance_that_alpha_says():
    """A share under Dir(alpha) over N clients has the variance (N - 1) / (N^2 (N alpha + 1))."""
    labels = np.repeat(np.arange(100), 1000)
    for alpha in (0.1, 1.0):
        shares = partition("dirichlet", labels, 20, 0, alpha=alpha).counts(labels, 100) / 1000
        assert shares.var() == pytest.approx(19 / (400 * (20 * alpha + 1)), rel=0.1)


@given(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=12), least=st.integers(0, 5))
def test_repair_moves_exactly_what_is_lacking_from_the_largest(sizes, least):
    if sum(sizes) < least * len(sizes):
        return
    groups = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    moved = module.repair(groups, least, seeds.stream(0, "test"))
    after = [len(g) for g in groups]
    assert moved == sum(max(0, least - s) for s in sizes)
    assert min(after) >= least
    assert sorted(np.concatenate(groups).tolist()) == list(range(sum(sizes)))
    givers = [a for s, a in zip(sizes, after, strict=True) if a < s]
    assert min(givers, default=99) >= max(after) - 1  # nobody gave while another had more


def test_of_many_draws_that_fall_short_the_one_with_the_fewest_lacking_rows_is_repaired(monkeypatch):
    sizes = iter([(7, 1, 2), (6, 3, 1), (4, 6, 0), (5, 2, 3), (8, 1, 1)] * 2)
    monkeypatch.setattr(
        module.Iid, "assign", lambda self, labels, clients, rng: np.split(np.arange(10), np.cumsum(next(sizes))[:-1])
    )
    parts = partition("iid", [0] * 10, 3, 0, min_size=3)
    assert parts.moved == 1  # (5, 2, 3) lacks one row
    assert sorted(map(len, parts.clients)) == [3, 3, 4]
    assert next(sizes, None) is None  # ten draws, not more


def test_repair_does_not_move_one_class_only():
    parts = partition("quantity", BALANCED[::10], 50, 0, alpha=0.05, min_size=20)
    poor = parts.counts(BALANCED[::10], 10)[[len(c) == 20 for c in parts.clients]]
    assert parts.moved > 200
    assert (poor.sum(0) > 0).all()
    labels = np.repeat([0, 1], 500)
    groups = [np.arange(1000), np.arange(0)]
    module.repair(groups, 100, seeds.stream(0, "test"))
    assert 30 < labels[groups[1]].sum() < 70


def test_empty_clients_are_allowed_on_request_and_counted():
    parts = partition("quantity", BALANCED[::50], 100, 0, alpha=0.05, min_size=0)
    statistics = parts.statistics(BALANCED[::50], 10)
    assert parts.moved == 0
    assert statistics["empty_clients"] == sum(len(c) == 0 for c in parts.clients) > 10
    assert statistics["min_size"] == 0


def test_statistics_of_a_split_done_by_hand():
    """Gen-FedSD's example: 250 cats, 100 dogs, 0 frogs need 0 + 150 + 250 images."""
    labels = np.repeat([0, 1, 2], [250, 100, 30])
    parts = module.Partition(
        name="iid", clients=(np.arange(350), np.arange(350, 370), np.arange(0)), rows=380, seed=0, unused=10
    )
    assert parts.counts(labels, 3).tolist() == [[250, 100, 0], [0, 0, 20], [0, 0, 0]]
    assert parts.statistics(labels, 3) == {
        "clients": 3,
        "empty_clients": 1,
        "rows": 370,
        "unused": 10,
        "moved": 0,
        "min_size": 0,
        "mean_size": 370 / 3,
        "max_size": 350,
        "mean_classes": 1.0,
        "clients_missing_classes": 3,
        "mean_largest_class": 90.0,
        "synthetic_to_balance": 400 + 40,
        "per_client": {"size": [350, 20, 0], "classes": [2, 1, 0], "largest_class": [250, 20, 0]},
    }


def test_lists_arrays_and_tensors_of_labels_give_the_same_split():
    labels = BALANCED[::100]
    parts = partition("dirichlet", labels, 5, 0, alpha=1.0)
    for other in (labels.tolist(), torch.from_numpy(labels), labels.astype(np.uint8)):
        assert partition("dirichlet", other, 5, 0, alpha=np.int64(1)).digest == parts.digest


def test_a_saved_partition_comes_back_and_damage_is_noticed(tmp_path):
    parts = partition("dirichlet", BALANCED[::50], 5, 0, alpha=0.5)
    path = tmp_path / "partition.json"
    parts.save(path)
    back = module.load(path)
    assert back.digest == parts.digest
    assert all((a == b).all() for a, b in zip(back.clients, parts.clients, strict=True))
    body = json.loads(path.read_text())
    body["clients"][0], body["clients"][1] = body["clients"][1], body["clients"][0]
    path.write_text(json.dumps(body))
    with pytest.raises(UserError, match=r"partition\.json does not match its digest"):
        module.load(path)
    body["clients"][1] = body["clients"][0]
    path.write_text(json.dumps(body))
    with pytest.raises(UserError, match=r"partition\.json: .*two clients"):
        module.load(path)
    for text in ("{}", "[]", "", "\0", json.dumps(body | {"clients": [[10**30]]}), json.dumps(body | {"rows": "x"})):
        path.write_text(text)
        with pytest.raises(UserError, match="no partition file"):
            module.load(path)
    with pytest.raises(UserError, match="no partition file"):
        module.load(tmp_path)
    with pytest.raises(UserError, match="there is no"):
        module.load(tmp_path / "absent.json")


@pytest.mark.parametrize(("key", "value"), [("seed", 1), ("moved", 3), ("name", "iid"), ("parameters", {"alpha": 1})])
def test_a_changed_field_of_a_saved_partition_is_noticed(tmp_path, key, value):
    path = tmp_path / "partition.json"
    partition("dirichlet", BALANCED[::50], 5, 0, alpha=0.5).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(UserError, match="digest"):
        module.load(path)


def test_a_failed_save_leaves_the_old_file(tmp_path):
    path = tmp_path / "partition.json"
    parts = partition("iid", BALANCED[::50], 5, 0)
    parts.save(path)
    bad = module.Partition(name="iid", clients=parts.clients, rows=parts.rows, seed=0, parameters={"x": object()})
    with pytest.raises(TypeError):
        bad.save(path)
    assert module.load(path).digest == parts.digest
    assert [f.name for f in tmp_path.iterdir()] == ["partition.json"]


def test_a_partition_with_a_shared_or_unknown_row_cannot_exist():
    with pytest.raises(UserError, match="two clients"):
        module.Partition(name="x", clients=(np.array([0, 1]), np.array([1])), rows=3, seed=0)
    with pytest.raises(UserError, match="outside"):
        module.Partition(name="x", clients=(np.array([0, 3]),), rows=3, seed=0)
    with pytest.raises(UserError, match="2 of 3 rows and calls 0 unused"):
        module.Partition(name="x", clients=(np.array([0, 1]),), rows=3, seed=0)
    assert module.Partition(name="x", clients=(np.array([0, 1]),), rows=3, seed=0, unused=1).unused == 1


def test_a_scheme_that_loses_a_row_is_caught(monkeypatch):
    monkeypatch.setattr(module.Iid, "assign", lambda self, labels, clients, rng: [np.array([0]), np.array([1])])
    with pytest.raises(UserError, match="calls 0 unused"):
        partition("iid", [0, 1, 1], 2, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (("dirichlet", {"alpha": 0}), "partition.alpha must be a number above 0"),
        (("dirichlet", {"alpha": -1}), "partition.alpha"),
        (("dirichlet", {"alpha": float("nan")}), "partition.alpha"),
        (("dirichlet", {"alpha": float("inf")}), "partition.alpha"),
        (
            ("dirichlet_client", {"alpha": "much"}),
            "partition.alpha must be a number above 0 and at most 1e.06, e.g. 0.1, not much",
        ),
        (("quantity", {"alpha": None}), "partition.alpha"),
        (("iid", {"min_size": -1}), "partition.min_size must be a whole number of at least 0, not -1"),
        (("nid1_official", {"group": 2.5}), "partition.group"),
        (("shards", {"per_client": 0}), "partition.per_client"),
        (("pathological", {"k": True}), "partition.k"),
        (("nid2", {"n_full": 0}), "partition.n_full"),
        (("nid2", {"n_single": 3}), "make 7 clients, not clients=5; make them add up"),
        (("dirichelt", {}), "did you mean dirichlet"),
        (("dirichlet", {"alhpa": 1}), "did you mean alpha"),
        (("pathological", {"k": 11}), "at most 10"),
        (("longtail", {"imbalance": 2}), "above 0 and at most 1"),
    ],
)
def test_wrong_words_are_named_with_the_remedy(call, message):
    with pytest.raises(UsageError, match=message):
        partition(call[0], BALANCED[::50], 5, 0, **call[1])


@pytest.mark.parametrize(("clients", "seed", "message"), [(0, 0, "clients"), (2.0, 0, "clients"), (2, -1, "seed")])
def test_clients_and_seed_must_be_whole_numbers(clients, seed, message):
    with pytest.raises(UsageError, match=f"{message} must be a whole number"):
        partition("iid", BALANCED[::50], clients, seed)


@pytest.mark.parametrize("labels", [[0.0, 1.0], [[0], [1]], [-1, 0], ["cat", "dog"]])
def test_labels_that_are_no_class_numbers_are_refused(labels):
    with pytest.raises(UserError, match="one class number"):
        partition("iid", labels, 1, 0)


@pytest.mark.parametrize(
    ("name", "labels", "clients", "parameters", "message"),
    [
        ("iid", [0, 1, 0], 4, {}, "clients=4 is more than the 3 rows; use fewer clients"),
        ("iid", [], 1, {}, "more than the 0 rows"),
        (
            "dirichlet_balanced",
            BALANCED[::100],
            100,
            {"alpha": 0.1},
            r"dirichlet_balanced \(min_size=15, alpha=0\.1\) cannot give clients=100 at least 15 rows each out of 500; "
            r"in the best draw the smallest got \d; lower partition\.min_size or clients$",
        ),
        ("longtail", BALANCED[::100], 100, {"imbalance": 0.001}, "out of 91;"),
        (
            "pathological",
            [0] * 90 + [1] * 3,
            10,
            {"k": 1},
            r"gives class 1 to 5 clients, but it has only 3 rows; lower partition\.k",
        ),
        ("nid2", [0] * 20 + [1], 10, {}, r"the smallest got 0; lower partition\.min_size or clients"),
    ],
)
def test_what_the_data_cannot_give_is_said_with_the_remedy(name, labels, clients, parameters, message):
    with pytest.raises(UserError, match=message) as caught:
        partition(name, labels, clients, 0, **parameters)
    assert "\n" not in str(caught.value)
