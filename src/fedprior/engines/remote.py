"""Clients on other machines: the results of `Serial`, to the bit, by letters.

The server trusts an answer no further than its place: who may answer for which clients, and what an upload looks like,
is settled here and in `uploads.check`, not by what the answer says.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import tree
from ..data.table import Federation, Shard
from ..errors import UsageError, UserError
from ..evaluate import Evaluation
from ..letters import Answer, Letter, Post
from ..local import Worker
from ..memory import ClientMemory, Index
from ..progress import clean, clock
from ..tree import Tree
from ..uploads import LARGEST_LOSS, Refusal, Upload, check
from .serial import Serial

TRIES = 4  # letters of a kind to a node that has trouble, before it is given up
MALFORMED = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)


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
    again: float = 10.0  # before a node that had trouble is asked again

    def __post_init__(self) -> None:
        for key in ("wait", "answer", "budget", "over_select"):
            value, least = getattr(self, key), 1.0 if key == "over_select" else 0.0
            if not least <= value < math.inf:
                raise UsageError(f"--{key.replace('_', '-')} must be a number of at least {least:g}, not {value}")


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
    best: dict[str, int] = field(default_factory=dict)  # of each thing it prepares, how many were done at most
    trouble: int = 0  # times in a row that it could not answer
    later: tuple[float, str] | None = None  # when which kind of letter is sent again


class Failure(NamedTuple):
    """Why a node's answer is missing. `final`: it would be missing again."""

    reason: str
    final: bool = False


Judge = Callable[[Letter], str]
"""Takes what a node says of itself -> why the node is refused; "" where it is welcome."""


@dataclass(kw_only=True)
class Nodes:
    """The nodes of a run. New ones are greeted and made ready whenever somebody looks, also while others train."""

    post: Post
    clients: Sequence[int]  # that there are
    greeting: dict[str, Any]  # facts of the hello, which a prepare letter repeats
    greet: Judge  # of a hello
    settle: Judge  # of a node that is ready
    patience: Patience
    say: Callable[[str], None]
    stations: dict[int, Station] = field(default_factory=dict)
    open: dict[str, tuple[int, str]] = field(default_factory=dict)  # letters without an answer: node, kind
    progressed: float = 0.0  # when something got done last
    here: set[int] = field(default_factory=set)  # who was there at the last census
    counted: float = float("-inf")  # when that was

    def look(self) -> list[tuple[int, str, Answer]]:
        """Greets new nodes, takes in who is ready -> answers to other letters, with node and kind."""
        now = time.monotonic()
        if now - self.counted >= self.patience.census:
            self.here, self.counted = set(self.post.nodes()), now
        new = [n for n in self.here if n not in self.stations or self.stations[n].gone]
        for node, station in self.stations.items():
            if node not in self.here and not station.gone:
                station.gone, station.ready, station.later = True, False, None
                self.say(f"{self.name(node)} is gone")
                self.open = {number: of for number, of in self.open.items() if of[0] != node}
            if station.later is not None and station.later[0] <= now:
                kind, station.later = station.later[1], None
                self.introduce(node, kind)
        self.stations |= {node: Station() for node in new}
        for node in new:
            self.introduce(node, "hello")
        others = []
        for answer in self.post.collect(list(self.open)) if self.open else []:
            if answer.number not in self.open:
                continue
            node, kind = self.open.pop(answer.number)
            if kind in ("hello", "prepare"):
                self.take(node, kind, answer)
            else:
                others.append((node, kind, answer))
        return others

    def name(self, node: int) -> str:
        return self.stations[node].name or f"node {node}"

    def introduce(self, node: int, kind: str) -> None:
        """Sends a hello, or has a node prepare for as long as its budget."""
        more = {"budget": self.patience.budget} if kind == "prepare" else {}
        self.send([(node, kind, Letter(self.greeting | more))], self.patience.answer + more.get("budget", 0.0))

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
        facts = answer.letter.facts if answer.letter else {"error": answer.error, "passing": True}
        try:
            error, passing = clean(facts.get("error", "")), bool(facts.get("passing"))
            if not error and kind == "hello":
                error = self.welcome(station, Letter(facts))
            if not error:
                station.ready = facts["ready"] is True
                error = self.settle(Letter(facts)) if station.ready else ""
                station.state = "is ready" if station.ready else self.progress(station, facts)
        except MALFORMED as wrong:
            error, passing = f"its answer is malformed ({type(wrong).__name__}: {clean(wrong, 100)})", False
        if error:
            station.ready = False
            station.trouble += 1
            if passing and station.trouble < TRIES:
                station.later = time.monotonic() + self.patience.again, kind
                station.state = f"has trouble ({error}) and is asked again"
                self.say(f"{self.name(node)} {station.state}")
                return
            station.refused = error
            self.say(f"{self.name(node)} does not take part: {error}")
            return
        station.trouble = 0
        if station.ready or kind == "hello":
            self.progressed = time.monotonic()
        self.say(f"{station.name} {station.state}")
        if not station.ready:
            self.introduce(node, "prepare")

    def progress(self, station: Station, facts: Mapping[str, Any]) -> str:
        """How far a node is, in words; only what is more than before counts as progress."""
        if "done" not in facts:
            return "prepares"
        what, done, total = clean(facts.get("what", "something"), 100), int(facts["done"]), int(facts["total"])
        if done > station.best.get(what, -1) and len(station.best) < 1000:
            station.best[what] = done
            self.progressed = time.monotonic()
        return f"prepares: {what}, {done} of {total}"

    def welcome(self, station: Station, letter: Letter) -> str:
        """Notes who a node is -> why it is refused."""
        facts = letter.facts
        station.name = clean(facts["name"], 60)
        clients = [int(k) for k in facts["clients"]]
        if len(set(clients)) < len(clients) or not set(clients) <= set(self.clients):
            return f"it stands for clients {clean(clients, 60)}, which are not all there or come twice"
        for other in self.stations.values():
            both = sorted(set(other.clients) & set(clients))
            if other is not station and both and not (other.refused or other.gone):
                return f"client {both[0]} is at {other.name} already; give each node clients of its own"
        if refusal := self.greet(letter):
            return refusal
        station.clients = tuple(sorted(clients))
        station.counts = counts_of(facts, clients)
        return ""

    def places(self) -> dict[int, int]:
        """Client -> the node that stands for it, ready or not; the last one known where that is gone."""
        known = [(n, s) for n, s in self.stations.items() if not s.refused]
        return {k: n for n, s in sorted(known, key=lambda item: not item[1].gone) for k in s.clients}

    def assemble(self, least: int) -> None:
        """Waits until nodes that are ready stand for all clients, or for `least` of them when patience is over. Raises
        UserError when too few came."""
        self.progressed, reminded = time.monotonic(), time.monotonic()
        while True:
            for node, kind, _ in self.look():
                self.say(f"a late answer ({kind}) of {self.name(node)} is ignored")
            here = [s for s in self.stations.values() if not s.gone and not s.refused]
            ready = sum(len(s.clients) for s in here if s.ready)
            if ready == len(self.clients):
                return
            now = time.monotonic()
            missing = len(self.clients) - sum(len(s.clients) for s in here)
            slow = [f"{s.name or 'a node'} {s.state}" for s in here if not s.ready]
            status = "; ".join(
                [*slow, *([f"{missing} of {len(self.clients)} clients have no node"] if missing else [])]
            )
            if now - self.progressed > self.patience.wait:
                if ready >= max(1, least):
                    self.say(f"goes on without those that are missing: {status}")
                    return
                why = [f"; {s.name or 'a node'}: {s.refused}" for s in self.stations.values() if s.refused]
                raise UserError(
                    f"only {ready} clients were ready after {clock(self.patience.wait)} without news "
                    f"({status}{''.join(why)}); start the nodes, or lower clients= and cohort="
                )
            if now - reminded > self.patience.remind:
                self.say(f"waits: {status}")
                reminded = now
            time.sleep(self.patience.poll)

    def ask(self, kind: str, letters: Mapping[int, Letter], seconds: float) -> Iterator[tuple[int, Letter | Failure]]:
        """Sends letters by node -> (node, its answer or why there is none), as they come, until all are there or time
        is over. A node that is gone, or not done with a letter of an earlier round, is not asked."""
        busy = {node: k for node, k in self.open.values() if k not in ("hello", "prepare")}
        for node in [n for n in letters if n in busy]:
            yield node, Failure(f"{self.name(node)} is still at an earlier letter ({busy[node]})")
        asked = [n for n in letters if n not in busy]
        sent = self.send([(n, kind, letters[n]) for n in asked], seconds)
        waiting = dict(zip(asked, sent, strict=True))
        end = reminded = time.monotonic()
        end += seconds
        while waiting:
            for node, was, answer in self.look():
                if waiting.get(node) != answer.number:
                    self.say(f"a late answer ({was}) of {self.name(node)} is ignored")
                    continue
                del waiting[node]
                yield node, self.opened(node, answer)
            for node in [n for n in waiting if self.stations[n].gone]:
                del waiting[node]
                yield node, Failure(f"{self.name(node)} was gone before it answered")
            now = time.monotonic()
            if now > end:
                for node in waiting:
                    yield node, Failure(f"{self.name(node)} gave no answer within {clock(seconds)}")
                return
            if waiting and now - reminded > self.patience.remind:
                self.say(f"waits for {', '.join(map(self.name, waiting))}")
                reminded = now
            if waiting:
                time.sleep(self.patience.poll)

    def opened(self, node: int, answer: Answer) -> Letter | Failure:
        if answer.letter is None:
            return Failure(clean(answer.error) or "no answer")
        facts = answer.letter.facts
        if facts.get("unprepared"):  # it has lost what it prepared, and makes it again while the others go on
            self.stations[node].ready, self.stations[node].state = False, "prepares again"
            self.introduce(node, "prepare")
        if error := clean(facts.get("error", "")):
            return Failure(error, final=not facts.get("unprepared"))
        return answer.letter


def counts_of(facts: Mapping[str, Any], clients: Sequence[int]) -> list[list[int]] | None:
    """Rows of each class, [clients of the node, classes], where it says them."""
    if facts.get("counts") is None:
        return None
    counts = [[int(n) for n in row] for row in facts["counts"]]
    if len(counts) != len(clients) or any(not 0 <= n < 2**40 for row in counts for n in row):
        raise ValueError("class counts that cannot be")
    return counts


class Elsewhere(ClientMemory):
    """What clients remember lies at their nodes; here is only of which round it is."""

    def restore(self, index: Index) -> None:
        self.index, self.staged = dict(index), set()


class Remote(Serial):
    """Clients behind nodes. Answers come in any order and are given out in the order of ids; what a node remembers of a
    round counts from the moment that the server accepts the round, since the next letter says so."""

    def __init__(self, worker: Worker, federation: Federation, nodes: Nodes, enough: int | None = None) -> None:
        super().__init__(worker, federation, Elsewhere())
        self.clients: Sequence[int] = sorted(nodes.clients)  # those too that no node stands for at present
        self.nodes, self.enough = nodes, enough

    def train(self, down: Tree, cohort: Sequence[int], round: int) -> Iterable[Upload | Refusal]:
        """With `enough`, those who answer after so many good uploads do not count."""
        letters, lost = self.letters(cohort, {"down": down}, {"round": round})
        found: dict[int, Upload | Refusal] = {k: Refusal(k, reason) for k, reason in lost.items()}
        asked = {node: [int(k) for k in letter.facts["bases"]] for node, letter in letters.items()}
        expected = self.expected(down) if self.enough is not None else {}
        good = 0
        for node, answer in self.nodes.ask("train", letters, self.nodes.patience.answer):
            for client in asked[node]:
                found[client] = one = self.uploaded(client, answer)
                if self.enough is not None and isinstance(one, Upload):
                    good += check(one, expected, None) is None
            if self.enough is not None and good >= self.enough:
                break
        for client in sorted(cohort):
            yield found.get(client) or Refusal(client, "others answered before it")

    def uploaded(self, client: int, answer: Letter | Failure) -> Upload | Refusal:
        """One client's part of a node's answer."""
        if isinstance(answer, Failure):
            return Refusal(client, answer.reason)
        try:
            refused = answer.facts["refused"]
            if str(client) in refused:
                return Refusal(client, clean(refused[str(client)]) or "its node gives no reason")
            said = answer.facts["uploads"][str(client)]
            moved: Tree = tree.map(lambda x: x.to(self.worker.net.device), answer.trees[str(client)])
            upload = Upload(
                client,
                moved,
                float(said["weight"]),
                float(said["loss"]),
                int(said["steps"]),
                int(said["planned"]),
            )
            if said["remembers"]:
                self.memory.staged.add(client)
            return upload
        except MALFORMED as error:
            return Refusal(client, f"its answer is malformed ({type(error).__name__}: {clean(error, 100)})")

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

    def everywhere(
        self, kind: str, clients: Sequence[int], trees: dict[str, Tree], read: Callable[[Any], Any]
    ) -> dict[int, Any]:
        """What nodes say of these clients, each through `read`. Those that are gone or busy are waited for as long as
        nodes are at the start. Raises UserError where one says nothing, or what cannot be."""
        left, out = set(clients), {}
        news = reminded = time.monotonic()
        while left:
            letters, lost = self.letters(sorted(left), trees, {})
            for node, answer in self.nodes.ask(kind, letters, self.nodes.patience.answer):
                for client in map(int, letters[node].facts["bases"]):
                    if isinstance(answer, Failure):
                        if answer.final:
                            raise UserError(f"what client {client} keeps cannot be judged: {answer.reason}")
                        lost[client] = answer.reason
                        continue
                    try:
                        out[client] = read(answer.facts["said"][str(client)])
                    except MALFORMED as error:
                        raise UserError(
                            f"{self.nodes.name(node)} answers of client {client} what cannot be "
                            f"({type(error).__name__}: {clean(error, 100)})"
                        ) from None
                    left.discard(client)
                    news = time.monotonic()
            if not left:
                break
            client, reason = next(iter(sorted(lost.items())))
            if time.monotonic() - news > self.nodes.patience.wait:
                raise UserError(
                    f"{len(left)} clients' own models cannot be judged, the first is client {client}: {reason}; run it "
                    "again under the same name once the nodes are there"
                )
            if time.monotonic() - reminded > self.nodes.patience.remind:
                self.nodes.say(f"waits for {len(left)} clients, the first is client {client}: {reason}")
                reminded = time.monotonic()
            time.sleep(self.nodes.patience.poll)
        return out

    def personal(self, clients: Sequence[int], weights: Tree) -> dict[int, Evaluation]:
        table = self.federation.test
        total = table["label"].bincount(minlength=len(self.federation.classes)).tolist()
        domains = table["domain"].bincount().tolist() if "domain" in table else []
        return self.everywhere("judge", clients, {"weights": weights}, lambda said: evaluation(said, total, domains))

    def models(self, weights: Tree) -> Iterable[Tree] | None:
        return None

    def kept(self) -> dict[int, str]:
        if not self.worker.kept:
            return {}
        return self.everywhere("kept", list(self.memory), {}, lambda said: clean(said, 64))


def evaluation(said: Mapping[str, Any], total: list[int], domains: list[int]) -> Evaluation:
    """What a node says of a model on a test set with so many images of each class (and domain). Raises ValueError for
    what cannot be."""
    found = Evaluation(
        **{key: np.array(said[key], dtype=np.int64) for key in Evaluation._fields if key != "loss"},
        loss=float(said["loss"]),
    )
    if found.total.tolist() != total or found.domain_total.tolist() != domains:
        raise ValueError("it was on other test images")
    for hits, all_of in ((found.correct, found.total), (found.domain_correct, found.domain_total)):
        if hits.shape != all_of.shape or (hits < 0).any() or (hits > all_of).any():
            raise ValueError("more hits than images")
    if np.isfinite(found.loss) and abs(found.loss) > LARGEST_LOSS:  # NaN and infinity may be a model's own
        raise ValueError("no such loss")
    return found
