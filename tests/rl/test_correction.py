from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax import rl
from fp8rl_jax.errors import UserError

correction = jax.jit(rl.correction, static_argnums=2)
TIS = rl.CorrectionConfig(method="token_tis")


def log_ratio_of(batch):
    return batch["old"] - batch["rollout"]


@pytest.mark.parametrize("cap", [1.0, 1.5, 2.0, 5.0])
def test_token_tis_matches_float64(make_batch, spoil_padding, cap):
    batch = make_batch(spread=0.8)
    mask = batch["mask"]
    config = rl.CorrectionConfig(method="token_tis", max_weight=cap)
    weights, kept, metrics = correction(
        jnp.asarray(spoil_padding(log_ratio_of(batch), mask)), jnp.asarray(mask), config
    )
    ratio = np.exp(log_ratio_of(batch).astype(np.float64))
    expected = np.where(mask, np.minimum(ratio, cap), 0)
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    np.testing.assert_array_equal(kept, mask)
    values = rl.metric_values(metrics)
    np.testing.assert_allclose(values["correction/weight_mean"], expected[mask].mean(), rtol=1e-6)
    np.testing.assert_allclose(values["correction/weight_max"], expected[mask].max(), rtol=1e-6)
    np.testing.assert_allclose(values["correction/clip_frac"], (ratio[mask] > cap).mean(), rtol=1e-6)


def test_tis_has_a_cap_and_no_floor():
    weights, _, _ = correction(jnp.array([[-30.0, -5.0, 5.0, 300.0]]), jnp.ones((1, 4), bool), TIS)
    np.testing.assert_allclose(weights[0], [np.exp(-20), np.exp(-5), 2.0, 2.0], rtol=1e-5)


@pytest.mark.parametrize(
    "config", [rl.CorrectionConfig(method="none"), rl.CorrectionConfig(method="token_tis", mode="bypass")]
)
def test_without_a_correction_the_weights_are_one(make_batch, config):
    batch = make_batch(spread=2.0)
    weights, _, metrics = correction(jnp.asarray(log_ratio_of(batch)), jnp.asarray(batch["mask"]), config)
    np.testing.assert_array_equal(weights, batch["mask"].astype(np.float32))
    assert rl.metric_values(metrics)["correction/clip_frac"] == 0


def test_weights_are_constants():
    grads = jax.grad(lambda x: correction(x, jnp.ones((1, 3), bool), TIS)[0].sum())(jnp.zeros((1, 3)))
    np.testing.assert_array_equal(grads, np.zeros((1, 3)))


def test_weights_correct_an_expectation():
    counts = np.array([10, 20, 30, 15, 5, 20])
    rollout, train = counts / 100, np.array([0.15, 0.15, 0.25, 0.2, 0.15, 0.1])
    payoff = np.array([3.0, 1.0, 0.0, -1.0, 7.0, 2.0])
    tokens = np.repeat(np.arange(6), counts)[None]
    log_ratio = jnp.asarray(np.log(train / rollout)[tokens], jnp.float32)
    config = rl.CorrectionConfig(method="token_tis", max_weight=100.0)
    weights, _, _ = correction(log_ratio, jnp.ones(tokens.shape, bool), config)
    np.testing.assert_allclose((weights * payoff[tokens]).mean(), train @ payoff, rtol=1e-5)
    assert abs(payoff[tokens].mean() - train @ payoff) > 0.3


def test_nan_reaches_its_own_weight_and_infinity_is_bounded():
    weights, _, metrics = correction(jnp.array([[jnp.nan, jnp.inf, -jnp.inf]]), jnp.ones((1, 3), bool), TIS)
    assert np.isnan(weights[0, 0]) and weights[0, 1] == 2.0 and 0 < weights[0, 2] < 1e-8
    assert np.isnan(rl.metric_values(metrics)["correction/weight_mean"])


def test_an_unresolved_recipe_is_refused():
    with pytest.raises(UserError, match="rl.correction.method"):
        correction(jnp.zeros((1, 1)), jnp.ones((1, 1), bool), rl.CorrectionConfig())


@pytest.mark.usefixtures("unchecked_shapes")
def test_misshapen_ratio_is_refused():
    with pytest.raises(ValueError, match="log_ratio has shape"):
        correction(jnp.zeros((1, 3)), jnp.ones((2, 3), bool), TIS)


def test_rollout_logprobs_are_chosen_by_the_switch():
    behaviour, policy = jnp.zeros((2, 3)), jnp.ones((2, 3))

    def choose(choice, truncated):
        return rl.rollout_logprobs(
            behaviour, policy, rl.CorrectionConfig(truncated_sampling=choice), truncated=truncated
        )

    assert choose("behaviour", True) is behaviour
    assert choose("policy", True) is policy
    assert all(choose(choice, False) is policy for choice in ("refuse", "behaviour", "policy"))
    with pytest.raises(UserError, match="rl.correction.truncated_sampling"):
        choose("refuse", True)


def test_behaviour_ratios_average_to_the_kept_mass():
    probabilities = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625])
    kept = probabilities[:3] / probabilities[:3].sum()
    tokens = np.random.default_rng(0).choice(3, (100, 100), p=kept)
    policy = jnp.asarray(np.log(probabilities)[tokens], jnp.float32)
    behaviour = jnp.asarray(np.log(kept)[tokens], jnp.float32)
    for choice, mean in (("behaviour", 0.875), ("policy", 1.0)):
        config = rl.CorrectionConfig(method="token_tis", truncated_sampling=choice)
        log_ratio = policy - rl.rollout_logprobs(behaviour, policy, config, truncated=True)
        _, _, metrics = correction(log_ratio, jnp.ones(tokens.shape, bool), config)
        np.testing.assert_allclose(rl.metric_values(metrics)["correction/weight_mean"], mean, rtol=1e-5)
