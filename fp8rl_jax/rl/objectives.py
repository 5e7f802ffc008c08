"""What one token adds to the policy loss, and how far the policy has moved from pi_old at it.

With r = pi_theta / pi_old and advantage A:

    clip        max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))    PPO, arXiv 1707.06347; clip_high alone raised is
                DAPO's clip-higher, arXiv 2503.14476; at most dual_clip * |A| where A < 0, arXiv 1912.09729; calibrated
                bounds in place of these two, calibrated_clipping.py
    cispo       -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi_theta    CISPO (MiniMax-M1), arXiv 2506.13585: every token
                keeps its gradient, with a bounded weight. The paper has no lower bound: clip_low = 1
    reinforce   -A log pi_theta    Williams 1992; RLOO and REINFORCE++ without their ratio

GSPO (arXiv 2507.18071) clips once a sequence: r is exp(mean over its tokens of log pi_theta / pi_old), in the form of its
section on token-level advantages: the value is the sequence's, the gradient each token's own. With one advantage and one
weight a sequence, and aggregation "sequence_mean", it is the sequence's ratio and its gradient.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fp8rl_jax.config.rl import LossConfig
from fp8rl_jax.rl.masked import Mask, clamp_log_ratio, masked_mean


def policy_ratio(logprobs: Float[Array, "B T"], old_logprobs: Float[Array, "B T"], mask: Mask, level: str) -> Float[Array, "B T"]:
    """r of each token, from log-ratios clamped to +-20; 1 in the padding.

    Departs from verl's GSPO, whose log-ratio is at most 10, and from NeMo RL's, which is not clamped and whose gradient
    goes through the mean: another gradient only where advantages or weights differ within a sequence.

    Args:
        logprobs: under the policy that is trained; padding may hold anything.
        old_logprobs: constants.
        mask: the tokens in the loss; the mean of a sequence is over them.
        level: "token" or "sequence".
    """
    mask = mask.astype(bool)
    logprobs = jnp.where(mask, logprobs, 0.0)
    log_ratio = logprobs - jax.lax.stop_gradient(jnp.where(mask, old_logprobs, 0.0))
    if level == "sequence":
        own = logprobs - jax.lax.stop_gradient(logprobs)
        log_ratio = own + jax.lax.stop_gradient(masked_mean(log_ratio, mask, axis=1))[:, None]
    return jnp.where(mask, jnp.exp(clamp_log_ratio(log_ratio)), 1.0)


def surrogate(
    logprobs: Float[Array, "B T"],
    ratio: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Mask,
    config: LossConfig,
    bounds: Float[Array, " bounds"] | None = None,
) -> Float[Array, "B T"]:
    """The objective's loss of each token, before weights.

    Args:
        logprobs: under the policy that is trained; padding may hold anything.
        ratio: of `policy_ratio`.
        advantages: constants, one a token.
        mask: the tokens in the loss.
        config: objective, clip_low, clip_high, dual_clip.
        bounds: of the ratio, in place of 1 - clip_low and 1 + clip_high.
    """
    if config.objective == "reinforce":
        return -advantages * jnp.where(mask.astype(bool), logprobs, 0.0)
    clipped = jnp.clip(ratio, *_bounds(config, bounds))
    if config.objective == "cispo":
        return -advantages * jax.lax.stop_gradient(clipped) * jnp.where(mask.astype(bool), logprobs, 0.0)
    loss = jnp.maximum(-advantages * ratio, -advantages * clipped)
    if config.dual_clip is not None:
        loss = jnp.where(advantages < 0, jnp.minimum(loss, -advantages * config.dual_clip), loss)
    return loss


def clipped_tokens(
    ratio: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    config: LossConfig,
    bounds: Float[Array, " bounds"] | None = None,
) -> tuple[Bool[Array, "B T"], Bool[Array, "B T"]]:
    """Where the lower, and where the upper bound of the ratio acts.

    clip: below with A < 0, above with A > 0, where the gradient is lost. cispo: with any A, where the weight is bounded.
    reinforce: nowhere. `bounds` as in `surrogate`.
    """
    least, most = _bounds(config, bounds)
    low, high = ratio < least, ratio > most
    match config.objective:
        case "clip":
            return (advantages < 0) & low, (advantages > 0) & high
        case "cispo":
            return low, high
        case _:
            return jnp.zeros_like(low), jnp.zeros_like(high)


def _bounds(config: LossConfig, bounds: Float[Array, " bounds"] | None):
    return (1 - config.clip_low, 1 + config.clip_high) if bounds is None else (bounds[0], bounds[1])
