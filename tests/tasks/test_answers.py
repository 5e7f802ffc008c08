"""Lines of a worker, good and bad: whatever comes is an answer or an AnswerFault, and no other
exception."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8rl_jax.tasks.rewards import LARGEST
from fp8rl_jax.tasks.sandbox.answers import (
    BATCH,
    AnswerFault,
    Start,
    read_answer,
    read_start,
)

TURN = {"observation": [{"role": "user", "content": "5"}], "reward": 0.5, "done": False}
# What the answers are made of, where it belongs and where it does not.
PARTS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats()
    | st.text(st.characters(codec=None), max_size=8)
    | st.sampled_from(["batch", "user", "tool", "assistant", "system"]),
    lambda below: (
        st.lists(below, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["ready", "batches", "warning", "failed", "observation", "reward", "done", "role"]
                + ["content"]
            ),
            below,
            max_size=4,
        )
    ),
    max_leaves=12,
)
GOOD = (
    [[0.5], None],
    [[1, 2.0], None],
    [None, "ValueError: no"],
    "batch",
    [TURN, None],
    {"ready": True, "batches": False, "warning": ""},
    {"failed": "it does not import"},
)


def check(line: bytes) -> None:
    """Every reader gives what it promises, or refuses."""
    try:
        start = read_start(line)
        assert isinstance(start, Start) and (start.failed + start.warning + "x").isprintable()
    except AnswerFault:
        pass
    for scores in (None, 1, 2):
        try:
            answer = read_answer(line, scores)
        except AnswerFault as fault:
            assert str(fault).startswith("sent ")
            continue
        if answer == BATCH:
            continue
        result, error = answer
        assert (result is None) != (error is None)
        if error is not None:
            assert error.isprintable() and error.encode() and len(error) <= 1000
        elif scores is None:
            assert set(result) == set(TURN) and type(result["done"]) is bool
            assert (
                abs(result["reward"]) <= LARGEST and bool(result["observation"]) != result["done"]
            )
            for message in result["observation"]:
                assert (
                    message["role"] in ("user", "tool") and message["content"].encode() is not None
                )
        else:
            assert len(result) == scores and all(type(score) is float for score in result)
            assert all(math.isfinite(score) and abs(score) <= LARGEST for score in result)


def test_what_workers_say_is_read():
    assert read_start(b'{"ready": true, "batches": true, "warning": "w"}') == Start("", True, "w")
    assert read_start(b'{"failed": "why\\nnot"}') == Start("why not")
    assert read_answer(b"[[1, 0.5], null]", 2) == ([1.0, 0.5], None)
    assert read_answer(b'[null, "no\\u001b[2J"]', 2) == (None, "no\ufffd[2J")
    assert read_answer(b'"batch"', 1) == BATCH
    assert read_answer(json.dumps([TURN, None]).encode(), None) == (TURN, None)
    assert read_answer(b'[{"observation": [], "reward": 1, "done": true}, null]', None)[0]["done"]


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\xff",
        b"[[1.0], null",
        b"[[NaN], null]",
        b"[[1e999], null]",
        b"[[1" + b"0" * 3000 + b"], null]",
        b"[[1" + b"0" * 5000 + b"], null]",
        b"[[true], null]",
        b'[["1"], null]',
        b"[[1.0, 1.0], null]",
        b"[[1.0], 0]",
        b'[null, ""]',
        b'[null, " "]',
        b"[null, null]",
        b'{"0": [1.0], "1": null}',
        b"[" * 10**6,
        b'{"a":' * 10**5,
        json.dumps([TURN, None]).encode(),
        "[[1.0], null]".encode("utf-16"),
    ],
    ids=range(19),
)
def test_what_is_no_answer_is_refused(line):
    with pytest.raises(AnswerFault):
        read_answer(line, 1)


@pytest.mark.parametrize(
    "change",
    [
        {"observation": []},
        {"observation": [{"role": "user", "content": "\ud83d"}]},
        {"observation": [{"role": ["user"], "content": "5"}]},
        {"observation": [{"role": "assistant", "content": "5"}]},
        {"observation": [{"role": "user", "content": "5", "weight": "x"}]},
        {"observation": "5"},
        {"reward": None},
        {"reward": 2e15},
        {"done": 1},
        {"done": True},
        {"more": 1},
        {"metrics": None},
        {"metrics": {"tries": "1"}},
        {"metrics": {"tries": 2e15}},
        {"metrics": {"": 1.0}},
        {"metrics": {"a\nb": 1.0}},
        {"metrics": {"x" * 201: 1.0}},
        {"metrics": {str(i): 0.0 for i in range(201)}},
    ],
)
def test_what_is_no_turn_is_refused(change):
    with pytest.raises(AnswerFault):
        read_answer(json.dumps([TURN | change, None]).encode(), None)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=64))
def test_any_bytes(line):
    check(line)


@settings(max_examples=150, deadline=None)
@given(PARTS, st.lists(PARTS, max_size=3))
def test_any_values(value, values):
    for each in (value, [[value], None], [None, value], [value, None], values):
        check(json.dumps(each).encode())


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(GOOD), st.data())
def test_answers_that_are_cut_or_changed(good, data):
    line = json.dumps(good).encode()
    at = data.draw(st.integers(0, len(line)))
    check(line[:at])
    check(line[:at] + data.draw(st.binary(max_size=3)) + line[at:])
    check(line[:at] + json.dumps(data.draw(PARTS)).encode() + line[at + 1 :])
