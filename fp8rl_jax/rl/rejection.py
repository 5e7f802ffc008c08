"""Rejection: tokens or sequences that are too far from the trainer's policy are left out of the
loss.

Truncation tames the weight of a bad sample and still learns from it. Rejection does not learn from
it: a sequence in which the two policies disagree may owe its reward to tokens that the trainer's
policy would hardly produce. With x = log rho of a token (rho = pi_train / pi_rollout), a statistic
of a token or of a sequence is held to bounds:

    k1      x, compared as a ratio exp(x) with [low, high]. seq_sum: the product of the ratios
            (MIS); seq_mean: their
            geometric mean, which does not grow with length ("geometric rejection")
    k2      x^2 / 2, at most high
    k3      exp(x) - 1 - x, at most high; seq_mean_k3 estimates the KL divergence, is never negative
            and, unlike k1, does
            not let a high token hide a low one
    error   exp |x|, at most high; its mean over a sequence is NeMo RL's seq_logprob_error_threshold

    token_*     of the token itself, which is rejected alone
    seq_sum_*   the sum over the sequence, seq_mean_* its mean, seq_max_* its maximum: one bad token
                rejects them all ("veto")

Several criteria are joined by "and". Sources: https://richardli.xyz/rl-collapse (parts 1 - 3),
arXiv 2512.23075 (trust region masking), k1 - k3: http://joschu.net/blog/kl-approx.html. verl's
bounds of k1 act on 1 / rho: `inverse_k1`.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fp8rl_jax.config.correction import CorrectionConfig, Criterion
from fp8rl_jax.rl.masked import Mask, clamp_log_ratio, k3, masked_max, masked_mean, masked_sum


def kept_tokens(
    log_ratio: Float[Array, "B T"], mask: Mask, config: CorrectionConfig
) -> Bool[Array, "B T"]:
    """The tokens of `mask` that pass every criterion of `config.reject`.

    Log-ratios are clamped to +-20 with overflow "clamp", as in verl; with "zero", as in NeMo RL,
    one that is not finite counts as 0. Departs from both in what a NaN does under "clamp": it
    rejects nothing, so that it reaches the loss, where it is seen, and is not taken for a sample to
    be left out.

    Args:
        log_ratio: log rho of each sampled token; padding may hold anything.
        mask: completion tokens.
        config: reject, inverse_k1, overflow.
    """
    kept = mask.astype(bool)
    log_ratio = jnp.where(kept, log_ratio, 0.0)
    if config.value("overflow") == "clamp":
        log_ratio = clamp_log_ratio(log_ratio)
    else:
        log_ratio = jnp.nan_to_num(log_ratio, nan=0.0, posinf=0.0, neginf=0.0)
    for criterion in config.criteria():
        statistic = _statistic(log_ratio, mask, criterion, config.value("inverse_k1"))
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
    reduce = {"seq_sum": masked_sum, "seq_mean": masked_mean, "seq_max": masked_max}[
        criterion.level
    ]
    return reduce(values, mask, axis=1)[:, None]
