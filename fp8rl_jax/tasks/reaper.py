"""Linux process trees: to adopt what a reward starts, to count it, and to end it.

A process that calls setsid, or whose parent exits at once (a daemon), leaves its process group and
its parent, but not its nearest ancestor that is a "child subreaper": the kernel makes it that one's
child. So a subreaper without children has no descendants, which `waitid` tells exactly.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make this process the parent of every descendant that loses its own."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Be killed when the thread that started this process ends, however it ends."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def children(pid: int) -> list[int]:
    """Process ids of the children of `pid`, zombies included; empty where there is no such
    process."""
    if not _HAS_CHILDREN_FILES:
        return [child for child, parent in _parents().items() if parent == pid]
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except FileNotFoundError:
        return found
    for thread in threads:
        # a thread may end meanwhile; its children are then another's
        with (
            suppress(FileNotFoundError, ProcessLookupError),
            open(f"/proc/{pid}/task/{thread}/children") as file,
        ):
            found += map(int, file.read().split())
    return found


def descendants(pid: int, spared: frozenset[int] = frozenset()) -> list[int]:
    """Children of `pid`, their children, and so on; those in `spared` are left out with all below
    them."""
    found, waiting = [], [pid]
    while waiting:
        below = [child for child in children(waiting.pop()) if child not in spared]
        found += below
        waiting += below
    return found


def has_children() -> bool:
    """Whether this process has a child, a zombie included."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def kill_descendants(spared: frozenset[int] = frozenset(), seconds: float = 5.0) -> bool:
    """Kill and reap what this process, a subreaper, has below it, again and again until nothing is
    left.

    Args:
        spared: process ids to leave alone, with what they started.
        seconds: to give up after; a process in an uninterruptible system call, or of another user,
            does not die.

    Returns:
        Whether nothing is left.
    """
    deadline = time.monotonic() + seconds
    while has_children():
        strays = descendants(os.getpid(), spared)
        # The list may miss a process while it changes; without children at all nothing can have
        # been missed.
        if not strays and spared:
            return True
        if time.monotonic() > deadline:
            return False
        kill_all(strays, spared)
        for pid in strays:
            with suppress(ChildProcessError):  # somebody else's child: it will be adopted
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.001)
    return True


def kill_all(pids: Iterable[int], spared: Iterable[int] = ()) -> None:
    """SIGKILL to these processes, first to their process groups where neither this process nor a
    spared one is a member: a fork cannot escape a signal to its group."""
    for group in _groups(pids) - _groups(spared) - {os.getpgrp()}:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _groups(pids: Iterable[int]) -> set[int]:
    found = set()
    for pid in pids:
        with suppress(ProcessLookupError):
            found.add(os.getpgid(pid))
    return found


def prctl(option: int, value: int) -> None:
    """The system call; raises OSError where it fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    if (
        libc.prctl(
            option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)
        )
        != 0
    ):
        raise OSError(ctypes.get_errno(), f"prctl({option}): {os.strerror(ctypes.get_errno())}")


def _parents() -> dict[int, int]:
    """{process: its parent} of the whole machine."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{name}/stat") as file:
            # "pid (command) state parent ...", and a command may hold spaces and parentheses
            found[int(name)] = int(file.read().rpartition(")")[2].split()[1])
    return found


# a kernel built without CONFIG_PROC_CHILDREN has none
_HAS_CHILDREN_FILES = os.path.exists("/proc/thread-self/children")
