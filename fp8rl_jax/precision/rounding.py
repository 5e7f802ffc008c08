"""Ways to let a change arrive that is smaller than a step of the format.

Rounding to nearest loses every change below half a step, each time anew, so a slow running mean,
or a weight that starts on the grid, never moves.

    round_stochastic   up or down at random, so that the mean of the result is the value itself: it
                       moves rarely, by whole steps, and arrives all the same (arXiv 1502.02551; for
                       bfloat16 updates 2010.06192; pallas_kernels.rounding)
    round_by_hash      the same with a draw that is a function of the value and its place alone, so
                       that two programs that are given one weight round it alike
    dither             the values themselves moved at random, once, without leaving what they round
                       to: from there rounding to nearest passes a change on in the mean, and draws
                       nothing more (subtractive dither's first half; Roberts 1962, Schuchman 1964)
    dither_blocks      the same of blocks that a quantized format gave, as an FP8 checkpoint has
    dither_inside      the same of a bfloat16 checkpoint's values, which are in FP8 rounded straight
                       from float32: they keep to their cells of both
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, UInt32

from fp8rl_jax.config.formats import TensorFormat
from fp8rl_jax.parallel import mixed, place_hash
from fp8rl_jax.precision.quantizer import quantize
from pallas_kernels import Blocks, QTensor
from pallas_kernels.quantize import block_amax, expand_scales
from pallas_kernels.rounding import rounded, up_or_down

# of itself: bfloat16 moves a value, what sets its scale, and a draw of it, by 2^-8 each at most
_NEAR = 2.0**-6


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
    return up_or_down(x, dtype, draw)


@round_by_hash.defjvp
def _round_by_hash_jvp(dtype, primals, tangents):
    return round_by_hash(*primals, dtype), tangents[0].astype(dtype)


def dither(
    x: Float[Array, "*axes"], dtype: jnp.dtype, salt: UInt32[Array, ""]
) -> Float[Array, "*axes"]:
    """Draw each value from all the float32 numbers that round to it in `dtype`.

    The cell of a power of two is half as wide on its lower side, so a draw's mean is not the value.

    Args:
        x: float32. What is not on the grid of `dtype` is kept, since it is somewhere in its cell
            already; so are zeros, subnormal numbers of 16 bits, the largest numbers, NaN and
            infinities.
        dtype: a float format of 16, 8 or 4 bits.
        salt: fixes the draws, whatever the sharding. They are hashes of the places, of 24 bits, as
            jax.random takes a second to compile for each tensor.

    Returns:
        Shape of `x`, float32; rounded to `dtype`, to nearest even, it is `x` bit for bit.
    """
    info = jnp.finfo(dtype)
    # bfloat16's subnormal numbers are float32's own, which a CPU takes for 0
    smallest = float(info.smallest_normal) if info.bits == 16 else 0.0
    narrow = _narrowed(x, dtype)

    def middle(step: int) -> Array:
        return x + (_neighbour(narrow, step).astype(jnp.float32) - x) / 2

    low, high = middle(-1), middle(1)
    part = (place_hash(x.shape, salt) >> 8).astype(jnp.float32) * 2.0**-24
    drawn = low + part * (high - low)
    size = jnp.abs(x)
    inside = (size > smallest) & (size < float(info.max))
    # a border belongs to one of its two cells
    inside &= (narrow.astype(jnp.float32) == x) & (_narrowed(drawn, dtype) == narrow)
    return jnp.where(inside, drawn, x)


def _narrowed(x: Array, dtype: jnp.dtype) -> Array:
    return rounded(x, dtype) if jnp.finfo(dtype).bits == 16 else x.astype(dtype)


def _neighbour(x: Array, step: int | Array) -> Array:
    """The next number away from 0, or with a step of -1 towards it: those of one sign are in the
    order of their bits."""
    word = {16: jnp.uint16, 8: jnp.uint8, 4: jnp.uint4}[jnp.finfo(x.dtype).bits]
    bits = lax.bitcast_convert_type(x, word) + jnp.asarray(step).astype(word)
    return lax.bitcast_convert_type(bits, x.dtype)


def dither_blocks(
    x: Float[Array, "*batch m n"], fmt: TensorFormat, dtype: jnp.dtype, salt: UInt32[Array, ""]
) -> Float[Array, "*batch m n"]:
    """Draw each value of a block that a quantized format gave from all the numbers that quantize to
    it.

    Other blocks stay (`on_grid`; `dither_inside` is for them). In a block that is drawn zeros stay,
    the largest numbers of the format, which set a float32 scale, and what would not be quantized as
    before.

    Args:
        x: float32.
        fmt: with a block, what whoever computes with `x` quantizes it to.
        dtype: what `x` is rounded to before that; float32 where it is not.
        salt: as of `dither`.

    Returns:
        Shape of `x`, float32. Rounded to `dtype` and quantized it has the values and the scales of
        `x`, bit for bit.
    """
    q = quantize(rounded(x, dtype), fmt)
    whole = expand_scales(on_grid(x, q), q.block, x.shape[-2:])
    if isinstance(q.format, Blocks):
        codes = q.values.astype(jnp.float32)
        moved = dither(codes, q.values.dtype, salt)
        cells = expand_scales(q.scales, q.block, x.shape[-2:]) * moved
        drawn = jnp.where(whole & (moved != codes), cells, x)
    else:
        drawn = q.format.dithered(q, salt)
        drawn = jnp.where(whole & (drawn != q.dequantize()), drawn, x)

    def stays(drawn: Array) -> Array:
        again = quantize(rounded(drawn, dtype), fmt)
        if q.format.packed == 1:
            return again.values == q.values
        return again.dequantize() == q.dequantize()

    if dtype != x.dtype:
        # the border is where `dtype` rounds across it: there, what is rounded to its last number
        narrow, inwards = rounded(drawn, dtype), jnp.where(jnp.abs(drawn) > jnp.abs(x), -1, 1)
        narrow = jnp.where(stays(drawn), narrow, _neighbour(narrow, inwards))
        drawn = jnp.where(drawn == x, x, dither(narrow.astype(x.dtype), dtype, salt ^ 1))
    # where the draws have changed a scale, most of its block does not stay
    return jnp.where(stays(drawn), drawn, x)


def dither_inside(
    x: Float[Array, "*batch m n"], fmt: TensorFormat, salt: UInt32[Array, ""]
) -> Float[Array, "*batch m n"]:
    """Draw each value of a bfloat16 checkpoint from the numbers that round to it in bfloat16, as
    far as they quantize to what it quantizes to.

    Of the sixteen numbers that bfloat16 has in a cell of e4m3 one is exactly on its border in some
    blocks (amax / 448 has to have few bits): a few weights in a thousand, which go to the even
    side. An update, however small, takes half of them across, by a whole step each, and all in
    its own direction: the first sync then serves many times the update. What is drawn beyond the
    border is folded back at it, so that on both sides together as much lies at each distance from
    it as if it were not there, and an update arrives as it is.

    Args:
        x: float32, quantized without being rounded before. What is not on the grid of bfloat16 is
            kept, as `dither` does, and the largest of each block, which sets its scale.
        fmt: with a block.
        salt: as of `dither`.

    Returns:
        Shape of `x`, float32. Quantized it is what `x` is, bit for bit.
    """
    q = quantize(x, fmt)
    served, largest = q.dequantize(), expand_scales(block_amax(x, q.block), q.block, x.shape[-2:])
    drawn = jnp.where(jnp.abs(x) == largest, x, dither(x, jnp.dtype(jnp.bfloat16), salt))
    beyond = quantize(drawn, fmt).dequantize()
    drawn = jnp.where(beyond == served, drawn, served + beyond - drawn)
    return jnp.where(quantize(drawn, fmt).dequantize() == served, drawn, x)


def on_grid(x: Float[Array, "*batch m n"], q: QTensor) -> Bool[Array, "*batch mb nb"]:
    """Tell of each block whether its values are in the middle of their cells, as those of a
    checkpoint are that was quantized so, and dequantized to bfloat16 or float32.

    Args:
        x: float32.
        q: what it quantizes to.
    """
    off = ~(jnp.abs(q.dequantize() - x) <= _NEAR * jnp.abs(x))
    return block_amax(off, q.block) == 0
