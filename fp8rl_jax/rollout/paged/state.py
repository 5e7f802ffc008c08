"""What the device holds while it samples: the queue, its rows, the slots that decode, and the pages
of the cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from fp8rl_jax.models.cache import empty_cache
from fp8rl_jax.models.logprobs import Support
from fp8rl_jax.models.moe import route_dtype
from fp8rl_jax.models.policy import Policy
from fp8rl_jax.rollout.paged.layout import Layout
from fp8rl_jax.rollout.sampler import cache_dtype
from fp8rl_jax.rollout.sampling import PhraseStates, Sampling

NEW, ACTIVE, EVICTED, DONE = range(4)
"""Where a row is: it has no tokens, or is in a slot, or lost it, or has ended."""


class Queue(NamedTuple):
    """What is asked for, P prompts and N = P * n rows; row r answers prompt r // n.

    Attributes:
        tokens, lengths: right-padded prompts.
        order: prompts in the order in which they are served.
        keys: of each row.
        limits: most tokens of each row.
        enough: prompts whose rows have all ended, with which the work is done.
    """

    tokens: Int[Array, "p s"]
    lengths: Int[Array, " p"]
    order: Int[Array, " p"]
    keys: Key[Array, " n"]
    limits: Int[Array, " n"]
    enough: Int[Array, ""]


class Rows(NamedTuple):
    """What becomes of the N rows: as in Rollout, and

    count: tokens that a row has; status: NEW to DONE; stop_state, bad_state: where each is in the
    sampling's phrases. Checkpoints know what is carried over by these names.
    """

    status: Int[Array, " n"]
    count: Int[Array, " n"]
    tokens: Int[Array, "n t"]
    behaviour_logprobs: Float[Array, "n t"]
    policy_logprobs: Float[Array, "n t"]
    support: Support | None
    stopped: Bool[Array, " n"]
    stop_state: Int[Array, " n"] | None
    bad_state: Int[Array, " n"] | None
    expert_ids: Int[Array, "n t sparse k"] | None

    @property
    def phrases(self) -> PhraseStates:
        """Both states, as `Sampling` takes them."""
        return self.stop_state, self.bad_state


class Loaded(NamedTuple):
    """The prompts' side of the cache.

    Attributes:
        count: prompts that have been loaded, the first ones of the order.
        pages: page numbers of each prompt; as many as the cache has stand for none.
        last_hidden: what the first token of each prompt's rows is drawn from.
        waiting: rows of each prompt that have not ended.
        logprobs, expert_ids: as in Rollout.
        ended: page numbers of each prompt's row, once it has ended and while they are kept; None
            where nothing is.
    """

    count: Int[Array, ""]
    pages: Int[Array, "p columns"]
    last_hidden: Float[Array, "p hidden"]
    waiting: Int[Array, " p"]
    logprobs: Float[Array, "p s"] | None
    expert_ids: Int[Array, "p s sparse k"] | None
    ended: Int[Array, "p row_columns"] | None


class Kept(NamedTuple):
    """What a call has left in the cache.

    Attributes:
        keys, values: the cache.
        pages: page numbers of each prompt, `Layout.widest` tokens, then of its row.
        prompts: tokens of each prompt; what is behind them begins in the row's first page.
    """

    keys: Any
    values: Any
    pages: Int[Array, "p columns"]
    prompts: Int[Array, " p"]


class Before(NamedTuple):
    """What an earlier call has left of the prompts that this one has not loaded yet.

    Attributes:
        pages, prompts: as in Kept, in the order of this call's prompts.
        lengths: how many tokens each prompt begins with that are there.
    """

    pages: Int[Array, "p columns"]
    prompts: Int[Array, " p"]
    lengths: Int[Array, " p"]


class Slots(NamedTuple):
    """Attributes:
    row: in each slot; N stands for none.
    held: tokens of the row that are in its pages.
    pages: page numbers.
    """

    row: Int[Array, " slots"]
    held: Int[Array, " slots"]
    pages: Int[Array, "slots columns"]


class Counters(NamedTuple):
    """What a rollout counts.

    Attributes:
        steps: decode steps.
        busy: of slots and steps while rows waited for a slot, those with a row.
        offered: all of these.
        evicted: rows that lost their pages.
        recomputed: tokens that were prefilled for it.
        peak_pages: most pages in use.
        reused: tokens of prompts that an earlier call had left.
    """

    steps: Int[Array, ""]
    busy: Float[Array, ""]
    offered: Float[Array, ""]
    evicted: Int[Array, ""]
    recomputed: Int[Array, ""]
    peak_pages: Int[Array, ""]
    reused: Int[Array, ""]


class State(NamedTuple):
    """All that the programs change; `before` is None where nothing is kept."""

    keys: Any
    values: Any
    free: Bool[Array, " pages"]
    rows: Rows
    loaded: Loaded
    slots: Slots
    counters: Counters
    before: Before | None = None


class Signals(NamedTuple):
    """What the host has to do next.

    Attributes:
        load: slots are free, and the prompts of the next rows are not loaded but could be.
        catch_up: rows in slots lack tokens in their pages.
        left: rows that have not ended; 0 as soon as enough prompts have all theirs.
    """

    load: Bool[Array, ""]
    catch_up: Bool[Array, ""]
    left: Int[Array, ""]


def begin(
    policy: Policy,
    queue: Queue,
    samples: int,
    sampling: Sampling,
    layout: Layout,
    expert_ids: bool = False,
    prompt_logprobs: bool = False,
    rows: Rows | None = None,
) -> State:
    """Make the state in which nothing has been loaded.

    Args:
        rows: those that have tokens already are EVICTED or DONE; default: all are NEW.
    """
    (p, s), n = queue.tokens.shape, len(queue.limits)
    config, width = policy.config, sampling.max_new_tokens
    dtype = cache_dtype(policy)
    keys, values = empty_cache(config, layout.pages, layout.page_size, dtype, policy.stacked)
    prompt_routes = routes = None
    if expert_ids:
        if config.experts is None:
            raise ValueError("generate: expert_ids of a policy without experts")
        layers = len(config.sparse_layers), config.experts.per_token
        kind = route_dtype(config.experts)
        prompt_routes = jnp.full((p, s, *layers), -1, kind)
        routes = jnp.full((n, width, *layers), -1, kind)
    if rows is None:
        rows = new_rows(n, sampling, config.pad_token_id or 0)
    rows = rows._replace(expert_ids=routes)

    def no_pages(count: int, tokens: int) -> Array:
        return jnp.full((count, layout.columns(tokens)), layout.pages, jnp.int32)

    loaded = Loaded(
        jnp.int32(0),
        no_pages(p, s),
        jnp.zeros((p, config.hidden_size), policy.embed_tokens.value.dtype),
        (rows.status != DONE).reshape(p, samples).sum(1, dtype=jnp.int32),
        jnp.zeros((p, s), jnp.float32) if prompt_logprobs else None,
        prompt_routes,
        no_pages(p, width) if layout.widest else None,
    )
    slots = Slots(
        jnp.full(layout.slots, n, jnp.int32),
        jnp.zeros(layout.slots, jnp.int32),
        no_pages(layout.slots, width),
    )
    none, zero = jnp.int32(0), jnp.float32(0)
    return State(
        keys,
        values,
        jnp.ones(layout.pages, bool),
        rows,
        loaded,
        slots,
        Counters(none, zero, zero, none, none, none, none),
    )


def new_rows(count: int, sampling: Sampling, pad: int) -> Rows:
    """Make rows without a token.

    Args:
        pad: token id of the padding.
    """
    width, none = sampling.max_new_tokens, jnp.zeros(count, jnp.int32)
    numbers = jnp.zeros((count, width), jnp.float32)
    tokens = jnp.full((count, width), pad, jnp.int32)
    support, phrases = sampling.no_support(count), sampling.at_start(count)
    return Rows(none, none, tokens, numbers, numbers, support, none > 0, *phrases, None)
