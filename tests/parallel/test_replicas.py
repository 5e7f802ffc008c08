"""Weight gradients in e4m3 between replicas: values and overflow on simulated devices and in two
processes, bytes in the program for Hopper."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from parallel.helpers import ROOT, run_on_devices, run_processes

SCRIPT = Path(__file__).with_name("on_gradients.py")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run_on_devices(SCRIPT, 8)


def test_sums_are_those_of_the_definition(found):
    """In float64: one scale for all parts, codes added up, saturated; and the bytes that
    Azure/MS-AMP's test of its all-reduce has (tests/operators/test_dist.py, commit 9746ea8):
    [4A, 58] + [50, 5C] = [55, 62]."""
    for numbers in (found["two"], found["eight"]):
        assert numbers["sum"] and numbers["share"] and numbers["saturates"] > 0.1
    assert found["two"]["bytes"] == [[0x55, 0x62]] * 2


@pytest.mark.parametrize(("micro", "start"), [("1", 8**-0.5), ("2", 2**-0.5)])
def test_an_update_is_that_of_float32_up_to_the_rounding(found, micro, start):
    """Eight replicas; and two, of two micro-batches each. Loss, log-probabilities and metrics are
    those of the whole batch."""
    told = found["updates"][micro]
    assert told["far"] < 0.06 and told["logprobs"] < 1e-5 and told["metrics"] < 1e-5
    assert told["more_metrics"] == ["optim/gradient_saturated", "optim/gradient_scale"]
    assert told["norms"][0] == pytest.approx(told["norms"][1], rel=0.01)
    assert told["scales"][0] == pytest.approx(start)
    # halved where the first sum saturated, and a thousandth of a doubling higher elsewhere
    grown = start * 2 ** (1 / 1000)
    halved = told["saturated"][0] > 1e-5
    assert told["scales"][1] == pytest.approx(start / 2 if halved else grown, rel=1e-5)


def test_two_processes_add_up_the_same_bytes():
    for told in run_processes(SCRIPT, 2, 1):
        assert told["bytes"] == [[0x55, 0x62]] * 2 and told["sum"]


@pytest.mark.slow
@pytest.mark.usefixtures("toolchain")
def test_a_quarter_of_the_bytes_travel_in_the_program_for_hopper():
    """What a device sends: codes of matrices, and in float32 norms and a scale for each matrix."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, "-m", "parallel.on_gradients_hopper"]
    environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    sent = json.loads(done.stdout.splitlines()[-1])
    plain, packed = sent["float32"], sent["e4m3-power_of_two"]
    assert plain.keys() == {"f32"} and packed.keys() == {"f32", "u8"}
    assert packed["u8"] == pytest.approx(plain["f32"] / 4, rel=0.03)
    assert sum(packed.values()) < 0.27 * sum(plain.values())
    assert sent["bfloat16"]["u16"] == pytest.approx(plain["f32"] / 2, rel=0.03)
