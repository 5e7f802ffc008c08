"""Where problems come from, by task.kind: a generator, a function, files of JSON lines, an
environment, Python objects.

A file of JSON lines has one object a line, with a prompt, an answer, and whatever else as metadata:

    {"prompt": "What is 2 + 2?", "answer": "4", "level": 1}
    {"messages": [{"role": "user", "content": "What is 2 + 2?"}], "answer": 4}

A line is read rightly or named as damaged; nothing is skipped but blank lines, and nothing is
guessed.
"""

from __future__ import annotations

import glob
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from fp8rl_jax.config.tasks import TaskConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.functions import load_function
from fp8rl_jax.tasks.conversation import Conversation, message_faults
from fp8rl_jax.tasks.environment import first_prompts
from fp8rl_jax.tasks.python_objects import check_dataset, length
from fp8rl_jax.tasks.rewards import create_reasoning_gym

# Generators seed their problem i with seed + i; this distance keeps the problems of neighbouring
# seeds apart.
_SEED_DISTANCE = 1_000_003
CHUNK = 512
_COMPARING_REWARDS = ("exact", "math_verify")
"""Rewards without a use where a problem has no answer."""

Row = Mapping[str, Any]
"""question (text, or a `Conversation`), answer (None where there is none), metadata."""
_SHOWN_FAULTS = 20
_PROMPT_KEYS = ("prompt", "question", "messages")


def shuffled[Item](rows: Sequence[Item], seed: int) -> list[Item]:
    """Shuffle `rows` into an order that the seed determines."""
    return [rows[index] for index in permutation(seed, 0, len(rows))]


def permutation(seed: int, epoch: int, size: int) -> Int[np.ndarray, " size"]:
    """Return the order of epoch `epoch` under `seed`."""
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
        "source": f"{task.name} row {index}",
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
    compared = [name for name in _COMPARING_REWARDS if name in task.components]
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
        return _parse_record(dict(record), needs_answer=False) | {"source": f"dataset row {index}"}
    except Damaged as fault:
        raise UserError(f"dataset row {index}: {fault}") from fault


def _first_seed(task: TaskConfig) -> int:
    return task.seed * _SEED_DISTANCE % 2**31


class Damaged(Exception):
    """What is wrong with a line."""


def read_problems(path: str, key: str) -> list[dict[str, Any]]:
    """Read every problem of the files that `path` names, in their order.

    Args:
        path: a file, or a pattern such as data/*.jsonl, whose files are read in the order of their
            names.
        key: configuration key that the path stands under, for the message.

    Returns:
        Dictionaries with question (text, or a `Conversation`), answer, metadata, and source
        ("FILE:LINE").

    Raises:
        UserError: there is no such file, it cannot be read, or lines are damaged: the first 20, one
            a line, and how many more.
    """
    faults: list[str] = []
    problems: list[dict[str, Any]] = []
    for file in _files(path, key):
        try:
            with open(file, "rb") as lines:
                for number, line in enumerate(lines, start=1):
                    source = f"{file}:{number}"
                    try:
                        if (problem := parse_line(line, first=number == 1)) is not None:
                            problems.append(problem | {"source": source})
                    except Damaged as fault:
                        faults.append(f"{source}: {fault}")
        except OSError as fault:
            raise UserError(f"{key}: {file} cannot be read ({fault.strerror})") from fault
    refuse(faults, "lines")
    return problems


def refuse(faults: Sequence[str], what: str) -> None:
    """Raise a UserError with the first 20 of the faults, and the number of the others.

    No faults: nothing is raised.
    """
    if faults:
        more = (
            f"\nand {len(faults) - _SHOWN_FAULTS} more damaged {what}"
            if len(faults) > _SHOWN_FAULTS
            else ""
        )
        raise UserError("\n".join(faults[:_SHOWN_FAULTS]) + more)


def parse_line(line: bytes, first: bool = False) -> dict[str, Any] | None:
    """Parse the problem of one line; None for a blank one.

    Args:
        line: UTF-8, with or without its line break.
        first: whether a byte order mark may stand before it.

    Raises:
        Damaged: anything that is no problem.
    """
    try:
        text = line.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as fault:
        raise Damaged(
            f"not UTF-8 (byte {line[fault.start]:#04x} at position {fault.start + 1})"
        ) from fault
    if not text.strip(" \t\r\n"):
        return None
    record = _parse_json(text)
    if not isinstance(record, dict):
        raise Damaged(f"an object with prompt and answer was expected, not {_kind(record)}")
    return _parse_record(record)


def _parse_record(record: Mapping[str, Any], needs_answer: bool = True) -> dict[str, Any]:
    """Parse a problem from a record of plain values.

    Without `needs_answer` its answer may be None or left out.

    Raises:
        Damaged: anything that is no problem.
    """
    metadata = record.get("metadata", {})
    if not isinstance(metadata, dict):
        raise Damaged(f"metadata must be an object, not {_kind(metadata)}")
    unanswered = not needs_answer and record.get("answer") is None
    question, answer = _question(record), None if unanswered else _answer(record)
    others = {
        key: value
        for key, value in record.items()
        if key not in (*_PROMPT_KEYS, "answer", "metadata")
    }
    if both := sorted(metadata.keys() & others.keys()):
        raise Damaged(f"{both[0]!r} stands both in metadata and beside it")
    return {"question": question, "answer": answer, "metadata": metadata | others}


def _files(path: str, key: str) -> list[Path]:
    if Path(path).expanduser().exists():
        return [Path(path).expanduser()]
    if found := sorted(glob.glob(str(Path(path).expanduser()), recursive=True)):
        return [Path(name) for name in found]
    raise UserError(
        f"{key} = {path!r}: there is no such file; give the path of a .jsonl file or a pattern "
        "of several"
    )


def _parse_json(text: str) -> Any:
    try:
        record = json.loads(
            text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float
        )
        # A lone half of a surrogate pair is valid in JSON, and no text: no tokenizer takes it.
        if "\\u" in text:
            json.dumps(record, ensure_ascii=False).encode()
    except json.JSONDecodeError as fault:
        raise Damaged(f"not JSON ({fault.msg} at column {fault.colno})") from fault
    except UnicodeEncodeError as fault:
        raise Damaged("holds half of a surrogate pair, which is no character") from fault
    except RecursionError as fault:
        raise Damaged("nested too deep") from fault
    except ValueError as fault:  # an integer of more digits than Python converts
        raise Damaged(f"holds a number that is too long ({fault})") from fault
    return record


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        raise Damaged(
            f"key {next(key for key in keys if keys.count(key) > 1)!r} stands twice in one object"
        )
    return record


def _constant(name: str) -> Any:
    raise Damaged(f"{name} is no JSON; write a number, text or null")


def _float(text: str) -> float:
    if math.isinf(value := float(text)):
        raise Damaged(f"the number {text[:40]} is beyond the range of a float; write it as text")
    return value


def _question(record: Mapping[str, Any]) -> str:
    given = [key for key in _PROMPT_KEYS if key in record]
    if len(given) != 1:
        raise Damaged(
            f"give one of prompt, question and messages (it has {' and '.join(given) or 'none'})"
        )
    key, value = given[0], record[given[0]]
    # A list under "prompt" is what some data sets call their messages.
    if key == "messages" or isinstance(value, list):
        if fault := message_faults(value):
            raise Damaged(f"{key}: {fault}")
        return Conversation(value)
    if not isinstance(value, str):
        raise Damaged(f"{key} must be text or a list of messages, not {_kind(value)}")
    if not value.strip():
        raise Damaged(f"{key} is empty")
    return value


def _answer(record: Mapping[str, Any]) -> str:
    if "answer" not in record:
        raise Damaged(f"it has no answer (keys: {', '.join(record)[:80]})")
    value = record["answer"]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise Damaged(f"answer must be text or a number, not {_kind(value)}")
    if not (answer := str(value)).strip():
        raise Damaged("answer is empty")
    return answer


def _kind(value: Any) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "text",
        bool: "true or false",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), "null")


LOADERS: dict[str, Callable[[TaskConfig, Any], Iterable[Row]]] = {
    "reasoning_gym": _reasoning_gym_rows,
    "module": _module_rows,
    "jsonl": _jsonl_rows,
    "environment": _environment_rows,
    "python": _python_rows,
}
"""Source of problems by task.kind, of the task and of what was given in Python: a data set, or an
environment's class. A sequence where it ends, another iterable where it does not."""
