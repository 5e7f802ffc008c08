"""Which processes of a run still move: each says where it is, and one that is lost is named.

The processes meet at the coordinator's address before JAX does, and keep these connections.
Process 0 hears all others; they hear it. A thread in each process sends where its main thread is
(step, phase, how many exchanges between processes it has begun) and listens. Process 0 judges:

- A connection that closes without a farewell: the process was killed.
- No word for `mesh.lost_after_seconds`: it is stopped, or its host or network is gone.
- Word, but the main thread has not moved for `mesh.hung_after_seconds` while another waits in an
  exchange that it has not begun: it hangs. While it compiles, `mesh.program_seconds` are allowed;
  while rewards are computed, as long as their time limits add up to.
- No main thread has moved for `mesh.program_seconds`: a program hangs that all of them run.

It tells all of them, and each ends with one line and status 75. A process that ends by an error of
its own says so first, and the others end with its status: to start them again would not help. The
others watch process 0 in the same way, so its death is seen by each of them.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from fp8rl_jax.config.run import MeshConfig
from fp8rl_jax.errors import RESUMABLE, UserError, switch

_UNTAKEN, _TAKEN = 2.0, 5.0
"""Seconds that the main thread has to leave by itself after a verdict, before it has begun to and
in all."""
_SECONDS_TO_A_VERDICT = 10.0
_SECONDS_TO_MEET = 300.0
_SECONDS_TO_A_WORD, _SECONDS_BETWEEN_WORDS = 2.0, 30.0


class Progress:
    """Where this process's main thread is; what other threads do is not told."""

    def __init__(self) -> None:
        self.step, self.phase = -1, "start"
        self.moves = self.entered = 0
        self.waiting = self._compiling = False
        self._taking = 0.0
        self.begun: Callable[[], None] = lambda: None

    def begin(self, step: int) -> None:
        """Enter a step, and tell the others at once."""
        self.step = step
        self.move()
        self.begun()

    def move(self) -> None:
        """Say that something has got done."""
        self.moves += 1
        self._compiling = False

    @contextmanager
    def enter(self, name: str) -> Generator[None]:
        """Enter and leave a phase of a step."""
        if not _in_main_thread():
            yield
            return
        before, self.phase = self.phase, name
        self.move()
        try:
            yield
        finally:
            self.phase = before
            self.move()

    @contextmanager
    def exchange(self) -> Generator[None]:
        """Wait for the other processes, which must come to the same exchange."""
        if not _in_main_thread():
            yield
            return
        self.entered += 1
        self.move()
        self.waiting = True
        try:
            yield
        finally:
            self.waiting = False
            self.move()

    @contextmanager
    def taking(self, seconds: float) -> Generator[None]:
        """Do what may take so long without a move."""
        self._taking = seconds
        self.move()
        try:
            yield
        finally:
            self._taking = 0.0
            self.move()

    def compiles(self, event: str, *_: Any, **__: Any) -> None:
        """Take an event of jax.monitoring: a program is traced, lowered and compiled in turn."""
        if event.startswith("/jax/core/compile/"):
            self.move()
            self._compiling = not event.endswith("backend_compile_duration")

    def allowed(self, config: MeshConfig) -> float:
        """Seconds that may pass from here without a move while others wait."""
        program = config.program_seconds if self._compiling else 0.0
        return max(config.hung_after_seconds, program, self._taking + config.lost_after_seconds)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


PROGRESS = Progress()


class Verdict(NamedTuple):
    """Why the run cannot go on."""

    status: int
    """Exit status for every process."""
    line: str


@dataclass
class _Peer:
    """What is known of a process."""

    heard: float
    link: socket.socket | None = None
    standing: dict[str, Any] = field(default_factory=dict)
    rest: bytes = b""
    closed: bool = False
    done: bool = False

    def where(self) -> str:
        step = self.standing.get("step", -1)
        return f"in step {step}" if step >= 0 else "before the first step"


class PeerWatch:
    """This process's end of the connections, and the thread that serves them.

    Args:
        process: number of this process.
        links: its connections, by process.
        config: the bounds.
        progress: of this process.
        leave: ends this process with a status.

    Attributes:
        seconds_to_a_verdict: a connection that breaks is a loss only if there is a verdict within
            this time.
    """

    def __init__(
        self,
        process: int,
        links: dict[int, socket.socket],
        config: MeshConfig,
        progress: Progress = PROGRESS,
        leave: Callable[[int], Any] = os._exit,
    ):
        now = time.monotonic()
        self.seconds_to_a_verdict = min(_SECONDS_TO_A_VERDICT, config.lost_after_seconds)
        self._process, self._config, self._progress, self._end = process, config, progress, leave
        self._interval = min(1.0, config.lost_after_seconds / 10)
        self._peers = {i: _Peer(now, link) for i, link in links.items()}
        self._own = _Peer(now)
        self._last, self._seen, self._idle = now, -1, 0.0
        self._lock, self._decided = threading.Lock(), threading.Event()
        self._taken = self._leaving = False
        self._verdict: Verdict | None = None
        self._selector = selectors.DefaultSelector()
        for i, link in links.items():
            link.setblocking(False)
            self._selector.register(link, selectors.EVENT_READ, i)

    def start(self) -> None:
        """Watch from here on, and leave JAX's own abort behind a verdict.

        The death of process 0 makes JAX's client abort every other process at once. A handler in C
        holds that thread for six seconds (sleep, called with SIGABRT's number), in which this one
        ends the process with a line and a status of its own; any other abort comes that much later.
        """
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        libc.signal(int(signal.SIGABRT), ctypes.cast(libc.sleep, ctypes.c_void_p))
        jax.monitoring.register_event_duration_secs_listener(self._progress.compiles)
        self._progress.begun = lambda: self._tell(0.0)
        for run in (self._run, self._leave):
            threading.Thread(target=run, name="watch", daemon=True).start()

    def verdict(self, seconds: float) -> Verdict | None:
        """Wait for a verdict; where there is one, the main thread has to end the process."""
        self._decided.wait(seconds)
        with self._lock:
            if not self._leaving:
                self._taken = self._taken or self._verdict is not None
                return self._verdict
        # the process ends in a moment, with its line said
        threading.Event().wait()
        return None

    def farewell(self, status: int, why: str = "") -> None:
        """Tell the others that this process ends; with status 0, that it has done its part."""
        self._taken = status != 0
        self._send({"ended": [status, why[:500]]})

    def wait_for_others(self) -> None:
        """Wait a few seconds until the others have gone: process 0's end aborts them."""
        deadline = time.monotonic() + _TAKEN
        while self._process == 0 and time.monotonic() < deadline:
            if all(peer.closed for peer in self._peers.values()):
                return
            time.sleep(0.02)

    def _run(self) -> None:
        while True:
            due = self._last + self._interval
            for key, _ in self._selector.select(max(due - time.monotonic(), 0.0)):
                self._read(key.data)
            self._turn(time.monotonic())

    def _turn(self, now: float) -> None:
        passed = now - self._last
        if passed > self._config.lost_after_seconds / 2:
            # this process was stopped itself: the others' silence says nothing
            for peer in self._peers.values():
                peer.heard = now
        if passed >= self._interval:
            self._tell(min(passed, 2 * self._interval))
            self._last = now
        if self._verdict is None and not self._taken and (found := self._judge(now)):
            if not self._process:
                self._send({"verdict": found})
            self._verdict = found
        if self._verdict is not None:
            self._decided.set()

    def _leave(self) -> None:
        """End the process, unless its main thread does."""
        self._decided.wait()
        assert self._verdict is not None
        began = time.monotonic()
        while time.monotonic() - began < (_TAKEN if self._taken else _UNTAKEN):
            time.sleep(0.02)
        with self._lock:
            self._leaving = True
        if not self._taken:
            print(f"fp8rl: {self._verdict.line}", file=sys.stderr, flush=True)
        self.wait_for_others()
        self._end(self._verdict.status)

    def _tell(self, passed: float) -> None:
        progress = self._progress
        moved = progress.moves != self._seen
        self._seen, self._idle = progress.moves, 0.0 if moved else self._idle + passed
        self._own.standing = {
            "step": progress.step,
            "phase": progress.phase,
            "entered": progress.entered,
            "waiting": progress.waiting,
            "idle": self._idle,
            "allowed": progress.allowed(self._config),
        }
        self._send(self._own.standing)

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        with self._lock:
            for peer in self._peers.values():
                # one that is stopped does not read, and is not waited for
                with suppress(OSError):
                    assert peer.link is not None
                    peer.link.send(data)

    def _read(self, process: int) -> None:
        peer = self._peers[process]
        assert peer.link is not None
        try:
            data = peer.link.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            peer.closed = True
            self._selector.unregister(peer.link)
            return
        peer.heard = time.monotonic()
        *lines, peer.rest = (peer.rest + data).split(b"\n")
        for line in lines:
            self._take(process, peer, json.loads(line))

    def _take(self, process: int, peer: _Peer, message: dict[str, Any]) -> None:
        if "verdict" in message:
            self._verdict = self._verdict or Verdict(*message["verdict"])
        elif "ended" not in message:
            peer.standing = message
        elif not message["ended"][0]:
            peer.done = True
        elif self._verdict is None:
            status, why = message["ended"]
            how = "ended early" if status == RESUMABLE else "ended by an error of its own"
            found = Verdict(status, f"process {process} {how} {peer.where()}: {why}")
            if not self._process:
                self._send({"verdict": found})
            self._verdict = found

    def _judge(self, now: float) -> Verdict | None:
        config = self._config
        for process, peer in self._peers.items():
            if peer.done:
                continue
            if peer.closed:
                return _lost(process, peer, "its connection closed")
            if (silence := now - peer.heard) > config.lost_after_seconds:
                return _lost(process, peer, f"no word from it for {silence:.0f} s")
        everyone = {self._process: self._own} | self._peers
        moving = {i: p for i, p in everyone.items() if p.standing and not p.done}
        if self._process or not moving:
            return None
        awaited = max(p.standing["entered"] * p.standing["waiting"] for p in moving.values())
        for process, peer in moving.items():
            idle, allowed = peer.standing["idle"], peer.standing["allowed"]
            if peer.standing["entered"] < awaited and idle > allowed:
                why = f"it has not moved for {idle:.0f} s, and others wait for it"
                return _lost(process, peer, why)
        idle = min(p.standing["idle"] for p in moving.values())
        if idle > max(config.program_seconds, *(p.standing["allowed"] for p in moving.values())):
            line = (
                f"no process has moved for {idle:.0f} s {self._own.where()} "
                f"({self._progress.phase}); continue with {switch('resume')}"
            )
            return Verdict(RESUMABLE, line)
        return None


def _lost(process: int, peer: _Peer, why: str) -> Verdict:
    phase = peer.standing.get("phase", "start")
    lost = f"process {process} was lost {peer.where()} ({phase}: {why})"
    return Verdict(RESUMABLE, f"{lost}; continue with {switch('resume')}")


def meet(address: str, count: int, process: int) -> dict[int, socket.socket]:
    """Connect the processes of a run: process 0 to all others, these to it.

    Says for whom it waits.

    Args:
        address: host:port of process 0; the port is free again afterwards.
        count: processes of the run.
        process: number of this one.

    Raises:
        UserError: the port is in use; another process has this number or another count; or some
            have not come after 300 s.
    """
    host, _, port = address.rpartition(":")
    said = _Said(address, count)
    if process:
        return {0: _come(host.strip("[]"), int(port), count, process, said)}
    with _listener(address, host, port) as listener:
        return _receive(listener, count, said)


class _Said:
    """For whom a process waits, a line now and then, and an end to it."""

    def __init__(self, address: str, count: int):
        self._address, self._count = address, count
        self._began = time.monotonic()
        self._next = self._began + _SECONDS_TO_A_WORD

    def waiting(self, missing: list[int]) -> None:
        numbers = ", ".join(map(str, missing))
        awaited = f"process{'es' * (len(missing) > 1)} {numbers} of {self._count}"
        now = time.monotonic()
        if now - self._began > _SECONDS_TO_MEET:
            raise UserError(
                f"mesh: {awaited} did not come to {self._address} within {_SECONDS_TO_MEET:g} s; "
                "start every process with the same mesh.coordinator and mesh.num_processes"
            )
        if now > self._next:
            self._next = now + _SECONDS_BETWEEN_WORDS
            print(f"fp8rl: waiting for {awaited} at {self._address}", file=sys.stderr, flush=True)


def _listener(address: str, host: str, port: str) -> socket.socket:
    """A socket on the coordinator's port, for IPv4 and IPv6 where there is both."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(("", int(port)), family=family, dualstack_ipv6=both)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"mesh.coordinator = {address!r}: process 0 cannot listen on port {port} of {host} "
            f"({error}); choose another port, the same for all processes"
        ) from None


def _receive(listener: socket.socket, count: int, said: _Said) -> dict[int, socket.socket]:
    links: dict[int, socket.socket] = {}
    listener.settimeout(0.1)
    while missing := [i for i in range(1, count) if i not in links]:
        said.waiting(missing)
        links = {i: link for i, link in links.items() if _say(link, {"missing": missing})}
        with suppress(TimeoutError):
            link, (host, *_) = listener.accept()
            hello = _line(link, 1.0)
            process, theirs = (hello or {}).get("process"), (hello or {}).get("count")
            if not (isinstance(process, int) and process > 0):
                link.close()
                continue
            if theirs != count:
                refusal = f"mesh.num_processes = {theirs}, and process 0 has {count}"
            elif process in links and _say(links[process], {"missing": missing}):
                refusal = f"mesh.process_id = {process} is that of another process, too ({host})"
            else:
                links[process] = link
                continue
            print(f"fp8rl: {refusal}", file=sys.stderr, flush=True)
            _say(link, {"refused": f"{refusal}; give each process its own id and one count"})
    for link in links.values():
        _say(link, {"go": True})
    return links


def _come(host: str, port: int, count: int, process: int, said: _Said) -> socket.socket:
    missing = [0]
    while True:
        said.waiting(missing)
        # refused, or by somebody else: process 0 is not there yet
        with suppress(OSError):
            link = socket.create_connection((host, port), timeout=2.0)
            _say(link, {"process": process, "count": count})
            while answer := _line(link, 3.0):
                if answer.get("go"):
                    return link
                if "refused" in answer:
                    raise UserError(answer["refused"])
                missing = [i for i in answer["missing"] if i != process]
                if missing:
                    said.waiting(missing)
            link.close()
        missing = [0]
        time.sleep(0.1)


def _say(link: socket.socket, message: dict[str, Any]) -> bool:
    """Send a line; False where the other end has gone."""
    try:
        link.settimeout(1.0)
        link.sendall(json.dumps(message).encode() + b"\n")
        return True
    except OSError:
        return False


def _line(link: socket.socket, seconds: float) -> dict[str, Any] | None:
    """Read a message; None where none comes, or something else than one."""
    data = b""
    link.settimeout(seconds)
    try:
        while not data.endswith(b"\n") and len(data) < 10_000:
            # byte by byte: what follows belongs to the next message
            if not (come := link.recv(1)):
                return None
            data += come
        message = json.loads(data)
    except (OSError, ValueError):
        return None
    return message if isinstance(message, dict) else None
