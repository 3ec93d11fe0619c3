"""What an experiment would cost, before it runs: images, megabytes, seconds."""

import time
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from . import assemble, choice, tree
from .aggregate import Mean
from .config import Experiment
from .data.table import Federation, Shard
from .engines.serial import Serial
from .errors import UsageError, UserError
from .federate import begin
from .guide import Guide
from .method import Round
from .prepare.balance import Counts
from .prepare.images import megabytes
from .prepare.synthesis import needs, opened
from .priors.base import Prior
from .priors.diffusion import DiffusionPrior
from .priors.encodings import LOT
from .progress import Silent
from .traffic import MB

CALIBRATION = 4  # images generated to time the prior


def plan(experiment: Experiment, calibrate: bool = True) -> dict[str, Any]:
    """Images by class and client, traffic and disk in MB (1e6 bytes), and about how many seconds.

    With `calibrate` the prior makes four images, the images that are there are counted, and one client takes two steps;
    else seconds and what is `stored` are None. Where the prior cannot be had, only its seconds and that are, and `note`
    says why.
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
    asked = allotted(experiment, federation)
    out: dict[str, Any] = asked.shown()
    real, synthetic = asked.real, asked.synthetic
    traffic = traffic_MB(experiment, engine, cohort)
    out |= {
        "MB": traffic,
        "state_MB": state_MB(experiment, engine, guide, int((real + synthetic).sum())),
    }
    described = descriptors(experiment, guide, federation, int(synthetic.sum()), out["images"], cohort)
    out |= {"descriptors": described._asdict(), "stored": None} | dict.fromkeys(SECONDS)
    if calibrate:
        sizes = [int(n) for n in (real + synthetic).sum(1) if n]
        sizes = [sum(sizes)] if engine.worker.method.pooled else sizes
        out["training_seconds"] = round(choice.training_seconds(experiment, engine, sizes, cohort), 1)
        out |= making(experiment, federation, asked.images, device)
        note = out.get("note", note)
        if not note:
            passes = described.passes
            out["description_seconds"] = round(passes * seconds_per_pass(guide, federation), 1) if guide else 0.0
            out["seconds"] = round(sum(out[name] for name in SECONDS[:3]), 1)
    return out | ({"note": note} if note else {})


SECONDS = ("generation_seconds", "description_seconds", "training_seconds", "seconds")


class Allotted(NamedTuple):
    """The images that an experiment asks for."""

    classes: tuple[str, ...]
    real: Counts  # rows that train, int64 [clients, classes]
    synthetic: Counts  # likewise
    images: int  # distinct ones, the server's included
    server_images: int
    dropped: int  # real rows that the rule leaves out
    disk_MB: float

    def shown(self) -> dict[str, Any]:
        clients = [
            {
                "client": k,
                "real": int(self.real[k].sum()),
                "synthetic": int(self.synthetic[k].sum()),
                "by_class": dict(zip(self.classes, self.synthetic[k].tolist(), strict=True)),
            }
            for k in range(len(self.real))
        ]
        return {
            "images": self.images,
            "rows": int(self.synthetic.sum()),
            "per_class": dict(zip(self.classes, self.synthetic.sum(0).tolist(), strict=True)),
            "clients": clients,
            "server_images": self.server_images,
            "dropped": self.dropped,
            "disk_MB": self.disk_MB,
        }


def allotted(experiment: Experiment, federation: Federation) -> Allotted:
    """By class and client, before anything is made."""
    before = real = federation.counts(synthetic=False)
    synthetic, images, pools = real * 0, 0, np.zeros(len(federation.classes), np.int64)
    if experiment.balance is not None:
        words = assemble.wording(experiment, federation)
        kept, needed, *_ = needs(federation, words, experiment.balance, experiment.seed)
        real, synthetic, images = kept.counts(synthetic=False), needed.by_class, needed.images
        if experiment.balance.pool == "shared" and not needed.domains:
            pools = needed.pool_sizes  # the server takes the first images of shared pools
    each = experiment.method.images
    images += int(np.maximum(each - pools, 0).sum())
    height, width = federation.test["image"].shape[2:]
    return Allotted(
        classes=federation.classes,
        real=real,
        synthetic=synthetic,
        images=images,
        server_images=each * len(federation.classes),
        dropped=int((before - real).sum()),
        disk_MB=megabytes(images, (height, width)),
    )


def generation(experiment: Experiment, federation: Federation, device: torch.device) -> dict[str, Any]:
    """`plan` for images alone."""
    asked = allotted(experiment, federation)
    return asked.shown() | making(experiment, federation, asked.images, device)


def making(experiment: Experiment, federation: Federation, images: int, device: torch.device) -> dict[str, Any]:
    """How many of the `images` are there already, and about how long the others take. Where the prior cannot be had,
    both are None, and `note` says why."""
    if not images:
        return {"stored": 0, "generation_seconds": 0.0}
    try:
        prior = assemble.prior_for(experiment, federation, device)
        stored = stored_images(experiment, federation, prior)
        each = seconds_per_image(experiment, federation, prior) if images > stored else 0.0
    except UsageError:
        raise
    except UserError as error:  # a prior that is not there yet must not hide the rest
        return {"stored": None, "generation_seconds": None, "note": str(error)}
    return {"stored": stored, "generation_seconds": round(each * (images - stored), 1)}


def stored_images(experiment: Experiment, federation: Federation, prior: Prior) -> int:
    """Images that are there, of those that clients and the server need."""
    folder = assemble.image_folder(experiment, federation, prior)
    streams = assemble.image_streams(experiment, federation, folder.wording)
    own = assemble.client_folders(experiment, federation, folder, Silent())
    stored = 0
    for entered, group in opened(folder, streams, own):
        with entered as one:
            for stream in group:
                stored += stream.need - sum(piece.size for piece in one.missing([stream], None))
                stream.blocks.clear()  # a plan holds no pool in memory
    return stored


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


def seconds_per_image(experiment: Experiment, federation: Federation, prior: DiffusionPrior) -> float:
    """By making a few: a whole lot where the prior makes no fewer at a time."""
    words = assemble.wording(experiment, federation).prompts()
    count = LOT if prior.exact else CALIBRATION
    batch = [words[i % len(words)] for i in range(count)]
    size = tuple(federation.test["image"].shape[2:])
    prior.generate(batch[:1], [0], (size[0], size[1]))  # the first call is slower
    began = time.perf_counter()
    prior.generate(batch, list(range(count)), (size[0], size[1]))
    return (time.perf_counter() - began) / count
