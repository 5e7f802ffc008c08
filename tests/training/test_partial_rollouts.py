"""Runs whose completions are carried over from step to step."""

from __future__ import annotations

import json
from unittest.mock import Mock

import numpy as np
import pytest
from tiny_run import CARRIES, RUN, check_refused, column, measured, train, write_run

import fp8rl_jax as fp8rl
from fp8rl_jax.config.run import PagedConfig, RolloutConfig, RunConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.tasks.dataset import Dataset, Example
from fp8rl_jax.training.collect import Collector

SOME_PROMPTS = "--precision.kv-calibration", "trainer", "--precision.kv-prompts", "2"


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [(), ("--recipe", "fp8-rl"), ("--recipe", "fp8-rl", *SOME_PROMPTS)]
)
def test_a_resumed_run_goes_on_with_what_was_carried_over(tmp_path, flags):
    run_file = write_run(tmp_path, CARRIES)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(run_file, whole, *flags) == 0
    assert train(run_file, parts, *flags, "--trainer.steps", "2") == 0
    assert train(run_file, parts, *flags, "--resume") == 0
    assert measured(whole) == measured(parts)
    stale, oldest = column(whole, "rollout/stale_tokens"), column(whole, "rollout/oldest_token")
    assert stale[0] == 0 and (stale[1:] > 0).any() and (stale < 1).all()
    assert ((oldest > 0) == (stale > 0)).all()
    for row in map(json.loads, (whole / "samples.jsonl").read_text().splitlines()):
        assert row["answer"] == row["prompt"].rstrip("=")[::-1]


@pytest.mark.slow
def test_prompts_are_drawn_again_until_they_teach(tmp_path):
    """Random weights spell no word backward: each step draws as often as it may."""
    run_file = write_run(tmp_path, CARRIES, {"task": {"reward": {"function": None}}})
    dynamic = ["--rl.dynamic-sampling.enabled", "--rl.dynamic-sampling.max-rounds", "3"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(run_file, whole, *dynamic) == 0
    assert (column(whole, "rollout/rounds") == 3).all()
    assert train(run_file, parts, *dynamic, "--trainer.steps", "2") == 0
    assert train(run_file, parts, *dynamic, "--resume") == 0
    assert measured(whole) == measured(parts)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rollout.engine", "static"], 'rollout.engine = "static" carries nothing over'),
        (["--precision.exact", "true"], "with precision.exact no bit may differ"),
        (["--rl.correction.method", "none"], "nothing corrects for tokens that older weights"),
        (["--rollout.paged.extra-prompts", "-1"], "rollout.paged.extra_prompts must not be"),
    ],
)
def test_what_cannot_be_carried_over_is_refused(tmp_path, capsys, flags, message):
    run_file = write_run(tmp_path, CARRIES)
    check_refused(run_file, tmp_path / "run", capsys, flags, message)


def test_each_problem_is_drawn_once_an_epoch():
    """The first step draws what is in progress on top, and every step as many as it learns from."""

    problems, none = Dataset(tuple(Example(i, str(i), "", "", {}) for i in range(24))), Mock()
    for extra in (0, 2, 4, 7):
        paged = PagedConfig(extra_prompts=extra)
        rollout = RolloutConfig(prompts_per_step=4, engine="paged", paged=paged)
        collector = Collector(none, problems, none, RunConfig(rollout=rollout))
        drawn = collector._first_examples() if extra else []
        for step in range(5):
            drawn += collector._examples(step, 0)
        indices = [example.index for example in drawn]
        assert len(indices) == extra + 20
        assert len(set(indices[:24])) == min(extra + 20, 24)


@pytest.mark.slow
def test_a_session_returns_the_first_prompts_to_be_complete():
    policy, tokenizer = fp8rl.byte_policy(**RUN["model"]["init"])
    settings = {
        "rollout.engine": "paged",
        "rollout.paged.extra_prompts": 2,
        "rollout.stop_token_ids": tuple(range(24)),
        "rl.correction.method": "token_tis",
    }
    session = fp8rl.Session(
        policy,
        tokenizer,
        compute_dtype="float32",
        samples_per_prompt=3,
        max_prompt_tokens=8,
        max_new_tokens=20,
        learning_rate=1e-2,
        **settings,
    )
    examples = [Example(i, "abc"[: i % 3 + 1], "", "", {}) for i in range(20)]
    given, seen = iter(examples), []
    for step in range(4):
        rollout = session.rollout([next(given) for _ in range(4 if step else 6)])
        assert len(rollout.prompt_ids) == 4 and session.carried == 2
        assert len(rollout.texts) == 12 and rollout.rollout.mask.any(1).all()
        lengths = np.asarray(rollout.rollout.prompts.lengths)
        # behind the begin of the sequence
        np.testing.assert_array_equal(lengths, [i % 3 + 2 for i in rollout.prompt_ids])
        seen += rollout.prompt_ids
        session.update(rollout, [float(len(text)) for text in rollout.texts])
    assert len(set(seen)) == 16 and set(seen) <= set(range(18))
    for prompts, message in (
        (["ab", "cd"], "text does not say which; give Examples"),
        (examples[:5], "a batch is not filled up"),
        ([Example(0, "x" * 9, "", "", {})] * 4, "at most rollout.max_prompt_tokens = 8"),
    ):
        with pytest.raises(UserError, match=message):
            session.rollout(prompts)
    with pytest.raises(UserError, match="prompts carried over have 3"):
        session.rollout(examples[:4], samples=2)
    session.restart()
    with pytest.raises(UserError, match="are not enough: rollout.paged.extra_prompts = 2"):
        session.rollout(examples[:2])
