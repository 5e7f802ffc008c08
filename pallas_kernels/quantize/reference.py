"""Blockwise quantization in plain XLA: the definition of correct for every other backend."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

SMALLEST_SCALE = 2.0**-126  # the smallest normal float32: a CPU flushes smaller ones to zero


def quantize(x, block, dtype, scale):
    limit = float(jnp.finfo(dtype).max)
    x = x.astype(jnp.float32)
    scales = scale_of(block_amax(x, block), dtype, scale)
    scaled = x * expand(1.0 / scales, block, x.shape[-2:])
    return jnp.clip(scaled, -limit, limit).astype(dtype), scales


def scale_of(amax, dtype, scale):
    """The scale of blocks whose largest magnitudes are `amax`, float32."""
    # what XLA makes of amax / max, one rounding apart
    scales = jnp.maximum(amax * (1.0 / float(jnp.finfo(dtype).max)), SMALLEST_SCALE)
    if scale == "power_of_two":
        scales = round_up_to_power_of_two(scales)
    return jnp.where(amax == 0, 1.0, scales)


def block_amax(x, block):
    """Largest magnitude of each block; the last block of an axis may be shorter. NaN and infinity propagate."""
    (m, n), (bm, bn) = x.shape[-2:], block
    rows, columns = -(-m // bm), -(-n // bn)
    pad = [(0, 0)] * (x.ndim - 2) + [(0, rows * bm - m), (0, columns * bn - n)]
    return largest(jnp.pad(x, pad).reshape(*x.shape[:-2], rows, bm, columns, bn), axis=(-3, -1))


def largest(x, axis=None):
    """Largest magnitude over `axis`, float32; a NaN wins. On bit patterns, because XLA's float maximum drops NaN on a CPU."""
    return lax.bitcast_convert_type(magnitude_bits(x).max(axis=axis), jnp.float32)


def magnitude_bits(x):
    """|x| as int32, in the order of float32, NaN above all."""
    return lax.bitcast_convert_type(jnp.abs(x.astype(jnp.float32)), jnp.int32)


def round_up_to_power_of_two(x):
    """Smallest power of two that is >= x, for positive normal x; exact, unlike exp2(ceil(log2(x)))."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    exponent = (bits + 0x007FFFFF) & 0x7F800000
    return jnp.where(x < jnp.inf, lax.bitcast_convert_type(exponent, jnp.float32), x)


def expand(scales, block, shape):
    """Scales [..., mb, nb] repeated to one for each element, [..., m, n]."""
    for axis, size, side in ((-2, shape[0], block[0]), (-1, shape[1], block[1])):
        if side > 1:
            scales = jnp.repeat(scales, side, axis=axis)
        scales = lax.slice_in_dim(scales, 0, size, axis=axis)
    return scales
