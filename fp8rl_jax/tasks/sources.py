"""Where problems come from, by task.kind: a generator, a function, files of JSON lines, an
environment, Python objects."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
from jaxtyping import Int

from fp8rl_jax.config.tasks import TaskConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.functions import load_function
from fp8rl_jax.tasks.environment import first_prompts
from fp8rl_jax.tasks.gym import create_reasoning_gym
from fp8rl_jax.tasks.jsonl import Damaged, parse_record, read_problems, refuse
from fp8rl_jax.tasks.python_objects import check_dataset, length

# Generators seed their problem i with seed + i; this distance keeps the problems of neighbouring
# seeds apart.
SEED_DISTANCE = 1_000_003
CHUNK = 512
COMPARING_REWARDS = ("exact", "math_verify")
"""Rewards without a use where a problem has no answer."""

Row = Mapping[str, Any]
"""question (text, or a `Conversation`), answer (None where there is none), metadata."""


def shuffled[Item](rows: Sequence[Item], seed: int) -> list[Item]:
    """`rows` in an order that the seed determines."""
    return [rows[index] for index in permutation(seed, 0, len(rows))]


def permutation(seed: int, epoch: int, size: int) -> Int[np.ndarray, " size"]:
    """The order of epoch `epoch` under `seed`."""
    # Sorting raw Philox words: numpy keeps a bit generator's stream the same for ever, but not that
    # of `permutation`.
    words = np.random.Philox(key=[seed, epoch]).random_raw(size)
    return np.argsort(words, kind="stable")


def _reasoning_gym_rows(task: TaskConfig, given: Any) -> Iterator[Row]:
    for start in count(_first_seed(task), CHUNK):
        gym = create_reasoning_gym(task, size=CHUNK, seed=start)
        for index in range(CHUNK):
            yield gym[index]


def _module_rows(task: TaskConfig, given: Any) -> Sequence[Row]:
    rows = load_function(task.name, "task.name")(**task.args)
    if not isinstance(rows, Sequence) or isinstance(rows, str):
        raise UserError(
            f"task.name = {task.name!r} returned {type(rows).__name__} instead of a list of "
            "dictionaries"
        )
    return [
        _module_entry(task, rows[index], index) for index in permutation(task.seed, 0, len(rows))
    ]


def _module_entry(task: TaskConfig, row: Any, index: int) -> Row:
    if (
        not isinstance(row, Mapping)
        or not isinstance(row.get("prompt"), str)
        or row.get("answer") is None
    ):
        raise UserError(
            f"task.name = {task.name!r}: row {index} needs a prompt (text) and an answer"
        )
    if not isinstance(row.get("metadata", {}), Mapping):
        raise UserError(
            f"task.name = {task.name!r}: the metadata of row {index} must be a dictionary"
        )
    try:
        json.dumps(dict(row))
    except TypeError as fault:
        raise UserError(
            f"task.name = {task.name!r}: row {index} must hold plain values only ({fault})"
        ) from fault
    metadata = {
        key: value for key, value in row.items() if key not in ("prompt", "answer", "metadata")
    }
    return {
        "question": row["prompt"],
        "answer": str(row["answer"]),
        "metadata": {**row.get("metadata", {}), **metadata},
    }


def _jsonl_rows(task: TaskConfig, given: Any) -> Sequence[Row]:
    return shuffled(read_problems(task.name, "task.name"), task.seed)


def _environment_rows(task: TaskConfig, given: Any) -> Iterator[Row]:
    for seed, prompt in first_prompts(
        task, count(_first_seed(task)), {task.name: given} if given is not None else {}
    ):
        yield {"question": prompt, "answer": None, "metadata": {"seed": seed}}


def _python_rows(task: TaskConfig, given: Any) -> Iterable[Row]:
    check_dataset(task, given)
    size = length(given)
    if size is None and not task.train_size:
        raise UserError(
            f"task.train_size: the dataset, a {task.name}, does not say how long it is; say how "
            "many to train on"
        )
    if size is None:
        return (_python_row(task, row, index) for index, row in enumerate(given))
    problems, faults = [], []
    for index in range(size):
        try:
            problems.append(_python_row(task, given[index], index))
        except UserError as fault:
            faults.append(str(fault))
    refuse(faults, "rows")
    return shuffled(problems, task.seed)


def _python_row(task: TaskConfig, row: Any, index: int) -> Row:
    compared = [name for name in COMPARING_REWARDS if name in task.components]
    try:
        record = {"prompt": row} if isinstance(row, str) else row
        if not isinstance(record, Mapping):
            raise Damaged(
                "a dictionary with a prompt, or a prompt as text, was expected, not "
                f"{type(row).__name__}"
            )
        if compared and record.get("answer") is None:
            raise Damaged(
                f"it has no answer, which the reward {compared[0]} compares with; give one, or "
                "another reward"
            )
        try:
            # what files of JSON lines can hold: rows are sent to the workers, and written into
            # samples.jsonl
            json.dumps(dict(record), ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as fault:
            raise Damaged(f"it must hold plain values only ({fault})") from fault
        return parse_record(dict(record), needs_answer=False) | {"source": f"dataset row {index}"}
    except Damaged as fault:
        raise UserError(f"dataset row {index}: {fault}") from fault


def _first_seed(task: TaskConfig) -> int:
    return task.seed * SEED_DISTANCE % 2**31


LOADERS: dict[str, Callable[[TaskConfig, Any], Iterable[Row]]] = {
    "reasoning_gym": _reasoning_gym_rows,
    "module": _module_rows,
    "jsonl": _jsonl_rows,
    "environment": _environment_rows,
    "python": _python_rows,
}
"""Source of problems by task.kind, of the task and of what was given in Python: a data set, or an
environment's class. A sequence where it ends, another iterable where it does not."""
