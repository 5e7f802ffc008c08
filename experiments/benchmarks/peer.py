"""The harness's end of the line protocol: another process, which waits while it is not its turn.

`peers/link.py` is the other end and describes the lines. A peer that ends, answers nonsense, or
stays silent is an error that names its option; and however this process ends, the other reads the
end of its input and ends too.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8rl_jax.errors import UserError

SCRIPTS = Path(__file__).parent / "peers"
END_SECONDS = 10.0
SAID_BYTES = 8000


class NoAnswer(Exception):
    """Why the other end did not answer; `silent`, where it ran and said nothing for too long."""

    def __init__(self, reason: str, silent: bool = False):
        super().__init__(reason)
        self.silent = silent


class Link:
    """A process that answers a line with a line; as a context manager it is ended on leaving, with
    whatever it started.

    Raises:
        OSError: it cannot be run.
    """

    def __init__(
        self, command: Sequence[str | Path], environment: dict[str, str], folder: Path | None = None
    ):
        self._received = b""
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            bufsize=0,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send one line, and wait for the one that answers it.

        Raises:
            NoAnswer: none came, or none that is JSON; a process that was silent has been killed.
        """
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError:
            raise NoAnswer(self._end()) from None
        return self.receive(seconds)

    def receive(self, seconds: float) -> dict[str, Any]:
        """Wait for a line; raises as `ask`."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._received:
            if not select.select(
                [self._process.stdout], [], [], max(deadline - time.monotonic(), 0)
            )[0]:
                self._process.kill()
                raise NoAnswer(f"did not answer within {seconds:g} s", silent=True)
            data = self._process.stdout.read(1 << 16)
            if not data:
                raise NoAnswer(self._end())
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        try:
            return dict(json.loads(line))
        except (ValueError, TypeError):
            raise NoAnswer(f"answered {line[:80]!r}, which is no JSON object") from None

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def kill(self) -> None:
        """End the process at once, from any thread; who waits for its answer gets none."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the process and whatever it started."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self.kill()
        self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stderr(self) -> str:
        """The end of what it wrote to standard error."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - SAID_BYTES))
        return self._log.read().decode(errors="replace")

    def _end(self) -> str:
        try:
            status = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its output"
        end = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        last = next(
            (line.strip() for line in reversed(self.stderr().split("\n")) if line.strip()), ""
        )
        return f"{end}: {last[:500]}" if last else end


@dataclass(frozen=True)
class PeerSpec:
    """Which peer, by which interpreter.

    Attributes:
        name: its side's name in the record.
        option: command-line option that gives `python`, for error messages.
        python: its interpreter.
        script: file in `peers/`, or any path.
    """

    name: str
    option: str
    python: str
    script: str


class Peer(Link):
    """Another library's process.

    Args:
        spec: see PeerSpec.
        settings: what its script asks for, JSON.
        threads: processors for libraries that take the number from OMP_NUM_THREADS.
        tokens: what one round has to generate.
        timeout: seconds that loading, or one round, may take.
    """

    def __init__(
        self,
        spec: PeerSpec,
        settings: dict[str, Any],
        threads: int,
        tokens: int,
        timeout: float = 1800.0,
    ):
        self.spec, self.tokens, self.timeout = spec, tokens, timeout
        self.about: dict[str, Any] = {}
        try:
            super().__init__(
                [spec.python, SCRIPTS / spec.script, json.dumps(settings)], _environment(threads)
            )
        except OSError as error:
            raise UserError(
                f"{spec.option}: {spec.python} cannot be run ({error.strerror})"
            ) from None

    def wait_until_ready(self) -> None:
        """Wait for the peer's model; `about` then holds its versions and settings."""
        try:
            self.about = self.receive(self.timeout)
        except NoAnswer as reason:
            raise self._fault(str(reason)) from None

    def __call__(self, number: int) -> dict[str, float]:
        """One round: the seconds that the peer took, by its own clock."""
        answer = self.answer({"round": number})
        tokens = answer.pop("tokens", None)
        if tokens != self.tokens:
            raise self._fault(
                f"generated {tokens} tokens in round {number} instead of {self.tokens}"
            )
        return answer

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send one line, and wait for the one that answers it.

        Raises:
            UserError: naming the peer's option.
        """
        try:
            return self.ask(request, self.timeout)
        except NoAnswer as reason:
            raise self._fault(str(reason)) from None

    def _fault(self, what: str) -> UserError:
        return UserError(f"{self.spec.option}: the peer {self.spec.name} {what}")


def _environment(threads: int) -> dict[str, str]:
    """This process's environment without its own JAX and Python settings; peers run on the CPU and
    look nothing up."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_", "XLA_", "PYTHON"))
    }
    return kept | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
