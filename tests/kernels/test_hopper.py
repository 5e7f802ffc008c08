"""The operations on Hopper, without one: every small case is played with race detection, and
compiled to sm_90a with every fourth of the real ones, which are sweeps of shapes (`python -m
pallas_kernels.check.compile OPERATION` compiles all).

A kernel with a fault in its barriers hangs, so each operation is played in a process that is killed
when it takes too long.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
from filelock import FileLock

from pallas_kernels.check.cases import OPERATIONS, Case, cases_of
from pallas_kernels.mosaic import SMEM_BYTES

SECONDS = 1200  # of all cases of an operation; a machine without other work needs a tenth


def run(check: str, *arguments: str, seconds: float) -> list[dict]:
    """The result of each case that finished; a last entry "hangs" or "died" where one did not."""
    command = [sys.executable, "-m", f"pallas_kernels.check.{check}", *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=seconds,
            env=dict(os.environ, JAX_PLATFORMS="cpu"),
        )
        output, fault = done.stdout, done.returncode and {"died": done.stderr[-2000:]}
    except subprocess.TimeoutExpired as late:
        output, fault = (late.stdout or b"").decode(), {"hangs": f"after {seconds} s"}
    lines = output.splitlines()
    results = [json.loads(line) for line in lines if line.startswith("{")]
    return results + (
        [{"case": lines[-1].removeprefix("# ") if lines else "", **fault}] if fault else []
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """check, operation -> case -> result; each runs once, for whichever of pytest's workers asks
    first."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def of(check: str, operation: str) -> dict[str, dict]:
        file = shared / f"{check}-{operation}.json"
        with FileLock(f"{file}.lock"):
            if not file.exists():
                names = [
                    case.name for case in chosen(operation, real=4 if check == "compile" else 0)
                ]
                file.write_text(json.dumps(run(check, operation, *names, seconds=SECONDS)))
        return {result["case"]: result for result in json.loads(file.read_text())}

    return of


def chosen(operation: str, real: int) -> list[Case]:
    """The small cases, and every `real`-th of the real ones; 0: none of these."""
    return [*cases_of(operation, "small"), *(cases_of(operation, "real")[::real] if real else ())]


def every(real: int) -> list:
    return [
        pytest.param(operation, case, id=f"{operation}-{case.name}")
        for operation in OPERATIONS
        for case in chosen(operation, real)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("operation, case", every(0))
def test_values_without_a_race(results, operation, case):
    found = results("interpret", operation).get(
        case.name, {"missing": "the process ended before it"}
    )
    assert set(found) == {"case", "difference", "races"}, found
    assert found["difference"] <= case.tolerance and not found["races"], found


@pytest.mark.slow
@pytest.mark.parametrize("operation, case", every(4))
@pytest.mark.usefixtures("toolchain")
def test_machine_code(results, operation, case):
    found = results("compile", operation).get(case.name, {"missing": "the process ended before it"})
    assert found.get("kernels"), found
    for kernel in found["kernels"]:
        # PTX 9.3 came with ptxas 13.3
        assert kernel["target"] == "sm_90a" and float(kernel["isa"]) >= 9.3, kernel
        assert kernel["spilled"] == 0 and kernel["smem"] <= SMEM_BYTES, kernel
    assert not case.instruction or any(
        case.instruction in name for k in found["kernels"] for name in k["products"]
    ), found


BUGS = {
    "commit_smem": lambda found: found["races"],
    "wait_smem_to_gmem": lambda found: "copy_smem_to_gmem" in found["raised"],
    "barrier_wait": lambda found: "Barrier" in found["raised"] or found.get("races"),
}


@pytest.mark.slow
@pytest.mark.parametrize("without", BUGS)
def test_the_interpreter_sees_what_is_left_out(without):
    [found] = run("interpret", "matmul", "ring-wraps", "--without", without, seconds=SECONDS)
    assert BUGS[without](found), found


def test_a_consumer_that_hands_nothing_back_hangs():
    began = time.monotonic()
    [found] = run("interpret", "matmul", "ring-wraps", "--without", "barrier_arrive", seconds=15)
    assert found == {"case": "ring-wraps", "hangs": "after 15 s"} and time.monotonic() - began < 45


def test_a_case_that_is_not_there_is_named():
    [found] = run("interpret", "matmul", "no-such-case", seconds=60)
    assert "no-such-case" in found["died"] and "ring-wraps" in found["died"]
