"""From an experiment to a run directory."""

import errno
import time
from collections.abc import Iterable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from . import __version__, assemble, predict, resume, store, track
from .checkpoint import Checkpoints, State
from .choice import choose
from .config import CHOICES, Experiment
from .data import augment
from .data.partition import Partition
from .data.table import Federation, Table, take
from .engines.serial import Serial
from .errors import UserError
from .evaluate import Evaluation, accuracy_by_client, answers, client_accuracies, embed
from .federate import RoundResult, begin, federate
from .memory import ClientMemory
from .method import Server
from .priors.quality import confusion
from .probe import knn, linear_head
from .progress import Progress, Silent
from .record import Record, metrics
from .report import html, load, numbers
from .store import weight_digest
from .traffic import MB, Traffic
from .tree import Tree

EXAMPLES = 8  # images of each class kept for the report


class Outcome(NamedTuple):
    """What a run came to."""

    result: dict[str, Any]  # what `fedprior run --json` prints
    curve: list[dict[str, Any]]  # the lines of metrics.jsonl


class Prepared(NamedTuple):
    """All that a run needs, found before its directory is made."""

    partition: Partition
    federation: Federation  # on the CPU, with synthetic rows
    images: Table | None  # the prior's, for the server
    synthetic_rows: int | None  # at all clients; None where that is not known
    engine: Serial
    cohort: int
    why: str  # this engine
    generation_seconds: float = 0.0  # for the prior's images, also where they were there; 0 where others make them
    description_seconds: float = 0.0  # for descriptors, alike


class Prepare(Protocol):
    """How a run comes by what it needs."""

    def __call__(
        self, experiment: Experiment, device: torch.device, memory: ClientMemory, progress: Progress
    ) -> Prepared: ...


def default_name(experiment: Experiment) -> str:
    """E.g. "digits-fedavg+max"."""
    parts = [experiment.data.name.replace("/", "-"), CHOICES["method"].name_of(experiment.method)]
    values = {key: getattr(experiment, key) for key in ("balance", "adapt", "guide")}
    extra = [CHOICES[key].name_of(value) for key, value in values.items() if value]
    return "+".join(["-".join(parts), *extra])


def run(
    experiment: Experiment,
    root: Path = Path("runs"),
    progress: Progress | None = None,
    preparing: Prepare | None = None,
    report: bool = True,
) -> Outcome:
    """Train, evaluate, record. A run directory that `experiment.name` names is continued where it stopped; when it is
    done already, its result is returned.

    What is wrong with settings, data, prior or net shows before the first line is written, and then leaves no
    directory behind; a run that fails later says so in its manifest. Where clients live elsewhere, `preparing` says how
    they are reached. Without `report` no page is made; `fedprior report` makes it later.
    """
    progress, root = progress or Silent(), Path(root)
    if not experiment.name and (hint := resume.unfinished(root, experiment)):
        progress.say(f"{hint} holds an unfinished run of these settings; `fedprior run {hint}` goes on with it")
    folder = root / experiment.name
    if experiment.name and resume.look(folder, experiment):
        progress.say(f"{folder} is done; nothing is left to do. A larger rounds= would go on from there.")
        return Outcome(resume.result(folder) | {"directory": str(folder)}, metrics(folder))
    track.refuse_missing(experiment.track)
    device = assemble.set_up(experiment)
    progress.say(f"fedprior {__version__} on {device} (threads={experiment.threads}), torch {torch.__version__}")
    began = time.monotonic()
    name = experiment.name or default_name(experiment)
    with Record(root / name, experiment, numbered=not experiment.name) as record:
        folder = record.folder
        resume.look(folder, experiment)  # again, since another process may have been there before the lock was ours
        record.reserve()
        try:
            memory = ClientMemory(folder / "checkpoints" / "clients", experiment.memory_MB)
            ready = (preparing or prepare)(experiment, device, memory, progress)
            with closing(ready.engine):
                return carry_out(ready, record, progress, began, report)
        except BaseException as error:
            if record.started:
                with suppress(OSError):  # a full disk must not hide what went wrong
                    how = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
                    record.status(how, error=repr(error))
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise UserError(
                    f"the disk of {folder} is full; free some space and run it again: it goes on after the last round "
                    "that was saved"
                ) from error
            raise


def prepare(experiment: Experiment, device: torch.device, memory: ClientMemory, progress: Progress) -> Prepared:
    """Data, prior's images, net and engine. What can fail without images fails before any is made."""
    real, parts = assemble.split(experiment)
    needed = experiment.balance or experiment.guide or experiment.method.images
    prior = assemble.prior_for(experiment, real, device) if needed else None
    guide = assemble.build_guide(experiment, real, device, prior)
    net = assemble.build_net(experiment, real, device, guide)
    assemble.build_engine(experiment, net, real)
    if remark := experiment.method.remark(net):
        progress.say(f"net={experiment.net}: {remark}")
    if experiment.bn_stats == "local" and not net.batch_norm_names:
        progress.say(f"net={experiment.net}: there is no batch norm in it, so bn_stats=local changes nothing")
    if experiment.augment and not augment.mirrors(real.classes):
        progress.say(
            f"classes such as '{real.classes[0]}' are taken for digits, so augment=true does not mirror images"
        )
    federation, rows, began = real, 0, time.monotonic()
    if experiment.balance is not None:
        federation, report = assemble.balance(experiment, real, device, progress, prior)
        rows = report.rows
        progress.say(f"{rows} synthetic rows at {len(real.clients)} clients from {report.origin}")
    images = assemble.images_for_server(experiment, real, device, progress, prior)
    made = time.monotonic()
    if guide is not None:
        guide.describe(assemble.gathered(experiment, federation), progress)
    described = time.monotonic()
    plain, cohort = assemble.build_engine(experiment, net, federation.to(device), memory, guide)
    engine, why = choose(experiment, plain, cohort)
    progress.say(why)
    return Prepared(parts, federation, images, rows, engine, cohort, why, made - began, described - made)


def carry_out(ready: Prepared, record: Record, progress: Progress, began: float, report: bool) -> Outcome:
    """All rounds from wherever the directory stands, then what is made of them."""
    experiment, engine, folder = record.experiment, ready.engine, record.folder
    spent = {"generation_seconds": ready.generation_seconds, "description_seconds": ready.description_seconds}
    checkpoints = Checkpoints(folder / "checkpoints")
    state = checkpoints.load(engine.memory, record.cover)
    resume.same_data(folder, ready.partition)
    if state is None:
        if record.rounds() > 1:
            raise UserError(f"{folder} has rounds but no checkpoint to go on from; choose another name= to begin anew")
        record.begin()
        weights = engine.worker.net.init()
        if ready.images is not None:
            before = time.monotonic()
            weights = experiment.method.pretrain(engine.worker.net, weights, ready.images, experiment.seed)
            spent["pretraining_seconds"] = time.monotonic() - before
        server = begin(engine.worker.net, experiment.method, experiment.seed, experiment.bn_stats, weights)
        state = State(0, server, {}, Traffic(), {}, 0.0)
    else:
        resume.warn(folder, progress)
        record.resume(state.lengths, state.done)
        progress.say(f"{folder} goes on after round {state.done}")
    ready.partition.save(folder / "partition.json")
    prepared = time.monotonic() - began
    judge = Judge(engine, ready.federation, ready.images)
    curve = metrics(folder) if state.done else []
    with track.follow(experiment, folder, ready.federation.classes, curve, progress.say) as tell:
        server, seconds = train(ready, state, judge, curve, checkpoints, record, progress, began, spent, tell)
    finish(ready, server, judge, record)
    result = {
        **{k: numbers.headline(curve)[k] for k in ("last", "mean_last10", "best", "rounds")},
        "models": "own" if engine.worker.kept else "global",  # whose accuracy it is
        "judged_on": "validation" if experiment.validation else "test",
        "uplink_MB": curve[-1]["uplink_bytes"] / MB,
        "downlink_MB": curve[-1]["downlink_bytes"] / MB,
        "seconds": round(seconds, 3),
        "preparation_seconds": round(prepared, 3),
        "target": experiment.target,
        "to_target": numbers.to_target(curve, experiment.target) if experiment.target is not None else None,
        "synthetic_rows": ready.synthetic_rows,
        "weights": digest(engine, server),
        "engine": ready.why.partition(":")[0].removeprefix("engine="),
        "directory": str(folder),
    }
    record.result(result)
    if report:
        html.write(load.report_data([folder]), folder / "report.html")
    record.status("done")
    return Outcome(result, curve)


def train(
    ready: Prepared,
    state: State,
    judge: "Judge",
    curve: list[dict[str, Any]],
    checkpoints: Checkpoints,
    record: Record,
    progress: Progress,
    began: float,
    spent: dict[str, float],
    tell: track.Tell,
) -> tuple[Server, float]:
    """The rounds that are left; `curve` and `tell` get a line for each -> (server, seconds of the run in all). What was
    `spent` before goes with the first of them, so that lines that are cut off take it along."""
    experiment, engine, server, traffic = record.experiment, ready.engine, state.server, state.traffic
    rounds = federate(
        server,
        engine.worker.method,
        engine,
        cohort=ready.cohort,
        seed=experiment.seed,
        traffic=traffic,
        aggregate=experiment.aggregate,
        drop_rate=0.0 if engine.worker.method.pooled else experiment.drop_rate,  # no client could fail to answer
        min_cohort=min(experiment.min_cohort, ready.cohort),
        max_update_norm=experiment.max_update_norm,
        clip_update_norm=experiment.clip_update_norm,
        first=state.done,
    )

    def seconds() -> float:
        return state.seconds + time.monotonic() - began

    with progress.task("rounds", experiment.rounds, state.done) as update:
        started = seconds()
        for done, outcome in zip(range(state.done + 1, experiment.rounds + 1), rounds, strict=False):
            trained, server = seconds(), outcome.server
            due = done % experiment.evaluate_every == 0 or done == experiment.rounds
            line = metrics_line(outcome, judge.scores(server) if due else dict.fromkeys(judge.KEYS), traffic)
            now = seconds()
            parts = {"training_seconds": trained - started, "evaluation_seconds": now - trained}
            record.round(line, {"round": done, "seconds": now, **parts, **spent})
            checkpoints.save(State(done, server, engine.memory.index, traffic, record.lengths(), now), engine.memory)
            curve.append(line)
            tell(line)
            update(done, f"accuracy {line['accuracy']:.3f}" if line["accuracy"] is not None else "")
            started, spent = seconds(), {}
    return server, seconds()


def digest(engine: Serial, server: Server) -> str:
    """Of the global model, and of what each client keeps to itself."""
    own = engine.kept()
    whole = weight_digest(server.weights)
    return store.digest(whole, *(f"{k} {own[k]}" for k in sorted(own))) if own else whole


def metrics_line(outcome: RoundResult, scores: dict[str, Any], traffic: Traffic) -> dict[str, Any]:
    """What metrics.jsonl says of a round; bytes are totals since round 1."""
    return {
        "round": outcome.number + 1,
        **scores,
        "train_loss": outcome.train_loss,
        "cohort": outcome.cohort,
        "dropped": outcome.dropped,
        "partial": [{"client": client, "steps": steps} for client, steps in outcome.partial.items()],
        "accepted": len(outcome.accepted),
        "refused": [refusal._asdict() for refusal in outcome.refused],
        "skipped": outcome.skipped,
        "uplink_bytes": sum(traffic.up.values()),
        "downlink_bytes": sum(traffic.down.values()),
        "uplink_groups": dict(traffic.up),
        "downlink_groups": dict(traffic.down),
    }


class Judge:
    """Evaluates the global model; or, where clients keep weights or statistics of their own, every client's.

    A client counts with the weights that it would begin the next round with, also one that was never asked: the
    scores are means over all clients with data. Where a guide trains without labels, the classifier is a linear probe
    on the frozen features of all real rows, fitted anew, and `knn` is the accuracy of 20 nearest neighbours among them.
    """

    KEYS: tuple[str, ...] = ("accuracy", "loss", "clients", "per_class")

    def __init__(self, engine: Serial, federation: Federation, images: Table | None = None) -> None:
        self.engine, self.classes, self.images = engine, len(federation.classes), images
        self.test = engine.federation.test
        self.domains = federation.domains if "domain" in self.test else ()
        if self.domains:
            self.KEYS = (*self.KEYS, "per_domain")
        guide = engine.worker.guide
        self.rows: Table | None = None  # that a probe is fitted on
        self.bank = torch.empty(0)  # their features under the weights last deployed, [n, D]
        if guide is not None and not guide.config.labels:
            held = torch.cat(list(engine.federation.clients)).unique()
            rows = take(engine.federation.table, held)
            self.rows = take(rows, torch.nonzero(~rows["synthetic"])[:, 0])
            self.KEYS = (*self.KEYS, "knn")
        self.counts = federation.counts(synthetic=False)
        self.own: dict[int, tuple[int | None, Evaluation]] = {}  # by client: the round its weights are from, and they
        self.rates: np.ndarray | None = None  # of the last evaluation, [classes] or [clients with data, classes]

    def scores(self, server: Server) -> dict[str, Any]:
        worker = self.engine.worker
        if not worker.kept:
            weights = self.deployed(server)
            seen = [self.engine.evaluate(weights)]
            self.rates = seen[0].per_class
            return self.summarise(seen, self.counts) | self.neighbours(weights)
        seen = self.everyone(server)
        self.rates = np.stack([e.per_class for e in seen])
        ids = list(self.engine.clients)
        return self.summarise(seen, self.counts if worker.method.pooled else self.counts[ids])

    def deployed(self, server: Server) -> dict[str, Any]:
        worker = self.engine.worker
        weights = worker.method.deploy(worker.net, server.weights, self.images, worker.seed)
        if self.rows is None:
            return weights
        self.bank = z = embed(worker.net, weights, self.rows)
        if not z.isfinite().all():
            return weights
        head = zip(
            ("head.weight", "head.bias"), linear_head(z, self.rows["label"], self.classes, worker.seed), strict=True
        )
        return weights | {"params": weights["params"] | {name: x.to(z) for name, x in head}}

    def neighbours(self, weights: dict[str, Any]) -> dict[str, Any]:
        if self.rows is None:
            return {}
        bank, asked = self.bank, embed(self.engine.worker.net, weights, self.test)
        if not (bank.isfinite().all() and asked.isfinite().all()):
            return {"knn": None}
        return {"knn": knn(bank, self.rows["label"], asked, self.test["label"])}

    def everyone(self, server: Server) -> list[Evaluation]:
        """With each client's own weights. Nothing is evaluated again that cannot have changed."""
        versions = {k: self.engine.memory.index.get(k) for k in self.engine.clients}
        stale = [k for k, version in versions.items() if k not in self.own or self.own[k][0] != version]
        if any(server.weights.values()):  # the server has a part of every model
            stale = list(versions)
            first: list[int] = []
        else:
            first = [k for k in stale if versions[k] is None]  # all begin with the same weights
            known = next((e for v, e in self.own.values() if v is None), None)
        asked = [k for k in stale if k not in first] + (first[:1] if first and known is None else [])
        found = self.engine.personal(sorted(asked), server.weights)
        if first:
            twin = known or found[first[0]]
            found |= dict.fromkeys(first, twin)
        self.own |= {k: (versions[k], found[k]) for k in stale}
        return [self.own[k][1] for k in self.engine.clients]

    def confusion(self, models: Iterable[Tree]) -> np.ndarray:
        """Test images of each class (down) by the class that they are taken for (across), summed over the models: int64
        [classes, classes]."""
        net, label = self.engine.worker.net, self.test["label"]
        total = torch.zeros(self.classes, self.classes, dtype=torch.int64, device=label.device)
        for weights in models:
            total += confusion(label, answers(net, weights, self.test), self.classes)
        return total.cpu().numpy()

    def summarise(self, seen: list[Evaluation], counts: np.ndarray) -> dict[str, Any]:
        assert self.rates is not None
        mean_rates = self.rates if self.rates.ndim == 1 else self.rates.mean(0)
        scores = {
            "accuracy": float(np.mean([e.accuracy for e in seen])),
            "loss": loss if np.isfinite(loss := float(np.mean([e.loss for e in seen]))) else None,
            "clients": client_accuracies(self.rates, counts),
            "per_class": [None if np.isnan(x) else float(x) for x in mean_rates],
        }
        if not self.domains:
            return scores
        by_domain = zip(self.domains, np.mean([e.per_domain for e in seen], 0), strict=False)
        return scores | {"per_domain": {name: float(x) for name, x in by_domain if not np.isnan(x)}}


def finish(ready: Prepared, server: Server, judge: Judge, record: Record) -> None:
    """Model, confusion matrix, clients' table and example images."""
    experiment, engine, federation = record.experiment, ready.engine, ready.federation
    if judge.rates is None:  # the last round was done before this process
        judge.scores(server)
    if not engine.worker.kept:
        about = predict.about(experiment, engine.worker.net, federation)
        record.weights(weights := judge.deployed(server), about)
        record.confusion(federation.classes, judge.confusion([weights]))
    elif (own := engine.models(server.weights)) is not None:
        record.confusion(federation.classes, judge.confusion(own))
    record.clients(client_columns(federation, engine, judge))
    examples = {kind: first_images(federation, kind == "synthetic", EXAMPLES) for kind in ("real", "synthetic")}
    record.examples(federation.classes, examples)


def client_columns(federation: Federation, engine: Serial, judge: Judge) -> dict[str, Any]:
    """One row a client: sizes, classes, domains where there are any, and the last accuracy on the client's own mix of
    classes (of the global model, or of the client's own); NaN for a client without data."""
    real, rows = federation.counts(synthetic=False), federation.counts()
    assert judge.rates is not None
    rates = np.full(real.shape, np.nan)
    rates[slice(None) if judge.rates.ndim == 1 or engine.worker.method.pooled else list(engine.clients)] = judge.rates
    columns = {
        "client": np.arange(len(real)),
        "real": real.sum(1),
        "synthetic": (rows - real).sum(1),
        "classes": (real > 0).sum(1),
        "rows_by_class": list(rows),
        "real_by_class": list(real),
        "accuracy": accuracy_by_client(rates, real),
    }
    return columns | ({"real_by_domain": list(federation.domain_counts(synthetic=False))} if federation.domains else {})


def first_images(federation: Federation, synthetic: bool, per_class: int) -> dict[str, torch.Tensor]:
    """The first rows of each class, uint8 [n, 3, H, W], n <= per_class."""
    label, flag = federation.table["label"], federation.table["synthetic"]
    out = {}
    for k, name in enumerate(federation.classes):
        rows = torch.nonzero((label == k) & (flag == synthetic)).flatten()[:per_class]
        if len(rows):
            out[name] = federation.table["image"][rows]
    return out
