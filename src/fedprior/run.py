"""From an experiment to a run directory."""

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from . import __version__, assemble
from .config import CHOICES, Experiment
from .data.table import Federation
from .engines.serial import Serial
from .evaluate import Evaluation, accuracy_by_client, client_accuracies, evaluate
from .federate import RoundResult, begin, federate
from .method import Server
from .progress import Progress, Silent
from .record import Record, free_folder, weight_digest
from .report import html, load, summary
from .traffic import MB, Traffic

EXAMPLES = 8  # images of each class kept for the report


class Outcome(NamedTuple):
    result: dict[str, Any]  # what `fedprior run --json` prints
    curve: list[dict[str, Any]]  # the lines of metrics.jsonl


def default_name(experiment: Experiment) -> str:
    """E.g. "digits-fedavg+max"."""
    parts = [experiment.data.name.replace("/", "-"), CHOICES["method"].name_of(experiment.method)]
    extra = f"+{CHOICES['balance'].name_of(experiment.balance)}" if experiment.balance else ""
    return "-".join(parts) + extra


def run(experiment: Experiment, root: Path = Path("runs"), progress: Progress | None = None) -> Outcome:
    """Train, evaluate, record. Everything that can be wrong with data, prior or net is found before the run
    directory is made; a run that fails later says so in its manifest."""
    progress = progress or Silent()
    device = assemble.set_up(experiment)
    progress.say(f"fedprior {__version__} on {device} (threads={experiment.threads}), torch {torch.__version__}")
    began = time.monotonic()
    real, parts = assemble.split(experiment)
    net = assemble.build_net(experiment, real, device)
    federation, synthesis = real, None
    if experiment.balance is not None:
        federation, synthesis = assemble.balance(experiment, real, device, progress)
        progress.say(
            f"{synthesis.rows} synthetic rows at {len(real.clients)} clients from {synthesis.generated} new and "
            f"{synthesis.reused} stored images"
        )
    engine, cohort = assemble.build_engine(experiment, net, federation.to(device))
    folder = Path(root) / experiment.name if experiment.name else free_folder(Path(root), default_name(experiment))
    record = Record(folder, experiment)
    try:
        parts.save(folder / "partition.json")
        server, curve, traffic, prepared = train(experiment, engine, cohort, federation, record, progress, began)
        finish(experiment, engine, federation, server, curve, record)
        result = {
            **{k: summary.headline(curve)[k] for k in ("last", "mean_last10", "best", "rounds")},
            "uplink_MB": sum(traffic.up.values()) / MB,
            "downlink_MB": sum(traffic.down.values()) / MB,
            "seconds": round(time.monotonic() - began, 3),
            "preparation_seconds": round(prepared, 3),
            "target": experiment.target,
            "to_target": summary.to_target(curve, experiment.target) if experiment.target is not None else None,
            "synthetic_rows": synthesis.rows if synthesis else 0,
            "weights": weight_digest(server.weights),
            "directory": str(folder),
        }
        record.result(result)
    except BaseException as error:
        record.status("interrupted" if isinstance(error, KeyboardInterrupt) else "failed", error=repr(error))
        raise
    record.status("done")
    return Outcome(result, curve)


def train(
    experiment: Experiment,
    engine: Serial,
    cohort: int,
    federation: Federation,
    record: Record,
    progress: Progress,
    began: float,
) -> tuple[Server, list[dict[str, Any]], Traffic, float]:
    """All rounds -> (server, curve, traffic, seconds spent before round 1)."""
    worker, traffic = engine.worker, Traffic()
    prepared = time.monotonic() - began
    server = begin(worker.net, worker.method, experiment.seed, experiment.bn_stats)
    judge = Judge(engine, federation)
    rounds = federate(
        server,
        worker.method,
        engine,
        cohort=cohort,
        seed=experiment.seed,
        traffic=traffic,
        max_update_norm=experiment.max_update_norm,
    )
    curve: list[dict[str, Any]] = []
    with progress.task("rounds", experiment.rounds) as update:
        for done, outcome in zip(range(1, experiment.rounds + 1), rounds, strict=False):
            trained = time.monotonic()
            judge.note(outcome)
            due = done % experiment.evaluate_every == 0 or done == experiment.rounds
            scores = judge.scores(outcome.server) if due else dict.fromkeys(judge.KEYS)
            line = metrics_line(outcome, scores, traffic)
            now = time.monotonic()
            record.round(line, {"round": done, "seconds": now - began, "evaluation_seconds": now - trained})
            curve.append(line)
            shown = f"accuracy {line['accuracy']:.3f}" if line["accuracy"] is not None else ""
            update(done, shown)
            server = outcome.server
    return server, curve, traffic, prepared


def metrics_line(outcome: RoundResult, scores: dict[str, Any], traffic: Traffic) -> dict[str, Any]:
    """What metrics.jsonl says of a round; bytes are totals since round 1."""
    return {
        "round": outcome.number + 1,
        **scores,
        "train_loss": outcome.train_loss,
        "cohort": outcome.cohort,
        "accepted": len(outcome.accepted),
        "refused": [refusal._asdict() for refusal in outcome.refused],
        "skipped": not outcome.accepted,
        "uplink_bytes": sum(traffic.up.values()),
        "downlink_bytes": sum(traffic.down.values()),
        "uplink_groups": dict(traffic.up),
        "downlink_groups": dict(traffic.down),
    }


class Judge:
    """Evaluates the global model; or, where each client has its own weights or statistics, those.

    With own weights, the score is the mean over all clients that have trained; with own batch-norm
    statistics, over the clients that trained since the last evaluation (the others' are stale).
    """

    KEYS = ("accuracy", "loss", "clients", "per_class")

    def __init__(self, engine: Serial, federation: Federation) -> None:
        self.engine, self.classes = engine, len(federation.classes)
        self.test = engine.federation.test
        self.counts = federation.counts(synthetic=False)
        self.keeps = engine.worker.method.scope == "personal"
        self.personal = self.keeps or engine.worker.bn_stats == "local"
        self.changed: set[int] = set()
        self.own: dict[int, Evaluation] = {}

    def note(self, outcome: RoundResult) -> None:
        self.changed |= set(outcome.accepted)

    def scores(self, server: Server) -> dict[str, Any]:
        if not self.personal:
            seen = evaluate(self.engine.worker.net, server.weights, self.test, self.classes)
            return self.summarise([seen], seen.per_class, self.counts)
        self.own = self.own if self.keeps else {}
        for client in sorted(self.changed):
            weights = self.engine.start(client, {"weights": server.weights, "shared": {}})
            self.own[client] = evaluate(self.engine.worker.net, weights, self.test, self.classes)
        self.changed = set()
        if not self.own:
            return dict.fromkeys(self.KEYS)
        ids = sorted(self.own)
        rates = np.stack([self.own[k].per_class for k in ids])
        counts = self.counts[ids] if len(self.engine.federation.clients) == len(self.counts) else self.counts
        return self.summarise([self.own[k] for k in ids], rates, counts)

    def summarise(self, seen: list[Evaluation], rates: np.ndarray, counts: np.ndarray) -> dict[str, Any]:
        mean_rates = rates if rates.ndim == 1 else rates.mean(0)
        return {
            "accuracy": float(np.mean([e.accuracy for e in seen])),
            "loss": loss if np.isfinite(loss := float(np.mean([e.loss for e in seen]))) else None,
            "clients": client_accuracies(rates, counts),
            "per_class": [None if np.isnan(x) else float(x) for x in mean_rates],
        }


def finish(
    experiment: Experiment,
    engine: Serial,
    federation: Federation,
    server: Server,
    curve: list[dict[str, Any]],
    record: Record,
) -> None:
    """Model, clients' table, example images and report."""
    real, rows = federation.counts(synthetic=False), federation.counts()
    one_model = engine.worker.method.scope != "personal" and engine.worker.bn_stats == "average"
    if one_model:
        about = {"net": experiment.net, "classes": json.dumps(federation.classes)}
        record.weights(server.weights, about)
    record.clients(client_columns(real, rows, curve[-1]["per_class"] if one_model else None))
    examples = {kind: first_images(federation, kind == "synthetic", EXAMPLES) for kind in ("real", "synthetic")}
    record.examples(federation.classes, examples)
    html.write(load.report_data([record.folder]), record.folder / "report.html")


def client_columns(real: np.ndarray, rows: np.ndarray, per_class: list[float | None] | None) -> dict[str, Any]:
    """One row a client: sizes, classes, and, where all share one model, its last accuracy on the client's mix."""
    columns: dict[str, Any] = {
        "client": np.arange(len(real)),
        "real": real.sum(1),
        "synthetic": (rows - real).sum(1),
        "classes": (real > 0).sum(1),
        "rows_by_class": list(rows),
        "real_by_class": list(real),
    }
    if per_class is not None:
        rates = np.array(per_class, dtype=np.float64)  # None becomes NaN
        columns["accuracy"] = accuracy_by_client(rates, real)
    return columns


def first_images(federation: Federation, synthetic: bool, per_class: int) -> dict[str, torch.Tensor]:
    """The first rows of each class, uint8 [n, 3, H, W], n <= per_class."""
    label, flag = federation.table["label"], federation.table["synthetic"]
    out = {}
    for k, name in enumerate(federation.classes):
        rows = torch.nonzero((label == k) & (flag == synthetic)).flatten()[:per_class]
        if len(rows):
            out[name] = federation.table["image"][rows]
    return out
