"""Attention, which mixes the tokens of a layer: over the call's own tokens, and over what the two
parts of the cache hold.

From top to bottom: what a layer reads and leaves, the completion cache in a block and in pages, the
mixer itself: `Attention` scores and prefills many tokens a row, and decodes one. Another attention
is a subclass with what differs (models/latent.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from fp8rl_jax.config.formats import TensorFormat
from fp8rl_jax.models.cache import KVCache, Pages
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.policy import Layer, Tensor
from fp8rl_jax.models.rope import base_frequencies
from fp8rl_jax.parallel import by_shards
from fp8rl_jax.precision import Compute, element_dtype, quantize_per_tensor
from fp8rl_jax.precision.quantizer import round_through
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
from pallas_kernels.cache_write import scatter, write_cache
from pallas_kernels.decode_attention import KeyValues, combine_score_scales, decode_attention
from pallas_kernels.qtensor import moved
from pallas_kernels.rounding import rounded


def rope_frequencies(config: PolicyConfig) -> Float[Array, " half"]:
    """Compute the angular frequency of each pair of a head's dimensions that is rotated, float32,
    as `rope_scaling` has it."""
    scaling = config.rope_scaling
    frequencies = base_frequencies(config.rope_theta, config.rotary_dim)
    return frequencies if scaling is None else scaling.rescaled(frequencies, config.rope_theta)


def layer_frequencies(config: PolicyConfig) -> Float[Array, "layers half"] | None:
    """Compute the frequencies of each layer where those with a window have their own, else None."""
    if config.local_rope_theta is None:
        return None
    local = base_frequencies(config.local_rope_theta, config.rotary_dim)
    full = rope_frequencies(config)
    return jnp.stack(
        [full if i in config.full_attention_layers else local for i in range(config.num_layers)]
    )


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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CompletionCache:
    """One layer's part of the completion cache.

    Attributes:
        keys, values: the layer's own arrays, or stacks over layers.
        slot: first slot that the call writes.
        layer: index into the stacks; None: the arrays are the layer's own.
    """

    keys: Any
    values: Any
    slot: Array
    layer: Array | None = None

    axes: ClassVar = ("batch", "kv_heads", None, None)
    """Of a layer's arrays, as `parallel.rules` names them."""

    def write(self, k: Array, v: Array) -> tuple[Array, Array]:
        """Write keys and values [rows, kv_heads, t, head_dim]; returns the cache."""
        start = (0, 0, self.slot, 0)
        if self.layer is not None:
            start, k, v = (self.layer, *start), k[None], v[None]

        def update(cache: Array, new: Array) -> Array:
            return lax.dynamic_update_slice(cache, new, start)

        return moved(update, self.keys, k), moved(update, self.values, v)

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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagePlaces:
    """Where the tokens of a call go in its pages, and what they see there: the same in each layer.

    Attributes:
        at: [rows, t], places among a row's own tokens.
        page, slot: [rows, t] of these; the page is `count` where there is no token.
        own, own_lengths: page table of each row, and the tokens in it after the call.
        prefix, prefix_lengths: likewise; None where no row has a prefix.
        count, size: pages of a layer, and slots of a page.
    """

    at: Array
    page: Array
    slot: Array
    own: Array
    own_lengths: Array
    prefix: Array | None
    prefix_lengths: Array | None
    count: int = field(metadata={"static": True})
    size: int = field(metadata={"static": True})

    @classmethod
    def of(cls, pages: Pages, real: Array) -> PagePlaces:
        """Find the places of a call's tokens.

        Args:
            real: [rows, t], tokens that there are; a row's come first.
        """
        layer = jax.tree.leaves(pages.keys)[0]
        count, size = layer.shape[-4], layer.shape[-2]
        at = pages.own_lengths[:, None] + jnp.arange(real.shape[1], dtype=jnp.int32)
        column = at // size
        page = jnp.take_along_axis(pages.own, column, axis=1, mode="clip")
        page = jnp.where(real & (column < pages.own.shape[1]), page, count).astype(jnp.int32)
        lengths = pages.own_lengths + real.sum(1, dtype=jnp.int32)
        prefix = pages.prefix, pages.prefix_lengths
        return cls(at, page, at % size, pages.own, lengths, *prefix, count, size)

    @property
    def start(self) -> Array | int:
        """Where each row's own tokens begin."""
        return 0 if self.prefix_lengths is None else self.prefix_lengths[:, None]

    def held(self) -> list[tuple[Array, Array]]:
        """List the page tables, each with the tokens in it after the call."""
        own = self.own, self.own_lengths
        if self.prefix is None or self.prefix_lengths is None:
            return [own]
        return [(self.prefix, self.prefix_lengths), own]

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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedRows:
    """One layer's pages, with the methods of `CompletionCache`.

    Attributes:
        keys, values: the layer's own arrays, or stacks over layers.
        places: of the call.
        layer: index into the stacks; None: the arrays are the layer's own.
    """

    keys: Any
    values: Any
    places: PagePlaces
    layer: Array | None = None

    axes: ClassVar = (None, "kv_heads", None, None)

    def write(self, k: Array, v: Array) -> tuple[Array, Array]:
        """Write keys and values [rows, kv_heads, t, head_dim]; returns the cache."""
        page = self.at(self.places.page).reshape(-1)
        slot = self.places.slot.reshape(-1)

        def written(cache: Array, new: Array) -> Array:
            flat = cache.reshape(-1, *cache.shape[-3:])
            new = jnp.moveaxis(new, 2, 1).reshape(-1, *flat.shape[1::2])
            return scatter(flat, new, page, slot).reshape(cache.shape)

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
        taken = moved(lambda x: x.at[self.at(table)].get(mode="clip"), flat)
        return jnp.moveaxis(taken, 2, 1).reshape(len(table), flat.shape[1], -1, flat.shape[3])

    def at(self, pages: Array) -> Array:
        """Number pages of this layer in the flattened stacks; those outside stay outside."""
        if self.layer is None:
            return pages
        count = self.places.count
        total = self.keys.shape[0] * count
        return jnp.where(pages < count, pages + self.layer * count, total)


LayerCache = CompletionCache | PagedRows
CachePart = tuple[Array, Array, Array | None]
"""Keys and values of the completion cache, and the index of a layer where they are stacks."""


class Operations(Protocol):
    """What a mixer asks of its layer, where a probe looks at it (compare.probe)."""

    def norm(self, x: Array, weight: Tensor | None, eps: float | None = None) -> Array: ...

    def project(self, x: Array, *weights: Tensor) -> list[Array]: ...

    def project_cached(self, x: Array, weight: Tensor) -> Array: ...


class Attention:
    """Grouped-query attention of one layer as a function of (x, weights, completion cache, inputs),
    for a call whose tokens, positions and cache are given.

    A subclass says what the cache keeps of a token (`entries`, of the sizes `PolicyConfig.cached`),
    how that is rounded (`stored`), and what attention takes of it (`operands`).

    Args:
        operations: norms and products of the layer.
        config, compute: of the policy.
        positions, segment_ids, cache, prefix_ids, observe: as in `forward.forward`.
    """

    def __init__(
        self,
        operations: Operations,
        config: PolicyConfig,
        compute: Compute,
        positions: Int[Array, "b t"],
        segment_ids: Int[Array, "b t"],
        cache: KVCache,
        prefix_ids: Int[Array, "b t"] | None = None,
        observe: Callable[..., Any] | None = None,
    ):
        self.operations, self.config, self.compute = operations, config, compute
        self.cache, self.observe = cache, observe
        self.positions, self.segment_ids = positions, segment_ids
        self.rope = self.rope_tables(rope_frequencies(config))
        if cache.prefix is not None:
            self.prefix_lengths = cache.prefix.mask.sum(1, dtype=jnp.int32)
        if isinstance(cache.completion, Pages):
            self.places = PagePlaces.of(cache.completion, segment_ids > 0)
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
    ) -> tuple[Array, tuple[Array, Array], Any]:
        """Compute attention's output, the keys and values that it leaves, and what is observed."""
        t, compute = x.shape[1], self.compute
        completion = None if part is None else self.layer_cache(*part)
        q, k, v = self.entries(x, layer)
        rope = self.rope
        if inputs.frequencies is not None:
            rope = self.rope_tables(inputs.frequencies)
        if (
            completion is not None
            and t == 1
            and self.decodes_in_kernels(compute)
            and self.observe is None
        ):
            out, written = self.decode((q, k, v), rope, completion, inputs, x.dtype)
            return self.output(out, layer), written, None
        q, k = self.rotated(q, rope), self.rotated(k, rope)
        scales, observed = inputs.scales, None
        if self.observe is not None:
            real = (self.segment_ids > 0)[..., None, None]
            observed, scales = self.observe(q, k, v, real, scales)
        if compute.key.calibrated:
            q, k, v, score_scale, value_scale = self.stored(q, k, v, scales)
        else:
            q, k = self.simulated(q, compute.query), self.simulated(k, compute.key)
            v = self.simulated(v, compute.value, turned=False)
            scales, score_scale, value_scale = None, self.config.score_scale, 1.0
        k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
        operands = partial(self.operands, layer=layer, scales=scales)
        if completion is None and self.chunk:
            q, blocks = operands(q, self.token_keys(k, v, inputs.prefix))
            window, attend = inputs.window, compute.attend
            out = attend_in_chunks(
                q, blocks, window, score_scale, value_scale, x.dtype, self.chunk, attend
            )
            return self.output(out, layer), (k, v), observed
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
        q, blocks = operands(q, blocks)
        out = compute.attend(q, blocks, score_scale, value_scale, x.dtype)
        return self.output(out, layer), written, observed

    @staticmethod
    def decodes_in_kernels(compute: Compute) -> bool:
        """Whether a decode step takes `decode`, and not the operations of a prefill."""
        return compute.decodes_in_kernels

    def entries(self, x: Array, layer: Layer) -> tuple[Array, Array, Array]:
        """Compute queries, and the keys and values that the cache keeps, before rotation.

        Each is [b, t, heads, dim] with sizes of its own, pairs that turn together half of the
        rotated dimensions apart.
        """
        norm, project = self.operations.norm, self.operations.project
        products = project(x, layer.q_proj, layer.k_proj, layer.v_proj)
        q, k, v = map(self.heads, products, (layer.q_bias, layer.k_bias, layer.v_bias))
        q, k = norm(q, layer.q_norm), norm(k, layer.k_norm)
        return self.pairs_apart(q), self.pairs_apart(k), v

    def rotated(self, x: Array, rope: tuple[Array, Array]) -> Array:
        """Turn queries or keys by their positions."""
        return self.compute.rotate(x, rope)

    def stored(
        self, q: Array, k: Array, v: Array, scales
    ) -> tuple[Array, Array, Array, Array | float, Array | float]:
        """Quantize for a cache with calibrated scales; and the factors of scores and of values."""
        assert scales is not None
        compute, (sq, sk, sv) = self.compute, scales
        k, v = quantize_heads(k, sk, compute.key), quantize_heads(v, sv, compute.value)
        if compute.query.quantized:
            q = quantize_heads(q, sq, compute.query)
        else:
            sq = None
        return q, k, v, combine_score_scales(self.config.score_scale, sq, sk), sv

    def operands(
        self, q: Array, blocks: list[Any], layer: Layer, scales
    ) -> tuple[Array, list[Any]]:
        """Give what attention multiplies: the queries, and what the cache keeps."""
        return q, blocks

    def output(self, out: Array, layer: Layer) -> Array:
        """Project the heads [b, t, heads, dim] that were attended to."""
        return self.operations.project(out.reshape(*out.shape[:2], -1), layer.o_proj)[0]

    def layer_cache(self, keys: Array, values: Array, index: Array | None) -> LayerCache:
        """Give a layer's part of the completion cache its methods."""
        if isinstance(self.cache.completion, Pages):
            return PagedRows(keys, values, self.places, index)
        assert self.cache.slot is not None
        return CompletionCache(keys, values, self.cache.slot, index)

    def rope_tables(self, frequencies: Array) -> tuple[Array, Array]:
        """Compute cos and sin of the tokens; dimensions that are not rotated turn by nothing."""
        scaling = self.config.rope_scaling
        amplitude = 1.0 if scaling is None else scaling.amplitude
        cos, sin = self.compute.rope_tables(frequencies, self.positions, amplitude)
        if not (still := self.config.head_dim // 2 - len(frequencies)):
            return cos, sin
        sides = [(0, 0), (0, 0), (0, still)]
        return jnp.pad(cos, sides, constant_values=1), jnp.pad(sin, sides)

    def pairs_apart(self, x: Array) -> Array:
        """Order the dimensions of heads so that pairs that turn together are half a head apart.

        They are half of the rotated part apart. Queries and keys are ordered alike, which changes
        no score.
        """
        turned, dim = self.config.rotary_dim, self.config.head_dim
        if turned == dim:
            return x
        ends = turned // 2, turned, (turned + dim) // 2
        first, second, third, fourth = jnp.split(x, ends, axis=-1)
        return jnp.concatenate([first, third, second, fourth], axis=-1)

    def pairs_back(self, x: Array) -> Array:
        """Undo `pairs_apart`."""
        turned, dim = self.config.rotary_dim, self.config.head_dim
        if turned == dim:
            return x
        ends = turned // 2, dim // 2, (dim + turned) // 2
        first, third, second, fourth = jnp.split(x, ends, axis=-1)
        return jnp.concatenate([first, second, third, fourth], axis=-1)

    def simulated(self, x: Array, fmt: TensorFormat, turned: bool = True) -> Array:
        """Round heads [b, t, heads, head_dim] through a format that finds its scales in each of
        them, in the dtype of x; x itself where the format is the compute dtype.

        Args:
            turned: queries and keys, whose dimensions share scales in the checkpoint's order.
        """
        if not fmt.quantized:
            return x
        x, dtype = self.pairs_back(x) if turned else x, x.dtype
        x = rounded(round_through(x, fmt, self.compute.backend), dtype)
        return self.pairs_apart(x) if turned else x

    def heads(self, x: Array, bias: Tensor | None) -> Array:
        """Split a projection, its bias added, into heads [b, t, heads, head_dim]."""
        if bias is not None:
            x = self.compute.add(x, jnp.broadcast_to(bias.value, x.shape))
        return x.reshape(*x.shape[:2], -1, self.config.head_dim)

    def decode(self, tokens, rope, completion: LayerCache, inputs: LayerInputs, dtype):
        """Attend with one token a row, over the prefix cache and the row's slots up to its own.

        On a mesh each device writes and reads the rows and heads that it has.
        """
        compute, window, score_scale = self.compute, inputs.window, self.config.score_scale
        prefix, lengths, scales = (), (), ()
        if inputs.prefix is not None:
            prefix, lengths = inputs.prefix, self.prefix_lengths
        if compute.key.calibrated:
            assert inputs.scales is not None
            scales = inputs.scales

        def on_device(tokens, rope, cache, places, prefix, lengths, scales, window):
            sq = sk = sv = None
            write = partial(write_cache, backend=compute.backend)
            if scales:
                sq, sk, sv = scales
                sq, stored = sq if compute.query.quantized else None, element_dtype(compute.key)
                write = partial(write, scales=(sk, sv), query_scale=sq, fp8_dtype=stored)
            part = replace(places, keys=cache[0], values=cache[1])
            written, q = part.write_token(write, tokens, rope)
            caches = part.held(*written, len(q))
            if prefix:
                caches.insert(0, KeyValues(*prefix, lengths))
            out = decode_attention(
                q, tuple(caches), score_scale, sq, sk, sv, window, dtype, backend=compute.backend
            )
            return out[:, None], written

        heads, own = ("batch", None, "kv_heads", None), completion.axes
        if completion.keys.ndim > len(own):
            own = (None, *own)
        axes = (
            heads,
            ("batch", None, None),
            own,
            None,
            ("batch", "kv_heads", None, None),
            ("batch",),
            ("kv_heads",)[: scales[0].ndim] if scales else None,
            None,
        )
        cache = completion.keys, completion.values
        places = replace(completion, keys=None, values=None)
        operands = tokens, rope, cache, places, prefix, lengths, scales, window
        return by_shards(on_device, operands, axes, (heads, own))

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
