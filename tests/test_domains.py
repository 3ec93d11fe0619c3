"""Federations whose clients hold data of different domains."""

import json
import re
import tomllib
from collections import Counter
from dataclasses import replace

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import toy
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedprior import assemble, local, partition
from fedprior.cli import partition_show
from fedprior.config import Experiment, from_toml, override, to_toml
from fedprior.data import sources, table
from fedprior.errors import UsageError, UserError
from fedprior.methods import FedAvg
from fedprior.progress import Silent
from fedprior.run import run

OFFICE = ("amazon", "caltech10", "dslr", "webcam")
SIZES = (958, 1123, 157, 295)  # the published ones
DOMAINS = np.random.default_rng(0).permutation(np.repeat(np.arange(4), SIZES))
LABELS = np.random.default_rng(1).integers(0, 10, len(DOMAINS))
FIXED = "caltech10:3,amazon:2,webcam:2,dslr:3"  # of F2DC


def deal(clients=10, seed=0, domains=DOMAINS, names=OFFICE, **parameters):
    labels = np.resize(LABELS, len(domains))
    return partition("domains", labels, clients, seed, domains=domains, domain_names=names, **parameters)


def held(parts, domains=DOMAINS):
    """The one domain of each client."""
    out = []
    for rows in parts.clients:
        (domain,) = set(domains[rows].tolist())
        out.append(domain)
    return out


# The partition


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(20, 60), min_size=1, max_size=5),
    more=st.integers(0, 12),
    seed=st.integers(0, 5),
    fraction=st.sampled_from([None, 0.07, 0.05]),
    assignment=st.sampled_from(["random", "even"]),
)
def test_a_client_holds_one_domain_every_domain_a_client_and_no_row_two(sizes, more, seed, fraction, assignment):
    domains = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    clients = len(sizes) + more
    parts = deal(clients, seed, domains, (), fraction=fraction, assignment=assignment)
    holders = Counter(held(parts, domains))
    assert holders.keys() == set(range(len(sizes)))
    rows = np.concatenate(parts.clients)
    assert len(set(rows.tolist())) == len(rows) == len(domains) - parts.unused
    for k, domain in enumerate(held(parts, domains)):
        if fraction is None:  # all rows of a domain, shared out evenly
            assert len(parts.clients[k]) in (
                sizes[domain] // holders[domain],
                -(-sizes[domain] // holders[domain]),
            )
        else:
            assert len(parts.clients[k]) == sizes[domain] * round(100 * fraction) // 100
    assert (parts.unused == 0) == (fraction is None)
    if assignment == "even":
        assert max(holders.values()) - min(holders.values()) <= 1


def test_random_domains_follow_the_seed_and_are_drawn_alike_often():
    assert held(deal(seed=1)) != held(deal(seed=2))
    assert deal(seed=1).digest == deal(seed=1).digest
    assert deal(seed=3).digest[:16] == "3df272d214e033dc"  # a change here changes every published split
    assert deal(seed=3, assignment=FIXED, fraction=0.1).digest[:16] == "346fcd100b193842"
    often = np.mean([np.bincount(held(deal(seed=seed))) for seed in range(300)], 0)
    np.testing.assert_allclose(often, 2.5, atol=0.25)  # one each, and a quarter of six; four deviations
    places = Counter(held(deal(seed=seed))[0] for seed in range(300))
    assert min(places.values()) > 45  # the sure ones come in no fixed place


def test_who_gets_one_client_more_of_an_even_split_falls_by_lot():
    seen = {tuple(np.bincount(held(deal(seed=seed, assignment="even")))) for seed in range(30)}
    assert {tuple(sorted(counts)) for counts in seen} == {(2, 2, 3, 3)}
    assert len(seen) > 3
    assert np.bincount(held(deal(8, assignment="even"))).tolist() == [2, 2, 2, 2]


def test_counts_are_taken_in_the_order_in_which_they_stand():
    parts = deal(assignment=" caltech10 : 3, amazon:2,webcam:2,dslr:3")
    assert held(parts) == [1, 1, 1, 0, 0, 3, 3, 2, 2, 2]
    assert [len(rows) for rows in parts.clients] == [375, 374, 374, 479, 479, 148, 147, 53, 52, 52]


def test_a_clients_classes_are_mixed_as_in_its_domain():
    """Of n rows out of N those of a class of share p vary by n p (1 - p) (N - n) / (N - 1) (hypergeometric)."""
    domains, labels = np.zeros(8000, dtype=int), np.repeat([0, 1, 2], [5000, 2000, 1000])
    parts = [partition("domains", labels, 4, seed, domains=domains, fraction=0.1) for seed in range(50)]
    counts = np.concatenate([p.counts(labels, 3) for p in parts])
    assert (counts.sum(1) == 800).all()
    share = np.array([5, 2, 1]) / 8
    np.testing.assert_allclose(counts.mean(0) / 800, share, atol=0.005)
    np.testing.assert_allclose(counts.var(0), 800 * share * (1 - share) * 7200 / 7999, rtol=0.35)


def test_a_fraction_is_of_the_domains_rows_to_the_last_bit():
    domains = np.zeros(300, dtype=int)
    for percent in range(1, 101):
        (rows,) = deal(1, domains=domains, names=("a",), fraction=percent / 100).clients
        assert len(rows) == 3 * percent
    parts = deal(3, domains=domains[:100], names=("a",), fraction=1 / 3)  # just possible
    assert [len(rows) for rows in parts.clients] == [33, 33, 33]
    assert parts.unused == 1


@pytest.mark.parametrize(
    ("clients", "parameters", "message"),
    [
        (3, {}, r"clients=3 is less than the 4 domains \(amazon, caltech10, dslr, webcam\).*raise clients"),
        (10, {"assignment": "rando"}, "neither random nor even nor counts.*amazon:2,caltech10:2,dslr:2,webcam:2"),
        (10, {"assignment": ""}, "neither random nor even"),
        (10, {"assignment": "caltech:3,amazon:2,webcam:2,dslr:3"}, "'caltech'; did you mean caltech10"),
        (10, {"assignment": "x:10"}, "'x'; choose from amazon, caltech10, dslr, webcam"),
        (10, {"assignment": "caltech10:3,amazon:7"}, "leaves out dslr, webcam; name every domain"),
        (11, {"assignment": FIXED}, "makes 10 clients, not clients=11; make them agree"),
        (10, {"assignment": FIXED.replace("webcam:2", "webcam:0")}, "'webcam' one number of clients of at least 1"),
        (10, {"assignment": FIXED.replace("webcam:2", "webcam:two")}, "'webcam' one number"),
        (10, {"assignment": FIXED + ",amazon:2"}, "'amazon' one number"),
        (10, {"assignment": 3}, "partition.assignment"),
        (10, {"fraction": 0.4, "assignment": FIXED}, "0.4 for each of 3 clients .* 'caltech10'; use at most 0.333"),
        (10, {"fraction": 0}, "partition.fraction must be a number above 0"),
        (10, {"fraction": 1.5}, "partition.fraction .* at most 1"),
    ],
)
def test_words_that_cannot_be_are_answered_with_the_valid_ones(clients, parameters, message):
    with pytest.raises(UsageError, match=message) as caught:
        deal(clients, **parameters)
    assert "\n" not in str(caught.value)


def test_data_that_cannot_be_dealt_so_are_refused_with_the_remedy():
    with pytest.raises(UserError, match="partition=domains needs data with a column 'domain'"):
        partition("domains", LABELS, 10, 0)
    with pytest.raises(UserError, match=r"0\.005 of the 157 rows of domain 'dslr' is less than one row.*raise it"):
        deal(assignment=FIXED, fraction=0.005)
    with pytest.raises(UserError, match=r"at least 1 rows each.*lower partition\.min_size or clients"):
        deal(8, domains=np.array([0] * 20 + [1]), names=(), assignment="0:4,1:4")
    for wrong in (DOMAINS[:-1], DOMAINS - 1, DOMAINS / 2):
        with pytest.raises(UserError, match=r"domain number"):
            partition("domains", LABELS, 10, 0, domains=wrong)
    with pytest.raises(UserError, match="domain number 3 has no name among a, b"):
        deal(names=("a", "b"))


def test_a_domain_that_only_the_test_set_has_needs_no_client():
    parts = deal(3, domains=np.array([0, 2, 0, 2, 2, 0]), names=("a", "b", "c"), assignment="c:1,a:2")
    assert held(parts, np.array([0, 2, 0, 2, 2, 0])) == [2, 0, 0]


def test_the_keys_of_the_scheme_go_to_a_file_and_back(tmp_path):
    words = ["partition=domains", f"partition.assignment={FIXED}", "clients=10"]
    for more in ([], ["partition.fraction=0.2"]):
        e = override(Experiment(), [*words, *more])
        (tmp_path / "config.toml").write_text(to_toml(e))
        assert from_toml(tmp_path / "config.toml") == e
        assert ("fraction" in tomllib.loads(to_toml(e))["partition"]) == bool(more)
    with pytest.raises(UserError, match="needs data with a column 'domain'"):
        assemble.split(override(Experiment(), words))


# The table


def test_synthetic_rows_of_a_federation_with_domains_are_of_none():
    plain = toy.federation()
    data = replace(plain, table=plain.table | {"domain": torch.arange(160) % 2}, domains=("a", "b"))
    image, label = toy.images(6, 3)
    more = data.with_rows(
        table.make(image, label, synthetic=True, first_id=160), [torch.tensor([0, k]) for k in range(6)]
    )
    assert more.table["domain"].tolist() == [0, 1] * 80 + [-1] * 6
    np.testing.assert_array_equal(more.domain_counts(), data.domain_counts())
    assert data.domain_counts().tolist() == [[-(-n // 2), n // 2] for n in (30, 20)] + [
        [int((data.table["domain"][rows] == d).sum()) for d in (0, 1)] for rows in data.clients[2:]
    ]
    assert "domain" not in plain.with_rows(table.make(image, label, synthetic=True), [torch.tensor([0])] * 6).table
    assert plain.domain_counts().shape == (6, 0)


# Digits are not mirrored


@pytest.mark.parametrize(("classes", "flip"), [(toy.CLASSES, True), (("number 0", "number 1", "number 2", "3"), False)])
def test_images_of_digits_are_cropped_and_not_mirrored(classes, flip, monkeypatch):
    data, seen = replace(toy.federation(), classes=classes), []
    real = local.cropped

    def watched(image, crops):
        seen.append(bool(crops[2].any()))
        return real(image, crops)

    monkeypatch.setattr(local, "cropped", watched)
    e = override(Experiment(), ["augment=true", "clients=6", "cohort=1", "steps=2", "batch_size=16"])
    engine, _ = assemble.build_engine(e, toy.net(), data)
    assert engine.worker.flip is flip
    engine.worker.train(0, data.shard(0), {"weights": toy.net().init(), "shared": {}}, {}, 0)
    assert seen == [flip, flip]


def test_unless_told_a_worker_mirrors():
    assert toy.worker(FedAvg()).flip is True


# The real sets

REAL = [  # folder, rows of each domain, with their names
    ("pacs", {"art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929}),
    ("office-caltech10", dict(zip(OFFICE, SIZES, strict=True))),
    ("digits", {"mnist": 4000, "mnist_m": 4000, "usps": 4000}),
]


@pytest.mark.data
@pytest.mark.parametrize(("folder", "sizes"), REAL)
def test_a_real_set_keeps_its_domains_and_no_test_image_is_trained_on(shared_data, folder, sizes):
    name = "digits_domains" if folder == "digits" else folder  # the plain name is that of the embedded set
    got = sources.load(name, path=shared_data / folder, size=4)
    assert got.domains == tuple(sizes)
    raw = [pq.read_table(path) for path in sorted((shared_data / folder).glob("*.parquet"), reverse=True)]
    images = [cell["bytes"] for part in raw for cell in part["image"].to_pylist()]  # train, then test
    told = [name for part in raw for name in part["domain"].to_pylist()]
    seen = {}
    for kind in ("train", "test"):
        part = getattr(got, kind)
        assert [got.domains[d] for d in part["domain"]] == [told[row] for row in part["id"]]
        seen[kind] = [{images[i] for i in part["id"][part["domain"] == d].tolist()} for d in range(len(sizes))]
    for d, (name, size) in enumerate(sizes.items()):
        rows = [int((part["domain"] == d).sum()) for part in (got.train, got.test)]
        assert sum(rows) == size, name
        assert rows[1] / size == pytest.approx(0.25 if folder == "digits" else 0.2, abs=0.04)
        assert not seen["train"][d] & seen["test"][d]
    assert not set.union(*seen["train"]) & set.union(*seen["test"])


@pytest.mark.data
def test_a_run_over_the_domains_of_office_reports_their_accuracies_and_the_mean(shared_data, tmp_path):
    words = [
        "data=office-caltech10",
        f"data.path={shared_data / 'office-caltech10'}",
        "data.size=16",
        "partition=domains",
        f"partition.assignment={FIXED}",
        "clients=10",
        "cohort=10",
        "rounds=3",
        "evaluate_every=2",
        "steps=4",
        "batch_size=16",
        "augment=true",
        "name=it",
    ]
    e = override(Experiment(), words)
    federation, parts = assemble.split(e)
    for rows, domain in zip(parts.clients, [1, 1, 1, 0, 0, 3, 3, 2, 2, 2], strict=True):
        assert (federation.table["domain"][torch.from_numpy(rows)] == domain).all()
    net = assemble.build_net(e, federation, torch.device("cpu"))
    assert (tuple(net.mean), tuple(net.std)) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    outcome = run(e, tmp_path, Silent())
    lines = [json.loads(line) for line in (tmp_path / "it" / "metrics.jsonl").read_text().splitlines()]
    assert [line["per_domain"] is None for line in lines] == [True, False, False]
    for line in lines[1:]:
        assert tuple(line["per_domain"]) == OFFICE
        assert line["accuracy"] == pytest.approx(np.mean(list(line["per_domain"].values())), abs=1e-12)
    assert outcome.result["last"] == lines[-1]["accuracy"]
    by_domain = pq.read_table(tmp_path / "it" / "clients.parquet")["real_by_domain"].to_pylist()
    assert [np.flatnonzero(row).tolist() for row in by_domain] == [[d] for d in (1, 1, 1, 0, 0, 3, 3, 2, 2, 2)]


@pytest.mark.data
def test_the_command_shows_the_domains_of_each_client(shared_data, capsys):
    words = ["data=own", f"data.path={shared_data / 'digits'}", "data.size=4", "partition=domains", "clients=6"]
    partition_show([*words, "partition.assignment=even", "partition.fraction=0.1", "cohort=2"], True)
    out = capsys.readouterr().out
    told = json.loads(out.strip().splitlines()[-1])["domains"]
    assert sorted(map(tuple, (row.values() for row in told))) == sorted([(300, 0, 0), (0, 300, 0), (0, 0, 300)] * 2)
    assert len(re.findall(r"mnist_m +300", out)) == 2
    partition_show(["clients=5", "cohort=2"], True)
    assert "domains" not in json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_a_column_domain_counts_only_where_the_partition_is_by_domains(shared_data, tmp_path):
    words = ["data=office", f"data.path={shared_data / 'office-caltech10'}", "data.size=16", "cohort=3", "rounds=1"]
    plain = override(Experiment(), [*words, "clients=8", "partition=iid", "steps=1"])
    data = assemble.split(plain).federation
    assert data.domains == ()
    assert "domain" not in data.table
    assert "per_domain" not in run(plain, tmp_path).curve[0]


def test_domains_that_the_test_split_does_not_name_are_said_at_once(tmp_path):

    rng = np.random.default_rng(0)
    image = [Image.fromarray(rng.integers(0, 255, (8, 8, 3), np.uint8)) for _ in range(20)]
    columns = {"image": image, "label": [0, 1] * 10}
    for split, more in (("train", {"domain": ["a", "b"] * 10}), ("test", {})):
        made = datasets.Dataset.from_dict({**columns, **more})
        made.to_parquet(str(tmp_path / f"{split}.parquet"))
    e = override(Experiment(), [f"data.path={tmp_path}", "data=x", "partition=domains", "clients=2", "cohort=2"])
    with pytest.raises(UserError, match=r"the test split of x has no column 'domain'"):
        assemble.split(e)
