"""Updates that are taken back: masters, optimizer and what is served are those of before, and a run
goes on as if they had not been made."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from tiny_run import LEARNS, RUN, check_refused, column, measured, train, write_run

import fp8rl_jax as fp8rl
from fp8rl_jax.training import acceptance

ACCEPTS = LEARNS | {"rl": {"acceptance": {"enabled": True}, "correction": {"method": "token_tis"}}}


def on_host(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def test_going_back_restores_what_is_trained_and_what_is_served():
    policy, tokenizer = fp8rl.byte_policy(**RUN["model"]["init"])
    settings = {"samples_per_prompt": 4, "max_new_tokens": 6, "learning_rate": 1e-1}
    lora = {"lora.rank": 2, "compute_dtype": "float32"}
    session = fp8rl.Session(policy, tokenizer, "fp8-rl", **settings, **lora)
    prompts = ["ab=", "cd="]

    def step():
        rollout = session.rollout(prompts)
        return session.update(rollout, [float(len(text)) for text in rollout.texts])

    step()
    before, held = session.state, session.hold()
    served, scales = session.sample(prompts, 4, 1.0), on_host(session.scales)
    step()
    moved = session.sample(prompts, 4, 1.0)
    assert any((a != b).any() for a, b in zip(served.logprobs, moved.logprobs, strict=True))
    session.go_back(held)
    after = session.state
    for one, other in zip(
        on_host((before.policy, before.optimizer)),
        on_host((after.policy, after.optimizer)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)
    assert int(after.updates) == int(before.updates) + 1 == session.step
    assert session.engine.version == session.step + 1
    for one, other in zip(scales, on_host(session.scales), strict=True):
        np.testing.assert_array_equal(one, other)
    again = session.sample(prompts, 4, 1.0)
    assert again.tokens == served.tokens
    for one, other in zip(again.logprobs, served.logprobs, strict=True):
        np.testing.assert_array_equal(one, other)
    assert np.isfinite(step()["loss"])


def test_a_run_counts_what_it_takes_back_and_goes_on_from_there(tmp_path, monkeypatch):
    seen, told = [], [0.5, -0.5, -0.5, 0.5]
    gap_of, gap = acceptance._gap_of, acceptance.Acceptance._gap

    def watched(*arrays, **settings):
        found = gap_of(*arrays, **settings)
        seen.append((*map(np.asarray, arrays), float(found)))
        return found

    def decided(self, step):
        gap(self, step)
        return told[step]

    monkeypatch.setattr(acceptance, "_gap_of", watched)
    flags = ["--recipe", "fp8-rl", "--precision.exact", "false"]
    plain, whole, parts = tmp_path / "plain", tmp_path / "whole", tmp_path / "parts"
    run_file = write_run(tmp_path, ACCEPTS, {"rl": {"acceptance": {"enabled": False}}})
    assert train(run_file, plain, *flags) == 0
    assert not seen
    run_file = write_run(tmp_path, ACCEPTS)
    monkeypatch.setattr(acceptance.Acceptance, "_gap", decided)
    assert train(run_file, whole, *flags) == 0
    np.testing.assert_array_equal(column(whole, "optim/rejected"), [0, 1, 1, 0])
    np.testing.assert_array_equal(column(whole, "optim/inference_gap"), told)
    np.testing.assert_allclose(column(whole, "optim/gap_tolerance")[[0, 2]], [4e-3, 3.94e-3])
    # what was judged draws nothing of the run's own, and an update that was kept is the same
    first, same = measured(plain)[0], measured(whole)[0]
    assert first.items() <= same.items()
    np.testing.assert_array_equal(column(whole, "rollout/weight_version"), range(1, 5))
    # steps 1, 2 and 3 begin with the weights of step 0's update; only the first run's step 1 does
    rates = column(whole, "mismatch/ppl_train")
    assert rates[1] == column(plain, "mismatch/ppl_train")[1]
    assert rates[2] != column(plain, "mismatch/ppl_train")[2]
    # the paper's formula with GRPO's advantages, in float64
    assert len(seen) == 4
    for sampled, trained, mask, rewards, valid, found in seen:
        groups = rewards.astype(np.float64).reshape(-1, 4)
        spread = groups.std(axis=1, ddof=1, keepdims=True)
        advantages = ((groups - groups.mean(axis=1, keepdims=True)) / (spread + 1e-6)).reshape(-1)
        counted = np.where(mask, trained.astype(np.float64) - sampled, 0).sum(1) / mask.sum(1)
        assert valid.all() and advantages.any() and np.abs(counted).max() > 1e-6
        np.testing.assert_allclose(found, -np.mean(np.exp(counted) * advantages), atol=1e-6)
    # what a run killed in step 3 leaves
    assert train(run_file, parts, *flags) == 0
    (parts / "checkpoints" / "4").rename(tmp_path / "gone")
    assert train(run_file, parts, *flags, "--resume") == 0
    assert measured(parts) == measured(whole)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--precision.exact", "true", "--recipe", "bf16"], "precision.exact"),
        (["--rollout.samples-per-prompt", "1"], "samples_per_prompt of at least 2"),
        (
            ["--rollout.engine", "paged", "--rollout.paged.extra-prompts", "2"],
            "rollout.paged.extra_prompts = 0",
        ),
    ],
)
def test_what_it_cannot_judge_is_refused(tmp_path, capsys, flags, message):
    run_file = write_run(tmp_path, ACCEPTS)
    line = check_refused(run_file, tmp_path / "run", capsys, [*flags, "--dry-run"], message)
    assert "rl.acceptance.enabled: " in line
