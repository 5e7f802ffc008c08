"""task.reward.sandbox = "strict": what a worker can no longer do to anything outside of itself.

The worker takes its own rights away before anything of the user's is imported, and what it starts
inherits that. Nothing here needs root, a user namespace or a daemon. It rests on three mechanisms
of Linux:

- Landlock (https://docs.kernel.org/userspace-api/landlock.html) looks at objects: files are written
  in the scratch folder alone; no TCP; no signal, no ptrace and no abstract socket to a process that
  is not below the worker. Its ABI has grown with the kernel, and `policy` says what is asked of
  which.
- A seccomp filter (`seccomp`) looks at system calls: no sockets; none of the ways to influence
  another process or another's file that Landlock does not see.
- Capabilities: the worker of a root user has none.

What this leaves open is in docs/sandbox.md.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

from fp8rl_jax.tasks.sandbox import seccomp
from fp8rl_jax.tasks.sandbox.seccomp import Refused

LEAST_ABI = 3
"""Of Landlock: below it a file can be cut to length 0 anywhere."""
SCOPING_ABI = 6
"""Of Landlock: from here on it keeps signals inside."""

# Rights of Landlock, by the ABI that brought them (include/uapi/linux/landlock.h).
_WRITE_FILE, _TRUNCATE, _IOCTL_DEVICE = 1 << 1, 1 << 14, 1 << 15
_REMOVE = 1 << 4 | 1 << 5
_MAKE_DEVICE = 1 << 6 | 1 << 11
# folders, files, sockets, pipes, symbolic links; and to move or link between folders
_MAKE = 1 << 7 | 1 << 8 | 1 << 9 | 1 << 10 | 1 << 12 | 1 << 13
_TCP = 1 << 0 | 1 << 1
_SCOPES = 1 << 0 | 1 << 1
_RULE_PATH_BENEATH = 1
_VERSION = 1
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full")

_CAPABILITY_VERSION_3 = 0x20080522
_PR_SET_NO_NEW_PRIVS = 38

# namespaces of every kind, by the flags of clone
_NEW_NAMESPACES = 0x7E020000

_INFLUENCE = (
    # memory and descriptors of another process
    *(
        Refused(call)
        for call in (
            "ptrace",
            "process_vm_readv",
            "process_vm_writev",
            "process_madvise",
            "pidfd_getfd",
            "perf_event_open",
        )
    ),
    # limits and priority of another process: 0 as its number is the caller
    *(
        Refused(call, allowed=(0,))
        for call in (
            "prlimit64",
            "sched_setaffinity",
            "sched_setattr",
            "sched_setparam",
            "sched_setscheduler",
        )
    ),
    *(Refused(call) for call in ("setpriority", "ioprio_set", "migrate_pages", "move_pages")),
    # keys, shared memory, semaphores and queues of the same user
    *(Refused(call) for call in ("add_key", "request_key", "keyctl")),
    *(Refused(call) for call in ("shmget", "semget", "msgget", "mq_open", "mq_unlink")),
    # ways around this filter: sockets of io_uring, rights in a namespace of one's own
    *(Refused(call) for call in ("io_uring_setup", "unshare", "setns", "bpf", "userfaultfd")),
    # nor a child that is not the worker's, which ends with it
    Refused("clone", mask=_NEW_NAMESPACES | seccomp.CLONE_PARENT, allowed=(0,)),
    Refused("clone3", error=errno.ENOSYS),
)
# Landlock does not see who owns a file, nor its mode, times and attributes.
_METADATA = (
    *(Refused(call) for call in ("chmod", "fchmod", "fchmodat", "fchmodat2")),
    *(Refused(call) for call in ("chown", "lchown", "fchown", "fchownat")),
    *(Refused(call) for call in ("utime", "utimes", "futimesat", "utimensat")),
    *(Refused(call) for call in ("setxattr", "lsetxattr", "fsetxattr", "setxattrat")),
    *(Refused(call) for call in ("removexattr", "lremovexattr", "fremovexattr", "removexattrat")),
    Refused("file_setattr"),
)
# FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR, FS_IOC_ENABLE_VERITY
_FILE_IOCTLS = (0x40086602, 0x401C5820, 0x40806685)
# Where Landlock does not keep signals inside nothing may send one; F_SETOWN, F_SETOWN_EX, F_SETSIG,
# FIOSETOWN and SIOCSPGRP let the kernel send one.
_SIGNALS = (
    *(Refused(call) for call in ("kill", "tkill", "tgkill", "pidfd_send_signal")),
    *(Refused(call) for call in ("rt_sigqueueinfo", "rt_tgsigqueueinfo")),
    Refused("fcntl", argument=1, values=(8, 10, 15)),
)
_OWNER_IOCTLS = (0x8901, 0x8902)
_AF_NETLINK = 16


@dataclass(frozen=True)
class Policy:
    """What is taken away from a worker."""

    files: int
    """Rights of Landlock that are left in the scratch folder alone."""
    tcp: int
    """Rights of Landlock to bind and to connect."""
    scopes: int
    """Landlock's abstract sockets and signals, which then stay inside."""
    calls: tuple[Refused, ...]
    """System calls that fail."""
    capabilities: bool = True
    """Whether the capabilities of root go, too."""


def policy(network: bool, abi: int) -> Policy:
    """Say what is taken away under an ABI of Landlock.

    Args:
        network: task.reward.network.
        abi: `landlock_abi()`.
    """
    scoped = abi >= SCOPING_ABI
    # Sockets of the file system (Docker's, a session bus, an SSH agent) are doors out of the
    # sandbox that Landlock does not watch, so there are none in any case. Pairs are connected to
    # each other alone, unless they are of datagrams.
    families = (socket.AF_INET, socket.AF_INET6, _AF_NETLINK) if network else ()
    sockets = (
        Refused("socket", allowed=tuple(map(int, families))),
        Refused("socketpair", argument=1, mask=0xF, allowed=(1, 5)),
    )
    ioctls = Refused("ioctl", argument=1, values=_FILE_IOCTLS + (() if scoped else _OWNER_IOCTLS))
    return Policy(
        files=_WRITE_FILE
        | _REMOVE
        | _MAKE
        | _MAKE_DEVICE
        | _TRUNCATE
        | (_IOCTL_DEVICE if abi >= 5 else 0),
        tcp=_TCP if abi >= 4 and not network else 0,
        scopes=_SCOPES if scoped else 0,
        calls=(*_INFLUENCE, *_METADATA, *sockets, ioctls, *(() if scoped else _SIGNALS)),
    )


def landlock_abi() -> int:
    """Return the version of Landlock that this kernel has switched on; 0: none."""
    try:
        return seccomp.system_call("landlock_create_ruleset", None, 0, _VERSION)
    except OSError:
        return 0


def guarded(abi: int) -> str:
    """Say what this ABI of Landlock keeps a worker from."""
    asked = policy(False, abi)
    kinds = {"files": abi >= LEAST_ABI, "TCP": asked.tcp, "signals": asked.scopes}
    return ", ".join(kind for kind, is_guarded in kinds.items() if is_guarded) or "nothing"


def missing() -> str:
    """Name the mechanism of the strict sandbox that this machine lacks; empty: none."""
    if sys.platform != "linux":
        return "Linux"
    if not seccomp.is_available():
        return f"seccomp filters, on x86_64 or aarch64 (this is {platform.machine()})"
    if (abi := landlock_abi()) < LEAST_ABI:
        has = f"ABI {abi}" if abi else "none, or it is switched off at boot or by a container"
        return f"Landlock of ABI {LEAST_ABI} (Linux 6.2; this kernel has {has})"
    return ""


def confine(taken: Policy, scratch: Path) -> None:
    """Take this process's rights away, for good, and those of all that it will start.

    It must have a single thread.

    Args:
        taken: `policy(...)`.
        scratch: the folder that it may write in.

    Raises:
        OSError: the kernel or a container refuses; some rights may be gone.
    """
    seccomp.prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if taken.capabilities:
        drop_capabilities()
    _landlock(taken, scratch)
    if taken.calls:
        seccomp.refuse(taken.calls)


def drop_capabilities() -> None:
    """Make root a user like any other, who owns root's files."""
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    seccomp.system_call("capset", header, bytes(24))


def _landlock(taken: Policy, scratch: Path) -> None:
    # An older kernel takes the larger struct, too, where it does not know of what is 0.
    rights = struct.pack("=QQQ", taken.files, taken.tcp, taken.scopes)
    if not any(rights):
        return
    ruleset = seccomp.system_call("landlock_create_ruleset", rights, len(rights), 0)
    writable = {str(scratch): taken.files & ~_MAKE_DEVICE & ~_IOCTL_DEVICE}
    writable |= {device: taken.files & (_WRITE_FILE | _TRUNCATE) for device in _DEVICES}
    try:
        for path, left in writable.items():
            if not left or not os.path.exists(path):
                continue
            beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                rule = ctypes.create_string_buffer(struct.pack("=Qi", left, beneath), 12)
                seccomp.system_call("landlock_add_rule", ruleset, _RULE_PATH_BENEATH, rule, 0)
            finally:
                os.close(beneath)
        seccomp.system_call("landlock_restrict_self", ruleset, 0)
    finally:
        os.close(ruleset)
