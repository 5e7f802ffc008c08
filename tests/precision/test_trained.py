"""The FP8 linear's gradients: against the same quantized operands multiplied in float64, and within
the format's error bound."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_fp8 import restored, rounding_error

from fp8rl_jax.config.recipe import COMPUTE, RECIPES, Recipe
from fp8rl_jax.precision import (
    AdaptedWeight,
    Compute,
    QTensor,
    QuantizedWeight,
    linear,
    quantize,
)
from fp8rl_jax.precision.linear import _quantized_linears

JET = RECIPES["jet-rl"]
RULES = {
    "e4m3": JET,
    "hybrid": replace(JET, output_gradient=replace(JET.output_gradient, element="e5m2")),
    "power of two": RECIPES["infir2"],
}
# (tokens, inputs, outputs): whole blocks, ragged in every dimension, fewer than a block
SHAPES = [(256, 256, 128), (150, 320, 200), (3, 70, 50)]
SIZES = (37, 0, 130, 90)  # of 270 rows: 13 are behind the last group


def draw(*shape, seed=0):
    """Normal values over several binades."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * np.exp(rng.normal(size=shape))).astype(np.float32)


def along_tokens(fmt):
    return replace(fmt, block=fmt.block[::-1])


def frozen_weight(w, recipe) -> QuantizedWeight:
    """Of a float32 weight, or of one that is quantized already."""
    q = w if isinstance(w, QTensor) else quantize(w, recipe.trainer.weight)
    return QuantizedWeight(q, None, recipe.linear("trainer"))


def trained_weight(w, recipe) -> QuantizedWeight:
    return replace(frozen_weight(jax.lax.stop_gradient(w), recipe), master=w)


def gradients(x, w, dy, recipe, sizes=None, form=trained_weight):
    """(y, dx, dw) of the FP8 linear in float32."""

    def run(x, w):
        groups = None if sizes is None else jnp.asarray(sizes)
        return linear(x, form(w, recipe), jnp.float32, group_sizes=groups)

    def products(x, w, dy):
        y, back = jax.vjp(run, x, w)
        return y, *back(dy)

    return jax.jit(products)(*map(jnp.asarray, (x, w, dy)))


def expected(x, w, dy, recipe: Recipe):
    """The three products as (left, right) operands, float64."""
    weight, activation, gradient = (
        recipe.trainer.weight,
        recipe.trainer.activation,
        recipe.output_gradient,
    )
    xq, wq = restored(x, activation), restored(np.asarray(w), weight)
    saved = xq if recipe.saved_activation.quantized else x.astype(np.float64)
    if not gradient.quantized:
        dy = dy.astype(np.float64)
        return (xq, wq.T), (dy, wq), (dy.T, saved)
    left, right = restored(dy, along_tokens(gradient)), restored(saved, along_tokens(activation))
    return (xq, wq.T), (restored(dy, gradient), wq), (left.T, right)


def assert_products(got, operands):
    """Each product up to the float32 rounding of its sum."""
    for out, (left, right) in zip(got, operands, strict=True):
        bound = 2.0**-22 * np.sqrt(left.shape[1] + 8) * (np.abs(left) @ np.abs(right))
        assert (np.abs(np.asarray(out, np.float64) - left @ right) <= bound).all()


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_products_equal_float64_over_the_same_quantized_operands(m, k, n, rule):
    x, w, dy = draw(m, k), draw(n, k, seed=1), draw(m, n, seed=2)
    assert_products(gradients(x, w, dy, RULES[rule]), expected(x, w, dy, RULES[rule]))


@pytest.mark.parametrize("role", ["output_gradient", "saved_activation"])
def test_a_role_in_the_compute_dtype_is_not_rounded(role):
    recipe = replace(JET, **{role: COMPUTE})
    x, w, dy = draw(150, 320), draw(200, 320, seed=1), draw(150, 200, seed=2)
    assert_products(gradients(x, w, dy, recipe), expected(x, w, dy, recipe))


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("size", [1.0, 1e-6, 1e-12])
def test_gradients_are_within_the_error_bound_of_the_format(rule, size):
    """|ab - a'b'| <= |a - a'| |b'| + |a| |b - b'| for each term of the sum; a gradient of 1e-12 is rounded no worse."""
    recipe, (m, k, n) = RULES[rule], SHAPES[1]
    x, w, dy = draw(m, k), draw(n, k, seed=1), np.float32(size) * draw(m, n, seed=2)
    _, dx, dw = (np.asarray(z, np.float64) for z in gradients(x, w, dy, recipe))
    _, (dyq, wq), (left, right) = expected(x, w, dy, recipe)
    fmt, activation = recipe.output_gradient, recipe.trainer.activation
    exact = np.asarray(w, np.float64)
    of_weight = rounding_error(w, recipe.trainer.weight)
    bound = rounding_error(dy, fmt) @ np.abs(wq) + np.abs(dy) @ of_weight
    assert (np.abs(dx - dy.astype(np.float64) @ exact) <= 1.001 * bound).all()
    of_x = rounding_error(x, activation) + rounding_error(
        restored(x, activation), along_tokens(activation)
    )
    bound = rounding_error(dy, along_tokens(fmt)).T @ np.abs(right) + np.abs(dy).T @ of_x
    error = np.abs(dw - dy.astype(np.float64).T @ x)
    assert (error <= 1.001 * bound).all()
    # and far below the bound as a whole: roundings are independent
    assert np.linalg.norm(error) < {"e4m3": 0.06, "hybrid": 0.09, "power of two": 0.06}[
        rule
    ] * np.linalg.norm(dw)


@pytest.mark.parametrize("rule", list(RULES))
def test_groups_are_products_of_their_own(rule):
    """A block along tokens that reached into the next group would change both groups' scales."""
    recipe = RULES[rule]
    x, w, dy = draw(270, 130), draw(4, 90, 130, seed=1), draw(270, 90, seed=2)
    x[37:] *= 50.0
    y, dx, dw = map(np.asarray, gradients(x, w, dy, recipe, SIZES))
    starts = np.cumsum((0, *SIZES))
    for group, (start, stop) in enumerate(zip(starts, starts[1:], strict=False)):
        rows = slice(start, stop)
        assert_products(
            (y[rows], dx[rows], dw[group]), expected(x[rows], w[group], dy[rows], recipe)
        )
    assert not y[starts[-1] :].any() and not dx[starts[-1] :].any()


def test_groups_without_quantized_gradients():
    recipe = replace(JET, output_gradient=COMPUTE)
    x, w, dy = draw(270, 130), draw(4, 90, 130, seed=1), draw(270, 90, seed=2)
    _, dx, dw = map(np.asarray, gradients(x, w, dy, recipe, SIZES))
    starts = np.cumsum((0, *SIZES))
    for group, (start, stop) in enumerate(zip(starts, starts[1:], strict=False)):
        rows = slice(start, stop)
        assert_products((dx[rows], dw[group]), expected(x[rows], w[group], dy[rows], recipe)[1:])


def test_what_is_kept_for_the_backward_is_one_quantized_input():
    """Two products of one input keep its e4m3 values, on a CPU as bit patterns, and scales once, and
    neither the input nor the masters."""
    weights = [jnp.asarray(draw(64, 256, seed=i)) for i in range(2)]

    def run(x, weights):
        forms, compute = [trained_weight(w, JET) for w in weights], Compute()
        inputs = forms[0].prepare(x, compute)
        return sum(form.multiply(inputs, jnp.bfloat16, compute) for form in forms)

    x = jnp.asarray(draw(128, 256), jnp.bfloat16)
    kept = jax.tree.leaves(jax.vjp(jax.jit(run), x, weights)[1])
    assert [leaf.dtype for leaf in kept if leaf.shape == x.shape] == [jnp.uint8]
    assert all(leaf.dtype == jnp.float8_e4m3fn for leaf in kept if leaf.shape == weights[0].shape)
    assert sum(leaf.nbytes for leaf in kept if leaf.shape[:1] == (128,)) == 128 * 256 + 128 * 2 * 4


@pytest.mark.parametrize(
    "recipe", [JET, replace(JET, output_gradient=COMPUTE)], ids=["quantized", "compute"]
)
@pytest.mark.parametrize("sizes", [None, SIZES], ids=["dense", "groups"])
def test_a_frozen_weight_passes_the_gradient_on_and_has_none(recipe, sizes):
    x, w, dy = draw(270, 130), draw(4, 90, 130, seed=1), draw(270, 90, seed=2)
    w = w[0] if sizes is None else w
    y, dx, _ = gradients(x, w, dy, recipe, sizes)
    frozen, passed, nothing = gradients(x, w, dy, recipe, sizes, frozen_weight)
    assert (
        (np.asarray(y) == frozen).all() and (np.asarray(dx) == passed).all() and not nothing.any()
    )
    # one that rests in FP8 is the same weight
    again, _, _ = gradients(
        x,
        w,
        dy,
        recipe,
        sizes,
        lambda w, recipe: frozen_weight(frozen_weight(w, recipe).quantized, recipe),
    )
    assert (np.asarray(y) == again).all()


def test_weights_that_share_a_kernel_have_the_products_and_gradients_of_each_alone():
    x, w, other = (jnp.asarray(draw(n, 320, seed=n)) for n in (150, 200, 70))
    dys = [jnp.asarray(draw(150, n, seed=3)) for n in (200, 70)]
    frozen = frozen_weight(other, JET)

    def together(x, w):
        weights = [trained_weight(w, JET), frozen]
        prepared = frozen.prepare(x, Compute())
        return _quantized_linears(prepared, weights, jnp.dtype("float32"), Compute())

    def alone(x, w):
        return [linear(x, weight, jnp.float32) for weight in (trained_weight(w, JET), frozen)]

    found = []
    for run in (together, alone):
        out, pull = jax.vjp(run, x, w)
        found.append((out, pull(dys)))
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert all(np.any(gradient) for gradient in found[0][1])


def test_a_frozen_weight_keeps_nothing_of_its_input():
    w, x = frozen_weight(jnp.asarray(draw(64, 256)), JET), jnp.asarray(draw(128, 256), jnp.bfloat16)
    run = jax.jit(lambda x: linear(x, w, jnp.bfloat16))
    assert not [
        leaf.shape for leaf in jax.tree.leaves(jax.vjp(run, x)[1]) if leaf.shape[:1] == (128,)
    ]


def test_an_adapter_on_a_frozen_weight_has_its_gradients_beside_those_of_the_base():
    x, w, dy = draw(150, 320), draw(200, 320, seed=1), draw(150, 200, seed=2)
    a, b, scale = draw(8, 320, seed=3), draw(200, 8, seed=4), 2.0

    def run(x, a, b):
        weight = AdaptedWeight(frozen_weight(jnp.asarray(w), JET), a, b, scale)
        return linear(x, weight, jnp.float32)

    y, back = jax.vjp(jax.jit(run), *map(jnp.asarray, (x, a, b)))
    (xq, wq), (dyq, _), _ = expected(x, w, dy, JET)
    wide = [z.astype(np.float64) for z in (x, a, b, dy)]
    x, a, b, dy = wide
    formulas = (
        xq @ wq + scale * (x @ a.T) @ b.T,
        dyq @ wq.T + scale * (dy @ b) @ a,
        scale * (dy @ b).T @ x,
        scale * dy.T @ (x @ a.T),
    )
    for got, formula in zip((y, *back(jnp.asarray(dy, jnp.float32))), formulas, strict=True):
        assert np.abs(np.asarray(got, np.float64) - formula).max() < 1e-5 * np.abs(formula).max()


@pytest.mark.slow
def test_dtypes_of_the_gradients():
    x, w = jnp.asarray(draw(8, 128), jnp.bfloat16), jnp.asarray(draw(16, 128))

    def run(x, w):
        return linear(x, trained_weight(w, JET), jnp.bfloat16).astype(jnp.float32).sum()

    dx, dw = jax.grad(run, (0, 1))(x, w)
    assert (dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.float32)
