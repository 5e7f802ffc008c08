"""The one table between Hugging Face's tensor names and the policy's parameter paths.

Hugging Face stores `model.layers.3.self_attn.q_proj.weight` per layer; the policy stores `layers.q_proj.weight`, all
layers stacked on a leading axis. Both keep weights as [out, in], so that the mapping is a name and an index.
"""

from __future__ import annotations

import dataclasses
import re

from fp8rl_jax.models.config import PolicyConfig

# policy name of a layer's parameter -> its Hugging Face name below "model.layers.{i}."
_LAYER_NAMES = {
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
}
_TOP_NAMES = {"embed_tokens": "model.embed_tokens", "norm": "model.norm", "lm_head": "lm_head"}

# Buffers that old checkpoints carry and that the config determines.
_IGNORED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


@dataclasses.dataclass(frozen=True)
class Location:
    """Where a Hugging Face tensor lives in the policy: a dotted path, and the index on its leading layer axis."""

    path: str
    layer: int | None
    shape: tuple[int, ...]


def parameter_shapes(config: PolicyConfig) -> dict[str, tuple[int, ...]]:
    """The policy's parameters: dotted path to shape, layers stacked; no `lm_head.weight` when it is tied."""
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_layers
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (config.vocab_size, hidden),
        "layers.q_proj.weight": (layers, config.q_size, hidden),
        "layers.k_proj.weight": (layers, config.kv_size, hidden),
        "layers.v_proj.weight": (layers, config.kv_size, hidden),
        "layers.o_proj.weight": (layers, hidden, config.q_size),
        "layers.gate_proj.weight": (layers, inner, hidden),
        "layers.up_proj.weight": (layers, inner, hidden),
        "layers.down_proj.weight": (layers, hidden, inner),
        "layers.input_layernorm.weight": (layers, hidden),
        "layers.post_attention_layernorm.weight": (layers, hidden),
        "norm.weight": (hidden,),
    }
    if config.qk_norm:
        shapes["layers.q_norm.weight"] = (layers, config.head_dim)
        shapes["layers.k_norm.weight"] = (layers, config.head_dim)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def hf_name(path: str, layer: int | None = None) -> str:
    """The Hugging Face name of a policy parameter: `("layers.q_proj.weight", 3)` to `model.layers.3.self_attn...`."""
    parts = path.split(".")
    if parts[0] == "layers":
        return f"model.layers.{layer}.{_LAYER_NAMES[parts[1]]}.{parts[2]}"
    return f"{_TOP_NAMES[parts[0]]}.{parts[1]}"


def hf_tensors(config: PolicyConfig) -> dict[str, Location]:
    """Every tensor that a Hugging Face checkpoint of this config holds, with its place in the policy and its shape."""
    tensors = {}
    for path, shape in parameter_shapes(config).items():
        if path.startswith("layers."):
            for layer in range(config.num_layers):
                tensors[hf_name(path, layer)] = Location(path, layer, shape[1:])
        else:
            tensors[hf_name(path)] = Location(path, None, shape)
    return tensors


def is_ignored(name: str) -> bool:
    """Whether a tensor of a checkpoint is a derived buffer and no parameter."""
    return _IGNORED.fullmatch(name) is not None
