"""Charts as inline SVG that belongs to the page: its font, its colours, light or dark.

matplotlib draws with placeholder colours, which become CSS variables afterwards: --ink, --grid,
--arm0, --phase0, ... So one drawing serves both colour schemes. Ids get the chart's name as a
prefix, because all charts share one document.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator

from fp8rl_jax.report.runs import Arm, Run
from fp8rl_jax.statistics import Interval, t_interval

ARM_COLOURS = 6
_WIDTH, _CURVE_HEIGHT = 5, 2.7
"""In inches."""
_POINTS = 100
"""Of a seed's curve at most, where it is a running mean."""
DASHES = ((), (5, 2), (1.5, 1.5), (6, 2, 1.5, 2), (10, 3), (6, 2, 1.5, 2, 1.5, 2))
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
    compiles: bool = False
    """Leave out a run's first step, which compiles."""
    optional: bool = False
    """Left out where no run has the metric."""


@dataclass(frozen=True)
class Chart:
    """A drawing and its words."""

    name: str
    title: str
    about: str
    svg: str
    """Empty where no run has the metric."""
    hover: dict[str, Any] | None = None
    """Of a chart over steps: where its axes lie in the drawing, and the numbers of each arm."""


CURVES = (
    Curve("reward/mean", "Reward", "Mean reward of the completions sampled in a step."),
    Curve(
        "eval/accuracy",
        "Held-out accuracy",
        "On prompts that are never trained on.",
        "eval/accuracy_low",
        "eval/accuracy_high",
        smooth=False,
    ),
    Curve(
        "mismatch/k3",
        "Mismatch: k3",
        "k3 estimate of KL(rollout || trainer) per token, on a logarithmic scale. Rollout and "
        "trainer hold the same weights, so all of it is numerics, but for stale tokens.",
        log_scale=True,
    ),
    Curve(
        "mismatch/token_mult_prob_error",
        "Mismatch: probability ratio",
        "Mean of exp |log p(trainer) - log p(rollout)| over tokens; 1 where both agree.",
    ),
    Curve(
        "sync/arrived",
        "Update that arrives",
        "Projection of the served weights' change since the start on the masters': 1 where all of "
        "it is served in the mean, 0 where rounding keeps it back.",
        optional=True,
    ),
    Curve(
        "sync/noise",
        "Noise beside it",
        "What else of the served weights has changed since the start, over the masters' change, on "
        "a logarithmic scale.",
        log_scale=True,
        optional=True,
    ),
    Curve(
        "rollout/stale_tokens",
        "Stale tokens",
        "Share of the tokens that older weights sampled, of completions that were carried over.",
        optional=True,
    ),
    Curve(
        "completions/mean_length",
        "Completion length",
        "Mean tokens of a completion, its stop token included.",
    ),
    Curve("entropy", "Entropy", "Mean entropy of the policy per sampled token, in nats."),
)
THROUGHPUT = Curve(
    "perf/tok_per_s_gpu",
    "Tokens a second",
    "Tokens of prompts and completions per second and device, without the first step, which "
    "compiles.",
    compiles=True,
)


def curve_chart(curve: Curve, arms: Sequence[Arm]) -> Chart:
    """Draw the arms' curves on shared axes.

    An arm of one run is one line. An arm of several is a thin line a seed, and their mean with its
    95 % interval: a band, or points with bars for a metric that has an interval of its own. On a
    logarithmic scale, mean and interval are those of the logarithm. Colour k is --armk.
    """
    about = [curve.about]
    runs = [run for arm in arms for run in arm.runs]
    longest = max((len(run.series(curve.key)[0]) for run in runs), default=0)
    window = _window(longest) if curve.smooth else 1
    as_points = bool(curve.low) and any(len(arm.runs) > 1 for arm in arms)
    drawn: list[Axes] = []
    numbers: dict[int, list[list[float]]] = {}

    def draw(axes: Axes) -> None:
        drawn.append(axes)
        if curve.log_scale:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(LogFormatter())  # 1e-03, as tables have it
            axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))
        for index, arm in enumerate(arms):
            lines = [run.series(curve.key) for run in arm.runs]
            if curve.compiles:
                lines = [(steps[1:], values[1:]) for steps, values in lines]
            if curve.log_scale:
                values = [value for _, values in lines for value in values]
                zeros = sum(value <= 0 for value in values)
                if zeros:
                    about.append(f"{arm.label}: 0 at {zeros} of {len(values)} steps, not drawn.")
                lines = [
                    (steps, [value if value > 0 else np.nan for value in values])
                    for steps, values in lines
                ]
            if len(lines) == 1 and not as_points:
                numbers[index] = _draw_run(axes, index, arm, curve, *lines[0])
            elif lines:
                points = max(len(steps) for steps, _ in lines)
                apart = min(0.006, 0.6 / (len(arms) * max(points, 1)))
                shift = (index - (len(arms) - 1) / 2) * apart
                numbers[index] = _draw_seeds(axes, index, arm, curve, lines, window, shift)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))

    logged = any(run.series(curve.key)[0] for run in runs)
    svg = draw_svg(curve.key, draw, _CURVE_HEIGHT) if logged else ""
    if curve.low:
        about.append(
            "Bars: 95 % intervals over seeds; of an arm with one seed, the interval logged with it."
            if as_points
            else "The band is the interval logged with it."
        )
    if window > 1:
        if any(len(arm.runs) == 1 for arm in arms):
            about.append(f"Faint: single steps; full: mean of {window} steps.")
        else:
            about.append(f"Running means of {window} steps.")
    hover = _axes_in_drawing(drawn[0]) | {"arms": numbers} if drawn else None
    return Chart(_slug(curve.key), curve.title, " ".join(about), svg, hover)


def _axes_in_drawing(axes: Axes) -> dict[str, Any]:
    """Say where the axes of a curve lie in its view box (left, top, right, bottom, in points) and
    which steps they span."""
    place, (first, last) = axes.get_position(), axes.get_xlim()
    width, height = 72 * _WIDTH, 72 * _CURVE_HEIGHT
    box = (place.x0 * width, (1 - place.y1) * height, place.x1 * width, (1 - place.y0) * height)
    return {"box": [round(float(x), 2) for x in box], "steps": [float(first), float(last)]}


def differences_chart(record: dict[str, Any], arms: Sequence[Arm]) -> Chart:
    """Draw the answer: each arm's paired difference to the baseline with the interval of its
    verdict, and the loss that is allowed.

    Args:
        record: of an ablation; its comparisons and its metric.
        arms: in the record's order.
    """
    metric, baseline = record["metric"], record["baseline"]
    places = {arm.name: index for index, arm in enumerate(arms)}
    rows = [
        (places[row["arm"]], row)
        for row in record["comparisons"]
        if row["arm"] in places and None not in row["difference"].values()
    ]
    loss = -metric["margin"] if metric["better"] == "higher" else metric["margin"]

    def draw(axes: Axes) -> None:
        for place, (index, row) in enumerate(rows):
            of, colour = row["difference"], _line_style(arms[index])["color"]
            bar = axes.hlines(place, of["low"], of["high"], colors=colour, linewidth=2.2)
            (point,) = axes.plot(of["mean"], place, "o", color=colour, markersize=6)
            bar.set_gid(f"mean.{index}")
            point.set_gid(f"mean.{index}")
        axes.axvline(0, color=INK, linewidth=0.8, zorder=1)
        axes.axvline(loss, color=INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
        axes.set_yticks(range(len(rows)), [_short(row["arm"]) for _, row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(f"{metric['name']}, less that of {baseline}")

    svg = draw_svg("differences", draw, height=0.7 + 0.34 * len(rows)) if rows else ""
    about = (
        "Over paired seeds, with the interval of the verdict. Dashed: the loss of "
        f"{metric['margin']:g} that is allowed."
    )
    return Chart("differences", f"Difference to {baseline}", about, svg)


def timing_chart(arms: Sequence[Arm]) -> Chart:
    """Draw one bar an arm: mean seconds of each phase (see `phase_seconds`)."""
    seconds = [phase_seconds(arm) for arm in arms]
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
        axes.set_yticks(range(len(arms)), [_tick(arm) for arm in arms])
        axes.invert_yaxis()
        axes.margins(x=0.14)
        axes.set_xlim(left=0)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("seconds a step")

    svg = draw_svg("timing", draw, height=0.9 + 0.42 * len(arms)) if any(seconds) else ""
    about = (
        "Mean seconds of each phase over the steps after the first, which compiles; a bar is what "
        "the table has as seconds a step, evaluations and checkpoints included."
    )
    return Chart("timing", "Where a step's time goes", about, svg)


def _short(name: str) -> str:
    return name if len(name) < 27 else f"{name[:25]}…"


def _tick(arm: Arm) -> str:
    name = _short(arm.name)
    dtype = arm.runs[0].config.get("compute_dtype") if arm.runs else None
    return f"{name}\n{dtype} compute" if dtype else name


def phase_seconds(arm: Arm) -> dict[str, float]:
    """Average the seconds of each phase over the steps after the first, then over the seeds.

    "other" is what time/step has on top of them.
    """
    means = [means for run in arm.runs if (means := _phases_of(run))]
    return {
        label: sum(row.get(label, 0.0) for row in means) / len(means)
        for label in [*PHASES.values(), "other"]
        if any(label in row for row in means)
    }


def step_seconds(arm: Arm) -> list[float]:
    """Give the mean seconds of a step of each run: what `phase_seconds` add up to."""
    return [sum(means.values()) for run in arm.runs if (means := _phases_of(run))]


def _phases_of(run: Run) -> dict[str, float]:
    """Average the seconds of each phase over a run's steps after the first; as `phase_seconds`."""
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


def _line_style(arm: Arm) -> dict[str, Any]:
    dashes = DASHES[arm.dashes % len(DASHES)]
    return {"color": f"#0a0c{arm.colour:02x}", "dashes": dashes, "linewidth": 1.8}


def _draw_run(
    axes: Axes, index: int, arm: Arm, curve: Curve, steps: list[int], values: list[float]
) -> list[list[float]]:
    """Draw an arm of one run, and return what `_draw_seeds` does."""
    line, (run,) = _line_style(arm), arm.runs
    if curve.low and curve.high:
        rows = [row for row in run.metrics if curve.low in row and curve.high in row]
        low, high = ([row[key] for row in rows] for key in (curve.low, curve.high))
        band = axes.fill_between(
            [row["step"] for row in rows], low, high, color=line["color"], alpha=0.16, linewidth=0
        )
        band.set_gid(f"band.{index}")
    window = _window(len(steps)) if curve.smooth else 1
    drawn = _running_mean(values, window) if window > 1 else values
    if window > 1:
        (faint,) = axes.plot(steps, values, color=line["color"], alpha=0.3, linewidth=0.8)
        faint.set_gid(f"seed.{index}.0")
        (thick,) = axes.plot(steps, drawn, **line)
    else:
        marker = "o" if len(steps) <= 40 else None
        (thick,) = axes.plot(steps, values, marker=marker, markersize=3, **line)
    thick.set_gid(f"mean.{index}")
    return _points(run, curve, dict(zip(steps, drawn, strict=True)))


def _points(run: Run, curve: Curve, values: dict[int, float]) -> list[list[float]]:
    """Give what is drawn of a single run, with the interval that was logged, where one was."""
    logged = {
        row["step"]: (row[curve.low], row[curve.high])
        for row in run.metrics
        if curve.low in row and curve.high in row
    }
    return [
        _rounded([step, value, *logged.get(step, (value, value)), 1])
        for step, value in values.items()
        if np.isfinite(value)
    ]


def _rounded(row: list[float]) -> list[float]:
    return [float(f"{x:.5g}") for x in row]


def _draw_seeds(
    axes: Axes,
    index: int,
    arm: Arm,
    curve: Curve,
    lines: list[tuple[list[int], list[float]]],
    window: int,
    shift: float,
) -> list[list[float]]:
    """Draw the seeds of an arm and their mean.

    `shift`, in parts of the axis, keeps the bars of several arms from hiding each other. The
    groups' ids name arm and place of the seed: `draw_svg` makes them classes.

    Returns:
        [step, mean, low, high, number of seeds] of each point drawn.
    """
    line: dict[str, Any] = {**_line_style(arm), "zorder": 3}
    logged = sorted({step for steps, _ in lines for step in steps})
    stride = max(math.ceil(len(logged) / _POINTS), 1) if curve.smooth else 1
    kept = {*logged[::stride], *(steps[-1] for steps, _ in lines if steps)}
    seeds: list[dict[int, float]] = []
    for place, (steps, values) in enumerate(lines):
        smooth = _running_mean(values, window) if window > 1 else values
        points = {
            step: value
            for step, value in zip(steps, smooth, strict=True)
            if step in kept and np.isfinite(value)
        }
        seeds.append(points)
        at, values = list(points), list(points.values())
        thin = axes.plot(at, values, color=line["color"], alpha=0.4, linewidth=0.6, zorder=2)
        if place in arm.broken:
            thin += axes.plot(at[-1:], values[-1:], "x", color=line["color"], markersize=5)
        for part in thin:
            part.set_gid(f"seed.{index}.{place}")
    if len(seeds) == 1:
        means = _points(arm.runs[0], curve, seeds[0])
    else:
        means = _means(seeds, curve.log_scale)
    if not means:
        return []
    steps, mean, low, high, _ = np.array(means).T
    if curve.low:
        places = steps + shift * (steps.max() - steps.min())
        bars = axes.vlines(places, low, high, colors=line["color"], linewidth=1.4, zorder=3)
        bars.set_gid(f"bars.{index}")
        line |= {"linewidth": 1.0, "marker": "o", "markersize": 4}
        (thick,) = axes.plot(places, mean, **line)
    else:
        band = axes.fill_between(steps, low, high, color=line["color"], alpha=0.16, linewidth=0)
        band.set_gid(f"band.{index}")
        (thick,) = axes.plot(steps, mean, **line)
    thick.set_gid(f"mean.{index}")
    return [_rounded(row) for row in means]


def _means(seeds: list[dict[int, float]], of_logarithm: bool) -> list[list[float]]:
    """Average over the seeds that have a step: [step, mean, low, high, seeds]; one alone has no
    interval, and its value stands for both ends."""
    rows = []
    for step in sorted({step for points in seeds for step in points}):
        values = [points[step] for points in seeds if step in points]
        mean = interval_over_seeds(values, of_logarithm)
        rows.append([step, mean.mean, mean.low, mean.high, mean.n])
    return rows


def interval_over_seeds(values: Sequence[float], of_logarithm: bool = False) -> Interval:
    """Give the mean over seeds with its 95 % interval (Student's t).

    Args:
        values: at least one; of one alone, the interval is the value.
        of_logarithm: the geometric mean, with the interval of the logarithm; all values positive.
    """
    if len(values) == 1:
        return Interval(values[0], values[0], values[0], 1)
    if not of_logarithm:
        return t_interval(values)
    of_log = t_interval([math.log(value) for value in values])
    return Interval(math.exp(of_log.mean), math.exp(of_log.low), math.exp(of_log.high), of_log.n)


def _window(points: int) -> int:
    return max(1, points // 16) if points >= 40 else 1


def _running_mean(values: list[float], window: int) -> list[float]:
    """Mean of the last `window` values that are numbers; never of later ones."""
    if not values:
        return []
    array = np.concatenate([np.full(window - 1, np.nan), np.array(values, np.float64)])
    recent = np.lib.stride_tricks.sliding_window_view(array, window)
    known = np.isfinite(recent)
    sums, counts = np.where(known, recent, 0.0).sum(axis=1), known.sum(axis=1)
    return np.where(counts, sums / np.maximum(counts, 1), np.nan).tolist()


def draw_svg(name: str, draw: Callable[[Axes], None], height: float) -> str:
    """Draw an <svg> element without width, height, namespaces or metadata: the page's own.

    `height` in inches, of `_WIDTH` wide.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        draw(figure.subplots())
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(
        r'<svg[^>]*(viewBox="[^"]*")[^>]*>', r'<svg \1 aria-hidden="true">', text, count=1
    )
    text = text.replace("xlink:href", "href")
    text = re.sub(
        r'<g id="(seed|bars|band|mean)\.(\d+)(?:\.(\d+))?"',
        lambda match: (
            f'<g class="{match[1]}" data-arm="{match[2]}"'
            + (f' data-seed="{match[3]}"' if match[3] else "")
        ),
        text,
    )
    # Hundredths of a point are finer than any screen.
    text = re.sub(
        r' d="[^"]*"',
        lambda match: re.sub(
            r"\d+\.\d{3,}",
            lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."),
            match[0],
        ),
        text,
    )
    text = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{_slug(name)}-", text)
    for placeholder, variable in ((INK, "ink"), (GRID, "grid")):
        text = text.replace(placeholder, f"var(--{variable})")
    text = re.sub(r"#0a0c([0-9a-f]{2})", lambda match: f"var(--arm{int(match[1], 16)})", text)
    return re.sub(r"#0a0d([0-9a-f]{2})", lambda match: f"var(--phase{int(match[1], 16)})", text)


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower())
