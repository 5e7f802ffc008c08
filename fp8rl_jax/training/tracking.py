"""A run's numbers: metrics.jsonl is the record, everything else is a view of it.

The loop calls `log` once a step. A view that fails (no network, a full disk elsewhere) is dropped
with one warning and training goes on; the record may not fail, because a run that nobody can read
afterwards was for nothing.

TensorBoard and Weights & Biases, from the extra [trackers].
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import math
import os
import secrets
import sys
import textwrap
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from fp8rl_jax.config.training import TrackingConfig
from fp8rl_jax.durable import write_durably
from fp8rl_jax.errors import UserError, switch
from fp8rl_jax.training.console import COLUMNS, console_tracker
from fp8rl_jax.training.live import SHOWN, Live, notebook

_log = logging.getLogger("fp8rl")


_SHOWN_ROWS, _SHOWN_CHARACTERS = 32, 2000
"""Samples that a view shows of a step, and characters of each text."""
SAMPLE_COLUMNS = ("prompt", "completion", "answer", "reward")


class Tracker(Protocol):
    """Takes the metrics of each step; names such as "reward/mean", values that `float()`
    accepts."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


Callback = Callable[[int, Mapping[str, float]], bool | None]
"""Called as f(step, metrics) with each row of metrics.jsonl; True ends the run behind this step."""


@runtime_checkable
class ShowsSamples(Protocol):
    """A tracker that takes samples, too: rows of SAMPLE_COLUMNS, few and short."""

    def show(self, step: int, rows: Sequence[Sequence[str | float]]) -> None: ...


class JsonLines:
    """A file of JSON objects, one a line, each with its "step" and each on disk (in the kernel)
    once written.

    Args:
        path: the file; its directory exists.
        start_step: lines of this step and later ones, left by a run that went on after its last
            checkpoint, are moved to `<name>-replaced.jsonl`, and so is what was cut off or damaged
            behind the line of the step before. 0 starts an empty file.

    Raises:
        UserError: the file cannot be written, or a line before the last is not JSON with a step.
    """

    def __init__(self, path: Path, start_step: int = 0) -> None:
        self._path = path
        with _faults_named(self._path):
            kept, replaced = _divided(path, start_step) if path.exists() else ([], [])
            if replaced:
                with path.with_name(f"{path.stem}-replaced{path.suffix}").open("ab") as file:
                    file.writelines(replaced)
                    file.flush()
                    os.fsync(file.fileno())
            write_durably(path, b"".join(kept))
            self._file = path.open("ab", buffering=0)

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows; numbers that are not finite become null.

        JSON has no other word for them.

        Raises:
            UserError: the disk is full, or the file cannot be written for another reason.
        """
        lines = [json.dumps(as_json(row), ensure_ascii=False, allow_nan=False) for row in rows]
        data = "".join(f"{line}\n" for line in lines).encode()
        with _faults_named(self._path):
            while data:
                data = data[self._file.write(data) :]

    def sync(self) -> None:
        """Flush what was written to the disk.

        Raises:
            UserError: it cannot be.
        """
        with _faults_named(self._path):
            os.fsync(self._file.fileno())

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

    def sync(self) -> None:
        """Flush the rows to the disk."""
        self._lines.sync()

    def close(self) -> None:
        self._lines.close()


class View:
    """A tracker that may fail: its first fault is warned about, and after that it is left alone."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name, self._tracker = name, tracker
        self._alive = True

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._attempt(lambda: self._tracker.log(step, metrics))

    def show(self, step: int, rows: Sequence[Sequence[str | float]]) -> None:
        tracker = self._tracker
        if isinstance(tracker, ShowsSamples):
            self._attempt(lambda: tracker.show(step, rows))

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
    """Several trackers as one.

    Args:
        trackers: views.
        record: what may not fail.
        callbacks: called with each row, behind the others; what they raise ends the run.

    Attributes:
        is_ended: a callback has returned True.
    """

    def __init__(
        self,
        trackers: Iterable[Tracker],
        record: JsonlTracker | None = None,
        callbacks: Iterable[Callback] = (),
    ) -> None:
        self._record, self._callbacks, self.is_ended = record, tuple(callbacks), False
        self._trackers: tuple[Tracker, ...] = (*([record] if record else ()), *trackers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics)
        for callback in self._callbacks:
            self.is_ended |= callback(step, metrics) is True

    def show(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """Show some samples of a step in the views that can: at most 32, texts cut to 2,000
        characters.

        Args:
            samples: rows as samples.jsonl has them.
        """
        rows = [
            [_cut(sample[column]) for column in SAMPLE_COLUMNS]
            for sample in islice(samples, _SHOWN_ROWS)
        ]
        for tracker in self._trackers if rows else ():
            if isinstance(tracker, ShowsSamples):
                tracker.show(step, rows)

    def sync(self) -> None:
        """Flush the record to the disk."""
        if self._record is not None:
            self._record.sync()

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
    callbacks: Iterable[Callback] = (),
) -> Trackers:
    """Open the record and the views that the configuration asks for.

    Args:
        directory: run directory; exists.
        total_steps: step at which the run ends, for the time left.
        start_step: first step that will be logged; what the record holds from there on is removed.
        settings: the run's configuration, for views that show it.
        columns: what the console shows.
        callbacks: of `Trackers`.

    Raises:
        UserError: the record cannot be written, or a view's package is not installed or refuses to
            start.
    """
    from fp8rl_jax.training.tracking import TensorBoardTracker, WandbTracker

    trackers: list[Tracker] = []
    record = JsonlTracker(directory / "metrics.jsonl", start_step)
    if config.tensorboard:
        trackers.append(
            View("TensorBoard", TensorBoardTracker(directory / "tensorboard", start_step))
        )
    if config.wandb:
        trackers.append(View("Weights & Biases", WandbTracker(directory, config, settings or {})))
    if notebook():
        names = SHOWN if columns is COLUMNS else [name for _, name, _ in columns[:2]]
        shown: Tracker = Live(total_steps, names, start_step=start_step, columns=columns)
    else:
        shown = console_tracker(total_steps, start_step, columns)
    trackers.append(View("the console", shown))
    return Trackers(trackers, record, callbacks)


@contextlib.contextmanager
def _faults_named(path: Path) -> Generator[None]:
    """Turns the operating system's faults into a line about `path`."""
    try:
        yield
    except OSError as error:
        reason = f"{path}: cannot be written: {error.strerror}"
        raise UserError(
            f"{reason}; once that is put right, {switch('resume')} goes on from the last checkpoint"
        ) from error


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a record that have a step; lines that are not whole are left out."""
    rows = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            row = json.loads(line)
            rows.append({**row, "step": int(row["step"])})
    return rows


def _divided(path: Path, step: int) -> tuple[list[bytes], list[bytes]]:
    """Lines of steps before `step`, and all others.

    Lines are flushed to the disk before a checkpoint, so behind the last of these a loss of power
    may have left anything.
    """
    kept: list[bytes] = []
    replaced: list[bytes] = []
    last = -1
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        try:
            its = int(json.loads(line)["step"]) if line.endswith(b"\n") else None
        except (ValueError, TypeError, KeyError):
            its = None
        if its is None and not replaced and last < step - 1 and line.endswith(b"\n"):
            raise UserError(
                f"{path}: line {number} is not a JSON object with a step; move the file away"
            )
        if its is not None and its < step:
            kept.append(line)
            last = max(last, its)
        else:
            replaced.append(line if line.endswith(b"\n") else line + b"\n")
    return kept, replaced


def as_json(value: Any) -> Any:
    """JSON's own types: scalars of NumPy and JAX become numbers, and what is not finite becomes
    None."""
    if isinstance(value, Mapping):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def _cut(value: Any) -> str | float:
    """A number, or text of a length that a page can show."""
    if isinstance(value, str) and len(value) > _SHOWN_CHARACTERS:
        return f"{value[:_SHOWN_CHARACTERS]} ... ({len(value):,} characters)"
    return str(value) if isinstance(value, str) else float(value)


class TensorBoardTracker:
    """Event files; on resume the later steps of earlier files are marked as superseded."""

    def __init__(self, directory: Path, start_step: int = 0) -> None:
        module = _import("tensorboardX", "tracking.tensorboard")
        self._writer = module.SummaryWriter(str(directory), purge_step=start_step or None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)
        self._writer.flush()

    def show(self, step: int, rows: Sequence[Sequence[str | float]]) -> None:
        # indented, so that no character of a text is taken for markup
        text = "\n\n---\n\n".join(
            "\n\n".join(
                f"{column}:\n\n{textwrap.indent(str(value), '    ', lambda line: True)}"
                for column, value in zip(SAMPLE_COLUMNS, row, strict=True)
            )
            for row in rows
        )
        self._writer.add_text("samples", text, step)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A Weights & Biases run. Its id is kept in the run directory, so that a resumed run goes on in
    the same charts."""

    def __init__(
        self, directory: Path, config: TrackingConfig, settings: Mapping[str, Any]
    ) -> None:
        self._wandb = wandb = _import("wandb", "tracking.wandb")
        id_file = directory / "wandb_id"
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(4))
        try:
            self._run = wandb.init(
                project=config.wandb_project,
                name=config.wandb_name or directory.name,
                id=id_file.read_text(),
                resume="allow",
                mode=config.wandb_mode,
                dir=str(directory),
                config=dict(settings),
            )
        except wandb.errors.Error as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f'tracking.wandb: {reason} (or set tracking.wandb_mode = "offline")'
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        self._run.log(finite, step=step)

    def show(self, step: int, rows: Sequence[Sequence[str | float]]) -> None:
        table = self._wandb.Table(columns=list(SAMPLE_COLUMNS), data=[list(row) for row in rows])
        self._run.log({"samples": table}, step=step)

    def close(self) -> None:
        self._run.finish()


def _import(package: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise UserError(f"{key}: the package {package} is missing; pip install {package}") from None
