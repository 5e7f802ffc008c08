"""Rollout correction: importance weights for tokens that a slightly different policy sampled.

The rollout runs in FP8, the trainer in bfloat16; even with equal formats, a decode program and a training program round
differently. So the samples come from pi_rollout, while the loss believes that they come from the trainer's pi_old. Each
token's expectation is repaired by the weight

    rho = pi_old / pi_rollout = exp(logp_train - logp_rollout)

whose variance is bounded by cutting it off at C (truncated importance sampling, TIS). All ratios in this library are
pi_train / pi_rollout. Two ways to use it:

    decoupled   three policies: clip pi_theta / pi_old, then multiply the token's loss by min(rho, C).
    bypass      two policies: pi_old is taken to be pi_rollout, so the clipped ratio pi_theta / pi_rollout carries the
                correction itself. A weight on top of it would count the mismatch twice, so there is none.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fp8rl_jax.config.rl import CorrectionConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.rl.masked import Mask, check_shapes, clamp_log_ratio
from fp8rl_jax.rl.metrics import Maximum, Mean, Metrics


def correction(
    log_ratio: Float[Array, "B T"], mask: Mask, config: CorrectionConfig
) -> tuple[Float[Array, "B T"], Mask, Metrics]:
    """Weights that correct the tokens of a rollout, and the mask of those that are kept.

    token_tis: min(exp(log_ratio clamped to +-20), max_weight), a cap and no floor as in verl; FP8-RL (arXiv 2601.18150)
    prints it as clip(rho, C). A NaN log-ratio gives a NaN weight.

    Args:
        log_ratio: logp_old - logp_rollout of each sampled token, float32. Padding may hold anything.
        mask: completion tokens.
        config: method (resolved, not "recipe"), mode, max_weight.

    Returns:
        weights: constants for the gradient, 0 outside the mask; 1 with method "none" and in bypass mode.
        mask: the tokens that stay in the loss. These methods reject none, so it is the mask that was given.
        metrics: correction/weight_mean and weight_max of the weights as applied, correction/clip_frac of capped tokens.

    Raises:
        UserError: the method is still "recipe".
    """
    check_shapes(mask, log_ratio=log_ratio)
    counted = mask.astype(bool)
    log_ratio = jnp.where(counted, jax.lax.stop_gradient(log_ratio), 0.0)
    if config.method == "recipe":
        raise UserError(
            'rl.correction.method: "recipe" must be resolved first; call CorrectionConfig.resolve, or name a method'
        )
    if config.method == "none" or config.mode == "bypass":
        weights, clipped = jnp.ones_like(log_ratio), jnp.zeros_like(counted)
    else:
        ratio = jnp.exp(clamp_log_ratio(log_ratio))
        weights, clipped = jnp.minimum(ratio, config.max_weight), ratio > config.max_weight
    metrics = {
        "correction/weight_mean": Mean.of(weights, counted),
        "correction/weight_max": Maximum.of(weights, counted),
        "correction/clip_frac": Mean.of(clipped, counted),
    }
    return jnp.where(counted, weights, 0.0), mask, metrics


def rollout_logprobs(
    behaviour_logprobs: Float[Array, "B T"],
    policy_logprobs: Float[Array, "B T"],
    config: CorrectionConfig,
    *,
    truncated: bool,
) -> Float[Array, "B T"]:
    """The rollout's log-probabilities that ratios divide by.

    Without truncation the two differ by rounding at most and policy_logprobs are taken. With it they answer two
    questions: behaviour_logprobs correct the truncation too, as far as its support reaches; policy_logprobs correct the
    numerics alone. Mismatch metrics always take policy_logprobs.

    Args:
        behaviour_logprobs: of the distribution that was sampled, renormalized over the tokens it keeps.
        policy_logprobs: of the full vocabulary at the same temperature.
        config: `truncated_sampling` chooses.
        truncated: whether top-k, top-p or min-p was on, as `check_sampling` returns it.

    Raises:
        UserError: truncated samples with `truncated_sampling = "refuse"`.
    """
    if truncated and config.truncated_sampling == "refuse":
        raise UserError(
            'rl.correction.truncated_sampling: the samples are truncated; say "behaviour" (correct the truncation) '
            'or "policy" (leave its bias)'
        )
    return behaviour_logprobs if truncated and config.truncated_sampling == "behaviour" else policy_logprobs
