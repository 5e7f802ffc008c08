"""Products that are exact sums of whole numbers: matrices, the rows of groups, and attention.

Each row of an operand becomes integers times a power of two (`numbers.integers`). A product of
integers is an integer, and as long as the sum stays below 2^53 a float64 matrix product adds them
up without rounding, in whatever order it likes. The left operand has 28 bits, in two slices of 14,
the right one 22, which leaves room for 2^17 terms. What is cut off is below 2^-28 and 2^-22 of a
row's largest element: less than a float32 product of the same length loses.

Gradients are those of the plain float32 product.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.exact.gradient import with_gradient_of
from pallas_kernels.exact.numbers import cut, exp, integers, once, scoped, total, wide
from pallas_kernels.grouped_matmul import reference as grouped_reference
from pallas_kernels.matmul import reference
from pallas_kernels.rounding import rounded

SLICE_BITS, RIGHT_BITS = 14, 22
MAX_TERMS = 2 ** (53 - SLICE_BITS - RIGHT_BITS)


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


@scoped
def to_integers(w: Float[Array, "*stack n k"] | Integers) -> Integers:
    """The form in which `dot` and `grouped_dot` multiply w; twice the memory of float32."""
    return w if isinstance(w, Integers) else Integers(*integers(wide(w), RIGHT_BITS, -1))


def dot(
    x: Float[Array, "*batch k"],
    w: Float[Array, "n k"] | Integers,
    out_dtype: jnp.dtype = jnp.float32,
) -> Array:
    """x @ w.T, each row of it a function of that row of x and of w alone.

    Raises:
        ValueError: more than 2^17 terms.
    """

    def plain(x, w):
        return reference.dot(x.astype(w.dtype), w).astype(out_dtype)

    if isinstance(w, Integers):
        return _dot(x, w, out_dtype)
    return with_gradient_of(plain, partial(_dot, out_dtype=out_dtype))(x, w)


def add_scaled(x: Array, y: Array, scale: float) -> Array:
    """x + scale * y, rounded once to x's dtype."""

    @scoped
    def exactly(x, y):
        return rounded(wide(x) + wide(y) * cut(jnp.float64(scale)), x.dtype)

    return with_gradient_of(lambda x, y: x + scale * y, exactly)(x, y)


def grouped_dot(
    x: Float[Array, "m k"],
    w: Float[Array, "groups n k"] | Integers,
    group_sizes: Int[Array, " groups"],
    out_dtype: jnp.dtype = jnp.float32,
) -> Array:
    """Each row of x, sorted by group, times its group's part of w transposed; zero behind the last
    group."""

    def plain(x, w, sizes):
        return grouped_reference.dot(x.astype(w.dtype), w, sizes).astype(out_dtype)

    if isinstance(w, Integers):
        return _grouped_dot(x, w, group_sizes, out_dtype)
    return with_gradient_of(plain, partial(_grouped_dot, out_dtype=out_dtype))(x, w, group_sizes)


@scoped
def attend(
    query: Array, keys: list[Array], values: list[Array], masks: list[Array], score_scale: float
) -> Array:
    """softmax(q k * score_scale) v over the slots of all blocks, whatever slots they stand in and
    whatever else is there.

    Args:
        query: [b, t, heads, dim].
        keys, values: of each block [rows, kv_heads, slots, dim]; row r serves the queries r * b /
            rows and on.
        masks: of each block, broadcastable to [rows, t * b / rows, slots].
        score_scale: factor of the scores.

    Returns:
        [b, t, heads, dim] in the dtype of `query`; 0 for a query that sees nothing. It has no
        gradient.

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
    scores, seen = [], []
    for key, mask in zip(keys, masks, strict=True):
        rows = key.shape[0]
        s = _product(
            "rkgqd,rksd->rkgqs", wide(by_row(q, rows)), *integers(wide(key), RIGHT_BITS, -1)
        )
        mask = jnp.broadcast_to(mask[:, None, None], s.shape)
        scores.append(once(by_query(jnp.where(mask, cut(s * score_scale), -jnp.inf), rows)))
        seen.append(by_query(mask, rows))
    top = once(
        jnp.maximum(
            jnp.max(
                jnp.concatenate([s.max(-1, keepdims=True) for s in scores], -1), -1, keepdims=True
            ),
            -1e30,
        )
    )
    weights = [
        once(jnp.where(mask, exp(s - top), 0.0)) for s, mask in zip(scores, seen, strict=True)
    ]
    norm = total(jnp.concatenate(weights, -1), -1)[..., None]
    # a value's own scale goes to its weight: no slot's integers then depend on another slot
    parts = [integers(wide(value), RIGHT_BITS, -1) for value in values]
    weights = [
        once(w * _per_slot(scale, b, group, t))
        for w, (_, scale) in zip(weights, parts, strict=True)
    ]
    edge = jnp.max(
        jnp.concatenate([w.max(-1, keepdims=True) for w in weights], -1), -1, keepdims=True
    )
    _, scale = integers(edge, 2 * SLICE_BITS, -1)
    out = [0.0, 0.0]
    for w, (value, _) in zip(weights, parts, strict=True):
        rows = value.shape[0]
        for i, part in enumerate(_slices(jnp.round(w / scale))):
            out[i] = out[i] + by_query(
                jnp.einsum("rkgqs,rksd->rkgqd", by_row(part, rows), value), rows
            )
    out = _joined(out) * scale / jnp.where(norm == 0, 1.0, norm)
    return rounded(out.transpose(0, 3, 1, 2, 4).reshape(b, t, heads, dim), query.dtype)


@scoped
def _dot(x, w, out_dtype):
    _check_terms(x.shape[-1], "terms")
    w = to_integers(w)
    rows = x.reshape(-1, x.shape[-1])
    out = _product("mk,nk->mn", wide(rows), w.values, w.scale)
    return rounded(out, out_dtype).reshape(*x.shape[:-1], w.shape[0])


@scoped
def _grouped_dot(x, w, group_sizes, out_dtype):
    _check_terms(x.shape[-1], "terms")
    w, x = to_integers(w), wide(x)
    whole, scale = integers(x, 2 * SLICE_BITS, -1)
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
    whole, scale = integers(x, 2 * SLICE_BITS, -1)
    out = _joined(jnp.einsum(spec, part, w) for part in _slices(whole)) * scale
    columns = jnp.swapaxes(w_scale, -1, -2)
    return out * columns.reshape(
        *columns.shape[:-2], *(1,) * (out.ndim - columns.ndim), *columns.shape[-2:]
    )


def _slices(whole: Array) -> tuple[Array, Array]:
    whole = once(whole)
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
