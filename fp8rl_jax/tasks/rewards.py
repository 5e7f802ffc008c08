"""From a completion to its scores, one for each reward of the sum. This runs in the reward workers,
so nothing here imports more than the standard library and the rewards themselves.

A reward function is a user's, named in task.reward.function or task.reward.functions, or given in
Python (`build(config, reward=...)`, `RewardPool(task, reward=...)`): a function, a lambda, a
method, or any object that can be called. It is called with keywords, and with those alone that it
has parameters for; with `**_` it gets all four. There are two forms.

One completion a call, which returns a number:

    def score(prompt, completion, answer, metadata): ...

    prompt        the text of the prompt, after the task's template (a conversation: its transcript)
    completion    what task.reward.extract leaves of the completion
    answer        the right answer as text; empty where the problem has none
    metadata      dictionary of whatever else the problem has

A parameter of another name is a column of the problems, as in TRL: `def score(completion, level)`
gets what its problem has under `level`, None where it has nothing there, or the parameter's own
default. `question` is the prompt before the template. A column that no problem has is refused
before anything runs.

A batch a call, which returns a list of numbers, one a completion; a function with a parameter of
the name `completions` is one:

    def score(prompts, completions, answers, metadata): ...

All four, and columns, are lists of one length, at most task.reward.batch_size, and 1 in a worker's
first call; `answer` is `answers` under TRL's name.
Which completions share a call is not fixed, and those of one prompt may be apart, so a score may
depend on nothing but its own row. The whole call has task.reward.timeout times its rows. An
exception, a list of another length, a timeout, and the end of the worker's process fail all
completions of the call; an entry that is no finite number fails its own completion alone.

Both forms return finite numbers; 1 and above counts as correct. Both may stand in one weighted sum.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any

from fp8rl_jax.config.tasks import Extract, TaskConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.functions import describe_fault, load_function
from fp8rl_jax.tasks.columns import listed
from fp8rl_jax.tasks.extraction import extract_answer, same_number
from fp8rl_jax.tasks.hf_datasets import named_elsewhere
from fp8rl_jax.tasks.mathematics import math_verify_reward

_Sample = tuple[str, str, str, Mapping[str, Any]]
"""prompt, completion, answer, entry."""
Reward = Callable[[str, str, str, Mapping[str, Any]], Any]
"""(prompt, completion, answer, entry) -> score, as the reward returned it."""
_BatchReward = Callable[[Sequence[_Sample]], Sequence[Any]]
"""samples -> scores, as the reward returned them."""
_ONE = ("prompt", "completion", "answer", "metadata")
_BATCH = ("prompts", "completions", "answers", "metadata")
_BATCH_PARAMETER = "completions"

LARGEST = 1e15
"""Magnitude of a reward: float32 holds the squares of 10^8 such, and with them a group's variance.
Above, advantages would all be 0 without a word."""


class ComponentFault(Exception):
    """One reward of several, or a batch reward, failed; the text says which and how."""


class Scorer:
    """The rewards of a task; called with one sample, it gives one score a component.

    Scores come in the order of `task.components`.

    It raises what a reward raises, and `ComponentFault` where there are several.

    Args:
        rewards: those that take one sample.
        batch_rewards: those that take several; a name is in one of the two.
        names: of all of them, in order.
    """

    def __init__(
        self,
        rewards: Mapping[str, Reward],
        batch_rewards: Mapping[str, _BatchReward],
        names: Sequence[str],
    ):
        self.rewards, self.batch_rewards, self.names = rewards, batch_rewards, tuple(names)

    def __call__(self, *sample: Any) -> list[float]:
        (score,) = self.batch([sample])
        return score()

    def batch(self, samples: Sequence[_Sample]) -> list[Callable[[], list[float]]]:
        """Call the batch rewards; returns one function a sample, which calls the other rewards.

        That function raises as `__call__` does.
        """
        batch_values: list[dict[str, Any]] = [{} for _ in samples]
        for name, reward in self.batch_rewards.items():
            for row, value in enumerate(_call_batch(reward, samples)):
                batch_values[row][name] = value
        return [
            partial(self._scores, sample, values)
            for sample, values in zip(samples, batch_values, strict=True)
        ]

    def _scores(self, sample: _Sample, batch_values: Mapping[str, Any]) -> list[float]:
        scores = []
        for name in self.names:
            try:
                value = batch_values[name] if name in batch_values else self.rewards[name](*sample)
                if isinstance(value, ComponentFault):
                    raise value
                scores.append(to_score(value))
            # SystemExit and KeyboardInterrupt too: whatever a reward raises costs its own sample
            # only.
            except BaseException as fault:
                if len(self.names) == 1:
                    raise
                text = str(fault) if isinstance(fault, ComponentFault) else describe_fault(fault)
                raise ComponentFault(f"{name}: {text}") from fault
        return scores


def build_scorer(
    task: TaskConfig, objects: Mapping[str, Any] | None = None, columns: Iterable[str] = ()
) -> Scorer:
    """Build the scorer that the configuration describes.

    Args:
        task: its rewards are loaded.
        objects: the functions that were given in Python, by `<python>:NAME`.
        columns: those that the problems have, which rewards may have parameters for.

    Raises:
        UserError: a reward does not import, has a parameter that it is not called with, or the
            generator is unknown.
    """
    rewards: dict[str, Reward] = {}
    batch_rewards: dict[str, _BatchReward] = {}
    for name in task.components:
        key = "task.reward.function" if not task.reward.weights else f"task.reward.functions.{name}"
        spec = task.reward.functions.get(name, "") if task.reward.weights else task.reward.function
        if not spec:
            rewards[name] = _built_in(task, name)
            continue
        function = load_function(spec, key, objects)
        taken = _taken(function, spec, key, tuple(columns))
        if taken.batches:
            batch_rewards[name] = _batch_function(function, taken, task.reward.extract)
        else:
            rewards[name] = _function(function, taken, task.reward.extract)
    return Scorer(rewards, batch_rewards, list(task.components))


def _built_in(task: TaskConfig, name: str) -> Reward:
    reward = task.reward
    if name == "math_verify":
        verify = math_verify_reward()
        return lambda prompt, completion, answer, entry: verify(completion, answer)
    if name in ("format", "length"):
        shape = (
            format_reward(reward.format_pattern)
            if name == "format"
            else length_reward(reward.length_target, reward.length_limit)
        )
        return lambda prompt, completion, answer, entry: shape(completion)
    if name == "reasoning_gym":
        judge = _reasoning_gym_reward(task)
        return lambda prompt, completion, answer, entry: judge(
            extract_answer(completion, reward.extract), entry
        )
    return lambda prompt, completion, answer, entry: exact_match(completion, answer, reward.extract)


@dataclass(frozen=True)
class _Taken:
    """What a reward is called with."""

    batches: bool
    arguments: tuple[str, ...]
    """Of the four that its form has."""
    columns: Mapping[str, bool]
    """Columns, and whether the function does without."""


def columns_of_problem(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Give the columns of a problem that rewards may have parameters for.

    Args:
        entry: question, answer and metadata; what only its metadata has, where it is of
            reasoning-gym.
    """
    own = {name: entry[name] for name in ("question", "answer") if entry.get(name) is not None}
    return own | {name: x for name, x in entry.get("metadata", {}).items() if x is not None}


def _function(function: Callable[..., Any], taken: _Taken, extract: Extract) -> Reward:
    def score(prompt: str, completion: str, answer: str, entry: Mapping[str, Any]) -> Any:
        given = {
            "prompt": prompt,
            "completion": extract_answer(completion, extract),
            "answer": answer,
            "metadata": entry.get("metadata", {}),
        }
        there = columns_of_problem(entry) if taken.columns else {}
        columns = {
            name: there.get(name)
            for name, optional in taken.columns.items()
            if name in there or not optional
        }
        return function(**{name: given[name] for name in taken.arguments}, **columns)

    return score


def _batch_function(function: Callable[..., Any], taken: _Taken, extract: Extract) -> _BatchReward:
    def score(samples: Sequence[_Sample]) -> Sequence[Any]:
        prompts, completions, answers, entries = map(list, zip(*samples, strict=True))
        given = {
            "prompts": prompts,
            "completions": [extract_answer(completion, extract) for completion in completions],
            "answers": answers,
            "metadata": [entry.get("metadata", {}) for entry in entries],
        }
        there = [columns_of_problem(entry) if taken.columns else {} for entry in entries]
        columns = {
            name: answers if name == "answer" else [row.get(name) for row in there]
            for name, optional in taken.columns.items()
            if not optional or any(name in row for row in there)
        }
        scores = function(**{name: given[name] for name in taken.arguments}, **columns)
        if (
            isinstance(scores, str | bytes | Mapping)
            or not hasattr(scores, "__len__")
            or not hasattr(scores, "__iter__")
        ):
            raise TypeError(
                f"the batch reward returned {type(scores).__name__} instead of a list of numbers"
            )
        if len(scores) != len(samples):
            raise ValueError(
                f"the batch reward returned {len(scores)} scores for {len(samples)} completions"
            )
        return list(scores)

    return score


def _call_batch(reward: _BatchReward, samples: Sequence[_Sample]) -> Sequence[Any]:
    """What the reward returns for each sample; where it raises, a `ComponentFault` for each."""
    try:
        return reward(samples)
    except BaseException as fault:
        return [ComponentFault(describe_fault(fault))] * len(samples)


def _taken(function: Callable[..., Any], spec: str, key: str, columns: Sequence[str]) -> _Taken:
    """What `function` is called with.

    Raises:
        UserError: it cannot be called as a reward of its form.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in functions have none
        return _Taken(False, _ONE, {})
    batches = _BATCH_PARAMETER in signature.parameters
    form = _BATCH if batches else _ONE
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    arguments = (
        form
        if inspect.Parameter.VAR_KEYWORD in kinds
        else tuple(name for name in form if name in signature.parameters)
    )
    named = {
        name: parameter.default is not inspect.Parameter.empty
        for name, parameter in signature.parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and name not in form
    }
    known = {*columns, "answer"} if batches else set(columns)
    called = f"takes {signature}, but is called with {', '.join(f'{name}=' for name in form)}"
    if unknown := [name for name, optional in named.items() if not optional and name not in known]:
        raise UserError(
            f"{key} = {spec!r} {called} and columns of the problems, and none has "
            f"{unknown[0]!r}: {listed(columns, unknown[0])}"
        )
    taken = _Taken(batches, arguments, named)
    try:
        signature.bind(**dict.fromkeys([*arguments, *named], ""))
    except TypeError as fault:
        raise UserError(f"{key} = {spec!r} {called} by name ({fault})") from fault
    if inspect.iscoroutinefunction(function):
        raise UserError(
            f"{key} = {spec!r} is an async function, and rewards are called without an event "
            "loop; use asyncio.run in it"
        )
    return taken


def exact_match(completion: str, answer: str, extract: Extract) -> float:
    """Return 1 where what is extracted of the completion is the answer, else 0.

    Letter for letter; under "last_number" two numbers are compared by value, that of the answer as
    it is read out of it.
    """
    extracted = extract_answer(completion, extract)
    if extract == "last_number":
        return float(same_number(extracted, extract_answer(answer, extract)))
    return float(extracted == answer.strip())


def format_reward(pattern: str) -> Callable[[str], float]:
    """Build a reward of 1 where `pattern` matches the whole stripped completion, else 0.

    "." matches line breaks.
    """
    compiled = re.compile(pattern, re.DOTALL)
    return lambda completion: float(compiled.fullmatch(completion.strip()) is not None)


def length_reward(target: int, limit: int) -> Callable[[str], float]:
    """Build a reward of 0 up to `target` characters and of -1 from `limit` on, linear between.

    DAPO's soft overlong punishment (arXiv 2503.14476, equation 13) in characters.
    """
    return lambda completion: -min(max(len(completion) - target, 0) / (limit - target), 1.0)


def create_reasoning_gym(task: TaskConfig, size: int, seed: int) -> Any:
    """Create a reasoning-gym data set with the task's parameters.

    Raises:
        UserError: reasoning-gym is not installed, or it has no such generator or parameter, or
            refuses a value.
    """
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ModuleNotFoundError as fault:
        raise UserError(
            f"task.kind = 'reasoning_gym' needs {fault.name}: pip install reasoning-gym"
        ) from fault
    if task.name not in DATASETS:
        raise UserError(
            f"task.name = {task.name!r} is no reasoning-gym "
            f"generator{_did_you_mean(task.name, DATASETS)}{named_elsewhere(task.name)}"
        )
    parameters: Any = DATASETS[task.name][1]
    known = {field.name for field in dataclasses.fields(parameters)} - {"size", "seed"}
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


def _reasoning_gym_reward(task: TaskConfig) -> Callable[[str, Mapping[str, Any]], float]:
    """Build (extracted completion, entry) -> score of the generator's own scorer.

    Raises as `create_reasoning_gym` does.
    """
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


def to_score(value: Any) -> float:
    """Convert `value` to a float of at most LARGEST.

    Raises:
        TypeError: it is no number (None, a string, a coroutine, an array of several values).
        ValueError: it is NaN, infinite, or larger.
    """
    if not hasattr(value, "__float__"):
        raise TypeError(f"the reward returned {type(value).__name__} instead of a number")
    score = float(value)
    if not math.isfinite(score):
        raise ValueError(f"the reward returned {score}")
    if abs(score) > LARGEST:
        raise ValueError(f"the reward returned {score:g}, and {LARGEST:g} is the most")
    return score
