"""Hugging Face's tensor names, and the policy's parameter paths (models/tensors.py has the table).

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
from fp8rl_jax.models.tensors import TENSORS, parameter_shapes, stack_of

_TOP_NAMES = {
    "embed_tokens": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}

_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.")
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
        name = TENSORS[name.removeprefix("layers.")].file.format(expert=expert)
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
            if TENSORS[name].kind == "experts":
                for expert in range(shape[1]):
                    tensors[hf_name(path, layer, expert)] = Location(
                        path, (place, expert), layer, shape[2:]
                    )
            else:
                tensors[hf_name(path, layer)] = Location(path, (place,), layer, shape[1:])
    return tensors


def is_ignored(name: str, config: PolicyConfig) -> bool:
    """Say whether a tensor of a checkpoint is no parameter of the policy.

    A derived buffer, or one of the layers behind the last that predict further tokens.
    """
    if _IGNORED.fullmatch(name) is not None:
        return True
    layer = _LAYER.match(name)
    return (
        config.family.predicts_ahead
        and layer is not None
        and int(layer.group(1)) >= config.num_layers
    )
