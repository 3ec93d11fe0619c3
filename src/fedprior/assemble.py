"""From an experiment to the things it names: data, prior, net, worker. Nothing here trains."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from . import environment, nets
from .config import Experiment, PriorChoice
from .data import augment, halves, origins, partition, sources
from .data.table import Federation, Shard, Table, take
from .data.validation import hold_out
from .engines.serial import Serial
from .errors import UsageError, UserError
from .guide import Guide
from .local import Worker, num_steps
from .memory import ClientMemory
from .net import Net
from .prepare import synthesis
from .prepare.align import align
from .prepare.balance import Balance, BalanceToMax
from .prepare.filters import ClipScore, Confidence, Filter
from .prepare.images import NO_DOMAIN, ImageFolder, Part, Rate, Stream, Wording
from .prepare.synthesis import Report
from .priors import features
from .priors.adapt import adapt
from .priors.adapt import check as check_adapt
from .priors.base import Prior
from .priors.check import judge_of
from .priors.diffusion import DiffusionPrior
from .priors.encoder import ImageEncoder
from .progress import Progress


class Split(NamedTuple):
    federation: Federation  # real rows only
    partition: partition.Partition


def split(experiment: Experiment) -> Split:
    """The data, decoded and given to clients."""
    d = experiment.data
    source = sources.load(d.name, path=d.path, image=d.image, label=d.label, size=d.size, half=d.half)
    labels = source.train["label"].numpy()
    if experiment.clients > len(labels):
        raise UserError(
            f"clients={experiment.clients} is more than the {len(labels)} training images; use fewer clients"
        )
    if not experiment.partition.needs_domains:  # a column of that name must not change what is measured
        source = source.without_domains()
    elif source.domains and "domain" not in source.test:
        raise UserError(f"the test split of {d.name} has no column 'domain', so no domain could be judged; add it")
    domains = source.train["domain"].numpy() if "domain" in source.train else None
    parts = partition.split(experiment.partition, labels, experiment.clients, experiment.seed, domains, source.domains)
    federation = Federation(
        table=source.train,
        clients=tuple(torch.from_numpy(np.asarray(rows)) for rows in parts.clients),
        test=source.test,
        classes=source.classes,
        domains=source.domains,
        split={"name": parts.name, "digest": parts.digest, "seed": experiment.seed},
    )
    if experiment.validation:
        federation = hold_out(federation, experiment.validation, experiment.seed)
        if not len(federation.test["label"]):
            raise UserError(
                f"validation={experiment.validation} holds no row out at clients as small as these; raise it"
            )
    return Split(federation, parts)


def load_prior(choice: PriorChoice, device: torch.device) -> DiffusionPrior:
    from .priors import embedded

    return embedded.load(choice.name, **prior_options(choice), device=device)


def prior_options(choice: PriorChoice) -> dict[str, Any]:
    """What differs from the defaults, the name left out."""
    chosen = {f.name: getattr(choice, f.name) for f in fields(choice) if f.name != "name"}
    return {name: value for name, value in chosen.items() if value != getattr(PriorChoice, name)}


def prior_for(experiment: Experiment, federation: Federation, device: torch.device) -> DiffusionPrior:
    """The experiment's prior, which must know the federation's classes and must not have seen its rows."""
    assert experiment.prior is not None
    prior = load_prior(experiment.prior, device)
    refuse_strange(prior, federation.classes)
    known = prior.defaults.get("trained_on")
    if known in (None, origins.EMBEDDED) or experiment.data.half == "private":  # the digits have no public rows
        return prior
    image = federation.table["image"][~federation.table["synthetic"]]
    alike = "classes" in prior.defaults and (experiment.data.size or tuple(image.shape[2:]) == (prior.size, prior.size))
    copy = alike and bool(halves.mask(image, "public").any())  # whatever it is called
    if copy or known == origins.alias(experiment.data.name):
        raise UsageError(
            f"prior={prior.name} was trained on the public half of {known}; add data.half=private, or its images would "
            "come from the clients' own rows"
        )
    return prior


def refuse_strange(prior: DiffusionPrior, classes: Sequence[str]) -> None:
    """Raises UsageError for a class that is none of those that the prior says it knows."""
    strange = [c for c in classes if c not in prior.defaults.get("classes", classes)]
    if strange:
        raise UsageError(f"prior={prior.name} does not know '{strange[0]}'; name a prior for these classes with prior=")


def build_guide(
    experiment: Experiment, federation: Federation, device: torch.device, prior: DiffusionPrior | None = None
) -> Guide | None:
    """The experiment's guide, which has described nothing yet; None without one."""
    config = experiment.guide
    if config is None:
        return None
    prior = prior or prior_for(experiment, federation, device)
    features.check(prior.pipeline, prior.name, config.timestep, tuple(config.wanted))
    encoder = ImageEncoder.from_pretrained(config.encoder, device) if config.encoder else None
    return Guide(config=config, prior=prior, classes=federation.classes, encoder=encoder)


def images_for_server(
    experiment: Experiment,
    federation: Federation,
    device: torch.device,
    progress: Progress,
    prior: DiffusionPrior | None = None,
) -> Table | None:
    """The prior's images that the method wants on the server; None where it wants none."""
    per_class = experiment.method.images
    if not per_class:
        return None
    folder = image_folder(experiment, federation, prior or prior_for(experiment, federation, device))
    with images_task(
        progress, f"server's images from {folder.prior.name}", per_class * len(federation.classes)
    ) as told:
        images = synthesis.server_images(folder, per_class, told)
    return {name: column.to(device) for name, column in images.items()}


@contextmanager
def images_task(progress: Progress, name: str, total: int) -> Iterator[Callable[[int, int], None]]:
    """A task told by (done, total) pairs, with images a second beside it."""
    rate = Rate()
    with progress.task(name, total) as update:
        yield lambda done, total: update(done, rate.note(done))


def wording(experiment: Experiment, federation: Federation) -> Wording:
    """How prompts name the federation's classes. Raises UsageError for prompts that name a domain where the server
    wants images too, since these are of none."""
    policy = experiment.balance or BalanceToMax()
    words = synthesis.wording(policy, federation.classes, federation.domains, origins.alias(experiment.data.name))
    if experiment.method.images and words.domains:
        raise UsageError(
            f"balance.templates={policy.templates} names domains, and the images that the method wants on the server "
            "are of none; use templates without {domain}"
        )
    return words


def image_folder(experiment: Experiment, federation: Federation, prior: Prior) -> ImageFolder:
    """Where the experiment's synthetic images lie."""
    policy = experiment.balance or BalanceToMax()
    height, width = federation.table["image"].shape[2:]
    return ImageFolder(
        prior=prior,
        wording=wording(experiment, federation),
        size=(height, width),
        seed=experiment.seed,
        attempts=policy.attempts,
        filters=filters_of(policy),
        distinct=policy.distinct,
    )


def filters_of(policy: Balance) -> tuple[Filter, ...]:
    """Those that do not depend on the client."""
    return (ClipScore.from_pretrained(policy.clip, threshold=policy.clip_threshold),) if policy.clip else ()


def client_folders(
    experiment: Experiment, federation: Federation, folder: ImageFolder, progress: Progress
) -> synthesis.Own | None:
    """Folders of clients that fine-tune the prior on their own real rows, or judge images by a classifier of their own;
    None where all share one."""
    config, confidence = experiment.adapt, experiment.balance.confidence if experiment.balance else 0.0
    if config is None and not confidence:
        return None
    if config is not None:
        check_adapt(folder.prior)

    @contextmanager
    def own(client: int) -> Iterator[ImageFolder]:
        shard = federation.shard(client)
        mine = folder
        if confidence:
            judge = Confidence(
                rows=take(federation.table, shard.rows),
                classes=len(federation.classes),
                threshold=confidence,
                judge=judge_of(federation.classes),
                seed=experiment.seed,
            )
            mine = replace(mine, filters=(*mine.filters, judge))
        if config is None:
            yield mine
            return
        words = [mine.wording.prompt(y, mine.wording.templates[0], d) for y, d in zip(*named(shard), strict=True)]
        with adapt(mine.prior, shard["image"], words, config, seed=experiment.seed, log=progress.say) as adapted:
            yield replace(mine, prior=adapted)

    def named(shard: Shard) -> tuple[list[int], list[int]]:
        label = shard["label"]
        known = folder.wording.domains and "domain" in shard.table
        return label.tolist(), (shard["domain"] if known else torch.full_like(label, NO_DOMAIN)).tolist()

    return own


def balance(
    experiment: Experiment,
    federation: Federation,
    device: torch.device,
    progress: Progress,
    prior: DiffusionPrior | None = None,
    clients: Sequence[int] | None = None,
) -> tuple[Federation, Report]:
    """The federation with the synthetic rows that the experiment's balance asks for, real rows aligned as it says.
    With `clients`, only those get rows, and the others have none: the same rows as if all were there."""
    assert experiment.balance is not None
    prior = prior or prior_for(experiment, federation, device)
    policy = experiment.balance
    folder = image_folder(experiment, federation, prior)
    wanted = synthesis.needs(federation, folder.wording, policy, experiment.seed)
    if clients is not None:
        wanted = wanted.of(clients)
    words = folder.wording.prompts()
    if cut := prior.truncated(words):
        progress.say(
            f"{len(cut)} of {len(words)} prompts are longer than {prior.name} reads, such as '{cut[0]}', and are cut; "
            "balance.templates=single is the shortest"
        )
    with images_task(progress, f"images from {prior.name}", wanted.images) as told:
        own = client_folders(experiment, federation, folder, progress)
        balanced, report = synthesis.deal(wanted, folder, own=own, progress=told)
    if policy.align != "none":
        real = int((~balanced.table["synthetic"]).sum())
        with images_task(progress, f"real rows aligned by {prior.name}", real) as told:
            balanced = align(
                balanced, prior, policy.align, policy.strength, folder.wording, seed=experiment.seed, progress=told
            )
    return balanced, report


def image_streams(experiment: Experiment, federation: Federation, words: Wording) -> list[Stream]:
    """The images that clients and the server need, before anything is made."""
    streams: list[Stream] = []
    if experiment.balance is not None:
        streams = synthesis.needs(federation, words, experiment.balance, experiment.seed).streams
    each = experiment.method.images
    return synthesis.with_server(streams, len(federation.classes), each) if each else streams


def fill_part(
    experiment: Experiment, federation: Federation, folder: ImageFolder, part: Part, progress: Progress
) -> synthesis.Filled:
    """Makes a part's share of the images that clients (and the server) need."""
    streams = image_streams(experiment, federation, folder.wording)
    name = f"part {part.number} of {part.of} of the images from {folder.prior.name}"
    own = client_folders(experiment, federation, folder, progress)
    with images_task(progress, name, folder.wanted(streams, part)) as told:
        return synthesis.fill(folder, streams, told, own, part)


def build_net(experiment: Experiment, federation: Federation, device: torch.device, guide: Guide | None = None) -> Net:
    height, width = federation.test["image"].shape[2:]
    module = nets.build(experiment.net, len(federation.classes), size=(height, width), seed=experiment.seed)
    module = experiment.method.adapt(module, experiment.seed)
    if guide is not None:
        module = guide.adapt(module, experiment.seed)
    mean, std = augment.statistics(origins.alias(experiment.data.name), federation.domains)
    return Net(module.to(device), mean, std, experiment.precision)


def pool(federation: Federation) -> Federation:
    """All clients' rows at one client; a synthetic image that several drew counts once."""
    return replace(federation, clients=(torch.cat(federation.clients).unique(),))


def gathered(experiment: Experiment, federation: Federation) -> Federation:
    """The clients that train: one that holds everything, where all data lie in one place."""
    return pool(federation) if experiment.method.pooled else federation


def cohort_steps(experiment: Experiment, federation: Federation) -> int:
    """The local steps that a cohort takes together, on average over clients with data."""
    own = [
        num_steps(len(rows), experiment.batch_size, experiment.steps, experiment.epochs)
        for rows in federation.clients
        if len(rows)
    ]
    return max(1, round(experiment.cohort * sum(own) / max(1, len(own))))


def build_engine(
    experiment: Experiment,
    net: Net,
    federation: Federation,
    memory: ClientMemory | None = None,
    guide: Guide | None = None,
) -> tuple[Serial, int]:
    """-> (engine, cohort size). Where all data lie in one place, one worker takes the whole cohort's steps."""
    worker = build_worker(experiment, net, federation, guide)
    cohort = 1 if experiment.method.pooled else experiment.cohort
    engine = Serial(worker, gathered(experiment, federation), memory)
    if not engine.clients:
        raise UserError("no client holds any data; lower clients= or raise partition.min_size")
    if cohort > len(engine.clients):
        raise UserError(f"cohort={cohort}, but only {len(engine.clients)} clients hold data; lower cohort")
    return engine, cohort


def build_worker(experiment: Experiment, net: Net, federation: Federation, guide: Guide | None = None) -> Worker:
    """What trains any of the federation's clients."""
    method = experiment.method
    steps, epochs = experiment.steps, experiment.epochs
    if method.pooled:
        steps, epochs = cohort_steps(experiment, federation), None
    return Worker(
        net=net,
        method=method,
        optimizer=experiment.local,
        schedule=experiment.schedule,
        batch_size=experiment.batch_size,
        steps=steps,
        epochs=epochs,
        augment=experiment.augment,
        flip=augment.mirrors(federation.classes),
        bn_stats=experiment.bn_stats,
        weight_by=experiment.weight_by,
        persist_optimizer=experiment.persist_optimizer,
        clip_gradient=experiment.clip_gradient,
        straggler_rate=0.0 if method.pooled else experiment.straggler_rate,
        guide=guide,
        seed=experiment.seed,
    )


def set_up(experiment: Experiment) -> torch.device:
    """Gives torch the experiment's number of threads -> the device that its name stands for."""
    torch.set_num_threads(experiment.threads)
    return environment.device(experiment.device)
