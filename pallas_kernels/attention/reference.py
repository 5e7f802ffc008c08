"""Grouped-query attention over blocks of keys in plain XLA.

Scores, softmax and the PV sum are float32 whatever the operands are. With an FP8 cache the operands
are the e4m3 values themselves and the scales enter twice, as in FA3: s_q * s_k on the scores, s_v
on the output.

The scores of a row of t tokens are t * t numbers a head, and a backward pass keeps them.
`attend_in_chunks` makes them for a few queries at a time and again in the backward pass, masks
included, so memory grows with t and not with its square.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.quantize.reference import on_grid
from pallas_kernels.rounding import full_precision, rounded

# from this many query-key pairs of a row on, attention is chunked unless the caller says otherwise
CHUNK_FROM, CHUNK = 1024 * 1024, 128
_NO_QUERY = -2
PROBABILITY_FACTOR = 256.0
"""Of probabilities that are cast: a power of two below the largest number of e4m3."""


class KeyBlock(NamedTuple):
    """One block of keys, with the mask of the queries that read it.

    Attributes:
        keys, values: [rows, kv_heads, slots, head_dim].
        mask: broadcastable to [rows, queries of all samples that share the row, slots].
    """

    keys: Array
    values: Array
    mask: Bool[Array, "rows queries slots"]


class Tokens(NamedTuple):
    """What decides which tokens attend to which, a number a token: no mask of all pairs is needed.

    Attributes:
        segments: a token attends to its own segment; 0 is padding.
        prefixes: the segment that its own continues, which it attends to, too; -1 where there is
            none, None where none has one.
        order: a token attends to those of the same or a lower order.
        positions: of sliding windows and rotary angles.
    """

    segments: Int[Array, "rows n"]
    order: Int[Array, "rows n"]
    positions: Int[Array, "rows n"]
    prefixes: Int[Array, "rows n"] | None = None

    @classmethod
    def of_rows(
        cls,
        segments: Int[Array, "rows n"],
        positions: Int[Array, "rows n"],
        prefixes: Int[Array, "rows n"] | None = None,
    ) -> Tokens:
        """Make tokens that stand in their order."""
        order = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)
        return cls(segments, order, positions, prefixes)

    @classmethod
    def of_block(
        cls, real: Bool[Array, "rows n"], positions: Int[Array, "rows n"] | None
    ) -> Tokens:
        """Make a block that everything comes after: as the only segment of its row, called 1."""
        segments = real.astype(jnp.int32)
        before = jnp.full_like(segments, -1)
        return cls(segments, before, before if positions is None else positions)

    def after_block(self) -> Tokens:
        """Return these tokens as readers of a block, who attend to all that is real in it."""
        return self._replace(segments=jnp.ones_like(self.segments))


class TokenBlock(NamedTuple):
    """One block of keys, with its queries [b, t] and slots [rows, slots] as tokens, not a mask."""

    keys: Array
    values: Array
    queries: Tokens
    slots: Tokens


def window_mask(
    queries: Int[Array, "*b t"], keys: Int[Array, "*b slots"], window: Int[Array, ""]
) -> Bool[Array, "*b t slots"]:
    """Mark the keys within a sliding window of each query, which is `window` positions long.

    The window includes the query's own position (arXiv 2310.06825).
    """
    return queries[..., :, None] - keys[..., None, :] < window


def attention_mask(
    queries: Tokens, keys: Tokens, window: Int[Array, ""] | None = None
) -> Bool[Array, "rows queries keys"]:
    """Mark the keys that each query attends to."""
    key = keys.segments[:, None, :]
    related = queries.segments[..., None] == key
    if queries.prefixes is not None:
        related |= queries.prefixes[..., None] == key
    visible = related & (queries.order[..., None] >= keys.order[:, None, :])
    return (
        visible
        if window is None
        else visible & window_mask(queries.positions, keys.positions, window)
    )


def attend(
    query: Float[Array, "b t heads dim"],
    blocks: list[KeyBlock],
    score_scale: Float[Array, ...] | float,
    value_scale: Float[Array, ...] | float,
    out_dtype: jnp.dtype,
    probability: jnp.dtype | None = None,
) -> Float[Array, "b t heads dim"]:
    """Compute softmax(q k * score_scale) v * value_scale over all blocks, as `attention`.

    Args:
        probability: FP8 dtype that the weights exp(score - top) are cast to, times 256, before they
            multiply V. 256 and the float32 sum of weights are those of FlashAttention-3's FP8
            forward (Dao-AILab/flash-attention, hopper/softmax.h: exp2(x - max + Max_offset) with
            Max_offset = 8; arXiv 2407.08608). `top` is the largest of all keys that a query
            attends to, in whatever blocks they lie, so the cast follows from the query's row alone;
            FlashAttention-3 goes through its keys in tiles and casts with the largest until then,
            which is another rounding of the tiles before the largest.
    """
    b, t, heads, dim = query.shape
    precision = full_precision(_widen(query), out_dtype)
    scores, grouped = [], []
    for block in blocks:
        rows, kv_heads, slots, _ = block.keys.shape
        n, group = b // rows, heads // kv_heads
        # samples that share a block become more queries of one product
        q = query.reshape(rows, n * t, kv_heads, group, dim)
        s = jnp.einsum(
            "rqkgd,rksd->rkgqs",
            _widen(q),
            _widen(block.keys),
            precision=precision,
            preferred_element_type=jnp.float32,
        ) * per_kv_head(score_scale, 3)
        s = jnp.where(block.mask[:, None, None], s, -jnp.inf)
        s = s.reshape(rows, kv_heads, group, n, t, slots).transpose(0, 3, 1, 2, 4, 5)
        scores.append(s.reshape(b, kv_heads, group, t, slots))
        grouped.append((rows, n, slots))
    top = jnp.maximum(
        jnp.max(jnp.concatenate([s.max(-1, keepdims=True) for s in scores], -1), -1, keepdims=True),
        -1e30,
    )
    weights = [jnp.exp(s - top) for s in scores]
    total = sum(w.sum(-1) for w in weights)
    if probability is not None:
        factor = PROBABILITY_FACTOR
        weights = [on_grid(w * factor, probability) / factor for w in weights]
    out = 0.0
    for block, w, (rows, n, slots) in zip(blocks, weights, grouped, strict=True):
        kv_heads, group = w.shape[1], w.shape[2]
        w = (
            w.reshape(rows, n, kv_heads, group, t, slots)
            .transpose(0, 2, 3, 1, 4, 5)
            .reshape(rows, kv_heads, group, n * t, slots)
        )
        values = block.values.astype(jnp.float32)
        o = jnp.einsum(
            "rkgqs,rksd->rqkgd", w, values, precision=precision, preferred_element_type=jnp.float32
        )
        out = out + o.reshape(b, t, kv_heads, group, dim)
    # a query that attends to nothing has the output 0
    scale = (
        per_kv_head(value_scale, 2)
        / jnp.moveaxis(jnp.where(total == 0, 1.0, total), 3, 1)[..., None]
    )
    return rounded((out * scale).reshape(b, t, heads, dim), out_dtype)


def attend_in_chunks(
    query: Float[Array, "b t heads dim"],
    blocks: list[TokenBlock],
    window: Int[Array, ""] | None,
    score_scale: Float[Array, ...] | float,
    value_scale: Float[Array, ...] | float,
    out_dtype: jnp.dtype,
    chunk: int,
    attend: Callable = attend,
) -> Float[Array, "b t heads dim"]:
    """Compute attention for `chunk` queries of each row at a time, again in the backward pass.

    Chunks of queries as in Rabe and Staats (arXiv 2112.05682), and not of keys: each query meets
    all of its keys at once, so the softmax is the one of `attend`, and the memory is t / chunk
    times less. `attend` is this file's, or has its arguments.
    """
    t = query.shape[1]
    count = -(-t // chunk)
    width = -(-t // count)

    def split(x, fill=0):
        x = jnp.pad(
            x, [(0, 0), (0, count * width - t)] + [(0, 0)] * (x.ndim - 2), constant_values=fill
        )
        return jnp.moveaxis(x.reshape(x.shape[0], count, width, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def one(part):
        query, tokens = part
        keys = []
        for block, own in zip(blocks, tokens, strict=True):
            rows = block.keys.shape[0]
            mask = attention_mask(
                jax.tree.map(lambda x, rows=rows: x.reshape(rows, -1), own), block.slots, window
            )
            keys.append(KeyBlock(block.keys, block.values, mask))
        return attend(query, keys, score_scale, value_scale, out_dtype)

    tokens = [jax.tree.map(lambda x: split(x, _NO_QUERY), block.queries) for block in blocks]
    out = lax.map(one, (split(query), tokens))
    return jnp.moveaxis(out, 0, 1).reshape(query.shape[0], count * width, *query.shape[2:])[:, :t]


def check_scale(operation: str, scale: Array | float, kv_heads: int) -> None:
    """Refuse a scale that is neither a scalar nor [kv_heads].

    Raises:
        ValueError: naming its shape.
    """
    if jnp.shape(scale) not in ((), (kv_heads,)):
        raise ValueError(
            f"{operation}: a scale has the shape () or ({kv_heads},), one for each KV "
            f"head, not {jnp.shape(scale)}"
        )


def per_kv_head(scale: Array | float, axes: int) -> Array | float:
    """Give a scale [kv_heads] `axes` axes of length 1, to multiply [..., kv_heads, *axes] with.

    A scalar stays as it is.
    """
    return jnp.reshape(scale, (-1, *(1,) * axes)) if jnp.ndim(scale) else scale


def _widen(x: Array) -> Array:
    """FP8 operands as float32: their products are exact in it."""
    return x.astype(jnp.float32) if jnp.finfo(x.dtype).bits == 8 else x
