"""Sites with data of their own: each trains on its rows as one machine would, and little leaves it."""

import numpy as np
import pytest
import torch
from local_post import LocalPost
from PIL import Image
from test_remote import SHORT, Said
from test_serve import QUICK

from fedprior import assemble, serve, store
from fedprior.config import Experiment, override
from fedprior.data import digits, site, table
from fedprior.data.table import Federation
from fedprior.errors import UserError
from fedprior.federate import begin, federate
from fedprior.progress import Silent
from fedprior.traffic import Traffic

WORDS = ("partition=sites", "clients=3", "cohort=2", "rounds=3", "steps=3", "batch_size=8", "name=it")
HELD = ({"zero": 9, "one": 4}, {"two": 12}, {"zero": 3, "nine": 8, "five": 2})  # rows of each class at each site


def written(folder):
    """Three sites' images as folders of classes, out of the digits' training rows."""
    rows, used = digits.train(), 0
    for number, held in enumerate(HELD):
        for name, count in held.items():
            label = digits.CLASSES.index(name)
            which = torch.nonzero(rows["label"] == label)[:, 0][used : used + count]
            (folder / f"data-{number}" / name).mkdir(parents=True)
            for i, image in enumerate(rows["image"][which]):
                Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"data-{number}" / name / f"{i:03}.png")
        used += 12


def sites(folder, **more):
    return {
        n: {
            "name": f"site-{n}",
            "clients": str(n),
            "state-dir": str(folder / f"site-{n}"),
            "data": str(folder / f"data-{n}"),
        }
        | more
        for n in range(len(HELD))
    }


def together(folder, e):
    """The same federation on one machine -> the server after the last round. Rows are balanced site by site."""
    parts = [site.load(folder / f"data-{n}", digits.CLASSES, (digits.SIZE, digits.SIZE)) for n in range(len(HELD))]
    clients = torch.arange(sum(len(p["label"]) for p in parts)).split([len(p["label"]) for p in parts])
    whole = table.concat(table.concat(parts[0], parts[1]), parts[2])
    data = Federation(table=whole, clients=tuple(clients), test=digits.test(), classes=digits.CLASSES)
    if e.balance is not None:
        own = [assemble.balance(e, data.only([k]), torch.device("cpu"), Silent())[0] for k in range(3)]
        rows = [table.take(f.table, f.clients[k]) for k, f in enumerate(own)]
        clients = torch.arange(sum(len(r["label"]) for r in rows)).split([len(r["label"]) for r in rows])
        whole = table.concat(table.concat(rows[0], rows[1]), rows[2])
        data = Federation(table=whole, clients=tuple(clients), test=digits.test(), classes=digits.CLASSES)
    net = assemble.build_net(e, data, torch.device("cpu"))
    engine, cohort = assemble.build_engine(e, net, data)
    rounds = federate(
        begin(net, e.method, e.seed), engine.worker.method, engine, cohort=cohort, seed=e.seed, traffic=Traffic()
    )
    for _, result in zip(range(e.rounds), rounds, strict=False):
        server = result.server
    return server


@pytest.mark.parametrize("words", [("method=scaffold",), ("balance=max", "prior.steps=1")])
def test_sites_train_as_one_machine_with_their_rows_would(words, tmp_path):
    written(tmp_path)
    e = override(Experiment(), [*WORDS, *words])
    outcome = serve.serve(e, LocalPost(e, sites(tmp_path)), QUICK, tmp_path / "runs", Silent())
    assert outcome.result["weights"] == store.weight_digest(together(tmp_path, e).weights)
    assert outcome.result["synthetic_rows"] is None  # which would say how many rows a site lacks
    assert all(value is None for value in outcome.curve[-1]["clients"].values())


class Overheard(LocalPost):
    """Notes what leaves sites."""

    def __init__(self, *given):
        super().__init__(*given)
        self.heard = []
        self.fault = self.note

    def note(self, node, kind, letter, answer):
        self.heard.append((node, kind, answer))
        return answer


def heard(folder, **more):
    e = override(Experiment(), [*WORDS, "method=scaffold", "balance=max", "prior.steps=1", "rounds=1", "cohort=3"])
    post = Overheard(e, sites(folder, **more))
    outcome = serve.serve(e, post, QUICK, folder / "runs", Silent())
    return post.heard, outcome


def test_nothing_leaves_a_site_but_what_the_method_uploads(tmp_path):
    written(tmp_path)
    letters, _ = heard(tmp_path)
    allowed = {
        "hello": {"name", "clients", "versions", "ready", "prior"},
        "prepare": {"ready", "prior"},
        "train": {"uploads", "refused"},
    }
    for node, kind, answer in letters:
        assert answer.facts.keys() <= allowed[kind]
        if kind == "train":
            assert answer.facts["uploads"].keys() == {node}
            assert answer.facts["uploads"][node].keys() == {"weight", "loss", "steps", "planned", "remembers"}
            assert {name: set(t) for name, t in answer.trees.items()} == {str(node): {"method", "buffers"}}
            assert set(answer.trees[str(node)]["method"]) == {"delta", "control"}
        else:
            assert not answer.trees
    import pyarrow.parquet as pq

    clients = pq.read_table(tmp_path / "runs" / "it" / "clients.parquet").to_pydict()
    assert np.sum(clients["rows_by_class"]) == 0


def test_class_counts_leave_a_site_where_it_says_so(tmp_path):
    written(tmp_path)
    letters, outcome = heard(tmp_path, **{"share-label-counts": True})
    said = {node: answer.facts["counts"] for node, kind, answer in letters if kind == "hello"}
    for number, held in enumerate(HELD):
        assert said[number] == [[held.get(name, 0) for name in digits.CLASSES]]
    assert outcome.curve[-1]["clients"]["mean"] is not None
    import pyarrow.parquet as pq

    clients = pq.read_table(tmp_path / "runs" / "it" / "clients.parquet").to_pydict()
    assert clients["real"] == [sum(held.values()) for held in HELD]
    assert np.array(clients["rows_by_class"]).tolist() == [[max(held.values())] * len(digits.CLASSES) for held in HELD]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"data": ""}, "has data of its own; set clients="),
        ({"clients": "0-1"}, "stands for one client"),
        ({"data": "/nowhere"}, "there is no such file or folder"),
    ],
)
def test_a_site_that_is_not_set_up_says_what_it_lacks(more, why, tmp_path):
    written(tmp_path)
    e = override(Experiment(), list(WORDS))
    said = Said()
    post = LocalPost(e, {**sites(tmp_path), 0: sites(tmp_path)[0] | more})
    serve.serve(e, post, SHORT, tmp_path / "runs", said)
    assert any(" does not take part: " in line and why in line for line in said.lines)


def test_a_class_that_the_experiment_does_not_know_is_named_with_its_file(tmp_path):
    written(tmp_path)
    (tmp_path / "data-1" / "two").rename(tmp_path / "data-1" / "twenty")
    e = override(Experiment(), [*WORDS, "cohort=3"])
    with pytest.raises(UserError, match=r"000\.png.*'twenty'"):
        serve.serve(e, LocalPost(e, sites(tmp_path)), SHORT, tmp_path / "runs", Silent())
    names = tmp_path / "names.txt"
    names.write_text("twenty = two\n")
    more = sites(tmp_path)
    more[1]["classes"] = str(names)
    serve.serve(e, LocalPost(e, more), QUICK, tmp_path / "runs", Silent())


def test_a_half_of_a_set_is_a_half_at_a_site_too(tmp_path, monkeypatch):
    """Of rows that a prior was trained on none is used where data.half=private."""
    from fedprior.data import halves

    written(tmp_path)
    monkeypatch.setattr(halves, "mask", lambda image, half: torch.arange(len(image)) % 2 == 0)
    e = override(Experiment(), [*WORDS, "data.half=private"])
    letters = []
    post = LocalPost(e, sites(tmp_path), fault=lambda *said: letters.append(said) or said[-1])
    serve.serve(e, post, QUICK, tmp_path / "runs", Silent())
    weights = {
        client: said["weight"]
        for _, kind, _, a in letters
        if kind == "train"
        for client, said in a.facts["uploads"].items()
    }
    assert weights == {k: -(-sum(held.values()) // 2) for k, held in enumerate(HELD) if k in weights}


def test_one_machine_says_how_a_federation_of_sites_is_run(tmp_path):
    from fedprior.run import run

    with pytest.raises(UserError, match="fedprior flower run"):
        run(override(Experiment(), [*WORDS]), tmp_path)


def test_the_server_judges_on_a_folder_of_test_images_alone(tmp_path):
    written(tmp_path)
    test = digits.test()
    for i in range(40):
        folder = tmp_path / "judged" / digits.CLASSES[int(test["label"][i])]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(test["image"][i].permute(1, 2, 0).numpy()).save(folder / f"{i}.png")
    e = override(Experiment(), [*WORDS, "data=mine", f"data.path={tmp_path / 'judged'}", "rounds=1"])
    outcome = serve.serve(e, LocalPost(e, sites(tmp_path)), QUICK, tmp_path / "runs", Silent())
    assert outcome.result["rounds"] == 1
