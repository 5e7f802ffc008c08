"""A run with calibrated clipping: when its bounds move, that they are resumed, and which runs are
refused."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import EVEN_LETTERS, check_refused, measured, train, write_run

from fp8rl_jax import rl
from fp8rl_jax.config.recipe import COMPUTE, TrainerFormats, get_recipe
from fp8rl_jax.config.rl import ClipCalibrationConfig, RLConfig
from fp8rl_jax.training.learner import MiniBatch, due, recalibrate, unquantized
from fp8rl_jax.training.state import TrainState
from fp8rl_jax.training.step import Batch, StepConfig

RUN = {
    "recipe": "jet-rl",
    "rollout": {"prompts_per_step": 6},
    "rl": {"clip_low": 0.02, "clip_high": 0.03, "clip_calibration": {"enabled": True, "every": 2}},
    "optimizer": {"learning_rate": 1e-2},
    "trainer": {"updates_per_rollout": 3, "micro_batch_prompts": 1},
}
ON = RLConfig(clip_calibration=ClipCalibrationConfig(enabled=True, every=3, smoothing=0.25))


@pytest.fixture
def run_file(tmp_path):
    return write_run(tmp_path, EVEN_LETTERS, RUN)


@pytest.mark.slow
def test_bounds_move_where_they_are_due_and_are_resumed(run_file, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for out in (whole, parts):
        assert train(run_file, out) == 0
    (parts / "checkpoints" / "4").rename(tmp_path / "gone")
    assert train(run_file, parts, "--resume") == 0
    found = measured(whole)[:4]
    assert found == measured(parts)[:4]
    assert [("clip_calibration/balance" in row) for row in found] == [True, False, True, False]
    bounds = [(row["clip_ratio/low_bound"], row["clip_ratio/high_bound"]) for row in found]
    # in force until the first calibration
    np.testing.assert_allclose(bounds[0], (0.98, 1.03), rtol=1e-6)
    assert bounds[1] == bounds[2] != bounds[0] and bounds[3] != bounds[2]
    assert (
        any(row["clip_ratio/low_mean"] > 0 for row in found)
        and found[0]["clip_calibration/low_frac"] > 0
    )


def test_when_a_calibration_is_due_and_what_is_not_quantized_in_it():
    steps = [due(TrainState(None, None, jnp.int32(2 * step)), ON, 2) for step in range(7)]
    assert steps == [True, False, False] * 2 + [True]
    assert not due(TrainState(None, None, jnp.int32(0)), RLConfig(), 2)
    config = StepConfig(get_recipe("fp8-e2e"), RLConfig(), "float32", 1.0, micro_batches=2)
    exact = unquantized(config).recipe
    assert (
        exact.trainer == TrainerFormats()
        and exact.output_gradient == exact.saved_activation == COMPUTE
    )
    assert (
        exact.rollout == config.recipe.rollout
        and replace(unquantized(config), recipe=config.recipe) == config
    )


def test_mini_batches_are_joined_and_weighted():
    """Two mini-batches, one with importance weights of 3 written out and one with advantages three
    times as large."""
    rng = np.random.default_rng(0)
    mask, advantages = (
        jnp.asarray(rng.random((2, 8, 20)) < 0.8),
        jnp.asarray(rng.normal(size=(2, 8)), jnp.float32),
    )
    logprobs, old, exact, exact_old = jnp.asarray(rng.normal(0, 0.3, (4, 2, 8, 20)), jnp.float32)
    ints = jnp.zeros((8, 20), jnp.int32)

    def seen(part: int, **changes) -> MiniBatch:
        batch = Batch(
            ints, ints[:, 0], ints, mask[part], old[part], advantages[part], old_logprobs=old[part]
        )
        return MiniBatch(replace(batch, **changes), logprobs[part], exact[part], exact_old[part])

    before = jnp.array([0.5, 2.0])
    weighted, metrics = recalibrate(before, [seen(0), seen(1, weights=jnp.full((8, 20), 3.0))], ON)
    scaled, _ = recalibrate(before, [seen(0), seen(1, advantages=3 * advantages[1])], ON)
    np.testing.assert_allclose(weighted, scaled, rtol=1e-6)
    both = mask.reshape(16, 20)
    ratios = (
        jnp.where(both, jnp.exp((x - y).reshape(16, 20)), 1.0)
        for x, y in ((logprobs, old), (exact, exact_old))
    )
    signed = jnp.broadcast_to((advantages * jnp.array([[1.0], [3.0]])).reshape(16, 1), (16, 20))
    expected, same = jax.jit(rl.calibrated_bounds, static_argnums=4)(*ratios, signed, both, ON)
    np.testing.assert_allclose(weighted, 0.25 * before + 0.75 * expected, rtol=1e-6)
    assert metrics.keys() == same.keys() and float(metrics["clip_calibration/low_frac"]) > 0
    broken, _ = recalibrate(
        before, [seen(0)._replace(logprobs=jnp.full((8, 20), jnp.nan)), seen(1)], ON
    )
    assert np.isfinite(broken).all()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--recipe", "fp8-rl"],
            "rl.clip_calibration.enabled: the trainer of recipe 'fp8-rl' is not in FP8",
        ),
        (
            ["--trainer.updates-per-rollout", "1"],
            "with trainer.updates_per_rollout = 1 the ratio is 1; set at least 2",
        ),
        (
            ["--rl.correction.method", "verl_bypass_ppo_clip"],
            'rl.correction.mode "bypass" has no ratio of pi_old',
        ),
        (
            ["--rl.ratio", "sequence"],
            'rl.clip_calibration: it calibrates rl.objective "clip" with rl.ratio "token"',
        ),
        (
            ["--rl.clip-calibration.smoothing", "1"],
            "rl.clip_calibration.smoothing: 1.0 must be below 1",
        ),
    ],
)
def test_runs_in_which_nothing_could_be_calibrated_are_refused(
    run_file, tmp_path, capsys, flags, message
):
    check_refused(run_file, tmp_path / "out", capsys, flags, message)
