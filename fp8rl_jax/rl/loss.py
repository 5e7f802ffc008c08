"""The clipped policy loss of GRPO and its relatives, in a form that adds up over micro-batches.

For a token with advantage A, sampled under pi_old, let r = pi_theta / pi_old. Its loss is

    max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))            PPO, arXiv 1707.06347
    at most dual_clip * |A| where A < 0                           dual clip, arXiv 1912.09729
    times w                                                       rollout correction, constant, after the clipping
    plus kl_coefficient * k3(pi_theta, pi_ref)                    GRPO, arXiv 2402.03300; not weighted by w

The maximum is pessimistic: clipping takes away the reward for moving r further, never the penalty for having moved it
the wrong way. At r = 1 the clip is inactive and the gradient is the policy gradient -A grad log pi_theta. That is the
whole story where one update follows each rollout: pi_old is the current policy, r is 1 by definition, and no forward
pass is needed to learn log pi_old; stop_gradient(log pi_theta) has the right value, and r keeps the right gradient.

The loss is a sum over the tokens at hand divided by the token count of the *global* batch, which the caller knows and a
micro-batch does not. So losses and gradients of micro-batches are added, not averaged, and equal the big batch's.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from fp8rl_jax.config.rl import LossConfig, RLConfig
from fp8rl_jax.rl.correction import correction
from fp8rl_jax.rl.masked import Mask, check_shapes, clamp_log_ratio, k3, per_token
from fp8rl_jax.rl.metrics import Maximum, Mean, Metrics


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossInputs:
    """What the loss needs of one micro-batch.

    Log-probabilities are of the sampled tokens, float32, at the temperature of the rollout. Padding may hold anything.
    """

    logprobs: Float[Array, "B T"]
    """Under the policy that is trained; the only field that carries a gradient."""
    advantages: Float[Array, " B"] | Float[Array, "B T"]
    """One a completion, or one a token."""
    mask: Mask
    """[B, T]: the completion tokens in the loss."""
    denominator: Float[Array, ""]
    """`loss_denominator` of the global batch."""
    old_logprobs: Float[Array, "B T"] | None = None
    """Under the policy at the start of the update; None: the policy has not changed since, so they are `logprobs`."""
    weights: Float[Array, "B T"] | None = None
    """Importance weights of `correction`; None: 1."""
    reference_logprobs: Float[Array, "B T"] | None = None
    """Under the reference policy; needed where kl_coefficient is above 0, measured as the metric `kl` where given."""
    entropy: Float[Array, "B T"] | None = None
    """Entropy of each token's distribution, in nats; measured, not trained."""


def loss_denominator(mask: Mask, config: LossConfig) -> Float[Array, ""]:
    """What the loss of the global batch divides by, at least 1. token_mean: the number of tokens in `mask`."""
    return jnp.maximum(_aggregate(mask, mask, config).denominator, 1.0)


def policy_loss(inputs: LossInputs, config: LossConfig) -> tuple[Float[Array, ""], Metrics]:
    """The clipped policy loss of one micro-batch, as its part of the global batch's loss.

    Log-ratios are clamped to +-20 before exp, as in verl; beyond that a token has no gradient. A NaN at a token in the
    mask makes the loss NaN. Departs from verl in the KL term, which has no cap of 10 a token here.

    Args:
        inputs: log-probabilities, advantages, mask and the global denominator.
        config: clip bounds, dual clip, KL coefficient, aggregation.

    Returns:
        loss: summed over micro-batches it is the global loss, and its gradients add likewise.
        metrics: `loss`, `policy_loss` (without KL), `approx_kl` (k3 of KL(pi_old || pi_theta)), `ratio_max`;
            as fractions of all tokens `clip_ratio/low_mean` (A < 0, r < 1 - clip_low), `clip_ratio/high_mean` (A > 0,
            r > 1 + clip_high), `clip_ratio/region_mean` (either), and where dual_clip is set `clip_ratio/dual_mean`
            (A < 0, r > dual_clip); `kl` (to the reference) and `entropy` where their inputs are given.

    Raises:
        ValueError: an array's shape is not the mask's, or the KL term has no reference.
    """
    check_shapes(
        inputs.mask,
        logprobs=inputs.logprobs,
        old_logprobs=inputs.old_logprobs,
        weights=inputs.weights,
        reference_logprobs=inputs.reference_logprobs,
        entropy=inputs.entropy,
    )
    if config.kl_coefficient > 0 and inputs.reference_logprobs is None:
        raise ValueError("rl.kl_coefficient is above 0, but reference_logprobs were not given")
    mask = inputs.mask.astype(bool)
    advantages = jax.lax.stop_gradient(per_token(inputs.advantages, mask))
    old = inputs.logprobs if inputs.old_logprobs is None else inputs.old_logprobs

    log_ratio = _log_ratio(inputs.logprobs, jax.lax.stop_gradient(old), mask)
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
    surrogate = jnp.maximum(-advantages * ratio, -advantages * clipped)
    if config.dual_clip is not None:
        surrogate = jnp.where(advantages < 0, jnp.minimum(surrogate, -advantages * config.dual_clip), surrogate)
    if inputs.weights is not None:
        surrogate = surrogate * jax.lax.stop_gradient(inputs.weights)

    low = (advantages < 0) & (ratio < 1 - config.clip_low)
    high = (advantages > 0) & (ratio > 1 + config.clip_high)
    metrics = {
        "policy_loss": _aggregate(surrogate, mask, config),
        "approx_kl": Mean.of(k3(log_ratio), mask),
        "ratio_max": Maximum.of(ratio, mask),
        "clip_ratio/low_mean": Mean.of(low, mask),
        "clip_ratio/high_mean": Mean.of(high, mask),
        "clip_ratio/region_mean": Mean.of(low | high, mask),
    }
    if config.dual_clip is not None:
        metrics["clip_ratio/dual_mean"] = Mean.of((advantages < 0) & (ratio > config.dual_clip), mask)
    if inputs.entropy is not None:
        metrics["entropy"] = Mean.of(inputs.entropy, mask)

    objective = surrogate
    if inputs.reference_logprobs is not None:
        kl = k3(_log_ratio(jax.lax.stop_gradient(inputs.reference_logprobs), inputs.logprobs, mask))
        metrics["kl"] = Mean.of(kl, mask)
        if config.kl_coefficient > 0:
            objective = objective + config.kl_coefficient * kl
    metrics["loss"] = _aggregate(objective, mask, config)
    return metrics["loss"].numerator / inputs.denominator, metrics


def corrected_policy_loss(
    inputs: LossInputs, rollout_logprobs: Float[Array, "B T"], config: RLConfig
) -> tuple[Float[Array, ""], Metrics]:
    """`policy_loss` of a rollout whose policy is not quite the trainer's, with the correction that the config names.

    decoupled: r = pi_theta / pi_old in the clip, weights from rho = pi_old / pi_rollout after it.
    bypass: r = pi_theta / pi_rollout in the clip, no weights; old_logprobs are not needed and not read by the loss.

    Args:
        inputs: without weights; old_logprobs may be None where one update follows each rollout.
        rollout_logprobs: of the sampled tokens, as the function `rollout_logprobs` selects them.
        config: loss and correction (method resolved).

    Returns:
        Loss and metrics of `policy_loss`, and the metrics of `correction`.

    Raises:
        ValueError: the inputs already have weights.
    """
    if inputs.weights is not None:
        raise ValueError("corrected_policy_loss computes the weights; leave LossInputs.weights unset")
    check_shapes(inputs.mask, rollout_logprobs=rollout_logprobs)
    old = jax.lax.stop_gradient(inputs.logprobs if inputs.old_logprobs is None else inputs.old_logprobs)
    weights, mask, correction_metrics = correction(old - rollout_logprobs, inputs.mask, config.correction)
    anchor = rollout_logprobs if config.correction.mode == "bypass" else old
    loss, metrics = policy_loss(dataclasses.replace(inputs, old_logprobs=anchor, weights=weights, mask=mask), config)
    return loss, metrics | correction_metrics


def _aggregate(values: Shaped[Array, "B T"], mask: Mask, config: LossConfig) -> Mean:
    match config.aggregation:
        case "token_mean":
            return Mean.of(values, mask)


def _log_ratio(numerator: Float[Array, "B T"], denominator: Float[Array, "B T"], mask: Mask) -> Float[Array, "B T"]:
    return clamp_log_ratio(jnp.where(mask, numerator - denominator, 0.0))
