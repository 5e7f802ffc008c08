"""What a worker says, read as what it is: bytes from a process that may have been taken over by
what a model wrote.

Lines of JSON, of bounded length, each checked for its shape, its types and its numbers before
anything is done with it. Nothing that comes from a worker is unpickled.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NoReturn

from fp8rl_jax.tasks.conversation import MessageFault, read_messages
from fp8rl_jax.tasks.rewards import LARGEST

LARGEST_ANSWER = 4 * 2**20
"""Bytes of one line; an environment's observation stands in one."""
_LONGEST_TEXT = 1000
_MOST_METRICS, _LONGEST_NAME = 200, 200
BATCH = "batch"
"""Says that the batch rewards have scored the list."""


class AnswerFault(Exception):
    """What a worker sent is none of its answers; the text ends a sentence about the worker."""


@dataclass(frozen=True)
class Start:
    """A worker is ready, or says why it will never be."""

    failed: str = ""
    batches: bool = False
    """Whether there are batch rewards."""
    warning: str = ""


def read_start(line: bytes) -> Start:
    """Read the first line of a worker.

    Raises:
        AnswerFault: it is none.
    """
    match _json(line):
        case {"failed": str(text), **rest} if text.strip() and not rest:
            return Start(failed=_printable(text))
        case {"ready": True, "batches": bool(batches), "warning": str(warning), **rest} if not rest:
            return Start(batches=batches, warning=_printable(warning))
    raise AnswerFault("sent something else than its start")


def read_answer(line: bytes, scores: int | None) -> tuple[Any, str | None] | str:
    """Read a line of a worker that is ready.

    Args:
        scores: how many a sample gets; None: it gets an environment's turn.

    Returns:
        (result, None) or (None, error) of a sample, or BATCH.

    Raises:
        AnswerFault: it is none of them.
    """
    match _json(line):
        case "batch":
            return BATCH
        case [None, str(error)] if error.strip():
            return None, _printable(error)
        case [list(result), None] if scores == len(result) and all(map(_is_score, result)):
            return [float(score) for score in result], None
        case [dict(turn), None] if scores is None and _is_turn(turn):
            return turn, None
    raise AnswerFault("sent something that is no answer")


def _json(line: bytes) -> Any:
    try:
        return json.loads(line.decode(), parse_constant=_refuse)
    # RecursionError: lists in lists in lists
    except (ValueError, RecursionError) as fault:
        raise AnswerFault("sent something that is no JSON") from fault


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _is_score(value: Any) -> bool:
    # NaN is within nothing; an integer may be larger than any float
    return type(value) in (int, float) and -LARGEST <= value <= LARGEST


def _is_turn(turn: dict[str, Any]) -> bool:
    keys = {"observation", "reward", "done"}
    if set(turn) - {"metrics"} != keys or type(turn["done"]) is not bool:
        return False
    if not _are_metrics(turn.get("metrics", {})):
        return False
    messages = turn["observation"]
    if not _is_score(turn["reward"]) or not isinstance(messages, list):
        return False
    if turn["done"]:
        return messages == []
    if not all(isinstance(message, dict) and _is_text(*message.values()) for message in messages):
        return False
    try:
        return all(message["role"] in ("user", "tool") for message in read_messages(messages))
    except MessageFault:
        return False


def _are_metrics(metrics: Any) -> bool:
    """Whether these are {name: number}, of names that a table of metrics can show."""
    return (
        isinstance(metrics, dict)
        and len(metrics) <= _MOST_METRICS
        and all(name.isprintable() and 0 < len(name) <= _LONGEST_NAME for name in metrics)
        and all(map(_is_score, metrics.values()))
    )


def _is_text(*values: Any) -> bool:
    """Whether these are texts that UTF-8 can say: JSON may name halves of a character."""
    try:
        return all(isinstance(value, str) and value.encode() is not None for value in values)
    except UnicodeEncodeError:
        return False


def _printable(text: str) -> str:
    """One line of bounded length that a terminal shows and does not obey."""
    line = " ".join(text.split())
    line = line if len(line) <= _LONGEST_TEXT else f"{line[: _LONGEST_TEXT - 3]}..."
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in line)
