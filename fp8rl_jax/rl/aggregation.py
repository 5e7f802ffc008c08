"""From losses of tokens to the loss of a batch, as a sum over micro-batches divided by something of
the global batch.

    token_mean      sum over tokens / tokens                      DAPO, arXiv 2503.14476: a long
                    completion weighs more
    sequence_mean   sum over completions of token means / completions     GRPO, arXiv 2402.03300:
                    each weighs the same, and a
                    token of a long one less
    sequence_sum    sum over tokens / completions                 the policy gradient of whole
                    completions, RLOO's
    fixed_length    sum over tokens / (completions * length)      Dr. GRPO, arXiv 2503.20783: as
                    before at another scale

A completion counts while it has a token in the mask. Departs from verl in that: there, completions
that rejection has emptied still count in the three sequence modes, where the trainer gives the size
of the global batch.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from fp8rl_jax.config.rl import LossConfig
from fp8rl_jax.rl.masked import Mask, masked_count, masked_mean, masked_sum
from fp8rl_jax.rl.metrics import Mean


def aggregate(values: Shaped[Array, "B T"], mask: Mask, config: LossConfig) -> Mean:
    """The rows' share of the batch's mean: numerators and denominators of micro-batches add up to
    the whole batch's."""
    if config.aggregation == "token_mean":
        return Mean.of(values, mask)
    completions = masked_count(mask.astype(bool).any(axis=1))
    match config.aggregation:
        case "sequence_mean":
            return Mean(masked_mean(values, mask, axis=1).sum(), completions)
        case "sequence_sum":
            return Mean(masked_sum(values, mask), completions)
        case _:
            length = mask.shape[1] if config.fixed_length is None else config.fixed_length
            return Mean(masked_sum(values, mask), completions * length)


def loss_denominator(mask: Mask, config: LossConfig) -> Float[Array, ""]:
    """What the loss of the global batch divides by, at least 1.

    Args:
        mask: the tokens in the loss, of the whole batch: after a rejection that takes tokens out of
            the denominator.
        config: aggregation, fixed_length.
    """
    return jnp.maximum(aggregate(mask, mask, config).denominator, 1.0)
