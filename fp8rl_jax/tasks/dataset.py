"""Problems as text, split into a training set and a held-out set that share no prompt, in an order
that can be resumed.

Generators repeat themselves: two terms of one digit make 200 sums, and two data sets with different
seeds share most of them. So the split is by prompt text, after the template. The order of training
is a function of (seed, step) alone, so a resumed run needs no iterator state.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from jaxtyping import Int

from fp8rl_jax.config.tasks import TaskConfig
from fp8rl_jax.errors import UserError, listing
from fp8rl_jax.tasks.conversation import Conversation
from fp8rl_jax.tasks.extraction import extract_answer
from fp8rl_jax.tasks.python_objects import check_dataset, name_objects, not_given
from fp8rl_jax.tasks.rewards import columns_of_problem
from fp8rl_jax.tasks.sources import (
    LOADERS,
    Fault,
    Row,
    held_out_rows,
    permutation,
    refuse,
)

_log = logging.getLogger("fp8rl")
_GENERATED_TRAIN_SIZE = 1024
_HELD_OUT_SIZE = 256


@dataclass(frozen=True)
class Example:
    """One problem."""

    index: int
    """Position in its data set."""
    prompt: str
    """Text of the prompt, without chat template; or a `Conversation`, whose messages
    `chat_messages` gives."""
    answer: str
    """The right answer, as task.answer_extract reads it; empty where the generator states none."""
    target: str
    """What supervised training writes after the prompt; empty where there is no answer."""
    entry: Mapping[str, Any]
    """The source's own record: question, answer, metadata; and source, the row that it was read
    from, where there are rows."""

    @property
    def where(self) -> str:
        """Where it stands, for messages: "FILE:LINE" or its number."""
        return str(self.entry.get("source", f"problem {self.index}"))


@dataclass(frozen=True)
class Dataset:
    """Examples in a fixed order; `batch` shuffles."""

    examples: tuple[Example, ...]
    """Distinct by prompt."""
    duplicates: int = 0
    """Problems of the source that were dropped because an earlier one has the same prompt."""

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self.examples[index]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of prompts and answers.

        It is kept in a checkpoint, so that resuming on other data can be refused.
        """
        text = json.dumps([(example.prompt, example.answer) for example in self.examples])
        return hashlib.sha256(text.encode()).hexdigest()

    def batch(self, step: int, prompts_per_step: int, seed: int) -> list[Example]:
        """Return the training prompts of `step`."""
        indices = batch_indices(step, prompts_per_step, seed, len(self))
        return [self.examples[index] for index in indices]


def columns_of(examples: Iterable[Example]) -> tuple[str, ...]:
    """Name the columns that any of the problems has, for the parameters of rewards."""
    return tuple(
        dict.fromkeys(name for example in examples for name in columns_of_problem(example.entry))
    )


def load_splits(
    task: TaskConfig,
    rows: Any = None,
    environment: type | None = None,
    eval_rows: Any = None,
) -> tuple[Dataset, Dataset]:
    """Load (training set, held-out set), disjoint by prompt.

    They are the same for the same configuration. A row whose prompt an earlier one has is dropped:
    a warning counts and names those of a list or a file.

    The held-out problems are the first `eval_size` distinct ones, hence a plain sample of the
    source that depends on neither `train_size` nor the training order. Where it is unset there are
    256, and no more than a tenth of a source that ends. With `eval_path`, `eval_split` or
    `eval_rows` they come from there, at most `eval_size`, and no problem of it is trained on.

    Args:
        task: problems and templates.
        rows: the problems themselves, in place of those that `task` names: dictionaries as the
            lines of a file of JSON lines are (prompt, question, problem or messages; answer;
            whatever else becomes metadata), or prompts as text. An answer may be left out where no
            reward compares with it. What has a length and an index, such as a list or a data set
            of Hugging Face's, is shuffled like a file; an iterator is read in its own order as far
            as `train_size`, which it needs, and no further.
        environment: the class, in place of the one that `task` names.
        eval_rows: held-out problems, as `rows` are; of an iterator as many as are used.

    Raises:
        UserError: a value of the configuration cannot work, the source is empty or damaged, it has
            too few distinct prompts, or task.answer_extract finds nothing in an answer.
    """
    task, _ = name_objects(task, dataset=rows, environment=environment, eval_dataset=eval_rows)
    if faults := task.problems():
        raise UserError("; ".join(faults))
    check_dataset(task, rows, eval_rows)
    if environment is None and "task.name" in task.python_objects:
        raise UserError(not_given("task.name", task.name))
    rows = LOADERS[task.kind](task, environment if rows is None else rows)
    endless = not isinstance(rows, Sequence)
    wanted = task.train_size or (_GENERATED_TRAIN_SIZE if endless else None)
    faults: list[Fault] = []
    distinct = _Distinct(task, rows, endless, faults)
    if task.names_held_out:
        size = _HELD_OUT_SIZE if task.eval_size is None else task.eval_size
        apart, key = held_out_rows(task, eval_rows, size)
        others = _Distinct(task, apart, False, faults, distinct.prompts)
        apart = tuple(others)
        _name_repeated(others, key)
        held_out, left = apart[:size], distinct
    elif task.eval_size is None:
        enough = _HELD_OUT_SIZE + wanted if endless and wanted else None
        problems = tuple(islice(distinct, enough))
        size = (
            _HELD_OUT_SIZE
            if len(problems) == enough
            else min(_HELD_OUT_SIZE, max(len(problems) // 10, 1))
        )
        held_out, left = problems[:size], problems[size:]
    else:
        size, left = task.eval_size, distinct
        held_out = tuple(islice(distinct, size))
    train = Dataset(_numbered(islice(left, wanted)), distinct.duplicates)
    held_out = Dataset(_numbered(held_out))
    refuse(faults, "answers")
    _check_sizes(task, train, held_out, wanted or 1, size)
    if not endless:
        _name_repeated(distinct, "task.name")
    return train, held_out


def _name_repeated(rows: _Distinct, key: str) -> None:
    if rows.repeated:
        _log.warning(
            "%s: %d rows have the prompt of an earlier one and are dropped%s: %s",
            key,
            len(rows.repeated),
            f", {rows.contradicting} of them with another answer" if rows.contradicting else "",
            listing(rows.repeated),
        )


def _check_sizes(
    task: TaskConfig, train: Dataset, held_out: Dataset, least: int, size: int
) -> None:
    name = f"the dataset, a {task.name}," if task.kind == "python" else f"task.name = {task.name!r}"
    if task.names_held_out:
        place = "task.eval_path" if task.eval_path else "task.eval_split"
        if not len(held_out):
            raise UserError(
                f"{place} = {task.eval_path or task.eval_split!r} is an empty data set; it has to "
                "give at least one problem"
            )
        if len(train) < least:
            raise UserError(
                f"{name} has {len(train)} distinct prompts that {place} does not have, "
                "fewer than task.train_size = "
                f"{least}; lower it or give more problems"
            )
        return
    count = len(held_out) + len(train)
    if count == 0:
        raise UserError(f"{name} is an empty data set; it has to give at least one problem")
    if len(held_out) < size or len(train) < least:
        unset = " (unset, so a tenth)" if task.eval_size is None else ""
        raise UserError(
            f"{name} has {count} distinct prompts, fewer than task.eval_size = {size}{unset} and "
            f"task.train_size = {least} "
            "together; lower these or give more problems"
        )


def batch_indices(step: int, prompts_per_step: int, seed: int, size: int) -> Int[np.ndarray, " P"]:
    """Choose the prompts of `step` among `size` examples, as a pure function of (seed, step).

    So a resumed run goes on exactly.

    Steps walk through epochs, each a permutation of its own; a batch may cross into the next epoch,
    so every example is seen once an epoch whether or not `prompts_per_step` divides `size`.

    Args:
        step: number of the step, from 0.
        prompts_per_step: P.
        seed: seed of the permutations.
        size: number of examples.

    Returns:
        int64 indices [P].
    """
    if size < 1:
        raise ValueError("an empty data set has no batches")
    positions = np.arange(step * prompts_per_step, (step + 1) * prompts_per_step)
    epochs = {epoch: permutation(seed, int(epoch), size) for epoch in np.unique(positions // size)}
    return np.array(
        [epochs[position // size][position % size] for position in positions], dtype=np.int64
    )


class _Distinct(Iterator[tuple]):
    """(prompt, answer, target, entry) of the `rows` whose prompts are new.

    An endless source is given up when it repeats itself 20 times as often as it has distinct
    prompts. `faults` receives a line for each answer in which task.answer_extract finds nothing;
    `repeated` names the rows that are left out where they have names."""

    def __init__(
        self,
        task: TaskConfig,
        rows: Iterable[Row],
        endless: bool,
        faults: list[Fault],
        prompts: dict[str, str] | None = None,
    ):
        self.task, self.rows, self.endless, self.faults = task, iter(rows), endless, faults
        self.prompts: dict[str, str] = {} if prompts is None else prompts  # key -> answer
        self.duplicates = self.contradicting = 0
        self.repeated: list[str] = []

    def __next__(self) -> tuple[str, str, str, Mapping[str, Any]]:
        repeats = 0
        while not self.endless or repeats <= max(2000, 20 * len(self.prompts)):
            entry = next(self.rows)
            prompt = render_prompt(self.task.prompt_template, entry)
            answer = "" if entry["answer"] is None else str(entry["answer"])
            key = self._key(prompt, entry)
            if key not in self.prompts:
                self.prompts[key] = answer
                target = (
                    _render(self.task.answer_template, entry, "task.answer_template")
                    if answer
                    else ""
                )
                return prompt, self._result(answer, entry), target, entry
            repeats += 1
            self.duplicates += 1
            self.contradicting += answer != self.prompts[key]
            self.repeated += [entry["source"]] if "source" in entry else []
        raise StopIteration

    def _key(self, prompt: str, entry: Row) -> str:
        """What tells a problem from others: the prompt; of an environment of `verifiers` its row,
        since a game's rows may all have the same prompt."""
        if self.task.kind != "verifiers":
            return prompt
        row = {key: value for key, value in entry["metadata"].items() if key != "example_id"}
        return prompt + json.dumps(row, sort_keys=True)

    def _result(self, answer: str, entry: Row) -> str:
        how = self.task.answer_extract
        if how == "whole":
            return answer
        result = extract_answer(answer, how)
        if answer and not result:
            why = f"task.answer_extract = {how!r} finds nothing in the answer {answer[-80:]!r}"
            self.faults.append((entry.get("source", "a problem"), why))
        return result


def _numbered(rows: Iterable[tuple[str, str, str, Mapping[str, Any]]]) -> tuple[Example, ...]:
    return tuple(Example(index, *row) for index, row in enumerate(rows))


def render_prompt(template: str, entry: Row) -> str:
    """Write the prompt of a problem by task.prompt_template; of a conversation its last message."""
    question = entry["question"]
    if not isinstance(question, Conversation):
        return _render(template, entry, "task.prompt_template")
    *before, last = question.messages
    text = _render(template, {**entry, "question": last["content"]}, "task.prompt_template")
    return Conversation([*before, {**last, "content": text}])


def _render(template: str, entry: Row, key: str) -> str:
    try:
        return template.format(
            question=entry["question"], answer=entry["answer"], metadata=entry["metadata"]
        )
    except (
        KeyError,
        IndexError,
        AttributeError,
        TypeError,
        ValueError,
        OverflowError,
        MemoryError,
    ) as fault:
        which = f"the problem of {entry['source']}" if "source" in entry else "the problems"
        raise UserError(
            f"{key} = {template!r} does not fit {which} ({type(fault).__name__}: {fault}); "
            f"their metadata has {', '.join(map(str, entry['metadata'])) or 'no keys'}"
        ) from fault
