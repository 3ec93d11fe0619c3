"""What guidance costs: a training step with cached descriptors beside a plain one, and describing images beside the
UNet passes that it needs. CPU seconds of one thread, in turns.

    python benchmarks/guidance.py [--json] [--prior FOLDER]
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from fedprior import environment, nets
from fedprior.data import digits, table
from fedprior.data.table import Federation, Shard
from fedprior.guide import FedDifRC, Guide
from fedprior.local import Worker
from fedprior.methods import FedAvg
from fedprior.net import Net
from fedprior.optim import SGD
from fedprior.priors import embedded
from fedprior.progress import Silent

BATCH, CLASSES = 64, 10
WIDE = {1: 1280, 2: 1280, 3: 640, 4: 320}  # Stable Diffusion's blocks: descriptors of 256 + 128 + 128 numbers


def seconds(call: Callable[[], Any]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def in_turns(first: Callable[[], Any], second: Callable[[], Any], repeats: int) -> tuple[float, float, float]:
    """-> (median seconds of each, median of the ratios second / first), after a turn that does not count."""
    first(), second()
    pairs = [(seconds(first), seconds(second)) for _ in range(repeats)]
    one, two = (statistics.median(side) for side in zip(*pairs, strict=True))
    return one, two, statistics.median(b / a for a, b in pairs)


def steps(name: str, repeats: int) -> dict[str, float]:
    """A step of the plain net beside a guided one on columns of Stable Diffusion's width."""
    prior: Any = SimpleNamespace(level_widths=WIDE)
    guide = Guide(config=FedDifRC(), prior=prior, classes=tuple(map(str, range(CLASSES))))
    batch = table.make(torch.randint(0, 256, (BATCH, 3, 32, 32), dtype=torch.uint8), torch.arange(BATCH) % CLASSES)
    columns = {
        "text": torch.rand(BATCH, CLASSES, guide.width).half(),
        "noise": torch.rand(BATCH, guide.width).half(),
        "own": batch["label"],
    }

    def stepper(guided: bool) -> Callable[[], Any]:
        module = nets.build(name, CLASSES, size=(32, 32), seed=0)
        net = Net(guide.adapt(module, 0) if guided else module)
        worker = Worker(
            net=net,
            method=FedAvg(),
            optimizer=SGD(lr=0.01, momentum=0.9),
            batch_size=BATCH,
            steps=1,
            guide=guide if guided else None,
        )
        ctx = worker.open({"weights": net.init(), "shared": {}}, {})
        carry, rows = worker.init(ctx, {}), batch | (columns if guided else {})
        return lambda: worker.step(carry, dict(rows), ctx)

    plain, guided, ratio = in_turns(stepper(False), stepper(True), repeats)
    return {"plain_ms": 1e3 * plain, "guided_ms": 1e3 * guided, "ratio": ratio}


def client_round(name: str, prior: Any, repeats: int) -> dict[str, float]:
    """A client's whole round, columns and all, beside a plain one: 600 images of 32 x 32, one pass over them."""
    data = digits.train()
    image = torch.nn.functional.interpolate(data["image"], (32, 32))
    shard = Shard(table.make(image, data["label"]), torch.arange(len(image)))
    guide = Guide(config=FedDifRC(), prior=prior, classes=digits.CLASSES)
    guide.describe(Federation(table=shard.table, clients=(shard.rows,), test={}, classes=digits.CLASSES), Silent())

    def trainer(guided: bool) -> Callable[[], Any]:
        module = nets.build(name, CLASSES, size=(32, 32), seed=0)
        net = Net(guide.adapt(module, 0) if guided else module)
        own = guide if guided else None
        worker = Worker(net=net, method=FedAvg(), optimizer=SGD(lr=0.01), batch_size=BATCH, epochs=1, guide=own)
        down = {"weights": net.init(), "shared": {}}
        return lambda: worker.train(0, shard, down, {}, 0)

    plain, guided, ratio = in_turns(trainer(False), trainer(True), repeats)
    return {"plain_s": plain, "guided_s": guided, "ratio": ratio}


def extraction(prior: Any, repeats: int) -> dict[str, float]:
    """Describing images under eleven prompts, files included, beside the bare UNet passes."""
    names = prior.defaults.get("classes", digits.CLASSES)
    image = digits.train()["image"][:256]
    image = torch.nn.functional.interpolate(image, (prior.size, prior.size))
    shard = Shard(table.make(image, torch.arange(len(image)) % len(names)), torch.arange(len(image)))
    guide = Guide(config=FedDifRC(), prior=prior, classes=tuple(names))
    guide.describer.basis("global")
    each = len(guide.prompts_of(bytes(8), 0))
    unet = prior.pipeline.unet
    side = prior.size // prior.pipeline.vae_scale_factor
    latent = torch.randn(128, unet.config.in_channels, side, side)
    text = prior.encode([""]).expand(128, -1, -1)
    passes = len(image) * each

    @torch.no_grad()
    def bare() -> None:
        for rows in torch.arange(passes).split(128):
            unet(latent[: len(rows)], 300, encoder_hidden_states=text[: len(rows)])

    def describe() -> None:
        fresh = Guide(config=FedDifRC(), prior=prior, classes=tuple(names)).describer
        for level, size in fresh.sizes.items():
            for file in (fresh.folder / f"level-{level}-{size}").glob("*.safetensors"):
                file.unlink()
        items = fresh.items([shard])
        fresh.fill(items, fresh.missing(items), image)

    plain, described, ratio = in_turns(bare, describe, repeats)
    return {"passes_per_s_bare": passes / plain, "passes_per_s_described": passes / described, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--prior", default="digits")
    parser.add_argument("--repeats", type=int, default=7)
    a = parser.parse_args()
    torch.set_num_threads(1)
    prior = embedded.load(a.prior)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FEDPRIOR_CACHE"] = folder
        result: dict[str, Any] = {
            "step": {name: steps(name, 3 * a.repeats) for name in ("cct_2_3x2_32", "resnet10")},
            "round": {"cct_2_3x2_32": client_round("cct_2_3x2_32", embedded.load("digits"), a.repeats)},
            "extraction": extraction(prior, a.repeats),
        }
    print(f"{environment.processor()}, Python {platform.python_version()}, torch {torch.__version__}, one thread")
    for name, row in result["step"].items():
        print(f"step of {name}: plain {row['plain_ms']:.1f} ms, guided {row['guided_ms']:.1f} ms, x {row['ratio']:.3f}")
    for name, row in result["round"].items():
        print(f"round of {name}: plain {row['plain_s']:.2f} s, guided {row['guided_s']:.2f} s, x {row['ratio']:.3f}")
    row = result["extraction"]
    print(
        f"{a.prior}: bare UNet {row['passes_per_s_bare']:.0f} passes/s, described {row['passes_per_s_described']:.0f}, "
        f"x {row['ratio']:.3f}"
    )
    if a.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
