"""Rewards that fail (row F5 of the fault matrix), that hang, multiply or end (F6), and workers that
answer what they should not: each costs its own sample, in bounded time, and leaves no process."""

from __future__ import annotations

import ast
import gc
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults.started import ROOT

from fp8rl_jax.config.tasks import RewardConfig, TaskConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.tasks.dataset import Example
from fp8rl_jax.tasks.sandbox import pool as pools
from fp8rl_jax.tasks.sandbox import processes
from fp8rl_jax.tasks.sandbox.pool import RewardPool

REWARDS = Path(__file__).with_name("hostile_rewards.py")
EXAMPLE = Example(0, "prompt", "answer", "answer", {"question": "prompt", "answer": "answer"})
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="limits need Linux")
TIMEOUT = 1.0


def pool_of(function="act", **changes) -> RewardPool:
    settings: dict[str, Any] = {"timeout": TIMEOUT, "num_workers": 1, "memory_limit_mib": 512}
    reward = RewardConfig(f"{REWARDS}:{function}", **(settings | changes))
    return RewardPool(TaskConfig(kind="module", name="m:f", reward=reward))


@pytest.fixture(
    scope="module", params=["process", "strict"] if sys.platform == "linux" else ["off"]
)
def pool(request):
    with pool_of(sandbox=request.param) as pool:
        pool.score([EXAMPLE], ["score 1"])
        yield pool


def check_cost(pool: RewardPool, completion: str, error: str, seconds: float) -> tuple[str, float]:
    """One of four samples fails with `error`, within `seconds` and the start of another worker; no
    process is left of its own. Gives the error, and seconds until the batch was whole."""
    before = {worker.process.pid for worker in pool._dispatcher.workers}
    started = time.monotonic()
    completions = ["score 0.25", completion, "score 0.5", "score 1"]
    scores = pool.score([EXAMPLE] * 4, completions)
    took = time.monotonic() - started
    assert took < seconds + 10  # the start of another worker, on a busy machine
    assert scores.rewards.tolist() == [0.25, 0, 0.5, 1]
    assert scores.failed.tolist() == [False, True, False, False]
    assert re.search(error, scores.first_error), scores.first_error
    # a sample that failed has no part in the mean
    assert scores.metrics()["rewards/act/mean"] == pytest.approx(7 / 12)
    now = {worker.process.pid for worker in pool._dispatcher.workers}
    if sys.platform == "linux":
        assert not any(Path(f"/proc/{pid}").exists() for pid in before - now)
        assert len(processes.descendants(next(iter(now)))) == 1
    return scores.first_error, took


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("raise no", r"^ValueError: no \(hostile_rewards.py:\d+\)$"),
        ("return none", "returned NoneType instead of a number"),
        ("return nan", "returned nan"),
        ("return inf", "returned inf"),
        ("return huge", "1e\\+15 is the most"),
        ("return text", "returned str instead of a number"),
    ],
)
def test_a_reward_that_gives_no_number(pool, kind, error, fault):
    said, took = check_cost(pool, kind, error, seconds=1)
    fault("no number", said, recovered=took, lost="its own sample")


def test_a_large_reward_is_a_reward(pool):
    assert pool.score([EXAMPLE], ["score 1e9"]).rewards.tolist() == [np.float32(1e9)]


@LINUX
@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("sleep 1000", "^no score after 1 s$"),
        ("algebra", "^no score after 1 s$|^MemoryError"),
        ("stubborn", "^no score after 1 s$"),
        ("forks 1000", r"^BlockingIOError: \[Errno 11\]|^no score after 1 s$"),
        ("allocate 51200", "^MemoryError"),
        ("exit 3", "^the worker exited with status 3$"),
    ],
)
def test_a_reward_that_hangs_multiplies_or_ends(pool, kind, error, fault):
    said, took = check_cost(pool, kind, error, seconds=TIMEOUT + 1)
    fault("hangs", said, recovered=took, lost="its own sample")


def test_a_flood_of_output_does_not_hold_a_reward_up(pool):
    started = time.monotonic()
    scores = pool.score([EXAMPLE], ["flood"])
    assert scores.timeouts == (scores.seconds > TIMEOUT) and time.monotonic() - started < 12


@pytest.mark.parametrize("workers", [1, 2])
def test_rewards_that_always_hang_cost_seconds(workers, fault):
    with pool_of(num_workers=workers, timeout=0.3) as pool:
        started = time.monotonic()
        with pytest.raises(UserError) as raised:
            pool.score([EXAMPLE] * 512, ["sleep 1000"] * 512)
        detected = time.monotonic() - started
        assert detected < 20
    fault("hangs always", str(raised.value), status=2, detected=detected, lost="the step")
    assert str(raised.value) == (
        "the rewards hang: 4 workers were killed at their first sample, and none has ever given a "
        "score; mend the reward, or raise task.reward.timeout = 0.3 if it is slow at first"
    )


def test_a_batch_that_hangs_at_first_has_the_time_of_one_sample():
    with pool_of("batch", timeout=0.5, batch_size=64) as pool:
        scores = pool.score([EXAMPLE] * 64, ["hang"] + ["score 1"] * 63)
    assert scores.first_error == "no score after 0.5 s" and scores.seconds < 0.5 + 10
    assert scores.rewards.tolist() == [0] + [1] * 63


def test_a_worker_that_does_not_start_again_costs_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr(pools, "_LEAST_START", 0.5)
    monkeypatch.setattr(pools, "_START_AGAIN", 1.5)
    monkeypatch.setenv("FP8RL_TEST_IMPORTED", str(tmp_path / "imported"))
    with pool_of(environment=("FP8RL_TEST_IMPORTED",)) as pool:
        started = time.monotonic()
        with pytest.raises(UserError, match=r"took more than \d+ s while it imported"):
            pool.score([EXAMPLE] * 2, ["exit 1", "score 1"])
        assert time.monotonic() - started < 30


@LINUX
@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("noise", "^the worker sent something that is no JSON$"),
        ("nan", "^the worker sent something that is no JSON$"),
        ("nested", "^the worker sent something that is no JSON$"),
        ("infinity", "^the worker sent something that is no answer$"),
        ("integer", "^the worker sent something that is no answer$"),
        ("object", "^the worker sent something that is no answer$"),
        ("two", "^the worker sent something that is no answer$"),
        ("truth", "^the worker sent something that is no answer$"),
        ("endless", "^the worker sent more than an answer may have$"),
    ],
)
def test_a_worker_that_says_what_is_no_answer(pool, what, error):
    check_cost(pool, f"say {what}", error, seconds=TIMEOUT + 1)


@LINUX
def test_a_worker_that_answers_unasked(pool):
    """It can lie about its samples, and about no others."""
    scores = pool.score([EXAMPLE], ["say twice"])
    assert scores.rewards.tolist() == [1]
    assert pool.score([EXAMPLE] * 2, ["score 0.5", "score 0.25"]).rewards.tolist() == [0.5, 0.25]


@LINUX
def test_a_pickle_from_a_worker_is_not_loaded(pool, tmp_path):
    check_cost(pool, f"say pickle {tmp_path}/made", "^the worker sent", seconds=TIMEOUT + 1)
    gc.collect()
    assert not (tmp_path / "made").exists()


def test_only_workers_load_pickles():
    """And the processes of an ablation, what it was given in Python."""
    found = set()
    for path in (ROOT / "fp8rl_jax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "attr", getattr(node, "id", ""))
            owner = ast.unparse(node.value) if isinstance(node, ast.Attribute) else ""
            if name == "Unpickler" or (name in ("load", "loads") and "pickle" in owner):
                found.add(path.relative_to(ROOT / "fp8rl_jax").as_posix())
    assert found == {"tasks/sandbox/worker.py", "ablation/process.py"}


def test_an_error_is_a_line_that_a_terminal_does_not_obey():
    with pool_of("terminal") as pool:
        error = pool.score([EXAMPLE], [""]).first_error
    assert error.isprintable() and "ValueError: \ufffd]0;title" in error
    assert error.encode() and os.linesep not in error
