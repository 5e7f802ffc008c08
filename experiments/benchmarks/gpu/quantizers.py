"""Part `quantize`: quantizers, in bytes a second, against the same arithmetic as XLA fuses it.

The cache write is checked and not timed here: it works in place, and a program that is run again on
the same inputs would copy the whole cache first. The part `step` has it where it belongs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from experiments.benchmarks.gpu.jobs import Job, Setting
from experiments.benchmarks.gpu.timing import Work, compare
from pallas_kernels.check.cases import Case

OURS, XLA = "ours", "XLA"


def jobs(setting: Setting) -> list[Job]:
    sources = (__name__, "pallas_kernels.quantize.cases")
    return [
        Job(case.name, partial(_case, setting, case), sources, "quantize")
        for case in setting.cases("quantize", "real")
    ]


def _case(setting: Setting, case: Case) -> dict[str, Any]:
    works = {
        OURS: Work(lambda *a: case.run(*a, backend=setting.backend), case.arguments),
        XLA: Work(lambda *a: case.run(*a, backend="reference"), case.arguments),
    }
    return compare(setting, works, (OURS,), case.flops, case.bytes)
