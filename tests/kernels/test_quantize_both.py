"""quantize_both and regroup against the numpy definition, and what the quantizers refuse."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import BackendError, quantize_blocks, quantize_both, regroup
from pallas_kernels.backend import tracing_for
from pallas_kernels.quantize.cases import expected


def random_array(shape, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * np.exp(rng.normal(0, 2, shape))).astype(np.float32)


def assert_same(got, wanted):
    for have, want in zip((got.values, got.scales), wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(have, np.float64), want.astype(np.float64))


@pytest.mark.parametrize("rule", ["float32", "power_of_two"])
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
@pytest.mark.parametrize("shape", [(256, 128), (130, 70), (2, 3, 200), (1, 1)])
def test_both_groupings_equal_numpy_bit_for_bit(shape, dtype, rule):
    x = random_array(shape)
    rows, tokens = quantize_both(jnp.asarray(x), 128, dtype, rule)
    assert_same(rows, expected(x, (1, 128), dtype, rule))
    assert_same(tokens, expected(x, (128, 1), dtype, rule))


@pytest.mark.parametrize("shape", [(256, 256), (130, 70), (5, 300)])
def test_regrouping_equals_numpy_on_the_dequantized_values(shape):
    q = quantize_blocks(jnp.asarray(random_array(shape, 1)), (1, 128))
    wide = np.asarray(q.values, np.float32) * np.repeat(q.scales, 128, 1)[:, : shape[1]]
    assert_same(regroup(q), expected(wide, (128, 1), jnp.float8_e4m3fn, "float32"))


def test_regrouping_adds_at_most_half_a_step():
    x = random_array((256, 64), 2)
    q = quantize_blocks(jnp.asarray(x), (1, 128))
    once, again = np.asarray(q.dequantize()), np.asarray(regroup(q).dequantize())
    tops = np.repeat(np.abs(once).reshape(2, 128, 64).max(1), 128, 0)
    assert (
        np.abs(again - once)
        <= np.maximum(np.abs(once) * 2.0**-4, tops / 448 * 2.0**-10) * (1 + 1e-6)
    ).all()


def test_other_group_sizes():
    x = random_array((50, 48), 3)
    rows, tokens = quantize_both(jnp.asarray(x), 16)
    assert_same(rows, expected(x, (1, 16), jnp.float8_e4m3fn, "float32"))
    assert_same(tokens, expected(x, (16, 1), jnp.float8_e4m3fn, "float32"))


def test_scales_of_other_values_are_refused():
    q = quantize_blocks(jnp.ones((64, 256)))
    with pytest.raises(
        ValueError, match=r"regroup: scales \(64, 1\) are not those of values \(64, 256\)"
    ):
        regroup(replace(q, scales=q.scales[:, :1]))


@pytest.mark.parametrize("function", [quantize_blocks, quantize_both])
@pytest.mark.parametrize("shape", [(0, 128), (128, 0)])
def test_nothing_to_quantize_is_refused(function, shape):
    with pytest.raises(ValueError, match=r"nothing to quantize in shape"):
        function(jnp.zeros(shape))


@pytest.mark.parametrize(
    ("dtype", "given", "block", "message"),
    [
        (jnp.float8_e4m3fn, jnp.bfloat16, (1, 64), "bfloat16 to float8_e4m3fn in blocks of 1x64"),
        (jnp.float4_e2m1fn, jnp.bfloat16, (1, 128), "bfloat16 to float4_e2m1fn in blocks of 1x128"),
        (jnp.float8_e4m3fn, jnp.float16, (1, 128), "float16 to float8_e4m3fn in blocks of 1x128"),
    ],
)
def test_what_hopper_has_no_kernel_for_is_refused_by_name_and_left_to_the_reference_by_auto(
    dtype, given, block, message
):
    x = jnp.asarray(random_array((4, 128)), given)
    with tracing_for(2):
        with pytest.raises(
            BackendError,
            match=f"quantize_blocks: the hopper backend has no quantizer from {message}",
        ):
            quantize_blocks(x, block, dtype, backend="hopper")
        reference = quantize_blocks(x, block, dtype, backend="reference")
        wanted = np.asarray(reference.values), np.asarray(reference.scales)
        assert_same(quantize_blocks(x, block, dtype), wanted)
