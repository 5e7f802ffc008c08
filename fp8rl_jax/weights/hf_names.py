"""Hugging Face's tensor names, and the policy's parameter paths (models/tensors.py has the table).

Hugging Face stores `model.layers.3.self_attn.q_proj.weight` per layer and
`model.layers.3.mlp.experts.7.up_proj.weight` per expert; the policy stores `layers.q_proj.weight`
and `layers.experts.up_proj.weight`, all layers, and all experts of a layer, stacked on leading
axes. Both keep weights as [out, in], so that the mapping is a name and an index.

Experts come fused, too, as transformers 5 holds them in memory: `mlp.experts.gate_up_proj` [E, 2I,
H], each expert's gate above its up, and `mlp.experts.down_proj` [E, H, I].

A tensor that only some layers have is stacked over these alone: where layers 1 and 3 of 4 have
experts, layer 3 is entry 1 of `layers.experts.up_proj.weight`. `stack_of` says which layers a
tensor's stack holds.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection

from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.tensors import TENSORS, parameter_shapes, stack_of

_TOP_NAMES = {
    "embed_tokens": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}

_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.")
# Buffers that old checkpoints carry and that the config determines.
_DERIVED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
# vLLM's maybe_remap_kv_scale_name and compressed-tensors' KVCacheScaleType; inputs of linears
_MEASURED = re.compile(
    r"model\.layers\.\d+\.(self_attn|mlp)\.(.+[._])?"
    r"(k|v|q|kv|prob|output|prob_output|input|activation)_(scale|scale_ub|global_scale|zero_point)"
    r"|model\.layers\.\d+\..+\.qscale_act"
)
# fused tensor below "mlp.experts." -> the tensors that it holds, one below the other
_FUSED = {
    "gate_up_proj": ("experts.gate_proj", "experts.up_proj"),
    "down_proj": ("experts.down_proj",),
}
# itself, or its packed values
_FUSED_ENDS = ("", "_packed", ".weight_packed", "_weight_packed")


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

    @property
    def places(self) -> tuple[Location, ...]:
        """Itself, as the only place of what the tensor holds."""
        return (self,)


@dataclasses.dataclass(frozen=True)
class FusedExperts:
    """A tensor [E, rows, columns] that holds matrices of every expert of a layer.

    Attributes:
        places: where the stacks [E, rows of one, columns] of its matrices live, which lie one below
            the other.
    """

    places: tuple[Location, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""
        experts, rows, columns = self.places[0].shape
        return experts, rows * len(self.places), columns


Stored = Location | FusedExperts


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


def stored_tensors(config: PolicyConfig, names: Collection[str]) -> dict[str, Stored]:
    """List the tensors that a checkpoint must hold.

    Args:
        config: of the model.
        names: of the tensors that it does hold; where one is a layer's fused experts, it stands for
            those that it holds, and else each expert has its own.
    """
    fused: dict[str, Stored] = {}
    replaced = set()
    shapes = parameter_shapes(config)
    for place, layer in enumerate(config.sparse_layers):
        for tensor, parts in _FUSED.items():
            name = f"model.layers.{layer}.mlp.experts.{tensor}"
            if any(name + end in names for end in _FUSED_ENDS):
                paths = [f"layers.{part}.weight" for part in parts]
                fused[name] = FusedExperts(
                    tuple(Location(path, (place,), layer, shapes[path][1:]) for path in paths)
                )
                replaced |= {(path, place) for path in paths}
    return fused | {
        name: location
        for name, location in hf_tensors(config).items()
        if (location.path, *location.index[:1]) not in replaced
    }


def is_ignored(name: str, config: PolicyConfig) -> bool:
    """Say whether a tensor of a checkpoint is no parameter of the policy.

    A derived buffer, what `is_measured_scale` says, or a tensor of the layers behind the last,
    which predict further tokens.
    """
    if _DERIVED.fullmatch(name) is not None or is_measured_scale(name):
        return True
    layer = _LAYER.match(name)
    return (
        config.family.predicts_ahead
        and layer is not None
        and int(layer.group(1)) >= config.num_layers
    )


def is_measured_scale(name: str) -> bool:
    """Say whether a tensor is a scale of a linear's input or of the KV cache, which a run measures
    itself."""
    return _MEASURED.fullmatch(name) is not None
