"""Runs whose completions are carried over from step to step."""

from __future__ import annotations

import json
from unittest.mock import Mock

import pytest
from tiny_run import CARRIES, check_refused, column, measured, train, write_run

from fp8rl_jax.config.run import PagedConfig, RolloutConfig, RunConfig
from fp8rl_jax.tasks.dataset import Dataset, Example
from fp8rl_jax.training.collect import Collector


@pytest.mark.parametrize("flags", [(), ("--recipe", "fp8-rl", "--precision.kv-prompts", "2")])
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
