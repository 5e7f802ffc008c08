"""Arithmetic whose last bit no compiler and no batch can change: sums, products and attention.

The same function is not the same program. For another batch size XLA adds the terms of a sum in
another order, and LLVM fuses another pair of a product and a sum into one instruction with one
rounding. Either moves the last bit, and a rollout's log-probability is then not the trainer's.
Three rules make every result a function of its inputs alone:

    sums        All terms of a sum are rounded to whole multiples of one power of two, so coarse
                that the sum of all is below 2^53. In float64 such a sum has no rounding, so its
                order, its split over threads or devices, and zeros among its terms make no
                difference. (Pre-rounding: Demmel and Nguyen, "Fast reproducible floating-point
                summation", 2013; in products, Ozaki et al., "Error-free transformations of matrix
                multiplication", 2012.)
    products    A product that is added to something has two factors of at most 24 bits. It is then
                exact in float64, fused or not, and so is a product of three such factors in any
                order but for its one rounding.
    roundings   To the dtype of a result by `rounding.rounded`, which XLA and LLVM keep.

A matrix product by these rules multiplies integers. Each row of an operand becomes integers times a
power of two (`scaled_integers`). A product of integers is an integer, and as long as the sum stays
below 2^53 a float64 matrix product adds them up without rounding, in whatever order it likes. The
left operand has 28 bits, in two slices of 14, the right one 22, which leaves room for 2^17 terms.
What is rounded off is below 2^-28 and 2^-22 of a row's largest element: less than a float32 product
of the same length loses. Attention needs one slice: its first product has few terms, and how many
its second has, the mask says.

All this is right by argument, on every device and mesh, and slow. `pallas_kernels.invariant` is
fast and right by test, on one device; on a CPU exact mode takes its attention from here.

float64 exists inside these functions alone: each opens JAX's 64-bit mode for itself and returns
narrower arrays, so it works in a program that has the mode off. Gradients are those of the plain
float32 computation, by `with_gradient_of`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial, reduce, wraps

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul import reference as grouped_reference
from pallas_kernels.matmul import reference
from pallas_kernels.rounding import rounded

__all__ = [
    "Integers",
    "add_scaled",
    "as_float64",
    "attend",
    "dot",
    "exp",
    "grouped_dot",
    "log",
    "materialize",
    "reproducible_sum",
    "round_to_24_bits",
    "sigmoid",
    "to_integers",
    "with_float64",
    "with_gradient_of",
]

SLICE_BITS, RIGHT_BITS = 14, 22
MAX_TERMS = 2 ** (53 - SLICE_BITS - RIGHT_BITS)
_FLOAT32 = (8, 23)  # bits of the exponent and of the mantissa
_LN2 = float(np.float32(math.log(2)))
# what float32 leaves of ln 2, so few bits of it that a multiple of up to 2^11 is exact in float64
_LN2_REST = float(np.float32(math.log(2) - _LN2))


def as_float64(x: Array) -> Array:
    """Convert x to float64, inside of `with_float64`."""
    return x.astype(jnp.float64)


def round_to_24_bits(x: Array) -> Array:
    """Round a float64 to the 24 bits of float32's significand; it stays a float64."""
    return lax.reduce_precision(x, *_FLOAT32)


def materialize[T](x: T) -> T:
    """Have XLA compute x here, behind a barrier.

    Else it would write what computes x into all of its uses, and LLVM takes minutes over the
    result.
    """
    return lax.optimization_barrier(x)


def power_of_two(exponent: Array) -> Array:
    """Return 2^exponent as float64, for int32 exponents from -1022 to 1023."""
    return lax.bitcast_convert_type((exponent.astype(jnp.int64) + 1023) << 52, jnp.float64)


def exponent_of(x: Array) -> Array:
    """Return the exponent e of normal float64 with 2^(e - 1) <= |x| < 2^e, int64; -1022 for 0."""
    return ((lax.bitcast_convert_type(x, jnp.int64) >> 52) & 0x7FF) - 1022


def scaled_integers(x: Array, bits: int, axis: int | tuple[int, ...]) -> tuple[Array, Array]:
    """Round x to whole numbers times a power of two for each slice along `axis`.

    Args:
        x: float64.
        bits: the integers are at most 2^bits in magnitude.

    Returns:
        (integers, scale), float64, with x about integers * scale. The scale keeps the reduced axes
        and depends on the largest magnitude alone.
    """
    x = materialize(x)
    exponent = exponent_of(jnp.max(jnp.abs(x), axis=axis, keepdims=True))
    exponent = jnp.clip(exponent, -900, 900)  # neither power of two may leave the normal numbers
    return jnp.round(x * power_of_two(bits - exponent)), power_of_two(exponent - bits)


def reproducible_sum(terms: Array, axis: int, headroom: int = 18) -> Array:
    """Add float64 terms over `axis`, with the same bits in every order.

    A term is rounded to 52 - headroom bits of the largest one (Demmel and Nguyen, 2013).

    Args:
        terms: float64, at most 2^headroom along the axis.
    """
    whole, scale = scaled_integers(terms, 52 - headroom, axis)
    return jnp.sum(whole, axis=axis) * jnp.squeeze(scale, axis)


def _horner(coefficients: list[float], x: Array) -> Array:
    """A polynomial by Horner's rule, highest coefficient first, with 24-bit operands in every
    product; the last sum keeps its 53 bits."""
    value = jnp.float64(np.float32(coefficients[0]))
    for coefficient in coefficients[1:]:
        value = round_to_24_bits(value) * x + coefficient
    return value


def exp(x: Array) -> Array:
    """Compute e^x to within 2^-23 of itself; 0 where it is below the smallest normal float32.

    Args:
        x: float64 in float32's precision, at most 88.
    """
    x = round_to_24_bits(jnp.clip(x, -200.0, 88.0))
    n = jnp.round(x * float(np.float32(1 / math.log(2))))
    rest = round_to_24_bits((x - n * _LN2) - n * _LN2_REST)
    value = _horner([1 / math.factorial(i) for i in range(8, -1, -1)], rest)
    return round_to_24_bits(value * power_of_two(jnp.where(jnp.isnan(n), 0, n).astype(jnp.int32)))


def log(x: Array) -> Array:
    """Compute ln x of a positive float64 to within 2^-23 of the larger of itself and 1."""
    # so that the mantissa is from sqrt(1/2) to sqrt(2)
    exponent = exponent_of(x / math.sqrt(0.5)) - 1
    mantissa = x * power_of_two(-exponent)
    z = round_to_24_bits((mantissa - 1) / (mantissa + 1))
    series = round_to_24_bits(_horner([1 / i for i in range(17, 0, -2)], round_to_24_bits(z * z)))
    n = exponent.astype(jnp.float64)
    return n * _LN2 + (2 * z * series + n * _LN2_REST)


def sigmoid(x: Array) -> Array:
    """Compute 1 / (1 + e^-x) in 24 bits; x as in `exp`, of either sign."""
    small = exp(-jnp.abs(x))
    return round_to_24_bits(jnp.where(x < 0, small, 1.0) / (1 + small))


def with_float64(function: Callable) -> Callable:
    """Open JAX's 64-bit mode around a function that takes and returns narrower arrays."""

    @wraps(function)
    def run(*args, **options):
        with jax.enable_x64(True):
            return function(*args, **options)

    return run


def with_gradient_of(plain: Callable, exact: Callable) -> Callable:
    """Make a function of arrays with the values of `exact` and the derivatives of `plain`.

    Both compute the same thing up to rounding. What `exact` rounds has no derivative of its own,
    and its float64 arrays would meet differentiation outside the scope in which they exist.
    """

    @jax.custom_vjp
    def run(*args):
        return exact(*args)

    run.defvjp(
        lambda *args: (exact(*args), args),
        lambda args, cotangent: jax.vjp(plain, *args)[1](cotangent),
    )
    return run


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Integers:
    """A right operand [..., n, k] that is kept as integers, for a loop that multiplies it many
    times.

    Attributes:
        values: float64 [..., n, k], whole numbers of at most 22 bits.
        scale: float64 [..., n, 1], powers of two.
    """

    values: Array
    scale: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


@with_float64
def to_integers(w: Float[Array, "*stack n k"] | Integers) -> Integers:
    """Round a right operand as `dot` and `grouped_dot` multiply it; twice the memory of float32."""
    return (
        w if isinstance(w, Integers) else Integers(*scaled_integers(as_float64(w), RIGHT_BITS, -1))
    )


def dot(
    x: Float[Array, "*batch k"],
    w: Float[Array, "n k"] | Integers,
    out_dtype: jnp.dtype = jnp.float32,
) -> Array:
    """Multiply x @ w.T, each row of it a function of that row of x and of w alone.

    Args:
        x: any float dtype up to float32.
        w: likewise, or what `to_integers` made of it.
        out_dtype: of the result.

    Raises:
        ValueError: more than 2^17 terms.
    """

    def plain(x, w):
        return reference.dot(x.astype(w.dtype), w).astype(out_dtype)

    exactly = partial(_dot, out_dtype=out_dtype)
    return exactly(x, w) if isinstance(w, Integers) else with_gradient_of(plain, exactly)(x, w)


def add_scaled(x: Array, y: Array, scale: float) -> Array:
    """Compute x + scale * y with one rounding, to x's dtype."""

    @with_float64
    def exactly(x, y):
        return rounded(
            as_float64(x) + as_float64(y) * round_to_24_bits(jnp.float64(scale)), x.dtype
        )

    return with_gradient_of(lambda x, y: x + scale * y, exactly)(x, y)


def grouped_dot(
    x: Float[Array, "m k"],
    w: Float[Array, "groups n k"] | Integers,
    group_sizes: Int[Array, " groups"],
    out_dtype: jnp.dtype = jnp.float32,
) -> Array:
    """Multiply each row of x, sorted by group, with its group's part of w transposed.

    Returns:
        [m, n] in `out_dtype`; zero behind the last group.
    """

    def plain(x, w, sizes):
        return grouped_reference.dot(x.astype(w.dtype), w, sizes).astype(out_dtype)

    exactly = partial(_grouped_dot, out_dtype=out_dtype)
    if isinstance(w, Integers):
        return exactly(x, w, group_sizes)
    return with_gradient_of(plain, exactly)(x, w, group_sizes)


@with_float64
def attend(
    query: Array,
    keys: list[Array],
    values: list[Array],
    masks: list[Array],
    score_scale: float,
    cast: Callable[[Array], Array] | None = None,
) -> Array:
    """Compute softmax(q k * score_scale) v over the slots of all blocks.

    A query's result depends on the keys that it attends to, and neither on the slots that they
    stand in nor on what else is there. A weight of the second product has as many bits as the
    number n of those keys leaves of a float64: 31 - log2(n), 21 for 1024 keys.

    Args:
        query: [b, t, heads, dim].
        keys, values: of each block [rows, kv_heads, slots, dim]; row r serves the queries r * b /
            rows and on.
        masks: of each block, broadcastable to [rows, t * b / rows, slots].
        score_scale: factor of the scores.
        cast: by elements, what the weights exp(score - top) are before they multiply the values;
            their sum, which normalizes, is that of what they were.

    Returns:
        [b, t, heads, dim] in the dtype of `query`; 0 for a query that attends to nothing. It has
        no gradient.

    Raises:
        ValueError: more than 2^17 slots.
    """
    b, t, heads, dim = query.shape
    _check_terms(sum(k.shape[2] for k in keys), "slots")
    kv_heads = keys[0].shape[1]
    group = heads // kv_heads

    # of b rows [b, kv_heads, group, t, n] to the block's [rows, kv_heads, group, b / rows * t, n]
    def by_row(x, rows):
        x = x.reshape(rows, b // rows, kv_heads, group, t, -1).transpose(0, 2, 3, 1, 4, 5)
        return x.reshape(rows, kv_heads, group, b // rows * t, -1)

    def by_query(x, rows):
        x = x.reshape(rows, kv_heads, group, b // rows, t, -1).transpose(0, 3, 1, 2, 4, 5)
        return x.reshape(b, kv_heads, group, t, -1)

    def of_slots(scale):  # [rows, kv_heads, slots, 1] as a factor of [rows, kv_heads, 1, 1, slots]
        return scale[:, :, None, None, :, 0]

    q, q_scale = scaled_integers(
        as_float64(query.reshape(b, t, kv_heads, group, dim).transpose(0, 2, 3, 1, 4)),
        53 - RIGHT_BITS - math.ceil(math.log2(dim)),
        -1,
    )
    scores, visible = [], []
    for key, mask in zip(keys, masks, strict=True):
        rows = len(key)
        k, scale = scaled_integers(as_float64(key), RIGHT_BITS, -1)
        s = jnp.einsum("rkgqd,rksd->rkgqs", by_row(q, rows), k) * of_slots(scale)
        s = s * (by_row(q_scale, rows) * score_scale)
        mask = jnp.broadcast_to(mask[:, None, None], s.shape)
        s = jnp.where(mask, rounded(s, jnp.float32), -jnp.inf)
        scores.append(materialize(by_query(s, rows)))
        visible.append(by_query(mask, rows).sum(-1, keepdims=True, dtype=jnp.int32))
    top = reduce(jnp.maximum, [s.max(-1, keepdims=True) for s in scores])
    top = materialize(jnp.maximum(top, -1e30))
    weights = [materialize(_exp_of_float32(s - top)) for s in scores]
    # the largest is 1, so all are whole multiples of 2^-30, or are made so
    norm = sum(jnp.round(as_float64(w) * 2.0**30).sum(-1, keepdims=True) for w in weights)
    if cast is not None:
        weights = [materialize(cast(w)) for w in weights]
    # a value's own scale goes to its weight: no slot's integers then depend on another slot
    parts = [scaled_integers(as_float64(value), RIGHT_BITS, -1) for value in values]
    weights = [
        materialize(by_query(by_row(as_float64(w), len(scale)) * of_slots(scale), len(scale)))
        for w, (_, scale) in zip(weights, parts, strict=True)
    ]
    edge = exponent_of(reduce(jnp.maximum, [w.max(-1, keepdims=True) for w in weights]))
    count = as_float64(sum(visible))
    bits = 53 - RIGHT_BITS - exponent_of(jnp.maximum(count, 1.0))
    unit = power_of_two(jnp.clip(edge - bits, -900, 900))
    out = 0.0
    for w, (value, _) in zip(weights, parts, strict=True):
        whole = by_row(jnp.round(w / unit), len(value))
        out = out + by_query(jnp.einsum("rkgqs,rksd->rkgqd", whole, value), len(value))
    out = out * (unit * 2.0**30) / jnp.where(norm == 0, 1.0, norm)
    return rounded(out.transpose(0, 3, 1, 2, 4).reshape(b, t, heads, dim), query.dtype)


def _exp_of_float32(x: Array) -> Array:
    return rounded(exp(as_float64(x)), jnp.float32)


@with_float64
def _dot(x, w, out_dtype):
    _check_terms(x.shape[-1], "terms")
    w = to_integers(w)
    whole, scale = scaled_integers(as_float64(x.reshape(-1, x.shape[-1])), 2 * SLICE_BITS, -1)
    out = _joined(jnp.einsum("mk,nk->mn", part, w.values) for part in _slices(whole))
    out = out * scale * w.scale[:, 0]
    return rounded(out, out_dtype).reshape(*x.shape[:-1], w.shape[0])


@with_float64
def _grouped_dot(x, w, group_sizes, out_dtype):
    _check_terms(x.shape[-1], "terms")
    w = to_integers(w)
    whole, scale = scaled_integers(as_float64(x), 2 * SLICE_BITS, -1)
    ends = jnp.cumsum(group_sizes)
    group = jnp.minimum(jnp.searchsorted(ends, jnp.arange(len(x)), side="right"), len(ends) - 1)
    out = _joined(
        lax.ragged_dot_general(part, w.values, group_sizes, grouped_reference.BY_ROW)
        for part in _slices(whole)
    )
    out = out * scale * w.scale[group, :, 0]
    return rounded(jnp.where((jnp.arange(len(x)) < ends[-1])[:, None], out, 0.0), out_dtype)


def _slices(whole: Array) -> tuple[Array, Array]:
    whole = materialize(whole)
    high = jnp.round(whole * 2.0**-SLICE_BITS)
    return high, whole - high * 2.0**SLICE_BITS


def _joined(parts: Iterable[Array]) -> Array:
    high, low = parts
    return high * 2.0**SLICE_BITS + low


def _check_terms(count: int, what: str) -> None:
    if count > MAX_TERMS:
        raise ValueError(f"an exact product has at most {MAX_TERMS} {what}, not {count}")
