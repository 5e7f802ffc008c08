"""What a run draws with: keys that are functions of (seed, use, step), so that a resumed run draws
what an uninterrupted one does."""

from __future__ import annotations

import jax
from jaxtyping import Array, Key

_TRAINING, _SAMPLES, _SYNCS = 0, 1, 4
"""What the keys of a seed are for; 2 is for adapters (training.adapters), 3 for dither (models)."""
_SELECTION = 2**31 - 1
"""What a step's key is for behind all its rollouts, which count from 0."""


def rollout_key(seed: int, step: int, number: int = 0) -> Key[Array, ""]:
    """Make the key of a step's draws.

    Args:
        number: of the rollout in the step.
    """
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), _TRAINING), step)
    return jax.random.fold_in(key, number) if number else key


def selection_key(seed: int, step: int) -> Key[Array, ""]:
    """Make the key of draws of rl.selection."""
    return jax.random.fold_in(rollout_key(seed, step), _SELECTION)


def sync_key(seed: int, step: int) -> Key[Array, ""]:
    """Make the key of draws of the weight sync behind so many updates."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), _SYNCS), step)


def sample_key(seed: int, number: int) -> Key[Array, ""]:
    """Make the key of draws that training does not depend on."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), _SAMPLES), number)
