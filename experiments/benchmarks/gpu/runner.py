"""Runs the parts, each in processes of its own, and ends those that hang."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from experiments.benchmarks.files import read
from experiments.benchmarks.gpu.parts import PARTS, Part
from experiments.benchmarks.gpu.record import ROOT, blame
from experiments.benchmarks.gpu.setting import Setting
from experiments.benchmarks.gpu.worker import FAULT, FAULT_MARK, UNUSABLE
from fp8rl_jax.errors import UserError

LEAST_SECONDS = 30.0  # less than this is not worth starting a process for
GRACE_SECONDS = 75.0  # for the job that is running when a part's time is over
ENDING_SECONDS = 10.0  # before the end of all time no job is begun
POLL_SECONDS = 0.2
RESTART_SECONDS = 2.0  # until a driver has taken back the memory of a process that was ended
Command = Callable[[Part, Path, float], list[str]]


def run(names: Sequence[str], folder: Path, setting: Setting, minutes: float, words: Sequence[str]) -> dict[str, str]:
    """Runs what is not complete yet, in order, as long as there is time.

    Args:
        words: of the command line, for the record.

    Returns:
        Part -> why it is not complete.

    Raises:
        UserError: the folder cannot be written, a file is of another device, or the GPU is missing.
    """
    check_writable(folder)
    end, faults = time.monotonic() + 60 * minutes, {}

    def command(part: Part, path: Path, seconds: float) -> list[str]:
        module = [sys.executable, "-m", "experiments.benchmarks.gpu.worker", part.name, str(path.resolve()), f"{seconds:.1f}"]
        options = ["--torch-python", setting.torch_python, "--words", json.dumps(list(words))]
        return [*module, *options, *(f"--{name}" for name in ("tiny", "profile") if getattr(setting, name))]

    for name in names:
        part, path = PARTS[name], file_of(folder, name)
        if complete(path):
            print(f"{name}: complete", flush=True)
        elif end - time.monotonic() > LEAST_SECONDS:
            faults[name] = run_part(part, path, end, command, environment(part, setting))
    return {name: faults.get(name) or "out of time" for name in names if not complete(file_of(folder, name))}


def environment(part: Part, setting: Setting) -> dict[str, str]:
    """Of a part's process."""
    own = {"JAX_PLATFORMS": "cpu"} if setting.tiny else {"XLA_PYTHON_CLIENT_MEM_FRACTION": str(part.memory)}
    return os.environ | own


def run_part(part: Part, path: Path, end: float, command: Command, environment: dict[str, str]) -> str:
    """Runs a part for its time, or until `end`; in a new process whenever one crashes or hangs.

    Returns:
        What went wrong outside of its jobs; empty for nothing.

    Raises:
        UserError: what the process says is at fault.
    """
    over = time.monotonic() + part.seconds
    begun_until, killed_at = min(over, end - ENDING_SECONDS), min(over + GRACE_SECONDS, end)
    while (left := begun_until - time.monotonic()) > 0:
        with tempfile.TemporaryFile() as errors:
            # a group of its own: what it has started ends with it
            process = subprocess.Popen(
                command(part, path, left), cwd=ROOT, stderr=errors, env=environment, start_new_session=True
            )
            try:
                hung = _wait(process, path, part.stall_seconds, killed_at)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            errors.seek(0)
            lines = [line.strip() for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
        status, said = process.returncode, lines[-1][:500] if lines else "no message"
        if hung is None:
            return ""  # cut off at the end of its time: the next run goes on there
        if not hung and status == FAULT:
            raise UserError(next((line.removeprefix(FAULT_MARK) for line in lines if line.startswith(FAULT_MARK)), said))
        if not hung and status == 0:
            return ""
        ended = hung or (f"killed by signal {-status}: {said}" if status < 0 else f"ended with status {status}: {said}")
        if not blame(path, ended) and status != UNUSABLE:
            return ended  # before any job, where a new process would end, too
        time.sleep(RESTART_SECONDS)
    return ""


def _wait(process: subprocess.Popen, path: Path, stall_seconds: float, over: float) -> str | None:
    """Waits for the process: empty where it ended itself, None where its time was over, or why it hangs."""
    changed, last = _changed(path), time.monotonic()
    while process.poll() is None:
        time.sleep(POLL_SECONDS)
        now = time.monotonic()
        if (seen := _changed(path)) != changed:
            changed, last = seen, now
        if now - last > stall_seconds:
            return f"took longer than {stall_seconds:g} s: taken for one that hangs, and ended"
        if now > over:
            return None
    return ""


def _changed(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def file_of(folder: Path, part: str) -> Path:
    return folder / f"{part}.json"


def complete(path: Path) -> bool:
    """Whether all of a part is measured, or has failed and is recorded so."""
    record = read(path)
    return record is not None and record.get("complete") is True


def check_writable(folder: Path) -> None:
    """
    Raises:
        UserError: the folder cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"--output: {folder} cannot be written ({error.strerror})") from None
