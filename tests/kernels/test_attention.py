"""What `attention` refuses, and how cuDNN is asked; tests/models/test_chunked_attention.py has its
values and gradients."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import BackendError, attention
from pallas_kernels.attention import KeyBlock
from pallas_kernels.attention import hopper as on_hopper
from pallas_kernels.attention.reference import attend
from pallas_kernels.backend import tracing_for
from pallas_kernels.check.cases import cases_of, difference
from pallas_kernels.decode_attention import hopper as decode_on_hopper


def operands(b=4, rows=2, t=5, slots=7, dim=16, dtype=jnp.float32):
    """A shared block and an own one; query 0 of row 0 sees nothing."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    some = jnp.asarray(rng.random((rows, b // rows * t, slots)) < 0.5)
    shared = KeyBlock(normal(rows, 2, slots, dim), normal(rows, 2, slots, dim), some)
    causal = jnp.tril(jnp.ones((b, t, t), bool)).at[0, 0].set(False)
    own = KeyBlock(normal(b, 2, t, dim), normal(b, 2, t, dim), causal)
    return normal(b, t, 4, dim), [shared._replace(mask=shared.mask.at[0, 0].set(False)), own]


@pytest.mark.parametrize("value_scale", [1.5, jnp.asarray([1.5, 0.5])], ids=["one", "by_kv_head"])
def test_cudnn_attention_equals_the_reference(monkeypatch, value_scale):
    """XLA answers in its place: blocks repeated for the rows that share them, masks, odd lengths,
    queries that see nothing."""
    asked = {}

    def answer(query, key, value, mask, scale, implementation):
        asked.update(implementation=implementation, lengths=(query.shape[1], key.shape[1]))
        return plain(query, key, value, mask=mask, scale=scale, implementation="xla")

    plain = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", answer)
    query, blocks = operands()
    arrays = (query, *(x for block in blocks for x in (block.keys, block.values)))

    def run(backend, query, *arrays):
        held = [KeyBlock(*arrays[2 * i : 2 * i + 2], block.mask) for i, block in enumerate(blocks)]
        if backend == "hopper":
            return on_hopper.cudnn_attention(query, held, 0.3, value_scale, jnp.float32)
        return attention(query, held, 0.3, value_scale, jnp.float32, backend=backend)

    weights = jnp.asarray(np.random.default_rng(1).normal(size=query.shape), jnp.float32)
    (got, pull), (wanted, wanted_pull) = (
        jax.vjp(partial(run, backend), *arrays) for backend in ("hopper", "reference")
    )
    assert (
        asked == {"implementation": "cudnn", "lengths": (6, 12)} and not np.asarray(got)[0, 0].any()
    )
    np.testing.assert_allclose(got, wanted, atol=2e-6)
    for one, other in zip(pull(weights), wanted_pull(weights), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_auto_takes_the_reference_where_cudnn_does_not_serve_and_cudnn_by_name_is_refused():
    ask = partial(attention, out_dtype=jnp.float32)
    wide, narrow = operands(), operands(dtype=jnp.float8_e4m3fn)
    with pytest.raises(BackendError, match=r"attention: .*needs a GPU of compute capability 9\.0"):
        ask(*wide, 1.0, 1.0, backend="hopper")
    with tracing_for(132):
        for call, message in (
            ((*wide, 1.0, 1.0), "of float32"),
            ((*narrow, 1.0, jnp.float32(2)), "of float8_e4m3fn"),
            ((*operands(dtype=jnp.bfloat16), jnp.float32(1), 1.0), "not known at trace time"),
            ((*operands(dim=136, dtype=jnp.bfloat16), 1.0, 1.0), "head_dim 136"),
        ):
            with pytest.raises(
                BackendError, match=f"attention: the hopper backend has no attention.*{message}"
            ):
                ask(*call, backend="hopper")
            assert jnp.isfinite(ask(*call)).all()


@pytest.mark.parametrize(
    "small",
    [case for case in cases_of("attention", "small") if case.tolerance],
    ids=lambda case: case.name,
)
def test_the_reference_equals_float64(small):
    arrays = small.arguments(jax.random.key(0))
    got = jax.jit(lambda *a: small.run(*a, backend="reference"))(*arrays)
    assert difference(got, small.expected(*map(np.asarray, arrays))) < 2e-6


def test_decodes_key_order_is_refused_where_no_kernel_has_it():
    ask = partial(attention, out_dtype=jnp.float32, key_order="decode")
    for backend in ("auto", "reference"):
        with pytest.raises(
            BackendError, match="attention: the reference does not join keys in decode's order"
        ):
            ask(*operands(), 1.0, 1.0, backend=backend)
    with tracing_for(132):
        for backend in ("auto", "hopper"):
            for call, message in (
                (operands(dim=64), "of float32"),
                (operands(dtype=jnp.bfloat16), "head_dim 16"),
            ):
                with pytest.raises(
                    BackendError,
                    match=f"attention: the hopper backend has no .*{message}.* in decode's order",
                ):
                    ask(*call, 1.0, 1.0, backend=backend)


def in_decodes_order(monkeypatch):
    """`attention` in decode's key order, and the limits that the kernel gets; the reference answers
    in its place."""
    asked = []

    def answer(query, caches, limits, score_scale, value_scale, out_dtype):
        asked.append(limits)
        query = query.astype(jnp.float32)
        masks = [
            (jnp.arange(c.keys.shape[2]) >= a[..., None])
            & (jnp.arange(c.keys.shape[2]) < b[..., None])
            for c, (a, b) in zip(caches, limits, strict=True)
        ]
        blocks = [KeyBlock(c.keys, c.values, mask) for c, mask in zip(caches, masks, strict=True)]
        return attend(query[:, None], blocks, score_scale, value_scale, out_dtype)[:, 0]

    monkeypatch.setattr(decode_on_hopper, "attend", answer)
    return on_hopper.decode_order_attention, asked


def causal_operands(dtype):
    """A shared block of 7 slots, of which the rows' prompts have 6 and 3; own causal keys, and
    query 0 of row 0 sees nothing."""
    query, (shared, own) = operands(dim=64, dtype=dtype)
    real = jnp.arange(7) < jnp.array([6, 3])[:, None]
    mask = jnp.broadcast_to(real[:, None], (2, 2 * 5, 7)).at[0, 0].set(False)
    return query, [shared._replace(mask=mask), own]


def test_decodes_key_order_has_the_limits_of_the_masks_and_the_references_gradient(monkeypatch):
    run, asked = in_decodes_order(monkeypatch)
    query, blocks = causal_operands(jnp.bfloat16)
    arrays = (query, *(x for block in blocks for x in (block.keys, block.values)))

    def on(function, query, *arrays):
        return function(
            query,
            [KeyBlock(*arrays[2 * i : 2 * i + 2], b.mask) for i, b in enumerate(blocks)],
            0.3,
            1.5,
            jnp.float32,
        )

    (got, pull), (want, wanted_pull) = (
        jax.vjp(partial(on, function), *arrays) for function in (run, attend)
    )
    (first, last), (own_first, own_last) = asked[0]
    np.testing.assert_array_equal(last, [[0] + [6] * 9, [3] * 10])
    np.testing.assert_array_equal(own_last, [[0, 2, 3, 4, 5]] + [[1, 2, 3, 4, 5]] * 3)
    np.testing.assert_array_equal(first[:, 1:], 0)
    assert int(own_first[0, 0]) == 5 and not np.asarray(got)[0, 0].any()
    np.testing.assert_allclose(got, want, atol=2e-3)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=query.shape), jnp.float32)
    for one, other in zip(pull(weights), wanted_pull(weights), strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


def test_a_mask_with_a_gap_is_not_a_number_in_decodes_key_order(monkeypatch):
    run, _ = in_decodes_order(monkeypatch)
    query, (shared, own) = causal_operands(jnp.bfloat16)
    out = run(
        query, [shared, own._replace(mask=own.mask.at[2, 4, 1].set(False))], 0.3, 1.0, jnp.float32
    )
    gap = np.isnan(np.asarray(out)).all((2, 3))
    assert gap[2, 4] and gap.sum() == 1 and np.isfinite(np.asarray(out)[~gap]).all()


def test_bad_shapes_are_one_clear_error():
    query, (shared, own) = operands()
    for blocks in (
        [shared._replace(keys=shared.keys[..., :8])],
        [shared._replace(mask=shared.mask[..., :3])],
    ):
        with pytest.raises(ValueError, match="attention: query .* do not fit"):
            attention(query, blocks, 1.0, 1.0, jnp.float32)
    with pytest.raises(ValueError, match="do not fit"):
        attention(query[:3], [shared], 1.0, 1.0, jnp.float32)
    for scales in ((jnp.ones(4), 1.0), (1.0, jnp.ones(1))):
        with pytest.raises(ValueError, match=r"attention: a scale has the shape \(\) or \(2,\)"):
            attention(query, [shared, own], *scales, jnp.float32)
