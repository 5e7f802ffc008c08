"""The metrics of a loop as they come: in a notebook a bar, a table and curves below the cell,
elsewhere a row a step.

    live = fp8rl.Live(20)
    for step in range(20):
        ...
        live(step, session.update(rollout, rewards))

`fp8rl.train` shows its run so in a notebook; `callbacks=[fp8rl.Live()]` draws other curves beside.
"""

from __future__ import annotations

import html
import io
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8rl_jax.compiling import COMPILING
from fp8rl_jax.errors import UserError
from fp8rl_jax.training.console import COLUMNS, Table, TimeLeft, clock_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = ("reward/mean", "mismatch/k3", "eval/accuracy", "completions/mean_length")
"""Curves that are drawn by default."""
_ROWS = 8
"""Last rows of the table that stay."""
_PART = 0.1
"""Of a loop's time that drawing takes at most."""


class Live:
    """Shows rows of metrics; called as callback(step, metrics).

    Args:
        total_steps: steps of the loop, for the bar and the time left; 0: not known.
        names: metrics to draw, those that are measured.
        start_step: first step that will be shown.
        columns: of the table: (heading, metric, format).

    Raises:
        UserError: `names` is one name and no list.
    """

    def __init__(
        self,
        total_steps: int = 0,
        names: Sequence[str] = SHOWN,
        *,
        start_step: int = 0,
        columns: tuple[tuple[str, str, str], ...] = COLUMNS,
    ) -> None:
        if isinstance(names, str):
            raise UserError(f"names: expected a list of metrics, got {names!r}")
        self._total, self._names = total_steps, tuple(names)
        self._shell = notebook()
        self._left = TimeLeft(total_steps, start_step, COMPILING.steady)
        self._table = Table(total_steps, columns)
        self._rows: list[str] = []
        self._steps: list[int] = []
        self._metrics: dict[str, list[float]] = {name: [] for name in names}
        self._handle: Any = None
        self._drawn, self._takes, self._is_stale = -1e9, 0.0, False

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show one more row."""
        row = self._table.row(step, metrics)
        if self._shell is None:
            print(*([] if self._steps else [self._table.header()]), row, sep="\n", flush=True)
            self._steps.append(step)
            return
        self._rows = [*self._rows, row][-_ROWS:]
        self._steps.append(step)
        for name, values in self._metrics.items():
            values.append(float(metrics.get(name, np.nan)))
        self._is_stale = True
        if time.monotonic() - self._drawn >= self._takes * (1 / _PART - 1):
            self._draw()

    log = __call__

    def close(self) -> None:
        """Show what was left out for want of time."""
        if self._is_stale:
            self._draw()

    def _draw(self) -> None:
        ipython = import_module("IPython.display")
        began = time.monotonic()
        page = ipython.HTML(self._page())
        if self._handle is None:
            self._handle = ipython.display(page, display_id=True)
            # of a loop that nobody closes the last rows are drawn when its cell ends
            self._shell.events.register("post_run_cell", lambda *_: self.close())
        else:
            self._handle.update(page)
        self._drawn = time.monotonic()
        self._takes, self._is_stale = self._drawn - began, False

    def _page(self) -> str:
        done = self._steps[-1] + 1
        bar = f"step {self._steps[-1]}"
        if self._total:
            left = clock_text(self._left.at(self._steps[-1]))
            done = min(done, self._total)
            bar = (
                f'<progress value="{done}" max="{self._total}"></progress> '
                f"step {done}/{self._total}, {left} left"
            )
        rows = html.escape("\n".join([self._table.header(), *self._rows]))
        columns = {"step": np.array(self._steps)} | {
            name: np.array(values) for name, values in self._metrics.items()
        }
        measured = [name for name in self._names if np.isfinite(columns[name]).any()]
        curves = _svg(draw(columns, measured)) if measured and len(self._steps) > 1 else ""
        return f"<div>{bar}</div><pre>{rows}</pre>{curves}"


def draw(metrics: Mapping[str, Any], names: Sequence[str]) -> Figure:
    """Draw metrics over steps, a panel each.

    Args:
        metrics: columns, "step" among them; NaN where a step has no such number.
        names: of them.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(names), 3), layout="constrained")
    for axes, name in zip(np.atleast_1d(figure.subplots(1, len(names))), names, strict=True):
        known = np.isfinite(metrics[name])
        axes.plot(
            metrics["step"][known],
            metrics[name][known],
            marker="." if known.sum() < 30 else None,
        )
        axes.set(title=name, xlabel="step")
        axes.grid(alpha=0.3)
    return figure


def notebook() -> Any:
    """The shell of a notebook that this runs in; None elsewhere, IPython in a terminal included."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell if getattr(shell, "kernel", None) is not None else None


def _svg(figure: Figure) -> str:
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # letters as such: a fifth of the size
        figure.savefig(text, format="svg")
    return text.getvalue()[text.getvalue().index("<svg") :]
