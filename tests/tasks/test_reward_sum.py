"""Weighted sums of rewards: the built-in ones, what is logged, what counts as correct, and what is
refused."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8rl_jax.cli.load import load_config
from fp8rl_jax.config.files import dump_toml
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.config.tasks import Extract, RewardConfig, TaskConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.tasks.dataset import Example
from fp8rl_jax.tasks.rewards import extract_answer, format_reward, length_reward
from fp8rl_jax.tasks.sandbox.pool import RewardPool, ScoreJob

REWARDS = Path(__file__).with_name("reward_examples.py")
EXAMPLE = Example(0, "prompt", "12", "12", {"question": "prompt", "answer": "12", "metadata": {}})
ANSWER_TAG = r"<think>.*</think>\s*<answer>.*</answer>"
SUM = {
    "weights": {"exact": 1.0, "format": 0.5, "length": 0.25, "third": 0.0},
    "functions": {"third": f"{REWARDS}:length"},
    "extract": "answer_tag",
    "format_pattern": ANSWER_TAG,
    "length_target": 50,
    "length_limit": 100,
}


def task_of(**reward):
    return TaskConfig(kind="module", name="m:f", reward=RewardConfig(num_workers=1, **reward))


def test_the_reward_is_the_weighted_sum_and_every_part_is_logged():
    right = "<think>3 * 4\n</think>\n<answer>12</answer>"
    long = right.replace("</think>", "." * 100 + "</think>")
    with RewardPool(task_of(**SUM)) as pool:
        scores = pool.score([EXAMPLE], [right, long, "<answer>12</answer>", "12"])
    np.testing.assert_allclose(scores.rewards, [1.5, 1.25, 1.0, 0.0])
    assert scores.correct.tolist() == [True, True, True, False]
    assert {name: values.tolist() for name, values in scores.components.items()} == {
        "exact": [1, 1, 1, 0],
        "format": [1, 1, 0, 0],
        "length": [0, -1, 0, 0],
        "third": [np.float32(0.2)] * 3 + [0],
    }
    metrics = scores.metrics()
    assert metrics["rewards/exact/mean"] == 0.75 and metrics["rewards/length/mean"] == -0.25
    assert metrics["rewards/format/std"] == 0.5 and "rewards/third/mean" in metrics


def test_a_part_that_fails_is_named_and_fails_the_sample():
    task = task_of(
        weights={"exact": 1.0, "odd": 1.0}, functions={"odd": f"{REWARDS}:faulty"}, correct="exact"
    )
    with RewardPool(task) as pool:
        scores = pool.score([EXAMPLE], ["12", "raise", "value nan", "sleep_not"])
    assert scores.rewards.tolist() == [13, 0, 0, 0] and scores.errors == 3
    assert scores.first_error.startswith("odd: ValueError: no such answer")
    # Means are over the samples that have scores.
    assert scores.metrics()["rewards/odd/mean"] == 12


def test_no_partial_credit_concerns_the_deciding_part_alone():
    task = task_of(
        weights={"close": 2.0, "length": 1.0},
        functions={"close": f"{REWARDS}:length"},
        length_target=5,
        length_limit=15,
        partial_credit=False,
    )
    with RewardPool(task) as pool:
        scores = pool.score([EXAMPLE], ["a" * 9, "a" * 10])
    np.testing.assert_allclose(scores.rewards, [-0.4, 1.5])
    assert scores.correct.tolist() == [False, True]


def test_a_sum_beyond_float32_is_an_error_and_a_batch_of_failures_has_finite_metrics():
    job = ScoreJob(
        [()], task_of(weights={"exact": 1.0, "format": 1.0}, format_pattern="x", correct="exact")
    )
    job.record(0, [6e14, 6e14], None)
    scores = job.scores()
    assert scores.errors == 1 and "more than 1e+15" in scores.first_error
    assert np.isfinite(list(scores.metrics().values())).all()


@settings(deadline=None)
@given(st.text(), st.sampled_from(get_args(Extract)))
def test_an_extraction_is_a_part_of_any_text(text, how):
    part = extract_answer(text, how)
    assert part == part.strip()
    assert how == "last_number" or part in text


@settings(deadline=None)
@given(st.text(max_size=300), st.integers(0, 100), st.integers(1, 100))
def test_length_falls_from_zero_to_minus_one(text, target, span):
    value = length_reward(target, target + span)(text)
    assert -1 <= value <= 0
    assert (value == 0) == (len(text) <= target) and (value == -1) == (len(text) >= target + span)


def test_format_matches_the_whole_completion():
    score = format_reward(ANSWER_TAG)
    assert score(" <think>a\nb</think>\n<answer>1</answer>\n") == 1
    assert score("so: <think>a</think><answer>1</answer>") == 0 and score("") == 0


def test_a_completion_that_math_verify_hangs_on_costs_its_own_sample():
    task = task_of(weights={"math_verify": 1.0}, timeout=1.5)
    with RewardPool(task) as pool:
        scores = pool.score(
            [EXAMPLE], ["12", "$\\sqrt{2^{3^{4^{5^{6}}}}}!! + 10^{10^{10}}!$", "It is $12$"]
        )
    assert scores.rewards.tolist() == [1, 0, 1]
    assert scores.seconds < 60  # a new worker has to import sympy again


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (
            {"weights": {"exakt": 1.0}},
            r"task.reward.weights.exakt is no built-in reward.*did you mean exact\?",
        ),
        ({"weights": {"tone": 1.0}}, "give task.reward.functions.tone"),
        ({"weights": {"exact": "much"}}, "weights.exact = 'much' must be a finite number"),
        ({"weights": {"exact": float("inf")}}, "must be a finite number"),
        ({"weights": {"exact": 0}}, "every weight is 0"),
        ({"weights": {"exact": 1}, "function": "m:f"}, "are both given"),
        ({"weights": {"exact": 1}, "functions": {"tone": "m:f"}}, "functions.tone has no weight"),
        ({"weights": {"exact": 1}, "functions": {"exact": "m:f"}}, "choose another name"),
        ({"weights": {"a": 1}, "functions": {"a": "no_colon"}}, "must be module:function"),
        ({"weights": {"reasoning_gym": 1}}, 'task.kind = "reasoning_gym" only'),
        ({"weights": {"exact": 1, "math_verify": 1}}, "say which of exact, math_verify decides"),
        ({"weights": {"exact": 1}, "correct": "format"}, "is none of the rewards"),
        ({"weights": {"format": 1}, "correct": "format"}, "give task.reward.format_pattern too"),
        ({"format_pattern": "x"}, "give task.reward.weights.format too"),
        ({"weights": {"exact": 1, "format": 1}, "format_pattern": "("}, "is no regular expression"),
        ({"weights": {"exact": 1, "length": 1}}, "needs 0 <= target < limit"),
        ({"length_limit": 5}, "need task.reward.weights.length"),
    ],
)
def test_a_sum_that_cannot_work_is_one_clear_line(reward, message):
    faults = task_of(**reward).problems()
    assert len(faults) == 1, faults
    with pytest.raises(UserError, match=message):
        RewardPool(task_of(**reward))


def test_weights_from_a_file_and_from_flags(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        '[task.reward]\nweights = { reasoning_gym = 1, format = 0.5 }\nformat_pattern = "[0-9]+"\n'
    )
    config = load_config(
        RunConfig, [str(file), "--task.reward.weights.format", "0.2"], "fp8rl train"
    )
    assert config.task.components == {"reasoning_gym": 1.0, "format": 0.2}
    assert config.task.deciding_reward == "reasoning_gym"
    (tmp_path / "again.toml").write_text(dump_toml(config))
    assert load_config(RunConfig, [str(tmp_path / "again.toml")], "fp8rl train") == config
    with pytest.raises(UserError, match="weights.format = 'high' must be a finite number"):
        load_config(RunConfig, [str(file), "--task.reward.weights.format", "high"], "fp8rl train")


@pytest.mark.parametrize(
    ("task", "name"),
    [
        (TaskConfig(), "reasoning_gym"),
        (TaskConfig(kind="module", name="m:f"), "exact"),
        (TaskConfig(reward=RewardConfig("rewards.py:length")), "length"),
    ],
)
def test_a_single_reward_has_a_name_too(task, name):
    assert task.problems() == [] and task.components == {name: 1.0} and task.deciding_reward == name
    assert replace(task, reward=replace(task.reward, correct=name)).problems() == []
