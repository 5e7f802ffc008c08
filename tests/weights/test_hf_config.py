from __future__ import annotations

import dataclasses
import json

import pytest
from tiny_models import LLAMA, QWEN3
from tiny_models import MISTRAL as TINY_MISTRAL
from tiny_models import MOE as TINY_MOE
from tiny_models import QWEN2 as TINY_QWEN2

from fp8rl_jax.errors import UserError
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.rope import Llama3RopeScaling
from fp8rl_jax.weights.hf_config import config_json, parse_config, read_policy_config

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
WINDOW = {"use_sliding_window": True, "sliding_window": 16}
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
SOURCE = "some/dir/config.json"


def parse(generation=None, **changes):
    return parse_config(
        {k: v for k, v in (BASE | changes).items() if v != "absent"}, SOURCE, generation
    )


def test_reads_every_field():
    config = parse(head_dim=64, bos_token_id=1, pad_token_id=0, tie_word_embeddings=True)
    assert config == PolicyConfig(
        architecture="llama",
        vocab_size=128,
        hidden_size=192,
        intermediate_size=320,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=None,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_ids=(2,),
        pad_token_id=0,
    )
    assert (config.q_size, config.kv_size, config.family.qk_norm) == (384, 128, False)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_scaling": {"type": "llama3", **LLAMA3}},
        {
            "rope_theta": "absent",
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3},
        },
        {
            "rope_scaling": None,
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3},
        },
    ],
)
def test_both_spellings_of_rope_are_the_same_model(rope):
    config = parse(**rope)
    assert config.rope_theta == 500000.0
    assert config.rope_scaling == Llama3RopeScaling(8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": None},
        {"rope_scaling": {"rope_type": "default"}},
        {"rope_theta": "absent", "rope_parameters": {"rope_type": "default", "rope_theta": 500000}},
    ],
)
def test_default_rope(rope):
    config = parse(**rope)
    assert config.rope_theta == 500000.0 and config.rope_scaling is None


@pytest.mark.parametrize(
    ("other", "usual"),
    [
        ({"architectures": ["FSDPLlamaForCausalLM"]}, {}),
        ({"architectures": ["LLaMAForCausalLM"]}, {}),
        ({"architectures": []}, {}),
        ({"hidden_act": "swish"}, {}),
        ({"pad_token_id": -1}, {"pad_token_id": None}),
        ({"quantization_config": {}}, {}),
    ],
)
def test_other_spellings_are_the_same_model(other, usual):
    assert parse(**other) == parse(**usual)


def test_a_wrong_value_of_generation_config_is_named_there():
    with pytest.raises(UserError, match=r"generation_config.json: pad_token_id must be an integer"):
        parse({"pad_token_id": [0]})


def test_defaults_are_those_of_transformers():
    config = parse(
        num_key_value_heads="absent",
        rms_norm_eps="absent",
        rope_theta="absent",
        max_position_embeddings="absent",
        eos_token_id="absent",
    )
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (6, 32, 1e-6)
    assert (config.rope_theta, config.max_position_embeddings) == (10000.0, 2048)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert parse(eos_token_id=None).eos_token_ids == ()
    qwen = parse(
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", max_position_embeddings="absent"
    )
    assert (qwen.head_dim, qwen.max_position_embeddings, qwen.family.qk_norm) == (128, 32768, True)


def test_model_type_stands_in_for_architectures():
    assert parse(architectures="absent", model_type="qwen3").architecture == "qwen3"


def test_end_tokens_are_merged_in_order():
    assert parse(eos_token_id=[9, 2]).eos_token_ids == (9, 2)
    assert parse(generation={"eos_token_id": [2, 7], "pad_token_id": 5}).eos_token_ids == (2, 7)
    assert parse(generation={"pad_token_id": 5}).pad_token_id == 5
    assert parse(generation={"pad_token_id": 5}, pad_token_id=0).pad_token_id == 0


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures"),
        ({"architectures": "absent", "model_type": "mamba"}, "model_type"),
        ({"architectures": "absent", "model_type": "absent"}, "architectures"),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
            "rope_scaling.rope_type 'longrope'",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "rope_scaling.low_freq_factor is missing",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 0.5}},
            "high_freq_factor",
        ),
        ({"rope_parameters": {"rope_theta": 10000.0}}, "contradicts"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters.factor is missing"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 5e5}}},
            "rope_parameters.full_attention",
        ),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"sliding_window": 4096, "use_sliding_window": True}, "sliding_window"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types holds sliding_attention",
        ),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
        (MISTRAL | {"sliding_window": 0}, "sliding_window must be positive"),
        (MISTRAL | {"layer_types": ["full_attention"] * 2}, "layer_types holds full_attention"),
        (
            QWEN2 | {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types holds sliding_attention",
        ),
        (
            QWEN2 | WINDOW | {"layer_types": ["sliding_attention"]},
            "layer_types has 1 entries for 2 layers",
        ),
        (MOE | {"num_experts": "absent"}, "num_experts is missing"),
        (
            MOE | {"num_experts_per_tok": 9},
            "num_experts_per_tok (9) must be from 1 to num_experts (8)",
        ),
        (MOE | {"moe_intermediate_size": 0}, "moe_intermediate_size"),
        (MOE | {"mlp_only_layers": [0, 1]}, "mlp_only_layers: all layers"),
        (MOE | {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"hidden_size": "absent"}, "hidden_size is missing"),
        ({"hidden_size": "192"}, "hidden_size must be an integer"),
        ({"hidden_size": 190}, "multiple of num_attention_heads"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be positive"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"head_dim": 31}, "head_dim"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"eos_token_id": "2"}, "eos_token_id"),
        ({"eos_token_id": 128}, "eos_token_id 128 is outside"),
        ({"pad_token_id": -2}, "pad_token_id -2"),
    ],
)
def test_refusals_name_the_file_and_the_key(changes, key):
    with pytest.raises(UserError) as error:
        parse(**changes)
    assert str(error.value).startswith(SOURCE)
    assert key in str(error.value)
    assert "\n" not in str(error.value)


def test_windows_follow_the_rules_of_each_architecture():
    assert parse(**MISTRAL).windows == (4096, 4096)  # transformers' default
    assert parse(**MISTRAL, sliding_window=None).windows is None
    assert parse(**QWEN2, sliding_window=16).windows is None
    assert parse(**QWEN2, **WINDOW).windows is None  # max_window_layers is 28 where it is absent
    assert parse(**QWEN2, **WINDOW, max_window_layers=0).windows == (16, 16)
    mixed = parse(**QWEN2, **WINDOW, max_window_layers=1)
    assert mixed == parse(**QWEN2, **WINDOW, layer_types=["full_attention", "sliding_attention"])
    assert mixed.windows[0] > 2**30 and mixed.windows[1] == 16 and mixed.family.qkv_bias
    assert parse(**MOE, **WINDOW).windows == (16, 16)


def test_which_layers_have_experts():
    four = {**MOE, "num_hidden_layers": 4}
    assert parse(**four).sparse_layers == (0, 1, 2, 3) and not parse(**four).experts.normalize
    assert parse(**four, decoder_sparse_step=2).sparse_layers == (1, 3)
    assert parse(**four, decoder_sparse_step=2, mlp_only_layers=[3]).sparse_layers == (1,)
    assert parse(**four, mlp_only_layers=[1], norm_topk_prob=True).dense_layers == (1,)
    renamed = {k: v for k, v in four.items() if k != "num_experts"} | {"num_local_experts": 8}
    assert parse(**renamed) == parse(**four)
    assert parse().sparse_layers == () and parse().dense_layers == (0, 1)


def test_shapes_that_no_checkpoint_could_hold_are_refused():
    for changes in (
        {"architecture": "llama", "sliding_window": 8},
        {"full_attention_layers": (0,)},
        {"experts": TINY_MOE.experts},
        {"architecture": "qwen3_moe"},
    ):
        with pytest.raises(UserError):
            dataclasses.replace(QWEN3, **changes)


def test_an_unused_sliding_window_is_no_obstacle():
    assert parse(sliding_window=4096, use_sliding_window=False, layer_types=["full_attention"] * 2)


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        QWEN3,
        dataclasses.replace(
            LLAMA, rope_scaling=Llama3RopeScaling(32.0, 1.0, 4.0, 8192), bos_token_id=1
        ),
        dataclasses.replace(QWEN3, eos_token_ids=(3, 5), pad_token_id=3, rope_theta=1e6),
        TINY_MISTRAL,
        dataclasses.replace(TINY_MISTRAL, sliding_window=None),
        TINY_QWEN2,
        dataclasses.replace(TINY_QWEN2, sliding_window=8, full_attention_layers=(1,)),
        TINY_MOE,
        dataclasses.replace(TINY_MOE, sliding_window=8),
    ],
)
def test_config_json_round_trips(config):
    assert parse_config(json.loads(json.dumps(config_json(config))), SOURCE) == config


def test_directory_faults(tmp_path):
    with pytest.raises(UserError, match="config.json: not found"):
        read_policy_config(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": ')
    with pytest.raises(UserError, match="config.json: not valid JSON"):
        read_policy_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(UserError, match="config.json: expected a JSON object"):
        read_policy_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    assert read_policy_config(tmp_path).eos_token_ids == (2, 3)
