"""How large the inputs of linears are: what a checkpoint says whose readers quantize activations
with one outer scale for each linear, measured beforehand."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from fp8rl_jax.compare.causes import operations
from fp8rl_jax.compare.side import Side
from fp8rl_jax.compare.tokens import Parts, Tokens
from fp8rl_jax.config.recipe import RECIPES
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.policy import Policy

_ROWS = 4
"""That are computed at a time."""


def largest_inputs(policy: Policy, tokens: Tokens) -> dict[str, float]:
    """Find the largest magnitude that each linear multiplies, in float32 with nothing quantized.

    Args:
        policy: layers stacked, plain.
        tokens: what it reads.

    Returns:
        {"layers.3.q_proj": largest}, of all linears; a layer's experts are one, as readers take
        one scale for them.

    Raises:
        UserError: inputs that are not finite.
    """
    found: dict[str, float] = {}
    for start in range(0, len(tokens.prompts), _ROWS):
        some = Tokens(*(x[start : start + _ROWS] for x in tokens))
        for linear, largest in _of_rows(policy, some).items():
            found[linear] = max(largest, found.get(linear, 0.0))
    if bad := [linear for linear, largest in found.items() if not math.isfinite(largest)]:
        raise UserError(f"inputs of {bad[0]} are not finite; the weights are broken")
    return found


def _of_rows(policy: Policy, tokens: Tokens) -> dict[str, float]:
    side = Side.of(policy, RECIPES["bf16"], "trainer", jnp.float32, tokens)
    x, config, found = side.embed(tokens), policy.config, {}
    for i in range(config.num_layers):
        kept = side.run(i, x, tokens)
        x = Parts(kept.prompt["output"], kept.completion["output"])
        sources = {step.name: step.source for step in operations(config, i) if step.product}
        if config.latent is not None:
            sources["kv_b_proj"] = "kv_a_layernorm.out"
        values = jax.device_get(kept)
        for name, source in sources.items():
            found[f"layers.{i}.{name}"] = max(
                float(np.abs(np.asarray(part[source], np.float32)[np.asarray(mask)]).max())
                for part, mask in zip(values, tokens.masks, strict=True)
            )
    return found
