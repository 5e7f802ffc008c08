"""Rotary positions and grouped-query attention over up to two blocks of keys.

Scores, softmax and the PV sum are float32 whatever the operands are. With an FP8 cache the operands are the e4m3 values
themselves and the scales enter twice, as in FA3: s_q * s_k on the scores, s_v on the output.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.rope_scaling import LinearRopeScaling


class Keys(NamedTuple):
    """One block of keys as attention sees it: keys, values [rows, kv_heads, slots, head_dim], mask broadcastable to
    [rows, queries of all samples that share the row, slots]."""

    keys: Array
    values: Array
    mask: Bool[Array, "rows queries slots"]


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
    scale = value_scale / jnp.moveaxis(total, 3, 1)[..., None]
    return (out * scale).reshape(b, t, heads, dim).astype(out_dtype)


def _widen(x: Array) -> Array:
    """FP8 operands as float32: their products are exact in it."""
    return x.astype(jnp.float32) if jnp.finfo(x.dtype).bits == 8 else x
