"""Small floating-point numbers in float32 arithmetic: rounding to them, and two e2m1 to a byte.

Nothing here casts to a dtype of less than 8 bits, which not every device has.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt8, UInt32

from fp8rl_jax.errors import UserError
from fp8rl_jax.parallel import place_hash

E2M1_LARGEST = 6.0


def on_grid(
    x: Float[Array, "*axes"], mantissa: int, smallest: int, draw: Array | None = None
) -> Float[Array, "*axes"]:
    """Round float32 to numbers of `mantissa` bits behind the leading one.

    Args:
        x: within the range of the numbers, which is the caller's; a NaN stays.
        mantissa: bits.
        smallest: exponent of the smallest normal number; below it the steps stay as they are.
        draw: in [0, 1), of the shape of `x`: it is rounded up where the draw reaches what is left
            to the number above. None: to nearest, ties to even.
    """
    step = step_of(x, mantissa, smallest)
    steps = x / step  # exact: a power of two
    return (jnp.round(steps) if draw is None else jnp.floor(steps + draw)) * step


def step_of(x: Float[Array, "*axes"], mantissa: int, smallest: int) -> Float[Array, "*axes"]:
    """Find the distance between the numbers on both sides of each value, for `on_grid`."""
    binade = lax.bitcast_convert_type(
        lax.bitcast_convert_type(x, jnp.int32) & 0x7F800000, jnp.float32
    )
    return jnp.maximum(binade, 2.0**smallest) * 2.0**-mantissa


def drawn_from_cells(
    x: Float[Array, "*axes"], mantissa: int, smallest: int, largest: float, salt: UInt32[Array, ""]
) -> Float[Array, "*axes"]:
    """Draw numbers of a grid (`on_grid`) each from all those that round to it; 0 and the largest
    stay. A power of two has half as much room below it."""
    size = jnp.abs(x)
    bits = lax.bitcast_convert_type(size, jnp.int32)
    binade = lax.bitcast_convert_type(bits & 0x7F800000, jnp.float32)
    above = jnp.maximum(binade, 2.0**smallest) * 2.0**-mantissa
    below = jnp.where((size == binade) & (size > 2.0**smallest), above / 2, above)
    drawn = size - below / 2 + draws(x.shape, salt) * (below + above) / 2
    return jnp.where((size == 0) | (size >= largest), x, jnp.sign(x) * drawn)


def draws(shape: tuple[int, ...], salt: UInt32[Array, ""]) -> Float[Array, "*shape"]:
    """Draw uniform numbers in [0, 1), of 24 bits: hashes of the places, the same on any mesh."""
    return (place_hash(shape, salt) >> 8).astype(jnp.float32) * 2.0**-24


def pack(codes: UInt8[Array, "*m n"]) -> UInt8[Array, "*m pairs"]:
    """Put two codes of 4 bits into a byte, the first one into its lower half.

    Raises:
        UserError: rows are of an odd length.
    """
    if codes.shape[-1] % 2:
        raise UserError(
            f"rows of {codes.shape[-1]} numbers cannot be stored two to a byte; a format of 8 bits "
            "takes them"
        )
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpack(packed: UInt8[Array, "*m pairs"]) -> UInt8[Array, "*m n"]:
    """Take the two codes out of each byte."""
    codes = jnp.stack([packed & 15, packed >> 4], axis=-1)
    return codes.reshape(*packed.shape[:-1], -1)


def e2m1_codes(x: Float[Array, "*axes"]) -> UInt8[Array, "*axes"]:
    """Encode numbers of e2m1: a sign, and a place in 0, 0.5, 1, 1.5, 2, 3, 4, 6."""
    size = jnp.abs(x)
    place = jnp.where(size <= 2, 2 * size, jnp.where(size <= 4, size + 2, 7.0))
    sign = lax.bitcast_convert_type(x, jnp.uint32) >> 28 & 8
    return place.astype(jnp.uint8) | sign.astype(jnp.uint8)


def e2m1_numbers(codes: UInt8[Array, "*axes"]) -> Float[Array, "*axes"]:
    """Decode them, float32."""
    place = (codes & 7).astype(jnp.float32)
    size = jnp.where(place <= 4, place / 2, jnp.where(place <= 6, place - 2, 6.0))
    return jnp.where(codes & 8, -size, size)


def as_float4(packed: UInt8[Array, "*m pairs"]) -> Array:
    """Read packed codes of e2m1 as float4_e2m1fn, which products of some devices take."""
    pairs = lax.bitcast_convert_type(packed, jnp.float4_e2m1fn)
    return pairs.reshape(*packed.shape[:-1], -1)
