"""The linear with a low-rank adapter, against float64 numpy, and its gradients against those of the
added-up weight."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax.config.recipe import COMPUTE, LinearPrecision, TensorFormat
from fp8rl_jax.precision import (
    AdaptedWeight,
    Compute,
    QuantizedInput,
    QuantizedWeight,
    is_quantized,
    linear,
    predequantize,
    quantize,
)

W, A = TensorFormat("e4m3", (128, 128)), TensorFormat("e4m3", (1, 128))
SCALE, OUT, IN, RANK = 0.375, 192, 320, 5
REFERENCE = Compute("reference")
BASES = {
    "plain": lambda w, _=COMPUTE: w,
    "fp8": lambda w, activation=COMPUTE: QuantizedWeight(
        quantize(w, W), None, LinearPrecision(W, activation)
    ),
    "predequantized": lambda w, activation=COMPUTE: predequantize(
        QuantizedWeight(quantize(w, W), None, LinearPrecision(W, activation)), REFERENCE
    ),
}


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> jax.Array:
    return jnp.asarray(
        scale * np.random.default_rng([seed, *shape]).normal(size=shape), jnp.float32
    )


def dense(base) -> np.ndarray:
    return np.asarray(
        base if isinstance(base, jax.Array) else predequantize(base, REFERENCE).values, np.float64
    )


def adapted(kind: str, activation: TensorFormat) -> AdaptedWeight:
    base = BASES[kind](draw(OUT, IN, scale=IN**-0.5), activation)
    return AdaptedWeight(base, draw(RANK, IN, scale=IN**-0.5), draw(OUT, RANK), SCALE)


@pytest.fixture(params=BASES)
def weight(request) -> AdaptedWeight:
    return adapted(request.param, COMPUTE)


@pytest.fixture(params=BASES)
def w8a8(request) -> AdaptedWeight:
    """With a base that quantizes its input, where it is FP8."""
    return adapted(request.param, A)


def delta(weight: AdaptedWeight) -> np.ndarray:
    return weight.scale * np.asarray(weight.b, np.float64) @ np.asarray(weight.a, np.float64)


def test_the_product_is_that_of_the_added_up_weight(weight):
    x = draw(2, 3, IN)
    expected = np.asarray(x, np.float64) @ (dense(weight.base) + delta(weight)).T
    out = linear(x, weight, jnp.float32)
    np.testing.assert_allclose(out, expected, atol=2e-5)
    assert weight.shape == (OUT, IN) and np.abs(delta(weight)).max() > 0.1


def test_the_adapter_sees_the_input_before_quantization(w8a8):
    """base(quantized x) + scale (x a^T) b^T: what the base gives is, to the bit, what it gives
    without an adapter."""
    x = draw(2, 3, IN)
    prepared = w8a8.prepare(x, REFERENCE)
    assert prepared.plain is x
    assert isinstance(prepared.base, QuantizedInput) == is_quantized(w8a8.base)
    alone = linear(x, w8a8.base, jnp.float32)
    out = linear(x, w8a8, jnp.float32)
    np.testing.assert_allclose(out - alone, np.asarray(x, np.float64) @ delta(w8a8).T, atol=2e-5)
    silent = AdaptedWeight(w8a8.base, w8a8.a, jnp.zeros_like(w8a8.b), SCALE)
    np.testing.assert_array_equal(linear(x, silent, jnp.float32), alone)
    narrow = linear(x, silent, jnp.bfloat16)
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_array_equal(narrow, alone.astype(jnp.bfloat16))


def test_the_adapter_computes_in_its_own_dtype_and_accumulates_in_float32():
    base, a, b = jnp.zeros((OUT, IN), jnp.bfloat16), draw(RANK, IN), draw(OUT, RANK)
    x, a, b = (z.astype(jnp.bfloat16) for z in (draw(4, IN), a, b))
    inner = (
        (np.asarray(x, np.float64) @ np.asarray(a, np.float64).T)
        .astype(jnp.bfloat16)
        .astype(np.float64)
    )
    out = linear(x, AdaptedWeight(base, a, b, SCALE), jnp.float32)
    np.testing.assert_allclose(
        out, SCALE * inner @ np.asarray(b, np.float64).T, rtol=1e-2, atol=0.3
    )
    wide = linear(x.astype(jnp.float32), AdaptedWeight(base, a, b, SCALE), jnp.float32)
    # an input of another dtype is brought to the adapter's
    np.testing.assert_array_equal(out, wide)


def test_gradients_are_those_of_the_added_up_weight(weight):
    x, g = draw(7, IN), draw(7, OUT, seed=1)

    def loss(x, a, b):
        return jnp.sum(g * linear(x, AdaptedWeight(weight.base, a, b, SCALE), jnp.float32))

    dx, da, db = jax.jit(jax.grad(loss, (0, 1, 2)))(x, weight.a, weight.b)
    wide_x, wide_g = np.asarray(x, np.float64), np.asarray(g, np.float64)
    of_delta = wide_g.T @ wide_x  # d loss / d (base + delta)
    np.testing.assert_allclose(dx, wide_g @ (dense(weight.base) + delta(weight)), atol=1e-4)
    np.testing.assert_allclose(
        da, SCALE * np.asarray(weight.b, np.float64).T @ of_delta, rtol=1e-4, atol=1e-3
    )
    np.testing.assert_allclose(
        db, SCALE * of_delta @ np.asarray(weight.a, np.float64).T, rtol=1e-4, atol=1e-3
    )


def test_the_backward_pass_keeps_the_fp8_weight_and_no_unpacked_copy():
    weight = AdaptedWeight(BASES["fp8"](draw(OUT, IN)), draw(RANK, IN), draw(OUT, RANK), SCALE)
    run = lambda x, a, b: linear(x, AdaptedWeight(weight.base, a, b, SCALE), jnp.float32)  # noqa: E731
    kept = jax.tree.leaves(jax.vjp(run, draw(7, IN), weight.a, weight.b)[1])
    full = [x.dtype for x in kept if x.shape == (OUT, IN)]
    assert jnp.float8_e4m3fn in full and not {
        jnp.dtype(jnp.float32),
        jnp.dtype(jnp.bfloat16),
    } & set(full)


@pytest.mark.parametrize("activation", [COMPUTE, A], ids=["compute", "e4m3"])
@pytest.mark.parametrize("base", ["plain", "fp8"])
def test_every_expert_has_its_own_adapter(base, activation):
    weights = BASES[base](draw(3, 64, IN, scale=IN**-0.5), activation)
    weight = AdaptedWeight(weights, draw(3, RANK, IN), draw(3, 64, RANK), SCALE)
    x, sizes = draw(9, IN), jnp.asarray([4, 0, 3])
    out = linear(x, weight, jnp.float32, group_sizes=sizes)
    alone = linear(x, weights, jnp.float32, group_sizes=sizes)
    for row, expert in enumerate([0] * 4 + [2] * 3):
        added = np.asarray(x[row], np.float64) @ np.asarray(weight.a[expert], np.float64).T
        added = SCALE * added @ np.asarray(weight.b[expert], np.float64).T
        np.testing.assert_allclose(out[row] - alone[row], added, atol=1e-4)
    assert not np.asarray(out[7:]).any()
    if base == "plain" or activation is COMPUTE:
        values = dense(weights)
        np.testing.assert_allclose(alone[5], np.asarray(x[5], np.float64) @ values[2].T, atol=1e-4)
