"""A cache that one call leaves to the next, as the next turn of a conversation wants it: what is
kept, what is taken over, and what goes when others need the room."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from fp8rl_jax.models.policy import Policy
from fp8rl_jax.rollout.paged.layout import Layout
from fp8rl_jax.rollout.paged.state import (
    DONE,
    NEW,
    Before,
    Kept,
    Loaded,
    Queue,
    State,
    begin,
    new_rows,
)
from fp8rl_jax.rollout.sampling import Sampling
from pallas_kernels.cache_write import move_tokens


def begin_turn(
    policy: Policy,
    queue: Queue,
    kept: Kept,
    asked: Bool[Array, " p"],
    source: Int[Array, " p"],
    lengths: Int[Array, " p"],
    sampling: Sampling,
    layout: Layout,
) -> State:
    """Make the state in which nothing has been loaded, with the cache of an earlier call.

    Args:
        kept, asked, source, lengths: as in `converse`.
    """
    rows = new_rows(len(asked), sampling, policy.config.pad_token_id or 0)
    rows = rows._replace(status=jnp.where(asked, NEW, DONE))
    state = begin(policy, queue, 1, sampling, layout, rows=rows)
    pages, prompts = kept.pages[source], kept.prompts[source]
    column, of_prompts = jnp.arange(pages.shape[1]), layout.columns(layout.widest)
    behind = jnp.where(column < of_prompts, 0, prompts[:, None])
    first = behind + jnp.where(column < of_prompts, column, column - of_prompts) * layout.page_size
    end = jnp.where(column < of_prompts, jnp.minimum(prompts, lengths)[:, None], lengths[:, None])
    pages = jnp.where(first < end, pages, layout.pages)
    free = state.free.at[pages].set(False, mode="drop")
    before = Before(pages, prompts, lengths)
    return state._replace(keys=kept.keys, values=kept.values, free=free, before=before)


def kept_pages(queue: Queue, loaded: Loaded, layout: Layout) -> tuple[Array, Array]:
    """Find what a call has left in the cache: `pages` and `prompts` of Kept."""
    assert loaded.ended is not None
    more = layout.columns(layout.widest) - loaded.pages.shape[1]
    pages = jnp.pad(loaded.pages, ((0, 0), (0, more)), constant_values=layout.pages)
    return jnp.concatenate([pages, loaded.ended], axis=1), queue.lengths


def taken_over(state: State, layout: Layout, prompt, pages) -> tuple[State, Array]:
    """Move what an earlier call has left of some prompts into their pages; and its lengths."""
    before, size, outside = state.before, layout.page_size, layout.pages * layout.page_size
    assert before is not None
    lengths = before.lengths.at[prompt].get(mode="fill", fill_value=0)
    first = before.prompts.at[prompt].get(mode="fill", fill_value=0)[:, None]
    old = before.pages.at[prompt].get(mode="fill", fill_value=layout.pages)
    width = pages.shape[1] * size
    column = jnp.broadcast_to(jnp.arange(width), (len(prompt), width))

    def places(pages, at, token):
        page = jnp.take_along_axis(pages, at + token // size, axis=1, mode="clip")
        return page * size + token % size

    of_row = layout.columns(layout.widest)
    sources = jnp.where(
        column < first, places(old, 0, column), places(old, of_row, jnp.maximum(column - first, 0))
    )
    real = column < lengths[:, None]
    move = partial(
        move_tokens,
        source=jnp.where(real, sources, 0).reshape(-1),
        target=jnp.where(real, places(pages, 0, column), outside).reshape(-1),
    )
    if isinstance(state.keys, Array):
        move = jax.vmap(move)
    keys, values = jax.tree.map(move, (state.keys, state.values))
    counters = state.counters._replace(reused=state.counters.reused + lengths.sum())
    before = before._replace(
        pages=before.pages.at[prompt].set(layout.pages, mode="drop"),
        lengths=before.lengths.at[prompt].set(0, mode="drop"),
    )
    free = state.free.at[old].set(True, mode="drop")
    state = state._replace(keys=keys, values=values, free=free, counters=counters, before=before)
    return state, lengths


def stays(loaded: Loaded, none: int) -> Bool[Array, " p"]:
    """Prompts whose rows have ended and whose pages are there all the same."""
    return (loaded.waiting == 0) & (loaded.pages[..., 0] < none)


def reclaim(state: State, wanted: Int[Array, ""]) -> State:
    """Free pages that are kept until as many as wanted are free: first those of prompts that have
    ended in this call, then those that this call has not come to yet, the last ones first."""
    if state.before is None:
        return state
    none = len(state.free)

    def short(carry):
        free, pages, _, before = carry
        there = stays(state.loaded._replace(pages=pages), none) | (before.lengths > 0)
        return (free.sum() < wanted) & there.any()

    def drop(carry):
        free, pages, ended, before = carry
        over, count = stays(state.loaded._replace(pages=pages), none), len(ended)
        last = count - 1 - jnp.argmax(jnp.where(over.any(), over, before.lengths > 0)[::-1])
        over, left = jnp.where(over.any(), last, count), jnp.where(over.any(), count, last)
        for table, place in ((pages, over), (ended, over), (before.pages, left)):
            gone = table.at[place].get(mode="fill", fill_value=none)
            free = free.at[gone].set(True, mode="drop")
        before = before._replace(
            pages=before.pages.at[left].set(none, mode="drop"),
            lengths=before.lengths.at[left].set(0, mode="drop"),
        )
        pages, ended = (x.at[over].set(none, mode="drop") for x in (pages, ended))
        return free, pages, ended, before

    loaded = state.loaded
    carry = (state.free, loaded.pages, loaded.ended, state.before)
    free, pages, ended, before = lax.while_loop(short, drop, carry)
    return state._replace(
        free=free, loaded=loaded._replace(pages=pages, ended=ended), before=before
    )
