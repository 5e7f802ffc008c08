"""What is said while JAX compiles, and how long it took.

Compiling a model's programs takes minutes, in which a run does nothing that can be seen.
FP8RL_COMPILING_AFTER is the seconds after which a program is named.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable

_log = logging.getLogger("fp8rl")
_EVENT = "/jax/core/compile/"
_AFTER = float(os.environ.get("FP8RL_COMPILING_AFTER", "3"))
"""Seconds that a program compiles in silence."""
_SPOKEN = {"generate": "the rollout", "update_program": "the update"}


def _say(line: str) -> None:
    """Log a line, or print it on standard error where nothing was set up to show it, as in a
    notebook."""
    if _log.isEnabledFor(logging.INFO):
        _log.info("%s", line)
    elif _log.level == logging.NOTSET:
        print(line, file=sys.stderr)


class Compiling:
    """Programs that this process compiles.

    Args:
        after: seconds behind which a program is named.
        say: receives a line when that is, and one when the program is there.
        clock: seconds.
    """

    def __init__(
        self,
        after: float = _AFTER,
        say: Callable[[str], None] = _say,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._after, self._say, self._clock = after, say, clock
        self._lock, self._listens = threading.Lock(), False
        self._spans: list[tuple[float, float]] = []
        self._timer: threading.Timer | None = None
        self._said = ""

    def listen(self) -> None:
        """Hear of every program from here on."""
        import jax

        if not self._listens:
            self._listens = True
            jax.monitoring.register_event_duration_secs_listener(self.take)

    @property
    def seconds(self) -> float:
        """Time in which something was traced, lowered or compiled."""
        with self._lock:
            return sum(end - start for start, end in self._spans)

    def steady(self) -> float:
        """Read the clock, which stands still while a program compiles."""
        return self._clock() - self.seconds

    def take(self, event: str, duration_secs: float, **about: str | int) -> None:
        """Take an event of jax.monitoring, which tells of a part of compiling when it is over."""
        if not event.startswith(_EVENT):
            return
        with self._lock:
            end = self._clock()
            start = end - duration_secs
            # a function is traced inside of another's tracing
            while self._spans and self._spans[-1][1] > start:
                start = min(start, self._spans.pop()[0])
            self._spans.append((start, end))
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None
            if event.endswith("jaxpr_to_mlir_module_duration"):  # XLA is next
                self._timer = threading.Timer(self._after, self._name, [str(about.get("fun_name"))])
                self._timer.daemon = True
                self._timer.start()
            elif self._said and event.endswith("backend_compile_duration"):
                self._say(f"compiled {self._said} in {duration_secs:.0f} s")
                self._said = ""

    def _name(self, program: str) -> None:
        with self._lock:
            if threading.current_thread() is not self._timer:  # it has just ended
                return
            name = program.removeprefix("jit(").removesuffix(")")
            self._said = _SPOKEN.get(name, name if name.isidentifier() else "a program")
            self._say(f"compiling {self._said} ...")


COMPILING = Compiling()
"""Of this process."""
