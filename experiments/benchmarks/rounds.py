"""Rounds: every side once, one after the other, so that a change in the machine's speed meets all
of them; their medians, quartiles and ratios."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Side = Callable[[int], dict[str, float]]
"""Does the work of round i (from 0, warm-up included) and returns its seconds: the total as
"seconds", and its parts."""

# Thread pools spin for some milliseconds after work; the next side starts when they sleep.
SETTLE_SECONDS = 0.3


@dataclass(frozen=True)
class Plan:
    """How often a benchmark is repeated: `warmup` rounds that do not count, then `rounds`."""

    rounds: int
    warmup: int


@dataclass(frozen=True)
class Round:
    """One round.

    Attributes:
        seconds: side -> part -> seconds, in the order in which the sides ran.
        load: the machine's load average at the end; far above the number of threads, something else
            ran too.
        peak_bytes: side -> the most memory of its process, resident, while it ran.
    """

    seconds: dict[str, dict[str, float]]
    load: float
    peak_bytes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Timed:
    """All rounds of a benchmark: those that count, and those before them."""

    rounds: list[Round]
    warmup: list[Round]


def interleave(
    sides: dict[str, Side],
    plan: Plan,
    settled: bool = True,
    processes: Mapping[str, int] | None = None,
) -> Timed:
    """Run the rounds.

    The order moves by one from round to round, so no side always follows the same other one.

    Args:
        settled: threads of the last side fall asleep before the next one, and each round is
            printed; not for sides that a device runs in microseconds.
        processes: process ids of the sides whose memory is looked at.
    """
    names, done, processes = list(sides), [], processes or {}
    for number in range(plan.warmup + plan.rounds):
        turn = number % len(names)
        seconds, peaks = {}, {}
        for name in names[turn:] + names[:turn]:
            if settled:
                settle()
            if name in processes:
                forget_peak(processes[name])
            seconds[name] = sides[name](number)
            if name in processes:
                peaks[name] = peak_bytes(processes[name])
        done.append(Round(seconds, load(), peaks))
        if settled:
            times = ", ".join(f"{name} {parts['seconds']:.2f} s" for name, parts in seconds.items())
            print(f"  round {number + 1} of {plan.warmup + plan.rounds}: {times}", flush=True)
    return split(done, plan)


def split(done: list[Round], plan: Plan) -> Timed:
    """The rounds of a finished plan."""
    return Timed(done[plan.warmup :], done[: plan.warmup])


def settle() -> None:
    """Let the threads of the side that ran last fall asleep."""
    time.sleep(SETTLE_SECONDS)


def load() -> float:
    """Processes that wanted a processor, averaged over the last minute."""
    return os.getloadavg()[0]


def forget_peak(process: int) -> None:
    """Count the most memory of a process, resident, from now on (Linux, as `peak_bytes`)."""
    Path(f"/proc/{process}/clear_refs").write_text("5")


def peak_bytes(process: int) -> int:
    """Read it."""
    status = Path(f"/proc/{process}/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


class Laps:
    """A stopwatch that waits for what JAX still computes."""

    def __init__(self) -> None:
        self.seconds = {"seconds": 0.0}
        self._last = time.perf_counter()

    def end(self, part: str, *results: Any) -> None:
        """Book the time since the last call, or the start, on `part`, which computed `results`."""
        import jax  # which `machine` must not import, as this file is

        jax.block_until_ready(results)
        now = time.perf_counter()
        self.seconds[part] = now - self._last
        self.seconds["seconds"] += now - self._last
        self._last = now


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
