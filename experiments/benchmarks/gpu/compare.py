"""Several ways to do the same work, timed in turns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from experiments.benchmarks import rounds
from experiments.benchmarks.gpu.jobs import Setting
from experiments.benchmarks.gpu.timing import Prepared, Work, clock, compile_ahead, kernels
from experiments.benchmarks.rounds import interleave
from experiments.benchmarks.stats import ratio, series, spread


def compare(
    setting: Setting,
    works: dict[str, Work],
    ours: Iterable[str],
    flops: float = 0.0,
    moved: float = 0.0,
    peers: dict[str, rounds.Side] | None = None,
    absent: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Times all of `works` and `peers`, round by round.

    Args:
        works: name -> what our clock times.
        ours: names of works; ratios are all others' seconds over theirs.
        flops, moved: of the work itself.
        peers: name -> what times itself.
        absent: name -> why it is not there.

    Returns:
        "seconds", "tflops" and "bytes_per_second" of each side as medians and quartiles, "ratios",
        "raw" rounds, and "failed": name -> reason, of what could not be prepared. With
        `compile_only`: "compiled", name -> whether it was.

    Raises:
        RuntimeError: nothing could be timed.
    """
    if setting.compile_only:
        return {
            "compiled": {name: compile_ahead(work, setting.tiny) for name, work in works.items()}
        }
    prepared, failed = prepare(works, setting.tiny)
    sides: dict[str, rounds.Side] = {
        name: lambda _, p=p: clock(setting.tiny).sample(p) for name, p in prepared.items()
    }
    sides |= peers or {}
    if not sides:
        raise RuntimeError("; ".join(f"{name}: {reason}" for name, reason in failed.items()))
    timed = interleave(sides, setting.plan, settled=False)
    found = {name: series(timed.rounds, name, "seconds") for name in sides}

    def rates(work: float) -> dict[str, dict[str, float]]:
        return (
            {name: spread([work / value for value in values]) for name, values in found.items()}
            if work
            else {}
        )

    return {
        "flops": flops,
        "bytes": moved,
        "seconds": {name: spread(values) for name, values in found.items()},
        "tflops": rates(flops / 1e12),
        "bytes_per_second": rates(moved),
        "ratios": [
            ratio(timed.rounds, over, under)
            for under in ours
            for over in sides
            if under in sides and over != under
        ],
        "host_was_ahead": {name: all(series(timed.rounds, name, "ahead")) for name in prepared},
        "programs": {
            name: one.about | {"queued": [one.leads, one.short, one.long]}
            for name, one in prepared.items()
        },
        "kernels": {name: _kernels(one) for name, one in prepared.items()}
        if setting.profile
        else {},
        "failed": failed | (absent or {}),
        "raw": asdict(timed),
    }


def prepare(works: dict[str, Work], tiny: bool) -> tuple[dict[str, Prepared], dict[str, str]]:
    """Whatever compiles and runs, and why the rest does not: one way's fault is not the others'."""
    prepared, failed = {}, {}
    for name, work in works.items():
        try:
            prepared[name] = clock(tiny).prepare(work)
        except Exception as error:  # whatever the compiler or the device objects to is the result
            failed[name] = reason_of(error)
    return prepared, failed


def _kernels(prepared: Prepared) -> dict[str, Any]:
    """Microseconds of each kernel of a call, or why they are not known."""
    try:
        return {"microseconds": kernels(prepared)}
    except (LookupError, RuntimeError, ValueError) as error:
        return {"failed": reason_of(error)}


def reason_of(error: Exception) -> str:
    """An exception as one line of the record."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:500]


def median_ratio(result: dict[str, Any], over: str, under: str) -> float | None:
    """The median of one of a result's ratios; None where it was not measured."""
    found = [
        r["median"] for r in result.get("ratios", []) if (r["over"], r["under"]) == (over, under)
    ]
    return found[0] if found else None
