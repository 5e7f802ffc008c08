"""Files of JSON lines: whatever stands in one, its answer or a line that names it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8rl_jax.errors import UserError
from fp8rl_jax.rollout.offline import read_lines, write_lines
from fp8rl_jax.tokenizers.byte_tokenizer import ByteTokenizer

VOCAB, LIMIT = 300, 12

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 310),
    st.floats(),
    st.text(max_size=8),
    st.just("\ud800"),
)
NESTED = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(max_size=3), v, max_size=2)
)
TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=LIMIT)
RECORDS = st.fixed_dictionaries(
    {},
    optional={
        "tokens": TOKENS | NESTED,
        "prompt": st.text(max_size=6) | NESTED,
        "messages": NESTED,
        "note": NESTED,
    },
)
TEXTS = st.one_of(
    RECORDS.map(lambda record: json.dumps(record).encode()),
    RECORDS.map(lambda record: json.dumps(record)[:-1].encode()),
    st.binary(max_size=12).map(lambda raw: raw.replace(b"\n", b"")),
    st.sampled_from(
        [b"", b"  ", b"{}", b'{"tokens": [1e2]}', b'{"prompt": "a", "x": 1e999}', b"[" * 3000]
    ),
    st.sampled_from(['{"prompt": "a"}'.encode(code) for code in ("utf-8-sig", "utf-16", "utf-32")]),
    st.sampled_from(
        [
            b'{"prompt": "\xff"}',
            b'{"prompt": "\xed\xa0\x80"}',
            b'{"tokens": [' + b"9" * 5000 + b"]}",
        ]
    ),
)


def expected(text: bytes) -> list[int] | None:
    """The tokens of a line that is right; None for one that is not."""
    try:
        record = json.loads(text.decode("utf-8-sig"), parse_constant=float)
        json.dumps(record, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    # null is absent
    if (tokens := record.get("tokens")) is not None:
        right = isinstance(tokens, list) and all(type(t) is int and 0 <= t < VOCAB for t in tokens)
    else:
        prompt = record.get("prompt")
        right = (
            record.get("messages") is None and isinstance(prompt, str) and "\ud800" not in prompt
        )
        tokens = [257, *prompt.encode()] if right else []
    return tokens if right and 0 < len(tokens) <= LIMIT else None


@settings(max_examples=400, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=6))
def test_every_line_is_answered_or_named(tmp_path_factory, texts):
    directory = tmp_path_factory.getbasetemp()
    path = directory / "in.jsonl"
    path.write_bytes(b"\n".join(texts))
    wanted = {number: expected(text) for number, text in enumerate(texts, start=1) if text.strip()}
    wrong = [number for number, tokens in wanted.items() if tokens is None]
    try:
        lines = read_lines(path, VOCAB, ByteTokenizer(), True, LIMIT)
    except UserError as error:
        said = str(error).splitlines()
        assert said == [f"{path}: holds no lines"] if not wanted else wrong
        for line, number in zip(said, wrong, strict=True) if wanted else ():
            assert line.startswith(f"{path}: line {number}: ")
        return
    assert not wrong and {line.number: line.tokens for line in lines} == wanted
    write_lines(directory / "out.jsonl", (line.record | {"tokens": line.tokens} for line in lines))
    written = [
        json.loads(line) for line in (directory / "out.jsonl").read_text("ascii").splitlines()
    ]
    assert written == [line.record | {"tokens": line.tokens} for line in lines]


@pytest.mark.parametrize("number", ["1e999", "-1e400", "NaN", "Infinity"])
def test_non_finite_numbers_are_refused_when_lines_are_read(tmp_path, number):
    (tmp_path / "in.jsonl").write_text(f'{{"tokens": [1], "note": [{number}]}}')
    with pytest.raises(UserError, match=r"line 1: not valid JSON"):
        read_lines(tmp_path / "in.jsonl", VOCAB, None, True, LIMIT)


def test_a_line_as_deep_as_can_be_read_can_be_written(tmp_path):
    for depth in range(100, 3000, 100):
        (tmp_path / "in.jsonl").write_text(
            '{"tokens": [1], "note": ' + "[" * depth + "]" * depth + "}"
        )
        try:
            lines = read_lines(tmp_path / "in.jsonl", VOCAB, None, True, LIMIT)
        except UserError:
            return
        write_lines(tmp_path / "out.jsonl", [line.record for line in lines])
    raise AssertionError("no depth was refused")
