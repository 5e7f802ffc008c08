"""Calibrated clipping in a run: when the unquantized passes are made, and how the bounds in the
state follow them.

A calibrating step scores its rollout once more with nothing quantized, before the first update, and
each later mini-batch before its own update: two forwards, as in the paper. The FP8 side of the
comparison costs nothing, since updates return the log-probabilities that they computed. The first
mini-batch is left out: it meets the old policy, and all its ratios are 1.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fp8rl_jax import rl
from fp8rl_jax.config.formats import COMPUTE
from fp8rl_jax.config.recipe import LinearFormats
from fp8rl_jax.config.rl import RLConfig
from fp8rl_jax.rl.metrics import per_token
from fp8rl_jax.training.state import TrainState
from fp8rl_jax.training.step import Batch, StepConfig


class Seen(NamedTuple):
    """One mini-batch as its update met it: log-probabilities of the trainer, and of passes in which
    nothing is quantized."""

    batch: Batch
    logprobs: Float[Array, "b t"]
    exact_logprobs: Float[Array, "b t"]
    exact_old_logprobs: Float[Array, "b t"]


def due(state: TrainState, config: RLConfig, updates_per_rollout: int) -> bool:
    """Whether the step that begins with `state` calibrates."""
    settings = config.clip_calibration
    return settings.enabled and (int(state.updates) // updates_per_rollout) % settings.every == 0


def unquantized(config: StepConfig) -> StepConfig:
    """The same forward in the compute dtype."""
    compute = {
        "trainer": LinearFormats(),
        "output_gradient": COMPUTE,
        "saved_activation": COMPUTE,
        "layers": (),
        "exact": False,
    }
    recipe = replace(config.recipe, **compute)
    return replace(config, recipe=recipe)


@partial(jax.jit, static_argnames="config")
def recalibrate(
    bounds: Float[Array, " bounds"], seen: list[Seen], config: RLConfig
) -> tuple[Float[Array, " bounds"], dict[str, Float[Array, ""]]]:
    """The next bounds, from those in force and all mini-batches together; metrics of
    `rl.calibrated_bounds`.

    A bound that is not finite, for which NaN log-probabilities are the only reason, stays what it
    is.
    """
    columns = []
    for batch, logprobs, exact, exact_old in seen:
        mask = batch.mask if batch.loss_mask is None else batch.loss_mask
        advantages = per_token(batch.advantages, mask)
        if batch.weights is not None:
            advantages = advantages * batch.weights
        ratios = [
            rl.policy_ratio(new, old, mask, "token")
            for new, old in ((logprobs, batch.old_logprobs), (exact, exact_old))
        ]
        columns.append((*ratios, advantages, mask))
    found, metrics = rl.calibrated_bounds(*map(jnp.concatenate, zip(*columns, strict=True)), config)
    kept, found = config.clip_calibration.smoothing, jnp.where(jnp.isfinite(found), found, bounds)
    return kept * bounds + (1 - kept) * found, metrics
