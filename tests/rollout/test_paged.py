"""Continuous batching: the static sampler's rollouts, whatever the slots, the pages and the order."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout.tiny import CONFIG, VOCAB, make_policy
from tiny_models import GEMMA, MISTRAL, MOE
from tiny_run import LEARNS, measured, train, write_run

from fp8rl_jax.config.recipe import PrecisionConfig, get_recipe
from fp8rl_jax.config.run import PagedConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.policy import init_policy
from fp8rl_jax.rollout import engine as engine_module
from fp8rl_jax.rollout.calibration import calibrate_on_prompts
from fp8rl_jax.rollout.constraints import compile_phrases
from fp8rl_jax.rollout.engine import LocalEngine, PagedEngine, pad_prompts
from fp8rl_jax.rollout.paged import host
from fp8rl_jax.rollout.paged.layout import Layout, choose_layout, token_bytes
from fp8rl_jax.rollout.paged.programs import allocate
from fp8rl_jax.rollout.paged.state import NEW
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.rollout.sync import SyncContext

KEY = jax.random.key(3)
STOPS = tuple(range(20, 25))
"""Of 131 tokens, or of 40: some completions are short, and some are cut."""
SAMPLING = Sampling(24, stop_token_ids=STOPS)
ROOMY = PagedConfig()
SMALL = PagedConfig(slots=4, page_size=4, prefill_tokens=8, decode_steps=7)
"""Slots are refilled, prompts prefilled in chunks, and rows take several pages."""
TIGHT = replace(SMALL, slots=8, cache_tokens=96)
"""Rows lose their pages."""
PROGRAMS = (host._begin, host._load, host._run, host._catch_up)
LAYOUTS = {"roomy": ROOMY, "small": SMALL, "tight": TIGHT}
KINDS = {"dense": CONFIG, "window": MISTRAL, "gemma": GEMMA, "experts": MOE}


@cache
def policy_of(kind: str):
    if kind == "dense":
        return make_policy()
    policy = init_policy(KINDS[kind], jax.random.key(0))
    return jax.tree.map(lambda x: x * 4.0 if x.ndim > 1 and x.shape[-1] > 16 else x, policy)


def prompts_of(kind: str = "dense", lengths=(9, 3, 1, 7, 5, 2), ids=(7, 3, 11, 0, 1, 2)):
    rng = np.random.default_rng(0)
    vocab = KINDS[kind].vocab_size
    return pad_prompts([rng.integers(1, vocab, n).tolist() for n in lengths], list(ids), 9)


def synced(made, kind="dense", recipe="bf16", exact=False, dtype=jnp.float32, **options):
    chosen = get_recipe(recipe, PrecisionConfig(exact=exact))
    engine = made(chosen, jnp.dtype(dtype), expert_ids=kind == "experts", **options)
    prompts, policy = prompts_of(kind), policy_of(kind)
    scales = calibrate_on_prompts(policy, prompts, chosen, jnp.dtype(dtype))
    engine.sync(policy, SyncContext(scales=scales))
    return engine


@cache
def expected(kind="dense", recipe="bf16", exact=False, dtype="float32", samples=3):
    engine = synced(LocalEngine, kind, recipe, exact, dtype)
    return jax.device_get(
        engine.generate(prompts_of(kind), samples, SAMPLING, KEY, prompt_logprobs=True)
    )


def assert_same(found, wanted, atol):
    found = jax.device_get(found)
    for name in ("tokens", "mask", "stopped"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name), name)
    names = ["behaviour_logprobs", "policy_logprobs"]
    for name in names + ["prompt_logprobs"] * (wanted.prompt_logprobs is not None):
        np.testing.assert_allclose(getattr(found, name), getattr(wanted, name), atol=atol)
    if wanted.expert_ids is not None:
        np.testing.assert_array_equal(found.prompt_expert_ids, wanted.prompt_expert_ids)
        fed = np.arange(24) < wanted.mask.sum(1, keepdims=True) - 1
        used = np.where(fed[..., None, None], wanted.expert_ids, -1)
        np.testing.assert_array_equal(found.expert_ids, used)


@pytest.mark.parametrize(
    ("kind", "unroll", "layout"),
    [
        *(("dense", True, layout) for layout in LAYOUTS),
        ("dense", False, "tight"),
        *(
            pytest.param("dense", False, layout, marks=pytest.mark.slow)
            for layout in ("roomy", "small")
        ),
        *(
            pytest.param(kind, False, layout, marks=pytest.mark.slow)
            for kind in list(KINDS)[1:]
            for layout in ("small", "tight")
        ),
    ],
)
def test_rollouts_are_those_of_the_static_sampler(kind, unroll, layout):
    engine = synced(PagedEngine, kind, unroll=unroll, paged=LAYOUTS[layout])
    found = engine.generate(prompts_of(kind), 3, SAMPLING, KEY, prompt_logprobs=True)
    assert_same(found, expected(kind), 1e-4)
    assert (found.metrics["rollout/evicted"] > 0) == (layout == "tight")
    assert (found.metrics["rollout/recomputed_tokens"] > 0) == (layout == "tight")
    assert layout == "tight" or found.metrics["rollout/slots_busy"] > 0.95


@pytest.mark.parametrize(
    ("kind", "recipe", "dtype", "layout"),
    [
        ("dense", "bf16", "float32", "small"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("dense", "bf16", "float32", "tight"),
                ("dense", "mxfp8", "float32", "small"),
                ("dense", "jet-rl", "bfloat16", "tight"),
                ("experts", "nvfp4-rl", "bfloat16", "small"),
                ("experts", "bf16", "bfloat16", "tight"),
            )
        ),
    ],
)
def test_exact_rollouts_have_the_static_sampler_s_bits(kind, recipe, dtype, layout):
    engine = synced(PagedEngine, kind, recipe, True, dtype, paged=LAYOUTS[layout])
    found = engine.generate(prompts_of(kind), 3, SAMPLING, KEY, prompt_logprobs=True)
    assert_same(found, expected(kind, recipe, True, dtype), 0)


@pytest.mark.parametrize("recipe", ["fp8-rl", pytest.param("fp8-kv", marks=pytest.mark.slow)])
def test_an_fp8_cache_in_pages(recipe):
    """The order of sums differs, and with it a rounding here and there; where no token changed."""
    wanted = expected("dense", recipe)
    found = jax.device_get(
        synced(PagedEngine, "dense", recipe, paged=TIGHT).generate(
            prompts_of(), 3, SAMPLING, KEY, prompt_logprobs=True
        )
    )
    alike = (found.tokens == wanted.tokens).all(1)
    assert alike.mean() > 0.5
    gap = np.abs(found.policy_logprobs - wanted.policy_logprobs)[alike]
    cost = np.abs(expected("dense").prompt_logprobs - wanted.prompt_logprobs)
    assert gap.mean() < cost.mean() / 5
    assert jax.tree.leaves(empty_pages("fp8-rl"))[0].dtype == jnp.float8_e4m3fn


def empty_pages(recipe):
    from fp8rl_jax.rollout.paged.state import Queue, begin

    policy = synced(PagedEngine, "dense", recipe).policy
    prompts = prompts_of()
    queue = Queue(prompts.tokens, prompts.lengths, None, None, np.zeros(6), None)
    layout = Layout(4, 4, 40, 2, 8, 1)
    return jax.eval_shape(lambda: begin(policy, queue, 1, SAMPLING, layout).keys)


def talk(engine, kind="dense", turns=3, told=None):
    """What an engine says in a conversation: of its six, two go on as they were, one is told
    nothing new, one is rewritten, one ends, and the first stands in its place."""
    rng, vocab = np.random.default_rng(1), KINDS[kind].vocab_size
    prompts = prompts_of(kind)
    said = [
        row[:count].tolist() for row, count in zip(prompts.tokens, prompts.lengths, strict=True)
    ]
    ids, found = prompts.ids.tolist(), []
    with engine.conversations(WIDEST):
        for turn in range(turns):
            width = max(map(len, said))
            batch = pad_prompts(said, ids, width)
            rollout = jax.device_get(engine.generate(batch, 1, SAMPLING, jax.random.key(turn)))
            found.append(rollout)
            words = zip(rollout.tokens, rollout.mask, strict=True)
            said = [
                [*one, *row[mask].tolist()] for one, (row, mask) in zip(said, words, strict=True)
            ]
            heard = [rng.integers(1, vocab, n).tolist() for n in (3, 1, 0, 2, 4, 2)]
            said = [[*one, *more] for one, more in zip(said, heard, strict=True)]
            said[3] = said[3][1:]
            said, ids = [*said[1:5], said[1], said[1]], [*ids[1:5], ids[1], ids[1]]
            if told is not None:
                told(turn)
    return found


WIDEST = 9 + 3 * (24 + 4)
FEW = replace(SMALL, cache_tokens=160)
"""Pages for some of the six conversations."""


@pytest.mark.parametrize(
    ("kind", "layout", "unroll"),
    [
        ("dense", "roomy", True),
        pytest.param("dense", "small", True, marks=pytest.mark.slow),
        pytest.param("dense", "few", True, marks=pytest.mark.slow),
        pytest.param("window", "small", False, marks=pytest.mark.slow),
        pytest.param("gemma", "small", False, marks=pytest.mark.slow),
    ],
)
def test_a_conversation_goes_on_from_its_caches(kind, layout, unroll):
    """What the static sampler, which prefills it anew, says."""
    engine = synced(PagedEngine, kind, unroll=unroll, paged=(LAYOUTS | {"few": FEW})[layout])
    found, wanted = talk(engine, kind), talk(synced(LocalEngine, kind), kind)
    for one, other in zip(found, wanted, strict=True):
        assert_same(one, other, 1e-4)
    # what the turn before has fed of 1, 2 and 4, and of 0, 1 and 2; the other, rewritten one may
    # begin with a token or two that it began with
    fed = [part.prompts.lengths + part.mask.sum(1) - 1 for part in wanted]
    whole = np.array([0, fed[0][[1, 2, 4]].sum(), fed[1][[0, 1, 2]].sum()])
    reused = np.array([part.metrics["rollout/reused_tokens"] for part in found])
    if layout == "few":
        assert reused[0] == 0 < sum(reused) < sum(whole)
    else:
        assert ((whole <= reused) & (reused <= whole + 2)).all()
    assert engine._earlier is None


@pytest.mark.slow
def test_an_exact_conversation_has_the_static_sampler_s_bits():
    wanted = talk(synced(LocalEngine, "dense", "jet-rl", True, "bfloat16"))
    found = talk(synced(PagedEngine, "dense", "jet-rl", True, "bfloat16", paged=SMALL))
    for one, other in zip(found, wanted, strict=True):
        assert_same(one, other, 0)
    assert all(part.metrics["rollout/reused_tokens"] > 0 for part in found[1:])


@pytest.mark.slow
def test_an_fp8_cache_of_a_conversation_is_moved_as_it_is():
    """The same as prefilled anew but for roundings."""
    wanted = talk(synced(LocalEngine, "dense", "fp8-kv"), turns=2)
    found = talk(synced(PagedEngine, "dense", "fp8-kv", paged=SMALL), turns=2)
    assert found[1].metrics["rollout/reused_tokens"] > 0
    alike = (found[1].tokens == wanted[1].tokens).all(1) & (
        found[1].prompts.tokens == wanted[1].prompts.tokens
    ).all(1)
    assert alike.mean() > 0.5
    gap = np.abs(found[1].policy_logprobs - wanted[1].policy_logprobs)[alike]
    assert gap.mean() < 0.02


def test_caches_of_other_weights_are_not_gone_on_from():
    """Nor those of another call's, when a conversation is over."""
    engine = synced(PagedEngine, paged=SMALL)
    found = talk(engine, turns=2, told=lambda _: engine.sync(policy_of("dense")))
    assert [int(part.metrics["rollout/reused_tokens"]) for part in found] == [0, 0]
    assert talk(engine, turns=1)[0].metrics["rollout/reused_tokens"] == 0


def test_stop_strings_bad_words_and_bias():
    letters = [bytes([i]) for i in range(VOCAB)]
    sampling = replace(
        SAMPLING,
        top_k=40,
        stop_strings=compile_phrases(["ab", "x"], letters, VOCAB),
        bad_words=compile_phrases(["c", "de"], letters, VOCAB),
        logit_bias=jnp.zeros(VOCAB).at[jnp.array([97, 98, 99])].set(4.0),
    )
    wanted = synced(LocalEngine).generate(prompts_of(), 3, sampling, KEY)
    found = synced(PagedEngine, paged=TIGHT).generate(prompts_of(), 3, sampling, KEY)
    assert (np.asarray(wanted.tokens) == 97).any() and not (np.asarray(wanted.tokens) == 99).any()
    for name in ("tokens", "mask", "stopped"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))
    np.testing.assert_allclose(found.behaviour_logprobs, wanted.behaviour_logprobs, atol=1e-4)


def test_limits_and_the_order_of_what_is_known():
    engine = synced(PagedEngine, paged=SMALL)
    limits = jnp.asarray(np.random.default_rng(1).integers(1, 24, 18))
    wanted = synced(LocalEngine).generate(prompts_of(), 3, Sampling(24), KEY, limits=limits)
    for _ in range(2):  # the second knows how long each prompt's completions are
        found = engine.generate(prompts_of(), 3, Sampling(24), KEY, limits=limits)
        np.testing.assert_array_equal(found.mask, np.arange(24) < np.asarray(limits)[:, None])
        np.testing.assert_array_equal(found.tokens, wanted.tokens)
    assert engine._lengths[7] == np.asarray(limits)[:3].mean()


def test_a_stream_grows_to_the_rollout():
    engine = synced(PagedEngine, paged=SMALL)
    wanted = engine.generate(prompts_of(), 1, SAMPLING, KEY)
    seen = list(engine.stream(prompts_of(), SAMPLING, KEY, every=5))
    counts = np.array([part.mask.sum(1) for part in seen])
    assert (np.diff(counts, axis=0) >= 0).all() and len(seen) > 4
    assert set(counts[0]) == {0, 1}
    np.testing.assert_array_equal(seen[-1].tokens, wanted.tokens)


@pytest.mark.slow
def test_fewer_rows_than_a_fourth_of_the_slots_get_fewer_slots():
    """The last rows alone: the same tokens, by a program of fewer slots."""
    limits = jnp.where(jnp.arange(18) == 4, 80, 5)
    sampling = Sampling(80)
    wanted = synced(LocalEngine).generate(prompts_of(), 3, sampling, KEY, limits=limits)
    found = synced(PagedEngine).generate(prompts_of(), 3, sampling, KEY, limits=limits)
    np.testing.assert_array_equal(found.tokens, wanted.tokens)


def test_a_second_step_compiles_nothing():
    engine = synced(PagedEngine, paged=TIGHT)
    engine.generate(prompts_of(), 3, SAMPLING, KEY)
    programs = [program._cache_size() for program in PROGRAMS]
    engine.sync(policy_of("dense"))
    others = prompts_of(lengths=(1, 9, 4, 4, 2, 8), ids=(5, 6, 8, 9, 10, 12))
    engine.generate(others, 3, SAMPLING, jax.random.key(9))
    assert [program._cache_size() for program in PROGRAMS] == programs
    assert all(programs)


def test_pages_are_given_by_their_rank_and_no_page_twice():
    rng = np.random.default_rng(0)
    for _ in range(20):
        free = rng.random(30) < 0.6
        table = np.full((5, 4), 30)
        have = rng.integers(0, 3, 5)
        taken = iter(np.flatnonzero(~free))
        for row, count in enumerate(have):
            table[row, :count] = [next(taken, 30) for _ in range(count)]
        wanted = np.minimum(have + rng.integers(0, 2, 5), 4)
        missing = sum(max(w - (t < 30).sum(), 0) for w, t in zip(wanted, table, strict=True))
        left, pages = jax.jit(allocate)(jnp.asarray(free), jnp.asarray(table), jnp.asarray(wanted))
        assert free.sum() - left.sum() == min(missing, free.sum())
        new = np.asarray(pages)[table == 30]
        new = new[new < 30]
        assert len(set(new)) == len(new) and free[new].all() and not np.asarray(left)[new].any()
        np.testing.assert_array_equal(np.asarray(pages)[table < 30], table[table < 30])


def test_a_turn_loads_no_more_prompts_together_than_leave_pages_for_a_row():
    """Whatever little of the prompts is new, and whatever the cache holds."""
    for tokens in (128, 176, 224, 240, 320, 448):
        config = PagedConfig(slots=4, page_size=4, cache_tokens=tokens, prefill_tokens=32)
        layout, most = choose_layout(config, (7, 32), 1, 64, widest=32), 0
        for chunk in (2, 8, 32):
            turn = layout.of_turn(chunk, config, (7, 32), 64)
            assert turn.prompt_pages(7, 32) + turn.columns(64) <= turn.pages == layout.pages
            assert turn.together >= layout.together and turn.chunk == chunk
            most = max(most, turn.together)
        # no fewer than there is room for
        assert most == 4 or layout.pages < (layout.slots + most + 1) * 8 + 16


def test_what_a_layout_makes_of_the_room():
    full = choose_layout(ROOMY, (8, 64), 4, 128)
    assert full == Layout(32, 32, 8 * 2 + 32 * 4, 8, 64, 64)
    assert choose_layout(ROOMY, (8, 64), 4, 128, room=1024).pages == 32
    few = choose_layout(replace(ROOMY, cache_tokens=12 * 32), (8, 64), 4, 128)
    assert few.slots == 2 and few.pages == 12
    assert choose_layout(ROOMY, (8, 64), 4, 128, hopper=True).page_size == 64
    with pytest.raises(UserError, match="page_size = 4: Hopper's kernels take multiples of 64"):
        choose_layout(SMALL, (8, 64), 4, 128, hopper=True)
    with pytest.raises(UserError, match=r"cache_tokens: the cache holds 128 tokens, and .* needs"):
        choose_layout(replace(ROOMY, cache_tokens=128), (8, 64), 4, 128)


def test_a_layout_is_of_the_process_with_least_room(monkeypatch):
    """What another process has less of makes the layout smaller; it is asked once a shape."""
    asked, engine = [], synced(PagedEngine, paged=replace(SMALL, cache_tokens=0))
    prompts = prompts_of()

    def told(name, value, processes):
        asked.append((name, value, processes))
        return 48.0 * token_bytes(engine.policy)

    monkeypatch.setattr(engine_module, "least_of", told)
    layouts = [engine._layout(engine.policy, prompts, 3, SAMPLING)[0] for _ in range(2)]
    ((name, value, processes),) = asked
    assert value == np.inf and processes == {0} and name.startswith("free bytes for ")
    assert layouts[0] is layouts[1] and layouts[0].pages == 48 // SMALL.page_size
    monkeypatch.undo()
    alone = synced(PagedEngine, paged=engine.paged)._layout(engine.policy, prompts, 3, SAMPLING)
    assert alone[0].pages > layouts[0].pages


def test_prompts_that_do_not_fit_the_cache_are_refused():
    engine = synced(PagedEngine, paged=replace(SMALL, cache_tokens=20))
    with pytest.raises(UserError, match="rollout.paged.cache_tokens"):
        engine.generate(prompts_of(), 3, SAMPLING, KEY)


def test_no_copy_of_the_cache_at_the_edges_of_a_loop():
    """Arrays of the pool's shape are written in place: none is copied in a step."""
    engine = synced(PagedEngine, paged=SMALL)
    layout = Layout(4, 4, 40, 2, 8, 7)
    policy, prompts = engine.policy, prompts_of()
    order = jnp.arange(6, dtype=jnp.int32)
    queue = host._queue(
        prompts, order, host._row_keys(KEY, prompts.ids, samples=3), None, None, longest=24
    )
    state, _ = host._begin(policy, queue, None, SAMPLING, 3, layout, False, False)
    steps = jnp.int32(7)
    text = host._run.lower(policy, queue, state, SAMPLING, steps, layout, 0).compile().as_text()
    pool = f"f32[{','.join(map(str, state.keys[0].shape))}]"
    assert f"{pool}{{3,2,1,0}} scatter" in text or f"{pool}{{3,2,1,0}} fusion" in text
    copies = [line for line in text.splitlines() if f"= {pool}" in line and " copy(" in line]
    assert not copies


def test_prompts_are_loaded_where_slots_wait_for_them():
    engine, prompts = synced(PagedEngine, paged=SMALL), prompts_of()
    layout = Layout(4, 4, 40, 1, 8, 7)
    order = jnp.arange(6, dtype=jnp.int32)
    queue = host._queue(
        prompts, order, host._row_keys(KEY, prompts.ids, samples=3), None, None, longest=24
    )
    state, _ = host._begin(engine.policy, queue, None, SAMPLING, 3, layout, False, False)
    seen = []
    for _ in range(3):
        state, signals = host._load(engine.policy, queue, state, SAMPLING, layout)
        seen.append(
            (int(state.loaded.count), int((state.rows.status != NEW).sum()), bool(signals.load))
        )
    # three rows a prompt: a fourth slot waits for the second prompt, and then none
    assert seen == [(1, 3, True), (2, 4, False), (2, 4, False)]


@pytest.mark.slow
def test_training_learns_the_same_from_either_engine(tmp_path):
    """In exact mode bit for bit, also where prompts are drawn again until they teach."""
    run_file = write_run(tmp_path, LEARNS)
    flags = ["--rl.dynamic-sampling.enabled", "--rl.dynamic-sampling.max-rounds", "3"]
    pages = ["--rollout.paged.slots", "5", "--rollout.paged.page-size", "3"]
    for engine in ("static", "paged"):
        assert train(run_file, tmp_path / engine, *flags, *pages, "--rollout.engine", engine) == 0
    static, found = (measured(tmp_path / engine) for engine in ("static", "paged"))
    assert len(static) == len(found) == 4
    for one, other in zip(static, found, strict=True):
        assert 0.5 < other["rollout/slots_busy"] <= 1
        assert {name: other[name] for name in one} == one
