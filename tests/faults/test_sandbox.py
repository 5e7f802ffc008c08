"""What the sandbox of rewards stops, each mechanism with an attack that succeeds without it: writes,
signals, sockets, memory, the environment. Row F7 of the fault matrix, and the tree's memory of F6."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from faults.started import ROOT, start
from tiny_run import LEARNS, metric_rows, write_run

from fp8rl_jax.config.tasks import RewardConfig, TaskConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.tasks.dataset import Example
from fp8rl_jax.tasks.sandbox import cgroup, processes, strict, worker_process
from fp8rl_jax.tasks.sandbox.pool import RewardPool

if sys.platform != "linux" or strict.missing():
    pytest.skip(f"the strict sandbox needs {strict.missing()}", allow_module_level=True)

from faults import attacks

REWARDS = Path(__file__).with_name("hostile_rewards.py")
EXAMPLE = Example(0, "prompt", "answer", "answer", {"question": "prompt", "answer": "answer"})
# What a kernel may be built or set up without: then the attack fails in any case.
OPTIONAL = (
    "filter: io_uring",
    "filter: user namespace",
    "filter: clone into a user namespace",
    "filter: clone3 into a user namespace",
    "filter: attribute",
    "filter: flags of a file",
    "filter: keys",
    "filter: 32-bit system call",
)


def pool_of(sandbox="strict", function="act", **changes) -> RewardPool:
    settings: dict[str, Any] = {"timeout": 10.0, "num_workers": 1, **changes}
    reward = RewardConfig(f"{REWARDS}:{function}", sandbox=sandbox, **settings)
    return RewardPool(TaskConfig(kind="module", name="m:f", reward=reward))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, list[str]]:
    done = subprocess.run(
        [sys.executable, "-P", attacks.__file__, tmp_path_factory.mktemp("attacks")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", attacks.ATTACKS)
def test_each_mechanism_stops_what_succeeds_without_it(outcomes, name):
    without, whole = outcomes[name]
    assert whole in ("EPERM", "EACCES", "ENOSYS", "SIGSYS")
    if name in OPTIONAL and without != attacks.DONE:
        pytest.skip(f"this kernel has nothing to attack: {without}")
    if name.startswith("capabilities") and os.getuid() != 0:
        pytest.skip("only root has any")
    assert without == attacks.DONE


@pytest.fixture(scope="module")
def pools():
    """A pool of either kind."""
    with pool_of("process") as process, pool_of("strict") as confined:
        yield {"process": process, "strict": confined}


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """What a reward might be after: {name: argument}."""
    home = tmp_path / "home"
    (home / ".config").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    server = socket.create_server(("127.0.0.1", 0))
    victim = subprocess.Popen(["sleep", "1000"])
    yield {
        "home": home / ".bashrc",
        "metrics": tmp_path / "metrics.jsonl",
        "shared": "/dev/shm/fp8rl-attack",
        "port": server.getsockname()[1],
        "pid": victim.pid,
        "trainer": os.getpid(),
    }
    Path("/dev/shm/fp8rl-attack").unlink(missing_ok=True)
    victim.kill()
    victim.wait()
    server.close()


@pytest.mark.parametrize(
    ("verb", "target"),
    [
        ("write", "home"),
        ("write", "metrics"),
        ("write", "shared"),
        ("delete", "metrics"),
        ("chmod", "metrics"),
        ("signal", "pid"),
        ("signal", "trainer"),
        ("connect", "port"),
    ],
)
def test_strict_stops_what_process_lets_happen(pools, outside, fault, verb, target):
    before = outside["metrics"].read_text()
    scores = pools["strict"].score([EXAMPLE] * 2, [f"{verb} {outside[target]}", "score 0.5"])
    assert scores.rewards.tolist() == [0, 0.5] and scores.errors == 1 and scores.seconds < 5
    assert scores.first_error.startswith("PermissionError: ")
    fault("attack", scores.first_error, recovered=scores.seconds, lost="its own sample")
    assert outside["metrics"].read_text() == before and not outside["home"].exists()
    scores = pools["process"].score([EXAMPLE] * 2, [f"{verb} {outside[target]}", "score 0.5"])
    assert scores.rewards.tolist() == [1, 0.5]


def test_strict_hides_the_environment_of_the_trainer_and_lets_files_be_read(pools, outside):
    scores = pools["strict"].score(
        [EXAMPLE] * 2, [f"environment_of {os.getpid()}", f"read {outside['metrics']}"]
    )
    assert scores.rewards.tolist() == [0, 1] and "PermissionError" in scores.first_error


def test_strict_has_a_folder_of_its_own_which_goes_with_the_worker():
    with pool_of() as pool:
        said = pool.score([EXAMPLE], ["scratch"]).first_error
        folder = Path(said.partition("scratch=")[2].split()[0])
        assert folder.name.startswith("fp8rl-reward-") and any(folder.iterdir())
        assert folder.stat().st_mode & 0o077 == 0
    assert not folder.exists()


def test_strict_lets_a_reward_end_what_it_started(pools):
    started = time.monotonic()
    scores = pools["strict"].score([EXAMPLE] * 2, ["forks 3", "forks 3"])
    assert scores.rewards.tolist() == [1, 1] and time.monotonic() - started < 5


def test_strict_with_the_network_reaches_a_server_and_no_more(outside):
    with pool_of(network=True) as pool:
        completions = [f"connect {outside['port']}", f"write {outside['metrics']}"]
        assert pool.score([EXAMPLE] * 2, completions).rewards.tolist() == [1, 0]


def test_strict_is_refused_where_a_mechanism_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(strict, "landlock_abi", lambda: 2)
    with pytest.raises(UserError) as raised:
        pool_of()
    assert str(raised.value) == (
        'task.reward.sandbox = "strict" needs Landlock of ABI 3 (Linux 6.2; this kernel has ABI 2); '
        'set sandbox = "process", which isolates faults and not malice'
    )
    monkeypatch.setattr(strict, "landlock_abi", lambda: 0)
    with pytest.raises(UserError, match="this kernel has none, or it is switched off"):
        pool_of()
    monkeypatch.setattr(strict.platform, "machine", lambda: "abacus")
    with pytest.raises(UserError, match="needs seccomp filters, .*this is abacus"):
        pool_of()
    monkeypatch.undo()
    # what the trainer finds and the worker is refused, as a container may
    (tmp_path / "sitecustomize.py").write_text(
        "import platform\nplatform.machine = lambda: 'abacus'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match='sandbox = "strict" is not possible here .*"process"'):
        pool_of().wait_until_ready()


def test_an_older_landlock_is_asked_for_what_it_has():
    asked = {abi: strict.policy(False, abi) for abi in range(3, 8)}
    assert [taken.tcp > 0 for taken in asked.values()] == [False, True, True, True, True]
    assert [taken.scopes > 0 for taken in asked.values()] == [False, False, False, True, True]
    assert [bool(taken.files >> 15) for taken in asked.values()] == [False, False, True, True, True]
    signals = [any(rule.call == "kill" for rule in taken.calls) for taken in asked.values()]
    assert signals == [True, True, True, False, False]
    for taken in asked.values():
        names = [rule.call for rule in taken.calls]
        assert len(names) == len(set(names)), "the second rule of a call is never met"
    assert strict.policy(True, 7).tcp == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"network": True}, 'task.reward.network = true belongs to task.reward.sandbox = "strict"'),
        ({"sandbox": "off", "environment": ("A",)}, "have the whole environment; take it out"),
        ({"environment": ("A=1",)}, "'A=1' is no name of a variable"),
        ({"environment": ("FP8RL_NOT_SET",)}, "names FP8RL_NOT_SET, which is not set"),
    ],
)
def test_settings_that_say_nothing_are_refused(changes, message):
    with pytest.raises(UserError) as raised:
        pool_of(**{"sandbox": "process", **changes})
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_secrets_do_not_reach_rewards_unless_they_are_named(monkeypatch):
    monkeypatch.setenv("FP8RL_TEST_KEY", "secret")
    monkeypatch.setenv("LC_TIME", "C.UTF-8")
    seen = ["variable FP8RL_TEST_KEY", "variable PATH", "variable LC_TIME"]
    for changes, expected in (
        ({"sandbox": "process"}, [0, 1, 1]),
        ({"sandbox": "strict"}, [0, 1, 1]),
        ({"sandbox": "process", "environment": ("FP8RL_TEST_KEY",)}, [1, 1, 1]),
        ({"sandbox": "off"}, [1, 1, 1]),
    ):
        with pool_of(**changes) as pool:
            assert pool.score([EXAMPLE] * 3, seen).rewards.tolist() == expected


def test_the_page_lists_the_variables_that_rewards_get():
    page = (ROOT / "docs" / "sandbox.md").read_text()
    assert [name for name in worker_process.PASSED_ON if f"`{name}`" not in page] == []


@pytest.mark.parametrize("bounded", [True, False], ids=["by a group", "looked at"])
def test_the_memory_of_a_whole_tree_is_bounded(fault, bounded, tmp_path, monkeypatch):
    """Four processes, each within its limit, all together beyond it."""
    if bounded and not cgroup.available():
        pytest.skip("no control group may be made here")
    if not bounded:
        (tmp_path / "sitecustomize.py").write_text(
            "from fp8rl_jax.tasks.sandbox import cgroup\n\ncgroup.make = lambda: None\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
    with pool_of("process", memory_limit_mib=600, timeout=60.0) as pool:
        supervisor = pool._dispatcher.workers[0].process.pid
        started = time.monotonic()
        job = pool.submit([EXAMPLE] * 2, ["children 4 300", "score 0.5"])
        most = 0
        while not job.done():
            most = max(most, processes.held(processes.descendants(supervisor)))
            time.sleep(0.002)
        scores = job.result()
        assert not Path(f"/proc/{supervisor}").exists()
        took = time.monotonic() - started
        # what no process has mapped only a group counts
        mapped = pool.score([EXAMPLE], ["files_in_memory 3 300"])
    assert scores.rewards.tolist() == [0, 0.5] and took < 30
    assert mapped.rewards.tolist() == [0.0 if bounded else 1.0]
    assert mapped.first_error == (scores.first_error if bounded else "")
    assert scores.first_error == (
        "the worker held more than task.reward.memory_limit_mib = 600 with what it started"
    )
    lost = f"its own sample (at most {most >> 20} MiB were held)"
    fault("tree", scores.first_error, recovered=took, lost=lost)
    with pool_of("off", memory_limit_mib=600, timeout=60.0) as pool:
        assert pool.score([EXAMPLE], ["children 4 300"]).rewards.tolist() == [1]


def test_memory_that_processes_share_is_counted_once():
    with pool_of("process", memory_limit_mib=600) as pool:
        assert pool.score([EXAMPLE], ["share 8 200"]).rewards.tolist() == [1]


def test_off_bounds_neither_files_nor_processes(tmp_path):
    limits = {"file_limit_mib": 1, "max_processes": 2, "memory_limit_mib": 64}
    completions = [f"large_file {tmp_path}/large", "forks 8", "allocate 256"]
    with pool_of("process", **limits) as pool:
        assert pool.score([EXAMPLE] * 3, completions).errors == 3
    with pool_of("off", **limits) as pool:
        assert pool.score([EXAMPLE] * 3, completions).errors == 0


@pytest.mark.slow
def test_a_run_whose_reward_attacks_it_goes_on_as_if_nothing_were(tmp_path):
    """Files of the run, the home folder, the trainer and the network, at every sample."""
    reward = tmp_path / "attack.py"
    reward.write_text(
        "import os, signal, socket\n"
        "def attack(completion, **_):\n"
        "    def met(action):\n"
        "        try:\n"
        "            action()\n"
        "            return 1.0\n"
        "        except OSError:\n"
        "            return 0.0\n"
        f"    files = [{str(tmp_path / 'run')!r} + '/metrics.jsonl', os.path.expanduser('~/.fp8rl')]\n"
        "    trainer = int(open(f'/proc/{os.getppid()}/stat').read().rpartition(')')[2].split()[1])\n"
        "    tries = [lambda file=file: open(file, 'a') for file in files]\n"
        "    tries += [lambda: os.kill(trainer, signal.SIGKILL), socket.socket]\n"
        "    return sum(map(met, tries)) + completion.count('a') / 100\n"
    )
    settings = {"function": f"{reward}:attack", "sandbox": "strict"}
    run = start(
        write_run(tmp_path, LEARNS, {"task": {"reward": settings}, "trainer": {"steps": 2}}),
        tmp_path / "run",
    )
    assert run.end() == 0, run.said
    rows = metric_rows(tmp_path / "run")
    assert len(rows) == 2 and all(row["reward/errors"] == 0 for row in rows)
    assert all(row["rewards/attack/mean"] < 1 for row in rows)
