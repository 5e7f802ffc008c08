"""Rotary positions and grouped-query attention over up to two blocks of keys.

Scores, softmax and the PV sum are float32 whatever the operands are. With an FP8 cache the operands are the e4m3 values
themselves and the scales enter twice, as in FA3: s_q * s_k on the scores, s_v on the output.

The scores of a row of t tokens are t * t numbers a head, and a backward pass keeps them. `attend_in_chunks` makes them for a few
queries at a time and again in the backward pass, masks included, so memory grows with t and not with its square.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.rope_scaling import LinearRopeScaling

# from this many query-key pairs of a row on, attention is chunked unless the caller says otherwise
CHUNK_FROM, CHUNK = 1024 * 1024, 128
_NO_QUERY = -2


class Keys(NamedTuple):
    """One block of keys as attention sees it: keys, values [rows, kv_heads, slots, head_dim], mask broadcastable to
    [rows, queries of all samples that share the row, slots]."""

    keys: Array
    values: Array
    mask: Bool[Array, "rows queries slots"]


class Tokens(NamedTuple):
    """What decides which tokens see which, a number a token: a mask of all pairs need not exist.

    Attributes:
        segments: a token sees its own segment; 0 is padding.
        prefixes: the segment that its own continues, which it sees, too; -1 where there is none, None where none has one.
        order: a token sees those of the same or a lower order.
        positions: of sliding windows and rotary angles.
    """

    segments: Int[Array, "rows n"]
    order: Int[Array, "rows n"]
    positions: Int[Array, "rows n"]
    prefixes: Int[Array, "rows n"] | None = None

    @classmethod
    def of_rows(
        cls, segments: Int[Array, "rows n"], positions: Int[Array, "rows n"], prefixes: Int[Array, "rows n"] | None = None
    ) -> Tokens:
        """Tokens that stand in their order."""
        order = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)
        return cls(segments, order, positions, prefixes)

    @classmethod
    def of_block(cls, real: Bool[Array, "rows n"], positions: Int[Array, "rows n"] | None) -> Tokens:
        """A block that everything comes after: as the only segment of its row, called 1."""
        segments = real.astype(jnp.int32)
        before = jnp.full_like(segments, -1)
        return cls(segments, before, before if positions is None else positions)

    def after_block(self) -> Tokens:
        """These tokens as they see a block: all of them see all that is real in it."""
        return self._replace(segments=jnp.ones_like(self.segments))


class TokenKeys(NamedTuple):
    """One block of keys as chunked attention sees it: as `Keys`, with its queries [b, t] and slots [rows, slots] as tokens."""

    keys: Array
    values: Array
    queries: Tokens
    slots: Tokens


def rope_frequencies(config: PolicyConfig) -> Float[Array, " half"]:
    """Angular frequency of each pair of a head's dimensions, float32, Llama 3's rescaling (arXiv 2407.21783) or a linear one
    (arXiv 2306.15595) applied."""
    frequencies = _frequencies(config.rope_theta, config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if isinstance(scaling, LinearRopeScaling):
        return frequencies / scaling.factor
    wavelength = 2 * math.pi / frequencies
    turns = scaling.original_max_position_embeddings / wavelength
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = jnp.clip(blend, 0.0, 1.0)
    return frequencies * (blend + (1 - blend) / scaling.factor)


def layer_frequencies(config: PolicyConfig) -> Float[Array, "layers half"] | None:
    """The rotary frequencies of each layer where those with a window have their own, else None."""
    if config.local_rope_theta is None:
        return None
    local, full = _frequencies(config.local_rope_theta, config.head_dim), rope_frequencies(config)
    return jnp.stack([full if i in config.full_attention_layers else local for i in range(config.num_layers)])


def _frequencies(theta: float, head_dim: int) -> Float[Array, " half"]:
    half = head_dim // 2
    return theta ** (-jnp.arange(half, dtype=jnp.float32) / half)


def rope_tables(
    frequencies: Float[Array, " half"], positions: Int[Array, "b t"]
) -> tuple[Float[Array, "b t half"], Float[Array, "b t half"]]:
    """cos and sin of each position's angles, float32."""
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Float[Array, "b t heads dim"], tables: tuple[Array, Array]) -> Float[Array, "b t heads dim"]:
    """Rotary embedding in the half-split layout of Hugging Face, computed in float32."""
    cos, sin = (table[:, :, None, :] for table in tables)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def in_window(
    queries: Int[Array, "*b t"], keys: Int[Array, "*b slots"], window: Int[Array, ""]
) -> Bool[Array, "*b t slots"]:
    """Which keys lie within a sliding window: a token sees `window` positions, its own included (arXiv 2310.06825)."""
    return queries[..., :, None] - keys[..., None, :] < window


def sees(queries: Tokens, keys: Tokens, window: Int[Array, ""] | None = None) -> Bool[Array, "rows queries keys"]:
    """Which keys each query sees."""
    key = keys.segments[:, None, :]
    related = queries.segments[..., None] == key
    if queries.prefixes is not None:
        related |= queries.prefixes[..., None] == key
    seen = related & (queries.order[..., None] >= keys.order[:, None, :])
    return seen if window is None else seen & in_window(queries.positions, keys.positions, window)


def attend(
    query: Float[Array, "b t heads dim"],
    blocks: list[Keys],
    score_scale: Float[Array, ""] | float,
    value_scale: Float[Array, ""] | float,
    out_dtype: jnp.dtype,
) -> Float[Array, "b t heads dim"]:
    """softmax(q k * score_scale) v * value_scale over the slots of all blocks together.

    Args:
        query: any float dtype, e4m3 included.
        blocks: a block with fewer rows than `query` is shared: row r serves query rows r*n ... r*n + n - 1.
        score_scale: the model's, mostly 1/sqrt(dim), times the scales of Q and K where they are quantized.
        value_scale: the scale of V, or 1.
        out_dtype: dtype of the result.
    """
    b, t, heads, dim = query.shape
    scores, grouped = [], []
    for block in blocks:
        rows, kv_heads, slots, _ = block.keys.shape
        n, group = b // rows, heads // kv_heads
        # samples that share a block become more queries of one product
        q = query.reshape(rows, n * t, kv_heads, group, dim)
        s = jnp.einsum("rqkgd,rksd->rkgqs", _widen(q), _widen(block.keys), preferred_element_type=jnp.float32) * score_scale
        s = jnp.where(block.mask[:, None, None], s, -jnp.inf)
        s = s.reshape(rows, kv_heads, group, n, t, slots).transpose(0, 3, 1, 2, 4, 5)
        scores.append(s.reshape(b, kv_heads, group, t, slots))
        grouped.append((rows, n, slots))
    top = jnp.maximum(jnp.max(jnp.concatenate([s.max(-1, keepdims=True) for s in scores], -1), -1, keepdims=True), -1e30)
    weights = [jnp.exp(s - top) for s in scores]
    total = sum(w.sum(-1) for w in weights)
    out = 0.0
    for block, w, (rows, n, slots) in zip(blocks, weights, grouped, strict=True):
        kv_heads, group = w.shape[1], w.shape[2]
        w = w.reshape(rows, n, kv_heads, group, t, slots).transpose(0, 2, 3, 1, 4, 5).reshape(rows, kv_heads, group, n * t, slots)
        values = block.values.astype(jnp.float32)
        o = jnp.einsum("rkgqs,rksd->rqkgd", w, values, preferred_element_type=jnp.float32)
        out = out + o.reshape(b, t, kv_heads, group, dim)
    # a query that sees nothing has the output 0
    scale = value_scale / jnp.moveaxis(jnp.where(total == 0, 1.0, total), 3, 1)[..., None]
    return (out * scale).reshape(b, t, heads, dim).astype(out_dtype)


def attend_in_chunks(
    query: Float[Array, "b t heads dim"],
    blocks: list[TokenKeys],
    window: Int[Array, ""] | None,
    score_scale: Float[Array, ""] | float,
    value_scale: Float[Array, ""] | float,
    out_dtype: jnp.dtype,
    chunk: int,
    attend: Callable = attend,
) -> Float[Array, "b t heads dim"]:
    """`attend`, for at most `chunk` queries of each row at a time, recomputed in the backward pass.

    Chunks of queries as in Rabe and Staats (arXiv 2112.05682), and not of keys: each query meets all of its keys at once, so
    the softmax is the one of `attend`, and the memory is t / chunk times less. `attend` is this file's, or an exact one.
    """
    t = query.shape[1]
    count = -(-t // chunk)
    width = -(-t // count)

    def split(x, fill=0):
        x = jnp.pad(x, [(0, 0), (0, count * width - t)] + [(0, 0)] * (x.ndim - 2), constant_values=fill)
        return jnp.moveaxis(x.reshape(x.shape[0], count, width, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def one(part):
        query, tokens = part
        keys = []
        for block, own in zip(blocks, tokens, strict=True):
            rows = block.keys.shape[0]
            mask = sees(jax.tree.map(lambda x, rows=rows: x.reshape(rows, -1), own), block.slots, window)
            keys.append(Keys(block.keys, block.values, mask))
        return attend(query, keys, score_scale, value_scale, out_dtype)

    tokens = [jax.tree.map(lambda x: split(x, _NO_QUERY), block.queries) for block in blocks]
    out = lax.map(one, (split(query), tokens))
    return jnp.moveaxis(out, 0, 1).reshape(query.shape[0], count * width, *query.shape[2:])[:, :t]


def _widen(x: Array) -> Array:
    """FP8 operands as float32: their products are exact in it."""
    return x.astype(jnp.float32) if jnp.finfo(x.dtype).bits == 8 else x
