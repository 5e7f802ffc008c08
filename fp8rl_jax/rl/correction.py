"""Rollout correction: what to do about tokens that a slightly different policy sampled.

The rollout runs in FP8, the trainer in bfloat16; even with equal formats, a decode program and a
training program round differently. So the samples come from pi_rollout, while the loss believes
that they come from the trainer's pi_old. Each token's expectation is repaired by the weight

    rho = pi_old / pi_rollout = exp(logp_train - logp_rollout)

whose variance is bounded (weights.py), and samples that are beyond repair are left out
(rejection.py). All ratios in this library are pi_train / pi_rollout. Two ways to use it:

    decoupled   three policies, arXiv 2110.00641: clip pi_theta / pi_old, then multiply the token's
                loss by its weight.
    bypass      two policies: pi_old is taken to be pi_rollout, so the clipped ratio pi_theta /
                pi_rollout carries the
                correction itself, and a weight on top of it would count the mismatch twice. Or
                REINFORCE, without a ratio: then the weight pi_theta / pi_rollout is the correction.

Weights, bounds, rejection, normalization and mode are fields of their own; `method` names usual
combinations.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fp8rl_jax.config.correction import CorrectionConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.rl.masked import Mask, check_shapes
from fp8rl_jax.rl.metrics import Maximum, Mean, Metrics
from fp8rl_jax.rl.rejection import kept_tokens
from fp8rl_jax.rl.weights import importance_weights, normalize_weights


def correction(
    log_ratio: Float[Array, "B T"], mask: Mask, config: CorrectionConfig
) -> tuple[Float[Array, "B T"], Mask, Metrics]:
    """Weights that correct the tokens of a rollout, and the mask of those that stay in the loss.

    Weights and statistics are taken over the tokens of `mask`; rejection comes after them, as in
    verl. Give it the whole batch where `config.whole_batch` names a reason; else rows may be split
    in any way.

    Args:
        log_ratio: logp_old - logp_rollout of each sampled token, float32. Padding may hold
            anything.
        mask: completion tokens.
        config: with a method by name; "recipe" has a meaning in a run only.

    Returns:
        weights: constants for the gradient, 0 outside the returned mask; 1 where the config asks
        for none, and in bypass
            mode with bypass_loss "ratio". A rejected token has weight 0.
        mask: the tokens that the loss counts: those that were not rejected, or all, as
        config.denominator says. metrics: over all tokens of `mask`, before rejection and
        normalization: correction/weight_mean and weight_max,
            correction/clip_frac of those outside the bounds. With criteria: correction/reject_frac
            of tokens and correction/reject_seq_frac of completions that lost one. With
            batch_normalize: correction/normalizer.

    Raises:
        UserError: the method is still "recipe"; or weights that are not built in, as
            `importance_weights` says.
    """
    check_shapes(mask, log_ratio=log_ratio)
    config = config.filled()
    counted = mask.astype(bool)
    log_ratio = jnp.where(counted, jax.lax.stop_gradient(log_ratio), 0.0)
    if config.mode == "bypass" and config.bypass_loss == "ratio":
        weights, outside = jnp.ones_like(log_ratio), jnp.zeros_like(counted)
    else:
        weights, outside = importance_weights(log_ratio, counted, config)
    metrics = {
        "correction/weight_mean": Mean.of(weights, counted),
        "correction/weight_max": Maximum.of(weights, counted),
        "correction/clip_frac": Mean.of(outside, counted),
    }
    if config.batch_normalize:
        weights, divisor = normalize_weights(weights, counted, config.weights)
        metrics["correction/normalizer"] = Mean(divisor, jnp.ones_like(divisor))
    if not config.reject:
        return jnp.where(counted, weights, 0.0), mask, metrics
    kept = kept_tokens(log_ratio, counted, config)
    metrics["correction/reject_frac"] = Mean.of(~kept, counted)
    metrics["correction/reject_seq_frac"] = Mean.of(
        (counted & ~kept).any(axis=1), counted.any(axis=1)
    )
    return jnp.where(kept, weights, 0.0), kept if config.denominator == "kept" else mask, metrics


def rollout_logprobs(
    behaviour_logprobs: Float[Array, "B T"],
    policy_logprobs: Float[Array, "B T"],
    config: CorrectionConfig,
    *,
    truncated: bool,
) -> Float[Array, "B T"]:
    """The rollout's log-probabilities that ratios divide by.

    Without truncation the two differ by rounding at most and policy_logprobs are taken. With it
    they answer two questions: behaviour_logprobs correct the truncation too, as far as its support
    reaches; policy_logprobs correct the numerics alone. Mismatch metrics always take
    policy_logprobs.

    Args:
        behaviour_logprobs: of the distribution that was sampled, renormalized over the tokens it
            keeps.
        policy_logprobs: of the full vocabulary at the same temperature.
        config: `truncated_sampling` chooses.
        truncated: whether top-k, top-p, min-p, bad words or a logit bias was on, as
            `check_sampling` returns it.

    Raises:
        UserError: truncated samples with `truncated_sampling = "refuse"`.
    """
    if truncated and config.truncated_sampling == "refuse":
        raise UserError(
            'rl.correction.truncated_sampling: the samples are truncated; say "behaviour" '
            "(correct the truncation) "
            'or "policy" (leave its bias)'
        )
    return (
        behaviour_logprobs
        if truncated and config.truncated_sampling == "behaviour"
        else policy_logprobs
    )


def refuse_partial(config: CorrectionConfig) -> None:
    """Refuses what cannot be computed from one micro-batch.

    Raises:
        UserError: naming the keys and the reason, where `config.whole_batch` has one.
    """
    if reasons := config.whole_batch:
        raise UserError(
            "; ".join(reasons)
            + ": a micro-batch does not know that, so it cannot be accumulated; it is computed "
            "before the "
            "update, from old log-probabilities, and the pass that makes them was skipped"
        )
