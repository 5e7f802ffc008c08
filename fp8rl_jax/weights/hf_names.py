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

from fp8rl_jax.models.config import PolicyConfig, parameter_shapes, stack_of

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


def hf_name(path: str, layer: int | None = None, expert: int | None = None) -> str:
    """Return Hugging Face's name of a policy parameter.

    `("layers.q_proj.weight", 3)` is `model.layers.3.self_attn.q_proj.weight`.
    """
    name = path.removesuffix(".weight")
    if name.startswith("layers."):
        name = _LAYER_NAMES[name.removeprefix("layers.")].format(expert=expert)
        return f"model.layers.{layer}.{name}"
    return _TOP_NAMES[name]


def hf_tensors(config: PolicyConfig) -> dict[str, Location]:
    """List every tensor of a Hugging Face checkpoint, with place in the policy and shape."""
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
    """Say whether a tensor of a checkpoint is a derived buffer and no parameter."""
    return _IGNORED.fullmatch(name) is not None
