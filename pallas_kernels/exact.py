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

A matrix product by these rules costs four times a float32 one. On one CPU device there is a cheaper
way, right by test and not by argument (tests/kernels/test_exact.py): rows are multiplied in tiles
of `TILE`, each by the same little program, whatever the batch. A row's bits then depend on neither
its place nor its neighbours, since the library that multiplies has one plan for one shape.

Elsewhere, and on a mesh, which may split the terms of a product, each row of an operand becomes
integers times a power of two (`scaled_integers`). A product of integers is an integer, and as long
as the sum stays below 2^53 a float64 matrix product adds them up without rounding, in whatever
order it likes. The left operand has 28 bits, in two slices of 14, the right one 22, which leaves
room for 2^17 terms. What is rounded off is below 2^-28 and 2^-22 of a row's largest element: less
than a float32 product of the same length loses.

float64 exists inside these functions alone: each opens JAX's 64-bit mode for itself and returns
narrower arrays, so it works in a program that has the mode off. Gradients are those of the plain
float32 computation, by `with_gradient_of`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial, wraps

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
    "dot_of_integers",
    "exp",
    "grouped_dot",
    "grouped_dot_of_integers",
    "has_tiles",
    "log",
    "materialize",
    "reproducible_sum",
    "round_to_24_bits",
    "sigmoid",
    "to_integers",
    "with_float64",
    "with_gradient_of",
]

TILE = 16
"""Rows of a tile: 8 and 16 give the same bits, and the fewer the less a small batch is padded."""
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
        ValueError: more than 2^17 terms, of integers.
    """

    def plain(x, w):
        return reference.dot(x.astype(w.dtype), w).astype(out_dtype)

    if isinstance(w, Integers):
        return dot_of_integers(x, w, out_dtype)
    exactly = _dot_of_tiles if has_tiles() else dot_of_integers
    return with_gradient_of(plain, partial(exactly, out_dtype=out_dtype))(x, w)


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

    if isinstance(w, Integers):
        return grouped_dot_of_integers(x, w, group_sizes, out_dtype)
    exactly = _grouped_dot_of_tiles if has_tiles() else grouped_dot_of_integers
    return with_gradient_of(plain, partial(exactly, out_dtype=out_dtype))(x, w, group_sizes)


@with_float64
def attend(
    query: Array, keys: list[Array], values: list[Array], masks: list[Array], score_scale: float
) -> Array:
    """Compute softmax(q k * score_scale) v over the slots of all blocks.

    A query's result depends on the keys that it attends to, and neither on the slots that they
    stand in nor on what else is there.

    Args:
        query: [b, t, heads, dim].
        keys, values: of each block [rows, kv_heads, slots, dim]; row r serves the queries r * b /
            rows and on.
        masks: of each block, broadcastable to [rows, t * b / rows, slots].
        score_scale: factor of the scores.

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

    q = query.reshape(b, t, kv_heads, group, dim).transpose(0, 2, 3, 1, 4)
    scores, visible = [], []
    for key, mask in zip(keys, masks, strict=True):
        rows = key.shape[0]
        s = _product(
            "rkgqd,rksd->rkgqs",
            as_float64(by_row(q, rows)),
            *scaled_integers(as_float64(key), RIGHT_BITS, -1),
        )
        mask = jnp.broadcast_to(mask[:, None, None], s.shape)
        scores.append(
            materialize(
                by_query(jnp.where(mask, round_to_24_bits(s * score_scale), -jnp.inf), rows)
            )
        )
        visible.append(by_query(mask, rows))
    top = materialize(
        jnp.maximum(
            jnp.max(
                jnp.concatenate([s.max(-1, keepdims=True) for s in scores], -1), -1, keepdims=True
            ),
            -1e30,
        )
    )
    weights = [
        materialize(jnp.where(mask, exp(s - top), 0.0))
        for s, mask in zip(scores, visible, strict=True)
    ]
    norm = reproducible_sum(jnp.concatenate(weights, -1), -1)[..., None]
    # a value's own scale goes to its weight: no slot's integers then depend on another slot
    parts = [scaled_integers(as_float64(value), RIGHT_BITS, -1) for value in values]
    weights = [
        materialize(w * _per_slot(scale, b, group, t))
        for w, (_, scale) in zip(weights, parts, strict=True)
    ]
    edge = jnp.max(
        jnp.concatenate([w.max(-1, keepdims=True) for w in weights], -1), -1, keepdims=True
    )
    _, scale = scaled_integers(edge, 2 * SLICE_BITS, -1)
    out = [0.0, 0.0]
    for w, (value, _) in zip(weights, parts, strict=True):
        rows = value.shape[0]
        for i, part in enumerate(_slices(jnp.round(w / scale))):
            out[i] = out[i] + by_query(
                jnp.einsum("rkgqs,rksd->rkgqd", by_row(part, rows), value), rows
            )
    out = _joined(out) * scale / jnp.where(norm == 0, 1.0, norm)
    return rounded(out.transpose(0, 3, 1, 2, 4).reshape(b, t, heads, dim), query.dtype)


def has_tiles() -> bool:
    """Whether products go through tiles of rows: on one CPU device, where a shape has one plan."""
    return jax.default_backend() == "cpu" and jax.device_count() == 1


def _dot_of_tiles(x, w, out_dtype):
    rows, w = _of_one_dtype(x.reshape(-1, x.shape[-1]), w)
    count = -(-len(rows) // TILE)
    out = lax.map(lambda tile: _tile_product(tile, w), _tiles(rows, count))
    return rounded(_rows_of(out)[: len(rows)], out_dtype).reshape(*x.shape[:-1], w.shape[0])


def _grouped_dot_of_tiles(x, w, group_sizes, out_dtype):
    (x, w), groups, rows = _of_one_dtype(x, w), len(w), jnp.arange(len(x))
    # each group begins a tile of its own, so there are at most so many
    count = -(-len(x) // TILE) + groups
    tiles = -(-group_sizes // TILE)
    ends, tile_ends = jnp.cumsum(group_sizes), jnp.cumsum(tiles)
    group = jnp.minimum(jnp.searchsorted(ends, rows, side="right"), groups - 1)
    place = rows - (ends - group_sizes)[group] + (tile_ends - tiles)[group] * TILE
    is_inside = (rows < ends[-1])[:, None]
    spread = jnp.zeros((count * TILE, x.shape[-1]), x.dtype)
    spread = spread.at[jnp.where(is_inside[:, 0], place, count * TILE)].set(x, mode="drop")
    of_tile = jnp.searchsorted(tile_ends, jnp.arange(count), side="right")

    def product(tile_and_group):
        tile, group = tile_and_group
        # what is behind the last group is zero: any weight will do
        weight = lax.dynamic_index_in_dim(w, jnp.minimum(group, groups - 1), keepdims=False)
        return _tile_product(tile, weight)

    out = _rows_of(lax.map(product, (_tiles(spread, count), of_tile)))
    return rounded(jnp.where(is_inside, out[place], 0.0), out_dtype)


def _tiles(rows: Array, count: int) -> Array:
    rows = jnp.pad(rows, ((0, count * TILE - len(rows)), (0, 0)))
    return rows.reshape(count, TILE, -1)


def _of_one_dtype(x: Array, w: Array) -> tuple[Array, Array]:
    """Both in 16 bits where both are, else in float32."""
    dtype = x.dtype if x.dtype == w.dtype else jnp.float32
    return x.astype(dtype), w.astype(dtype)


def _tile_product(tile: Array, w: Array) -> Array:
    """w @ tile.T, between barriers: nothing around it may change how it is multiplied."""
    tile, w = materialize((tile, w))
    contract = (((1,), (1,)), ((), ()))
    return materialize(
        lax.dot_general(w, tile, contract, "highest", preferred_element_type=jnp.float32)
    )


def _rows_of(tiles: Array) -> Array:
    return jnp.swapaxes(tiles, 1, 2).reshape(-1, tiles.shape[1])


@with_float64
def dot_of_integers(x: Array, w: Array | Integers, out_dtype: jnp.dtype = jnp.float32) -> Array:
    """Multiply as `dot` does, right by argument on every device; it has no gradient."""
    _check_terms(x.shape[-1], "terms")
    w = to_integers(w)
    rows = x.reshape(-1, x.shape[-1])
    out = _product("mk,nk->mn", as_float64(rows), w.values, w.scale)
    return rounded(out, out_dtype).reshape(*x.shape[:-1], w.shape[0])


@with_float64
def grouped_dot_of_integers(
    x: Array, w: Array | Integers, group_sizes: Array, out_dtype: jnp.dtype = jnp.float32
) -> Array:
    """Multiply as `grouped_dot` does, right by argument on every device; it has no gradient."""
    _check_terms(x.shape[-1], "terms")
    w, x = to_integers(w), as_float64(x)
    whole, scale = scaled_integers(x, 2 * SLICE_BITS, -1)
    ends = jnp.cumsum(group_sizes)
    group = jnp.minimum(jnp.searchsorted(ends, jnp.arange(len(x)), side="right"), len(ends) - 1)
    high, low = (
        lax.ragged_dot_general(part, w.values, group_sizes, grouped_reference.BY_ROW)
        for part in _slices(whole)
    )
    out = _joined((high, low)) * scale * w.scale[group, :, 0]
    return rounded(jnp.where((jnp.arange(len(x)) < ends[-1])[:, None], out, 0.0), out_dtype)


def _product(spec: str, x: Array, w: Array, w_scale: Array) -> Array:
    """einsum of x and of the integers w with their scales [..., n, 1], float64."""
    whole, scale = scaled_integers(x, 2 * SLICE_BITS, -1)
    out = _joined(jnp.einsum(spec, part, w) for part in _slices(whole)) * scale
    columns = jnp.swapaxes(w_scale, -1, -2)
    return out * columns.reshape(
        *columns.shape[:-2], *(1,) * (out.ndim - columns.ndim), *columns.shape[-2:]
    )


def _slices(whole: Array) -> tuple[Array, Array]:
    whole = materialize(whole)
    high = jnp.round(whole * 2.0**-SLICE_BITS)
    return high, whole - high * 2.0**SLICE_BITS


def _joined(parts: Iterable[Array]) -> Array:
    high, low = parts
    return high * 2.0**SLICE_BITS + low


def _per_slot(scale: Array, b: int, group: int, t: int) -> Array:
    """The scales of a block's values, [rows, kv_heads, slots, 1], as factors of weights [b,
    kv_heads, group, t, slots]."""
    return jnp.repeat(scale[..., 0], b // scale.shape[0], axis=0)[:, :, None, None, :]


def _check_terms(count: int, what: str) -> None:
    if count > MAX_TERMS:
        raise ValueError(f"an exact product has at most {MAX_TERMS} {what}, not {count}")
