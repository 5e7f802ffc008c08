"""From what samples earned to what an update learns from: their rewards as arrays, advantages, and
the rows that rl.selection chooses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from fp8rl_jax import rl
from fp8rl_jax.config.rl import RLConfig
from fp8rl_jax.config.schema import show
from fp8rl_jax.errors import UserError
from fp8rl_jax.parallel import constrain, to_host
from fp8rl_jax.rl.metrics import masked_mean
from fp8rl_jax.tasks.scores import Scores
from fp8rl_jax.training.batch import Batch
from fp8rl_jax.training.experience import Experience

lengths_of = jax.jit(partial(jnp.sum, axis=1))
"""Tokens of each row of a mask; a program, as everything here: single operations on a mesh may wait
for each other without an end."""


class Rewards(NamedTuple):
    """What the samples of a batch earned, [b]; filling has earned nothing.

    Attributes:
        values: float32.
        valid: those that have a reward.
        real: those that are no filling.
    """

    values: Float[np.ndarray, " b"]
    valid: Bool[np.ndarray, " b"]
    real: Bool[np.ndarray, " b"]


def read_rewards(rollout: Experience, rewards: Sequence[float | None] | Scores) -> Rewards:
    """Bring rewards of a rollout's samples into the shape of its batch.

    Args:
        rollout: that was rewarded.
        rewards: one for each of `rollout.texts`, None where there is none; or scores.

    Raises:
        UserError: others than as many as samples, each finite, not all None.
    """
    if isinstance(rewards, Scores):
        values, valid = rewards.rewards, ~rewards.failed
    else:
        if isinstance(rewards, str | Mapping) or not isinstance(rewards, Iterable):
            raise UserError(
                f"rewards: expected a list, one for each of rollout.texts, got {show(rewards)}"
            )
        given = list(rewards)
        valid = np.array([reward is not None for reward in given], bool)
        try:
            values = np.array(
                [0.0 if reward is None else float(reward) for reward in given], np.float64
            )
        except (TypeError, ValueError, OverflowError) as error:
            raise UserError(f"rewards: each must be a number or None ({error})") from None
        if given and not valid.any():
            raise UserError(
                f"rewards: all {len(given)} are None, which leaves nothing to learn from; does the "
                "reward return its number?"
            )
    if len(values) != len(rollout.texts):
        raise UserError(
            f"rewards: {len(values)} for {len(rollout.texts)} samples; give one for each of "
            "rollout.texts"
        )
    rl.check_rewards(values, valid)
    missing = rollout.prompts_in_batch * rollout.samples - len(values)
    real = np.pad(np.ones(len(values), bool), (0, missing))
    return Rewards(
        np.pad(values.astype(np.float32), (0, missing)), np.pad(valid, (0, missing)), real
    )


@partial(jax.jit, static_argnames=("config", "samples", "longest"))
def sample_advantages(
    rewards: Float[Array, " b"],
    valid: Bool[Array, " b"],
    lengths: Int[Array, " b"],
    divergence: Float[Array, " b"] | None,
    real: Bool[Array, " b"] | None = None,
    *,
    config: RLConfig,
    samples: int,
    longest: int,
) -> tuple[Float[Array, " b"], dict[str, Array]]:
    """Compute advantages of samples from what the task gave them, and what was taken from that.

    Args:
        rewards, valid, real: as `Rewards` has them.
        lengths: tokens of each completion.
        divergence: of each completion from the reference policy, where it costs.
        config: of the run.
        samples: of each prompt, side by side.
        longest: tokens that a completion can have.
    """
    overlong = rl.overlong_penalty(
        lengths, longest, config.overlong.buffer, config.overlong.penalty
    )
    metrics = {"reward/overlong_penalty": overlong.mean(where=real)}
    metrics |= rl.reward_metrics(rewards, samples, valid)
    if divergence is not None:
        rewards, metrics["reward/kl"] = (
            rewards - config.reward_kl.coefficient * divergence,
            divergence.mean(where=real),
        )
    return rl.group_advantages(
        rewards + overlong, samples, config.advantage, valid, lengths
    ), metrics


@jax.jit
def explored(batch: Batch, sampled: Float[Array, "b t"]) -> dict[str, Array]:
    """Measure how much a rollout explores: rollout/entropy, in nats a token.

    It is -E[log p] over what was sampled: the entropy of the distribution that served, noise and
    quantization included, where that was sampled as it is.

    Args:
        batch: all rows of a step, before a selection.
        sampled: the rollout's log-probabilities of its tokens.
    """
    return {"rollout/entropy": masked_mean(-sampled, batch.mask)}


@jax.jit
def taught(batch: Batch) -> dict[str, Array]:
    """Measure what the rows of an update teach: advantages/frac_zero, the part of those in the loss
    whose advantage is 0.

    Args:
        batch: behind a selection.
    """
    rows = (batch.mask if batch.loss_mask is None else batch.loss_mask).any(axis=1)
    return {"advantages/frac_zero": masked_mean(batch.advantages == 0, rows)}


def select_rows(
    rollout: Experience,
    batch: Batch,
    rewards: Rewards,
    key: Key[Array, ""],
    config: RLConfig,
    unit: int,
) -> tuple[Batch, Float[Array, "b t"], dict[str, float]]:
    """Keep the rows that rl.selection chooses.

    Args:
        rollout: that was sampled.
        batch: its rows, with advantages.
        rewards: of its samples.
        key: for draws.
        config: of the run.
        unit: what the number of prompts, lines of rows, has to divide by.

    Returns:
        The rows, what the rollout gave their tokens, and selection/*.

    Raises:
        UserError: the rule chose rows that are none, or lines that do not divide.
    """
    rows_per_prompt = len(batch.tokens) // len(batch.lengths)
    stopped = rollout.rollout.stopped & batch.mask.any(axis=1)
    samples = batch.advantages, *rewards[:2], lengths_of(batch.mask), stopped
    rows, weights = _selection(*samples, key, config=config, samples=rows_per_prompt)
    host, weighed = to_host((rows, weights))
    rl.check_rows(host, len(batch.lengths), rows_per_prompt, config.selection)
    if len(host) % unit:
        raise UserError(
            f"rl.selection = {config.selection!r}: {len(host)} lines of rows do not divide by "
            f"{unit}, which updates, micro-batches and the mesh ask for"
        )
    used = np.unique(host[weighed > 0])
    metrics = {"selection/used": len(used) / max(len(rollout.texts), 1)}
    return *_picked(batch, rollout.scored_logprobs, rows, weights), metrics


@partial(jax.jit, static_argnames=("config", "samples"))
def _selection(
    advantages, rewards, valid, lengths, stopped, key, *, config: RLConfig, samples: int
):
    """Rows and weights of rl.selection, from values of all rows."""
    groups = (x.reshape(-1, samples) for x in (advantages, rewards, valid, lengths, stopped))
    return rl.select(rl.SelectionInputs(*groups, key), config)


@jax.jit
def _picked(batch: Batch, sampled, rows, weights) -> tuple[Batch, Array]:
    """These rows of a batch, a line of them for each prompt, and of a value a token."""
    flat, samples = rows.reshape(-1), len(batch.tokens) // len(batch.lengths)
    prompts = rows[:, 0] // samples
    of_prompts = ("prompts", "lengths", "prompt_routes")

    def pick(x: Array, chosen: Array) -> Array:
        return constrain(x[chosen], "batch", *[None] * (x.ndim - 1))

    fields = {
        name: jax.tree.map(partial(pick, chosen=prompts if name in of_prompts else flat), x)
        for name, x in vars(batch).items()
    }
    made, weights = replace(batch, **fields), weights.reshape(-1)
    in_loss = made.mask if made.loss_mask is None else made.loss_mask
    made = replace(
        made,
        advantages=made.advantages * weights,
        loss_mask=in_loss & (weights > 0)[:, None],
    )
    return made, constrain(sampled[flat], "batch", None)
