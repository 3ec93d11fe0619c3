"""Experiments as typed values; `key=value` words and TOML files change them."""

import difflib
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from .aggregate import AGGREGATES, Mean
from .data.partition import PARTITIONS
from .errors import UsageError, unknown
from .guide import GUIDES, FedDifRC
from .local import WeightBy
from .method import Method
from .methods import METHODS, FedAvg, Scaffold
from .net import BNStats, Precision
from .optim import OPTIMIZERS, SERVER_OPTIMIZERS, SGD, Optimizer
from .prepare.balance import BALANCES, Balance
from .priors.adapt import Lora
from .priors.embedded import sidecar
from .schedule import SCHEDULES, Constant, Schedule
from .track import named

MOST_THREADS = 1024  # far more than pay; without a bound a slip of the finger ends in a crash

LONGEST_NAME = 200  # bytes; file systems allow 255, and files beside it add to the name

Aggregate = Any  # one of the rules in aggregate.py
Scheme = Any  # one of the partition dataclasses; they share nothing but their registry


@dataclass(frozen=True, kw_only=True)
class Data:
    """Where images come from."""

    name: str = "digits"  # "digits" ships in the package; else a known name or a hub id
    path: str | None = None  # local parquet files, an ImageFolder or a save_to_disk folder in place of the hub
    image: str | None = None  # column names, where the features do not tell
    label: str | None = None
    size: int | None = None  # side in pixels to resize to; None keeps the set's own
    half: Literal["all", "public", "private"] = "all"  # of the training rows; see data/halves.py


@dataclass(frozen=True, kw_only=True)
class PriorChoice:
    """Which diffusion model, and how it samples. None takes the prior's own default."""

    name: str = "digits"  # an embedded prior, an alias, a folder, a safetensors file or a hub id
    revision: str | None = None
    config: str | None = None  # folder or hub id of the base model of a safetensors file
    steps: int | None = None
    guidance: float | None = None
    guidance_interval: str | None = None  # shares of the steps with guidance, such as 0.2-0.8
    scheduler: Literal["auto", "dpm++", "ddim", "euler", "euler_trailing", "lcm", "own"] = "auto"
    lora: str | None = None  # adapters, such as a.safetensors,b.safetensors:0.5
    vae: str = "full"  # or sliced, or the folder of an AutoencoderTiny
    dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    batch_size: int = 32  # 0: as many as fit
    compile: bool = False  # the denoiser; pays after some hundred images
    offline: bool = False  # never uses the network


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything that decides a run's result."""

    name: str = ""  # of the run directory; empty derives one from method and balance
    data: Data = field(default_factory=Data)
    clients: int = 20
    partition: Scheme = field(default_factory=lambda: PARTITIONS["dirichlet"](alpha=0.05))
    net: str = "cnn"
    method: Method = field(default_factory=FedAvg)
    server: Optimizer | None = None  # None: the method's own; method.server is the one in force
    aggregate: Aggregate = field(default_factory=Mean)
    local: Optimizer = field(default_factory=lambda: SGD(lr=0.1))
    schedule: Schedule = field(default_factory=Constant)  # of the local rate
    persist_optimizer: bool = False  # clients' optimisers keep their state between rounds
    clip_gradient: float | None = None  # local gradients are scaled down to this norm
    steps: int | None = 20  # local steps a round; or
    epochs: float | None = None  # local passes a round, fractions allowed
    batch_size: int = 32
    augment: bool = False  # random crop and flip
    cohort: int = 5  # clients a round
    drop_rate: float = 0.0  # probability that a client of the cohort does not answer
    straggler_rate: float = 0.0  # probability that a client does only part of its steps
    min_cohort: int = 1  # good updates below which a round is abandoned
    rounds: int = 30
    weight_by: WeightBy = "training"
    bn_stats: BNStats = "average"
    max_update_norm: float | None = None  # a longer update is refused
    clip_update_norm: float | None = None  # a longer update is scaled down
    prior: PriorChoice | None = field(default_factory=PriorChoice)
    balance: Balance | None = None
    adapt: Lora | None = None  # clients fine-tune the prior on their own rows; needs balance.pool=per_client
    guide: FedDifRC | None = None
    validation: float = 0.0  # share of each client's rows that is held out and judged on in place of the test set
    seed: int = 0
    precision: Precision = "fp32"
    engine: Literal["auto", "serial", "pool", "vectorised"] = "auto"  # where clients run: docs/engines.md
    workers: int | None = None  # processes of engine=pool; None: one a core (or `threads` of them) or GPU
    block: int | None = None  # clients that engine=vectorised trains together; None: the cohort
    compile: bool = False  # the steps of engine=vectorised; a minute at first
    device: Literal["auto", "cpu", "cuda"] = "auto"
    memory_MB: float = 4000.0  # what clients remember beyond this is kept on disk only
    threads: int = 1  # of a CPU; more pay for large nets on idle cores only, and change the last bits
    evaluate_every: int = 1  # rounds between evaluations; the last round always has one
    target: float | None = None  # accuracy in [0, 1] whose rounds and MB are reported
    track: str | None = None  # who is told each round's metrics, such as tensorboard,mlflow

    def __post_init__(self) -> None:
        check_name(self.name)
        for key in ("clients", "batch_size", "cohort", "min_cohort", "rounds", "evaluate_every", "threads"):
            if getattr(self, key) < 1:
                raise UsageError(f"{key} must be at least 1, not {getattr(self, key)}")
        for key in ("workers", "block"):
            if (value := getattr(self, key)) is not None and value < 1:
                raise UsageError(f"{key} must be at least 1, not {value}")
        if (self.steps is None) == (self.epochs is None):
            raise UsageError("give the local work either as steps or as epochs, not both")
        if self.steps is not None and self.steps < 1:
            raise UsageError(f"steps must be at least 1, not {self.steps}")
        if self.epochs is not None and not 0 < self.epochs < float("inf"):
            raise UsageError(f"epochs must be above 0, not {self.epochs}")
        if self.cohort > self.clients:
            raise UsageError(f"cohort={self.cohort} is more than clients={self.clients}; lower one or raise the other")
        if self.threads > MOST_THREADS:
            raise UsageError(f"threads must be at most {MOST_THREADS}, not {self.threads}")
        if self.target is not None and not 0 < self.target <= 1:
            raise UsageError(f"target is an accuracy above 0 and at most 1, not {self.target}; write 0.8 for 80 %")
        for key in ("max_update_norm", "clip_update_norm", "clip_gradient"):
            if (value := getattr(self, key)) is not None and not value > 0:
                raise UsageError(f"{key} must be above 0, not {value}")
        for key in ("drop_rate", "straggler_rate"):
            if not 0 <= getattr(self, key) < 1:
                raise UsageError(f"{key} is a probability from 0 to below 1, not {getattr(self, key)}")
        if self.min_cohort > self.cohort:
            raise UsageError(f"min_cohort={self.min_cohort} is more than cohort={self.cohort}; no round would count")
        if not self.memory_MB >= 0:
            raise UsageError(f"memory_MB must be at least 0, not {self.memory_MB}")
        if self.seed < 0:
            raise UsageError(f"seed must be at least 0, not {self.seed}")
        if self.balance is not None and self.prior is None:
            raise UsageError("balance needs a prior; name one with prior=, or say balance=none")
        if self.adapt is not None and (self.balance is None or self.balance.pool != "per_client"):
            raise UsageError(
                "adapt makes each client's prior its own, so it needs a balance with balance.pool=per_client; its "
                "images must not reach a shared pool"
            )
        if self.guide is not None and self.prior is None:
            raise UsageError("guide needs a prior; name one with prior=, or say guide=none")
        if self.guide is not None:
            self._check_guide(self.guide)
        if not 0 <= self.validation < 1:
            raise UsageError(f"validation is a share of the rows from 0 to below 1, not {self.validation}")
        if self.method.images and self.prior is None:
            raise UsageError(f"method={CHOICES['method'].name_of(self.method)} needs a prior; name one with prior=")
        if self.method.images and self.bn_stats == "local":
            raise UsageError("bn_stats=local leaves the server without a whole model, so it has no use for images")
        named(self.track)
        # the optimiser in force stands in the method; here stands only what differs from the method's own
        own = own_server(self.method)
        server = self.method.server if self.server is None else self.server
        object.__setattr__(self, "server", None if server == own else server)
        object.__setattr__(self, "method", replace(self.method, server=server))
        self.method.check(self.local)
        if self.method.needs_mean and not isinstance(self.aggregate, Mean):
            raise UsageError(
                f"method={CHOICES['method'].name_of(self.method)} needs aggregate=mean: {self.method.needs_mean}"
            )
        if self.method.needs_whole_updates and self.clip_update_norm is not None:
            raise UsageError(
                f"method={CHOICES['method'].name_of(self.method)} cannot have clip_update_norm: clients count on their "
                "updates as they sent them; clip_gradient or max_update_norm may serve"
            )

    def _check_guide(self, guide: FedDifRC) -> None:
        name = CHOICES["method"].name_of(self.method)
        hooks = ("loss", "adapt", "keeps", "pretrain", "deploy")
        if not guide.labels and any(getattr(type(self.method), h) is not getattr(Method, h) for h in hooks):
            raise UsageError(
                f"guide.labels=false trains one backbone on the guide alone, but method={name} has a loss or net of "
                "its own; fedavg, fedprox, fednova, scaffold, feddyn, feddisco and the server optimisers go with it"
            )
        if not guide.labels and self.bn_stats == "local":
            raise UsageError("guide.labels=false judges one global backbone, so bn_stats=local does not go with it")
        if isinstance(self.method, Scaffold) and self.method.option == "I":
            raise UsageError("method.option=I takes gradients without the guide; use method.option=II with guide=")


def check_name(name: str) -> None:
    """Raises UsageError for a name that no directory can have."""
    if len(name.encode()) > LONGEST_NAME:
        raise UsageError(
            f"name= has {len(name.encode())} bytes, more than a directory name may have; give a shorter one"
        )
    if name in (".", "..") or set(name) & set('/\\:*?"<>|=\0'):
        raise UsageError(f"name={name} is no plain directory name; --runs or --sweeps say where it goes")


@dataclass(frozen=True)
class Choice:
    """A field that is set by a name: which class or factory the name stands for."""

    make: Callable[[str], Any]
    name_of: Callable[[Any], str]


def _registry(kind: str, entries: Mapping[str, Any], also: Sequence[str] = ()) -> Choice:
    """`also` are words that a person may say although no entry has the name."""

    def make(name: str) -> Any:
        if name not in entries:
            raise unknown(kind, name, [*entries, *also])
        return entries[name]()

    def name_of(value: Any) -> str:
        return next(name for name, cls in entries.items() if cls is type(value))

    return Choice(make, name_of)


CHOICES: dict[str, Choice] = {
    "data": Choice(lambda name: Data(name=name), lambda value: value.name),
    "prior": Choice(lambda name: PriorChoice(name=name), lambda value: value.name),
    "partition": _registry("partition", PARTITIONS),
    "method": _registry("method", METHODS, also=("feddifrc",)),
    "server": _registry("server optimiser", SERVER_OPTIMIZERS),
    "aggregate": _registry("aggregation rule", AGGREGATES),
    "schedule": _registry("schedule", SCHEDULES),
    "local": _registry("optimiser", OPTIMIZERS),
    "balance": _registry("balance", BALANCES),
    "adapt": _registry("adaptation", {"lora": Lora}),
    "guide": _registry("guide", GUIDES),
}
OPTIONAL = ("prior", "balance", "adapt", "guide")
SHORT = {"method=feddifrc": ("method=fedavg", "guide=feddifrc")}
"""Words that stand for several: a guide goes with any method, and FedDifRC's paper takes FedAvg."""


def keys(experiment: Experiment) -> list[str]:
    """Every key that can be set, as a person writes it: "rounds", "method.mu", ..."""
    out = []
    for f in fields(experiment):
        value = _shown(experiment, f.name)
        out.append(f.name)
        if f.name in CHOICES and value is not None:
            out += [f"{f.name}.{g.name}" for g in _settable(value)]
    return out


def takes(experiment: Experiment, key: str) -> bool:
    """Whether a key such as "balance.cap" means something beside the experiment's other values."""
    head, _, tail = key.partition(".")
    return hasattr(experiment, head) and _has(head, _shown(experiment, head), tail)


def override(experiment: Experiment, words: Sequence[str]) -> Experiment:
    """A copy changed by words such as "method=fedprox" and "method.mu=0.1".

    Names ("method=") count before their values ("method.mu=") whatever the order; otherwise the later
    word wins. A name that the experiment has already leaves its values as they are; another brings its
    own. A new method brings its own server optimiser, unless a word names one. Raises UsageError for an
    unknown key (with the nearest ones) or a bad value.
    """
    pairs = []
    for word in (w for given in words for w in SHORT.get(given, (given,))):
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise UsageError(f"'{word}' is not of the form key=value")
        pairs.append((key.strip().replace("-", "_"), text.strip()))
    given = {key for key, _ in pairs}
    if {"method=feddifrc", "guide=none"} <= set(words):
        raise UsageError("method=feddifrc is fedavg with guide=feddifrc; with guide=none say method=fedavg")
    if {"steps", "epochs"} <= given:
        raise UsageError("give the local work either as steps or as epochs, not both")
    pairs.sort(key=lambda pair: ("." in pair[0], pair[0] != "method"))  # the method decides what a server means
    changes: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}  # set together, since some values have a sense only beside others
    for key, text in pairs:
        head, _, tail = key.partition(".")
        current = changes.get(head, getattr(experiment, head, None))
        if head == "server" and current is None:
            current = changes.get("method", experiment.method).server
        if not hasattr(experiment, head) or (tail and not _has(head, current, tail)):
            raise _unknown_key(replace(experiment, **_consistent(changes)), key, current)
        if head in CHOICES and (not tail or tail == "name"):
            changes[head] = None if head in OPTIONAL and text == "none" else _chosen(experiment, head, text)
            if head == "method" and not given & {"server", "server.name"}:
                changes["server"] = None
            if head == "server":  # by its name alone it is the method's own, where that is of this kind
                own = own_server(changes.get("method", experiment.method))
                changes[head] = own if type(own) is type(changes[head]) else changes[head]
        elif head in CHOICES:
            assert current is not None
            inner.setdefault(head, {})[tail] = parse(get_type_hints(type(current))[tail], text, key)
        else:
            changes[head] = parse(get_type_hints(Experiment)[head], text, key)
    for head, values in inner.items():
        current = changes.get(head, getattr(experiment, head))
        if head == "server" and current is None:
            current = changes.get("method", experiment.method).server
        changes[head] = replace(current, **values)
    return replace(experiment, **_consistent(changes | _of_the_prior(experiment, changes, given)))


def _chosen(experiment: Experiment, head: str, name: str) -> Any:
    """What a name stands for: what the experiment has, where that has the name already, else a new one."""
    there = getattr(experiment, head)
    if there is None or head == "server" or CHOICES[head].name_of(there) != name:
        return CHOICES[head].make(name)
    return replace(there, server=own_server(there)) if head == "method" else there


def _of_the_prior(experiment: Experiment, changes: dict[str, Any], given: set[str]) -> dict[str, Any]:
    """What a prior says, beside its weights, of prompts and features: where a word names a prior that was not there, or
    what they serve, and no word says otherwise."""
    prior = changes.get("prior", experiment.prior)
    own = sidecar(prior.name) if prior is not None else {}
    out = {}
    for head, keys in (("balance", own.get("balance", {})), ("guide", own.get("guide", {}))):
        current = changes.get(head, getattr(experiment, head))
        fresh = {key: value for key, value in keys.items() if f"{head}.{key}" not in given}
        new = [k for k in ("prior", head) if {k, f"{k}.name"} & given and not _alike(k, experiment, changes)]
        if current is not None and fresh and new:
            out[head] = replace(current, **fresh)
    return out


def _alike(head: str, experiment: Experiment, changes: Mapping[str, Any]) -> bool:
    """Whether a choice has the name that it had."""
    before, after = getattr(experiment, head), changes[head]
    return before is not None and after is not None and CHOICES[head].name_of(before) == CHOICES[head].name_of(after)


def _consistent(changes: dict[str, Any]) -> dict[str, Any]:
    """Steps given take the place of epochs, and the other way round."""
    for key, other in (("steps", "epochs"), ("epochs", "steps")):
        if changes.get(key) is not None and other not in changes:
            return changes | {other: None}
    return changes


def own_server(method: Method) -> Optimizer:
    """The server optimiser that a method has when nothing else is asked for."""
    own: Any = next(f.default for f in fields(method) if f.name == "server")
    return cast(Optimizer, own)


def _shown(experiment: Experiment, key: str) -> Any:
    """The value in force, as a person sees and sets it."""
    return experiment.method.server if key == "server" else getattr(experiment, key)


def _settable(value: Any) -> list[Any]:
    return [f for f in fields(value) if f.metadata.get("config", True)]


def _has(head: str, value: Any, tail: str) -> bool:
    return head in CHOICES and (tail == "name" or (value is not None and tail in {f.name for f in _settable(value)}))


def _unknown_key(experiment: Experiment, key: str, current: Any) -> UsageError:
    head, _, tail = key.partition(".")
    if tail and head in OPTIONAL and current is None:
        example = {"prior": "digits", "balance": "max", "guide": "feddifrc"}[head]
        return UsageError(f"{key} has no meaning while {head}=none; choose a {head} first, e.g. {head}={example}")
    valid = keys(experiment)
    leaves = {k.rpartition(".")[2]: k for k in valid}
    if tail and head in CHOICES:
        own = [k for k in valid if k.startswith(f"{head}.")]
        near = difflib.get_close_matches(key, own, n=3, cutoff=0.7)
        name = CHOICES[head].name_of(current)
        has = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(own) or 'no keys'}"
        return UsageError(f"unknown key '{key}' for {head}={name}; {has}")
    if key in leaves:
        return UsageError(f"unknown key '{key}'; did you mean {leaves[key]}?")
    return unknown("key", key, valid)


def parse(kind: Any, text: str, key: str) -> Any:
    """The value that `text` means for a field of type `kind`."""
    if get_origin(kind) in (Union, types.UnionType):
        if text in ("none", ""):
            return None
        kind = next(k for k in get_args(kind) if k is not type(None))
    if get_origin(kind) is Literal:
        if text not in get_args(kind):
            raise unknown(f"value for {key}", text, get_args(kind))
        return text
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise UsageError(f"{key} must be true or false, not '{text}'")
        return text.lower() == "true"
    words = {int: "a whole number", float: "a number"}
    try:
        return kind(text)
    except ValueError:
        raise UsageError(f"{key} must be {words.get(kind, kind)}, not '{text}'") from None


def to_dict(experiment: Experiment) -> dict[str, Any]:
    """Plain values as they stand in a TOML file; what is None is left out, a prior or balance of None is "none"."""
    out: dict[str, Any] = {}
    for f in fields(experiment):
        value = _shown(experiment, f.name)
        if f.name not in CHOICES:
            out |= {f.name: value} if value is not None else {}
        elif value is None:
            out[f.name] = "none"
        else:
            shown = [g for g in _settable(value) if getattr(value, g.name) is not None or g.default is not None]
            inner = {g.name: "none" if (v := getattr(value, g.name)) is None else v for g in shown}
            out[f.name] = {"name": CHOICES[f.name].name_of(value)} | inner
    simple = {k: v for k, v in out.items() if not isinstance(v, dict)}
    return simple | {k: v for k, v in out.items() if isinstance(v, dict)}


def to_toml(experiment: Experiment) -> str:
    """The whole experiment as a TOML file that `from_toml` reads."""
    import tomli_w

    return tomli_w.dumps(to_dict(experiment))


def from_toml(path: Path, base: Experiment | None = None) -> Experiment:
    """An experiment from a TOML file; keys it leaves out have their defaults."""
    import tomllib

    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"there is no file {path}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from None
    words = []
    for key, value in values.items():
        inner = value if isinstance(value, dict) else {"": value}
        words += [f"{key}.{k}={_word(v)}" if k else f"{key}={_word(v)}" for k, v in inner.items()]
    words = [w.replace(".name=", "=", 1) if w.partition("=")[0] in {f"{c}.name" for c in CHOICES} else w for w in words]
    try:
        return override(base or Experiment(), words)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
