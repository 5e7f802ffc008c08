"""The linear by the type of its weight, and the weight quantizer."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax.config.recipe import COMPUTE, LinearPrecision, TensorFormat
from fp8rl_jax.precision import (
    Compute,
    PredequantizedWeight,
    QuantizedInput,
    QuantizedWeight,
    as_weight,
    dequantize,
    is_finite,
    is_quantized,
    linear,
    predequantize,
    quantize,
    quantize_per_tensor,
)
from pallas_kernels import BackendError
from pallas_kernels.qtensor import from_bits

REFERENCE = Compute("reference")
W, A, KV = TensorFormat("e4m3", (128, 128)), TensorFormat("e4m3", (1, 128)), TensorFormat("e4m3")


@pytest.fixture
def pair():
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 3, 320)), rng.normal(size=(192, 320)) / 18
    return jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32)


def test_stacked_weights_are_quantized_layer_by_layer(pair):
    stacked = jnp.stack([pair[1], 3 * pair[1]])
    q = quantize(stacked, W)
    assert (
        q.shape == (2, 192, 320)
        and q.scales.shape == (2, 2, 3)
        and q.nbytes == 2 * 192 * 320 + 2 * 2 * 3 * 4
    )
    for i in range(2):
        one = quantize(stacked[i], W)
        np.testing.assert_array_equal(
            np.asarray(q.values[i], np.float32), np.asarray(one.values, np.float32)
        )
        np.testing.assert_array_equal(q.scales[i], one.scales)


def test_no_block_means_one_scale_a_matrix(pair):
    q = quantize(pair[1], KV)
    assert q.scales.shape == (1, 1)
    np.testing.assert_allclose(q.scales[0, 0], jnp.abs(pair[1]).max() / 448, rtol=1e-6)


def test_plain_weight_is_an_ordinary_product(pair):
    x, w = pair
    out = linear(x, w, jnp.float32)
    np.testing.assert_allclose(
        out, np.asarray(x, np.float64) @ np.asarray(w, np.float64).T, atol=1e-5
    )
    assert as_weight(w).prepare(x, REFERENCE) is x


def test_w8a8_equals_the_float64_product_of_the_dequantized_operands(pair):
    x, w = pair
    weight = QuantizedWeight(quantize(w, W), precision=LinearPrecision(W, A))
    prepared = weight.prepare(x, REFERENCE)
    assert isinstance(prepared, QuantizedInput) and prepared.x is x and prepared.shape == x.shape
    qx = from_bits(prepared.quantized)
    assert qx.shape == x.shape and qx.scales.shape == (2, 3, 3)
    wide_x = (
        np.asarray(qx.values, np.float64)
        * np.repeat(np.asarray(qx.scales, np.float64), 128, -1)[..., :320]
    )
    expected = wide_x @ np.asarray(dequantize(weight.quantized), np.float64).T
    np.testing.assert_allclose(linear(x, weight, jnp.float32), expected, atol=1e-5)
    # and it is the plain product up to two roundings to 3 mantissa bits
    plain = np.asarray(linear(x, w, jnp.float32))
    assert 1e-3 < np.linalg.norm(plain - expected) / np.linalg.norm(plain) < 0.06


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("activation", [A, COMPUTE])
def test_a_predequantized_weight_gives_the_bits_of_the_fp8_weight(pair, dtype, activation):
    x, w = (
        pair[0].astype(dtype),
        QuantizedWeight(quantize(pair[1], W), precision=LinearPrecision(W, activation)),
    )
    ready = predequantize(w, REFERENCE)
    assert (
        isinstance(ready, PredequantizedWeight)
        and ready.shape == w.shape
        and ready.activation == activation
        and ready.values.dtype == jnp.float32
    )
    outs = [linear(x, weight, dtype) for weight in (w, ready)]
    assert outs[0].dtype == dtype and outs[0].shape == (2, 3, 192)
    np.testing.assert_array_equal(np.asarray(outs[0], np.float32), np.asarray(outs[1], np.float32))


def test_weight_only_equals_the_plain_product_with_the_dequantized_weight(pair):
    q = quantize(pair[1], W)
    plain = linear(pair[0], dequantize(q), jnp.float32)
    for weight in (q, QuantizedWeight(q), predequantize(q, REFERENCE)):
        assert as_weight(weight).prepare(pair[0], REFERENCE) is pair[0]
        np.testing.assert_allclose(
            linear(pair[0], weight, jnp.float32), plain, rtol=1e-6, atol=1e-7
        )


def test_predequantize_leaves_plain_weights_alone(pair):
    assert predequantize(pair[1], REFERENCE) is pair[1] and not is_quantized(pair[1])
    q = quantize(pair[1], W)
    assert all(
        is_quantized(weight) for weight in (q, QuantizedWeight(q), predequantize(q, REFERENCE))
    )


def test_hopper_by_name_is_refused(pair):
    x, w = pair
    weight, hopper = (
        QuantizedWeight(quantize(w, W), precision=LinearPrecision(W, A)),
        Compute("hopper"),
    )
    for call in (
        lambda: predequantize(weight, hopper),
        lambda: quantize(w, W, "hopper"),
        lambda: weight.prepare(x, hopper),
        lambda: linear(x, weight, jnp.float32, hopper),
    ):
        with pytest.raises(BackendError, match="hopper backend"):
            call()


def test_per_tensor_quantizer_clamps():
    x = jnp.asarray([0.0, 1.0, -447.0, 464.0, 500.0, -1e6], jnp.float32)
    out = quantize_per_tensor(x, jnp.float32(1.0), KV)
    np.testing.assert_array_equal(np.asarray(out, np.float32), [0, 1, -448, 448, 448, -448])
    halved = quantize_per_tensor(x, jnp.float32(2.0), KV)
    np.testing.assert_array_equal(np.asarray(halved, np.float32), [0, 0.5, -224, 224, 256, -448])


@pytest.mark.parametrize("fault", [np.nan, np.inf])
def test_is_finite_sees_a_fault_anywhere(pair, fault):
    assert bool(is_finite(quantize(pair[1], W)))
    assert not bool(is_finite(quantize(pair[1].at[191, 319].set(fault), W)))
