"""Which engine runs an experiment, and why."""

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from .config import Experiment
from .engines.pool import Pool, portable
from .engines.serial import Serial
from .engines.vectorised import Vectorised
from .errors import UserError
from .federate import begin
from .progress import clock

WORTH = 30.0  # seconds of training on one core from which processes pay, which take some to start


class Choice(NamedTuple):
    engine: Serial
    why: str  # in words for a person


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose(experiment: Experiment, plain: Serial, cohort: int) -> Choice:
    """The engine that the experiment names, or with engine=auto the one that fits machine and work; with the clients
    of `plain`."""
    gpus = torch.cuda.device_count() if plain.worker.net.device.type == "cuda" else 0
    workers = min(cohort, experiment.workers or max(1, gpus or cores() // experiment.threads))
    kind: str = experiment.engine
    why = "as asked"
    if kind == "auto":
        kind, why = fitting(experiment, plain, cohort, workers, gpus)
    guide = plain.worker.guide
    if kind == "pool" and gpus > 1 and guide is not None and guide.config.condition == "dynamic":
        raise UserError(
            "with guide.condition=dynamic every worker needs the diffusion model on its GPU, and engine=pool does not "
            "bring it there; say engine=serial or engine=vectorised"
        )
    parts = plain.worker, plain.federation, plain.memory
    if kind == "pool":
        devices = [f"cuda:{i}" for i in range(gpus)] or ["cpu"]
        pool = Pool(*parts, workers=workers, threads=experiment.threads, devices=devices)
        return Choice(pool, f"engine=pool with {workers} worker{'s' * (workers > 1)}: {why}")
    if kind == "vectorised":
        block = min(cohort, experiment.block or cohort)
        stacked = Vectorised(*parts, block=block, compile=experiment.compile)
        return Choice(stacked, f"engine=vectorised with blocks of {block}: {why}")
    return Choice(plain, f"engine=serial: {why}")


def fitting(experiment: Experiment, plain: Serial, cohort: int, workers: int, gpus: int) -> tuple[str, str]:
    """-> (name of an engine, why it)"""
    if cohort == 1:
        return "serial", "one client a round"
    if gpus == 1:
        return "vectorised", "many small clients fill one GPU together"
    if workers == 1:
        return "serial", "one core"
    if gpus:
        dynamic = plain.worker.guide is not None and plain.worker.guide.config.condition == "dynamic"
        return ("vectorised", "a prior that stays on one GPU") if dynamic else ("pool", f"{gpus} GPUs")
    sizes = [len(rows) for rows in plain.federation.clients if len(rows)]
    seconds = training_seconds(experiment, plain, sizes, cohort)
    if seconds < WORTH:
        return "serial", f"about {clock(seconds)} of training, too little for processes to pay"
    try:
        portable(plain.worker)
    except UserError as error:
        return "serial", str(error).partition(";")[0]
    return "pool", f"about {clock(seconds)} of training on one core"


def training_seconds(experiment: Experiment, engine: Serial, sizes: Sequence[int], cohort: int) -> float:
    """All local steps of clients with so many rows, one after another, by two timed ones; neither evaluations nor
    what a guide adds count."""
    worker = replace(engine.worker, guide=None)
    server = begin(worker.net, worker.method, experiment.seed, experiment.bn_stats)
    ctx = worker.open({"weights": server.weights, "shared": worker.method.broadcast(server)}, {})
    carry = worker.init(ctx, {})
    shard = engine.federation.shard(engine.clients[0])
    batch = shard.batch((torch.arange(worker.batch_size) % len(shard)).to(shard.rows.device))
    carry, _ = worker.step(carry, batch, ctx)
    began = time.perf_counter()
    for _ in range(2):
        carry, _ = worker.step(carry, batch, ctx)
    each = (time.perf_counter() - began) / 2
    return each * sum(map(worker.num_steps, sizes)) / len(sizes) * cohort * experiment.rounds
