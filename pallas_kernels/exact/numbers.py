"""Float arithmetic that a compiler cannot change the last bit of.

The same function is not the same program. For another batch size XLA adds the terms of a sum in
another order, and LLVM fuses another pair of a product and a sum into one instruction with one
rounding. Either moves the last bit, and a rollout's log-probability is then not the trainer's.
Three rules make every result a function of its inputs alone:

    sums        All terms of a sum are rounded to whole multiples of one power of two, so few bits
                of it that the sum of all
                is below 2^53. In float64 such a sum has no rounding, so its order, its split over
                threads or devices, and zeros among its terms make no difference. (Pre-rounding:
                Demmel and Nguyen, "Fast reproducible floating-point summation", 2013; in products,
                Ozaki et al., "Error-free transformations of matrix multiplication", 2012.)
    products    A product that is added to something has two factors of at most 24 bits. It is then
                exact in float64, fused or
                not, and so is a product of three such factors in any order but for its one
                rounding.
    roundings   To the dtype of a result by `rounding.rounded`, which XLA and LLVM keep.

float64 exists inside these functions alone: each opens JAX's 64-bit mode for itself and returns
narrower arrays, so it works in a program that has the mode off. Nothing here has a gradient; see
`with_gradient_of`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

F32 = (8, 23)
_LN2 = float(np.float32(math.log(2)))
# what float32 leaves of ln 2, cut so that a multiple of up to 2^11 is exact in float64
_LN2_REST = float(np.float32(math.log(2) - _LN2))


def wide(x: Array) -> Array:
    """float64, inside a 64-bit scope."""
    return x.astype(jnp.float64)


def cut(x: Array) -> Array:
    """A float64 rounded to float32's 24 bits."""
    return lax.reduce_precision(x, *F32)


def once(x: Array) -> Array:
    """x, computed here. XLA would write what computes it into all of its uses, and LLVM takes
    minutes over the result."""
    return lax.optimization_barrier(x)


def power_of_two(exponent: Array) -> Array:
    """2^exponent as float64 for int32 exponents from -1022 to 1023."""
    return lax.bitcast_convert_type((exponent.astype(jnp.int64) + 1023) << 52, jnp.float64)


def exponent_of(x: Array) -> Array:
    """The exponent e of normal float64 with 2^(e - 1) <= |x| < 2^e, int64; -1022 for 0. On bit
    patterns: one operation deep."""
    return ((lax.bitcast_convert_type(x, jnp.int64) >> 52) & 0x7FF) - 1022


def integers(x: Array, bits: int, axis: int | tuple[int, ...]) -> tuple[Array, Array]:
    """x as whole numbers times a power of two for each slice along `axis`: x is about integers *
    scale.

    Args:
        x: float64.
        bits: the integers are at most 2^bits in magnitude.

    Returns:
        (integers, scale), float64; the scale keeps the reduced axes. It depends on the largest
        magnitude alone.
    """
    x = once(x)
    exponent = exponent_of(jnp.max(jnp.abs(x), axis=axis, keepdims=True))
    exponent = jnp.clip(exponent, -900, 900)  # neither power of two may leave the normal numbers
    return jnp.round(x * power_of_two(bits - exponent)), power_of_two(exponent - bits)


def total(terms: Array, axis: int, headroom: int = 18) -> Array:
    """The sum over `axis` of float64 terms, of which there are at most 2^headroom: every order
    gives the same bits.

    A term is rounded to 52 - headroom bits of the largest one.
    """
    whole, scale = integers(terms, 52 - headroom, axis)
    return jnp.sum(whole, axis=axis) * jnp.squeeze(scale, axis)


def _horner(coefficients: list[float], x: Array) -> Array:
    """A polynomial, highest coefficient first, with 24-bit operands in every product; the last sum
    keeps its 53 bits."""
    value = jnp.float64(np.float32(coefficients[0]))
    for coefficient in coefficients[1:]:
        value = cut(value) * x + coefficient
    return value


def exp(x: Array) -> Array:
    """e^x, within 2^-23 of itself; 0 where it is below the smallest normal float32.

    Args:
        x: float64 in float32's precision, at most 88.
    """
    x = cut(jnp.clip(x, -200.0, 88.0))
    n = jnp.round(x * float(np.float32(1 / math.log(2))))
    rest = cut((x - n * _LN2) - n * _LN2_REST)
    value = _horner([1 / math.factorial(i) for i in range(8, -1, -1)], rest)
    return cut(value * power_of_two(jnp.where(jnp.isnan(n), 0, n).astype(jnp.int32)))


def log(x: Array) -> Array:
    """The natural logarithm of a positive float64, within 2^-23 of the larger of itself and 1."""
    # so that the mantissa is from sqrt(1/2) to sqrt(2)
    exponent = exponent_of(x / math.sqrt(0.5)) - 1
    mantissa = x * power_of_two(-exponent)
    z = cut((mantissa - 1) / (mantissa + 1))
    series = cut(_horner([1 / i for i in range(17, 0, -2)], cut(z * z)))
    n = exponent.astype(jnp.float64)
    return n * _LN2 + (2 * z * series + n * _LN2_REST)


def sigmoid(x: Array) -> Array:
    """1 / (1 + e^-x), in 24 bits; x as in `exp`, of either sign."""
    small = exp(-jnp.abs(x))
    return cut(jnp.where(x < 0, small, 1.0) / (1 + small))


def scoped(function: Callable) -> Callable:
    """Opens the 64-bit scope around a function that takes and returns narrower arrays."""

    @wraps(function)
    def run(*args, **options):
        with jax.enable_x64(True):
            return function(*args, **options)

    return run
