"""Skips, failed rewards and constant groups: what is said, and when a run stops."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fp8rl_jax.config.training import TrainerConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.tasks.scores import Scores
from fp8rl_jax.training.watch import LEAST, SPIKE, ArrivalWatch, Stability, Watch, middle


def metrics(skipped: float = 0.0, constant: float = 0.0, **flags: float) -> dict[str, float]:
    return {
        "optim/skipped": skipped,
        "reward/frac_zero_std": constant,
        **{f"nonfinite/{k}": v for k, v in flags.items()},
    }


def scores(failed: int = 0, first_error: str = "ZeroDivisionError: x") -> Scores:
    """Of four completions, the first `failed` of which have no score."""
    values, lost = np.zeros(4, np.float32), np.arange(4) < failed
    return Scores(
        values, {"exact": values}, values > 0, lost, failed, 0, first_error if failed else "", 0.0
    )


def watch_of(skips: int = 9, rewards: int = 9, steps: int = 100, dtype: str = "bfloat16") -> Watch:
    trainer = TrainerConfig(
        steps=steps, abort_after_skips=skips, abort_after_failed_rewards=rewards
    )
    return Watch(trainer, "run/checkpoints", dtype, "run/rewards.log")


GOOD = scores()


def test_skips_are_named_and_counted(caplog):
    watch = watch_of(3)
    assert watch.see(0, metrics(), GOOD) == {"optim/skipped_steps": 0.0}
    assert watch.see(1, metrics(1.0, loss=0.0, gradient=1.0), GOOD) == {"optim/skipped_steps": 1.0}
    assert "step 1: update skipped, non-finite gradient" in caplog.text


def test_only_skips_in_a_row_stop_the_run():
    watch = watch_of(2)
    for step, skipped in enumerate((1.0, 0.0, 1.0, 0.0)):
        watch.see(step, metrics(skipped), GOOD)
    watch.see(4, metrics(1.0), GOOD)
    with pytest.raises(
        UserError, match=r"2 updates in a row.*abort_after_skips.*run/checkpoints is whole"
    ):
        watch.see(5, metrics(1.0), GOOD)


def test_rewards_that_fail_are_said_each_time_and_constant_groups_once(caplog):
    watch = watch_of()
    for step in range(3):
        watch.see(step, metrics(constant=1.0), scores(step + 1))
    watch.see(3, metrics(), GOOD)
    said = [
        record.getMessage() for record in caplog.records if "rewards failed" in record.getMessage()
    ]
    assert said == [
        f"step {step}: {step + 1} of 4 rewards failed: ZeroDivisionError: x" for step in range(3)
    ]
    assert caplog.text.count("teaches nothing") == 1


def test_only_steps_in_a_row_in_which_every_reward_failed_stop_the_run():
    watch = watch_of(rewards=3)
    for step, failed in enumerate((4, 4, 3, 4, 4, 0, 4, 4)):
        watch.see(step, metrics(), scores(failed))
    with pytest.raises(UserError) as fault:
        watch.see(8, metrics(), scores(4))
    assert str(fault.value) == (
        "every reward failed in 3 steps in a row (trainer.abort_after_failed_rewards): "
        "ZeroDivisionError: x; "
        "what rewards print is in run/rewards.log"
    )


def test_a_run_shorter_than_that_stops_where_all_its_steps_failed():
    watch = watch_of(rewards=3, steps=2)
    watch.see(0, metrics(), scores(4))
    with pytest.raises(UserError, match="every reward failed in 2 steps in a row"):
        watch.see(1, metrics(), scores(4))


def test_sides_that_disagree_twice_are_said_once_and_again_once_they_had_agreed(caplog):
    watch = watch_of()
    series = (1.02, 2.2, 1.01, 1.3, 1.06, 1.2, float("nan"), 1.3, 1.07)
    for step, apart in enumerate(series):
        watch.see(step, metrics() | {"mismatch/token_mult_prob_error": apart}, GOOD)
    said = [line for line in caplog.messages if "rollout and trainer disagree" in line]
    assert [line.partition(":")[0] for line in said] == ["step 4", "step 8"]
    assert "mismatch/token_mult_prob_error is 1.06, and above 1.05" in said[0]


def test_a_policy_that_does_not_hear_its_updates_is_said_with_cause_and_remedies(caplog):
    watch = ArrivalWatch()
    #          deaf from step 2 to 5, said at 4; and again from 7 on, said at 9
    series = (math.nan, 0.9, 0.1, 0.12, 0.13, 0.2, 0.6, 0.1, 0.1, 0.1, 0.1)
    for step, arrived in enumerate(series):
        watch.see(step, {"sync/arrived": arrived, "sync/noise": 1.2})
    said = [line for line in caplog.messages if "sync/arrived" in line]
    assert [line.partition(":")[0] for line in said] == ["step 4", "step 9"]
    assert "13 % of the update since the start has reached the policy that is served" in said[0]
    assert "half a step of bfloat16" in said[0] and 'model.dither = "auto"' in said[0]
    caplog.clear()
    watch = ArrivalWatch(adapted=True)  # what is not there for adapters is not advised
    for step in range(3):
        watch.see(step, {"sync/arrived": 0.1, "sync/noise": 1.2})
    (said,) = [line for line in caplog.messages if "sync/arrived" in line]
    assert 'set compute_dtype = "float32" or a larger' in said and "dither" not in said
    caplog.clear()
    watch = ArrivalWatch("float32")
    for step in range(3):
        watch.see(step, {"sync/arrived": 0.1, "sync/noise": 1.2})
    (said,) = [line for line in caplog.messages if "sync/arrived" in line]
    assert "format that they are quantized to" in said and "on both sides" in said


def test_a_first_sync_that_serves_many_times_the_update_is_said_once(caplog):
    watch = ArrivalWatch("float32")
    for step, arrived in enumerate((math.nan, 3.9, 7.1, 64.0, 1.2)):
        watch.see(step, {"sync/arrived": arrived, "sync/noise": 190.0})
    (said,) = [line for line in caplog.messages if "sync/arrived" in line]
    assert said.startswith("step 2: the policy that is served has moved by 7.1 times the update")
    assert "border of two numbers" in said and 'model.dither = "auto"' in said


def overflow(scale: float, part: float = 1.0) -> dict[str, float]:
    """A step in which `part` of the updates found the loss scale too large, and nothing else went
    wrong."""
    return metrics(part, loss=0.0, gradient=0.0) | {
        "optim/overflow": part,
        "optim/loss_scale": scale,
    }


def test_the_search_for_a_loss_scale_is_said_and_not_counted(caplog):
    watch = watch_of(2, dtype="float16")
    with caplog.at_level("INFO", logger="fp8rl"):
        for step in range(12):
            assert watch.see(step, overflow(2.0 ** (16 - step)), GOOD) == {
                "optim/skipped_steps": 0.0
            }
    assert "step 3: gradients overflow with a loss scale of 8192; it is lowered" in caplog.text
    watch.see(12, metrics(1.0, loss=1.0) | {"optim/overflow": 0.0, "optim/loss_scale": 16.0}, GOOD)
    watch.see(13, overflow(16.0), GOOD)  # ends no row of faults
    with pytest.raises(
        UserError,
        match=r"2 updates in a row.*float16 holds nothing above 65504.*bfloat16.*is whole",
    ):
        watch.see(14, overflow(16.0, 0.5) | {"optim/skipped": 1.0, "nonfinite/loss": 0.5}, GOOD)


def seen(values, supervised: bool = True, name: str = "loss") -> list[dict[str, float]]:
    """What is said of each step of a series."""
    watch = Stability(supervised)
    other = {"loss": 1.0} if name != "loss" else {}
    return [watch.see({"optim/skipped": 0.0, **other, name: value}) for value in values]


def noise(steps: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=steps)


def test_planted_spikes_are_counted_and_noise_has_none():
    """On a loss that falls, and on gradient norms that vary by factors."""
    falling = 1 + 4 * np.exp(-np.arange(400) / 60) + 0.05 * noise(400)
    for values, name in ((falling, "loss"), (np.exp(0.5 * noise(400)), "optim/grad_norm")):
        count = f"stability/{name.split('/')[-1]}_spikes"
        assert seen(values, name=name)[-1][count] == 0
        spiked = values.copy()
        spiked[[50, 51, 200, 390]] *= 100
        found = [row[count] for row in seen(spiked, name=name)]
        assert [found[i] for i in (49, 50, 51, 199, 200, 389, 390, 399)] == [0, 1, 2, 2, 3, 3, 4, 4]
        assert seen(values[:31].tolist() + [1e6], name=name)[-1][count] == 0  # too few before


def test_the_rate_of_false_alarms_is_what_is_said():
    """Of normal noise, with the fewest values before: 7 in a million, exactly from the window."""
    draws = np.random.default_rng(0).normal(size=(20_000, LEAST))
    limits = [median + SPIKE * spread for median, spread in map(middle, draws)]
    rate = np.mean([math.erfc(limit / math.sqrt(2)) / 2 for limit in limits])
    assert 2e-6 < rate < 2e-5
    counts = [seen(noise(1000, seed))[-1]["stability/loss_spikes"] for seed in range(5)]
    assert counts == [0] * 5


def test_what_has_no_spread_or_no_level_is_not_counted():
    assert seen([2.0] * 50 + [9.0])[-1]["stability/loss_spikes"] == 0
    found = seen([1.0] * 40 + [math.nan, None, 1.0], supervised=False)[-1]
    assert found == {"stability/loss_spikes": 0.0}


def test_divergence_is_a_loss_that_does_not_come_back():
    falling = 1 + 4 * np.exp(-np.arange(200) / 30) + 0.05 * noise(200)
    cases = {
        "falls": (falling, 0),
        "a spike": (np.where(np.arange(200) == 150, 9, falling), 0),
        "stays up": (np.where(np.arange(200) > 150, 3 + 0.05 * noise(200), falling), 1),
        "from the start": (np.minimum(5 + 0.5 * np.arange(200), 8) + 0.05 * noise(200), 1),
        "learns nothing": (5 + 0.05 * noise(200), 0),
        "not finite": (np.where(np.arange(200) > 150, np.nan, falling), 1),
        "comes back": (np.where((np.arange(200) > 80) & (np.arange(200) < 130), 9, falling), 0),
    }
    for name, (values, diverged) in cases.items():
        assert seen(values)[-1]["stability/diverged"] == diverged, name
    assert max(row["stability/diverged"] for row in seen(cases["comes back"][0])) == 1


def test_a_resumed_run_goes_on_counting():
    values = np.where(np.isin(np.arange(90), (40, 80)), 99, noise(90)).tolist()
    resumed = watch_of()
    resumed.recall({"step": i, "loss": x} for i, x in enumerate(values[:60]))
    for step, value in enumerate(values[60:], 60):
        found = resumed.see(step, metrics() | {"loss": value}, GOOD)
    assert found == {"optim/skipped_steps": 0.0, "stability/loss_spikes": 2.0}
