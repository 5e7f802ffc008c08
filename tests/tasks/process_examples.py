"""Rewards that start processes; the completion says which, and what the reward does then: `KIND
THEN PID_FILE`."""

import os
import signal
import subprocess
import sys
import threading
import time

HELPER = subprocess.Popen(["sleep", "1000"])
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"


def start(completion, **_):
    kind, then, path = completion.split()
    globals()[kind](path)
    wait_for(path)
    if then == "hang":
        time.sleep(1000)
    if then == "die":
        os._exit(3)
    if then == "raise":
        raise ValueError("after the start")
    return 1.0


def write(path, pid):
    with open(path + ".part", "w") as file:
        file.write(str(pid))
    os.replace(path + ".part", path)


def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.001)


def setsid(path):
    write(path, subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)


def stubborn(path):
    write(path, subprocess.Popen([sys.executable, "-S", "-c", STUBBORN]).pid)


def daemon(path):
    """Fork, setsid, fork: nothing but its parents' numbers ties it to this process, and the parents
    are gone, and reaped, when its number is written."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if (pid := os.fork()) == 0:
            time.sleep(1000)
        os.write(writer, str(pid).encode())
        os._exit(0)
    os.wait()
    write(path, int(os.read(reader, 32)))
    os.close(reader)
    os.close(writer)


def group(path):
    """Ends its own process group, as clumsy clean-up code does."""
    write(path, subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)
    os.killpg(0, signal.SIGKILL)


def bomb(path):
    """2^9 processes, each in a session of its own, unless somebody stops it; a real one would go
    on. The first one forks until it is refused, even where the others get no time to. Where a fork
    is refused, none of them ends before the test has counted them."""
    write(path, first := os.getpid())
    for i in range(40):
        if i >= 9 and os.getpid() != first:
            break
        try:
            child = os.fork()
        except BlockingIOError:
            open(path + ".refused", "w").close()
            wait_for(path + ".counted")
            raise
        if child == 0:
            os.setsid()
    time.sleep(20)


def hop(path):
    """A chain in which every link forks the next one and ends, for a second at most."""
    write(path, os.getpid())
    until = time.monotonic() + 3
    if os.fork() == 0:
        os.setsid()
        while time.monotonic() < until:
            if os.fork():
                os._exit(0)
        os._exit(0)


def threads(path):
    started = [threading.Thread(target=time.sleep, args=(0.2,)) for _ in range(20)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()


def helper(completion, **_):
    """Whether the process of the import still runs."""
    return float(HELPER.poll() is None)


def returns_twice(completion, **_):
    if completion == "fork" and os.fork() == 0:
        return 0.5
    return 1.0


def big_file(completion, **_):
    """Write as many MiB as the completion says, in this process or another."""
    where, size, path = completion.split()
    if where == "here":
        with open(path, "wb") as file:
            for _ in range(int(size)):
                file.write(bytes(2**20))
        return 1.0
    return float(
        subprocess.run(
            ["dd", "if=/dev/zero", f"of={path}", "bs=1M", f"count={size}"], check=False
        ).returncode
        == 0
    )


def stops_its_supervisor(completion, **_):
    write(completion, subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)
    os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(1000)
