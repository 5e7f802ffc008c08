"""A run's numbers: metrics.jsonl is the record, everything else is a view of it.

The loop calls `log` once a step. A view that fails (no network, a full disk elsewhere) is dropped
with one warning and training goes on; the record may not fail, because a run that nobody can read
afterwards was for nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from fp8rl_jax.config.training import TrackingConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.training.console import COLUMNS, console_tracker


class Tracker(Protocol):
    """Takes the metrics of each step; names such as "reward/mean", values that `float()`
    accepts."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """A file of JSON objects, one a line, each with its "step" and each on disk (in the kernel)
    once written.

    Args:
        path: the file; its directory exists.
        start_step: lines of this step and later ones, left by a run that went on after its last
            checkpoint, are removed, and so is a last line that was cut off. 0 starts an empty file.

    Raises:
        UserError: the file cannot be written, or a line before the last is not JSON with a step.
    """

    def __init__(self, path: Path, start_step: int = 0) -> None:
        self._path = path
        with _faults_named(self._path):
            kept = _lines_before(path, start_step) if path.exists() else []
            replacement = path.with_name(f"{path.name}.tmp")
            replacement.write_bytes(b"".join(kept))
            os.replace(replacement, path)
            self._file = path.open("ab", buffering=0)

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Appends rows; numbers that are not finite become null, as JSON has no other word for
        them.

        Raises:
            UserError: the disk is full, or the file cannot be written for another reason.
        """
        lines = [json.dumps(_plain(row), ensure_ascii=False, allow_nan=False) for row in rows]
        data = "".join(f"{line}\n" for line in lines).encode()
        with _faults_named(self._path):
            while data:
                data = data[self._file.write(data) :]

    def close(self) -> None:
        self._file.close()


class JsonlTracker:
    """metrics.jsonl: {"step": int, "time": seconds since 1970, metric: number or null, ...}, one
    line a step."""

    def __init__(
        self, path: Path, start_step: int = 0, clock: Callable[[], float] = time.time
    ) -> None:
        self._lines, self._clock = JsonLines(path, start_step), clock

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._lines.write([{"step": step, "time": round(self._clock(), 3), **metrics}])

    def close(self) -> None:
        self._lines.close()


class View:
    """A tracker that may fail: its first fault is warned about, and after that it is left alone."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name, self._tracker = name, tracker
        self._alive = True

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._attempt(lambda: self._tracker.log(step, metrics))

    def close(self) -> None:
        self._attempt(self._tracker.close)

    def _attempt(self, action: Callable[[], None]) -> None:
        if not self._alive:
            return
        try:
            action()
        # Whatever a view's library raises, the run is worth more than the view.
        except Exception as error:
            self._alive = False
            print(
                f"fp8rl: warning: {self._name} failed and is off from here on; metrics.jsonl "
                "goes on "
                f"({type(error).__name__}: {error})",
                file=sys.stderr,
            )


class Trackers:
    """Several trackers as one; the first is the record."""

    def __init__(self, trackers: Iterable[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def make_tracker(
    directory: Path,
    config: TrackingConfig,
    *,
    total_steps: int,
    start_step: int = 0,
    settings: Mapping[str, Any] | None = None,
    columns: tuple[tuple[str, str, str], ...] = COLUMNS,
) -> Trackers:
    """The record and the views that the configuration asks for.

    Args:
        directory: run directory; exists.
        total_steps: step at which the run ends, for the time left.
        start_step: first step that will be logged; what the record holds from there on is removed.
        settings: the run's configuration, for views that show it.
        columns: what the console shows.

    Raises:
        UserError: the record cannot be written, or a view's package is not installed or refuses to
            start.
    """
    from fp8rl_jax.training.external_trackers import TensorBoardTracker, WandbTracker

    trackers: list[Tracker] = [JsonlTracker(directory / "metrics.jsonl", start_step)]
    if config.tensorboard:
        trackers.append(
            View("TensorBoard", TensorBoardTracker(directory / "tensorboard", start_step))
        )
    if config.wandb:
        trackers.append(View("Weights & Biases", WandbTracker(directory, config, settings or {})))
    trackers.append(View("the console", console_tracker(total_steps, start_step, columns)))
    return Trackers(trackers)


@contextlib.contextmanager
def _faults_named(path: Path) -> Iterator[None]:
    """Turns the operating system's faults into a line about `path`."""
    try:
        yield
    except OSError as error:
        reason = f"{path}: cannot be written: {error.strerror}"
        raise UserError(
            f"{reason}; once that is put right, --resume goes on from the last checkpoint"
        ) from error


def _lines_before(path: Path, step: int) -> list[bytes]:
    kept = []
    lines = path.read_bytes().splitlines(keepends=True) if step else []
    for number, line in enumerate(lines, 1):
        try:
            is_earlier = json.loads(line)["step"] < step
        except (ValueError, TypeError, KeyError):
            if number < len(lines):
                raise UserError(
                    f"{path}: line {number} is not a JSON object with a step; move the file away"
                ) from None
            continue
        if is_earlier and line.endswith(b"\n"):
            kept.append(line)
    return kept


def _plain(value: Any) -> Any:
    """JSON's own types: scalars of NumPy and JAX become numbers, and what is not finite becomes
    None."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None
