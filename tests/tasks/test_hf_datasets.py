"""Data sets by name or path: what Hugging Face's library is asked for, and what it reads of local
files."""

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from fp8rl_jax.config.tasks import FieldsConfig, TaskConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.tasks.dataset import load_splits

NAME = "openai/gsm8k"


def rows(start, stop):
    return [{"query": f"Say {i}", "answer": f"So #### {i}"} for i in range(start, stop)]


def task_of(name=NAME, **changes):
    settings: dict[str, Any] = {"answer_extract": "after_hashes", "fields": FieldsConfig("query")}
    return TaskConfig(kind="dataset", name=str(name), **{**settings, **changes})


@pytest.fixture
def asked(monkeypatch):
    """What a library that has GSM8K was asked for."""
    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((*args, kwargs))
        if args[0] != NAME:
            raise FileNotFoundError(f"Dataset {args[0]!r} doesn't exist\non the Hub")
        return {"train": rows(0, 20), "train[:5]": rows(0, 5), "test": rows(18, 24)}[
            kwargs["split"]
        ]

    library = SimpleNamespace(load_dataset=load_dataset, load_from_disk=None)
    monkeypatch.setitem(sys.modules, "datasets", library)
    return calls


def test_a_name_a_subset_and_splits(asked):
    task = task_of(subset="main", eval_split="test")
    train, held_out = load_splits(task)
    assert asked == [(NAME, "main", {"split": "train"}), (NAME, "main", {"split": "test"})]
    # what is held out is not trained on
    assert sorted(int(e.answer) for e in train) == list(range(18))
    assert sorted(int(e.answer) for e in held_out) == list(range(18, 24))
    assert train[0].where == f"{NAME} train row {train[0].answer}"
    train, held_out = load_splits(task_of(split="train[:5]", eval_size=1))
    assert asked[2:] == [(NAME, None, {"split": "train[:5]"})] and (len(train), len(held_out)) == (
        4,
        1,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"name": "openai/gsm9k"},
            r"^the data set 'openai/gsm9k', split 'train': FileNotFoundError: Dataset 'openai/gsm9k' doesn't exist on the Hub$",
        ),
        ({"fields": FieldsConfig("qeury")}, "train has no such column; did you mean query"),
        ({"split": "train[:5]", "train_size": 9, "eval_size": 1}, "'openai/gsm8k' has 5 distinct"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(asked, changes, message):
    with pytest.raises(UserError, match=message) as raised:
        load_splits(task_of(**changes))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", ["jsonl", "reasoning_gym"])
def test_a_name_of_the_hub_under_another_kind_is_told_its_own(kind):
    with pytest.raises(UserError, match='`datasets` loads is task.kind = "dataset"$'):
        load_splits(TaskConfig(kind=kind, name=NAME))
    for path in ("data/*.jsonl", "./gsm8k", "data/a.jsonl", "gsm8k"):
        with pytest.raises(UserError) as raised:
            load_splits(TaskConfig(kind=kind, name=path))
        assert "datasets" not in str(raised.value)


def test_without_the_library_a_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="needs datasets: pip install datasets, or"):
        load_splits(task_of())


@pytest.fixture
def library(monkeypatch, tmp_path):
    datasets = pytest.importorskip("datasets", reason="needs the extra [datasets]")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()
    return datasets


def answers(data):
    return sorted(int(example.answer) for example in data)


def test_the_library_reads_folders_files_and_what_it_saved(library, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    for split, some in {"train": rows(0, 9), "test": rows(9, 12)}.items():
        lines = "".join(json.dumps(row) + "\n" for row in some)
        (folder / f"{split}.jsonl").write_text(lines)
    both = library.DatasetDict(
        train=library.Dataset.from_list(rows(0, 9)), test=library.Dataset.from_list(rows(9, 12))
    )
    both.save_to_disk(tmp_path / "saved")
    both["train"].save_to_disk(tmp_path / "one")
    both["test"].to_csv(tmp_path / "test.csv")
    for name in (folder, tmp_path / "saved"):
        train, held_out = load_splits(task_of(name, eval_split="test"))
        assert (answers(train), answers(held_out)) == ([*range(9)], [9, 10, 11])
    assert answers(load_splits(task_of(tmp_path / "one", eval_size=0))[0]) == [*range(9)]
    assert answers(load_splits(task_of(tmp_path / "test.csv", eval_size=0))[0]) == [9, 10, 11]
    # held-out problems of another data set
    another = task_of(tmp_path / "one", eval_path=str(folder), eval_split="test")
    assert answers(load_splits(another)[1]) == [9, 10, 11]
    another = task_of(folder, eval_path=str(tmp_path / "test.csv"))
    assert answers(load_splits(another)[1]) == [9, 10, 11]
    for name, said in (
        (folder, 'Unknown split "tset". Should be one of .*train'),
        (tmp_path / "saved", "saved' was saved with train, test, and has no split 'tset'"),
        (tmp_path / "one", "one' was saved with train, and has no split 'tset'"),
    ):
        with pytest.raises(UserError, match=said):
            load_splits(task_of(name, eval_split="tset"))


def test_a_data_set_of_the_library_is_a_list_of_problems(library):
    given = [library.Dataset.from_list(some) for some in (rows(0, 9), rows(9, 12))]
    task = TaskConfig(answer_extract="after_hashes", fields=FieldsConfig("query"))
    train, held_out = load_splits(task, given[0], eval_rows=given[1])
    assert (answers(train), answers(held_out)) == ([*range(9)], [9, 10, 11])
    stream = given[1].to_iterable_dataset()
    _, held_out = load_splits(task, given[0], eval_rows=stream)
    assert answers(held_out) == [9, 10, 11]
