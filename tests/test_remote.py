"""What nodes and the post do wrong: it is named, refused, and changes nothing else."""

from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from local_post import LocalPost
from test_serve import QUICK, experiment, here, memories, over_nodes, same, sites

from fedprior import assemble, serve, store
from fedprior import node as node_module
from fedprior.config import Experiment, override
from fedprior.engines import remote
from fedprior.engines.remote import Patience
from fedprior.errors import UsageError, UserError
from fedprior.letters import Letter
from fedprior.node_settings import Settings, numbers
from fedprior.progress import Silent

SITES = ("partition=sites",)
SHORT = Patience(wait=0.3, answer=0.3, budget=60.0, poll=0.001, census=0.0, again=0.0)
FIRST = 11  # the number of site-0, where clients 0 and 1 are; site-1 is 22


class Said(Silent):
    def __init__(self):
        self.lines = []

    def say(self, text):
        self.lines.append(text)


def go(folder, *words, patience=QUICK, post=None, fault=None, **more):
    e = experiment("cohort=4", *words)
    post = post or LocalPost(e, sites(folder, **more), fault=fault)
    said = Said()
    outcome = serve.serve(e, post, patience, folder / "runs", said)
    return outcome, post, said.lines


def refusals(outcome, round=1):
    return {r["client"]: r["reason"] for r in outcome.curve[round - 1]["refused"]}


def at(round, change, node=FIRST):
    """A fault of one node in the train letter of a round (from 1)."""

    def fault(where, kind, letter, answer):
        return change(answer) if (where, kind) == (node, "train") and letter.facts["round"] == round - 1 else answer

    return fault


# answers that are not what they should be


def with_tree(change):
    """Changes the tensors of client 0's upload."""

    def changed(answer):
        tree = answer.trees["0"]
        name = next(iter(tree["method"]["delta"]))
        tree["method"]["delta"] |= {name: change(tree["method"]["delta"][name])}
        return answer

    return changed


def with_facts(**values):
    def changed(answer):
        answer.facts["uploads"][0] |= values
        return answer

    return changed


def without(name):
    def changed(answer):
        del answer.facts["uploads"][0][name]
        return answer

    return changed


def spoilt(x, value):
    x = x.contiguous().clone(memory_format=torch.contiguous_format)
    x.view(-1)[0] = value
    return x


def replaced(**parts):
    return lambda answer: Letter(answer.facts | parts.get("facts", {}), parts.get("trees", answer.trees))


def nested(depth):
    tree = {"x": torch.zeros(1)}
    for _ in range(depth):
        tree = {"x": tree}
    return tree


def dropped_name(answer):
    tree = answer.trees["0"]["method"]["delta"]
    tree.pop(next(iter(tree)))
    return answer


def added(where, name, value):
    def changed(answer):
        answer.trees["0"][where][name] = value
        return answer

    return changed


MALFORMED = {
    "NaN": with_tree(partial(spoilt, value=float("nan"))),
    "infinite": with_tree(partial(spoilt, value=float("inf"))),
    "minus infinite": with_tree(partial(spoilt, value=float("-inf"))),
    "broadcastable": with_tree(lambda x: x.reshape(-1)[:1]),
    "scalar": with_tree(lambda x: x.sum()),
    "empty tensor": with_tree(lambda x: x[:0]),
    "float64": with_tree(lambda x: x.double()),
    "float16": with_tree(lambda x: x.half()),
    "whole numbers": with_tree(lambda x: x.long()),
    "truth values": with_tree(lambda x: x > 0),
    "another shape": with_tree(lambda x: x[None]),
    "transposed": with_tree(lambda x: x.transpose(0, 1)),
    "norm 1e30": with_tree(lambda x: x + 1e30),
    "missing name": dropped_name,
    "unknown name": added("method", "surprise", torch.zeros(3)),
    "unknown group": lambda answer: added("buffers", "x", torch.zeros(2))(answer),
    "no tree": lambda answer: Letter(answer.facts, {k: v for k, v in answer.trees.items() if k != "0"}),
    "a tensor for a tree": lambda answer: Letter(answer.facts, answer.trees | {"0": {"method": {}}}),
    "no uploads": replaced(facts={"uploads": {}}),
    "uploads that are a list": replaced(facts={"uploads": [1, 2]}),
    "uploads that are nothing": replaced(facts={"uploads": None}),
    "refusals that are a number": replaced(facts={"refused": 5}),
    "no facts": lambda answer: Letter({}, answer.trees),
    "weight 0": with_facts(weight=0.0),
    "weight -1": with_facts(weight=-1.0),
    "weight NaN": with_facts(weight=float("nan")),
    "weight infinite": with_facts(weight=float("inf")),
    "weight 1.7e308": with_facts(weight=1.7e308),
    "loss 1.7e308": with_facts(loss=1.7e308),
    "nested too deeply": lambda answer: Letter(answer.facts, answer.trees | {"0": nested(500)}),
    "weight that is text": with_facts(weight="many"),
    "weight that is nothing": with_facts(weight=None),
    "weight that is a list": with_facts(weight=[1.0]),
    "no weight": without("weight"),
    "loss NaN": with_facts(loss=float("nan")),
    "loss that is text": with_facts(loss="low"),
    "no loss": without("loss"),
    "steps that are text": with_facts(steps="three"),
    "steps infinite": with_facts(steps=float("inf")),
    "no steps": without("steps"),
    "no plan": without("planned"),
    "does not say whether it remembers": without("remembers"),
    "remembers nothing": lambda answer: with_facts(remembers=0)(with_facts(weight=-2)(answer)),
    "an error in the place of an answer": lambda answer: "Flower says: the client raised",
    "an error of its own": replaced(facts={"error": "the disk is full"}),
}


@pytest.fixture(scope="module")
def without_client_0(tmp_path_factory):
    """A run in whose first round client 0 was refused, and which says so itself."""
    folder = tmp_path_factory.mktemp("reference")

    def change(answer):
        answer.facts["uploads"].pop(0)
        answer.facts["refused"] = {"0": "ill"}
        return answer

    outcome, _, _ = go(folder, "max_update_norm=1e6", fault=at(1, change))
    assert refusals(outcome) == {0: "ill"}
    return folder / "runs" / "it"


BOTH = (
    "nested too deeply",
    "no uploads",
    "uploads that are",
    "refusals that are",
    "no facts",
    "an error",
)  # spoil client 1's part too


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_answer_is_refused_and_changes_nothing_else(kind, without_client_0, tmp_path):
    outcome, _, _ = go(tmp_path, "max_update_norm=1e6", fault=at(1, MALFORMED[kind]))
    refused = refusals(outcome)
    assert refused.keys() == ({0, 1} if kind.startswith(BOTH) else {0})
    assert all(refused.values())
    assert not outcome.curve[1]["refused"]
    if refused.keys() == {0}:
        model = "model.safetensors"
        assert (tmp_path / "runs" / "it" / model).read_bytes() == (without_client_0 / model).read_bytes()


def test_an_upload_for_somebody_else_s_client_counts_for_nobody(tmp_path):
    def change(answer):
        return Letter(
            answer.facts | {"uploads": answer.facts["uploads"] | {2: answer.facts["uploads"][0]}},
            answer.trees | {"2": answer.trees["0"]},
        )

    go(tmp_path, fault=at(1, change))
    here(experiment("cohort=4"), tmp_path)
    same(tmp_path / "here" / "it", tmp_path / "runs" / "it")


def test_a_client_that_raises_is_named_and_the_others_of_its_node_count(tmp_path, monkeypatch):
    from fedprior.local import Worker

    train = Worker.train

    def raising(self, client, *rest):
        if client == 0 and rest[-1] == 0:
            raise RuntimeError("no such kernel\nat all")
        return train(self, client, *rest)

    monkeypatch.setattr(Worker, "train", raising)
    outcome, _, _ = go(tmp_path)
    assert refusals(outcome) == {0: "RuntimeError: no such kernel at all"}
    assert outcome.curve[0]["accepted"] == 3
    assert outcome.curve[1]["accepted"] == 4


def test_the_node_refuses_its_own_bad_upload(tmp_path):
    outcome, _, _ = go(tmp_path, "local.lr=1e20")
    assert set(refusals(outcome)) == {0, 1, 2, 3}
    assert all("finite" in reason for reason in refusals(outcome).values())
    assert outcome.curve[0]["uplink_bytes"] == 0  # nothing of it left the nodes


# nodes that say nothing, go and come


def test_a_node_that_says_nothing_is_not_asked_again_until_it_has_answered(tmp_path):
    outcome, post, _ = go(tmp_path, "rounds=3", patience=SHORT, fault=at(1, lambda answer: None))
    assert "gave no answer within" in refusals(outcome)[0]
    assert "still at an earlier letter" in refusals(outcome, 2)[1]
    assert [kind for node, kind in post.log if node == FIRST and kind == "train"] == ["train"]
    assert [line["accepted"] for line in outcome.curve] == [2, 2, 2]


def test_a_late_answer_is_ignored_and_the_node_counts_again(tmp_path):
    class Late(LocalPost):
        """site-0's first upload arrives while the second round is on its way."""

        held = None

        def collect(self, numbers):
            found = super().collect(numbers)
            if self.held is None:
                early = [a for a in found if a.letter and "uploads" in a.letter.facts and "0" in a.letter.trees]
                if early:
                    self.held = early[0], len(self.log)
                    return [a for a in found if a is not early[0]]
            elif self.held[0] and ("train" in [kind for _, kind in self.log[self.held[1] :]]):
                found, self.held = [self.held[0], *found], (None, 0)
            return found

    e = experiment("cohort=4", "rounds=3")
    outcome, _, lines = go(tmp_path, "rounds=3", patience=SHORT, post=Late(e, sites(tmp_path)))
    assert [line["accepted"] for line in outcome.curve] == [2, 2, 4]
    assert any("late answer (train) of site-0 is ignored" in line for line in lines)


def test_a_node_that_goes_in_a_round_is_missed_and_greeted_when_it_is_back(tmp_path):
    e = experiment("cohort=4", "rounds=4", "method=scaffold")
    post = LocalPost(e, sites(tmp_path))

    def fault(node, kind, letter, answer):
        if kind == "train":
            round = letter.facts["round"]
            if node == FIRST and round == 0:
                post.away.add(FIRST)
                return None
            if node != FIRST and round == 1:
                post.away.discard(FIRST)
        return answer

    post.fault = fault
    outcome, _, lines = go(tmp_path, "rounds=4", "method=scaffold", post=post)
    assert refusals(outcome) == dict.fromkeys((0, 1), "site-0 was gone before it answered")
    assert refusals(outcome, 2) == dict.fromkeys((0, 1), "site-0 is gone")
    assert outcome.curve[3]["accepted"] == 4
    assert "site-0 is gone" in lines
    assert lines.count("site-0 is ready") == 2


def test_what_a_client_remembers_of_a_round_that_did_not_count_is_forgotten(tmp_path):
    """SCAFFOLD goes on from the control variate of the last accepted round, as on one machine."""

    def lose(node, kind, letter, answer):
        return "lost on the way" if (node, kind) == (FIRST, "train") and letter.facts["round"] == 1 else answer

    words = ("method=scaffold", "rounds=4")
    go(tmp_path, *words, fault=lose)
    kept = memories(tmp_path / "none", [tmp_path / "site-0"])
    assert set(kept) == {f"{k}-{r}.safetensors" for k in (0, 1) for r in (0, 2, 3)}
    go(tmp_path / "again", *words, fault=lose)
    same(tmp_path / "runs" / "it", tmp_path / "again" / "runs" / "it")


def test_a_node_that_lost_what_a_client_remembers_says_so(tmp_path):
    def fault(node, kind, letter, answer):
        if (node, kind) == (FIRST, "train") and letter.facts["round"] == 0:
            [path] = (tmp_path / "site-0" / "runs").glob("*/clients/1-0.safetensors")
            path.write_bytes(path.read_bytes()[:-1])
        return answer

    outcome, _, _ = go(tmp_path, "method=scaffold", fault=fault)
    assert list(refusals(outcome, 2)) == [1]
    assert "what it remembered after round 1 is lost at site-0" in refusals(outcome, 2)[1]


def test_a_node_that_lost_what_it_prepared_makes_it_again(tmp_path):
    def fault(node, kind, letter, answer):
        if (node, kind) == (FIRST, "train") and letter.facts["round"] == 0:
            [path] = (tmp_path / "site-0" / "runs").glob("*/prepared-*.safetensors")
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
        return answer

    outcome, post, _ = go(tmp_path, "rounds=3", "balance=max", "balance.pool_size=3", "prior.steps=1", fault=fault)
    assert [line["accepted"] for line in outcome.curve] == [4, 2, 4]
    assert "has to prepare first" in refusals(outcome, 2)[0]
    assert [kind for node, kind in post.log if node == FIRST] == [
        *("hello", "prepare", "train"),
        *("train", "prepare", "train"),
    ]


# a server that dies and goes on


class Stop(Exception):
    pass


@pytest.mark.parametrize("method", ["scaffold", "moon", "fedadam"])
@pytest.mark.parametrize("torn", [False, True])
def test_a_server_that_died_goes_on_after_the_last_round_that_counted(method, torn, tmp_path):
    def die(node, kind, letter, answer):
        if kind == "train" and letter.facts["round"] == 2 and node != FIRST:
            raise Stop  # site-0 has trained already
        return answer

    words = (f"method={method}", "rounds=4")
    with pytest.raises(Stop):
        go(tmp_path, *words, fault=die)
    folder = tmp_path / "runs" / "it"
    if torn:
        newest = folder / "checkpoints" / "round-2.safetensors"
        newest.write_bytes(newest.read_bytes()[:-3])
    go(tmp_path, *words)
    assert store.read_json(folder / "manifest.json")["resumed_after"] == [1 if torn else 2]
    here(experiment("cohort=4", *words), tmp_path)
    same(tmp_path / "here" / "it", folder)


def test_a_run_that_is_done_is_not_run_again(tmp_path):
    first, _, _ = go(tmp_path)
    again, post, _ = go(tmp_path)
    assert again.result == first.result
    assert post.log == []


# the post


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shuffled=st.randoms(use_true_random=False))
def test_answers_in_any_order_and_twice_give_the_same_bytes(shuffled, reference, tmp_path_factory):
    folder = tmp_path_factory.mktemp("order")

    def order(answers):
        answers = [*answers, *answers[:1]]
        shuffled.shuffle(answers)
        seen, unique = set(), []
        for a in answers:  # Flower gives each answer out once
            if a.number not in seen:
                seen.add(a.number)
                unique.append(a)
        return unique

    e = experiment("cohort=4", "method=scaffold", "rounds=1")
    clients = ("0", "1", "2", "3")
    over_nodes(e, folder, post=LocalPost(e, sites(folder, clients=clients), order=order))
    same(reference, folder / "runs" / "it")


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    here(experiment("cohort=4", "method=scaffold", "rounds=1"), folder)
    return folder / "here" / "it"


def test_with_over_selection_the_first_to_answer_count(tmp_path):
    e = experiment("rounds=1", "cohort=2")
    post = LocalPost(e, sites(tmp_path, clients=("0", "1", "2", "3")), order=lambda answers: answers[::-1])
    outcome = serve.serve(e, post, Patience(**(vars(QUICK) | {"over_select": 2.0})), tmp_path / "runs", Silent())
    line = outcome.curve[0]
    assert len(line["cohort"]) == 4
    assert line["accepted"] == 2
    assert {r["client"] for r in line["refused"]} == {0, 1}  # the last ones answered first
    assert {r["reason"] for r in line["refused"]} == {"others answered before it"}


# before round 1


@pytest.mark.parametrize("words", [("balance=max", "balance.pool_size=40"), ("guide=feddifrc", "guide.levels=4")])
def test_a_node_prepares_in_as_many_letters_as_its_time_asks_for(words, tmp_path, monkeypatch):
    from fedprior.prepare import describe

    monkeypatch.setattr(describe, "FLUSH_SECONDS", 0)
    words = ("prior.steps=1", "rounds=1", *words)
    _, post, lines = go(
        tmp_path, *words, patience=Patience(wait=60, answer=60, budget=0, poll=0.001, census=0.0, again=0.0)
    )
    assert post.log.count((FIRST, "prepare")) > 2
    assert any("site-0 prepares: " in line and " of " in line for line in lines)
    here(experiment("cohort=4", *words), tmp_path)
    same(tmp_path / "here" / "it", tmp_path / "runs" / "it")


def test_no_train_letter_loads_the_diffusion_model(tmp_path, monkeypatch):
    words = ("prior.steps=1", "guide=feddifrc", "guide.levels=4", "balance=max", "balance.pool_size=2")
    e = experiment("cohort=4", *words)
    post, load = LocalPost(e, sites(tmp_path)), assemble.load_prior
    deliver = post.deliver

    def guarded(number):
        kind = post.waiting.get(number, (0, "", None))[1]
        monkeypatch.setattr(assemble, "load_prior", load if kind != "train" else forbidden)
        return deliver(number)

    def forbidden(*given):
        raise AssertionError("the prior was loaded")

    post.deliver = guarded
    outcome, _, _ = go(tmp_path, *words, post=post)
    assert [line["accepted"] for line in outcome.curve] == [4, 4]


def wrong(node, kind, facts):
    """site-0 says something else in its answers of a kind."""
    return lambda where, what, letter, answer: (
        replaced(facts=facts)(answer) if (where, what) == (node, kind) else answer
    )


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (wrong(FIRST, "hello", {"partition": "other"}), "its data are not the server's"),
        (wrong(FIRST, "hello", {"data": "other"}), "its data are not the server's"),
        (wrong(FIRST, "hello", {"clients": [0, 0]}), "come twice"),
        (wrong(FIRST, "hello", {"clients": [0, 9]}), "are not all there"),
        (wrong(FIRST, "hello", {"clients": [0, -1]}), "are not all there"),
        (wrong(FIRST, "hello", {"clients": [float("inf")]}), "its answer is malformed"),
        (wrong(FIRST, "hello", {"counts": [[1e30] * 10] * 2}), "its answer is malformed"),
        (wrong(FIRST, "hello", {"versions": {"torch": "1.0"}}), "its torch is 1.0"),
        (wrong(FIRST, "hello", {"clients": None}), "its answer is malformed"),
        (wrong(FIRST, "hello", {"clients": ["a"]}), "its answer is malformed"),
        (wrong(FIRST, "hello", {"versions": 3}), "its answer is malformed"),
        (wrong(FIRST, "hello", {"error": "no such data"}), "no such data"),
        (wrong(FIRST, "hello", {"ready": False, "done": "x"}), "its answer is malformed"),
        (wrong(FIRST, "prepare", {"error": "the disk is full"}), "the disk is full"),
        (lambda where, kind, letter, answer: "it raised" if where == FIRST else answer, "it raised"),
    ],
)
def test_a_node_that_cannot_take_part_is_named_and_the_rest_is_too_few(fault, why, tmp_path):
    with pytest.raises(UserError, match=f"only 2 clients were ready.*{why}.*start the nodes"):
        go(tmp_path, "balance=max", "balance.pool_size=1", "prior.steps=1", patience=SHORT, fault=fault)
    assert not (tmp_path / "runs").exists()


def test_a_run_goes_on_without_nodes_that_it_can_do_without(tmp_path):
    """Cohorts are drawn over all clients, as on one machine, and those without a node are named."""
    e = experiment("cohort=2", "rounds=4")
    post = LocalPost(e, sites(tmp_path, clients=("0-1",)))
    said = Said()
    outcome = serve.serve(e, post, SHORT, tmp_path / "runs", said)
    assert any("goes on without those that are missing: 2 of 4 clients have no node" in line for line in said.lines)
    alone = here(e, tmp_path)
    for mine, theirs in zip(outcome.curve, alone.curve, strict=True):
        assert mine["cohort"] == theirs["cohort"]
        assert {r["client"]: r["reason"] for r in mine["refused"]} == {
            k: "no node stands for it" for k in mine["cohort"] if k > 1
        }


def test_a_node_that_comes_late_counts_from_then_on(tmp_path):
    e = experiment("cohort=2", "rounds=6")
    post = LocalPost(e, sites(tmp_path))
    late = post.sites.pop(22)

    def fault(node, kind, letter, answer):
        if kind == "train" and letter.facts["round"] == 0:
            post.sites[22] = late
        return answer

    post.fault = fault
    outcome = serve.serve(e, post, SHORT, tmp_path / "runs", Silent())
    assert [line["accepted"] for line in outcome.curve[2:]] == [2, 2, 2, 2]


def test_two_nodes_cannot_stand_for_the_same_client(tmp_path):
    with pytest.raises(UserError, match="client 1 is at site-0 already"):
        go(tmp_path, patience=SHORT, clients=("0-1", "1-3"))


def test_versions_and_settings_must_be_the_same_at_both_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(node_module, "__version__", "0.0.7")
    with pytest.raises(UserError, match=r"fedprior is 0\.0\.7 at site-0 and"):
        go(tmp_path, patience=SHORT)
    monkeypatch.undo()
    e = experiment("cohort=4")
    post = LocalPost(experiment("cohort=4", "steps=4"), sites(tmp_path))
    with pytest.raises(UserError, match="the settings mean something else at site-0"):
        serve.serve(e, post, SHORT, tmp_path / "runs", Silent())


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("method=centralised",), "all data in one place"),
        (("guide=feddifrc", "guide.condition=dynamic"), "loads it in none"),
        (("guide=feddifrc", "guide.labels=false"), "stay at their nodes"),
        ((*SITES, "balance=discrepancy"), "class counts of all clients"),
        ((*SITES, "balance=global_target", "balance.target=global"), "class counts of all clients"),
        ((*SITES, "validation=0.1"), "leave out validation="),
        ((*SITES, "method=fedbn", "net=resnet10"), "judges one global model"),
        (("name=",), "needs a name="),
    ],
)
def test_what_cannot_be_done_over_nodes_is_refused_before_anything_is_sent(words, why, tmp_path):
    e = override(Experiment(), ["clients=4", "cohort=4", "name=it", *words])
    post = LocalPost(e, sites(tmp_path))
    with pytest.raises(UsageError, match=why):
        serve.serve(e, post, SHORT, tmp_path / "runs", Silent())
    assert post.log == []


def test_own_models_cannot_be_judged_while_a_node_is_gone_and_the_run_goes_on_later(tmp_path):
    words = ("method=fedbn", "net=resnet10", "steps=1", "rounds=3")
    e = experiment("cohort=4", *words)
    post = LocalPost(e, sites(tmp_path))

    def fault(node, kind, letter, answer):
        if kind == "train" and letter.facts["round"] == 1 and node == FIRST:
            post.away.add(FIRST)
        return answer

    post.fault = fault
    with pytest.raises(
        UserError, match="2 clients' own models cannot be judged, the first is client 0: site-0 is gone"
    ):
        go(tmp_path, *words, post=post)
    go(tmp_path, *words)
    here(e, tmp_path)
    same(tmp_path / "here" / "it", tmp_path / "runs" / "it")


# trouble that passes, and what nodes keep


def test_a_node_with_trouble_that_passes_is_asked_again(tmp_path):
    """A reply that Flower makes up for a process that died, then a disk that is full for a moment."""
    troubles = [
        lambda answer: "ClientApp stopped responding",
        lambda answer: Letter({"error": "full", "passing": True}),
    ]

    def fault(node, kind, letter, answer):
        return troubles.pop()(answer) if (node, kind) == (FIRST, "hello") and troubles else answer

    outcome, post, lines = go(tmp_path, fault=fault)
    assert outcome.curve[0]["accepted"] == 4
    assert post.log.count((FIRST, "hello")) == 3
    assert sum("has trouble" in line for line in lines) == 2


def test_a_full_disk_is_trouble_that_passes(tmp_path, monkeypatch):
    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(node_module.store, "write_tree", full)
    monkeypatch.setenv("FEDPRIOR_CACHE", str(tmp_path / "cache"))
    e = experiment("cohort=4")
    answer = node_module.answered(e, sites(tmp_path)[FIRST], "hello", Letter(greeting_of(e)), Silent())
    assert "give state-dir a folder with space" in answer.facts["error"]
    assert answer.facts["passing"]


def greeting_of(e):
    return serve.greeting(e, assemble.split(e).federation)


def test_a_node_that_never_gets_ready_does_not_keep_the_others_waiting(tmp_path):
    fault = wrong(22, "hello", {"ready": False})
    never = lambda node, kind, letter, answer: (
        Letter({"ready": False, "what": "images", "done": 3, "total": 9})
        if (node, kind) == (22, "prepare")
        else fault(node, kind, letter, answer)
    )
    e = experiment("cohort=2", "rounds=1")
    said = Said()
    serve.serve(e, LocalPost(e, sites(tmp_path), fault=never), SHORT, tmp_path / "runs", said)
    assert any("goes on without those that are missing: site-1 prepares: images, 3 of 9" in line for line in said.lines)


@pytest.mark.parametrize("words", [("balance.align=half",), ("balance.pool=per_client", "balance.confidence=0.01")])
def test_preparing_ends_however_short_its_time_is(words, tmp_path):
    """What is found in the cache counts as done too, so that more than before has to be done in each letter."""
    words = ("balance=max", "prior.steps=1", "rounds=1", "clients=3", "cohort=3", "balance.cap=3", *words)
    e = experiment(*words)
    patience = Patience(wait=60, answer=60, budget=0, poll=0.001, census=0.0)
    post = LocalPost(e, sites(tmp_path, clients=("0-2",)))
    outcome = serve.serve(e, post, patience, tmp_path / "runs", Silent())
    assert outcome.curve[0]["accepted"] == 3
    assert 1 < post.log.count((FIRST, "prepare")) < 60


def test_a_letter_that_comes_after_a_newer_one_forgets_nothing(tmp_path):
    letters = []

    def fault(node, kind, letter, answer):
        if (node, kind) == (FIRST, "train"):
            letters.append(letter)
        return answer

    words = ("method=scaffold", "rounds=4")
    go(tmp_path, *words, fault=fault)
    before = memories(tmp_path / "none", [tmp_path / "site-0"])
    e = experiment("cohort=4", *words)
    for letter in letters[1:3]:
        node_module.answered(e, sites(tmp_path)[FIRST], "train", letter, Silent())
    after = memories(tmp_path / "none", [tmp_path / "site-0"])
    assert {k: v for k, v in after.items() if k in before} == before


def test_own_models_are_judged_once_a_busy_node_has_answered(tmp_path):
    """site-0 hangs in the first round for a moment; the run waits for it instead of ending."""
    words = ("method=local", "rounds=2")
    held = []

    class Slow(LocalPost):
        def collect(self, numbers):
            found = super().collect(numbers)
            trained = [a for a in found if a.letter and "0" in a.letter.trees]
            if trained and not held:
                held.append((trained[0], len(self.log)))
                return [a for a in found if a is not trained[0]]
            if held and held[0] and len(self.log) > held[0][1]:  # others have been judged meanwhile
                found, held[0] = [*found, held[0][0]], None
            return found

    e = experiment("cohort=4", *words)
    outcome, _, _ = go(tmp_path, *words, patience=SHORT, post=Slow(e, sites(tmp_path)))
    assert [line["accepted"] for line in outcome.curve] == [2, 4]
    assert outcome.curve[0]["accuracy"] is not None


def test_over_selection_does_not_go_with_models_of_their_own(tmp_path):
    e = experiment("method=local", "cohort=2")
    over = Patience(**(vars(QUICK) | {"over_select": 2.0}))
    with pytest.raises(UsageError, match="leave it out"):
        serve.serve(e, LocalPost(e, sites(tmp_path)), over, tmp_path / "runs", Silent())


def test_a_model_that_is_lost_at_its_node_ends_the_run_with_the_remedy(tmp_path):
    def fault(node, kind, letter, answer):
        if (node, kind) == (FIRST, "train") and letter.facts["round"] == 0:
            for path in (tmp_path / "site-0" / "runs").glob("*/clients/*"):
                path.unlink()
        return answer

    with pytest.raises(UserError, match=r"round 1 is lost at site-0.*begin anew under another name="):
        go(tmp_path, "method=local", fault=fault)


@pytest.mark.parametrize(
    "said",
    [
        {"said": None},
        {"said": {"0": 3, "1": 3}},
        {"said": {"0": {"correct": [1], "total": [1], "loss": 0.0, "domain_correct": [], "domain_total": []}}},
        {"said": {}},
    ],
)
def test_a_node_that_judges_nonsense_ends_the_run_in_one_line(said, tmp_path):
    with pytest.raises(UserError, match="site-0 answers of client 0 what cannot be"):
        go(tmp_path, "method=local", fault=wrong(FIRST, "judge", said))


def test_more_hits_than_images_and_losses_beyond_sense_are_refused():
    said = {"correct": [1, 2], "total": [2, 3], "loss": 0.5, "domain_correct": [], "domain_total": []}
    assert remote.evaluation(said, [2, 3], []).accuracy == 0.6
    for change in ({"correct": [3, 0]}, {"correct": [-1, 2]}, {"total": [2, 4]}, {"loss": 1.7e308}, {"correct": [1]}):
        with pytest.raises(ValueError, match=r"images|loss"):
            remote.evaluation(said | change, [2, 3], [])


def test_with_over_selection_a_bad_upload_is_not_one_of_those_that_are_enough(tmp_path):
    e = experiment("rounds=1", "cohort=1")

    def fault(node, kind, letter, answer):
        if kind == "train" and "0" in letter.facts["bases"]:
            answer.facts["uploads"][0]["weight"] = -1.0
        return answer

    post = LocalPost(e, sites(tmp_path, clients=("0", "1", "2", "3")), fault=fault)
    outcome = serve.serve(e, post, Patience(**(vars(QUICK) | {"over_select": 4.0})), tmp_path / "runs", Silent())
    assert outcome.curve[0]["accepted"] >= 1


def test_what_nodes_say_is_one_printable_line_of_bounded_length(tmp_path):
    noise = "a\nfedprior result {}\x1b[31m" + "\ud800" + "x" * 5_000_000
    fault = lambda node, kind, letter, answer: {
        (FIRST, "hello"): replaced(facts={"name": noise}),
        (FIRST, "train"): replaced(facts={"uploads": {}, "refused": {"0": noise, "1": ""}}),
        (22, "train"): replaced(facts={"error": noise}),
    }.get((node, kind), lambda answer: answer)(answer)
    outcome, _, lines = go(tmp_path, "rounds=1", fault=fault)
    texts = [*refusals(outcome).values(), *lines]
    assert all(text.isprintable() and len(text) < 700 for text in texts)
    assert refusals(outcome)[1] == "its node gives no reason"
    assert (tmp_path / "runs" / "it" / "metrics.jsonl").stat().st_size < 10_000


def test_nodes_that_share_a_folder_keep_their_rows_apart(tmp_path):
    both = {n: s | {"state-dir": str(tmp_path / "one")} for n, s in sites(tmp_path).items()}
    words = ("balance=max", "balance.pool_size=2", "prior.steps=1", "method=scaffold")
    e = experiment("cohort=4", *words)
    go(tmp_path, *words, post=LocalPost(e, both))
    here(e, tmp_path)
    same(tmp_path / "here" / "it", tmp_path / "runs" / "it")


def test_axes_that_have_gone_are_fitted_again(tmp_path):
    words = ("guide=feddifrc", "guide.levels=4", "guide.whiten=component", "rounds=3")
    e = experiment("cohort=4", *words)

    def fault(node, kind, letter, answer):
        if (node, kind) == (FIRST, "train") and letter.facts["round"] == 0:
            import shutil

            for path in store.cache_folder().glob("descriptors/*/axes-*"):
                shutil.rmtree(path)
        return answer

    outcome, _, _ = go(tmp_path, *words, post=LocalPost(e, sites(tmp_path, clients=("0-3",)), fault=fault))
    assert [line["accepted"] for line in outcome.curve] == [4, 0, 4]


# what has to be the same everywhere


def copied_digits(folder, invert=False):
    """Digits as class folders, by the pixels or by their negatives."""
    from PIL import Image

    from fedprior.data import digits

    rows = digits.train()
    for i in range(0, 400, 4):
        image = rows["image"][i].permute(1, 2, 0).numpy()
        place = folder / digits.CLASSES[int(rows["label"][i])]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(255 - image if invert else image).save(place / f"{i:04}.png")
    return str(folder)


def test_a_node_whose_images_differ_is_refused_though_they_split_alike(tmp_path):
    plain, inverted = copied_digits(tmp_path / "plain"), copied_digits(tmp_path / "inverted", invert=True)
    e = experiment("cohort=4", "data=mine", f"data.path={plain}")
    own = sites(tmp_path)
    own[22]["data"] = inverted
    with pytest.raises(UserError, match="its data are not the server's"):
        serve.serve(e, LocalPost(e, own), SHORT, tmp_path / "runs", Silent())


def test_rows_prepared_from_data_that_have_changed_are_prepared_again(tmp_path):
    import shutil

    folder = copied_digits(tmp_path / "data")
    e = experiment("cohort=4", "data=mine", f"data.path={folder}")
    first = serve.serve(e, LocalPost(e, sites(tmp_path)), QUICK, tmp_path / "runs", Silent())
    shutil.rmtree(folder)
    copied_digits(tmp_path / "data", invert=True)
    shutil.rmtree(tmp_path / "runs")
    second = serve.serve(e, LocalPost(e, sites(tmp_path)), QUICK, tmp_path / "runs", Silent())
    here(e, tmp_path)
    same(tmp_path / "here" / "it", tmp_path / "runs" / "it")
    assert first.result["weights"] != second.result["weights"]


def test_a_node_with_another_prior_is_refused_in_a_simulation(tmp_path):
    fault = wrong(22, "prepare", {"ready": True, "prior": "another"})
    with pytest.raises(UserError, match="its prior is another model"):
        go(tmp_path, "balance=max", "balance.pool_size=1", "prior.steps=1", patience=SHORT, fault=fault)


def test_files_that_settings_name_are_part_of_what_is_agreed(tmp_path):
    templates = tmp_path / "templates.txt"
    templates.write_text("a photo of a {}\n")
    e = experiment("balance=max", f"balance.templates={templates}")
    before = node_module.agreement(e)
    templates.write_text("a scan of a {}\n")
    assert node_module.agreement(e) != before
    assert node_module.agreement(experiment("device=cuda", "name=other")) == node_module.agreement(experiment())


# a node's configuration


@pytest.mark.parametrize(
    ("text", "ids"), [("0", (0,)), ("0-3", (0, 1, 2, 3)), ("5,0-1", (0, 1, 5)), (" 2 - 3 , 7", (2, 3, 7))]
)
def test_clients_are_numbers_and_ranges(text, ids):
    assert numbers(text) == ids


@pytest.mark.parametrize(
    "text", ["", "a", "1-", "-1", "1,1", "0-2,2", "1.5", "0--2", "9999999999999", "3-1", "0-99999999"]
)
def test_anything_else_is_refused(text):
    with pytest.raises(UsageError, match="clients="):
        numbers(text)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"clients": "0"}, "needs clients="),
        ({"state-dir": "x"}, "needs clients="),
        ({"clients": "0", "state-dir": "x", "shared-label-counts": True}, "did you mean share_label_counts"),
        ({"clients": "0", "state-dir": "x", "share-label-counts": "yes"}, "must be true or false"),
        ({"clients": "0", "state-dir": "x", "device": "gpu0"}, "unknown device 'gpu0'"),
    ],
)
def test_a_wrong_configuration_is_one_line(values, why):
    with pytest.raises(UsageError, match=why):
        Settings.read(values)


def test_a_client_beyond_the_experiment_s_is_refused(tmp_path):
    outcome, post, lines = go(tmp_path, "rounds=1", clients=("0-3", "4"))
    assert "node 22 does not take part: site-1 stands for client 4, and clients=4" in lines
    assert outcome.curve[0]["accepted"] == 4
    assert (22, "train") not in post.log
