"""DAPO's treatment of samples (arXiv 2503.14476): which prompts enter the update, and what becomes
of long completions.

Its other parts are settings of the loss: clip_high and aggregation "token_mean".
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fp8rl_jax.errors import UserError
from fp8rl_jax.rl.advantages import constant_groups
from fp8rl_jax.rl.masked import Mask


def informative_groups(
    rewards: Float[Array, " B"], samples_per_prompt: int, valid: Bool[Array, " B"] | None = None
) -> Bool[Array, " P"]:
    """Prompts whose completions do not all have the same reward: the others' advantages are 0.

    Dynamic sampling (section 3.2) drops the others and samples new prompts until the batch is full.
    Give it the task's rewards, before `overlong_penalty`, as verl and NeMo RL do: a group that
    differs in length alone teaches no task. Departs from the paper, which asks for an accuracy
    strictly between 0 and 1: any two rewards that differ will do.

    Args:
        rewards: one scalar a completion; row b belongs to prompt b // samples_per_prompt.
        samples_per_prompt: n, at least 2.
        valid: False where a completion has no reward; by default all have one. Fewer than two teach
            nothing.

    Raises:
        UserError: as `group_advantages`.
    """
    return ~constant_groups(rewards, samples_per_prompt, valid)


def overlong_penalty(
    lengths: Int[Array, " B"], max_new_tokens: int, buffer: int, penalty: float = 1.0
) -> Float[Array, " B"]:
    """What is added to the reward of a completion for its length: 0 down to -penalty (soft
    punishment, section 3.4).

    0 up to max_new_tokens - buffer tokens, then linear to -penalty at max_new_tokens, and no less
    beyond. verl has no lower bound, which is the same as long as no completion is longer than
    max_new_tokens.

    Args:
        lengths: tokens of each completion, its stop token included.
        max_new_tokens: the longest completion.
        buffer: tokens over which the penalty grows; 0 for no penalty.
        penalty: its full size.

    Raises:
        UserError: the buffer is longer than the completion may be.
    """
    if buffer > max_new_tokens:
        raise UserError(
            f"rl.overlong.buffer: {buffer} is more than rollout.max_new_tokens = {max_new_tokens}"
        )
    if not buffer:
        return jnp.zeros(lengths.shape, jnp.float32)
    exceeded = jnp.asarray(lengths, jnp.float32) - (max_new_tokens - buffer)
    return -penalty * jnp.clip(exceeded / buffer, 0.0, 1.0)


def drop_truncated(mask: Mask, stopped: Bool[Array, " B"]) -> Bool[Array, "B T"]:
    """The mask without completions that were cut off at the length limit (overlong filtering,
    section 3.4).

    It is a mask for the loss alone: the model still attends to those tokens, and mismatch metrics
    still count them.

    Args:
        mask: completion tokens [B, T].
        stopped: completions that ended with a stop token.
    """
    return mask.astype(bool) & stopped[:, None]
