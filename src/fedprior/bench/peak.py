"""The most that matrix products reach on this machine: what a step's arithmetic is measured against."""

import time

import torch

from ..net import Precision

SIZES = (256, 512, 1024, 2048)
TYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


def gflops(precision: Precision) -> float:
    """GFLOP in a CPU second (of any thread) of a product of square matrices, the best of several sizes."""
    best = 0.0
    for n in SIZES:
        a = torch.ones(n, n, dtype=TYPES[precision])
        out = a.clone()  # memory that is there, so that only arithmetic is timed
        began = time.process_time()
        torch.mm(a, a, out=out)
        best = max(best, 2 * n**3 / (time.process_time() - began) / 1e9)
    return best
