"""FP4 training of arXiv 2501.17116 against its official code's own tests (Azure/MS-AMP @70dd974,
tests/operators/test_fp4_quantize.py; all in bfloat16) and against its formulas in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fp8rl_jax.config.formats import parse_format
from fp8rl_jax.config.recipe import LinearPrecision
from fp8rl_jax.precision import PredequantizedWeight, QuantizedWeight, format_of, linear, quantize
from fp8rl_jax.precision.estimator import e2m1_slope
from fp8rl_jax.precision.formats.fp4 import ClampedFP4
from fp8rl_jax.precision.quantizer import quantize_along_rows

NUMBERS = np.float64([0, 0.5, 1, 1.5, 2, 3, 4, 6])
OFFICIAL = parse_format("mxfp4_up-1xall")
"""Its scales: the next power of two above amax / 6."""


def bfloat16(x) -> np.ndarray:
    return np.asarray(x, ml_dtypes.bfloat16).astype(np.float32)


def test_slopes_are_those_of_the_official_test():
    half = [0.2002, 0.4375, 0.6055, 0.2168, 1.8359, 0.2695, 0.3027, 0.2695, 0.2402, 0.5781]
    got = e2m1_slope(jnp.asarray(bfloat16(np.linspace(-6, 6, 20))))
    np.testing.assert_allclose(bfloat16(got), [*half, *half[::-1]], atol=4e-5)
    # at numbers 1 / k, in the middle between two of them 3, where it saturates as at 6
    middles = (NUMBERS[1:] + NUMBERS[:-1]) / 2
    np.testing.assert_allclose(e2m1_slope(jnp.float32([*NUMBERS, 8, -100])), 0.2)
    np.testing.assert_array_equal(e2m1_slope(jnp.float32(middles)), 3)


def test_powers_of_two_are_those_of_the_official_test():
    x = [0.001, 0.048, 0.0997, 0.1503, 0.2002, 0.2497, 0.2974, 0.30699, 0.4001, 0]
    want = [0, 0.0625, 0.125, 0.125, 0.1875, 0.25, 0.25, 0.25, 0.375, 0]
    np.testing.assert_array_equal(
        quantize(jnp.asarray(bfloat16([x])), OFFICIAL).dequantize(), [want]
    )
    rows = [[-0.01, 0.48, -9.67], [1.623, -2.222, 24.67], [-2.874, 3.699, -34.57]]
    x = jnp.asarray(bfloat16([*rows, [0.85, -1.343, 18.88]]))
    want = [[0, 0.5, -8], [1.5, -2, 24], [-3, 4, -32], [0.75, -1.5, 16]]
    np.testing.assert_array_equal(quantize_along_rows(x, OFFICIAL).dequantize(), want)  # channels
    np.testing.assert_array_equal(quantize(x.T, OFFICIAL).dequantize().T, want)  # tokens


def test_ties_go_to_even_where_the_official_ones_go_up():
    middles = (NUMBERS[1:] + NUMBERS[:-1]) / 2
    x = jnp.float32([[*middles, *-middles, 6, 6]])
    theirs = [*NUMBERS[1:], *-NUMBERS[:-1]]
    got = np.asarray(quantize(x, parse_format("fp4")).dequantize())[0, :-2]
    np.testing.assert_array_equal(np.abs(got), [0, 1, 1, 2, 2, 4, 4] * 2)
    assert np.flatnonzero(got != theirs).tolist() == [0, 2, 4, 6, 8, 10, 12]


def nearest(x: np.ndarray) -> np.ndarray:
    """The number of e2m1 next to each value."""
    found = NUMBERS[np.abs(np.abs(x)[..., None] - NUMBERS).argmin(-1)]
    return np.sign(x) * found


def scaled(x: np.ndarray) -> np.ndarray:
    return np.abs(x).max(-1, keepdims=True) / 6


def clamped(x: np.ndarray, made: ClampedFP4) -> np.ndarray:
    """Q(clamp(x)) + (x - clamp(x)), float64, bounds as the official code picks them."""
    values = np.sort(x if made.of == "row" else x.reshape(1, -1), -1)
    places = int((1 - made.alpha) * values.shape[1]), int(made.alpha * values.shape[1])
    inside = np.clip(x, *(values[:, i : i + 1] for i in places))
    found = nearest(inside / scaled(inside)) * scaled(inside)
    return found + (x - inside) * made.compensated


def heavy(*shape: int, seed: int = 0) -> np.ndarray:
    """Activations with outliers."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * np.exp(1.5 * rng.normal(size=shape))).astype(np.float32)


@pytest.mark.parametrize("of", ["row", "tensor"])
@pytest.mark.parametrize("alpha", [0.999, 0.99, 0.97])
def test_outliers_are_clamped_and_compensated(of, alpha):
    x = heavy(7, 300)
    for compensated in (True, False):
        made = ClampedFP4((1, 300), alpha=alpha, of=of, compensated=compensated)
        q = made.quantize(jnp.asarray(x))
        want = clamped(x.astype(np.float64), made)
        # beside what was cut off, which bfloat16 holds to 2^-8
        np.testing.assert_allclose(q.dequantize(), want, rtol=2.0**-8, atol=1e-6)
    plain = quantize(jnp.asarray(x), parse_format("fp4")).dequantize()
    assert np.linalg.norm(want - x) > 0  # not compensated
    assert np.linalg.norm(clamped(x, ClampedFP4(alpha=alpha, of=of)) - x) < np.linalg.norm(
        plain - x
    )


def test_a_clamped_token_is_its_own_and_one_of_a_tensor_is_not():
    x = jnp.asarray(heavy(5, 64)).at[2].multiply(10)
    for name, own in (("fp4_clamped", True), ("fp4_clamped_tensor", False)):
        made = format_of(parse_format(name), x.shape)
        whole, alone = (made.quantize(z).dequantize() for z in (x, x[2:3]))
        assert made.by_row == own == np.array_equal(whole[2], alone[0])


@pytest.mark.parametrize("activation", ["fp4_clamped", "fp4_clamped_tensor", "compute"])
def test_products_and_gradients_of_a_linear(activation):
    """dX and dW are those of the dequantized operands, dW times the slope at the weight."""
    of = parse_format(activation)
    precision = LinearPrecision(
        parse_format("fp4"), of, saved_activation=of, weight_gradient_estimator="differentiable"
    )
    x, w, dy = heavy(9, 64), heavy(10, 64, seed=1), heavy(9, 10, seed=2)

    @jax.jit
    def products(x, w, dy):
        def run(x, w):
            return linear(x, QuantizedWeight.of(w, w, precision), jnp.float32)

        y, back = jax.vjp(run, x, w)
        weight = QuantizedWeight.of(w, None, precision)
        decoded = linear(x, PredequantizedWeight(weight.quantized.dequantize(), of), jnp.float32)
        return y, decoded, *back(dy)

    y, decoded, dx, dw = (np.asarray(z) for z in products(x, w, dy))
    xq = np.asarray(quantize(jnp.asarray(x), of).dequantize() if of.quantized else x)
    wq, steps = nearest(w / scaled(w)) * scaled(w), np.abs(w / scaled(w))
    steps /= np.where(steps < 2, 0.5, np.where(steps < 4, 1, 2))
    with np.errstate(divide="ignore"):
        slope = np.minimum(np.abs(2 * (steps % 1) - 1) ** (1 / 5 - 1) / 5, 3)
    for got, want in ((y, xq @ wq.T), (decoded, y), (dx, dy @ wq), (dw, dy.T @ xq * slope)):
        np.testing.assert_allclose(got, want, rtol=0, atol=3e-5 * np.abs(want).max())
    assert slope.min() < 0.25 and slope.max() > 1.5
