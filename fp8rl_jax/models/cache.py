"""The KV cache, in two parts or in pages, and its FP8 scales.

All completions of a prompt read one copy of its keys and values, the prefix cache; each completion
then writes its completion cache from slot 0, so ragged prompts need no alignment and a decode step
writes one slot for every row at once. The trainer scores completions against the same two parts,
which is why it, too, runs the prompt once for a group instead of once for a sample.

Rows that come and go, each with a length of its own, keep their keys and values in pages instead
(`Pages`): a row is a list of page numbers, those of its prompt shared with the prompt's other
samples.

With latent attention (models/latent.py) the keys are those that all heads share, and the values the
latents, each as of a single head.

In FP8 the cache holds e4m3 values, and a layer has scales of Q, K and V: a number each, or one a KV
head. They are calibrated at every weight sync (rollout.calibration); nothing here guesses one. A
format that finds its scales in each token's head is simulated: keys and values are rounded through
it as they are written, and kept in the compute dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
class Pages:
    """Keys and values in pages, and which of them each row of a call holds.

    A row attends to the tokens in its prefix pages, which other rows may hold as well, then to
    those in its own. A call writes its tokens behind the latter. Page numbers outside the cache
    stand for no page.

    Attributes:
        keys, values: [pages, kv_heads, page_size, head_dim] of each layer; a tuple over layers, or
            one array with a leading axis.
        own, own_lengths: int32 [rows, columns] of page numbers, and [rows], the tokens in them
            before the call.
        prefix, prefix_lengths: likewise; None where no row has a prefix.
    """

    keys: Array | tuple[Array, ...]
    values: Array | tuple[Array, ...]
    own: Int[Array, "rows columns"]
    own_lengths: Int[Array, " rows"]
    prefix: Int[Array, "rows prefix_columns"] | None = None
    prefix_lengths: Int[Array, " rows"] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """What a policy call attends to besides its own tokens.

    Attributes:
        prefix: the prompts' keys and values, read only, or None.
        completion: what the call writes and attends to, a block at `slot`, or pages, which have
            their own prefix; None: the call attends to its own tokens causally and returns their
            block.
        slot: int32, first slot of a block that the call writes.
    """

    prefix: KVBlock | None = None
    completion: KVBlock | Pages | None = None
    slot: Int[Array, ""] | None = None


def empty_block(
    config: PolicyConfig, rows: int, slots: int, dtype: jnp.dtype, stacked: bool
) -> KVBlock:
    """Make a block with nothing in it: zeros, mask False."""
    keys, values = empty_cache(config, rows, slots, dtype, stacked)
    return KVBlock(keys, values, jnp.zeros((rows, slots), bool))


def empty_cache(
    config: PolicyConfig, rows: int, slots: int, dtype: jnp.dtype, stacked: bool
) -> tuple[Any, Any]:
    """Make keys and values of zeros, [rows, heads, slots, dim] of each layer, as
    `PolicyConfig.cached` has them."""

    def make(heads: int, dim: int):
        shape = (rows, heads, slots, dim)
        if stacked:
            return jnp.zeros((config.num_layers, *shape), dtype)
        return tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))

    keys, values = config.cached
    return make(*keys), make(*values)
