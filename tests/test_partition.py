import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprior import partition
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
    "iid": "de7955f57f5d91ce",
    "dirichlet": "eae14b962aa75375",
    "dirichlet_balanced": "b30c0eb2c4e6d341",
    "dirichlet_client": "96a793c5cd5a9248",
    "nid1_official": "616fd8e363eb1d2f",
    "nid2": "909a679f1bcd7006",
    "shards": "576c59d8d3b4727a",
    "pathological": "607f068717ea4a5e",
    "quantity": "768bad2896e73a08",
    "longtail": "04ee9d62305d1b41",
}


def test_every_scheme_is_tried():
    assert PARAMETERS.keys() == module.PARTITIONS.keys() == GOLDEN.keys()


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(sorted(PARAMETERS)),
    alpha=st.sampled_from([0.01, 0.05, 0.1, 0.5, 1.0, 100.0]),
    clients=st.integers(1, 30),
    classes=st.integers(2, 12),
    rows=st.integers(60, 400),
    seed=st.integers(0, 5),
)
def test_each_row_goes_to_one_client_and_no_client_is_too_small(name, alpha, clients, classes, rows, seed):
    labels = np.random.default_rng(seed).permutation(np.arange(rows) % classes)
    chosen = PARAMETERS[name] | ({"alpha": alpha} if "alpha" in PARAMETERS[name] else {})
    parts = partition(name, labels, clients, seed, **chosen)
    used = Counter(np.concatenate(parts.clients).tolist())
    assert set(used.values()) <= {1}
    assert set(used) <= set(range(rows))
    if name not in ("longtail", "pathological"):
        assert parts.unused == 0
    assert min(map(len, parts.clients)) >= chosen.get("min_size", 1)
    assert all((np.diff(c) > 0).all() for c in parts.clients)
    assert parts.counts(labels, classes).sum() == rows - parts.unused


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_the_same_arguments_give_the_same_rows_on_every_machine(name):
    state = np.random.get_state()[1].copy()
    parts = partition(name, BALANCED[::10], 20, 7, **PARAMETERS[name])
    assert (np.random.get_state()[1] == state).all()
    np.random.seed(3)
    assert partition(name, BALANCED[::10], 20, 7, **PARAMETERS[name]).digest == parts.digest
    assert partition(name, BALANCED[::10], 20, 8, **PARAMETERS[name]).digest != parts.digest
    assert parts.digest[:16] == GOLDEN[name]


def test_very_skewed_dirichlet_ends_and_leaves_classes_missing():
    parts = partition("dirichlet_balanced", BALANCED, 100, 0, alpha=0.05)
    statistics = parts.statistics(BALANCED, 10)
    assert statistics["min_size"] >= 15
    assert statistics["rows"] == 50_000
    assert statistics["clients_missing_classes"] > 90
    assert 0 < parts.moved < 1000


@pytest.mark.parametrize(("alpha", "classes", "largest"), [(0.5, 8.1, 230), (0.1, 4.5, 374), (0.05, 2.7, 446)])
def test_balanced_dirichlet_has_the_known_statistics_of_the_papers_split(alpha, classes, largest):
    """papers.md 2.5, a simulation of FedZoo's partition: 100 clients on CIFAR-10, three seeds."""
    seen = [partition("dirichlet_balanced", BALANCED, 100, s, alpha=alpha).statistics(BALANCED, 10) for s in range(3)]
    assert np.mean([s["mean_classes"] for s in seen]) == pytest.approx(classes, abs=0.3)
    assert np.mean([s["mean_largest_class"] for s in seen]) == pytest.approx(largest, rel=0.08)


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


def test_official_nid1_is_milder_than_the_plain_split():
    share = lambda name: (
        partition(name, BALANCED, 10, 7, alpha=0.05).counts(BALANCED, 10).max(1)
        / partition(name, BALANCED, 10, 7, alpha=0.05).counts(BALANCED, 10).sum(1)
    )
    assert share("nid1_official").max() < share("dirichlet").max()


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
    owned = (partition("nid2", BALANCED, 10, 0).counts(BALANCED, 10) > 0).sum(1)
    assert sorted(owned) == [1] * 6 + [10] * 4
    owned = (partition("nid2", BALANCED, 20, 0).counts(BALANCED, 10) > 0).sum(1)
    assert sorted(owned) == [1] * 12 + [10] * 8


def test_shards_deal_two_pieces_of_sorted_rows():
    parts = partition("shards", BALANCED, 100, 0)
    assert all(len(c) == 500 for c in parts.clients)
    assert (parts.counts(BALANCED, 10) > 0).sum(1).max() <= 2


def test_equal_sizes_per_client_dirichlet():
    parts = partition("dirichlet_client", BALANCED, 40, 0, alpha=0.05)
    assert all(len(c) == 1250 for c in parts.clients)


@given(sizes=st.lists(st.integers(0, 30), min_size=2, max_size=12), least=st.integers(0, 5))
def test_repair_moves_exactly_what_is_lacking(sizes, least):
    if sum(sizes) < least * len(sizes):
        return
    groups = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    moved = module.repair(groups, least)
    assert moved == sum(max(0, least - s) for s in sizes)
    assert min(map(len, groups)) >= least
    assert sorted(np.concatenate(groups).tolist()) == list(range(sum(sizes)))


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
    with pytest.raises(UserError, match="digest"):
        module.load(path)
    body["clients"][1] = body["clients"][0]
    path.write_text(json.dumps(body))
    with pytest.raises(UserError, match="two clients"):
        module.load(path)
    path.write_text("{}")
    with pytest.raises(UserError, match="no partition file"):
        module.load(path)
    with pytest.raises(UserError, match="there is no"):
        module.load(tmp_path / "absent.json")


def test_a_partition_with_a_shared_or_unknown_row_cannot_exist():
    with pytest.raises(UserError, match="two clients"):
        module.Partition(name="x", clients=(np.array([0, 1]), np.array([1])), rows=3, seed=0)
    with pytest.raises(UserError, match="outside"):
        module.Partition(name="x", clients=(np.array([0, 3]),), rows=3, seed=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (("dirichlet", {"alpha": 0}), "partition.alpha must be a number above 0"),
        (("dirichlet", {"alpha": -1}), "partition.alpha"),
        (("dirichlet", {"alpha": float("nan")}), "partition.alpha"),
        (("dirichelt", {}), "did you mean dirichlet"),
        (("dirichlet", {"alhpa": 1}), "did you mean alpha"),
        (("pathological", {"k": 11}), "at most 10"),
        (("longtail", {"imbalance": 2}), "imbalance"),
    ],
)
def test_wrong_words_are_named_with_the_remedy(call, message):
    with pytest.raises(UsageError, match=message):
        partition(call[0], BALANCED[::50], 5, 0, **call[1])


def test_what_the_data_cannot_give_is_said_with_the_remedy():
    with pytest.raises(UserError, match="use fewer clients"):
        partition("iid", [0, 1, 0], 4, 0)
    with pytest.raises(UserError, match=r"dirichlet_balanced.*alpha.*lower partition\.min_size"):
        partition("dirichlet_balanced", BALANCED[::100], 100, 0, alpha=0.1)
