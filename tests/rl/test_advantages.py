from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax import rl
from fp8rl_jax.errors import UserError

group_advantages = jax.jit(rl.group_advantages, static_argnums=(1, 2))
reward_metrics = jax.jit(rl.reward_metrics, static_argnums=1)


def reference_advantages(rewards, n, ddof=1, epsilon=1e-6, divide=True):
    result = []
    for group in np.asarray(rewards, np.float64).reshape(-1, n):
        deviation = group - group.mean()
        result += list(deviation / (group.std(ddof=ddof) + epsilon) if divide else deviation)
    return np.array(result)


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("n", [2, 4, 8])
def test_grpo_matches_float64(n, ddof):
    rewards = np.random.default_rng(n).normal(0.4, 1.0, 5 * n)
    found = group_advantages(jnp.asarray(rewards), n, rl.AdvantageConfig(ddof=ddof, epsilon=1e-4))
    np.testing.assert_allclose(
        found, reference_advantages(rewards, n, ddof, 1e-4), rtol=1e-5, atol=1e-6
    )


def test_dr_grpo_only_subtracts_the_mean():
    rewards = np.array([1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0])
    found = group_advantages(jnp.asarray(rewards), 4, rl.AdvantageConfig(estimator="dr_grpo"))
    np.testing.assert_allclose(found, [0.5, -0.5, -0.5, 0.5, -0.25, -0.25, -0.25, 0.75])


@pytest.mark.parametrize("n", [2, 5])
def test_rloo_compares_with_the_mean_of_the_others(n):
    rewards = np.random.default_rng(n).normal(size=4 * n)
    valid = np.arange(4 * n) % 7 != 3
    found = group_advantages(
        jnp.asarray(rewards), n, rl.AdvantageConfig(estimator="rloo"), jnp.asarray(valid)
    )
    for b, reward in enumerate(rewards):
        others = [rewards[i] for i in range(b // n * n, b // n * n + n) if i != b and valid[i]]
        expected = reward - np.mean(others) if valid[b] and others else 0.0
        np.testing.assert_allclose(found[b], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("estimator", ["reinforce_pp", "reinforce_pp_baseline"])
def test_reinforce_pp_whitens_the_batch(estimator, weighted):
    rng = np.random.default_rng(1)
    rewards, valid, lengths = rng.normal(size=12), np.arange(12) != 5, rng.integers(1, 9, 12)
    base = rewards.copy()
    if estimator == "reinforce_pp_baseline":
        for rows in np.split(np.arange(12), 4):
            base[rows] -= rewards[rows][valid[rows]].mean()
    tokens = np.repeat(base[valid], lengths[valid] if weighted else 1)
    expected = np.where(valid, (base - tokens.mean()) / (tokens.std(ddof=1) + 1e-6), 0)
    found = group_advantages(
        jnp.asarray(np.where(valid, rewards, np.nan)),
        3,
        rl.AdvantageConfig(estimator=estimator),
        jnp.asarray(valid),
        lengths=jnp.asarray(lengths) if weighted else None,
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_reinforce_pp_needs_one_sample_a_prompt():
    found = group_advantages(
        jnp.array([1.0, 0.0, 0.0, 1.0]), 1, rl.AdvantageConfig(estimator="reinforce_pp", ddof=0)
    )
    np.testing.assert_allclose(found, [1, -1, -1, 1], rtol=1e-5)


@pytest.mark.parametrize("estimator", ["rloo", "reinforce_pp", "reinforce_pp_baseline"])
def test_equal_rewards_everywhere_are_exact_zeros(estimator):
    lengths = jnp.array([3, 1, 4, 1, 5, 9])
    found = group_advantages(
        jnp.full(6, 0.1), 3, rl.AdvantageConfig(estimator=estimator), lengths=lengths
    )
    np.testing.assert_array_equal(found, np.zeros(6))


def test_rows_of_a_prompt_are_adjacent():
    found = group_advantages(
        jnp.array([1.0, 0.0, 5.0, 5.0]), 2, rl.AdvantageConfig(estimator="dr_grpo")
    )
    np.testing.assert_array_equal(found, [0.5, -0.5, 0.0, 0.0])


@pytest.mark.parametrize("constant", [0.0, 0.1, 1 / 3, -1e4])
@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo"])
def test_equal_rewards_give_exact_zeros(constant, estimator):
    found = group_advantages(jnp.full(7 * 3, constant), 7, rl.AdvantageConfig(estimator=estimator))
    np.testing.assert_array_equal(found, np.zeros(21))


def test_nearly_equal_rewards_keep_their_advantages():
    found = group_advantages(jnp.array([0.5, 0.5, 0.5, 0.501]), 4, rl.AdvantageConfig())
    assert found[3] > 1.4


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo"])
def test_invalid_completions_are_left_out(estimator):
    config = rl.AdvantageConfig(estimator=estimator)
    rewards = jnp.array([1.0, 0.0, np.nan, 1.0, np.nan, np.nan, 1.0, np.nan, np.nan])
    valid = jnp.array([1, 1, 0, 1, 0, 0, 1, 0, 0], bool)
    found = group_advantages(rewards, 3, config, valid)
    expected = reference_advantages([1.0, 0.0], 2, divide=estimator == "grpo")
    np.testing.assert_allclose(found, [*expected, 0, 0, 0, 0, 0, 0, 0], rtol=1e-6)


def test_a_group_without_any_valid_reward_gives_zeros():
    found = group_advantages(jnp.full(4, jnp.nan), 2, rl.AdvantageConfig(), jnp.zeros(4, bool))
    np.testing.assert_array_equal(found, np.zeros(4))


def test_nan_reaches_its_own_group_only():
    found = group_advantages(jnp.array([jnp.nan, 1.0, 0.0, 1.0]), 2, rl.AdvantageConfig())
    assert np.isnan(found[:2]).all() and np.isfinite(found[2:]).all()


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([1.0, np.nan, 0.0, 1.0], "sample 1 is nan; give a finite number"),
        ([1.0, 0.0, -np.inf, 1.0], "sample 2 is -inf"),
        ([1.0, 0.0, 0.0, 1e30], "sample 3 is 1e\\+30, and the squares of 4 .* above 9e\\+18"),
    ],
)
@pytest.mark.parametrize("made", [rl.reward_metrics, rl.informative_groups, rl.group_advantages])
def test_rewards_of_which_float32_makes_no_advantage_are_refused(made, rewards, message):
    more = (rl.AdvantageConfig(),) if made is rl.group_advantages else ()
    with pytest.raises(UserError, match=f"rewards: that of {message}"):
        made(jnp.asarray(rewards), 2, *more)
    made(jnp.asarray([1e18, -1e18, 0.0, 1.0]), 2, *more)


def test_advantages_are_constants_and_jit_changes_nothing():
    def total(rewards):
        return jnp.sum(rl.group_advantages(rewards, 2, rl.AdvantageConfig()) ** 2)

    rewards = jnp.array([1.0, 0.0, 1.0, 1.0])
    np.testing.assert_allclose(jax.jit(total)(rewards), total(rewards), rtol=1e-6)
    np.testing.assert_array_equal(jax.jit(jax.grad(total))(rewards), np.zeros(4))


@pytest.mark.parametrize(
    ("count", "n", "text"), [(6, 1, "2 or more"), (7, 3, "does not divide the 7")]
)
def test_groups_that_do_not_divide_the_rewards_are_refused(count, n, text):
    with pytest.raises(UserError, match=f"rollout.samples_per_prompt: {n} .*{text}"):
        group_advantages(jnp.zeros(count), n, rl.AdvantageConfig())


def test_reward_metrics_of_one_sample_a_prompt():
    found = reward_metrics(jnp.asarray([1.0, 0.0, 0.0, 1.0]), 1)
    assert found == {"reward/mean": 0.5, "reward/std": 0, "reward/frac_zero_std": 1}


def test_reward_metrics():
    rewards = np.array([1.0, 0.0, 1.0, 1.0, 0.25, 0.75, np.nan, np.nan])
    found = reward_metrics(jnp.asarray(rewards), 2, jnp.asarray(~np.isnan(rewards)))
    assert float(found["reward/mean"]) == pytest.approx(4 / 6)
    assert float(found["reward/std"]) == pytest.approx((0.5 + 0.0 + 0.25) / 3)
    assert float(found["reward/frac_zero_std"]) == pytest.approx(1 / 3)
