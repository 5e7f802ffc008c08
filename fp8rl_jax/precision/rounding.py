"""Two ways to let a change arrive that is smaller than a step of the format.

Rounding to nearest loses every change below half a step, each time anew, so a slow running mean,
or a weight that starts on the grid, never moves.

    round_stochastic   up or down at random, so that the mean of the result is the value itself: it
                       moves rarely, by whole steps, and arrives all the same (arXiv 1502.02551; for
                       bfloat16 updates 2010.06192)
    dither             the values themselves moved at random, once, without leaving what they round
                       to: from there rounding to nearest passes a change on in the mean, and draws
                       nothing more (subtractive dither's first half; Roberts 1962, Schuchman 1964)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Key, UInt32

from fp8rl_jax.parallel import place_hash
from pallas_kernels.rounding import rounded

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


def dither(
    x: Float[Array, "*axes"], dtype: jnp.dtype, salt: UInt32[Array, ""]
) -> Float[Array, "*axes"]:
    """Draw each value from all the float32 numbers that round to it in `dtype`.

    The cell of a power of two is half as wide on its lower side, so a draw's mean is not the value.

    Args:
        x: float32. What is not on the grid of `dtype` is kept, since it is somewhere in its cell
            already; so are zeros, subnormal and largest numbers, NaN and infinities.
        dtype: float16 or bfloat16.
        salt: fixes the draws, whatever the sharding. They are hashes of the places, of 24 bits, as
            jax.random takes a second to compile for each tensor.

    Returns:
        Shape of `x`, float32; rounded to `dtype`, to nearest even, it is `x` bit for bit.
    """
    narrow, info = rounded(x, dtype), jnp.finfo(dtype)
    bits = lax.bitcast_convert_type(narrow, jnp.uint16)

    def middle(step: int) -> Array:
        """Between a number and its neighbour, which of one sign are in the order of their bits."""
        neighbour = lax.bitcast_convert_type(bits + jnp.uint16(step % 2**16), dtype)
        return (x + neighbour.astype(jnp.float32)) / 2

    low, high = middle(-1), middle(1)
    part = (place_hash(x.shape, salt) >> 8).astype(jnp.float32) * 2.0**-24
    drawn = low + part * (high - low)
    size = jnp.abs(x)
    inside = (size > float(info.smallest_normal)) & (size < float(info.max))
    # a border belongs to one of its two cells
    inside &= (narrow.astype(jnp.float32) == x) & (rounded(drawn, dtype) == narrow)
    return jnp.where(inside, drawn, x)
