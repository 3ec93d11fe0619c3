"""What an experiment would cost, before it runs: images, megabytes, seconds."""

import time
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from . import assemble, tree
from .aggregate import Mean
from .config import Experiment
from .data.table import Federation, Shard
from .engines.serial import Serial
from .errors import UsageError, UserError
from .federate import begin
from .guide import Guide
from .method import Round
from .prepare.balance import BalanceToMax
from .prepare.balance import plan as plan_balance
from .priors import prompts
from .traffic import MB

CALIBRATION = 4  # images generated to time the prior
PNG_BYTES_PER_PIXEL = 2.5  # of small photographs, three channels


def plan(experiment: Experiment, calibrate: bool = True) -> dict[str, Any]:
    """Images by class and client, traffic and disk in MB (1e6 bytes), and about how many seconds.

    With `calibrate` the prior makes four images and one client takes two steps; else seconds are None. Where the
    prior cannot be had, only its seconds are, and `note` says why.
    """
    device = assemble.set_up(experiment)
    federation, _ = assemble.split(experiment)
    guide, note = None, ""
    try:
        guide = assemble.build_guide(experiment, federation, device)
    except UsageError:
        raise
    except UserError as error:  # a prior that is not there yet must not hide the rest
        note = str(error)
    net = assemble.build_net(experiment, federation, device, guide)
    engine, cohort = assemble.build_engine(experiment, net, federation.to(device))
    out: dict[str, Any] = {"images": 0, "rows": 0, "per_class": dict.fromkeys(federation.classes, 0)}
    clients: list[dict[str, Any]] = []
    real = federation.counts(synthetic=False)
    synthetic = real * 0
    if experiment.balance is not None:
        needed = plan_balance(experiment.balance, real)
        synthetic = needed.allocation
        out |= {"images": int(needed.images), "rows": int(needed.rows)}
        out["per_class"] = dict(zip(federation.classes, synthetic.sum(0).tolist(), strict=True))
    server_images = experiment.method.images * len(federation.classes)
    shared = experiment.balance is not None and experiment.balance.pool == "shared"
    pools = needed.pool_sizes if shared else 0  # the server takes the first images of shared pools
    out["images"] += int(np.maximum(experiment.method.images - pools * np.ones(len(federation.classes), int), 0).sum())
    for k in range(len(real)):
        clients.append({"client": k, "real": int(real[k].sum()), "synthetic": int(synthetic[k].sum())})
    traffic = traffic_MB(experiment, engine, cohort)
    height, width = federation.test["image"].shape[2:]
    out |= {
        "clients": clients,
        "MB": traffic,
        "server_images": server_images,
        "state_MB": state_MB(experiment, engine, guide, int((real + synthetic).sum())),
        "disk_MB": out["images"] * height * width * PNG_BYTES_PER_PIXEL / MB,
    }
    described = descriptors(experiment, guide, federation, int(synthetic.sum()), out["images"], cohort)
    out |= {"descriptors": described._asdict()}
    seconds: dict[str, float | None] = dict.fromkeys(SECONDS)
    if calibrate:
        training = round(training_seconds(experiment, engine, cohort, real + synthetic), 1)
        seconds["training_seconds"] = training
        try:
            each = seconds_per_image(experiment, federation, device) if out["images"] else 0.0
        except UserError as error:
            note = str(error)
        if note:
            return out | seconds | {"note": note}
        generation = round(each * out["images"], 1)
        describing = round(described.passes * seconds_per_pass(guide, federation), 1) if guide else 0.0
        seconds |= {"generation_seconds": generation, "description_seconds": describing}
        seconds["seconds"] = round(generation + describing + training, 1)
    return out | seconds | ({"note": note} if note else {})


SECONDS = ("generation_seconds", "description_seconds", "training_seconds", "seconds")


class Descriptors(NamedTuple):
    """What guidance asks of the prior."""

    images: int  # to describe before round 1
    stored: int  # described already
    prompts: int  # of each image
    passes: int  # of the UNet, in all; with dynamic conditions about as many, over all rounds
    disk_MB: float | None  # of new descriptors; None where the prior, and so their width, is not known


def descriptors(
    experiment: Experiment, guide: Guide | None, federation: Federation, rows: int, new: int, cohort: int
) -> Descriptors:
    """For the real rows, and `rows` synthetic ones of `new` images that are still to be made."""
    if experiment.guide is None:
        return Descriptors(0, 0, 0, 0, 0.0)
    asks = guide or Guide(config=experiment.guide, prior=cast(Any, None), classes=federation.classes)
    federation = assemble.gathered(experiment, federation)
    shards = [federation.shard(k) for k, own in enumerate(federation.clients) if len(own)]
    prompts = len(asks.prompts_of(bytes(8), 0))
    draws = experiment.guide.draws
    if experiment.guide.condition == "dynamic":
        held = sum(map(len, shards)) + (new if experiment.method.pooled else rows)
        chance, wait = cohort / len(shards), experiment.guide.refresh_rounds
        times = experiment.rounds * chance / (1 + (wait - 1) * chance)  # a client describes anew when it is next drawn
        return Descriptors(0, 0, prompts, round(times * held * prompts * draws), 0.0)
    if not prompts:
        return Descriptors(0, 0, 0, 0, 0.0)
    items = asks.describer.items(shards)
    wanted = len({item.key for own in items for item in own})
    lacking = len(guide.describer.missing(items)) if guide else wanted
    images = lacking + new
    disk = images * prompts * guide.width * 2 / MB if guide else None  # float16
    return Descriptors(images, wanted - lacking, prompts, images * prompts * draws, disk)


def seconds_per_pass(guide: Guide, federation: Federation) -> float:
    """By describing a few images, without axes."""
    rows = torch.arange(CALIBRATION) % len(federation.table["label"])
    items = guide.describer.items([Shard(federation.table, rows)])[0]
    passes = sum(len(item.prompts) for item in items) * guide.config.draws
    if not passes:
        return 0.0
    image = federation.table["image"][rows]
    guide.describer.maps(image[:1], items[:1])  # the first call is slower
    began = time.perf_counter()
    guide.describer.maps(image, items)
    return (time.perf_counter() - began) / passes


def traffic_MB(experiment: Experiment, engine: Serial, cohort: int) -> float:
    """Both directions over all rounds. What a method sends may grow once it has heard of clients, so the first round is
    counted apart."""
    worker = engine.worker
    if worker.method.pooled:
        return 0.0
    server = begin(worker.net, worker.method, experiment.seed, experiment.bn_stats)
    down = {"weights": server.weights, "shared": worker.method.broadcast(server)}
    up = engine.expected(down)
    mean = worker.method.reduce(((up, 1.0) for _ in range(cohort)), Mean())
    later = worker.method.update(server, mean["method"], Round(0, cohort / engine.total))
    sent = [tree.num_bytes(server.weights | worker.method.broadcast(s)) for s in (server, later)]
    received = tree.num_bytes(up)
    return cohort * (sent[0] + received + (experiment.rounds - 1) * (sent[1] + received)) / MB


def state_MB(experiment: Experiment, engine: Serial, guide: Guide | None = None, rows: int = 0) -> float:
    """What the clients remember between rounds, once all have taken part. On disk it takes up to twice that."""
    worker = engine.worker
    server = begin(worker.net, worker.method, experiment.seed, experiment.bn_stats)
    down = {"weights": server.weights, "shared": worker.method.broadcast(server)}
    memory = worker.sample(down, engine.federation.shard(engine.clients[0]))[1]
    own = 0
    if guide and guide.config.condition == "dynamic" and guide.config.refresh_rounds > 1:
        own = rows * len(guide.prompts_of(bytes(8), 0)) * guide.width * 2  # float16 columns of all rows
    return (len(engine.clients) * tree.num_bytes(memory) + own) / MB


def seconds_per_image(experiment: Experiment, federation: Federation, device: torch.device) -> float:
    assert experiment.prior is not None
    prior = assemble.load_prior(experiment.prior, device)
    template = prompts.templates((experiment.balance or BalanceToMax()).templates)[0]
    words = [prompts.prompt(name, template) for name in federation.classes]
    batch = [words[i % len(words)] for i in range(CALIBRATION)]
    size = tuple(federation.test["image"].shape[2:])
    prior.generate(batch[:1], [0], (size[0], size[1]))  # the first call is slower
    began = time.perf_counter()
    prior.generate(batch, list(range(CALIBRATION)), (size[0], size[1]))
    return (time.perf_counter() - began) / CALIBRATION


def training_seconds(experiment: Experiment, engine: Serial, cohort: int, rows: Any) -> float:
    """All local steps, by two timed ones; evaluations are left out."""
    worker = engine.worker
    server = begin(worker.net, worker.method, experiment.seed, experiment.bn_stats)
    ctx = worker.open({"weights": server.weights, "shared": worker.method.broadcast(server)}, {})
    carry = worker.init(ctx, {})
    shard = engine.federation.shard(engine.clients[0])
    which = torch.arange(experiment.batch_size) % len(shard)
    carry, _ = worker.step(carry, shard.batch(which), ctx)
    began = time.perf_counter()
    for _ in range(2):
        carry, _ = worker.step(carry, shard.batch(which), ctx)
    step = (time.perf_counter() - began) / 2
    sizes = rows.sum(1) if not worker.method.pooled else rows.sum().reshape(1)
    steps = sum(worker.num_steps(int(n)) for n in sizes if n) / max(1, int((sizes > 0).sum()))
    return step * steps * cohort * experiment.rounds
