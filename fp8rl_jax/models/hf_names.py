"""The one table between Hugging Face's tensor names and the policy's parameter paths.

Hugging Face stores `model.layers.3.self_attn.q_proj.weight` per layer and
`model.layers.3.mlp.experts.7.up_proj.weight` per expert; the policy stores `layers.q_proj.weight`
and `layers.experts.up_proj.weight`, all layers, and all experts of a layer, stacked on leading
axes. Both keep weights as [out, in], so that the mapping is a name and an index.

A tensor that only some layers have is stacked over these alone: where layers 1 and 3 of 4 have
experts, layer 3 is entry 1 of `layers.experts.up_proj.weight`. `stack_of` says which layers a
tensor's stack holds.
"""

from __future__ import annotations

import dataclasses
import re

from fp8rl_jax.models.config import PolicyConfig

# policy name of a layer's parameter -> its Hugging Face name below "model.layers.{i}."
_LAYER_NAMES = {
    "q_proj": "self_attn.q_proj.weight",
    "k_proj": "self_attn.k_proj.weight",
    "v_proj": "self_attn.v_proj.weight",
    "o_proj": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "gate_proj": "mlp.gate_proj.weight",
    "up_proj": "mlp.up_proj.weight",
    "down_proj": "mlp.down_proj.weight",
    "router": "mlp.gate.weight",
    "experts.gate_proj": "mlp.experts.{expert}.gate_proj.weight",
    "experts.up_proj": "mlp.experts.{expert}.up_proj.weight",
    "experts.down_proj": "mlp.experts.{expert}.down_proj.weight",
    "input_layernorm": "input_layernorm.weight",
    "post_attention_layernorm": "post_attention_layernorm.weight",
    "pre_feedforward_layernorm": "pre_feedforward_layernorm.weight",
    "post_feedforward_layernorm": "post_feedforward_layernorm.weight",
}
_TOP_NAMES = {
    "embed_tokens": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}

DENSE = ("gate_proj", "up_proj", "down_proj")
SPARSE = ("router", "experts.gate_proj", "experts.up_proj", "experts.down_proj")

# Buffers that old checkpoints carry and that the config determines.
_IGNORED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


@dataclasses.dataclass(frozen=True)
class Location:
    """Where a Hugging Face tensor lives in the policy.

    Attributes:
        path: of the parameter, such as "layers.experts.up_proj.weight".
        index: of the tensor on the parameter's leading axes: (), (place in the stack of layers,),
            and the expert behind it.
        layer: its layer, or None.
        shape: of the tensor.
    """

    path: str
    index: tuple[int, ...]
    layer: int | None
    shape: tuple[int, ...]


def stack_of(config: PolicyConfig, name: str) -> tuple[int, ...]:
    """The layers that have the tensor `name` ("q_proj", "experts.up_proj"), in the order of its
    stack."""
    if name in SPARSE:
        return config.sparse_layers
    return config.dense_layers if name in DENSE else tuple(range(config.num_layers))


def parameter_shapes(config: PolicyConfig) -> dict[str, tuple[int, ...]]:
    """The policy's parameters: dotted path to shape, layers stacked; no `lm_head.weight` when it is
    tied."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (config.vocab_size, hidden)}
    for name, shape in _layer_shapes(config).items():
        if layers := stack_of(config, name):
            shapes[f"layers.{name}.weight"] = (len(layers), *shape)
    shapes["norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def hf_name(path: str, layer: int | None = None, expert: int | None = None) -> str:
    """The Hugging Face name of a policy parameter: `("layers.q_proj.weight", 3)` to
    `model.layers.3.self_attn...`."""
    name = path.removesuffix(".weight")
    if name.startswith("layers."):
        name = _LAYER_NAMES[name.removeprefix("layers.")].format(expert=expert)
        return f"model.layers.{layer}.{name}"
    return _TOP_NAMES[name]


def hf_tensors(config: PolicyConfig) -> dict[str, Location]:
    """Every tensor that a Hugging Face checkpoint of this config holds, with its place in the
    policy and its shape."""
    tensors = {}
    for path, shape in parameter_shapes(config).items():
        name = path.removeprefix("layers.").removesuffix(".weight")
        if not path.startswith("layers."):
            tensors[hf_name(path)] = Location(path, (), None, shape)
            continue
        for place, layer in enumerate(stack_of(config, name)):
            if name.startswith("experts."):
                for expert in range(shape[1]):
                    tensors[hf_name(path, layer, expert)] = Location(
                        path, (place, expert), layer, shape[2:]
                    )
            else:
                tensors[hf_name(path, layer)] = Location(path, (place,), layer, shape[1:])
    return tensors


def is_ignored(name: str) -> bool:
    """Whether a tensor of a checkpoint is a derived buffer and no parameter."""
    return _IGNORED.fullmatch(name) is not None


def _layer_shapes(config: PolicyConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that a layer of this architecture may have."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "q_proj": (config.q_size, hidden),
        "k_proj": (config.kv_size, hidden),
        "v_proj": (config.kv_size, hidden),
        "o_proj": (hidden, config.q_size),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    if config.qkv_bias:
        shapes |= {
            "q_bias": (config.q_size,),
            "k_bias": (config.kv_size,),
            "v_bias": (config.kv_size,),
        }
    if config.post_norms:
        shapes |= {"pre_feedforward_layernorm": (hidden,), "post_feedforward_layernorm": (hidden,)}
    if config.qk_norm:
        shapes |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    if config.experts is not None:
        count, inner = config.experts.count, config.experts.intermediate_size
        shapes |= {
            "router": (count, hidden),
            "experts.gate_proj": (count, inner, hidden),
            "experts.up_proj": (count, inner, hidden),
            "experts.down_proj": (count, hidden, inner),
        }
    return shapes
