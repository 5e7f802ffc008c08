"""Intervals of means over the steps of a run, which follow on each other and are not independent.

Blocks of consecutive steps are drawn with replacement, within each seed, and put together to a run of the same length (the
circular block bootstrap of Politis and Romano, 1992). So an interval covers the noise of steps, not the choice of seeds:
those are too few for that, and their means are given beside it.
"""

from __future__ import annotations

import numpy as np

BLOCK = 10
DRAWS = 2000


def draws(seeds: int, steps: int) -> np.ndarray:
    """Step numbers of all resampled runs, int [DRAWS, seeds, steps], the same at every call: what is drawn for one variant
    is drawn for every other, so ratios of means are paired."""
    rng = np.random.default_rng(0)
    starts = rng.integers(0, steps, (DRAWS, seeds, -(-steps // BLOCK)))
    drawn = (starts[..., None] + np.arange(BLOCK)) % steps
    return drawn.reshape(DRAWS, seeds, -1)[..., :steps]


def means(values: np.ndarray) -> np.ndarray:
    """Means of all resampled runs, float64 [DRAWS]; `values` is [seeds, steps]."""
    drawn = draws(*values.shape)
    return np.take_along_axis(values[None], drawn, axis=2).mean(axis=(1, 2))


def interval(samples: np.ndarray) -> tuple[float, float]:
    """The middle 95 %."""
    low, high = np.percentile(samples, (2.5, 97.5))
    return float(low), float(high)
