"""The harness's end of the line protocol: another library's process, which waits while it is not its turn.

`peers/link.py` is the other end and describes the lines. A peer that ends, answers nonsense, or stays silent is an error
that names its option; and however this process ends, the peer reads the end of its input and ends too.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8rl_jax.errors import UserError

SCRIPTS = Path(__file__).parent / "peers"
END_SECONDS = 10.0


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


class Peer:
    """A running peer; as a context manager it is ended on leaving.

    Args:
        spec: see PeerSpec.
        settings: what its script asks for, JSON.
        threads: processors for libraries that take the number from OMP_NUM_THREADS.
        tokens: what one round has to generate.
        timeout: seconds that loading, or one round, may take.
    """

    def __init__(self, spec: PeerSpec, settings: dict[str, Any], threads: int, tokens: int, timeout: float = 1800.0):
        self.spec, self.tokens, self.timeout = spec, tokens, timeout
        self.about: dict[str, Any] = {}
        self._received = b""
        self._log = tempfile.TemporaryFile()
        command = [spec.python, SCRIPTS / spec.script, json.dumps(settings)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, bufsize=0,
                env=_environment(threads), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise UserError(f"{spec.option}: {spec.python} cannot be run ({error.strerror})") from None

    def wait_until_ready(self) -> None:
        """Waits for the peer's model; `about` then holds its versions and settings."""
        self.about = self._receive()

    def __call__(self, number: int) -> dict[str, float]:
        """One round: the seconds that the peer took, by its own clock."""
        answer = self.ask({"round": number})
        tokens = answer.pop("tokens", None)
        if tokens != self.tokens:
            raise self._fault(f"generated {tokens} tokens in round {number} instead of {self.tokens}")
        return answer

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Sends one line, and waits for the one that answers it."""
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError:
            raise self._fault(self._end()) from None
        return self._receive()

    def close(self) -> None:
        """Ends the peer and whatever it started."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + self.timeout
        while b"\n" not in self._received:
            if not select.select([self._process.stdout], [], [], max(deadline - time.monotonic(), 0))[0]:
                self._process.kill()
                raise self._fault(f"did not answer within {self.timeout:g} s")
            data = self._process.stdout.read(1 << 16)
            if not data:
                raise self._fault(self._end())
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        try:
            return dict(json.loads(line))
        except (ValueError, TypeError):
            raise self._fault(f"answered {line[:80]!r}, which is no JSON object") from None

    def _end(self) -> str:
        try:
            status = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its output"
        end = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"{end}: {last}" if last else end

    def _fault(self, what: str) -> UserError:
        return UserError(f"{self.spec.option}: the peer {self.spec.name} {what}")


def _environment(threads: int) -> dict[str, str]:
    """This process's environment without its own JAX and Python settings; peers run on the CPU and look nothing up."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "PYTHON"))}
    return kept | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
