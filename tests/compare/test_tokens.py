"""Rows of a comparison: from lines, from a text, cut and padded."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fp8rl_jax.compare.tokens import TEXT, Row, as_recorded, as_tokens, from_file, from_text, halves
from fp8rl_jax.errors import UserError
from fp8rl_jax.tokenizers.byte_tokenizer import ByteTokenizer

VOCAB = ByteTokenizer.vocab_size


def rows_of(tmp_path, *lines, tokenizer=None, recorded=""):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return from_file(str(path), VOCAB, tokenizer, 100, recorded)


def test_prompts_and_completions_of_lines(tmp_path):
    encode = ByteTokenizer().encode
    lines = (
        {"tokens": [1, 2, 3], "completion_tokens": [4]},
        {"tokens": [1, 2, 3, 4, 5]},
        {"prompt": "ab", "completion": "cde", "reward": 1.0},
        {"prompt": "abcd", "completion": ""},
    )
    assert rows_of(tmp_path, *lines, tokenizer=ByteTokenizer()) == [
        Row([1, 2, 3], [4]),
        Row([1, 2], [3, 4, 5]),
        Row(encode("ab"), [99, 100, 101]),
        halves(encode("abcd")),
    ]


def test_every_line_that_is_wrong_is_named(tmp_path):
    lines = (
        {"tokens": [1]},
        {"tokens": [1, 2], "completion_tokens": [VOCAB]},
        {"tokens": [1, 2], "completion_tokens": "3"},
        {"tokens": [1, 2], "completion": "text"},
        {"tokens": [1, 2], "completion": 3},
        {"tokens": [1, 2]},
    )
    with pytest.raises(UserError) as fault:
        rows_of(tmp_path, *lines)
    said = [line.split(": ", 1)[1] for line in str(fault.value).splitlines()]
    assert said == [
        "line 1: needs at least two tokens, one of a prompt and one that follows",
        f"line 2: token {VOCAB} is outside the vocabulary of {VOCAB}",
        'line 3: "completion_tokens" must be a list of integers',
        'line 4: "completion" needs a tokenizer, and the model has none; give "completion_tokens"',
        'line 5: "completion" must be a string',
    ]


def test_a_text_needs_a_tokenizer():
    (row,) = from_text(TEXT, ByteTokenizer())
    assert row[0] + row[1] == ByteTokenizer().encode(TEXT)
    with pytest.raises(
        UserError, match='no tokenizer: give token ids, --input FILE with lines such as {"tokens"'
    ):
        from_text(TEXT, None)


def test_rows_are_padded_and_the_longest_truncated():
    tokens = as_tokens(
        [Row([1, 2, 3], [4, 5, 6, 7]), Row([8], [9]), Row([1, 2, 3, 4, 5, 6], [7])], 5
    )
    np.testing.assert_array_equal(tokens.prompts, [[1, 2, 3], [8, 0, 0], [1, 2, 0]])
    np.testing.assert_array_equal(tokens.completions, [[4, 5, 0], [9, 0, 0], [3, 4, 5]])
    assert tokens.prompt_lengths.tolist() == [3, 1, 2] and tokens.completion_lengths.tolist() == [
        2,
        1,
        3,
    ]
    assert [mask.sum() for mask in tokens.masks] == [6, 6]


def test_recorded_logprobs_are_truncated_with_their_tokens():
    rows = [
        Row([1, 2, 3], [4, 5, 6, 7], [-1.0, -2.0, -3.0, -4.0]),
        Row([8], [9], [-5]),
        Row([1, 2, 3, 4, 5, 6], [7], [-6]),
    ]
    gap = np.nan
    np.testing.assert_array_equal(
        as_recorded(rows, 5), [[-1, -2, gap], [-5, gap, gap], [gap, gap, gap]]
    )
    with pytest.raises(
        UserError,
        match="--max-tokens: cuts off every token that has a recorded log-probability; raise it",
    ):
        as_recorded(rows[2:], 5)


def test_a_line_without_recorded_logprobs_is_named(tmp_path):
    tokens = {"tokens": [1, 2], "completion_tokens": [3, 4]}
    (row,) = rows_of(tmp_path, tokens | {"logprobs": [-1, -0.5]}, recorded="logprobs")
    assert row == Row([1, 2], [3, 4], [-1, -0.5])
    faults = (
        (tokens, 'has no "logprobs"; --recorded needs both'),
        (
            {"tokens": [1, 2, 3], "logprobs": [-1]},
            'has no "completion_tokens"; --recorded needs both',
        ),
        (tokens | {"logprobs": -1}, '"logprobs" must be a list of finite numbers'),
        (tokens | {"logprobs": [-1, None]}, '"logprobs" must be a list of finite numbers'),
        (tokens | {"logprobs": [-1]}, '"logprobs" has 1 numbers for 2 "completion_tokens"'),
    )
    with pytest.raises(UserError) as fault:
        rows_of(tmp_path, *(line for line, _ in faults), recorded="logprobs")
    said = [line.split(": ", 2)[2] for line in str(fault.value).splitlines()]
    assert said == [why for _, why in faults]
