"""Runs in this process that meet something: nothing to learn, no memory left, other weights in the
rollout; and what a run holds after many steps."""

from __future__ import annotations

import gc
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import EVEN_LETTERS, LEARNS, column, measured, train, write_run
from tiny_run import faults as lines

import fp8rl_jax.rollout.engine as engine_module
from fp8rl_jax.parallel import PROGRESS
from fp8rl_jax.training.session import Session


def test_rewards_that_are_all_equal_are_said_once_and_teach_nothing(tmp_path, caplog, fault):
    reward = tmp_path / "reward.py"
    reward.write_text("def score(completion, **_):\n    return 1.0\n")
    changes = {"task": {"reward": {"function": f"{reward}:score"}}}
    asked = time.monotonic()
    assert train(write_run(tmp_path, changes), tmp_path / "run") == 0
    took = time.monotonic() - asked
    (said,) = (line for line in caplog.messages if "teaches nothing" in line)
    assert said.startswith("step 0: every group has equal rewards")
    rows = measured(tmp_path / "run")
    assert len(rows) == 4
    assert all(row["optim/grad_norm"] == 0 and row["optim/skipped"] == 0 for row in rows)
    fault("equal rewards", said, status=0, detected=took, lost="what there was to learn")


@pytest.mark.parametrize("phase", ["rollout", "update"])
def test_memory_that_is_not_there_is_one_line_and_the_checkpoint_stands(
    tmp_path, capsys, monkeypatch, fault, phase
):
    """The third step asks the device for a petabyte."""
    original = getattr(Session, phase)

    def asks(session, *arguments, **options):
        if session.step == 2:
            jnp.zeros((1 << 50,), jnp.uint8).block_until_ready()
        return original(session, *arguments, **options)

    run_file, out = write_run(tmp_path, LEARNS), tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Session, phase, asks)
        asked = time.monotonic()
        assert train(run_file, out) == 2
        detected = time.monotonic() - asked
    (line,) = lines(capsys)
    assert "out of memory in step 2: RESOURCE_EXHAUSTED" in line and "`fp8rl plan` counts" in line
    assert "set trainer.micro_batch_prompts = 1 or " in line
    assert line.endswith("--resume goes on from the checkpoint of step 2")
    assert train(run_file, out, "--resume") == 0
    assert [row["step"] for row in measured(out)] == [0, 1, 2, 3]
    fault("exhausted", line, status=2, detected=detected, lost=0)


def test_other_weights_in_the_rollout_are_said_in_the_first_step(
    tmp_path, caplog, monkeypatch, fault
):
    """Where both sides have the same formats; others warn by their mean (test_watch.py)."""
    original, rng = engine_module._rollout_policy, np.random.default_rng(0)

    def perturbed(policy, **options):
        served, metrics = original(policy, **options)
        noisy = jax.tree.map(
            lambda x: x * (1 + 0.05 * rng.normal(size=x.shape).astype(x.dtype)), served
        )
        return noisy, metrics

    run_file = write_run(tmp_path, LEARNS, {"trainer": {"steps": 2}})
    assert train(run_file, tmp_path / "sound") == 0 and "not one bit may differ" not in caplog.text
    monkeypatch.setattr(engine_module, "_rollout_policy", perturbed)
    asked = time.monotonic()
    assert train(run_file, tmp_path / "run") == 0
    took = time.monotonic() - asked
    (said,) = (line for line in caplog.messages if "not one bit may differ" in line)
    assert "in step 0 a log-probability of the trainer is 0.0" in said
    assert column(tmp_path / "run", "mismatch/logprob_abs_diff_max").min() > 0.01
    assert column(tmp_path / "sound", "mismatch/logprob_abs_diff_max").max() == 0
    fault("perturbed", said, status=0, detected=took)


@pytest.mark.slow
def test_many_steps_hold_what_few_do(tmp_path, monkeypatch, fault):
    held, begin = {}, PROGRESS.begin

    def counted(step: int) -> None:
        begin(step)
        if step % 10 == 5:
            gc.collect()
            held[step] = len(jax.live_arrays()), sys.getallocatedblocks()

    monkeypatch.setattr(PROGRESS, "begin", counted)
    flags = ["--trainer.steps", "60", "--checkpoint.every", "10"]
    assert train(write_run(tmp_path, EVEN_LETTERS), tmp_path / "run", *flags) == 0
    arrays, blocks = zip(*(held[step] for step in (25, 35, 45, 55)), strict=True)
    assert len(set(arrays)) == 1, arrays
    a_step = (blocks[-1] - blocks[0]) / 30
    assert a_step < 100, blocks
    fault("memory", "", lost=f"{a_step:.0f} objects and {arrays[-1] - arrays[0]} arrays a step")
