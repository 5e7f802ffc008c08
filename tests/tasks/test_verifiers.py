"""Rewards are tested before they are learned from: what passes, what is named, and with which row."""

from __future__ import annotations

import json
import re

import pytest

from fp8rl_jax.config.tasks import RewardConfig, TaskConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.functions import describe_fault
from fp8rl_jax.tasks.dataset import load_splits
from fp8rl_jax.tasks.python_objects import name_objects
from fp8rl_jax.tasks.rewards import build_scorer
from fp8rl_jax.tasks.sandbox.pool import RewardPool, ScoreJob
from fp8rl_jax.tasks.verifiers import check_rewards, unread_result, unverified

GSM8K = ["48/2 = 24 in May.\n48+24 = 72 altogether.\n#### 72", "1000+234 = 1234.\n#### 1,234"]
MATH = [r"\begin{pmatrix} -1 \\ 7 \end{pmatrix}", r"\$18.90", "(1, 2]", r"\frac{1}{2}", "0"]


def kind(completion, answer, **_):
    """Takes any part of the answer."""
    return float(completion in answer)


def shy(completion, answer, **_):
    return 0.5 * float(completion == answer)


def one(completion, answer, **_):
    return float(completion in (answer, "1"))


def generous(completion, **_):
    """Pays silence, though it does not count as correct."""
    return 0.9 if not completion else 1.0 if completion == "4" else 0.3


def brittle(completion, answer, **_):
    return float(completion.split()[-1] == answer)


def boxed(completion, answer, **_):
    """Right, and reads the completion by itself."""
    return float(completion == f"\\boxed{{{answer}}}")


def examined(answers, reward=None, check=check_rewards, **settings):
    """What `check` says of problems with these answers."""
    extract = settings.pop("answer_extract", "whole")
    task = TaskConfig(
        kind="python",
        name="rows",
        eval_size=1,
        answer_extract=extract,
        reward=RewardConfig(num_workers=1, **settings),
    )
    rows = [{"prompt": f"Problem {i}", "answer": text} for i, text in enumerate(answers)]
    train, held_out = load_splits(task, rows)
    return check(InThisProcess(task, reward), train.examples + held_out.examples)


class InThisProcess(RewardPool):
    """A pool without workers, which are slow to start."""

    def __init__(self, task, reward):
        self.task, objects = name_objects(task, reward)
        self.scorer = build_scorer(self.task, objects)

    def score(self, examples, completions):
        repeats = len(completions) // max(len(examples), 1)
        job = ScoreJob([()] * len(completions), self.task)
        for row, completion in enumerate(completions):
            example = examples[row // repeats]
            try:
                scores = self.scorer(example.prompt, completion, example.answer, example.entry)
                job.record(row, scores, None)
            except Exception as fault:
                job.record(row, None, describe_fault(fault))
        return job.scores()


@pytest.mark.parametrize(
    ("answers", "settings"),
    [
        (["4", "1,234", "-5"], {"extract": "last_number"}),
        (["north", "south"], {"extract": "answer_tag"}),
        (["A", "B", "C"], {"extract": "boxed"}),
        (GSM8K, {"answer_extract": "after_hashes", "extract": "last_number"}),
        (GSM8K, {"answer_extract": "after_hashes"}),
        (MATH, {"weights": {"math_verify": 1.0}}),
        (["4", "north"], {"reward": boxed}),
    ],
)
def test_sound_rewards_pass(answers, settings):
    lines, faults = examined(answers, **settings)
    assert faults == [] and f"{len(answers)} of {len(answers)} problems tried" in lines[0]


@pytest.mark.parametrize(
    ("answers", "settings", "faults"),
    [
        (GSM8K, {}, ['2 of 2 answers have a line #### RESULT in them.*answer_extract = "after_hashes"']),
        ([r"So \boxed{4}.", "5"], {}, ['1 of 2 answers have a box.*answer_extract = "boxed"']),
        (
            ["4", "none", "about"],
            {"extract": "last_number"},
            [r"exact: the problem's own answer is not correct.*for 2 of 3 .*dataset row [12] \('"],
        ),
        (
            [*MATH, "$$"],
            {"weights": {"math_verify": 1.0}},
            [r"math_verify: .* for 1 of 6 problems: dataset row 5 \('\$\$'\) \(ValueError: .*reads no"],
        ),
        (["4", "5"], {"reward": shy}, ["not correct.*2 of 2.*its highest score is 0.5"]),
        (["4", "5"], {"reward": kind}, ["kind: the empty answer is correct for 2 of 2 problems"]),
        (["4", "5"], {"reward": one}, ["one: '1' is correct for 2 of 2 problems: dataset row"]),
        (["4", "45"], {"reward": kind}, ["empty", "another problem's answer, '4', is correct for 1"]),
        (
            ["4", "5"],
            {"reward": generous},
            ["not correct.*1 of 2", "the empty answer earns 0.9 in the mean, .* have earn 0.65"],
        ),
        (["4", "5"], {"reward": brittle}, ["fails on 2 of 16 wrong.*: IndexError"]),
    ],
)  # fmt: skip
def test_unsound_rewards_are_named_with_the_rows(answers, settings, faults):
    found = examined(answers, **settings)[1]
    assert len(found) == len(faults), found
    for line, fault in zip(found, faults, strict=True):
        assert "\n" not in line and re.search(fault, line), line


def test_a_run_tries_its_own_answers_where_that_costs_nothing():
    of_math = examined([*MATH, "$$"], weights={"math_verify": 1.0}, check=unverified)
    assert "for 1 of 6 problems: dataset row 5" in of_math
    assert examined(MATH, weights={"math_verify": 1.0}, check=unverified) == ""
    assert examined(["4", "none"], extract="last_number", check=unverified).startswith("exact: ")
    assert examined(["4", "5"], reward=shy, check=unverified) == ""


def test_a_function_makes_of_answers_what_it_likes():
    def hint(pool, examples):
        return unread_result(pool.task, examples)

    assert examined(GSM8K, reward=boxed, check=hint) == ""
    assert "after_hashes" in examined(GSM8K, weights={"math_verify": 1.0}, check=hint)


def test_results_are_read_out_of_answers_and_rows_without_one_are_named(tmp_path):
    path = tmp_path / "problems.jsonl"
    rows = [{"question": f"Q{i}", "answer": answer} for i, answer in enumerate(GSM8K)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = TaskConfig(kind="jsonl", name=str(path), eval_size=1, answer_extract="after_hashes")
    train, held_out = load_splits(task)
    examples = {example.prompt: example for example in train.examples + held_out.examples}
    assert [examples[f"Q{i}"].answer for i in range(2)] == ["72", "1,234"]
    assert [examples[f"Q{i}"].target for i in range(2)] == GSM8K
    path.write_text(path.read_text() + '{"question": "Q2", "answer": "5"}\n')
    with pytest.raises(UserError, match=r"problems.jsonl:3: task.answer_extract = 'after_hashes'"):
        load_splits(task)
    assert "task.answer_extract" in TaskConfig(answer_extract="boxed").problems()[0]
