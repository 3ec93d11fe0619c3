"""Letters in Flower's messages, and a grid that fails: without any process of Flower."""

import httpx
import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedprior.engines import flower
from fedprior.engines.flower import GridPost, pack, patience, unpack
from fedprior.engines.remote import Patience
from fedprior.errors import UserError
from fedprior.letters import Letter


@pytest.fixture(autouse=True)
def task(monkeypatch):
    """What Flower's process for an app knows of itself before it makes messages."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in [n for n in vars(TaskIdentity) if n.startswith("_") and n.endswith("_id")]:
        monkeypatch.setattr(TaskIdentity, name, 1)


TREE = {
    "b": {"whole": torch.arange(3), "bits": torch.tensor([True, False]), "point": torch.tensor(0.1)},
    "a": {"half": torch.ones(2, 3, dtype=torch.bfloat16), "none": torch.zeros(0, 4), "empty": {}},
}


def flat(tree):
    from fedprior.tree import flatten

    return {name: (x.dtype, tuple(x.shape), x.tolist()) for name, x in flatten(tree).items()}


def test_a_letter_comes_out_as_it_went_in_to_the_bit_and_in_its_order():
    facts = {"a": 1, "b": [0.1, 1e-320, float("inf")], "c": {"d": None, "é": "ß"}}
    letter = unpack(pack(Letter(facts, {"down": TREE, "0": {"x": torch.randn(3)}})))
    assert letter.facts == facts
    assert list(flat(letter.trees["down"]).items()) == list(flat(TREE).items())
    assert np.isnan(unpack(pack(Letter({"loss": float("nan")}))).facts["loss"])


def test_a_tree_that_goes_to_several_nodes_is_made_an_array_once(monkeypatch):
    made, plain = [], flower.store.tree_bytes
    monkeypatch.setattr(flower.store, "tree_bytes", lambda value: made.append(value) or plain(value))
    arrays = {}
    first, second = (pack(Letter({"n": n}, {"down": TREE}), arrays) for n in (1, 2))
    assert len(made) == 1
    assert first["tree.down"].object_id == second["tree.down"].object_id  # so Flower uploads it once


def content(text='{"a": 1}', **trees):
    out = RecordDict({"facts": ConfigRecord({"json": text})})
    for name, data in trees.items():
        out[f"tree.{name}"] = ArrayRecord({"tree": Array(dtype="uint8", shape=(len(data),), stype="x", data=data)})
    return out


@pytest.mark.parametrize(
    "record",
    [
        RecordDict(),
        RecordDict({"facts": ConfigRecord({"json": 3})}),
        RecordDict({"facts": ConfigRecord({"other": "{}"})}),
        content("[1]"),
        content("{"),
        content("[" * 100_000),
        content(x=b""),
        content(x=b"\x00" * 40),
        content(x=b"\xff" * 40),
        content(x=b"\x02\x00\x00\x00\x00\x00\x00\x00{}"),
    ],
)
def test_what_is_no_letter_is_refused(record):
    with pytest.raises(ValueError, match=r"."):
        unpack(record)


def test_a_tree_that_is_too_large_is_refused_before_it_is_read():
    with pytest.raises(ValueError, match="a tree of 100 bytes, more than 99"):
        unpack(content(x=b"\x00" * 100), most=99)


class Grid:
    """Flower's, as far as it is used. The first calls fail as `troubles` say."""

    def __init__(self, *troubles, replies=(), numbers=None):
        self.troubles, self.replies, self.numbers, self.pushed = list(troubles), list(replies), numbers, []

    def trouble(self):
        if self.troubles:
            raise self.troubles.pop(0)

    def get_node_ids(self):
        self.trouble()
        return [7]

    def push_messages(self, messages):
        self.trouble()
        self.pushed += messages
        return self.numbers if self.numbers is not None else [str(i) for i in range(len(messages))]

    def pull_messages(self, numbers):
        self.trouble()
        return self.replies


def post(*troubles, **more):
    said = []
    grid = Grid(*troubles, **more)
    return GridPost(grid, said.append, pause=0.0), grid, said


def test_what_the_network_refuses_for_a_moment_is_tried_again():
    busy = httpx.HTTPStatusError("500", request=None, response=None)
    mine, grid, said = post(httpx.ConnectError("refused"), busy, httpx.ReadTimeout("slow"))
    assert mine.nodes() == [7]
    assert len(said) == 3
    grid.troubles = [httpx.ConnectError("refused")]
    assert mine.send([(7, "train", Letter())], 5.0) == ["0"]
    assert len(grid.pushed) == 1
    assert grid.pushed[0].metadata.message_type == "train"


def test_a_superlink_that_stays_away_ends_the_run(monkeypatch):
    monkeypatch.setattr(flower, "LOST", 0.0)
    mine, _, _ = post(*[httpx.ConnectError("refused")] * 5)
    with pytest.raises(UserError, match="run it again under the same name"):
        mine.nodes()


@pytest.mark.parametrize("numbers", [[], [None]])
def test_messages_that_are_not_taken_are_an_error(numbers):
    mine, _, _ = post(numbers=numbers)
    with pytest.raises(UserError, match="took no messages"):
        mine.send([(7, "hello", Letter())], 5.0)


def test_answers_are_read_and_those_that_are_none_say_why():
    from flwr.app import Error

    asked = Message(content(), dst_node_id=7, message_type="train")
    asked.metadata.__dict__["_message_id"] = "m"
    replies = [
        Message(pack(Letter({"fine": 1})), reply_to=asked),
        Message(RecordDict(), reply_to=asked),
        Message(Error(code=5, reason="Node Unavailable"), reply_to=asked),
        Message(content(x=b"\x00" * 2_000_000), reply_to=asked),
    ]
    mine, _, _ = post(replies=replies)
    good, none, error, large = mine.collect(["m"])
    assert good.letter.facts == {"fine": 1}
    assert none.letter is None
    assert "malformed" in none.error
    assert error.error == "Flower says: Node Unavailable"
    assert "a tree of 2000000 bytes, more than 1000000" in large.error
    assert {a.number for a in (good, none, error, large)} == {"m"}


def test_messages_live_longer_than_an_answer_is_waited_for():
    mine, grid, _ = post()
    mine.send([(7, "train", Letter()), (7, "prepare", Letter())], 100_000.0)
    assert all(message.metadata.ttl >= 200_000 for message in grid.pushed)
    mine.send([(7, "train", Letter())], 1.0)
    assert grid.pushed[-1].metadata.ttl >= 43_200


def test_patience_comes_from_the_run_s_configuration():
    config = {"runs": "", "wait": 5, "answer": 6.5, "budget": 7, "over-select": 1.5}
    assert patience(config) == Patience(wait=5.0, answer=6.5, budget=7.0, over_select=1.5)
