"""KL to the reference in the reward: float64, the padding, and what it does to advantages."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax import rl
from fp8rl_jax.errors import UserError

# x = log pi_ref - log pi_old, in float64
FORMULAS = {"k1": lambda x: -x, "k2": lambda x: x**2 / 2, "k3": lambda x: np.exp(x) - 1 - x}


@pytest.mark.parametrize("estimator", FORMULAS)
def test_the_sum_over_tokens_matches_float64(make_batch, spoil_padding, estimator):
    batch = make_batch(spread=0.5)
    mask, (old, reference) = (
        batch["mask"],
        (np.float64(batch[name]) for name in ("old", "reference")),
    )
    expected = np.where(mask, FORMULAS[estimator](reference - old), 0.0).sum(1)
    spoiled = (jnp.asarray(spoil_padding(batch[name], mask)) for name in ("old", "reference"))
    found = rl.reward_kl(*spoiled, jnp.asarray(mask), rl.RewardKLConfig(0.1, estimator))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert found[2] == 0 and not mask[2].any()


def test_k1_is_an_unbiased_estimate_of_the_divergence_of_sequences():
    """Two tokens a completion, every completion weighed by its probability."""
    rng = np.random.default_rng(0)
    first, second = (rng.dirichlet(np.ones(5), (2, 1)), rng.dirichlet(np.ones(5), (2, 5)))
    joint = first[:, 0, :, None] * second
    tokens = [
        np.stack([np.repeat(first[side, 0], 5), second[side].reshape(-1)], axis=1)
        for side in range(2)
    ]
    kl = rl.reward_kl(
        *(jnp.log(jnp.asarray(t, jnp.float32)) for t in tokens),
        jnp.ones((25, 2), bool),
        rl.RewardKLConfig(0.1),
    )
    expected = (joint[0] * np.log(joint[0] / joint[1])).sum()
    np.testing.assert_allclose((joint[0].reshape(-1) * np.asarray(kl)).sum(), expected, rtol=1e-5)


def test_a_log_ratio_that_overflows_costs_no_more_than_the_clamp():
    old, reference = jnp.zeros((1, 2)), jnp.array([[-100.0, -1.0]])
    assert rl.reward_kl(old, reference, jnp.ones((1, 2), bool), rl.RewardKLConfig(1.0))[0] == 21


@pytest.mark.parametrize(
    "values", [{"coefficient": -0.1}, {"coefficient": float("nan")}, {"estimator": "k4"}]
)
def test_values_that_cannot_work_are_refused(values):
    with pytest.raises(UserError, match="rl.reward_kl"):
        rl.RewardKLConfig(**values)
