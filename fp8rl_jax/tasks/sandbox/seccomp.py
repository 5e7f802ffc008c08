"""Filters of system calls (seccomp), in the few instructions of classic BPF that they need.

The fork gate is a hard bound on the processes that a worker has running: the supervisor is asked
about every fork. A fork bomb doubles within a millisecond, so counting processes now and then comes
too late; RLIMIT_NPROC counts all threads of the user, those of other jobs too, and does not bind
root; a cgroup takes rights that a container rarely has. A seccomp filter takes none: the worker
puts it on itself before anything of the user's runs, everything that it starts inherits it, and the
kernel stops every fork, vfork and clone (threads excepted) until the supervisor has answered. No
answer, no process: whatever is being killed cannot multiply meanwhile.

`refuse` makes system calls fail. A process may have several filters; the strictest answer counts.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from fp8rl_jax.tasks.sandbox.processes import prctl

_PR_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER, _GET_ACTION_AVAILABLE = 1, 2
_NEW_LISTENER = 1 << 3
_ALLOW, _ERRNO, _USER_NOTIF, _KILL = 0x7FFF0000, 0x00050000, 0x7FC00000, 0x80000000
_CLONE_THREAD = 0x00010000
CLONE_PARENT = 0x00008000

# Offsets in struct seccomp_data, and the instructions.
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT = 0x15, 0x35, 0x45
# x86_64 has a second table of system calls behind this bit, with pointers of 32 bits.
_X32 = 0x40000000

# struct seccomp_notif, struct seccomp_notif_resp, and the ioctls that read one and send the other.
_NOTICE, _ANSWER = struct.Struct("=QII64x"), struct.Struct("=QqiI")
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_CONTINUE = 1

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Numbers on x86_64 and on aarch64; None: there is no such call there.
_CALLS: dict[str, tuple[int, int | None]] = {
    "add_key": (248, 217),
    "bpf": (321, 280),
    "capset": (126, 91),
    "chmod": (90, None),
    "chown": (92, None),
    "clone": (56, 220),
    "clone3": (435, 435),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "fcntl": (72, 25),
    "file_setattr": (469, 469),
    "fork": (57, None),
    "fremovexattr": (199, 16),
    "fsetxattr": (190, 7),
    "futimesat": (261, None),
    "io_uring_setup": (425, 425),
    "ioctl": (16, 29),
    "ioprio_set": (251, 30),
    "keyctl": (250, 219),
    "kill": (62, 129),
    "landlock_add_rule": (445, 445),
    "landlock_create_ruleset": (444, 444),
    "landlock_restrict_self": (446, 446),
    "lchown": (94, None),
    "lremovexattr": (198, 15),
    "lsetxattr": (189, 6),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "msgget": (68, 186),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "prlimit64": (302, 261),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "removexattr": (197, 14),
    "removexattrat": (466, 466),
    "request_key": (249, 218),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "seccomp": (317, 277),
    "semget": (64, 190),
    "setns": (308, 268),
    "setpriority": (141, 140),
    "setxattr": (188, 5),
    "setxattrat": (463, 463),
    "shmget": (29, 194),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "tgkill": (234, 131),
    "tkill": (200, 130),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "utime": (132, None),
    "utimensat": (280, 88),
    "utimes": (235, None),
    "vfork": (58, None),
}

_Line = tuple[int, int, int, int]
"""(code, jump if true, jump if false, operand); a jump counts the lines after the next one."""


class Refused(NamedTuple):
    """A system call that fails: always, or as one of its arguments (its low 32 bits) says."""

    call: str
    argument: int = 0
    mask: int = 0xFFFFFFFF
    """The argument is taken by these bits alone."""
    allowed: tuple[int, ...] = ()
    """Values with which the call is let through."""
    values: tuple[int, ...] = ()
    """Values with which it fails, where these alone are to; `allowed` says nothing then."""
    error: int = errno.EPERM


def call_number(name: str) -> int | None:
    """Return the number of a system call on this machine; None where it has none.

    Raises:
        OSError: the machine is of a kind whose numbers are not known.
    """
    _architecture()
    return _CALLS[name][platform.machine() != "x86_64"]


def system_call(name: str, *arguments: object) -> int:
    """Make a system call that the C library has no function for.

    Raises:
        OSError: it failed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    # the kernel takes whole registers, where ctypes fills half of one
    words = (ctypes.c_long(word) if isinstance(word, int) else word for word in arguments)
    result = libc.syscall(call_number(name), *words)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


def is_available(gate: bool = False) -> bool:
    """Say whether this kernel has filters, or those that can ask a supervisor."""
    try:
        for action in (_USER_NOTIF,) if gate else (_ERRNO, _KILL):
            system_call("seccomp", _GET_ACTION_AVAILABLE, 0, ctypes.byref(ctypes.c_uint32(action)))
    except OSError:
        return False
    return True


def install_fork_gate() -> int:
    """Put the fork gate on this process and on all that it will start.

    Returns:
        The file descriptor to answer its forks through; until somebody does, they wait.

    Raises:
        OSError: this kernel or machine has no such filter, or the container forbids it.
    """
    return _install(_gate_program(), _NEW_LISTENER)


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


def refuse(rules: Iterable[Refused]) -> None:
    """Let these system calls fail in this process and in all that it will start.

    A call through another table of system calls (32 bits, x32) ends the process: a rule would not
    meet it.

    Raises:
        OSError: as `install_fork_gate`.
    """
    _install(_refusing_program(rules))


def _architecture() -> int:
    if platform.machine() not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"not known on {platform.machine()}")
    return _ARCHITECTURES[platform.machine()]


def _install(program: Sequence[_Line], flags: int = 0) -> int:
    code = b"".join(struct.pack("=HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(buffer)))
    # The kernel wants this of whoever is not root: a filter must not fool a program that has more
    # rights than its caller.
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    return system_call("seccomp", _SET_MODE_FILTER, flags, header)


def _gate_program() -> list[_Line]:
    # clone3 keeps its flags in memory, which a filter cannot read; where it is missing, the C
    # library uses clone.
    verdicts = {"clone3": _ERRNO | errno.ENOSYS, "fork": _USER_NOTIF, "vfork": _USER_NOTIF}
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IF_EQUAL, 1, 0, _architecture()),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, _NUMBER),
    ]
    for name, verdict in verdicts.items():
        if (number := call_number(name)) is not None:
            lines += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, verdict)]
    clone = call_number("clone")
    assert clone is not None
    return [
        *lines,
        (_IF_EQUAL, 1, 0, clone),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, _ARGUMENTS),
        (_IF_ANY_BIT, 0, 1, _CLONE_THREAD),
        (_RETURN, 0, 0, _ALLOW),
        # a child of the supervisor's is not among those that it counts and ends
        (_IF_ANY_BIT, 0, 1, CLONE_PARENT),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _USER_NOTIF),
    ]


def _refusing_program(rules: Iterable[Refused]) -> list[_Line]:
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IF_EQUAL, 1, 0, _architecture()),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if platform.machine() == "x86_64":
        lines += [(_IF_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    for rule in rules:
        if (number := call_number(rule.call)) is None:
            continue
        met, otherwise = _ALLOW, _ERRNO | rule.error
        if rule.values:
            met, otherwise = otherwise, met
        values = rule.values or rule.allowed
        body: list[_Line] = [(_RETURN, 0, 0, otherwise)]
        if values:
            tests = [(_IF_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
            body = [
                (_LOAD, 0, 0, _ARGUMENTS + 8 * rule.argument),
                (_AND, 0, 0, rule.mask),
                *tests,
                (_RETURN, 0, 0, otherwise),
                (_RETURN, 0, 0, met),
            ]
        lines += [(_IF_EQUAL, 0, len(body), number), *body]
    return [*lines, (_RETURN, 0, 0, _ALLOW)]
