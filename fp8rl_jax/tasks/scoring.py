"""What a reward's return value has to be."""

from __future__ import annotations

import math
from typing import Any

FLOAT32_MAX = 3.4028234663852886e38


def to_score(value: Any) -> float:
    """`value` as a finite float that float32 can hold.

    Raises:
        TypeError: it is no number (None, a string, a coroutine, an array of several values).
        ValueError: it is NaN, infinite, or beyond float32.
    """
    if not hasattr(value, "__float__"):
        raise TypeError(f"the reward returned {type(value).__name__} instead of a number")
    score = float(value)
    if not math.isfinite(score) or abs(score) > FLOAT32_MAX:
        raise ValueError(f"the reward returned {score}")
    return score
