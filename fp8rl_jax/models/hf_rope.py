"""The rotary positions of a config.json, in the spellings of transformers 4 and 5.

transformers 4   rope_theta beside rope_scaling; Gemma 3 with rope_local_base_freq for its layers
                 with a window
transformers 5   rope_parameters with both inside; Gemma 3 with one such object for each kind of
                 layer
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fp8rl_jax.errors import UserError
from fp8rl_jax.models.config import DEFAULT_ROPE_THETA, PolicyConfig
from fp8rl_jax.models.hf_json import Fields
from fp8rl_jax.models.rope_scaling import LinearRopeScaling, Llama3RopeScaling

FULL, SLIDING = "full_attention", "sliding_attention"
# What transformers assumes when config.json leaves a key out.
_GEMMA_THETA, _GEMMA_LOCAL_THETA = 1e6, 1e4


def read_rope(fields: Fields) -> tuple[float, LinearRopeScaling | Llama3RopeScaling | None]:
    """(rope_theta, rope_scaling) of a model whose layers all rotate alike.

    Raises:
        UserError: naming the key that is malformed, not implemented, or contradicts another.
    """
    rope = fields.object(
        "rope_parameters" if fields.data.get("rope_parameters") is not None else "rope_scaling"
    )
    if nested := [name for name, value in rope.data.items() if isinstance(value, dict)]:
        raise UserError(
            f"{rope.prefix}{nested[0]}: rotary positions that differ by kind of layer are not "
            "supported"
        )
    return _theta(fields, "rope_theta", rope, DEFAULT_ROPE_THETA), _scaling(fields, rope)


def read_gemma_rope(
    fields: Fields,
) -> tuple[float, LinearRopeScaling | Llama3RopeScaling | None, float]:
    """(rope_theta, rope_scaling, rope_theta of the layers with a window) of a Gemma 3.

    Raises:
        UserError: see `read_rope`.
    """
    by_kind = fields.object("rope_parameters")
    if strange := sorted(by_kind.data.keys() - {FULL, SLIDING}):
        raise UserError(
            f"{by_kind.prefix}{strange[0]} is not supported; a gemma3_text has {FULL} and "
            f"{SLIDING} there"
        )
    full, local = by_kind.object(FULL), by_kind.object(SLIDING)
    if fields.data.get("rope_scaling") is not None:
        if full.data:
            raise UserError(
                f"rope_scaling and {by_kind.prefix}{FULL} are both given; keep one of them"
            )
        full = fields.object("rope_scaling")
    if _scaling(fields, local) is not None:
        raise UserError(
            f"{local.prefix}rope_type: only 'default' is supported in the layers with a window"
        )
    theta = _theta(fields, "rope_theta", full, _GEMMA_THETA)
    return (
        theta,
        _scaling(fields, full),
        _theta(fields, "rope_local_base_freq", local, _GEMMA_LOCAL_THETA),
    )


def rope_keys(config: PolicyConfig) -> dict[str, Any]:
    """The keys of transformers 4, which 5 reads, too."""
    scaling = None
    if config.rope_scaling is not None:
        kind = {LinearRopeScaling: "linear", Llama3RopeScaling: "llama3"}[type(config.rope_scaling)]
        scaling = {"rope_type": kind, **dataclasses.asdict(config.rope_scaling)}
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


def _scaling(fields: Fields, rope: Fields) -> LinearRopeScaling | Llama3RopeScaling | None:
    for part in (fields, rope):
        if (fraction := part.number("partial_rotary_factor", default=1.0)) != 1.0:
            raise UserError(
                f"{part.prefix}partial_rotary_factor {fraction} is not supported; only 1.0 is"
            )
    kind = rope.data.get("rope_type", rope.data.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return LinearRopeScaling(factor=rope.number("factor"))
    if kind != "llama3":
        raise UserError(
            f"{rope.prefix}rope_type {kind!r} is not supported; supported: 'default', 'linear', "
            "'llama3'"
        )
    return Llama3RopeScaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
    )
