"""Prefill and decode as one compiled program, reused for every step of a run.

The samples of a prompt share its prefill and its keys. Decode is a loop that ends when every row has stopped. A row's
randomness comes from (key, prompt id, sample number, position) alone, so the order of a batch does not matter.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from fp8rl_jax.config.recipe import Recipe
from fp8rl_jax.models.cache import KVBlock, KVCache, KVScales, empty_block
from fp8rl_jax.models.forward import forward
from fp8rl_jax.models.policy import Policy
from fp8rl_jax.parallel import constrain
from fp8rl_jax.precision import element_dtype, hoist, is_quantized
from fp8rl_jax.rollout.sampling import Sampling, draw
from pallas_kernels.backend import Backend
from pallas_kernels.matmul.reference import dot


class Completions(NamedTuple):
    """B = prompts * n rows, prompt b // n each, T = sampling.max_new_tokens. After a row's end: pad / False / 0 / False / -1."""

    tokens: Int[Array, "b t"]
    mask: Bool[Array, "b t"]
    behaviour_logprobs: Float[Array, "b t"]
    policy_logprobs: Float[Array, "b t"]
    stopped: Bool[Array, " b"]
    prompt_expert_ids: Int[Array, "p s sparse k"] | None = None
    expert_ids: Int[Array, "b t sparse k"] | None = None


class _State(NamedTuple):
    t: Array
    token: Array
    done: Array
    own: tuple
    out: Completions


@partial(jax.jit, static_argnames=("samples", "sampling", "recipe", "backend", "expert_ids"))
def generate(
    policy: Policy,
    prompts: Int[Array, "p s"],
    lengths: Int[Array, " p"],
    prompt_ids: Int[Array, " p"],
    key: Key[Array, ""],
    scales: KVScales | None = None,
    *,
    samples: int,
    sampling: Sampling,
    recipe: Recipe,
    backend: Backend = "auto",
    expert_ids: bool = False,
) -> Completions:
    """Samples `samples` completions of each prompt.

    Args:
        policy: the rollout's policy, in the compute dtype, linears quantized as the recipe says (rollout.engine makes it).
        prompts: right-padded token ids; at least one token each.
        lengths: tokens of each prompt.
        prompt_ids: identity of each prompt in the data set; with `key` it fixes the draws.
        scales: KV scales, where the recipe quantizes the cache.
        samples: completions a prompt.
        expert_ids: return the experts that each token used (rollout.engine.Rollout says how).

    Raises:
        ValueError: `expert_ids` of a policy that has no experts.
    """
    if expert_ids and policy.config.experts is None:
        raise ValueError("generate: expert_ids of a policy without experts")
    p, s = prompts.shape
    rows, width = p * samples, sampling.max_new_tokens
    # unpacking FP8 weights once instead of at every token; the identity where weights are plain arrays
    policy = jax.tree.map(partial(hoist, backend=backend), policy, is_leaf=is_quantized)
    prompts = constrain(prompts, "batch", None)
    segments = (jnp.arange(s) < lengths[:, None]).astype(jnp.int32)
    prefill = forward(
        policy, prompts, segment_ids=segments, cache=KVCache(scales=scales), recipe=recipe, phase="prefill", backend=backend
    )
    last = jnp.take_along_axis(prefill.hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    first_logits = jnp.repeat(dot(last, policy.head), samples, axis=0)
    starts = jnp.repeat(lengths, samples)
    row_keys = _row_keys(key, prompt_ids, samples)

    dtype = element_dtype(recipe.rollout.key) if recipe.rollout.key.quantized else policy.embed_tokens.value.dtype
    own = empty_block(policy.config, rows, width, dtype, policy.stacked)
    stops = jnp.asarray(sampling.stop_token_ids, jnp.int32)
    pad = policy.config.pad_token_id or 0

    def record(out: Completions, t, logits, done):
        """Draws token t of every row that still runs."""
        tokens, behaviour, full = draw(logits, jax.vmap(jax.random.fold_in, (0, None))(row_keys, t), sampling)
        tokens = jnp.where(done, pad, tokens).astype(jnp.int32)
        live = ~done
        stopped = live & jnp.isin(tokens, stops) if stops.size else jnp.zeros_like(done)
        column = (tokens, live, jnp.where(live, behaviour, 0.0), jnp.where(live, full, 0.0))
        written = [lax.dynamic_update_slice(old, new[:, None], (0, t)) for old, new in zip(out[:4], column, strict=True)]
        out = Completions(*written, out.stopped | stopped, out.prompt_expert_ids, out.expert_ids)
        return out, tokens, done | stopped

    def step(state: _State) -> _State:
        cache = KVCache(prefill.cache, KVBlock(*state.own, own.mask), state.t, scales)
        positions = (starts + state.t)[:, None]
        result = forward(policy, state.token[:, None], positions, cache=cache, recipe=recipe, phase="decode", backend=backend)
        logits = dot(result.hidden[:, 0], policy.head)
        out = state.out
        if expert_ids:  # of token t, which this step has fed
            used = _known(result.routes, lax.dynamic_slice_in_dim(out.mask, state.t, 1, axis=1))
            out = out._replace(expert_ids=lax.dynamic_update_slice(out.expert_ids, used, (0, state.t, 0, 0)))
        out, token, done = record(out, state.t + 1, logits, state.done)
        return _State(state.t + 1, token, done, (result.cache.keys, result.cache.values), out)

    blank = Completions(
        jnp.full((rows, width), pad, jnp.int32),
        jnp.zeros((rows, width), bool),
        jnp.zeros((rows, width), jnp.float32),
        jnp.zeros((rows, width), jnp.float32),
        jnp.zeros(rows, bool),
        _known(prefill.routes, segments > 0) if expert_ids else None,
        jnp.full((rows, width, *prefill.routes.shape[2:]), -1, prefill.routes.dtype) if expert_ids else None,
    )
    out, token, done = record(blank, jnp.int32(0), first_logits, jnp.zeros(rows, bool))
    start = _State(jnp.int32(0), token, done, (own.keys, own.values), out)
    return lax.while_loop(lambda s: (s.t < width - 1) & ~s.done.all(), step, start).out


def _known(routes: Int[Array, "b t sparse k"], real: Bool[Array, "b t"]) -> Int[Array, "b t sparse k"]:
    """`routes`, -1 where there is no token."""
    return jnp.where(real[..., None, None], routes, jnp.array(-1, routes.dtype))


def _row_keys(key, prompt_ids, samples):
    def one(prompt_id, sample):
        return jax.random.fold_in(jax.random.fold_in(key, prompt_id), sample)

    keys = jax.vmap(lambda i: jax.vmap(lambda s: one(i, s))(jnp.arange(samples)))(prompt_ids)
    return keys.reshape(-1)
