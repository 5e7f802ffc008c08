"""Files of problems: a problem, a blank line, or one clear complaint with file and row; nothing
else."""

import gzip
import json
import math
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fp8rl_jax.config.tasks import FieldsConfig, RewardConfig, TaskConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.tasks.columns import value_at
from fp8rl_jax.tasks.conversation import Conversation, read_messages
from fp8rl_jax.tasks.dataset import load_splits
from fp8rl_jax.tasks.sources import Damaged, parse_problem, read_line, read_problems

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
ANSWERS = ("answer", "solution", "ground_truth", "reward_model", "completion")
KEYS = ("prompt", "question", *ANSWERS, "metadata", "level")
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "x"]), "content": VALUES}
)
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2 + 2?"}]


def parse_line(line: bytes) -> dict[str, Any]:
    return parse_problem(read_line(line))


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
    extra = {key: value for key, value in extra.items() if key not in ("messages", "tools", *KEYS)}
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
@example(b'{"prompt": "a", "\\n": 1}')
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
    given = [
        record[key] for key in ("prompt", "question", "messages") if record.get(key) is not None
    ]
    assert len(given) == 1 and parsed["answer"].strip()
    if record.get("answer") is not None:
        assert parsed["answer"] == str(record["answer"])
    if isinstance(given[0], str):
        assert parsed["question"] == given[0]
    else:
        roles = ("user", "tool", "assistant")
        whole = read_messages(given[0], last=roles)
        assert parsed["question"].messages == whole[: len(parsed["question"].messages)]
    assert parsed["metadata"] == (record.get("metadata") or {}) | {
        k: v for k, v in record.items() if k in ("level", *ANSWERS[1:])
    }


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "a", "answer": "\xff"}', r"not UTF-8 \(byte 0xff at position 28\)"),
        (b'{"prompt": "a", "answer": 1', r"not JSON \(.* at column 28\)"),
        (b'["a", 1]', "an object with prompt and answer was expected, not a list"),
        (
            b'{"answer": 1}',
            r"one of prompt, question, problem and messages \(it has none; keys: answer\)",
        ),
        (b'{"prompt": "a", "question": "b", "answer": 1}', "it has prompt and question"),
        (b'{"prompt": " ", "answer": 1}', "prompt is empty"),
        (b'{"prompt": 3, "answer": 1}', "prompt must be text or a list of messages, not a number"),
        (b'{"prompt": "a"}', r"no answer \(keys: prompt\)"),
        (b'{"prompt": "a", "answer": null}', r"no answer \(keys: prompt, answer\)"),
        (b'{"prompt": null, "answer": 1}', r"it has none"),
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


CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
CALLS = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "4", "name": "add", "tool_call_id": "c"},
]


def arrow(messages):
    """With every field that any has, null where it isn't, as Arrow fills a column of structs."""
    further = ("name", "tool_calls", "tool_call_id", "reasoning_content", "weight")
    call = {**CALL, "function": {**CALL["function"], "arguments": {"a": 2, "b": 2, "city": None}}}
    filled = [dict.fromkeys(further) | message for message in messages]
    return [m | {"tool_calls": [call]} if m["tool_calls"] else m for m in filled]


@pytest.mark.parametrize(
    ("messages", "read"),
    [
        (arrow(MESSAGES), MESSAGES),
        (arrow(CALLS), CALLS),
        (CALLS, CALLS),
        ([{"role": "user", "content": "a", "tool_calls": []}], [{"role": "user", "content": "a"}]),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a", "image_url": None}]}],
            [{"role": "user", "content": "a"}],
        ),
        (
            [{"role": "user", "name": "u", "content": ""}],
            [{"role": "user", "content": "", "name": "u"}],
        ),
    ],
)
def test_a_null_is_no_field_of_a_message(messages, read):
    problem = parse_line(json.dumps({"messages": messages, "answer": 4}).encode())
    assert problem is not None and list(problem["question"].messages) == read


def test_two_conversations_that_differ_in_a_call_are_two():
    other = [CALLS[0], {**CALLS[1], "tool_calls": [{"function": {"name": "sub"}}]}, CALLS[2]]
    assert Conversation(other) != Conversation(CALLS)
    assert Conversation(CALLS).splitlines()[2] == ('tool: 4 {"name": "add", "tool_call_id": "c"}')


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        ({"content": "a"}, "message 0 must have role and content"),
        ({"role": "user", "content": None}, "message 0 must have role and content"),
        ({"role": "tool", "content": None, "tool_call_id": "c"}, "must have role and content"),
        (
            {"role": "user", "content": "a", "weight": 1},
            "message 0 has 'weight', which is no field",
        ),
        ({"role": "user", "content": "a", "tool_calls": [CALL]}, "no field of the user's messages"),
        ({"role": "user", "content": "a", "name": 3}, "must have text as its name"),
        ({"role": "user", "content": 3}, "must have text as its content"),
        ({"role": "user", "content": []}, "message 0 has 0 content parts"),
        ({"role": "user", "content": [{"type": "image"}]}, "a content part of type 'image'"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}] * 2}, "has 2 content parts"),
        ({"role": "user", "content": ["a"]}, "a content part of type 'a'; only text"),
        ({"role": "assistant", "tool_calls": "add"}, "must have a list as its tool_calls"),
        ({"role": "assistant", "tool_calls": [{"name": "add"}]}, "a tool call that is not"),
    ],
)
def test_what_is_wrong_with_a_message(message, fault):
    with pytest.raises(Damaged, match=f"messages: .*{fault}"):
        parse_line(json.dumps({"messages": [message], "answer": 4}).encode())


USER, SAID = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "It is 4."}
VERL = {
    "data_source": "gsm8k",
    "prompt": [USER],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"split": "train", "index": 0, "answer": "2 + 2 = 4 #### 4"},
}


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        (VERL, "4"),
        (VERL | {"answer": None}, "4"),
        (VERL | {"answer": 4}, "4"),
        ({"prompt": "a", "solution": "4"}, "4"),
        ({"prompt": "a", "solution": "2 + 2 = 4", "answer": "4"}, "4"),
        (VERL | {"solution": "2 + 2 = 4", "images": [], "tools": None}, "4"),
        ({"prompt": "a", "ground_truth": 4}, "4"),
        ({"prompt": "a", "solution": None, "ground_truth": "4", "completion": "It is 4."}, "4"),
        ({"prompt": "a", "completion": "It is 4."}, "It is 4."),
        ({"prompt": [USER], "completion": [SAID]}, "It is 4."),
        ({"messages": [USER, SAID]}, "It is 4."),
        ({"messages": [USER, SAID], "problem": "2 + 2?", "answer": "4"}, "4"),
        ({"prompt": [USER], "problem": "2 + 2?", "solution": "4"}, "4"),
        ({"messages": arrow([USER, SAID]), "prompt": None, "metadata": None}, "It is 4."),
    ],
)
def test_columns_may_have_the_names_of_trl_and_verl(row, answer):
    problem = parse_line(json.dumps(row).encode())
    assert problem is not None and problem["answer"] == answer
    question = problem["question"]
    assert question == "a" if isinstance(row.get("prompt"), str) else question.messages == (USER,)
    left = {key: row[key] for key in row if key not in ("prompt", "messages", "answer", "metadata")}
    assert problem["metadata"] == left


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (VERL | {"answer": "5"}, "answer and reward_model.ground_truth differ"),
        (VERL | {"ground_truth": "5"}, "reward_model.ground_truth and ground_truth differ"),
        (
            {"prompt": "a", "ground_truth": ["4"]},
            "ground_truth must be text or a number, not a list",
        ),
        (
            {"prompt": "a", "reward_model": {"ground_truth": {"target": 4}}},
            "must be text or a number",
        ),
        ({"prompt": "a", "reward_model": "rule"}, "it has no answer"),
        ({"prompt": "a", "completion": [SAID, SAID]}, "completion must be one message"),
        ({"prompt": "a", "completion": [USER]}, "completion: the last message is the user's"),
        ({"messages": [SAID]}, "messages: the last message is the assistant's"),
        ({"messages": [USER, CALLS[1]]}, "the last of messages calls tools or reasons"),
        (
            {"messages": [USER], "tools": [{"type": "function"}], "answer": 4},
            "tools would not get into",
        ),
    ],
)
def test_what_a_row_says_in_two_ways_or_in_none_is_named(row, fault):
    with pytest.raises(Damaged, match=fault):
        parse_line(json.dumps(row).encode())


NAMED = {"fields": FieldsConfig(prompt="extra_info.question", answer="final_answer")}
FOREIGN = [
    {"extra_info": {"question": f"{i} + 1?"}, "final_answer": i + 1, "answer": "so", "level": i % 2}
    for i in range(30)
]


def test_columns_under_other_names_are_named(tmp_path):
    files = write(tmp_path / "a.jsonl", *FOREIGN), write(tmp_path / "held.jsonl", *FOREIGN[:4])
    loaded = load_splits(task_of(files[0], eval_path=files[1], eval_size=4, **NAMED))
    given = load_splits(TaskConfig(eval_size=4, **NAMED), FOREIGN)
    for train, held_out in (loaded, given):
        assert (len(train), len(held_out)) == (26, 4)
        assert all(int(e.prompt[:-5]) + 1 == int(e.answer) for e in (*train, *held_out))
        assert {"answer", "final_answer", "level", "extra_info"} == set(train[0].entry["metadata"])
    messages = [{"prompt": "not this", "talk": [USER, SAID]}]
    train, _ = load_splits(TaskConfig(eval_size=0, fields=FieldsConfig("talk")), messages)
    assert train[0].answer == "It is 4." and train[0].entry["metadata"] == {"prompt": "not this"}
    # a column of that very name goes before one of an object
    assert value_at({"a.b": 1, "a": {"b": 2}}, "a.b") == 1


@pytest.mark.parametrize("kind", ["files", "python", "module"])
def test_a_column_that_no_row_has_is_one_line_with_those_that_there_are(tmp_path, kind):
    fields = FieldsConfig(prompt="extra_info.questions", answer="answers.final")
    task = task_of(write(tmp_path / "a.jsonl", *FOREIGN), fields=fields)
    if kind == "module":
        (tmp_path / "m.py").write_text(f"def f():\n    return {FOREIGN!r}\n")
        task = replace(task, kind="module", name=f"{tmp_path}/m.py:f")
    with pytest.raises(UserError) as raised:
        load_splits(task, FOREIGN if kind == "python" else None)
    prompt, answer = str(raised.value).splitlines()
    there = "there are extra_info.question, final_answer, answer, level"
    assert prompt.startswith("task.fields.prompt = 'extra_info.questions': ")
    assert prompt.endswith(f"no such column; did you mean extra_info.question? {there}")
    assert answer.startswith("task.fields.answer = 'answers.final': ") and answer.endswith(there)


def test_a_row_without_a_named_column_is_named(tmp_path):
    lacking = [row | {"final_answer": None} for row in FOREIGN[:3]]
    path = write(tmp_path / "a.jsonl", *FOREIGN[3:], *lacking)
    with pytest.raises(UserError, match=r"a.jsonl:28: it has no final_answer .*2 more rows alike"):
        load_splits(task_of(path, **NAMED))
    with pytest.raises(UserError, match='task.kind = "reasoning_gym" have no columns'):
        load_splits(TaskConfig(**NAMED))


def test_rows_as_the_sets_of_mathematics_have_them():
    math = {"problem": "2 + 2?", "solution": "So $\\boxed{4}$.", "level": 1, "subject": "sums"}
    for row, answer in ((math, math["solution"]), (math | {"answer": "4"}, "4")):
        problem = parse_line(json.dumps(row).encode())
        assert problem is not None
        assert (problem["question"], problem["answer"]) == ("2 + 2?", answer)
        assert "problem" not in problem["metadata"]


def test_prompts_alone_are_enough_where_no_reward_compares(tmp_path):
    path = write(tmp_path / "a.jsonl", {"prompt": [USER]}, {"prompt": "b"})
    judged = RewardConfig(function="<python>:f")
    train, held_out = load_splits(task_of(path, eval_size=1, reward=judged))
    assert [problem.answer for problem in (*train, *held_out)] == ["", ""]
    with pytest.raises(UserError, match=r"a.jsonl:1: it has no answer \(keys: prompt\)"):
        load_splits(task_of(path))


def test_what_only_a_reward_reads_may_be_anything():
    row = VERL | {"reward_model": {"ground_truth": {"target": 4}}, "solution": ["4"]}
    train, _ = load_splits(
        TaskConfig(
            kind="python", name="list", eval_size=0, reward=RewardConfig(function="<python>:f")
        ),
        [row],
    )
    assert train[0].answer == "" and train[0].entry["metadata"]["solution"] == ["4"]


def test_rows_as_pandas_reads_them_from_parquet():
    row = VERL | {
        "prompt": np.array([USER], object),
        "extra_info": {"index": np.int64(3), "parts": np.array([0.5, 1.0])},
    }
    train, _ = load_splits(TaskConfig(kind="python", name="list", eval_size=0), [row])
    assert isinstance(train[0].prompt, Conversation) and train[0].prompt.messages == (USER,)
    assert train[0].entry["metadata"]["extra_info"] == {"index": 3, "parts": [0.5, 1.0]}
    with pytest.raises(UserError, match="dataset row 0: it must hold plain values only"):
        bad = {**row, "extra_info": np.array([np.nan])}
        load_splits(TaskConfig(kind="python", name="list", eval_size=0), [bad])


def test_one_list_and_gzip_are_files_too(tmp_path):
    listed = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]
    for form, text in {
        "list": json.dumps(listed, indent=1),
        "marked": "\ufeff" + json.dumps(listed),
        "lines": "".join(f"{json.dumps(row)}\r\n\r\n" for row in listed),
    }.items():
        for name, pack in {"plain": bytes, "packed": gzip.compress}.items():
            (tmp_path / f"{form}-{name}").write_bytes(pack(text.encode()))
    for file in sorted(tmp_path.iterdir()):
        read = read_problems(str(file), "task.name")
        assert [(row["question"], row["answer"]) for row in read] == [("a", "1"), ("b", "2")]
        lines = (f"{file}:1", f"{file}:3")
        numbered = (f"{file}: row 1", f"{file}: row 2")
        assert tuple(r["source"] for r in read) == (lines if "lines" in file.name else numbered)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[1, {}]", "row 1: an object with prompt and answer was expected, not a number"),
        (b'[{"prompt": "a", "answer": 1},\n {"prompt"]', "not JSON .* at line 2, column 11"),
        (b"[]", "is an empty data set"),
        (b'{\n "data": []\n}', "a: one object over several lines; write an object a line"),
        (
            b'{"prompt": ["a", "b"], "answer": ["1", "2"]}',
            "a:1: prompt: is a list of texts; write an object for each row",
        ),
        (gzip.compress(b"{}" * 99, mtime=0)[:-9], "task.name: .* cannot be read"),
        (b"\x1f\x8b\x00", "task.name: .* cannot be read"),
    ],
)
def test_files_that_are_damaged_are_named(data, message, tmp_path):
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(UserError, match=message):
        load_splits(task_of(tmp_path / "a"))


def test_parquet_has_rows_like_any_file(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    problems = [
        VERL,
        VERL | {"prompt": CALLS, "reward_model": {"style": "rule", "ground_truth": "5"}},
        VERL | {"reward_model": {"style": "rule", "ground_truth": None}},
    ]
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(problems[:2]), path)
    read = read_problems(str(path), "task.name")
    assert [row["source"] for row in read] == [f"{path}: row 1", f"{path}: row 2"]
    assert [row["answer"] for row in read] == ["4", "5"]
    assert [list(row["question"].messages) for row in read] == [[USER], CALLS]
    parquet.write_table(pyarrow.Table.from_pylist(problems), path)
    with pytest.raises(UserError, match="a.parquet: row 3: it has no answer"):
        read_problems(str(path), "task.name")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match="task.name: .*a.parquet cannot be read"):
        read_problems(str(path), "task.name")


def test_parquet_without_its_package_is_one_clear_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a").write_bytes(b"PAR1")
    with pytest.raises(UserError, match="is a Parquet file.*pip install pyarrow, or"):
        read_problems(str(tmp_path / "a"), "task.name")


def test_rows_with_the_prompt_of_an_earlier_one_are_named(tmp_path, caplog):
    path = write(tmp_path / "a.jsonl", *rows(9), *rows(6), {"prompt": "Say 0", "answer": 7})
    train, held_out = load_splits(task_of(path))
    assert len(train) + len(held_out) == 9 and train.duplicates == 7
    assert "task.name: 7 rows have the prompt of an earlier one and are dropped" in caplog.text
    assert ", 1 of them with another answer: " in caplog.text and "and 2 more" in caplog.text
    assert f"{path}:" in caplog.text


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
    columns = "".join(f'{{"ask": {i}, "x{i}": 1}}\n' for i in range(25))
    path.write_text('{"prompt": "a", "answer": 1}\n' + columns)
    with pytest.raises(UserError) as raised:
        load_splits(task_of(path))
    lines = str(raised.value).splitlines()
    assert (
        len(lines) == 21
        and lines[0].startswith(f"{path}:2: give one of")
        and lines[-1] == "and 5 more damaged rows"
    )


def test_what_is_wrong_with_many_lines_is_said_once(tmp_path):
    path = write(tmp_path / "a.jsonl", *[{"ask": i, "answer": i} for i in range(40)], {"prompt": 1})
    with pytest.raises(UserError) as raised:
        load_splits(task_of(path))
    one, other = str(raised.value).splitlines()
    assert one.startswith(
        f"{path}:1: give one of prompt, question, problem and messages (it has none; keys: ask, "
        f"answer); task.fields.prompt names another column; 39 more rows alike: {path}:2, {path}:3"
    ) and one.endswith(" and 34 more")
    assert other.startswith(f"{path}:41: ")


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
        ({"kind": "environment", "name": "m:f", "eval_path": "x"}, "belongs to problems that are"),
        ({"eval_split": "test"}, 'task.eval_split belong to task.kind = "dataset"'),
        ({"eval_path": "<python>:list of 2"}, "give eval_dataset= again, or name their file"),
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
