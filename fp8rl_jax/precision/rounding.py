"""Stochastic rounding: up or down at random, so that the mean of the result is the value itself.

Rounding to nearest loses every change below half a step of the format, each time anew, so a slow
running mean never moves. Rounded at random it moves rarely, by whole steps, and arrives all the
same (arXiv 1502.02551; for bfloat16 updates 2010.06192).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Key

_EXPONENT = 0x7F800000  # of a float32


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
    info = jnp.finfo(dtype)
    power = lax.bitcast_convert_type(
        lax.bitcast_convert_type(x, jnp.int32) & _EXPONENT, jnp.float32
    )
    # the grid is even below the format's smallest normal, and float32 has nothing below its own on
    # a CPU
    smallest = max(
        float(info.smallest_normal) * 2.0**-info.nmant,
        float(jnp.finfo(jnp.float32).smallest_normal),
    )
    step = jnp.maximum(power * 2.0**-info.nmant, smallest)
    draw = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.float32) * 2.0**-16
    rounded = jnp.floor(x / step + draw) * step
    return jnp.where(jnp.isfinite(x), rounded, x).astype(dtype)
