"""Linux processes: to adopt what a reward starts, to count it, to end it, and to bound it.

A process that calls setsid, or whose parent exits at once (a daemon), leaves its process group and
its parent, but not its nearest ancestor that is a "child subreaper": the kernel makes it that one's
child. So a subreaper without children has no descendants, which `waitid` tells exactly.

The fork gate is a hard bound on the processes that a worker has running: the supervisor is asked
about every fork. A fork bomb doubles within a millisecond, so counting processes now and then comes
too late; RLIMIT_NPROC counts all threads of the user, those of other jobs too, and does not bind
root; a cgroup takes rights that a container rarely has. A seccomp filter takes none: the worker
puts it on itself before anything of the user's runs, everything that it starts inherits it, and the
kernel stops every fork, vfork and clone (threads excepted) until the supervisor has answered. No
answer, no process: whatever is being killed cannot multiply meanwhile.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import signal
import struct
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_SET_MODE_FILTER = 1
_SECCOMP_FILTER_FLAG_NEW_LISTENER = 1 << 3
_ALLOW, _ERRNO, _USER_NOTIF = 0x7FFF0000, 0x00050000, 0x7FC00000
_CLONE_THREAD = 0x00010000

# Offsets in struct seccomp_data, and the instructions of classic BPF that are needed.
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_LOAD, _IF_EQUAL, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06

# struct seccomp_notif, struct seccomp_notif_resp, and the ioctls that read one and send the other.
_NOTICE, _ANSWER = struct.Struct("=QII64x"), struct.Struct("=QqiI")
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_CONTINUE = 1

# a kernel built without CONFIG_PROC_CHILDREN has none
_HAS_CHILDREN_FILES = os.path.exists("/proc/thread-self/children")


class _Calls(NamedTuple):
    """System call numbers of one architecture."""

    architecture: int
    seccomp: int
    clone: int
    clone3: int
    forks: tuple[int, ...]


_CALLS = {
    "x86_64": _Calls(0xC000003E, seccomp=317, clone=56, clone3=435, forks=(57, 58)),
    "aarch64": _Calls(0xC00000B7, seccomp=277, clone=220, clone3=435, forks=()),
}


def adopt_orphans() -> None:
    """Make this process the parent of every descendant that loses its own."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Let this process be killed when the thread that started it ends, however that ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


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


def _prctl(option: int, value: int) -> None:
    """Make the system call; raises OSError where it fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    if (
        libc.prctl(
            option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)
        )
        != 0
    ):
        raise OSError(ctypes.get_errno(), f"_prctl({option}): {os.strerror(ctypes.get_errno())}")


def _parents() -> dict[int, int]:
    """{process: its parent} of the whole machine."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{name}/stat") as file:
            # "pid (command) state parent ...", and a command may hold spaces and parentheses
            parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
    return parents


def install_fork_gate() -> int:
    """Put the filter on this process and on all that it will start.

    Returns:
        The file descriptor to answer its forks through; until somebody does, they wait.

    Raises:
        OSError: this kernel or machine has no such filter, or the container forbids it.
    """
    if platform.machine() not in _CALLS:
        raise OSError(errno.ENOSYS, f"not known on {platform.machine()}")
    calls = _CALLS[platform.machine()]
    program = _gate_program(calls)
    code = b"".join(struct.pack("=HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(buffer)))
    # The kernel wants this of whoever is not root: a filter must not fool a program that has more
    # rights than its caller.
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    libc = ctypes.CDLL(None, use_errno=True)
    listener = libc.syscall(
        calls.seccomp, _SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_NEW_LISTENER, header
    )
    if listener < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return listener


def answer_fork(listener: int, allowed: bool) -> None:
    """Let the fork that waits at `listener` happen, or fail with EAGAIN.

    The process may have been killed meanwhile.
    """
    notice = bytearray(_NOTICE.size)
    with suppress(FileNotFoundError):
        fcntl.ioctl(listener, _RECEIVE, notice)
        identity = _NOTICE.unpack(notice)[0]
        fcntl.ioctl(
            listener,
            _SEND,
            _ANSWER.pack(identity, 0, 0 if allowed else -errno.EAGAIN, _CONTINUE if allowed else 0),
        )


def _gate_program(calls: _Calls) -> list[tuple[int, int, int, int]]:
    """(code, jump if true, jump if false, operand); a jump counts the lines after the next one."""
    # clone3 keeps its flags in memory, which a filter cannot read; where it is missing, the C
    # library uses clone.
    tests = [(calls.clone3, _ERRNO | errno.ENOSYS), *((fork, _USER_NOTIF) for fork in calls.forks)]
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IF_EQUAL, 1, 0, calls.architecture),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, _NUMBER),
    ]
    for number, verdict in tests:
        lines += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, verdict)]
    return [
        *lines,
        (_IF_EQUAL, 1, 0, calls.clone),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_IF_ANY_BIT, 0, 1, _CLONE_THREAD),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _USER_NOTIF),
    ]


def describe_end(status: int) -> str:
    """Say how a process ended, from its exit status; negative for a signal."""
    if status >= 0:
        return f"exited with status {status}"
    return (
        "was killed by "
        f"{signal.Signals(-status).name if -status in set(signal.Signals) else f'signal {-status}'}"
    )
