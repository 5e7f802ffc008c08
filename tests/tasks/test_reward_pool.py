"""What a reward may do wrong, and what it must cost: its own sample, a count, and never the run."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8rl_jax.config.tasks import RewardConfig, TaskConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.tasks.dataset import Example, load_splits
from fp8rl_jax.tasks.sandbox import pool as pools
from fp8rl_jax.tasks.sandbox import processes
from fp8rl_jax.tasks.sandbox.pool import RewardPool

LINUX = pytest.mark.skipif(
    sys.platform != "linux", reason="needs /proc, RLIMIT_AS and PR_SET_PDEATHSIG"
)
REWARDS = Path(__file__).with_name("reward_examples.py")
EXAMPLE = Example(
    0, "prompt", "answer", "answer", {"question": "prompt", "answer": "answer", "metadata": {}}
)


def pool_of(function, log=None, **changes):
    settings: dict[str, Any] = {
        "timeout": 0.5,
        "num_workers": 1,
        "memory_limit_mib": 512,
        **changes,
    }
    return RewardPool(
        TaskConfig(
            kind="module", name="m:f", reward=RewardConfig(f"{REWARDS}:{function}", **settings)
        ),
        log,
    )


@pytest.fixture(scope="module")
def faulty():
    with pool_of("faulty") as pool:
        yield pool


def alive(pid):
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children():
    """Process ids of this process's children, zombies included (Linux; elsewhere none)."""
    return set(processes.children(os.getpid()))


def gone(pid, seconds=5.0):
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def test_rewards_come_back_in_order_as_float32():
    with pool_of("length", num_workers=2) as pool:
        scores = pool.score([EXAMPLE] * 50, ["a" * n for n in range(50)])
    assert scores.rewards.dtype == np.float32
    np.testing.assert_array_equal(scores.rewards, np.float32(np.arange(50) / 10))
    np.testing.assert_array_equal(scores.correct, np.arange(50) >= 10)
    assert (
        scores.errors == scores.timeouts == 0
        and scores.first_error == ""
        and not scores.failed.any()
    )


def test_completions_belong_to_their_prompt():
    first, second = (Example(0, "p", answer, answer, {}) for answer in ("1", "2"))
    with RewardPool(
        TaskConfig(kind="module", name="m:f", reward=RewardConfig(num_workers=1))
    ) as pool:
        scores = pool.score([first, second], ["1", "2", "1", "1", "2", "2"])
        with pytest.raises(ValueError, match="5 completions are no multiple of 2 examples"):
            pool.score([first, second], ["1"] * 5)
        assert pool.score([], []).rewards.shape == (0,)
    assert scores.rewards.tolist() == [1, 0, 1, 0, 1, 1]


def test_without_partial_credit_rewards_are_zero_or_one():
    with pool_of("length", partial_credit=False) as pool:
        scores = pool.score([EXAMPLE], ["a" * 9, "a" * 10, "a" * 11])
    assert scores.rewards.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("completion", "error"),
    [
        ("raise", r"ValueError: no such answer \(reward_examples.py:\d+\)"),
        ("value none", "TypeError: the reward returned NoneType"),
        ("value nan", "ValueError: the reward returned nan"),
        ("value inf", "ValueError: the reward returned -inf"),
        ("value huge", r"ValueError: the reward returned 1e\+300"),
        ("value text", "TypeError: the reward returned str"),
        ("value list", "TypeError: the reward returned list"),
        ("exit", "SystemExit: 1"),
        ("die", "the worker exited with status 3"),
        ("abort", "the worker was killed by SIGSEGV"),
        pytest.param("allocate", "MemoryError", marks=LINUX),
    ],
)
def test_an_error_costs_its_own_sample(faulty, completion, error):
    scores = faulty.score([EXAMPLE] * 5, ["1", "0.5", completion, "0.75", "1"])
    assert scores.rewards.tolist() == [1, 0.5, 0, 0.75, 1]
    assert scores.failed.tolist() == [False, False, True, False, False]
    assert (scores.errors, scores.timeouts) == (1, 0)
    assert re.search(error, scores.first_error)


@pytest.mark.parametrize("completion", ["sleep", "ignore_sigterm", "regex"])
def test_a_hang_is_killed_and_costs_its_own_sample(faulty, completion):
    started = time.monotonic()
    scores = faulty.score([EXAMPLE] * 4, ["1", completion, "0.5", "1"])
    assert time.monotonic() - started < 0.5 + 2.0
    assert scores.rewards.tolist() == [1, 0, 0.5, 1]
    assert (scores.errors, scores.timeouts) == (0, 1)
    assert scores.first_error == "no score after 0.5 s"
    assert scores.metrics()["reward/timeouts"] == 1


def test_the_timeout_is_for_one_sample_not_for_the_batch():
    with pool_of("slow") as pool:
        scores = pool.score([EXAMPLE] * 8, ["0.2"] * 8)
    assert scores.rewards.tolist() == [1.0] * 8 and scores.seconds > 1.5


@LINUX
def test_what_a_reward_started_is_killed_with_it(faulty, tmp_path):
    assert faulty.score([EXAMPLE], [f"child {tmp_path}/pid"]).timeouts == 1
    assert gone(int((tmp_path / "pid").read_text()))


def test_output_does_not_block_and_input_is_empty(faulty):
    assert faulty.score([EXAMPLE] * 2, ["flood", "stdin"]).rewards.tolist() == [0.25, 0]


def test_what_a_reward_prints_goes_into_the_log_and_not_to_the_console(tmp_path, capfd):
    log = tmp_path / "run" / "rewards.log"
    with pool_of("faulty", log) as pool:
        assert pool.score([EXAMPLE], ["1"]).rewards.tolist() == [1] and not log.exists()
        assert pool.score([EXAMPLE] * 2, ["say hello", "say_and_hang bye"]).rewards.tolist() == [
            0.5,
            0,
        ]
        assert pool.score([EXAMPLE], ["say again"]).rewards.tolist() == [0.5]  # by another worker
    said = ["hello", "HELLO", "child says hello", "bye", "again", "AGAIN", "child says again"]
    assert log.read_text().splitlines() == said
    assert capfd.readouterr() == ("", "")
    with pool_of("faulty", log) as pool:
        pool.score([EXAMPLE], ["say more"])
    assert log.read_text().splitlines() == [*said, "more", "MORE", "child says more"]


def test_the_log_keeps_the_newest_and_stays_small(tmp_path, monkeypatch):
    monkeypatch.setattr(pools, "LOG_BYTES", 2**20)
    log = tmp_path / "rewards.log"
    with pool_of("faulty", log, timeout=10.0) as pool:  # 41 MB
        assert pool.score([EXAMPLE] * 2, ["flood", "say last"]).rewards.tolist() == [0.25, 0.5]
    older = tmp_path / "rewards.log.1"
    assert 2**20 <= older.stat().st_size < 2**20 + 2**16 and log.stat().st_size < 2**20 + 2**16
    assert sorted(tmp_path.iterdir()) == [log, older]
    assert (older.read_text() + log.read_text()).endswith("last\nLAST\nchild says last\n")


def test_a_log_that_cannot_be_written_costs_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with pool_of("faulty", tmp_path / "file" / "rewards.log") as pool:
        assert pool.score([EXAMPLE] * 3, ["say a", "say b", "1"]).rewards.tolist() == [0.5, 0.5, 1]
    assert caplog.text.count("what rewards print cannot be written") == 1


def test_a_worker_holds_neither_jax_nor_the_main_module(faulty):
    assert faulty.score([EXAMPLE], ["modules"]).rewards.tolist() == [1]


def test_workers_are_kept(faulty):
    pids = faulty.score([EXAMPLE] * 40, ["pid"] * 40).rewards
    assert len(set(pids)) == 1
    assert faulty.score([EXAMPLE], ["pid"]).rewards[0] == pids[0]


def test_many_simultaneous_faults_are_all_counted(faulty):
    kinds = ["1", "raise", "die", "value nan"]
    scores = faulty.score([EXAMPLE] * 24, kinds * 6)
    assert scores.rewards.tolist() == [1, 0, 0, 0] * 6 and scores.errors == 18


def test_scoring_overlaps_with_other_work():
    with pool_of("slow") as pool:
        started = time.monotonic()
        futures = [pool.submit([EXAMPLE], ["0.3"]) for _ in range(2)]
        assert time.monotonic() - started < 0.2
        assert [future.result().rewards.tolist() for future in futures] == [[1], [1]]


def test_reasoning_gym_scores_with_its_own_scorer():
    task = TaskConfig(
        name="chain_sum",
        args={"max_terms": 2},
        train_size=32,
        eval_size=8,
        reward=RewardConfig(num_workers=1),
    )
    pool = RewardPool(task)
    train, _ = load_splits(task)
    with pool:
        right = pool.score(train.examples, [f" {example.answer}.0\n" for example in train.examples])
        wrong = pool.score(train.examples, ["unknown"] * 32)
        pool.score(train.examples, ["1"] * 256)
        fast = min(pool.score(train.examples, ["1"] * 256).seconds for _ in range(5))
    assert right.rewards.tolist() == [1] * 32 and wrong.rewards.tolist() == [0] * 32
    # Generous: 3 ms on an idle machine.
    assert fast < 0.25


def test_a_scorer_that_raises_on_text_costs_its_sample():
    task = TaskConfig(
        name="prime_factorization", train_size=4, eval_size=1, reward=RewardConfig(num_workers=1)
    )
    train, _ = load_splits(task)
    with RewardPool(task) as pool:
        scores = pool.score(train.examples, ["banana"] * 4)
    assert (
        scores.rewards.tolist() == [0] * 4
        and scores.errors == 4
        and "ValueError" in scores.first_error
    )


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (TaskConfig(reward=RewardConfig("no_such_module:f")), "No module named 'no_such_module'"),
        (TaskConfig(reward=RewardConfig(f"{REWARDS}:batch_two_arguments")), "is called with"),
        (TaskConfig(name="chain_sums"), "did you mean chain_sum?"),
        (TaskConfig(reward=RewardConfig(timeout=-1.0)), "task.reward.timeout"),
    ],
)
def test_a_reward_that_does_not_load_is_refused_before_training(task, message):
    before = children()
    with pytest.raises(UserError) as raised, RewardPool(task):
        pytest.fail("the pool started")
    assert message in str(raised.value) and "\n" not in str(raised.value)
    assert children() <= before


def test_a_module_that_ends_its_process_is_refused(tmp_path):
    (tmp_path / "ends.py").write_text("import os\nos._exit(7)\n")
    with pytest.raises(UserError, match="exited with status 7 while it imported"):
        RewardPool(TaskConfig(reward=RewardConfig(f"{tmp_path}/ends.py:f"))).wait_until_ready()


def test_workers_that_cannot_be_replaced_end_in_an_error(tmp_path):
    reward = tmp_path / "vanishes.py"
    reward.write_text("import os\ndef f(**_): os._exit(1)\n")
    with RewardPool(
        TaskConfig(kind="module", name="m:f", reward=RewardConfig(f"{reward}:f", num_workers=1))
    ) as pool:
        reward.unlink()
        with pytest.raises(UserError, match="there is no file"):
            pool.score([EXAMPLE] * 2, ["", ""])
        with pytest.raises(UserError, match="there is no file"):
            pool.score([EXAMPLE], [""])


@LINUX
def test_closing_leaves_no_process_and_ends_waiting():
    before = children()
    pool = pool_of("faulty", timeout=60.0, num_workers=2)
    pool.wait_until_ready()
    waiting = pool.submit([EXAMPLE] * 2, ["sleep", "ignore_sigterm"])
    pids = {worker.process.pid for worker in pool._dispatcher.workers}
    time.sleep(0.2)
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        waiting.result(timeout=1)
    with pytest.raises(RuntimeError, match="closed"):
        pool.score([EXAMPLE], ["1"])
    assert len(pids) == 2 and not any(alive(pid) for pid in pids)
    assert children() <= before


@LINUX
def test_workers_die_with_the_trainer(tmp_path):
    script = tmp_path / "trainer.py"
    # No `if __name__ == "__main__"`: a worker must not run this file again.
    script.write_text(
        textwrap.dedent(f"""
        import sys, time
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_reward_pool import EXAMPLE, pool_of
        pool = pool_of("faulty", timeout=60.0, num_workers=2)
        pool.wait_until_ready()
        pool.submit([EXAMPLE], ["ignore_sigterm"])
        time.sleep(0.2)
        print(*(worker.process.pid for worker in pool._dispatcher.workers), flush=True)
        time.sleep(60)
        """)
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    trainer = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment
    )
    with trainer:
        assert trainer.stdout is not None
        pids = [int(pid) for pid in trainer.stdout.readline().split()]
        assert len(pids) == 2 and all(alive(pid) for pid in pids)
        trainer.send_signal(signal.SIGKILL)
    assert all(gone(pid) for pid in pids)
