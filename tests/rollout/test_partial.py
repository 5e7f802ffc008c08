"""Partial rollouts: what one step begins and another ends."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout.test_paged import KEY, SAMPLING, SMALL, prompts_of, synced
from rollout.tiny import VOCAB, full_logits, log_softmax, make_policy, take

from fp8rl_jax.rollout.constraints import compile_phrases
from fp8rl_jax.rollout.engine import PagedEngine
from fp8rl_jax.rollout.paged.state import DONE, NEW
from fp8rl_jax.rollout.partial import advance, as_rollout, begin, divide, join
from fp8rl_jax.rollout.sampling import Sampling


def sampled(engine, progress, enough, sampling=SAMPLING):
    """Sample until enough prompts are complete; the same on the host."""
    rows, metrics = jax.device_get(engine.go_on(progress, sampling, enough))
    return advance(progress, rows, engine.version), metrics


@pytest.mark.parametrize("phrases", [False, True], ids=["stop-tokens", "stop-strings"])
def test_interrupted_completions_are_those_of_a_rollout_in_one_piece(phrases):
    """Under the same weights; slots and pages change, tokens and log-probabilities do not."""
    sampling = replace(SAMPLING, top_p=0.95, support_size=60)
    if phrases:
        letters = [bytes([i]) for i in range(VOCAB)]
        stops = compile_phrases(["ab", "x", "yz"], letters, VOCAB)
        bias = jnp.zeros(VOCAB).at[jnp.array([97, 98, 121, 122])].set(4.0)
        sampling = Sampling(24, stop_strings=stops, logit_bias=bias)
    engine = synced(PagedEngine, paged=SMALL)
    wanted = jax.device_get(engine.generate(prompts_of(), 3, sampling, KEY))
    progress = begin(prompts_of(), KEY, 3, sampling, 0)
    rounds = 0
    for enough in (1, 3, 6):
        progress, metrics = sampled(engine, progress, enough, sampling)
        ended = (progress.rows.status == DONE).reshape(6, 3).all(1)
        assert ended.sum() >= enough
        rounds += not ended.all()
    assert rounds >= 1 and metrics["rollout/recomputed_tokens"] > 0
    found = as_rollout(progress, engine.version, metrics)
    for name in ("tokens", "mask", "stopped"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name), name)
    for name in ("behaviour_logprobs", "policy_logprobs"):
        np.testing.assert_allclose(getattr(found, name), getattr(wanted, name), atol=1e-4)
    assert found.metrics["rollout/stale_tokens"] == 0 and (found.support is None) == phrases
    for one, other in zip(found.support or (), wanted.support or (), strict=True):
        np.testing.assert_array_equal(one[found.mask], other[found.mask])


def test_each_token_has_the_log_probability_of_the_weights_that_sampled_it():
    """Against a full forward under the old weights, and under the new ones, which see the old
    tokens."""
    engines = [synced(PagedEngine, paged=SMALL) for _ in range(2)]
    for _ in range(2):
        engines[1].sync(make_policy(seed=1))
    progress = begin(prompts_of(), KEY, 3, SAMPLING, 0)
    for engine, enough in zip(engines, (2, 6), strict=True):
        progress, metrics = sampled(engine, progress, enough)
    found = as_rollout(progress, engines[1].version, metrics)
    mask, old = found.mask, found.token_versions == engines[0].version
    assert set(found.token_versions[mask]) == {1, 3}
    # some rows have tokens of both
    assert ((mask & old).any(1) & (mask & ~old).any(1)).any()
    assert found.metrics["rollout/stale_tokens"] == (old & mask).sum() / mask.sum()
    assert found.metrics["rollout/oldest_token"] == 2
    for engine, own in zip(engines, (old, ~old), strict=True):
        logprobs = take(log_softmax(full_logits(engine, found)), found.tokens)
        own = own & mask
        np.testing.assert_allclose(found.policy_logprobs[own], logprobs[own], atol=1e-4)


@pytest.mark.parametrize("parts", [1, 2])
def test_the_rest_is_carried_in_front_of_the_next_prompts(parts):
    prompts = prompts_of()
    first = begin(prompts, KEY, 2, SAMPLING, 0)
    status = np.full(12, NEW, np.int32)
    status[[2, 3, 8, 9]] = DONE  # prompts 1 and 4
    count = np.arange(12, dtype=np.int32)
    first = first._replace(rows=first.rows._replace(status=status, count=count))
    ended, rest = divide(first, 2, parts)
    np.testing.assert_array_equal(ended.prompts.ids, prompts.ids[[1, 4]])
    np.testing.assert_array_equal(ended.rows.count, [2, 3, 8, 9])
    np.testing.assert_array_equal(rest.prompts.ids, prompts.ids[[0, 2, 3, 5]])
    np.testing.assert_array_equal(rest.keys, first.keys[[0, 1, 4, 5, 6, 7, 10, 11]])
    new = begin(prompts_of(lengths=(1, 2), ids=(20, 21)), KEY, 2, SAMPLING, 0)
    joined = join(rest, new, parts)
    order = {1: [7, 11, 0, 2, 20, 21], 2: [7, 11, 20, 0, 2, 21]}[parts]
    np.testing.assert_array_equal(joined.prompts.ids, order)
    with pytest.raises(ValueError, match="fewer than"):
        divide(first, 4, parts)
    with pytest.raises(ValueError, match="samples of a prompt"):
        join(first, begin(prompts, KEY, 3, SAMPLING, 0), parts)
