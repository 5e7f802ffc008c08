"""From timed rounds to what stands in the JSON file."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from experiments.benchmarks.contest import Contest
from experiments.benchmarks.stats import common_parts, ratio, series, spread
from experiments.benchmarks.workloads import Shape, Workload


def result(benchmark: str, workload: Workload, shape: Shape, contest: Contest) -> dict[str, Any]:
    """One benchmark's entry.

    Returns:
        "ratios", which hold anywhere, and "raw", which holds on this machine only. A workload whose
        times are results of their own has "seconds" beside them, and "tokens_per_second" of the
        rollout where there is one.
    """
    rounds = contest.timed.rounds
    seconds = {
        side: {part: spread(series(rounds, side, part)) for part in parts}
        for side, parts in rounds[0].seconds.items()
    }
    entry = {
        "benchmark": benchmark,
        "workload": workload.describe(),
        "shape": asdict(shape),
        "sides": contest.about,
        "ratios": [
            ratio(rounds, *pair, part)
            for pair in contest.pairs
            for part in common_parts(rounds, *pair)
        ],
    }
    raw = asdict(contest.timed)
    if not workload.absolute:
        return entry | {"raw": raw | {"seconds": seconds}}
    entry |= {"seconds": seconds, "raw": raw}
    if benchmark == "trained_layer":
        return entry
    rates = {}
    for side, parts in rounds[0].seconds.items():
        part = "gen" if "gen" in parts else "seconds"
        rates[side] = spread([shape.tokens / value for value in series(rounds, side, part)])
    return entry | {"tokens_per_second": rates}
