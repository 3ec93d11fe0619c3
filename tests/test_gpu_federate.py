"""The script that measures federated training on a GPU, at toy size on a CPU."""

import json
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
import toy
from torch import nn
from toy import gap

from fedprior.engines.vectorised import Vectorised
from fedprior.methods import FedAvg, FedProx, Scaffold
from fedprior.optim import AdamW


@pytest.fixture
def script(monkeypatch):
    """The script as a module; what it changes in torch and fedprior ends with the test."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, cudnn.benchmark, products.allow_tf32
    yield import_module("gpu_federate")
    cudnn.allow_tf32, cudnn.benchmark, products.allow_tf32 = before


@pytest.mark.parametrize("method", [FedAvg(), FedProx(mu=0.1), Scaffold()], ids=repr)
def test_a_step_that_reads_and_writes_in_place_changes_no_bit(method, script):
    """What a graph replays, run without one: round after round, with batch norm and crops."""
    options = {"steps": 4, "cohort": 3, "augment": True, "optimizer": AdamW(lr=1e-2)}
    a, *_ = toy.go(method, engine=partial(Vectorised, block=3), **options)
    recorded = lambda w, d, memory: script.Tuned(w, d, block=3, compile=False, graphs=True)
    b, engine, _ = toy.go(method, engine=recorded, **options)
    assert engine.play is not None
    assert gap(a.server.weights, b.server.weights) == 0
    assert a.train_loss == b.train_loss


def test_products_are_the_convolution(script):
    conv = nn.Conv2d(3, 5, 3, padding=1, bias=False).double()
    x = torch.randn(2, 3, 6, 7, dtype=torch.float64)
    for found, true in zip(*(torch.func.vjp(f, x) for f in (script.Products(conv), conv)), strict=True):
        if isinstance(found, torch.Tensor):
            assert torch.allclose(found, true, atol=1e-12)
        else:
            seed = torch.randn(2, 5, 6, 7, dtype=torch.float64)
            assert torch.allclose(found(seed)[0], true(seed)[0], atol=1e-12)


def run(script, monkeypatch, folder, *words):
    monkeypatch.setattr(sys, "argv", ["gpu_federate.py", "--tiny", "--out", str(folder), *words])
    script.main()
    return json.loads((folder / "gpu_federate.json").read_text()), (folder / "gpu_federate.md").read_text()


def test_every_part_runs_at_toy_size(script, monkeypatch, tmp_path):
    monkeypatch.setattr(script, "PRECISIONS", ("fp32",))
    result, page = run(script, monkeypatch, tmp_path, "--graphs")
    assert "notes" not in result
    cell, one = result["cell"], result["serial"]["fp32"]
    assert (cell["rounds"], cell["client_steps"], len(cell["accuracy"])) == (2, 2 * 2 * 2, 2)
    assert cell["whole_cell_seconds"] == cell["wall_seconds"] > cell["evaluation_seconds"]
    assert result["ratio"]["fp32"] * one["client_steps_per_second"] == pytest.approx(cell["client_steps_per_second"])
    assert one["cell_seconds"] * one["client_steps_per_second"] == pytest.approx(8)
    assert cell["allocated_MB"] is result["kernels"] is None
    assert {"graphs" in row["setting"] for row in result["probe"]} == {True, False}
    agree = result["same"]["float64, stacked against serial"]
    assert agree["largest_weight_difference"] < 1e-9 < 1e-4 < agree["largest_way"]
    assert agree["accuracy_difference"] == 0
    # multiply-adds of a forward pass: two convolutions; two layers of projections, scores and mixing, two linear ones;
    # pooling and head. Backward takes twice as much, but for the gradient of the image.
    first, second = 32 * 32 * 27 * 64, 16 * 16 * 9 * 64 * 128
    layer = 64 * 128 * (384 + 128) + 2 * 64 * 64 * 128 + 2 * 64 * 128 * 128
    rest = second + 2 * layer + 64 * 128 + 64 * 128 + 128 * 10
    assert result["flop"]["client_step"] == 8 * 2 * (2 * first + 3 * rest)
    assert "## The cell" in page


def test_what_there_is_no_time_for_is_told(script, monkeypatch, tmp_path):
    result, page = run(script, monkeypatch, tmp_path, "--seconds", "0")
    assert {note.partition(":")[0] for note in result["notes"]} > {"matmul", "serial (bf16)", "evaluation"}
    assert "cell" not in result
    assert all(note in page for note in result["notes"])


def test_a_part_that_takes_too_long_ends_and_is_told(script, tmp_path):
    lab = script.Lab(
        sizes=script.TINY, experiment=None, federation=None, device=None, folder=tmp_path, ends=float("inf")
    )
    begun = []

    def endless():
        begun.append(1)
        while True:
            pass

    assert lab.attempt("loop", endless, needs=1, most=0.05) is None
    assert begun
    (note,) = lab.result["notes"]
    assert note.startswith("loop: failed after ")
    assert "TimeoutError" in note
