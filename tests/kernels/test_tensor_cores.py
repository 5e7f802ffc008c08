"""Sums as tensor cores make them, against an implementation that was held against H100s bit for
bit."""

import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from experiments.benchmarks.gpu.checks import tensor_core_sums
from experiments.benchmarks.gpu.jobs import Setting
from pallas_kernels.check import device, tensor_cores
from pallas_kernels.check.tensor_cores import accumulate, errors, replace_products

KEPT = json.loads(Path(__file__).with_name("tensor_core_sums.json").read_text())
RESULTS = Path(__file__).parents[2] / "experiments/results/exact/tensor_cores.json"


@pytest.mark.parametrize("of", KEPT["rows"], ids=lambda x: f"{x['left']}-{x['right']}-{x['k']}")
def test_the_bits_are_those_of_mmaemu(of):
    """Its model of Hopper gives the bits of an H100 in every case that was recorded there."""
    k, draws = of["k"], np.random.RandomState(of["k"])

    def operand(dtype):
        x = draws.randint(0, 256, (8, k)).astype(np.uint8).view(dtype)
        return np.where(np.isfinite(x.astype(np.float64)), x, np.zeros_like(x))

    a, b = operand(of["left"]), operand(of["right"])
    start = of["start"] * draws.standard_normal((8, 8)) * np.exp(3 * draws.standard_normal((8, 8)))
    found = accumulate(start.astype(np.float32), a, b.T)
    assert found.astype(">f4").tobytes().hex() == of["bits"]


def one(dtype, left, right, start=0.0):
    a, b = (np.array([x], np.float64).astype(dtype) for x in (left, right))
    return float(accumulate(np.full((1, 1), start, np.float32), a, b.T)[0, 0])


def test_what_is_below_the_last_bit_is_cut():
    e4m3, bf16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
    # 2^8 + 2^-5 is 2^8 (1 + 2^-13), and the next power is gone
    assert one(e4m3, [256, 2**-5], [1, 1]) == 256 + 2**-5
    assert one(e4m3, [256, 2**-6], [1, 1]) == 256 == one(e4m3, [256, 2**-6, 2**-6], [1, 1, 1])
    assert one(e4m3, [-256, -(2**-6)], [1, 1]) == -256  # towards zero
    # 33 products are two instructions, and the accumulator is cut between them
    ones = [256] + [0] * 31 + [2**-6]
    assert one(e4m3, ones, [1] * 33, 2**-6) == 256
    # 25 bits are kept of an addend and 23 of the sum
    assert one(bf16, [1, *[2.0**-25] * 4], [1] * 5) == 1 + 2.0**-23
    assert one(bf16, [1, *[2.0**-25] * 3], [1] * 4) == 1
    assert one(bf16, [1, 2.0**-26, 2.0**-26], [1] * 3) == 1
    assert math.isnan(one(e4m3, [math.nan, 1], [1, 1])) and one(e4m3, [3], [0], math.inf) == (
        math.inf
    )
    with pytest.raises(KeyError):
        one(np.float32, [1], [1])


def test_the_interpreter_adds_so(monkeypatch):
    monkeypatch.setattr(np, "matmul", np.matmul)
    replace_products(lambda left, right, dtype: "another")
    a, b = (np.array([[256, 2**-6]], ml_dtypes.float8_e4m3fn) for _ in range(2))
    b[:] = 1
    total = np.full((1, 1), 2**-6, np.float32) + np.matmul(a, b.T, dtype=np.float32)
    assert total == 256 and np.matmul(np.ones((1, 1)), np.ones((1, 1)), dtype=float) == "another"


def test_bounds_on_a_card_hold_for_data_of_both_signs_and_for_no_others():
    found = {(x["data"], x["operands"]): x for x in errors(tensor_cores.BLOCK)}
    kept = json.loads(RESULTS.read_text())["rows"]
    # another machine's normal numbers may end in another bit, which e4m3 may round elsewhere
    for row in kept[: len(found)]:
        assert found[row["data"], row["operands"]]["largest"] == pytest.approx(row["largest"], 0.2)
    normal, one_sign = (found[name, "float8_e4m3fn"]["largest"] for name in ("normal", "one sign"))
    assert normal < device.SHORT_SUM < one_sign
    assert found["one sign", "float8_e4m3fn"]["mean"] < -5e-4  # it only loses


def test_a_card_that_adds_otherwise_is_seen():
    """XLA on a CPU adds in float32, and so not as a tensor core."""
    found = tensor_core_sums(Setting(tiny=True), "float8_e4m3fn")["sums"]
    assert len(found) == 9 and found["one sign, 8 rows"]["equal"] < 0.1
    assert 1e-4 < found["one sign, 8 rows"]["difference"] < 1e-2
