"""Clients on other machines: the results of `Serial`, to the bit, by letters.

The server trusts an answer no further than its place: who may answer for which clients, and what an upload looks like,
is settled here and in `uploads.check`, not by what the answer says.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..data.table import Federation, Shard
from ..errors import UserError
from ..evaluate import Evaluation
from ..letters import Answer, Letter, Post
from ..local import Worker
from ..memory import ClientMemory, Index
from ..progress import clock
from ..tree import Tree
from ..uploads import Refusal, Upload
from .serial import Serial


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a server waits, in seconds, and for how many."""

    wait: float = 600.0  # for all clients to be there and prepared, counted anew whenever something gets done
    answer: float = 3600.0  # for the answers of a round
    budget: float = 600.0  # that a node prepares at a stretch
    over_select: float = 1.0  # clients asked for each that a round needs; the first to answer count
    poll: float = 0.2  # between two looks for answers
    census: float = 2.0  # between two looks who is there
    remind: float = 30.0  # between two lines that say who is missing


@dataclass
class Station:
    """What the server knows of a node."""

    name: str = ""
    clients: tuple[int, ...] = ()  # that hold data; it alone answers for them
    ready: bool = False
    refused: str = ""  # why it does not take part
    counts: list[list[int]] | None = None  # real rows of each class at its clients, where it shares them
    state: str = "has not said who it is"
    gone: bool = False


Greet = Callable[[Letter], str]
"""Takes a node's hello -> why the node is refused; "" where it is welcome."""


@dataclass(kw_only=True)
class Nodes:
    """The nodes of a run. New ones are greeted and made ready whenever somebody looks, also while others train."""

    post: Post
    greeting: dict[str, Any]  # facts of the hello, which a prepare letter repeats
    greet: Greet
    patience: Patience
    say: Callable[[str], None]
    stations: dict[int, Station] = field(default_factory=dict)
    open: dict[str, tuple[int, str]] = field(default_factory=dict)  # letters without an answer: node, kind
    progressed: float = 0.0  # when something got done last
    here: set[int] = field(default_factory=set)  # who was there at the last census
    counted: float = float("-inf")  # when that was

    def look(self) -> list[tuple[int, str, Answer]]:
        """Greets new nodes, takes in who is ready -> answers to other letters, with node and kind."""
        if time.monotonic() - self.counted >= self.patience.census:
            self.here, self.counted = set(self.post.nodes()), time.monotonic()
        here = self.here
        new = [n for n in here if n not in self.stations or self.stations[n].gone]
        for node, station in self.stations.items():
            if node not in here and not station.gone:
                station.gone, station.ready = True, False
                self.say(f"{station.name or f'node {node}'} is gone")
                self.open = {number: of for number, of in self.open.items() if of[0] != node}
        self.stations |= {node: Station() for node in new}
        self.send([(node, "hello", Letter(self.greeting)) for node in new], self.patience.answer)
        others = []
        for answer in self.post.collect(list(self.open)) if self.open else []:
            node, kind = self.open.pop(answer.number)
            if kind in ("hello", "prepare"):
                self.take(node, kind, answer)
            else:
                others.append((node, kind, answer))
        return others

    def send(self, letters: Sequence[tuple[int, str, Letter]], seconds: float) -> list[str]:
        if not letters:
            return []
        numbers = self.post.send(letters, seconds)
        self.open |= {number: (node, kind) for number, (node, kind, _) in zip(numbers, letters, strict=True)}
        return numbers

    def take(self, node: int, kind: str, answer: Answer) -> None:
        """What a node said of itself."""
        station = self.stations[node]
        if station.refused:
            return
        facts = answer.letter.facts if answer.letter else {"error": answer.error}
        try:
            error = str(facts.get("error", "")) or (self.welcome(station, answer) if kind == "hello" else "")
            if not error:
                station.ready = bool(facts["ready"])
                station.state = "is ready" if station.ready else progress_of(facts)
        except (KeyError, TypeError, ValueError, AttributeError) as wrong:
            error = f"its answer is malformed ({type(wrong).__name__}: {wrong})"
        self.progressed = time.monotonic()
        if error:
            station.refused, station.ready = error, False
            self.say(f"{station.name or f'node {node}'} does not take part: {error}")
            return
        self.say(f"{station.name} {station.state}")
        if not station.ready:
            self.send(
                [(node, "prepare", Letter(self.greeting | {"budget": self.patience.budget}))],
                self.patience.answer + self.patience.budget,
            )

    def welcome(self, station: Station, answer: Answer) -> str:
        assert answer.letter is not None
        facts = answer.letter.facts
        name, clients = str(facts["name"])[:100], tuple(sorted(int(k) for k in facts["clients"]))
        station.name = name
        for other in self.stations.values():
            if other is not station and not (other.refused or other.gone) and set(other.clients) & set(clients):
                both = sorted(set(other.clients) & set(clients))
                return f"client {both[0]} is at {other.name} already; give each node clients of its own"
        if refusal := self.greet(answer.letter):
            return refusal
        station.clients = clients
        station.counts = counts_of(facts, clients)
        return ""

    def places(self) -> dict[int, int]:
        """Client -> the node that stands for it, ready or not; the last one known where that is gone."""
        known = [(n, s) for n, s in self.stations.items() if not s.refused]
        return {k: n for n, s in sorted(known, key=lambda item: not item[1].gone) for k in s.clients}

    def assemble(self, clients: int, least: int) -> list[int]:
        """Waits until nodes that are ready stand for all `clients`, or for `least` of them when patience is over -> ids
        of the clients with data. Raises UserError when too few came."""
        self.progressed, reminded = time.monotonic(), time.monotonic()
        while True:
            for node, kind, _ in self.look():
                self.say(f"a late answer ({kind}) of {self.stations[node].name} is ignored")
            here = [s for s in self.stations.values() if not s.gone and not s.refused]
            busy = [s for s in here if not s.ready]
            ready = sorted(k for s in here if s.ready for k in s.clients)
            claimed = {k for s in here for k in s.clients}
            if not busy and len(claimed) >= clients:
                return ready
            now = time.monotonic()
            missing = f"{clients - len(claimed)} of {clients} clients have no node"
            status = "; ".join([*(f"{s.name or 'a node'} {s.state}" for s in busy), missing])
            if now - self.progressed > self.patience.wait:
                if len(ready) >= max(1, least):
                    self.say(f"goes on without those that are missing: {status}")
                    return ready
                why = [f"{s.name or 'a node'}: {s.refused}" for s in self.stations.values() if s.refused]
                raise UserError(
                    f"only {len(ready)} clients were ready after {clock(self.patience.wait)} without news ({status}"
                    + "".join(f"; {one}" for one in why)
                    + "); start the nodes, or lower clients= and cohort="
                )
            if now - reminded > self.patience.remind:
                self.say(f"waits: {status}")
                reminded = now
            time.sleep(self.patience.poll)

    def ask(self, kind: str, letters: Mapping[int, Letter], seconds: float) -> Iterator[tuple[int, Letter | str]]:
        """Sends letters by node -> (node, its answer or why there is none), as they come, until all are there or time
        is over. A node that is gone, or not done with a letter of an earlier round, is not asked."""
        busy = {node: k for node, k in self.open.values() if k not in ("hello", "prepare")}
        for node in [n for n in letters if n in busy]:
            yield node, f"{self.stations[node].name} is still at an earlier letter ({busy[node]})"
        asked = [n for n in letters if n not in busy]
        sent = self.send([(n, kind, letters[n]) for n in asked], seconds)
        waiting = dict(zip(asked, sent, strict=True))
        end = reminded = time.monotonic()
        end += seconds
        while waiting:
            for node, was, answer in self.look():
                if waiting.get(node) != answer.number:
                    self.say(f"a late answer ({was}) of {self.stations[node].name} is ignored")
                    continue
                del waiting[node]
                error = answer.error if answer.letter is None else str(answer.letter.facts.get("error", ""))
                if answer.letter is not None and answer.letter.facts.get("unprepared"):
                    self.again(node)
                yield node, error or answer.letter or "no answer"
            for node in [n for n in waiting if self.stations[n].gone]:
                del waiting[node]
                yield node, f"{self.stations[node].name} was gone before it answered"
            now = time.monotonic()
            if now > end:
                for node in waiting:
                    yield node, f"{self.stations[node].name} gave no answer within {clock(seconds)}"
                return
            if waiting and now - reminded > self.patience.remind:
                self.say(f"waits for {', '.join(self.stations[n].name for n in waiting)}")
                reminded = now
            if waiting:
                time.sleep(self.patience.poll)

    def again(self, node: int) -> None:
        """A node that has lost what it prepared makes it again, while the others go on."""
        station = self.stations[node]
        station.ready, station.state = False, "prepares again"
        self.send(
            [(node, "prepare", Letter(self.greeting | {"budget": self.patience.budget}))],
            self.patience.answer + self.patience.budget,
        )


def progress_of(facts: Mapping[str, Any]) -> str:
    """How far a node is, in words."""
    if "done" not in facts:
        return "prepares"
    return f"prepares: {str(facts.get('what', 'something'))[:100]}, {int(facts['done'])} of {int(facts['total'])}"


def counts_of(facts: Mapping[str, Any], clients: Sequence[int]) -> list[list[int]] | None:
    """Rows of each class, [clients of the node, classes], where it says them."""
    if facts.get("counts") is None:
        return None
    counts = [[int(n) for n in row] for row in facts["counts"]]
    if len(counts) < len(clients) or any(n < 0 for row in counts for n in row):
        raise ValueError("class counts of other clients")
    return counts


class Elsewhere(ClientMemory):
    """What clients remember lies at their nodes; here is only of which round it is."""

    def restore(self, index: Index) -> None:
        self.index, self.staged = dict(index), set()


class Remote(Serial):
    """Clients behind nodes. Answers come in any order and are given out in the order of ids; what a node remembers of a
    round counts from the moment that the server accepts the round, since the next letter says so."""

    def __init__(
        self, worker: Worker, federation: Federation, nodes: Nodes, clients: Sequence[int], enough: int | None = None
    ) -> None:
        super().__init__(worker, federation, Elsewhere())
        self.clients: Sequence[int] = sorted(clients)
        self.nodes, self.enough = nodes, enough

    def train(self, down: Tree, cohort: Sequence[int], round: int) -> Iterable[Upload | Refusal]:
        """With `enough`, those who answer after so many do not count."""
        found: dict[int, Upload | Refusal] = {}
        letters, lost = self.letters(cohort, {"down": down}, {"round": round})
        found |= {k: Refusal(k, reason) for k, reason in lost.items()}
        asked = {node: [int(k) for k in letter.facts["bases"]] for node, letter in letters.items()}
        for node, answer in self.nodes.ask("train", letters, self.nodes.patience.answer):
            for client in asked[node]:
                found[client] = self.uploaded(client, answer)
            if self.enough is not None and sum(isinstance(x, Upload) for x in found.values()) >= self.enough:
                break
        for client in sorted(cohort):
            yield found.get(client) or Refusal(client, "others answered before it")

    def uploaded(self, client: int, answer: Letter | str) -> Upload | Refusal:
        """One client's part of a node's answer."""
        if isinstance(answer, str):
            return Refusal(client, answer)
        try:
            refused = answer.facts["refused"]
            if str(client) in refused:
                return Refusal(client, str(refused[str(client)])[:600])
            said = answer.facts["uploads"][str(client)]
            upload = Upload(
                client,
                to(answer.trees[str(client)], self.worker.net.device),
                float(said["weight"]),
                float(said["loss"]),
                int(said["steps"]),
                int(said["planned"]),
            )
            if said["remembers"]:
                self.memory.staged.add(client)
            return upload
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            return Refusal(client, f"its answer is malformed ({type(error).__name__}: {str(error)[:100]})")

    def commit(self, accepted: Sequence[int], round: int) -> None:
        self.memory.commit(round, accepted)

    def letters(
        self, clients: Sequence[int], trees: dict[str, Tree], facts: dict[str, Any]
    ) -> tuple[dict[int, Letter], dict[int, str]]:
        """-> (a letter to each node that stands for some of the clients; why others cannot be reached)"""
        self.nodes.look()
        places, stations = self.nodes.places(), self.nodes.stations
        mine: dict[int, dict[str, int]] = {}
        lost: dict[int, str] = {}
        for client in sorted(clients):
            node = places.get(client)
            if node is None:
                lost[client] = "no node stands for it"
            elif stations[node].gone or not stations[node].ready:
                lost[client] = f"{stations[node].name} is {'gone' if stations[node].gone else 'not ready'}"
            else:
                mine.setdefault(node, {})[str(client)] = self.memory.index.get(client, -1)
        return {node: Letter(facts | {"bases": bases}, trees) for node, bases in mine.items()}, lost

    def expected(self, down: Tree) -> Tree:
        """By a test row: no client's rows are here."""
        return self.worker.sample(down, Shard(self.federation.test, torch.zeros(1, dtype=torch.int64)))[0].tree

    def everywhere(self, kind: str, clients: Sequence[int], trees: dict[str, Tree]) -> dict[int, Any]:
        """What nodes say of these clients. Raises UserError where one says nothing."""
        letters, lost = self.letters(clients, trees, {})
        out: dict[int, Any] = {}
        for node, answer in self.nodes.ask(kind, letters, self.nodes.patience.answer):
            if isinstance(answer, str):
                lost |= {int(k): answer for k in letters[node].facts["bases"]}
                continue
            said = answer.facts.get("seen" if kind == "judge" else kind, {})
            out |= {int(k): said[k] for k in letters[node].facts["bases"] if k in said}
        lost |= {k: "it was left out of an answer" for k in clients if k not in out and k not in lost}
        if lost:
            client, reason = next(iter(lost.items()))
            raise UserError(
                f"{len(lost)} clients' own models cannot be judged, the first is client {client}: {reason}; run it "
                "again under the same name once the nodes are there"
            )
        return out

    def personal(self, clients: Sequence[int], weights: Tree) -> dict[int, Evaluation]:
        if not clients:
            return {}
        found = self.everywhere("judge", clients, {"weights": weights})
        return {k: evaluation(said) for k, said in found.items()}

    def kept(self) -> dict[int, str]:
        if not self.worker.kept or not self.memory.index:
            return {}
        return {k: str(said) for k, said in self.everywhere("kept", list(self.memory), {}).items()}


def evaluation(said: Mapping[str, Any]) -> Evaluation:
    values = {key: np.array(said[key], dtype=np.int64) for key in Evaluation._fields if key != "loss"}
    return Evaluation(**values, loss=float(said["loss"]))


def to(value: Tree, device: torch.device) -> Tree:
    from .. import tree

    moved: Tree = tree.map(lambda x: x.to(device), value)
    return moved
