"""Who is judged, by which weights, how often, and what the numbers of a round and of a run say about clients."""

import json
from dataclasses import replace
from itertools import islice

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import toy
from safetensors.torch import load_file

from fedprior import assemble, cli, nets, resume, store
from fedprior.config import Experiment, override
from fedprior.data import digits, table
from fedprior.data.table import Federation
from fedprior.engines import serial
from fedprior.engines.serial import Serial
from fedprior.evaluate import evaluate
from fedprior.federate import begin, choose, federate
from fedprior.memory import ClientMemory
from fedprior.methods import METHODS, Centralised, FedAvg, FedBN, FedProto, Local
from fedprior.methods.ccvr import CCVR
from fedprior.net import Net
from fedprior.progress import Silent
from fedprior.record import Record
from fedprior.report import summary
from fedprior.report.numbers import Arm
from fedprior.run import Judge, client_columns, run
from fedprior.traffic import Traffic

SIZES = (30, 0, 18, 25, 0, 0, 40, 7)  # empty clients between, before and after others
HELD = [k for k, n in enumerate(SIZES) if n]
STATISTICS = ("mean", "weighted", "std", "p10", "worst")


def skewed(seed: int = 0) -> Federation:
    """Clients of very unlike class mixes: rows by class are dealt out in blocks. Labels of the test set are turned
    for every third image, so that classes differ in accuracy."""
    plain = toy.federation(SIZES, seed)
    order = plain.table["label"].argsort(stable=True)
    label = plain.test["label"].clone()
    label[::3] = label[::3] // 2
    return replace(plain, clients=tuple(order[rows] for rows in plain.clients), test=plain.test | {"label": label})


def with_synthetic(federation: Federation) -> Federation:
    """Each client with data also gets 20 flagged rows of the first class."""
    image, label = toy.images(20, 9)
    extra = table.make(image, label * 0, synthetic=True, first_id=10_000)
    rows = [torch.arange(20 if len(own) else 0) for own in federation.clients]
    return federation.with_rows(extra, rows)


def play(method, rounds, data=None, cohort=2, memory=None, first=0, **options):
    """-> (engine, the server after each round, lazily)"""
    worker = toy.worker(method, **({"steps": 8} | options))
    engine = Serial(worker, data or skewed(), memory)
    start = begin(worker.net, method, worker.seed, worker.bn_stats)
    loop = federate(start, method, engine, cohort=cohort, seed=worker.seed, traffic=Traffic(), first=first)
    return engine, (result.server for result in islice(loop, rounds))


@pytest.fixture
def calls(monkeypatch):
    """The weights of every evaluation that the judge asks for."""
    seen = []

    def counted(net, weights, table, classes):
        seen.append(weights)
        return evaluate(net, weights, table, classes)

    monkeypatch.setattr(serial, "evaluate", counted)
    return seen


def by_hand(engine, server, data):
    """-> each client's Evaluation of the weights that it would begin the next round with"""
    net, worker = engine.worker.net, engine.worker
    first, out = net.init(), []
    for k in HELD:
        own = engine.memory.get(k).get("kept", first)
        weights = {
            group: {name: own[group][name] if name in worker.kept else server.weights[group][name] for name in part}
            for group, part in first.items()
        }
        out.append(evaluate(net, weights, data.test, len(data.classes)))
    return out


def clients_by_hand(rates, counts):
    """The statistics over clients with rows, by a loop; `rates` is one row a client with data, or one for all."""
    own, sizes = [], []
    for k, row in enumerate(counts):
        if row.sum():
            mine = rates if np.ndim(rates) == 1 else rates[len(own)]
            own.append(sum(n * r for n, r in zip(row, mine, strict=True)) / row.sum())
            sizes.append(counts[k].sum())
    numbers = np.mean(own), np.dot(own, sizes) / sum(sizes), np.std(own), np.percentile(own, 10), min(own)
    return dict(zip(STATISTICS, numbers, strict=True)), own


def tells(own):
    """Whether these accuracies of clients would show a confusion of clients or of statistics."""
    return len(set(own)) >= 3 and sorted(own)[0] < sorted(own)[1]


# One model for all


def test_a_global_model_is_judged_by_one_evaluation_with_the_numbers_of_evaluate(calls):
    data = skewed()
    engine, servers = play(FedAvg(), 3, data)
    judge, told = Judge(engine, data), []
    for done, server in enumerate(servers, 1):
        got = judge.scores(server)
        assert len(calls) == done
        assert toy.gap(calls[-1], server.weights) == 0
        plain = evaluate(engine.worker.net, server.weights, data.test, 4)
        assert got["accuracy"] == plain.accuracy
        assert got["loss"] == plain.loss
        assert got["per_class"] == plain.per_class.tolist()
        wanted, own = clients_by_hand(plain.per_class, data.counts())
        assert got["clients"] == pytest.approx(wanted)
        told.append(tells(own))
    assert any(told)


def test_only_real_rows_say_what_a_client_sees_and_what_it_weighs():
    plain, data = skewed(), with_synthetic(skewed())
    assert (data.counts().sum(1)[HELD] == plain.counts().sum(1)[HELD] + 20).all()
    for method in (FedAvg(), Local()):
        engine, servers = play(method, 1, data)
        judge = Judge(engine, data)
        got = judge.scores(next(servers))["clients"]
        rates = judge.rates
        assert got == pytest.approx(clients_by_hand(rates, plain.counts())[0])
        assert got["weighted"] != pytest.approx(clients_by_hand(rates, data.counts())[0]["weighted"])


def test_a_class_without_test_images_has_no_rate_and_the_rest_can_be_written_as_json():
    data = skewed()
    rows = torch.nonzero(data.test["label"] != 2).flatten()
    data = replace(data, test=table.take(data.test, rows))
    for method in (FedAvg(), Local()):
        engine, servers = play(method, 1, data)
        got = Judge(engine, data).scores(next(servers))
        assert [x is None for x in got["per_class"]] == [False, False, True, False]
        json.dumps(got, allow_nan=False)


def test_a_loss_that_is_not_finite_is_none():
    data = skewed()
    engine, servers = play(FedAvg(), 1, data)
    server = next(servers)
    broken = {k: x * float("inf") for k, x in server.weights["params"].items()}
    got = Judge(engine, data).scores(server._replace(weights=server.weights | {"params": broken}))
    assert got["loss"] is None
    json.dumps(got, allow_nan=False)


# Models of their own

PERSONAL = [
    (Local(), {}),
    (FedProto(share="prototypes"), {}),
    (FedBN(), {}),
    (FedAvg(), {"bn_stats": "local"}),
]
NAMES = ["local", "fedproto", "fedbn", "fedavg with local statistics"]


@pytest.mark.parametrize(("method", "options"), PERSONAL, ids=NAMES)
def test_personal_models_score_the_mean_over_all_clients_with_data_trained_or_not(method, options):
    data = skewed()
    engine, servers = play(method, 4, data, **options)
    judge, told = Judge(engine, data), []
    for server in servers:
        got, seen = judge.scores(server), by_hand(engine, server, data)
        assert got["accuracy"] == pytest.approx(np.mean([e.accuracy for e in seen]), abs=1e-12)
        assert got["loss"] == pytest.approx(np.mean([e.loss for e in seen]), rel=1e-12)
        rates = np.stack([e.per_class for e in seen])
        assert got["per_class"] == pytest.approx(rates.mean(0))
        wanted, own = clients_by_hand(rates, data.counts())
        assert got["clients"] == pytest.approx(wanted)
        told.append(tells(own))
    assert any(told)
    engine, servers = play(method, 1, data, **options)
    next(servers)
    assert any(k not in engine.memory for k in HELD)  # the first round did leave somebody out


@pytest.mark.parametrize("method", [Local(), FedProto(share="prototypes")], ids=["local", "fedproto"])
def test_a_model_is_evaluated_when_it_changed_and_not_again_and_untrained_ones_once_together(method, calls):
    data = skewed()
    engine, servers = play(method, 6, data)
    judge = Judge(engine, data)
    trained, evaluated, again = set(), 0, 0
    for number, server in enumerate(servers):
        judge.scores(server)
        cohort = choose(HELD, 2, 0, number)
        evaluated += len(cohort) + (number == 0)  # at first also the weights that the others begin with
        assert len(calls) == evaluated
        for k in cohort:
            mine = engine.memory.get(k)["kept"]
            assert any(toy.gap(weights, mine) == 0 for weights in calls[-len(cohort) - (number == 0) :])
        again += len(trained.intersection(cohort))
        trained.update(cohort)
        judge.scores(server)
        assert len(calls) == evaluated  # nothing has changed in between
    assert again  # somebody trained twice


def test_before_anybody_trained_one_evaluation_serves_all_and_one_a_client_is_made_when_they_have(calls):
    data = skewed()
    engine, servers = play(Local(), 2, data, cohort=len(HELD))
    judge = Judge(engine, data)
    start = begin(engine.worker.net, engine.worker.method, 0)
    first = judge.scores(start)
    assert len(calls) == 1
    assert first["accuracy"] == evaluate(engine.worker.net, engine.worker.net.init(), data.test, 4).accuracy
    for rounds, server in enumerate(servers, 1):
        judge.scores(server)
        assert len(calls) == 1 + rounds * len(HELD)


def test_a_client_whose_update_did_not_count_is_not_evaluated_again(calls):
    data = skewed()
    worker = toy.worker(Local(), steps=2)
    engine = Serial(worker, data)
    rules = {"cohort": 2, "seed": 0, "traffic": Traffic(), "drop_rate": 0.5, "min_cohort": 2}
    judge, start, kinds = Judge(engine, data), begin(worker.net, worker.method, 0), set()
    judge.scores(start)
    evaluated = 1  # the weights that all begin with
    for result in islice(federate(start, worker.method, engine, **rules), 8):
        judge.scores(result.server)
        evaluated += 0 if result.skipped else len(result.accepted)
        assert len(calls) == evaluated
        kinds.add((result.skipped, bool(result.accepted)))
    assert kinds >= {(True, True), (False, True)}  # some trained in vain, some did not


@pytest.mark.parametrize(("method", "options"), PERSONAL[2:], ids=NAMES[2:])
def test_where_a_part_is_shared_every_client_is_evaluated_every_time(method, options, calls):
    data = skewed()
    engine, servers = play(method, 3, data, **options)
    judge = Judge(engine, data)
    for done, server in enumerate(servers, 1):
        judge.scores(server)
        assert len(calls) == done * len(HELD)


def test_fedbn_without_batch_norm_is_judged_as_the_global_model_that_it_is(calls):
    data = skewed()
    engine, servers = play(FedBN(), 1, data, norm="gn")
    Judge(engine, data).scores(next(servers))
    assert len(calls) == 1


@pytest.mark.parametrize(("method", "options"), PERSONAL, ids=NAMES)
def test_a_judge_that_comes_after_a_resume_scores_as_one_that_saw_every_round(method, options, tmp_path):
    data = skewed()
    engine, servers = play(method, 4, data, memory=ClientMemory(tmp_path), **options)
    judge = Judge(engine, data)
    for server in servers:
        scores = judge.scores(server)
    back = ClientMemory(tmp_path)
    back.restore(dict(engine.memory.index))
    resumed = Serial(toy.worker(method, steps=8, **options), data, back)
    late = Judge(resumed, data)
    assert late.scores(server) == scores
    np.testing.assert_array_equal(late.rates, judge.rates)


# Domains

NAMED = ("air", "land", "sea")


def with_domains(federation: Federation) -> Federation:
    """Rows of three domains, the test set's very unequal in number."""
    table, test = (t | {"domain": torch.arange(len(t["label"])) % 7 // 3} for t in (federation.table, federation.test))
    return replace(federation, table=table, test=test, domains=NAMED)


def domains_by_hand(engine, weights, test):
    """-> each domain's accuracy, each evaluated alone"""
    out = []
    for d in range(len(NAMED)):
        rows = torch.nonzero(test["domain"] == d).flatten()
        alone = {k: x for k, x in table.take(test, rows).items() if k != "domain"}
        out.append(evaluate(engine.worker.net, weights, alone, 4).accuracy)
    return out


def test_with_domains_a_global_model_scores_the_mean_of_their_accuracies_in_one_evaluation(calls):
    data = with_domains(skewed())
    engine, servers = play(FedAvg(), 3, data)
    judge, differs = Judge(engine, data), []
    for done, server in enumerate(servers, 1):
        got = judge.scores(server)
        assert len(calls) == done
        wanted = domains_by_hand(engine, server.weights, data.test)
        assert got["per_domain"] == pytest.approx(dict(zip(NAMED, wanted, strict=True)))
        assert got["accuracy"] == pytest.approx(np.mean(wanted))
        differs.append(abs(got["accuracy"] - np.dot(wanted, data.test["domain"].bincount()) / 50) > 1e-3)
        assert tuple(got) == judge.KEYS == (*Judge.KEYS, "per_domain")
    assert any(differs)  # from the accuracy over all images


@pytest.mark.parametrize(("method", "options"), PERSONAL, ids=NAMES)
def test_of_personal_models_each_domains_accuracy_is_the_mean_over_clients(method, options):
    data = with_domains(skewed())
    engine, servers = play(method, 2, data, **options)
    judge = Judge(engine, data)
    for server in servers:
        got = judge.scores(server)
    wanted = np.mean([domains_by_hand(engine, engine.start(k, server.weights), data.test) for k in HELD], 0)
    assert got["per_domain"] == pytest.approx(dict(zip(NAMED, wanted, strict=True)))
    assert got["accuracy"] == pytest.approx(wanted.mean())


def test_a_domain_without_test_images_is_left_out_and_without_domains_nothing_is_added():
    data = with_domains(skewed())
    for absent, names in ((1, ("air", "sea")), (2, ("air", "land"))):
        rows = torch.nonzero(data.test["domain"] != absent).flatten()
        partial = replace(data, test=table.take(data.test, rows))
        engine, servers = play(FedAvg(), 1, partial)
        got = Judge(engine, partial).scores(next(servers))
        assert tuple(got["per_domain"]) == names
        assert got["accuracy"] == pytest.approx(np.mean(list(got["per_domain"].values())))
        json.dumps(got, allow_nan=False)
    plain = {k: x for k, x in data.test.items() if k != "domain"}
    for other in (skewed(), replace(data, test=plain)):
        engine, servers = play(FedAvg(), 1, other)
        judge = Judge(engine, other)
        assert tuple(judge.scores(next(servers))) == judge.KEYS == Judge.KEYS


def test_the_clients_table_says_how_many_real_rows_of_each_domain_a_client_has():
    data = with_synthetic(with_domains(skewed()))
    assert (data.table["domain"][-20:] == -1).all()
    engine, servers = play(FedAvg(), 1, data)
    judge = Judge(engine, data)
    judge.scores(next(servers))
    got = client_columns(data, engine, judge)["real_by_domain"]
    for k, own in enumerate(skewed().clients):
        wanted = [sum(int(row) % 7 // 3 == d for row in own) for d in range(3)]
        assert got[k].tolist() == wanted
    plain = skewed()
    assert "real_by_domain" not in client_columns(plain, *played(plain))


def played(data):
    engine, servers = play(FedAvg(), 1, data)
    judge = Judge(engine, data)
    judge.scores(next(servers))
    return engine, judge


# All data in one place


def pooled(data, rounds=1, **options):
    worker = toy.worker(Centralised(), steps=2, **options)
    engine = Serial(worker, assemble.pool(data))
    start = begin(worker.net, worker.method, 0, worker.bn_stats)
    loop = federate(start, worker.method, engine, cohort=1, seed=0, traffic=Traffic())
    return engine, list(islice(loop, rounds))[-1].server


@pytest.mark.parametrize("options", [{}, {"bn_stats": "local"}], ids=["average", "local statistics"])
def test_of_a_pooled_model_every_client_sees_its_own_mix(options, calls):
    data = skewed()
    engine, server = pooled(data, 2, **options)
    judge = Judge(engine, data)
    got = judge.scores(server)
    assert len(calls) == 1
    seen = evaluate(engine.worker.net, engine.start(0, server.weights), data.test, 4)
    assert got["accuracy"] == seen.accuracy
    wanted, own = clients_by_hand(seen.per_class, data.counts())
    assert got["clients"] == pytest.approx(wanted)
    column = client_columns(data, engine, judge)["accuracy"]
    np.testing.assert_allclose(column[HELD], own)
    assert np.isnan(np.delete(column, HELD)).all()


# The table of clients


@pytest.mark.parametrize(("method", "options"), [(FedAvg(), {}), *PERSONAL], ids=["fedavg", *NAMES])
def test_each_row_of_the_clients_table_has_its_own_clients_numbers(method, options):
    data = with_synthetic(skewed())
    engine, servers = play(method, 3, data, **options)
    judge = Judge(engine, data)
    for server in servers:
        judge.scores(server)
    columns = client_columns(data, engine, judge)
    real = data.counts(synthetic=False)
    rates = judge.rates if judge.rates.ndim == 1 else np.stack([e.per_class for e in by_hand(engine, server, data)])
    own = clients_by_hand(rates, real)[1]
    np.testing.assert_allclose(columns["accuracy"][HELD], own)
    assert np.isnan(np.delete(columns["accuracy"], HELD)).all()
    assert columns["client"].tolist() == list(range(len(SIZES)))
    assert columns["real"].tolist() == list(SIZES)
    assert columns["synthetic"].tolist() == [20 if n else 0 for n in SIZES]
    assert columns["classes"].tolist() == (real > 0).sum(1).tolist()
    np.testing.assert_array_equal(np.stack(columns["real_by_class"]), real)
    np.testing.assert_array_equal(np.stack(columns["rows_by_class"]), data.counts())


EMPTIES = ["clients=12", "cohort=3", "partition.alpha=0.01", "partition.min_size=0", "rounds=2", "steps=1"]


@pytest.mark.parametrize(
    "words", [["method=fedavg"], ["method=local"], ["method=centralised"]], ids=["global", "own models", "pooled"]
)
def test_the_written_table_and_the_last_line_agree_and_a_client_without_data_has_no_accuracy(tmp_path, words):
    outcome = run(override(Experiment(), [*EMPTIES, *words, "name=it"]), tmp_path, Silent())
    rows = pq.read_table(tmp_path / "it" / "clients.parquet").to_pydict()
    accuracy = np.array(rows["accuracy"], dtype=float)  # null counts as nan
    empty = np.array(rows["real"]) == 0
    assert empty.any()
    np.testing.assert_array_equal(np.isnan(accuracy), empty)
    known, sizes = accuracy[~empty], np.array(rows["real"])[~empty]
    numbers = known.mean(), np.average(known, weights=sizes), known.std(), np.percentile(known, 10), known.min()
    assert outcome.curve[-1]["clients"] == pytest.approx(dict(zip(STATISTICS, numbers, strict=True)))


@pytest.mark.parametrize("method", ["local", "fedavg"])
def test_a_run_that_stopped_after_its_last_round_still_writes_the_same_table_and_result(tmp_path, method):
    words = [*EMPTIES, f"method={method}", "name=it", "evaluate_every=2"]
    first = run(override(Experiment(), words), tmp_path, Silent())
    folder = tmp_path / "it"
    before = (folder / "clients.parquet").read_bytes()
    for name in ("clients.parquet", "result.json", "examples.safetensors", "report.html"):
        (folder / name).unlink()
    manifest = json.loads((folder / "manifest.json").read_text())
    store.write_json(folder / "manifest.json", manifest | {"status": "running"})
    again = run(override(Experiment(), words), tmp_path, Silent())
    assert (folder / "clients.parquet").read_bytes() == before
    timed = ("seconds", "preparation_seconds")
    assert {k: v for k, v in again.result.items() if k not in timed} == {
        k: v for k, v in first.result.items() if k not in timed
    }
    assert again.curve == first.curve


# A model that is changed before it is judged


def test_ccvr_is_judged_by_the_weights_it_deploys_and_the_servers_stay_as_they_were():
    data, method = skewed(), CCVR(images_per_class=5)
    image, label = toy.images(40, 7)
    images = table.make(image, label, synthetic=True)
    engine, servers = play(method, 2, data)
    judge = Judge(engine, data, images)
    for server in servers:
        kept = {k: x.clone() for k, x in server.weights["params"].items()}
        deployed = method.deploy(engine.worker.net, server.weights, images, 0)
        got = judge.scores(server)
        wanted = evaluate(engine.worker.net, deployed, data.test, 4)
        assert got["loss"] == pytest.approx(wanted.loss)
        assert got["accuracy"] == wanted.accuracy
        assert toy.gap(kept, server.weights["params"]) == 0
        assert got["loss"] != pytest.approx(evaluate(engine.worker.net, server.weights, data.test, 4).loss)


def test_ccvr_saves_the_deployed_model_and_trains_on_from_the_one_fedavg_has(tmp_path, monkeypatch):
    def images_for_server(experiment, *rest):  # real digits stand in for the prior's: quick, and as good here
        return {**digits.public(), "synthetic": torch.ones(901, dtype=torch.bool)} if experiment.method.images else None

    monkeypatch.setattr(assemble, "images_for_server", images_for_server)
    words = ["rounds=3", "steps=2", "clients=6", "cohort=3"]
    plain = run(override(Experiment(), [*words, "method=fedavg", "name=plain"]), tmp_path, Silent())
    fitted = run(override(Experiment(), [*words, "method=ccvr", "name=fitted"]), tmp_path, Silent())
    assert fitted.result["weights"] == plain.result["weights"]  # what training goes on from
    assert [x["train_loss"] for x in fitted.curve] == [x["train_loss"] for x in plain.curve]
    saved, trained = (load_file(tmp_path / name / "model.safetensors") for name in ("fitted", "plain"))
    differing = {k for k in saved if not torch.equal(saved[k], trained[k])}
    assert differing == {"head.weight", "head.bias"}
    module = nets.build("cnn", 10, size=16)
    module.load_state_dict(saved)
    net = Net(module)
    assert evaluate(net, net.init(), digits.test(), 10).accuracy == fitted.result["last"]
    assert fitted.result["last"] != plain.result["last"]


# Reports about rounds


def line(number, cohort, **more):
    """A round as metrics.jsonl has it."""
    plain = {"round": number, "accuracy": 0.5, "cohort": cohort, "accepted": len(cohort), "refused": []}
    return plain | {"dropped": [], "partial": [], "skipped": False} | more


def test_attendance_counts_requests_silence_and_part_work_of_a_run_in_one_line():
    curve = [
        line(1, [1, 2, 3], dropped=[2], partial=[{"client": 1, "steps": 3}]),
        line(2, [4, 5, 6]),
        line(3, [1, 2], dropped=[1, 2], partial=[]),
        line(4, [7, 8], partial=[{"client": 7, "steps": 1}]),
    ]
    assert summary.attendance("arm", curve) == ["arm: of 10 requests 3 got no answer and 2 were done in part"]
    assert summary.attendance("arm", [line(1, [1, 2]), line(2, [3])]) == []


@pytest.mark.parametrize("key", ["dropped", "partial"])
def test_either_alone_makes_a_line_of_attendance(key):
    happened = {
        "dropped": [[3], "1 got no answer and 0 were done"],
        "partial": [[{}], "0 got no answer and 1 were done"],
    }
    value, text = happened[key]
    (told,) = summary.attendance("arm", [line(1, [3, 4], **{key: value})])
    assert text in told


def test_incidents_name_the_arm_and_seed_first_count_attendance_and_then_name_abandoned_rounds():
    dropping = [
        line(1, [1, 2], dropped=[1], accepted=1, skipped=True),
        line(2, [1, 2], refused=[{"client": 2, "reason": "odd"}], accepted=1),
        line(3, [1, 2], accepted=0, skipped=True, dropped=[1, 2]),
    ]
    arms = [Arm(name="a", curves=[[line(1, [1])], dropping]), Arm(name="b", curves=[[line(1, [1])]])]
    assert summary.incidents(arms) == [
        "a, run 2 of 2: of 6 requests 3 got no answer and 0 were done in part",
        "a, run 2 of 2, round 1: only 1 good update, the model stayed as it was",
        "a, run 2 of 2, round 2: client 2 refused, odd",
        "a, run 2 of 2, round 3: no update counted, the model stayed as it was",
    ]
    assert summary.incidents(arms, most=1) == [
        "a, run 2 of 2: of 6 requests 3 got no answer and 0 were done in part",
        "a, run 2 of 2, round 1: only 1 good update, the model stayed as it was",
        "and 2 more",
    ]


def test_the_limit_on_incidents_is_no_limit_on_attendance():
    arms = [Arm(name=f"arm{i}", curves=[[line(1, [1], dropped=[1])]]) for i in range(5)]
    assert len(summary.incidents(arms, most=0)) == 5


def test_lines_of_older_runs_know_no_drop_out_and_are_reported_all_the_same():
    old = [{k: v for k, v in x.items() if k not in ("dropped", "partial")} for x in [line(1, [1, 2]), line(2, [3])]]
    old[1] |= {"skipped": True, "accepted": 0}
    assert summary.attendance("old", old) == []
    assert summary.incidents([Arm(name="old", curves=[old])]) == [
        "old, round 2: no update counted, the model stayed as it was"
    ]


# The command line on a directory

QUICK = ["rounds=3", "steps=1", "clients=6", "cohort=3", "method=local"]


def call(capsys, *words):
    """-> (exit code, stdout, stderr) of the command line, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["fedprior", *map(str, words)])
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
    out = capsys.readouterr()
    return code, out.out, out.err


def files(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def stop_after(monkeypatch, rounds):
    """A person presses Ctrl-C while the round after these is being written."""
    real = Record.round

    def interrupted(self, metrics, timings):
        if metrics["round"] > rounds:
            raise KeyboardInterrupt
        real(self, metrics, timings)

    monkeypatch.setattr(Record, "round", interrupted)


def stopped(folder, after):
    """A run of QUICK in this directory that a person stopped after so many rounds."""
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, after)
        with pytest.raises(KeyboardInterrupt):
            run(override(Experiment(), [*QUICK, f"name={folder.name}"]), folder.parent, Silent())


def test_a_run_that_a_person_stops_says_so_in_one_line_and_ends_with_code_130(tmp_path, monkeypatch, capsys):
    stop_after(monkeypatch, 1)
    code, _, err = call(capsys, "run", *QUICK, "--runs", tmp_path)
    (folder,) = tmp_path.iterdir()
    assert err.strip().splitlines()[-1] == f"stopped; `fedprior run {folder}` goes on with it"
    assert code == 130


def test_run_on_a_finished_directory_prints_its_result_says_so_and_touches_nothing(tmp_path, capsys):
    _, out, _ = call(capsys, "run", *QUICK, "name=it", "--runs", tmp_path)
    before = files(tmp_path / "it")
    code, again, err = call(capsys, "run", tmp_path / "it")
    assert code == 0
    assert again == out
    assert "nothing is left to do" in err
    assert files(tmp_path / "it") == before


def test_run_on_an_unfinished_directory_goes_on_to_the_end_of_an_unbroken_run(tmp_path, capsys):
    folder = tmp_path / "it"
    stopped(folder, 1)
    assert json.loads((folder / "manifest.json").read_text())["status"] == "interrupted"
    code, _, err = call(capsys, "run", folder)
    assert code == 0
    assert "goes on after round 1" in err
    whole = run(override(Experiment(), [*QUICK, "name=it"]), tmp_path / "whole", Silent())
    assert (folder / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "it" / "metrics.jsonl").read_bytes()
    assert resume.result(folder)["weights"] == whole.result["weights"]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["status"], manifest["resumed_after"]) == ("done", [1])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["it", "whole"]


def test_run_on_a_finished_directory_with_more_rounds_does_only_those(tmp_path, capsys):
    call(capsys, "run", *QUICK, "name=it", "--runs", tmp_path)
    code, out, err = call(capsys, "run", tmp_path / "it", "rounds=5", "--json")
    assert code == 0
    assert "goes on after round 3" in err
    assert json.loads(out.strip().splitlines()[-1])["rounds"] == 5
    assert len((tmp_path / "it" / "metrics.jsonl").read_text().splitlines()) == 5


@pytest.mark.parametrize("word", [".", "../it", "link"])
def test_the_directory_that_is_named_is_the_one_that_goes_on_however_it_is_named(tmp_path, monkeypatch, capsys, word):
    folder = tmp_path / "it"
    stopped(folder, 2)
    if word == "link":
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "link").symlink_to(folder)
        monkeypatch.chdir(tmp_path / "elsewhere")
    else:
        monkeypatch.chdir(folder)
    code, _, err = call(capsys, "run", word)
    assert code == 0
    assert "goes on after round 2" in err
    assert (folder / "result.json").exists()


def test_every_method_with_models_of_their_own_is_one_that_this_file_judges():
    net = toy.net()
    own = {name for name, method in METHODS.items() if method().keeps(net)}
    assert own == {"local", "fedproto", "fedbn"}
