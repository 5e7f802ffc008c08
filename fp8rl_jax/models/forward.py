"""One forward pass for scoring, prefill and decode.

The three differ in their inputs only: which keys are cached, which slots are written, and on which
side of the recipe the formats stand. A train-rollout mismatch can then come from formats and
reduction orders, never from a second definition of the model.

    train     tokens [b, t], no cache or a shared block     trainer formats, differentiable
    prefill   prompts [p, s], no cache                      rollout formats, returns the prompts'
                                                            block
    decode    one token a row, shared block + own block     rollout formats, writes the own block at
                                                            `slot`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from fp8rl_jax.config.recipe import Recipe
from fp8rl_jax.models.arithmetic import PLAIN, Arithmetic, arithmetic
from fp8rl_jax.models.cache import KVBlock, KVCache
from fp8rl_jax.models.layer import LayerInputs, LayerOutputs, LayerStep, OwnBlock
from fp8rl_jax.models.policy import Policy, equal_runs, run_of_layers
from fp8rl_jax.models.rotary import layer_frequencies
from fp8rl_jax.models.trained import check_form
from pallas_kernels.backend import Backend, check_exact
from pallas_kernels.matmul import selected_backend

Phase = Literal["train", "prefill", "decode"]


class ForwardResult(NamedTuple):
    """hidden: [b, t, hidden] after the final norm; cache: the block this call's tokens fill;
    observed: what `observe` returned in each layer, its leaves stacked over the layers; routes: the
    experts that each token used in each layer that has some."""

    hidden: Float[Array, "b t hidden"]
    cache: KVBlock | None
    observed: Any
    routes: Int[Array, "b t sparse k"] | None = None


def forward(
    policy: Policy,
    tokens: Int[Array, "b t"],
    positions: Int[Array, "b t"] | None = None,
    segment_ids: Int[Array, "b t"] | None = None,
    cache: KVCache | None = None,
    recipe: Recipe | None = None,
    phase: Phase = "train",
    *,
    prefix_ids: Int[Array, "b t"] | None = None,
    routes: Int[Array, "b t sparse k"] | None = None,
    remat: bool = False,
    attention_chunk: int | None = None,
    keep_cache: bool = True,
    observe: Callable[..., Any] | None = None,
    calibrate: Callable[[Any], tuple[Array, Array, Array]] | None = None,
    backend: Backend = "auto",
) -> ForwardResult:
    """Runs the policy over `tokens`.

    Args:
        policy: stacked layers are scanned, a list of layers is unrolled; the dtype of the embedding
            is the compute dtype. Its linears are in the form of the recipe's side: `trainer_policy`
            makes the trainer's, `quantized_policy` the rollout's.
        tokens: int32.
        positions: rotary positions; default 0, 1, ... in each row.
        segment_ids: a token attends to earlier tokens of its own segment; 0 marks padding. Default:
            all ones.
        cache: see KVCache. With an own block, `segment_ids` is not used: a row attends to its slots
            up to the one it writes.
        recipe: default: nothing is quantized.
        phase: picks the recipe's side: "train" the trainer's formats, the others the rollout's.
        prefix_ids: the segment that a token's own one continues: it attends to that, too, where it
            stands earlier in the row (several completions behind one copy of their prompt). -1:
            none, the default.
        routes: expert ids to replay, as `ForwardResult.routes` of another forward gave them. A
            token with a -1 in a layer is routed anew there. Gate weights are always the policy's
            own (R3, arXiv 2510.11370).
        remat: recompute each layer in the backward pass instead of keeping its activations.
        attention_chunk: queries whose scores exist at one time, where there is no own block; 0:
            all. Default: all, and 128 in rows of 2^20 pairs of query and key or more.
        keep_cache: False leaves `ForwardResult.cache` empty where nothing reads it.
        observe: called in each layer as observe(q, k, v, real, scales), after q/k-norm and rope and
            before anything is quantized: q, k, v [b, t, heads, dim]; real [b, t, 1, 1], False on
            padding; the layer's KV scales or None.
        calibrate: gives a layer the scales of Q, K and V, float32 scalars, from what `observe`
            returned in it, in place of `cache.scales`. A layer's scales are then known before its
            attention runs, and the next layer sees what they did.

    Raises:
        ValueError: the policy is not in the form of the recipe's side (`check_form`); the recipe
            quantizes the cache and `cache.scales` is missing; the policy has a sliding window and
            the shared block no positions; `routes` are not those of this policy's experts.
    """
    recipe = recipe or Recipe("bf16")
    formats = recipe.trainer if phase == "train" else recipe.rollout
    cache, config = cache or KVCache(), policy.config
    check_form(policy, recipe, phase)
    if formats.key.quantized and cache.scales is None and calibrate is None:
        raise ValueError(
            f"recipe {recipe.name!r} quantizes the KV cache: forward needs cache.scales"
        )
    if config.windows is not None and cache.shared is not None and cache.shared.positions is None:
        raise ValueError(
            "forward: with a sliding window the shared block needs the positions of its slots"
        )
    b, t = tokens.shape
    if routes is not None:
        expected = (
            b,
            t,
            len(config.sparse_layers),
            config.experts.per_token if config.experts else 0,
        )
        if routes.shape != expected:
            raise ValueError(
                f"forward: routes of shape {routes.shape} are not those of this policy, {expected}"
            )
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (b, t))
    if segment_ids is None:
        segment_ids = jnp.ones((b, t), jnp.int32)
    if recipe.exact:
        check_exact(selected_backend(backend), "forward")
    numbers = arithmetic(recipe.exact)
    x = embed(policy, tokens, numbers)
    step = LayerStep(
        config,
        formats,
        positions,
        segment_ids,
        cache,
        observe,
        backend,
        prefix_ids,
        attention_chunk,
        numbers,
        calibrate,
    )
    run = jax.checkpoint(step, prevent_cse=False) if remat else step
    x, outputs = (_scan if policy.stacked else _unroll)(run, policy, x, cache, routes, keep_cache)
    block = None
    if keep_cache and cache.own is None:
        block = KVBlock(*outputs.block, segment_ids > 0, positions)
    elif keep_cache:
        written = jnp.ones((cache.own.mask.shape[0], t), bool)
        block = KVBlock(
            *outputs.block, lax.dynamic_update_slice(cache.own.mask, written, (0, cache.slot))
        )
    return ForwardResult(step.norm(x, policy.norm), block, outputs.observed, outputs.routes)


def embed(
    policy: Policy, tokens: Int[Array, "b t"], numbers: Arithmetic = PLAIN
) -> Float[Array, "b t hidden"]:
    """What enters the first layer."""
    x, scale = jnp.take(policy.embed_tokens.value, tokens, axis=0), policy.config.embedding_scale
    return x if scale is None else numbers.scale(x, scale)


def layer_inputs(
    policy: Policy, cache: KVCache, routes, pick: Callable, pick_sparse: Callable
) -> LayerInputs:
    """LayerInputs of the layers that `pick` and `pick_sparse` take out of stacks over all layers
    and over those with experts."""
    windows = (
        None if policy.config.windows is None else jnp.asarray(policy.config.windows, jnp.int32)
    )
    frequencies = layer_frequencies(policy.config)
    return LayerInputs(
        shared=None
        if cache.shared is None
        else (pick(cache.shared.keys), pick(cache.shared.values)),
        scales=None
        if cache.scales is None
        else tuple(map(pick, (cache.scales.query, cache.scales.key, cache.scales.value))),
        window=None if windows is None else pick(windows),
        frequencies=None if frequencies is None else pick(frequencies),
        routes=None if routes is None else pick_sparse(jnp.moveaxis(routes, 2, 0)),
    )


def _unroll(
    step: Callable, policy: Policy, x, cache: KVCache, routes, keep_cache: bool
) -> tuple[Array, LayerOutputs]:
    sparse, outputs = policy.config.sparse_layers, []
    for i, layer in enumerate(policy.layers):
        replayed = routes if i in sparse else None
        inputs = layer_inputs(
            policy, cache, replayed, lambda x, i=i: x[i], lambda x, i=i: x[sparse.index(i)]
        )
        own = (
            None
            if cache.own is None
            else OwnBlock(cache.own.keys[i], cache.own.values[i], cache.slot)
        )
        x, out = step(x, layer, own, inputs)
        outputs.append(out)
    observed = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(out.observed for out in outputs))
    used = [out.routes for out in outputs if out.routes is not None]
    blocks = tuple(zip(*(out.block for out in outputs), strict=True)) if keep_cache else None
    return x, LayerOutputs(blocks, observed, jnp.stack(used, axis=2) if used else None)


def _scan(
    step: Callable, policy: Policy, x, cache: KVCache, routes, keep_cache: bool
) -> tuple[Array, LayerOutputs]:
    config = policy.config

    def body(carry, inputs):
        x, own_blocks = carry
        layer, index, inputs = inputs
        own = None if own_blocks is None else OwnBlock(*own_blocks, cache.slot, index)
        x, out = step(x, layer, own, inputs)
        if own is None:
            return (x, None), out if keep_cache else out._replace(block=None)
        # an own block travels as the carry, so that a step writes one slot instead of copying the
        # cache
        return (x, out.block), out._replace(block=None)

    carry = (x, None if cache.own is None else (cache.own.keys, cache.own.values))
    parts = []
    # one scan for each run of layers of a kind: most models, under most recipes, have a single one
    for run in equal_runs(policy):
        start, stop, sparse = run.start, run.stop, run.start in config.sparse_layers
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
    (x, own) = carry
    blocks = jax.tree.map(_joined, *(out.block for out in parts)) if own is None else own
    observed = jax.tree.map(_joined, *(out.observed for out in parts))
    used = [out.routes for out in parts if out.routes is not None]
    return x, LayerOutputs(blocks, observed, jnp.moveaxis(_joined(*used), 0, 2) if used else None)


def _joined(*stacks: Array) -> Array:
    return stacks[0] if len(stacks) == 1 else jnp.concatenate(stacks)
