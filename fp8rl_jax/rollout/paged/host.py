"""The host's loop, which calls the programs as their signals say, for every shard of the batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int, Key

from fp8rl_jax.models.cache import empty_cache
from fp8rl_jax.models.policy import Policy
from fp8rl_jax.parallel import (
    DECODE_RULES,
    DEFAULT_RULES,
    PROGRESS,
    placed_shapes,
    policy_shardings,
    split_batch,
    to_host,
)
from fp8rl_jax.rollout.paged.layout import Layout
from fp8rl_jax.rollout.paged.programs import catch_up, load, run, shrink, with_signals
from fp8rl_jax.rollout.paged.reuse import begin_turn, kept_pages, stays
from fp8rl_jax.rollout.paged.state import Counters, Kept, Loaded, Queue, Rows, State, begin
from fp8rl_jax.rollout.sampler import Prompts, Rollout, cache_dtype, for_decode, row_keys
from fp8rl_jax.rollout.sampling import Sampling


def generate(
    policy: Policy,
    prompts: Prompts,
    key: Key[Array, ""],
    *,
    samples: int,
    sampling: Sampling,
    layout: Layout,
    order: Int[Array, " p"],
    limits: Int[Array, " b"] | None = None,
    expert_ids: bool = False,
    prompt_logprobs: bool = False,
    every: int = 0,
) -> Iterator[Rollout]:
    """Sample `samples` completions of each prompt, as `sampler.generate`.

    Args:
        policy: in the rollout's form (models.forms), its layers stacked or a list, with its KV
            scales where it has an FP8 cache.
        layout: sizes of one shard of the batch.
        order: of each shard's prompts, counted in the shard.
        limits: most tokens of each row; default: sampling.max_new_tokens.
        every: give the completions so far after the first token and then after every `every`
            decode steps; 0: when all have ended.

    Yields:
        Rollouts; the last one has all tokens.
    """
    policy = _gathered(policy)
    keys = _row_keys(key, prompts.ids, samples=samples)
    queue = _queue(prompts, order, keys, limits, longest=sampling.max_new_tokens)
    state, signals = _begin(
        policy, queue, None, sampling, samples, layout, expert_ids, prompt_logprobs
    )
    for seen in _states(policy, queue, state, signals, sampling, layout, every):
        yield Rollout(prompts, **_found(seen.rows, seen.loaded, seen.counters))


def lower_decode(
    policy: Policy, prompts: Prompts, samples: int, sampling: Sampling, layout: Layout
) -> jax.stages.Lowered:
    """Lower the program that decodes, from shapes with shardings, on the enclosing mesh.

    Args:
        policy, samples, sampling, layout: as `generate` takes them.
    """
    served, mesh = jax.eval_shape(_gather, policy), jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        served = placed_shapes(served, policy_shardings(served, mesh, SHARD_RULES))
    key = jax.eval_shape(lambda: jax.random.key(0))
    keys = jax.eval_shape(partial(_row_keys, samples=samples), key, prompts.ids)
    each = jax.ShapeDtypeStruct(prompts.lengths.shape, jnp.int32)
    longest = partial(_queue, longest=sampling.max_new_tokens)
    queue = jax.eval_shape(longest, prompts, each, keys, None)
    state, _ = jax.eval_shape(
        lambda *given: _begin(*given, None, sampling, samples, layout, False, False), served, queue
    )
    steps = jax.ShapeDtypeStruct((), jnp.int32)
    return _run.lower(served, queue, state, sampling, steps, layout, 0)


def go_on(
    policy: Policy,
    prompts: Prompts,
    keys: Key[Array, " b"],
    rows: Rows,
    *,
    sampling: Sampling,
    layout: Layout,
    order: Int[Array, " p"],
    enough: int,
) -> tuple[Rows, dict[str, Array]]:
    """Sample on, until enough prompts have all their completions.

    Args:
        policy, layout, order: as in `generate`.
        keys: of each row.
        rows: what they have; those that have not ended, EVICTED or NEW, are prefilled with it.
        enough: prompts of a shard.

    Returns:
        The rows, those that were in a slot ACTIVE, and rollout/*.
    """
    policy, samples = _gathered(policy), len(keys) // len(prompts.lengths)
    queue = _queue(prompts, order, keys, None, jnp.int32(enough), longest=sampling.max_new_tokens)
    state, signals = _begin(policy, queue, _split(rows), sampling, samples, layout, False, False)
    (state,) = _states(policy, queue, state, signals, sampling, layout, 0)
    return _whole(state.rows), _found(state.rows, state.loaded, state.counters)["metrics"]


def converse(
    policy: Policy,
    prompts: Prompts,
    key: Key[Array, ""],
    *,
    sampling: Sampling,
    layout: Layout,
    asked: Bool[Array, " p"],
    kept: Kept | None,
    source: Int[Array, " p"],
    lengths: Int[Array, " p"],
) -> tuple[Rollout, Kept, Bool[Array, " p"]]:
    """Sample a completion of each prompt that is asked, in their order, with what an earlier call
    has left, and leave what the next one may use.

    Args:
        policy: as in `generate`; the same as in the earlier call.
        layout: its `pages`, `page_size` and `widest` are those of the earlier call.
        asked: the other prompts' rows get no token.
        kept: of the earlier call, which loses it; None: there was none.
        source: the prompt of the earlier call, counted in the shard, that each goes on from; none
            is the source of two.
        lengths: tokens that each begins with that the cache has: of the source's prompt, then of
            its completion, but for that one's last token.

    Returns:
        (the rollout, what is left, and of which prompts).
    """
    policy = _gathered(policy)
    keys = _row_keys(key, prompts.ids, samples=1)
    order = jnp.arange(len(keys), dtype=jnp.int32) % (len(keys) // _shard_count())
    queue = _queue(prompts, order, keys, None, longest=sampling.max_new_tokens)
    if kept is None:
        kept = _nothing(policy, queue, sampling.max_new_tokens, layout)
    given = kept.pages, kept.prompts, *_split((asked, source, lengths))
    state, signals = _begin_turn(policy, queue, (kept.keys, kept.values), given, sampling, layout)
    (state,) = _states(policy, queue, state, signals, sampling, layout, 0)
    found = _found(state.rows, state.loaded, state.counters)
    pages, lengths = _kept_pages(queue, state.loaded, layout)
    there = stays(state.loaded, layout.pages).reshape(-1)
    return Rollout(prompts, **found), Kept(state.keys, state.values, pages, lengths), there


def _states(policy, queue, state, signals, sampling, layout: Layout, every: int) -> Iterator[State]:
    """Call the programs as the signals say; gives the states that are looked at, and the last."""
    steps, slots = 1 if every else layout.steps, layout.slots
    decoding = replace(layout, together=0, chunk=0)  # whatever is prefilled, it is one program
    shrinks = sampling.max_new_tokens >= _SHRINK_FROM
    while (wanted := to_host(signals)).left.any():
        PROGRESS.move()
        if wanted.catch_up.any():
            state, signals = _catch_up(policy, queue, state, layout)
        elif wanted.load.any():
            state, signals = _load(policy, queue, state, sampling, layout)
        else:
            fewer = slots // _SHRINK if shrinks else 0
            if wanted.left.max() <= fewer:
                rows = len(queue.limits) // len(signals.left.reshape(-1))
                state = state._replace(slots=_shrink(state.slots, rows, fewer))
                slots, fewer = fewer, fewer // _SHRINK
            state, signals = _run(policy, queue, state, sampling, jnp.int32(steps), decoding, fewer)
            if every:
                yield state
                steps = every
    yield state


_SHRINK, _SHRINK_FROM = 4, 64
"""Slots are cut to a fourth as soon as that holds all rows that are left, where completions may
have this many tokens: each number of slots is a program to compile."""


def _batch_axes() -> tuple[str, ...]:
    """Axes of the mesh that split a batch."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = () if mesh.empty else DEFAULT_RULES.mesh_axes("batch")
    return tuple(axis for axis in axes if mesh.shape[axis] > 1)


def _shard_count() -> int:
    return math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in _batch_axes())


def _by_shards(function: Callable) -> Callable:
    """Run function(policy, queue, state, sampling, ...) for each shard of the batch by itself.

    Every array of the state has a leading axis of shards then, on one device none.
    """
    if not (axes := _batch_axes()):
        return function
    whole, split = PartitionSpec(), PartitionSpec(axes)

    def of_shard(policy, queue, state, *rest):
        state = jax.tree.map(lambda x: x[0], state)
        return jax.tree.map(lambda x: x[None], function(policy, queue, state, *rest))

    def run(policy, queue, state, *rest):
        queues: Any = (*(split,) * 5, whole)
        queues = Queue(*queues)
        specs = (whole, queues, split, *(whole,) * len(rest))
        return jax.shard_map(
            of_shard, in_specs=specs, out_specs=split, axis_names=set(axes), check_vma=False
        )(policy, queue, state, *rest)

    return run


SHARD_RULES = replace(DECODE_RULES, experts=None)
"""Where these programs have their weights: whole in each shard of the batch, which exchanges
nothing with others."""


def _gathered(policy: Policy) -> Policy:
    """Bring the weights into the form that the programs multiply; the same arrays where they are
    in it."""
    form = jax.tree.structure(jax.eval_shape(_gather, policy))  # a jitted function's is remembered
    return policy if not _batch_axes() and form == jax.tree.structure(policy) else _gather(policy)


@jax.jit
def _gather(policy: Policy) -> Policy:
    return for_decode(policy, SHARD_RULES)


_row_keys = jax.jit(row_keys, static_argnames="samples")


@partial(jax.jit, static_argnames="longest")
def _queue(prompts, order, keys, limits, enough=None, *, longest: int) -> Queue:
    if limits is None:
        limits = jnp.full(len(keys), longest, jnp.int32)
    if enough is None:
        enough = jnp.int32(len(order) // _shard_count())
    return Queue(prompts.tokens, prompts.lengths, order, keys, limits, enough)


@jax.jit
def _split[T](rows: T) -> T:
    """Rows with a leading axis of shards, where there are some."""
    shards = _shard_count()
    return rows if shards == 1 else split_batch(rows, shards)


@jax.jit
def _whole(rows: Rows) -> Rows:
    """Without it."""
    if rows.count.ndim == 1:
        return rows
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)


@partial(jax.jit, static_argnums=(4, 5, 6, 7))
def _begin(policy, queue, rows, sampling, samples, layout, expert_ids, prompt_logprobs):
    def run(policy, queue, rows, sampling):
        state = begin(policy, queue, samples, sampling, layout, expert_ids, prompt_logprobs, rows)
        return with_signals(queue, state, layout)

    return _by_shards(run)(policy, queue, rows, sampling)


@partial(jax.jit, static_argnums=5, donate_argnums=2)
def _begin_turn(policy, queue, cache, given, sampling, layout):
    def run(policy, queue, left, sampling):
        (keys, values), (pages, lengths, *given) = left
        kept = Kept(keys, values, pages, lengths)
        state = begin_turn(policy, queue, kept, *given, sampling, layout)
        return with_signals(queue, state, layout)

    return _by_shards(run)(policy, queue, (cache, given), sampling)


@partial(jax.jit, static_argnums=(2, 3))
def _nothing(policy, queue, longest, layout):
    """An empty cache, which no call has left."""

    def run(policy, queue, _):
        size = layout.pages, layout.page_size
        cache = empty_cache(policy.config, *size, cache_dtype(policy), policy.stacked)
        columns = layout.columns(layout.widest) + layout.columns(longest)
        pages = jnp.full((len(queue.lengths), columns), layout.pages, jnp.int32)
        return Kept(*cache, pages, jnp.zeros(len(pages), jnp.int32))

    return _by_shards(run)(policy, queue, None)


@partial(jax.jit, static_argnums=2)
def _kept_pages(queue, loaded, layout):
    def run(policy, queue, loaded):
        return kept_pages(queue, loaded, layout)

    return _by_shards(run)(None, queue, loaded)


@partial(jax.jit, static_argnums=4, donate_argnums=2)
def _load(policy, queue, state, sampling, layout):
    return _by_shards(partial(load, layout=layout))(policy, queue, state, sampling)


@partial(jax.jit, static_argnums=(5, 6), donate_argnums=2)
def _run(policy, queue, state, sampling, steps, layout, fewer):
    call = partial(run, layout=layout, fewer=fewer)
    return _by_shards(call)(policy, queue, state, sampling, steps)


@partial(jax.jit, static_argnums=3, donate_argnums=2)
def _catch_up(policy, queue, state, layout):
    return _by_shards(partial(catch_up, layout=layout))(policy, queue, state)


@partial(jax.jit, static_argnums=(1, 2))
def _shrink(slots, rows, count):
    call = partial(shrink, rows=rows, count=count)
    return (jax.vmap(call) if slots.row.ndim > 1 else call)(slots)


@jax.jit
def _found(rows: Rows, loaded: Loaded, counters: Counters) -> dict[str, Any]:
    """The fields of a Rollout."""
    given = loaded.logprobs, loaded.expert_ids
    if rows.count.ndim > 1:
        rows, given = _whole(rows), jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), given)
        counters = jax.tree.map(lambda x: x.sum(), counters)
    busy = counters.busy / jnp.maximum(counters.offered, 1.0)
    return {
        "tokens": rows.tokens,
        "mask": jnp.arange(rows.tokens.shape[1]) < rows.count[:, None],
        "behaviour_logprobs": rows.behaviour_logprobs,
        "policy_logprobs": rows.policy_logprobs,
        "support": rows.support,
        "stopped": rows.stopped,
        "prompt_logprobs": given[0],
        "prompt_expert_ids": given[1],
        "expert_ids": rows.expert_ids,
        "metrics": {
            "rollout/decode_steps": counters.steps,
            "rollout/slots_busy": jnp.where(counters.offered > 0, busy, 1.0),
            "rollout/evicted": counters.evicted,
            "rollout/recomputed_tokens": counters.recomputed,
            "rollout/peak_pages": counters.peak_pages,
            "rollout/reused_tokens": counters.reused,
        },
    }
