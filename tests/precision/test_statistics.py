"""What quantization did to a tensor, against float64 numpy."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fp8rl_jax.config.recipe import TensorFormat
from fp8rl_jax.precision import QuantizationSums, quantize, stack_sums, weight_sums

ROLE = ("amax", "sat_frac", "underflow_frac", "quant_snr_db")


def named(metrics: dict, role: str) -> tuple[float, ...]:
    assert set(metrics) == {f"fp8/{name}_{role}" for name in ROLE}
    return tuple(float(metrics[f"fp8/{name}_{role}"]) for name in ROLE)


def test_weight_metrics_equal_float64():
    rng = np.random.default_rng(0)
    # wide enough for underflow
    weight = rng.normal(size=(200, 300)) * np.exp(rng.normal(size=(200, 300)) * 4)
    weight[3, 5], weight[199, 7] = 0.0, 1e9
    rounded = np.asarray(jnp.asarray(weight, jnp.bfloat16)).astype(np.float64)
    restored = np.zeros_like(rounded)
    for i in range(0, 200, 128):
        for j in range(0, 300, 128):
            block = rounded[i : i + 128, j : j + 128]
            scale = np.abs(block).max() / 448
            restored[i : i + 128, j : j + 128] = (block / scale).astype(
                ml_dtypes.float8_e4m3fn
            ).astype(np.float64) * scale
    first, back = rounded[:16], restored[:16]
    underflow = ((first != 0) & (back == 0)).mean()
    snr = 10 * np.log10((first**2).sum() / ((first - back) ** 2).sum())
    given = jnp.asarray(rounded, jnp.float32)
    sums = weight_sums(given, quantize(given, TensorFormat("e4m3", (128, 128))))
    got = named(sums.metrics("weight"), "weight")
    assert underflow > 0.05
    assert got == pytest.approx((np.abs(rounded).max(), 0.0, underflow, snr), rel=1e-4)


def test_saturation_underflow_and_padding_are_counted():
    x = jnp.asarray([500.0, 448.0, -449.0, 1e-5, 0.0, 3.0, 7e9])
    restored = jnp.asarray([448.0, 448.0, -448.0, 0.0, 0.0, 3.0, 448.0])
    real = jnp.asarray([True] * 6 + [False])
    sums = QuantizationSums.of(x, restored, 448.0, real)
    signal = 500.0**2 + 448**2 + 449**2 + 1e-10 + 9
    expected = (500.0, 2 / 6, 1 / 6, 10 * np.log10(signal / (52.0**2 + 1 + 1e-10)))
    assert named(sums.metrics("k"), "k") == pytest.approx(expected, rel=1e-5)


def test_sums_add_and_stack_like_one_tensor():
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(6, 50)), jnp.float32)
    restored = jnp.round(x * 4) / 4
    whole = QuantizationSums.of(x, restored, 2.0).metrics("q")
    parts = [QuantizationSums.of(x[i], restored[i], 2.0) for i in range(6)]
    for other in (stack_sums(parts), parts[0] + parts[1] + stack_sums(parts[2:]).total()):
        assert named(other.metrics("q"), "q") == pytest.approx(named(whole, "q"), rel=1e-5)


def test_nothing_lost_nothing_there_and_nan():
    x = jnp.asarray([1.0, -2.0])
    assert named(QuantizationSums.of(x, x, 4.0).metrics("q"), "q") == (2.0, 0.0, 0.0, 200.0)
    assert named(QuantizationSums.of(x * 0, x * 0, 4.0).metrics("q"), "q") == (0.0, 0.0, 0.0, 0.0)
    assert np.isnan(QuantizationSums.of(x * jnp.nan, x, 4.0).metrics("q")["fp8/amax_q"])
