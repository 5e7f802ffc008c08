"""Runs under a supervisor that kills them and starts them again, by their exit status alone."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8rl_jax.errors import RESUMABLE, UserError

ROOT = Path(__file__).parents[2]
QUICK = (
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)
"""Nearly all of a start is compiling, and how is of no concern here."""
_LONGEST = 300.0
"""Seconds until a run that does not get where it should has failed."""


@dataclass(frozen=True)
class Aim:
    """A moment to kill at: `seconds` behind the begin of a phase, in this step or a later one."""

    step: int
    phase: str
    seconds: float
    process: int = 0


@dataclass
class Told:
    """What a process has told of itself: (seconds since it was started, step, phase)."""

    moves: list[tuple[float, int, str]] = field(default_factory=list)
    rest: bytes = b""

    @property
    def where(self) -> tuple[int, str]:
        """Step and phase; before the first word it starts."""
        return self.moves[-1][1:] if self.moves else (-1, "start")


class Started:
    """The processes of one `fp8rl train`, from their start to the end of all.

    Args:
        words: of the command, the same each time.
        log: what they say on standard error is added to a file for each, of this name; compiled
            programs are kept beside them.
        count: processes.
        devices: simulated CPU devices of each.
    """

    def __init__(self, words: Sequence[str], log: Path, count: int = 1, devices: int = 1):
        self.began = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self.told = [Told() for _ in range(count)]
        self._logs = [log.with_name(f"{log.name}-{i}.err") for i in range(count)]
        self._behind = [path.stat().st_size if path.exists() else 0 for path in self._logs]
        self.processes = []
        port = _free_port()
        for i in range(count):
            place: list[str] = []
            if count > 1:
                place = ["--mesh.coordinator", f"127.0.0.1:{port}"]
                place += ["--mesh.num-processes", str(count), "--mesh.process-id", str(i)]
            reader, writer = os.pipe()
            os.set_blocking(reader, False)
            with self._logs[i].open("a") as file:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "experiments.chaos.told", str(writer)]
                        + [*words, *place],
                        env=_environ(devices, log.with_name(f"{log.name}-compiled")),
                        cwd=ROOT,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=file,
                        pass_fds=(writer,),
                    )
                )
            os.close(writer)
            self._selector.register(reader, selectors.EVENT_READ, i)

    def said(self, process: int = 0) -> str:
        """What it said on standard error since it was started."""
        return self._logs[process].read_bytes()[self._behind[process] :].decode(errors="replace")

    def listen(self, seconds: float) -> None:
        """Take what is told within so many seconds, or what comes first."""
        for key, _ in self._selector.select(seconds):
            with suppress(BlockingIOError):
                data = os.read(key.fd, 1 << 16)
                if not data:
                    self._selector.unregister(key.fd)
                    os.close(key.fd)
                    continue
                told, now = self.told[key.data], time.monotonic() - self.began
                *lines, told.rest = (told.rest + data).split(b"\n")
                for line in lines:
                    step, _, phase = line.decode().partition(" ")
                    told.moves.append((now, int(step), phase))

    def until(self, happened: Callable[[], bool]) -> None:
        """Wait for something, or fail: with what was said, where all have ended or time is up."""
        deadline = time.monotonic() + _LONGEST
        while not happened():
            ended = all(process.poll() is not None for process in self.processes)
            if ended or time.monotonic() > deadline:
                self.kill()
                said = "\n".join(map(self.said, range(len(self.processes))))[-3000:]
                raise UserError(f"the run ended, or hung, before it came to its moment:\n{said}")
            self.listen(0.05)

    def wait(self, seconds: float = _LONGEST) -> list[int]:
        """Wait for the end of all; gives their exit statuses.

        Raises:
            UserError: they have not ended in time; they are killed.
        """
        deadline = time.monotonic() + seconds
        while any(process.poll() is None for process in self.processes):
            self.listen(0.02)
            if time.monotonic() > deadline:
                self.kill()
                raise UserError(f"the run did not end within {seconds:g} s")
        while self._selector.get_map():
            self.listen(0.0)
        return [process.returncode for process in self.processes]

    def kill(self) -> None:
        """Kill what still runs."""
        for process in self.processes:
            process.kill()
            process.wait()

    def reach(self, aim: Aim) -> None:
        """Wait until the moment of an aim."""
        told = self.told[aim.process]
        if aim.step < 0:
            self.until(lambda: time.monotonic() - self.began >= aim.seconds)
            return

        def there() -> bool:
            step, phase = told.where
            return step >= aim.step and phase == aim.phase

        self.until(there)
        time.sleep(aim.seconds)


def killed(run: Started, aim: Aim, output: Path) -> dict[str, Any]:
    """Kill one process of a run at a moment; gives what came of it.

    Raises:
        UserError: another process did not end with a status and a line that say how to go on.
    """
    run.reach(aim)
    run.processes[aim.process].send_signal(signal.SIGKILL)
    at = time.monotonic()
    statuses = run.wait()
    detected, step, phase = time.monotonic() - at, *run.told[aim.process].where
    if statuses[aim.process] != -signal.SIGKILL:
        raise UserError(f"the run had ended with {statuses} when it was to be killed: {run.said()}")
    messages = []
    for i, status in enumerate(statuses):
        if i == aim.process:
            continue
        last = (run.said(i).strip().splitlines() or [""])[-1]
        messages.append(last)
        if status != RESUMABLE or f"process {aim.process} was lost" not in last:
            raise UserError(f"process {i} ended with {status}: {run.said(i)[-2000:]}")
    return {
        "process": aim.process,
        "aimed": [aim.step, aim.phase],
        "step": step,
        "phase": phase,
        "seconds_in": round(at - run.began, 3),
        "detected": round(detected, 3),
        "statuses": statuses,
        "message": messages[0] if messages else "",
        "rows": len(_rows(output)),
    }


def survive(
    start: Callable[[], Started], output: Path, aims: Sequence[Aim]
) -> tuple[list[dict[str, Any]], Started]:
    """Kill a run at each moment, and start it again as often as its exit status says so.

    Returns:
        What came of each kill, and the last start, which went to the end.

    Raises:
        UserError: it ended with another status than 0, 75 or that of the kill.
    """
    kills: list[dict[str, Any]] = []
    for aim in aims:
        run = start()
        found = killed(run, aim, output)
        _recovered(kills, run)
        kills.append(found)
    run = start()
    statuses = run.wait()
    if any(statuses):
        raise UserError(f"the last start ended with {statuses}: {run.said()[-3000:]}")
    _recovered(kills, run)
    return kills, run


def _recovered(kills: list[dict[str, Any]], run: Started) -> None:
    """Add to the kill before when the run was where it had been, and from where it went on."""
    if not kills:
        return
    before = kills[-1]
    _, _, from_step = run.said().partition("resuming at step ")
    before["resumed_at"] = int(from_step.split()[0]) if from_step else 0
    before["steps_lost"] = max(before["rows"] - before["resumed_at"], 0)
    there = [at for at, step, _ in run.told[0].moves if step >= max(before["step"], 0)]
    # killed once more before it was
    before["recovered"] = round(there[0], 3) if there else None


def left(output: Path) -> dict[str, Any]:
    """Everything that a run left, but for times: rows, samples, evaluations, model, state."""
    checkpoints = [int(path.name) for path in (output / "checkpoints").iterdir() if path.is_dir()]
    about = output / "checkpoints" / str(max(checkpoints)) / "about" / "metadata"
    kept = ("samples.jsonl", "evaluations.jsonl", "model/model.safetensors")
    return {
        "rows": [
            {name: x for name, x in row.items() if not name.startswith(("time", "perf/"))}
            for row in _rows(output)
        ],
        **{name: (output / name).read_bytes() for name in kept},
        "state": json.loads(about.read_text())["checksums"],
    }


def _rows(output: Path) -> list[dict[str, Any]]:
    path = output / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _environ(devices: int, cache: Path) -> dict[str, str]:
    environ = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    flags = f"{QUICK} --xla_force_host_platform_device_count={devices}"
    return environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags,
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
