"""Exact mode in each format: the rollout's log-probabilities are the trainer's, to the last bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np

from experiments.formats.rows import BACKEND, Row
from fp8rl_jax.compare.probe import at_once
from fp8rl_jax.compare.tokens import Tokens
from fp8rl_jax.models.forms import rollout_policy, trainer_policy
from fp8rl_jax.models.policy import Policy
from fp8rl_jax.precision import check_recipe
from fp8rl_jax.rollout.engine import Prompts
from fp8rl_jax.rollout.sampler import generate
from fp8rl_jax.rollout.sampling import Sampling

NEW = 8
"""Tokens of a completion."""
_serve = jax.jit(rollout_policy, static_argnums=(1, 2, 3, 4))
_train = jax.jit(trainer_policy, static_argnums=(1, 2, 3))
_at_once = jax.jit(at_once)


def differences(policy: Policy, row: Row, given: Prompts, new: int) -> dict[str, Any]:
    """Largest difference of a log-probability, and the number of tokens, between the sampler's own,
    token by token over its cache, and the trainer's of a whole completion.

    Args:
        policy: float32 masters.
        new: tokens of each completion.
    """
    recipe = replace(row.forward, exact=True)
    check_recipe(recipe, BACKEND)
    side = _serve(policy, recipe, row.dtype, False, BACKEND)[0]
    key, sampling = jax.random.key(0), Sampling(max_new_tokens=new)
    made = generate(side, *given, key, samples=1, sampling=sampling)
    tokens = Tokens(given.tokens, given.lengths, made.tokens, made.mask.sum(1))
    found = _at_once(_train(policy, recipe, row.dtype, BACKEND), tokens)
    apart = np.abs(np.asarray(found, np.float64) - np.asarray(made.policy_logprobs, np.float64))
    return {"largest": float(apart.max()), "tokens": apart.size}
