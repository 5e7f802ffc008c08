"""Planted faults are found, and named by the right cause; equal sides are equal; the programs are
the real ones."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from precision.numpy_fp8 import restored
from tiny_models import GLM, LLAMA

from fp8rl_jax.compare.comparison import Comparison, compare, where_sides_part
from fp8rl_jax.compare.side import Side, check_alike
from fp8rl_jax.compare.tokens import Row, as_tokens, of_rollout
from fp8rl_jax.config.recipe import RECIPES, Recipe, TensorFormat, get_recipe
from fp8rl_jax.config.rl import RLConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.policy import init_policy, with_scales
from fp8rl_jax.precision import Compute
from fp8rl_jax.precision.compute import ACTIVATIONS
from fp8rl_jax.rollout.engine import LocalEngine, pad_prompts
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.rollout.sync import SyncContext
from fp8rl_jax.training.step import Batch, StepConfig, batch_logprobs

DENSE = replace(LLAMA, num_layers=2, vocab_size=40, eos_token_ids=())
SPARSE = replace(GLM, num_layers=2, experts=replace(GLM.experts, dense_layers=()))
TOKENS = as_tokens(
    [Row([5, 9, 3, 22, 8, 1, 30], [7, 7, 12, 4, 39]), Row([2, 6, 11, 17], [3, 33])], 64
)


@cache
def policy(config=DENSE):
    """Random weights with decided opinions."""
    made = init_policy(config, jax.random.key(0))
    return jax.tree.map(lambda x: x * 4 if x.ndim > 1 and x.std() > 0 else x, made)


def side(recipe: str | Recipe, phase: str, weights=None, **options) -> Side:
    recipe = RECIPES[recipe] if isinstance(recipe, str) else recipe
    weights = policy() if weights is None else weights
    return Side.of(
        weights, recipe, phase, options.get("dtype", "float32"), options.get("tokens", TOKENS)
    )


def changed(config, tensor: str, place: tuple[int, ...]):
    """The policy with a bit of one weight flipped."""

    def flip(path, x):
        name = ".".join(str(getattr(key, "key", getattr(key, "name", key))) for key in path)
        if tensor not in name:
            return x
        bits = np.array(x)
        bits.view(np.uint32)[place] ^= 1 << 21  # the second highest of its fraction
        return jnp.asarray(bits)

    found = jax.tree_util.tree_map_with_path(flip, policy(config))
    assert (
        sum(
            bool((x != y).any())
            for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(policy(config)), strict=True)
        )
        == 1
    )
    return found


def causes(found: Comparison, layer: int) -> dict[str, str]:
    return {
        operation.name: operation.verdict.cause
        for operation in found.layers[layer].operations
        if operation.verdict.cause
    }


def operation(found: Comparison, layer: int, name: str):
    return next(x for x in found.layers[layer].operations if x.name == name)


def test_a_side_against_itself_is_zero_everywhere():
    found = compare(side("bf16", "trainer"), side("bf16", "trainer"), TOKENS)
    assert found.equal and not found.first and found.only_a == found.only_b == ()
    for layer in found.layers:
        assert layer.input.equal and all(
            x.output.equal and x.own.equal and not x.verdict.cause for x in layer.operations
        )
    assert found.logprobs["differing"] == found.logprobs["max_abs"] == found.logprobs["k3"] == 0
    assert found.sharpness[0] == found.sharpness[1]
    assert 0 < found.sharpness[0]["sharpness/0.001"] < found.sharpness[0]["sharpness/0.01"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_changed_bit_of_one_weight_is_the_only_cause(dtype):
    """In bfloat16, too, where a compiler may skip a rounding between two operations."""
    other = changed(DENSE, "up_proj", (1, 5, 7))
    found = compare(
        side("bf16", "trainer", dtype=dtype), side("bf16", "trainer", other, dtype=dtype), TOKENS
    )
    (first,) = found.first
    assert (first.name, first.cause) == ("layers.1.up_proj", "operand")
    assert (
        first.detail == f"weight: 1 of {64 * 96:,} values differ before quantization"
        and "completion" in first.where
    )
    assert causes(found, 0) == {} and causes(found, 1) == {"up_proj": "operand"}
    assert found.layers[1].input.equal and operation(found, 1, "gate_proj").output.equal
    # what comes after differs because its input does
    down = operation(found, 1, "down_proj")
    assert not down.output.equal and down.own.equal and not found.equal
    assert not found.end[0].output.equal and found.end[0].own.equal


def test_a_weight_before_quantization_is_named_where_both_sides_quantize_it():
    found = compare(
        side("jet-rl", "trainer"),
        side("jet-rl", "trainer", changed(DENSE, "k_proj", (0, 2, 3))),
        TOKENS,
    )
    assert causes(found, 0) == {"k_proj": "operand"} and causes(found, 1) == {}
    assert found.first[0].detail == f"weight: 1 of {32 * 64:,} values differ before quantization"


def other_elements(fmt: TensorFormat) -> TensorFormat:
    return replace(fmt, element="e5m2")


@pytest.mark.parametrize("fault", ["scale rule", "elements"])
def test_another_scale_rule_and_other_elements_are_formats(fault):
    if fault == "scale rule":
        other = get_recipe("infir2")
        words = "weight: e4m3 128x128 float32 scales against e4m3 128x128 power_of_two scales"
    else:
        jet = RECIPES["jet-rl"]
        trainer = replace(jet.trainer, activation=other_elements(jet.trainer.activation))
        other = replace(jet, trainer=trainer, saved_activation=trainer.activation)
        words = "activation: e4m3 1x128 float32 scales against e5m2 1x128 float32 scales"
    found = compare(side("jet-rl", "trainer"), side(other, "trainer"), TOKENS)
    assert (found.first[0].name, found.first[0].cause) == ("layers.0.q_proj", "format")
    assert words in found.first[0].detail
    assert set(causes(found, 0).values()) == {"format"} and len(causes(found, 0)) == 7
    assert found.only_a == found.only_b == ()


def test_an_excluded_layer_is_quantized_on_one_side_only():
    part = replace(RECIPES["fp8-rollout"], excluded=("layers.1.*",))
    found = compare(side("fp8-rollout", "rollout"), side(part, "rollout"), TOKENS)
    assert (found.first[0].name, found.first[0].cause) == ("layers.1.q_proj", "format")
    assert causes(found, 0) == {} and found.layers[1].input.equal
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert found.only_a == tuple(f"layers.1.{name}" for name in names) and found.only_b == ()
    eight = "e4m3-128x128 weights, e4m3-1x128 activations"
    assert found.linears == (
        ([f"layers.0.{name}" for name in names], eight, eight),
        ([f"layers.1.{name}" for name in names], eight, ""),
    )


def test_kv_scales_are_scales():
    roomy = replace(RECIPES["fp8-kv"], kv_margin=1.3)
    found = compare(side("fp8-kv", "rollout"), side(roomy, "rollout"), TOKENS)
    (first,) = found.first
    assert (first.name, first.cause) == ("layers.0.attention", "scale")
    assert first.detail == "; ".join(
        f"{role}: 1 of 1 scales differ" for role in ("query", "key", "value")
    )
    assert causes(found, 1) == {"attention": "scale"}


def test_own_errors_are_those_of_numpy():
    """A q_proj in FP8 against a plain one on the same input, from the weights alone."""
    found = compare(side("fp8-rollout", "rollout"), side("fp8-rollout", "trainer"), TOKENS)
    assert [first.cause for first in found.first][0] == "format" and found.first[
        0
    ].name == "layers.0.q_proj"
    assert len(found.only_a) == 14 and found.only_b == ()
    weights = policy()
    rows = np.concatenate(
        [
            table[row, :n]
            for table, lengths in (
                (TOKENS.prompts, TOKENS.prompt_lengths),
                (TOKENS.completions, TOKENS.completion_lengths),
            )
            for row, n in enumerate(lengths)
        ]
    )
    x = np.asarray(weights.embed_tokens.value, np.float64)[rows]
    x = (
        x
        / np.sqrt((x**2).mean(-1, keepdims=True) + DENSE.rms_norm_eps)
        * np.asarray(weights.layers.input_layernorm.value[0])
    )
    w, recipe = np.asarray(weights.layers.q_proj.value[0]), RECIPES["fp8-rollout"].rollout
    a, b = (
        restored(x.astype(np.float32), recipe.activation) @ restored(w, recipe.weight).T,
        x @ w.T.astype(np.float64),
    )
    q = operation(found, 0, "q_proj")
    assert q.own.relative_error == pytest.approx(
        np.linalg.norm(a - b) / np.linalg.norm(a), rel=1e-3
    )
    assert q.own == q.output
    weight = q.verdict.operands["weight"]
    restored_weight = restored(w, recipe.weight)
    assert weight.relative_error == pytest.approx(
        np.linalg.norm(restored_weight - w) / np.linalg.norm(restored_weight), rel=1e-5
    )
    # behind it the errors pile up, and each operation keeps its own
    down = operation(found, 1, "down_proj")
    assert down.output.relative_error > 1.5 * down.own.relative_error > 0.01


def test_experts_and_the_router():
    sparse = policy(SPARSE)
    bf16 = side("bf16", "trainer", sparse)
    found = compare(
        bf16, side("bf16", "trainer", changed(SPARSE, ".experts.up_proj", (1, 2, 4, 5))), TOKENS
    )
    assert causes(found, 0) == {} and causes(found, 1) == {"experts.up_proj": "operand"}
    assert found.layers[0].rerouted == found.layers[1].rerouted == 0
    found = compare(
        bf16, side("bf16", "trainer", changed(SPARSE, "shared_experts.up_proj", (1, 4, 5))), TOKENS
    )
    assert causes(found, 0) == {} and causes(found, 1) == {"shared_experts.up_proj": "operand"}
    swapped = jax.tree_util.tree_map_with_path(
        lambda path, x: x[:, ::-1] if "router" in jax.tree_util.keystr(path) else x, sparse
    )
    found = compare(bf16, side("bf16", "trainer", swapped), TOKENS)
    assert causes(found, 0) == causes(found, 1) == {"router": "operand", "mixture": "input"}
    assert found.layers[0].rerouted > 0.5 and found.first[0].name == "layers.0.router"


@pytest.mark.slow
def test_the_sides_are_the_engine_and_the_update():
    """Layer by layer they give the log-probabilities that the engine sampled with and the update
    recomputes."""
    # an e4m3 value more or less, where sums differ in the last bit
    recipe, tolerance = "fp8-rl", 5e-3
    engine, weights = LocalEngine(RECIPES[recipe], jnp.float32, unroll=False), policy()
    prompts = pad_prompts([[5, 9, 3, 22, 8], [2, 6, 11]], [0, 1], 5)
    probe = as_tokens([Row([5, 9, 3, 22, 8], [1] * 6), Row([2, 6, 11], [1] * 6)], 64)
    scales = side(recipe, "rollout", tokens=probe).served.kv_scales
    engine.sync(weights, SyncContext(scales=scales))
    out = jax.device_get(engine.generate(prompts, 1, Sampling(max_new_tokens=6), jax.random.key(0)))
    batch = Batch(
        prompts.tokens, prompts.lengths, out.tokens, out.mask, out.policy_logprobs, jnp.zeros(2)
    )
    trainer = np.asarray(
        batch_logprobs(weights, batch, StepConfig(RECIPES[recipe], RLConfig(), "float32", 1.0))
    )
    tokens = probe._replace(completions=out.tokens)
    for phase, expected in (("rollout", out.policy_logprobs), ("trainer", trainer)):
        one = side(recipe, phase, tokens=tokens)
        one = dataclasses.replace(one, served=with_scales(one.served, scales))
        x = one.embed(tokens)
        for i in range(DENSE.num_layers):
            x = type(x)(*(part["output"] for part in one.run(i, x, tokens)))
        np.testing.assert_allclose(one.logprobs(one.norm(x), tokens), expected, atol=tolerance)
    assert np.abs(trainer - out.policy_logprobs).max() > 4 * tolerance
    twice = {name: np.repeat(getattr(out, name), 2, 0) for name in ("tokens", "policy_logprobs")}
    wide = dataclasses.replace(out, **twice, mask=out.mask[[0, 0, 1, 1]])
    first, second = (
        [x[i, out.mask[i]].tolist() for x in (out.tokens, out.policy_logprobs)] for i in (0, 1)
    )
    assert of_rollout(wide, most=2) == [Row([5, 9, 3, 22, 8], *first), Row([2, 6, 11], *second)]
    said = where_sides_part(weights, RECIPES[recipe], "float32", out)
    assert said.startswith("layers.0.q_proj differs first, format: ")
    exact = replace(RECIPES["jet-rl"], exact=True)
    assert where_sides_part(weights, exact, "float32", out).startswith("each operation by itself")


def test_models_of_other_shapes_are_refused():
    with pytest.raises(
        UserError, match=r"a and b cannot be compared: they differ in num_layers \(2 and 3\)"
    ):
        check_alike([DENSE, replace(DENSE, num_layers=3, eos_token_ids=(1,))], ["a", "b"])


@pytest.mark.slow
def test_an_exact_rollout_is_its_trainer_bit_for_bit():
    exact = replace(RECIPES["jet-rl"], exact=True)
    a, b = (
        side(exact, phase, policy(SPARSE), dtype="bfloat16") for phase in ("rollout", "trainer")
    )
    found = compare(a, b, TOKENS)
    assert found.equal and found.logprobs["max_abs"] == 0.0
    assert all(
        operation.output.equal and operation.own.equal
        for layer in found.layers
        for operation in layer.operations
    )


@pytest.mark.slow
@pytest.mark.parametrize("left_to_the_compiler", [True, False])
def test_excess_precision_is_named(monkeypatch, left_to_the_compiler):
    """Of a model whose roundings are XLA's choice: it keeps 16-bit results in float32, in each
    program its own way."""
    # programs of this test alone
    config = replace(DENSE, rms_norm_eps=1e-4 if left_to_the_compiler else 1e-5)
    if left_to_the_compiler:
        monkeypatch.setattr(Compute, "add", lambda self, x, y: x + y)
        monkeypatch.setattr(
            Compute, "gated", lambda self, gate, up, name: ACTIVATIONS[name](gate) * up
        )
    sides = [
        side("bf16", phase, policy(config), dtype="bfloat16") for phase in ("rollout", "trainer")
    ]
    first = {first.cause: first for first in compare(*sides, TOKENS).first}
    assert ("excess precision" in first) == left_to_the_compiler
    if left_to_the_compiler:
        assert first["excess precision"].where == "whole program"
        assert "side b: " in first["excess precision"].detail
    assert side("bf16", "trainer").excess is None
