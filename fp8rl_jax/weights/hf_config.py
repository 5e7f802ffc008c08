"""Hugging Face's config.json -> PolicyConfig, and back.

Everything that would change the numbers is either represented or refused by name: a key that we do
not implement (another rope type, biases elsewhere, a window where there should be none) must never
be dropped, because the model would still run and answer slightly wrong log-probabilities.

Rotary positions come in two spellings. transformers 4 has rope_theta beside rope_scaling, and
Gemma 3 has rope_local_base_freq for its layers with a window. transformers 5 has rope_parameters
with both inside, and Gemma 3 one such object for each kind of layer.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from fp8rl_jax.errors import UserError
from fp8rl_jax.json_fields import Fields, read_json
from fp8rl_jax.models.config import (
    DEFAULT_ROPE_THETA,
    ExpertsConfig,
    LatentConfig,
    PolicyConfig,
    check_count,
)
from fp8rl_jax.models.families import FAMILIES, Family
from fp8rl_jax.models.rope import ROPE_SCALINGS, Llama3RopeScaling, RopeScaling, YarnRopeScaling
from fp8rl_jax.weights.layouts import parse_quantization

_FULL, _SLIDING = "full_attention", "sliding_attention"
# What transformers assumes when config.json leaves a key out.
_GEMMA_THETA, _GEMMA_LOCAL_THETA = 1e6, 1e4
_DEFAULT_SLIDING_WINDOW = 4096
_DEFAULT_MAX_WINDOW_LAYERS = 28
_DEFAULT_QUERY_PRE_ATTN_SCALAR = 256
_OTHER_NAMES = {"silu": ("swish",)}
"""Of an activation."""
_ROUTING_KEYS = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
"""What DeepSeek-V3's routing is called: vLLM reads it, transformers has nothing else."""
_NO_NULLS = ("head_dim", "norm_topk_prob", "n_group", "topk_group", "rope_interleave")
"""Keys of which transformers' DeepSeek-V3 takes a null for another value than an absent one."""


def read_policy_config(directory: str | Path) -> PolicyConfig:
    """Read config.json, and generation_config.json where it is there, of a Hugging Face directory.

    Raises:
        UserError: a missing or malformed file, or whatever `parse_config` refuses.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise UserError(f"{path}: not found; a Hugging Face model directory needs a config.json")
    generation = Path(directory) / "generation_config.json"
    return parse_config(
        read_json(path), path, read_json(generation) if generation.is_file() else None
    )


def parse_config(
    config: dict[str, Any],
    source: str | Path,
    generation_config: dict[str, Any] | None = None,
) -> PolicyConfig:
    """Parse the values of a config.json, in the spelling of transformers 4 or 5.

    Args:
        config: what config.json holds.
        source: the file that it came from, for error messages.
        generation_config: what generation_config.json holds; its end-of-sequence tokens are added
            to config's.

    Raises:
        UserError: naming `source` and the key that is missing, malformed, or not implemented.
    """
    try:
        return _parse(config, generation_config or {})
    except UserError as error:
        raise UserError(f"{source}: {error}") from None


def _parse(config: dict[str, Any], generation_config: dict[str, Any]) -> PolicyConfig:
    fields, generation = Fields(config), Fields(generation_config, "generation_config.json: ")
    architecture = _architecture(config)
    family = FAMILIES[architecture]
    _refuse_unimplemented(fields, family)
    hidden_size, num_layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    check_count("num_hidden_layers", num_layers)
    num_heads = fields.integer("num_attention_heads")
    # an absent key is the architecture's default, a null means one for each query head
    default_kv_heads = (
        num_heads if "num_key_value_heads" in config else family.kv_heads or num_heads
    )
    latent = _latent(fields) if family.latent else None
    head_dim = fields.integer("head_dim", default=family.head_dim)
    if latent is not None:
        head_dim = _latent_head_dim(fields, latent, head_dim)
    if head_dim is None:
        if num_heads < 1 or hidden_size % num_heads:
            raise UserError(
                f"hidden_size ({hidden_size}) must be a multiple of num_attention_heads "
                f"({num_heads})"
            )
        head_dim = hidden_size // num_heads
    positions = fields.integer("max_position_embeddings", default=family.max_positions)
    rope_theta, rope_scaling, local_rope_theta = (
        _rope_by_kind(fields, family, positions)
        if family.local_rope
        else (*_rope(fields, family, positions), None)
    )
    sliding_window, full_attention_layers = _window(fields, family, num_layers)
    bos, eos, pad = _special_tokens(fields, family)
    return PolicyConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", default=default_kv_heads),
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", default=family.norm_eps),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=family.tied),
        max_position_embeddings=positions,
        bos_token_id=bos,
        eos_token_ids=tuple(dict.fromkeys(eos + generation.integers("eos_token_id"))),
        pad_token_id=_pad(generation, default=None) if pad is None else pad,
        sliding_window=sliding_window,
        full_attention_layers=full_attention_layers,
        experts=None if family.routing is None else _experts(fields, family, num_layers),
        query_pre_attn_scalar=fields.integer(
            "query_pre_attn_scalar", default=_DEFAULT_QUERY_PRE_ATTN_SCALAR
        )
        if family.query_scalar
        else None,
        local_rope_theta=None if sliding_window is None else local_rope_theta,
        partial_rotary_factor=_rotary_factor(fields, family),
        **{
            key: fields.boolean(key)
            for key in ("attention_bias", "use_qk_norm")
            if key in family.options
        },
        latent=latent,
    )


def _latent(fields: Fields) -> LatentConfig:
    if "q_lora_rank" not in fields.data:
        raise UserError("q_lora_rank is missing; null says that queries are made without latents")
    return LatentConfig(
        rank=fields.integer("kv_lora_rank"),
        rotary_dim=fields.integer("qk_rope_head_dim"),
        value_dim=fields.integer("v_head_dim"),
        query_rank=fields.integer("q_lora_rank", default=None),
        interleaved=fields.boolean("rope_interleave", default=True),
    )


def _latent_head_dim(fields: Fields, latent: LatentConfig, given: int | None) -> int:
    """Dimensions of a query; by head_dim transformers means those of it that are rotated."""
    if given not in (None, latent.rotary_dim):
        raise UserError(
            f"head_dim {given} contradicts qk_rope_head_dim {latent.rotary_dim}; leave it out"
        )
    return fields.integer("qk_nope_head_dim") + latent.rotary_dim


def _special_tokens(
    fields: Fields, family: Family
) -> tuple[int | None, tuple[int, ...], int | None]:
    """bos, eos and pad; an absent key is the family's, a null means that there is none."""
    bos, eos, pad = (
        None if key in fields.data else token
        for key, token in zip(
            ("bos_token_id", "eos_token_id", "pad_token_id"), family.special_tokens, strict=True
        )
    )
    return (
        fields.integer("bos_token_id", default=bos),
        fields.integers("eos_token_id") if eos is None else (eos,),
        _pad(fields, default=pad),
    )


def _pad(fields: Fields, default: int | None) -> int | None:
    """pad_token_id; -1 is older files' way to say that there is none."""
    pad = fields.integer("pad_token_id", default=default)
    return None if pad == -1 else pad


def config_json(config: PolicyConfig, dtype: str = "bfloat16") -> dict[str, Any]:
    """Return the values of a config.json that transformers 4 and 5 both read.

    Args:
        config: what to write.
        dtype: name of the weights' dtype.
    """
    eos = list(config.eos_token_ids)
    return {
        "architectures": [config.family.hf_class],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "attention_dropout": 0.0,
        **_architecture_keys(config),
        "rms_norm_eps": config.rms_norm_eps,
        **_rope_keys(config),
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
    family = config.family
    keys: dict[str, Any] = {family.activation_key: family.activation}
    if "attention_bias" in family.options or not family.qkv_bias:
        keys["attention_bias"] = config.qkv_bias
    if "use_qk_norm" in family.options:
        keys["use_qk_norm"] = config.qk_norm
    if "partial_rotary_factor" in family.options:
        keys["partial_rotary_factor"] = config.partial_rotary_factor
    if (latent := config.latent) is None:
        keys["head_dim"] = config.head_dim
    else:
        keys |= {
            "q_lora_rank": latent.query_rank,
            "kv_lora_rank": latent.rank,
            "qk_nope_head_dim": config.head_dim - latent.rotary_dim,
            "qk_rope_head_dim": latent.rotary_dim,
            "v_head_dim": latent.value_dim,
            "rope_interleave": latent.interleaved,
            **_ROUTING_KEYS,
        }
    if config.experts is not None:
        keys |= _expert_keys(config.experts, config.dense_layers)
    if family.window == "none":
        return keys
    full = (
        config.full_attention_layers
        if config.sliding_window is not None
        else range(config.num_layers)
    )
    keys["sliding_window"] = config.sliding_window
    if family.window_switch:
        keys["use_sliding_window"] = config.sliding_window is not None
    if family.window == "some":
        keys["layer_types"] = [_FULL if i in full else _SLIDING for i in range(config.num_layers)]
        if family.window_pattern is None:
            keys["max_window_layers"] = len(full)
        elif config.sliding_window is None:
            # transformers wants a window even where no layer uses it
            keys["sliding_window"] = _DEFAULT_SLIDING_WINDOW
    if family.query_scalar:
        keys["query_pre_attn_scalar"] = config.query_pre_attn_scalar
    return keys


def _expert_keys(experts: ExpertsConfig, dense_layers: tuple[int, ...]) -> dict[str, Any]:
    keys = {
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.normalize,
    }
    if experts.scoring == "softmax":
        return keys | {
            "num_experts": experts.count,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(dense_layers),
        }
    return keys | {
        "n_routed_experts": experts.count,
        "n_shared_experts": experts.shared,
        "n_group": experts.groups,
        "topk_group": experts.groups_per_token,
        "routed_scaling_factor": experts.scale,
        "first_k_dense_replace": len(dense_layers),
        "num_nextn_predict_layers": 0,
    }


def _architecture(config: dict[str, Any]) -> str:
    model_type = config.get("model_type")
    classes = {family.hf_class: architecture for architecture, family in FAMILIES.items()}
    types = {other: name for name, family in FAMILIES.items() for other in family.other_types}
    model_type = types.get(str(model_type), model_type)
    by_type = FAMILIES.get(str(model_type))
    names = config.get("architectures") or [by_type and by_type.hf_class]
    if isinstance(names, list) and names:
        # as verl saves a model, and as the first converters named LLaMA
        plain = str(names[0]).removeprefix("FSDP").replace("LLaMA", "Llama")
        names = [plain if plain in classes else names[0], *names[1:]]
    if not isinstance(names, list) or len(names) != 1 or names[0] not in [*classes]:
        raise UserError(
            f"architectures {names} (model_type {model_type!r}) is not supported; "
            f"supported: {', '.join(classes)}"
        )
    if model_type is not None and model_type != classes[names[0]]:
        raise UserError(
            f"architectures {names} and model_type {model_type!r} contradict each other: "
            f"{names[0]} has {classes[names[0]]!r}"
        )
    return classes[names[0]]


def _refuse_unimplemented(fields: Fields, family: Family) -> None:
    config, key, activation = fields.data, family.activation_key, family.activation
    if config.get(key, activation) not in (activation, *_OTHER_NAMES.get(activation, ())):
        raise UserError(f"{key} {config[key]!r} is not supported; only {activation!r} is")
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(key) is not None:
            raise UserError(f"{key} {config[key]!r} is not supported; it must be null")
    if fields.boolean("use_bidirectional_attention"):
        raise UserError(
            "use_bidirectional_attention true is not supported; a policy attends to earlier "
            "tokens only"
        )
    for key in ("attention_bias", "mlp_bias"):
        if key not in family.options and fields.boolean(key):
            raise UserError(
                f"{key} true is not supported in {family.hf_class}; the only biases are those of "
                "Qwen2's and GLM's q, k and v"
            )
    if family.latent:
        for key in _NO_NULLS:
            if config.get(key, "") is None:
                raise UserError(
                    f"{key} null is not supported in {family.hf_class}; give it, or leave it out"
                )
        for key, value in _ROUTING_KEYS.items():
            if config.get(key, value) != value:
                raise UserError(f"{key} {config[key]!r} is not supported; only {value!r} is")
    # how weights are stored does not matter here; a form that cannot be read is refused
    parse_quantization(config)


def _window(fields: Fields, family: Family, num_layers: int) -> tuple[int | None, tuple[int, ...]]:
    """(sliding_window, full_attention_layers), by the rules of the family's class in
    transformers."""
    types = _layer_types(fields, family, num_layers)
    # an absent key is the default, a null turns the window off
    default = None if family.window == "none" else _DEFAULT_SLIDING_WINDOW
    window = fields.integer(
        "sliding_window", default=None if "sliding_window" in fields.data else default
    )
    if family.window == "none":
        if window is not None and fields.boolean("use_sliding_window", default=True):
            raise UserError(
                f"sliding_window {window} is not supported; every layer of a {family.hf_class} "
                "must attend fully"
            )
        window = None
    elif family.window_switch and not fields.boolean("use_sliding_window"):
        window = None
    if family.window == "some" and window is not None:
        if types is None:
            first = fields.integer("max_window_layers", default=_DEFAULT_MAX_WINDOW_LAYERS)
            types = [_FULL if i < first else _SLIDING for i in range(num_layers)]
        full = tuple(i for i, kind in enumerate(types) if kind == _FULL)
        return (None, ()) if len(full) == num_layers else (window, full)
    kind = _FULL if window is None else _SLIDING
    if other := sorted(set(types or ()) - {kind}):
        raise UserError(
            f"layer_types holds {', '.join(other)}, but sliding_window and the other keys make "
            f"every layer {kind}"
        )
    return window, ()


def _layer_types(fields: Fields, family: Family, num_layers: int) -> list[str] | None:
    """The kind of each layer's attention where config.json gives it, or the family's pattern
    does."""
    types = fields.data.get("layer_types")
    if types is None and family.window_pattern is not None:
        period = fields.integer("sliding_window_pattern", default=family.window_pattern)
        if period < 1:
            raise UserError(f"sliding_window_pattern must be positive, got {period}")
        return [_SLIDING if (i + 1) % period else _FULL for i in range(num_layers)]
    if types is not None and (
        not isinstance(types, list) or any(kind not in (_FULL, _SLIDING) for kind in types)
    ):
        raise UserError(
            f"layer_types {types} is not supported; it must list {_FULL} and {_SLIDING}"
        )
    if types is not None and len(types) != num_layers:
        raise UserError(f"layer_types has {len(types)} entries for {num_layers} layers")
    return types


def _experts(fields: Fields, family: Family, num_layers: int) -> ExpertsConfig:
    sizes: dict[str, Any] = {
        "per_token": fields.integer("num_experts_per_tok"),
        "intermediate_size": fields.integer("moe_intermediate_size"),
        "normalize": fields.boolean("norm_topk_prob", default=family.normalize_experts),
    }
    if family.routing == "softmax":
        step = fields.integer("decoder_sparse_step", default=1)
        if step < 1:
            raise UserError(f"decoder_sparse_step must be positive, got {step}")
        dense = fields.integers("mlp_only_layers")
        return ExpertsConfig(
            count=_one_of(fields, "num_experts", "num_local_experts"),
            dense_layers=tuple(i for i in range(num_layers) if i in dense or (i + 1) % step),
            **sizes,
        )
    return ExpertsConfig(
        count=_one_of(fields, "n_routed_experts", "num_local_experts"),
        dense_layers=tuple(
            range(min(num_layers, fields.integer("first_k_dense_replace", family.first_sparse)))
        ),
        scoring="sigmoid",
        groups=fields.integer("n_group", default=family.expert_groups[0]),
        groups_per_token=fields.integer("topk_group", default=family.expert_groups[1]),
        scale=fields.number("routed_scaling_factor", default=family.expert_scale),
        shared=fields.integer("n_shared_experts", default=1),
        **sizes,
    )


def _one_of(fields: Fields, *keys: str) -> int:
    """The integer that may stand under several names; transformers 4 and 5 differ in some."""
    found = {key: fields.integer(key) for key in keys if fields.data.get(key) is not None}
    if not found:
        raise UserError(f"{keys[0]} is missing")
    if len(set(found.values())) > 1:
        given = " and ".join(f"{key} {value}" for key, value in found.items())
        raise UserError(f"{given} contradict each other; keep one of them")
    return next(iter(found.values()))


def _rotary_factor(fields: Fields, family: Family) -> float:
    """The part of a head that is rotated; an absent key is the family's, a null means all."""
    key, place = "partial_rotary_factor", fields
    factor = fields.number(key, default=1.0 if key in fields.data else family.rotary_factor)
    rope = fields.object("rope_scaling" if fields.data.get("rope_scaling") else "rope_parameters")
    if rope.data.get(key) is not None:
        factor, place = rope.number(key), rope
    if factor != 1.0 and key not in family.options:
        raise UserError(f"{place.prefix}{key} {factor} is not supported; only 1.0 is")
    return factor


def _rope(fields: Fields, family: Family, positions: int) -> tuple[float, RopeScaling | None]:
    """(rope_theta, rope_scaling) of a model whose layers all rotate alike.

    Where both spellings are given transformers takes rope_scaling and drops rope_parameters; what
    would be lost by that is refused.
    """
    older, newer = fields.object("rope_scaling"), fields.object("rope_parameters")
    rope = older if older.data else newer
    if nested := [name for name, value in rope.data.items() if isinstance(value, dict)]:
        raise UserError(
            f"{rope.prefix}{nested[0]}: rotary positions that differ by kind of layer are not "
            "supported"
        )
    theta = _theta(fields, "rope_theta", rope, DEFAULT_ROPE_THETA)
    if older.data and newer.data:
        taken = {"rope_theta": theta, "rope_type": _rope_type(older), **older.data}
        for key, value in newer.data.items():
            if value != taken.get(key, value) and (key, value) != ("rope_type", "default"):
                raise UserError(
                    f"rope_scaling and rope_parameters are both given, and differ in {key} "
                    f"({taken[key]!r} and {value!r}); keep one of them"
                )
    return theta, _scaling(fields, family, rope, positions)


def _rope_by_kind(
    fields: Fields, family: Family, positions: int
) -> tuple[float, RopeScaling | None, float]:
    """(rope_theta, rope_scaling, rope_theta of the layers with a window) of a Gemma 3."""
    by_kind = fields.object("rope_parameters")
    if strange := sorted(by_kind.data.keys() - {_FULL, _SLIDING}):
        raise UserError(
            f"{by_kind.prefix}{strange[0]} is not supported; a {family.hf_class} has {_FULL} and "
            f"{_SLIDING} there"
        )
    full, local = by_kind.object(_FULL), by_kind.object(_SLIDING)
    for part in (full, local):
        if (fraction := part.number("partial_rotary_factor", default=1.0)) != 1.0:
            raise UserError(
                f"{part.prefix}partial_rotary_factor {fraction} is not supported; only 1.0 is"
            )
    if fields.data.get("rope_scaling") is not None:
        if full.data:
            raise UserError(
                f"rope_scaling and {by_kind.prefix}{_FULL} are both given; keep one of them"
            )
        full = fields.object("rope_scaling")
    # transformers 5 reads these elsewhere, or not at all, where layers differ
    outer = "original_max_position_embeddings"
    stretched = _rope_type(full) in ("llama3", "yarn")
    if stretched and fields.data.get(outer) is not None and outer not in full.data:
        raise UserError(f"{outer} is not read beside {full.prefix}rope_type; write it in there")
    if "type" in full.data and "rope_type" not in full.data:
        raise UserError(f"{full.prefix}type is not read in {family.hf_class}; call it rope_type")
    if full.data.get("truncate", True) is not True:
        raise UserError(f"{full.prefix}truncate is not read in {family.hf_class}; leave it out")
    if _scaling(fields, family, local, positions) is not None:
        raise UserError(
            f"{local.prefix}rope_type: only 'default' is supported in the layers with a window"
        )
    theta = _theta(fields, "rope_theta", full, _GEMMA_THETA)
    return (
        theta,
        _scaling(fields, family, full, positions),
        _theta(fields, "rope_local_base_freq", local, _GEMMA_LOCAL_THETA),
    )


def _rope_keys(config: PolicyConfig) -> dict[str, Any]:
    """The keys of transformers 4, which 5 reads, too."""
    scaling = None
    if (rescaling := config.rope_scaling) is not None:
        given = {k: v for k, v in dataclasses.asdict(rescaling).items() if v is not None}
        scaling = {"rope_type": rescaling.rope_type, **given}
    keys = {"rope_theta": config.rope_theta, "rope_scaling": scaling}
    return (
        keys
        if config.local_rope_theta is None
        else keys | {"rope_local_base_freq": config.local_rope_theta}
    )


def _theta(fields: Fields, key: str, rope: Fields, default: float) -> float:
    outer, inner = fields.number(key, default=None), rope.number("rope_theta", default=None)
    if outer is not None and inner is not None and outer != inner:
        raise UserError(f"{key} {outer} contradicts {rope.prefix}rope_theta {inner}")
    return next((value for value in (inner, outer) if value is not None), default)


def _rope_type(rope: Fields) -> Any:
    return rope.data.get("rope_type", rope.data.get("type", "default"))


def _scaling(fields: Fields, family: Family, rope: Fields, positions: int) -> RopeScaling | None:
    if (kind := _rope_type(rope)) == "default":
        return None
    if not isinstance(kind, str) or kind not in ROPE_SCALINGS:
        raise UserError(
            f"{rope.prefix}rope_type {kind!r} is not supported; supported: 'default', "
            + ", ".join(map(repr, ROPE_SCALINGS))
        )
    if kind != "yarn" and family.latent and rope.number("mscale_all_dim", default=None):
        raise UserError(f"{rope.prefix}mscale_all_dim is supported with rope_type 'yarn' alone")
    if kind not in ("llama3", "yarn"):
        return ROPE_SCALINGS[kind](rope.number("factor"))
    original = _original_positions(fields, rope, positions)
    if kind == "llama3":
        return Llama3RopeScaling(
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_position_embeddings=original,
        )
    # a null is the quotient of the two lengths
    stretched = {"default": positions / max(original, 1)} if "factor" in rope.data else {}
    return YarnRopeScaling(
        factor=rope.number("factor", **stretched),
        original_max_position_embeddings=original,
        attention_factor=rope.number("attention_factor", default=None),
        beta_fast=rope.number("beta_fast", default=None) or 32.0,
        beta_slow=rope.number("beta_slow", default=None) or 1.0,
        mscale=rope.number("mscale", default=None),
        mscale_all_dim=rope.number("mscale_all_dim", default=None),
        truncate=rope.boolean("truncate", default=True),
    )


def _original_positions(fields: Fields, rope: Fields, positions: int) -> int:
    """Positions of pretraining, by default those of today; beside the rope's keys they come
    first."""
    key = "original_max_position_embeddings"
    inner, outer = rope.integer(key, default=None), fields.integer(key, default=None)
    if inner is not None and outer is not None and inner != outer:
        raise UserError(f"{key} {outer} contradicts {rope.prefix}{key} {inner}; keep one of them")
    return next((x for x in (outer, inner) if x is not None), positions)
