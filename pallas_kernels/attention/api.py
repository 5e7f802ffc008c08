"""Attention of many queries a row, over blocks of keys with a mask each: prefill, scoring and
training."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.attention import reference
from pallas_kernels.attention.reference import KeyBlock, check_scale
from pallas_kernels.backend import Backend, BackendError, choose, resolve

OPERATION = "attention"
_CAST = "probabilities that are cast"


def attention(
    query: Float[Array, "b t heads dim"],
    blocks: list[KeyBlock],
    score_scale: Float[Array, ...] | float,
    value_scale: Float[Array, ...] | float,
    out_dtype: jnp.dtype,
    *,
    key_order: Literal["any", "decode"] = "any",
    probability: jnp.dtype | None = None,
    backend: Backend = "auto",
) -> Float[Array, "b t heads dim"]:
    """Compute softmax(q . k * score_scale) . v * value_scale over all blocks; differentiable.

    Segments, prefixes and sliding windows are in the masks, which `attention_mask` makes from a
    number a token. `attend_in_chunks` makes them, and runs this, for a few queries at a time.

    The Hopper backend is cuDNN's flash attention (jax.nn.dot_product_attention). It takes bfloat16
    or float16, a head_dim of a multiple of 8 up to 128, and scales known at trace time; masks reach
    it as a bias, and a block that rows share is copied to each of them, because its batch and mask
    interfaces have no other form of either.

    In decode's key order a token's output has the bits of a decode step whose caches hold, each
    from its first slot on, the keys of the same blocks up to the token's own. It takes what
    `decode_attention` takes on Hopper: e4m3 and 16 bits, head_dim 64, 96 and 128. The slots of a
    block that a query attends to must follow each other, as causal masks, right padding and windows
    have them; a query whose mask has a gap has the output NaN. No slot may hold a NaN or an
    infinity, attended to or not. Partial results are float32 [chunks of 512 slots, rows, heads,
    queries, head_dim] for each block: `attend_in_chunks` bounds the queries. The gradient is the
    reference's.

    Args:
        query: any float dtype, e4m3 included.
        blocks: a block with fewer rows than `query` is shared: row r serves query rows r*n ... r*n
            + n - 1.
        score_scale: the model's, mostly 1/sqrt(dim), times the scales of Q and K where they are
            quantized; [] or [kv_heads], where Q's scale is that of its KV head's group.
        value_scale: the scale of V, [] or [kv_heads], or 1.
        out_dtype: dtype of the result.
        key_order: "decode" joins keys as `decode_attention` does, for a decode step's bits; Hopper
            alone has it.
        probability: FP8 dtype that exp(score - the query's largest score) is cast to, times 256,
            before it is multiplied with V; None: it stays float32. The reference alone has it.
        backend: implementation. "auto" takes the reference where cuDNN does not serve the call.

    Returns:
        The output, 0 for a query that attends to nothing.

    Raises:
        BackendError: a backend asked for by name cannot serve the call, or none here has decode's
            key order for it.
        ValueError: shapes that do not belong together.
    """
    b, _, heads, dim = query.shape
    for block in blocks:
        rows, kv_heads, slots, key_dim = block.keys.shape
        if (
            not rows
            or b % rows
            or heads % kv_heads
            or key_dim != dim
            or block.mask.shape[-1] != slots
        ):
            raise ValueError(
                f"{OPERATION}: query {query.shape}, keys {block.keys.shape} and mask "
                f"{block.mask.shape} do not fit"
            )
    for scale in (score_scale, value_scale):
        check_scale(OPERATION, scale, blocks[0].keys.shape[1])
    inputs = (query, blocks, score_scale, value_scale, out_dtype)
    chosen = resolve(backend, OPERATION)
    if chosen == "reference" and key_order == "decode":
        raise BackendError(
            f"{OPERATION}: the reference does not join keys in decode's order; the hopper "
            "backend does"
        )
    if chosen == "reference":
        return reference.attend(*inputs, probability)
    from pallas_kernels.attention import hopper  # importing Pallas takes longer than importing JAX

    if key_order == "decode":
        lacking = _CAST if probability else hopper.decode_order_lacks(query, blocks)
        if lacking:
            raise BackendError(
                f"{OPERATION}: the hopper backend has no {lacking} in decode's order"
            )
        return hopper.decode_order_attention(*inputs)
    lacking = _CAST if probability else hopper.cudnn_lacks(query, blocks, score_scale)
    if choose(OPERATION, backend, lacking) == "reference":
        return reference.attend(*inputs, probability)
    return hopper.cudnn_attention(*inputs)
