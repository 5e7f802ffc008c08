"""Group advantages: the other completions of a prompt are the baseline, so no value network is needed.

A completion is better or worse than its siblings, never good or bad by itself. GRPO divides the difference by the
group's standard deviation, which gives an easy and a hard prompt the same say; Dr. GRPO does not, because the division
over-weights prompts that are nearly always, or nearly never, solved. A group of equal rewards teaches nothing and gets
exact zeros: rewards are compared with each other, since the rounding of their mean, divided by epsilon, could pass for
a signal.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fp8rl_jax.config.rl import AdvantageConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.rl.masked import masked_count, masked_mean, masked_sum


def group_advantages(
    rewards: Float[Array, " B"],
    samples_per_prompt: int,
    config: AdvantageConfig,
    valid: Bool[Array, " B"] | None = None,
) -> Float[Array, " B"]:
    """Advantages of completions against the others of their prompt.

    GRPO (arXiv 2402.03300): (r - mean) / (std + epsilon), std dividing by n - ddof.
    Dr. GRPO (arXiv 2503.20783): r - mean.

    Args:
        rewards: one scalar a completion; row b belongs to prompt b // samples_per_prompt.
        samples_per_prompt: n, at least 2.
        config: estimator, ddof and epsilon.
        valid: False where a completion has no reward (its grader failed): it gets 0 and is left out of its group's mean
            and standard deviation. By default all are valid.

    Returns:
        One constant advantage a completion, float32. A non-finite reward that is not marked invalid makes its group's
        advantages NaN.

    Raises:
        UserError: fewer than 2 samples a prompt, or a number of rewards that they do not divide.
    """
    groups, counted = _groups(rewards, samples_per_prompt, valid)
    deviation = jnp.where(counted, groups - masked_mean(groups, counted, axis=1)[:, None], 0.0)
    if config.estimator == "grpo":
        deviation = deviation / (_std(deviation, counted, config.ddof)[:, None] + config.epsilon)
    advantages = jnp.where(_constant(groups, counted)[:, None], 0.0, deviation)
    return jax.lax.stop_gradient(advantages.reshape(-1))


def reward_metrics(
    rewards: Float[Array, " B"], samples_per_prompt: int, valid: Bool[Array, " B"] | None = None
) -> dict[str, Float[Array, ""]]:
    """reward/mean over completions; reward/std within a group (ddof 0) and reward/frac_zero_std over prompts.

    Prompts without a valid reward are left out. Arguments and errors as in `group_advantages`.
    """
    groups, counted = _groups(rewards, samples_per_prompt, valid)
    graded = counted.any(axis=1)
    deviation = groups - masked_mean(groups, counted, axis=1)[:, None]
    return {
        "reward/mean": masked_mean(groups, counted),
        "reward/std": masked_mean(_std(deviation, counted, ddof=0), graded),
        "reward/frac_zero_std": masked_mean(_constant(groups, counted), graded),
    }


def _groups(
    rewards: Float[Array, " B"], samples_per_prompt: int, valid: Bool[Array, " B"] | None
) -> tuple[Float[Array, "P n"], Bool[Array, "P n"]]:
    if samples_per_prompt < 2:
        raise UserError(
            f"rollout.samples_per_prompt: {samples_per_prompt} leaves nothing to compare with; set 2 or more"
        )
    if len(rewards) % samples_per_prompt:
        raise UserError(
            f"rollout.samples_per_prompt: {samples_per_prompt} does not divide the {len(rewards)} rewards of a batch"
        )
    groups = jnp.asarray(rewards, jnp.float32).reshape(-1, samples_per_prompt)
    return groups, jnp.ones_like(groups, bool) if valid is None else jnp.asarray(valid, bool).reshape(groups.shape)


def _std(deviation: Float[Array, "P n"], counted: Bool[Array, "P n"], ddof: int) -> Float[Array, " P"]:
    return jnp.sqrt(masked_sum(deviation**2, counted, axis=1) / jnp.maximum(masked_count(counted, axis=1) - ddof, 1.0))


def _constant(groups: Float[Array, "P n"], counted: Bool[Array, "P n"]) -> Bool[Array, " P"]:
    return jnp.where(counted, groups, -jnp.inf).max(axis=1) <= jnp.where(counted, groups, jnp.inf).min(axis=1)
