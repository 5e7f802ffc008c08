"""Signals that ask a run to end: SIGTERM of schedulers, SIGINT (Ctrl-C), SIGHUP of terminals.

The first asks for a checkpoint and an end; the second ends the process at once. Python runs a
signal's handler between two lines of the main thread, which may wait for minutes in a compiled
program. So a thread of its own reads the signals as they come: it says what will happen, ends the
process where the time is up, and at the second signal.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from types import FrameType

from fp8rl_jax.errors import RESUMABLE

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Asked(BaseException):
    """Raised in `Stopping.at_once`; no fault, so that no handler of faults takes it."""


class Stopping:
    """What signals have asked for.

    Attributes:
        asked: the first signal's name; empty: none has come.
    """

    def __init__(self) -> None:
        self.asked, self._at_once = "", False

    @contextlib.contextmanager
    def at_once(self, allowed: bool = True) -> Generator[None]:
        """Let a signal leave the block by `Asked`: in it nothing happens that must be finished."""
        self._at_once = allowed
        try:
            if allowed and self.asked:
                raise Asked
            yield
        finally:
            self._at_once = False

    def handle(self, number: int, _: FrameType | None) -> None:
        """Take a signal, in the main thread."""
        self.asked = self.asked or signal.Signals(number).name
        if self._at_once:
            self._at_once = False
            raise Asked


@contextlib.contextmanager
def deferred() -> Generator[None]:
    """Let Ctrl-C wait for the end of the block, in which buffers are given away and taken anew."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    come: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda number, frame: come.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if come:
            before(signal.SIGINT, come[0])


@contextlib.contextmanager
def stopping(seconds: float, standing: Callable[[], str]) -> Generator[Stopping]:
    """Take the signals until the block is left.

    Outside of the main thread signals are left as they are.

    Args:
        seconds: from the first signal on, after which the process ends with status RESUMABLE,
            wherever it is; 0: never.
        standing: says how the run can go on, for the message of such an end.
    """
    found = Stopping()
    if threading.current_thread() is not threading.main_thread():
        yield found
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = {number: signal.signal(number, found.handle) for number in SIGNALS}
    woken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    watch = threading.Thread(
        target=_watch, args=(reader, seconds, standing), name="signals", daemon=True
    )
    watch.start()
    try:
        yield found
    finally:
        signal.set_wakeup_fd(woken)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(writer)
        watch.join()
        os.close(reader)


def _watch(reader: int, seconds: float, standing: Callable[[], str]) -> None:
    first, deadline = "", float("inf")
    while True:
        left = None if deadline == float("inf") else max(deadline - time.monotonic(), 0.0)
        if not select.select([reader], [], [], left)[0]:
            _end(f"{first}: no checkpoint within {seconds:g} s; {standing()}", RESUMABLE)
        if not (come := os.read(reader, 1)):
            return
        number = come[0]
        if number not in SIGNALS:
            continue
        name = signal.Signals(number).name
        if first:
            _end(f"{name} again: ended at once; {standing()}", 128 + number)
        first = name
        if seconds:
            deadline = time.monotonic() + seconds
        within = f" within {seconds:g} s" * bool(seconds)
        _say(f"{name}: the run writes a checkpoint and ends{within}; once more: at once")


def _say(line: str) -> None:
    print(f"fp8rl: {line}", file=sys.stderr, flush=True)


def _end(line: str, code: int) -> None:
    _say(line)
    sys.stdout.flush()
    os._exit(code)
