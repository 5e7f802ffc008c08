"""One transformer layer: attention over a shared and an own block of keys, then a feed-forward
layer or experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from fp8rl_jax.config.recipe import LinearFormats
from fp8rl_jax.models.arithmetic import PLAIN, Arithmetic
from fp8rl_jax.models.cache import KVCache
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.moe import mixture
from fp8rl_jax.models.policy import Layer, Weight
from fp8rl_jax.models.rotary import rope_frequencies
from fp8rl_jax.precision import linear, quantize_input, quantize_per_tensor
from pallas_kernels.attention import (
    CHUNK,
    CHUNK_FROM,
    KeyBlock,
    TokenBlock,
    Tokens,
    attend_in_chunks,
    attention_mask,
    window_mask,
)
from pallas_kernels.backend import Backend
from pallas_kernels.cache_write import write_cache
from pallas_kernels.decode_attention import KeyValues, combine_score_scales, decode_attention
from pallas_kernels.matmul import flatten_many_rows


class LayerInputs(NamedTuple):
    """What a layer reads besides the hidden states and its weights; None where there is nothing of
    the kind.

    Attributes:
        shared: keys and values of the prompts' block.
        scales: KV scales of Q, K and V.
        window: positions that a token sees, int32.
        frequencies: rotary frequencies, where they differ between layers.
        routes: expert ids to replay, [b, t, k], -1 where the router decides.
    """

    shared: tuple[Array, Array] | None = None
    scales: tuple[Array, Array, Array] | None = None
    window: Int[Array, ""] | None = None
    frequencies: Float[Array, " half"] | None = None
    routes: Int[Array, "b t k"] | None = None


class LayerOutputs(NamedTuple):
    """What a layer leaves besides the hidden states: its keys and values, what `observe` returned,
    and its expert ids."""

    block: tuple[Array, Array] | None
    observed: Any
    routes: Int[Array, "b t k"] | None


class OwnBlock:
    """Read and write of one layer's own block; `layer` is None for a layer's own arrays, else an
    index into stacked ones."""

    def __init__(self, keys, values, slot, layer=None):
        self.keys, self.values, self.slot, self.layer = keys, values, slot, layer

    def write(self, k, v):
        if self.layer is None:
            return tuple(
                lax.dynamic_update_slice(old, new, (0, 0, self.slot, 0))
                for old, new in ((self.keys, k), (self.values, v))
            )
        start = (self.layer, 0, 0, self.slot, 0)
        return tuple(
            lax.dynamic_update_slice(old, new[None], start)
            for old, new in ((self.keys, k), (self.values, v))
        )

    def write_token(self, tokens, rope, scales, query_scale, backend):
        """One token a row: (keys, values) with it in them, and its queries, all rotated and
        quantized on the way.

        Args:
            tokens: queries, keys and values before rotation, [rows, 1, heads, head_dim].
            rope: cos and sin of the tokens.
        """
        (q, k, v), rows = (x[:, 0] for x in tokens), len(tokens[0])
        row = jnp.arange(rows, dtype=jnp.int32) + (0 if self.layer is None else self.layer * rows)
        slot = jnp.full(rows, self.slot, jnp.int32)
        flat = (x.reshape(-1, *x.shape[-3:]) for x in (self.keys, self.values))
        keys, values, q = write_cache(
            *flat,
            k,
            v,
            *(x[:, 0] for x in rope),
            row,
            slot,
            scales,
            q,
            query_scale,
            backend=backend,
        )
        return (keys.reshape(self.keys.shape), values.reshape(self.values.shape)), q

    def read(self, keys, values):
        if self.layer is None:
            return keys, values
        return tuple(
            lax.dynamic_index_in_dim(x, self.layer, keepdims=False) for x in (keys, values)
        )

    def visible(self, t, window):
        """[t, slots]: query i, written at slot + i, sees the slots up to its own and within the
        window."""
        slots, written = jnp.arange(self.keys.shape[-2]), self.slot + jnp.arange(t)
        seen = slots[None, :] <= written[:, None]
        return seen if window is None else seen & window_mask(written, slots, window)


class LayerStep:
    """One layer as a function of (x, layer, own block, inputs), for a call whose tokens, positions
    and cache are given."""

    def __init__(
        self,
        config: PolicyConfig,
        formats: LinearFormats,
        positions: Int[Array, "b t"],
        segment_ids: Int[Array, "b t"],
        cache: KVCache,
        observe: Callable[..., Any] | None,
        backend: Backend,
        prefix_ids: Int[Array, "b t"] | None = None,
        attention_chunk: int | None = None,
        arithmetic: Arithmetic = PLAIN,
        calibrate: Callable[[Any], tuple[Array, Array, Array]] | None = None,
    ):
        self.calibrate = calibrate
        self.config, self.formats, self.cache, self.observe, self.backend = (
            config,
            formats,
            cache,
            observe,
            backend,
        )
        self.positions, self.segment_ids, self.arithmetic = positions, segment_ids, arithmetic
        # cuDNN's attention serves prefill and training where it can; there is no kernel of ours to
        # insist on
        self.attend = partial(arithmetic.attend, backend="auto" if backend == "hopper" else backend)
        self.rope = arithmetic.rope_tables(rope_frequencies(config), positions)
        if cache.shared is not None:
            self.shared_lengths = cache.shared.mask.sum(1, dtype=jnp.int32)
        if cache.own is None:
            self.tokens = Tokens.of_rows(segment_ids, positions, prefix_ids)
            t = segment_ids.shape[1]
            pairs = t * (t + (0 if cache.shared is None else cache.shared.mask.shape[1]))
            self.chunk = (
                (CHUNK if pairs >= CHUNK_FROM else 0)
                if attention_chunk is None
                else attention_chunk
            )
            if not self.chunk:
                self.own_mask = attention_mask(self.tokens, self.tokens)

    def __call__(
        self, x, layer: Layer, own: OwnBlock | None, inputs: LayerInputs
    ) -> tuple[Array, LayerOutputs]:
        before_attention, after_attention, before_mlp, after_mlp = layer.norms
        attended, block, observed = self.attention(
            self.norm(x, before_attention), layer, own, inputs
        )
        add = self.arithmetic.add
        x = add(x, self.norm(attended, after_attention))
        normed = self.norm(x, before_mlp)
        if layer.experts is None:
            return add(x, self.norm(self.mlp(normed, layer), after_mlp)), LayerOutputs(
                block, observed, None
            )
        mixed, routes = self.mixture(normed, layer, inputs.routes)
        return add(x, self.norm(mixed, after_mlp)), LayerOutputs(block, observed, routes)

    def norm(self, x, weight: Weight | None):
        """RMSNorm over the last axis; x itself where the layer has no such norm."""
        if weight is None:
            return x
        return self.arithmetic.rms_norm(
            x, weight.value, self.config.rms_norm_eps, self.config.norm_offset
        )

    def project(self, x, *weights):
        """The product of x with each weight; x is quantized once for all weights of a kind, and
        kept once for the backward."""
        rows, inputs, out = flatten_many_rows(x), {}, []
        for weight in (w.value for w in weights):
            kind = jax.tree.structure(weight)
            if kind not in inputs:
                inputs[kind] = self.operand(rows, weight)
            product = linear(inputs[kind], weight, x.dtype, self.backend, self.arithmetic.exact)
            out.append(product.reshape(*x.shape[:-1], -1))
        return out

    def operand(self, x, weight):
        """x in the form that `weight` multiplies."""
        return quantize_input(x, weight, self.formats.activation, self.backend)

    def mixture(self, x, layer: Layer, routes):
        return mixture(
            x,
            layer,
            self.config.experts,
            self.formats.activation,
            routes,
            self.backend,
            self.arithmetic,
        )

    def heads(self, x, bias):
        x = x if bias is None else self.arithmetic.add(x, jnp.broadcast_to(bias.value, x.shape))
        return x.reshape(*x.shape[:2], -1, self.config.head_dim)

    def attention(self, x, layer: Layer, own: OwnBlock | None, inputs: LayerInputs):
        b, t, _ = x.shape
        products = self.project(x, layer.q_proj, layer.k_proj, layer.v_proj)
        q, k, v = map(self.heads, products, (layer.q_bias, layer.k_bias, layer.v_bias))
        q, k = self.norm(q, layer.q_norm), self.norm(k, layer.k_norm)
        rope = (
            self.rope
            if inputs.frequencies is None
            else self.arithmetic.rope_tables(inputs.frequencies, self.positions)
        )
        if own is not None and t == 1 and not self.arithmetic.exact and self.observe is None:
            out, written = self.decode((q, k, v), rope, own, inputs, x.dtype)
            return *self.project(out.reshape(b, 1, -1), layer.o_proj), written, None
        q, k = self.arithmetic.rotate(q, rope), self.arithmetic.rotate(k, rope)
        observed = (
            self.observe(q, k, v, (self.segment_ids > 0)[..., None, None], inputs.scales)
            if self.observe
            else None
        )
        sq = sk = sv = None
        if self.formats.key.quantized:
            sq, sk, sv = inputs.scales if self.calibrate is None else self.calibrate(observed)
            k, v = (
                quantize_per_tensor(k, sk, self.formats.key),
                quantize_per_tensor(v, sv, self.formats.value),
            )
            q, sq = (
                (quantize_per_tensor(q, sq, self.formats.query), sq)
                if self.formats.query.quantized
                else (q, None)
            )
        k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
        score_scale, value_scale = (
            combine_score_scales(self.config.score_scale, sq, sk),
            1.0 if sv is None else sv,
        )
        if own is None and self.chunk:
            blocks = self.token_keys(k, v, inputs.shared)
            out = attend_in_chunks(
                q, blocks, inputs.window, score_scale, value_scale, x.dtype, self.chunk, self.attend
            )
            return *self.project(out.reshape(b, t, -1), layer.o_proj), (k, v), observed
        blocks = (
            []
            if inputs.shared is None
            else [KeyBlock(*inputs.shared, self.shared_mask(inputs.window))]
        )
        if own is None:
            written, mask = (k, v), self.own_mask
            if inputs.window is not None:
                mask = mask & window_mask(self.positions, self.positions, inputs.window)
            blocks.append(KeyBlock(k, v, mask))
        else:
            written = own.write(k, v)
            blocks.append(KeyBlock(*own.read(*written), own.visible(t, inputs.window)[None]))
        out = self.attend(q, blocks, score_scale, value_scale, x.dtype).reshape(b, t, -1)
        return *self.project(out, layer.o_proj), written, observed

    def decode(self, tokens, rope, own: OwnBlock, inputs: LayerInputs, dtype):
        """One token a row, over the prompts' block and the row's own slots up to the one that it
        now writes."""
        sq, sk, sv = inputs.scales if self.formats.key.quantized else (None, None, None)
        sq = sq if self.formats.query.quantized else None
        written, q = own.write_token(
            tokens, rope, None if sk is None else (sk, sv), sq, self.backend
        )
        lengths = jnp.full(len(q), own.slot + 1, jnp.int32)
        caches = [KeyValues(*own.read(*written), lengths)]
        if inputs.shared is not None:
            caches.insert(0, KeyValues(*inputs.shared, self.shared_lengths))
        window, score_scale = inputs.window, self.config.score_scale
        out = decode_attention(
            q, tuple(caches), score_scale, sq, sk, sv, window, dtype, backend=self.backend
        )
        return out, written

    def token_keys(self, k, v, shared) -> list[TokenBlock]:
        blocks = [TokenBlock(k, v, self.tokens, self.tokens)]
        if shared is not None:
            slots = Tokens.of_block(self.cache.shared.mask, self.cache.shared.positions)
            blocks.insert(0, TokenBlock(*shared, self.tokens.after_block(), slots))
        return blocks

    def shared_mask(self, window):
        """[rows, 1 or the queries of all samples that share the row, slots]."""
        shared = self.cache.shared
        if window is None:
            return shared.mask[:, None, :]
        rows, slots = shared.mask.shape
        queries = self.positions.reshape(rows, -1)
        return shared.mask[:, None, :] & window_mask(queries, shared.positions, window)

    def mlp(self, x, layer: Layer):
        gate, up = self.project(x, layer.gate_proj, layer.up_proj)
        return self.project(
            self.arithmetic.gated(gate, up, self.config.activation), layer.down_proj
        )[0]
