"""One forward pass for scoring, prefill and decode.

The three differ in their inputs only: which keys are cached, which slots are written, and on which side of the recipe the
formats stand. A train-rollout mismatch can then come from formats and reduction orders, never from a second definition of
the model.

    train     tokens [b, t], no cache or a shared block     trainer formats, differentiable
    prefill   prompts [p, s], no cache                      rollout formats, returns the prompts' block
    decode    one token a row, shared block + own block     rollout formats, writes the own block at `slot`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from fp8rl_jax.config.recipe import ForwardFormats, Recipe
from fp8rl_jax.models.attention import Keys, attend, rope_tables, rotate
from fp8rl_jax.models.cache import KVBlock, KVCache
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.policy import Layer, Policy
from fp8rl_jax.precision import linear, quantize_input, quantize_per_tensor
from pallas_kernels.backend import Backend

Phase = Literal["train", "prefill", "decode"]


class ForwardResult(NamedTuple):
    """hidden: [b, t, hidden] after the final norm; cache: the block this call's tokens fill; observed: what `observe` returned
    in each layer, its leaves stacked over the layers."""

    hidden: Float[Array, "b t hidden"]
    cache: KVBlock | None
    observed: Any


def forward(
    policy: Policy,
    tokens: Int[Array, "b t"],
    positions: Int[Array, "b t"] | None = None,
    segment_ids: Int[Array, "b t"] | None = None,
    cache: KVCache | None = None,
    recipe: Recipe | None = None,
    phase: Phase = "train",
    *,
    remat: bool = False,
    keep_cache: bool = True,
    observe: Callable[..., Any] | None = None,
    backend: Backend = "auto",
) -> ForwardResult:
    """Runs the policy over `tokens`.

    Args:
        policy: stacked layers are scanned, a list of layers is unrolled; the dtype of the embedding is the compute dtype.
        tokens: int32.
        positions: rotary positions; default 0, 1, ... in each row.
        segment_ids: a token attends to earlier tokens of its own segment; 0 marks padding. Default: all ones.
        cache: see KVCache. With an own block, `segment_ids` is not used: a row attends to its slots up to the one it writes.
        recipe: default: nothing is quantized.
        phase: picks the recipe's side: "train" the trainer's formats, the others the rollout's.
        remat: recompute each layer in the backward pass instead of keeping its activations.
        keep_cache: False leaves `ForwardResult.cache` empty where nothing reads it.
        observe: called in each layer as observe(q, k, v, real, scales), after q/k-norm and rope and before anything is
            quantized: q, k, v [b, t, heads, dim]; real [b, t, 1, 1], False on padding; the layer's KV scales or None.

    Raises:
        ValueError: the recipe quantizes the cache and `cache.scales` is missing.
    """
    recipe = recipe or Recipe("bf16")
    formats = recipe.trainer if phase == "train" else recipe.rollout
    cache = cache or KVCache()
    if formats.key.quantized and cache.scales is None:
        raise ValueError(f"recipe {recipe.name!r} quantizes the KV cache: forward needs cache.scales")
    b, t = tokens.shape
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (b, t))
    if segment_ids is None:
        segment_ids = jnp.ones((b, t), jnp.int32)
    x = jnp.take(policy.embed_tokens.value, tokens, axis=0)
    step = _LayerStep(policy.config, formats, rope_tables(policy.config, positions), segment_ids, cache, observe, backend)
    run = jax.checkpoint(step, prevent_cse=False) if remat else step
    x, blocks, observed = (_scan if policy.stacked else _unroll)(run, policy, x, cache, keep_cache)
    block = KVBlock(*blocks, step.written_mask()) if keep_cache else None
    return ForwardResult(rms_norm(x, policy.norm.value, policy.config.rms_norm_eps), block, observed)


def rms_norm(x: Float[Array, "*b dim"], weight: Float[Array, " dim"], eps: float) -> Float[Array, "*b dim"]:
    """x / sqrt(mean(x^2) + eps) * weight (arXiv 1910.07467), in float32, result in x's dtype."""
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (normed * weight.astype(jnp.float32)).astype(x.dtype)


class _LayerStep:
    """One layer as a function of (x, layer, its cached keys and values, its KV scales)."""

    def __init__(self, config: PolicyConfig, formats: ForwardFormats, rope, segment_ids, cache: KVCache, observe, backend):
        self.config, self.formats, self.rope, self.cache, self.observe, self.backend = (
            config, formats, rope, cache, observe, backend,
        )  # fmt: skip
        self.segment_ids = segment_ids
        if cache.own is None:
            t = segment_ids.shape[1]
            same = segment_ids[:, :, None] == segment_ids[:, None, :]
            self.own_mask = same & jnp.tril(jnp.ones((t, t), bool))

    def written_mask(self):
        own = self.cache.own
        if own is None:
            return self.segment_ids > 0
        t = self.segment_ids.shape[1]
        return lax.dynamic_update_slice(own.mask, jnp.ones((own.mask.shape[0], t), bool), (0, self.cache.slot))

    def __call__(self, x, layer: Layer, shared, own, scales):
        c = self.config
        attended, written, observed = self.attention(
            rms_norm(x, layer.input_layernorm.value, c.rms_norm_eps), layer, shared, own, scales
        )
        x = x + attended
        return x + self.mlp(rms_norm(x, layer.post_attention_layernorm.value, c.rms_norm_eps), layer), written, observed

    def project(self, x, weight):
        quantized = quantize_input(x, weight.value, self.formats.activation, self.backend)
        return linear(quantized, weight.value, x.dtype, self.backend)

    def attention(self, x, layer: Layer, shared, own, scales):
        c, (b, t, _) = self.config, x.shape
        q, k, v = (self.project(x, w).reshape(b, t, -1, c.head_dim) for w in (layer.q_proj, layer.k_proj, layer.v_proj))
        if c.qk_norm:
            q, k = rms_norm(q, layer.q_norm.value, c.rms_norm_eps), rms_norm(k, layer.k_norm.value, c.rms_norm_eps)
        q, k = rotate(q, self.rope), rotate(k, self.rope)
        observed = self.observe(q, k, v, (self.segment_ids > 0)[..., None, None], scales) if self.observe else None
        score_scale, value_scale = c.head_dim**-0.5, 1.0
        if self.formats.key.quantized:
            sq, sk, sv = scales
            k, v = quantize_per_tensor(k, sk, self.formats.key), quantize_per_tensor(v, sv, self.formats.value)
            score_scale, value_scale = score_scale * sk, sv
            if self.formats.query.quantized:
                q, score_scale = quantize_per_tensor(q, sq, self.formats.query), score_scale * sq
        k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
        blocks = [] if shared is None else [Keys(*shared, self.cache.shared.mask[:, None, :])]
        if own is None:
            written = (k, v)
            blocks.append(Keys(k, v, self.own_mask))
        else:
            written = own.write(k, v)
            blocks.append(Keys(*own.read(*written), own.visible(t)[None]))
        out = attend(q, blocks, score_scale, value_scale, x.dtype).reshape(b, t, -1)
        return self.project(out, layer.o_proj), written, observed

    def mlp(self, x, layer: Layer):
        return self.project(jax.nn.silu(self.project(x, layer.gate_proj)) * self.project(x, layer.up_proj), layer.down_proj)


class _OwnBlock:
    """Read and write of one layer's own block; `layer` is None for a layer's own arrays, else an index into stacked ones."""

    def __init__(self, keys, values, slot, layer=None):
        self.keys, self.values, self.slot, self.layer = keys, values, slot, layer

    def write(self, k, v):
        if self.layer is None:
            return tuple(
                lax.dynamic_update_slice(old, new, (0, 0, self.slot, 0)) for old, new in ((self.keys, k), (self.values, v))
            )
        start = (self.layer, 0, 0, self.slot, 0)
        return tuple(lax.dynamic_update_slice(old, new[None], start) for old, new in ((self.keys, k), (self.values, v)))

    def read(self, keys, values):
        if self.layer is None:
            return keys, values
        return tuple(lax.dynamic_index_in_dim(x, self.layer, keepdims=False) for x in (keys, values))

    def visible(self, t):
        """[t, slots]: query i, written at slot + i, sees the slots up to its own."""
        slots = jnp.arange(self.keys.shape[-2])
        return slots[None, :] <= self.slot + jnp.arange(t)[:, None]


def _unroll(step: Callable, policy: Policy, x, cache: KVCache, keep_cache: bool):
    written, observed = [], []
    for i, layer in enumerate(policy.layers):
        shared = None if cache.shared is None else (cache.shared.keys[i], cache.shared.values[i])
        own = None if cache.own is None else _OwnBlock(cache.own.keys[i], cache.own.values[i], cache.slot)
        scales = None if cache.scales is None else (cache.scales.query[i], cache.scales.key[i], cache.scales.value[i])
        x, block, seen = step(x, layer, shared, own, scales)
        written.append(block)
        observed.append(seen)
    blocks = tuple(zip(*written, strict=True)) if keep_cache else None
    return x, blocks, jax.tree.map(lambda *leaves: jnp.stack(leaves), *observed)


def _scan(step: Callable, policy: Policy, x, cache: KVCache, keep_cache: bool):
    scales = None if cache.scales is None else (cache.scales.query, cache.scales.key, cache.scales.value)
    shared = None if cache.shared is None else (cache.shared.keys, cache.shared.values)
    layers = jnp.arange(policy.config.num_layers)

    def body(carry, inputs):
        x, own_blocks = carry
        layer, index, shared, scales = inputs
        own = None if own_blocks is None else _OwnBlock(*own_blocks, cache.slot, index)
        x, written, observed = step(x, layer, shared, own, scales)
        # an own block travels as the carry, so that a step writes one slot instead of copying the cache
        return (x, None if own is None else written), (written if own is None and keep_cache else None, observed)

    own = None if cache.own is None else (cache.own.keys, cache.own.values)
    (x, own), (blocks, observed) = lax.scan(body, (x, own), (policy.layers, layers, shared, scales))
    return x, blocks if own is None else own, observed
