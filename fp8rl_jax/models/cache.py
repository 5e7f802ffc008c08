"""The KV cache in two parts, and its FP8 scales.

All completions of a prompt read one copy of its keys and values, the prefix cache; each completion
then writes its completion cache from slot 0, so ragged prompts need no alignment and a decode step
writes one slot for every row at once. The trainer scores completions against the same two parts,
which is why it, too, runs the prompt once for a group instead of once for a sample.

In FP8 the cache holds e4m3 values, and a layer has scales of Q, K and V: a number each, or one a KV
head. They are calibrated at every weight sync (rollout.calibration); nothing here guesses one.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fp8rl_jax.models.config import PolicyConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVScales:
    """Scales of each layer: x is about stored * scale. float32 [layers], or [layers, kv_heads]; a
    query's is that of its KV head's group."""

    query: Float[Array, "layers ..."]
    key: Float[Array, "layers ..."]
    value: Float[Array, "layers ..."]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVBlock:
    """Keys and values of one stretch of tokens, for every layer.

    Attributes:
        keys, values: [rows, kv_heads, slots, head_dim] of each layer; a tuple over layers, or one
            array with a leading axis.
        mask: [rows, slots], True where a slot holds a token. In a prefix cache that is decoded
            with, each row's tokens come first. A policy call has rows * n rows for a prefix cache
            of `rows`: row b of the call reads row b // n.
        positions: [rows, slots], position of the token in each slot, which sliding windows read in
            a prefix cache. None in a completion cache: its slots are consecutive positions.
    """

    keys: Array | tuple[Array, ...]
    values: Array | tuple[Array, ...]
    mask: Bool[Array, "rows slots"]
    positions: Int[Array, "rows slots"] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """What a policy call attends to besides its own tokens.

    Attributes:
        prefix: the prompts' keys and values, read only, or None.
        completion: what the call writes at `slot` and attends to; None: the call attends to its own
            tokens causally and returns their block.
        slot: int32, first slot that the call writes.
        scales: FP8 scales, or None when nothing in the cache is quantized.
    """

    prefix: KVBlock | None = None
    completion: KVBlock | None = None
    slot: Int[Array, ""] | None = None
    scales: KVScales | None = None


def empty_block(
    config: PolicyConfig, rows: int, slots: int, dtype: jnp.dtype, stacked: bool
) -> KVBlock:
    """Make a block with nothing in it: zeros, mask False."""
    shape = (rows, config.num_kv_heads, slots, config.head_dim)

    def make():
        if stacked:
            return jnp.zeros((config.num_layers, *shape), dtype)
        return tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))

    return KVBlock(make(), make(), jnp.zeros((rows, slots), bool))
