"""Exact mode: what the trainer computes has the bits that the rollout had, and training with it
changes nothing else."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout.tiny import CONFIG, make_policy, make_prompts

from fp8rl_jax import rl
from fp8rl_jax.config.files import dump_toml, read_recipes
from fp8rl_jax.config.recipe import RECIPES, PrecisionConfig, get_recipe
from fp8rl_jax.config.rl import CorrectionConfig, RLConfig
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.config.tasks import TaskConfig
from fp8rl_jax.config.training import OptimizerConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.config import ExpertsConfig
from fp8rl_jax.models.policy import init_policy
from fp8rl_jax.precision.exact import (
    HopperCompute,
    InvariantCompute,
    OrderFreeCompute,
    exact_compute,
)
from fp8rl_jax.rollout.engine import LocalEngine, Prompts
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.tokenizers.byte_tokenizer import ByteTokenizer
from fp8rl_jax.training.batch import pack
from fp8rl_jax.training.checks import with_exact_decided
from fp8rl_jax.training.session import Session
from fp8rl_jax.training.setup import _with_kept_exact
from fp8rl_jax.training.state import init_state, make_optimizer
from fp8rl_jax.training.step import Batch, StepConfig, batch_logprobs, update
from pallas_kernels.backend import Backend, tracing_for

RL = RLConfig(correction=CorrectionConfig(method="token_tis"))
MOE = replace(
    CONFIG, architecture="qwen3_moe", experts=ExpertsConfig(4, 2, 96, normalize=True), num_layers=1
)
SAMPLING = Sampling(max_new_tokens=7)
CAST = {"probability": "e4m3"}
RECIPES_OF_FILES = Path(__file__).parents[2] / "experiments" / "recipes"
ROWS = {"jet-rl-cast": {"base": "jet-rl", "rollout": CAST, "trainer": CAST}} | read_recipes(
    [str(RECIPES_OF_FILES / "nvfp4_experts.toml")]
)


@cache
def policy_of(kind: str):
    if kind == "dense":
        return make_policy()
    policy = init_policy(MOE, jax.random.key(0))
    return jax.tree.map(lambda x: x * 4.0 if x.ndim > 1 and x.shape[-1] > 32 else x, policy)


@cache
def sampled(kind: str, name: str, dtype: str, backend: Backend = "auto"):
    """The engine, its rollout and the trainer's configuration."""
    recipe = get_recipe(name, PrecisionConfig(exact=True), ROWS)
    engine = LocalEngine(recipe, jnp.dtype(dtype), unroll=kind == "dense", backend=backend)
    engine.sync(policy_of(kind))
    rollout = engine.generate(make_prompts(), 4, SAMPLING, jax.random.key(1))
    config = StepConfig(recipe, RL, dtype, temperature=1.0, logprob_chunk=32, backend=backend)
    return engine, rollout, config


def start(optimizer):
    """A state of its own: an update donates it."""
    return init_state(jax.tree.map(jnp.copy, policy_of("dense")), optimizer)


def batch_of(rollout) -> Batch:
    advantages = np.random.default_rng(0).normal(size=len(rollout.tokens)).astype(np.float32)
    prompts = rollout.prompts
    return Batch(
        prompts.tokens,
        prompts.lengths,
        rollout.tokens,
        rollout.mask,
        rollout.policy_logprobs,
        advantages,
    )


def in_parts(config: StepConfig) -> StepConfig:
    """Micro-batches, the layers run anew, attention a few queries at a time, logits of a few
    tokens."""
    return replace(config, micro_batches=3, remat=True, attention_chunk=2, logprob_chunk=5)


def bits(values, mask) -> bytes:
    return np.where(np.asarray(mask), np.asarray(values), np.float32(0)).tobytes()


def decided(recipe: str, exact="auto", ours: bool = True, **task: Any):
    config = RunConfig(
        recipe=recipe, precision=PrecisionConfig(exact=exact), task=TaskConfig(**task)
    )
    return with_exact_decided(config, ours).precision.exact


def test_recipes_with_one_precision_flow_are_exact_by_default(monkeypatch):
    one_flow = {"bf16", "jet-rl", "fp8-e2e", "infir2", "int4-qat", "mxfp8", "mxfp4", "nvfp4"}
    one_flow |= {"nvfp4-rl", "fp4", "fp8-lm-o1", "fp8-lm-o2", "fp8-lm-o3"}
    assert {name for name in RECIPES if decided(name)} == one_flow
    assert decided("jet-rl", False) is False and decided("jet-rl", True) is True
    assert decided("jet-rl", ours=False) is False
    assert decided("jet-rl", kind="text") is False  # nothing is sampled
    judged = RunConfig(recipe="jet-rl", rl=rl.RLConfig(acceptance=rl.AcceptanceConfig(True)))
    assert with_exact_decided(judged).precision.exact is False  # which would leave it nothing
    monkeypatch.setattr("pallas_kernels.invariant.is_available", lambda backend="auto": False)
    assert decided("jet-rl") is False and decided("jet-rl", True) is True


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"trainer.packing": True}, r"trainer\.packing: with precision\.exact"),
        ({"compute_dtype": "float32"}, r"precision\.exact: attention: .* of float32, float32"),
        ({"head_dim": 32}, r"precision\.exact: attention: .* head_dim 32, but with \(64, 96, 128"),
    ],
)
def test_what_hopper_does_not_serve_in_exact_mode_is_said_at_once(changes, said):
    config = replace(CONFIG, head_dim=changes.pop("head_dim", 64), vocab_size=259)
    settings = {"precision.exact": True, "precision.backend": "hopper", **changes}

    def make(**settings):
        return Session(init_policy(config, jax.random.key(0)), ByteTokenizer(), "bf16", **settings)

    with tracing_for(132):
        with pytest.raises(UserError, match=said):
            make(**settings)
        assert make(**settings | {"precision.exact": False}).recipe.exact is False


def test_a_session_with_hoppers_kernels_is_exact_on_request():
    config = replace(CONFIG, head_dim=64, vocab_size=259)
    policy, settings = init_policy(config, jax.random.key(0)), {"precision.backend": "hopper"}
    with tracing_for(132):
        assert decided("jet-rl") is False  # no GPU has confirmed it
        session = Session(
            policy, ByteTokenizer(), "jet-rl", **{"precision.exact": True}, **settings
        )
        assert session.recipe.exact and exact_compute("hopper") is HopperCompute
        assert exact_compute("reference") is OrderFreeCompute
    assert exact_compute("reference") is InvariantCompute  # on the CPU that is here


def test_a_resumed_run_keeps_what_was_decided(tmp_path):
    config = RunConfig(output=str(tmp_path), resume=True)
    assert _with_kept_exact(config) is config  # nothing is recorded
    for kept in (False, True):
        began = replace(config, precision=PrecisionConfig(exact=kept))
        (tmp_path / "config.toml").write_text(dump_toml(began))
        assert _with_kept_exact(config).precision.exact is kept
        assert _with_kept_exact(replace(config, resume=False)).precision.exact == "auto"
        asked = replace(config, precision=PrecisionConfig(exact=not kept))
        assert _with_kept_exact(asked) is asked
    (tmp_path / "config.toml").write_text("precision = {")
    with pytest.raises(UserError, match="config.toml: not TOML"):
        _with_kept_exact(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name", "dtype", "backend"),
    [
        ("dense", "jet-rl", "bfloat16", "auto"),
        ("moe", "jet-rl", "float16", "auto"),
        ("dense", "jet-rl", "bfloat16", "cpu"),
        ("moe", "bf16", "float32", "cpu"),
        ("moe", "mxfp8", "float32", "auto"),
        ("dense", "nvfp4", "bfloat16", "auto"),
        ("moe", "int4-qat", "bfloat16", "auto"),
        ("moe", "nvfp4-experts", "bfloat16", "auto"),
        ("dense", "jet-rl-cast", "float32", "auto"),
        ("dense", "fp4", "bfloat16", "auto"),
        ("moe", "nvfp4-rl", "float32", "auto"),
        ("dense", "mxfp4", "bfloat16", "auto"),
    ],
)
def test_the_trainer_has_the_bits_of_the_rollout(kind, name, dtype, backend):
    _, rollout, config = sampled(kind, name, dtype, backend)
    expected = bits(rollout.policy_logprobs, rollout.mask)
    assert bits(rollout.behaviour_logprobs, rollout.mask) == expected
    assert (
        bits(batch_logprobs(policy_of(kind), batch_of(rollout), in_parts(config)), rollout.mask)
        == expected
    )


@pytest.mark.slow
def test_the_trainer_has_them_in_the_order_free_arithmetic_too(monkeypatch):
    """As on a mesh, and on devices other than a CPU."""
    monkeypatch.setattr("pallas_kernels.invariant.is_available", lambda backend="auto": False)
    jax.clear_caches()
    try:
        _, rollout, config = sampled.__wrapped__("dense", "jet-rl", "bfloat16")
        trained = batch_logprobs(policy_of("dense"), batch_of(rollout), in_parts(config))
        assert bits(trained, rollout.mask) == bits(rollout.policy_logprobs, rollout.mask)
    finally:
        jax.clear_caches()


@pytest.mark.slow
def test_layers_in_the_compute_dtype_have_their_bits_too():
    recipe = get_recipe("fp8-e2e", PrecisionConfig(exact=True, first_layers_in_compute=1))
    engine = LocalEngine(recipe, jnp.dtype("bfloat16"), unroll=False)
    engine.sync(policy_of("dense"))
    rollout = engine.generate(make_prompts(), 4, SAMPLING, jax.random.key(1))
    config = in_parts(StepConfig(recipe, RL, "bfloat16", temperature=1.0))
    expected = bits(rollout.policy_logprobs, rollout.mask)
    assert (
        bits(batch_logprobs(policy_of("dense"), batch_of(rollout), config), rollout.mask)
        == expected
    )


@pytest.mark.slow
def test_a_token_has_its_bits_in_other_batches_and_behind_its_prompt_in_one_row():
    engine, rollout, config = sampled("dense", "jet-rl", "bfloat16")
    prompts, batch = make_prompts(), batch_of(rollout)
    wider = Prompts(
        np.pad(prompts.tokens[1:], ((0, 0), (0, 6))), prompts.lengths[1:], prompts.ids[1:]
    )
    again = engine.generate(wider, 4, SAMPLING, jax.random.key(1))
    assert bits(again.policy_logprobs, again.mask) == bits(
        rollout.policy_logprobs[4:], rollout.mask[4:]
    )
    lengths, sides = (
        np.asarray(rollout.mask).sum(1),
        (batch.prompts.shape[1], batch.tokens.shape[1]),
    )
    packing = pack(
        np.asarray(batch.lengths, np.int64),
        lengths,
        sides,
        2 * sum(sides),
        micro_batches=1,
        devices=1,
    )
    packed = batch_logprobs(policy_of("dense"), replace(batch, packing=packing), config)
    assert bits(packed, rollout.mask) == bits(rollout.policy_logprobs, rollout.mask)


@pytest.mark.slow
def test_an_update_sees_no_mismatch_and_its_correction_is_the_identity():
    _, rollout, config = sampled("dense", "jet-rl", "bfloat16")
    batch, optimizer = batch_of(rollout), make_optimizer(OptimizerConfig(learning_rate=1e-3), 1)
    _, logprobs, metrics = update(start(optimizer), batch, in_parts(config), optimizer)
    assert bits(logprobs, rollout.mask) == bits(rollout.policy_logprobs, rollout.mask)
    weights, mask, _ = rl.correction(logprobs - rollout.policy_logprobs, batch.mask, RL.correction)
    assert np.all(np.asarray(weights)[np.asarray(mask)] == 1.0) and np.array_equal(mask, batch.mask)
    seen = rl.mismatch_metrics(rollout.policy_logprobs, logprobs, batch.mask)
    assert seen["mismatch/k3"] == 0.0 and seen["mismatch/logprob_abs_diff_max"] == 0.0
    # an update that is not exact: its gradient is the same but for roundings of activations, and
    # its log-probabilities are not
    plain = replace(config, recipe=get_recipe("jet-rl"))
    _, other, expected = update(start(optimizer), batch, plain, optimizer)
    assert metrics["optim/skipped"] == 0
    assert metrics["optim/grad_norm"] == pytest.approx(float(expected["optim/grad_norm"]), rel=0.05)
    difference = np.abs(np.asarray(other) - np.asarray(rollout.policy_logprobs))[
        np.asarray(rollout.mask)
    ]
    assert 0 < difference.max() < 0.5
