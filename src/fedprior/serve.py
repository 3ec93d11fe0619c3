"""A run whose clients are behind nodes: the same run as on one machine, with another engine."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import __version__, assemble, run
from .config import Experiment
from .data import sources, table
from .data.partition import Partition, Sites
from .data.table import Federation
from .engines.remote import Nodes, Patience, Remote, Station
from .errors import UsageError, UserError
from .letters import Letter, Post
from .memory import ClientMemory
from .node import agreement, content
from .prepare import balance, synthesis
from .prepare.balance import Discrepancy, GlobalTarget
from .progress import Progress, clean
from .run import Outcome, Prepared


@dataclass(frozen=True, kw_only=True)
class Distant(Federation):
    """A federation whose clients' rows are elsewhere; here are the test set and what is known of class counts."""

    real: np.ndarray  # int64 [clients, classes], zeros where nothing is known
    every: np.ndarray  # with synthetic rows

    def counts(self, synthetic: bool | None = None) -> np.ndarray:
        if synthetic is None:
            return self.every
        return self.every - self.real if synthetic else self.real


def serve(experiment: Experiment, post: Post, patience: Patience, root: Path, progress: Progress) -> Outcome:
    """Runs the experiment over the nodes that `post` reaches, and writes its run directory as `run.run` does: with a
    name= that is there already it goes on. Raises UserError for what cannot be done over nodes, and where too few nodes
    come or answer."""
    refuse(experiment)

    def preparing(experiment: Experiment, device: torch.device, memory: ClientMemory, progress: Progress) -> Prepared:
        return prepare(experiment, device, post, patience, progress)

    return run.run(experiment, root, progress, preparing)


def refuse(experiment: Experiment) -> None:
    """Raises UsageError for settings that need all data, or the diffusion model, where the training is."""
    if not experiment.name:
        raise UsageError("a run over nodes needs a name=, under which it can go on after a crash")
    if experiment.method.pooled:
        raise UsageError("method=centralised has all data in one place, so no nodes; run it with `fedprior run`")
    guide, policy = experiment.guide, experiment.balance
    if guide is not None and guide.condition == "dynamic":
        raise UsageError(
            "guide.condition=dynamic asks the diffusion model in every round, and a node loads it in none; use "
            "guide.condition=static or frozen_encoder"
        )
    if guide is not None and not guide.labels:
        raise UsageError("guide.labels=false is judged by a probe on all clients' rows, which stay at their nodes")
    if not isinstance(experiment.partition, Sites):
        return
    if isinstance(policy, Discrepancy) or (isinstance(policy, GlobalTarget) and policy.target == "global"):
        raise UsageError("this balance needs the class counts of all clients, which sites keep; use balance=max")
    if experiment.validation:
        raise UsageError("with partition=sites the server judges on its test set; leave out validation=")


def prepare(
    experiment: Experiment, device: torch.device, post: Post, patience: Patience, progress: Progress
) -> Prepared:
    """Meets the nodes, which prepare their own rows."""
    at_sites = isinstance(experiment.partition, Sites)
    federation, parts = remaining(experiment) if at_sites else assemble.split(experiment)
    needed = experiment.guide or experiment.method.images
    prior = assemble.prior_for(experiment, federation, device) if needed else None
    guide = assemble.build_guide(experiment, federation, device, prior)
    net = assemble.build_net(experiment, federation, device, guide)
    worker = assemble.build_worker(experiment, net, federation)
    if at_sites and worker.kept:
        raise UsageError(
            "with partition=sites the server judges one global model, but here clients keep a part of it; use "
            "bn_stats=average and a method that shares the whole model"
        )
    if worker.kept and patience.over_select > 1:
        raise UsageError("--over-select leaves nodes busy, and here each judges its clients' own models; leave it out")
    held = federation.counts().sum(1)
    there = range(experiment.clients) if at_sites else np.flatnonzero(held).tolist()
    if experiment.cohort > len(there):
        raise UserError(f"cohort={experiment.cohort}, but only {len(there)} clients hold data; lower cohort")
    guests = Guests(None if at_sites else federation, progress)
    nodes = Nodes(
        post=post,
        clients=there,
        greeting=greeting(experiment, federation),
        greet=guests.greet,
        settle=guests.settle,
        patience=patience,
        say=progress.say,
    )
    nodes.assemble(len(there) if worker.kept else experiment.cohort)
    images = assemble.images_for_server(experiment, federation, device, progress, prior)
    told = shared(experiment, federation, nodes.stations.values()) if at_sites else planned(experiment, federation)
    cohort, enough = experiment.cohort, None
    if patience.over_select > 1:
        enough, cohort = cohort, min(len(there), round(cohort * patience.over_select))
    moved = told.to(device)
    engine = Remote(worker, moved, nodes, enough)
    synthetic = None if at_sites else int((told.every - told.real).sum())
    why = f"engine=remote with {sum(s.ready for s in nodes.stations.values())} nodes"
    progress.say(why)
    return Prepared(parts, told, images, synthetic, engine, cohort, why)


def greeting(experiment: Experiment, federation: Federation) -> dict[str, Any]:
    """What every node is told first."""
    return {
        "version": __version__,
        "agreement": agreement(experiment),
        "classes": list(federation.classes),
        "size": list(federation.test["image"].shape[2:]),
    }


class Guests:
    """Who may take part, by what nodes say of themselves. In a simulation all have the `federation`'s data and the same
    prior; sites have their own."""

    def __init__(self, federation: Federation | None, progress: Progress) -> None:
        self.data = {} if federation is None else {"partition": federation.split["digest"], "data": content(federation)}
        self.simulated, self.progress = federation is not None, progress
        self.prior: str | None = None  # of the first node that was ready

    def greet(self, letter: Letter) -> str:
        theirs = clean(letter.facts["versions"]["torch"])
        for key, mine in self.data.items():
            if letter.facts.get(key) != mine:
                return f"its data are not the server's (another {key}); give both the same files"
        if theirs.partition("+")[0] != torch.__version__.partition("+")[0]:
            return f"its torch is {theirs}, the server's {torch.__version__}; results could differ in their last bits"
        return ""

    def settle(self, letter: Letter) -> str:
        theirs = clean(letter.facts["prior"])
        self.prior = theirs if self.prior is None else self.prior
        if theirs == self.prior:
            return ""
        if self.simulated:
            return "its prior is another model than that of the nodes before it; give all the same files"
        self.progress.say("a site's prior is another model than that of the sites before it")
        return ""


def remaining(experiment: Experiment) -> tuple[Federation, Partition]:
    """A server's federation where clients have data of their own: no rows but the test set's."""
    d = experiment.data
    source = sources.load_test(d.name, path=d.path, image=d.image, label=d.label, size=d.size).without_domains()
    nothing = torch.zeros(0, dtype=torch.int64)
    parts = experiment.partition.of(experiment.clients, experiment.seed)
    federation = Federation(
        table=table.take(source.test, nothing),
        clients=(nothing,) * experiment.clients,
        test=source.test,
        classes=source.classes,
        split={"name": parts.name, "digest": parts.digest, "seed": experiment.seed},
    )
    return federation, parts


def planned(experiment: Experiment, federation: Federation) -> Distant:
    """A simulation's federation with the class counts that its nodes will have."""
    real = every = federation.counts(synthetic=False)
    if experiment.balance is not None:
        words = assemble.wording(experiment, federation)
        wanted = synthesis.needs(federation, words, experiment.balance, experiment.seed)
        federation, real = wanted.federation, wanted.plan.kept
        every = real + wanted.plan.by_class
    return distant(federation, real, every)


def shared(experiment: Experiment, federation: Federation, stations: Iterable[Station]) -> Distant:
    """What sites say of their class counts, and what balancing makes of these; zeros for those that say nothing."""
    real = federation.counts()
    for station in stations:
        for client, row in zip(station.clients, station.counts or (), strict=False):
            if len(row) == real.shape[1]:
                real[client] = row
    every = real
    if experiment.balance is not None:
        alone = [balance.plan(experiment.balance, real[[k]], federation.classes) for k in range(len(real))]
        real = np.concatenate([one.kept for one in alone])
        every = real + np.concatenate([one.by_class for one in alone])
    return distant(federation, real, every)


def distant(federation: Federation, real: np.ndarray, every: np.ndarray) -> Distant:
    parts = {name: getattr(federation, name) for name in Federation.__dataclass_fields__}
    return Distant(**parts, real=real, every=every)
