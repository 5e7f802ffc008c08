from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax import rl
from fp8rl_jax.config.correction import CRITERIA
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
    np.testing.assert_allclose(
        values["correction/clip_frac"], (ratio[mask] > cap).mean(), rtol=1e-6
    )


def test_tis_has_a_cap_and_no_floor():
    weights, _, _ = correction(jnp.array([[-30.0, -5.0, 5.0, 300.0]]), jnp.ones((1, 4), bool), TIS)
    np.testing.assert_allclose(weights[0], [np.exp(-20), np.exp(-5), 2.0, 2.0], rtol=1e-5)


@pytest.mark.parametrize(
    "config",
    [rl.CorrectionConfig(method="none"), rl.CorrectionConfig(method="token_tis", mode="bypass")],
)
def test_without_a_correction_the_weights_are_one(make_batch, config):
    batch = make_batch(spread=2.0)
    weights, _, metrics = correction(
        jnp.asarray(log_ratio_of(batch)), jnp.asarray(batch["mask"]), config
    )
    np.testing.assert_array_equal(weights, batch["mask"].astype(np.float32))
    assert rl.metric_values(metrics)["correction/clip_frac"] == 0


def test_weights_are_constants():
    grads = jax.grad(lambda x: correction(x, jnp.ones((1, 3), bool), TIS)[0].sum())(
        jnp.zeros((1, 3))
    )
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
    weights, _, metrics = correction(
        jnp.array([[jnp.nan, jnp.inf, -jnp.inf]]), jnp.ones((1, 3), bool), TIS
    )
    assert np.isnan(weights[0, 0]) and weights[0, 1] == 2.0 and 0 < weights[0, 2] < 1e-8
    assert np.isnan(rl.metric_values(metrics)["correction/weight_mean"])


def ratios(*rows):
    """log rho of a batch in which every row is full, and its mask."""
    log_ratio = jnp.log(jnp.array(rows, jnp.float32))
    return log_ratio, jnp.ones(log_ratio.shape, bool)


def test_sequence_weights_are_the_product_of_the_ratios(make_batch, spoil_padding):
    batch = make_batch(spread=0.4)
    mask = batch["mask"]
    weights, _, _ = correction(
        jnp.asarray(spoil_padding(log_ratio_of(batch), mask)),
        jnp.asarray(mask),
        rl.CorrectionConfig(method="sequence_tis"),
    )
    product = np.exp(
        np.where(mask, log_ratio_of(batch).astype(np.float64), 0).sum(1, keepdims=True)
    )
    np.testing.assert_allclose(weights, np.where(mask, np.minimum(product, 2), 0), rtol=1e-5)


def test_icepop_zeroes_weights_and_keeps_the_tokens():
    log_ratio, mask = ratios([0.4, 0.6, 1.0, 4.9, 5.1])
    weights, kept, metrics = correction(log_ratio, mask, rl.CorrectionConfig(method="icepop"))
    np.testing.assert_allclose(weights[0], [0, 0.6, 1.0, 4.9, 0], rtol=1e-6)
    assert kept.all()
    np.testing.assert_allclose(rl.metric_values(metrics)["correction/clip_frac"], 0.4)


def test_token_mis_takes_tokens_outside_of_the_bounds_out_of_the_loss(make_batch, spoil_padding):
    """min(rho, 2) where 0.5 <= rho <= 2, and no token elsewhere: neither in the sum nor in what it
    is divided by."""
    batch = make_batch(spread=0.8)
    mask = batch["mask"]
    ratio = np.exp(log_ratio_of(batch).astype(np.float64))
    inside = mask & (ratio >= 0.5) & (ratio <= 2.0)
    assert 0.1 < inside.sum() / mask.sum() < 0.9
    log_ratio = jnp.asarray(spoil_padding(log_ratio_of(batch), mask))
    weights, kept, metrics = correction(
        log_ratio, jnp.asarray(mask), rl.CorrectionConfig(method="token_mis")
    )
    np.testing.assert_allclose(weights, np.where(inside, ratio, 0), rtol=1e-6)
    np.testing.assert_array_equal(kept, inside)
    np.testing.assert_allclose(
        rl.metric_values(metrics)["correction/reject_frac"],
        1 - inside.sum() / mask.sum(),
        rtol=1e-6,
    )
    # IcePop of the same bounds has the same weights and counts every token
    icepop = rl.CorrectionConfig(method="icepop", min_weight=0.5, max_weight=2.0)
    masked, counted, _ = correction(log_ratio, jnp.asarray(mask), icepop)
    np.testing.assert_allclose(masked, weights, rtol=1e-6)
    np.testing.assert_array_equal(counted, mask)


def test_overflow_clamps_log_ratios_at_20_or_gives_zero():
    log_ratio, mask = jnp.array([[100.0, 30.0, -200.0, jnp.nan]]), jnp.ones((1, 4), bool)
    clamped, _, _ = correction(
        log_ratio, mask, rl.CorrectionConfig(method="none", weights="token", bounds="keep")
    )
    np.testing.assert_allclose(clamped[0, :3], np.exp([20.0, 20.0, -20.0]), rtol=1e-5)
    assert np.isnan(clamped[0, 3])
    zeroed, _, _ = correction(log_ratio, mask, rl.CorrectionConfig(method="nemo_is"))
    np.testing.assert_allclose(zeroed[0], [0, np.exp(30.0), 0, 0], rtol=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_normalized_weights_average_to_one(make_batch, level):
    batch = make_batch(spread=0.5)
    mask = batch["mask"]
    config = rl.CorrectionConfig(method="none", weights=level, batch_normalize=True)
    weights, _, metrics = correction(jnp.asarray(log_ratio_of(batch)), jnp.asarray(mask), config)
    weights = np.asarray(weights)
    mean = weights[mask].mean() if level == "token" else weights[mask.any(1), 0].mean()
    np.testing.assert_allclose(mean, 1.0, rtol=1e-5)
    plain = dataclasses.replace(config, batch_normalize=False)
    raw, _, _ = correction(jnp.asarray(log_ratio_of(batch)), jnp.asarray(mask), plain)
    np.testing.assert_allclose(
        weights * rl.metric_values(metrics)["correction/normalizer"], raw, rtol=1e-5
    )


def binary_kl(p, q):
    """KL(Bernoulli(p) || Bernoulli(q)): compute_binary_kl_divergence of areal-project/AReaL (commit
    cbff54d6, areal/utils/functional/functional.py), in float64."""
    return p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))


def reference_statistic(x, logprobs, name):
    """Of one completion's log-ratios and log-probabilities, in float64."""
    level = "token" if name == "token_binary_kl" else name.rpartition("_")[0]
    p, q = np.exp(logprobs), np.exp(logprobs - x)
    values = {
        "k1": x,
        "k2": x**2 / 2,
        "k3": np.exp(x) - 1 - x,
        "error": np.exp(np.abs(x)),
        "binary_kl": np.maximum(binary_kl(p, q), binary_kl(q, p)),
    }[name.removeprefix(f"{level}_")]
    return (
        values
        if level == "token"
        else {"seq_sum": np.sum, "seq_mean": np.mean, "seq_max": np.max}[level](values)
    )


@pytest.mark.parametrize("name", CRITERIA)
def test_every_criterion_matches_float64(make_batch, spoil_padding, name):
    batch = make_batch(3, spread=0.3)
    mask, log_ratio = batch["mask"], log_ratio_of(batch)
    # both are probabilities
    batch["old"] = np.minimum(batch["old"], -0.01 + np.minimum(log_ratio, 0))
    logprobs = batch["old"].astype(np.float64)
    statistics = {
        b: reference_statistic(log_ratio[b][mask[b]].astype(np.float64), logprobs[b][mask[b]], name)
        for b in np.flatnonzero(mask.any(1))
    }
    flat = np.concatenate([np.atleast_1d(value) for value in statistics.values()])
    low, high = np.quantile(flat, [0.2, 0.8])
    text = f"{name}:{np.exp(low)}:{np.exp(high)}" if name.endswith("k1") else f"{name}:{high}"
    floor = low if name.endswith("k1") else -np.inf
    config = rl.CorrectionConfig(method="none", reject=(text,))
    weights, kept, metrics = correction(
        jnp.asarray(spoil_padding(log_ratio, mask)),
        jnp.asarray(mask),
        config,
        jnp.asarray(spoil_padding(batch["old"], mask)),
    )
    expected = np.zeros_like(mask)
    for b, value in statistics.items():
        expected[b][mask[b]] = (value >= floor) & (value <= high)
    np.testing.assert_array_equal(kept, expected)
    np.testing.assert_array_equal(weights, expected)
    values = rl.metric_values(metrics)
    np.testing.assert_allclose(
        values["correction/reject_frac"], 1 - expected.sum() / mask.sum(), rtol=1e-5
    )
    whole = (expected == mask).all(1)[mask.any(1)]
    np.testing.assert_allclose(values["correction/reject_seq_frac"], 1 - whole.mean(), rtol=1e-5)


def test_kpop_has_whole_weights_and_zeroes_tokens_by_the_probabilities_themselves():
    """As AReaL's apply_rejection_sampling with metric "binary_kl", of bound 0.1: the same ratio
    passes where the token is rare and not where it is likely; what is rejected still counts."""
    p, q = np.array([[0.001, 0.6, 0.2, 1.0, 0.5]]), np.array([[0.004, 0.15, 0.8, 1.0, 1.0]])
    mask = np.ones(p.shape, bool)
    weights, kept, metrics = correction(
        jnp.log(p / q), jnp.asarray(mask), rl.CorrectionConfig(method="kpop"), jnp.log(p)
    )
    held = np.clip([p, q], 1e-6, 1 - 1e-6)
    passes = np.maximum(binary_kl(*held), binary_kl(*held[::-1])) <= 0.1
    np.testing.assert_array_equal(passes, [[True, False, False, True, False]])
    np.testing.assert_allclose(weights, np.where(passes, p / q, 0), rtol=1e-5)
    assert kept.all()
    np.testing.assert_allclose(rl.metric_values(metrics)["correction/reject_frac"], 0.6)
    with pytest.raises(ValueError, match="binary_kl needs logprobs"):
        correction(jnp.log(p / q), jnp.asarray(mask), rl.CorrectionConfig(method="kpop"))


def test_bounds_of_k1_are_on_the_ratio_and_in_verls_on_its_inverse():
    log_ratio, mask = ratios([1.5, 1.0, 0.65])
    reject = ("token_k1:0.6:1.4",)
    _, kept, _ = correction(log_ratio, mask, rl.CorrectionConfig(method="none", reject=reject))
    np.testing.assert_array_equal(kept[0], [False, True, True])
    _, kept, _ = correction(
        log_ratio, mask, rl.CorrectionConfig(method="verl_decoupled_geo_rs", reject=reject)
    )
    np.testing.assert_array_equal(kept[0], [True, True, False])


def test_criteria_are_joined_by_and():
    log_ratio, mask = ratios([1.0, 1.9], [1.0, 1.0], [1.0, 0.55])
    config = rl.CorrectionConfig(method="none", reject=("token_k1:0.6:2", "seq_max_k3:0.2"))
    _, kept, _ = correction(log_ratio, mask, config)
    np.testing.assert_array_equal(kept, [[False, False], [True, True], [True, False]])


def test_seq_max_rejects_what_seq_mean_keeps():
    log_ratio, mask = ratios([1.0] * 63 + [4.0])
    assert correction(
        log_ratio, mask, rl.CorrectionConfig(method="none", reject=("seq_mean_k3:0.1",))
    )[1].all()
    assert not correction(
        log_ratio, mask, rl.CorrectionConfig(method="none", reject=("seq_max_k3:0.5",))
    )[1].any()


def test_rejected_tokens_stay_in_the_denominator_where_it_is_all():
    log_ratio, mask = ratios([1.0, 1.0], [1.2, 1.2])
    weights, kept, metrics = correction(
        log_ratio, mask, rl.CorrectionConfig(method="nemo_seq_mask_tis")
    )
    assert kept.all()
    np.testing.assert_allclose(weights, [[1, 1], [0, 0]], rtol=1e-6)
    assert rl.metric_values(metrics)["correction/reject_seq_frac"] == 0.5


def test_a_nan_is_not_rejected_in_silence():
    log_ratio, mask = jnp.array([[0.0, jnp.nan], [0.0, 0.0]]), jnp.ones((2, 2), bool)
    for method in ("k3", "geometric", "mis"):
        weights, kept, _ = correction(
            log_ratio, mask, rl.CorrectionConfig(method=method, weights="token")
        )
        assert kept[0].all() and np.isnan(weights[0, 1])


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
    assert choose("replay", True) is behaviour and choose("policy", True) is policy
    choices = ("refuse", "replay", "behaviour", "policy")
    assert all(choose(choice, False) is policy for choice in choices)
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
        np.testing.assert_allclose(
            rl.metric_values(metrics)["correction/weight_mean"], mean, rtol=1e-5
        )
