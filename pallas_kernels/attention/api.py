"""Attention of many queries a row, over blocks of keys with a mask each: prefill, scoring and training."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.attention import hopper, reference
from pallas_kernels.attention.reference import Keys
from pallas_kernels.backend import Backend, BackendError, choose

OPERATION = "attention"


def attention(
    query: Float[Array, "b t heads dim"],
    blocks: list[Keys],
    score_scale: Float[Array, ""] | float,
    value_scale: Float[Array, ""] | float,
    out_dtype: jnp.dtype,
    *,
    key_order: Literal["any", "decode"] = "any",
    backend: Backend = "auto",
) -> Float[Array, "b t heads dim"]:
    """softmax(q . k * score_scale) . v * value_scale over the slots of all blocks together; differentiable.

    Segments, prefixes and sliding windows are in the masks, which `sees` makes from a number a token. `attend_in_chunks` makes
    them, and runs this, for a few queries at a time.

    The Hopper backend is cuDNN's flash attention (jax.nn.dot_product_attention). It takes bfloat16 or float16, a head_dim of a
    multiple of 8 up to 128, and scales known at trace time; masks reach it as a bias, and a block that rows share is copied to
    each of them, because its batch and mask interfaces have no other form of either.

    Args:
        query: any float dtype, e4m3 included.
        blocks: a block with fewer rows than `query` is shared: row r serves query rows r*n ... r*n + n - 1.
        score_scale: the model's, mostly 1/sqrt(dim), times the scales of Q and K where they are quantized.
        value_scale: the scale of V, or 1.
        out_dtype: dtype of the result.
        key_order: "decode" joins keys in the order of `decode_attention`'s chunks, for bits equal to decode's.
        backend: implementation. "auto" takes the reference where cuDNN does not serve the call.

    Returns:
        The output, 0 for a query that sees nothing.

    Raises:
        BackendError: a backend asked for by name cannot serve the call; no backend has decode's key order yet.
        ValueError: shapes that do not belong together.
    """
    b, _, heads, dim = query.shape
    for block in blocks:
        rows, kv_heads, slots, key_dim = block.keys.shape
        if not rows or b % rows or heads % kv_heads or key_dim != dim or block.mask.shape[-1] != slots:
            raise ValueError(f"{OPERATION}: query {query.shape}, keys {block.keys.shape} and mask {block.mask.shape} do not fit")
    if key_order == "decode":
        raise BackendError(f"{OPERATION}: no backend joins keys in decode's order; that needs a prefill kernel over its chunks")
    run = reference.attend
    if choose(OPERATION, backend, hopper.lacks(query, blocks, score_scale)) == "hopper":
        run = hopper.attention
    return run(query, blocks, score_scale, value_scale, out_dtype)
