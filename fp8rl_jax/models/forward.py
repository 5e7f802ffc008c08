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

From top to bottom: one layer (its mixer, models/attention.py or models/latent.py, then a
feed-forward layer or experts), the whole pass, the stack of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from fp8rl_jax.models.attention import (
    Attention,
    CachePart,
    LayerInputs,
    LayerOutputs,
    layer_frequencies,
)
from fp8rl_jax.models.cache import KVBlock, KVCache, Pages
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.latent import LatentAttention
from fp8rl_jax.models.moe import mixture
from fp8rl_jax.models.policy import (
    FeedForward,
    Layer,
    Policy,
    Tensor,
    Weight,
    equal_runs,
    run_of_layers,
)
from fp8rl_jax.models.shards import Split, split_of
from fp8rl_jax.parallel import (
    DECODE_RULES,
    constrain,
    devices_of,
    left_inside,
    policy_shardings,
)
from fp8rl_jax.precision import Compute, as_weight, multiply_all
from pallas_kernels.matmul import flatten_many_rows
from pallas_kernels.qtensor import to_bits
from pallas_kernels.rounding import rounded


def mixer_of(config: PolicyConfig) -> type[Attention]:
    """Find what mixes the tokens of a layer."""
    return Attention if config.latent is None else LatentAttention


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
        self.config, self.compute, self.positions = config, compute, positions
        self.mixer = mixer_of(config)(
            self, config, compute, positions, segment_ids, cache, prefix_ids, observe
        )

    def __call__(
        self, x: Array, layer: Layer, part: CachePart | None, inputs: LayerInputs
    ) -> tuple[Array, LayerOutputs]:
        before_attention, after_attention, before_mlp, after_mlp = layer.norms
        attended, block, observed = self.mixer(self.norm(x, before_attention), layer, part, inputs)
        add = self.compute.add
        x = on_batch_axes(add(x, self.norm(attended, after_attention)))
        normed, routes = self.norm(x, before_mlp), None
        if layer.experts is None:
            mixed = self.mlp(normed, layer)
        else:
            mixed, routes = self.mixture(normed, layer, inputs.routes)
        x = on_batch_axes(add(x, self.norm(mixed, after_mlp)))
        return x, LayerOutputs(block, observed, routes)

    def norm(self, x: Array, weight: Tensor | None, eps: float | None = None) -> Array:
        """RMSNorm over the last axis; x itself where the layer has no such norm."""
        if weight is None:
            return x
        config = self.config
        eps = config.rms_norm_eps if eps is None else eps
        return self.compute.rms_norm(x, weight.value, eps, config.family.norm_offset)

    def project(self, x: Array, *weights: Tensor) -> list[Array]:
        """Multiply x by each weight.

        Weights of one kind share a prepared input, which is quantized once and kept once for the
        backward.
        """
        # sums of exact mode have an order of their own, which XLA keeps
        if (axes := left_inside()) and not self.compute.exact:
            return _over_axes(axes, self._project, x, weights)
        return self._project(x, weights, x.dtype)

    def _project(self, x: Array, weights: Sequence[Tensor], out_dtype: jnp.dtype) -> list[Array]:
        rows = flatten_many_rows(x)
        operands = [as_weight(w.value) for w in weights]

        def multiply(kind: tuple[Any, int], alike: list[Any]) -> list[Array]:
            prepared = self.prepare(rows, alike[0])
            return multiply_all(prepared, alike, out_dtype, self.compute, kind[1])

        kinds = zip(map(jax.tree.structure, operands), map(self.shards, weights), strict=True)
        products = _by_kind(multiply, operands, kinds)
        return [product.reshape(*x.shape[:-1], -1) for product in products]

    def shards(self, weight: Tensor) -> int:
        """Into how many shards the devices cut the outputs of a weight, where the trainer joins
        them."""
        joins = self.compute.joins and isinstance(weight, Weight)
        return devices_of(weight.axes[-2]) if joins else 1

    def project_cached(self, x: Array, weight: Tensor) -> Array:
        """Multiply what the cache keeps, [rows, slots, n]."""
        return TransformerLayer.project(self, x, weight)[0]

    def prepare(self, x: Array, weight: Any) -> Any:
        """Bring x into the form that `weight` multiplies."""
        return weight.prepare(x, self.compute)

    def mlp(self, x: Array, layer: Layer | FeedForward) -> Array:
        gate, up = self.project(x, layer.gate_proj, layer.up_proj)
        inner = self.compute.gated(gate, up, self.config.family.activation)
        return self.project(inner, layer.down_proj)[0]

    def mixture(self, x: Array, layer: Layer, routes: Array | None) -> tuple[Array, Array]:
        routed, used = self.routed(x, layer, routes)
        if layer.shared_experts is None:
            return routed, used
        return self.compute.add(routed, self.mlp(x, layer.shared_experts)), used

    def routed(self, x: Array, layer: Layer, routes: Array | None) -> tuple[Array, Array]:
        return mixture(x, layer, self.config.mixture, self.compute, routes)


def _over_axes(
    axes: tuple[str, ...], project: Callable, x: Array, weights: Sequence[Tensor]
) -> list[Array]:
    """`project` inside of a `jax.shard_map` that leaves some axes to XLA, which would gather the
    weights of kernels: in another one over these, each device with its part of each weight."""
    mesh, whole = jax.sharding.get_abstract_mesh(), PartitionSpec()

    def multiply(kind: Split, alike: list[Tensor]) -> list[Array]:
        over, contracted = kind
        if not over:
            return project(x, alike, x.dtype)
        last = PartitionSpec(*(None,) * (x.ndim - 1), over)
        placed = jax.tree.map(lambda s: s.spec, policy_shardings(alike, mesh, DECODE_RULES))

        def run(x, alike):
            if not contracted:
                return project(x, alike, x.dtype)
            # added up in float32 and rounded once, as on one device
            sums = lax.psum(project(x, alike, jnp.float32), over)
            return [rounded(total, x.dtype) for total in sums]

        return jax.shard_map(
            run,
            in_specs=(last if contracted else whole, placed),
            out_specs=whole if contracted else last,
            axis_names=set(axes),
            check_vma=False,
        )(x, alike)

    return _by_kind(multiply, weights, (split_of(weight, axes, mesh) for weight in weights))


def _by_kind(
    run: Callable[[Any, list[Any]], list[Array]], items: Sequence[Any], kinds: Iterable[Any]
) -> list[Array]:
    """`run` of each kind with its items, which gives an array for each; in the order of `items`."""
    own: dict[Any, list[int]] = {}
    for i, kind in enumerate(kinds):
        own.setdefault(kind, []).append(i)
    out: dict[int, Array] = {}
    for kind, places in own.items():
        out |= zip(places, run(kind, [items[i] for i in places]), strict=True)
    return [out[i] for i in range(len(items))]


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
    if policy.compute.key.calibrated and policy.kv_scales is None and observe is None:
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
    return on_batch_axes(x if scale is None else policy.compute.scale(x, scale))


def on_batch_axes(x: Float[Array, "b t hidden"]) -> Float[Array, "b t hidden"]:
    """Keep the rows of hidden states on the devices that have their tokens.

    Left to itself XLA may follow the weights, which fsdp splits along `hidden`: then every device
    computes all rows, and adds up activations.
    """
    return constrain(x, "batch", None, None)


def layer_inputs(
    policy: Policy, cache: KVCache, routes, pick: Callable, pick_sparse: Callable
) -> LayerInputs:
    """Take the inputs of some layers out of stacks over all layers.

    By `pick`, and out of stacks over those with experts by `pick_sparse`.
    """
    config, prefix, scales = policy.config, cache.prefix, policy.kv_scales
    windows = None if config.windows is None else jnp.asarray(config.windows, jnp.int32)
    frequencies = layer_frequencies(config)
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
        layers = to_bits(run_of_layers(policy, start, stop))
        carry, out = lax.scan(body, carry, (layers, jnp.arange(start, stop), inputs))
        parts.append(out)
    x, blocks = carry
    if blocks is None:
        blocks = jax.tree.map(_chained, *(out.block for out in parts))
    observed = jax.tree.map(_chained, *(out.observed for out in parts))
    used = [out.routes for out in parts if out.routes is not None]
    return x, LayerOutputs(blocks, observed, jnp.moveaxis(_chained(*used), 0, 2) if used else None)


def _chained(*stacks: Array) -> Array:
    return stacks[0] if len(stacks) == 1 else jnp.concatenate(stacks)
