"""A hard bound on the processes that a worker has running: the supervisor is asked about every fork
(Linux, seccomp).

A fork bomb doubles within a millisecond, so counting processes now and then comes too late;
RLIMIT_NPROC counts all threads of the user, those of other jobs too, and does not bind root; a
cgroup takes rights that a container rarely has. A seccomp filter takes none: the worker puts it on
itself before anything of the user's runs, everything that it starts inherits it, and the kernel
stops every fork, vfork and clone (threads excepted) until the supervisor has answered. No answer,
no process: whatever is being killed cannot multiply meanwhile.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import struct
from contextlib import suppress
from typing import NamedTuple

from fp8rl_jax.tasks.reaper import prctl

PR_SET_NO_NEW_PRIVS = 38
SECCOMP_SET_MODE_FILTER = 1
SECCOMP_FILTER_FLAG_NEW_LISTENER = 1 << 3
ALLOW, ERRNO, USER_NOTIF = 0x7FFF0000, 0x00050000, 0x7FC00000
CLONE_THREAD = 0x00010000

# Offsets in struct seccomp_data, and the instructions of classic BPF that are needed.
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
LOAD, IF_EQUAL, IF_ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06

# struct seccomp_notif, struct seccomp_notif_resp, and the ioctls that read one and send the other.
NOTICE, ANSWER = struct.Struct("=QII64x"), struct.Struct("=QqiI")
RECEIVE, SEND = 0xC0502100, 0xC0182101
CONTINUE = 1


class Calls(NamedTuple):
    """System call numbers of one architecture."""

    architecture: int
    seccomp: int
    clone: int
    clone3: int
    forks: tuple[int, ...]


CALLS = {
    "x86_64": Calls(0xC000003E, seccomp=317, clone=56, clone3=435, forks=(57, 58)),
    "aarch64": Calls(0xC00000B7, seccomp=277, clone=220, clone3=435, forks=()),
}


def install() -> int:
    """Put the filter on this process and on all that it will start.

    Returns:
        The file descriptor to answer its forks through; until somebody does, they wait.

    Raises:
        OSError: this kernel or machine has no such filter, or the container forbids it.
    """
    if platform.machine() not in CALLS:
        raise OSError(errno.ENOSYS, f"not known on {platform.machine()}")
    calls = CALLS[platform.machine()]
    program = _program(calls)
    code = b"".join(struct.pack("=HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(buffer)))
    # The kernel wants this of whoever is not root: a filter must not fool a program that has more
    # rights than its caller.
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    libc = ctypes.CDLL(None, use_errno=True)
    listener = libc.syscall(
        calls.seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, header
    )
    if listener < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return listener


def answer(listener: int, allowed: bool) -> None:
    """Let the fork that waits at `listener` happen, or fail with EAGAIN. The process may have been
    killed meanwhile."""
    notice = bytearray(NOTICE.size)
    with suppress(FileNotFoundError):
        fcntl.ioctl(listener, RECEIVE, notice)
        identity = NOTICE.unpack(notice)[0]
        fcntl.ioctl(
            listener,
            SEND,
            ANSWER.pack(identity, 0, 0 if allowed else -errno.EAGAIN, CONTINUE if allowed else 0),
        )


def _program(calls: Calls) -> list[tuple[int, int, int, int]]:
    """(code, jump if true, jump if false, operand); a jump counts the lines after the next one."""
    # clone3 keeps its flags in memory, which a filter cannot read; where it is missing, the C
    # library uses clone.
    tests = [(calls.clone3, ERRNO | errno.ENOSYS), *((fork, USER_NOTIF) for fork in calls.forks)]
    lines = [
        (LOAD, 0, 0, ARCHITECTURE),
        (IF_EQUAL, 1, 0, calls.architecture),
        (RETURN, 0, 0, ALLOW),
        (LOAD, 0, 0, NUMBER),
    ]
    for number, verdict in tests:
        lines += [(IF_EQUAL, 0, 1, number), (RETURN, 0, 0, verdict)]
    return [
        *lines,
        (IF_EQUAL, 1, 0, calls.clone),
        (RETURN, 0, 0, ALLOW),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (IF_ANY_BIT, 0, 1, CLONE_THREAD),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, USER_NOTIF),
    ]
