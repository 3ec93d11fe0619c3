"""What a node does: it holds the data of one or several clients, and answers the server's letters.

Every answer may come from a process of its own, so whatever lasts lies in the node's folder: the prepared rows, what
clients remember after each round, and the caches of images and descriptors. Only what the method uploads leaves a node,
and class counts where the site says so.
"""

import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import __version__, assemble, store
from .choice import choose
from .config import Experiment, to_dict
from .data import halves, table
from .data import site as own_data
from .data.partition import Sites
from .data.table import Federation
from .engines.serial import Serial
from .errors import UsageError, UserError
from .guide import Guide
from .letters import Letter
from .memory import ClientMemory
from .node_settings import Settings
from .progress import Progress, Update
from .resume import FREE
from .tree import Tree
from .uploads import Refusal, Upload, check

FORMAT = "fedprior prepared 1"
STALE = 3600.0  # seconds after which a file that nobody finished is left over
REMEMBERED = re.compile(r"(\d+)-(\d+)\.safetensors")


def agreement(experiment: Experiment) -> str:
    """A digest of all settings that decide a result, as this version of fedprior understands them."""
    values = {key: value for key, value in to_dict(experiment).items() if key not in (*FREE, "name", "device")}
    named = [getattr(experiment.balance, key, "") for key in ("templates", "names", "domain_words", "target")]
    files = [path.read_bytes() for text in named if text and len(text) < 4096 and (path := Path(text)).is_file()]
    return store.digest(*(f"{key} {value}" for key, value in sorted(values.items())), *files)


def content(federation: Federation) -> str:
    """A digest of images, labels and class names, whoever holds which rows."""
    return store.digest(store.weight_digest({"train": federation.table, "test": federation.test}), *federation.classes)


class Unprepared(UserError):
    """What `prepare` left is missing or damaged: the node has to prepare again."""


class OutOfTime(Exception):
    """The time for this message is over; what is done so far is kept."""

    def __init__(self, what: str, done: int, total: int) -> None:
        super().__init__(what)
        self.what, self.done, self.total = what, done, total


class Budget:
    """A progress that ends a task after so many seconds, though not before more was done than when a budget ended it
    the last time: `file` keeps how far that was, since what is found again counts as done too."""

    def __init__(self, seconds: float, progress: Progress, file: Path) -> None:
        self.end, self.progress, self.file = time.monotonic() + seconds, progress, file
        try:
            self.before = {str(key): int(n) for key, n in store.read_json(file).items()}
        except (OSError, ValueError, TypeError):
            self.before = {}

    def say(self, text: str) -> None:
        self.progress.say(text)

    @contextmanager
    def task(self, name: str, total: int, done: int = 0) -> Iterator[Update]:
        first = None

        def update(now: int, note: str) -> None:
            nonlocal first
            first = now if first is None else first
            tell(now, note)
            least = max(first, self.before.get(f"{name} of {total}", -1))
            if least < now < total and time.monotonic() > self.end:
                store.write_json(self.file, self.before | {f"{name} of {total}": now})
                raise OutOfTime(name, now, total)

        with self.progress.task(name, total, done) as tell:
            yield update


class Stored(NamedTuple):
    """What `prepare` left in the node's folder."""

    federation: Federation  # only the node's own clients have rows
    guide: Guide | None  # without the diffusion model


class Node:
    """Answers the letters of one run. `experiment` is the server's; `settings` are the site's."""

    def __init__(self, experiment: Experiment, settings: Settings, progress: Progress) -> None:
        self.agreement, self.settings, self.progress = agreement(experiment), settings, progress
        if not experiment.name:
            raise UsageError("a run over nodes needs a name=")
        if outside := [k for k in settings.clients if k >= experiment.clients]:
            raise UserError(f"{settings.name} stands for client {outside[0]}, and clients={experiment.clients}")
        self.sites = isinstance(experiment.partition, Sites)
        if self.sites and (settings.data is None or len(settings.clients) != 1):
            raise UserError(
                f"{settings.name}: with partition=sites a node stands for one client and has data of its own; set "
                'clients="NUMBER" and data="PATH" in its configuration'
            )
        data, prior = experiment.data, experiment.prior
        if settings.data is not None and not self.sites:
            data = replace(data, path=settings.data)
        if settings.prior is not None and prior is not None:
            prior = replace(prior, name=settings.prior)
        device: Any = settings.device or experiment.device  # a name that is none is refused where it is used
        self.experiment = replace(experiment, data=data, prior=prior, device=device)
        self.folder = settings.state / "runs" / f"{experiment.name}-{self.agreement[:12]}"
        os.environ.setdefault("FEDPRIOR_CACHE", str(settings.state / "cache"))

    def answer(self, kind: str, letter: Letter) -> Letter:
        """The answer to a letter of a kind; one with `error` where the node cannot."""
        handlers: dict[str, Callable[[Letter], Letter]] = {
            "hello": self.hello,
            "prepare": self.prepare,
            "train": self.train,
            "judge": self.judge,
            "kept": self.kept,
        }
        try:
            return handlers[kind](letter)
        except Exception as error:
            if not isinstance(error, UserError):
                import traceback

                self.progress.say(traceback.format_exc())
            seen: BaseException | None = error
            while seen is not None and not isinstance(seen, OSError | MemoryError):
                seen = seen.__cause__ or seen.__context__
            return Letter(
                {"error": told(error), "unprepared": isinstance(error, Unprepared), "passing": seen is not None}
            )

    # before round 1
    def hello(self, letter: Letter) -> Letter:
        """Who this is. Refuses another version of fedprior, and settings that it understands otherwise."""
        theirs = letter.facts
        if theirs["version"] != __version__:
            raise UserError(f"fedprior is {__version__} at {self.settings.name} and {theirs['version']} at the server")
        if theirs["agreement"] != self.agreement:
            raise UserError(f"the settings mean something else at {self.settings.name} than at the server")
        facts: dict[str, Any] = {
            "name": self.settings.name,
            "clients": list(self.settings.clients),
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
        }
        federation = self.data(theirs)
        if not self.sites:
            facts |= {"partition": federation.split["digest"], "data": content(federation)}
        facts["clients"] = [k for k in self.settings.clients if len(federation.clients[k])]
        if self.settings.share_label_counts:
            facts["counts"] = federation.counts()[facts["clients"]].tolist()
        store.sweep(self.folder, older=STALE)
        if self.ready(federation) is None and self.experiment.balance is None and self.experiment.guide is None:
            self.make(federation, self.progress)  # at once, since there is nothing to wait for
        return Letter(facts | (self.ready(federation) or {"ready": False}))

    def data(self, theirs: Mapping[str, Any]) -> Federation:
        """All rows that the node can see, its own clients' among them."""
        return self.own(theirs) if self.sites else assemble.split(self.experiment).federation

    def own(self, theirs: Mapping[str, Any]) -> Federation:
        """The site's data as the federation's only rows. `theirs` says which classes and size (H, W) there are."""
        assert self.settings.data is not None
        height, width = theirs["size"]
        rows = own_data.load(
            Path(self.settings.data),
            tuple(theirs["classes"]),
            (height, width),
            image=self.settings.image,
            label=self.settings.label,
            names=self.settings.classes,
        )
        if self.experiment.data.half != "all":
            rows = table.take(rows, torch.nonzero(halves.mask(rows["image"], self.experiment.data.half))[:, 0])
            if not len(rows["label"]):
                raise UserError(
                    f"no image of {self.settings.name} is in the {self.experiment.data.half} half of its set"
                )
        nothing = torch.zeros(0, dtype=torch.int64)
        clients = [nothing] * self.experiment.clients
        clients[self.settings.clients[0]] = torch.arange(len(rows["label"]))
        return Federation(
            table=rows, clients=tuple(clients), test=table.take(rows, nothing), classes=tuple(theirs["classes"])
        )

    def prepare(self, letter: Letter) -> Letter:
        """Synthetic rows and descriptors of the node's clients, as far as the time allows: `budget` in seconds."""
        federation = self.data(letter.facts)
        if self.ready(federation) is None:
            try:
                self.make(federation, Budget(letter.facts["budget"], self.progress, self.folder / "budget.json"))
            except OutOfTime as stop:
                return Letter({"ready": False, "what": stop.what, "done": stop.done, "total": stop.total})
        return Letter(self.ready(federation) or {"ready": False})

    @property
    def path(self) -> Path:
        """Of prepared rows; nodes that share a folder have their own."""
        return self.folder / f"prepared-{self.key[:12]}.safetensors"

    def make(self, whole: Federation, progress: Progress) -> None:
        """Prepares the node's clients out of the rows that it can see."""
        experiment, clients, path = self.experiment, self.settings.clients, self.path
        device = assemble.set_up(experiment)
        needed = experiment.balance is not None or experiment.guide is not None
        prior = assemble.prior_for(experiment, whole, device) if needed else None
        federation = whole.only(clients)
        if experiment.balance is not None and any(len(federation.clients[k]) for k in clients):
            federation, report = assemble.balance(experiment, whole, device, progress, prior, clients)
            progress.say(f"{report.rows} synthetic rows from {report.origin}")
        guide = assemble.build_guide(experiment, federation, device, prior)
        facts: dict[str, Any] | None = None
        tensors: dict[str, torch.Tensor] = {}
        if guide is not None:
            guide.describe(federation, progress)
            facts, tensors = guide.essence()
        rows = {str(k): federation.clients[k] for k in clients}
        about = {
            "key": self.key,
            "content": content(whole),
            "prior": prior.revision if prior is not None else "",
            "classes": federation.classes,
            "domains": federation.domains,
            "split": federation.split,
            "size": list(federation.test["image"].shape[2:]),
            "guide": facts,
        }
        try:
            store.write_tree(path, {"table": federation.table, "rows": rows, "guide": tensors}, about)
        except OSError as error:
            raise UserError(f"cannot write to {path.parent} ({error}); give state-dir a folder with space") from None

    @property
    def key(self) -> str:
        """What prepared rows depend on."""
        s = self.settings
        return store.digest(
            FORMAT, self.agreement, repr(s.clients), *(v or "" for v in (s.data, s.image, s.label, s.classes, s.prior))
        )

    def ready(self, federation: Federation) -> dict[str, Any] | None:
        """What the server is told of prepared rows; None where they are missing, damaged or of other data."""
        try:
            _, about = store.read_tree(self.path, copy=False)
            if about["key"] != self.key or about["content"] != content(federation):
                return None
            return {"ready": True, "prior": about["prior"]}
        except (OSError, ValueError, KeyError):
            return None

    def stored(self) -> Stored:
        """What `prepare` left. Raises Unprepared."""
        try:
            parts, about = store.read_tree(self.path, copy=False)
            if about["key"] != self.key:
                raise ValueError("it was made for other settings")
        except (OSError, ValueError) as error:
            raise Unprepared(f"{self.settings.name} has to prepare first ({error})") from None
        height, width = about["size"]
        none = torch.zeros(0, dtype=torch.int64)
        empty = table.take(parts["table"], none)
        empty["image"] = torch.zeros((0, 3, height, width), dtype=torch.uint8)
        rows = parts["rows"]
        federation = Federation(
            table=parts["table"],
            clients=tuple(rows.get(str(k), none) for k in range(self.experiment.clients)),
            test=empty,
            classes=tuple(about["classes"]),
            domains=tuple(about["domains"]),
            split=about["split"],
        )
        guide = None
        if about["guide"] is not None:
            assert self.experiment.guide is not None
            guide = Guide.of(self.experiment.guide, federation.classes, about["guide"], parts["guide"])
        return Stored(federation, guide)

    # in every round
    def engine(self, bases: Mapping[int, int], described: bool) -> Serial:
        """The node's clients, each remembering what it did after the round that the server names (-1: nothing)."""
        ready, device = self.stored(), assemble.set_up(self.experiment)
        federation = ready.federation
        if described and ready.guide is not None and not ready.guide.complete(federation.only(list(bases))):
            self.path.unlink(missing_ok=True)
            raise Unprepared(f"{self.settings.name} has to prepare first (descriptors have gone from its cache)")
        net = assemble.build_net(self.experiment, federation, device, ready.guide)
        worker = assemble.build_worker(self.experiment, net, federation, ready.guide)
        memory = ClientMemory(self.folder / "clients", self.experiment.memory_MB)
        memory.restore({k: base for k, base in bases.items() if base >= 0})
        return Serial(worker, federation.to(device), memory)

    def train(self, letter: Letter) -> Letter:
        """Trains clients for a round; the tree `down` is the server's message, `bases` says what each remembers."""
        round, bases, refused = int(letter.facts["round"]), self.bases(letter), {}
        for client in list(bases):
            if reason := self.obstacle(client, bases[client]):
                refused[client] = reason
                del bases[client]
        facts: dict[str, Any] = {"uploads": {}, "refused": refused}
        trees: dict[str, Tree] = {}
        if bases:
            plain = self.engine(bases, described=True)
            asked = self.experiment
            if asked.engine == "auto":  # a process lives for one message, so workers would start in each
                asked = replace(asked, engine="serial")
            engine = choose(asked, plain, len(bases)).engine
            try:
                expected = engine.expected(letter.trees["down"])
                for answer in answers(engine, letter.trees["down"], sorted(bases), round, self.progress):
                    bad = (
                        answer
                        if isinstance(answer, Refusal)
                        else check(answer, expected, self.experiment.max_update_norm)
                    )
                    if bad is not None:
                        refused[bad.client] = bad.reason
                        continue
                    assert isinstance(answer, Upload)
                    facts["uploads"][answer.client] = {
                        **{key: getattr(answer, key) for key in ("weight", "loss", "steps", "planned")},
                        "remembers": answer.client in engine.memory.staged,
                    }
                    trees[str(answer.client)] = answer.tree
            finally:
                engine.close()
            for client, base in bases.items():
                self.forget(client, base, round)
        return Letter(facts, trees)

    def bases(self, letter: Letter) -> dict[int, int]:
        return {int(client): int(base) for client, base in letter.facts["bases"].items()}

    def obstacle(self, client: int, base: int) -> str:
        """Why a client cannot go on from what it remembered after round `base`; "" where it can."""
        if client not in self.settings.clients:
            return f"client {client} is not at {self.settings.name}"
        if base < 0:
            return ""
        try:
            ClientMemory(self.folder / "clients").read(client, base)
        except (OSError, ValueError) as error:
            return f"what it remembered after round {base + 1} is lost at {self.settings.name} ({error})"
        return ""

    def forget(self, client: int, base: int, round: int) -> None:
        """Leaves what a client remembers of this round and of later ones, of the last that counted, and of the one
        before that: a server that fell back to its last checkpoint but one asks for it."""
        rounds = {
            int(found[2]): path
            for path in (self.folder / "clients").glob(f"{client}-*.safetensors")
            if (found := REMEMBERED.fullmatch(path.name))
        }
        keep = {base, max((r for r in rounds if r < base), default=-1)}
        for r, path in rounds.items():
            if r < round and r not in keep:
                path.unlink(missing_ok=True)

    def judge(self, letter: Letter) -> Letter:
        """How good the models are that clients would begin a round with, on the test set; the tree is `weights`."""
        if self.sites:
            raise UserError("there is no test set at a site")
        engine = self.remembering(letter)
        test = assemble.split(self.experiment).federation.test
        device = engine.worker.net.device
        engine.federation = replace(engine.federation, test={name: x.to(device) for name, x in test.items()})
        seen = engine.personal(sorted(self.bases(letter)), letter.trees["weights"])
        plain = lambda e: {key: v if key == "loss" else v.tolist() for key, v in e._asdict().items()}
        return Letter({"said": {k: plain(e) for k, e in seen.items()}})

    def kept(self, letter: Letter) -> Letter:
        """Digests of what clients keep of the model."""
        return Letter({"said": self.remembering(letter).kept()})

    def remembering(self, letter: Letter) -> Serial:
        """The engine for a letter that is about clients' own models. Raises UserError where one has lost its own."""
        bases = self.bases(letter)
        for client, base in bases.items():
            if reason := self.obstacle(client, base):
                raise UserError(f"{reason}; begin anew under another name=")
        return self.engine(bases, described=False)


def answered(
    experiment: Experiment, configuration: Mapping[str, Any], kind: str, letter: Letter, progress: Progress
) -> Letter:
    """What the node of this configuration answers; one line where it cannot."""
    try:
        return Node(experiment, Settings.read(configuration), progress).answer(kind, letter)
    except UserError as error:
        return Letter({"error": told(error)})


def answers(
    engine: Serial, down: Tree, cohort: Sequence[int], round: int, progress: Progress
) -> Iterator[Upload | Refusal]:
    """What `engine.train` yields, with a refusal in the place of a client that raises: the others go on."""
    left = list(cohort)
    while left:
        try:
            for answer in engine.train(down, left[:], round):
                yield answer
                left.remove(answer.client)
        except Exception as error:
            import traceback

            progress.say(traceback.format_exc())
            yield Refusal(left.pop(0), told(error))


def told(error: Exception) -> str:
    """An error in one line; the name of its class where it is not meant for people."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"
    return text if len(text) <= 500 else f"{text[:500]}..."
