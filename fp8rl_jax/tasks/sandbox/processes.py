"""Linux processes: to adopt what a reward starts, to count and weigh it, and to end it.

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

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

# a kernel built without CONFIG_PROC_CHILDREN has none
_HAS_CHILDREN_FILES = os.path.exists("/proc/thread-self/children")


def adopt_orphans() -> None:
    """Make this process the parent of every descendant that loses its own."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Let this process be killed when the thread that started it ends, however that ends."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def children(pid: int) -> list[int]:
    """List the children of `pid`, zombies included; empty where there is no such process."""
    if not _HAS_CHILDREN_FILES:
        return [child for child, parent in _parents().items() if parent == pid]
    pids: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except FileNotFoundError:
        return pids
    for thread in threads:
        # a thread may end meanwhile; its children are then another's
        with (
            suppress(FileNotFoundError, ProcessLookupError),
            open(f"/proc/{pid}/task/{thread}/children") as file,
        ):
            pids += map(int, file.read().split())
    return pids


def descendants(pid: int, spared: frozenset[int] = frozenset()) -> list[int]:
    """List the children of `pid`, their children, and so on.

    Those in `spared` are left out with all below them.
    """
    pids, waiting = [], [pid]
    while waiting:
        below = [child for child in children(waiting.pop()) if child not in spared]
        pids += below
        waiting += below
    return pids


def memory_above(pids: Iterable[int], limit: int) -> bool:
    """Say whether these processes hold more than `limit` bytes together.

    Counted is what they have in memory and no file can give back: private and shared, each page
    once. A process that ends meanwhile, or whose memory nobody may see, counts as the kernel lets
    it.
    """
    pids = list(pids)
    # Pages that several hold are counted by each of them here; the exact sum takes a walk through
    # their page tables.
    if sum(_resident(pid, "status", "RssAnon:", "RssShmem:") or 0 for pid in pids) <= limit:
        return False
    return held(pids) > limit


def held(pids: Iterable[int]) -> int:
    """Return the bytes that `memory_above` compares."""
    total = 0
    for pid in pids:
        size = _resident(pid, "smaps_rollup", "Pss_Anon:", "Pss_Shmem:")
        # a process may hide its page tables, and not its size
        total += _resident(pid, "status", "RssAnon:", "RssShmem:") or 0 if size is None else size
    return total


def _resident(pid: int, file: str, *keys: str) -> int | None:
    """Add lines of a file of /proc; None where it cannot be read."""
    try:
        with open(f"/proc/{pid}/{file}") as lines:
            rows = [line.split() for line in lines]
    except OSError:
        return None
    return sum(int(row[1]) * 1024 for row in rows if row and row[0] in keys)


def _has_children() -> bool:
    """Say whether this process has a child, a zombie included."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def kill_descendants(spared: frozenset[int] = frozenset(), seconds: float = 5.0) -> bool:
    """Kill and reap what this process, a subreaper, has below it, until nothing is left.

    Args:
        spared: process ids to leave alone, with what they started.
        seconds: to give up after; a process in an uninterruptible system call, or of another user,
            does not die.

    Returns:
        Whether nothing is left.
    """
    deadline = time.monotonic() + seconds
    while _has_children():
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
    """Send SIGKILL to these processes, and first to their process groups.

    A fork cannot escape a signal to its group. Groups of which this process or a spared one is a
    member get none.
    """
    for group in _groups(pids) - _groups(spared) - {os.getpgrp()}:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _groups(pids: Iterable[int]) -> set[int]:
    groups = set()
    for pid in pids:
        with suppress(ProcessLookupError):
            groups.add(os.getpgid(pid))
    return groups


def prctl(option: int, value: int) -> None:
    """Make the system call; raises OSError where it fails."""
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
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{name}/stat") as file:
            # "pid (command) state parent ...", and a command may hold spaces and parentheses
            parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
    return parents


def describe_end(status: int) -> str:
    """Say how a process ended, from its exit status; negative for a signal."""
    if status >= 0:
        return f"exited with status {status}"
    return (
        "was killed by "
        f"{signal.Signals(-status).name if -status in set(signal.Signals) else f'signal {-status}'}"
    )
