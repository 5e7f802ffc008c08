"""What a weight sync knows beside the weights, and a transform of what it serves.

The recipe says how weights are rounded and quantized. What else is to happen to the served copy,
and not to the masters, is a function of the user's: noise for exploration (rollout.noise), a
rotation, a layer that is left out. It is called at every sync, in one compiled
program, on the policy as the rollout multiplies it; adapters stand beside their base there.
Rollout and trainer then differ by it, which the mismatch shows and the correction corrects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Int, Key

from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.functions import Arguments, call, callable_with, check_unchanged
from fp8rl_jax.models.cache import KVScales
from fp8rl_jax.models.policy import Policy

TRANSFORM_KEY = "rollout.transform"


class SyncContext(NamedTuple):
    """
    Attributes:
        step: updates before this sync.
        key: for draws, a function of (seed, step); None where nobody draws.
        scales: KV scales measured with these very weights, where the trainer calibrates.
        steps: of the whole run; 0: there is none.
    """

    step: int | Int[Array, ""] = 0
    key: Key[Array, ""] | None = None
    scales: KVScales | None = None
    steps: int | Int[Array, ""] = 0


NO_CONTEXT = SyncContext()
"""Of a sync without draws and calibration."""


def transform_of(config: RunConfig) -> tuple[str, Mapping[str, float]] | None:
    """Find what a run does to its served policy: a function's spec and its arguments.

    Raises:
        UserError: it does not import, or does not take (policy, context) and these arguments.
    """
    name, arguments = config.rollout.transform, config.rollout.transform_args
    if not name:
        return None
    callable_with(TRANSFORM_KEY, name, ("policy", "context"), arguments)
    return name, arguments


def transformed(
    served: Policy, context: SyncContext, name: str, arguments: Mapping[str, float]
) -> Policy:
    """Apply the function that rollout.transform names to the served policy.

    Args:
        served: in the rollout's form.
        name: the function's spec.
        arguments: keyword arguments behind (policy, context).

    Raises:
        UserError: it cannot be called so, raises an exception, or does not return a policy of the
            same tensors.
    """
    check_unchanged(name, TRANSFORM_KEY)
    return _compiled(name, Arguments(arguments))(served, context)


@cache
def _compiled(name: str, arguments: Arguments) -> Callable[[Policy, SyncContext], Policy]:
    return jax.jit(partial(_transform, name=name, arguments=arguments))


def _transform(
    served: Policy, context: SyncContext, name: str, arguments: Mapping[str, float]
) -> Policy:
    given = {"policy": served, "context": context}
    made = call(TRANSFORM_KEY, name, {}, given, arguments)
    if wrong := _difference(served, made):
        raise UserError(
            f"{TRANSFORM_KEY} = {name!r}: must return the policy that it was given with other "
            f"numbers in it; {wrong}"
        )
    return made


def _difference(one: Policy, other: Any) -> str:
    """What two policies differ in beside their numbers; empty where there is nothing."""
    if jax.tree.structure(one) != jax.tree.structure(other):
        return f"it returned another {type(other).__name__}"
    pairs = zip(jax.tree.leaves_with_path(one), jax.tree.leaves(other), strict=True)
    for (path, before), after in pairs:
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            return f"{name} is {after.dtype}{[*after.shape]}, not {before.dtype}{[*before.shape]}"
    return ""
