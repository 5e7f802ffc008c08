"""Attention in chunks against float64 numpy, values and gradients, and against whole attention in a
forward."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_forward import MIXED_WINDOWS, QWEN3, policy_and_weights, random_tokens

from fp8rl_jax.models.cache import KVCache
from fp8rl_jax.models.forward import forward
from fp8rl_jax.models.policy import with_compute
from fp8rl_jax.precision import Compute
from pallas_kernels.attention import (
    KeyBlock,
    TokenBlock,
    Tokens,
    attend_in_chunks,
    attention,
    attention_mask,
)

B, N, T, SLOTS, HEADS, KV, DIM, SCALE, VALUE_SCALE = 4, 2, 11, 7, 4, 2, 8, 0.3, 1.5


@pytest.fixture(scope="module")
def case():
    """Two shared rows, one of them without a token, own tokens in three segments and padding, and
    query 0 of row 0 alone."""
    rng = np.random.default_rng(0)
    segments = np.array(
        [[9, *[1] * 3, *[2] * 4, 0, 0, 0], [1] * T, [1] * 5 + [2] * 6, [0] * 3 + [4] * 8], np.int32
    )
    prefixes = np.where(segments == 2, 1, -1).astype(np.int32)
    positions = np.cumsum(np.ones_like(segments), axis=1).astype(np.int32) + 4
    real = np.zeros((B // N, SLOTS), bool)
    real[0, :5] = True
    slots = np.broadcast_to(np.arange(SLOTS), real.shape).astype(np.int32)
    shapes = (
        (B, T, HEADS, DIM),
        (B // N, KV, SLOTS, DIM),
        (B // N, KV, SLOTS, DIM),
        (B, KV, T, DIM),
        (B, KV, T, DIM),
    )
    return (
        segments,
        prefixes,
        positions,
        real,
        slots,
        tuple(rng.normal(size=s).astype(np.float32) for s in shapes),
    )


def visible(case, window) -> np.ndarray:
    """[b, t, slots + t] pair by pair. Segment 9's token sees nothing: the caller takes itself and
    the block away."""
    segments, prefixes, positions, real, slots, _ = case
    seen = np.zeros((B, T, SLOTS + T), bool)
    for b, i in np.ndindex(B, T):
        for j in range(SLOTS):
            seen[b, i, j] = real[b // N, j] and positions[b, i] - slots[b // N, j] < window
        for j in range(i + 1):
            related = segments[b, j] in (segments[b, i], prefixes[b, i])
            seen[b, i, SLOTS + j] = related and positions[b, i] - positions[b, j] < window
    return seen


def reference(arrays, seen, weights):
    """Output and gradients of sum(output * weights) in float64, a head of a row at a time."""
    q, sk, sv, k, v = (x.astype(np.float64) for x in arrays)
    out, gradients = np.zeros(q.shape), [np.zeros(x.shape) for x in (q, sk, sv, k, v)]
    dq, dsk, dsv, dk, dv = gradients
    for b, h in np.ndindex(B, HEADS):
        r, g = b // N, h // (HEADS // KV)
        keys, values = np.concatenate([sk[r, g], k[b, g]]), np.concatenate([sv[r, g], v[b, g]])
        e = np.exp(q[b, :, h] @ keys.T * SCALE) * seen[b]
        p = e / np.maximum(e.sum(-1, keepdims=True), 1e-300)
        out[b, :, h] = p @ values * VALUE_SCALE
        w = weights[b, :, h] * VALUE_SCALE
        dp = w @ values.T
        ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * SCALE
        dq[b, :, h] = ds @ keys
        for whole, shared, own in (
            (ds.T @ q[b, :, h], dsk[r, g], dk[b, g]),
            (p.T @ w, dsv[r, g], dv[b, g]),
        ):
            shared += whole[:SLOTS]
            own += whole[SLOTS:]
    return out, gradients


@pytest.mark.parametrize(
    ("chunk", "window"),
    [(4, None), (1, None), (4, 6), (0, None)],
    ids=["4", "1", "window", "whole"],
)
def test_values_and_gradients_equal_float64_numpy(case, chunk, window):
    segments, prefixes, positions, real, slots, arrays = case
    own = Tokens.of_rows(*map(jnp.asarray, (segments, positions, prefixes)))
    # segment 9 is told apart from the others: as a query it matches no key
    queries = own._replace(segments=jnp.where(segments == 9, -7, segments))
    block = Tokens.of_block(jnp.asarray(real), jnp.asarray(slots))
    before = own.after_block()
    before = before._replace(segments=jnp.where(segments == 9, -7, before.segments))
    weights = np.random.default_rng(1).normal(size=arrays[0].shape)

    def run(q, sk, sv, k, v):
        if not chunk:
            at_once = attention_mask(jax.tree.map(lambda x: x.reshape(B // N, -1), before), block)
            whole = [KeyBlock(sk, sv, at_once), KeyBlock(k, v, attention_mask(queries, own))]
            return attention(q, whole, SCALE, VALUE_SCALE, jnp.float32)
        keys = [TokenBlock(sk, sv, before, block), TokenBlock(k, v, queries, own)]
        limit = None if window is None else jnp.int32(window)
        return attend_in_chunks(q, keys, limit, SCALE, VALUE_SCALE, jnp.float32, chunk)

    seen = visible(case, np.inf if window is None else window)
    seen[segments == 9] = False
    assert not seen[0, 0].any()
    expected, expected_gradients = reference(arrays, seen, weights)
    found, pull = jax.vjp(jax.jit(run), *arrays)
    np.testing.assert_allclose(found, expected, atol=2e-6)
    assert not np.asarray(found)[0, 0].any()
    for got, wanted in zip(
        pull(jnp.asarray(weights, jnp.float32)), expected_gradients, strict=True
    ):
        np.testing.assert_allclose(got, wanted, atol=1e-5)


@pytest.mark.parametrize("config", [QWEN3, MIXED_WINDOWS], ids=["qwen3", "windows"])
def test_a_chunked_forward_has_the_values_and_gradients_of_the_whole_one(config):
    policy, _ = policy_and_weights(config)
    lengths, prompts, completions = (
        np.array([4, 7], np.int32),
        random_tokens(config, 2, 7),
        random_tokens(config, 6, 5, seed=4),
    )
    segments = (np.arange(7) < lengths[:, None]).astype(np.int32)
    positions = np.repeat(lengths, 3)[:, None] + np.arange(5, dtype=np.int32)

    def loss(policy, chunk):
        run = partial(forward, with_compute(policy, Compute(remat=True, attention_chunk=chunk)))
        first = run(jnp.asarray(prompts), segment_ids=jnp.asarray(segments))
        second = run(
            jnp.asarray(completions), jnp.asarray(positions), cache=KVCache(first.cache)
        ).hidden
        return (second * np.random.default_rng(5).normal(size=second.shape)).sum(), second

    (whole, chunked) = (
        jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)(policy, chunk) for chunk in (0, 3)
    )
    np.testing.assert_allclose(chunked[1], whole[1], atol=1e-5)
    for got, expected in zip(jax.tree.leaves(chunked[0]), jax.tree.leaves(whole[0]), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5 * np.abs(expected).max())


def test_long_rows_are_chunked_by_themselves():
    """The temporary memory of a backward pass over 2048 tokens: whole, its scores alone are 2048 *
    2048 * 3 * 4 bytes a layer."""
    policy, _ = policy_and_weights(QWEN3)

    def memory(chunk):
        def loss(policy, tokens):
            remade = with_compute(policy, Compute(remat=True, attention_chunk=chunk))
            return forward(remade, tokens, keep_cache=False).hidden.sum()

        tokens = jax.ShapeDtypeStruct((1, 2048), jnp.int32)
        return (
            jax.jit(jax.grad(loss))
            .lower(policy, tokens)
            .compile()
            .memory_analysis()
            .temp_size_in_bytes
        )

    whole, chunked = memory(0), memory(None)
    assert whole > 2048 * 2048 * 3 * 4 and chunked < whole / 8, (whole, chunked)
