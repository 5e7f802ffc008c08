"""Splits that share no prompt, data that a seed determines, and an order that can be resumed."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.config.tasks import TaskConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.tasks.conversation import chat_messages
from fp8rl_jax.tasks.dataset import batch_indices, load_splits
from fp8rl_jax.tasks.sources import LOADERS
from fp8rl_jax.tokenizers.byte_tokenizer import ByteTokenizer
from fp8rl_jax.training.prompts import PromptEncoder

REWARDS = Path(__file__).with_name("reward_examples.py")
ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def prompts(dataset):
    return [example.prompt for example in dataset.examples]


def rows_task(function="rows", **changes):
    settings: dict[str, Any] = {"eval_size": 2, **changes}
    return TaskConfig(kind="module", name=f"{REWARDS}:{function}", **settings)


def test_held_out_prompts_never_appear_in_training():
    # 200 problems exist, so a split by index would share most of them.
    train, held_out = load_splits(
        TaskConfig(name="chain_sum", args=ONE_DIGIT, train_size=140, eval_size=60)
    )
    assert len(train) == len(set(prompts(train))) == 140
    assert len(held_out) == len(set(prompts(held_out))) == 60
    assert not set(prompts(train)) & set(prompts(held_out))
    assert train.duplicates > 0


def test_the_default_problems_fit_the_default_prompt():
    run = RunConfig()
    encoder = PromptEncoder(ByteTokenizer(), "", run.rollout.max_prompt_tokens)
    train, held_out = load_splits(run.task)
    assert (len(train), len(held_out)) == (1024, 256)
    assert all(map(encoder.fits, train.examples + held_out.examples))


def test_prompts_that_a_template_makes_equal_count_once():
    # The template shows the first term alone: ten different prompts.
    task = TaskConfig(
        name="chain_sum",
        args=ONE_DIGIT,
        prompt_template="{metadata[expression][0]}",
        train_size=6,
        eval_size=4,
    )
    train, held_out = load_splits(task)
    assert sorted(prompts(train) + prompts(held_out)) == [str(digit) for digit in range(10)]


def test_too_few_distinct_problems_says_how_many_there_are():
    with pytest.raises(UserError, match="has 200 distinct prompts, fewer than task.eval_size = 60"):
        load_splits(TaskConfig(name="chain_sum", args=ONE_DIGIT, train_size=150, eval_size=60))


def test_a_seed_determines_the_data():
    task = TaskConfig(name="chain_sum", args=ONE_DIGIT, train_size=50, eval_size=50)
    train, held_out = load_splits(task)
    again, _ = load_splits(task)
    assert train == again and train.fingerprint == again.fingerprint
    larger, same_held_out = load_splits(
        TaskConfig(name="chain_sum", args=ONE_DIGIT, train_size=80, eval_size=50)
    )
    assert held_out == same_held_out and larger.examples[:50] == train.examples
    assert larger.fingerprint != train.fingerprint


def test_neighbouring_seeds_give_unrelated_problems():
    args = {"min_terms": 4, "max_terms": 4, "min_digits": 4, "max_digits": 4}
    first, second = (
        load_splits(
            TaskConfig(name="chain_sum", args=args, seed=seed, train_size=100, eval_size=0)
        )[0]
        for seed in (0, 1)
    )
    assert not set(prompts(first)) & set(prompts(second))


def test_templates_make_prompt_and_target():
    task = rows_task(
        prompt_template="Q: {question} ({metadata[level]})", answer_template="A: {answer}."
    )
    train, _ = load_splits(task)
    example = next(
        example for example in train.examples if example.answer == "3" or example.answer == "5"
    )
    assert example.prompt == f"Q: Say {example.answer} (1)"
    assert example.target == f"A: {example.answer}."
    assert example.entry["metadata"] == {"level": 1}
    assert [example.index for example in train.examples] == list(range(6))


def test_a_template_that_does_not_fit_names_what_there_is():
    with pytest.raises(
        UserError, match="task.prompt_template.*KeyError: 'word'.*their metadata has level"
    ):
        load_splits(rows_task(prompt_template="{metadata[word]}"))


def test_a_list_is_shuffled_by_the_seed_and_used_up():
    train, held_out = load_splits(rows_task(args={"count": 40}))
    assert len(train) == 38 and {e.answer for e in train.examples + held_out.examples} == set(
        map(str, range(40))
    )
    other, _ = load_splits(rows_task(args={"count": 40}, seed=1))
    assert prompts(train) != prompts(other)


def test_repeated_rows_are_dropped_and_counted():
    train, held_out = load_splits(rows_task("repeated_rows"))
    assert len(train) + len(held_out) == 9 and train.duplicates == 6


@pytest.mark.parametrize(("count", "held"), [(2, 1), (15, 1), (261, 26), (2559, 255), (3000, 256)])
def test_a_tenth_of_a_list_is_held_out_and_256_at_most(count, held):
    task = rows_task(args={"count": count}, eval_size=None)
    train, held_out = load_splits(task)
    assert (len(train), len(held_out)) == (count - held, held)
    assert load_splits(replace(task, eval_size=held)) == (train, held_out)


def test_a_generator_holds_out_256_and_a_tenth_where_it_runs_out():
    args = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}
    train, held_out = load_splits(TaskConfig(name="chain_sum", args=args, train_size=40))
    assert (len(train), len(held_out)) == (40, 256)
    # of the 200 sums of two digits
    train, held_out = load_splits(TaskConfig(name="chain_sum", args=ONE_DIGIT, train_size=150))
    assert (len(train), len(held_out)) == (150, 20) and not set(prompts(train)) & set(
        prompts(held_out)
    )
    with pytest.raises(
        UserError,
        match=r"has 200 .*than task.eval_size = 20 \(unset, so a tenth\) and task.train_size = 181",
    ):
        load_splits(TaskConfig(name="chain_sum", args=ONE_DIGIT, train_size=181))


def test_nothing_is_held_out_where_eval_size_is_0():
    train, held_out = load_splits(rows_task(eval_size=0))
    assert (len(train), len(held_out)) == (8, 0)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (rows_task("no_rows"), "is an empty data set"),
        (rows_task("no_rows", eval_size=None), "is an empty data set"),
        (
            rows_task(eval_size=None, args={"count": 1}),
            r"has 1 distinct prompts, fewer than task.eval_size = 1 \(unset",
        ),
        (rows_task("bad_rows"), "row 2: it has no answer"),
        (
            rows_task(
                "length", args=dict.fromkeys(("prompt", "completion", "answer", "metadata"), "")
            ),
            "returned float",
        ),
        (rows_task(eval_size=8), "has 8 distinct prompts"),
        (rows_task(train_size=7), "has 8 distinct prompts"),
        (rows_task(args={"metadata": 3}), "row .: metadata must be an object"),
        (rows_task(args={"thing": {1, 2}}), "plain values"),
        (rows_task(train_size=-1), "must not be negative"),
        (rows_task("no_such_function"), "has no function"),
    ],
)
def test_a_source_that_cannot_be_used_is_one_clear_line(task, message, fault):
    asked = time.monotonic()
    with pytest.raises(UserError, match=message) as raised:
        load_splits(task)
    assert "\n" not in str(raised.value)
    fault("source", str(raised.value), status=2, detected=time.monotonic() - asked)


def test_every_epoch_visits_every_example_once_in_an_order_of_its_own():
    order = np.concatenate([batch_indices(step, 4, seed=3, size=10) for step in range(10)])
    epochs = order.reshape(4, 10)
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_the_order_depends_on_seed_and_step_alone():
    late = batch_indices(1000, 7, seed=5, size=33)
    assert late.dtype == np.int64 and late.shape == (7,)
    np.testing.assert_array_equal(late, batch_indices(1000, 7, seed=5, size=33))
    assert list(late) != list(batch_indices(1000, 7, seed=6, size=33))
    # Written down once: a resumed run has to meet the same order under every version of numpy.
    assert list(batch_indices(0, 8, seed=0, size=8)) == [0, 2, 1, 5, 4, 3, 6, 7]


def test_a_batch_may_be_larger_than_the_data_set():
    assert np.bincount(batch_indices(0, 10, seed=0, size=5)).tolist() == [2] * 5


def test_every_kind_has_a_loader():
    # text has no problems: tasks/text.py loads its documents
    assert {*LOADERS, "text"} == set(get_args(get_type_hints(TaskConfig)["kind"]))


def test_chat_messages():
    assert chat_messages("hi") == [{"role": "user", "content": "hi"}]
    assert chat_messages("hi", "be brief")[0] == {"role": "system", "content": "be brief"}


def test_the_configuration_needs_no_third_party_module():
    code = (
        "import sys, fp8rl_jax.config.tasks; print({m for m in ('jax', 'numpy', "
        "'reasoning_gym') if m in sys.modules})"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
        == "set()"
    )
