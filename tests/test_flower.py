"""The same experiment over Flower, with TLS and node keys. One smoke test is in every run of the tests; every method is
behind the marker: pytest -m flower tests/test_flower.py"""

import json
import os
import subprocess
import sys

import pytest
from cluster import Cluster, fedprior
from test_methods import VARIANTS
from test_serve import experiment, here, memories, same, words_of

from fedprior.config import to_toml
from fedprior.engines.remote import Patience
from fedprior.submit import write_app

BASE = ("cohort=3", "steps=2")
NODES = {0: {"clients": "0-1"}, 1: {"clients": "2-3"}}
HASTE = Patience(wait=120, answer=150, budget=60)


def submitted(cluster, folder, e, patience=HASTE, app=None):
    """-> the run's id. `app` is the text of another app.py."""
    write_app(e, folder / e.name, patience)
    if app:
        (folder / e.name / "app.py").write_text(app)
    return cluster.submit(folder / e.name)


def finished(cluster, folder, e, **more):
    """Submits, waits -> (how it ended, the run's directory)."""
    return cluster.wait(submitted(cluster, folder, e, **more), timeout=300), cluster.server / "runs" / e.name


def equal(cluster, folder, e):
    """The run over Flower is the run on one machine: every byte of its results, and of what clients remember."""
    here(e, folder)
    same(folder / "here" / e.name, cluster.server / "runs" / e.name)
    ours = memories(folder / "here" / e.name, [])
    theirs = memories(folder / "none", cluster.root.glob(f"site-*/state/runs/{e.name}-*"))
    assert ours.items() <= theirs.items()


@pytest.mark.slow
def test_an_experiment_over_two_nodes_is_the_one_of_this_machine(tmp_path):
    """SCAFFOLD on balanced rows with a guide, by the command line, while every socket is watched."""
    e = experiment(*BASE, "method=scaffold", "guide=feddifrc", "guide.levels=4", "balance=max", "balance.pool_size=4")
    (tmp_path / "mine.toml").write_text(to_toml(e))
    with Cluster(tmp_path, nodes=2, node_toml=NODES, watch=True) as cluster:
        done = cluster.run(
            fedprior("flower", "run", tmp_path / "mine.toml", "--server", cluster.server, "--json"), timeout=240
        )
        result = json.loads(done.stdout.splitlines()[-1])
        assert result["rounds"] == 2
        assert "Test accuracy" in done.stdout
        assert "site-0 is ready" in done.stderr
        assert cluster.tried() == []
        equal(cluster, tmp_path, e)


def test_an_exported_app_is_three_files_and_names_itself(tmp_path):
    done = subprocess.run(
        fedprior("flower", "export", tmp_path / "app", "clients=4", "cohort=2", "--json"),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert sorted(p.name for p in (tmp_path / "app").iterdir()) == ["app.py", "experiment.toml", "pyproject.toml"]
    name = json.loads(done.stdout.splitlines()[-1])["name"]
    assert name.startswith("digits-fedavg-20")
    assert f'name = "{name}"' in (tmp_path / "app" / "experiment.toml").read_text()


def test_flower_builds_and_finds_the_app(tmp_path):
    """What `flwr run` does before it sends: a bundle of the three files, in which both components are found."""
    from flwr.cli.build import build_fab_from_disk
    from flwr.supercore.object_ref import load_app, validate

    write_app(experiment(), tmp_path / "app", HASTE)
    bundle = build_fab_from_disk(tmp_path / "app")
    assert 500 < len(bundle) < 10_000
    for name in ("server", "client"):
        assert validate(f"app:{name}", project_dir=tmp_path / "app") == (True, None)
        assert load_app(f"app:{name}", ImportError, tmp_path / "app") is not None
    sys.modules.pop("app", None)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("cluster"), nodes=2, node_toml=NODES) as running:
        yield running


@pytest.mark.flower
@pytest.mark.parametrize("method", [m for m in VARIANTS if not m.pooled], ids=repr)
def test_every_method_is_the_same_over_flower(method, cluster, tmp_path):
    net = "resnet10" if type(method).__name__ == "FedBN" else "cnn"
    words = [*words_of(method), f"net={net}", "prior.steps=2", f"name={tmp_path.name[-60:]}"]
    e = experiment(*BASE, *words)
    assert finished(cluster, tmp_path, e)[0] == "finished:completed"
    equal(cluster, tmp_path, e)
