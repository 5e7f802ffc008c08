"""The operations on Hopper, without one: every small case is played with race detection, and
compiled to sm_90a with every fourth of the real ones (`python -m pallas_kernels.check.compile
OPERATION` compiles all). What has been checked as it is now is not checked again, but for an eighth
of it (pallas_kernels/check/verdicts.py; `make hopper ALL=1` checks everything).

A kernel with a fault in its barriers hangs, so each operation is played in a process that is killed
when it takes too long.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import nullcontext
from datetime import date, timedelta

import jax
import jax.numpy as jnp
import pytest
from filelock import FileLock
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.backend import tracing_for
from pallas_kernels.check import verdicts
from pallas_kernels.check.cases import OPERATIONS
from pallas_kernels.check.sources import ROOT
from pallas_kernels.check.verdicts import chosen, due, known, run

ALL = "FP8RL_ALL_CHECKS"
WHOLE_ROWS = {"memref<128x128xf32>", "memref<128x128xbf16>"}
"""Of grouped products: memory that Mosaic swizzles unasked, and that is written from a multiple of
1,024 bytes on; right on an H200."""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """check, operation -> case -> result; each runs once, for whichever of pytest's workers asks
    first. Where nothing has changed that it depends on, the result is the one that is kept."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def of(check: str, operation: str) -> dict[str, dict]:
        file = shared / f"{check}-{operation}.json"
        with FileLock(f"{file}.lock"):
            if not file.exists():
                kept = {} if os.environ.get(ALL) else known(check, operation)
                names = [case.name for case in chosen(check, operation)]
                wanted = [x for x in names if x not in kept or due(x, date.today())]
                fresh = run(check, operation, *wanted) if wanted else []
                file.write_text(json.dumps(kept | {x["case"]: x for x in fresh}))
        return json.loads(file.read_text())

    return of


def every(check: str) -> list:
    return [
        pytest.param(operation, case, id=f"{operation}-{case.name}")
        for operation in OPERATIONS
        for case in chosen(check, operation)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("operation, case", every("interpret"))
def test_values_without_a_race(results, operation, case):
    found = results("interpret", operation).get(
        case.name, {"missing": "the process ended before it"}
    )
    assert set(found) == {"case", "difference", "races"}, found
    assert found["difference"] <= case.tolerance and not found["races"], found


@pytest.mark.slow
@pytest.mark.parametrize("operation, case", every("compile"))
@pytest.mark.usefixtures("toolchain")
def test_machine_code(results, operation, case):
    found = results("compile", operation).get(case.name, {"missing": "the process ended before it"})
    assert found.get("kernels") and set(found["swizzled"]) <= WHOLE_ROWS, found
    for kernel in found["kernels"]:
        # PTX 9.3 came with ptxas 13.3
        assert kernel["target"] == "sm_90a" and float(kernel["isa"]) >= 9.3, kernel
        assert kernel["spilled"] == 0 and kernel["smem"] <= mosaic.SMEM_BYTES, kernel
    assert not case.instruction or any(
        case.instruction in name for k in found["kernels"] for name in k["products"]
    ), found


@pytest.mark.parametrize(
    "shape, staging, refused",
    [
        ((3, 8, 200), mosaic.SMEM, "a side of 200"),
        ((3, 8, 32), mosaic.SMEM, "a side of 32"),
        ((3, 20, 256), mosaic.SMEM, "a side of 20"),
        ((3, 8, 256), mosaic.SMEM, ""),
        ((3, 20, 200), mosaic.tiled, ""),
    ],
)
def test_a_copy_that_may_overwrite_the_next_row_is_refused(shape, staging, refused):
    """The interpreter cuts off what a GPU does not: 64 numbers at a time of a row of 200 end in the
    first 56 of the next one."""

    def body(out, staged):
        i = lax.axis_index("block")
        to = out.at[i, mosaic.ds(i * 8, 8), mosaic.ds(i * 64, 64)]
        mosaic.copy_smem_to_gmem(staged.at[...], to)

    out, scratch = jax.ShapeDtypeStruct(shape, jnp.float32), [staging((8, 64), jnp.float32)]
    with tracing_for(2):
        kernel = mosaic.launch(body, out, scratch=scratch, threads=1, tiles=2, name="copy")
        with pytest.raises(ValueError, match=refused) if refused else nullcontext():
            jax.make_jaxpr(kernel)()


BUGS = {
    "commit_smem": lambda found: found["races"],
    "wait_smem_to_gmem": lambda found: "copy_smem_to_gmem" in found["raised"],
    "barrier_wait": lambda found: "Barrier" in found["raised"] or found.get("races"),
}


@pytest.mark.slow
@pytest.mark.parametrize("without", BUGS)
def test_the_interpreter_sees_what_is_left_out(without):
    [found] = run(
        "interpret", "matmul", "ring-wraps", "--without", without, seconds=verdicts.SECONDS
    )
    assert BUGS[without](found), found


def test_a_consumer_that_hands_nothing_back_hangs():
    began = time.monotonic()
    [found] = run("interpret", "matmul", "ring-wraps", "--without", "barrier_arrive", seconds=15)
    assert found == {"case": "ring-wraps", "hangs": "after 15 s"} and time.monotonic() - began < 45


def test_a_case_that_is_not_there_is_named():
    [found] = run("interpret", "matmul", "no-such-case", seconds=60)
    assert "no-such-case" in found["died"] and "ring-wraps" in found["died"]


def test_a_verdict_holds_as_long_as_nothing_changes_that_it_depends_on(monkeypatch, tmp_path):
    kept = {"fingerprint": verdicts.fingerprint("compile", "quantize"), "results": [{"case": "a"}]}
    monkeypatch.setattr(verdicts, "_kept", lambda: {"compile": {"quantize": kept}})
    assert known("compile", "quantize") == {"a": {"case": "a"}}
    assert known("interpret", "quantize") == known("compile", "matmul") == {}
    reached = verdicts.sources("pallas_kernels.quantize.cases", "pallas_kernels.check.compile")
    names = {file.relative_to(ROOT / "pallas_kernels").as_posix() for file in reached}
    assert {"quantize/hopper.py", "mosaic.py", "qtensor.py", "check/compile.py"} <= names
    assert not any(name.startswith(("attention", "matmul")) for name in names)
    changed = tmp_path / "mosaic.py"
    changed.write_text("# another\n")
    monkeypatch.setattr(verdicts, "sources", lambda *_: [*reached, changed])
    assert known("compile", "quantize") == {}


def test_every_case_is_due_on_one_day_of_eight():
    names = [f"{op}-{case.name}" for op in OPERATIONS for case in chosen("compile", op)]
    days = [date(2026, 1, 1) + timedelta(n) for n in range(verdicts.EVERY)]
    counts = [sum(due(name, day) for name in names) for day in days]
    assert sum(counts) == len(names) and max(counts) < len(names) / 4
