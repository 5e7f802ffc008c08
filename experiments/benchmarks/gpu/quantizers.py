"""Part `quantize`: quantizers, in bytes a second, against the same arithmetic as XLA fuses it."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

from experiments.benchmarks.gpu.compare import Job, compare
from experiments.benchmarks.gpu.setting import Setting
from experiments.benchmarks.gpu.timing import Clock, Work
from pallas_kernels.check.cases import OPERATIONS, Case

OURS, XLA = "ours", "XLA"
MEMORY_BOUND = ("quantize", "cache_write")


def jobs(setting: Setting, stack: ExitStack) -> list[Job]:
    """Operations that move bytes and multiply nothing."""
    clock, found = Clock(setting.tiny), [name for name in MEMORY_BOUND if name in OPERATIONS]
    if not found:
        return [("quantize", _missing)]
    cases = [(name, case) for name in found for case in setting.cases(name, "real")]
    return [(f"{name} {case.name}", partial(_case, setting, clock, case)) for name, case in cases]


def _missing() -> dict[str, Any]:
    raise LookupError("this version has no quantizers of its own")


def _case(setting: Setting, clock: Clock, case: Case) -> dict[str, Any]:
    works = {
        OURS: Work(lambda *a: case.run(*a, backend=setting.backend), case.arguments),
        XLA: Work(lambda *a: case.run(*a, backend="reference"), case.arguments),
    }
    return compare(setting, clock, works, (OURS,), case.flops, case.bytes)
