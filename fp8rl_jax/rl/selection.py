"""Which samples teach: a rule from a step's advantages to the rows of the update.

A rule sees all samples of the step, and returns the rows that the update is made of, in their
order, so that it may leave samples out, repeat them, and decide which mini-batch they are in. It
may weigh each, too; one of weight 0 stays in the batch and leaves the loss, its denominator
included. Old log-probabilities and updates are computed of these rows alone.

    informative   weight 0 where all rewards of a prompt are equal: DAPO's filter without new
                  samples (arXiv 2503.14476, section 3.2; with them: rl.dynamic_sampling)
    finished      weight 0 where the length limit ended a completion (its section 3.4; rl.overlong
                  masks them before advantages are computed, here they have a part in these)

Any other is a function, by the same door: Shuffle-R1's are in rl/shuffle.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from fp8rl_jax.config.rl import RLConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.rl.functions import call, is_array, summarize

SELECTION_KEY = "rl.selection"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SelectionInputs:
    """What a rule chooses by: the samples of P prompts, n of each."""

    advantages: Float[Array, "P n"]
    """0 where the sample is not valid."""
    rewards: Float[Array, "P n"]
    """The task's; 0 where it is not valid."""
    valid: Bool[Array, "P n"]
    """False where a sample has no reward, or only fills the batch."""
    lengths: Int[Array, "P n"]
    """Tokens of each completion."""
    stopped: Bool[Array, "P n"]
    """Ended with a stop token."""
    key: Key[Array, ""]
    """For draws; a function of (seed, step)."""


Selection = Callable[..., Any]
"""(inputs, config, **arguments) -> rows, or (rows, weights). Rows are numbers from 0 to P n - 1,
int32 [Q, m], m samples of one prompt in each line, or [Q] where each stands behind a prompt of its
own; of a shape that follows from the inputs'. Weights are of that shape."""


def informative(inputs: SelectionInputs, config: RLConfig) -> tuple[Array, Array]:
    """Every row, with weight 0 where all valid rewards of its prompt are equal."""
    del config
    valid, rewards = inputs.valid, inputs.rewards
    largest = jnp.where(valid, rewards, -jnp.inf).max(axis=1, keepdims=True)
    smallest = jnp.where(valid, rewards, jnp.inf).min(axis=1, keepdims=True)
    return _every(inputs), jnp.broadcast_to(largest > smallest, rewards.shape)


def finished(inputs: SelectionInputs, config: RLConfig) -> tuple[Array, Array]:
    """Every row, with weight 0 where the length limit ended it."""
    del config
    return _every(inputs), inputs.stopped


SELECTIONS: dict[str, Selection] = {"informative": informative, "finished": finished}


def _every(inputs: SelectionInputs) -> Int[Array, "P n"]:
    return jnp.arange(inputs.valid.size, dtype=jnp.int32).reshape(inputs.valid.shape)


def select(
    inputs: SelectionInputs, config: RLConfig
) -> tuple[Int[Array, "Q m"], Float[Array, "Q m"]]:
    """Choose the rows of the update.

    Args:
        config: its selection is set.

    Returns:
        (rows, weights float32); that a line of rows is of one prompt is `check_rows`'s to say.

    Raises:
        UserError: the rule cannot be called, or does not return rows, or rows and weights.
    """
    name, key = config.selection, SELECTION_KEY
    found = call(key, name, SELECTIONS, inputs, config, config.selection_args)
    rows, weights = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    shape = getattr(rows, "shape", ())
    if not (
        is_array(rows, shape)
        and jnp.issubdtype(rows.dtype, jnp.integer)
        and len(shape) in (1, 2)
        and 0 not in shape
    ):
        raise UserError(
            f"{key} = {name!r} must return rows, integers [Q] or [Q, m], alone or with weights; it "
            f"returned {summarize(rows)}"
        )
    weights = jnp.ones(shape) if weights is None else weights
    if not is_array(weights, shape):
        raise UserError(
            f"{key} = {name!r}: weights must be an array of the rows' shape {[*shape]}, not "
            f"{summarize(weights)}"
        )
    if rows.ndim == 1:
        rows, weights = rows[:, None], weights[:, None]
    return rows.astype(jnp.int32), jnp.asarray(weights, jnp.float32)


def check_rows(rows: Int[np.ndarray, "Q m"], prompts: int, samples: int, name: str) -> None:
    """Refuse rows that are none, and lines of several prompts.

    Args:
        prompts, samples: P and n of the step.
        name: of the rule.

    Raises:
        UserError: naming the first such row.
    """
    if (wrong := (rows < 0) | (rows >= prompts * samples)).any():
        raise UserError(
            f"{SELECTION_KEY} = {name!r}: row {rows[wrong][0]} is none of the {prompts * samples} "
            "samples"
        )
    mixed = (rows // samples != rows[:, :1] // samples).any(axis=1)
    if mixed.any():
        raise UserError(
            f"{SELECTION_KEY} = {name!r}: line {int(mixed.argmax())} has samples of several "
            "prompts; return rows [Q], or lines of one prompt"
        )
