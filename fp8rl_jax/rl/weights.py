"""Importance weights: how much a sampled token counts, given how much likelier the trainer finds it
than the rollout did.

With rho = pi_old / pi_rollout, the weight of a token is its own rho (biased, of low variance: the
tokens before it are taken as the rollout made them) or rho of its whole sequence (unbiased, of a
variance that grows with length). Bounds keep either in check:

    truncate   min(rho, max_weight): truncated importance sampling (TIS),
               https://fengyao.notion.site/off-policy-rl;
               FP8-RL, arXiv 2601.18150, prints it as clip(rho, C). min_weight raises small weights,
               if it is above 0.
    mask       rho inside [min_weight, max_weight], else 0: IcePop, arXiv 2510.18855. The token's
               gradient is lost, but it
               still counts in the denominator.
    keep       rho: plain importance sampling, NeMo RL's correction without a truncation type.

Something else than rho is a function of one's own with the signature of `token` and `sequence`
(docs/objectives.md), `rl.correction.weights = "module:function"`; bounds then act on what it
returns:

    weights(inputs: RatioInputs, config: CorrectionConfig, **arguments) -> weights [B, T]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fp8rl_jax.config.correction import CorrectionConfig
from fp8rl_jax.rl.functions import call, floats
from fp8rl_jax.rl.masked import Mask, clamp_log_ratio, masked_mean, masked_sum

KEY = "rl.correction.weights"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RatioInputs:
    """What importance weights are computed from: B completions of T tokens, of one micro-batch or
    of the whole batch."""

    log_ratio: Float[Array, "B T"]
    """log rho of each sampled token, not clamped; 0 in the padding."""
    mask: Bool[Array, "B T"]
    """Completion tokens."""


Weights = Callable[..., Float[Array, "B T"]]
"""(inputs, config, **arguments) -> the weight of each token, before bounds."""


def token(inputs: RatioInputs, config: CorrectionConfig) -> Float[Array, "B T"]:
    """rho of each token."""
    return importance_ratio(inputs.log_ratio, config)


def sequence(inputs: RatioInputs, config: CorrectionConfig) -> Float[Array, "B T"]:
    """rho of the whole sequence, at each of its tokens."""
    total = masked_sum(inputs.log_ratio, inputs.mask, axis=1)[:, None]
    return importance_ratio(jnp.broadcast_to(total, inputs.log_ratio.shape), config)


BUILT_IN: dict[str, Weights] = {"token": token, "sequence": sequence}
"""All but "none"."""


def importance_ratio(
    log_ratio: Float[Array, "B T"], config: CorrectionConfig
) -> Float[Array, "B T"]:
    """rho from its logarithm, by config.overflow: clamp (log-ratios to +-20, as in verl), or zero
    for what is not finite."""
    if config.value("overflow") == "clamp":
        return jnp.exp(clamp_log_ratio(log_ratio))
    return jnp.nan_to_num(jnp.exp(log_ratio), nan=0.0, posinf=0.0, neginf=0.0)


def importance_weights(
    log_ratio: Float[Array, "B T"], mask: Mask, config: CorrectionConfig
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Weights of all tokens, and where they lay outside the bounds.

    A NaN log-ratio gives a NaN weight with overflow "clamp" (of its whole sequence, where weights
    are of sequences), and weight 0 with overflow "zero". Departs from verl in nothing on finite
    input; from NeMo RL in that a NaN of the padding never reaches a sequence's product.

    Args:
        log_ratio: log rho of each sampled token; padding may hold anything.
        mask: completion tokens.
        config: weights, weights_args, bounds, max_weight, min_weight, overflow.

    Returns:
        weights: not masked and not normalized; 1 where config.weights is "none".
        outside: tokens whose weight was below min_weight or above max_weight; none where bounds are
        "keep".

    Raises:
        UserError: weights that are not built in do not import, do not take (inputs, config,
            **weights_args), raise an exception, or are something else than [B, T] floats.
    """
    inside = jnp.zeros(log_ratio.shape, bool)
    name, bounds = config.value("weights"), config.value("bounds")
    if name == "none":
        return jnp.ones_like(log_ratio), inside
    mask = mask.astype(bool)
    inputs = RatioInputs(jnp.where(mask, log_ratio, 0.0), mask)
    ratio = floats(
        KEY,
        name,
        call(KEY, name, BUILT_IN, inputs, config, config.weights_args),
        log_ratio.shape,
        "[B, T]",
    )
    if bounds == "keep":
        return ratio, inside
    low, high = config.value("min_weight"), config.value("max_weight")
    outside = (ratio < low) | (ratio > high)
    return jnp.where(outside, 0.0, ratio) if bounds == "mask" else jnp.clip(
        ratio, low, high
    ), outside


def normalize_weights(
    weights: Float[Array, "B T"], mask: Mask, level: str
) -> tuple[Float[Array, "B T"], Float[Array, ""]]:
    """Weights divided by their mean over the whole batch, so that they average to 1; verl's batch
    normalization.

    Self-normalized importance sampling: a little bias for less variance. The mean is over tokens
    for token weights and those of the user's functions, and over completions with tokens for
    sequence weights, so that a long one has no more say than a short one.

    Args:
        weights: of the whole batch, of a micro-batch it would be another number; as
            `importance_weights` returns them.
        mask: completion tokens, before rejection.
        level: config.weights: "sequence", or anything else for weights of tokens.

    Returns:
        The weights, and what they were divided by: 1 where the mean is below 1e-8, as in verl.
    """
    if level == "sequence":
        mean = masked_mean(masked_mean(weights, mask, axis=1), mask.any(axis=1))
    else:
        mean = masked_mean(weights, mask)
    divisor = jnp.where(mean <= 1e-8, 1.0, mean)
    return weights / divisor, divisor
