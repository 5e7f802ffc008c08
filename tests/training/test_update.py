"""The compiled update: accumulation, the skipped old-logprob pass, shared prompts, and non-finite
values."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax.config.recipe import get_recipe, recipe
from fp8rl_jax.config.rl import CorrectionConfig, RLConfig
from fp8rl_jax.config.training import OptimizerConfig
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.forward import forward
from fp8rl_jax.models.policy import init_policy
from fp8rl_jax.training import step
from fp8rl_jax.training.state import (
    apply_gradients,
    decay_mask,
    init_state,
    learning_rate,
    make_optimizer,
)
from fp8rl_jax.training.step import Batch, StepConfig, batch_logprobs, completion_logprobs, update

SHAPE = PolicyConfig(
    "qwen3",
    vocab_size=61,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
)
RL = RLConfig(correction=CorrectionConfig(method="token_tis"))
CONFIG = StepConfig(get_recipe("bf16"), RL, "float32", temperature=0.8, logprob_chunk=8)
OPTIMIZER = make_optimizer(OptimizerConfig(learning_rate=1e-2, weight_decay=0.1), 4)


@pytest.fixture
def policy():
    return init_policy(SHAPE, jax.random.key(0))


@pytest.fixture
def batch():
    rng = np.random.default_rng(0)
    lengths = np.array([3, 5, 2, 4], np.int32)
    mask = np.arange(6) < rng.integers(1, 7, (8, 1))
    return Batch(
        rng.integers(1, 61, (4, 5)).astype(np.int32),
        lengths,
        rng.integers(1, 61, (8, 6)).astype(np.int32),
        mask,
        rng.normal(-4, 0.3, (8, 6)).astype(np.float32),
        rng.normal(size=8).astype(np.float32),
    )


def test_shared_prompt_equals_each_row_alone(policy, batch):
    logprobs, entropy, *_ = jax.jit(completion_logprobs, static_argnums=2)(policy, batch, CONFIG)
    for row in range(8):
        prompt = batch.prompts[row // 2][: batch.lengths[row // 2]]
        tokens = np.concatenate([prompt, batch.tokens[row][batch.mask[row]]])
        hidden = forward(policy, jnp.asarray(tokens[None])).hidden[0]
        table = np.asarray(jax.nn.log_softmax(np.float64(hidden @ policy.head.T) / 0.8))
        expected = table[np.arange(len(prompt) - 1, len(tokens) - 1)]
        kept = batch.mask[row]
        np.testing.assert_allclose(
            logprobs[row][kept], expected[np.arange(kept.sum()), tokens[len(prompt) :]], atol=1e-5
        )
        np.testing.assert_allclose(
            entropy[row][kept], -(np.exp(expected) * expected).sum(-1), atol=1e-5
        )


@pytest.mark.slow
def test_accumulation_equals_the_big_batch(policy, batch):
    whole, logprobs, metrics = update(init_state(policy, OPTIMIZER), batch, CONFIG, OPTIMIZER)
    policy = init_policy(SHAPE, jax.random.key(0))
    parts, part_logprobs, part_metrics = update(
        init_state(policy, OPTIMIZER), batch, replace(CONFIG, micro_batches=4), OPTIMIZER
    )
    np.testing.assert_allclose(part_logprobs, logprobs, atol=1e-5)
    for name, value in metrics.items():
        np.testing.assert_allclose(part_metrics[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    moments = jax.tree.leaves(whole.optimizer)
    for a, b in zip(moments, jax.tree.leaves(parts.optimizer), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)


def test_skipping_the_old_logprob_pass_changes_nothing(policy, batch):
    old = batch_logprobs(policy, batch, CONFIG)
    explicit, _, _ = update(
        init_state(policy, OPTIMIZER), replace(batch, old_logprobs=old), CONFIG, OPTIMIZER
    )
    policy = init_policy(SHAPE, jax.random.key(0))
    skipped, _, metrics = update(init_state(policy, OPTIMIZER), batch, CONFIG, OPTIMIZER)
    assert metrics["ratio_max"] == 1
    for a, b in zip(
        jax.tree.leaves(explicit.optimizer), jax.tree.leaves(skipped.optimizer), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)
    before = step.update_program._cache_size()
    numbers = {"weight_decay": 0.2, "beta1": 0.8, "beta2": 0.95, "eps": 1e-9}
    faster = make_optimizer(OptimizerConfig(learning_rate=2e-2, **numbers), 4)
    named = replace(CONFIG, recipe=recipe("bf16", "mine"))
    state = init_state(init_policy(SHAPE, jax.random.key(0)), faster)
    further, _, _ = update(state, batch, named, faster)
    assert (
        step.update_program._cache_size() == before
    )  # what is swept and a name are no part of the program
    start = init_policy(SHAPE, jax.random.key(0)).norm.value
    once, twice = (np.asarray(x.policy.norm.value - start) for x in (skipped, further))
    np.testing.assert_allclose(twice, 2 * once, rtol=1e-3)


@pytest.mark.slow
def test_the_update_takes_old_policy_reference_weights_and_loss_mask(policy, batch):
    """Ratios of exp(0.5), importance weights of 1.5 and a divergence of k3(-0.3) at every token
    that the loss counts."""
    now = np.asarray(batch_logprobs(policy, batch, CONFIG))
    old, kept = now - 0.5, batch.mask & (np.arange(8) % 3 > 0)[:, None]
    advantages = np.where(np.arange(8) % 3 > 0, batch.advantages, np.nan).astype(np.float32)
    given = replace(
        batch,
        advantages=advantages,
        old_logprobs=old,
        rollout_logprobs=old - np.float32(np.log(1.5)),
        reference_logprobs=now - np.float32(0.3),
        loss_mask=kept,
    )
    config = replace(CONFIG, rl=replace(RL, kl_coefficient=2.0))
    _, logprobs, metrics = update(init_state(policy, OPTIMIZER), given, config, OPTIMIZER)
    surrogate = np.maximum(-np.exp(0.5) * advantages, -1.2 * advantages)
    divergence = np.exp(-0.3) - 1 + 0.3
    loss = np.sum(np.where(kept, 1.5 * surrogate[:, None] + 2 * divergence, 0)) / kept.sum()
    expected = {
        "loss": loss,
        "kl": divergence,
        "ratio_max": np.exp(0.5),
        "correction/weight_mean": 1.5,
        "optim/skipped": 0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    np.testing.assert_allclose(logprobs, now, atol=1e-5)
    # the same tokens, had the policy sampled no others
    policy = init_policy(SHAPE, jax.random.key(0))
    others_read = replace(given, mask=kept, attended=batch.mask, loss_mask=None)
    _, _, same = update(init_state(policy, OPTIMIZER), others_read, config, OPTIMIZER)
    np.testing.assert_allclose(metrics["optim/grad_norm"], same["optim/grad_norm"], rtol=1e-5)


@pytest.mark.parametrize("role", ["advantages", "rollout_logprobs"])
def test_non_finite_update_is_skipped_and_flagged(policy, batch, role):
    broken = np.array(getattr(batch, role))
    broken[0] = np.nan
    before = jax.tree.map(np.asarray, policy)
    state, _, metrics = update(
        init_state(policy, OPTIMIZER), replace(batch, **{role: broken}), CONFIG, OPTIMIZER
    )
    assert metrics["optim/skipped"] == 1 and metrics["nonfinite/loss"] == 1
    jax.tree.map(np.testing.assert_array_equal, state.policy, before)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(state.optimizer))


def test_an_update_from_nothing_moves_nothing(policy, batch):
    """Momentum alone would; it is no fault, and schedules go on."""
    state, _, _ = update(init_state(policy, OPTIMIZER), batch, CONFIG, OPTIMIZER)
    kept = jax.tree.map(np.asarray, (state.policy, state.optimizer))
    empty = replace(batch, loss_mask=np.zeros_like(batch.mask))
    state, _, metrics = update(state, empty, CONFIG, OPTIMIZER)
    jax.tree.map(np.testing.assert_array_equal, (state.policy, state.optimizer), kept)
    assert metrics["optim/skipped"] == metrics["optim/grad_norm"] == 0 and state.updates == 2


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_schedule_follows_the_data_whatever_is_skipped(name):
    """Updates at a quarter, a half, three quarters and all of the peak, of which two are skipped."""
    config = OptimizerConfig(
        name, learning_rate=1.0, warmup_steps=4, weight_decay=0.0, max_grad_norm=0.0
    )
    optimizer, policy = make_optimizer(config, 8), init_policy(SHAPE, jax.random.key(0))
    state, moved = init_state(policy, optimizer), []
    step = jax.jit(partial(apply_gradients, loss=jnp.float32(0), optimizer=optimizer))
    for gradient in (np.nan, np.nan, 1.0, 1.0):
        before = state.policy.norm.value[0]
        gradients = jax.tree.map(partial(jnp.full_like, fill_value=gradient), policy)
        state, _ = step(state, gradients)
        moved.append(float(before - state.policy.norm.value[0]))
    np.testing.assert_allclose(moved, [0, 0, 0.75, 1], rtol=1e-5)


def test_remat_gives_the_same_update(policy, batch):
    plain, _, _ = update(init_state(policy, OPTIMIZER), batch, CONFIG, OPTIMIZER)
    policy = init_policy(SHAPE, jax.random.key(0))
    remat, _, _ = update(
        init_state(policy, OPTIMIZER), batch, replace(CONFIG, remat=True), OPTIMIZER
    )
    for a, b in zip(
        jax.tree.leaves(plain.optimizer), jax.tree.leaves(remat.optimizer), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)


def test_norms_and_embeddings_are_not_decayed(policy):
    mask = decay_mask(policy)
    assert not mask.embed_tokens.value and not mask.norm.value and not mask.layers.q_norm.value
    assert mask.layers.q_proj.value and mask.layers.down_proj.value


def test_learning_rate_warms_up_and_decays():
    schedule = learning_rate(
        OptimizerConfig(learning_rate=1.0, warmup_steps=4, schedule="linear", final_ratio=0.0), 8
    )
    np.testing.assert_allclose(
        [schedule(i) for i in range(9)], [0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25, 0], atol=1e-6
    )
    assert float(learning_rate(OptimizerConfig(learning_rate=0.5), 8)(jnp.int32(7))) == 0.5
