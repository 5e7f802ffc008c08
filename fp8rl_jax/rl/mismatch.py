"""How far the rollout's policy is from the trainer's, on the tokens that the rollout sampled.

Both sides give log-probabilities of the same tokens with the same weights, so every number here
would be 0 (or 1, for ratios) if precision and kernels made no difference. With
d = log pi_train - log pi_rollout, rho = exp(d), C = max_weight, and E the mean over tokens (for ppl
and chi2_seq: over completions), under the prefix mismatch/:

    kl                       E[-d]: KL(rollout || train), unbiased, of either sign on a batch
    k3                       E[rho - 1 - d]: the same with less variance; NeMo RL's gen_kl_error,
                             which it wants below 1e-3
    policy_kl_error          E[1 / rho - 1 + d]: k3 with the policies exchanged, NeMo RL's
                             KL(train || rollout). Its tokens are the rollout's, not the trainer's,
                             so it is a measure and no unbiased estimate
    js_divergence_error      E[(k3(log pi_train / m) + k3(log pi_rollout / m)) / 2] with
                             m = (pi_train + pi_rollout) / 2 of the token and
                             k3(x) = exp(x) - 1 - x: NeMo RL's Jensen-Shannon divergence, the same
                             for either order
    token_mult_prob_error    E[exp |d|]: NeMo RL's alarm; healthy at 1.01 - 1.02, look closer above
                             1.05
    logprob_abs_diff_mean    E[|d|] in nats, and logprob_abs_diff_max
    pearson                  correlation of the two probabilities, as in verl
    ppl_train, ppl_rollout   E[exp(-mean logp)]
    ppl_ratio                E[ppl_train / ppl_rollout]
    log_ppl_diff             E[log of that ratio], and log_ppl_abs_diff of its absolute value
    chi2_token, chi2_seq     E[rho^2] - 1, rho of a token or of a whole completion; verl warns above
                             1 (token)
    is_mean                  E[rho]: 1 in expectation; verl warns outside 0.5 - 2
    is_ess                   effective part of the sample, E[w]^2 / E[w^2] with w = min(rho, C);
                             verl warns below 0.3
    is_clip_frac             part of the tokens with rho > C, which token TIS truncates
    is_low_frac              part of the tokens with rho < 1 / C, which it does not change

The last two come by sign of the advantage as well, ending in _positive and _negative. The is_*
numbers describe the two policies, whether or not a correction is in use, so that runs with and
without compare. Formulas: verl's rollout correction helper; NeMo RL's ClippedPGLossFn
(nemo_rl/algorithms/loss/loss_functions.py). Departures: completions without tokens are left out
(verl counts them with perplexity 1), and is_mean is taken before the truncation.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from fp8rl_jax.config.rl import CorrectionConfig
from fp8rl_jax.rl.metrics import (
    Mask,
    check_shapes,
    clamp_log_ratio,
    k3,
    masked_count,
    masked_max,
    masked_mean,
    masked_sum,
    per_token,
    safe_divide,
)


def mismatch_metrics(
    rollout_logprobs: Float[Array, "B T"],
    train_logprobs: Float[Array, "B T"],
    mask: Mask,
    advantages: Float[Array, " B"] | Float[Array, "B T"] | None = None,
    config: CorrectionConfig | None = None,
) -> dict[str, Float[Array, ""]]:
    """Compute all mismatch metrics of one batch, by the table at the top of this file.

    Give it the full batch: the arrays are small, and several metrics are no sums over
    micro-batches. A NaN or infinite log-probability at a token makes at least kl and
    logprob_abs_diff_max non-finite; only is_* and chi2_* clamp log-ratios (to +-20, as in verl).
    Over no tokens at all every metric is 0.

    Args:
        rollout_logprobs: the rollout's policy_logprobs (full vocabulary, sampling temperature),
            float32; its behaviour_logprobs where the trainer's are over the same supports.
        train_logprobs: the trainer's, of the same weights, tokens and temperature.
        mask: completion tokens; padding may hold anything.
        advantages: adds the metrics by sign of the advantage.
        config: its max_weight is C; 2 unless it or its preset sets another.

    Returns:
        Scalars by name, float32.
    """
    check_shapes(mask, rollout_logprobs=rollout_logprobs, train_logprobs=train_logprobs)
    cap = (config or CorrectionConfig()).value("max_weight")
    mask = mask.astype(bool)
    rollout, train = (
        jnp.where(mask, logprobs, 0.0) for logprobs in (rollout_logprobs, train_logprobs)
    )
    difference = train - rollout
    ratio = jnp.exp(clamp_log_ratio(difference))
    metrics = {
        "kl": masked_mean(-difference, mask),
        "k3": masked_mean(k3(difference), mask),
        "policy_kl_error": masked_mean(k3(-difference), mask),
        "js_divergence_error": masked_mean(_jensen_shannon(difference), mask),
        "token_mult_prob_error": masked_mean(jnp.exp(jnp.abs(difference)), mask),
        "logprob_abs_diff_mean": masked_mean(jnp.abs(difference), mask),
        "logprob_abs_diff_max": masked_max(jnp.abs(difference), mask),
        "chi2_token": _chi2(difference, mask),
        "pearson": _pearson(jnp.exp(rollout), jnp.exp(train), mask),
        "is_mean": masked_mean(ratio, mask),
        "is_ess": _effective_sample(jnp.minimum(ratio, cap), mask),
        **_sequence_metrics(rollout, train, mask),
        **_clip_fractions(ratio, cap, mask),
    }
    if advantages is not None:
        advantages = per_token(advantages, mask)
        for name, sign in (("positive", advantages > 0), ("negative", advantages < 0)):
            metrics |= {
                f"{key}_{name}": value
                for key, value in _clip_fractions(ratio, cap, mask & sign).items()
            }
    return {f"mismatch/{name}": value for name, value in metrics.items()}


def _sequence_metrics(
    rollout: Float[Array, "B T"], train: Float[Array, "B T"], mask: Mask
) -> dict[str, Float[Array, ""]]:
    filled = mask.any(axis=1)
    mean_rollout, mean_train = masked_mean(rollout, mask, axis=1), masked_mean(train, mask, axis=1)
    log_ppl_diff = mean_rollout - mean_train
    return {
        "ppl_train": masked_mean(jnp.exp(-mean_train), filled),
        "ppl_rollout": masked_mean(jnp.exp(-mean_rollout), filled),
        "ppl_ratio": masked_mean(jnp.exp(log_ppl_diff), filled),
        "log_ppl_diff": masked_mean(log_ppl_diff, filled),
        "log_ppl_abs_diff": masked_mean(jnp.abs(log_ppl_diff), filled),
        "chi2_seq": _chi2(masked_sum(train - rollout, mask, axis=1), filled),
    }


def _jensen_shannon(difference: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """NeMo RL's formula from d alone: the logarithms of both probabilities over their mean are -s
    and -s - |d|, in some order."""
    gap = jnp.abs(difference)
    to_mean = -jnp.log1p(jnp.expm1(-gap) / 2)
    return 0.5 * (k3(to_mean) + k3(to_mean - gap))


def _chi2(log_ratio: Float[Array, "*axes"], mask: Mask) -> Float[Array, ""]:
    return masked_mean(jnp.expm1(2.0 * clamp_log_ratio(log_ratio)), mask)


def _clip_fractions(
    ratio: Float[Array, "B T"], cap: float, mask: Mask
) -> dict[str, Float[Array, ""]]:
    return {
        "is_clip_frac": masked_mean(ratio > cap, mask),
        "is_low_frac": masked_mean(ratio < 1.0 / cap, mask),
    }


def _effective_sample(weights: Float[Array, "B T"], mask: Mask) -> Float[Array, ""]:
    return safe_divide(
        masked_sum(weights, mask) ** 2, masked_count(mask) * masked_sum(weights**2, mask)
    )


def _pearson(x: Float[Array, "B T"], y: Float[Array, "B T"], mask: Mask) -> Float[Array, ""]:
    x, y = x - masked_mean(x, mask), y - masked_mean(y, mask)
    return safe_divide(
        masked_sum(x * y, mask), jnp.sqrt(masked_sum(x**2, mask)) * jnp.sqrt(masked_sum(y**2, mask))
    )
