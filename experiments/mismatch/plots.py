"""The charts, as SVG files: mismatch over the steps beside its means, and what was learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.mismatch.summary import K3, steps_of
from experiments.mismatch.variants import KIND

WINDOW = 10
COLOURS = {
    "rollout only": ("#d55e00", "#e69f00", "#8c2d04"),
    "end to end": ("#0072b2", "#56b4e9", "#009e73", "#6a51a3"),
    "bf16": ("#222222",),
    "exact": ("#222222", "#009e73"),
}
STYLE = {
    "svg.hashsalt": "fp8rl",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
}


def colour(variant: str) -> str:
    """Warm for FP8 in the rollout alone, cold for FP8 on both sides, black for bf16."""
    kind = next(kind for kind, names in KIND.items() if variant in names)
    return COLOURS[kind][KIND[kind].index(variant)]


def draw_mismatch(runs: dict[str, Any], summary: dict[str, Any], path: Path) -> None:
    """Left: k3 of each step; right: its mean with the interval, and the mean of each seed. Both on one logarithmic axis."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.5, 3.8), layout="constrained")
        over_steps, means = figure.subplots(1, 2, sharey=True, width_ratios=(5, 3))
        zero = [name for name, row in summary["variants"].items() if row["k3"]["mean"] == 0]
        drawn = [name for name in summary["variants"] if name not in zero]
        for name in drawn:
            _line(over_steps, name, steps_of(runs[name], K3))
        over_steps.set_yscale("log")
        over_steps.set(xlabel="step", ylabel="k3 of KL(rollout || trainer), nats a token", xlim=(0, None))
        over_steps.set_title(f"Mean of {WINDOW} steps and of all seeds; shaded: from the least to the largest seed", fontsize=9)
        for place, name in enumerate(drawn):
            row = summary["variants"][name]["k3"]
            low, high = row["interval"]
            means.vlines(place, low, high, color=colour(name), linewidth=2.5)
            means.plot([place] * len(row["seeds"]), list(row["seeds"].values()), "_", color=colour(name), markersize=9)
            means.plot(place, row["mean"], "o", color=colour(name), markersize=5)
        means.set_xticks(range(len(drawn)), drawn, rotation=40, ha="right")
        for label, name in zip(means.get_xticklabels(), drawn, strict=True):
            label.set_color(colour(name))
        means.set_title("Mean over all steps, 95 % interval; dashes: seeds", fontsize=9)
        means.grid(axis="x", visible=False)
        if zero:
            over_steps.text(0.01, 0.01, f"0 at every step: {', '.join(zero)}", transform=over_steps.transAxes, fontsize=9)
        _save(figure, path)


def draw_learning(runs: dict[str, Any], path: Path) -> None:
    """Reward, entropy and held-out accuracy of every variant."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.5, 3.2), layout="constrained")
        reward, entropy, accuracy = figure.subplots(1, 3)
        for name, seeds in runs.items():
            _line(reward, name, steps_of(seeds, "reward/mean"), shade=False)
            _line(entropy, name, steps_of(seeds, "entropy"), shade=False)
            steps = next(iter(seeds.values()))["evaluation"]["step"]
            values = np.mean([run["evaluation"]["eval/accuracy"] for run in seeds.values()], axis=0)
            accuracy.plot(steps, values, "o-", color=colour(name), markersize=3, linewidth=1.3, label=name)
        for axes, title in (
            (reward, f"Reward, mean of {WINDOW} steps"),
            (entropy, "Entropy, nats a token"),
            (accuracy, "Held-out accuracy, greedy"),
        ):
            axes.set_title(title, fontsize=9)
            axes.set_xlabel("step")
        figure.legend(*accuracy.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
        _save(figure, path)


def _line(axes: Axes, name: str, values: np.ndarray, shade: bool = True) -> None:
    """A running mean over the seeds' steps [seeds, steps]."""
    smooth = np.stack([np.convolve(row, np.full(WINDOW, 1 / WINDOW), "valid") for row in values])
    steps = np.arange(WINDOW - 1, values.shape[1])
    dashes = (4, 1.5) if name in KIND["exact"] else (None, None)
    axes.plot(steps, smooth.mean(axis=0), color=colour(name), linewidth=1.4, dashes=dashes)
    if shade:
        some = slice(None, None, 4)  # an edge of every step would make up most of the file
        low, high = smooth.min(axis=0)[some], smooth.max(axis=0)[some]
        axes.fill_between(steps[some], low, high, color=colour(name), alpha=0.18, linewidth=0)


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, format="svg", facecolor="white", metadata={"Date": None})
    text = path.read_text()
    path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")
