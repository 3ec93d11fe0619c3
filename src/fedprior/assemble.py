"""From an experiment to the things it names: data, prior, net, worker. Nothing here trains."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from . import environment, nets
from .config import Experiment, PriorChoice
from .data import augment, origins, partition, sources
from .data.table import Federation, Table
from .data.validation import hold_out
from .engines.serial import Serial
from .errors import UsageError, UserError
from .guide import Guide
from .local import Worker, num_steps
from .memory import ClientMemory
from .net import Net
from .prepare.balance import BalanceToMax, plan
from .prepare.synthesis import Report, server_images, synthesise
from .priors import features, prompts
from .priors.diffusion import DiffusionPrior
from .priors.encoder import ImageEncoder
from .progress import Progress


class Split(NamedTuple):
    federation: Federation  # real rows only
    partition: partition.Partition


def split(experiment: Experiment) -> Split:
    """The data, decoded and given to clients."""
    d = experiment.data
    source = sources.load(d.name, path=d.path, image=d.image, label=d.label, size=d.size)
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

    return embedded.load(
        choice.name,
        revision=choice.revision,
        steps=choice.steps,
        guidance=choice.guidance,
        dtype=choice.dtype,
        batch_size=choice.batch_size,
        device=device,
    )


def prior_for(experiment: Experiment, federation: Federation, device: torch.device) -> DiffusionPrior:
    """The experiment's prior, which must know the federation's classes."""
    assert experiment.prior is not None
    prior = load_prior(experiment.prior, device)
    strange = [c for c in federation.classes if c not in prior.defaults.get("classes", federation.classes)]
    if strange:
        raise UsageError(f"prior={prior.name} does not know '{strange[0]}'; name a prior for these classes with prior=")
    return prior


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
    prior = prior or prior_for(experiment, federation, device)
    height, width = federation.table["image"].shape[2:]
    with progress.task(f"server's images from {prior.name}", per_class * len(federation.classes)) as update:
        images = server_images(
            prior,
            federation.classes,
            (height, width),
            per_class,
            experiment.balance or BalanceToMax(),
            seed=experiment.seed,
            progress=lambda done, total: update(done, ""),
        )
    return {name: column.to(device) for name, column in images.items()}


def balance(
    experiment: Experiment,
    federation: Federation,
    device: torch.device,
    progress: Progress,
    prior: DiffusionPrior | None = None,
) -> tuple[Federation, Report]:
    """The federation with the synthetic rows that the experiment's balance asks for."""
    assert experiment.balance is not None
    prior = prior or prior_for(experiment, federation, device)
    templates = prompts.templates(experiment.balance.templates)
    words = [prompts.prompt(name, template) for name in federation.classes for template in templates]
    if cut := prior.truncated(words):
        progress.say(
            f"{len(cut)} of {len(words)} prompts are longer than {prior.name} reads, such as '{cut[0]}', and are cut; "
            "balance.templates=single is the shortest"
        )
    wanted = plan(experiment.balance, federation.counts(synthetic=False)).images
    with progress.task(f"images from {prior.name}", wanted) as update:
        return synthesise(
            federation,
            prior,
            experiment.balance,
            seed=experiment.seed,
            progress=lambda done, total: update(done, ""),
        )


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
    method = experiment.method
    steps, epochs, cohort = experiment.steps, experiment.epochs, experiment.cohort
    if method.pooled:
        steps, epochs = cohort_steps(experiment, federation), None
        cohort = 1
    federation = gathered(experiment, federation)
    worker = Worker(
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
    engine = Serial(worker, federation, memory)
    if not engine.clients:
        raise UserError("no client holds any data; lower clients= or raise partition.min_size")
    if cohort > len(engine.clients):
        raise UserError(f"cohort={cohort}, but only {len(engine.clients)} clients hold data; lower cohort")
    return engine, cohort


def set_up(experiment: Experiment) -> torch.device:
    """Gives torch the experiment's number of threads -> the device that its name stands for."""
    torch.set_num_threads(experiment.threads)
    return environment.device(experiment.device)
