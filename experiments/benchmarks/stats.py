"""Medians, quartiles and ratios of timed rounds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experiments.benchmarks.rounds import Round


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles (linear interpolation between neighbours), and iqr = q3 - q1."""
    q1, median, q3 = (float(q) for q in np.percentile(values, (25, 50, 75)))
    return {"median": median, "q1": q1, "q3": q3, "iqr": q3 - q1}


def series(rounds: Sequence[Round], side: str, part: str) -> list[float]:
    """The seconds of one part of one side, round by round."""
    return [round.seconds[side][part] for round in rounds]


def ratio(rounds: Sequence[Round], over: str, under: str, part: str = "seconds") -> dict:
    """`over`'s seconds divided by `under`'s, pair by pair: both were timed within the same round.

    Returns:
        The spread of the pairs' ratios, "pairs" themselves, and what was divided: "over", "under",
        "part".
    """
    pairs = [
        a / b for a, b in zip(series(rounds, over, part), series(rounds, under, part), strict=True)
    ]
    return {"over": over, "under": under, "part": part, **spread(pairs), "pairs": pairs}


def common_parts(rounds: Sequence[Round], one: str, other: str) -> list[str]:
    """Parts that both sides have, the total ("seconds") first."""
    return [part for part in rounds[0].seconds[one] if part in rounds[0].seconds[other]]
