import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
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


COMMAND = (  # Ctrl-C counts, also where the tests are a shell's background job, which ignores it
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\nfrom fedprior.cli import main; main()"
)


@pytest.fixture
def endless():
    """Starts commands that take hours, each in a process group of its own, and ends what the test leaves of them."""
    begun = []

    def start(words, ready):
        child = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        begun.append(child)
        while not ready():
            assert child.poll() is None, child.communicate()
            time.sleep(0.05)
        return child

    yield start
    for child in begun:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


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
