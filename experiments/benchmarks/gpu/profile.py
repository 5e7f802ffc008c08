"""What a program spends its device time on, kernel by kernel, from a profiler's trace; also a second opinion on `timing.py`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from experiments.benchmarks.gpu.timing import Prepared

PROGRAMS = 3


def kernels(prepared: Prepared) -> dict[str, float]:
    """Kernel -> microseconds of a call, the longest first.

    Raises:
        LookupError: the trace has no GPU in it: this is none, or its profiler may not be used.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(PROGRAMS):
                result = prepared.program(prepared.copies)
            jax.block_until_ready(result)
        (file,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(file)).planes
        gpus = [plane for plane in planes if plane.name.startswith("/device:GPU")]
        if not gpus:
            raise LookupError("no GPU in the profiler's trace")
        events = [(e.name, e.duration_ns) for line in gpus[0].lines if line.name.startswith("Stream") for e in line.events]
    return by_name(events, PROGRAMS * prepared.calls)


def by_name(events: Iterable[tuple[str, float]], calls: int) -> dict[str, float]:
    """Microseconds of a call for each name, the longest first."""
    total: dict[str, Any] = {}
    for name, nanoseconds in events:
        total[name] = total.get(name, 0.0) + nanoseconds / 1e3 / calls
    return dict(sorted(total.items(), key=lambda item: -item[1]))
