"""Every tensor that a layer may have: one table of shapes, axes, file names and first values.

Models, sharding, files, adapters and recipes learn from here which tensors there are. The order of
the table is that of a policy's tensors, which random draws go by: new ones come at its end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fp8rl_jax.models.config import PolicyConfig

Kind = Literal["linear", "experts", "router", "norm", "bias"]
"""linear, experts: may be quantized; experts: one for each, on an axis before the others; router:
float32 whatever the compute dtype."""


@dataclass(frozen=True)
class Tensor:
    """One row.

    Attributes:
        file: Hugging Face's name below "model.layers.{i}.".
        kind: what it is.
        axes: logical names of its axes (parallel.rules).
        shape: of one layer's, without the axis of experts.
        layers: which layers have it: all, those without or those with experts.
        there: whether models of this configuration have it at all.
        into_residual: it writes into the residual stream, so that it begins smaller (GPT-2).
    """

    file: str
    kind: Kind
    axes: tuple[str, ...]
    shape: Callable[[PolicyConfig], tuple[int, ...]]
    layers: Literal["all", "dense", "sparse"] = "all"
    there: Callable[[PolicyConfig], bool] = lambda config: True
    into_residual: bool = False


def _norm(file: str, there: Callable[[PolicyConfig], bool] = lambda config: True) -> Tensor:
    return Tensor(file, "norm", ("norm",), lambda c: (c.hidden_size,), there=there)


def _head_norm(file: str) -> Tensor:
    return Tensor(file, "norm", ("norm",), lambda c: (c.head_dim,), there=lambda c: c.qk_norm)


def _bias(file: str, axis: str, size: Callable[[PolicyConfig], int]) -> Tensor:
    return Tensor(file, "bias", (axis,), lambda c: (size(c),), there=lambda c: c.qkv_bias)


def _feed_forward(name: str) -> Tensor:
    return Tensor(
        f"mlp.{name}.weight",
        "linear",
        ("mlp", "embed"),
        lambda c: (c.intermediate_size, c.hidden_size),
        layers="dense",
    )


def _of_experts(name: str) -> Tensor:
    return Tensor(
        f"mlp.experts.{{expert}}.{name}.weight",
        "experts",
        ("experts", "mlp", "embed"),
        lambda c: (c.mixture.intermediate_size, c.hidden_size),
        layers="sparse",
    )


def _of_shared_experts(name: str) -> Tensor:
    return Tensor(
        f"mlp.shared_experts.{name}.weight",
        "linear",
        ("mlp", "embed"),
        lambda c: (c.mixture.shared_size, c.hidden_size),
        layers="sparse",
        there=_shares,
    )


def _shares(config: PolicyConfig) -> bool:
    return config.experts is not None and config.experts.shared > 0


def _has_latents(config: PolicyConfig) -> bool:
    return config.latent is not None


def _has_query_latents(config: PolicyConfig) -> bool:
    return config.latent is not None and config.latent.query_rank is not None


def _query_rank(config: PolicyConfig) -> int:
    assert config.latents.query_rank is not None
    return config.latents.query_rank


TENSORS: dict[str, Tensor] = {
    "q_proj": Tensor(
        "self_attn.q_proj.weight",
        "linear",
        ("heads", "embed"),
        lambda c: (c.q_size, c.hidden_size),
        there=lambda c: not _has_query_latents(c),
    ),
    "k_proj": Tensor(
        "self_attn.k_proj.weight",
        "linear",
        ("kv_heads", "embed"),
        lambda c: (c.kv_size, c.hidden_size),
        there=lambda c: c.latent is None,
    ),
    "v_proj": Tensor(
        "self_attn.v_proj.weight",
        "linear",
        ("kv_heads", "embed"),
        lambda c: (c.kv_size, c.hidden_size),
        there=lambda c: c.latent is None,
    ),
    "o_proj": Tensor(
        "self_attn.o_proj.weight",
        "linear",
        ("embed", "heads"),
        lambda c: (c.hidden_size, c.attended_size),
        into_residual=True,
    ),
    "gate_proj": _feed_forward("gate_proj"),
    "up_proj": _feed_forward("up_proj"),
    "down_proj": Tensor(
        "mlp.down_proj.weight",
        "linear",
        ("embed", "mlp"),
        lambda c: (c.hidden_size, c.intermediate_size),
        layers="dense",
        into_residual=True,
    ),
    "input_layernorm": _norm("input_layernorm.weight"),
    "post_attention_layernorm": _norm("post_attention_layernorm.weight"),
    "q_bias": _bias("self_attn.q_proj.bias", "heads", lambda c: c.q_size),
    "k_bias": _bias("self_attn.k_proj.bias", "kv_heads", lambda c: c.kv_size),
    "v_bias": _bias("self_attn.v_proj.bias", "kv_heads", lambda c: c.kv_size),
    "pre_feedforward_layernorm": _norm(
        "pre_feedforward_layernorm.weight", lambda c: c.family.post_norms
    ),
    "post_feedforward_layernorm": _norm(
        "post_feedforward_layernorm.weight", lambda c: c.family.post_norms
    ),
    "q_norm": _head_norm("self_attn.q_norm.weight"),
    "k_norm": _head_norm("self_attn.k_norm.weight"),
    "router": Tensor(
        "mlp.gate.weight",
        "router",
        ("router", "embed"),
        lambda c: (c.mixture.count, c.hidden_size),
        layers="sparse",
    ),
    "experts.gate_proj": _of_experts("gate_proj"),
    "experts.up_proj": _of_experts("up_proj"),
    "experts.down_proj": Tensor(
        "mlp.experts.{expert}.down_proj.weight",
        "experts",
        ("experts", "embed", "mlp"),
        lambda c: (c.hidden_size, c.mixture.intermediate_size),
        layers="sparse",
        into_residual=True,
    ),
    "router_bias": Tensor(
        "mlp.gate.e_score_correction_bias",
        "router",
        ("router",),
        lambda c: (c.mixture.count,),
        layers="sparse",
        there=lambda c: c.experts is not None and c.experts.scoring == "sigmoid",
    ),
    "shared_experts.gate_proj": _of_shared_experts("gate_proj"),
    "shared_experts.up_proj": _of_shared_experts("up_proj"),
    "shared_experts.down_proj": Tensor(
        "mlp.shared_experts.down_proj.weight",
        "linear",
        ("embed", "mlp"),
        lambda c: (c.hidden_size, c.mixture.shared_size),
        layers="sparse",
        there=_shares,
        into_residual=True,
    ),
    "q_a_proj": Tensor(
        "self_attn.q_a_proj.weight",
        "linear",
        ("latent", "embed"),
        lambda c: (_query_rank(c), c.hidden_size),
        there=_has_query_latents,
    ),
    "q_a_layernorm": Tensor(
        "self_attn.q_a_layernorm.weight",
        "norm",
        ("norm",),
        lambda c: (_query_rank(c),),
        there=_has_query_latents,
    ),
    "q_b_proj": Tensor(
        "self_attn.q_b_proj.weight",
        "linear",
        ("heads", "embed"),
        lambda c: (c.q_size, _query_rank(c)),
        there=_has_query_latents,
    ),
    "kv_a_proj_with_mqa": Tensor(
        "self_attn.kv_a_proj_with_mqa.weight",
        "linear",
        ("latent", "embed"),
        lambda c: (c.latents.rank + c.latents.rotary_dim, c.hidden_size),
        there=_has_latents,
    ),
    "kv_a_layernorm": Tensor(
        "self_attn.kv_a_layernorm.weight",
        "norm",
        ("norm",),
        lambda c: (c.latents.rank,),
        there=_has_latents,
    ),
    # of each head the rows that make its key come first, then those of its value
    "kv_b_proj": Tensor(
        "self_attn.kv_b_proj.weight",
        "linear",
        ("heads", "embed"),
        lambda c: (
            c.num_heads * (c.head_dim - c.latents.rotary_dim + c.latents.value_dim),
            c.latents.rank,
        ),
        there=_has_latents,
    ),
}


def of_kind(*kinds: Kind) -> tuple[str, ...]:
    """List the tensors of some kinds, in the table's order."""
    return tuple(name for name, tensor in TENSORS.items() if tensor.kind in kinds)


def stack_of(config: PolicyConfig, name: str) -> tuple[int, ...]:
    """List the layers that have a tensor ("q_proj", "experts.up_proj"), as they are stacked."""
    tensor = TENSORS[name]
    if not tensor.there(config):
        return ()
    whole = tuple(range(config.num_layers))
    return {"all": whole, "dense": config.dense_layers, "sparse": config.sparse_layers}[
        tensor.layers
    ]


def parameter_shapes(config: PolicyConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter, by its dotted path, layers stacked.

    There is no `lm_head.weight` when it is tied.
    """
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (config.vocab_size, hidden)}
    for name, tensor in TENSORS.items():
        if layers := stack_of(config, name):
            experts = (config.mixture.count,) if tensor.kind == "experts" else ()
            shapes[f"layers.{name}.weight"] = (len(layers), *experts, *tensor.shape(config))
    shapes["norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes
