"""Ways to let a change arrive that is smaller than a step of the format.

Rounding to nearest loses every change below half a step, each time anew, so a slow running mean,
or a weight that starts on the grid, never moves.

    round_stochastic   up or down at random, so that the mean of the result is the value itself: it
                       moves rarely, by whole steps, and arrives all the same (arXiv 1502.02551; for
                       bfloat16 updates 2010.06192)
    round_by_hash      the same with a draw that is a function of the value and its place alone, so
                       that two programs that are given one weight round it alike
    dither             the values themselves moved at random, once, without leaving what they round
                       to: from there rounding to nearest passes a change on in the mean, and draws
                       nothing more (subtractive dither's first half; Roberts 1962, Schuchman 1964)
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Key, UInt32

from fp8rl_jax.parallel import mixed, place_hash
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
    draw = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.float32) * 2.0**-16
    return _up_or_down(x, dtype, draw)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def round_by_hash(x: Float[Array, "*axes"], dtype: jnp.dtype) -> Float[Array, "*axes"]:
    """Round as `round_stochastic`, by a hash of each value's bits and of its place.

    A value that changes is drawn anew, one that stays is rounded as before. Its derivative is that
    of `x.astype(dtype)`.

    Args:
        x: float32.
        dtype: float16 or bfloat16; in float32 `x` stays as it is.
    """
    if dtype == x.dtype:
        return x
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    # of a matrix alone: a layer is rounded as in its stack
    draw = (mixed(bits ^ place_hash(x.shape[-2:], 1)) >> 8).astype(jnp.float32) * 2.0**-24
    return _up_or_down(x, dtype, draw)


@round_by_hash.defjvp
def _round_by_hash_jvp(dtype, primals, tangents):
    return round_by_hash(*primals, dtype), tangents[0].astype(dtype)


def _up_or_down(x: Array, dtype: jnp.dtype, draw: Array) -> Array:
    """The neighbour above where `draw`, from 0 to below 1, reaches what is left to it."""
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
