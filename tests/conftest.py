import os
from copy import copy
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """No test reads or fills the user's cache."""
    monkeypatch.setenv("FEDPRIOR_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real data sets beside the checkout; CI checks beforehand that they are there."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real data sets at {folder}")
    return folder


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A tiny checkpoint of random weights, whose level 4 is as wide as the features of toy's net."""
    import reference_guide

    from fedprior.priors.diffusion import DiffusionPrior

    return DiffusionPrior.from_pretrained(reference_guide.checkpoint(tmp_path_factory.mktemp("prior")), steps=1)


@pytest.fixture
def prior(loaded, monkeypatch):
    """The tiny checkpoint; axes need few images."""
    from fedprior.prepare import describe

    monkeypatch.setattr(describe, "TOKENS", 300)
    monkeypatch.setattr(describe, "LEAST_IMAGES", 6)
    return copy(loaded)
