"""GLM-4-MoE: against transformers' numbers; a bias of the router that nobody trains or rounds,
shared experts, a part of each head that is not rotated; and another family of the same layers,
added from outside by a row."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from test_forward import TOKENS, check_logits, policy_and_weights
from test_gemma import PROMPTS, check_followed, trainer_logprobs
from tiny_models import GLM, MOE, random_tensors, write_model

from fp8rl_jax.config.recipe import PrecisionConfig, get_recipe
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.dither import dithered
from fp8rl_jax.models.families import FAMILIES, Family
from fp8rl_jax.models.forward import forward
from fp8rl_jax.models.moe import choose
from fp8rl_jax.models.policy import cast, linear_names
from fp8rl_jax.precision import Compute
from fp8rl_jax.precision.exact import InvariantCompute, OrderFreeCompute
from fp8rl_jax.rollout.engine import LocalEngine
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.training.state import decay_mask
from fp8rl_jax.weights.hf_config import config_json, parse_config
from fp8rl_jax.weights.load import load_policy, save_policy

# Logits in float64 (the router's in float32) with the weights reference.random_weights(config), for
# the first 8 tokens of the vocabulary behind tokens 5 and 12 of TOKENS: transformers 5.24.0, torch
# 2.13.0.
GLM4_MOE = [
    [-1.479108, 0.899443, 1.409688, 1.64725, -0.585274, 0.631803, 0.759691, 0.309345],
    [2.787467, 0.677155, 1.528732, 0.226128, -0.181467, 0.795325, 1.458267, 1.346297],
]
DOTS1 = [
    [0.303231, -0.745006, -0.393033, 0.307857, -2.057868, 1.612261, 0.065813, -0.600611],
    [1.032269, 1.451372, 0.653712, 0.536822, -0.461551, 1.452686, 0.316662, -0.647465],
]


def dots() -> PolicyConfig:
    experts = dataclasses.replace(GLM.experts, normalize=False, dense_layers=())
    return dataclasses.replace(
        GLM,
        architecture="dots1",
        num_layers=2,
        rope_scaling=None,
        partial_rotary_factor=1.0,
        attention_bias=None,
        use_qk_norm=None,
        experts=experts,
    )


def test_logits_are_those_of_transformers(monkeypatch):
    row = Family(
        "Dots1ForCausalLM", 2048, kv_heads=32, window="none", qk_norm=True, routing="sigmoid"
    )
    monkeypatch.setitem(FAMILIES, "dots1", row)
    for config, expected in ((GLM, GLM4_MOE), (dots(), DOTS1)):
        check_logits(config, expected, atol=3e-5, of_reference=2e-6)
        assert parse_config(config_json(config), "config.json") == config


@pytest.mark.parametrize("compute", [Compute(), InvariantCompute(), OrderFreeCompute()])
def test_experts_are_chosen_in_the_best_groups_and_weighed_without_the_bias(compute):
    scores = [0.9, 0.1, 0.6, 0.5, 0.7, 0.05, 0.4, 0.3]
    # groups score 1.0, 1.1, 0.75, 1.6: the single best expert is in none of the two best
    bias = jnp.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.45, 0.45])
    x, router = jnp.ones((1, 1)), jnp.log(jnp.array(scores) / (1 - jnp.array(scores)))[:, None]
    ids, weights = choose(x, router, GLM.mixture, compute, bias=bias)
    assert ids.tolist() == [[6, 7, 2]]
    np.testing.assert_allclose(weights[0], 2.5 * np.array([0.4, 0.3, 0.6]) / 1.3, rtol=2e-6)
    plain = dataclasses.replace(GLM.mixture, normalize=False, groups_per_token=4, scale=1.0)
    ids, weights = choose(x, router, plain, compute, bias=bias)
    assert ids.tolist() == [[0, 6, 7]]
    np.testing.assert_allclose(weights[0], [0.9, 0.4, 0.3], rtol=2e-6)
    underflown = jnp.full((8, 1), -200.0)
    assert np.isfinite(choose(x, underflown, GLM.mixture, compute, bias=bias)[1]).all()


def test_the_router_s_bias_is_neither_trained_nor_rounded_nor_moved(tmp_path):
    policy, _ = policy_and_weights(GLM)

    def total(policy):
        return forward(policy, jnp.array([TOKENS], jnp.int32)).hidden.sum()

    gradient = jax.jit(jax.grad(total))(policy)
    assert not gradient.stack.router_bias.value.any() and gradient.stack.router.value.any()
    assert gradient.stack.shared_experts.up_proj.value.any()
    assert not decay_mask(policy).stack.router_bias.value
    bias = np.asarray(policy.stack.router_bias.value)
    assert (bias.astype(jnp.bfloat16) != bias).any()
    again = load_policy(save_policy(policy, tmp_path))
    moved = dithered(again, get_recipe("bf16"), 0, jnp.bfloat16)
    for other in (again, moved, cast(policy, jnp.bfloat16)):
        np.testing.assert_array_equal(other.stack.router_bias.value, bias)
    assert (np.asarray(again.stack.q_proj.value) != np.asarray(moved.stack.q_proj.value)).any()


def test_layers_that_predict_further_tokens_are_not_read(tmp_path):
    tensors = random_tensors(GLM, np.float32)
    ahead = {"model.layers.3.eh_proj.weight": np.ones((4, 8), np.float32)}
    assert load_policy(write_model(tmp_path / "a", GLM, tensors | ahead)).config == GLM
    with pytest.raises(UserError, match="unexpected"):
        write_model(tmp_path / "b", MOE, random_tensors(MOE, np.float32))
        path = tmp_path / "b" / "model.safetensors"
        named = {"model.layers.4.eh_proj.weight": np.ones((4, 8), np.float32)}
        safetensors.numpy.save_file(safetensors.numpy.load_file(path) | named, path)
        load_policy(tmp_path / "b")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"n_group": 3}, "n_group (3) must divide"),
        ({"topk_group": 5}, "topk_group (5) must be from 1 to n_group (4)"),
        ({"num_experts_per_tok": 5}, "topk_group (2)"),
        ({"n_group": 8, "topk_group": 8}, "n_group (8): groups are ranked by their two best"),
        ({"routed_scaling_factor": 0.0}, "routed_scaling_factor must be positive"),
        ({"first_k_dense_replace": 3}, "first_k_dense_replace: all layers"),
        ({"partial_rotary_factor": 0.2}, "partial_rotary_factor 0.2 must rotate an even number"),
        ({"n_shared_experts": 0}, "n_shared_experts must be positive"),
    ],
)
def test_refusals_name_the_key(changes, key):
    with pytest.raises(UserError) as error:
        parse_config(config_json(GLM) | changes, "config.json")
    assert str(error.value).startswith("config.json: ") and key in str(error.value)


def test_shared_experts_are_linears_of_a_recipe():
    names = linear_names(GLM)
    assert "layers.1.shared_experts.down_proj" in names and "layers.1.router_bias" not in names
    assert "layers.0.shared_experts.down_proj" not in names


SMALL = dataclasses.replace(GLM, num_layers=2)


@pytest.mark.parametrize("recipe", ["bf16", "fp8-e2e-kv"])
def test_the_trainer_follows_the_rollout(recipe):
    check_followed(SMALL, recipe)


def test_exact_mode_has_one_policy():
    policy, _ = policy_and_weights(SMALL)
    recipe = get_recipe("jet-rl", PrecisionConfig(exact=True))
    engine = LocalEngine(recipe, jnp.bfloat16, unroll=True)
    engine.sync(policy)
    rollout = engine.generate(PROMPTS, 2, Sampling(8), jax.random.key(2))
    gap = trainer_logprobs(policy, rollout, recipe, "bfloat16") - rollout.policy_logprobs
    assert not np.where(np.asarray(rollout.mask), gap, 0).any()
