"""DeepSeek-V3: against transformers' numbers, and latent attention: its cache, its linears, its
files."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parallel.helpers import run_on_devices
from test_forward import check_logits, policy_and_weights
from test_gemma import PROMPTS, logprobs_of_full_forwards, trainer_logprobs
from tiny_models import DEEPSEEK, random_tensors, write_model

from fp8rl_jax.compare.causes import operations
from fp8rl_jax.compare.probe import ProbedLayer
from fp8rl_jax.config.recipe import RECIPES, PrecisionConfig, get_recipe
from fp8rl_jax.config.run import PagedConfig, RolloutConfig, RunConfig
from fp8rl_jax.config.training import LoraConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.attention import LayerInputs
from fp8rl_jax.models.cache import KVCache, empty_cache
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.forward import TransformerLayer
from fp8rl_jax.models.lora import adapted_tensors
from fp8rl_jax.models.policy import (
    init_policy,
    linear_names,
    parameter_count,
    single_layers,
)
from fp8rl_jax.precision import Compute, quantized_layers
from fp8rl_jax.rollout.calibration import calibrate_on_prompts
from fp8rl_jax.rollout.engine import LocalEngine, PagedEngine
from fp8rl_jax.rollout.paged.layout import token_bytes
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.rollout.sync import SyncContext
from fp8rl_jax.training.checks import check_policy
from fp8rl_jax.training.plan import memory_plan
from fp8rl_jax.weights.hf_config import config_json, parse_config
from fp8rl_jax.weights.load import load_policy, save_policy
from fp8rl_jax.weights.safetensors_io import read_safetensors

# Logits in float64 (the router's in float32) with the weights reference.random_weights(config), for
# the first 8 tokens of the vocabulary behind tokens 5 and 12 of TOKENS: transformers 5.24.0, torch
# 2.13.0.
DEEPSEEK_V3 = [
    [1.158228, 0.713654, 0.248754, 0.641259, 0.58842, -2.358548, 2.138775, -0.034799],
    [-1.023544, 1.600037, -0.961892, -0.730399, -0.702182, -0.288311, 0.236553, 1.291201],
]
WITHOUT_QUERY_LATENTS = [
    [1.792277, -0.325186, -0.260005, 0.428404, 1.671957, 0.51587, 0.58063, -0.433429],
    [1.209693, -0.244089, -0.484023, -0.15136, -0.490741, 0.100792, -0.94009, -1.094861],
]
PLAIN = dataclasses.replace(
    DEEPSEEK,
    rope_scaling=None,
    latent=dataclasses.replace(DEEPSEEK.latent, query_rank=None, interleaved=False, value_dim=28),
)


def test_logits_are_those_of_transformers():
    for config, expected in ((DEEPSEEK, DEEPSEEK_V3), (PLAIN, WITHOUT_QUERY_LATENTS)):
        check_logits(config, expected, atol=3e-5, of_reference=2e-6)
        assert parse_config(config_json(config), "config.json") == config


# deepseek-ai/DeepSeek-V3's config.json, less the keys that do not change the model
PUBLISHED = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def parse(**changes) -> PolicyConfig:
    return parse_config(PUBLISHED | changes, "config.json")


def test_the_published_model_has_its_published_sizes():
    """671 B parameters (arXiv 2412.19437), and a cache of 70.272 KB a token in bfloat16, table 1 of
    arXiv 2505.09343."""
    config = parse()
    assert parameter_count(config) == pytest.approx(671e9, rel=1e-3)
    policy = jax.eval_shape(lambda key: init_policy(config, key, jnp.bfloat16), jax.random.key(0))
    assert token_bytes(policy) == 70_272
    # 192^-0.5 (0.1 ln 40 + 1)^2, and cos and sin as they are
    assert config.score_scale == pytest.approx(0.07216878 * 1.3688879**2)
    assert config.rope_scaling.amplitude == 1.0
    assert parse(model_type="kimi_k2") == config
    assert parse_config(config_json(config), "config.json") == config


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"attention_bias": True}, "attention_bias true"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ({"topk_method": "group_limited_greedy"}, "topk_method 'group_limited_greedy'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ({"num_key_value_heads": 8}, "num_key_value_heads (8) must be num_attention_heads (128)"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim must be even"),
        ({"qk_nope_head_dim": 0}, "qk_nope_head_dim must be positive"),
        ({"kv_lora_rank": 0}, "kv_lora_rank must be from 1"),
        ({"head_dim": 192}, "head_dim 192 contradicts qk_rope_head_dim 64"),
        ({"n_group": None}, "n_group null"),
        (
            {"rope_scaling": {"type": "linear", "factor": 4.0, "mscale_all_dim": 1.0}},
            "rope_scaling.mscale_all_dim",
        ),
    ],
)
def test_refusals_name_the_key(changes, key):
    with pytest.raises(UserError) as error:
        parse(**changes)
    assert str(error.value).startswith("config.json: ") and key in str(error.value)


def test_other_families_have_no_latents_and_vllm_is_refused():
    for changes in ({"latent": None}, {"architecture": "glm4_moe"}):
        with pytest.raises(UserError, match="kv_lora_rank"):
            dataclasses.replace(DEEPSEEK, **changes)
    policy = jax.eval_shape(lambda key: init_policy(DEEPSEEK, key), jax.random.key(0))
    with pytest.raises(UserError, match="rollout.engine = 'vllm': a DeepseekV3ForCausalLM has"):
        vllm = RunConfig(rollout=RolloutConfig(engine="vllm"))
        check_policy(policy, vllm)


LINEARS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


def test_its_linears_are_quantized_adapted_and_written_like_others(tmp_path):
    linears = {f"layers.{i}.{name}" for i in range(2) for name in LINEARS}
    assert linears <= set(quantized_layers(get_recipe("fp8-rl"), linear_names(DEEPSEEK)))
    assert set(LINEARS) <= set(adapted_tensors(DEEPSEEK, LoraConfig(rank=2, targets=("*",))))
    tensors = random_tensors(DEEPSEEK, np.float32)
    ahead = {"model.layers.2.eh_proj.weight": np.ones((4, 8), np.float32)}
    policy = load_policy(write_model(tmp_path / "given", DEEPSEEK, tensors | ahead))
    written = save_policy(policy, tmp_path / "written", dtype="fp8-block")
    files = dict(read_safetensors(written / "model.safetensors"))
    for name in LINEARS:
        name = f"model.layers.1.self_attn.{name}.weight"
        assert files[name].dtype == jnp.float8_e4m3fn and f"{name}_scale_inv" in files
    norms = {name for name in files if name.endswith("a_layernorm.weight")}
    assert len(norms) == 4 and all(files[name].dtype == jnp.bfloat16 for name in norms)
    again = load_policy(written)
    assert again.config == DEEPSEEK
    for name in LINEARS:
        ours, theirs = (getattr(x.stack, name).value for x in (policy, again))
        error = np.linalg.norm(ours - theirs) / np.linalg.norm(ours)
        assert 0.01 < error < 0.04


# of one kind, so that one body is compiled for both layers
SMALL = dataclasses.replace(
    DEEPSEEK, experts=dataclasses.replace(DEEPSEEK.mixture, dense_layers=())
)


def test_an_fp8_cache_keeps_the_latents_and_the_shared_key():
    policy, _ = policy_and_weights(SMALL)
    engine = LocalEngine(RECIPES["fp8-kv"], jnp.float32, unroll=False)
    scales = calibrate_on_prompts(policy, PROMPTS, engine.recipe, jnp.float32)
    assert scales is not None and scales.value.shape == (2,)
    engine.sync(policy, SyncContext(scales=scales))
    rollout = engine.generate(PROMPTS, 2, Sampling(8), jax.random.key(2))
    error = np.abs(logprobs_of_full_forwards(engine, rollout) - rollout.policy_logprobs)
    # some roundings flip
    assert (error < 1e-4).mean() > 0.8 and error.mean() < 2e-3
    cost = np.abs(trainer_logprobs(policy, rollout, "bf16") - rollout.policy_logprobs)
    assert 10 * error.mean() < cost.mean() < 0.1


def test_an_exact_rollout_in_pages_is_the_trainer_s():
    policy, _ = policy_and_weights(SMALL)
    recipe = get_recipe("jet-rl", PrecisionConfig(exact=True))
    paged = PagedConfig(slots=2, page_size=4, prefill_tokens=4)
    engine = PagedEngine(recipe, jnp.dtype(jnp.bfloat16), unroll=False, paged=paged)
    engine.sync(policy)
    rollout = engine.generate(PROMPTS, 2, Sampling(8), jax.random.key(2))
    gap = trainer_logprobs(policy, rollout, recipe, "bfloat16") - rollout.policy_logprobs
    assert not np.where(np.asarray(rollout.mask), gap, 0).any()


def test_neighbours_are_brought_half_of_what_is_rotated_apart_and_back():
    """Groups of a format that is simulated are those of the checkpoint's order."""
    tokens = jnp.ones((1, 1), jnp.int32)
    for config, order in ((DEEPSEEK, [0, 2, 4, 6, 1, 3, 5, 7]), (PLAIN, [*range(8)])):
        mixer = TransformerLayer(config, Compute(), tokens, tokens, KVCache()).mixer
        for still in (0, 16):  # the shared key, a query
            x = jnp.arange(still + 8.0)
            moved = mixer.pairs_apart(x)
            assert moved.tolist() == [*range(still), *(still + i for i in order)]
            assert (mixer.pairs_back(moved) == x).all()


@pytest.mark.parametrize("tensor", [1, 2])
def test_the_planned_cache_is_what_is_live(tensor):
    """Latents are whole on every device."""
    run = RunConfig(rollout=RolloutConfig(4, 2, 16, 24), recipe="bf16")
    sizes = {"data": 1, "fsdp": 1, "tensor": tensor, "expert": 1}
    rollout = memory_plan(DEEPSEEK, run, sizes).phases["rollout"]
    sides = (4, 16), (8, 24)
    live = [empty_cache(DEEPSEEK, *side, jnp.bfloat16, True) for side in sides]
    (planned,) = (size for key, size in rollout.items() if key.startswith("KV cache"))
    assert planned == sum(x.nbytes for x in jax.tree.leaves(live))


@pytest.mark.parametrize("config", [DEEPSEEK, PLAIN], ids=["query latents", "none"])
def test_a_comparison_finds_what_each_operation_reads_and_leaves(config):
    tokens = jnp.ones((1, 4), jnp.int32)

    def kept(key):
        layer = single_layers(init_policy(config, key))[1]
        probed = ProbedLayer(config, Compute(), tokens, tokens, KVCache())
        probed(jnp.zeros((1, 4, config.hidden_size)), layer, None, LayerInputs())
        return probed.kept

    found, attention = jax.eval_shape(kept, jax.random.key(0)), None
    for operation in operations(config, 1):
        assert {operation.output, operation.source or operation.output} <= found.keys()
        attention = operation if operation.name == "attention" else attention
    assert attention is not None and attention.tensors == ("kv_b_proj",)
    # of a query all dimensions, of the key those that heads share, and the latent
    shapes = [found[f"{name}.out"].shape for name, _ in attention.operands]
    assert shapes == [(1, 4, 4, 24), (1, 4, 1, 8), (1, 4, 1, 32)]


@pytest.mark.slow
def test_a_mesh_computes_what_one_device_does():
    found = run_on_devices(Path(__file__).with_name("on_latent_mesh.py"), 8)
    assert found["loss"] < 1e-5 and max(found["gradient"].values()) < 1e-5
    assert found["places"]["kv_b_proj"] == [None, "tensor", "fsdp"]
    assert found["places"]["kv_a_proj_with_mqa"] == [None, None, "fsdp"]
