"""Rewards that take a batch: what one call costs where it goes wrong, and sums with rewards of the
other form."""

import re
from pathlib import Path
from typing import Any

import pytest

from fp8rl_jax.config.tasks import RewardConfig, TaskConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.tasks.dataset import Example, columns_of
from fp8rl_jax.tasks.rewards import build_scorer
from fp8rl_jax.tasks.sandbox.pool import RewardPool

REWARDS = Path(__file__).with_name("reward_examples.py")


def task_of(function="batch_faulty", **changes):
    settings: dict[str, Any] = {"timeout": 0.2, "num_workers": 1, "batch_size": 4, **changes}
    if function:
        settings["function"] = f"{REWARDS}:{function}"
    return TaskConfig(kind="module", name="m:f", reward=RewardConfig(**settings))


def example(answer="1"):
    return Example(
        0,
        "prompt",
        answer,
        answer,
        {"question": "prompt", "answer": answer, "metadata": {"level": 3}},
    )


@pytest.fixture(scope="module")
def pool():
    with RewardPool(task_of()) as pool:
        pool.score([example()], ["1"])  # a worker's first call has one row
        yield pool


def test_a_function_with_completions_gets_lists_in_order():
    def reward(prompts, completions, answers, metadata):
        assert [len(each) for each in (prompts, answers, metadata)] == [len(completions)] * 3
        return [
            len(text) + float(answer) + data["level"]
            for text, answer, data in zip(completions, answers, metadata, strict=True)
        ]

    examples = [example(str(10 * i)) for i in range(6)]
    with RewardPool(task_of("", timeout=5.0, num_workers=2), reward=reward) as pool:
        scores = pool.score(examples, ["a", "bb"] * 6)
    assert scores.rewards.tolist() == [3 + 10 * i + length for i in range(6) for length in (1, 2)]
    assert not scores.failed.any()


def test_a_batch_is_an_even_share_and_at_most_batch_size(pool):
    assert pool.score([example()] * 6, ["count"] * 6).rewards.tolist() == [4] * 4 + [2] * 2
    with RewardPool(task_of(num_workers=2, batch_size=32)) as two:
        assert two.score([example()] * 6, ["count"] * 6).rewards.tolist()[:2] == [1, 1]
        assert two.score([example()] * 6, ["count"] * 6).rewards.tolist() == [3] * 6


@pytest.mark.parametrize(
    ("completion", "error", "timeouts"),
    [
        ("raise", r"^ValueError: no such batch \(reward_examples.py:\d+\)$", 0),
        ("short", r"returned 1 scores for 4 completions", 0),
        ("none", r"returned NoneType instead of a list of numbers", 0),
        ("die", r"^the worker exited with status 3$", 0),
        ("sleep", r"^no score after 0.8 s$", 4),
    ],
)
def test_a_fault_costs_its_batch_and_no_other(pool, completion, error, timeouts):
    scores = pool.score(
        [example()] * 10, ["1", "2", completion, "4", "5", "6", "7", "8", "9", "10"]
    )
    assert scores.rewards.tolist() == [0, 0, 0, 0, 5, 6, 7, 8, 9, 10]
    assert scores.failed.tolist() == [True] * 4 + [False] * 6
    assert (scores.timeouts, scores.errors) == (timeouts, 4 - timeouts)
    assert re.search(error, scores.first_error)


def test_an_entry_that_is_no_number_costs_its_own_sample(pool):
    scores = pool.score([example()] * 4, ["1", "no score", "3", "4"])
    assert scores.rewards.tolist() == [1, 0, 3, 4] and scores.failed.tolist() == [
        False,
        True,
        False,
        False,
    ]
    assert "returned NoneType instead of a number" in scores.first_error


def test_a_batch_has_the_time_of_all_its_samples(pool):
    """It takes 0.4 s a sample, and the timeout is 0.2 s: then the same under a timeout of 1 s."""
    assert pool.score([example()] * 2, ["wait", "1"]).timeouts == 2
    with RewardPool(task_of(timeout=0.6)) as patient:  # 1.6 s for a batch that may take 2.4 s
        assert patient.score([example()] * 4, ["wait", "1", "1", "1"]).rewards.tolist() == [
            0.5,
            1,
            1,
            1,
        ]


def test_workers_know_the_columns_of_the_problems():
    def reward(completions, level):
        return [float(value) for value in level]

    problems = [example(), example("2")]
    with RewardPool(task_of(""), reward=reward, columns=columns_of(problems)) as pool:
        assert pool.score(problems, ["a", "b"]).rewards.tolist() == [3.0, 3.0]
    with pytest.raises(UserError, match="none has 'level': there are none"):
        RewardPool(task_of(""), reward=reward).wait_until_ready()


def test_both_forms_in_one_sum():
    functions = {"many": f"{REWARDS}:batch_faulty", "one": f"{REWARDS}:faulty"}
    weights = {"many": 1.0, "exact": 10.0, "one": 100.0}
    with RewardPool(task_of("", functions=functions, weights=weights, correct="exact")) as pool:
        scores = pool.score([example("2")] * 4, ["1", "2", "3", "4"])
        assert scores.rewards.tolist() == [101, 212, 303, 404] and scores.correct.tolist() == [
            False,
            True,
            False,
            False,
        ]
        assert scores.components["many"].tolist() == [1, 2, 3, 4]
        # behind the batch each sample stands for itself again
        scores = pool.score([example()] * 4, ["1", "sleepy", "3", "raise 2"])
        assert scores.failed.tolist() == [False, True, False, True]
        assert scores.first_error.startswith(
            "one: ValueError: could not convert string to float: 'sleepy'"
        )
        scores = pool.score([example()] * 4, ["1", "regex", "3", "4"])
        assert scores.failed.tolist() == [False, True, False, False] and scores.timeouts == 1
        scores = pool.score([example()] * 4, ["1", "short", "3", "4"])
        assert scores.failed.all() and scores.first_error.startswith(
            "many: ValueError: the batch reward returned 1 scores"
        )


def test_a_batch_reward_that_cannot_be_called_as_one_is_refused():
    with pytest.raises(
        UserError,
        match=r"takes \(completions, scale\), but is called with prompts=, completions=, answers=, meta",
    ):
        build_scorer(task_of("batch_two_arguments"))
    assert task_of(batch_size=0).problems() == ["task.reward.batch_size = 0 must be at least 1"]
