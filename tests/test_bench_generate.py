"""The benchmark of generation, and the script that runs it on a GPU, at toy sizes."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_pipelines as tiny
import torch

from fedprior.errors import UsageError
from fedprior.priors import bench, embedded
from fedprior.priors.diffusion import DiffusionPrior

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu_generate.py"


def test_arms_take_turns_on_the_same_prompts_seeds_steps_and_guidance(tmp_path, monkeypatch):
    prior = DiffusionPrior.from_pretrained(
        tiny.write(tmp_path, "StableDiffusionPipeline"), steps=2, guidance=3, batch_size=16
    )
    calls, made = [], {}
    plain = type(prior.pipeline).__call__

    def spied(self, *prompts, **options):
        calls.append((options["num_inference_steps"], options["guidance_scale"], options["height"]))
        out = plain(self, *prompts, **options)
        made.setdefault(order[-1], []).append(out.images)
        return out

    monkeypatch.setattr(type(prior.pipeline), "__call__", spied)
    order = []
    for arm, run in list(bench.RUNS.items()):
        monkeypatch.setitem(bench.RUNS, arm, lambda *a, arm=arm, run=run: order.append(arm) or run(*a))
    result = bench.measure(prior, 5, rounds=2)
    assert order == ["loop", "batch", "fedprior"] * 3  # the first turn warms up
    assert set(calls) == {(2, 3.0, 16)}
    assert [len(made[arm]) for arm in bench.ARMS] == [1 + 5 + 5, 3, 3]
    batch, ours = made["batch"][-1], made["fedprior"][-1][:5]
    loop = [images[0] for images in made["loop"][-5:]]
    shown = (ours.permute(0, 2, 3, 1) * 255).round().numpy()
    for i in range(5):  # all make the same pictures
        for other in (batch[i], loop[i]):
            assert np.abs(np.asarray(other) - shown[i]).max() <= 1
    for arm in ("loop", "batch"):
        rates = result["fedprior"]["images_per_second"], result[arm]["images_per_second"]
        assert result["speedup"][arm] == pytest.approx(rates[0] / rates[1])
    assert (result["images"], result["rounds"], result["batch_size"]) == (5, 2, 16)
    assert result["settings"] == prior.settings
    assert result["memory"] == {}
    json.dumps(result, allow_nan=False)


def test_nothing_is_kept_from_one_round_to_the_next(tmp_path):
    prior = DiffusionPrior.from_pretrained(tiny.write(tmp_path, "StableDiffusionPipeline"), steps=1, guidance=1)
    encoded = []
    prior.pipeline.text_encoder.register_forward_hook(lambda *_: encoded.append(1))
    bench.measure(prior, 4, rounds=2, arms=["fedprior"])
    assert len(encoded) == 3


def test_the_embedded_prior_is_more_than_twice_as_fast_as_the_plain_loop():
    result = bench.measure("digits", 32, rounds=1, memory=False, arms=["loop", "fedprior"])
    assert result["prior"] == "digits"
    assert result["speedup"]["loop"] > 2


def test_on_a_cpu_memory_is_the_peak_of_a_process_of_its_own(monkeypatch):
    asked = []
    peak = bench._peak_of_a_process
    monkeypatch.setattr(bench, "_peak_of_a_process", lambda arm, *a: asked.append(arm) or peak(arm, *a))
    before = bench.peak_megabytes()
    result = bench.measure("digits", 2, rounds=1, arms=["fedprior"], prompts=["a photo of a two"], steps=1)
    assert asked == ["fedprior"]
    assert 100 < result["fedprior"]["peak_MB"] < 20_000  # torch and diffusers alone take hundreds
    assert bench.peak_megabytes() >= before


def test_the_peak_follows_what_a_process_took():
    code = "from fedprior.priors.bench import peak_megabytes as p; a = p(); x = bytearray(300 * 10**6); print(p() - a)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 280 < float(done.stdout) < 400


def test_a_benchmark_of_nothing_and_unknown_arms_are_refused():
    for words, options in {
        "at least 1 image": {"images": 0},
        "1 round": {"rounds": 0},
        "unknown arm 'x'; choose from loop, batch, fedprior": {"arms": ["x"]},
    }.items():
        with pytest.raises(UsageError, match=words):
            bench.measure("digits", **options)


def test_prompts_are_those_of_the_priors_classes():
    assert bench._prompts(embedded.load("digits"))[0] == "a photo of a zero"


def test_the_script_for_a_gpu_runs_at_toy_widths(tmp_path):
    done = subprocess.run([sys.executable, SCRIPT, "--tiny"], capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    assert [row["batch_size"] for row in report["rows"]] == [32] * 4
    assert report["rows"][1]["guidance_interval"] == "0.2-0.8"
    assert report["rows"][0]["result"]["speedup"].keys() == {"loop", "batch"}
    assert report["left_out"] == []
    if not torch.cuda.is_available():
        alone = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
        assert alone.returncode == 1
        assert "no CUDA device" in alone.stderr
