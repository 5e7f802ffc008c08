"""Scales of the FP8 KV cache, measured anew at every weight sync.

One number a layer, or a KV head, for each of Q, K and V: amax after q/k-norm and rope, over the
tokens of a micro-batch; then a percentile over the micro-batches, a head-room factor, and the
format's largest value:

    scale = percentile(amax_1 ... amax_m) * 1.05 / 448

as in NeMo RL's trainer-side calibration (nemo_rl, calibrate_qkv_fp8_scales). Note that the
percentile is over micro-batches, not over elements: below some 500 of them 99.9 is the largest.

Three forwards can measure:

    trainer   the trainer's, under the new weights, nothing of Q, K and V quantized: the step's
              tokens, or prompts alone before the first step
    update    the trainer's, as the update runs it anyway: all of the step's tokens, under the
              weights before the update (delayed scaling by one update, as in Transformer Engine)
    rollout   the forward that serves, on prompts: quantized weights and activations, and each layer
              attends with the scales
              that its own Q, K and V have just given, so that the next layer measures what it will
              meet. This is what vLLM's first forward after a sync does (calculate_kv_scales), and
              verl through it; by its rule (precision.kv_rule = "verl") scale = amax / 200 for Q and
              K and amax / 100 for V: a head-room of 2.2 and 4.5, for tokens unseen

The same pass measures what the scales served until now would have cost these tokens, so a run shows
whether it has to recalibrate as often as it does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fp8rl_jax.config.formats import COMPUTE, TensorFormat
from fp8rl_jax.config.recipe import Recipe
from fp8rl_jax.models.attention import quantize_heads
from fp8rl_jax.models.cache import KVCache, KVScales
from fp8rl_jax.models.forms import trainer_policy
from fp8rl_jax.models.forward import forward
from fp8rl_jax.models.lora import has_adapters
from fp8rl_jax.models.policy import Policy, with_compute, with_scales
from fp8rl_jax.parallel import batch_shards, split_batch
from fp8rl_jax.precision import (
    QuantizationSums,
    is_quantized,
    max_value,
    stack_sums,
)
from pallas_kernels.backend import Backend
from pallas_kernels.quantize import amax


@partial(jax.jit, static_argnames=("recipe", "dtype", "micro_batches", "backend"))
def observe_qkv(
    policy: Policy,
    prompts: Int[Array, "p s"],
    lengths: Int[Array, " p"],
    completions: Int[Array, "b t"] | None = None,
    mask: Bool[Array, "b t"] | None = None,
    scales: KVScales | None = None,
    *,
    recipe: Recipe,
    dtype: jnp.dtype,
    micro_batches: int = 1,
    backend: Backend = "auto",
) -> QuantizationSums:
    """Measure amax of Q, K and V, and what quantization does to them.

    Over the prompts and, if given, their completions.

    Args:
        policy: masters, which run in the trainer's formats; or a rollout's policy, whose linears
            run in the rollout's.
        prompts, lengths: right-padded prompts.
        completions, mask: B = p * n completions and their real tokens.
        scales: those whose effect is measured; without them there is none.
        recipe: its rollout formats of Q, K and V, of masters the trainer's of the linears, and how
            many prompts are measured.
        dtype: compute dtype.
        micro_batches: of equal size, whole prompts each, that are run one after the other;
            fewer where the recipe's kv_prompts do not split into so many.
        backend: kernels of the forward; those of the trainer, so that its scales are those of its
            own forward.

    Returns:
        Sums of shape [m, layers, 3], of recipe.kv_granularity "head" [m, layers, 3, kv_heads].
    """
    quantized = any(map(is_quantized, jax.tree.leaves(policy, is_leaf=is_quantized)))
    # a rollout's weights are measured as it multiplies them; a base of adapters may rest in FP8
    if not quantized or has_adapters(policy):
        policy = trainer_policy(policy, recipe, dtype, backend)
    plain = replace(policy.compute, query=COMPUTE, key=COMPUTE, value=COMPUTE)
    policy = with_scales(with_compute(policy, plain), scales)
    run = partial(forward, policy, observe=_observer(recipe))

    def one(micro):
        prompts, lengths, completions, mask = micro
        segments = (jnp.arange(prompts.shape[1]) < lengths[:, None]).astype(jnp.int32)
        first = run(prompts, segment_ids=segments)
        if completions is None:
            return first.observed
        starts = jnp.repeat(lengths, completions.shape[0] // prompts.shape[0])
        positions = starts[:, None] + jnp.arange(completions.shape[1])
        cache = KVCache(first.cache)
        second = run(completions, positions, mask.astype(jnp.int32), cache, keep_cache=False)
        return first.observed + second.observed

    batch = prompts, lengths, completions, mask
    kept, every = len(prompts), _every(len(prompts), recipe.kv_prompts)
    if every > 1:
        batch, kept = jax.tree.map(partial(_spread, len(prompts), every), batch), kept // every
    return jax.lax.map(one, split_batch(batch, math.gcd(micro_batches, kept)))


def _every(prompts: int, wanted: int) -> int:
    """Find k such that every k-th of the prompts are as many as are wanted or a few more; a whole
    number of each shard of the batch."""
    shards = batch_shards(jax.sharding.get_abstract_mesh())
    steps = range(prompts // wanted if 0 < wanted < prompts else 1, 0, -1)
    return next((k for k in steps if prompts % k == 0 and prompts // k % shards == 0), 1)


def _spread(prompts: int, every: int, x: Array) -> Array:
    """Take every `every`-th prompt's rows."""
    rows = x.reshape(prompts, len(x) // prompts, *x.shape[1:])[::every]
    return rows.reshape(-1, *x.shape[1:])


@partial(jax.jit, static_argnames="recipe")
def observe_served(
    policy: Policy,
    prompts: Int[Array, "p s"],
    lengths: Int[Array, " p"],
    scales: KVScales | None = None,
    *,
    recipe: Recipe,
) -> QuantizationSums:
    """Measure prompts by the forward that serves them.

    It is a prefill whose layers attend with scales of their own amaxes.

    Args:
        policy: the rollout's, as an engine holds it.
        prompts, lengths: right-padded prompts, one batch.
        scales: those whose effect is measured; the forward does not use them.
        recipe: its rollout formats, and the rule from amax to scale.

    Returns:
        Sums as of `observe_qkv`, m = 1.
    """

    def rule(sums: QuantizationSums) -> tuple[Array, ...]:
        return tuple(_scales(sums.amax, recipe))

    segments = (jnp.arange(prompts.shape[1]) < lengths[:, None]).astype(jnp.int32)
    seen = forward(
        with_scales(policy, scales),
        prompts,
        segment_ids=segments,
        observe=_observer(recipe, rule),
        keep_cache=False,
    )
    return jax.tree.map(lambda x: x[None], seen.observed)


def sampling_observer(recipe: Recipe) -> Callable:
    """Make `observe` of a forward that runs anyway: amax of all rows, and what quantization does to
    a few of them, evenly spread."""
    return _observer(recipe, rows=_MEASURED_ROWS)


_MEASURED_ROWS = 16


def _observer(recipe: Recipe, rule: Callable | None = None, rows: int = 0) -> Callable:
    """`observe` of a forward that measures Q, K and V.

    Args:
        rule: from the sums of a layer to the scales that the layer goes on with; None: those that
            it was given.
        rows: whose quantization is measured, that many or a few more; 0: all.
    """
    formats = _formats(recipe)

    def sampled(x, fmt, scale, real) -> QuantizationSums:
        x, every = jax.lax.stop_gradient(x), _every(len(x), rows)
        largest = amax(jnp.where(real, x, 0))
        sums = measure(_spread(len(x), every, x), fmt, scale, _spread(len(x), every, real))
        return replace(sums, amax=largest)

    def measure(x, fmt, scale, real) -> QuantizationSums:
        restored, limit = x.astype(jnp.float32), jnp.inf
        if fmt.quantized and scale is not None:
            stored = quantize_heads(x, scale, fmt).astype(jnp.float32)
            restored, limit = stored * scale, scale * max_value(fmt)
        return QuantizationSums.of(x, restored, limit, real)

    def by_head(x, fmt, scale, real, kv_heads: int) -> QuantizationSums:
        grouped = x.reshape(*x.shape[:2], kv_heads, -1, x.shape[-1])
        if scale is None:
            return jax.vmap(lambda x: one(x, fmt, None, real), in_axes=2)(grouped)
        return jax.vmap(lambda x, s: one(x, fmt, s, real), in_axes=(2, 0))(grouped, scale)

    one = sampled if rows else measure

    def observe(q, k, v, real, scales):
        roles = zip((q, k, v), formats, scales or (None,) * 3, strict=True)
        if recipe.kv_granularity == "head":
            sums = stack_sums([by_head(*role, real, k.shape[2]) for role in roles])
        else:
            sums = stack_sums([one(*role, real) for role in roles])
        return sums, scales if rule is None else rule(sums)

    return observe


@jax.jit
def qkv_metrics(sums: QuantizationSums) -> dict[str, Float[Array, ""]]:
    """Name the metrics fp8/*_q, fp8/*_k and fp8/*_v.

    Of what `observe_qkv` saw under the scales that it was given.
    """
    found = {}
    for i, role in enumerate("qkv"):
        found |= jax.tree.map(lambda x, i=i: x[:, :, i], sums).metrics(role)
    return found


@partial(jax.jit, static_argnames="recipe")
def scales_from_amax(amax: Float[Array, "m layers 3 *kv_heads"], recipe: Recipe) -> KVScales:
    """Compute KV scales from the amaxes of m micro-batches.

    A layer whose amax is 0 gets scale 1; a NaN or an infinity stays, so that the sync's finite flag
    shows it.
    """
    ordered = jnp.sort(amax, axis=0)
    picked = ordered[round(recipe.kv_percentile / 100 * (amax.shape[0] - 1))]
    picked = jnp.where(jnp.isnan(amax).any(axis=0), jnp.nan, picked)
    scales = _scales(picked, recipe)
    return KVScales(scales[:, 0], scales[:, 1], scales[:, 2])


def _scales(amax: Float[Array, ...], recipe: Recipe) -> Float[Array, ...]:
    """Scales from amaxes [..., 3], or [..., 3, kv_heads], by the recipe's rule."""
    limits = recipe.kv_constants or [
        max_value(fmt) if fmt.quantized else 1.0 for fmt in _formats(recipe)
    ]
    divisor = jnp.asarray(limits, jnp.float32)
    if recipe.kv_granularity == "head":
        divisor = divisor[:, None]
    return jnp.where(amax == 0, 1.0, amax * recipe.kv_margin / divisor)


def _formats(recipe: Recipe) -> tuple[TensorFormat, TensorFormat, TensorFormat]:
    return recipe.rollout.query, recipe.rollout.key, recipe.rollout.value


@partial(jax.jit, static_argnames="recipe")
def calibrated(
    sums: QuantizationSums, recipe: Recipe
) -> tuple[KVScales, dict[str, Float[Array, ""]]]:
    """Compute scales from what was measured, and what the scales served until then did to it."""
    return scales_from_amax(sums.amax, recipe), qkv_metrics(sums)


def calibrate_on_prompts(
    policy: Policy, prompts, recipe: Recipe, dtype: jnp.dtype, backend: Backend = "auto"
) -> KVScales | None:
    """Measure KV scales on prompts alone by the trainer's forward: what step 0 starts from.

    Args:
        prompts: rollout.engine.Prompts.

    Returns:
        None where the recipe does not quantize the cache, or leaves its scales to the rollout
        (`LocalEngine.calibrate`).
    """
    if not recipe.quantizes_cache or recipe.kv_calibration == "rollout":
        return None
    seen = observe_qkv(
        policy, prompts.tokens, prompts.lengths, recipe=recipe, dtype=dtype, backend=backend
    )
    return scales_from_amax(seen.amax, recipe)
