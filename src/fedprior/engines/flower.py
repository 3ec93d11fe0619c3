"""Flower carries the letters: the one module that imports flwr.

Every message starts a process at the node, which answers it and ends. A tree travels as the content of a safetensors
file in one array, since Flower moves each array by requests of its own; nothing is pickled.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from .. import store
from ..config import Experiment, from_toml
from ..errors import UserError
from ..letters import Answer, Letter
from ..node import answered
from ..progress import Lines
from ..serve import serve
from ..submit import FAILED, RESULT
from .remote import Patience

KIND = "safetensors"  # how an array says what its bytes are
TYPES = {"train": "train"} | {kind: f"query.{kind}" for kind in ("hello", "prepare", "judge", "kept")}
HALF_DAY = 43_200.0  # seconds that Flower keeps a message at least
LOST = 300.0  # seconds without a SuperLink after which the server gives up
MOST_FACTS = 64_000_000  # bytes


def pack(letter: Letter, arrays: dict[int, Array] | None = None) -> RecordDict:
    """`arrays` keeps those of trees that go to several nodes, by id."""
    arrays = {} if arrays is None else arrays
    out = RecordDict({"facts": ConfigRecord({"json": json.dumps(letter.facts)})})
    for name, value in letter.trees.items():
        if id(value) not in arrays:
            data = store.tree_bytes(value)
            arrays[id(value)] = Array(dtype="uint8", shape=(len(data),), stype=KIND, data=data)
        out[f"tree.{name}"] = ArrayRecord({"tree": arrays[id(value)]})
    return out


def unpack(content: RecordDict, most: float = float("inf")) -> Letter:
    """Raises ValueError for a content that is no letter, or has trees of more than `most` bytes."""
    try:
        text = content.config_records["facts"]["json"]
        if not isinstance(text, str) or len(text) > MOST_FACTS:
            raise ValueError("its facts are no text, or too long")
        facts = json.loads(text)
        trees = {}
        for name, record in content.array_records.items():
            data = record["tree"].data
            if len(data) > most:
                raise ValueError(f"a tree of {len(data)} bytes, more than {most:.0f}")
            trees[name.removeprefix("tree.")] = store.tree_from(data)
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"no letter: {error!r}") from None
    if not isinstance(facts, dict):
        raise ValueError("its facts are no object")
    return Letter(facts, trees)


class GridPost:
    """A `letters.Post` over a Grid. What the network refuses for a moment is tried again for `LOST` seconds."""

    def __init__(self, grid: Grid, say: Callable[[str], None], pause: float = 2.0) -> None:
        self.grid, self.say, self.pause = grid, say, pause
        self.sent: dict[str, float] = {}  # by letter: bytes of its largest tree
        self.largest = 0.0

    def nodes(self) -> Collection[int]:
        found: list[int] = self.patiently(lambda: list(self.grid.get_node_ids()))
        return found

    def send(self, letters: Sequence[tuple[int, str, Letter]], seconds: float) -> list[str]:
        arrays: dict[int, Array] = {}
        messages = [
            Message(pack(letter, arrays), dst_node_id=node, message_type=TYPES[kind], ttl=max(HALF_DAY, 2 * seconds))
            for node, kind, letter in letters
        ]
        self.largest = max([self.largest, *(float(len(array.data)) for array in arrays.values())])
        numbers = self.patiently(lambda: list(self.grid.push_messages(messages)))
        if len(numbers) != len(messages) or None in numbers:
            raise UserError("the SuperLink took no messages; its log says why (is a limit on sizes too low?)")
        return [str(number) for number in numbers]

    def collect(self, numbers: Collection[str]) -> Sequence[Answer]:
        found = self.patiently(lambda: list(self.grid.pull_messages(list(numbers))))
        return [self.read(message) for message in found]

    def read(self, message: Message) -> Answer:
        number = message.metadata.reply_to_message_id
        if message.has_error():
            return Answer(number, None, f"Flower says: {message.error.reason or message.error.code}"[:500])
        try:
            return Answer(number, unpack(message.content, most=4 * self.largest + 1_000_000))
        except ValueError as error:
            return Answer(number, None, f"its answer is malformed ({error})")

    def patiently(self, do: Callable[[], Any]) -> Any:
        began = time.monotonic()
        while True:
            try:
                return do()
            except httpx.HTTPError as error:
                if time.monotonic() - began > LOST:
                    raise UserError(
                        f"the SuperLink cannot be reached ({error}); run it again under the same name"
                    ) from None
                self.say(f"the SuperLink did not answer ({error}); tries again")
                time.sleep(self.pause)


def patience(config: dict[str, Any]) -> Patience:
    """From a run's configuration."""
    return Patience(
        **{key: float(config[key.replace("_", "-")]) for key in ("wait", "answer", "budget", "over_select")}
    )


def client_app(experiment: Path) -> ClientApp:
    """The part of an app that runs at nodes, for the experiment in a TOML file."""
    app = ClientApp()

    def handler(kind: str) -> Callable[[Message, Context], Message]:
        def answer(message: Message, context: Context) -> Message:
            return Message(pack(opened(experiment, kind, message, context)), reply_to=message)

        return answer

    app.train()(handler("train"))
    for kind, name in TYPES.items():
        if kind != "train":
            app.query(name.partition(".")[2])(handler(kind))
    return app


def opened(experiment: Path, kind: str, message: Message, context: Context) -> Letter:
    """The node's answer to a message."""
    try:
        letter = unpack(message.content)
        return answered(from_toml(experiment), context.node_config, kind, letter, Lines(sys.stderr))
    except (UserError, ValueError) as error:
        return Letter({"error": str(error)})


def server_app(experiment: Path) -> ServerApp:
    """The part of an app that runs beside the SuperLink."""
    app = ServerApp()
    app.main()(lambda grid, context: conduct(from_toml(experiment), grid, context))
    return app


def conduct(experiment: Experiment, grid: Grid, context: Context) -> None:
    """Runs it; the log's last line says how it ended."""
    config = dict(context.run_config)
    root = Path(str(config["runs"]) or os.environ.get("FEDPRIOR_RUNS") or "runs").expanduser()
    progress = Lines(sys.stderr)
    try:
        outcome = serve(experiment, GridPost(grid, progress.say), patience(config), root, progress)
    except UserError as error:
        print(f"{FAILED}{' '.join(str(error).split())}", flush=True)
        raise
    print(RESULT + json.dumps(outcome.result, default=float), flush=True)


__all__ = ["client_app", "server_app"]
