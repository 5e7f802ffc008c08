"""Charts as inline SVG that belongs to the page: its font, its colours, light or dark.

matplotlib draws with placeholder colours, which become CSS variables afterwards: --ink, --grid,
--arm0, --phase0, ... So one drawing serves both colour schemes. Ids get the chart's name as a
prefix, because all charts share one document.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fp8rl_jax.report.runs import Run

ARM_COLOURS = 6
DASHES = ((), (5, 2), (1.5, 1.5), (6, 2, 1.5, 2))
PHASES = {
    "time/gen": "generation",
    "time/calibrate": "KV calibration",
    "time/reward": "reward",
    "time/logprob": "old log-probabilities",
    "time/ref": "reference policy",
    "time/train": "update",
    "time/sync": "weight sync",
    "time/eval": "evaluation",
    "time/ckpt": "checkpoint",
}
"""Parts of a step, in the order of the loop; a number of its own each, so that a colour means one
phase on every page."""

INK, GRID = "#0a0b01", "#0a0b02"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fp8rl",
    "font.size": 9,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "lines.solid_capstyle": "round",
}


@dataclass(frozen=True)
class Curve:
    """What one chart shows: a metric of every arm over the steps."""

    key: str
    title: str
    about: str
    low: str = ""
    """Lower end of an interval around the metric, where there is one."""
    high: str = ""
    log_scale: bool = False
    smooth: bool = True
    """Draw a running mean over the single steps where there are many."""


@dataclass(frozen=True)
class Chart:
    """A drawing and its words."""

    name: str
    title: str
    about: str
    svg: str
    """Empty where no run has the metric."""


CURVES = (
    Curve("reward/mean", "Reward", "Mean reward of the completions sampled in a step."),
    Curve(
        "eval/accuracy",
        "Held-out accuracy",
        "On prompts that are never trained on; the band is the interval logged with it.",
        "eval/accuracy_low",
        "eval/accuracy_high",
        smooth=False,
    ),
    Curve(
        "mismatch/k3",
        "Mismatch: k3",
        "k3 estimate of KL(rollout || trainer) per token, on a logarithmic scale. Rollout and "
        "trainer hold the same weights, "
        "so all of it is numerics.",
        log_scale=True,
    ),
    Curve(
        "mismatch/token_mult_prob_error",
        "Mismatch: probability ratio",
        "Mean of exp |log p(trainer) - log p(rollout)| over tokens; 1 where both agree.",
    ),
    Curve(
        "completions/mean_length",
        "Completion length",
        "Mean tokens of a completion, its stop token included.",
    ),
    Curve("entropy", "Entropy", "Mean entropy of the policy per sampled token, in nats."),
)


def curve_chart(curve: Curve, runs: list[Run]) -> Chart:
    """Draw one line an arm on shared axes.

    Arm i has colour --arm(i mod 6), and a new dash pattern after every six.
    """
    about = [curve.about]

    def draw(axes: Axes) -> None:
        if curve.log_scale:
            axes.set_yscale("log")
        for index, run in enumerate(runs):
            steps, values = run.series(curve.key)
            if curve.log_scale:
                zeros = sum(value <= 0 for value in values)
                values = [value if value > 0 else np.nan for value in values]
                if zeros:
                    about.append(f"{run.label}: 0 at {zeros} of {len(values)} steps, not drawn.")
            _draw_arm(axes, index, curve, run, steps, values)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))

    logged = any(run.series(curve.key)[0] for run in runs)
    svg = draw_svg(curve.key, draw, height=2.7) if logged else ""
    window = _window(max(len(run.series(curve.key)[0]) for run in runs))
    if curve.smooth and window > 1:
        about.append(f"Faint: single steps; full: mean of {window} steps.")
    return Chart(_slug(curve.key), curve.title, " ".join(about), svg)


def timing_chart(runs: list[Run]) -> Chart:
    """Draw one bar an arm: mean seconds of each phase (see `phase_seconds`)."""
    seconds = [phase_seconds(run) for run in runs]
    colours = {
        label: f"#0a0d{index:02x}" for index, label in enumerate([*PHASES.values(), "other"])
    }

    def draw(axes: Axes) -> None:
        for row, phases in enumerate(seconds):
            left = 0.0
            for label, duration in phases.items():
                axes.barh(row, duration, left=left, height=0.62, color=colours[label])
                left += duration
            axes.text(left, row, f" {left:.3g} s", va="center", ha="left")
        axes.set_yticks(range(len(runs)), [_tick(run) for run in runs])
        axes.invert_yaxis()
        axes.margins(x=0.14)
        axes.set_xlim(left=0)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("seconds a step")

    svg = draw_svg("timing", draw, height=0.9 + 0.42 * len(runs)) if any(seconds) else ""
    about = "Mean seconds of each phase, without the first step, which compiles."
    return Chart("timing", "Where a step's time goes", about, svg)


def _tick(run: Run) -> str:
    name = run.name if len(run.name) < 19 else f"{run.name[:17]}…"
    dtype = run.config.get("compute_dtype")
    return f"{name}\n{dtype} compute" if dtype else name


def phase_seconds(run: Run) -> dict[str, float]:
    """Average the seconds of each phase over the steps after the first.

    "other" is what time/step has on top of them.
    """
    rows = [row for row in run.metrics if "time/step" in row]
    rows = rows[1:] or rows
    if not rows:
        return {}
    means = {
        label: sum(row.get(key, 0.0) for row in rows) / len(rows) for key, label in PHASES.items()
    }
    other = sum(row["time/step"] for row in rows) / len(rows) - sum(means.values())
    return {
        label: duration for label, duration in {**means, "other": other}.items() if duration > 0
    }


def _draw_arm(
    axes: Axes, index: int, curve: Curve, run: Run, steps: list[int], values: list[float]
) -> None:
    colour = f"#0a0c{index % ARM_COLOURS:02x}"
    dashes = DASHES[index // ARM_COLOURS % len(DASHES)]
    line: dict[str, Any] = {"color": colour, "dashes": dashes, "linewidth": 1.8}
    if curve.low and curve.high:
        rows = [row for row in run.metrics if curve.low in row and curve.high in row]
        low, high = ([row[key] for row in rows] for key in (curve.low, curve.high))
        axes.fill_between(
            [row["step"] for row in rows], low, high, color=colour, alpha=0.16, linewidth=0
        )
    window = _window(len(steps)) if curve.smooth else 1
    if window > 1:
        axes.plot(steps, values, color=colour, alpha=0.3, linewidth=0.8)
        axes.plot(steps, _running_mean(values, window), **line)
    else:
        axes.plot(steps, values, marker="o" if len(steps) <= 40 else None, markersize=3, **line)


def _window(points: int) -> int:
    return max(1, points // 16) if points >= 40 else 1


def _running_mean(values: list[float], window: int) -> list[float]:
    """Mean of the last `window` values that are numbers; never of later ones."""
    array = np.array(values, np.float64)
    recent = [array[max(0, end - window) : end] for end in range(1, len(array) + 1)]
    return [float(np.nanmean(part)) if np.isfinite(part).any() else np.nan for part in recent]


def draw_svg(name: str, draw: Callable[[Axes], None], height: float) -> str:
    """Draw an <svg> element without width, height, namespaces or metadata: the page's own.

    `height` in inches of 5 wide.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(5, height), layout="constrained")
        draw(figure.subplots())
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(
        r'<svg[^>]*(viewBox="[^"]*")[^>]*>', r'<svg \1 aria-hidden="true">', text, count=1
    )
    text = text.replace("xlink:href", "href")
    text = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{_slug(name)}-", text)
    for placeholder, variable in ((INK, "ink"), (GRID, "grid")):
        text = text.replace(placeholder, f"var(--{variable})")
    text = re.sub(r"#0a0c([0-9a-f]{2})", lambda match: f"var(--arm{int(match[1], 16)})", text)
    return re.sub(r"#0a0d([0-9a-f]{2})", lambda match: f"var(--phase{int(match[1], 16)})", text)


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower())
