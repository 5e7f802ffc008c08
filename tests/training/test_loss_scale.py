"""Loss scaling: PyTorch's rule, gradients that float16 would lose, and what an overflow does to an
update and to a run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax.config.recipe import get_recipe
from fp8rl_jax.config.rl import CorrectionConfig, RLConfig
from fp8rl_jax.config.training import LossScaleConfig, OptimizerConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.policy import init_policy
from fp8rl_jax.training.checkpoint import _by_name
from fp8rl_jax.training.loss_scale import factor, init_scale, next_scale
from fp8rl_jax.training.state import (
    TrainState,
    apply_gradients,
    init_state,
    make_optimizer,
    scaled_loss,
)
from fp8rl_jax.training.step import Batch, StepConfig, update

DYNAMIC = LossScaleConfig(mode="dynamic")
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
OPTIMIZER = make_optimizer(OptimizerConfig(learning_rate=1e-2, max_grad_norm=0.0), 4)
PLAIN = make_optimizer(OptimizerConfig(learning_rate=0.0), 1)


def grad_scaler(finite: list[bool], config: LossScaleConfig) -> list[tuple[np.float32, int]]:
    """torch.amp.GradScaler.update, after its documentation: (scale, growth tracker) after each
    step, float32."""
    scale, tracker, seen = np.float32(config.initial), 0, []
    for ok in finite:
        if not ok:
            scale, tracker = np.float32(scale * np.float32(config.backoff_factor)), 0
        else:
            tracker += 1
            if tracker == config.growth_interval:
                with np.errstate(over="ignore"):
                    grown = np.float32(scale * np.float32(config.growth_factor))
                scale, tracker = grown if np.isfinite(grown) else scale, 0
        seen.append((scale, tracker))
    return seen


def state_of(weights: dict, optimizer, scaling: LossScaleConfig | None) -> TrainState:
    return TrainState(weights, optimizer.init(weights), jnp.int32(0), init_scale(scaling))


@pytest.mark.parametrize(
    "config",
    [
        replace(DYNAMIC, growth_interval=3),
        replace(DYNAMIC, growth_interval=1, initial=2.0**126),
        replace(DYNAMIC, growth_interval=4, growth_factor=3.0, backoff_factor=0.3, initial=1000.0),
    ],
)
def test_the_scale_follows_the_rule_of_grad_scaler(config):
    finite = list(np.random.default_rng(0).random(200) > 0.15)
    step, state, seen = jax.jit(partial(next_scale, config=config)), init_scale(config), []
    for ok in finite:
        state = step(state, jnp.bool_(ok))
        seen.append((np.float32(state.scale), int(state.count)))
    assert seen == grad_scaler(finite, config)
    assert len({scale for scale, _ in seen}) > 2


def test_which_runs_have_a_scale():
    auto = LossScaleConfig()
    assert (
        auto.resolve("bfloat16")
        is auto.resolve("float32")
        is replace(auto, mode="none").resolve("float16")
        is None
    )
    assert auto.resolve("float16") == DYNAMIC and DYNAMIC.resolve("float32") == DYNAMIC
    static = LossScaleConfig("static", initial=8.0)
    assert init_scale(static) is None and factor(None, static) == 8.0 and factor(None, None) is None
    assert factor(init_scale(DYNAMIC), DYNAMIC) == 65536


def test_a_checkpoint_holds_a_scale_where_there_is_one_and_is_otherwise_as_it_was(policy):
    def names(scaling):
        return [
            name[5:]
            for name in _by_name(init_state(policy, PLAIN, scaling))
            if "policy" not in name and "mu" not in name
        ]

    plain, dynamic = names(None), names(DYNAMIC)
    assert plain == names(replace(DYNAMIC, mode="static")) and plain[-1] == ".updates"
    assert dynamic[: len(plain)] == plain and dynamic[len(plain) :] == [
        ".loss_scale.scale",
        ".loss_scale.count",
    ]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("initial", 0.0),
        ("growth_factor", 1.0),
        ("backoff_factor", 1.5),
        ("growth_interval", 0),
        ("mode", "on"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_key(key, value):
    with pytest.raises(UserError, match=rf"trainer\.loss_scale\.{key}: "):
        LossScaleConfig(**{key: value})


def test_gradients_below_the_range_of_float16_survive():
    """A float16 product whose output gradient is 1e-9, 60 times below what float16 holds; exact
    powers are exact again."""
    w, x, tiny = jnp.full((4, 8), 0.5), jnp.full((2, 8), 2.0, jnp.float16), 2.0**-30

    def gradient(scaling):
        state = state_of({"w": w}, PLAIN, scaling)

        def loss(weights):
            out = jnp.dot(x, weights["w"].astype(jnp.float16).T)
            return scaled_loss(tiny * jnp.sum(out.astype(jnp.float32)), state, scaling)

        raw = jax.grad(loss)(state.policy)
        return apply_gradients(state, raw, jnp.float32(1.0), PLAIN, scaling)[1]["optim/grad_norm"]

    # two rows of x, each 2, in each of 32 weights
    expected = np.float64(tiny) * 2 * 2.0 * np.sqrt(32)
    assert gradient(None) == 0
    np.testing.assert_allclose(gradient(DYNAMIC), expected, rtol=1e-6)
    np.testing.assert_allclose(
        gradient(LossScaleConfig("static", initial=2.0**20)), expected, rtol=1e-6
    )


@pytest.fixture
def policy():
    return init_policy(SHAPE, jax.random.key(0))


@pytest.fixture
def batch():
    rng = np.random.default_rng(0)
    mask = np.arange(6) < rng.integers(2, 7, (8, 1))
    tokens = rng.integers(1, 61, (8, 6)).astype(np.int32)
    logprobs, advantages = (
        rng.normal(-4, 0.3, (8, 6)).astype(np.float32),
        rng.normal(size=8).astype(np.float32),
    )
    prompts = rng.integers(1, 61, (4, 5)).astype(np.int32)
    return Batch(prompts, np.array([3, 5, 2, 4], np.int32), tokens, mask, logprobs, advantages)


def step_config(dtype: str, scaling: LossScaleConfig | None, **changes) -> StepConfig:
    return StepConfig(
        get_recipe("bf16"),
        RL,
        dtype,
        temperature=0.8,
        logprob_chunk=8,
        loss_scale=scaling,
        **changes,
    )


def first_moments(policy, batch, config) -> tuple[list[np.ndarray], dict]:
    state = init_state(jax.tree.map(jnp.copy, policy), OPTIMIZER, config.loss_scale)
    state, _, metrics = update(state, batch, config, OPTIMIZER)
    return [np.asarray(x) / 0.1 for x in jax.tree.leaves(state.optimizer[0].mu)], metrics


@pytest.mark.slow
def test_float16_gradients_are_those_of_float32_to_its_rounding(policy, batch):
    """Rounding errors of 2^-11 in some ten operations one after the other; accumulation and a scale
    in float32 add none."""
    exact, plain = first_moments(policy, batch, step_config("float32", None))
    same, scaled = first_moments(policy, batch, step_config("float32", DYNAMIC))
    # a power of two changes no bit, but may change how XLA fuses
    for one, other in zip(exact, same, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-9)
    assert (
        scaled["loss"] == plain["loss"]
        and scaled["optim/loss_scale"] == 65536
        and "optim/loss_scale" not in plain
    )
    half, metrics = first_moments(policy, batch, step_config("float16", DYNAMIC, micro_batches=2))
    for one, other in zip(exact, half, strict=True):
        assert np.linalg.norm(other - one) < 0.01 * np.linalg.norm(one)
    assert metrics["optim/skipped"] == metrics["optim/overflow"] == 0


def test_an_overflow_is_skipped_and_lowers_the_scale_until_none_is_left(policy, batch):
    config = step_config("float16", replace(DYNAMIC, initial=2.0**40, backoff_factor=2.0**-6))
    state, seen = init_state(policy, OPTIMIZER, config.loss_scale), []
    before = jax.tree.map(np.asarray, state.policy)
    for _ in range(8):
        state, _, metrics = update(state, batch, config, OPTIMIZER)
        seen.append(
            {
                name.split("/")[1]: float(metrics[name])
                for name in metrics
                if name.startswith(("optim/", "nonfinite/"))
            }
        )
        if seen[-1]["skipped"]:
            jax.tree.map(np.testing.assert_array_equal, state.policy, before)
    skipped = [row["skipped"] for row in seen]
    assert skipped == sorted(skipped, reverse=True) and 1 < sum(skipped) < 8
    assert [row["overflow"] for row in seen] == skipped and not any(
        row["gradient"] or row["loss"] for row in seen
    )
    assert [row["loss_scale"] for row in seen] == [
        2.0 ** (40 - 6 * min(i, int(sum(skipped)))) for i in range(8)
    ]
    assert int(state.optimizer[0].count) == 8 - sum(skipped) and int(state.updates) == 8


def test_a_fault_that_scaling_cannot_cause_is_no_overflow(policy, batch):
    advantages = np.array(batch.advantages)
    advantages[0] = np.nan
    config = step_config("float16", DYNAMIC)
    _, _, metrics = update(
        init_state(policy, OPTIMIZER, DYNAMIC),
        replace(batch, advantages=advantages),
        config,
        OPTIMIZER,
    )
    assert (
        metrics["optim/skipped"] == metrics["nonfinite/loss"] == 1
        and metrics["optim/overflow"] == 0
    )
    state = state_of({"w": jnp.ones(3)}, PLAIN, replace(DYNAMIC, initial=1.0))
    inf = {"w": jnp.full(3, jnp.inf)}
    after, metrics = apply_gradients(state, inf, jnp.float32(1.0), PLAIN, DYNAMIC)
    assert (
        metrics["nonfinite/gradient"] == 1
        and metrics["optim/overflow"] == 0
        and after.loss_scale.scale == 0.5
    )


def test_activations_beyond_float16_are_a_fault_of_the_loss(policy, batch):
    """Weights that float16 holds, and products of two of them that it does not: no scale can help,
    and none is blamed."""
    for name in ("up_proj", "gate_proj"):
        weight = getattr(policy.layers, name)
        weight.weight.set_value(weight.value * 1e5)
    before = jax.tree.map(np.asarray, policy)
    state, _, metrics = update(
        init_state(policy, OPTIMIZER, DYNAMIC), batch, step_config("float16", DYNAMIC), OPTIMIZER
    )
    assert (
        metrics["optim/skipped"] == metrics["nonfinite/loss"] == 1
        and metrics["optim/overflow"] == 0
    )
    jax.tree.map(np.testing.assert_array_equal, state.policy, before)
