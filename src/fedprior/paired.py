"""Whether two settings that were run with the same seeds differ by more than chance."""

import math

import numpy as np

LEVEL = 0.05  # of the test
LEAST = 3  # seeds: with two, gaps of 10 points may be "not significant"
FEW = 5  # seeds; with fewer the test has little power


def the_test(seeds: str) -> str:
    """The test in words, over so many seeds."""
    return f"two-sided paired t-test over {seeds} at {100 * LEVEL:.0f} %"


def differs(gaps: np.ndarray) -> bool:
    """Whether the mean of float64 [seeds] is told from 0 by a two-sided t-test at 5 %; of the differences between two
    rows it is the paired t-test, which lets each row have a spread of its own. Two numbers tell nothing: False."""
    from scipy import stats

    n = len(gaps)
    if n < LEAST:
        return False
    mean, noise = float(gaps.mean()), float(gaps.std(ddof=1)) / math.sqrt(n)
    if noise <= 1e-9:  # of points: the same difference with every seed
        return abs(mean) > 1e-9
    return bool(2 * stats.t.sf(abs(mean) / noise, n - 1) < LEVEL)
