"""One forward pass for scoring, prefill and decode.

The three differ in their inputs only: which keys are cached, which slots are written, and in which
form the policy is. A train-rollout mismatch can then come from formats and reduction orders, never
from a second definition of the model.

    train     tokens [b, t], no cache or a prefix cache    the trainer's form, differentiable
    prefill   prompts [p, s], no cache                     the rollout's form; returns their block
    decode    one token a row, prefix and completion       the rollout's form; writes the completion
              cache                                        cache at `slot`
    pages     any number of tokens a row, pages            the rollout's form; writes them behind a
                                                           row's own

From top to bottom: positions, one layer (attention over the two parts of the cache, then a
feed-forward layer or experts), the stack of layers, the whole pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from fp8rl_jax.config.formats import TensorFormat
from fp8rl_jax.models.cache import KVBlock, KVCache, Pages
from fp8rl_jax.models.config import LinearRopeScaling, PolicyConfig
from fp8rl_jax.models.moe import mixture
from fp8rl_jax.models.policy import Layer, Policy, Tensor, equal_runs, run_of_layers
from fp8rl_jax.precision import Compute, as_weight, element_dtype, quantize_per_tensor
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
from pallas_kernels.cache_write import write_cache
from pallas_kernels.decode_attention import KeyValues, combine_score_scales, decode_attention
from pallas_kernels.matmul import flatten_many_rows


def rope_frequencies(config: PolicyConfig) -> Float[Array, " half"]:
    """Compute the angular frequency of each pair of a head's dimensions, float32.

    Llama 3's rescaling (arXiv 2407.21783) or a linear one (arXiv 2306.15595) is applied.
    """
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


def _layer_frequencies(config: PolicyConfig) -> Float[Array, "layers half"] | None:
    """Compute the frequencies of each layer where those with a window have their own, else None."""
    if config.local_rope_theta is None:
        return None
    local, full = _frequencies(config.local_rope_theta, config.head_dim), rope_frequencies(config)
    return jnp.stack(
        [full if i in config.full_attention_layers else local for i in range(config.num_layers)]
    )


def _frequencies(theta: float, head_dim: int) -> Float[Array, " half"]:
    half = head_dim // 2
    return theta ** (-jnp.arange(half, dtype=jnp.float32) / half)


class LayerInputs(NamedTuple):
    """What a layer reads besides the hidden states and its weights; None where there is nothing.

    Attributes:
        prefix: keys and values of the prefix cache.
        scales: KV scales of Q, K and V, float32 [] or [kv_heads].
        window: positions that a token sees, int32.
        frequencies: rotary frequencies, where they differ between layers.
        routes: expert ids to replay, [b, t, k], -1 where the router decides.
    """

    prefix: tuple[Array, Array] | None = None
    scales: tuple[Array, Array, Array] | None = None
    window: Int[Array, ""] | None = None
    frequencies: Float[Array, " half"] | None = None
    routes: Int[Array, "b t k"] | None = None


class LayerOutputs(NamedTuple):
    """What a layer leaves besides the hidden states: its keys and values, what `observe` returned,
    and its expert ids."""

    block: tuple[Any, Any] | None
    observed: Any
    routes: Int[Array, "b t k"] | None


class CompletionCache:
    """One layer's part of the completion cache.

    Args:
        keys, values: the layer's own arrays, or stacks over layers.
        slot: first slot that the call writes.
        layer: index into the stacks; None: the arrays are the layer's own.
    """

    def __init__(self, keys: Array, values: Array, slot: Array, layer: Array | None = None):
        self.keys, self.values, self.slot, self.layer = keys, values, slot, layer

    def write(self, k: Array, v: Array) -> tuple[Array, Array]:
        """Write keys and values [rows, kv_heads, t, head_dim]; returns the cache."""
        start = (0, 0, self.slot, 0)
        if self.layer is not None:
            start, k, v = (self.layer, *start), k[None], v[None]
        keys = lax.dynamic_update_slice(self.keys, k, start)
        return keys, lax.dynamic_update_slice(self.values, v, start)

    def write_token(self, write: Callable, tokens, rope):
        """Write one token a row, rotated and quantized on the way.

        Args:
            write: pallas_kernels.cache_write's, with what it needs besides arrays and places.
            tokens: queries, keys and values before rotation, [rows, 1, heads, head_dim].
            rope: cos and sin of the tokens.

        Returns:
            (keys, values) of the cache, and the queries.
        """
        (q, k, v), rows = (x[:, 0] for x in tokens), len(tokens[0])
        row = jnp.arange(rows, dtype=jnp.int32) + (0 if self.layer is None else self.layer * rows)
        slot = jnp.full(rows, self.slot, jnp.int32)
        flat = (x.reshape(-1, *x.shape[-3:]) for x in (self.keys, self.values))
        cos, sin = (x[:, 0] for x in rope)
        keys, values, q = write(*flat, k, v, cos, sin, row, slot, q=q)
        return (keys.reshape(self.keys.shape), values.reshape(self.values.shape)), q

    def read(self, keys: Array, values: Array) -> tuple[Array, Array]:
        """Take the layer's part of what `write` returned."""
        if self.layer is None:
            return keys, values
        keys = lax.dynamic_index_in_dim(keys, self.layer, keepdims=False)
        return keys, lax.dynamic_index_in_dim(values, self.layer, keepdims=False)

    def held(self, keys: Array, values: Array, rows: int) -> list[KeyValues]:
        """List what one token a row attends to, of what `write_token` returned."""
        lengths = jnp.full(rows, self.slot + 1, jnp.int32)
        return [KeyValues(*self.read(keys, values), lengths)]

    def blocks(self, keys: Array, values: Array, t: int, window: Array | None) -> list[KeyBlock]:
        """List what t tokens a row attend to, of what `write` returned."""
        return [KeyBlock(*self.read(keys, values), self.visible(t, window)[None])]

    def visible(self, t: int, window: Array | None) -> Array:
        """Mask the slots [t, slots] that each query sees.

        Query i, written at slot + i, sees the slots up to its own and within the window.
        """
        slots, written = jnp.arange(self.keys.shape[-2]), self.slot + jnp.arange(t)
        mask = slots[None, :] <= written[:, None]
        return mask if window is None else mask & window_mask(written, slots, window)


class PagePlaces:
    """Where the tokens of a call go in its pages, and what they see there: the same in each layer.

    Args:
        pages: of the call.
        real: [rows, t], tokens that there are; a row's come first.
    """

    def __init__(self, pages: Pages, real: Array):
        self.pages = pages
        layer = jax.tree.leaves(pages.keys)[0]
        self.count, self.size = layer.shape[-4], layer.shape[-2]
        self.at = pages.own_lengths[:, None] + jnp.arange(real.shape[1], dtype=jnp.int32)
        column = self.at // self.size
        page = jnp.take_along_axis(pages.own, column, axis=1, mode="clip")
        inside = real & (column < pages.own.shape[1])
        self.page = jnp.where(inside, page, self.count).astype(jnp.int32)
        self.slot = self.at % self.size
        self.own_lengths = pages.own_lengths + real.sum(1, dtype=jnp.int32)
        before = pages.prefix_lengths
        self.start = 0 if before is None else before[:, None]

    def held(self) -> list[tuple[Array, Array]]:
        """List the page tables, each with the tokens in it after the call."""
        pages, own = self.pages, (self.pages.own, self.own_lengths)
        if pages.prefix is None or pages.prefix_lengths is None:
            return [own]
        return [(pages.prefix, pages.prefix_lengths), own]

    def masks(self, window: Array | None) -> list[Array]:
        """Mask the slots of each table that a token sees, [rows, t, slots]."""
        first, masks = jnp.zeros_like(self.at[:, :1]), []
        for table, lengths in self.held():
            place = first + jnp.arange(table.shape[1] * self.size)
            last = first + lengths[:, None]
            before = jnp.minimum(last, self.start + self.at + 1)
            visible = place[:, None] < before[..., None]
            if window is not None:
                visible &= window_mask(self.start + self.at, place, window)
            masks.append(visible)
            first = last
        return masks


class PagedRows:
    """One layer's pages, with the methods of `CompletionCache`.

    Args:
        keys, values: the layer's own arrays, or stacks over layers.
        places: of the call.
        layer: index into the stacks; None: the arrays are the layer's own.
    """

    def __init__(self, keys: Array, values: Array, places: PagePlaces, layer: Array | None = None):
        self.keys, self.values, self.places = keys, values, places
        self.first = 0 if layer is None else layer * places.count

    def write(self, k: Array, v: Array) -> tuple[Array, Array]:
        """Write keys and values [rows, kv_heads, t, head_dim]; returns the cache."""
        page = self.at(self.places.page).reshape(-1)
        slot = self.places.slot.reshape(-1)

        def written(cache: Array, new: Array) -> Array:
            flat = cache.reshape(-1, *cache.shape[-3:])
            new = jnp.moveaxis(new, 2, 1).reshape(-1, *flat.shape[1::2])
            return flat.at[page, :, slot].set(new, mode="drop").reshape(cache.shape)

        return written(self.keys, k), written(self.values, v)

    def write_token(self, write: Callable, tokens, rope):
        """Write one token a row, as `CompletionCache.write_token`."""
        q, k, v = (x[:, 0] for x in tokens)
        cos, sin = (x[:, 0] for x in rope)
        flat = (x.reshape(-1, *x.shape[-3:]) for x in (self.keys, self.values))
        page, slot = self.at(self.places.page)[:, 0], self.places.slot[:, 0]
        keys, values, q = write(*flat, k, v, cos, sin, page, slot, q=q)
        return (keys.reshape(self.keys.shape), values.reshape(self.values.shape)), q

    def held(self, keys: Array, values: Array, rows: int) -> list[KeyValues]:
        """List what one token a row attends to, of what `write_token` returned."""
        flat = tuple(x.reshape(-1, *x.shape[-3:]) for x in (keys, values))
        return [
            KeyValues(*flat, lengths, self.at(table), self.places.size)
            for table, lengths in self.places.held()
        ]

    def blocks(self, keys: Array, values: Array, t: int, window: Array | None) -> list[KeyBlock]:
        """List what t tokens a row attend to, of what `write` returned."""
        places, flat = self.places, [x.reshape(-1, *x.shape[-3:]) for x in (keys, values)]
        return [
            KeyBlock(*(self.rows(x, table) for x in flat), mask)
            for (table, _), mask in zip(places.held(), places.masks(window), strict=True)
        ]

    def rows(self, flat: Array, table: Array) -> Array:
        """Gather the pages of each row, [rows, kv_heads, slots, head_dim]."""
        taken = flat.at[self.at(table)].get(mode="clip")
        return jnp.moveaxis(taken, 2, 1).reshape(len(table), flat.shape[1], -1, flat.shape[3])

    def at(self, pages: Array) -> Array:
        """Number pages of this layer in the flattened stacks; those outside stay outside."""
        if isinstance(self.first, int):
            return pages
        total = self.keys.shape[0] * self.places.count
        return jnp.where(pages < self.places.count, pages + self.first, total)


LayerCache = CompletionCache | PagedRows
CachePart = tuple[Array, Array, Array | None]
"""Keys and values of the completion cache, and the index of a layer where they are stacks."""


class TransformerLayer:
    """One layer as a function of (x, weights, completion cache, inputs), for a call whose tokens,
    positions and cache are given; arguments as in `forward`."""

    def __init__(
        self,
        config: PolicyConfig,
        compute: Compute,
        positions: Int[Array, "b t"],
        segment_ids: Int[Array, "b t"],
        cache: KVCache,
        prefix_ids: Int[Array, "b t"] | None = None,
        observe: Callable[..., Any] | None = None,
    ):
        self.config, self.compute, self.cache, self.observe = config, compute, cache, observe
        self.positions, self.segment_ids = positions, segment_ids
        self.rope = compute.rope_tables(rope_frequencies(config), positions)
        if cache.prefix is not None:
            self.prefix_lengths = cache.prefix.mask.sum(1, dtype=jnp.int32)
        if isinstance(cache.completion, Pages):
            self.places = PagePlaces(cache.completion, segment_ids > 0)
        if cache.completion is None:
            self.tokens = Tokens.of_rows(segment_ids, positions, prefix_ids)
            t, chunk = segment_ids.shape[1], compute.attention_chunk
            if chunk is None:
                pairs = t * (t + (0 if cache.prefix is None else cache.prefix.mask.shape[1]))
                chunk = CHUNK if pairs >= CHUNK_FROM else 0
            self.chunk = chunk
            if not chunk:
                self.causal_mask = attention_mask(self.tokens, self.tokens)

    def __call__(
        self, x: Array, layer: Layer, part: CachePart | None, inputs: LayerInputs
    ) -> tuple[Array, LayerOutputs]:
        completion = None if part is None else self.layer_cache(*part)
        before_attention, after_attention, before_mlp, after_mlp = layer.norms
        attended, block, observed = self.attention(
            self.norm(x, before_attention), layer, completion, inputs
        )
        add = self.compute.add
        x = add(x, self.norm(attended, after_attention))
        normed, routes = self.norm(x, before_mlp), None
        if layer.experts is None:
            mixed = self.mlp(normed, layer)
        else:
            mixed, routes = self.mixture(normed, layer, inputs.routes)
        return add(x, self.norm(mixed, after_mlp)), LayerOutputs(block, observed, routes)

    def layer_cache(self, keys: Array, values: Array, index: Array | None) -> LayerCache:
        """Give a layer's part of the completion cache its methods."""
        if isinstance(self.cache.completion, Pages):
            return PagedRows(keys, values, self.places, index)
        assert self.cache.slot is not None
        return CompletionCache(keys, values, self.cache.slot, index)

    def norm(self, x: Array, weight: Tensor | None) -> Array:
        """RMSNorm over the last axis; x itself where the layer has no such norm."""
        if weight is None:
            return x
        config = self.config
        return self.compute.rms_norm(
            x, weight.value, config.rms_norm_eps, config.family.norm_offset
        )

    def project(self, x: Array, *weights: Tensor) -> list[Array]:
        """Multiply x by each weight.

        Weights of one kind share a prepared input, which is quantized once and kept once for the
        backward.
        """
        rows, prepared, out = flatten_many_rows(x), {}, []
        for weight in (as_weight(w.value) for w in weights):
            kind = jax.tree.structure(weight)
            if kind not in prepared:
                prepared[kind] = self.prepare(rows, weight)
            product = weight.multiply(prepared[kind], x.dtype, self.compute)
            out.append(product.reshape(*x.shape[:-1], -1))
        return out

    def prepare(self, x: Array, weight: Any) -> Any:
        """Bring x into the form that `weight` multiplies."""
        return weight.prepare(x, self.compute)

    def mlp(self, x: Array, layer: Layer) -> Array:
        gate, up = self.project(x, layer.gate_proj, layer.up_proj)
        inner = self.compute.gated(gate, up, self.config.family.activation)
        return self.project(inner, layer.down_proj)[0]

    def mixture(self, x: Array, layer: Layer, routes: Array | None) -> tuple[Array, Array]:
        assert self.config.experts is not None
        return mixture(x, layer, self.config.experts, self.compute, routes)

    def attention(
        self, x: Array, layer: Layer, completion: LayerCache | None, inputs: LayerInputs
    ) -> tuple[Array, tuple[Array, Array], Any]:
        """Compute attention's output, the keys and values that it leaves, and what is observed."""
        (b, t, _), compute = x.shape, self.compute
        products = self.project(x, layer.q_proj, layer.k_proj, layer.v_proj)
        q, k, v = map(self.heads, products, (layer.q_bias, layer.k_bias, layer.v_bias))
        q, k = self.norm(q, layer.q_norm), self.norm(k, layer.k_norm)
        rope = self.rope
        if inputs.frequencies is not None:
            rope = compute.rope_tables(inputs.frequencies, self.positions)
        if completion is not None and t == 1 and not compute.exact and self.observe is None:
            out, written = self.decode((q, k, v), rope, completion, inputs, x.dtype)
            return self.project(out.reshape(b, 1, -1), layer.o_proj)[0], written, None
        q, k = compute.rotate(q, rope), compute.rotate(k, rope)
        scales, observed = inputs.scales, None
        if self.observe is not None:
            real = (self.segment_ids > 0)[..., None, None]
            observed, scales = self.observe(q, k, v, real, scales)
        sq = sk = sv = None
        if compute.key.quantized:
            assert scales is not None
            sq, sk, sv = scales
            k, v = quantize_heads(k, sk, compute.key), quantize_heads(v, sv, compute.value)
            if compute.query.quantized:
                q = quantize_heads(q, sq, compute.query)
            else:
                sq = None
        k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
        score_scale = combine_score_scales(self.config.score_scale, sq, sk)
        value_scale = 1.0 if sv is None else sv
        if completion is None and self.chunk:
            blocks = self.token_keys(k, v, inputs.prefix)
            out = attend_in_chunks(
                q,
                blocks,
                inputs.window,
                score_scale,
                value_scale,
                x.dtype,
                self.chunk,
                compute.attend,
            )
            return self.project(out.reshape(b, t, -1), layer.o_proj)[0], (k, v), observed
        blocks = []
        if inputs.prefix is not None:
            blocks.append(KeyBlock(*inputs.prefix, self.prefix_mask(inputs.window)))
        if completion is None:
            written, mask = (k, v), self.causal_mask
            if inputs.window is not None:
                mask = mask & window_mask(self.positions, self.positions, inputs.window)
            blocks.append(KeyBlock(k, v, mask))
        else:
            written = completion.write(k, v)
            blocks += completion.blocks(*written, t, inputs.window)
        out = compute.attend(q, blocks, score_scale, value_scale, x.dtype).reshape(b, t, -1)
        return self.project(out, layer.o_proj)[0], written, observed

    def heads(self, x: Array, bias: Tensor | None) -> Array:
        """Split a projection, its bias added, into heads [b, t, heads, head_dim]."""
        if bias is not None:
            x = self.compute.add(x, jnp.broadcast_to(bias.value, x.shape))
        return x.reshape(*x.shape[:2], -1, self.config.head_dim)

    def decode(self, tokens, rope, completion: LayerCache, inputs: LayerInputs, dtype):
        """Attend with one token a row, over the prefix cache and the row's slots up to its own."""
        compute = self.compute
        sq = sk = sv = None
        write = partial(write_cache, backend=compute.backend)
        if compute.key.quantized:
            assert inputs.scales is not None
            sq, sk, sv = inputs.scales
            sq, stored = sq if compute.query.quantized else None, element_dtype(compute.key)
            write = partial(write, scales=(sk, sv), query_scale=sq, fp8_dtype=stored)
        written, q = completion.write_token(write, tokens, rope)
        caches = completion.held(*written, len(q))
        if inputs.prefix is not None:
            caches.insert(0, KeyValues(*inputs.prefix, self.prefix_lengths))
        window, score_scale = inputs.window, self.config.score_scale
        out = decode_attention(
            q, tuple(caches), score_scale, sq, sk, sv, window, dtype, backend=compute.backend
        )
        return out, written

    def token_keys(self, k: Array, v: Array, prefix) -> list[TokenBlock]:
        """List the blocks of keys as chunked attention takes them."""
        blocks = [TokenBlock(k, v, self.tokens, self.tokens)]
        if prefix is not None:
            assert self.cache.prefix is not None
            slots = Tokens.of_block(self.cache.prefix.mask, self.cache.prefix.positions)
            blocks.insert(0, TokenBlock(*prefix, self.tokens.after_block(), slots))
        return blocks

    def prefix_mask(self, window: Array | None) -> Array:
        """Mask the slots [rows, 1 or the queries of all samples that share the row, slots]."""
        prefix = self.cache.prefix
        assert prefix is not None
        if window is None:
            return prefix.mask[:, None, :]
        assert prefix.positions is not None
        rows, slots = prefix.mask.shape
        queries = self.positions.reshape(rows, -1)
        return prefix.mask[:, None, :] & window_mask(queries, prefix.positions, window)


def quantize_heads(
    x: Float[Array, "b t heads dim"], scale: Float[Array, "*kv_heads"], fmt: TensorFormat
) -> Float[Array, "b t heads dim"]:
    """Quantize queries, keys or values for the cache.

    Args:
        scale: float32 [] or [kv_heads]; a query's is that of its KV head's group.
    """
    if scale.ndim:
        scale = jnp.repeat(scale, x.shape[2] // len(scale))[:, None]
    return quantize_per_tensor(x, scale, fmt)


class ForwardResult(NamedTuple):
    """What `forward` returns.

    Attributes:
        hidden: [b, t, hidden] after the final norm.
        cache: the block that this call's tokens fill; None where they went into pages.
        observed: what `observe` returned in each layer, its leaves stacked over the layers.
        routes: the experts that each token used in each layer that has some.
        pages: the pages with the tokens of this call.
    """

    hidden: Float[Array, "b t hidden"]
    cache: KVBlock | None
    observed: Any
    routes: Int[Array, "b t sparse k"] | None = None
    pages: Pages | None = None


def forward(
    policy: Policy,
    tokens: Int[Array, "b t"],
    positions: Int[Array, "b t"] | None = None,
    segment_ids: Int[Array, "b t"] | None = None,
    cache: KVCache | None = None,
    *,
    prefix_ids: Int[Array, "b t"] | None = None,
    routes: Int[Array, "b t sparse k"] | None = None,
    keep_cache: bool = True,
    observe: Callable[..., Any] | None = None,
) -> ForwardResult:
    """Run the policy over `tokens`.

    Args:
        policy: in the form of a side (models.forms), or plain weights, which are multiplied as they
            are. Stacked layers are scanned, a list of layers is unrolled; the dtype of the
            embedding is the compute dtype. `policy.compute` has kernels, KV formats, remat.
        tokens: int32.
        positions: rotary positions; default 0, 1, ... in each row.
        segment_ids: a token attends to earlier tokens of its own segment; 0 marks padding. Default:
            all ones.
        cache: see KVCache. With a block as completion cache `segment_ids` is not used: a row
            attends to its slots up to the one that it writes. Into pages a row writes its tokens
            that are no padding, which come first.
        prefix_ids: the segment that a token's own one continues: it attends to that, too, where it
            stands earlier in the row (several completions behind one copy of their prompt). -1:
            none, the default.
        routes: expert ids to replay, as `ForwardResult.routes` of another forward gave them. A
            token with a -1 in a layer is routed anew there. Gate weights are always the policy's
            own (R3, arXiv 2510.11370).
        keep_cache: False leaves `ForwardResult.cache` empty where nothing reads it.
        observe: called in each layer as observe(q, k, v, real, scales), after q/k-norm and rope and
            before anything is quantized: q, k, v [b, t, heads, dim]; real [b, t, 1, 1], False on
            padding; the layer's KV scales (`policy.kv_scales`) or None. Returns what is kept of it,
            and the scales that the layer quantizes its cache with.

    Raises:
        ValueError: the policy has an FP8 cache and there are no scales for it; it has a sliding
            window and the prefix cache no positions; `routes` are not those of its experts.
    """
    cache, config, compute = cache or KVCache(), policy.config, policy.compute
    _check(policy, tokens, cache, routes, observe)
    b, t = tokens.shape
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (b, t))
    if segment_ids is None:
        segment_ids = jnp.ones((b, t), jnp.int32)
    x = embed(policy, tokens)
    layer = TransformerLayer(config, compute, positions, segment_ids, cache, prefix_ids, observe)
    run = jax.checkpoint(layer, prevent_cse=False) if compute.remat else layer
    x, outputs = (_scan if policy.stacked else _unroll)(run, policy, x, cache, routes, keep_cache)
    block = pages = None
    if isinstance(cache.completion, Pages):
        assert outputs.block is not None
        keys, values = outputs.block
        pages = replace(cache.completion, keys=keys, values=values)
    elif keep_cache:
        assert outputs.block is not None
        if cache.completion is None:
            block = KVBlock(*outputs.block, segment_ids > 0, positions)
        else:
            assert cache.slot is not None
            mask = cache.completion.mask
            written = jnp.ones((mask.shape[0], t), bool)
            mask = lax.dynamic_update_slice(mask, written, (0, cache.slot))
            block = KVBlock(*outputs.block, mask)
    hidden = layer.norm(x, policy.norm)
    return ForwardResult(hidden, block, outputs.observed, outputs.routes, pages)


def forward_completions(
    policy: Policy,
    prompts: Int[Array, "p s"],
    lengths: Int[Array, " p"],
    tokens: Int[Array, "b t"],
    segment_ids: Int[Array, "b t"],
    prompt_routes: Int[Array, "p s sparse k"] | None = None,
    routes: Int[Array, "b t sparse k"] | None = None,
    observe: Callable[..., Any] | None = None,
) -> tuple[Float[Array, "p s hidden"], Float[Array, "b t hidden"], Any]:
    """Run the policy over prompts and over completions behind them, b / p of each prompt.

    The values of two calls of `forward`, the second with the first's block as prefix cache. Here
    both take a layer at once, so the two gradients of its weights are added there; of two calls
    each fills a stack over all layers.

    Args:
        policy, segment_ids, routes, observe: as in `forward`, of a trainer: no FP8 cache, and
            scales for `observe` alone.
        lengths: tokens of each prompt, from its first slot on.

    Returns:
        Hidden states after the final norm, of the prompts and of the completions; and the sum of
        what `observe` returned for the two.

    Raises:
        ValueError: as `forward`.
    """
    config, compute = policy.config, policy.compute
    for given, replayed in ((prompts, prompt_routes), (tokens, routes)):
        _check(policy, given, KVCache(), replayed, None)
    slots = jnp.broadcast_to(jnp.arange(prompts.shape[1], dtype=jnp.int32), prompts.shape)
    real = slots < lengths[:, None]
    n, t = len(tokens) // len(prompts), tokens.shape[1]
    positions = jnp.repeat(lengths, n)[:, None] + jnp.arange(t, dtype=jnp.int32)
    # keys and values come from the layer itself
    behind = KVCache(KVBlock((), (), real, slots))
    cache, made = KVCache(), partial(TransformerLayer, config, compute)
    first = made(slots, real.astype(jnp.int32), cache, observe=observe)
    second = made(positions, segment_ids, behind, observe=observe)

    def run(x, layer: Layer, _, inputs: LayerInputs):
        own, following = inputs.routes or (None, None)
        prompt, outputs = first(x[0], layer, None, inputs._replace(routes=own))
        inputs = inputs._replace(prefix=outputs.block, routes=following)
        completion, further = second(x[1], layer, None, inputs)
        seen = None if observe is None else outputs.observed + further.observed
        return (prompt, completion), LayerOutputs(None, seen, None)

    both = jax.checkpoint(run, prevent_cse=False) if compute.remat else run
    x = embed(policy, prompts), embed(policy, tokens)
    pair = None if routes is None else (prompt_routes, routes)
    x, outputs = (_scan if policy.stacked else _unroll)(both, policy, x, cache, pair, False)
    return first.norm(x[0], policy.norm), second.norm(x[1], policy.norm), outputs.observed


def _check(policy: Policy, tokens, cache: KVCache, routes, observe) -> None:
    config = policy.config
    if policy.compute.key.quantized and policy.kv_scales is None and observe is None:
        raise ValueError("forward: the policy has an FP8 cache, and no scales of it")
    if config.windows is not None and cache.prefix is not None and cache.prefix.positions is None:
        raise ValueError(
            "forward: with a sliding window the prefix cache needs the positions of its slots"
        )
    if routes is not None:
        used = config.experts.per_token if config.experts else 0
        expected = (*tokens.shape, len(config.sparse_layers), used)
        if routes.shape != expected:
            raise ValueError(
                f"forward: routes of shape {routes.shape} are not those of this policy, {expected}"
            )


def embed(policy: Policy, tokens: Int[Array, "b t"]) -> Float[Array, "b t hidden"]:
    """Look up what enters the first layer."""
    x, scale = jnp.take(policy.embed_tokens.value, tokens, axis=0), policy.config.embedding_scale
    return x if scale is None else policy.compute.scale(x, scale)


def layer_inputs(
    policy: Policy, cache: KVCache, routes, pick: Callable, pick_sparse: Callable
) -> LayerInputs:
    """Take the inputs of some layers out of stacks over all layers.

    By `pick`, and out of stacks over those with experts by `pick_sparse`.
    """
    config, prefix, scales = policy.config, cache.prefix, policy.kv_scales
    windows = None if config.windows is None else jnp.asarray(config.windows, jnp.int32)
    frequencies = _layer_frequencies(config)
    return LayerInputs(
        prefix=None if prefix is None else (pick(prefix.keys), pick(prefix.values)),
        scales=None
        if scales is None
        else (pick(scales.query), pick(scales.key), pick(scales.value)),
        window=None if windows is None else pick(windows),
        frequencies=None if frequencies is None else pick(frequencies),
        routes=jax.tree.map(lambda x: pick_sparse(jnp.moveaxis(x, 2, 0)), routes),
    )


def _unroll(
    run: Callable, policy: Policy, x, cache: KVCache, routes, keep_cache: bool
) -> tuple[Array, LayerOutputs]:
    assert not isinstance(policy.layers, Layer)
    sparse, outputs, own = policy.config.sparse_layers, [], cache.completion
    for i, layer in enumerate(policy.layers):
        replayed = routes if i in sparse else None
        inputs = layer_inputs(
            policy, cache, replayed, lambda x, i=i: x[i], lambda x, i=i: x[sparse.index(i)]
        )
        completion = None
        if own is not None:
            completion = own.keys[i], own.values[i], None
        x, out = run(x, layer, completion, inputs)
        outputs.append(out)
    observed = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(out.observed for out in outputs))
    used = [out.routes for out in outputs if out.routes is not None]
    blocks = None
    if keep_cache:
        keys, values = zip(*(out.block for out in outputs), strict=True)
        blocks = keys, values
    return x, LayerOutputs(blocks, observed, jnp.stack(used, axis=2) if used else None)


def _scan(
    run: Callable, policy: Policy, x, cache: KVCache, routes, keep_cache: bool
) -> tuple[Array, LayerOutputs]:
    config, own = policy.config, cache.completion

    def body(carry, inputs):
        x, blocks = carry
        layer, index, inputs = inputs
        completion = None
        if blocks is not None:
            completion = *blocks, index
        x, out = run(x, layer, completion, inputs)
        if completion is None:
            return (x, None), out if keep_cache else out._replace(block=None)
        # a completion cache travels as the carry: a step writes one slot and copies nothing
        return (x, out.block), out._replace(block=None)

    carry = (x, None if own is None else (own.keys, own.values))
    parts = []
    # one scan for each run of layers of a kind: most models, under most recipes, have a single one
    for equal in equal_runs(policy):
        start, stop, sparse = equal.start, equal.stop, equal.start in config.sparse_layers
        first = config.sparse_layers.index(start) if sparse else 0
        inputs = layer_inputs(
            policy,
            cache,
            routes if sparse else None,
            lambda x, a=start, b=stop: x[a:b],
            lambda x, a=first, b=first + stop - start: x[a:b],
        )
        carry, out = lax.scan(
            body, carry, (run_of_layers(policy, start, stop), jnp.arange(start, stop), inputs)
        )
        parts.append(out)
    x, blocks = carry
    if blocks is None:
        blocks = jax.tree.map(_joined, *(out.block for out in parts))
    observed = jax.tree.map(_joined, *(out.observed for out in parts))
    used = [out.routes for out in parts if out.routes is not None]
    return x, LayerOutputs(blocks, observed, jnp.moveaxis(_joined(*used), 0, 2) if used else None)


def _joined(*stacks: Array) -> Array:
    return stacks[0] if len(stacks) == 1 else jnp.concatenate(stacks)
