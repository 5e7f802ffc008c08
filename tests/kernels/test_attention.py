"""What `attention` refuses, and how cuDNN is asked; tests/models/test_chunked_attention.py has its values and gradients."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import BackendError, attention
from pallas_kernels.attention import Keys
from pallas_kernels.attention import hopper as on_hopper
from pallas_kernels.target import tracing_for


def operands(b=4, rows=2, t=5, slots=7, dim=16, dtype=jnp.float32):
    """A shared block and an own one; query 0 of row 0 sees nothing."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    some = jnp.asarray(rng.random((rows, b // rows * t, slots)) < 0.5)
    shared = Keys(normal(rows, 2, slots, dim), normal(rows, 2, slots, dim), some)
    causal = jnp.tril(jnp.ones((b, t, t), bool)).at[0, 0].set(False)
    own = Keys(normal(b, 2, t, dim), normal(b, 2, t, dim), causal)
    return normal(b, t, 4, dim), [shared._replace(mask=shared.mask.at[0, 0].set(False)), own]


def test_cudnn_is_asked_for_what_the_reference_computes(monkeypatch):
    """XLA answers in its place: blocks repeated for the rows that share them, masks, odd lengths, queries that see nothing."""
    asked = {}

    def answer(query, key, value, mask, scale, implementation):
        asked.update(implementation=implementation, lengths=(query.shape[1], key.shape[1]))
        return plain(query, key, value, mask=mask, scale=scale, implementation="xla")

    plain = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", answer)
    query, blocks = operands()
    arrays = (query, *(x for block in blocks for x in (block.keys, block.values)))

    def run(backend, query, *arrays):
        held = [Keys(*arrays[2 * i : 2 * i + 2], block.mask) for i, block in enumerate(blocks)]
        if backend == "hopper":
            return on_hopper.attention(query, held, 0.3, 1.5, jnp.float32)
        return attention(query, held, 0.3, 1.5, jnp.float32, backend=backend)

    weights = jnp.asarray(np.random.default_rng(1).normal(size=query.shape), jnp.float32)
    (got, pull), (wanted, wanted_pull) = (jax.vjp(partial(run, backend), *arrays) for backend in ("hopper", "reference"))
    assert asked == {"implementation": "cudnn", "lengths": (6, 12)} and not np.asarray(got)[0, 0].any()
    np.testing.assert_allclose(got, wanted, atol=2e-6)
    for one, other in zip(pull(weights), wanted_pull(weights), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_what_cudnn_does_not_serve_is_refused_by_name_and_left_to_the_reference():
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
            with pytest.raises(BackendError, match=f"attention: the hopper backend has no attention.*{message}"):
                ask(*call, backend="hopper")
            assert jnp.isfinite(ask(*call)).all()


def test_decodes_key_order_is_refused_until_a_kernel_has_it():
    with pytest.raises(BackendError, match="attention: no backend joins keys in decode's order"):
        attention(*operands(), 1.0, 1.0, jnp.float32, key_order="decode")


def test_bad_shapes_are_one_clear_error():
    query, (shared, own) = operands()
    for blocks in ([shared._replace(keys=shared.keys[..., :8])], [shared._replace(mask=shared.mask[..., :3])]):
        with pytest.raises(ValueError, match="attention: query .* do not fit"):
            attention(query, blocks, 1.0, 1.0, jnp.float32)
    with pytest.raises(ValueError, match="do not fit"):
        attention(query[:3], [shared], 1.0, 1.0, jnp.float32)
