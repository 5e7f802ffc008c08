"""reasoning-gym: its generators as a source of problems, and their scorers as a reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from fp8rl_jax.config.tasks import TaskConfig
from fp8rl_jax.errors import UserError


def create_reasoning_gym(task: TaskConfig, size: int, seed: int) -> Any:
    """A reasoning-gym data set with the task's parameters.

    Raises:
        UserError: reasoning-gym is not installed, or it has no such generator or parameter, or
            refuses a value.
    """
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ModuleNotFoundError as fault:
        raise UserError(
            f"task.kind = 'reasoning_gym' needs {fault.name}: pip install 'fp8rl-jax[envs]'"
        ) from fault
    if task.name not in DATASETS:
        raise UserError(
            f"task.name = {task.name!r} is no reasoning-gym "
            f"generator{_did_you_mean(task.name, DATASETS)}"
        )
    known = set(DATASETS[task.name][1].__dataclass_fields__) - {"size", "seed"}
    unknown = [
        f"task.args.{key}{_did_you_mean(key, known)}" for key in task.args if key not in known
    ]
    if unknown:
        raise UserError(
            f"{task.name} has no parameter {', '.join(unknown)}; it has {', '.join(sorted(known))}"
        )
    try:
        return create_dataset(task.name, size=size, seed=seed, **task.args)
    except (AssertionError, TypeError, ValueError) as fault:
        raise UserError(
            f"reasoning-gym's {task.name} refuses task.args = {task.args}: {fault}"
        ) from fault


def reasoning_gym_reward(task: TaskConfig) -> Callable[[str, Mapping[str, Any]], float]:
    """(extracted completion, entry) -> score of the generator's own scorer. Raises as
    `create_reasoning_gym` does."""
    gym = create_reasoning_gym(task, size=1, seed=task.seed)

    def score(completion: str, entry: Mapping[str, Any]) -> float:
        value = gym.score_answer(completion, entry)
        # Some scorers sum 1/n for each right character, and give a right answer with text after it
        # 0.9999999999999999 or 1.0000000000000002, which float32 would round to a full reward.
        return value if value == 1.0 else min(value, 0.99)

    return score


def _did_you_mean(word: str, known: Any) -> str:
    close = get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
