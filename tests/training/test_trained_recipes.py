"""Recipes whose trainer is in FP8: the rollout serves the trainer's own operands, and the update
follows the unquantized one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rollout.tiny import CONFIG, make_engine, make_policy, make_prompts

from fp8rl_jax.config.recipe import RECIPES, PrecisionConfig, Recipe, SideScales, get_recipe
from fp8rl_jax.config.rl import CorrectionConfig, RLConfig
from fp8rl_jax.config.training import OptimizerConfig
from fp8rl_jax.models.forms import trainer_policy
from fp8rl_jax.models.forward import forward
from fp8rl_jax.models.policy import (
    LINEARS,
    Layer,
    Weight,
    equal_runs,
    init_policy,
    unstack,
    with_layers,
)
from fp8rl_jax.precision import QuantizedWeight, quantize
from fp8rl_jax.rollout.engine import LocalEngine
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.training.state import init_state, make_optimizer
from fp8rl_jax.training.step import Batch, StepConfig, batch_logprobs, update

TRAINED = [name for name, recipe in RECIPES.items() if recipe.trainer.weight.quantized]


@cache
def rollout_of(name: str):
    return make_engine(name).generate(
        make_prompts(), 4, Sampling(max_new_tokens=8), jax.random.key(1)
    )


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


def step_config(name: str) -> StepConfig:
    rl = RLConfig(correction=CorrectionConfig(method="none"))
    return StepConfig(get_recipe(name), rl, "float32", temperature=1.0, logprob_chunk=32)


def mismatch(name: str, recipe: Recipe | None = None) -> np.ndarray:
    """|log p_trainer - log p_rollout| of every token that the recipe's rollout sampled; recipe: another one for the trainer."""
    rollout, config = rollout_of(name), step_config(name)
    trained = batch_logprobs(
        make_policy(), batch_of(rollout), replace(config, recipe=recipe or config.recipe)
    )
    return np.abs(np.asarray(trained) - np.asarray(rollout.policy_logprobs))[
        np.asarray(rollout.mask)
    ]


@pytest.mark.parametrize("name", TRAINED)
def test_the_rollout_serves_the_trainers_operands_bit_for_bit(name):
    policy, recipe = make_policy(), RECIPES[name]
    served = make_engine(name, unroll=False, policy=policy).policy.layers.tensors()
    trained = jax.jit(trainer_policy, static_argnums=(1, 2))(
        policy, recipe, jnp.dtype("float32")
    ).layers.tensors()
    assert [n for n, w in trained.items() if isinstance(w.value, QuantizedWeight)] == list(trained)[
        :7
    ]
    for linear in list(trained)[:7]:
        for ours, theirs in zip(
            jax.tree.leaves(trained[linear].value.quantized),
            jax.tree.leaves(served[linear]),
            strict=True,
        ):
            np.testing.assert_array_equal(
                np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
            )


@pytest.mark.slow
def test_one_precision_flow_has_a_tenth_of_the_mismatch():
    """Where rollout and trainer quantize alike, only the order of float32 sums differs, and an e4m3
    rounding that it flips."""
    mixed = mismatch("fp8-rollout").mean()
    for name in ("fp8-e2e", "jet-rl", "infir2"):
        unified = mismatch(name)
        assert unified.mean() < mixed / 10 and np.median(unified) < 1e-4, name


@pytest.mark.slow
def test_scales_that_differ_by_side_are_a_mismatch_of_their_own():
    """UE8M0 in the rollout and float32 in the trainer; blocks of 128 and of 64 with float32 scales.
    With UE8M0 scales the block hardly matters: a power of two moves no rounding, but for what
    underflows."""
    mixed = mismatch("fp8-rollout").mean()
    for name, own in (("infir2", SideScales("float32")), ("jet-rl", SideScales(block=64))):
        found = mismatch(name, get_recipe(name, PrecisionConfig(trainer=own))).mean()
        assert found > 10 * mismatch(name).mean() and found > mixed / 10
    assert (
        mismatch(
            "infir2", get_recipe("infir2", PrecisionConfig(trainer=SideScales(block=64)))
        ).mean()
        < mixed / 20
    )


def gradients(name: str, changes: PrecisionConfig | None = None) -> np.ndarray:
    """What one plain gradient step takes from the weights of the linears."""
    policy, optimizer = (
        make_policy(),
        make_optimizer(OptimizerConfig(learning_rate=1e-3, max_grad_norm=0.0), 1),
    )
    batch = batch_of(rollout_of("bf16"))
    config = replace(step_config(name), recipe=get_recipe(name, changes))
    state, _, metrics = update(init_state(policy, optimizer), batch, config, optimizer)
    assert metrics["optim/skipped"] == 0 and np.isfinite(metrics["optim/grad_norm"])
    # Adam's first moment after one update is the gradient, up to a factor
    moments = state.optimizer[0].mu.layers.tensors()
    return np.concatenate(
        [np.asarray(moments[linear].value, np.float64).ravel() for linear in list(moments)[:7]]
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "block"), [("jet-rl", None), ("infir2", None), ("jet-rl", 64)])
def test_the_update_points_where_the_unquantized_one_does(name, block):
    exact, found = (
        gradients("bf16"),
        gradients(name, PrecisionConfig(trainer=SideScales(block=block))),
    )
    cosine = exact @ found / np.linalg.norm(exact) / np.linalg.norm(found)
    assert cosine > 0.9 and 0.8 < np.linalg.norm(found) / np.linalg.norm(exact) < 1.25


FOUR = replace(CONFIG, num_layers=4)
ENDS = PrecisionConfig(
    first_layers_in_compute=1, last_layers_in_compute=1, excluded=("layers.2.up_proj",)
)


@cache
def policy_of_four():
    policy = init_policy(FOUR, jax.random.key(0))
    return jax.tree.map(
        lambda x: x * 4.0 if x.ndim > 1 and x.shape[-1] > 32 and x.std() > 0 else x, policy
    )


def quantized(i: int, name: str) -> bool:
    return i in (1, 2) and name in LINEARS and (i, name) != (2, "up_proj")


def fp8_weight(master, recipe) -> QuantizedWeight:
    quantized = quantize(jax.lax.stop_gradient(master), recipe.trainer.weight)
    return QuantizedWeight(quantized, master, recipe.linear("trainer"))


def layer_by_layer(policy, recipe):
    """The trainer's form as a list of single layers, each from its own slice of the masters."""

    def form(i, name, weight):
        master = weight.value[i]
        return Weight(fp8_weight(master, recipe) if quantized(i, name) else master, weight.axes)

    layers = (
        Layer({n: form(i, n, w) for n, w in policy.layers.tensors().items()}) for i in range(4)
    )
    return with_layers(policy, nnx.List(layers))


@pytest.mark.slow
def test_layers_in_the_compute_dtype_are_runs_whose_gradients_reach_one_stack():
    policy, recipe = policy_of_four(), get_recipe("fp8-e2e", ENDS)
    trained = trainer_policy(policy, recipe, jnp.dtype("float32"))
    assert equal_runs(trained) == [range(1), range(1, 2), range(2, 3), range(3, 4)]
    assert [part.weight.get_value().shape[0] for part in trained.layers.q_proj.parts] == [1, 2, 1]
    assert equal_runs(policy) == [range(4)]
    tokens = jnp.asarray(np.random.default_rng(0).integers(1, CONFIG.vocab_size, (2, 9)), jnp.int32)

    def loss(policy, form, recipe=recipe):
        hidden = forward(form(policy, recipe), tokens, keep_cache=False).hidden
        return jnp.sum(hidden * jnp.cos(jnp.arange(hidden.size).reshape(hidden.shape)))

    of_form = partial(trainer_policy, dtype=jnp.dtype("float32"))
    found, gradient = jax.jit(jax.value_and_grad(partial(loss, form=of_form)))(policy)
    expected, reference = jax.jit(jax.value_and_grad(partial(loss, form=layer_by_layer)))(policy)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    for (path, one), other in zip(
        jax.tree.leaves_with_path(gradient), jax.tree.leaves(reference), strict=True
    ):
        assert one.dtype == jnp.float32
        scale = np.abs(other).max()
        np.testing.assert_allclose(
            one / scale, other / scale, atol=1e-3, err_msg=jax.tree_util.keystr(path)
        )
    plain = jax.jit(partial(loss, form=of_form, recipe=get_recipe("bf16")))(policy)
    assert abs(plain / expected - 1) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("unroll", [True, False], ids=["unrolled", "scanned"])
def test_both_sides_keep_the_same_layers_in_the_compute_dtype(unroll):
    policy, recipe = policy_of_four(), get_recipe("jet-rl", ENDS)
    engine = LocalEngine(recipe, jnp.float32, unroll)
    engine.sync(policy)
    trained = unstack(trainer_policy(policy, recipe, jnp.dtype("float32")))
    served = engine.policy if unroll else unstack(engine.policy)
    for i, (ours, theirs) in enumerate(zip(trained.layers, served.layers, strict=True)):
        for name, weight in ours.tensors().items():
            other = theirs.tensors()[name].value
            assert (
                isinstance(weight.value, QuantizedWeight)
                == isinstance(other, QuantizedWeight)
                == quantized(i, name)
            )
            pair = weight.value, other
            if quantized(i, name):
                ours_in, theirs_in = weight.value.precision, other.precision
                assert (ours_in.weight, ours_in.activation) == (
                    theirs_in.weight,
                    theirs_in.activation,
                )
                pair = weight.value.quantized, other.quantized
            for one, two in zip(*map(jax.tree.leaves, pair), strict=True):
                np.testing.assert_array_equal(
                    np.asarray(one, np.float32), np.asarray(two, np.float32)
                )
    rollout = engine.generate(make_prompts(), 2, Sampling(max_new_tokens=6), jax.random.key(1))
    config = replace(step_config("jet-rl"), recipe=recipe)
    scored = batch_logprobs(policy, batch_of(rollout), config)
    assert np.median(np.abs(scored - rollout.policy_logprobs)[np.asarray(rollout.mask)]) < 1e-4
