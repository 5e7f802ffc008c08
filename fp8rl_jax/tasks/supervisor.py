"""The process between the trainer and a reward worker: it ends the worker with everything that the
worker started.

Started by `worker_process.WorkerProcess` as `python -P -m fp8rl_jax.tasks.supervisor SOCKET_FD
OBJECTS_FD MAX_PROCESSES`. It forks the
worker before anything of the user's is imported. Then it answers the worker's forks (`fork_gate`)
and waits for the end: of the worker, or of standard input, which the trainer holds open for as long
as it lives and wants the worker.

It is a subreaper, so when the worker is gone, all that the worker has started, daemons in sessions
of their own too, is below the supervisor. It kills that, writes one line about the worker's end to
standard output, and exits only when nothing is left. What a reward can still do is kill its
supervisor: this isolates faults, not malice.

Elsewhere than on Linux there is nothing of the kind; the worker then runs in this process.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys

from fp8rl_jax.tasks import fork_gate, reaper
from fp8rl_jax.tasks.worker_main import serve

# How often the processes are counted where their forks cannot be answered.
SECONDS_BETWEEN_COUNTS = 0.02
# How often the parent is looked at: a fork of the trainer's, which outlives it, would keep standard
# input open.
SECONDS_BETWEEN_LOOKS = 1.0


def main() -> None:
    socket_fd, objects_fd, max_processes = map(int, sys.argv[1:])
    # What a reward starts must not hold these open after this process.
    os.set_inheritable(socket_fd, False)
    os.set_inheritable(objects_fd, False)
    channel = socket.socket(fileno=socket_fd)
    report_fd = os.dup(1)
    if sys.platform != "linux":
        _print_to_the_log()
        serve(channel, objects_fd)
        return
    trainer = os.getppid()
    reaper.adopt_orphans()
    ours, theirs = socket.socketpair()
    supervisor = os.getpid()
    worker = os.fork()
    if worker == 0:
        reaper.die_with_parent()
        if os.getppid() != supervisor:
            os._exit(1)
        ours.close()
        os.close(report_fd)
        _print_to_the_log()
        # A session of its own: a reward that kills its process group must not kill the supervisor.
        os.setsid()
        reaper.adopt_orphans()
        serve(channel, objects_fd, _hand_over_forks(theirs))
        return
    channel.close()
    os.close(objects_fd)
    theirs.close()
    end = _watch(worker, _take_over_forks(ours), max_processes, trainer)
    # From here on no fork is answered, so nothing that is being killed can multiply.
    if not reaper.kill_descendants():
        end += " and left processes behind that cannot be killed"
    os.write(report_fd, end.encode())


def describe_end(status: int) -> str:
    """How a process ended, from its exit status; negative for a signal."""
    if status >= 0:
        return f"exited with status {status}"
    return (
        "was killed by "
        f"{signal.Signals(-status).name if -status in set(signal.Signals) else f'signal {-status}'}"
    )


def _print_to_the_log() -> None:
    """Standard output goes where standard error goes, line by line: a worker that is killed has
    written what it printed."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)


def _hand_over_forks(supervisor: socket.socket) -> str:
    """Put this process's forks into the supervisor's hands; returns what speaks against it, for the
    log."""
    with supervisor:
        try:
            listener = fork_gate.install()
        except OSError as fault:
            supervisor.send(b"none")
            return (
                f"the kernel does not let forks be counted ({fault.strerror}); a fork bomb is "
                "stopped, but later"
            )
        socket.send_fds(supervisor, [b"gate"], [listener])
        os.close(listener)
    return ""


def _take_over_forks(worker: socket.socket) -> int | None:
    with worker:
        _, listeners, _, _ = socket.recv_fds(worker, 4, 1)
    return listeners[0] if listeners else None


def _watch(worker: int, listener: int | None, max_processes: int, trainer: int) -> str:
    """Answer forks until the worker has ended or has to end, and say how it ended."""
    seconds = SECONDS_BETWEEN_COUNTS if listener is None else SECONDS_BETWEEN_LOOKS
    events = select.poll()
    pidfd = os.pidfd_open(worker)
    for descriptor in (pidfd, 0) if listener is None else (pidfd, 0, listener):
        events.register(descriptor, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in events.poll(seconds * 1000)}
        if pidfd in ready or 0 in ready or os.getppid() != trainer:
            # not yet reaped, so nobody else has its number; its own end stays its end
            os.kill(worker, signal.SIGKILL)
            return describe_end(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]))
        if listener in ready:
            fork_gate.answer(listener, allowed=len(reaper.descendants(worker)) < max_processes)
        elif listener is None and len(reaper.descendants(worker)) > max_processes:
            return f"had more than task.reward.max_processes = {max_processes} processes running"


if __name__ == "__main__":
    main()
