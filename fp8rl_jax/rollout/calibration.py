"""Scales of the FP8 KV cache, measured anew at every weight sync.

One number a layer for each of Q, K and V: amax after q/k-norm and rope, over the tokens of a micro-batch; then a percentile
over the micro-batches, a head-room factor, and the format's largest value:

    scale = percentile(amax_1 ... amax_m) * 1.05 / 448

as in NeMo RL's trainer-side calibration (nemo_rl, calibrate_qkv_fp8_scales). Note that the percentile is over micro-batches,
not over elements: below some 500 of them 99.9 is the largest.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fp8rl_jax.config.recipe import Recipe
from fp8rl_jax.models.cache import KVCache, KVScales
from fp8rl_jax.models.forward import forward
from fp8rl_jax.models.policy import Policy, cast
from fp8rl_jax.precision import max_value

# what an observing forward runs under: amax is read before anything is quantized
_OBSERVE = Recipe("observe")


@partial(jax.jit, static_argnames=("dtype",))
def observe_amax(
    policy: Policy,
    prompts: Int[Array, "p s"],
    lengths: Int[Array, " p"],
    completions: Int[Array, "b t"] | None = None,
    mask: Bool[Array, "b t"] | None = None,
    *,
    dtype: jnp.dtype,
) -> Float[Array, "layers 3"]:
    """Largest |q|, |k|, |v| of each layer over the prompts and, if given, their completions.

    Args:
        policy: master or rollout policy; it is cast to `dtype`, quantized linears stay as they are.
        prompts, lengths: right-padded prompts.
        completions, mask: B = p * n completions and their real tokens.
        dtype: compute dtype.
    """
    policy = cast(policy, dtype)
    segments = (jnp.arange(prompts.shape[1]) < lengths[:, None]).astype(jnp.int32)
    first = forward(policy, prompts, segment_ids=segments, recipe=_OBSERVE, observe_amax=True)
    if completions is None:
        return first.amax
    starts = jnp.repeat(lengths, completions.shape[0] // prompts.shape[0])
    positions = starts[:, None] + jnp.arange(completions.shape[1])
    second = forward(
        policy,
        completions,
        positions,
        mask.astype(jnp.int32),
        KVCache(first.cache),
        _OBSERVE,
        keep_cache=False,
        observe_amax=True,
    )
    return jnp.maximum(first.amax, second.amax)


def scales_from_amax(amax: Float[Array, "m layers 3"], recipe: Recipe) -> KVScales:
    """KV scales from the amaxes of m micro-batches.

    A layer whose amax is 0 gets scale 1; a NaN or an infinity stays, so that the sync's finite flag shows it.
    """
    ordered = jnp.sort(amax, axis=0)
    picked = ordered[round(recipe.kv_percentile / 100 * (amax.shape[0] - 1))]
    picked = jnp.where(jnp.isnan(amax).any(axis=0), jnp.nan, picked)
    formats = (recipe.rollout.query, recipe.rollout.key, recipe.rollout.value)
    limits = jnp.asarray([max_value(fmt) if fmt.quantized else 1.0 for fmt in formats])
    scales = jnp.where(picked == 0, 1.0, picked * recipe.kv_margin / limits)
    return KVScales(scales[:, 0], scales[:, 1], scales[:, 2])


def calibrate_on_prompts(policy: Policy, prompts, recipe: Recipe, dtype: jnp.dtype) -> KVScales | None:
    """KV scales measured on prompts alone: what step 0 of a run, evaluation and generation start from.

    Args:
        prompts: rollout.engine.Prompts.

    Returns:
        None where the recipe does not quantize the cache, or leaves its scales to the rollout's first forward.
    """
    if not recipe.quantizes_cache or recipe.kv_calibration != "trainer":
        return None
    return scales_from_amax(observe_amax(policy, prompts.tokens, prompts.lengths, dtype=dtype)[None], recipe)
