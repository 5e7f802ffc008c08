"""What a person sees while a run goes on: a row a step, and on a terminal a bar with the time left
beneath the rows."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from fp8rl_jax.compiling import COMPILING

# (heading, metric, format), in the order in which they are read
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


TEXT_COLUMNS = (
    ("loss", "loss", "{:.4f}"),
    ("held-out", "eval/loss", "{:.4f}"),
    ("grad norm", "optim/grad_norm", "{:.3f}"),
    ("lr", "optim/lr", "{:.1e}"),
)


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
    happens between them; the clock of a run does not count what compiles."""

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
        clock: Callable[[], float] = COMPILING.steady,
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
        clock: Callable[[], float] = COMPILING.steady,
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
