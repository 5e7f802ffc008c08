"""Prefill and decode as one compiled program, reused for every step of a run.

The samples of a prompt share its prefill and its keys. Decode is a loop that ends when every row
has stopped. A row's randomness comes from (key, prompt id, sample number, position) alone, so the
order of a batch does not matter.

    generate     the whole loop in one call
    stream       the same two halves, `begin` once and `proceed` a few tokens at a time, for a
                 terminal
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from fp8rl_jax.models.cache import KVBlock, KVCache, empty_block
from fp8rl_jax.models.forms import predequantized
from fp8rl_jax.models.forward import forward, mixer_of
from fp8rl_jax.models.logprobs import Support, token_logprobs
from fp8rl_jax.models.policy import Policy
from fp8rl_jax.parallel import DECODE_RULES, ShardingRules, constrain, policy_shardings
from fp8rl_jax.precision import element_dtype
from fp8rl_jax.rollout.sampling import PhraseStates, Sampling, draw
from pallas_kernels.backend import platform, resolve
from pallas_kernels.decode_attention import whole_slots


class Prompts(NamedTuple):
    """Right-padded prompts.

    Attributes:
        tokens: int32 [p, s].
        lengths: int32 [p].
        ids: int32 [p], identity in the data set; it fixes the draws.
    """

    tokens: Int[Array, "p s"]
    lengths: Int[Array, " p"]
    ids: Int[Array, " p"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rollout:
    """What an engine returns: B = prompts * n completions; row b answers prompt b // n.

    Attributes:
        prompts: as given.
        tokens: int32 [b, t], pad behind the end.
        mask: [b, t], True on sampled tokens, the stop token included.
        behaviour_logprobs: float32 [b, t], of the distribution that was sampled.
        policy_logprobs: float32 [b, t], same temperature, whole vocabulary.
        stopped: [b], True where a stop token or a stop string ended the row, False where its length
            did.
        weight_version: number of the weight sync that served it.
        prompt_logprobs: float32 [p, s], of each prompt token given those before it, at the sampling
            temperature (1 for greedy), over the whole vocabulary; 0 for the first and for padding.
            None unless asked for.
        prompt_expert_ids, expert_ids: [p, s, layers with experts, k] and [b, t, layers with
            experts, k], the experts that each token used, -1 where there is no token and for the
            last of a row, which no layer has seen. None unless asked for.
        token_versions: int32 [b, t], number of the weight sync that served each token; None where
            that is `weight_version` for all.
        support: [b, t, k], what each token could have been; then behaviour_logprobs are over it.
            None unless `Sampling.keeps_support`.
        metrics: rollout/*, of an engine that counts something.
    """

    prompts: Prompts
    tokens: Int[Array, "b t"]
    mask: Bool[Array, "b t"]
    behaviour_logprobs: Float[Array, "b t"]
    policy_logprobs: Float[Array, "b t"]
    stopped: Bool[Array, " b"]
    weight_version: int = field(default=0, metadata={"static": True})
    prompt_logprobs: Float[Array, "p s"] | None = None
    prompt_expert_ids: Int[Array, "p s sparse k"] | None = None
    expert_ids: Int[Array, "b t sparse k"] | None = None
    token_versions: Int[Array, "b t"] | None = None
    support: Support | None = None
    metrics: dict[str, Array] = field(default_factory=dict)

    def of_prompts(self, chosen: Int[Array, " q"] | Int[np.ndarray, " q"]) -> Rollout:
        """Pick prompts by their places, each with its completions, in this order."""
        rows = rows_of(chosen, len(self.tokens) // len(self.prompts.lengths))

        def pick(places, *names: str) -> dict[str, Any]:
            values = {name: getattr(self, name) for name in names}
            return jax.tree.map(lambda x: x[places], values)

        return replace(
            self,
            **pick(chosen, "prompts", "prompt_logprobs", "prompt_expert_ids"),
            **pick(rows, "tokens", "mask", "behaviour_logprobs", "policy_logprobs", "stopped"),
            **pick(rows, "expert_ids", "token_versions", "support"),
        )


class _Fixed(NamedTuple):
    """What decode reads and never writes."""

    prefill: KVBlock
    starts: Int[Array, " b"]
    keys: Key[Array, " b"]
    slots: Bool[Array, "b t"]
    limits: Int[Array, " b"] | None
    prompt_logprobs: Float[Array, "p s"] | None
    prompt_expert_ids: Int[Array, "p s sparse k"] | None


class _State(NamedTuple):
    """t: last token drawn; the rest as in Rollout."""

    t: Int[Array, ""]
    token: Int[Array, " b"]
    done: Bool[Array, " b"]
    completion: tuple
    phrases: PhraseStates
    tokens: Int[Array, "b t"]
    mask: Bool[Array, "b t"]
    behaviour_logprobs: Float[Array, "b t"]
    policy_logprobs: Float[Array, "b t"]
    support: Support | None
    stopped: Bool[Array, " b"]
    expert_ids: Int[Array, "b t sparse k"] | None


@partial(jax.jit, static_argnames=("samples", "expert_ids", "prompt_logprobs"))
def generate(
    policy: Policy,
    prompts: Int[Array, "p s"],
    lengths: Int[Array, " p"],
    prompt_ids: Int[Array, " p"],
    key: Key[Array, ""],
    limits: Int[Array, " b"] | None = None,
    *,
    samples: int,
    sampling: Sampling,
    expert_ids: bool = False,
    prompt_logprobs: bool = False,
) -> Rollout:
    """Sample `samples` completions of each prompt.

    Args:
        policy: in the rollout's form (models.forms), with its KV scales where it has an FP8 cache.
        prompts: right-padded token ids; at least one token each.
        lengths: tokens of each prompt.
        prompt_ids: identity of each prompt in the data set; with `key` it fixes the draws.
        limits: most tokens of each row, at least 1, where that is less than
            `sampling.max_new_tokens`.
        samples: completions a prompt.
        expert_ids: return the experts that each token used (rollout.engine.Rollout says how).
        prompt_logprobs: return those of the prompts' tokens too (rollout.engine.Rollout says
            which).

    Raises:
        ValueError: `expert_ids` of a policy that has no experts.
    """
    policy = for_decode(policy)
    fixed, state = _begin(
        policy,
        prompts,
        lengths,
        prompt_ids,
        key,
        limits,
        samples=samples,
        sampling=sampling,
        expert_ids=expert_ids,
        prompt_logprobs=prompt_logprobs,
    )
    state = _proceed(policy, fixed, state, sampling.max_new_tokens - 1, sampling=sampling)
    return _rollout(Prompts(prompts, lengths, prompt_ids), fixed, state)


def stream(
    policy: Policy,
    *inputs: Any,
    samples: int = 1,
    sampling: Sampling,
    every: int = 1,
) -> Iterator[Rollout]:
    """Sample as `generate`, with a look at the completions as they grow.

    As numpy arrays, after the first token and then after every `every`.

    Args:
        inputs: prompts, lengths, prompt_ids and key; these and the rest as `generate` takes them.

    Yields:
        The completions so far; the last are those that `generate` returns.
    """
    policy = _for_decode_alone(policy)
    fixed, state = _begin_alone(
        policy,
        *inputs,
        samples=samples,
        sampling=sampling,
        expert_ids=False,
        prompt_logprobs=False,
    )
    last, prompts = sampling.max_new_tokens - 1, Prompts(*inputs[:3])
    while True:
        # copies: the state's own buffers are handed on to the next call
        seen = jax.tree.map(np.array, state._replace(completion=()))
        yield _rollout(prompts, fixed, seen)
        if seen.t >= last or seen.done.all():
            return
        until = jnp.int32(min(seen.t + every, last))
        state = _proceed_alone(policy, fixed, state, until, sampling=sampling)


def _begin(
    policy: Policy,
    prompts,
    lengths,
    prompt_ids,
    key,
    limits=None,
    *,
    samples: int,
    sampling: Sampling,
    expert_ids: bool,
    prompt_logprobs: bool,
) -> tuple[_Fixed, _State]:
    """Prefill, and the first token of every row."""
    if expert_ids and policy.config.experts is None:
        raise ValueError("generate: expert_ids of a policy without experts")
    p, s = prompts.shape
    rows, width = p * samples, sampling.max_new_tokens
    prompts = constrain(prompts, "batch", None)
    segments = (jnp.arange(s) < lengths[:, None]).astype(jnp.int32)
    prefill = forward(policy, prompts, segment_ids=segments)
    assert prefill.cache is not None
    last = jnp.take_along_axis(prefill.hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    first_logits = jnp.repeat(policy.compute.product(last, policy.head), samples, axis=0)
    starts, keys = jnp.repeat(lengths, samples), row_keys(key, prompt_ids, samples)
    kind = loop_dtype(policy)
    slots = partial(whole_slots, backend=policy.compute.backend)
    empty = empty_block(policy.config, rows, slots(width), kind, policy.stacked)
    prefix = _read_often(prefill.cache, kind, slots(s))
    logprobs = routes = sampled_routes = None
    if prompt_logprobs:
        logprobs = _prompt_logprobs(policy, prompts, segments, prefill.hidden, sampling)
    if expert_ids:
        assert prefill.routes is not None
        routes = _known(prefill.routes, segments > 0)
        shape = (rows, width, *prefill.routes.shape[2:])
        sampled_routes = jnp.full(shape, -1, prefill.routes.dtype)
    fixed = _Fixed(prefix, starts, keys, empty.mask, limits, logprobs, routes)
    state = _State(
        jnp.int32(0),
        jnp.zeros(rows, jnp.int32),
        jnp.zeros(rows, bool),
        (empty.keys, empty.values),
        sampling.at_start(rows),
        tokens=jnp.full((rows, width), policy.config.pad_token_id or 0, jnp.int32),
        mask=jnp.zeros((rows, width), bool),
        behaviour_logprobs=jnp.zeros((rows, width), jnp.float32),
        policy_logprobs=jnp.zeros((rows, width), jnp.float32),
        support=sampling.no_support(rows),
        stopped=jnp.zeros(rows, bool),
        expert_ids=sampled_routes,
    )
    return fixed, _record(policy, fixed, state, state.t, first_logits, sampling)


def _read_often(block: KVBlock, dtype: jnp.dtype, slots: int) -> KVBlock:
    """A block in the dtype that the decode loop reads, with empty slots behind its own."""
    extra = slots - block.mask.shape[1]

    def wider(x: Array, axis: int) -> Array:
        return jnp.pad(x, [(0, extra if i == axis else 0) for i in range(x.ndim)])

    keys, values = jax.tree.map(
        lambda x: wider(x.astype(dtype), x.ndim - 2), (block.keys, block.values)
    )
    positions = None if block.positions is None else wider(block.positions, 1)
    return KVBlock(keys, values, wider(block.mask, 1), positions)


def _proceed(
    policy: Policy,
    fixed: _Fixed,
    state: _State,
    last: int | Int[Array, ""],
    *,
    sampling: Sampling,
) -> _State:
    """Draws on until every row has its token `last` or has stopped."""

    def step(state: _State) -> _State:
        cache = KVCache(fixed.prefill, KVBlock(*state.completion, fixed.slots), state.t)
        positions = (fixed.starts + state.t)[:, None]
        result = forward(policy, state.token[:, None], positions, cache=cache)
        logits = policy.compute.product(result.hidden[:, 0], policy.head)
        used = state.expert_ids
        if used is not None:  # of token t, which this step has fed
            assert result.routes is not None
            fed = _known(result.routes, lax.dynamic_slice_in_dim(state.mask, state.t, 1, axis=1))
            used = lax.dynamic_update_slice(used, fed, (0, state.t, 0, 0))
        assert result.cache is not None
        written = (result.cache.keys, result.cache.values)
        state = state._replace(completion=written, expert_ids=used)
        drawn = _record(policy, fixed, state, state.t + 1, logits, sampling)
        return drawn._replace(t=state.t + 1)

    return lax.while_loop(lambda s: (s.t < last) & ~s.done.all(), step, state)


def _record(
    policy: Policy,
    fixed: _Fixed,
    state: _State,
    t,
    logits: Float[Array, "b vocab"],
    sampling: Sampling,
) -> _State:
    """Draws token t of every row that still runs."""
    done = state.done
    tokens, behaviour, full, support = draw(
        logits,
        jax.vmap(jax.random.fold_in, (0, None))(fixed.keys, t),
        sampling,
        sampling.banned(state.phrases),
        policy.compute,
    )
    tokens = jnp.where(done, policy.config.pad_token_id or 0, tokens).astype(jnp.int32)
    live = ~done
    stopped, phrases = sampling.read(tokens, state.phrases)
    stopped &= live
    if support is not None:
        support = support._replace(count=jnp.where(live, support.count, 0))
    drawn = (tokens, live, jnp.where(live, behaviour, 0.0), jnp.where(live, full, 0.0), support)
    tables = (state.tokens, state.mask, state.behaviour_logprobs, state.policy_logprobs)
    written = jax.tree.map(
        lambda old, new: lax.dynamic_update_slice_in_dim(old, new[:, None], t, axis=1),
        (*tables, state.support),
        drawn,
    )
    stopped_rows = state.stopped | stopped
    ended = done | stopped
    if fixed.limits is not None:
        ended |= t + 1 >= fixed.limits
    return _State(
        state.t,
        tokens,
        ended,
        state.completion,
        phrases,
        *written,
        stopped_rows,
        state.expert_ids,
    )


def _rollout(prompts: Prompts, fixed: _Fixed, state: _State) -> Rollout:
    return Rollout(
        prompts,
        state.tokens,
        state.mask,
        state.behaviour_logprobs,
        state.policy_logprobs,
        state.stopped,
        prompt_logprobs=fixed.prompt_logprobs,
        prompt_expert_ids=fixed.prompt_expert_ids,
        expert_ids=state.expert_ids,
        support=state.support,
    )


def _prompt_logprobs(
    policy: Policy, prompts, segments, hidden, sampling: Sampling
) -> Float[Array, "p s"]:
    logprobs, _ = token_logprobs(
        hidden[:, :-1], policy, prompts[:, 1:], sampling.temperature or 1.0
    )
    return jnp.pad(jnp.where(segments[:, 1:] > 0, logprobs, 0.0), ((0, 0), (1, 0)))


def _known(
    routes: Int[Array, "b t sparse k"], real: Bool[Array, "b t"]
) -> Int[Array, "b t sparse k"]:
    """`routes`, -1 where there is no token."""
    return jnp.where(real[..., None, None], routes, jnp.array(-1, routes.dtype))


def rows_of(prompts: Int[Array, " q"] | Int[np.ndarray, " q"], samples: int) -> Any:
    """Find the rows of prompts, by their places: `samples` each, side by side."""
    return (prompts[:, None] * samples + np.arange(samples)).reshape(-1)


def for_decode(policy: Policy, rules: ShardingRules = DECODE_RULES) -> Policy:
    """Bring weights into the form that a decode loop multiplies, and to where it multiplies them.

    Both once: its steps would do it again and again.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.size > 1:
        policy = lax.with_sharding_constraint(policy, policy_shardings(policy, mesh, rules))
    return predequantized(policy)


def cache_dtype(policy: Policy) -> jnp.dtype:
    """Find what keys and values are stored in."""
    key = policy.compute.key
    return element_dtype(key) if key.calibrated else policy.embed_tokens.value.dtype


def loop_dtype(policy: Policy) -> jnp.dtype:
    """Find what this loop keeps keys and values in: `cache_dtype`, or float32.

    float32 holds the same FP8 values where the reference would convert them again at every token,
    which costs a CPU more than to read four times the bytes, and no other device.
    """
    compute = policy.compute
    if (
        compute.key.calibrated
        and mixer_of(policy.config).decodes_in_kernels(compute)
        and resolve(compute.backend, "decode_attention") == "reference"
        and platform() == "cpu"
    ):
        return jnp.dtype(jnp.float32)
    return cache_dtype(policy)


def row_keys(key: Key[Array, ""], prompt_ids: Int[Array, " p"], samples: int) -> Key[Array, " b"]:
    """Make the key of each row, which fixes its draws."""

    def one(prompt_id, sample):
        return jax.random.fold_in(jax.random.fold_in(key, prompt_id), sample)

    keys = jax.vmap(lambda i: jax.vmap(lambda s: one(i, s))(jnp.arange(samples)))(prompt_ids)
    return keys.reshape(-1)


_for_decode_alone = jax.jit(for_decode)
_begin_alone = jax.jit(_begin, static_argnames=("samples", "expert_ids", "prompt_logprobs"))
_proceed_alone = jax.jit(_proceed, donate_argnames="state")
