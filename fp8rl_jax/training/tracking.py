"""A run's numbers: metrics.jsonl is the record, everything else is a view of it.

The loop calls `log` once a step. A view that fails (no network, a full disk elsewhere) is dropped
with one warning and training goes on; the record may not fail, because a run that nobody can read
afterwards was for nothing.

TensorBoard and Weights & Biases, from the extra [trackers].

What a person sees while a run goes on: a row a step, and on a terminal a bar with the time left
beneath the rows.

What a person must be told while a run goes on: skipped updates, failed rewards, groups that
teach nothing.
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
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from fp8rl_jax.config.training import TrackingConfig, TrainerConfig
from fp8rl_jax.durable import write_durably
from fp8rl_jax.errors import UserError
from fp8rl_jax.parallel import is_main_process
from fp8rl_jax.rollout.arrival import DEAF
from fp8rl_jax.tasks.scores import Scores

_log = logging.getLogger("fp8rl")
COLUMNS = (
    ("reward", "reward/mean", "{:.3f}"),
    ("held-out", "eval/accuracy", "{:.3f}"),
    ("length", "completions/mean_length", "{:.1f}"),
    ("entropy", "entropy", "{:.3f}"),
    ("mismatch k3", "mismatch/k3", "{:.1e}"),
    ("arrives", "sync/arrived", "{:.2f}"),
    ("s/step", "time/step", "{:.2f}"),
)
SFT_COLUMNS = (
    ("loss", "loss", "{:.4f}"),
    ("held-out", "eval/accuracy", "{:.3f}"),
    ("grad norm", "optim/grad_norm", "{:.3f}"),
)


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
        lines = [json.dumps(_plain(row), ensure_ascii=False, allow_nan=False) for row in rows]
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
    """

    def __init__(self, trackers: Iterable[Tracker], record: JsonlTracker | None = None) -> None:
        self._record = record
        self._trackers: tuple[Tracker, ...] = (*([record] if record else ()), *trackers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics)

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
) -> Trackers:
    """Open the record and the views that the configuration asks for.

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
    from fp8rl_jax.training.tracking import TensorBoardTracker, WandbTracker

    trackers: list[Tracker] = []
    record = JsonlTracker(directory / "metrics.jsonl", start_step)
    if config.tensorboard:
        trackers.append(
            View("TensorBoard", TensorBoardTracker(directory / "tensorboard", start_step))
        )
    if config.wandb:
        trackers.append(View("Weights & Biases", WandbTracker(directory, config, settings or {})))
    trackers.append(View("the console", console_tracker(total_steps, start_step, columns)))
    return Trackers(trackers, record)


@contextlib.contextmanager
def _faults_named(path: Path) -> Generator[None]:
    """Turns the operating system's faults into a line about `path`."""
    try:
        yield
    except OSError as error:
        reason = f"{path}: cannot be written: {error.strerror}"
        raise UserError(
            f"{reason}; once that is put right, --resume goes on from the last checkpoint"
        ) from error


def steps_of(path: Path) -> set[int]:
    """Read which steps a record has; lines that are not whole have none."""
    steps = set()
    for line in path.read_bytes().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            steps.add(int(json.loads(line)["step"]))
    return steps


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


class TensorBoardTracker:
    """Event files; on resume the later steps of earlier files are marked as superseded."""

    def __init__(self, directory: Path, start_step: int = 0) -> None:
        module = _import("tensorboardX", "tracking.tensorboard")
        self._writer = module.SummaryWriter(str(directory), purge_step=start_step or None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A Weights & Biases run. Its id is kept in the run directory, so that a resumed run goes on in
    the same charts."""

    def __init__(
        self, directory: Path, config: TrackingConfig, settings: Mapping[str, Any]
    ) -> None:
        wandb = _import("wandb", "tracking.wandb")
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

    def close(self) -> None:
        self._run.finish()


def _import(package: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise UserError(
            f"{key}: the package {package} is missing; pip install 'fp8rl_jax[trackers]'"
        ) from None


# (heading, metric, format): the columns, in the order in which they are read.
class Table:
    """Lines of equal width under one header.

    Args:
        total_steps: sets the width of the step's number.
        columns: like COLUMNS.
    """

    def __init__(
        self, total_steps: int, columns: tuple[tuple[str, str, str], ...] = COLUMNS
    ) -> None:
        self._step_width = max(len("step"), len(str(total_steps)))
        self._columns = [
            (heading, name, form, max(len(heading), 8)) for heading, name, form in columns
        ]

    def header(self) -> str:
        """Write the headings over `row`."""
        return " ".join(
            [
                f"{'step':>{self._step_width}}",
                *(f"{heading:>{width}}" for heading, _, _, width in self._columns),
            ]
        )

    def row(self, step: int, metrics: Mapping[str, float]) -> str:
        """Write one step's columns; what was not measured in this step is a dash."""
        cells = [
            f"{form.format(float(metrics[name])) if name in metrics else '-':>{width}}"
            for _, name, form, width in self._columns
        ]
        return " ".join([f"{step:>{self._step_width}}", *cells])


class TimeLeft:
    """Seconds until the last step, at the mean pace of the last `window` steps, with all that
    happens between them."""

    def __init__(
        self, total_steps: int, start_step: int, clock: Callable[[], float], window: int = 20
    ) -> None:
        self._total, self._clock = total_steps, clock
        self._marks: deque[tuple[int, float]] = deque(
            [(start_step - 1, clock())], maxlen=window + 1
        )

    def at(self, step: int) -> float | None:
        """Note that `step` (counted from 0) is done; None until a step has been timed."""
        if step > self._marks[-1][0]:
            self._marks.append((step, self._clock()))
        (first, began), (last, ended) = self._marks[0], self._marks[-1]
        if last == first:
            return None
        return max(self._total - 1 - step, 0) * (ended - began) / (last - first)


class PlainConsole:
    """A header and aligned lines, for logs and pipes."""

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        header_every: int = 40,
        columns: tuple[tuple[str, str, str], ...] = COLUMNS,
    ) -> None:
        self._table, self._stream = Table(total_steps, columns), stream or sys.stdout
        self._left = TimeLeft(total_steps, start_step, clock)
        self._header_every, self._rows = header_every, 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._rows % self._header_every == 0:
            print(f"{self._table.header()} {'left':>8}", file=self._stream)
        self._rows += 1
        print(
            f"{self._table.row(step, metrics)} {clock_text(self._left.at(step)):>8}",
            file=self._stream,
            flush=True,
        )

    def close(self) -> None:
        self._stream.flush()


class LiveConsole:
    """The same rows on a terminal, above a bar that shows how far the run is and the time left."""

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        columns: tuple[tuple[str, str, str], ...] = COLUMNS,
    ) -> None:
        self._total, self._table = total_steps, Table(total_steps, columns)
        self._left = TimeLeft(total_steps, start_step, clock)
        self._progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=40),
            TextColumn("{task.fields[left]} left"),
            console=console,
        )
        self._task = self._progress.add_task(
            "", total=total_steps, completed=start_step, left=clock_text(None)
        )
        self._progress.start()
        self._print(f"[bold]{self._table.header()}[/bold]")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._print(self._table.row(step, metrics))
        done = min(step + 1, self._total)
        self._progress.update(self._task, completed=done, left=clock_text(self._left.at(step)))

    def close(self) -> None:
        self._progress.stop()

    def _print(self, line: str) -> None:
        self._progress.console.print(
            line, highlight=False, no_wrap=True, overflow="ignore", crop=False
        )


def console_tracker(
    total_steps: int, start_step: int = 0, columns: tuple[tuple[str, str, str], ...] = COLUMNS
) -> PlainConsole | LiveConsole:
    """Follow a run live on a terminal, in plain lines elsewhere."""
    console = Console()
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveConsole(total_steps, start_step, console, columns=columns)
    return PlainConsole(total_steps, start_step, columns=columns)


def clock_text(seconds: float | None) -> str:
    """Write seconds as m:ss or h:mm:ss; "-" for None."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


ALARM = 1.05
"""The mean of exp |d log p| above which NeMo RL looks closer. One token far from the rest is enough
for it, so that one step alone says nothing."""


_DEAF_STEPS = 3
"""So many steps in a row, as the first ones move the masters little."""


class Watch:
    """Reads each step's metrics, warns, and stops a run that no longer learns.

    Args:
        trainer: how many faults in a row stop the run; a run of fewer steps stops when rewards
            failed in all of them.
        checkpoints: where the last whole checkpoint lies, for the message.
        compute_dtype: of the run, for the message.
        log: where what rewards print stands, for the message.
    """

    def __init__(
        self,
        trainer: TrainerConfig,
        checkpoints: object,
        compute_dtype: str = "bfloat16",
        log: object = "rewards.log",
    ):
        self._abort_after, self._checkpoints, self._log = (
            trainer.abort_after_skips,
            checkpoints,
            log,
        )
        self._abort_after_failed = min(trainer.abort_after_failed_rewards, trainer.steps)
        self._dtype = compute_dtype
        self._skipped = self._in_a_row = self._failed_in_a_row = 0
        self._warned_constant, self._apart, self._deaf = False, 0, 0

    @property
    def skipping(self) -> bool:
        """Whether the last update was skipped for values that are not finite."""
        return self._in_a_row > 0

    def see(self, step: int, metrics: dict[str, float], scores: Scores) -> dict[str, float]:
        """Take one step's metrics and the scores of all that it sampled.

        An update that is skipped while a dynamic loss scale is being found is no fault: it is said,
        not counted, and does not end a row of faults either.

        Returns:
            `optim/skipped_steps`, the number of skipped updates since the run started or was
            resumed.

        Raises:
            UserError: trainer.abort_after_skips updates in a row were skipped, or every reward of
                trainer.abort_after_failed_rewards steps in a row failed.
        """
        overflow = metrics.get("optim/overflow", 0.0)
        skipped = metrics["optim/skipped"] > overflow
        self._skipped += skipped
        if overflow:
            _log.info(
                "step %d: gradients overflow with a loss scale of %g; it is lowered",
                step,
                metrics["optim/loss_scale"],
            )
        if skipped:
            self._in_a_row += 1
            roles = [
                name.removeprefix("nonfinite/")
                for name, v in metrics.items()
                if name.startswith("nonfinite/") and v > 0
            ]
            _log.warning(
                "step %d: update skipped, non-finite %s%s",
                step,
                ", ".join(roles),
                self._advice(roles),
            )
            if self._in_a_row >= self._abort_after:
                raise UserError(
                    f"{self._in_a_row} updates in a row were skipped for non-finite values "
                    "(trainer.abort_after_skips)"
                    f"{self._advice(roles)}; the last checkpoint in {self._checkpoints} is whole"
                )
        elif not overflow:
            self._in_a_row = 0
        if scores.failed.any() and is_main_process():
            _log.warning("step %d: %s", step, scores.failure_text())
        self._failed_in_a_row = self._failed_in_a_row + 1 if scores.failed.all() else 0
        if self._failed_in_a_row >= self._abort_after_failed:
            raise UserError(
                f"every reward failed in {self._failed_in_a_row} steps in a row "
                "(trainer.abort_after_failed_rewards): "
                f"{scores.first_error}; what rewards print is in {self._log}"
            )
        if metrics["reward/frac_zero_std"] == 1.0 and not self._warned_constant:
            self._warned_constant = True
            _log.warning(
                "step %d: every group has equal rewards, which teaches nothing where advantages "
                "compare in groups (said once)",
                step,
            )
        apart = metrics.get("mismatch/token_mult_prob_error", 1.0)
        self._apart = self._apart + 1 if apart > ALARM else 0
        if self._apart == 2:
            _log.warning(
                "step %d: rollout and trainer disagree, as in the step before: "
                "mismatch/token_mult_prob_error is %.3g, and above %g in step after step something "
                "other than rounding is likely; `fp8rl compare` shows where (said once, until it "
                "is below)",
                step,
                apart,
                ALARM,
            )
        # not a number before the masters have moved
        arrived = metrics.get("sync/arrived", 1.0)
        self._deaf = self._deaf + 1 if arrived < DEAF else 0
        if self._deaf == _DEAF_STEPS:
            _log.warning(
                "step %d: %.0f %% of the update since the start has reached the policy that is "
                "served (sync/arrived), and %.2g times as much noise (sync/noise): weights move by "
                "less than half a step of %s, and rounding leaves them where they were; %s or a "
                "larger optimizer.learning_rate (said once, until it is above %g)",
                step,
                100 * arrived,
                metrics["sync/noise"],
                *self._deaf_to(),
                DEAF,
            )
        return {"optim/skipped_steps": float(self._skipped)}

    def _deaf_to(self) -> tuple[str, str]:
        """The grid that an update does not leave, and what to do."""
        if self._dtype == "float32":
            return "the format that they are quantized to", (
                "where the checkpoint was quantized in it, use a recipe that has weights in it on "
                "both sides, with model.dither"
            )
        return self._dtype, 'set model.dither = "auto", compute_dtype = "float32"'

    def _advice(self, roles: list[str]) -> str:
        if self._dtype != "float16" or "loss" not in roles:
            return ""
        return (
            ", and float16 holds nothing above 65504: if activations exceed it, set "
            'compute_dtype to "bfloat16"'
        )
