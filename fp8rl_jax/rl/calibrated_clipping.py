"""Calibrated clipping (arXiv 2609.22870): bounds that clip as much of a noisy ratio as PPO's clip
of the exact one.

A trainer in FP8 computes log pi_theta and log pi_old each with its own rounding, so r = pi_theta /
pi_old carries the noise of both. The distribution of r widens, and clipping is one-sided: a token
with A < 0 that noise moves below 1 - clip_low loses its whole gradient, and with it the penalty
that it should have had. Bad tokens then go unpunished, and the entropy rises. The remedy compares
the ratios of one batch with those of a forward in which nothing is quantized, r':

    lower bound L    the same part of the tokens with A < 0 is clipped:
                     F(L) = F'(1 - clip_low), F their distribution of r
    upper bound H    the same balance of updates, once that part is fixed:
                     P(H) / N(L) = P'(1 + clip_high) / N'(1 - clip_low)
                     P(h) = sum of A r over A > 0, r <= h
                     N(l) = sum of |A| r over A < 0, r >= l

A looser L alone punishes too much, which is why H has to follow. The paper itself could not be
read: the quantile rule, the balance, 20 steps between calibrations, its two passes and its starting
bounds are from accounts of it that agree. That a token's contribution is its weight in the
gradient, |A| r and 0 where it is clipped, is how "effective update" is read here. Departures: where
r' clips no token of a sign, the batch does not say how far that bound may be tightened, and it is
not; and bounds stay within [lowest, highest]. Sequence ratios and other objectives are not in the
paper and are refused.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from fp8rl_jax.config.rl import RLConfig
from fp8rl_jax.rl.masked import Mask, check_shapes, masked_count, masked_sum, safe_divide


def calibrated_bounds(
    ratio: Float[Array, "B T"],
    exact_ratio: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Mask,
    config: RLConfig,
) -> tuple[Float[Array, " bounds"], dict[str, Float[Array, ""]]]:
    """The bounds (L, H) of `ratio`, by the table above.

    Args:
        ratio: r of the trainer's own forward, as the loss clips it.
        exact_ratio: r' of the same tokens and weights, from forwards in which nothing is quantized.
        advantages: one a token; times the importance weights, where there are some.
        mask: the tokens in the loss; padding may hold anything.
        config: clip_low and clip_high, which say what is to be clipped of r'; clip_calibration's
            lowest and highest.

    Returns:
        Bounds, float32 [2]: L, H. Metrics: `clip_calibration/low_frac`, F'(1 - clip_low);
        `clip_calibration/balance`, the ratio of updates that H restores;
        `clip_calibration/false_low_frac`, the part of the tokens with A < 0 that r puts below 1 -
        clip_low and r' does not.
    """
    check_shapes(mask, ratio=ratio, exact_ratio=exact_ratio, advantages=advantages)
    mask, low, high = mask.astype(bool), 1 - config.clip_low, 1 + config.clip_high
    negative, positive = mask & (advantages < 0), mask & (advantages > 0)

    clipped = masked_sum(exact_ratio < low, negative)
    ordered = jnp.sort(jnp.where(negative, ratio, jnp.inf), axis=None)
    # the first that is kept; an infinity where none is left
    lower = ordered[clipped.astype(jnp.int32)]
    lower = jnp.where(clipped > 0, lower, jnp.minimum(lower, low))
    lower = jnp.where(jnp.isfinite(lower), lower, low)

    weight, exact = jnp.abs(advantages) * ratio, jnp.abs(advantages) * exact_ratio
    balance = safe_divide(
        masked_sum(exact, positive & (exact_ratio <= high)),
        masked_sum(exact, negative & (exact_ratio >= low)),
    )
    wanted = balance * masked_sum(weight, negative & (ratio >= lower))
    order = jnp.argsort(jnp.where(positive, ratio, jnp.inf), axis=None)
    kept = jnp.cumsum(jnp.where(positive, weight, 0.0).reshape(-1)[order])
    count = masked_count(positive).astype(jnp.int32)
    # the last one where all are too little
    place = jnp.minimum(jnp.searchsorted(kept, wanted), jnp.maximum(count - 1, 0))
    upper = jnp.where(positive, ratio, jnp.inf).reshape(-1)[order][place]
    upper = jnp.where(masked_sum(exact_ratio > high, positive) > 0, upper, jnp.maximum(upper, high))
    upper = jnp.where((count > 0) & (wanted > 0), upper, high)

    settings = config.clip_calibration
    bounds = jnp.stack([jnp.maximum(lower, settings.lowest), jnp.minimum(upper, settings.highest)])
    negatives = masked_count(negative)
    metrics = {
        "low_frac": safe_divide(clipped, negatives),
        "balance": balance,
        "false_low_frac": safe_divide(
            masked_sum((ratio < low) & (exact_ratio >= low), negative), negatives
        ),
    }
    return bounds, {f"clip_calibration/{name}": value for name, value in metrics.items()}
