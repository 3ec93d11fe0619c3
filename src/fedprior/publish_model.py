"""A run's global model on the Hugging Face hub, with a card that says how it was trained and how good it is."""

import json
import re
import tomllib
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

from . import predict, record, resume, store
from .config import Experiment, from_toml, to_dict
from .data import origins
from .data.partition import Sites
from .errors import UserError
from .hub import File, check_license, upload
from .report import numbers

LICENSE = "unknown"  # the hub's word for a model whose owner has not said
FEW, MANY = 20, 200  # classes that the first sentence names, and that a table has a row for
CLIENTS = ("mean", "weighted", "p10", "worst")
SHOWN = ("method", "partition", "clients", "cohort", "rounds", "steps", "epochs", "batch_size", "local", "schedule",
         "server", "aggregate", "augment", "bn_stats", "balance", "adapt", "guide", "precision", "seed")  # fmt: skip


class Trained(NamedTuple):
    """What a run directory says of its model."""

    folder: Path
    experiment: Experiment
    result: dict[str, Any]  # result.json
    last: dict[str, Any]  # the last line of metrics.jsonl
    about: dict[str, Any]  # the metadata of the model file
    parameters: int
    version: str  # of fedprior


def read(folder: Path) -> Trained:
    """Raises UserError for what is no run directory, for one that is not done or has no global model, and for one whose
    settings are not those of the model."""
    if folder.is_file():
        raise UserError(f"{folder} is a file; name its run directory, which says how it was trained")
    classifier = predict.load(folder, "cpu")
    if not (folder / "result.json").exists():
        raise UserError(
            f"{folder} has no result.json, so no card could be written; `fedprior run {folder}` makes it again"
        )
    experiment = settings(folder, classifier.about)
    try:
        versions = store.read_json(folder / "manifest.json")["versions"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder}/manifest.json cannot be read ({error}), so the card could not say how") from None
    return Trained(
        folder,
        experiment,
        resume.result(folder),
        record.metrics(folder)[-1],
        classifier.about,
        sum(x.numel() for x in classifier.weights["params"].values()),
        str(versions.get("fedprior")),
    )


def settings(folder: Path, about: dict[str, Any]) -> Experiment:
    """The experiment in a run's config.toml. Raises UserError where that is not the one of the model, by what the model
    file says of itself."""
    path = folder / "config.toml"
    experiment = from_toml(path)
    values = to_dict(experiment)
    remedy = "bring back the file that the run wrote, or run it again under another name="
    if missing := [key for key in ("method", "data", "rounds") if key not in tomllib.loads(path.read_text("utf-8"))]:
        raise UserError(f"{path} does not say {', '.join(missing)}: it was changed; {remedy}")
    method = json.loads(json.dumps(values["method"]))  # lists, as in the model file
    here = {key: values[key] for key in ("net", "precision")} | {"method": method["name"]}
    there = {key: about[key] for key in here}
    if there["method"] == here["method"]:
        here |= {f"method.{key}": value for key, value in method.items() if key != "name"}
        there |= {f"method.{key}": "none" if value is None else value for key, value in about["settings"].items()}
    if differing := [f"{key}: {there.get(key)} there, {here[key]} here" for key in here if there.get(key) != here[key]]:
        raise UserError(f"{path} is not of this model ({'; '.join(differing)}); {remedy}")
    return experiment


def files(trained: Trained) -> list[File]:
    """What goes to the hub beside the card. Paths of this machine are cut to their last part."""
    import tomli_w

    model = trained.folder / predict.MODEL
    result = {key: value for key, value in trained.result.items() if key != "directory"}
    return [
        File(predict.MODEL, model, model.stat().st_size),
        File.of("config.toml", tomli_w.dumps(portable(to_dict(trained.experiment)))),
        File.of("result.json", json.dumps(result, indent=2, allow_nan=False) + "\n"),
    ]


def portable(value: Any) -> Any:
    """Settings without absolute paths: of each, its last part is left."""
    if isinstance(value, dict):
        return {key: portable(x) for key, x in value.items()}
    if not isinstance(value, str):
        return value
    return ",".join(_last_part(word) for word in value.split(","))


def _last_part(word: str) -> str:
    for kind in (PurePosixPath, PureWindowsPath):
        if kind(word).is_absolute() or word.startswith("~"):
            return kind(word).name
    return word


def card(trained: Trained, repository: str, license: str = LICENSE) -> str:
    """The README.md of the model: the hub's metadata, then the same in words. Raises UsageError for a licence that is
    no word of the hub's."""
    check_license(license)
    about, values = trained.about, portable(to_dict(trained.experiment))
    classes, (height, width) = [plain(name) for name in about["classes"]], about["size"]
    how = "on all data in one place" if trained.experiment.method.pooled else "by federated learning"
    shown = ", ".join(classes[:FEW]) + (f" and {len(classes) - FEW} more" if len(classes) > FEW else "")
    lines = [
        "---",
        metadata(trained, repository, license).to_yaml().strip(),
        "---",
        "",
        f"# {repository.partition('/')[2]}",
        "",
        f"An image classifier for {len(classes)} classes ({shown}), trained {how} with fedprior {trained.version}.",
        *(["", "Its owner has not said under which licence the weights are given."] if license == LICENSE else []),
        "",
        "## How good it is",
        "",
        *scores(trained),
        "",
        "## How it was trained",
        "",
        origin(trained.experiment, values),
        "",
        "| setting | value |",
        "| --- | --- |",
        f"| net | {values['net']}, {trained.parameters} parameters |",
        f"| images | RGB, {height} x {width} pixels; others are resized to that |",
        *(f"| {key} | {plain(told(values[key]))} |" for key in SHOWN if key in values),
        "",
        "`config.toml` holds every setting; `fedprior run config.toml` trains the model again where the data are.",
        "",
        "## The prior",
        "",
        prior(trained, values),
        "",
        "## How to use it",
        "",
        "```python",
        "from huggingface_hub import hf_hub_download",
        "",
        "from fedprior import predict",
        "",
        f'classifier = predict.load(hf_hub_download("{repository}", "{predict.MODEL}"))',
        f"probabilities = classifier(images)  # uint8 [n, 3, {height}, {width}] -> float32 [n, {len(classes)}]",
        "```",
        "",
        f"`fedprior predict {predict.MODEL} PATH...` takes images, folders and parquet files.",
        "",
        "## Limits",
        "",
        *(f"- {line}" for line in limits(trained)),
        "",
    ]
    return "\n".join(lines)


def scores(trained: Trained) -> list[str]:
    """What was measured, as Markdown."""
    result, last = trained.result, trained.last
    rows = [
        ("last round", result["last"]),
        *([(numbers.window([result["rounds"]]), result["mean_last10"])] if result["rounds"] > 1 else []),
        ("best round (optimistic)", result["best"]),
        *((f"clients' own mix of classes, {name}", last["clients"][name]) for name in CLIENTS if last["clients"]),
    ]
    names = trained.about["classes"]
    by_class = last["per_class"] or [] if len(names) <= MANY else []
    rows += [(f"class {plain(name)}", rate) for name, rate in zip(names, by_class, strict=False)]
    rows += [(f"domain {plain(name)}", rate) for name, rate in (last.get("per_domain") or {}).items()]
    where = "rows of clients that were held out" if result["judged_on"] == "validation" else "the test set"
    mean = ", the mean over its domains" if "per_domain" in last else ""
    traffic = f"Clients and server exchanged {result['uplink_MB']:.3f} MB up and {result['downlink_MB']:.3f} MB down."
    return [
        f"Top-1 accuracy on {where} of {plain(trained.experiment.data.name)}{mean}. These weights are those of the "
        f"last round, {result['rounds']}; one run, seed {trained.experiment.seed}.",
        "",
        "| accuracy of | % |",
        "| --- | --- |",
        *(f"| {name} | {100 * rate:.2f} |" for name, rate in rows if rate is not None),
        *([] if trained.experiment.method.pooled else ["", traffic]),
    ]


def origin(experiment: Experiment, values: dict[str, Any]) -> str:
    """Whose data the model learnt from, in a sentence."""
    name, clients = plain(values["data"]["name"]), values["clients"]
    if isinstance(experiment.partition, Sites):
        return f"{clients} sites trained on data of their own, which did not leave them; {name} is the test set."
    half = values["data"]["half"]
    part = "" if half == "all" else f" (its {half} half)"
    if experiment.method.pooled:
        return f"It was trained on {name}{part} in one place, as a baseline."
    return f"The training images of {name}{part} were split over {clients} clients ({told(values['partition'])})."


def prior(trained: Trained, values: dict[str, Any]) -> str:
    """What the diffusion model did, in a sentence."""
    experiment, rows = trained.experiment, trained.result["synthetic_rows"]
    said = []
    if experiment.adapt:
        said.append(f"was fine-tuned by each client on its own images (adapt={values['adapt']['name']})")
    if experiment.balance:
        count = "" if rows is None else f", {rows} synthetic rows in all"
        said.append(f"made images for clients before training (balance={values['balance']['name']}{count})")
    if images := experiment.method.images:
        said.append(f"made {images} images of each class for the server")
    if experiment.guide:
        said.append(f"described clients' images to guide their training (guide={values['guide']['name']})")
    if not said:
        return "No diffusion model was used."
    return (
        f"The text-to-image diffusion model `{values['prior']['name']}` {numbers.joined(said)}. Accuracy is measured "
        "on real images only."
    )


def limits(trained: Trained) -> list[str]:
    experiment = trained.experiment
    height, width = trained.about["size"]
    out = [
        "It names one of its classes for every image, also for one that shows none of them.",
        f"It sees {height} x {width} pixels. Images unlike those that it was tested on may be judged much worse.",
        "Its numbers are of one run; another seed gives others.",
    ]
    if not experiment.method.pooled:
        out.append(
            "Federated learning leaves images with the clients, but gives no formal guarantee of privacy: weights can "
            "tell something of the images that they were trained on."
        )
    if experiment.adapt:
        out.append(
            "Clients fine-tuned the diffusion model on their own images. What it then made may be near-copies of "
            "those, and this model was trained on it."
        )
    if experiment.balance or experiment.method.images or experiment.guide:
        out.append(
            "The diffusion model's licence may limit the use of what was trained with it, and what it learnt from its "
            "own training data, biases included, may have gone into this model."
        )
    return out


def plain(text: str) -> str:
    """A text as words on one line, whatever it would mean in Markdown or HTML."""
    return re.sub(r"[\\`*\[\]<>&|~$]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", " ".join(text.split()))


def told(value: Any) -> str:
    """A setting in words: "dirichlet (alpha=0.05)"."""
    if not isinstance(value, dict):
        return str(value).lower() if isinstance(value, bool) else str(value)
    inner = ", ".join(f"{key}={told(x)}" for key, x in value.items() if key != "name" and x != "")
    return f"{value['name']} ({inner})" if inner else str(value["name"])


def push(trained: Trained, repository: str, text: str, *, private: bool = True) -> str:
    """Uploads the files with `text` as their card; -> the address of the model. Raises what `hub.upload` raises."""
    message = f"{trained.about['method']}, {trained.result['rounds']} rounds"
    return upload(repository, "model", files(trained), text, message, private=private, kept="The run stays where it is")


def metadata(trained: Trained, repository: str, license: str) -> Any:
    """What the hub reads of the card."""
    from huggingface_hub import EvalResult, ModelCardData

    experiment, result = trained.experiment, trained.result
    name = experiment.data.name
    hub_id = origins.ALIASES.get(name, name)
    known = hub_id in origins.ALIASES.values() or (experiment.data.path is None and "/" in hub_id)
    tags = [*([] if experiment.method.pooled else ["federated-learning"]), "fedprior", trained.about["method"]]
    if result.get("synthetic_rows"):
        tags.append("synthetic")
    scored = []
    if result["last"] is not None:
        scored = [
            EvalResult(
                task_type="image-classification",
                dataset_type=hub_id,
                dataset_name=name,
                dataset_split="held-out training rows" if result["judged_on"] == "validation" else "test",
                metric_type="accuracy",
                metric_name="Accuracy",
                metric_value=result["last"],
            )
        ]
    return ModelCardData(
        license=license,
        library_name="fedprior",
        pipeline_tag="image-classification",
        tags=tags,
        datasets=[hub_id] if known and not isinstance(experiment.partition, Sites) else None,
        metrics=["accuracy"],
        model_name=repository.partition("/")[2],
        eval_results=scored or None,
    )
