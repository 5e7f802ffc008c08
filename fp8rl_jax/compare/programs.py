"""Both sides' whole programs on given tokens: the update's forward, and the sampler's prefill and
decode.

A comparison looks at a layer at a time, with every result in memory. In a whole program nothing is
in memory that need not be, and what the code leaves to the compiler shows: XLA may keep a 16-bit
result in float32 (excess precision), in each program where it likes. So each program is run twice,
as it is and with that forbidden; where roundings are explicit no bit changes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from fp8rl_jax.compare.probe import Tokens
from fp8rl_jax.compare.statistics import logprob_differences
from fp8rl_jax.config.recipe import Recipe
from fp8rl_jax.models.arithmetic import arithmetic
from fp8rl_jax.models.cache import KVBlock, KVCache, KVScales, empty_block
from fp8rl_jax.models.forward import Phase, forward
from fp8rl_jax.models.logprobs import token_logprobs
from fp8rl_jax.models.policy import Policy
from fp8rl_jax.precision import element_dtype, hoist, is_quantized
from fp8rl_jax.rollout.sampling import logprob_of
from pallas_kernels.backend import Backend


def at_once(
    policy: Policy,
    tokens: Tokens,
    scales: KVScales | None = None,
    *,
    recipe: Recipe,
    phase: Phase = "train",
    backend: Backend = "auto",
) -> Float[Array, "p t"]:
    """Log-probabilities of the completions as the update takes them: a prompt, then its completion
    over the prompt's keys.

    Args:
        policy: in the form of `phase`.
        phase: "prefill" runs the trainer's program with the rollout's formats.
    """
    lengths, masks, width = tokens.prompt_lengths, tokens.masks, tokens.completions.shape[1]
    run = partial(forward, policy, recipe=recipe, phase=phase, backend=backend)
    prompt = run(
        tokens.prompts, segment_ids=masks.prompt.astype(jnp.int32), cache=KVCache(scales=scales)
    )
    cache, positions = KVCache(prompt.cache, scales=scales), lengths[:, None] + jnp.arange(width)
    rest = run(
        tokens.completions, positions, masks.completion.astype(jnp.int32), cache, keep_cache=False
    )
    last = jnp.take_along_axis(prompt.hidden, (lengths - 1)[:, None, None], axis=1)
    hidden = jnp.concatenate([last, rest.hidden[:, :-1]], axis=1)
    return token_logprobs(hidden, policy.head, tokens.completions, exact=recipe.exact)[0]


def one_by_one(
    policy: Policy,
    tokens: Tokens,
    scales: KVScales | None = None,
    *,
    recipe: Recipe,
    backend: Backend = "auto",
) -> Float[Array, "p t"]:
    """Log-probabilities of the completions as the sampler takes them: prefill, then a token at a
    time over its cache.

    Args:
        policy: in the rollout's form.
    """
    policy = jax.tree.map(partial(hoist, backend=backend), policy, is_leaf=is_quantized)
    lengths, completions, width = (
        tokens.prompt_lengths,
        tokens.completions,
        tokens.completions.shape[1],
    )
    run = partial(forward, policy, recipe=recipe, backend=backend)
    segments = tokens.masks.prompt.astype(jnp.int32)
    prefill = run(
        tokens.prompts, segment_ids=segments, cache=KVCache(scales=scales), phase="prefill"
    )
    last = jnp.take_along_axis(prefill.hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    dtype = (
        element_dtype(recipe.rollout.key)
        if recipe.rollout.key.quantized
        else policy.embed_tokens.value.dtype
    )
    own = empty_block(policy.config, len(completions), width, dtype, policy.stacked)

    def score(hidden, token):
        return logprob_of(
            arithmetic(recipe.exact).dot(hidden, policy.head), token, 1.0, recipe.exact
        )

    def step(kept, now):
        t, token, following = now
        cache = KVCache(prefill.cache, KVBlock(*kept, own.mask), t, scales)
        result = run(token[:, None], (lengths + t)[:, None], cache=cache, phase="decode")
        return (result.cache.keys, result.cache.values), score(result.hidden[:, 0], following)

    first = score(last, completions[:, 0])
    steps = (jnp.arange(width - 1), completions[:, :-1].T, completions[:, 1:].T)
    _, rest = lax.scan(step, (own.keys, own.values), steps)
    return jnp.concatenate([first[:, None], rest.T], axis=1)


def excess_precision(
    policy: Policy,
    tokens: Tokens,
    scales: KVScales | None,
    recipe: Recipe,
    rollout: bool,
    backend: Backend = "auto",
) -> dict[str, Any]:
    """`logprob_differences` of a side's whole program as it is and compiled without XLA's excess
    precision."""
    run = partial(one_by_one if rollout else at_once, recipe=recipe, backend=backend)
    allowed, forbidden = (
        jax.jit(run, compiler_options={"xla_allow_excess_precision": kept})(policy, tokens, scales)
        for kept in (True, False)
    )
    return logprob_differences(
        np.asarray(allowed), np.asarray(forbidden), np.asarray(tokens.masks.completion)
    )
