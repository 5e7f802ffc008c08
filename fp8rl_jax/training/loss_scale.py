"""Loss scaling: how gradients survive float16.

float16 has 10 bits of mantissa where bfloat16 has 7, and pays with its range: nothing above 65504,
nothing below 2^-24 = 6e-8. Activations fit. Gradients often do not: that of a mean over a hundred
thousand tokens begins as 1e-5 times an advantage, and what is a thousandth of it is lost. So the
loss is multiplied by a large number before the backward pass, every gradient carries that factor
through float16, and it is divided away once they are in float32 (arXiv 1710.03740, section 3.2),
after micro-batches were added up and before the norm is taken and clipped.

The factor cannot be known beforehand, so it is found while training. Too large a one makes
gradients infinite: that update is skipped and the scale lowered. After a while without overflow it
is raised again. This is the rule of PyTorch's GradScaler:

    a gradient is not finite    scale * backoff_factor, count = 0
    else                        count + 1; at growth_interval: scale * growth_factor where that is
                                finite, count = 0

The scale and its count are part of the training state, so a resumed run goes on with them. bfloat16
and float32 have the range and need none of this. FP8 products inside a float16 trainer have scales
of their own: their groups see scaled gradients, whose factor falls out of amax / 448.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fp8rl_jax.config.training import LossScaleConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScale:
    """scale: what the next loss is multiplied by; count: updates without overflow since it last
    changed."""

    scale: Float[Array, ""]
    count: Int[Array, ""]


def init_scale(config: LossScaleConfig | None) -> LossScale | None:
    """Make the state of a dynamic scale before the first update.

    None where the scale is static, or there is none.
    """
    if config is None or config.mode != "dynamic":
        return None
    return LossScale(jnp.float32(config.initial), jnp.int32(0))


def factor(
    state: LossScale | None, config: LossScaleConfig | None
) -> Float[Array, ""] | float | None:
    """Give what the loss is multiplied by; None where it is not.

    Args:
        state: of a dynamic scale.
        config: resolved (`LossScaleConfig.resolve`).
    """
    if config is None:
        return None
    if config.mode == "static":
        return config.initial
    assert state is not None
    return state.scale


def next_scale(state: LossScale, finite: Bool[Array, ""], config: LossScaleConfig) -> LossScale:
    """Compute the scale after an update whose gradients were finite or not."""
    count = jnp.where(finite, state.count + 1, 0)
    due = count >= config.growth_interval
    grown = state.scale * config.growth_factor
    grown = jnp.where(due & jnp.isfinite(grown), grown, state.scale)
    scale = jnp.where(finite, grown, state.scale * config.backoff_factor)
    return LossScale(scale, jnp.where(due, 0, count))
