"""Rollout correction: weights and rejection for tokens that a slightly different policy sampled.

The rollout runs in FP8, the trainer in bfloat16; even with equal formats, a decode program and a
training program round differently. So the samples come from pi_rollout, while the loss believes
that they come from the trainer's pi_old. Each token's expectation is repaired by the weight

    rho = pi_old / pi_rollout = exp(logp_train - logp_rollout)

whose variance is bounded, and samples that are beyond repair are rejected. All ratios in this
library are pi_train / pi_rollout. Two ways to use it:

    decoupled   three policies, arXiv 2110.00641: clip pi_theta / pi_old, then multiply the token's
                loss by its weight.
    bypass      two policies: pi_old is taken to be pi_rollout, so the clipped ratio
                pi_theta / pi_rollout carries the correction itself, and a weight on top of it would
                count the mismatch twice. Or REINFORCE, without a ratio: then the weight
                pi_theta / pi_rollout is the correction.

Weights, bounds, rejection, normalization and mode are fields of their own; `method` names usual
combinations.

Importance weights. The weight of a token is its own rho (biased, of low variance: the tokens before
it are taken as the rollout made them) or rho of its whole sequence (unbiased, of a variance that
grows with length). Bounds keep either in check:

    truncate    min(rho, max_weight): truncated importance sampling (TIS),
                https://fengyao.notion.site/off-policy-rl; FP8-RL, arXiv 2601.18150, prints it as
                clip(rho, C). min_weight raises small weights, if it is above 0.
    mask        rho inside [min_weight, max_weight], else 0: IcePop, arXiv 2510.18855. The token's
                gradient is lost, but it still counts in the denominator.
    keep        rho: plain importance sampling, NeMo RL's correction without a truncation type.

Something else than rho is a function of one's own with the signature of `token` and `sequence`
(docs/objectives.md), `rl.correction.weights = "module:function"`; bounds then act on what it
returns:

    weights(inputs: RatioInputs, config: CorrectionConfig, **arguments) -> weights [B, T]

Rejection. Truncation tames the weight of a bad sample and still learns from it. Rejection does not
learn from it: a sequence in which the two policies disagree may owe its reward to tokens that the
trainer's policy would hardly produce. With x = log rho of a token, a statistic of a token or of a
sequence is held to bounds:

    k1          x, compared as a ratio exp(x) with [low, high]. seq_sum: the product of the ratios
                (MIS); seq_mean: their geometric mean, which does not grow with length ("geometric
                rejection")
    k2          x^2 / 2, at most high
    k3          exp(x) - 1 - x, at most high; seq_mean_k3 estimates the KL divergence, is never
                negative and, unlike k1, does not let a high token hide a low one
    error       exp |x|, at most high; its mean over a sequence is NeMo RL's
                seq_logprob_error_threshold
    binary_kl   the larger of D(p, q) and D(q, p), at most high, with p and q the probabilities of
                the sampled token under the two policies and D(p, q) = p log(p / q) + (1 - p)
                log((1 - p) / (1 - q)), the KL divergence over "this token" and "another": KPop. A
                bound of it is wide in the ratio where the token is rare and narrow where it is
                likely

    token_*     of the token itself, which is rejected alone
    seq_*       the sum (seq_sum_), mean (seq_mean_) or maximum (seq_max_) over the sequence: one
                bad token rejects them all ("veto")

Several criteria are joined by "and". Sources: https://richardli.xyz/rl-collapse (parts 1 - 3),
arXiv 2512.23075 (trust region masking), k1 - k3: http://joschu.net/blog/kl-approx.html, KPop:
https://ringtech.notion.site/kpop. verl's bounds of k1 act on 1 / rho: `inverse_k1`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fp8rl_jax.config.correction import CorrectionConfig, Criterion
from fp8rl_jax.errors import UserError
from fp8rl_jax.rl.functions import call, floats
from fp8rl_jax.rl.metrics import (
    Mask,
    Maximum,
    Mean,
    Metrics,
    check_shapes,
    clamp_log_ratio,
    k3,
    masked_max,
    masked_mean,
    masked_sum,
)


def correction(
    log_ratio: Float[Array, "B T"],
    mask: Mask,
    config: CorrectionConfig,
    logprobs: Float[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T"], Mask, Metrics]:
    """Compute the weights of a rollout's tokens, and the mask of those that stay in the loss.

    Weights and statistics are taken over the tokens of `mask`; rejection comes after them, as in
    verl. Give it the whole batch where `config.whole_batch` names a reason; else rows may be split
    in any way.

    Args:
        log_ratio: logp_old - logp_rollout of each sampled token, float32. Padding may hold
            anything.
        mask: completion tokens.
        config: with a method by name; "recipe" has a meaning in a run only.
        logprobs: logp_old itself, float32, which a criterion of binary_kl needs beside its
            difference.

    Returns:
        weights: constants for the gradient, 0 outside the returned mask; 1 where the config asks
            for none, and in bypass mode with bypass_loss "ratio". A rejected token has weight 0.
        mask: the tokens that the loss counts: those that were not rejected, or all, as
            config.denominator says.
        metrics: over all tokens of `mask`, before rejection and normalization:
            correction/ratio_mean of rho itself, and correction/ratio_outside_frac of tokens whose
            rho is outside [0.9, 1.1] (huggingface/trl #7269 reports both);
            correction/weight_mean and weight_max, correction/clip_frac of those outside the bounds.
            With criteria: correction/reject_frac of tokens and correction/reject_seq_frac of
            completions that lost one. With batch_normalize: correction/normalizer.

    Raises:
        UserError: the method is still "recipe"; or weights that are not built in, as
            `importance_weights` says.
        ValueError: another shape than the mask's, or logprobs are missing.
    """
    check_shapes(mask, log_ratio=log_ratio)
    config = config.filled()
    counted = mask.astype(bool)
    log_ratio = jnp.where(counted, jax.lax.stop_gradient(log_ratio), 0.0)
    if config.mode == "bypass" and config.bypass_loss == "ratio":
        weights, outside = jnp.ones_like(log_ratio), jnp.zeros_like(counted)
    else:
        weights, outside = importance_weights(log_ratio, counted, config)
    ratio = jnp.exp(clamp_log_ratio(log_ratio))
    metrics = {
        "correction/ratio_mean": Mean.of(ratio, counted),
        "correction/ratio_outside_frac": Mean.of((ratio < 0.9) | (ratio > 1.1), counted),
        "correction/weight_mean": Mean.of(weights, counted),
        "correction/weight_max": Maximum.of(weights, counted),
        "correction/clip_frac": Mean.of(outside, counted),
    }
    if config.batch_normalize:
        weights, divisor = _normalize_weights(weights, counted, config.value("weights"))
        metrics["correction/normalizer"] = Mean(divisor, jnp.ones_like(divisor))
    if not config.reject:
        return jnp.where(counted, weights, 0.0), mask, metrics
    kept = kept_tokens(log_ratio, counted, config, logprobs)
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
    """Choose the rollout's log-probabilities that ratios divide by.

    Without truncation the two differ by rounding at most and policy_logprobs are taken. With it
    they answer two questions: behaviour_logprobs correct the truncation too, as far as its support
    reaches; policy_logprobs correct the numerics alone. Mismatch metrics take policy_logprobs. Of a
    trainer that renormalizes over the same supports ("replay") both take behaviour_logprobs, and
    there is no other difference than the numerics.

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
            'rl.correction.truncated_sampling: the samples are truncated; say "replay" '
            '(renormalize alike in the trainer), "behaviour" (correct the truncation) or "policy" '
            "(leave its bias)"
        )
    behaviour = truncated and config.truncated_sampling in ("behaviour", "replay")
    return behaviour_logprobs if behaviour else policy_logprobs


def refuse_partial(config: CorrectionConfig) -> None:
    """Refuse what cannot be computed from one micro-batch.

    Raises:
        UserError: naming the keys and the reason, where `config.whole_batch` has one.
    """
    if reasons := config.whole_batch:
        raise UserError(
            "; ".join(reasons)
            + ": a micro-batch does not know that, so it cannot be accumulated; it is computed "
            "before the update, from old log-probabilities, and the pass that makes them "
            "was skipped"
        )


WEIGHTS_KEY = "rl.correction.weights"


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
    """Weigh each token by its rho."""
    return importance_ratio(inputs.log_ratio, config)


def sequence(inputs: RatioInputs, config: CorrectionConfig) -> Float[Array, "B T"]:
    """Weigh each token by rho of its whole sequence."""
    total = masked_sum(inputs.log_ratio, inputs.mask, axis=1)[:, None]
    return importance_ratio(jnp.broadcast_to(total, inputs.log_ratio.shape), config)


BUILT_IN_WEIGHTS: dict[str, Weights] = {"token": token, "sequence": sequence}
"""All but "none"."""


def importance_ratio(
    log_ratio: Float[Array, "B T"], config: CorrectionConfig
) -> Float[Array, "B T"]:
    """Compute rho from its logarithm.

    config.overflow "clamp" clamps log-ratios to +-20, as in verl; "zero" gives 0 for what is not
    finite.
    """
    if config.value("overflow") == "clamp":
        return jnp.exp(clamp_log_ratio(log_ratio))
    return jnp.nan_to_num(jnp.exp(log_ratio), nan=0.0, posinf=0.0, neginf=0.0)


def importance_weights(
    log_ratio: Float[Array, "B T"], mask: Mask, config: CorrectionConfig
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Compute the weights of all tokens, and where they lay outside the bounds.

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
    nowhere = jnp.zeros(log_ratio.shape, bool)
    name, bounds = config.value("weights"), config.value("bounds")
    if name == "none":
        return jnp.ones_like(log_ratio), nowhere
    mask = mask.astype(bool)
    inputs = RatioInputs(jnp.where(mask, log_ratio, 0.0), mask)
    ratio = call(WEIGHTS_KEY, name, BUILT_IN_WEIGHTS, inputs, config, config.weights_args)
    ratio = floats(WEIGHTS_KEY, name, ratio, log_ratio.shape, "[B, T]")
    if bounds == "keep":
        return ratio, nowhere
    low, high = config.value("min_weight"), config.value("max_weight")
    outside = (ratio < low) | (ratio > high)
    weights = jnp.where(outside, 0.0, ratio) if bounds == "mask" else jnp.clip(ratio, low, high)
    return weights, outside


def _normalize_weights(
    weights: Float[Array, "B T"], mask: Mask, level: str
) -> tuple[Float[Array, "B T"], Float[Array, ""]]:
    """Divide weights by their mean over the whole batch, so that they average to 1.

    verl's batch normalization.

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


def kept_tokens(
    log_ratio: Float[Array, "B T"],
    mask: Mask,
    config: CorrectionConfig,
    logprobs: Float[Array, "B T"] | None = None,
) -> Bool[Array, "B T"]:
    """Find the tokens of `mask` that pass every criterion of `config.reject`.

    Log-ratios are clamped to +-20 with overflow "clamp", as in verl; with "zero", as in NeMo RL,
    one that is not finite counts as 0. Departs from both in what a NaN does under "clamp": it
    rejects nothing, so that it reaches the loss, where it is seen, and is not taken for a sample to
    be left out.

    Args:
        log_ratio: log rho of each sampled token; padding may hold anything.
        mask: completion tokens.
        config: reject, inverse_k1, overflow.
        logprobs: logp_old, as in `correction`.

    Raises:
        ValueError: a criterion of binary_kl, and no logprobs.
    """
    check_shapes(mask, log_ratio=log_ratio, logprobs=logprobs)
    kept = mask.astype(bool)
    log_ratio = jnp.where(kept, log_ratio, 0.0)
    if config.value("overflow") == "clamp":
        log_ratio = clamp_log_ratio(log_ratio)
    else:
        log_ratio = jnp.nan_to_num(log_ratio, nan=0.0, posinf=0.0, neginf=0.0)
    for criterion in config.criteria():
        if criterion.statistic != "binary_kl":
            statistic = _statistic(log_ratio, mask, criterion, config.value("inverse_k1"))
        elif logprobs is None:
            raise ValueError("rl.correction.reject: binary_kl needs logprobs, which were not given")
        else:
            statistic = _binary_kl(jnp.where(kept, logprobs, 0.0), log_ratio)
        low, high = criterion.low, criterion.high
        if criterion.statistic == "k1":
            low, high = math.log(low), math.log(high)
        kept &= ~((statistic < low) | (statistic > high))
    return kept


def _statistic(
    log_ratio: Float[Array, "B T"], mask: Mask, criterion: Criterion, inverse_k1: bool
) -> Float[Array, "B T"] | Float[Array, "B 1"]:
    match criterion.statistic:
        case "k1":
            values = -log_ratio if inverse_k1 else log_ratio
        case "k2":
            values = 0.5 * log_ratio**2
        case "k3":
            values = k3(log_ratio)
        case _:
            values = jnp.exp(jnp.abs(log_ratio))
    if criterion.level == "token":
        return values
    reductions = {"seq_sum": masked_sum, "seq_mean": masked_mean, "seq_max": masked_max}
    return reductions[criterion.level](values, mask, axis=1)[:, None]


def _binary_kl(
    logprobs: Float[Array, "B T"], log_ratio: Float[Array, "B T"]
) -> Float[Array, "B T"]:
    """The larger of D(p, q) and D(q, p), with p = exp(logprobs) and q = p / rho. Probabilities are
    held in [1e-6, 1 - 1e-6], as in prime-rl #3283: 1 - 1e-8, AReaL's, is 1 in float32."""
    p, q = (
        jnp.clip(jnp.exp(x), 1e-6, 1 - 1e-6)
        for x in (jax.lax.stop_gradient(logprobs), jax.lax.stop_gradient(logprobs) - log_ratio)
    )
    of_token, of_others = jnp.log(p / q), jnp.log((1 - p) / (1 - q))
    return jnp.maximum(p * of_token + (1 - p) * of_others, -(q * of_token + (1 - q) * of_others))
