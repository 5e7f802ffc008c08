"""Blockwise quantization in plain XLA: the definition of correct for every other backend."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

SMALLEST_SCALE = 2.0**-126  # the smallest normal float32: a CPU flushes smaller ones to zero


def quantize(x, block, dtype, scale):
    scaled, scales = _scaled(x, block, dtype, scale)
    return to_float8(scaled, dtype), scales


def round_blocks(x, block, dtype, scale):
    """Quantize and dequantize, float32, without a number in `dtype`, whose casts a CPU emulates."""
    scaled, scales = _scaled(x, block, dtype, scale)
    return on_grid(scaled, dtype) * expand_scales(scales, block, x.shape[-2:])


def _scaled(x, block, dtype, scale):
    """x over the scales of its blocks, within the range of `dtype`, float32; and the scales."""
    limit = float(jnp.finfo(dtype).max)
    x = x.astype(jnp.float32)
    scales = scale_of(block_amax(x, block), dtype, scale)
    scaled = x * expand_scales(reciprocal(scales), block, x.shape[-2:])
    return jnp.clip(scaled, -limit, limit), scales


NAN_CODES = {"float8_e4m3fn": 0x7F, "float8_e5m2": 0x7E}


def to_float8(x, dtype):
    """Cast float32 to `dtype` by integer operations, a third of the time of a CPU's cast.

    |x| is at most the largest number of `dtype`, or NaN.
    """
    info = jnp.finfo(dtype)
    if info.dtype.name not in NAN_CODES:
        return x.astype(dtype)
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    size, smallest = bits & 0x7FFFFFFF, int(info.minexp)
    drop = 23 - info.nmant
    ties_to_even = (1 << (drop - 1)) - 1 + ((size >> drop) & 1)
    normal = ((size + ties_to_even) >> drop) - ((126 + smallest) << info.nmant)
    # a sum whose last bit is the step of the subnormal numbers
    shifted = lax.bitcast_convert_type(size, jnp.float32) + 2.0 ** (smallest + drop)
    subnormal = lax.bitcast_convert_type(shifted, jnp.uint32)
    code = jnp.where(size < (127 + smallest) << 23, subnormal, normal)
    code = jnp.where(size > 0x7F800000, NAN_CODES[info.dtype.name], code)
    code = (code & 0x7F) | ((bits >> 24) & 0x80)
    return lax.bitcast_convert_type(code.astype(jnp.uint8), dtype)


def on_grid(x, dtype):
    """Round float32 to the numbers of `dtype`, ties to even: a cast there and back.

    |x| is at most the largest of them. The sum with 1.5 * 2^23 of their steps at x has steps of
    that size, and the difference is exact.
    """
    info = jnp.finfo(dtype)
    bits = lax.bitcast_convert_type(x, jnp.int32)
    smallest = (127 + int(info.minexp)) << 23  # below it the steps stay as they are
    binade = lax.bitcast_convert_type(jnp.maximum(bits & 0x7F800000, smallest), jnp.float32)
    shift = binade * (1.5 * 2.0 ** (23 - info.nmant))
    rounded = lax.bitcast_convert_type((x + shift) - shift, jnp.int32)
    return lax.bitcast_convert_type(rounded | (bits & jnp.int32(-(2**31))), jnp.float32)


def scale_of(amax, dtype, scale):
    """Make the scale of blocks whose largest magnitudes are `amax`, float32."""
    # what XLA makes of amax / max, one rounding apart
    scales = jnp.maximum(amax * (1.0 / float(jnp.finfo(dtype).max)), SMALLEST_SCALE)
    if scale == "power_of_two":
        scales = round_up_to_power_of_two(scales)
    return jnp.where(amax == 0, 1.0, scales)


def block_amax(x, block):
    """Find the largest magnitude of each block; the last block of an axis may be shorter.

    NaN and infinity propagate.
    """
    (m, n), (bm, bn) = x.shape[-2:], block
    rows, columns = -(-m // bm), -(-n // bn)
    pad = [(0, 0)] * (x.ndim - 2) + [(0, rows * bm - m), (0, columns * bn - n)]
    return amax(jnp.pad(x, pad).reshape(*x.shape[:-2], rows, bm, columns, bn), axis=(-3, -1))


def amax(x, axis=None):
    """Find the largest magnitude over `axis`, float32; a NaN wins.

    On bit patterns, because XLA's float maximum drops NaN on a CPU.
    """
    return lax.bitcast_convert_type(magnitude_bits(x).max(axis=axis), jnp.float32)


def magnitude_bits(x):
    """Return |x| as int32, in the order of float32, NaN above all."""
    return lax.bitcast_convert_type(jnp.abs(x.astype(jnp.float32)), jnp.int32)


def round_up_to_power_of_two(x):
    """Round a positive normal x up to a power of two.

    Exact, unlike exp2(ceil(log2(x))).
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    exponent = (bits + 0x007FFFFF) & 0x7F800000
    return jnp.where(x < jnp.inf, lax.bitcast_convert_type(exponent, jnp.float32), x)


def reciprocal(scale):
    """Compute 1 / scale rounded to nearest on every device.

    A GPU's float32 division may be a unit in the last place off, or two.
    """
    return nearest_reciprocal(scale, 1.0 / scale)


def nearest_reciprocal(scale, near):
    """Compute 1 / scale rounded to nearest, from a number up to two units in the last place off.

    Significands are 24-bit integers and the product of one and its reciprocal's is near a power of
    two above 2^32, so what 32 bits keep of it is the error. More than half a significand of it is a
    unit of the reciprocal.
    """
    bits, own = (lax.bitcast_convert_type(x, jnp.int32) for x in (near, scale))
    for _ in range(2):
        error = 2 * (_significand(own) * _significand(bits))
        bits = (
            bits
            - (error > _significand(own)).astype(jnp.int32)
            + (error < -_significand(own)).astype(jnp.int32)
        )
    return jnp.where(scale < jnp.inf, lax.bitcast_convert_type(bits, jnp.float32), near)


def _significand(bits):
    return (bits & 0x007FFFFF) | 0x00800000


def expand_scales(scales, block, shape):
    """Repeat scales [..., mb, nb] to one for each element, [..., m, n]."""
    for axis, size, side in ((-2, shape[0], block[0]), (-1, shape[1], block[1])):
        if side > 1:
            scales = jnp.repeat(scales, side, axis=axis)
        scales = lax.slice_in_dim(scales, 0, size, axis=axis)
    return scales


def swiglu(gate, up):
    """Compute silu(gate) * up in float32, rounded to their dtype behind silu and the product.

    As torch and vLLM round it.
    """
    kind = jnp.finfo(gate.dtype)

    def rounded(x):
        return lax.reduce_precision(x, kind.nexp, kind.nmant)

    gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
    return rounded(rounded(gate * (1.0 / (1.0 + jnp.exp(-gate)))) * up)


def inverse_rms(x, eps):
    """Compute 1 / sqrt(mean(x^2) + eps) of each row, float32 [..., 1]."""
    x = x.astype(jnp.float32)
    return lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def gain(weight, offset):
    weight = weight.astype(jnp.float32)
    return weight + offset if offset else weight


def rms_norm(x, inverse, gain):
    """Compute the norm of x in float32, rounded to the dtype of x."""
    kind = jnp.finfo(x.dtype)
    return lax.reduce_precision(x.astype(jnp.float32) * inverse * gain, kind.nexp, kind.nmant)
