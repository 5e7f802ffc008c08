"""JSON lines: a problem, a blank line, or one clear complaint with file and line; nothing else."""

import json
import math
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fp8rl_jax.config.tasks import TaskConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.tasks.conversation import Conversation, message_faults
from fp8rl_jax.tasks.dataset import load_splits
from fp8rl_jax.tasks.sources import Damaged, parse_line, read_problems

TEXT = st.text(st.characters(codec="utf-8"), min_size=1).filter(str.strip)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
KEYS = ("prompt", "question", "answer", "metadata", "level")
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "x"]), "content": VALUES}
)
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2 + 2?"}]


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows(count, start=0, **extra):
    return [
        {"prompt": f"Say {i}", "answer": i, "level": i % 2, **extra}
        for i in range(start, start + count)
    ]


def task_of(path, **changes):
    settings: dict[str, Any] = {"kind": "jsonl", "name": str(path), "eval_size": 2, **changes}
    return TaskConfig(**settings)


@settings(deadline=None)
@given(TEXT, TEXT | st.integers(-(10**9), 10**9), st.dictionaries(st.text(), VALUES, max_size=3))
def test_a_sound_line_is_read_rightly(prompt, answer, extra):
    extra = {
        key: value
        for key, value in extra.items()
        if key not in ("prompt", "question", "messages", "answer", "metadata")
    }
    for line in (json.dumps, lambda row: json.dumps(row, ensure_ascii=False)):
        parsed = parse_line(
            line({"question": prompt, "answer": answer, **extra}).encode() + b"\r\n"
        )
        assert parsed == {"question": prompt, "answer": str(answer), "metadata": extra}


@settings(deadline=None)
@given(
    st.binary() | st.text().map(str.encode) | VALUES.map(lambda value: json.dumps(value).encode())
)
@example(b"[" * 100_000)
@example(b'{"prompt": "a", "answer": ' + b"1" * 5000 + b"}")
@example(b'{"prompt": "\\ud800", "answer": 1}')
@example(b'{"prompt": "a", "answer": 1e999}')
@example(b"\xef\xbb\xbf")
def test_any_line_is_read_or_named_as_damaged(line):
    try:
        parsed = parse_line(line)
    except Damaged as fault:
        assert str(fault) and "\n" not in str(fault)
    else:
        assert parsed is None or (parsed["question"].strip() and parsed["answer"].strip())


@settings(deadline=None)
@given(
    st.fixed_dictionaries(
        {}, optional={**dict.fromkeys(KEYS, VALUES), "messages": VALUES | st.lists(MESSAGE)}
    )
)
def test_any_object_is_read_or_named_as_damaged(record):
    try:
        parsed = parse_line(json.dumps(record).encode())
    except Damaged:
        return
    assert parsed is not None
    given = [record[key] for key in ("prompt", "question", "messages") if key in record]
    assert len(given) == 1 and type(record["answer"]) in (str, int, float)
    if isinstance(given[0], str):
        assert parsed["question"] == given[0]
    else:
        assert not message_faults(given[0]) and list(parsed["question"].messages) == given[0]
    assert parsed["metadata"] == record.get("metadata", {}) | {
        k: v for k, v in record.items() if k == "level"
    }


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "a", "answer": "\xff"}', r"not UTF-8 \(byte 0xff at position 28\)"),
        (b'{"prompt": "a", "answer": 1', r"not JSON \(.* at column 28\)"),
        (b'["a", 1]', "an object with prompt and answer was expected, not a list"),
        (b'{"answer": 1}', r"one of prompt, question and messages \(it has none\)"),
        (b'{"prompt": "a", "question": "b", "answer": 1}', "it has prompt and question"),
        (b'{"prompt": " ", "answer": 1}', "prompt is empty"),
        (b'{"prompt": 3, "answer": 1}', "prompt must be text or a list of messages, not a number"),
        (b'{"prompt": "a"}', r"no answer \(keys: prompt\)"),
        (b'{"prompt": "a", "answer": null}', "answer must be text or a number, not null"),
        (b'{"prompt": "a", "answer": true}', "not true or false"),
        (b'{"prompt": "a", "answer": ""}', "answer is empty"),
        (b'{"prompt": "a", "answer": NaN}', "NaN is no JSON"),
        (b'{"prompt": "a", "answer": 1, "x": 1e999}', "beyond the range of a float"),
        (b'{"prompt": "a", "answer": 1, "answer": 2}', "key 'answer' stands twice"),
        (b'{"prompt": "a", "answer": 1, "metadata": 3}', "metadata must be an object"),
        (
            b'{"prompt": "a", "answer": 1, "x": 1, "metadata": {"x": 2}}',
            "'x' stands both in metadata and beside it",
        ),
        (b'{"prompt": "a\\udc00", "answer": 1}', "half of a surrogate pair"),
        (b'{"messages": [], "answer": 1}', "messages: must be a list of messages"),
        (b'{"messages": [{"role": "user"}], "answer": 1}', "message 0 must have role and content"),
        (
            b'{"messages": [{"role": "god", "content": "x"}], "answer": 1}',
            "which is none of system, user",
        ),
        (
            b'{"messages": [{"role": "assistant", "content": "x"}], "answer": 1}',
            "nothing to answer",
        ),
    ],
)
def test_what_is_wrong_with_a_line(line, message):
    with pytest.raises(Damaged, match=message):
        parse_line(line)


def test_messages_become_a_conversation_and_the_template_fits_its_last_one(tmp_path):
    path = write(
        tmp_path / "a.jsonl",
        *({"messages": MESSAGES, "answer": 4}, {"prompt": MESSAGES[1:], "answer": 4}),
    )
    train, _ = load_splits(task_of(path, eval_size=0, prompt_template="{question} Think."))
    prompts = {
        len(e.prompt.messages): e.prompt
        for e in train.examples
        if isinstance(e.prompt, Conversation)
    }
    assert len(prompts) == 2 and prompts[2].messages[0] == MESSAGES[0]
    assert all(prompt.messages[-1]["content"] == "2 + 2? Think." for prompt in prompts.values())


def test_a_file_is_split_like_a_list(tmp_path):
    path = write(tmp_path / "a.jsonl", *rows(40))
    train, held_out = load_splits(task_of(path))
    assert len(train) == 38 and {e.answer for e in train.examples + held_out.examples} == set(
        map(str, range(40))
    )
    assert train[0].entry["metadata"] == {"level": int(train[0].answer) % 2}
    assert [e.answer for e in train.examples] != sorted((e.answer for e in train.examples), key=int)


def test_several_files_blank_lines_and_a_byte_order_mark(tmp_path):
    lines = (
        b'\xef\xbb\xbf{"prompt": "a", "answer": 1}\r\n\r\n  \n{"prompt": "b\xe2\x80\xa8c", '
        b'"answer": 2}'
    )
    (tmp_path / "a.jsonl").write_bytes(lines)
    write(tmp_path / "b.jsonl", {"prompt": "d", "answer": 3})
    read = read_problems(f"{tmp_path}/*.jsonl", "task.name")
    assert [row["question"] for row in read] == ["a", "b\u2028c", "d"]
    assert [row["source"].rpartition("/")[2] for row in read] == [
        "a.jsonl:1",
        "a.jsonl:4",
        "b.jsonl:1",
    ]


def test_a_held_out_file_stays_out_of_training(tmp_path):
    path, held = (
        write(tmp_path / "a.jsonl", *rows(10)),
        write(tmp_path / "held.jsonl", *rows(6, start=7)),
    )
    train, held_out = load_splits(task_of(path, eval_path=held, eval_size=4))
    assert len(held_out) == 4 and {e.answer for e in train.examples} == set(map(str, range(7)))
    assert len(load_splits(task_of(path, eval_path=held, eval_size=100))[1]) == 6
    assert len(load_splits(task_of(path, eval_path=held, eval_size=None))[1]) == 6
    with pytest.raises(UserError, match="has 7 distinct prompts that task.eval_path does not have"):
        load_splits(task_of(path, eval_path=held, train_size=8))
    with pytest.raises(UserError, match="task.eval_path = .* is an empty data set"):
        load_splits(task_of(path, eval_path=write(tmp_path / "none.jsonl")))


def test_every_damaged_line_is_named_up_to_twenty(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "answer": 1}\n' + "{}\n" * 25)
    with pytest.raises(UserError) as raised:
        load_splits(task_of(path))
    lines = str(raised.value).splitlines()
    assert (
        len(lines) == 21
        and lines[0].startswith(f"{path}:2: give one of")
        and lines[-1] == "and 5 more damaged lines"
    )


def test_a_line_that_the_template_does_not_fit_is_named(tmp_path):
    path = write(tmp_path / "a.jsonl", *rows(3), {"prompt": "b", "answer": 1})
    with pytest.raises(UserError, match=r"a.jsonl:4 \(KeyError: 'level'\)"):
        load_splits(task_of(path, prompt_template="{metadata[level]}: {question}"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "no/such/file.jsonl"}, "task.name = .*there is no such file"),
        ({"eval_path": "no/such/*.jsonl"}, "task.eval_path = .*there is no such file"),
        ({"name": "."}, "cannot be read"),
        ({"args": {"x": 1}}, "take no arguments"),
        ({"kind": "module", "name": "m:f", "eval_path": "x"}, "belongs to task.kind"),
        ({"eval_path": "x", "eval_size": 0}, "is not read while task.eval_size = 0"),
    ],
)
def test_files_that_cannot_be_used_are_one_clear_line(tmp_path, changes, message):
    task = task_of(**{"path": write(tmp_path / "a.jsonl", *rows(9)), **changes})
    with pytest.raises(UserError, match=message) as raised:
        load_splits(task)
    assert "\n" not in str(raised.value)


@settings(deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_an_answer_that_is_a_number_keeps_its_value(value):
    problem = parse_line(json.dumps({"prompt": "a", "answer": value}).encode())
    assert problem is not None
    answer = problem["answer"]
    assert math.isclose(float(answer), value) or float(answer) == value
