"""The programs on the device: prefill, decode, and who has which slot and which pages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from fp8rl_jax.models.cache import KVCache, Pages
from fp8rl_jax.models.forward import forward
from fp8rl_jax.models.logprobs import token_logprobs
from fp8rl_jax.models.policy import Policy
from fp8rl_jax.rollout.paged.layout import Layout
from fp8rl_jax.rollout.paged.reuse import reclaim, stays, taken_over
from fp8rl_jax.rollout.paged.state import (
    ACTIVE,
    DONE,
    EVICTED,
    NEW,
    Queue,
    Rows,
    Signals,
    Slots,
    State,
)
from fp8rl_jax.rollout.sampler import rows_of
from fp8rl_jax.rollout.sampling import Sampling, draw


def load(
    policy: Policy, queue: Queue, state: State, sampling: Sampling, layout: Layout
) -> tuple[State, Signals]:
    """Prefill the next prompts of the order, `layout.together` or as many as find pages.

    None where slots do not wait for them, as in shards of the batch that another one interrupts.
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
    state = reclaim(state, jnp.where(fits, columns, 0).sum())
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
        state, begins = taken_over(state, layout, prompt, pages)

    def chunk(carry):
        done, state = carry
        start = begins + done
        result, state, column, real = _prefill(
            policy, state, layout, tokens, lengths, start, (pages, start), None
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
    return with_signals(queue, _admit(queue, state, layout), layout)


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
        state = _admit(queue, _decode(policy, queue, state, sampling), layout)
        return taken + 1, *with_signals(queue, state, layout)

    carry = (jnp.int32(0), *with_signals(queue, state, layout))
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
            policy, state, layout, tokens, wanted, start, (pages, start), prefix
        )
        rows = _with_routes(state.rows, row[:, None], column, real, result.routes)
        return done + layout.chunk, state._replace(rows=rows)

    most = _most((wanted - held).max())
    _, state = lax.while_loop(lambda carry: carry[0] < most, chunk, (jnp.int32(0), state))
    counters = state.counters
    counters = counters._replace(recomputed=counters.recomputed + (wanted - held).sum())
    slots = state.slots
    slots = slots._replace(held=slots.held.at[chosen].set(wanted, mode="drop"))
    return with_signals(queue, state._replace(slots=slots, counters=counters), layout)


def shrink(slots: Slots, rows: int, count: int) -> Slots:
    """Keep `count` slots, those with one of the rows first."""
    order = jnp.argsort(slots.row == rows, stable=True)[:count]
    return jax.tree.map(lambda x: x[order], slots)


def _prefill(policy, state, layout, tokens, lengths, start, own, prefix):
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


def _decode(policy: Policy, queue: Queue, state: State, sampling: Sampling):
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
    keys = jax.vmap(jax.random.fold_in)(_of_rows(queue.keys, row), count)
    phrases = jax.tree.map(lambda states: _of_rows(states, row), rows.phrases)
    drawn, behaviour, full, support = draw(
        logits, keys, sampling, sampling.banned(phrases), policy.compute
    )
    stopped, phrases = sampling.read(drawn, phrases)
    stop_state, bad_state = jax.tree.map(
        lambda states, new: states.at[row].set(new, mode="drop"), rows.phrases, phrases
    )

    def write(tables, columns):
        return jax.tree.map(
            lambda table, column: table.at[row, count].set(column, mode="drop"), tables, columns
        )

    ended = there & (stopped | (count + 1 >= _of_rows(queue.limits, row)))
    rows = rows._replace(
        status=rows.status.at[jnp.where(ended, row, len(rows.status))].set(DONE, mode="drop"),
        count=rows.count.at[row].set(count + 1, mode="drop"),
        tokens=write(rows.tokens, drawn),
        behaviour_logprobs=write(rows.behaviour_logprobs, behaviour),
        policy_logprobs=write(rows.policy_logprobs, full),
        support=write(rows.support, support),
        stopped=rows.stopped.at[row].set(stopped, mode="drop"),
        stop_state=stop_state,
        bad_state=bad_state,
    )
    return _leave(queue, _counted(state, there)._replace(rows=rows, slots=slots), ended)


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

    state = lax.while_loop(short, evict, reclaim(state, missing(state)))
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


def with_signals(queue: Queue, state: State, layout: Layout) -> tuple[State, Signals]:
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


def _counted(state: State, there: Bool[Array, " slots"]) -> State:
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
    """The largest over all shards of the batch where they step together; else the shard's own.

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
        spare += (stays(loaded, none)[:, None] & (loaded.pages < none)).sum()
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
