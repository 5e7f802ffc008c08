from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax import rl
from fp8rl_jax.errors import UserError


def test_only_groups_whose_rewards_differ_are_informative():
    rewards = jnp.array([1.0, 1, 1, 0, 0, 0, 1, 0, 1, 0.1, 0.1, 0.2])
    found = jax.jit(rl.informative_groups, static_argnums=1)(rewards, 3)
    np.testing.assert_array_equal(found, [False, False, True, True])


def test_failed_graders_do_not_make_a_group_informative():
    rewards, valid = (
        jnp.array([1.0, np.nan, 0.0, 1.0, np.nan, np.nan]),
        jnp.array([1, 0, 1, 1, 0, 0], bool),
    )
    np.testing.assert_array_equal(rl.informative_groups(rewards, 2, valid), [False, True, False])


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_uninformative_groups_have_no_advantage(estimator):
    rewards = jnp.asarray(np.random.default_rng(0).integers(0, 2, 60).astype(np.float32))
    advantages = rl.group_advantages(rewards, 3, rl.AdvantageConfig(estimator=estimator)).reshape(
        -1, 3
    )
    np.testing.assert_array_equal(
        rl.informative_groups(rewards, 3), (np.asarray(advantages) != 0).any(1)
    )


def test_overlong_penalty_grows_over_the_buffer():
    found = jax.jit(rl.overlong_penalty, static_argnums=(1, 2, 3))(
        jnp.array([0, 12, 13, 16, 20, 25]), 20, 8, 2.0
    )
    np.testing.assert_allclose(found, [0, 0, -0.25, -1, -2, -2])
    np.testing.assert_array_equal(rl.overlong_penalty(jnp.array([20]), 20, 0), [0.0])
    np.testing.assert_array_equal(rl.overlong_penalty(jnp.array([0, 20]), 20, 20), [0.0, -1.0])


def test_a_buffer_longer_than_the_completion_is_refused():
    with pytest.raises(UserError, match="rl.overlong.buffer: 21 .*rollout.max_new_tokens = 20"):
        rl.overlong_penalty(jnp.array([3]), 20, 21)


def test_truncated_completions_leave_the_loss():
    mask = jnp.array([[True, True], [True, False]])
    np.testing.assert_array_equal(
        rl.drop_truncated(mask, jnp.array([False, True])), [[False, False], [True, False]]
    )
