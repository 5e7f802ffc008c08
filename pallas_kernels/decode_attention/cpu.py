"""Decode attention by the CPU kernel (pallas_kernels/attention/cpu.c): it reads the keys that a
sequence sees where they lie, and no others, e4m3 as it is."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import native
from pallas_kernels.attention.cpu import lacks as lacks_of_blocks
from pallas_kernels.attention.cpu import scales_of
from pallas_kernels.decode_attention.reference import first_visible, known_lengths, page_of
from pallas_kernels.rounding import rounded


def lacks(caches) -> str:
    """Say what the kernel does not serve of these caches; empty where it serves them."""
    return lacks_of_blocks([cache.keys for cache in caches], [cache.values for cache in caches])


def decode_attention(query, caches, score_scale, value_scale, window, out_dtype):
    sequences = len(query)
    starts = first_visible([known_lengths(cache) for cache in caches], sequences, window)
    operands = []
    for cache, start in zip(caches, starts, strict=True):
        table = cache.pages
        if table is None:
            table = jnp.arange(len(cache.keys), dtype=jnp.int32)[:, None]
        first = jnp.zeros(sequences, jnp.int32) if start is None else start.reshape(-1)
        operands += [cache.keys, cache.values, cache.lengths, table, first.astype(jnp.int32)]
    sizes = jnp.array([page_of(cache)[0] for cache in caches], jnp.int32)
    scales = scales_of(score_scale, value_scale, caches[0].keys.shape[1])
    made = jax.ShapeDtypeStruct(query.shape, jnp.float32)
    call = jax.ffi.ffi_call(native.target("fp8rl_decode_attention"), made)
    return rounded(call(query.astype(jnp.float32), scales, sizes, *operands), out_dtype)
