"""From a completion to its scores, one for each reward of the sum. This runs in the reward workers, so nothing here imports
more than the standard library and the rewards themselves."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from fp8rl_jax.config.tasks import TaskConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.functions import describe_fault, load_function
from fp8rl_jax.tasks.builtin_rewards import (
    exact_match,
    extract_answer,
    format_reward,
    length_reward,
    math_verify_reward,
)
from fp8rl_jax.tasks.gym import reasoning_gym_reward
from fp8rl_jax.tasks.scoring import to_score

Scorer = Callable[[str, str, str, Mapping[str, Any]], Any]
"""(prompt, completion, answer, entry) -> score, as the reward returned it."""


class ComponentFault(Exception):
    """One reward of several failed; the text names it."""


def build_scorer(task: TaskConfig) -> Callable[[str, str, str, Mapping[str, Any]], list[float]]:
    """The scorer that the configuration describes: (prompt, completion, answer, entry) -> one score a component, in the
    order of `task.components`. It raises what a reward raises, and `ComponentFault` where there are several.

    Raises:
        UserError: a reward does not import, does not take the four arguments, or the generator is unknown.
    """
    components = {name: _component(task, name) for name in task.components}

    def score(*sample: Any) -> list[float]:
        scores = []
        for name, component in components.items():
            try:
                scores.append(to_score(component(*sample)))
            # SystemExit and KeyboardInterrupt too: whatever a reward raises costs its own sample only.
            except BaseException as fault:
                if len(components) == 1:
                    raise
                raise ComponentFault(f"{name}: {describe_fault(fault)}") from fault
        return scores

    return score


def _component(task: TaskConfig, name: str) -> Scorer:
    reward = task.reward
    if not reward.weights and reward.function:
        return _function(reward.function, "task.reward.function", reward.extract)
    if name in reward.functions:
        return _function(reward.functions[name], f"task.reward.functions.{name}", reward.extract)
    if name == "math_verify":
        verify = math_verify_reward()
        return lambda prompt, completion, answer, entry: verify(completion, answer)
    if name in ("format", "length"):
        shape = (
            format_reward(reward.format_pattern) if name == "format" else length_reward(reward.length_target, reward.length_limit)
        )
        return lambda prompt, completion, answer, entry: shape(completion)
    if name == "reasoning_gym":
        judge = reasoning_gym_reward(task)
        return lambda prompt, completion, answer, entry: judge(extract_answer(completion, reward.extract), entry)
    return lambda prompt, completion, answer, entry: exact_match(extract_answer(completion, reward.extract), answer)


def _function(spec: str, key: str, extract: str) -> Scorer:
    function = load_function(spec, key)
    _check_signature(function, spec, key)

    def score(prompt: str, completion: str, answer: str, entry: Mapping[str, Any]) -> Any:
        return function(
            prompt=prompt,
            completion=extract_answer(completion, extract),
            answer=answer,
            metadata=entry.get("metadata", {}),
        )

    return score


def _check_signature(function: Callable[..., Any], spec: str, key: str) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in functions have none
        return
    try:
        signature.bind(prompt="", completion="", answer="", metadata={})
    except TypeError as fault:
        raise UserError(
            f"{key} = {spec!r} takes {signature}, but is called with "
            f"prompt=, completion=, answer=, metadata= ({fault}); add **_ for those that it does not use"
        ) from fault
