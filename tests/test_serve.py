"""Runs over nodes: the results are those of one machine, whatever the nodes and the post do."""

from dataclasses import fields

import pytest
from local_post import LocalPost
from test_methods import VARIANTS

from fedprior import store
from fedprior.config import Experiment, override
from fedprior.engines.remote import Patience
from fedprior.progress import Silent
from fedprior.run import run
from fedprior.serve import serve

QUICK = Patience(wait=1.0, answer=1.0, budget=60.0, poll=0.001, census=0.0, again=0.0)
BASE = ("clients=4", "partition=dirichlet", "partition.alpha=0.3", "cohort=3", "rounds=2", "steps=3", "batch_size=8")


def experiment(*words):
    return override(Experiment(), [*BASE, "name=it", *words])


def sites(folder, clients=("0-1", "2-3"), **more):
    return {
        11 * (i + 1): {"name": f"site-{i}", "clients": own, "state-dir": str(folder / f"site-{i}"), **more}
        for i, own in enumerate(clients)
    }


def over_nodes(e, folder, patience=QUICK, post=None, **options):
    post = post or LocalPost(e, sites(folder), **options)
    return serve(e, post, patience, folder / "runs", Silent())


def here(e, folder):
    return run(e, folder / "here")


FILES = ("metrics.jsonl", "model.safetensors", "partition.json", "clients.parquet")


def same(a, b):
    """Two run directories hold the same results, to the byte."""
    for name in FILES:
        if (a / name).exists() or (b / name).exists():
            assert (a / name).read_bytes() == (b / name).read_bytes(), name
    ours, theirs = (store.read_json(folder / "result.json") for folder in (a, b))
    for values in (ours, theirs):
        for key in ("seconds", "preparation_seconds", "engine", "directory"):
            values.pop(key)
    assert ours == theirs


def memories(folder, sites):
    """What clients remember, by (client, round), of a run directory or of nodes' folders."""
    paths = [p for where in [folder, *sites] for p in where.rglob("clients/*-*.safetensors")]
    return {p.name: store.weight_digest(store.read_tree(p)[0]) for p in paths}


def words_of(method):
    """A variant as a person would say it."""
    from fedprior.config import CHOICES, to_dict

    values = to_dict(override(Experiment(), [f"method={CHOICES['method'].name_of(method)}"]))
    plain = values["method"]
    own = {f.name: getattr(method, f.name) for f in fields(method) if f.metadata.get("config", True)}
    words = [f"method={plain['name']}"]
    return words + [f"method.{k}={'none' if v is None else v}" for k, v in own.items() if plain.get(k) != v]


OPTIONS = {
    "local batch norm": ("net=resnet10", "bn_stats=local", "steps=2"),
    "averaged batch norm": ("net=resnet10", "steps=2"),
    "an optimiser that persists": ("local=adamw", "persist_optimizer=true"),
    "augmentation, stragglers, drop-outs": ("augment=true", "straggler_rate=0.5", "drop_rate=0.4", "rounds=3"),
    "balancing from a shared pool": ("balance=max", "prior.steps=2"),
    "balancing from pools of a size": ("balance=max", "prior.steps=2", "balance.pool_size=7"),
    "balancing from pools of their own": ("balance=max", "prior.steps=2", "balance.pool=per_client", "clients=3"),
    "a rule that drops rows": ("balance=fixed_budget", "balance.budget=0", "balance.drop=true", "prior.steps=2"),
    "aligned rows": ("balance=max", "prior.steps=2", "balance.align=half", "balance.pool_size=3"),
    "a guide": ("guide=feddifrc", "guide.levels=4", "partition.alpha=1", "data.size=8"),
    "a guide with anchors and whitening": ("guide=feddifrc", "guide.levels=4", "guide.anchors=text"),
    "a guide on balanced rows": ("guide=feddifrc", "guide.levels=4", "balance=max", "balance.pool_size=2"),
    "validation rows": ("validation=0.2", "method=fedbn", "net=resnet10", "steps=2"),
    "a pool of processes": ("engine=pool", "workers=2", "threads=1", "rounds=1"),
}


@pytest.mark.parametrize("method", [m for m in VARIANTS if not m.pooled], ids=repr)
def test_every_method_is_the_same_over_nodes(method, tmp_path):
    """Server, what clients remember, metrics, model: each byte. FedBN has batch norm to keep."""
    net = "resnet10" if type(method).__name__ == "FedBN" else "cnn"
    check(tmp_path, *words_of(method), f"net={net}", f"steps={1 if net == 'resnet10' else 3}", "prior.steps=2")


@pytest.mark.parametrize("options", OPTIONS)
def test_every_option_is_the_same_over_nodes(options, tmp_path):
    check(tmp_path, "method=scaffold", *OPTIONS[options])


def check(folder, *words):
    e = experiment(*words)
    here(e, folder)
    post = LocalPost(e, sites(folder, clients=("0-1", f"2-{e.clients - 1}")), order=lambda answers: answers[::-1])
    over_nodes(e, folder, post=post)
    same(folder / "here" / "it", folder / "runs" / "it")
    ours = memories(folder / "here" / "it", [])
    theirs = memories(folder / "none", [folder / "site-0", folder / "site-1"])
    assert ours.items() <= theirs.items()
