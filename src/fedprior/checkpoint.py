"""Everything stateful of a run in one file, so that a killed run goes on to the bit.

A round is written in this order: clients' memories (memory.py), the lines of metrics.jsonl and timings.jsonl, the
checkpoint. Whatever dies in between, the newest whole checkpoint names memories that exist and says how long the
line files were; what lies behind that is cut off and the round is done again. Two generations are kept, so one
torn file costs one round. Best-so-far needs no place of its own: it is read from the lines.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from . import store
from .errors import UserError
from .memory import ClientMemory, Index
from .method import Server
from .net import layout
from .traffic import Traffic

GENERATIONS = 2


class State(NamedTuple):
    """A run between two rounds."""

    done: int  # rounds
    server: Server
    memories: Index  # what each client remembers, by the round it is from
    traffic: Traffic
    lengths: dict[str, int]  # bytes of metrics.jsonl and timings.jsonl
    seconds: float  # the run has taken so far


class Checkpoints:
    """The generations of one run, `checkpoints/round-N.safetensors`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kept: dict[Path, Index] = {}  # oldest first

    def save(self, state: State, memory: ClientMemory) -> None:
        """Writes a generation and forgets all but the last two, with the memories that only those named."""
        path = self.folder / f"round-{state.done}.safetensors"
        about = {
            "done": state.done,
            "index": {str(client): round for client, round in state.memories.items()},
            "up": dict(state.traffic.up),
            "down": dict(state.traffic.down),
            "lengths": state.lengths,
            "seconds": state.seconds,
        }
        store.write_tree(path, state.server._asdict(), about)
        self.kept[path] = dict(state.memories)
        self.kept = dict(list(self.kept.items())[-GENERATIONS:])
        for other in self.folder.glob("round-*.safetensors"):  # older ones, and what was passed over on loading
            if other not in self.kept:
                other.unlink(missing_ok=True)
        memory.prune(*self.kept.values())

    def load(self, memory: ClientMemory, cover: Callable[[dict[str, int], int], None]) -> State | None:
        """The newest generation that is whole, with `memory` restored to it; None where there are no files at all.

        `cover(lengths, done)` raises ValueError or OSError when the line files lack what a generation counts on.
        Nothing is removed or written. Raises UserError when there are generations and none is whole.
        """
        found = sorted(self.folder.glob("round-*.safetensors"), key=_number)
        newest: State | None = None
        self.kept, reasons = {}, []
        for path in reversed(found):  # the newest whole one, and one before it to fall back on
            try:
                state = read(path)
                cover(state.lengths, state.done)
                if newest is None:
                    memory.restore(state.memories)
            except (OSError, ValueError) as error:
                reasons.append(str(error))
                continue
            newest = newest or state
            self.kept = {path: state.memories} | self.kept
            if len(self.kept) == GENERATIONS:
                break
        if newest is None and (len(found) > 1 or (found and _number(found[0]) > 1)):
            raise UserError(
                f"no checkpoint in {self.folder} is whole ({reasons[0]}); choose another name= to begin anew"
            )
        if newest is None:
            memory.restore({})
        return newest


def read(path: Path) -> State:
    """One generation. Raises ValueError or OSError when it is damaged or missing."""
    parts, about = store.read_tree(path)
    if parts.keys() != set(Server._fields):
        raise ValueError(f"{path} holds no server")
    server = Server(**{name: layout(part) for name, part in parts.items()})
    try:
        return _state(server, about)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no checkpoint of this version: {error!r}") from None


def _state(server: Server, about: dict[str, Any]) -> State:
    index = {int(client): round for client, round in about["index"].items()}
    traffic = Traffic()
    traffic.up.update(about["up"])
    traffic.down.update(about["down"])
    return State(about["done"], server, index, traffic, about["lengths"], about["seconds"])


def _number(path: Path) -> int:
    tail = path.stem.removeprefix("round-")
    return int(tail) if tail.isdigit() else -1
