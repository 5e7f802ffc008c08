"""From a completion to a score. This runs in the reward workers, so only the standard library is imported here."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, Literal

from fp8rl_jax.config.tasks import TaskConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.tasks.functions import load_function

FLOAT32_MAX = 3.4028234663852886e38

# A minus after a digit, a letter or a bracket is an operator: the last number of "7-5" is 5, that of "= -5" is -5.
NUMBER = re.compile(r"(?:(?<![\w)\].])[-\u2212])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")

Scorer = Callable[[str, str, str, Mapping[str, Any]], Any]
"""(prompt, completion, answer, entry) -> score, as the reward returned it."""


def build_scorer(task: TaskConfig) -> Scorer:
    """The scorer that the configuration names, with the completion's extraction applied first.

    Raises:
        UserError: the reward does not import, does not take the four arguments, or the generator is unknown.
    """
    extract = task.reward.extract
    if task.kind == "reasoning_gym" and not task.reward.function:
        gym = create_reasoning_gym(task, size=1, seed=task.seed)

        def score(prompt: str, completion: str, answer: str, entry: Mapping[str, Any]) -> Any:
            value = gym.score_answer(extract_answer(completion, extract), entry)
            # Some scorers sum 1/n for each right character, and give a right answer with text after it
            # 0.9999999999999999 or 1.0000000000000002, which float32 would round to a full reward.
            return value if value == 1.0 else min(value, 0.99)

        return score

    function = exact_match
    if task.reward.function:
        function = load_function(task.reward.function, "task.reward.function")
        _check_signature(function, task.reward.function)

    def score(prompt: str, completion: str, answer: str, entry: Mapping[str, Any]) -> Any:
        return function(
            prompt=prompt,
            completion=extract_answer(completion, extract),
            answer=answer,
            metadata=entry.get("metadata", {}),
        )

    return score


def exact_match(prompt: str, completion: str, answer: str, metadata: Mapping[str, Any]) -> float:
    """1 where the extracted completion is the answer, letter for letter; else 0."""
    return float(completion == answer.strip())


def extract_answer(completion: str, how: Literal["whole", "last_number"]) -> str:
    """The part of a completion that is scored.

    "whole" removes surrounding whitespace. "last_number" gives the last decimal number without its thousands separators
    ("so 1,250.5 in all" -> "1250.5"), or "" where there is none.
    """
    if how == "whole":
        return completion.strip()
    numbers = NUMBER.findall(completion)
    return numbers[-1].replace(",", "").replace("\u2212", "-") if numbers else ""


def to_score(value: Any) -> float:
    """`value` as a finite float that float32 can hold.

    Raises:
        TypeError: it is no number (None, a string, a coroutine, an array of several values).
        ValueError: it is NaN, infinite, or beyond float32.
    """
    if not hasattr(value, "__float__"):
        raise TypeError(f"the reward returned {type(value).__name__} instead of a number")
    score = float(value)
    if not math.isfinite(score) or abs(score) > FLOAT32_MAX:
        raise ValueError(f"the reward returned {score}")
    return score


def create_reasoning_gym(task: TaskConfig, size: int, seed: int) -> Any:
    """A reasoning-gym data set with the task's parameters.

    Raises:
        UserError: reasoning-gym is not installed, or it has no such generator or parameter, or refuses a value.
    """
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ModuleNotFoundError as fault:
        raise UserError(f"task.kind = 'reasoning_gym' needs {fault.name}: pip install 'fp8rl-jax[envs]'") from fault
    if task.name not in DATASETS:
        raise UserError(f"task.name = {task.name!r} is no reasoning-gym generator{_did_you_mean(task.name, DATASETS)}")
    known = set(DATASETS[task.name][1].__dataclass_fields__) - {"size", "seed"}
    unknown = [f"task.args.{key}{_did_you_mean(key, known)}" for key in task.args if key not in known]
    if unknown:
        raise UserError(f"{task.name} has no parameter {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    try:
        return create_dataset(task.name, size=size, seed=seed, **task.args)
    except (AssertionError, TypeError, ValueError) as fault:
        raise UserError(f"reasoning-gym's {task.name} refuses task.args = {task.args}: {fault}") from fault


def _check_signature(function: Callable[..., Any], spec: str) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in functions have none
        return
    try:
        signature.bind(prompt="", completion="", answer="", metadata={})
    except TypeError as fault:
        raise UserError(
            f"task.reward.function = {spec!r} takes {signature}, but is called with "
            f"prompt=, completion=, answer=, metadata= ({fault}); add **_ for those that it does not use"
        ) from fault


def _did_you_mean(word: str, known: Any) -> str:
    close = get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
