"""What transformers makes of configurations: every key of every family absent, null, at its default
and at another value, and facts that two places state.

    python tests/weights/config_answers.py > tests/weights/config_answers.json

needs torch and transformers (the environment of `make peers`). Each row is built as a model, which
is then asked; a row that transformers refuses or that fails when it is built has no answer.
"""

from __future__ import annotations

import copy
import json
import logging

ABSENT = "absent"
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
FAMILIES = {
    "llama": ("LlamaForCausalLM", SIZES),
    "mistral": ("MistralForCausalLM", SIZES),
    "qwen2": ("Qwen2ForCausalLM", SIZES),
    "qwen3": ("Qwen3ForCausalLM", SIZES | {"head_dim": 8}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", SIZES | MOE | {"num_experts": 8}),
    "gemma3_text": ("Gemma3ForCausalLM", SIZES | {"head_dim": 8, "sliding_window_pattern": 2}),
    "glm4_moe": ("Glm4MoeForCausalLM", SIZES | MOE | {"n_routed_experts": 8, "head_dim": 8}),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        SIZES
        | {"num_key_value_heads": 4, "n_routed_experts": 16, "n_group": 4, "topk_group": 2}
        | MOE
        | LATENT,
    ),
}
WALK = {
    "num_key_value_heads": (4, 1),
    "head_dim": (8, 16, 128, 256),
    "hidden_act": ("silu", "gelu"),
    "hidden_activation": ("gelu_pytorch_tanh", "gelu"),
    "rms_norm_eps": (1e-6, 1e-5),
    "tie_word_embeddings": (False, True),
    "max_position_embeddings": (2048, 32768, 131072),
    "attention_bias": (False, True),
    "mlp_bias": (False, True),
    "rope_theta": (10000.0, 1e6),
    "rope_local_base_freq": (10000.0, 500.0),
    "rope_scaling": (
        {},
        {"rope_type": "default"},
        {"type": "linear", "factor": 4.0},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 4, "beta_slow": 0.5, "truncate": False},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5, "beta_fast": None},
        {"rope_type": "yarn", "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.0},
        {"rope_type": "yarn", "factor": 8.0, "mscale": 0.7},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
        {"rope_type": None, "factor": 4.0},
        {"type": "yarn", "rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
    ),
    "rope_parameters": (
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "default", "rope_theta": 5000.0},
        {"rope_theta": 5000.0},
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
        {"full_attention": {"rope_theta": 5000.0}},
        {"full_attention": None, "sliding_attention": {"rope_theta": 300.0}},
    ),
    "partial_rotary_factor": (1.0, 0.5, 0.25),
    "sliding_window": (4096, 3),
    "use_sliding_window": (False, True),
    "max_window_layers": (28, 0, 2),
    "sliding_window_pattern": (6, 2),
    "layer_types": (
        ["full_attention"] * 4,
        ["sliding_attention"] * 4,
        ["full_attention", "sliding_attention"] * 2,
    ),
    "query_pre_attn_scalar": (256, 16),
    "attn_logit_softcapping": (50.0,),
    "final_logit_softcapping": (30.0,),
    "use_bidirectional_attention": (False, True),
    "use_qk_norm": (False, True),
    "bos_token_id": (1, 7),
    "eos_token_id": (2, 7, [7, 8]),
    "pad_token_id": (0, 7),
    "num_experts": (8, 4),
    "num_local_experts": (8, 4),
    "n_routed_experts": (8, 4),
    "norm_topk_prob": (False, True),
    "decoder_sparse_step": (1, 2),
    "mlp_only_layers": ([], [1]),
    "first_k_dense_replace": (1, 0, 2),
    "n_group": (1, 4),
    "topk_group": (1, 2),
    "n_shared_experts": (1, 2),
    "routed_scaling_factor": (1.0, 2.5),
    "num_nextn_predict_layers": (0, 1),
    "original_max_position_embeddings": (64,),
    "q_lora_rank": (12, 20),
    "kv_lora_rank": (16, 24),
    "qk_rope_head_dim": (4, 6),
    "v_head_dim": (6, 10),
    "rope_interleave": (True, False),
}
YARN = {"rope_type": "yarn", "factor": 4.0}
TOGETHER = (
    {
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    {
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    },
    {
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "rope_parameters": {"rope_type": "linear", "factor": 2.0},
    },
    {"rope_scaling": None, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    {"rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    {"rope_theta": 300.0, "rope_parameters": {"rope_theta": 5000.0}},
    {"rope_theta": 300.0, "rope_parameters": {"rope_type": "default"}},
    {"rope_theta": 300.0, "rope_scaling": YARN | {"original_max_position_embeddings": 64}},
    {"rope_scaling": YARN, "original_max_position_embeddings": 64},
    {
        "rope_scaling": YARN | {"original_max_position_embeddings": 32},
        "original_max_position_embeddings": 64,
    },
    {"partial_rotary_factor": 0.25, "rope_parameters": {"partial_rotary_factor": 0.5}},
    {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
    {"use_sliding_window": True, "sliding_window": 3},
    {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2},
    {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 2},
    {"use_sliding_window": False, "sliding_window": 3, "max_window_layers": 0},
    {
        "use_sliding_window": True,
        "sliding_window": 3,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
    {"num_experts": ABSENT, "num_local_experts": 8},
    {"num_experts": 8, "num_local_experts": 4},
    {"n_routed_experts": ABSENT, "num_local_experts": 8},
    {"n_group": 4, "topk_group": 2},
    {"decoder_sparse_step": 2, "mlp_only_layers": [1]},
    {"rope_scaling": {"factor": 4.0, "rope_type": "linear"}, "rope_local_base_freq": 500.0},
)


def rows():
    """(family, changes) of every row; the change to a key that a family does not have is one,
    too."""
    for family in FAMILIES:
        yield family, {}
        for key, values in WALK.items():
            for value in (ABSENT, None, *values):
                yield family, {key: value}
        for changes in TOGETHER:
            yield family, dict(changes)


def config_of(family: str, changes: dict) -> dict:
    """The config.json of a row."""
    name, sizes = FAMILIES[family]
    given = {"architectures": [name], "model_type": family, **sizes, **changes}
    return {key: value for key, value in given.items() if value != ABSENT}


def answer(family: str, changes: dict) -> dict | None:
    """What a model of the row is; None where there is none."""
    import transformers

    given = copy.deepcopy(config_of(family, changes))
    model_class = getattr(transformers, given["architectures"][0])
    try:
        config = model_class.config_class(**given)
        if config.tie_word_embeddings is None:
            return None
        model = model_class(config)
        return facts(model, model.config)
    except Exception:  # whatever a class makes of a bad value
        return None


def facts(model, config) -> dict:
    """What can be seen of a model."""
    layers = model.model.layers
    attention = layers[0].self_attn
    rope = model.model.rotary_emb
    experts = next((layer.mlp for layer in layers if hasattr(layer.mlp, "experts")), None)
    latent = hasattr(attention, "kv_lora_rank")
    if latent:
        attention.head_dim = attention.qk_head_dim
    kv_width = config.num_key_value_heads * attention.head_dim
    kv_width = kv_width if latent else attention.k_proj.out_features
    found = {
        "head_dim": attention.head_dim,
        "kv_heads": kv_width // attention.head_dim,
        "bias": (attention.kv_a_proj_with_mqa if latent else attention.q_proj).bias is not None,
        "other_biases": attention.o_proj.bias is not None
        or any("mlp" in name and name.endswith("proj.bias") for name in model.state_dict()),
        "qk_norm": hasattr(attention, "q_norm"),
        "activation": type((layers[0].mlp if experts is None else experts.experts).act_fn).__name__,
        "eps": getattr(layers[0].input_layernorm, "variance_epsilon", None)
        or layers[0].input_layernorm.eps,
        "score_scale": float(attention.scaling),
        "tied": config.tie_word_embeddings,
        "positions": config.max_position_embeddings,
        "windows": [
            config.sliding_window
            if config.model_type == "mistral"  # which has it in the model's mask alone
            else getattr(layer.self_attn, "sliding_window", None)
            for layer in layers
        ],
        "softcapping": [
            getattr(config, f"{name}_logit_softcapping", None) for name in ("attn", "final")
        ],
        "causal": attention.is_causal,
        "special": [config.bos_token_id, config.eos_token_id, config.pad_token_id],
        "rope": {},
    }
    for kind in sorted(set(getattr(rope, "layer_types", None) or [""])):
        prefix = f"{kind}_" if kind else ""
        found["rope"][kind or "full_attention"] = [
            float(getattr(rope, f"{prefix}attention_scaling")),
            [float(f"{x:.8g}") for x in getattr(rope, f"{prefix}inv_freq").tolist()],
        ]
    if latent:
        found["latent"] = [
            attention.kv_lora_rank,
            attention.qk_rope_head_dim,
            attention.v_head_dim,
            attention.q_lora_rank,
            config.rope_interleave,
        ]
    if experts is not None:
        router = experts.gate
        found["experts"] = {
            "layers": [hasattr(layer.mlp, "experts") for layer in layers],
            "count": router.num_experts,
            "per_token": router.top_k,
            "normalize": router.norm_topk_prob,
            "groups": [getattr(router, "num_group", 1), getattr(router, "topk_group", 1)],
            "scale": float(getattr(router, "routed_scaling_factor", 1.0)),
            "shared": config.n_shared_experts if hasattr(experts, "shared_experts") else 0,
        }
    return found


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    known: dict = {}
    for family, changes in rows():
        found = answer(family, changes)
        if found is not None:
            base = known.setdefault(family, found)
            found = base if not changes else {k: v for k, v in found.items() if v != base.get(k)}
        lines = json.dumps([family, changes, found], separators=(",", ":"))
        print(f"{'[' if family == 'llama' and not changes else ','}{lines}")
    print("]")
