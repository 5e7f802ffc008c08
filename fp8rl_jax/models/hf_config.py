"""Hugging Face's config.json -> PolicyConfig, and back.

Everything that would change the numbers is either represented or refused by name: a key that we do not implement (another
rope type, biases elsewhere, a window where there should be none) must never be dropped, because the model would still run
and answer slightly wrong log-probabilities.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fp8rl_jax.errors import UserError
from fp8rl_jax.models.block_fp8 import parse_quantization
from fp8rl_jax.models.config import (
    DEFAULT_RMS_NORM_EPS,
    DEFAULT_ROPE_THETA,
    HF_CLASS,
    ExpertsConfig,
    Llama3RopeScaling,
    PolicyConfig,
    check_count,
)
from fp8rl_jax.models.hf_json import Fields

# What transformers assumes when config.json leaves a key out.
_DEFAULT_MAX_POSITIONS = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768, "qwen3_moe": 32768}
_DEFAULT_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32, "qwen3_moe": 4}  # llama: num_attention_heads
_DEFAULT_SLIDING_WINDOW = 4096
_DEFAULT_MAX_WINDOW_LAYERS = 28
_QWEN3_HEAD_DIM = 128

_FULL, _SLIDING = "full_attention", "sliding_attention"


def parse(config: dict[str, Any], generation_config: dict[str, Any]) -> PolicyConfig:
    """See `PolicyConfig.from_hf`.

    Raises:
        UserError: naming the key.
    """
    fields, generation = Fields(config), Fields(generation_config)
    architecture = _architecture(config)
    _refuse_unimplemented(fields)
    hidden_size, num_layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    check_count("num_hidden_layers", num_layers)
    num_heads = fields.integer("num_attention_heads")
    # an absent key is the architecture's default, a null means one for each query head
    default_kv_heads = num_heads if "num_key_value_heads" in config else _DEFAULT_KV_HEADS.get(architecture, num_heads)
    head_dim = fields.integer("head_dim", default=_QWEN3_HEAD_DIM if architecture == "qwen3" else None)
    if head_dim is None:
        if num_heads < 1 or hidden_size % num_heads:
            raise UserError(f"hidden_size ({hidden_size}) must be a multiple of num_attention_heads ({num_heads})")
        head_dim = hidden_size // num_heads
    rope_theta, rope_scaling = _rope(fields)
    sliding_window, full_attention_layers = _window(fields, architecture, num_layers)
    eos_token_ids = fields.integers("eos_token_id") + generation.integers("eos_token_id")
    return PolicyConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", default=default_kv_heads),
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", default=DEFAULT_RMS_NORM_EPS),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=fields.boolean("tie_word_embeddings"),
        max_position_embeddings=fields.integer("max_position_embeddings", default=_DEFAULT_MAX_POSITIONS[architecture]),
        bos_token_id=fields.integer("bos_token_id", default=None),
        eos_token_ids=tuple(dict.fromkeys(eos_token_ids)),
        pad_token_id=fields.integer("pad_token_id", default=generation.integer("pad_token_id", default=None)),
        sliding_window=sliding_window,
        full_attention_layers=full_attention_layers,
        experts=_experts(fields, num_layers) if architecture == "qwen3_moe" else None,
    )


def unparse(config: PolicyConfig, dtype: str) -> dict[str, Any]:
    """See `PolicyConfig.to_hf`."""
    rope_scaling = None
    if config.rope_scaling is not None:
        rope_scaling = {"rope_type": "llama3", **dataclasses.asdict(config.rope_scaling)}
    eos = list(config.eos_token_ids)
    return {
        "architectures": [HF_CLASS[config.architecture]],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        **_architecture_keys(config),
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope_scaling,
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else (eos or None),
        "pad_token_id": config.pad_token_id,
        "torch_dtype": dtype,
        "use_cache": True,
    }


def _architecture_keys(config: PolicyConfig) -> dict[str, Any]:
    """The keys that only some of the architectures have."""
    keys: dict[str, Any] = {} if config.qkv_bias or config.architecture == "mistral" else {"attention_bias": False}
    if config.architecture == "llama":
        return keys | {"mlp_bias": False}
    keys["sliding_window"] = config.sliding_window
    if config.architecture == "mistral":
        return keys
    keys["use_sliding_window"] = config.sliding_window is not None
    if config.experts is not None:
        return keys | {
            "num_experts": config.experts.count,
            "num_experts_per_tok": config.experts.per_token,
            "moe_intermediate_size": config.experts.intermediate_size,
            "norm_topk_prob": config.experts.normalize,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(config.dense_layers),
        }
    full = config.full_attention_layers if config.sliding_window is not None else range(config.num_layers)
    return keys | {
        "max_window_layers": len(full),
        "layer_types": [_FULL if i in full else _SLIDING for i in range(config.num_layers)],
    }


def _architecture(config: dict[str, Any]) -> str:
    model_type = config.get("model_type")
    names = config.get("architectures") or [HF_CLASS.get(str(model_type))]
    if not isinstance(names, list) or len(names) != 1 or names[0] not in HF_CLASS.values():
        raise UserError(
            f"architectures {names} (model_type {model_type!r}) is not supported; "
            f"supported: {', '.join(HF_CLASS.values())}"
        )
    return next(architecture for architecture, name in HF_CLASS.items() if name == names[0])


def _refuse_unimplemented(fields: Fields) -> None:
    config = fields.data
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"hidden_act {config['hidden_act']!r} is not supported; only 'silu' is")
    for key in ("attention_bias", "mlp_bias"):
        if fields.boolean(key):
            raise UserError(f"{key} true is not supported; the only biases are those of Qwen2's q, k and v")
    parse_quantization(config)  # how the weights are stored is the loader's; a form that it doesn't read is refused here


def _window(fields: Fields, architecture: str, num_layers: int) -> tuple[int | None, tuple[int, ...]]:
    """(sliding_window, full_attention_layers), by the rules of the architecture's class in transformers."""
    types = fields.data.get("layer_types")
    if types is not None and (not isinstance(types, list) or not set(types) <= {_FULL, _SLIDING}):
        raise UserError(f"layer_types {types} is not supported; it must list {_FULL} and {_SLIDING}")
    if architecture == "mistral":  # an absent key is the default, a null turns the window off
        window = fields.integer("sliding_window", default=None if "sliding_window" in fields.data else _DEFAULT_SLIDING_WINDOW)
    elif fields.boolean("use_sliding_window", default=architecture == "llama"):
        window = fields.integer("sliding_window", default=None if architecture == "llama" else _DEFAULT_SLIDING_WINDOW)
    else:
        window = None
    if architecture == "llama" and window is not None:
        raise UserError(f"sliding_window {window} is not supported; every layer of a llama must attend fully")
    if architecture in ("qwen2", "qwen3") and window is not None:
        if types is None:
            first = fields.integer("max_window_layers", default=_DEFAULT_MAX_WINDOW_LAYERS)
            types = [_FULL if i < first else _SLIDING for i in range(num_layers)]
        if len(types) != num_layers:
            raise UserError(f"layer_types has {len(types)} entries for {num_layers} layers")
        full = tuple(i for i, kind in enumerate(types) if kind == _FULL)
        return (None, ()) if len(full) == num_layers else (window, full)
    kind = _FULL if window is None else _SLIDING
    if other := sorted(set(types or ()) - {kind}):
        raise UserError(f"layer_types holds {', '.join(other)}, but the other keys make every layer {kind}")
    return window, ()


def _experts(fields: Fields, num_layers: int) -> ExpertsConfig:
    # transformers 5 writes num_local_experts
    count = fields.integer("num_experts", default=fields.integer("num_local_experts", default=None))
    if count is None:
        raise UserError("num_experts is missing")
    step = fields.integer("decoder_sparse_step", default=1)
    if step < 1:
        raise UserError(f"decoder_sparse_step must be positive, got {step}")
    dense = fields.integers("mlp_only_layers")
    return ExpertsConfig(
        count=count,
        per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        normalize=fields.boolean("norm_topk_prob"),
        dense_layers=tuple(i for i in range(num_layers) if i in dense or (i + 1) % step),
    )


def _rope(fields: Fields) -> tuple[float, Llama3RopeScaling | None]:
    """Reads either spelling: `rope_theta` beside `rope_scaling`, or `rope_parameters` with both inside."""
    key = "rope_parameters" if fields.data.get("rope_parameters") is not None else "rope_scaling"
    rope = fields.object(key)
    if nested := [name for name, value in rope.data.items() if isinstance(value, dict)]:
        raise UserError(f"{key}.{nested[0]}: rotary positions that differ by kind of layer are not supported")
    outer, inner = fields.number("rope_theta", default=None), rope.number("rope_theta", default=None)
    if outer is not None and inner is not None and outer != inner:
        raise UserError(f"rope_theta {outer} contradicts {key}.rope_theta {inner}")
    theta = next((value for value in (inner, outer) if value is not None), DEFAULT_ROPE_THETA)
    for part in (fields, rope):
        if (fraction := part.number("partial_rotary_factor", default=1.0)) != 1.0:
            raise UserError(f"{part.prefix}partial_rotary_factor {fraction} is not supported; only 1.0 is")
    kind = rope.data.get("rope_type", rope.data.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UserError(f"{key}.rope_type {kind!r} is not supported; supported: 'default', 'llama3'")
    return theta, Llama3RopeScaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
    )
