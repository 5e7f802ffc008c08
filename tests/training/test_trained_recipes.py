"""Recipes whose trainer is in FP8: the rollout serves the trainer's own operands, and the update follows the unquantized one."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout.tiny import CONFIG, make_engine, make_policy, make_prompts

from fp8rl_jax.config.recipe import RECIPES, PrecisionConfig, get_recipe
from fp8rl_jax.config.rl import CorrectionConfig, RLConfig
from fp8rl_jax.config.training import OptimizerConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.trained import trainer_policy
from fp8rl_jax.precision import TrainedWeight
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.training.state import init_state, make_optimizer
from fp8rl_jax.training.step import Batch, StepConfig, score, update

TRAINED = [name for name, recipe in RECIPES.items() if recipe.trainer.weight.quantized]


@cache
def rollout_of(name: str):
    return make_engine(name).generate(make_prompts(), 4, Sampling(max_new_tokens=8), jax.random.key(1))


def batch_of(rollout) -> Batch:
    advantages = np.random.default_rng(0).normal(size=len(rollout.tokens)).astype(np.float32)
    prompts = rollout.prompts
    return Batch(prompts.tokens, prompts.lengths, rollout.tokens, rollout.mask, rollout.policy_logprobs, advantages)


def step_config(name: str) -> StepConfig:
    rl = RLConfig(correction=CorrectionConfig(method="none"))
    return StepConfig(get_recipe(name), rl, "float32", temperature=1.0, logprob_chunk=32)


def mismatch(name: str) -> np.ndarray:
    """|log p_trainer - log p_rollout| of every sampled token."""
    rollout = rollout_of(name)
    trained = score(make_policy(), batch_of(rollout), step_config(name))
    return np.abs(np.asarray(trained) - np.asarray(rollout.policy_logprobs))[np.asarray(rollout.mask)]


@pytest.mark.parametrize("name", TRAINED)
def test_the_rollout_serves_the_trainers_operands_bit_for_bit(name):
    policy, recipe = make_policy(), RECIPES[name]
    served = make_engine(name, unroll=False, policy=policy).policy.layers.tensors()
    trained = jax.jit(trainer_policy, static_argnums=(1, 2))(policy, recipe, jnp.dtype("float32")).layers.tensors()
    assert [n for n, w in trained.items() if isinstance(w.value, TrainedWeight)] == list(trained)[:7]
    for linear in list(trained)[:7]:
        for ours, theirs in zip(jax.tree.leaves(trained[linear].value.quantized), jax.tree.leaves(served[linear]), strict=True):
            np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))


def test_one_precision_flow_has_a_tenth_of_the_mismatch():
    """Where rollout and trainer quantize alike, only the order of float32 sums differs, and an e4m3 rounding that it flips."""
    mixed = mismatch("fp8-rollout").mean()
    for name in ("fp8-e2e", "jet-rl", "infir2"):
        unified = mismatch(name)
        assert unified.mean() < mixed / 10 and np.median(unified) < 1e-4, name


def gradients(name: str) -> np.ndarray:
    """What one plain gradient step takes from the weights of the linears."""
    policy, optimizer = make_policy(), make_optimizer(OptimizerConfig(learning_rate=1e-3, max_grad_norm=0.0), 1)
    batch = batch_of(rollout_of("bf16"))
    state, _, metrics = update(init_state(policy, optimizer), batch, step_config(name), optimizer)
    assert metrics["optim/skipped"] == 0 and np.isfinite(metrics["optim/grad_norm"])
    # Adam's first moment after one update is the gradient, up to a factor
    moments = state.optimizer[0].mu.layers.tensors()
    return np.concatenate([np.asarray(moments[linear].value, np.float64).ravel() for linear in list(moments)[:7]])


@pytest.mark.parametrize("name", ["jet-rl", "infir2"])
def test_the_update_points_where_the_unquantized_one_does(name):
    exact, quantized = gradients("bf16"), gradients(name)
    cosine = exact @ quantized / np.linalg.norm(exact) / np.linalg.norm(quantized)
    assert cosine > 0.9 and 0.8 < np.linalg.norm(quantized) / np.linalg.norm(exact) < 1.25


def test_layers_that_are_scanned_are_quantized_alike():
    recipe = get_recipe("jet-rl", PrecisionConfig(excluded=("layers.1.up_proj",)))
    with pytest.raises(UserError, match=r"up_proj is quantized in some layers and not in layer 1; .*precision\.excluded"):
        trainer_policy(make_policy(), recipe, jnp.dtype("float32"))
    whole = get_recipe("jet-rl", PrecisionConfig(excluded=("*.up_proj",)))
    kept = trainer_policy(make_policy(), whole, jnp.dtype("float32")).layers.up_proj.value
    assert kept.shape == (CONFIG.num_layers, CONFIG.intermediate_size, CONFIG.hidden_size) and kept.dtype == jnp.float32
