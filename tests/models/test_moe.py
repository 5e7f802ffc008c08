"""Experts: routing, replay, recipes, files, and a rollout whose routes the trainer follows."""

from __future__ import annotations

import dataclasses
from functools import partial
from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_llama as reference
from flax import nnx
from test_forward import TOLERANCE, logits, policy_and_weights, random_tokens, run
from tiny_models import MOE, QWEN3

from fp8rl_jax.config.recipe import PrecisionConfig, get_recipe
from fp8rl_jax.config.rl import RLConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.config import ExpertsConfig
from fp8rl_jax.models.forms import rollout_policy
from fp8rl_jax.models.forward import forward
from fp8rl_jax.models.moe import choose, mixture, route_dtype
from fp8rl_jax.models.policy import (
    EXPERT_LINEARS,
    LINEARS,
    Layer,
    Weight,
    cast,
    equal_runs,
    init_policy,
    linear_names,
    matrix_parameters,
    parameter_count,
    unstack,
    with_layers,
)
from fp8rl_jax.precision import (
    Compute,
    QuantizedWeight,
    linear,
    predequantize,
    quantize,
    quantized_layers,
)
from fp8rl_jax.rollout.calibration import calibrate_on_prompts
from fp8rl_jax.rollout.engine import LocalEngine, pad_prompts
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.rollout.sync import SyncContext
from fp8rl_jax.training.state import decay_mask
from fp8rl_jax.training.step import Batch, StepConfig, batch_logprobs
from fp8rl_jax.weights.load import load_policy, save_policy


def test_choice_and_weights():
    rng = np.random.default_rng(0)
    x, router = (
        rng.normal(size=(3, 4, 8)).astype(np.float32),
        rng.normal(size=(5, 8)).astype(np.float32),
    )
    scores = np.exp(reference.log_softmax(x.astype(np.float64) @ router.T))
    order = np.argsort(-scores, axis=-1)
    for normalize in (True, False):
        config = ExpertsConfig(5, 2, 16, normalize)
        ids, weights = choose(jnp.asarray(x), jnp.asarray(router), config, Compute())
        np.testing.assert_array_equal(ids, order[..., :2])
        best = np.take_along_axis(scores, order[..., :2], -1)
        np.testing.assert_allclose(
            weights, best / best.sum(-1, keepdims=True) if normalize else best, rtol=1e-5
        )
    routes = order[..., 2:4].copy()
    routes[1, 2, 0] = -1  # this token alone is routed anew
    ids, weights = choose(
        jnp.asarray(x), jnp.asarray(router), config, Compute(), jnp.asarray(routes, jnp.int8)
    )
    expected = order[..., 2:4].copy()
    expected[1, 2] = order[1, 2, :2]
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_allclose(weights, np.take_along_axis(scores, expected, -1), rtol=1e-5)


def test_the_router_computes_in_float32_under_bfloat16():
    policy, _ = policy_and_weights(MOE)
    served = cast(policy, jnp.bfloat16)
    assert (
        served.layers.router.value.dtype == jnp.float32
        and served.layers.experts.up_proj.value.dtype == jnp.bfloat16
    )
    np.testing.assert_array_equal(served.layers.router.value, policy.layers.router.value)
    x = jnp.full((1, 8), 1.0, jnp.bfloat16)
    router = jnp.stack([jnp.full(8, 1.0), jnp.full(8, 1.0 + 2.0**-12)])  # equal in bfloat16
    assert choose(x, router, ExpertsConfig(2, 1, 16, True), Compute())[0].item() == 1


@pytest.mark.parametrize("ready", [False, True], ids=["quantized", "predequantized"])
def test_quantized_experts_are_those_of_the_quantized_linear(ready):
    """Token by token and expert by expert through `linear`, which has tests of its own."""
    policy, _ = policy_and_weights(MOE)
    formats = get_recipe("fp8-rollout").linear("rollout")
    layer = jax.tree.map(lambda x: x, unstack(policy).layers[0])
    weights = {}
    for name in ("gate_proj", "up_proj", "down_proj"):
        param = getattr(layer.experts, name).weight
        weights[name] = quantize(param.get_value(), formats.weight)
        quantized = QuantizedWeight(weights[name], precision=formats)
        param.set_value(predequantize(quantized, Compute("reference")) if ready else quantized)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 48)), jnp.float32)
    out, ids = mixture(x, layer, MOE.experts, Compute())
    gates = choose(x, layer.router.value, MOE.experts, Compute())[1]
    for where in np.ndindex(2, 3):
        expected = np.zeros(48)
        for expert, gate in zip(np.asarray(ids)[where], np.asarray(gates)[where], strict=True):
            own = {
                name: QuantizedWeight(jax.tree.map(itemgetter(expert), w), precision=formats)
                for name, w in weights.items()
            }

            def project(y, name, own=own):
                return linear(y, own[name], jnp.float32)

            row = x[where][None]
            inner = jax.nn.silu(project(row, "gate_proj")) * project(row, "up_proj")
            expected += gate * np.asarray(project(inner, "down_proj"))[0]
        np.testing.assert_allclose(np.asarray(out)[where], expected, atol=2e-5)


def test_ids_fit_their_dtype():
    assert route_dtype(ExpertsConfig(128, 8, 16, True)) == jnp.int8
    assert route_dtype(ExpertsConfig(129, 8, 16, True)) == jnp.int16


@pytest.mark.parametrize("stacked", [True, False], ids=["scan", "unroll"])
def test_replayed_routes_are_followed_token_by_token(stacked, unchecked_shapes):
    policy, weights = policy_and_weights(MOE)
    tokens = random_tokens(MOE, 1, 8)
    served = policy if stacked else unstack(policy)
    own = run(served, tokens).routes
    assert own.shape == (1, 8, 3, 2) and own.dtype == jnp.int8
    rng = np.random.default_rng(3)
    routes = np.array([[rng.permutation(5)[:2] for _ in range(3)] for _ in range(8)])
    routes[2], routes[5, 1, 1] = -1, -1
    result = run(served, tokens, routes=jnp.asarray(routes[None], jnp.int8))
    np.testing.assert_allclose(
        logits(policy, result.hidden)[0],
        reference.logits(MOE, weights, tokens[0].tolist(), routes),
        **TOLERANCE,
    )
    kept = (routes >= 0).all(-1)
    np.testing.assert_array_equal(np.asarray(result.routes)[0][kept], routes[kept])
    np.testing.assert_allclose(
        run(served, tokens, routes=own).hidden, run(served, tokens).hidden, atol=1e-6
    )
    with pytest.raises(ValueError, match=r"routes of shape \(1, 7, 3, 2\)"):
        forward(served, tokens, routes=own[:, 1:])


def test_recipes_reach_the_experts_and_never_the_router():
    names = linear_names(MOE)
    assert "layers.0.experts.gate_proj" in names and "layers.1.gate_proj" in names
    assert "layers.1.experts.gate_proj" not in names and "layers.0.gate_proj" not in names
    assert (
        not any("router" in name or name.endswith(".gate") for name in names)
        and len(names) == 4 * 7
    )
    recipe = get_recipe("fp8-rl")
    assert quantized_layers(recipe, names) == names
    experts = dataclasses.replace(recipe, quantized=("*.experts.*",))
    assert quantized_layers(experts, names) == tuple(name for name in names if ".experts." in name)
    with pytest.raises(UserError, match="router"):
        quantized_layers(dataclasses.replace(recipe, excluded=("*.router",)), names)


def test_a_scanned_rollout_policy_has_a_linear_that_is_quantized_in_some_layers_in_runs():
    policy = jax.eval_shape(lambda: init_policy(MOE, jax.random.key(0)))
    recipe = get_recipe("fp8-rollout")

    def served(**changes):
        convert = partial(
            rollout_policy,
            recipe=dataclasses.replace(recipe, **changes),
            dtype=jnp.bfloat16,
            unroll=False,
        )
        return jax.eval_shape(convert, policy)[0].layers

    experts = served(quantized=("*.experts.*",))
    assert experts.experts.up_proj.value.shape == (
        3,
        5,
        24,
        48,
    ) and experts.up_proj.value.shape == (1, 80, 48)
    assert isinstance(experts.experts.up_proj.value, QuantizedWeight)
    assert not isinstance(experts.up_proj.value, QuantizedWeight)
    assert served().router.value.dtype == jnp.float32
    runs = served(excluded=("layers.0.experts.*",)).experts.up_proj
    assert runs.sizes == (1, 2) and runs.parts[0].value.shape == (1, 5, 24, 48)
    assert runs.parts[1].value.quantized.values.shape == (2, 5, 24, 48)


@pytest.mark.slow
@pytest.mark.parametrize("unroll", [True, False], ids=["unrolled", "scanned"])
def test_experts_in_the_compute_dtype_in_some_layers(unroll):
    """Scanned in runs cut by kind of layer and by format, the answer is that of single layers."""
    policy, _ = policy_and_weights(MOE)
    recipe = get_recipe(
        "fp8-rollout", PrecisionConfig(first_layers_in_compute=1, excluded=("layers.3.experts.*",))
    )
    served = rollout_policy(policy, recipe, jnp.dtype("float32"), unroll)[0]
    if not unroll:
        assert equal_runs(served) == [range(1), range(1, 2), range(2, 3), range(3, 4)]
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, MOE.vocab_size, (2, 7)), jnp.int32)
    found = forward(served, tokens)
    layers = []
    for i, layer in enumerate(unstack(policy).layers):
        tensors = layer.tensors()
        for name in (*LINEARS, *EXPERT_LINEARS):
            if name in tensors and i and not (i == 3 and name in EXPERT_LINEARS):
                q = quantize(tensors[name].value, recipe.rollout.weight)
                weight = QuantizedWeight(q, precision=recipe.linear("rollout"))
                tensors[name] = Weight(weight, tensors[name].axes)
        layers.append(Layer(tensors))
    expected = forward(with_layers(policy, nnx.List(layers)), tokens)
    np.testing.assert_allclose(found.hidden, expected.hidden, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(found.routes, expected.routes)


def test_counts_and_weight_decay():
    policy = jax.eval_shape(lambda: init_policy(MOE, jax.random.key(0)))
    assert parameter_count(MOE) == sum(leaf.size for leaf in jax.tree.leaves(policy))
    attention = 4 * (2 * 64 * 48 + 2 * 32 * 48)
    assert matrix_parameters(MOE) == attention + 3 * 80 * 48 + 3 * (5 * 48 + 2 * 3 * 24 * 48)
    mask = decay_mask(policy)
    assert mask.layers.experts.down_proj.value and not mask.layers.input_layernorm.value


def test_saving_and_loading_gives_the_same_policy(tmp_path):
    policy = init_policy(MOE, jax.random.key(0))
    again = load_policy(save_policy(policy, tmp_path, dtype="float32"))
    assert again.config == MOE
    assert jax.tree.structure(again) == jax.tree.structure(policy)
    for old, new in zip(jax.tree.leaves(policy), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(old, new)


def opinionated():
    """Two layers, one of them dense, with random weights whose logits spread and whose experts
    differ."""
    experts = dataclasses.replace(MOE.experts, dense_layers=(0,))
    return policy_and_weights(dataclasses.replace(MOE, num_layers=2, experts=experts))[0]


def roll_out(policy, recipe: str, unroll=True):
    engine = LocalEngine(get_recipe(recipe), jnp.float32, unroll, expert_ids=True)
    prompts = pad_prompts([[3, 9, 27, 1], [5, 8]], [0, 1], 4)
    scales = calibrate_on_prompts(policy, prompts, engine.recipe, jnp.float32)
    engine.sync(policy, SyncContext(scales=scales))
    return engine, engine.generate(
        prompts, 2, Sampling(6, stop_token_ids=(7, 11, 13, 20)), jax.random.key(2)
    )


def as_batch(rollout, **routes):
    p = rollout.prompts
    zeros = jnp.zeros(len(rollout.tokens))
    return Batch(
        p.tokens, p.lengths, rollout.tokens, rollout.mask, rollout.policy_logprobs, zeros, **routes
    )


@pytest.mark.parametrize(
    "unroll", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["unroll", "scan"]
)
def test_a_rollout_brings_the_routes_that_a_full_forward_takes(unroll):
    policy = opinionated()
    _, rollout = roll_out(policy, "bf16", unroll)
    lengths, mask = np.asarray(rollout.prompts.lengths), np.asarray(rollout.mask)
    assert rollout.expert_ids.shape == (4, 6, 1, 2) and rollout.prompt_expert_ids.shape == (
        2,
        4,
        1,
        2,
    )
    np.testing.assert_array_equal(
        (np.asarray(rollout.prompt_expert_ids) >= 0).all((2, 3)), np.arange(4) < lengths[:, None]
    )
    rows = np.zeros((4, 10), np.int32)
    for row, tokens in enumerate(np.asarray(rollout.tokens)):
        start = lengths[row // 2]
        rows[row, :start], rows[row, start : start + 6] = (
            rollout.prompts.tokens[row // 2, :start],
            tokens,
        )
    full = np.asarray(run(policy, rows).routes)
    for row, got in enumerate(np.asarray(rollout.expert_ids)):
        start, used = lengths[row // 2], mask[row].sum()
        known = (got >= 0).all((1, 2))
        assert known[: used - 1].all() and not known[used:].any() and not known[-1]
        np.testing.assert_array_equal(got[known], full[row, start : start + known.sum()])
        np.testing.assert_array_equal(
            rollout.prompt_expert_ids[row // 2, :start], full[row, :start]
        )


@pytest.mark.slow
def test_the_trainer_replays_the_rollout_s_routes():
    """fp8-rl on a mixture: where the two sides chose other experts, replay brings the
    log-probabilities nearer."""
    policy = opinionated()
    _, rollout = roll_out(policy, "fp8-rl")
    config = StepConfig(get_recipe("fp8-rl"), RLConfig(), "float32", 1.0)
    mask = np.asarray(rollout.mask)
    replayed = {"prompt_routes": rollout.prompt_expert_ids, "routes": rollout.expert_ids}
    plain, same = (
        np.asarray(batch_logprobs(policy, as_batch(rollout, **routes), config))
        for routes in ({}, replayed)
    )
    nothing = jax.tree.map(lambda x: jnp.full_like(x, -1), replayed)
    np.testing.assert_allclose(
        batch_logprobs(policy, as_batch(rollout, **nothing), config)[mask], plain[mask], atol=1e-6
    )
    gap = np.abs(np.stack([plain, same]) - np.asarray(rollout.policy_logprobs))[:, mask].mean(1)
    assert 0 < gap[1] < gap[0]


def test_expert_ids_of_a_policy_without_experts_are_refused():
    engine = LocalEngine(get_recipe("bf16"), jnp.float32, expert_ids=True)
    engine.sync(init_policy(QWEN3, jax.random.key(0)))
    with pytest.raises(ValueError, match="policy without experts"):
        engine.generate(pad_prompts([[1]], [0], 2), 1, Sampling(2), jax.random.key(0))
