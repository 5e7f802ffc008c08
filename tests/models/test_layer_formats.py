"""Recipes whose linears differ between layers: the types and formats of a policy's weights on both
sides, and log-probabilities that are alike where the sides are."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout.tiny import CONFIG, make_policy, make_prompts

from fp8rl_jax.config.formats import COMPUTE, TensorFormat
from fp8rl_jax.config.recipe import RECIPES, LayerFormats, Recipe
from fp8rl_jax.config.rl import RLConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.forms import linear_formats, rollout_policy, trainer_policy
from fp8rl_jax.models.policy import WeightRuns, equal_runs, init_policy
from fp8rl_jax.precision import QuantizedWeight
from fp8rl_jax.rollout.engine import LocalEngine
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.training.step import Batch, StepConfig, batch_logprobs

JET, FLOAT32 = RECIPES["jet-rl"], jnp.dtype("float32")
W, A = JET.rollout.weight, JET.rollout.activation
SMALL, GROUPS = TensorFormat("e4m3", (64, 64)), TensorFormat("e4m3", (1, 64))
BLOCKS = LayerFormats(
    "layers.1.up_proj",
    (
        *(("rollout.weight", SMALL), ("rollout.activation", GROUPS)),
        *(("trainer.weight", SMALL), ("trainer.activation", GROUPS)),
        *(("output_gradient", GROUPS), ("saved_activation", GROUPS)),
    ),
)
PLAIN_DOWN = LayerFormats(
    "layers.0.down_proj", (("rollout.weight", COMPUTE), ("trainer.weight", COMPUTE))
)
ROLLOUT_ONLY = LayerFormats("*.q_proj", (("trainer.weight", COMPUTE),))
MIXED = replace(JET, layers=(BLOCKS, PLAIN_DOWN, ROLLOUT_ONLY))


def kind(value) -> tuple | None:
    """(block of the weight, its activation's, whether it is trained); None of a plain array."""
    if not isinstance(value, QuantizedWeight):
        return None
    return value.quantized.block, value.precision.activation.block, value.master is not None


@pytest.mark.parametrize("unroll", [True, False], ids=["unrolled", "scanned"])
def test_the_rollout_s_weights_are_in_each_layer_s_own_format(unroll):
    convert = jax.jit(rollout_policy, static_argnums=(1, 2, 3))
    served, metrics = convert(make_policy(), MIXED, FLOAT32, unroll)
    assert "fp8/quant_snr_db_weight" in metrics
    blocks, small = ((128, 128), (1, 128), False), ((64, 64), (1, 64), False)
    expected = {"up_proj": [blocks, small], "down_proj": [None, blocks], "q_proj": [blocks] * 2}
    if unroll:
        for name, kinds in expected.items():
            assert [kind(getattr(layer, name).value) for layer in served.layers] == kinds
        return
    assert equal_runs(served) == [range(1), range(1, 2)]
    for name, kinds in expected.items():
        weight = getattr(served.layers, name)
        parts = weight.parts if isinstance(weight, WeightRuns) else [weight]
        assert [kind(part.value) for part in parts] == list(dict.fromkeys(kinds))


def test_the_trainer_s_weights_are_in_each_layer_s_own_format():
    layers = jax.jit(trainer_policy, static_argnums=(1, 2))(make_policy(), MIXED, FLOAT32).layers
    up, down = layers.up_proj, layers.down_proj
    assert [kind(part.value) for part in up.parts] == [
        ((128, 128), (1, 128), True),
        ((64, 64), (1, 64), True),
    ]
    assert [part.value.precision.output_gradient for part in up.parts] == [A, GROUPS]
    assert [part.value.precision.saved_activation for part in up.parts] == [A, GROUPS]
    assert [kind(part.value) for part in down.parts] == [None, ((128, 128), (1, 128), True)]
    assert kind(layers.q_proj.value) is None
    assert kind(layers.k_proj.value) == ((128, 128), (1, 128), True)


@cache
def rollout_of(recipe: Recipe, unroll: bool = False):
    engine = LocalEngine(recipe, jnp.float32, unroll)
    engine.sync(make_policy())
    return engine.generate(make_prompts(), 2, Sampling(8, 0.8), jax.random.key(42))


def gap(recipe: Recipe, trainer: Recipe | None = None, unroll: bool = False) -> np.ndarray:
    """|log p_trainer - log p_rollout| of every token that the recipe's rollout sampled."""
    out, prompts = rollout_of(recipe, unroll), make_prompts()
    advantages = jnp.zeros(len(out.tokens))
    batch = Batch(
        prompts.tokens, prompts.lengths, out.tokens, out.mask, out.policy_logprobs, advantages
    )
    config = StepConfig(trainer or recipe, RLConfig(), "float32", 0.8, backend="reference")
    trained = batch_logprobs(make_policy(), batch, config)
    return np.abs(np.asarray(trained) - np.asarray(out.policy_logprobs))[np.asarray(out.mask)]


@pytest.mark.slow
@pytest.mark.parametrize("unroll", [True, False], ids=["unrolled", "scanned"])
def test_rollout_and_trainer_agree_under_jet_rl_with_rules(unroll):
    """Where both sides follow the rules, as without any; a trainer without them has a mismatch."""
    both = replace(JET, layers=(BLOCKS, PLAIN_DOWN))
    mixed = gap(RECIPES["fp8-rollout"]).mean()
    found = gap(both, unroll=unroll)
    assert np.median(found) < 1e-4 and found.mean() < mixed / 10
    assert gap(both, trainer=JET, unroll=unroll).mean() > 10 * found.mean()


@pytest.mark.slow
def test_gradients_reach_the_masters_of_every_kind_of_weight():
    out, prompts = rollout_of(JET), make_prompts()
    batch = Batch(
        prompts.tokens,
        prompts.lengths,
        out.tokens,
        out.mask,
        out.policy_logprobs,
        jnp.zeros(len(out.tokens)),
    )

    def gradient(recipe):
        config = StepConfig(recipe, RLConfig(), "float32", 0.8, backend="reference")
        loss = jax.jit(jax.grad(lambda policy: batch_logprobs(policy, batch, config).sum()))
        return loss(make_policy()).layers.tensors()

    plain, found = gradient(RECIPES["bf16"]), gradient(MIXED)
    for name, weight in found.items():
        for layer in range(CONFIG.num_layers):
            one, other = (np.asarray(x.value[layer], np.float64) for x in (weight, plain[name]))
            cosine = (one * other).sum() / np.linalg.norm(one) / np.linalg.norm(other)
            assert cosine > 0.9, (name, layer, cosine)


def test_a_rule_that_matches_nothing_is_refused_by_both_forms():
    recipe = replace(JET, layers=(LayerFormats("layers.2.*", BLOCKS.formats),))
    policy = jax.eval_shape(lambda: init_policy(CONFIG, jax.random.key(0)))
    for convert in (
        lambda: jax.eval_shape(lambda p: trainer_policy(p, recipe, FLOAT32), policy),
        lambda: jax.eval_shape(lambda p: rollout_policy(p, recipe, FLOAT32, True), policy),
    ):
        with pytest.raises(UserError, match=r"layers pattern 'layers\.2\.\*' matches no linear"):
            convert()


def test_formats_that_two_rules_give_one_linear_are_checked_together():
    """Each alone can be computed, and both together cannot."""
    weight = LayerFormats("*.up_proj", (("rollout.weight", SMALL), ("rollout.activation", GROUPS)))
    activation = LayerFormats("layers.1.*", (("rollout.activation", A),))
    recipe = replace(RECIPES["fp8-rollout"], layers=(weight, activation))
    with pytest.raises(UserError, match=r"rollout\.activation\.block must be 1x64"):
        linear_formats(CONFIG, recipe, "rollout")
