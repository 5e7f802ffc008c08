"""Quantizers that compute what they quantize: equal to the two steps that they replace, bit for
bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax.precision import Compute
from pallas_kernels import BackendError, quantize_blocks, quantize_rms_norm, quantize_swiglu
from pallas_kernels.backend import tracing_for
from pallas_kernels.check.cases import difference
from pallas_kernels.quantize.cases import SMALL
from pallas_kernels.quantize.reference import nearest_reciprocal, reciprocal


def data(shape, dtype, count):
    return [
        3 * jax.random.normal(key, shape).astype(dtype)
        for key in jax.random.split(jax.random.key(0), count)
    ]


def assert_same(got, wanted):
    for have, want in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.asarray(have, np.float32), np.asarray(want, np.float32))


@pytest.mark.parametrize(
    "case", [case for case in SMALL if case.tolerance], ids=lambda case: case.name
)
def test_fused_quantizers_equal_numpy_to_a_step(case):
    arrays = case.arguments(jax.random.key(1))
    got = jax.jit(lambda *a: case.run(*a, backend="reference"))(*arrays)
    assert difference(got, case.expected(*jax.tree.map(np.asarray, arrays))) <= case.tolerance


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("rule", ["float32", "power_of_two"])
def test_swiglu_equals_the_models_gate_and_then_the_quantizer(dtype, rule):
    gate, up = data((4, 5, 200), dtype, 2)
    expected = quantize_blocks(Compute().gated(gate, up, "silu"), scale=rule)
    assert_same(quantize_swiglu(gate, up, scale=rule), expected)
    assert_same(jax.jit(lambda gate, up: quantize_swiglu(gate, up, scale=rule))(gate, up), expected)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_equals_the_models_norm_and_then_the_quantizer(dtype, offset):
    x, weight = data((6, 300), dtype, 2)
    weight = weight[0]
    assert_same(
        quantize_rms_norm(x, weight, 1e-6, offset),
        quantize_blocks(Compute().rms_norm(x, weight, 1e-6, offset)),
    )


def test_what_does_not_belong_together_is_refused(unchecked_shapes):
    gate, up = data((4, 128), jnp.bfloat16, 2)
    with pytest.raises(
        ValueError, match=r"quantize_swiglu: gate is bfloat16\(4, 128\), up bfloat16\(4, 64\)"
    ):
        quantize_swiglu(gate, up[:, :64])
    with pytest.raises(
        ValueError, match=r"quantize_rms_norm: weight \(4,\) is not that of rows of x \(4, 128\)"
    ):
        quantize_rms_norm(gate, up[:, 0], 1e-6)
    with (
        tracing_for(2),
        pytest.raises(
            BackendError, match="has no quantizer from bfloat16 to float8_e4m3fn in blocks of 1x64"
        ),
    ):
        quantize_swiglu(gate, up, 64, backend="hopper")


def test_reciprocals_are_rounded_to_nearest():
    rng = np.random.default_rng(0)
    some = rng.integers(0x00800000, 0x7C000000, 200_000)
    near = np.concatenate(
        [
            np.arange(power - 1000, power + 1000)
            for power in range(0x01000000, 0x7C000000, 0x00800000)
        ]
    )
    scales = np.concatenate([some, near]).astype(np.int32).view(np.float32)
    np.testing.assert_array_equal(np.asarray(jax.jit(reciprocal)(scales)), np.float32(1) / scales)


@pytest.mark.parametrize("units", [-2, -1, 1, 2])
def test_nearest_reciprocal_corrects_a_division_that_is_off(units):
    scales = (
        np.random.default_rng(1)
        .integers(0x00800000, 0x7C000000, 100_000)
        .astype(np.int32)
        .view(np.float32)
    )
    exact = np.float32(1) / scales
    off = (exact.view(np.int32) + np.int32(units)).view(np.float32)
    np.testing.assert_array_equal(
        np.asarray(nearest_reciprocal(jnp.asarray(scales), jnp.asarray(off))), exact
    )
