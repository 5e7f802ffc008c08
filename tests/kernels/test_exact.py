"""Order-free arithmetic: right against float64, and the same bits in every order and split."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import exact
from pallas_kernels.exact import as_float64, with_float64
from pallas_kernels.matmul import dot as plain_dot
from pallas_kernels.rounding import rounded

RNG = np.random.default_rng(0)
dot = jax.jit(exact.dot)
grouped_dot = jax.jit(exact.grouped_dot)
attend = jax.jit(exact.attend, static_argnums=4)
total = jax.jit(
    with_float64(
        lambda x: rounded(exact.reproducible_sum(as_float64(x) * as_float64(x), -1), jnp.float32)
    )
)


def normal(*shape, spread: float = 2.0) -> np.ndarray:
    """Normal numbers whose magnitudes spread over several powers of ten, as activations' do."""
    return (RNG.normal(size=shape) * np.exp(spread * RNG.normal(size=shape))).astype(np.float32)


def same(a, b) -> bool:
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("k", [1, 24, 576, 4096])
def test_a_product_is_nearer_to_float64_than_a_float32_sum_may_be(k):
    x, w = normal(5, k), normal(7, k)
    expected = x.astype(np.float64) @ w.T.astype(np.float64)
    # each operand is cut at its row's largest element, and the result is rounded once
    cut = (
        2.0**-28 * np.abs(x).max(1)[:, None] * np.abs(w).sum(1)
        + 2.0**-22 * np.abs(w).max(1) * np.abs(x).sum(1)[:, None]
    )
    assert np.all(np.abs(np.asarray(dot(x, w)) - expected) <= cut + 2.0**-24 * abs(expected))


def test_products_have_the_same_bits_in_every_order_of_their_terms():
    x, w, order = normal(37, 576), normal(48, 576), RNG.permutation(576)
    whole = dot(x, w)
    for rows in (1, 2, 3, 8, 17):
        assert same(dot(x[:rows], w), whole[:rows])
    assert same(dot(x.reshape(37, 1, 576), w)[:, 0], whole)
    assert same(dot(x[:, order], w[:, order]), whole)
    padded = [np.pad(a, ((0, 0), (3, 61))) for a in (x, w)]
    assert same(dot(*padded), whole)
    split = jax.jit(jax.vmap(exact.dot, (0, None)))(x.reshape(37, 1, 576), w)[:, 0]
    assert same(split, whole)
    integers = jax.jit(exact.to_integers)(w)
    assert same(dot(x, integers), whole)
    # the order matters to what this replaces, or the checks above would show nothing
    assert not same(jax.jit(plain_dot)(x[:, order], w[:, order]), jax.jit(plain_dot)(x, w))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_dot_rounds_to_16_bits_only_at_the_end(dtype):
    x, w = (jnp.asarray(normal(4, 32, spread=0.5), dtype) for _ in range(2))
    expected = (np.asarray(x, np.float64) @ np.asarray(w, np.float64).T).astype(dtype)
    assert same(exact.dot(x, w, dtype), expected)


def test_values_that_are_not_finite_stay_in_their_row():
    x, w = normal(3, 16), normal(4, 16)
    x[1, 3] = np.inf
    out = np.asarray(dot(x, w))
    assert not np.isfinite(out[1]).any() and same(out[[0, 2]], dot(x[[0, 2]], w))
    assert not np.asarray(dot(np.zeros((2, 16), np.float32), w)).any()


def test_grouped_dot_equals_dot_of_each_group():
    x, w = normal(60, 48), normal(4, 20, 48)
    sizes = np.array([31, 0, 16, 8], np.int32)
    out = grouped_dot(x, w, sizes)
    for rows, group in ((slice(0, 31), 0), (slice(31, 47), 2), (slice(47, 55), 3)):
        assert same(out[rows], dot(x[rows], w[group]))
    assert not np.asarray(out[55:]).any()


def test_reproducible_sum_has_the_same_bits_in_every_order():
    x = normal(9, 1000, spread=4.0)
    expected = (x.astype(np.float64) ** 2).sum(-1)
    np.testing.assert_allclose(total(x), expected, rtol=2.0**-23)
    assert same(total(x[:, RNG.permutation(1000)]), total(x)) and same(
        total(np.pad(x, ((0, 0), (5, 9)))), total(x)
    )


ELEMENTARY = {
    "exp": (exact.exp, np.exp, np.linspace(-87, 88, 20001)),
    "log": (exact.log, np.log, np.exp(np.linspace(-80, 80, 20001))),
    "sigmoid": (exact.sigmoid, lambda x: 1 / (1 + np.exp(-x)), np.linspace(-87, 87, 20001)),
}


@pytest.mark.parametrize("name", ELEMENTARY)
def test_exp_log_and_sigmoid_are_within_their_stated_errors(name):
    ours, reference, x = ELEMENTARY[name]
    x = x.astype(np.float32)
    found = np.asarray(
        jax.jit(with_float64(lambda x: rounded(ours(as_float64(x)), jnp.float32)))(x), np.float64
    )
    expected = reference(x.astype(np.float64))
    scale = np.maximum(np.abs(expected), 1) if name == "log" else expected
    assert np.max(np.abs(found - expected) / scale) < 2.0**-23


def test_exp_log_and_sigmoid_at_the_edges_of_their_range():
    @with_float64
    def found(x):
        return rounded(exact.exp(as_float64(x)), jnp.float32)

    np.testing.assert_array_equal(
        found(jnp.array([0.0, -jnp.inf, -1e30, jnp.nan])), [1.0, 0.0, 0.0, np.nan]
    )


def attention_case():
    q, shared, own = normal(4, 5, 4, 16, spread=0.5), (2, 2, 12, 16), (4, 2, 5, 16)
    keys, values = ([normal(*shared, spread=0.5), normal(*own, spread=0.5)] for _ in range(2))
    masks = [RNG.random((2, 1, 12)) < 0.7, np.tril(np.ones((1, 5, 5), bool))]
    return q, keys, values, masks


def test_attention_against_float64():
    q, keys, values, masks = attention_case()
    joined = [
        np.concatenate([np.repeat(first, 2, 0), second], 2).astype(np.float64)
        for first, second in (keys, values)
    ]
    k, v = (np.repeat(x, 2, 1) for x in joined)
    mask = np.concatenate(
        [
            np.broadcast_to(np.repeat(masks[0], 2, 0), (4, 5, 12)),
            np.broadcast_to(masks[1], (4, 5, 5)),
        ],
        2,
    )
    scores = np.where(
        mask[:, None], np.einsum("bthd,bhsd->bhts", q.astype(np.float64), k) * 0.25, -np.inf
    )
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("bhts,bhsd->bthd", weights / weights.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(attend(q, keys, values, masks, 0.25), expected, rtol=1e-5, atol=1e-6)


def test_attention_has_the_same_bits_for_all_slots_blocks_and_neighbours():
    q, keys, values, masks = attention_case()
    whole = attend(q, keys, values, masks, 0.25)
    order = RNG.permutation(12)
    moved = [[x[0][:, :, order], x[1]] for x in (keys, values)]
    assert same(attend(q, *moved, [masks[0][:, :, order], masks[1]], 0.25), whole)

    # one query of one row, its prompt in a longer block with rubbish behind it
    def padded(x):
        return [np.pad(x[0][1:], ((0, 0), (0, 0), (0, 9), (0, 0)), constant_values=1e4), x[1][2:3]]

    mask = [np.pad(masks[0][1:], ((0, 0), (0, 0), (0, 9))), masks[1][:, 2:3]]
    assert same(attend(q[2:3, 2:3], padded(keys), padded(values), mask, 0.25), whole[2:3, 2:3])
    # both blocks as one
    one = [[np.concatenate([np.repeat(x[0], 2, 0), x[1]], 2)] for x in (keys, values)]
    mask = np.concatenate(
        [
            np.broadcast_to(np.repeat(masks[0], 2, 0), (4, 5, 12)),
            np.broadcast_to(masks[1], (4, 5, 5)),
        ],
        2,
    )
    assert same(attend(q, *one, [mask], 0.25), whole)


def test_a_query_that_attends_to_nothing_has_the_output_zero():
    q, keys, values, masks = attention_case()
    masks = [
        np.zeros_like(masks[0]),
        masks[1] & (np.arange(5) > 0)[None, :, None] & (np.arange(5) > 0),
    ]
    out = np.asarray(attend(q, keys, values, masks, 0.25))
    assert np.isfinite(out).all() and not out[:, 0].any() and out[:, 1].any()


def test_gradients_are_those_of_the_plain_product():
    x, w = normal(6, 24, spread=0.5), normal(5, 24, spread=0.5)

    def gradients(product):
        return jax.jit(jax.grad(lambda x, w: (jnp.sin(product(x, w))).sum(), argnums=(0, 1)))(x, w)

    for found, expected in zip(gradients(exact.dot), gradients(plain_dot), strict=True):
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
    sizes, weights = jnp.array([2, 4]), jnp.stack([w, 2 * w])
    slope = jax.grad(lambda x: exact.grouped_dot(x, weights, sizes).sum())(jnp.asarray(x))
    np.testing.assert_allclose(
        slope, np.repeat([1.0, 2.0], sizes)[:, None] * w.sum(0), rtol=1e-5, atol=1e-5
    )


def test_float64_does_not_leak():
    x, w = jnp.asarray(normal(2, 8)), jnp.asarray(normal(3, 8))
    for out in (exact.dot(x, w), dot(x, w), exact.grouped_dot(x, w[None], jnp.array([2]))):
        assert out.dtype == jnp.float32
    with pytest.raises(ValueError, match="at most 131072 terms, not 131073"):
        exact.dot(jnp.ones((1, 131073)), jnp.ones((1, 131073)))
    assert not jax.config.jax_enable_x64 and jnp.arange(3.0).dtype == jnp.float32
    outside = jax.make_jaxpr(lambda x, w: exact.dot(x, w) * 2)(x, w)
    assert {v.aval.dtype for eqn in outside.eqns[-1:] for v in (*eqn.invars[:1], *eqn.outvars)} == {
        np.dtype("float32")
    }
