"""Rotary positions (arXiv 2104.09864): frequencies, their rescalings, and the rotation of queries
and keys."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fp8rl_jax.models.config import LinearRopeScaling, PolicyConfig
from pallas_kernels.rounding import rounded


def rope_frequencies(config: PolicyConfig) -> Float[Array, " half"]:
    """Angular frequency of each pair of a head's dimensions, float32, Llama 3's rescaling (arXiv
    2407.21783) or a linear one (arXiv 2306.15595) applied."""
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
    return jnp.stack(
        [full if i in config.full_attention_layers else local for i in range(config.num_layers)]
    )


def _frequencies(theta: float, head_dim: int) -> Float[Array, " half"]:
    half = head_dim // 2
    return theta ** (-jnp.arange(half, dtype=jnp.float32) / half)


def rope_tables(
    frequencies: Float[Array, " half"], positions: Int[Array, "b t"]
) -> tuple[Float[Array, "b t half"], Float[Array, "b t half"]]:
    """cos and sin of each position's angles, float32."""
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "b t heads dim"], tables: tuple[Array, Array]
) -> Float[Array, "b t heads dim"]:
    """Rotary embedding in the half-split layout of Hugging Face, computed in float32."""
    cos, sin = (table[:, :, None, :] for table in tables)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return rounded(
        jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1), x.dtype
    )
