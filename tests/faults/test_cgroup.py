"""Control groups: where one is made, and what is written there. That the kernel holds a tree to it is
tried in test_sandbox.py; the files of v2 stand in a folder here, as no machine has both versions."""

from __future__ import annotations

import os
import sys

import pytest

from fp8rl_jax.tasks.sandbox import cgroup

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
SCOPE = "user.slice/run-1.scope"


@pytest.fixture
def unified(tmp_path, monkeypatch):
    """A machine of v2 alone, in which this process is in a scope; says what is written."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mounts").write_text(
        "proc /proc proc rw 0 0\ncgroup2 /sys/fs/cgroup cgroup2 rw,nsdelegate 0 0\n"
    )
    (tmp_path / "proc/self/cgroup").write_text(f"0::/{SCOPE}\n")
    scope = tmp_path / "sys/fs/cgroup" / SCOPE
    scope.mkdir(parents=True)
    (scope / "cgroup.controllers").write_text("cpu memory pids\n")
    (scope / "cgroup.subtree_control").write_text("\n")
    (scope / "cgroup.procs").write_text("41\n42\n")
    monkeypatch.setattr(os, "getxattr", lambda path, name: {"user.delegate": b"1"}[name])
    return tmp_path, scope


def test_a_delegated_group_is_set_up_and_a_worker_has_one_below_it(unified):
    root, scope = unified
    group = cgroup.make(root)
    assert group == cgroup.Group(scope / f"fp8rl-reward-{os.getpid()}", 2)
    # what was in it moved down, one after the other, before it hands controllers down
    assert (scope / "fp8rl-run/cgroup.procs").read_text() == "42"
    assert (scope / "cgroup.subtree_control").read_text() == "+memory"
    (group.path / "memory.current").write_text("1000\n")
    group.allow(400)
    assert not (group.path / "memory.swap.max").exists()  # a kernel that does not count swap
    (group.path / "memory.swap.max").write_text("max\n")
    assert group.take(77) and (group.path / "cgroup.procs").read_text() == "77"
    group.allow(500)
    assert (group.path / "memory.max").read_text() == "1500"
    assert (group.path / "memory.swap.max").read_text() == "0"
    for count in (0, 1):
        (group.path / "memory.events").write_text(f"low 0\nmax 7\noom 2\noom_kill {count}\n")
        assert group.has_killed() == bool(count)


def test_a_run_that_has_moved_makes_its_groups_beside_itself(unified):
    root, scope = unified
    (scope / "fp8rl-run").mkdir()
    (scope / "cgroup.subtree_control").write_text("memory\n")
    (root / "proc/self/cgroup").write_text(f"0::/{SCOPE}/fp8rl-run\n")
    group = cgroup.make(root)
    assert group is not None and group.path.parent == scope
    assert (scope / "cgroup.procs").read_text() == "41\n42\n"


def test_a_group_that_nobody_delegated_is_left_alone(unified, monkeypatch):
    root, scope = unified

    def missing(path, name):
        raise OSError(61, "No data available")

    monkeypatch.setattr(os, "getxattr", missing)
    assert cgroup.make(root) is None and cgroup.available(root) == ""
    assert (scope / "cgroup.procs").read_text() == "41\n42\n"
    assert not (scope / "fp8rl-run").exists()
    (scope / "cgroup.controllers").write_text("cpu\n")
    assert cgroup.make(root) is None


def test_what_killed_supervisors_left_is_taken_away(unified):
    root, scope = unified
    for process in (50, 51):
        (scope / f"fp8rl-reward-{process}").mkdir()
    (root / "proc/51").mkdir()
    assert cgroup.available(root) == "cgroup v2"
    assert [path.name for path in scope.glob("fp8rl-reward-*")] == ["fp8rl-reward-51"]
