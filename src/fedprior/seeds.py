"""The one rule for randomness: a stream is a pure function of (seed, purpose, key).

Nothing in fedprior draws from a global generator. Two draws share a stream only when their seed,
purpose and key agree, so the result never depends on the number of workers, the batch size or the
order in which clients finish.
"""

import hashlib

import numpy as np


def sequence(seed: int, purpose: str, *key: int) -> np.random.SeedSequence:
    """The root of a stream. `purpose` is a short fixed word ("cohort"), `key` for example (round, client)."""
    word = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:4], "big")
    return np.random.SeedSequence([seed, word, len(key), *key])


def stream(seed: int, purpose: str, *key: int) -> np.random.Generator:
    """A numpy generator for (seed, purpose, key); all numbers must be >= 0."""
    return np.random.default_rng(sequence(seed, purpose, *key))


def number(seed: int, purpose: str, *key: int) -> int:
    """A 63-bit integer for (seed, purpose, key): the seed of a torch generator or of one synthetic image."""
    return int(sequence(seed, purpose, *key).generate_state(1, np.uint64)[0] >> np.uint64(1))
