"""Scales of the FP8 KV cache, measured anew at every weight sync.

One number a layer for each of Q, K and V: amax after q/k-norm and rope, over the tokens of a
micro-batch; then a percentile over the micro-batches, a head-room factor, and the format's largest
value:

    scale = percentile(amax_1 ... amax_m) * 1.05 / 448

as in NeMo RL's trainer-side calibration (nemo_rl, calibrate_qkv_fp8_scales). Note that the
percentile is over micro-batches, not over elements: below some 500 of them 99.9 is the largest.

Two sides can measure:

    trainer   the trainer's forward, nothing of Q, K and V quantized: the step's tokens, or prompts
              alone before the first step
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

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fp8rl_jax.config.formats import TensorFormat
from fp8rl_jax.config.recipe import Recipe
from fp8rl_jax.models.cache import KVCache, KVScales
from fp8rl_jax.models.forward import forward
from fp8rl_jax.models.lora import has_adapters
from fp8rl_jax.models.policy import Policy
from fp8rl_jax.models.trained import trainer_policy
from fp8rl_jax.parallel import split_batch
from fp8rl_jax.precision import (
    QuantizationSums,
    is_quantized,
    max_value,
    quantize_per_tensor,
    stack_sums,
)
from pallas_kernels.backend import Backend


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
    """Largest magnitudes of Q, K and V over the prompts and, if given, their completions, and what
    quantization does to them.

    Args:
        policy: masters, which run in the trainer's formats; or a rollout's policy, whose linears
            run in the rollout's.
        prompts, lengths: right-padded prompts.
        completions, mask: B = p * n completions and their real tokens.
        scales: those whose effect is measured; without them there is none.
        recipe: its rollout formats of Q, K and V, and of masters the trainer's of the linears.
        dtype: compute dtype.
        micro_batches: parts of equal size, whole prompts each, that are run one after the other.
        backend: kernels of the forward; those of the trainer, so that its scales are those of its
            own forward.

    Returns:
        Sums of shape [m, layers, 3].
    """
    if any(map(is_quantized, jax.tree.leaves(policy, is_leaf=is_quantized))) and not has_adapters(
        policy
    ):
        # a rollout's weights, measured as it multiplies them; a base of adapters rests in FP8 on
        # both sides
        linears = replace(
            recipe.trainer, weight=recipe.rollout.weight, activation=recipe.rollout.activation
        )
        recipe = replace(recipe, trainer=linears)
    policy = trainer_policy(policy, recipe, dtype, backend)
    run = partial(
        forward,
        policy,
        recipe=recipe,
        phase="train",
        observe=partial(_observe, _formats(recipe)),
        backend=backend,
    )

    def one(micro):
        prompts, lengths, completions, mask = micro
        segments = (jnp.arange(prompts.shape[1]) < lengths[:, None]).astype(jnp.int32)
        first = run(prompts, segment_ids=segments, cache=KVCache(scales=scales))
        if completions is None:
            return first.observed
        starts = jnp.repeat(lengths, completions.shape[0] // prompts.shape[0])
        positions = starts[:, None] + jnp.arange(completions.shape[1])
        cache = KVCache(first.cache, scales=scales)
        second = run(completions, positions, mask.astype(jnp.int32), cache, keep_cache=False)
        return first.observed + second.observed

    return jax.lax.map(one, split_batch((prompts, lengths, completions, mask), micro_batches))


@partial(jax.jit, static_argnames=("recipe", "backend"))
def observe_served(
    policy: Policy,
    prompts: Int[Array, "p s"],
    lengths: Int[Array, " p"],
    scales: KVScales | None = None,
    *,
    recipe: Recipe,
    backend: Backend = "auto",
) -> QuantizationSums:
    """`observe_qkv` of prompts by the forward that serves them: a prefill whose layers attend with
    scales of their own amaxes.

    Args:
        policy: the rollout's, as an engine holds it.
        prompts, lengths: right-padded prompts, one batch.
        scales: those whose effect is measured; the forward does not use them.
        recipe: its rollout formats, and the rule from amax to scale.

    Returns:
        Sums of shape [1, layers, 3].
    """

    def calibrate(sums: QuantizationSums) -> tuple[Array, Array, Array]:
        return tuple(_scales(sums.amax, recipe))

    segments = (jnp.arange(prompts.shape[1]) < lengths[:, None]).astype(jnp.int32)
    seen = forward(
        policy,
        prompts,
        segment_ids=segments,
        cache=KVCache(scales=scales),
        recipe=recipe,
        phase="prefill",
        observe=partial(_observe, _formats(recipe)),
        calibrate=calibrate,
        keep_cache=False,
        backend=backend,
    )
    return jax.tree.map(lambda x: x[None], seen.observed)


def _formats(recipe: Recipe) -> tuple[TensorFormat, TensorFormat, TensorFormat]:
    return recipe.rollout.query, recipe.rollout.key, recipe.rollout.value


def _observe(formats: tuple[TensorFormat, ...], q, k, v, real, scales) -> QuantizationSums:
    sums = []
    for x, fmt, scale in zip((q, k, v), formats, scales or (None,) * 3, strict=True):
        restored, limit = x.astype(jnp.float32), jnp.inf
        if fmt.quantized and scale is not None:
            restored, limit = (
                quantize_per_tensor(x, scale, fmt).astype(jnp.float32) * scale,
                scale * max_value(fmt),
            )
        sums.append(QuantizationSums.of(x, restored, limit, real))
    return stack_sums(sums)


@jax.jit
def qkv_metrics(sums: QuantizationSums) -> dict[str, Float[Array, ""]]:
    """fp8/*_q, fp8/*_k and fp8/*_v, from what `observe_qkv` saw under the scales that it was
    given."""
    found = {}
    for i, role in enumerate("qkv"):
        found |= jax.tree.map(lambda x, i=i: x[..., i], sums).metrics(role)
    return found


@partial(jax.jit, static_argnames="recipe")
def scales_from_amax(amax: Float[Array, "m layers 3"], recipe: Recipe) -> KVScales:
    """KV scales from the amaxes of m micro-batches.

    A layer whose amax is 0 gets scale 1; a NaN or an infinity stays, so that the sync's finite flag
    shows it.
    """
    ordered = jnp.sort(amax, axis=0)
    picked = ordered[round(recipe.kv_percentile / 100 * (amax.shape[0] - 1))]
    picked = jnp.where(jnp.isnan(amax).any(axis=0), jnp.nan, picked)
    scales = _scales(picked, recipe)
    return KVScales(scales[:, 0], scales[:, 1], scales[:, 2])


def _scales(amax: Float[Array, "*layers 3"], recipe: Recipe) -> Float[Array, "*layers 3"]:
    limits = recipe.kv_constants or [
        max_value(fmt) if fmt.quantized else 1.0 for fmt in _formats(recipe)
    ]
    return jnp.where(amax == 0, 1.0, amax * recipe.kv_margin / jnp.asarray(limits, jnp.float32))


def calibrate_on_prompts(
    policy: Policy, prompts, recipe: Recipe, dtype: jnp.dtype, backend: Backend = "auto"
) -> KVScales | None:
    """KV scales measured on prompts alone by the trainer's forward: what step 0 of a run starts
    from.

    Args:
        prompts: rollout.engine.Prompts.

    Returns:
        None where the recipe does not quantize the cache, or leaves its scales to the rollout
        (`LocalEngine.calibrate`).
    """
    if not recipe.quantizes_cache or recipe.kv_calibration != "trainer":
        return None
    seen = observe_qkv(
        policy, prompts.tokens, prompts.lengths, recipe=recipe, dtype=dtype, backend=backend
    )
    return scales_from_amax(seen.amax, recipe)
