"""Rewards for the tests, good and bad; the completion says what happens."""

import os
import re
import signal
import subprocess
import sys
import time

VALUES = {
    "none": None,
    "nan": float("nan"),
    "inf": -float("inf"),
    "huge": 1e300,
    "text": "1.0",
    "list": [1.0],
}


def length(prompt, completion, answer, metadata):
    """A good reward: a tenth a letter."""
    return len(completion) / 10


def faulty(completion, **_):
    """Does what the completion says; a number is the score."""
    action, _, argument = completion.partition(" ")
    if action == "raise":
        raise ValueError("no such\nanswer")
    if action == "exit":
        sys.exit(1)
    if action == "die":
        os._exit(3)
    if action == "abort":
        os.kill(os.getpid(), signal.SIGSEGV)
    if action == "value":
        return VALUES[argument]
    if action == "sleep":
        time.sleep(1000)
    if action == "ignore_sigterm":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(1)
    if action == "regex":  # holds the interpreter lock
        re.match(r"(a+)+$", "a" * 60 + "b")
    if action == "child":
        child = subprocess.Popen(["sleep", "1000"])
        with open(argument, "w") as file:
            file.write(str(child.pid))
        time.sleep(1000)
    if action == "allocate":
        return float(len(bytearray(2**30)))
    if action == "flood":
        for _ in range(200):
            print("x" * 100_000)
            print("x" * 100_000, file=sys.stderr)
        os.write(1, b"x" * 1_000_000)
        return 0.25
    if action == "stdin":
        return float(len(sys.stdin.read()))
    if action == "say":
        print(argument)
        print(argument.upper(), file=sys.stderr)
        os.system(f"echo child says {argument}")
        return 0.5
    if action == "say_and_hang":
        print(argument)
        time.sleep(1000)
    if action == "modules":
        return float(not {"jax", "jaxlib", "numpy", "__mp_main__"} & set(sys.modules))
    if action == "pid":
        return float(os.getpid())
    return float(completion)


def slow(completion, **_):
    time.sleep(float(completion))
    return 1.0


def rows(count=8, **extra):
    return [{"prompt": f"Say {i}", "answer": i, "level": i % 2, **extra} for i in range(count)]


def repeated_rows():
    return rows(6) + rows(9)


def bad_rows():
    return [*rows(2), {"prompt": "no answer"}]


def no_rows():
    return []


def batch_faulty(completions, answers, **_):
    """Does what one of the completions says, to the whole batch; numbers are scores."""
    assert len(completions) == len(answers)
    if "raise" in completions:
        raise ValueError("no such batch")
    if "short" in completions:
        return [1.0]
    if "none" in completions:
        return None
    if "sleep" in completions:
        time.sleep(1000)
    if "die" in completions:
        os._exit(3)
    if "wait" in completions:
        time.sleep(0.4 * len(completions))
    if "count" in completions:
        return [len(completions)] * len(completions)
    return [
        None if text == "no score" else float(text) if text[0].isdigit() else 0.5
        for text in completions
    ]


def batch_two_arguments(completions, scale):
    return completions
