"""Calibrated clip bounds against a float64 search over all of them, and what the loss makes of
bounds."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax import rl
from fp8rl_jax.config.rl import ClipCalibrationConfig, LossConfig, RLConfig
from fp8rl_jax.errors import UserError

CONFIG = RLConfig(clip_low=0.2, clip_high=0.28)


def batch(noise: float, spread: float = 0.25, seed: int = 0):
    """Ratios that drift by `spread`, and the same ones as two noisy forwards would compute them;
    all float32."""
    rng = np.random.default_rng(seed)
    mask, advantages = rng.random((32, 120)) < 0.8, rng.normal(size=(32, 120))
    exact = rng.normal(0, spread, (32, 120))
    noisy = exact + noise * (rng.normal(size=exact.shape) - rng.normal(size=exact.shape))
    return (
        *(np.exp(x).astype(np.float32) for x in (noisy, exact)),
        advantages.astype(np.float32),
        mask,
    )


def searched(ratio, exact, advantages, mask, config=CONFIG) -> tuple[float, float]:
    """The definition in float64: every ratio tried as the lower bound, then every ratio as the
    upper one."""
    r, e, a = (x[mask].astype(np.float64) for x in (ratio, exact, advantages))
    low, high = np.float32(1 - config.clip_low), np.float32(1 + config.clip_high)
    clipped = np.sum(e[a < 0] < low)
    lower = next(x for x in np.sort(r[a < 0]) if np.sum(r[a < 0] < x) == clipped)
    if clipped == 0:
        lower = min(lower, low)

    def balance(r, low, high):
        up, down = (a > 0) & (r <= high), (a < 0) & (r >= low)
        return np.sum(a[up] * r[up]) / np.sum(-a[down] * r[down])

    target, candidates = balance(e, low, high), np.sort(r[a > 0])
    upper = next((x for x in candidates if balance(r, lower, x) >= target), candidates[-1])
    return lower, upper if np.any(e[a > 0] > high) else max(upper, high)


def found(*arrays, config=CONFIG) -> tuple[tuple[float, float], dict[str, float]]:
    bounds, metrics = jax.jit(rl.calibrated_bounds, static_argnums=4)(*arrays, config)
    return tuple(float(x) for x in bounds), {
        name.split("/")[1]: float(x) for name, x in metrics.items()
    }


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("seed", [0, 1])
def test_calibrated_bounds_match_a_brute_force_search(noise, seed):
    ratio, exact, advantages, mask = batch(noise, seed=seed)
    ratio[~mask], exact[~mask] = np.nan, np.inf  # padding may hold anything
    (low, high), metrics = found(ratio, exact, advantages, mask)
    expected = searched(ratio, exact, advantages, mask)
    np.testing.assert_allclose((low, high), expected, rtol=1e-6)
    negative = mask & (advantages < 0)
    assert (
        metrics["low_frac"]
        == pytest.approx(np.mean(exact[negative] < 0.8))
        == pytest.approx(np.mean(ratio[negative] < low))
    )
    assert (
        metrics["false_low_frac"]
        == pytest.approx(np.mean((ratio < 0.8)[negative] & (exact >= 0.8)[negative]))
        and noise
    )
    # noise widens the ratios, so the bounds have to be wider for as much to be clipped
    if noise > 0.05:
        assert low < 0.8 and high > 1.28


def test_calibrated_bounds_of_unquantized_ratios_are_those_of_the_config():
    _, exact, advantages, mask = batch(0.0)
    (low, high), metrics = found(exact, exact, advantages, mask)
    negative, positive = (exact[mask & (sign * advantages > 0)] for sign in (-1, 1))
    assert negative[negative < 0.8].max() < low <= negative[negative >= 0.8].min()
    around = np.sort(positive)[
        np.searchsorted(np.sort(positive), 1.28) + np.array([-2, 0])
    ]  # float32 sums: one token more or less
    assert around[0] <= high <= around[1] and metrics["false_low_frac"] == 0


@pytest.mark.parametrize(
    "case", ["nothing clipped", "no token", "no negative", "no positive", "all clipped"]
)
def test_calibrated_bounds_are_not_tightened_without_evidence(case):
    ratio, exact, advantages, mask = batch(0.001, spread=0.01)
    match case:
        case "no token":
            mask = np.zeros_like(mask)
        case "no negative":
            advantages = np.abs(advantages)
        case "no positive":
            advantages = -np.abs(advantages)
        case "all clipped":
            ratio, exact, advantages = 0.01 * ratio, 0.01 * exact, -np.abs(advantages)
    (low, high), metrics = found(ratio, exact, advantages, mask)
    assert (low, high) == (np.float32(0.8), np.float32(1.28)) and all(
        np.isfinite(x) for x in metrics.values()
    )


def test_calibrated_bounds_stay_within_lowest_and_highest():
    ratio, exact, advantages, mask = batch(2.0)
    limits = replace(CONFIG, clip_calibration=ClipCalibrationConfig(lowest=0.5, highest=1.5))
    assert found(ratio, exact, advantages, mask, config=limits)[0] == (0.5, 1.5)
    (low, high), _ = found(ratio, exact, advantages, mask)
    assert 0.1 <= low < 0.5 and 1.5 < high <= 10


def test_the_loss_clips_at_given_bounds_and_at_those_of_the_config_alike():
    ratio, _, advantages, mask = batch(0.3)
    old = jnp.full(ratio.shape, -3.0)
    inputs = rl.LossInputs(
        jnp.asarray(old + np.log(ratio)),
        jnp.asarray(advantages),
        jnp.asarray(mask),
        jnp.float32(100),
        old,
    )
    wide = LossConfig(clip_low=0.5, clip_high=0.75)

    def loss(logprobs, bounds, config):
        return rl.policy_loss(replace(inputs, logprobs=logprobs, clip_bounds=bounds), config)

    bounds = jnp.array([0.5, 1.75])
    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(
        inputs.logprobs, bounds, CONFIG
    )
    (same, expected), same_gradient = jax.value_and_grad(loss, has_aux=True)(
        inputs.logprobs, None, wide
    )
    assert value == same and np.array_equal(gradient, same_gradient)
    assert rl.metric_values(metrics) == rl.metric_values(expected)
    r, a = np.exp(np.float64(inputs.logprobs) - old), np.float64(advantages)
    free = mask & ~((a < 0) & (r < 0.5)) & ~((a > 0) & (r > 1.75))
    np.testing.assert_allclose(gradient, np.where(free, -a * r / 100, 0.0), rtol=2e-5, atol=1e-9)
    reference = np.maximum(-a * r, -a * np.clip(r, 0.5, 1.75))[mask].sum() / 100
    np.testing.assert_allclose(value, reference, rtol=1e-5)
    assert float(loss(inputs.logprobs, None, CONFIG)[0]) != float(value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("every", 0),
        ("smoothing", 1.0),
        ("smoothing", -0.1),
        ("start_low", 1.2),
        ("start_high", 0.9),
        ("lowest", 0),
        ("highest", 0.5),
    ],
)
def test_settings_that_cannot_work_are_refused_by_key(key, value):
    with pytest.raises(UserError, match=rf"rl\.clip_calibration\.{key}: "):
        ClipCalibrationConfig(**{key: value})


def test_other_objectives_are_refused():
    on = ClipCalibrationConfig(enabled=True)
    assert RLConfig(clip_calibration=on).clip_calibration.start(0.2, 0.28) == (0.8, 1.28)
    assert replace(on, start_low=0.6, start_high=1.8).start(0.2, 0.28) == (0.6, 1.8)
    for other in (
        {"objective": "cispo"},
        {"ratio": "sequence", "aggregation": "sequence_mean"},
        {"objective": "reinforce"},
    ):
        with pytest.raises(UserError, match=r"rl\.clip_calibration: it calibrates rl\.objective"):
            RLConfig(clip_calibration=on, **other)
