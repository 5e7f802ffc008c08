"""Files of JSON lines around a policy: prompts in, answers out.

Every line is checked before anything is computed, all faults are reported together, and the answers
appear under their name only when the last one is there.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fp8rl_jax.errors import UserError
from fp8rl_jax.tokenizers.tokenizer import Tokenizer

_LISTED = 20  # faults shown before the rest is counted


class Line(NamedTuple):
    """number: in its file, from 1; record: the object as read; tokens: its token ids, at least
    one."""

    number: int
    record: dict[str, Any]
    tokens: list[int]


def read_lines(
    path: str | Path,
    vocab_size: int,
    tokenizer: Tokenizer | None,
    generation: bool,
    limit: int,
    reserve: int = 0,
) -> list[Line]:
    """Reads objects that hold "tokens" (ids), "messages" (a conversation) or "prompt" (text); the
    first of these is used.

    Args:
        path: JSON lines, UTF-8; blank lines are skipped.
        vocab_size: token ids are below it.
        tokenizer: None for a model of token ids.
        generation: end a conversation where the assistant's answer begins; else take it as it
            stands.
        limit: positions that the model has.
        reserve: positions to leave free behind the tokens.

    Raises:
        UserError: the file cannot be read or holds nothing, or one line for each fault, with the
            number of its line.
    """
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    lines, faults = [], []
    for number, text in enumerate(raw.split(b"\n"), start=1):
        if not text.strip():
            continue
        try:
            record = _object(text)
            tokens = _tokens(record, vocab_size, tokenizer, generation)
            if len(tokens) + reserve > limit:
                behind = f" and {reserve} new ones" if reserve else ""
                raise UserError(
                    f"{len(tokens)} tokens{behind} are more than the model's {limit} positions"
                )
            lines.append(Line(number, record, tokens))
        except UserError as error:
            faults.append(f"{path}: line {number}: {error}")
    if len(faults) > _LISTED:
        faults[_LISTED:] = [f"{path}: {len(faults) - _LISTED} more lines are wrong"]
    if faults:
        raise UserError("\n".join(faults))
    if not lines:
        raise UserError(f"{path}: holds no lines")
    return lines


def check_writable(path: str | Path) -> None:
    """Finds out before the work, by making an empty file beside `path`, whether `write_lines` will
    be able to write.

    Raises:
        UserError: it will not.
    """
    with _partial(Path(path)) as partial:
        partial.touch()


def write_lines(path: str | Path, records: Iterable[dict[str, Any]]) -> None:
    """Writes one object a line; the file takes its name when it is complete.

    The text is ASCII, so that lone surrogates and characters cut in the middle cannot break the
    file.

    Raises:
        UserError: `path` cannot be written.
    """
    with _partial(Path(path)) as partial:
        partial.write_text(
            "".join(json.dumps(record, allow_nan=False) + "\n" for record in records),
            encoding="ascii",
        )
        os.replace(partial, path)


@contextmanager
def _partial(path: Path) -> Iterator[Path]:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        if path.is_dir():
            raise UserError(f"{path}: is a directory; give a file")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield partial
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None


def _object(text: bytes) -> dict[str, Any]:
    def finite(number: str) -> float:
        # 1e999 would be read as infinity, which the answers' file can't hold
        if not math.isfinite(value := float(number)):
            raise ValueError(f"{number} is no finite number")
        return value

    try:
        record = json.loads(text.decode("utf-8-sig"), parse_float=finite, parse_constant=finite)
    except (ValueError, RecursionError) as error:
        raise UserError(f"not valid JSON ({error})") from None
    if not isinstance(record, dict):
        raise UserError('must be a JSON object such as {"tokens": [1, 2]}')
    return record


def _tokens(
    record: dict[str, Any], vocab_size: int, tokenizer: Tokenizer | None, generation: bool
) -> list[int]:
    key = next((key for key in ("tokens", "messages", "prompt") if key in record), None)
    if key is None:
        raise UserError('holds neither "tokens" nor "messages" nor "prompt"')
    value = record[key]
    if key == "tokens":
        if not isinstance(value, list) or not all(type(token) is int for token in value):
            raise UserError('"tokens" must be a list of integers')
        outside = [token for token in value if not 0 <= token < vocab_size]
        if outside:
            raise UserError(f"token {outside[0]} is outside the vocabulary of {vocab_size}")
        tokens = value
    elif tokenizer is None:
        raise UserError(f'"{key}" needs a tokenizer, and the model has none; give "tokens"')
    elif key == "messages":
        if (
            not isinstance(value, list)
            or not value
            or not all(isinstance(message, dict) for message in value)
        ):
            raise UserError('"messages" must be a list of objects with "role" and "content"')
        tokens = tokenizer.encode_chat(value, add_generation_prompt=generation)
    elif not isinstance(value, str):
        raise UserError('"prompt" must be a string')
    else:
        tokens = tokenizer.encode(value)
    if not tokens:
        raise UserError(f'"{key}" gives no tokens')
    return tokens
