"""generate() through the engine: against full forwards without a cache, and against itself in
another order or layout."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from rollout.tiny import (
    CONFIG,
    VOCAB,
    WIDTH,
    full_logits,
    hugging_face_mask,
    log_softmax,
    make_engine,
    make_policy,
    make_prompts,
    take,
)

from fp8rl_jax.models.logprobs import token_logprobs
from fp8rl_jax.models.policy import init_policy
from fp8rl_jax.rollout import sampler
from fp8rl_jax.rollout.engine import LocalEngine, PagedEngine, Prompts
from fp8rl_jax.rollout.sampler import generate, row_keys
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.rollout.sync import SyncContext
from pallas_kernels.backend import refuse_hopper, tracing_for

KEY = jax.random.key(42)
PLAIN = Sampling(max_new_tokens=8, temperature=0.8)


@pytest.fixture(scope="module")
def engine():
    return make_engine("bf16")


@pytest.fixture(scope="module")
def rollout(engine):
    return engine.generate(make_prompts(), 2, PLAIN, KEY)


def test_policy_logprobs_equal_a_full_forward(engine, rollout):
    expected = take(log_softmax(full_logits(engine, rollout) / 0.8), rollout.tokens)
    assert rollout.tokens.shape == (6, 8) and rollout.mask.all() and not rollout.stopped.any()
    assert np.asarray(rollout.policy_logprobs).std() > 0.5  # the policy has opinions
    np.testing.assert_allclose(rollout.policy_logprobs, expected, atol=1e-4)
    np.testing.assert_array_equal(rollout.behaviour_logprobs, rollout.policy_logprobs)


def test_fp8_policy_logprobs_equal_a_full_forward_up_to_flipped_roundings():
    """Same QTensors, KV scales and formats, so only the order of float32 sums differs. Where that
    moves a value across an e4m3 rounding boundary, one operand changes by 2^-3 of itself, and later
    values of its row follow. Few values do, so most log-probabilities agree to float32 and the rest
    stay far below what dropping a format costs. Which values lie that near to a boundary depends on
    the processor, so the bounds are those costs and no absolute number."""
    engine = make_engine("fp8-rl")
    rollout = engine.generate(make_prompts(), 2, PLAIN, KEY)
    error = np.abs(
        take(log_softmax(full_logits(engine, rollout) / 0.8), rollout.tokens)
        - rollout.policy_logprobs
    )
    plain = make_engine("bf16")
    cost = np.abs(
        take(log_softmax(full_logits(plain, rollout) / 0.8), rollout.tokens)
        - rollout.policy_logprobs
    )
    assert (
        (error < 1e-4).mean() > 0.5
        and error.max() < cost.max() / 2
        and error.mean() < cost.mean() / 10
    )


@pytest.mark.parametrize("made", [LocalEngine, PagedEngine])
@pytest.mark.parametrize("recipe", ["bf16", "fp8-rl"])
def test_the_cpu_kernels_sample_what_the_reference_samples(recipe, made):
    found = []
    for backend in ("reference", "cpu"):
        engine = make_engine(recipe, made=made, backend=backend)
        found.append(engine.generate(make_prompts(), 2, PLAIN, KEY))
    one, other = found
    same = np.isclose(one.policy_logprobs, other.policy_logprobs, atol=1e-4)
    # a flipped rounding changes the rest of its row
    assert (same & (one.tokens == other.tokens)).mean() > (0.99 if recipe == "bf16" else 0.5)


def test_an_fp8_cache_kept_as_float32_gives_the_same_completions(monkeypatch):
    engine, prompts = make_engine("fp8-rl", backend="reference"), make_prompts()

    def run():
        inputs = (engine.policy, *prompts, KEY)
        call = partial(generate.__wrapped__, samples=2, sampling=PLAIN)
        program = jax.jit(call).lower(*inputs)
        return program.compile()(*inputs), program.as_text()

    wide, text = run()
    monkeypatch.setattr(sampler, "loop_dtype", sampler.cache_dtype)
    narrow, other = run()
    cache = "tensor<6x2x8x32x{}>"
    assert cache.format("f8E4M3FN") in other and cache.format("f8E4M3FN") not in text
    # a flipped rounding, of which the test above tells, changes the rest of its row
    same = np.isclose(wide.policy_logprobs, narrow.policy_logprobs, atol=1e-4)
    assert (same & (wide.tokens == narrow.tokens)).mean() > 0.5


def test_an_fp8_cache_is_kept_as_float32_on_a_cpu_alone(monkeypatch):
    """And not for want of another operation's kernel."""
    policy = make_engine("fp8-rl").policy
    with tracing_for(132):
        refuse_hopper({"blockwise_matmul": "planted"})
        try:
            assert sampler.loop_dtype(policy) == jnp.float8_e4m3fn
        finally:
            refuse_hopper({})
    policy = make_engine("fp8-rl", backend="reference").policy
    assert sampler.loop_dtype(policy) == jnp.float32
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert sampler.loop_dtype(policy) == jnp.float8_e4m3fn


def test_truncated_behaviour_logprobs(engine):
    settings = {"temperature": 1.2, "top_k": 60, "top_p": 0.8}
    out = engine.generate(make_prompts(), 2, Sampling(max_new_tokens=8, **settings), KEY)
    logits = full_logits(engine, out)
    keep = hugging_face_mask(logits, **settings)
    assert take(keep, out.tokens).all()
    tempered = logits / 1.2
    np.testing.assert_allclose(
        out.policy_logprobs, take(log_softmax(tempered), out.tokens), atol=1e-4
    )
    kept = log_softmax(np.where(keep, tempered, -np.inf))
    np.testing.assert_allclose(out.behaviour_logprobs, take(kept, out.tokens), atol=1e-4)


def test_supports_are_what_each_token_was_drawn_from_in_both_engines(engine):
    """Rows that stop have none behind their end; the support holds fewer than truncation keeps."""
    settings, size = {"temperature": 1.2, "top_k": 60, "top_p": 0.8}, 37
    sampling = Sampling(8, **settings, stop_token_ids=tuple(range(40)), support_size=size)
    out = jax.device_get(engine.generate(make_prompts(), 2, sampling, KEY))
    logits = full_logits(engine, out)
    keep = hugging_face_mask(logits, **settings)
    ids, count = out.support
    np.testing.assert_array_equal(count, np.where(out.mask, keep.sum(-1), 0))
    assert not out.mask.all() and (count > size).any() and (count[out.mask] < size).any()
    inside = np.zeros(keep.shape, bool)
    np.put_along_axis(inside, ids, True, -1)
    kept = take(log_softmax(np.where(inside, logits / 1.2, -np.inf)), out.tokens)
    mask = out.mask
    np.testing.assert_allclose(out.behaviour_logprobs[mask], kept[mask], atol=1e-4)
    paged = make_engine("bf16", made=PagedEngine)
    other = jax.device_get(paged.generate(make_prompts(), 2, sampling, KEY))
    for name in ("tokens", "mask"):
        np.testing.assert_array_equal(getattr(other, name), getattr(out, name))
    np.testing.assert_allclose(other.behaviour_logprobs, out.behaviour_logprobs, atol=1e-4)
    np.testing.assert_array_equal(other.support.count, count)
    np.testing.assert_array_equal(other.support.ids[mask], ids[mask])


def test_greedy_is_the_argmax_of_full_forwards(engine):
    out = engine.generate(make_prompts(), 1, Sampling(max_new_tokens=8, temperature=0), KEY)
    np.testing.assert_array_equal(out.tokens, full_logits(engine, out).argmax(-1))
    np.testing.assert_array_equal(out.behaviour_logprobs, 0)


def test_stop_tokens_end_a_row_and_are_counted(engine, rollout):
    free = np.asarray(rollout.tokens)
    stops = (int(free[0, 3]), int(free[3, 0]))
    out = engine.generate(make_prompts(), 2, Sampling(8, 0.8, stop_token_ids=stops), KEY)
    for b, row in enumerate(free):
        hits = np.flatnonzero(np.isin(row, stops))
        end = hits[0] + 1 if len(hits) else 8
        assert bool(out.stopped[b]) == bool(len(hits))
        np.testing.assert_array_equal(out.mask[b], np.arange(8) < end)
        np.testing.assert_array_equal(out.tokens[b, :end], row[:end])
        np.testing.assert_allclose(
            out.policy_logprobs[b, :end], rollout.policy_logprobs[b, :end], atol=1e-5
        )
        for field in (out.tokens, out.policy_logprobs, out.behaviour_logprobs):
            assert not np.asarray(field)[b, end:].any()
    assert out.stopped[0] and out.stopped[3]


def test_a_row_ends_at_its_limit(engine, rollout):
    limits = jnp.array([1, 8, 3, 2, 7, 20])
    out = engine.generate(make_prompts(), 2, PLAIN, KEY, limits=limits)
    np.testing.assert_array_equal(out.mask, np.arange(8) < limits[:, None])
    np.testing.assert_array_equal(out.tokens, np.where(out.mask, rollout.tokens, 0))
    np.testing.assert_array_equal(
        out.policy_logprobs, np.where(out.mask, rollout.policy_logprobs, 0)
    )
    assert not out.stopped.any()
    out = engine.generate(make_prompts(), 2, PLAIN, KEY, limits=jnp.full(6, 2))
    np.testing.assert_array_equal(out.mask, np.arange(8) < np.full((6, 1), 2))


def test_the_loop_ends_when_every_row_has_stopped(engine):
    """Any token stops: one draw each."""
    out = engine.generate(
        make_prompts(), 2, Sampling(8, 0.8, stop_token_ids=tuple(range(VOCAB))), KEY
    )
    np.testing.assert_array_equal(out.mask, np.arange(8) < np.ones((6, 1)))
    assert out.stopped.all()


def test_a_prompt_alone_gets_the_same_completions(engine, rollout):
    prompts = make_prompts()
    alone = engine.generate(Prompts(*(x[1:2] for x in prompts)), 2, PLAIN, KEY)
    np.testing.assert_array_equal(alone.tokens, rollout.tokens[2:4])


def test_padding_is_not_read(engine, rollout):
    tokens, lengths, ids = make_prompts()
    rubbish = np.where(np.arange(WIDTH) < lengths[:, None], tokens, VOCAB - 1)
    np.testing.assert_array_equal(
        engine.generate(Prompts(rubbish, lengths, ids), 2, PLAIN, KEY).tokens, rollout.tokens
    )


def test_batch_order_does_not_matter(engine, rollout):
    order = np.array([2, 0, 1])
    out = engine.generate(Prompts(*(x[order] for x in make_prompts())), 2, PLAIN, KEY)
    np.testing.assert_array_equal(
        np.asarray(out.tokens).reshape(3, 2, 8), np.asarray(rollout.tokens).reshape(3, 2, 8)[order]
    )


def test_samples_keys_and_ids_give_different_completions(engine, rollout):
    tokens = np.asarray(rollout.tokens)
    assert len(np.unique(tokens, axis=0)) == 6
    prompts = make_prompts()
    assert (engine.generate(prompts, 2, PLAIN, jax.random.key(1)).tokens != tokens).any()
    assert (
        engine.generate(prompts._replace(ids=prompts.ids + 100), 2, PLAIN, KEY).tokens != tokens
    ).any()
    np.testing.assert_array_equal(engine.generate(prompts, 2, PLAIN, KEY).tokens, tokens)


def test_neighbouring_problems_draw_apart(engine):
    """One prompt under neighbouring ids: what is drawn depends on problem and sample apart, and not
    on their sum."""
    prompts = Prompts(*(np.repeat(x[:1], 3, axis=0) for x in make_prompts()))._replace(
        ids=np.array([3, 4, 5], np.int32)
    )
    out = engine.generate(prompts, 2, PLAIN, KEY)
    assert len(np.unique(np.asarray(out.tokens), axis=0)) == 6
    keys = jax.random.key_data(row_keys(KEY, jnp.arange(40), 8))
    assert keys.shape[0] == 320 and len(np.unique(keys, axis=0)) == 320
    np.testing.assert_array_equal(
        jax.random.key_data(row_keys(KEY, jnp.array([7, 3]), 4)), keys[np.r_[56:60, 24:28]]
    )


def test_every_position_draws_anew(engine):
    """Where all tokens are equally likely, a row draws 8 tokens out of 131, and not one of them 8
    times."""
    flat = make_engine("bf16", policy=jax.tree.map(jnp.zeros_like, make_policy()))
    out = flat.generate(make_prompts(), 2, PLAIN, KEY)
    np.testing.assert_allclose(out.policy_logprobs, -np.log(VOCAB), rtol=1e-6)
    assert min(len(np.unique(row)) for row in np.asarray(out.tokens)) >= 6


@pytest.mark.parametrize("recipe", ["bf16", "fp8-rl"])
def test_scanned_layers_decode_like_unrolled_ones(recipe):
    outs = [
        make_engine(recipe, unroll).generate(make_prompts(), 2, PLAIN, KEY)
        for unroll in (True, False)
    ]
    same = (np.asarray(outs[0].tokens) == np.asarray(outs[1].tokens)).all(-1)
    # a flipped e4m3 rounding may change a draw
    assert same.all() if recipe == "bf16" else same.mean() >= 0.5
    first = np.abs(outs[0].policy_logprobs - outs[1].policy_logprobs)[same]
    assert np.median(first) < 1e-4 and first.max() < (1e-4 if recipe == "bf16" else 0.1)


def test_new_weights_scales_and_prompts_compile_nothing():
    engine = make_engine("fp8-rl")
    engine.generate(make_prompts(), 2, PLAIN, KEY)
    before = generate._cache_size()
    scales = jax.tree.map(lambda s: s * 1.5, engine.scales)
    engine.sync(make_policy(1), SyncContext(scales=scales))
    out = engine.generate(make_prompts((2, 8, 5), (1, 2, 3), seed=9), 2, PLAIN, jax.random.key(7))
    assert generate._cache_size() == before and out.weight_version == 2


def sizes(jaxpr):
    """Elements of every array in a jaxpr and in those inside it."""
    for equation in jaxpr.eqns:
        for value in (*equation.invars, *equation.outvars):
            yield getattr(value.aval, "size", 0), str(value.aval)
        for inner in jaxprs_in_params(equation.params):
            yield from sizes(inner)


@pytest.mark.parametrize("unroll", [True, False])
def test_no_array_of_all_logits_in_generate(unroll):
    """4 x 6 rows, 90 tokens: their logits would be larger than any weight or cache."""
    engine = make_engine("fp8-rl", unroll)
    rows, width = 24, 90
    prompts = make_prompts((9, 4, 1, 3), (1, 2, 3, 4))

    def run(policy):
        sampling = Sampling(width, 0.8, top_p=0.9)
        return generate(policy, *prompts, KEY, samples=6, sampling=sampling)

    found = list(sizes(jax.make_jaxpr(run)(engine.policy).jaxpr))
    assert max(size for size, _ in found) < rows * width * VOCAB
    assert any(size == rows * VOCAB for size, _ in found)  # the walk did reach the decode loop


def test_no_array_of_all_logits_in_token_logprobs():
    hidden = jnp.zeros((24, 90, 192))
    policy = jax.eval_shape(lambda: init_policy(replace(CONFIG, vocab_size=1000), KEY))

    def loss(hidden, policy):
        return token_logprobs(hidden, policy, jnp.zeros((24, 90), jnp.int32), chunk=256)[0].sum()

    found = list(sizes(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(hidden, policy).jaxpr))
    assert max(size for size, _ in found) < 24 * 90 * 1000 / 2
    assert any(aval.endswith(",1000]") for _, aval in found)
