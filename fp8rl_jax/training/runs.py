"""A whole run from Python, and what it leaves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from fp8rl_jax.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = ("reward/mean", "mismatch/k3", "eval/accuracy", "completions/mean_length")
"""What `Run.plot` draws by default."""


@dataclass(frozen=True)
class Run:
    """A run directory: metrics.jsonl, samples.jsonl, config.toml, checkpoints/, model/."""

    directory: Path

    @property
    def model(self) -> Path:
        """The trained model, for `fp8rl.load`."""
        return self.directory / "model"

    @property
    def metrics(self) -> dict[str, Float[np.ndarray, " rows"]]:
        """A column for each metric and one for "step", a row for each line of metrics.jsonl, NaN where a line has no such number:
        what `pandas.DataFrame` takes.

        Raises:
            UserError: there is no record, or it is damaged.
        """
        path = self.directory / "metrics.jsonl"
        try:
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: cannot be read ({error})") from None
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: np.array([_number(row.get(name)) for row in rows]) for name in names}

    def plot(self, names: Sequence[str] = SHOWN) -> Figure:
        """Metrics over steps, one panel each; names that the run did not measure are left out.

        Raises:
            UserError: it measured none of them.
        """
        from matplotlib.figure import Figure

        metrics = self.metrics
        names = [name for name in names if name in metrics]
        if not names:
            raise UserError(f"{self.directory}: none of these were measured; Run.metrics has all names")
        figure = Figure(figsize=(4 * len(names), 3), layout="constrained")
        for axes, name in zip(np.atleast_1d(figure.subplots(1, len(names))), names, strict=True):
            known = np.isfinite(metrics[name])
            axes.plot(metrics["step"][known], metrics[name][known], marker="." if known.sum() < 30 else None)
            axes.set(title=name, xlabel="step")
            axes.grid(alpha=0.3)
        return figure


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else np.nan
