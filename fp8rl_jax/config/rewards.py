"""How completions are scored: one reward, or a weighted sum of several, and the limits of the
processes that compute it."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Literal

from fp8rl_jax.functions import is_function_spec

SHAPING_REWARDS = ("format", "length")
"""Built-in rewards that say nothing about the answer, so that they cannot count a completion as
correct by default."""
BUILT_IN_REWARDS = ("exact", "math_verify", "reasoning_gym", *SHAPING_REWARDS)


@dataclass(frozen=True)
class RewardConfig:
    """How one completion is scored, in worker processes that can be killed."""

    function: str = ""
    """The one reward, `module:function` or `path/to/file.py:function`, called as reward(prompt=,
    completion=, answer=, metadata=), or once a batch where it has a parameter `completions`
    (fp8rl_jax/tasks/rewards.py); empty: reasoning-gym's own scorer, or exact match with the answer
    for lists of problems. `<python>:NAME` is one that the run got in Python."""
    weights: dict[str, float] = field(default_factory=dict)
    """Several rewards: weights = { math_verify = 1.0, format = 0.1 } makes the reward their
    weighted sum. Names are exact, math_verify, reasoning_gym, format, length, or those of
    functions; a weight of 0 only logs. Empty: the one reward."""
    functions: dict[str, str] = field(default_factory=dict)
    """Functions that weights names: functions = { tone = "my_rewards.py:tone" }."""
    correct: str = ""
    """The reward that decides accuracy: a completion is correct where it is at least 1. Empty: the
    only one with a weight other than 0 that is neither format nor length."""
    extract: Literal["whole", "last_number", "answer_tag"] = "whole"
    """What exact, reasoning_gym and functions score: the completion without surrounding whitespace,
    its last number, or the inside of its last <answer></answer> (both empty where there is none).
    The others see the whole completion."""
    format_pattern: str = ""
    """Regular expression for format, which is 1 where it matches the whole completion without
    surrounding whitespace, else 0; a dot matches line breaks too."""
    length_target: int = 0
    """Characters that length leaves unpunished."""
    length_limit: int = 0
    """Characters from where on length is -1; from the target to here it falls from 0 in a straight
    line."""
    partial_credit: bool = True
    """Use scores as they are; false: the reward that decides accuracy is 1 where it is at least 1,
    else 0."""
    timeout: float = 5.0
    """Seconds that one sample may take, all its rewards together, or a turn of an environment with
    the earlier ones that are played again; then its worker is killed and the sample gets reward 0.
    A batch reward may take this times its samples."""
    batch_size: int = 32
    """Completions that a batch reward gets in one call, at most."""
    memory_limit_mib: int = 2048
    """MiB of address space that a worker, and each process that it starts, may add to what the
    worker holds once the rewards are imported (Linux only)."""
    file_limit_mib: int = 1024
    """MiB that a worker and what it starts may write into one file (Linux only)."""
    max_processes: int = 64
    """Processes that a worker may have running at one time, threads not counted; a fork beyond that
    fails (Linux only)."""
    num_workers: int = 2
    """Worker processes."""

    @property
    def specs(self) -> dict[str, str]:
        """{key: name} of the functions."""
        several = {f"task.reward.functions.{name}": spec for name, spec in self.functions.items()}
        return {"task.reward.function": self.function, **several}

    def components(self, kind: str) -> dict[str, float]:
        """{name: weight} of the rewards that are summed, for a task of this kind."""
        if self.weights:
            return dict(self.weights)
        if self.function:
            return {self.function.rpartition(":")[2]: 1.0}
        return {kind if kind in ("reasoning_gym", "environment") else "exact": 1.0}

    def decides(self, kind: str) -> str:
        """Name of the component that decides accuracy; empty where the configuration leaves it
        open."""
        names = list(self.components(kind))
        if self.weights:
            names = [
                name
                for name, weight in self.weights.items()
                if weight and name not in SHAPING_REWARDS
            ]
        return self.correct or (names[0] if len(names) == 1 else "")

    def faults(self, kind: str) -> Iterator[str]:
        """Every value that cannot work for a task of this kind, one line each."""
        if self.function and not is_function_spec(self.function):
            yield (
                f"task.reward.function = {self.function!r} must be module:function or "
                "path/to/file.py:function"
            )
        yield from (
            main_fault(key, spec, "reward") for key, spec in self.specs.items() if is_in_main(spec)
        )
        yield from self._composition_faults(kind)
        yield from self._shaping_faults()
        if not self.timeout > 0:
            yield f"task.reward.timeout = {self.timeout} must be a positive number of seconds"
        least_of = {
            "batch_size": 1,
            "memory_limit_mib": 16,
            "file_limit_mib": 1,
            "max_processes": 1,
            "num_workers": 1,
        }
        for key, least in least_of.items():
            if getattr(self, key) < least:
                yield f"task.reward.{key} = {getattr(self, key)} must be at least {least}"

    def _composition_faults(self, kind: str) -> Iterator[str]:
        key = "task.reward.weights"
        if self.weights and self.function:
            yield (
                f"task.reward.function and {key} are both given; name the function in "
                "task.reward.functions instead"
            )
        if kind == "environment" and (self.weights or self.function or self.extract != "whole"):
            yield (
                "task.reward: an environment rewards its own steps; take function, weights and "
                "extract out"
            )
        known = [*BUILT_IN_REWARDS, *self.functions]
        for name, weight in self.weights.items():
            if name not in known:
                near = get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"give task.reward.functions.{name}"
                yield f"{key}.{name} is no built-in reward and no function; {hint}"
            # A flag's value has not been checked against the annotation.
            if type(weight) not in (int, float) or not math.isfinite(weight):
                yield f"{key}.{name} = {weight!r} must be a finite number"
        if self.weights and not any(self.weights.values()):
            yield f"{key}: every weight is 0, so every reward is 0; make one of them positive"
        if "reasoning_gym" in self.weights and kind != "reasoning_gym":
            yield f'{key}.reasoning_gym scores the problems of task.kind = "reasoning_gym" only'
        for name, spec in self.functions.items():
            if name in BUILT_IN_REWARDS or not name.isidentifier():
                yield (
                    f"task.reward.functions.{name}: choose another name, an identifier that no "
                    "built-in reward has"
                )
            if not isinstance(spec, str) or not is_function_spec(spec):
                yield (
                    f"task.reward.functions.{name} = {spec!r} must be module:function or "
                    "path/to/file.py:function"
                )
            if name not in self.weights:
                yield (
                    f"task.reward.functions.{name} has no weight; give {key}.{name} (0: only "
                    "logged)"
                )
        names = ", ".join(self.components(kind))
        if self.correct and self.correct not in self.components(kind):
            yield f"task.reward.correct = {self.correct!r} is none of the rewards ({names})"
        elif not self.decides(kind) and any(self.weights.values()):
            yield (
                f"task.reward.correct: say which of {names} decides whether a completion is correct"
            )

    def _shaping_faults(self) -> Iterator[str]:
        if ("format" in self.weights) != bool(self.format_pattern):
            wanted = (
                "task.reward.weights.format"
                if self.format_pattern
                else "task.reward.format_pattern"
            )
            yield (
                "the format reward needs task.reward.format_pattern and "
                f"task.reward.weights.format; give {wanted} too"
            )
        try:
            with warnings.catch_warnings():
                # a pattern that a later Python will read otherwise
                warnings.simplefilter("error", FutureWarning)
                re.compile(self.format_pattern)
        except (re.error, RecursionError, OverflowError, FutureWarning) as fault:
            yield (
                f"task.reward.format_pattern = {self.format_pattern!r} is no regular "
                f"expression: {fault}"
            )
        if "length" not in self.weights and (self.length_target or self.length_limit):
            yield (
                "task.reward.length_target and length_limit need task.reward.weights.length; "
                "give it a weight too"
            )
        if "length" in self.weights and not 0 <= self.length_target < self.length_limit:
            yield (
                f"task.reward.length_target = {self.length_target} and task.reward.length_limit "
                f"= {self.length_limit}: the "
                "length reward needs 0 <= target < limit, in characters"
            )


def is_in_main(spec: str) -> bool:
    """Whether `spec` names something of a script or a notebook, whose `__main__` the reward workers
    do not have."""
    return isinstance(spec, str) and spec.startswith("__main__:")


def main_fault(key: str, spec: str, argument: str) -> str:
    """What to do about it."""
    name = spec.rpartition(":")[2]
    return (
        f"{key} = {spec!r}: the reward workers do not run your script or notebook; give "
        f"{argument}={name} in Python, or name the "
        f"file that it stands in: path/to/file.py:{name}"
    )
