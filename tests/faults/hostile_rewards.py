"""Rewards that do what the completion says, `VERB ARGUMENT ...`; 1 where that was possible."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

VALUES = {"none": None, "nan": float("nan"), "inf": float("inf"), "huge": 1e16, "text": "1"}


def act(completion, **_):
    verb, *arguments = completion.split(" ")
    if verb == "return":
        return VALUES[arguments[0]]
    result = globals()[f"do_{verb}"](*arguments)
    return 1.0 if result is None else result


def do_score(value):
    return float(value)


def do_raise(text):
    raise ValueError(text)


def do_write(path):
    with open(path, "a") as file:
        file.write("forged\n")


def do_read(path):
    with open(path) as file:
        file.read()


def do_delete(path):
    os.unlink(path)


def do_chmod(path):
    os.chmod(path, 0o600)


def do_signal(pid):
    os.kill(int(pid), signal.SIGCONT)


def do_environment_of(pid):
    do_read(f"/proc/{pid}/environ")


def do_connect(port):
    socket.create_connection(("127.0.0.1", int(port)), timeout=2).close()


def do_variable(name):
    return float(name in os.environ)


def do_scratch(*path):
    """Write below the temporary folder, run a program there, and say where that is."""
    folder = tempfile.mkdtemp()
    program = Path(folder, "program.py")
    program.write_text("print(6 * 7)")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True)
    assert done.stdout == "42\n"
    raise ValueError(f"scratch={tempfile.gettempdir()}")


def do_children(number, mebibytes):
    """Processes that hold memory of their own, all at one time."""
    reader, writer = os.pipe()
    for _ in range(int(number)):
        if os.fork() == 0:
            held = b"\1" * (int(mebibytes) << 20)
            os.write(writer, b".")
            time.sleep(1000)
            os._exit(len(held))
    seen = 0
    while seen < int(number):
        seen += len(os.read(reader, 100))


def do_share(number, mebibytes):
    """Processes that hold the memory of their parent."""
    held = b"\1" * (int(mebibytes) << 20)
    for _ in range(int(number)):
        if os.fork() == 0:
            time.sleep(1000)
    time.sleep(0.5)
    return float(len(held) > 0)


def do_files_in_memory(number, mebibytes):
    """Memory that no process has mapped."""
    for place in range(int(number)):
        file = os.memfd_create(str(place))
        for _ in range(int(mebibytes)):
            os.write(file, b"\1" * (1 << 20))
    return 1.0


def do_forks(number):
    for _ in range(int(number)):
        if os.fork() == 0:
            time.sleep(1000)


def do_sleep(seconds):
    time.sleep(float(seconds))


def do_stubborn():
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    time.sleep(1000)


def do_algebra():
    import sympy  # the textbook bomb: as many terms as there are partitions

    x = sympy.symbols("x0:9")
    return float(len(sympy.expand(sum(x) ** 200).args))


def do_allocate(mebibytes):
    return float(len(bytes(int(mebibytes) << 20)))


def do_exit(status):
    os._exit(int(status))


def do_flood():
    for _ in range(300):
        print("x" * 100_000)


def do_large_file(path):
    with open(path, "wb") as file:
        for _ in range(64):
            file.write(bytes(1 << 20))


class Bomb:
    """Makes a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def do_say(what, *arguments):
    """Write into the socket that the answers go through."""
    texts = {
        "noise": b"\xff\xfe\x00 no answer\n",
        "nan": b"[[NaN], null]\n",
        "infinity": b"[[1e999], null]\n",
        "integer": b"[[1" + b"0" * 4000 + b"], null]\n",
        "nested": b"[" * 200_000 + b"\n",
        "object": b'{"reward": 1}\n',
        "two": b"[[1.0, 1.0], null]\n",
        "truth": b"[[true], null]\n",
        "twice": b"[[1.0], null]\n[[1.0], null]\n[[1.0], null]\n[[1.0], null]\n[[1.0], null]\n",
        "endless": b"x" * (6 << 20),
    }
    data = pickle.dumps(Bomb(arguments[0])) + b"\n" if what == "pickle" else texts[what]
    for number in os.listdir("/proc/self/fd"):
        try:
            channel = socket.socket(fileno=os.dup(int(number)))
        except OSError:
            continue
        if channel.family == socket.AF_UNIX:
            channel.sendall(data)
    time.sleep(1000)


def batch(completions, **_):
    """A batch reward that hangs where it is told to."""
    if "hang" in completions:
        time.sleep(1000)
    return [1.0] * len(completions)


def terminal(**_):
    raise ValueError("\x1b]0;title\x07 \x1b[2J and half a letter: \ud83d")


# A worker that replaces another hangs while it imports this.
if marker := os.environ.get("FP8RL_TEST_IMPORTED"):
    if os.path.exists(marker):
        time.sleep(1000)
    Path(marker).touch()
