"""Skips, failed rewards and constant groups: what is said, and when a run stops."""

from __future__ import annotations

import pytest

from fp8rl_jax.errors import UserError
from fp8rl_jax.training.watch import Watch


def metrics(skipped: float = 0.0, constant: float = 0.0, **flags: float) -> dict[str, float]:
    return {"optim/skipped": skipped, "reward/frac_zero_std": constant, **{f"nonfinite/{k}": v for k, v in flags.items()}}


def test_skips_are_named_and_counted(caplog):
    watch = Watch(3, "checkpoints")
    assert watch.see(0, metrics(), None) == {"optim/skipped_steps": 0.0}
    assert watch.see(1, metrics(1.0, loss=0.0, gradient=1.0), None) == {"optim/skipped_steps": 1.0}
    assert "step 1: update skipped, non-finite gradient" in caplog.text


def test_only_skips_in_a_row_stop_the_run():
    watch = Watch(2, "run/checkpoints")
    for step, skipped in enumerate((1.0, 0.0, 1.0, 0.0)):
        watch.see(step, metrics(skipped), None)
    watch.see(4, metrics(1.0), None)
    with pytest.raises(UserError, match=r"2 updates in a row.*abort_after_skips.*run/checkpoints is whole"):
        watch.see(5, metrics(1.0), None)


def test_rewards_that_fail_are_said_each_time_and_constant_groups_once(caplog):
    watch = Watch(2, "checkpoints")
    for step in range(3):
        watch.see(step, metrics(constant=1.0), "ZeroDivisionError: x")
    assert caplog.text.count("a reward failed: ZeroDivisionError") == 3
    assert caplog.text.count("teaches nothing") == 1


def overflow(scale: float, part: float = 1.0) -> dict[str, float]:
    """A step in which `part` of the updates found the loss scale too large, and nothing else went wrong."""
    return metrics(part, loss=0.0, gradient=0.0) | {"optim/overflow": part, "optim/loss_scale": scale}


def test_the_search_for_a_loss_scale_is_said_and_not_counted(caplog):
    watch = Watch(2, "checkpoints", "float16")
    with caplog.at_level("INFO", logger="fp8rl"):
        for step in range(12):
            assert watch.see(step, overflow(2.0 ** (16 - step)), None) == {"optim/skipped_steps": 0.0}
    assert "step 3: gradients overflow with a loss scale of 8192; it is lowered" in caplog.text
    watch.see(12, metrics(1.0, loss=1.0) | {"optim/overflow": 0.0, "optim/loss_scale": 16.0}, None)
    watch.see(13, overflow(16.0), None)  # ends no row of faults
    with pytest.raises(UserError, match=r"2 updates in a row.*float16 holds nothing above 65504.*bfloat16.*is whole"):
        watch.see(14, overflow(16.0, 0.5) | {"optim/skipped": 1.0, "nonfinite/loss": 0.5}, None)
