"""Continuous batching over a paged KV cache: a slot whose completion has ended takes the next
request at once.

All prompts of a step are known when it begins, so nothing has to be served while it waits: there
is a queue on the device, and programs that work on it.

    begin       an empty cache, the queue, and nothing in the slots
    load        prefill of the next prompts of the queue, `Layout.together` at a time
    run         up to `Layout.steps` decode steps, slots refilled from the prompts that are loaded
    catch_up    prefill of tokens that rows already have, of rows that had lost their pages
    shrink      the same state with fewer slots, when fewer rows are left

The host calls them as the signals of the last call say. Shapes are fixed, so each program is
compiled once.

A prompt's pages are shared by its samples, and freed with the last of them. A row's own pages hold
what it has sampled, one more whenever a page is full. If none is free then, the row that loses
least gives up its pages and its slot, keeps its tokens, and goes to the front of the queue. One row
alone always has room (`choose_layout`), so every row ends.

A call can leave the cache to the next one (`converse`): prompts and what was sampled behind them
stay in their pages, until others need these, and prompts that go on from there, as the next turn of
a conversation does, are prefilled from where they differ.

A row's randomness comes from (key, prompt id, sample number, position) alone, as in `sampler`, so
its tokens do not depend on the slot, the pages and the rows beside it, but for what a matrix
product rounds differently (and in exact mode for nothing).

On a mesh each part of the batch has a queue, slots and pages of its own; the loops are manual over
the batch's axes. Where each device has the whole model, a part steps as often as it has to; where
the model is split, all parts step together (`_most`), and one that is done waits for the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key

from fp8rl_jax.config.run import PagedConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.cache import KVCache, Pages, empty_cache
from fp8rl_jax.models.forms import predequantized
from fp8rl_jax.models.forward import forward
from fp8rl_jax.models.logprobs import token_logprobs
from fp8rl_jax.models.moe import route_dtype
from fp8rl_jax.models.policy import Policy
from fp8rl_jax.parallel import DEFAULT_RULES, PROGRESS, policy_shardings, split_batch, to_host
from fp8rl_jax.rollout.sampler import Prompts, Rollout, cache_dtype, row_keys, rows_of
from fp8rl_jax.rollout.sampling import Sampling, draw
from pallas_kernels.cache_write import move_tokens

NEW, ACTIVE, EVICTED, DONE = range(4)
"""Where a row is: it has no tokens, or is in a slot, or lost it, or has ended."""


@dataclass(frozen=True)
class Layout:
    """The sizes that programs are compiled for.

    Attributes:
        slots: rows that decode at one time.
        page_size: tokens of a page.
        pages: of the cache.
        together: prompts that are loaded together.
        chunk: tokens of a row that are prefilled at one time.
        steps: decode steps of one call.
        widest: tokens of the longest prompt of calls that leave the cache to each other; 0: what is
            over leaves it.
    """

    slots: int
    page_size: int
    pages: int
    together: int
    chunk: int
    steps: int
    widest: int = 0

    def columns[T: (int, Array)](self, tokens: T) -> T:
        """Count the pages of `tokens` tokens."""
        return -(-tokens // self.page_size)

    def prefilling(self, tokens: int, config: PagedConfig, prompts: int) -> Layout:
        """The same cache, for calls that prefill at most so many tokens of each of P prompts."""
        chunk = min(tokens, config.prefill_tokens)
        together = max(1, min(prompts, self.slots, config.prefill_tokens // chunk))
        return replace(self, chunk=chunk, together=together)

    def prompt_pages(self, prompts: int, tokens: int) -> int:
        """Count the pages of all prompts that may be loaded at one time, of so many and so long."""
        return min(prompts, self.slots + self.together) * self.columns(tokens)


def choose_layout(
    config: PagedConfig,
    prompts: tuple[int, int],
    samples: int,
    new_tokens: int,
    hopper: bool = False,
    room: float = math.inf,
    widest: int = 0,
) -> Layout:
    """Choose sizes for P prompts of at most S tokens and `samples` completions of each.

    Args:
        config: what the user wants; 0 leaves a size to this function.
        prompts: (P, S) of one part of the batch.
        new_tokens: longest completion.
        hopper: the cache is read by Hopper's kernels.
        room: tokens of cache that the memory holds.
        widest: make pages, as far as there is room, for prompts of so many tokens each with its
            completion, as calls leave them to the next ones (Layout.widest); `samples` is 1 then.

    Raises:
        UserError: not even one row fits, or the kernels have no such page.
    """
    count, width = prompts
    default = min(32, max(width, widest, new_tokens))
    size = config.page_size or (_KERNEL_PAGE if hopper else default)
    if hopper and size % _KERNEL_PAGE:
        raise UserError(
            f"rollout.paged.page_size = {size}: Hopper's kernels take multiples of {_KERNEL_PAGE}"
        )
    room = config.cache_tokens or room
    most = min(config.slots or _most_slots(), count * samples)
    pages = needed = 0
    for slots in range(most, 0, -1):
        layout = Layout(slots, size, 0, 0, 0, config.decode_steps, widest)
        layout = layout.prefilling(width, config, count)
        loaded, row = layout.prompt_pages(count, width), layout.columns(new_tokens)
        wanted = loaded + slots * row
        if widest:
            wanted = count * (layout.columns(widest) + row) + layout.columns(widest)
        pages, needed = int(min(wanted, room // size)), loaded + row
        if pages >= needed:
            return replace(layout, pages=pages)
    raise UserError(
        f"rollout.paged.cache_tokens: the cache holds {pages * size} tokens, and a prompt of "
        f"rollout.max_prompt_tokens = {width} with rollout.max_new_tokens = {new_tokens} needs "
        f"{needed * size}; raise it, or make room"
    )


_KERNEL_PAGE = 64


def _most_slots() -> int:
    """Choose how many rows decode at one time, where more are waiting.

    Reading the weights is most of a step until so many rows share it that their products take as
    long: hundreds on a GPU, about a dozen on a CPU. More slots gain nothing beyond that, and lose
    where no row is left to refill them.
    """
    return 64 if jax.default_backend() == "cpu" else 256


def token_bytes(policy: Policy) -> int:
    """Count the bytes of cache of one token."""
    config, kind = policy.config, cache_dtype(policy)
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * kind.itemsize


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
    sampling's phrases.
    """

    status: Int[Array, " n"]
    count: Int[Array, " n"]
    tokens: Int[Array, "n t"]
    behaviour_logprobs: Float[Array, "n t"]
    policy_logprobs: Float[Array, "n t"]
    stopped: Bool[Array, " n"]
    stop_state: Int[Array, " n"] | None
    bad_state: Int[Array, " n"] | None
    expert_ids: Int[Array, "n t sparse k"] | None


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


def new_rows(count: int, sampling: Sampling, pad: int) -> Rows:
    """Make rows without a token.

    Args:
        pad: token id of the padding.
    """
    width, none = sampling.max_new_tokens, jnp.zeros(count, jnp.int32)
    states = [
        None if table is None else none for table in (sampling.stop_strings, sampling.bad_words)
    ]
    numbers = jnp.zeros((count, width), jnp.float32)
    tokens = jnp.full((count, width), pad, jnp.int32)
    return Rows(none, none, tokens, numbers, numbers, none > 0, *states, None)


def load(
    policy: Policy, queue: Queue, state: State, sampling: Sampling, layout: Layout
) -> tuple[State, Signals]:
    """Prefill the next prompts of the order, `layout.together` or as many as find pages.

    None where slots do not wait for them, as in parts of the batch that another part interrupts.
    """
    (p, s), loaded = queue.tokens.shape, state.loaded
    place = loaded.count + jnp.arange(layout.together)
    prompt = queue.order.at[place].get(mode="fill", fill_value=p)
    lengths = queue.lengths.at[prompt].get(mode="fill", fill_value=0)
    # of a prompt that nothing waits for, nothing
    lengths = jnp.where(loaded.waiting.at[prompt].get(mode="clip") > 0, lengths, 0)
    columns = layout.columns(lengths)
    fits = (
        (place < p) & (jnp.cumsum(columns) <= _spare(state)) & _wants_prompts(queue, state, layout)
    )
    prompt, lengths = jnp.where(fits, prompt, p), jnp.where(fits, lengths, 0)
    state = _reclaim(state, jnp.where(fits, columns, 0).sum())
    loaded = state.loaded
    none = jnp.full((layout.together, loaded.pages.shape[1]), layout.pages, jnp.int32)
    free, pages = allocate(state.free, none, jnp.where(fits, columns, 0))
    loaded = loaded._replace(
        count=loaded.count + fits.sum(dtype=jnp.int32),
        pages=loaded.pages.at[prompt].set(pages, mode="drop"),
    )
    tokens = queue.tokens.at[prompt].get(mode="fill", fill_value=0)
    state = state._replace(free=free, loaded=loaded)
    begins = jnp.zeros(layout.together, jnp.int32)
    if state.before is not None:
        state, begins = _taken_over(state, layout, prompt, pages)

    def chunk(carry):
        done, state = carry
        start = begins + done
        result, state, column, real = _prefill(
            policy, queue, state, layout, tokens, lengths, start, (pages, start), None
        )
        found = state.loaded
        last = lengths - 1 - start
        hidden = jnp.take_along_axis(result.hidden, last[:, None, None], axis=1, mode="clip")[:, 0]
        ends = jnp.where((last >= 0) & (last < layout.chunk), prompt, p)
        found = found._replace(last_hidden=found.last_hidden.at[ends].set(hidden, mode="drop"))
        if found.logprobs is not None:
            target = jnp.take_along_axis(tokens, column + 1, axis=1, mode="clip")
            given, _ = token_logprobs(result.hidden, policy, target, sampling.temperature or 1.0)
            place = jnp.where(column + 1 < lengths[:, None], column + 1, s)
            values = found.logprobs.at[prompt[:, None], place].set(given, mode="drop")
            found = found._replace(logprobs=values)
        if found.expert_ids is not None:
            used = found.expert_ids.at[prompt[:, None], jnp.where(real, column, s)]
            found = found._replace(expert_ids=used.set(result.routes, mode="drop"))
        return done + layout.chunk, state._replace(loaded=found)

    most = _most((lengths - begins).max())
    _, state = lax.while_loop(lambda carry: carry[0] < most, chunk, (jnp.int32(0), state))
    return _with_signals(queue, _admit(queue, state, layout), layout)


def _taken_over(state: State, layout: Layout, prompt, pages) -> tuple[State, Array]:
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


def _stays(loaded: Loaded, none: int) -> Bool[Array, " p"]:
    """Prompts whose rows have ended and whose pages are there all the same."""
    return (loaded.waiting == 0) & (loaded.pages[..., 0] < none)


def _reclaim(state: State, wanted: Int[Array, ""]) -> State:
    """Free pages that are kept until as many as wanted are free: first those of prompts that have
    ended in this call, then those that this call has not come to yet, the last ones first."""
    if state.before is None:
        return state
    none = len(state.free)

    def short(carry):
        free, pages, _, before = carry
        there = _stays(state.loaded._replace(pages=pages), none) | (before.lengths > 0)
        return (free.sum() < wanted) & there.any()

    def drop(carry):
        free, pages, ended, before = carry
        over, count = _stays(state.loaded._replace(pages=pages), none), len(ended)
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


def run(
    policy: Policy,
    queue: Queue,
    state: State,
    sampling: Sampling,
    steps: Int[Array, ""],
    layout: Layout,
    fewer: int = 0,
) -> tuple[State, Signals]:
    """Decode until the host is wanted, and for `steps` steps at most.

    Args:
        fewer: stop as soon as no more rows than these are left; 0: with the last one.
    """

    def goes_on(carry):
        taken, _, signals = carry
        return (taken < steps) & ~signals.load & ~signals.catch_up & (signals.left > fewer)

    def step(carry):
        taken, state, _ = carry
        state = _admit(queue, _decode(policy, queue, state, sampling, layout), layout)
        return taken + 1, *_with_signals(queue, state, layout)

    carry = (jnp.int32(0), *_with_signals(queue, state, layout))
    _, state, signals = lax.while_loop(goes_on, step, carry)
    return state, signals


def catch_up(policy: Policy, queue: Queue, state: State, layout: Layout) -> tuple[State, Signals]:
    """Prefill what rows in slots lack in their pages, of `layout.together` rows."""
    slots, none = state.slots, len(state.slots.row)
    chosen = jnp.nonzero(_lacking(queue, state), size=layout.together, fill_value=none)[0]
    row = slots.row.at[chosen].get(mode="fill", fill_value=len(queue.limits))
    tokens = state.rows.tokens.at[row].get(mode="clip")
    held = slots.held.at[chosen].get(mode="fill", fill_value=0)
    wanted = state.rows.count.at[row].get(mode="fill", fill_value=1) - 1
    pages = slots.pages.at[chosen].get(mode="fill", fill_value=layout.pages)
    prefix = _prefix(queue, state, row)

    def chunk(carry):
        done, state = carry
        start = held + done
        result, state, column, real = _prefill(
            policy, queue, state, layout, tokens, wanted, start, (pages, start), prefix
        )
        rows = _with_routes(state.rows, row[:, None], column, real, result.routes)
        return done + layout.chunk, state._replace(rows=rows)

    most = _most((wanted - held).max())
    _, state = lax.while_loop(lambda carry: carry[0] < most, chunk, (jnp.int32(0), state))
    counters = state.counters
    counters = counters._replace(recomputed=counters.recomputed + (wanted - held).sum())
    slots = state.slots
    slots = slots._replace(held=slots.held.at[chosen].set(wanted, mode="drop"))
    return _with_signals(queue, state._replace(slots=slots, counters=counters), layout)


def shrink(slots: Slots, rows: int, count: int) -> Slots:
    """Keep `count` slots, those with one of the rows first."""
    order = jnp.argsort(slots.row == rows, stable=True)[:count]
    return jax.tree.map(lambda x: x[order], slots)


def _prefill(policy, queue, state, layout, tokens, lengths, start, own, prefix):
    """One chunk of some rows from `start` on: the forward's result, the state with their keys and
    values, the tokens' columns, and which are real."""
    column = start[:, None] + jnp.arange(layout.chunk)
    real = column < lengths[:, None]
    fed = jnp.take_along_axis(tokens, column, axis=1, mode="clip")
    pages, before = (None, None) if prefix is None else prefix
    cache = KVCache(completion=Pages(state.keys, state.values, *own, pages, before))
    positions = column if before is None else column + before[:, None]
    result = forward(policy, fed, positions, real.astype(jnp.int32), cache)
    assert result.pages is not None
    cached = {"keys": result.pages.keys, "values": result.pages.values}
    return result, state._replace(**cached), column, real


def _decode(policy: Policy, queue: Queue, state: State, sampling: Sampling, layout: Layout):
    """One token for every row in a slot: of a new one from its prompt, of others by a forward."""
    slots, rows = state.slots, state.rows
    there, row = _there(queue, state), slots.row
    count = jnp.where(there, _of_rows(rows.count, row), 0)
    feeds = there & (count > 0)
    prompt = row // _samples(queue)
    first = state.loaded.last_hidden.at[prompt].get(mode="clip")
    token = rows.tokens.at[row, count - 1].get(mode="clip")
    prefix, before = _prefix(queue, state, row)

    def fed(carry):
        _, keys, values, _, rows = carry
        pages = Pages(keys, values, slots.pages, slots.held, prefix, before)
        cache = KVCache(completion=pages)
        positions, real = (before + slots.held)[:, None], feeds[:, None]
        result = forward(policy, token[:, None], positions, real.astype(jnp.int32), cache)
        hidden = jnp.where(real, result.hidden[:, 0], first)
        rows = _with_routes(rows, row[:, None], slots.held[:, None], real, result.routes)
        assert result.pages is not None
        return jnp.zeros((), bool), result.pages.keys, result.pages.values, hidden, rows

    # a loop and not a cond, whose branches would copy the cache
    carry = (_anywhere(feeds.any()), state.keys, state.values, first, rows)
    _, cached, values, hidden, rows = lax.while_loop(lambda carry: carry[0], fed, carry)
    state = state._replace(keys=cached, values=values)
    slots = slots._replace(held=slots.held + feeds)

    logits = policy.compute.product(hidden, policy.head)
    banned = None
    if sampling.bad_words is not None:
        banned = sampling.bad_words.completing(_of_rows(rows.bad_state, row))
    keys = jax.vmap(jax.random.fold_in)(_of_rows(queue.keys, row), count)
    drawn, behaviour, full = draw(logits, keys, sampling, banned, policy.compute)
    drawn = drawn.astype(jnp.int32)
    stopped = jnp.zeros_like(there)
    if sampling.stop_token_ids:
        stopped = jnp.isin(drawn, jnp.asarray(sampling.stop_token_ids, jnp.int32))
    stop_state: Any = rows.stop_state
    bad_state: Any = rows.bad_state
    if sampling.stop_strings is not None:
        after, complete = sampling.stop_strings.step(_of_rows(stop_state, row), drawn)
        stop_state = stop_state.at[row].set(after, mode="drop")
        stopped |= complete
    if sampling.bad_words is not None:
        after, _ = sampling.bad_words.step(_of_rows(bad_state, row), drawn)
        bad_state = bad_state.at[row].set(after, mode="drop")

    def write(table, column):
        return table.at[row, count].set(column, mode="drop")

    ended = there & (stopped | (count + 1 >= _of_rows(queue.limits, row)))
    rows = rows._replace(
        status=rows.status.at[jnp.where(ended, row, len(rows.status))].set(DONE, mode="drop"),
        count=rows.count.at[row].set(count + 1, mode="drop"),
        tokens=write(rows.tokens, drawn),
        behaviour_logprobs=write(rows.behaviour_logprobs, behaviour),
        policy_logprobs=write(rows.policy_logprobs, full),
        stopped=rows.stopped.at[row].set(stopped, mode="drop"),
        stop_state=stop_state,
        bad_state=bad_state,
    )
    return _leave(queue, _counted(queue, state, there)._replace(rows=rows, slots=slots), ended)


def _leave(queue: Queue, state: State, leaving: Bool[Array, " slots"]) -> State:
    """Empty some slots; a prompt whose rows have all ended goes, too, if it is not kept."""
    slots, loaded, none = state.slots, state.loaded, len(state.free)
    ended = leaving & (_of_rows(state.rows.status, slots.row) == DONE)
    prompt = jnp.where(ended, slots.row // _samples(queue), len(queue.lengths))
    stay = ended if loaded.ended is not None else jnp.zeros_like(ended)
    go = leaving & ~stay
    free = state.free.at[jnp.where(go[:, None], slots.pages, none)].set(True, mode="drop")
    waiting = loaded.waiting.at[prompt].add(-1, mode="drop")
    over = ~stay & (waiting.at[prompt].get(mode="fill", fill_value=1) == 0)
    over = jnp.where(over, prompt, len(waiting))
    gone = loaded.pages.at[over].get(mode="fill", fill_value=none)
    loaded = loaded._replace(waiting=waiting, pages=loaded.pages.at[over].set(none, mode="drop"))
    if loaded.ended is not None:
        place = jnp.where(stay, prompt, len(waiting))
        loaded = loaded._replace(ended=loaded.ended.at[place].set(slots.pages, mode="drop"))
    slots = Slots(
        jnp.where(leaving, len(queue.limits), slots.row),
        jnp.where(leaving, 0, slots.held),
        jnp.where(leaving[:, None], none, slots.pages),
    )
    return state._replace(free=free.at[gone].set(True, mode="drop"), slots=slots, loaded=loaded)


def _admit(queue: Queue, state: State, layout: Layout) -> State:
    """Give free slots to rows, those that lost theirs first, and every row in a slot the pages that
    its next token needs."""
    rows, slots, n = state.rows, state.slots, len(queue.limits)
    size = len(slots.row)
    ready, back, new = _waiting(queue, state)
    place = jnp.nonzero(jnp.concatenate([back, new]), size=size, fill_value=2 * n)[0]
    row = jnp.where(place < 2 * n, ready[place % n], n)
    needs = jnp.where(row < n, layout.columns(jnp.maximum(_of_rows(rows.count, row), 1)), 0)
    there = _there(queue, state)
    idle = (~there).sum()
    taken = (row < n) & (jnp.arange(size) < idle) & (jnp.cumsum(needs) <= _spare(state))
    rank = jnp.cumsum(~there) - 1
    given = jnp.where(~there & taken.at[rank].get(mode="clip"), row.at[rank].get(mode="clip"), n)
    into = jnp.where(there, slots.row, given)
    state = state._replace(
        rows=rows._replace(status=rows.status.at[given].set(ACTIVE, mode="drop")),
        slots=slots._replace(row=into),
    )

    def wanted(state):
        there = _there(queue, state)
        return jnp.where(there, layout.columns(_of_rows(state.rows.count, state.slots.row)), 0)

    def missing(state):
        have = (state.slots.pages < layout.pages).sum(1)
        return jnp.maximum(wanted(state) - have, 0).sum()

    def short(state):
        return (missing(state) > state.free.sum()) & (_there(queue, state).sum() > 1)

    def evict(state):
        slots = state.slots
        count = _of_rows(state.rows.count, slots.row)
        least = jnp.argmin(jnp.where(_there(queue, state), count, jnp.iinfo(jnp.int32).max))
        leaving = jnp.arange(len(slots.row)) == least
        status = state.rows.status.at[slots.row[least]].set(EVICTED, mode="drop")
        counters = state.counters._replace(evicted=state.counters.evicted + 1)
        state = state._replace(rows=state.rows._replace(status=status), counters=counters)
        return _leave(queue, state, leaving)

    state = lax.while_loop(short, evict, _reclaim(state, missing(state)))
    free, pages = allocate(state.free, state.slots.pages, wanted(state))
    return state._replace(free=free, slots=state.slots._replace(pages=pages))


def allocate(
    free: Bool[Array, " pages"], table: Int[Array, "rows columns"], wanted: Int[Array, " rows"]
) -> tuple[Bool[Array, " pages"], Int[Array, "rows columns"]]:
    """Give each row pages until it has as many as it wants, the free ones by their rank.

    Args:
        table: page numbers; as many as there are pages stands for none, and what is left without
            one keeps it.
        wanted: pages of each row, those that it has among them.

    Returns:
        (what is still free, the table).
    """
    none = len(free)
    missing = (jnp.arange(table.shape[1]) < wanted[:, None]) & (table == none)
    rank = (jnp.cumsum(missing.reshape(-1)) - 1).reshape(missing.shape)
    numbers = jnp.nonzero(free, size=min(missing.size, none), fill_value=none)[0].astype(jnp.int32)
    pages = jnp.where(missing, numbers.at[rank].get(mode="fill", fill_value=none), table)
    return free.at[jnp.where(missing, pages, none)].set(False, mode="drop"), pages


def _with_signals(queue: Queue, state: State, layout: Layout) -> tuple[State, Signals]:
    done = state.rows.status == DONE
    whole = done.reshape(-1, _samples(queue)).all(1).sum()
    left = jnp.where(whole >= queue.enough, 0, (~done).sum(dtype=jnp.int32))
    load, lacking = _wants_prompts(queue, state, layout), _lacking(queue, state).any()
    return state, Signals(_anywhere(load), _anywhere(lacking), _most(left))


def _wants_prompts(queue: Queue, state: State, layout: Layout) -> Bool[Array, ""]:
    """Whether slots are free, no row is there to take them, and the next prompt finds pages."""
    loaded, (_, back, new) = state.loaded, _waiting(queue, state)
    following = queue.order.at[loaded.count].get(mode="clip")
    return (
        ~_there(queue, state).all()
        & ~(back | new).any()
        & (loaded.count < len(queue.order))
        & (layout.columns(queue.lengths[following]) <= _spare(state))
    )


def _waiting(queue: Queue, state: State) -> tuple[Array, Array, Array]:
    """The rows in the order in which they are served, and which of them wait for a slot, their
    prompt loaded: those that have tokens, and new ones."""
    samples = _samples(queue)
    row = rows_of(queue.order, samples)
    loaded = jnp.arange(len(row)) < state.loaded.count * samples
    status = state.rows.status[row]
    return row, loaded & (status == EVICTED), loaded & (status == NEW)


def _counted(queue: Queue, state: State, there: Bool[Array, " slots"]) -> State:
    c, status = state.counters, state.rows.status
    waits = ((status == NEW) | (status == EVICTED)).any().astype(jnp.float32)
    used = (~state.free).sum(dtype=jnp.int32)
    counters = c._replace(
        steps=c.steps + 1,
        busy=c.busy + waits * there.sum(),
        offered=c.offered + waits * len(there),
        peak_pages=jnp.maximum(c.peak_pages, used),
    )
    return state._replace(counters=counters)


def _most(number: Int[Array, ""]) -> Int[Array, ""]:
    """The largest over all parts of the batch where they step together; else the part's own.

    They have to where the model itself is split: XLA moves its tensors by collectives that every
    device of the mesh takes part in.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.shape["tensor"] == 1 or not mesh.manual_axes:
        return number
    return lax.pmax(number, mesh.manual_axes)


def _anywhere(flag: Bool[Array, ""]) -> Bool[Array, ""]:
    return _most(flag.astype(jnp.int32)) > 0


def _spare(state: State) -> Int[Array, ""]:
    """Pages that are free or could be, less one for each row in a slot, which may want it soon."""
    none, loaded, spare = len(state.free), state.loaded, state.free.sum()
    if state.before is not None and loaded.ended is not None:
        spare += (_stays(loaded, none)[:, None] & (loaded.pages < none)).sum()
        spare += (loaded.ended < none).sum()
        spare += (state.before.pages < none).sum()
    return spare - (state.slots.row < len(state.rows.status)).sum()


def _there(queue: Queue, state: State) -> Bool[Array, " slots"]:
    return state.slots.row < len(queue.limits)


def _lacking(queue: Queue, state: State) -> Bool[Array, " slots"]:
    """Slots whose row has tokens before its last that are not in its pages."""
    count = _of_rows(state.rows.count, state.slots.row)
    return _there(queue, state) & (state.slots.held < count - 1)


def _prefix(queue: Queue, state: State, row: Int[Array, " slots"]) -> tuple[Array, Array]:
    """Pages and length of the prompt of each row; 0 where there is none."""
    prompt = row // _samples(queue)
    lengths = queue.lengths.at[prompt].get(mode="fill", fill_value=0)
    return state.loaded.pages.at[prompt].get(mode="fill", fill_value=len(state.free)), lengths


def _with_routes(rows: Rows, row, column, real, routes) -> Rows:
    """Keep the experts of tokens that were fed."""
    if rows.expert_ids is None:
        return rows
    column = jnp.where(real, column, rows.tokens.shape[1])
    return rows._replace(expert_ids=rows.expert_ids.at[row, column].set(routes, mode="drop"))


def _of_rows(values: Any, row: Int[Array, " slots"]) -> Array:
    """Values of the rows in slots; of an empty slot those of the last row."""
    return values.at[row].get(mode="clip")


def _samples(queue: Queue) -> int:
    return len(queue.limits) // len(queue.lengths)


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
        layout: sizes of one part of the batch.
        order: of each part's prompts, counted in the part.
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
        enough: prompts of a part.

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
        source: the prompt of the earlier call, counted in the part, that each goes on from; none is
            the source of two.
        lengths: tokens that each begins with that the cache has: of the source's prompt, then of
            its completion, but for that one's last token.

    Returns:
        (the rollout, what is left, and of which prompts).
    """
    policy = _gathered(policy)
    keys = _row_keys(key, prompts.ids, samples=1)
    order = jnp.arange(len(keys), dtype=jnp.int32) % (len(keys) // _part_count())
    queue = _queue(prompts, order, keys, None, longest=sampling.max_new_tokens)
    if kept is None:
        kept = _nothing(policy, queue, sampling.max_new_tokens, layout)
    given = kept.pages, kept.prompts, *_split((asked, source, lengths))
    state, signals = _begin_turn(policy, queue, (kept.keys, kept.values), given, sampling, layout)
    (state,) = _states(policy, queue, state, signals, sampling, layout, 0)
    found = _found(state.rows, state.loaded, state.counters)
    pages, lengths = _kept_pages(queue, state.loaded, layout)
    there = _stays(state.loaded, layout.pages).reshape(-1)
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
WHOLE = replace(DEFAULT_RULES, embed=None, experts=None)
"""Where the weights of a decode loop live: whole in each part of the batch."""


def _parts() -> tuple[str, ...]:
    """Axes of the mesh that split a batch."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = () if mesh.empty else DEFAULT_RULES.mesh_axes("batch")
    return tuple(axis for axis in axes if mesh.shape[axis] > 1)


def _part_count() -> int:
    return math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in _parts())


def _by_parts(function: Callable) -> Callable:
    """Run function(policy, queue, state, sampling, ...) for each part of the batch by itself.

    Every array of the state has a leading axis of parts then, on one device none.
    """
    if not (axes := _parts()):
        return function
    whole, split = PartitionSpec(), PartitionSpec(axes)

    def of_part(policy, queue, state, *rest):
        state = jax.tree.map(lambda x: x[0], state)
        return jax.tree.map(lambda x: x[None], function(policy, queue, state, *rest))

    def run(policy, queue, state, *rest):
        queues: Any = (*(split,) * 5, whole)
        queues = Queue(*queues)
        specs = (whole, queues, split, *(whole,) * len(rest))
        return jax.shard_map(
            of_part, in_specs=specs, out_specs=split, axis_names=set(axes), check_vma=False
        )(policy, queue, state, *rest)

    return run


def _gathered(policy: Policy) -> Policy:
    """Bring the weights into the form that the programs multiply; the same arrays where they are
    in it."""
    form = jax.tree.structure(jax.eval_shape(_gather, policy))  # a jitted function's is remembered
    return policy if not _parts() and form == jax.tree.structure(policy) else _gather(policy)


@jax.jit
def _gather(policy: Policy) -> Policy:
    if _parts():
        mesh = jax.sharding.get_abstract_mesh()
        policy = lax.with_sharding_constraint(policy, policy_shardings(policy, mesh, WHOLE))
    return predequantized(policy)


_row_keys = jax.jit(row_keys, static_argnames="samples")


@partial(jax.jit, static_argnames="longest")
def _queue(prompts, order, keys, limits, enough=None, *, longest: int) -> Queue:
    if limits is None:
        limits = jnp.full(len(keys), longest, jnp.int32)
    if enough is None:
        enough = jnp.int32(len(order) // _part_count())
    return Queue(prompts.tokens, prompts.lengths, order, keys, limits, enough)


@jax.jit
def _split[T](rows: T) -> T:
    """Rows with a leading axis of parts, where there are some."""
    parts = _part_count()
    return rows if parts == 1 else split_batch(rows, parts)


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
        return _with_signals(queue, state, layout)

    return _by_parts(run)(policy, queue, rows, sampling)


@partial(jax.jit, static_argnums=5, donate_argnums=2)
def _begin_turn(policy, queue, cache, given, sampling, layout):
    def run(policy, queue, left, sampling):
        (keys, values), (pages, lengths, *given) = left
        kept = Kept(keys, values, pages, lengths)
        state = begin_turn(policy, queue, kept, *given, sampling, layout)
        return _with_signals(queue, state, layout)

    return _by_parts(run)(policy, queue, (cache, given), sampling)


@partial(jax.jit, static_argnums=(2, 3))
def _nothing(policy, queue, longest, layout):
    """An empty cache, which no call has left."""

    def run(policy, queue, _):
        size = layout.pages, layout.page_size
        cache = empty_cache(policy.config, *size, cache_dtype(policy), policy.stacked)
        columns = layout.columns(layout.widest) + layout.columns(longest)
        pages = jnp.full((len(queue.lengths), columns), layout.pages, jnp.int32)
        return Kept(*cache, pages, jnp.zeros(len(pages), jnp.int32))

    return _by_parts(run)(policy, queue, None)


@partial(jax.jit, static_argnums=2)
def _kept_pages(queue, loaded, layout):
    def run(policy, queue, loaded):
        return kept_pages(queue, loaded, layout)

    return _by_parts(run)(None, queue, loaded)


@partial(jax.jit, static_argnums=4, donate_argnums=2)
def _load(policy, queue, state, sampling, layout):
    return _by_parts(partial(load, layout=layout))(policy, queue, state, sampling)


@partial(jax.jit, static_argnums=(5, 6), donate_argnums=2)
def _run(policy, queue, state, sampling, steps, layout, fewer):
    call = partial(run, layout=layout, fewer=fewer)
    return _by_parts(call)(policy, queue, state, sampling, steps)


@partial(jax.jit, static_argnums=3, donate_argnums=2)
def _catch_up(policy, queue, state, layout):
    return _by_parts(partial(catch_up, layout=layout))(policy, queue, state)


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
