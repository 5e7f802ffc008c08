"""Part `checks`: whether the kernels are right on this card, and always the same."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from functools import partial
from typing import Any

import jax
import numpy as np
from jax._src.lib import xla_client

from experiments.benchmarks.gpu.bounds import magnitudes, same_bits, sums_of_magnitudes, verdict
from experiments.benchmarks.gpu.compare import Job
from experiments.benchmarks.gpu.independence import neighbours, rows
from experiments.benchmarks.gpu.references import reference_of
from experiments.benchmarks.gpu.setting import Setting, arrays_of
from pallas_kernels.check.cases import Case

RUNS = 3  # of the same input: a race shows as other bits
ROWS_OF = ((4096, 4096), (1024, 4096), (4096, 12288))
ROW_COUNTS = (1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 127, 128, 129, 136, 1000, 4096)


def jobs(setting: Setting, stack: ExitStack) -> list[Job]:
    """Small cases of every operation first, then what must not depend on the batch, then real shapes."""
    small = [(f"small: {name} {c.name}", partial(against_expected, setting, name, c)) for name, c in _all(setting, "small")]
    real = [(f"real: {name} {c.name}", partial(against_reference, setting, name, c)) for name, c in _all(setting, "real")]
    shapes, counts = (((256, 640),), (1, 9, 24)) if setting.tiny else (ROWS_OF, ROW_COUNTS)
    same = [(f"rows: matmul {n}x{k}", partial(rows, setting, n, k, counts)) for n, k in shapes]
    same.append(("neighbours: decode_attention", partial(neighbours, setting)))
    return [*([] if setting.tiny else [("card", describe)]), *small, *same, *real]


def _all(setting: Setting, sizes: str) -> list[tuple[str, Case]]:
    return [(name, case) for name in setting.operations for case in setting.cases(name, sizes)]


def against_expected(setting: Setting, operation: str, case: Case) -> dict[str, Any]:
    """A small case against float64."""
    arrays = arrays_of(case, jax.random.key(0))
    got, equal = run_often(setting, case, arrays)
    want, sums = case.expected(*map(np.asarray, arrays)), None
    if sums_of_magnitudes(operation, case):
        sums = case.expected(*map(np.asarray, magnitudes(arrays)))
    return _judged(verdict(operation, case, got, want, sums), equal)


def against_reference(setting: Setting, operation: str, case: Case) -> dict[str, Any]:
    """A real case against plain XLA on the device."""
    arrays = arrays_of(case, jax.random.key(0))
    got, equal = run_often(setting, case, arrays)
    reference = reference_of(operation, case)
    sums = reference(magnitudes(arrays)) if sums_of_magnitudes(operation, case) else None
    return _judged(verdict(operation, case, got, reference(arrays), sums), equal)


def run_often(setting: Setting, case: Case, arrays: tuple) -> tuple[Any, bool]:
    """The result, and whether it was the same bits each time."""
    run = jax.jit(lambda *a: case.run(*a, backend=setting.backend))
    first = jax.block_until_ready(run(*arrays))
    return first, all([bool(same_bits(first, run(*arrays))) for _ in range(RUNS - 1)])


def _judged(found: dict[str, Any], equal: bool) -> dict[str, Any]:
    found |= {"runs_equal": equal, "passed": found["passed"] and equal}
    if not found["passed"]:
        print(f"  WRONG: {found}", flush=True)
    return found


def describe() -> dict[str, Any]:
    """XLA's description of this card, for compiling without one, and the assembler that is found first."""
    target = xla_client.get_topology_for_devices(jax.devices()).target_config
    asked = subprocess.run(["ptxas", "--version"], capture_output=True, text=True, check=False)
    return {"target_config": str(target), "ptxas": asked.stdout.strip().splitlines()[-1:], "passed": True}
