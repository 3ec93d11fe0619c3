"""One environment a peer, made where it is missing, with the versions of `constraints.txt` that the arithmetic
depends on. (Of other packages several peers exclude the versions in there.)"""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
SHARED = ("torch", "numpy", "pillow", "psutil")  # what the benchmark's own modules import


@dataclass(frozen=True)
class Packages:
    """What a peer is installed from: `bare` ones without what they depend on (torchvision) and whatever Python they
    ask for, `others` in the place of that."""

    others: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()


PEERS = {
    "flwr": Packages(others=("flwr[simulation]==1.42.0",)),
    "pfl": Packages(others=("pfl[pytorch]==0.6.0",)),
    "fluke": Packages(
        others=(
            *(
                "cerberus",
                "clearml",
                "datasets",
                "diskcache",
                "hydra-core",
                "matplotlib",
                "omegaconf",
                "opacus",
                "pandas",
            ),
            *("pyyaml", "requests", "rich", "scikit-learn", "seaborn", "tensorboard", "torchmetrics", "typer", "wandb"),
        ),
        bare=("fluke-fl==0.8.1",),
    ),
    "fedlab": Packages(others=("munch", "nvidia-ml-py", "pandas", "scikit-learn", "tqdm"), bare=("fedlab==1.3.0",)),
    "blazefl": Packages(others=("tqdm",), bare=("blazefl==2.0.2",)),  # asks for Python 3.12, runs on 3.11
}


def interpreter(folder: Path, peer: str) -> str:
    """The interpreter of a peer's environment, which is there whole or made anew."""
    place = folder / peer
    own, whole = place / "bin" / "python", place / "installed"
    wanted = repr(PEERS[peer])
    if not whole.exists() or whole.read_text() != wanted:
        print(f"installing {peer}", file=sys.stderr, flush=True)
        if place.exists():
            shutil.rmtree(place)
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        pins = [line for line in CONSTRAINTS.read_text().splitlines() if line.partition("==")[0] in SHARED]
        (place / "constraints.txt").write_text("\n".join(pins))
        pip = [str(own), "-m", "pip", "install", "--quiet", "--constraint", str(place / "constraints.txt")]
        subprocess.run([*pip, *SHARED, *PEERS[peer].others], check=True)
        if PEERS[peer].bare:
            subprocess.run([*pip, "--no-deps", "--ignore-requires-python", *PEERS[peer].bare], check=True)
        whole.write_text(wanted)
    return str(own)
