"""Attention of any number of queries by the CPU kernel (`cpu.c` beside this file).

A query's bits depend on the keys that it sees and on their order, and on nothing else.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels import native
from pallas_kernels.rounding import rounded

MOST_BLOCKS = 8
_WIDTH = 16


def lacks(keys: list[Array], values: list[Array]) -> str:
    """Say what the kernel does not serve of these blocks; empty where it serves them."""
    kinds = {x.dtype.name for x in (*keys, *values)}
    if len(kinds) > 1 or not kinds <= {"float32", "bfloat16", "float8_e4m3fn"}:
        return f"keys and values of {', '.join(sorted(kinds))}"
    if keys[0].shape[3] % _WIDTH:
        return f"head_dim {keys[0].shape[3]}, no multiple of {_WIDTH}"
    return f"{len(keys)} blocks of keys" if len(keys) > MOST_BLOCKS else ""


def attend(
    query: Float[Array, "b t heads dim"],
    keys: list[Float[Array, "_ kv_heads _ dim"]],
    values: list[Float[Array, "_ kv_heads _ dim"]],
    masks: list[Bool[Array, "_ _ _"]],
    score_scale: float,
    out_dtype: jnp.dtype,
) -> Float[Array, "b t heads dim"]:
    """Compute softmax(q k * score_scale) v over the slots of all blocks that are visible.

    Args:
        keys, values: of each block [rows, kv_heads, slots, dim]; row r serves the queries r * b /
            rows and on.
        masks: of each block, broadcastable to [rows, t * b / rows, slots].

    Returns:
        0 for a query that attends to nothing. It has no gradient.

    Raises:
        RuntimeError: this machine has no CPU kernels.
    """
    blocks = [x for block in zip(keys, values, masks, strict=True) for x in block]
    made = jax.ShapeDtypeStruct(query.shape, jnp.float32)
    call = jax.ffi.ffi_call(native.target("fp8rl_attend"), made)
    factors = scales_of(score_scale, 1.0, keys[0].shape[1])
    return rounded(call(query.astype(jnp.float32), factors, *blocks), out_dtype)


def scales_of(score_scale, value_scale, kv_heads: int) -> Float[Array, "2 kv_heads"]:
    """Bring the scales of scores and of values into the kernel's form."""
    scales = (jnp.asarray(x, jnp.float32) for x in (score_scale, value_scale))
    return jnp.stack([jnp.broadcast_to(x, kv_heads) for x in scales])
