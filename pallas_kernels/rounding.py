"""Roundings that happen where they are written, and none that nobody wrote.

A result in bfloat16 or float16 that the same program reads again need not be rounded: XLA may keep
it in float32 (`xla_allow_excess_precision`, on unless a flag says otherwise), and whether it does
depends on the program around it. The decode loop and the training step then compute two functions
from one definition: a train-rollout mismatch that no format and no order of sums has made.

XLA does not remove `lax.reduce_precision`. So every narrowing to 16 bits in this library goes
through `rounded`.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Key


def full_precision(x: Array, dtype: jnp.dtype = jnp.float32) -> str | None:
    """Choose the precision of a product with x that is computed in `dtype`.

    Float32 numbers are multiplied as they are where the computation is in float32. Left to the
    device, a GPU of NVIDIA's rounds them to the 11 bits of TF32 first, and a TPU to bfloat16. That
    is more than a computation in 16 bits keeps of them, as where they are dequantized there, and
    several times as fast.
    """
    return "highest" if x.dtype == dtype == jnp.float32 else None


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def rounded(x: Float[Array, "*axes"], dtype: jnp.dtype) -> Float[Array, "*axes"]:
    """Round `x` to `dtype` here and to nearest even, whatever surrounds it.

    Its derivative is that of `x.astype(dtype)`.

    Args:
        x: any float dtype. One that is no wider than `dtype` is converted and nothing else.
        dtype: float16, bfloat16, float32 or float64.
    """
    info = jnp.finfo(dtype)
    if jnp.finfo(x.dtype).nmant <= info.nmant:
        return x.astype(dtype)
    on_grid = lax.reduce_precision(x, info.nexp, info.nmant)
    # whose subnormal numbers hold small gradients; reduce_precision makes them 0
    if dtype == jnp.float16:
        steps = jnp.round(x * (1.0 / float(info.smallest_subnormal)))
        on_grid = jnp.where(
            jnp.abs(x) < float(info.smallest_normal),
            steps * float(info.smallest_subnormal),
            on_grid,
        )
    return on_grid.astype(dtype)


@rounded.defjvp
def _rounded_jvp(dtype, primals, tangents):
    return rounded(*primals, dtype), tangents[0].astype(dtype)


def round_stochastic(
    x: Float[Array, "*axes"], dtype: jnp.dtype, key: Key[Array, ""]
) -> Float[Array, "*axes"]:
    """Round to one of the two neighbours on the grid of `dtype`, the nearer one more often.

    Args:
        x: float32 within the range of `dtype`; NaN and infinities stay. A value on the grid is
            kept.
        dtype: a float format of fewer bits.
        key: fixes the draws, whatever the sharding.

    Returns:
        Shape of `x`, dtype `dtype`; its expected value is `x`, to 16 bits of the step.
    """
    draw = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.float32) * 2.0**-16
    return up_or_down(x, dtype, draw)


def up_or_down(x: Array, dtype: jnp.dtype, draw: Array) -> Array:
    """Round to the neighbour above where `draw`, from 0 to below 1, reaches what is left to it."""
    info = jnp.finfo(dtype)
    power = lax.bitcast_convert_type(
        lax.bitcast_convert_type(x, jnp.int32) & 0x7F800000, jnp.float32
    )
    # the grid is even below the format's smallest normal, and float32 has nothing below its own on
    # a CPU
    smallest = max(
        float(info.smallest_normal) * 2.0**-info.nmant,
        float(jnp.finfo(jnp.float32).smallest_normal),
    )
    step = jnp.maximum(power * 2.0**-info.nmant, smallest)
    moved = jnp.floor(x / step + draw) * step
    return jnp.where(jnp.isfinite(x), moved, x).astype(dtype)
