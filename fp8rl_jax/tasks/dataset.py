"""Problems as text, split into a training set and a held-out set that share no prompt, in an order that can be resumed.

Generators repeat themselves: two terms of one digit make 200 sums, and two data sets with different seeds share most
of them. So the split is by prompt text, after the template. The order of training is a function of (seed, step) alone,
so a resumed run needs no iterator state.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import numpy as np
from jaxtyping import Int

from fp8rl_jax.config.tasks import TaskConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.tasks.functions import load_function
from fp8rl_jax.tasks.rewards import create_reasoning_gym

GENERATED_TRAIN_SIZE = 1024
# reasoning-gym seeds its problem i with seed + i; this distance keeps the problems of neighbouring seeds apart.
SEED_DISTANCE = 1_000_003
CHUNK = 512


@dataclass(frozen=True)
class Example:
    """One problem."""

    index: int
    """Position in its data set."""
    prompt: str
    """Text of the prompt, without chat template."""
    answer: str
    """The right answer; empty where the generator states none."""
    target: str
    """What supervised training writes after the prompt; empty where there is no answer."""
    entry: Mapping[str, Any]
    """The source's own record: question, answer, metadata."""


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
        """SHA-256 of prompts and answers; kept in a checkpoint, so that resuming on other data can be refused."""
        text = json.dumps([(example.prompt, example.answer) for example in self.examples])
        return hashlib.sha256(text.encode()).hexdigest()

    def batch_indices(self, step: int, prompts_per_step: int, seed: int) -> Int[np.ndarray, " P"]:
        """Indices of the training prompts of `step`; see `batch_indices`."""
        return batch_indices(step, prompts_per_step, seed, len(self))

    def batch(self, step: int, prompts_per_step: int, seed: int) -> list[Example]:
        """Training prompts of `step`."""
        return [self.examples[index] for index in self.batch_indices(step, prompts_per_step, seed)]


def load_splits(task: TaskConfig) -> tuple[Dataset, Dataset]:
    """(training set, held-out set): disjoint by prompt, and the same for the same configuration.

    The held-out problems are the first `eval_size` distinct ones, hence a plain sample of the source that depends on
    neither `train_size` nor the training order.

    Raises:
        UserError: a value of the configuration cannot work, the source is empty, or it has too few distinct prompts.
    """
    if faults := task.problems():
        raise UserError("; ".join(faults))
    rows = LOADERS[task.kind](task)
    endless = not isinstance(rows, Sequence)
    wanted = task.train_size or (GENERATED_TRAIN_SIZE if endless else None)

    distinct = _Distinct(task, rows, endless)
    held_out = Dataset(_numbered(islice(distinct, task.eval_size)))
    train_examples = _numbered(islice(distinct, wanted))
    train = Dataset(train_examples, distinct.duplicates)

    found = len(held_out) + len(train)
    if found == 0:
        raise UserError(f"task.name = {task.name!r} is an empty data set; it has to give at least one problem")
    if found < task.eval_size + (task.train_size or 1) or (endless and len(train) < wanted):
        raise UserError(
            f"task.name = {task.name!r} has {found} distinct prompts, fewer than task.eval_size = {task.eval_size} "
            f"and task.train_size = {wanted or 1} together; lower these or widen task.args"
        )
    return train, held_out


def batch_indices(step: int, prompts_per_step: int, seed: int, size: int) -> Int[np.ndarray, " P"]:
    """Which of `size` examples are the prompts of `step`: a pure function, so that a resumed run goes on exactly.

    Steps walk through epochs, each a permutation of its own; a batch may cross into the next epoch, so every example is
    seen once an epoch whether or not `prompts_per_step` divides `size`.

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
    epochs = {epoch: _permutation(seed, int(epoch), size) for epoch in np.unique(positions // size)}
    return np.array([epochs[position // size][position % size] for position in positions], dtype=np.int64)


def chat_messages(prompt: str, system_prompt: str = "") -> list[dict[str, str]]:
    """`prompt` as the messages that a chat template takes."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": prompt}]


def _permutation(seed: int, epoch: int, size: int) -> Int[np.ndarray, " size"]:
    # Sorting raw Philox words: numpy keeps a bit generator's stream the same for ever, but not that of `permutation`.
    words = np.random.Philox(key=[seed, epoch]).random_raw(size)
    return np.argsort(words, kind="stable")


class _Distinct(Iterator[tuple]):
    """(prompt, answer, target, entry) of the `rows` whose prompts have not been seen.

    An endless source is given up when it repeats itself 20 times as often as it has distinct prompts."""

    def __init__(self, task: TaskConfig, rows: Iterable[Mapping[str, Any]], endless: bool):
        self.task, self.rows, self.endless = task, iter(rows), endless
        self.seen: set[str] = set()
        self.duplicates = 0

    def __next__(self) -> tuple[str, str, str, Mapping[str, Any]]:
        repeats = 0
        while not self.endless or repeats <= max(2000, 20 * len(self.seen)):
            entry = next(self.rows)
            prompt = _render(self.task.prompt_template, entry, "task.prompt_template")
            if prompt not in self.seen:
                self.seen.add(prompt)
                answer = "" if entry["answer"] is None else str(entry["answer"])
                target = _render(self.task.answer_template, entry, "task.answer_template") if answer else ""
                return prompt, answer, target, entry
            repeats += 1
            self.duplicates += 1
        raise StopIteration


def _numbered(rows: Iterable[tuple[str, str, str, Mapping[str, Any]]]) -> tuple[Example, ...]:
    return tuple(Example(index, *row) for index, row in enumerate(rows))


def _render(template: str, entry: Mapping[str, Any], key: str) -> str:
    try:
        return template.format(question=entry["question"], answer=entry["answer"], metadata=entry["metadata"])
    except (KeyError, IndexError, AttributeError, TypeError, ValueError) as fault:
        raise UserError(
            f"{key} = {template!r} does not fit the problems ({type(fault).__name__}: {fault}); "
            f"their metadata has {', '.join(map(str, entry['metadata'])) or 'no keys'}"
        ) from fault


def _reasoning_gym_rows(task: TaskConfig) -> Iterator[Mapping[str, Any]]:
    base = task.seed * SEED_DISTANCE % 2**31
    for start in count(0, CHUNK):
        gym = create_reasoning_gym(task, size=CHUNK, seed=base + start)
        for index in range(CHUNK):
            yield gym[index]


def _module_rows(task: TaskConfig) -> Sequence[Mapping[str, Any]]:
    rows = load_function(task.name, "task.name")(**task.args)
    if not isinstance(rows, Sequence) or isinstance(rows, str):
        raise UserError(f"task.name = {task.name!r} returned {type(rows).__name__} instead of a list of dictionaries")
    return [_module_entry(task, rows[index], index) for index in _permutation(task.seed, 0, len(rows))]


def _module_entry(task: TaskConfig, row: Any, index: int) -> Mapping[str, Any]:
    if not isinstance(row, Mapping) or not isinstance(row.get("prompt"), str) or row.get("answer") is None:
        raise UserError(f"task.name = {task.name!r}: row {index} needs a prompt (text) and an answer")
    if not isinstance(row.get("metadata", {}), Mapping):
        raise UserError(f"task.name = {task.name!r}: the metadata of row {index} must be a dictionary")
    try:
        json.dumps(dict(row))
    except TypeError as fault:
        raise UserError(f"task.name = {task.name!r}: row {index} must hold plain values only ({fault})") from fault
    metadata = {key: value for key, value in row.items() if key not in ("prompt", "answer", "metadata")}
    return {
        "question": row["prompt"],
        "answer": str(row["answer"]),
        "metadata": {**row.get("metadata", {}), **metadata},
    }


LOADERS: dict[str, Callable[[TaskConfig], Iterable[Mapping[str, Any]]]] = {
    "reasoning_gym": _reasoning_gym_rows,
    "module": _module_rows,
}
"""Source of problems by task.kind: a sequence where it ends, another iterable where it does not. Rows hold question,
answer and metadata."""
