"""Attacks on what is outside of the strict sandbox, each tried twice: without the mechanism that is
to stop it, and with it. The outcomes are written to standard output as JSON.

    python attacks.py FOLDER

Everything else is switched on both times, but for what would stop the attack as well.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import resource
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from fp8rl_jax.tasks.sandbox import seccomp, strict
from fp8rl_jax.tasks.sandbox.strict import Policy

DONE = "done"
CLONE_NEWUSER = 0x10000000


@dataclass(frozen=True)
class Target:
    """What stands outside of the sandbox."""

    pid: int
    file: str
    port: int
    unix: str
    datagram: str
    abstract: str


def without(taken: Policy, *calls: str) -> Policy:
    """Let these system calls through."""
    return replace(taken, calls=tuple(rule for rule in taken.calls if rule.call not in calls))


def no_landlock(taken: Policy) -> Policy:
    return replace(taken, files=0, tcp=0, scopes=0)


def connect(family: int, address) -> None:
    with socket.socket(family) as client:
        client.settimeout(2)
        client.connect(address)


def datagram(target: Target) -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with one, other:
        one.sendto(b"hello", target.datagram)


def ptrace(target: Target) -> None:
    attach, detach = 16, 17
    libc = ctypes.CDLL(None, use_errno=True)
    check(libc.ptrace(attach, target.pid, None, None))
    os.waitpid(target.pid, 0x40000000)
    libc.ptrace(detach, target.pid, None, None)


def check(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def other_memory(call: str) -> Callable[[Target], None]:
    """Read or write a buffer of the victim's, which is at the same place here: it is a fork."""

    def attack(target: Target) -> None:
        vector = (ctypes.c_size_t * 2)(ctypes.addressof(BUFFER), len(BUFFER))
        seccomp.system_call(call, target.pid, vector, 1, vector, 1, 0)

    return attack


BUFFER = ctypes.create_string_buffer(16)


def io_uring(target: Target) -> None:
    os.close(seccomp.system_call("io_uring_setup", 1, ctypes.create_string_buffer(120)))


def clone_namespace(target: Target) -> None:
    pid = seccomp.system_call("clone", CLONE_NEWUSER | int(signal.SIGCHLD), None, None, None, None)
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def clone_sibling(target: Target) -> None:
    """A child of the parent's, who may not know of it."""
    flags = seccomp.CLONE_PARENT | int(signal.SIGCHLD)
    if seccomp.system_call("clone", flags, None, None, None, None) == 0:
        os._exit(0)


def message_queue(target: Target) -> None:
    name = f"fp8rl-{target.pid}".encode()
    os.close(seccomp.system_call("mq_open", name, os.O_CREAT | os.O_RDONLY, 0o600, None))
    seccomp.system_call("mq_unlink", name)


def clone3(target: Target) -> None:
    arguments = (ctypes.c_uint64 * 8)(CLONE_NEWUSER, 0, 0, 0, signal.SIGCHLD, 0, 0, 0)
    pid = seccomp.system_call("clone3", arguments, 64)
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def signal_by_kernel(target: Target) -> None:
    reader, _ = os.pipe()
    fcntl.fcntl(reader, fcntl.F_SETOWN, target.pid)


def old_system_call(target: Target) -> None:
    """Getpid through the table of 32-bit programs."""
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    # push rbx; mov eax, 20; int 0x80; pop rbx; ret
    code.write(b"\x53\xb8\x14\x00\x00\x00\xcd\x80\x5b\xc3")
    place = ctypes.addressof(ctypes.c_char.from_buffer(code))
    if ctypes.CFUNCTYPE(ctypes.c_int)(place)() != os.getpid():
        raise OSError(errno.ENOSYS, "no 32-bit system calls")


def x32_system_call(target: Target) -> None:
    """Getpid through the table of x32, which is there or says ENOSYS."""
    ctypes.CDLL(None).syscall(0x40000000 + 39)


def flags_of_file(target: Target) -> None:
    with open(target.file) as file:
        flags = bytearray(8)
        fcntl.ioctl(file, 0x80086601, flags)
        flags[0] ^= 0x40  # not to be dumped
        fcntl.ioctl(file, 0x40086602, bytes(flags))


def shared_memory(target: Target) -> None:
    number = seccomp.system_call("shmget", 0, 4096, 0o1600)
    ctypes.CDLL(None).shmctl(number, 0, None)


def session_keys(target: Target) -> None:
    seccomp.system_call("keyctl", 0, -3, 1)  # the id of the session's keyring, made if need be


FULL = strict.policy(network=False, abi=strict.landlock_abi())
UNSCOPED = strict.policy(network=False, abi=strict.SCOPING_ABI - 1)
SOCKETS = without(FULL, "socket", "socketpair")
SIGNALS = ("kill", "tkill", "tgkill", "fcntl", "rt_sigqueueinfo")

_files = replace(FULL, files=0)
ATTACKS: dict[str, tuple[Callable[[Target], object], Policy, Policy]] = {
    # name: what is tried, what is on without the mechanism, and with it
    "files: append": (lambda at: open(at.file, "a").close(), _files, FULL),
    "files: truncate": (lambda at: os.truncate(at.file, 0), _files, FULL),
    "files: unlink": (lambda at: os.unlink(at.file), _files, FULL),
    "files: rename": (lambda at: os.rename(at.file, f"{at.file}.moved"), _files, FULL),
    "files: new folder": (lambda at: os.mkdir(f"{at.file}.folder"), _files, FULL),
    "files: symbolic link": (lambda at: os.symlink("/", f"{at.file}.link"), _files, FULL),
    "files: move from scratch": (
        lambda at: os.rename(tempfile.mkstemp()[1], f"{at.file}.new"),
        _files,
        FULL,
    ),
    "tcp: connect": (
        lambda at: connect(socket.AF_INET, ("127.0.0.1", at.port)),
        replace(SOCKETS, tcp=0),
        SOCKETS,
    ),
    "scopes: signal": (lambda at: os.kill(at.pid, signal.SIGKILL), replace(FULL, scopes=0), FULL),
    "scopes: abstract socket": (
        lambda at: connect(socket.AF_UNIX, at.abstract),
        replace(SOCKETS, scopes=0),
        SOCKETS,
    ),
    "Landlock: environment of another process": (
        lambda at: open(f"/proc/{at.pid}/environ").close(),
        no_landlock(FULL),
        FULL,
    ),
    "filter: signal": (
        lambda at: os.kill(at.pid, signal.SIGKILL),
        without(UNSCOPED, *SIGNALS),
        UNSCOPED,
    ),
    "filter: signal by the kernel": (signal_by_kernel, without(UNSCOPED, *SIGNALS), UNSCOPED),
    "filter: socket": (
        lambda at: connect(socket.AF_INET, ("127.0.0.1", at.port)),
        replace(without(FULL, "socket"), tcp=0),
        replace(FULL, tcp=0),
    ),
    "filter: socket of the file system": (
        lambda at: connect(socket.AF_UNIX, at.unix),
        without(FULL, "socket"),
        FULL,
    ),
    "filter: socket of the file system, where the network is allowed": (
        lambda at: connect(socket.AF_UNIX, at.unix),
        without(strict.policy(network=True, abi=strict.landlock_abi()), "socket"),
        strict.policy(network=True, abi=strict.landlock_abi()),
    ),
    "filter: pair of datagrams": (datagram, without(FULL, "socketpair"), FULL),
    "filter: ptrace": (ptrace, without(no_landlock(FULL), "ptrace"), no_landlock(FULL)),
    "filter: read memory": (
        other_memory("process_vm_readv"),
        without(no_landlock(FULL), "process_vm_readv"),
        no_landlock(FULL),
    ),
    "filter: write memory": (
        other_memory("process_vm_writev"),
        without(no_landlock(FULL), "process_vm_writev"),
        no_landlock(FULL),
    ),
    "filter: io_uring": (io_uring, without(FULL, "io_uring_setup"), FULL),
    "filter: user namespace": (
        lambda at: os.unshare(CLONE_NEWUSER),
        without(FULL, "unshare"),
        FULL,
    ),
    "filter: clone into a user namespace": (clone_namespace, without(FULL, "clone"), FULL),
    "filter: clone3 into a user namespace": (clone3, without(FULL, "clone3"), FULL),
    "filter: limits of another process": (
        lambda at: resource.prlimit(at.pid, resource.RLIMIT_CORE, (0, 0)),
        without(FULL, "prlimit64"),
        FULL,
    ),
    "filter: cores of another process": (
        lambda at: os.sched_setaffinity(at.pid, os.sched_getaffinity(0)),
        without(FULL, "sched_setaffinity"),
        FULL,
    ),
    "filter: scheduling of another process": (
        lambda at: os.sched_setscheduler(at.pid, os.SCHED_BATCH, os.sched_param(0)),
        without(FULL, "sched_setscheduler"),
        FULL,
    ),
    "filter: priority of another process": (
        lambda at: os.setpriority(os.PRIO_PROCESS, at.pid, 10),
        without(FULL, "setpriority"),
        FULL,
    ),
    "filter: mode": (lambda at: os.chmod(at.file, 0), without(FULL, "chmod", "fchmodat"), FULL),
    "filter: owner": (
        lambda at: os.chown(at.file, os.getuid(), os.getgid()),
        without(FULL, "chown", "fchownat"),
        FULL,
    ),
    "filter: times": (lambda at: os.utime(at.file, (0, 0)), without(FULL, "utimensat"), FULL),
    "filter: attribute": (
        lambda at: os.setxattr(at.file, "user.fp8rl", b"1"),
        without(FULL, "setxattr"),
        FULL,
    ),
    "filter: flags of a file": (flags_of_file, without(FULL, "ioctl"), FULL),
    "filter: shared memory": (shared_memory, without(FULL, "shmget"), FULL),
    "filter: message queues": (message_queue, without(FULL, "mq_open", "mq_unlink"), FULL),
    "filter: a child of the parent": (clone_sibling, without(FULL, "clone"), FULL),
    "filter: keys": (session_keys, without(FULL, "keyctl"), FULL),
    "capabilities: another root folder": (
        lambda at: os.chroot("/"),
        replace(FULL, capabilities=False),
        FULL,
    ),
}
if os.uname().machine == "x86_64":
    nothing = replace(FULL, calls=())
    ATTACKS["filter: 32-bit system call"] = (old_system_call, nothing, FULL)
    ATTACKS["filter: x32 system call"] = (x32_system_call, nothing, FULL)


def outcome(attack: Callable[[Target], object], taken: Policy, target: Target, folder: Path) -> str:
    """What came of it: DONE, the name of an error, or how the process ended."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        said = DONE
        try:
            scratch = tempfile.mkdtemp(dir=folder)
            tempfile.tempdir = scratch
            strict.confine(taken, Path(scratch))
            attack(target)
        except OSError as fault:
            said = errno.errorcode[fault.errno or 0]
        except BaseException as fault:
            said = repr(fault)
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return said or signal.Signals(-status).name


def victim() -> int:
    """A process with no more rights than an attacker's, which everybody of the same user may trace;
    it sleeps."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        strict.drop_capabilities()
        ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(2**64 - 1), 0, 0, 0)
        os.close(reader)
        os.close(writer)
        time.sleep(60)
        os._exit(0)
    os.close(writer)
    os.read(reader, 1)
    os.close(reader)
    return pid


def main() -> None:
    outcomes, folder = {}, Path(sys.argv[1])
    tcp = socket.create_server(("127.0.0.1", 0))
    names = [str(folder / "unix"), str(folder / "datagram"), f"\0fp8rl-attack-{os.getpid()}"]
    kinds = (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_STREAM)
    servers = [socket.socket(socket.AF_UNIX, kind) for kind in kinds]
    for server, name in zip(servers, names, strict=True):
        server.bind(name)
    servers[0].listen()
    servers[2].listen()
    for name, (attack, weak, whole) in ATTACKS.items():
        said = []
        for taken in (weak, whole):
            file = Path(tempfile.mkdtemp(dir=folder)) / "metrics.jsonl"
            file.write_text("{}\n")
            target = Target(victim(), str(file), tcp.getsockname()[1], *names)
            said.append(outcome(attack, taken, target, folder))
            os.kill(target.pid, signal.SIGKILL)
            os.waitpid(target.pid, 0)
        outcomes[name] = said
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
