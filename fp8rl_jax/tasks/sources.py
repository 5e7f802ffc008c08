"""Where problems come from, by task.kind: a generator, a function, files, a data set, environments,
Python objects.

A file has one object a row, with a prompt, an answer, and whatever else as metadata: JSON lines or
one JSON list, packed by gzip or not, or Parquet.

    {"prompt": "What is 2 + 2?", "answer": "4", "level": 1}
    {"messages": [{"role": "user", "content": "What is 2 + 2?"}], "answer": 4}

Columns may have the names of TRL and verl. The prompt is prompt, question or messages, of which one
is there, or else problem (MATH): text, or a list of messages. The answer is `answer`,
`reward_model.ground_truth` (verl) or `ground_truth`, or else `solution` (TRL), or else `completion`
or the last of `messages` where it is the assistant's (both TRL's, for supervised training; beside
an answer it is left out). Rewards that compare with nothing need none. A null is no value, since
Arrow fills with nulls what a row has not. Columns under any other name are named in task.fields,
and then these alone are looked at. The others become metadata.

A row is read rightly or named as damaged; nothing is skipped but blank lines, and nothing is
guessed.
"""

from __future__ import annotations

import glob
import gzip
import json
import math
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from fp8rl_jax.config.tasks import FieldsConfig, TaskConfig
from fp8rl_jax.errors import UserError, listing
from fp8rl_jax.functions import load_function
from fp8rl_jax.tasks.columns import NamedColumns, value_at
from fp8rl_jax.tasks.conversation import Conversation, MessageFault, read_messages
from fp8rl_jax.tasks.environment import first_prompts
from fp8rl_jax.tasks.hf_datasets import load_rows, named_elsewhere
from fp8rl_jax.tasks.python_objects import length
from fp8rl_jax.tasks.rewards import create_reasoning_gym
from fp8rl_jax.tasks.verifiers_environment import read_rows

# Generators seed their problem i with seed + i; this distance keeps the problems of neighbouring
# seeds apart.
_SEED_DISTANCE = 1_000_003
CHUNK = 512
_USUAL = FieldsConfig()
COMPARING_REWARDS = ("exact", "math_verify")
"""Rewards without a use where a problem has no answer."""

Row = Mapping[str, Any]
"""question (text, or a `Conversation`), answer (None where there is none), metadata."""
_Load = Callable[[], Any]
_SHOWN_FAULTS = 20
Fault = tuple[str, str]
"""(where it stands, what is wrong)."""
_PROMPT_KEYS = ("prompt", "question", "messages")
_PROMPT_KEY_ALONE = "problem"
_ANSWER_KEYS = ("answer", "reward_model.ground_truth", "ground_truth", "solution")
_UNREAD = ("tools", "images", "videos", "chat_template_kwargs")
"""Columns of conversations that TRL hands to the chat template, which nothing here does."""


def shuffled[Item](rows: Sequence[Item], seed: int) -> list[Item]:
    """Shuffle `rows` into an order that the seed determines."""
    return [rows[index] for index in permutation(seed, 0, len(rows))]


def permutation(seed: int, epoch: int, size: int) -> Int[np.ndarray, " size"]:
    """Return the order of epoch `epoch` under `seed`."""
    # Sorting raw Philox words: numpy keeps a bit generator's stream the same for ever, but not that
    # of `permutation`.
    words = np.random.Philox(key=[seed, epoch]).random_raw(size)
    return np.argsort(words, kind="stable")


def _reasoning_gym_rows(task: TaskConfig, given: Any) -> Iterator[Row]:
    for start in count(_first_seed(task), CHUNK):
        gym = create_reasoning_gym(task, size=CHUNK, seed=start)
        for index in range(CHUNK):
            yield gym[index]


def _module_rows(task: TaskConfig, given: Any) -> Sequence[Row]:
    rows = load_function(task.name, "task.name")(**task.args)
    if not isinstance(rows, Sequence) or isinstance(rows, str):
        raise UserError(
            f"task.name = {task.name!r} returned {type(rows).__name__} instead of a list of "
            "dictionaries"
        )
    named = NamedColumns(task.fields, f"task.name = {task.name!r}")
    for row in rows:
        named.see(row)
    named.check()
    needs_answer = bool(comparing_reward(task))
    return [
        _foreign_row(
            rows[index], f"task.name = {task.name!r}: row {index}", needs_answer, task.fields
        )
        | {"source": f"{task.name} row {index}"}
        for index in permutation(task.seed, 0, len(rows))
    ]


def comparing_reward(task: TaskConfig) -> str:
    """Return the reward that has no use where a problem has no answer; "" where there is none."""
    return next((name for name in COMPARING_REWARDS if name in task.components), "")


def _foreign_row(row: Any, which: str, needs_answer: bool, fields: FieldsConfig) -> dict[str, Any]:
    """The problem of a Python object.

    Raises:
        UserError: it is none; `which` stands before the reason.
    """
    try:
        if not isinstance(row, Mapping):
            raise Damaged(
                "a dictionary with a prompt, or a prompt as text, was expected, not "
                f"{type(row).__name__}"
            )
        return _parse_record(_plain(row), needs_answer, fields)
    except Damaged as fault:
        raise UserError(f"{which}: {fault}") from fault


def _jsonl_rows(task: TaskConfig, given: Any) -> Sequence[Row]:
    problems = read_problems(task.name, "task.name", bool(comparing_reward(task)), task.fields)
    return shuffled(problems, task.seed)


def _dataset_rows(task: TaskConfig, given: Any) -> Sequence[Row]:
    return shuffled(_of_split(task, task.name, task.subset, task.split), task.seed)


def _of_split(task: TaskConfig, name: str, subset: str, split: str) -> list[Row]:
    where = f"{name} {split}"
    loads = (
        (f"{where} row {index}", partial(_plain, row))
        for index, row in enumerate(load_rows(name, subset, split))
    )
    return _read(loads, where, bool(comparing_reward(task)), task.fields)


def held_out_rows(task: TaskConfig, given: Any, size: int) -> tuple[list[Row], str]:
    """Read held-out problems that have a place of their own.

    Args:
        task: `names_held_out`.
        given: those that were given in Python, or None.
        size: so many are read of what does not say how long it is.

    Returns:
        The problems, shuffled, and the key that names them.

    Raises:
        UserError: as where problems are trained on.
    """
    key = "task.eval_path" if task.eval_path else "task.eval_split"
    if given is not None:
        rows = given if length(given) is not None else list(islice(given, size))
        problems = _python_problems(task, rows, "eval_dataset")
    elif task.kind == "dataset":
        place = (task.eval_path, "") if task.eval_path else (task.name, task.subset)
        problems = _of_split(task, *place, task.eval_split or "train")
    elif task.kind == "verifiers":
        problems = _of_verifiers(task, task.eval_split)
    else:
        needed = bool(comparing_reward(task))
        problems = read_problems(task.eval_path, key, needed, task.fields)
    return shuffled(problems, task.seed), key


def _environment_rows(task: TaskConfig, given: Any) -> Iterator[Row]:
    for seed, prompt in first_prompts(
        task, count(_first_seed(task)), {task.name: given} if given is not None else {}
    ):
        yield {"question": prompt, "answer": None, "metadata": {"seed": seed}}


def _verifiers_rows(task: TaskConfig, given: Any) -> Sequence[Row]:
    return shuffled(_of_verifiers(task, task.split), task.seed)


def _of_verifiers(task: TaskConfig, split: str) -> list[Row]:
    problems, faults = [], []
    for where, row, prompt in read_rows(task, split):
        try:
            plain = _plain(row)
        except Damaged as fault:
            faults.append((where, str(fault)))
            continue
        answer = plain.get("answer")
        answer = str(answer) if isinstance(answer, str | int | float) else None
        problems.append({"question": prompt, "answer": answer, "metadata": plain, "source": where})
    refuse(faults, "rows")
    return problems


def _python_rows(task: TaskConfig, given: Any) -> Iterable[Row]:
    size = length(given)
    if size is None and not task.train_size:
        raise UserError(
            f"task.train_size: the dataset, a {task.name}, does not say how long it is; say how "
            "many to train on"
        )
    if size is None:
        return (_python_row(task, row, f"dataset row {i}") for i, row in enumerate(given))
    return shuffled(_python_problems(task, given, "dataset"), task.seed)


def _python_problems(task: TaskConfig, given: Any, argument: str) -> list[Row]:
    problems, faults = [], []
    named = NamedColumns(task.fields, argument)
    for index in range(length(given) or 0):
        row, where = given[index], f"{argument} row {index}"
        named.see(row)
        try:
            problems.append(_python_row(task, row, where))
        except UserError as fault:
            faults.append((where, str(fault).removeprefix(f"{where}: ")))
    named.check()
    refuse(faults, "rows")
    return problems


def _python_row(task: TaskConfig, row: Any, source: str) -> Row:
    compared = comparing_reward(task)
    record = {task.fields.prompt or "prompt": row} if isinstance(row, str) else row
    problem = _foreign_row(record, source, needs_answer=False, fields=task.fields)
    if compared and problem["answer"] is None:
        raise UserError(
            f"{source}: it has no answer, which the reward {compared} compares with; give one, "
            "or another reward"
        )
    return problem | {"source": source}


def _plain(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record of what JSON can hold: it is sent to the workers, and written into samples.jsonl.

    Arrays and numbers of numpy, which pandas reads lists and columns of Parquet as, become lists
    and numbers.
    """
    converted = False

    def of_numpy(value: Any) -> Any:
        nonlocal converted
        if not isinstance(value, np.ndarray | np.generic):
            raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
        converted = True
        return value.tolist()

    try:
        text = json.dumps(dict(record), ensure_ascii=False, allow_nan=False, default=of_numpy)
        text.encode()
    except (TypeError, ValueError, RecursionError) as fault:
        raise Damaged(f"it must hold plain values only ({fault})") from fault
    return json.loads(text) if converted else dict(record)


def _first_seed(task: TaskConfig) -> int:
    return task.seed * _SEED_DISTANCE % 2**31


class Damaged(Exception):
    """What is wrong with a row."""


def read_problems(
    path: str, key: str, needs_answer: bool = True, fields: FieldsConfig = _USUAL
) -> list[Row]:
    """Read every problem of the files that `path` names, in their order.

    Args:
        path: a file, or a pattern such as data/*.jsonl, whose files are read in the order of their
            names. What a file is says its content.
        key: configuration key that the path stands under, for the message.
        needs_answer: whether a row without an answer is damaged.
        fields: columns under other names.

    Returns:
        Dictionaries with question (text, or a `Conversation`), answer (None where there is none),
        metadata, and source:
        "FILE:LINE" of JSON lines, and "FILE: row NUMBER", counted from 1, of others.

    Raises:
        UserError: there is no such file, it cannot be read, no row has a column of `fields`, or
            rows are damaged, as `refuse` says.
    """
    return _read(_rows_of_files(path, key), f"{key} = {path!r}", needs_answer, fields)


def _rows_of_files(path: str, key: str) -> Iterator[tuple[str, _Load]]:
    for file in named_files(path, key):
        with readable(file, key):
            yield from records(file, key)


def _read(
    loads: Iterable[tuple[str, _Load]], of: str, needs_answer: bool, fields: FieldsConfig
) -> list[Row]:
    """The problems of rows that are read one by one; `of`: what they are, for the message.

    Raises:
        UserError: no row has a column of `fields`, or rows are damaged, as `refuse` says.
    """
    named, faults = NamedColumns(fields, of), []
    problems: list[Row] = []
    for source, load in loads:
        try:
            record = load()
            named.see(record)
            problem = parse_problem(record, needs_answer, fields)
            problems.append({**problem, "source": source})
        except Damaged as fault:
            faults.append((source, str(fault)))
    named.check()
    refuse(faults, "rows")
    return problems


@contextmanager
def readable(file: Path, key: str) -> Generator[None]:
    """Turn what the operating system and gzip raise into a line about a file.

    Raises:
        UserError: in its place.
    """
    try:
        yield
    except (OSError, EOFError, zlib.error) as fault:
        reason = getattr(fault, "strerror", None) or fault
        raise UserError(f"{key}: {file} cannot be read ({reason})") from fault


def records(file: Path, key: str) -> Iterator[tuple[str, _Load]]:
    """Yield (source, what reads the row or raises `Damaged`) of JSON lines, a JSON list or Parquet.

    Blank lines are passed over.

    Raises:
        UserError: it is nothing of the kind as a whole.
    """
    with file.open("rb") as opened:
        magic = opened.read(4)
    if magic == b"PAR1":
        for number, record in enumerate(_parquet_records(file, key), start=1):
            yield f"{file}: row {number}", partial(_plain, record)
        return
    with opened_bytes(file) as lines:
        for number, line in enumerate(lines, start=1):
            if line.removeprefix(_BYTE_ORDER_MARK).strip() == b"{" and number == 1:
                raise UserError(
                    f"{file}: one object over several lines; write an object a line, or one list "
                    "of objects"
                )
            if line.removeprefix(_BYTE_ORDER_MARK).lstrip()[:1] == b"[" and number == 1:
                yield from _list_rows(file, b"".join(chain([line], lines)))
            elif line.removeprefix(_BYTE_ORDER_MARK if number == 1 else b"").strip(_BLANK):
                yield f"{file}:{number}", partial(read_line, line, number == 1)


def opened_bytes(file: Path) -> Any:
    """Open a file for reading, unpacked where it is packed by gzip."""
    with file.open("rb") as opened:
        magic = opened.read(2)
    return gzip.open(file) if magic == b"\x1f\x8b" else file.open("rb")


def _list_rows(file: Path, text: bytes) -> Iterator[tuple[str, _Load]]:
    try:
        rows = _parse_json(decoded(text, first=True))
    except Damaged as fault:
        raise UserError(f"{file}: {fault}") from fault
    for number, record in enumerate(rows, start=1):
        yield f"{file}: row {number}", partial(lambda record: record, record)


def _parquet_records(file: Path, key: str) -> Iterator[dict[str, Any]]:
    try:
        pyarrow, parquet = (import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
    except ImportError as fault:
        raise UserError(
            f"{key}: {file} is a Parquet file, which pyarrow reads; pip install pyarrow, or write "
            "it as JSON lines"
        ) from fault
    try:
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches():
                yield from batch.to_pylist()
    except pyarrow.ArrowException as fault:
        raise UserError(f"{key}: {file} cannot be read ({fault})") from fault


def refuse(faults: Sequence[Fault], what: str) -> None:
    """Raise a UserError with a line for each reason, the first 20 of them, and the number of what
    else is damaged.

    No faults: nothing is raised.
    """
    if not faults:
        return
    places: dict[str, list[str]] = {}
    for where, why in faults:
        places.setdefault(why, []).append(where)
    lines = []
    for why, (first, *others) in places.items():
        alike = f"; {len(others)} more {what} alike: {listing(others)}" if others else ""
        lines.append(f"{first}: {why}{alike}")
    left = sum(map(len, list(places.values())[_SHOWN_FAULTS:]))
    raise UserError(
        "\n".join(lines[:_SHOWN_FAULTS] + [f"and {left} more damaged {what}"] * bool(left))
    )


def read_line(line: bytes, first: bool = False) -> Any:
    """Read the value of one line of JSON.

    Args:
        line: UTF-8, with or without its line break.
        first: whether a byte order mark may stand before it.

    Raises:
        Damaged: it is no JSON.
    """
    return _parse_json(decoded(line, first).strip(" \t\r\n"))


def decoded(text: bytes, first: bool) -> str:
    """Decode UTF-8.

    Args:
        text: the bytes.
        first: whether a byte order mark may stand before it.

    Raises:
        Damaged: it is none, and where.
    """
    try:
        return text.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as fault:
        raise Damaged(
            f"not UTF-8 (byte {text[fault.start]:#04x} at position {fault.start + 1})"
        ) from fault


def parse_problem(
    record: Any, needs_answer: bool = True, fields: FieldsConfig = _USUAL
) -> dict[str, Any]:
    """Parse the problem of a row.

    Args:
        record: what JSON or Parquet had.
        needs_answer: whether it has to have an answer.
        fields: columns under other names.

    Raises:
        Damaged: anything that is no problem.
    """
    if not isinstance(record, dict):
        raise Damaged(f"an object with prompt and answer was expected, not {kind_of(record)}")
    return _parse_record(record, needs_answer, fields)


def _parse_record(
    record: Mapping[str, Any], needs_answer: bool, fields: FieldsConfig
) -> dict[str, Any]:
    """Parse a problem from a record of plain values.

    Without `needs_answer` it may have no answer.

    Raises:
        Damaged: anything that is no problem.
    """
    metadata = {} if (given := record.get("metadata")) is None else given
    if not isinstance(metadata, dict):
        raise Damaged(f"metadata must be an object, not {kind_of(metadata)}")
    stated = _stated_answer(record, needs_answer, fields.answer)
    asked, question, said = _question(
        record, answered=stated is not None or bool(fields.answer), named=fields.prompt
    )
    stated = stated or said
    if stated is None and needs_answer:
        raise Damaged(
            f"it has no {fields.answer or 'answer'} (keys: {_keys(record)}); task.fields.answer "
            "names the column"
        )
    read = {asked, "metadata"}
    read |= set() if fields.prompt else set(_PROMPT_KEYS)
    read |= set() if fields.answer else {"answer"}
    others = {key: value for key, value in record.items() if key not in read}
    if both := sorted(metadata.keys() & others.keys()):
        raise Damaged(f"{both[0]!r} stands both in metadata and beside it")
    answer = None if stated is None else _answer(*stated)
    return {"question": question, "answer": answer, "metadata": metadata | others}


def named_files(path: str, key: str) -> list[Path]:
    """List the files of a path or a pattern, in the order of their names.

    Raises:
        UserError: there is none.
    """
    if Path(path).expanduser().exists():
        return [Path(path).expanduser()]
    if found := sorted(glob.glob(str(Path(path).expanduser()), recursive=True)):
        return [Path(name) for name in found]
    raise UserError(
        f"{key} = {path!r}: there is no such file; give the path of a file or a pattern of several"
        f"{named_elsewhere(path)}"
    )


def _parse_json(text: str) -> Any:
    try:
        record = json.loads(
            text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float
        )
        # A lone half of a surrogate pair is valid in JSON, and no text: no tokenizer takes it.
        if "\\u" in text:
            json.dumps(record, ensure_ascii=False).encode()
    except json.JSONDecodeError as fault:
        line = f"line {fault.lineno}, " if fault.lineno > 1 else ""
        raise Damaged(f"not JSON ({fault.msg} at {line}column {fault.colno})") from fault
    except UnicodeEncodeError as fault:
        raise Damaged("holds half of a surrogate pair, which is no character") from fault
    except RecursionError as fault:
        raise Damaged("nested too deep") from fault
    except ValueError as fault:  # an integer of more digits than Python converts
        raise Damaged(f"holds a number that is too long ({fault})") from fault
    return record


_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BLANK = b" \t\r\n"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        raise Damaged(
            f"key {next(key for key in keys if keys.count(key) > 1)!r} stands twice in one object"
        )
    return record


def _constant(name: str) -> Any:
    raise Damaged(f"{name} is no JSON; write a number, text or null")


def _float(text: str) -> float:
    if math.isinf(value := float(text)):
        raise Damaged(f"the number {text[:40]} is beyond the range of a float; write it as text")
    return value


def _question(
    record: Mapping[str, Any], answered: bool, named: str
) -> tuple[str, str, tuple[str, str] | None]:
    """(key, the prompt); and, of messages that end with the assistant's where the row is not
    answered, (where it stands, what it says). `named`: the column, where task.fields names it."""
    key, value = _asked(record, named)
    # A list under "prompt" is what some data sets call their messages.
    if key == "messages" or isinstance(value, list):
        if unread := [column for column in _UNREAD if record.get(column)]:
            raise Damaged(
                f"{unread[0]} would not get into the prompt; write it into the messages, and "
                "rename the column"
            )
        try:
            if isinstance(value, list) and value and isinstance(value[0], str):
                raise MessageFault("is a list of texts; write an object for each row, not columns")
            if key in ("messages", named) and isinstance(value, list) and len(value) > 1:
                *before, last = read_messages(value, last=("user", "tool", "assistant"))
                if last["role"] == "assistant":
                    if answered:  # the way to the answer
                        return key, Conversation(read_messages(before)), None
                    where = f"the last of {key}"
                    if last.keys() != {"role", "content"}:
                        raise MessageFault(
                            f"{where} calls tools or reasons; give the answer as text"
                        )
                    return key, Conversation(read_messages(before)), (where, last["content"])
            return key, Conversation(read_messages(value)), None
        except MessageFault as fault:
            raise Damaged(f"{key}: {fault}") from fault
    if not isinstance(value, str):
        raise Damaged(f"{key} must be text or a list of messages, not {kind_of(value)}")
    if not value.strip():
        raise Damaged(f"{key} is empty")
    return key, value, None


def _asked(record: Mapping[str, Any], named: str) -> tuple[str, Any]:
    """(column, what stands there)."""
    if named:
        if (value := value_at(record, named)) is None:
            raise Damaged(
                f"it has no {named} (keys: {_keys(record)}), which task.fields.prompt names"
            )
        return named, value
    given = [key for key in _PROMPT_KEYS if record.get(key) is not None]
    if not given and record.get(_PROMPT_KEY_ALONE) is not None:
        given = [_PROMPT_KEY_ALONE]
    if len(given) != 1:
        has = " and ".join(given) or f"none; keys: {_keys(record)}"
        raise Damaged(
            f"give one of prompt, question, problem and messages (it has {has}); "
            "task.fields.prompt names another column"
        )
    return given[0], record[given[0]]


def _stated_answer(record: Mapping[str, Any], needed: bool, named: str) -> tuple[str, Any] | None:
    """(where it stands, the answer), which several columns may state alike.

    Where none is needed, columns of other things than text and numbers are the reward's business.
    `named`: the column, where task.fields names it.
    """
    if named:
        value = value_at(record, named)
        return None if value is None else (named, value)
    model = record.get("reward_model")
    truth = model.get("ground_truth") if isinstance(model, dict) else None
    columns = {**record, "reward_model.ground_truth": truth}
    given = {
        key: columns[key]
        for key in _ANSWER_KEYS
        if columns.get(key) is not None
        and (needed or key == "answer" or isinstance(columns[key], str | int | float))
    }
    if len(given) > 1:
        given.pop("solution", None)  # the way to the answer
    if given:
        (first, value), *others = given.items()
        if differing := [key for key, other in others if str(other) != str(value)]:
            raise Damaged(
                f"{first} and {differing[0]} differ; name the one that is the answer in "
                "task.fields.answer"
            )
        return first, value
    completion = record.get("completion")
    if isinstance(completion, list):
        try:
            messages = read_messages(completion, last=("assistant",))
        except MessageFault as fault:
            raise Damaged(f"completion: {fault}") from fault
        if len(messages) > 1 or messages[0].keys() != {"role", "content"}:
            raise Damaged("completion must be one message of text")
        completion = messages[0]["content"]
    return None if completion is None else ("completion", completion)


def _keys(record: Mapping[str, Any]) -> str:
    """Its keys on one line."""
    return " ".join(", ".join(record).split())[:80]


def _answer(where: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise Damaged(f"{where} must be text or a number, not {kind_of(value)}")
    if not (answer := str(value)).strip():
        raise Damaged(f"{where} is empty")
    return answer


def kind_of(value: Any) -> str:
    """Name what a value is in JSON's words."""
    names = {
        dict: "an object",
        list: "a list",
        str: "text",
        bool: "true or false",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), "null")


LOADERS: dict[str, Callable[[TaskConfig, Any], Iterable[Row]]] = {
    "reasoning_gym": _reasoning_gym_rows,
    "module": _module_rows,
    "jsonl": _jsonl_rows,
    "dataset": _dataset_rows,
    "environment": _environment_rows,
    "verifiers": _verifiers_rows,
    "python": _python_rows,
}
"""Source of problems by task.kind, of the task and of what was given in Python: a data set, or an
environment's class. A sequence where it ends, another iterable where it does not."""
