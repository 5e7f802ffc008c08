"""The tokens of a comparison: from a file of lines, a text, or the text below."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8rl_jax.compare.probe import Tokens
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.tokenizer import Tokenizer
from fp8rl_jax.rollout.lines import Line, read_lines

TEXT = """Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips did she
sell altogether in April and May? In May she sold 48 / 2 = 24 clips. Together that makes 48 + 24 = 72 clips, so the answer is 72.
A train that leaves at a quarter past nine and travels 180 kilometres at 60 kilometres an hour arrives at a quarter past 12."""
"""What is compared on where nothing else is given."""


def from_file(path: str, vocab_size: int, tokenizer: Tokenizer | None, limit: int) -> list[tuple[list[int], list[int]]]:
    """(prompt, completion) of every line; see `rollout.lines.read_lines` for how prompts are written.

    A line's "completion_tokens" (ids) or "completion" (text) is its completion, as `fp8rl generate` and a run's samples.jsonl
    have them; without one, or with an empty one, the second half of the prompt's tokens is.

    Raises:
        UserError: what `read_lines` refuses, or one line for each line of the file that is wrong here.
    """
    rows, faults = [], []
    for line in read_lines(path, vocab_size, tokenizer, generation=True, limit=limit):
        try:
            completion = _completion(line, vocab_size, tokenizer)
            rows.append((line.tokens, completion) if completion else halves(line.tokens))
        except UserError as error:
            faults.append(f"{path}: line {line.number}: {error}")
    if faults:
        raise UserError("\n".join(faults))
    return rows


def from_text(text: str, tokenizer: Tokenizer | None) -> list[tuple[list[int], list[int]]]:
    """A text as one row.

    Raises:
        UserError: there is no tokenizer, or the text gives fewer than two tokens.
    """
    if tokenizer is None:
        raise UserError('the model has no tokenizer: give token ids, --input FILE with lines such as {"tokens": [1, 2, 3]}')
    return [halves(tokenizer.encode(text))]


def halves(tokens: list[int]) -> tuple[list[int], list[int]]:
    """The first half as prompt, the second as completion. Raises UserError for fewer than two tokens."""
    if len(tokens) < 2:
        raise UserError("needs at least two tokens, one of a prompt and one that follows")
    return tokens[: len(tokens) // 2], tokens[len(tokens) // 2 :]


def as_tokens(rows: list[tuple[list[int], list[int]]], longest: int) -> Tokens:
    """Rows as padded arrays, each cut to its first `longest` tokens; one whose prompt is longer becomes two halves of it."""
    cut = []
    for prompt, completion in rows:
        whole = (prompt + completion)[:longest]
        cut.append((whole[: len(prompt)], whole[len(prompt) :]) if len(prompt) < len(whole) else halves(whole))
    prompts, completions = (_padded([row[i] for row in cut]) for i in (0, 1))
    return Tokens(*prompts, *completions)


def _completion(line: Line, vocab_size: int, tokenizer: Tokenizer | None) -> list[int]:
    if "completion_tokens" in line.record:
        return _ids(line.record["completion_tokens"], vocab_size)
    text = line.record.get("completion", "")
    if not isinstance(text, str):
        raise UserError('"completion" must be a string')
    if text and tokenizer is None:
        raise UserError('"completion" needs a tokenizer, and the model has none; give "completion_tokens"')
    return tokenizer.encode(text, add_special_tokens=False) if text else []


def _ids(value: Any, vocab_size: int) -> list[int]:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise UserError('"completion_tokens" must be a list of integers')
    if outside := [token for token in value if not 0 <= token < vocab_size]:
        raise UserError(f"token {outside[0]} is outside the vocabulary of {vocab_size}")
    return value


def _padded(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    table = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for row, tokens in zip(table, rows, strict=True):
        row[: len(tokens)] = tokens
    return table, np.asarray([len(tokens) for tokens in rows], np.int32)
