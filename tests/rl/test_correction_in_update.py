"""The compiled update with corrections that need the whole batch, and with a loss mask narrower
than the completion."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax import rl
from fp8rl_jax.config.recipe import get_recipe
from fp8rl_jax.config.training import OptimizerConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.policy import init_policy
from fp8rl_jax.training.state import init_state, make_optimizer
from fp8rl_jax.training.step import Batch, StepConfig, batch_logprobs, correct, update

SHAPE = PolicyConfig(
    "qwen3",
    vocab_size=31,
    hidden_size=32,
    intermediate_size=48,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
)
WHOLE = rl.CorrectionConfig(
    method="token_tis", batch_normalize=True, reject=("seq_mean_k1:0.95:1.03",)
)
CONFIG = StepConfig(
    get_recipe("bf16"), rl.RLConfig(correction=WHOLE), "float32", temperature=1.0, logprob_chunk=8
)
OPTIMIZER = make_optimizer(OptimizerConfig(learning_rate=1e-2), 4)


def fresh():
    return init_state(init_policy(SHAPE, jax.random.key(0)), OPTIMIZER)


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    mask = np.arange(6) < rng.integers(2, 7, (8, 1))
    arrays = {
        "prompts": rng.integers(1, 31, (4, 4)).astype(np.int32),
        "lengths": np.array([3, 4, 2, 4], np.int32),
        "tokens": rng.integers(1, 31, (8, 6)).astype(np.int32),
        "mask": mask,
        "rollout_logprobs": np.zeros((8, 6), np.float32),
        "advantages": rng.normal(size=8).astype(np.float32),
    }
    batch = Batch(**{name: jnp.asarray(array) for name, array in arrays.items()})
    old = batch_logprobs(fresh().policy, batch, CONFIG)
    rollout = np.asarray(old) + rng.normal(0, 0.1, (8, 6)).astype(np.float32)
    return replace(batch, old_logprobs=old, rollout_logprobs=jnp.asarray(rollout))


def test_functions_named_as_a_users_are_compiled_into_the_same_update(batch):
    settings = rl.RLConfig(
        objective="fp8rl_jax.rl.objectives:clip",
        correction=replace(WHOLE, weights="fp8rl_jax.rl.correction:token"),
    )
    parts = replace(CONFIG, micro_batches=4)
    own = update(fresh(), batch, parts, OPTIMIZER)
    users = update(fresh(), batch, replace(parts, rl=settings), OPTIMIZER)
    jax.tree.map(np.testing.assert_array_equal, own, users)


def test_whole_batch_statistics_survive_micro_batches(batch):
    state, _, metrics = update(fresh(), batch, CONFIG, OPTIMIZER)
    parts, _, part_metrics = update(fresh(), batch, replace(CONFIG, micro_batches=4), OPTIMIZER)
    assert 0 < metrics["correction/reject_frac"] < 1 and metrics["correction/normalizer"] != 1
    assert metrics.keys() == part_metrics.keys()
    for name, value in metrics.items():
        np.testing.assert_allclose(part_metrics[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    for a, b in zip(
        jax.tree.leaves(state.optimizer), jax.tree.leaves(parts.optimizer), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)


def test_a_correction_made_before_is_used_as_it_is(batch):
    made, metrics = correct(batch, CONFIG.rl)
    assert made.loss_mask.sum() < batch.mask.sum() and "correction/normalizer" in metrics
    kpop = rl.CorrectionConfig("kpop", reject=("token_binary_kl:1e-4",), denominator="kept")
    log_ratio = batch.old_logprobs - batch.rollout_logprobs
    weights, kept, _ = rl.correction(log_ratio, batch.mask, kpop, batch.old_logprobs)
    assert 0.1 < kept.sum() / batch.mask.sum() < 0.9
    found, _ = correct(batch, rl.RLConfig(correction=kpop))
    np.testing.assert_allclose(found.weights, weights, rtol=1e-6)
    np.testing.assert_array_equal(found.loss_mask, kept)
    again, nothing = correct(made, CONFIG.rl)
    assert nothing == {}
    np.testing.assert_array_equal(again.weights, made.weights)


def test_a_narrower_loss_mask_is_corrected_and_not_undone(batch):
    stopped = jnp.arange(8) % 2 == 0
    made, _ = correct(replace(batch, loss_mask=rl.drop_truncated(batch.mask, stopped)), CONFIG.rl)
    assert not made.loss_mask[1::2].any() and made.loss_mask.any()


def test_without_old_logprobs_the_update_is_refused(batch):
    with pytest.raises(
        UserError, match="rl.correction.batch_normalize .*rl.correction.reject .*was skipped"
    ):
        update(fresh(), replace(batch, old_logprobs=None), CONFIG, OPTIMIZER)


def test_an_entropy_bonus_raises_the_entropy(batch):
    def entropy_after(coefficient: float) -> float:
        config = replace(
            CONFIG,
            rl=rl.RLConfig(correction=rl.CorrectionConfig("none"), entropy_coefficient=coefficient),
        )
        still = replace(batch, advantages=jnp.zeros(8))
        state, _, _ = update(fresh(), still, config, OPTIMIZER)
        return float(update(state, still, config, OPTIMIZER)[2]["entropy"])

    assert entropy_after(1.0) > entropy_after(0.0) + 1e-4
