"""The report: what the runs of one comparison did, as one HTML file that needs no network. A script
hides lines and reads numbers from them; without it all is there."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from fp8rl_jax.errors import UserError
from fp8rl_jax.report.charts import (
    ARM_COLOURS,
    CURVES,
    DASHES,
    PHASES,
    Chart,
    curve_chart,
    interval_over_seeds,
    phase_seconds,
    step_seconds,
    timing_chart,
)
from fp8rl_jax.report.comparison import Panel, panel, read_comparison
from fp8rl_jax.report.runs import Arm, Run, find_comparisons, find_runs, group_runs, read_runs

_SHOWN_SAMPLES = 4
_SHOWN_CHARACTERS = 2000
NOTHING = "–"


def write_report(directories: list[Path], output: Path) -> Path:
    """Write the page about the runs and comparisons in `directories` (see `find_runs`).

    Returns `output`, the page.

    Raises:
        UserError: there is no run, a run's files are damaged, or the page cannot be written.
    """
    arms = group_runs(read_runs(find_runs(directories)), ARM_COLOURS)
    page = render(arms, [read_comparison(path) for path in find_comparisons(directories)])
    return save_page(page, output, "name another file with --output")


def save_page(page: str, output: Path, remedy: str) -> Path:
    """Write a page whole or not at all.

    Raises:
        UserError: it cannot be written; `remedy` says what to do.
    """
    unfinished = output.with_name(f"{output.name}.tmp")
    try:
        unfinished.write_text(page, encoding="utf-8")
        os.replace(unfinished, output)
    except OSError as error:
        raise UserError(f"{output}: cannot be written: {error.strerror}; {remedy}") from error
    return output


def page_template(name: str) -> Template:
    """Get a template of this folder; it escapes whatever it is given."""
    environment = Environment(
        loader=PackageLoader("fp8rl_jax.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def render(arms: list[Arm], comparisons: Sequence[dict[str, Any]] = ()) -> str:
    """Render the page as text; all text from the runs' files is escaped."""
    panels = [panel(number, results) for number, results in enumerate(comparisons)]
    charts = [
        chart
        for curve in CURVES
        if arms and ((chart := curve_chart(curve, arms)).svg or not curve.optional)
    ]
    return page_template("page.html").render(
        title=_title(arms, panels),
        arms=arms_with_keys(arms),
        runs=sum(len(arm.runs) for arm in arms),
        lines=lines_text(arms),
        headline=[headline(arm) for arm in arms],
        charts=charts,
        dtype=_shared_dtype(arms),
        timing=timing_chart(arms) if arms else None,
        phases=phase_rows(arms),
        differences=config_differences(arms),
        samples=[sample_pairs(arm.runs[0]) for arm in arms],
        panels=panels,
        **scripted(charts, [[run.config.get("seed", NOTHING) for run in arm.runs] for arm in arms]),
    )


def scripted(charts: Sequence[Chart], seeds: list[list[Any]]) -> dict[str, Any]:
    """Give what a page's script needs: the script, its hash for the page's policy, and the numbers
    of the charts.

    Args:
        seeds: of each arm's runs.
    """
    script = Path(__file__).with_name("charts.js").read_text(encoding="utf-8")
    return {
        "numbers": {
            "charts": {chart.name: chart.hover for chart in charts if chart.hover},
            "seeds": seeds,
        },
        "script": Markup(script),
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    }


def lines_text(arms: list[Arm]) -> str:
    """Say what the lines of arms of several seeds are."""
    said = "Thin: single seeds. Thick: their mean, with its 95 % interval (Student's t)."
    ends = [{run.metrics[-1]["step"] for run in arm.runs} for arm in arms]
    if any(len(steps) > 1 for steps in ends):
        said += " Where a seed ends, the mean goes on without it."
    return said


def arms_with_keys(arms: list[Arm]) -> list[dict[str, Any]]:
    """Give what templates need of each arm: name, label, runs, colour and dash pattern."""
    return [
        {
            "name": arm.name,
            "label": arm.label,
            "runs": arm.runs,
            "colour": arm.colour,
            "dashes": " ".join(str(length) for length in DASHES[arm.dashes % len(DASHES)]),
        }
        for arm in arms
    ]


def phase_rows(arms: list[Arm]) -> list[tuple[int, str, list[str]]]:
    """Make the table of seconds a step: (number of the phase's colour, its name, a cell an arm)."""
    phases = [phase_seconds(arm) for arm in arms]
    return [
        (number, label, [number_text(row.get(label)) for row in phases])
        for number, label in enumerate([*PHASES.values(), "other"])
        if any(label in row for row in phases)
    ]


def headline(arm: Arm) -> dict[str, str]:
    """Make one row of the first table; of several seeds, means with their 95 % intervals.

    A tenth of a run is at least one step; a value that was never logged is a dash.
    """
    run = arm.runs[0]
    steps = list(dict.fromkeys(_steps(run) for run in arm.runs))
    return {
        "Recipe": str(run.config.get("recipe", NOTHING)),
        "Compute dtype": str(run.config.get("compute_dtype", NOTHING)),
        "Steps": ", ".join(steps),
        "Reward, first → last tenth": _first_to_last_tenth(arm, "reward/mean"),
        "Held-out accuracy, first → last": _accuracy(arm),
        "Mismatch k3, last tenth": estimate_text(
            [_tenths(run, "mismatch/k3")[1] for run in arm.runs], number=power_text
        ),
        "Update that arrives, last tenth": estimate_text(
            [_tenths(run, "sync/arrived")[1] for run in arm.runs]
        ),
        "Completion tokens, first → last tenth": _first_to_last_tenth(
            arm, "completions/mean_length"
        ),
        "Seconds a step": estimate_text(step_seconds(arm)),
    }


def median_of(run: Run, key: str, first: int = 0) -> float | None:
    """Take the median of a metric over the steps, without the `first` ones that log it."""
    values = run.series(key)[1]
    values = values[first:] or values
    return statistics.median(values) if values else None


def config_differences(arms: list[Arm]) -> list[tuple[str, list[str]]]:
    """List configuration keys that differ between arms, each with its values by arm."""

    def values(arm: Arm, key: str) -> str:
        of_runs = (
            json.dumps(run.config[key]) if key in run.config else NOTHING for run in arm.runs
        )
        return ", ".join(dict.fromkeys(of_runs))

    keys = sorted({key for arm in arms for run in arm.runs for key in run.config})
    rows = [(key, [values(arm, key) for arm in arms]) for key in keys]
    return [(key, row) for key, row in rows if len(set(row)) > 1]


def sample_pairs(run: Run) -> list[tuple[int, list[dict[str, str]]]]:
    """Choose sampled completions of the first and of the last step that has any.

    (step, samples), one of each where one is all.
    """
    steps = [row["step"] for row in run.samples]
    ends = sorted({min(steps), max(steps)}) if steps else []
    return [
        (end, [_sample(row) for row in run.samples if row["step"] == end][:_SHOWN_SAMPLES])
        for end in ends
    ]


def _title(arms: list[Arm], panels: list[Panel]) -> str:
    if not arms:
        return panels[0].title if len(panels) == 1 else f"{len(panels)} comparisons"
    if len(arms) < 3:
        by = "name" if _shared_dtype(arms) else "label"
        return " and ".join(getattr(arm, by) for arm in arms)
    return f"{sum(len(arm.runs) for arm in arms)} runs"


def _shared_dtype(arms: list[Arm]) -> str:
    """The compute dtype of all runs; empty where they differ, or do not say."""
    dtypes = {run.config.get("compute_dtype") for arm in arms for run in arm.runs}
    return str(dtypes.pop()) if len(dtypes) == 1 and None not in dtypes else ""


def _steps(run: Run) -> str:
    steps = len(set(run.series("reward/mean")[0] or run.series("step")[0]))
    planned = run.config.get("trainer.steps", steps)
    return f"{steps}" if steps == planned else f"{steps} of {planned}"


def _sample(row: dict[str, Any]) -> dict[str, str]:
    return {key: _shortened(row.get(key)) for key in ("prompt", "completion", "answer", "reward")}


def _shortened(value: Any) -> str:
    if value is None:
        return NOTHING
    if isinstance(value, float):
        return f"{value:.3g}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    more = len(text) - _SHOWN_CHARACTERS
    return text if more <= 0 else f"{text[:_SHOWN_CHARACTERS]}… ({more} more characters)"


def _tenths(run: Run, key: str) -> tuple[float | None, float | None]:
    values = run.series(key)[1]
    if not values:
        return None, None
    count = max(1, len(values) // 10)
    return statistics.fmean(values[:count]), statistics.fmean(values[-count:])


def _first_to_last_tenth(arm: Arm, key: str) -> str:
    tenths = [_tenths(run, key) for run in arm.runs]
    first, last = (estimate_text([pair[end] for pair in tenths]) for end in (0, 1))
    return first if first == NOTHING else f"{first} → {last}"


def _accuracy(arm: Arm) -> str:
    evaluations = [
        rows for run in arm.runs if (rows := [row for row in run.metrics if "eval/accuracy" in row])
    ]
    shown = []
    for end in (0, -1) if evaluations else ():
        rows = [rows[end] for rows in evaluations]
        mean, low, high = rows[0]["eval/accuracy"], None, None
        if len(rows) > 1:
            interval = interval_over_seeds([row["eval/accuracy"] for row in rows])
            mean, low, high = interval.mean, interval.low, interval.high
        else:
            low, high = (rows[0].get(f"eval/accuracy_{bound}") for bound in ("low", "high"))
        around = "" if low is None or high is None else f" ({low:.3f}, {high:.3f})"
        shown.append(f"{mean:.3f}{around}")
    return " → ".join(shown) or NOTHING


def number_text(value: float | None) -> str:
    """Write a number with three digits, without an exponent up to a million; None is a dash."""
    if value is None:
        return NOTHING
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def power_text(value: float) -> str:
    """Write a number with an exponent, as those are that spread over powers of ten."""
    return f"{value:.1e}"


def estimate_text(
    values: Sequence[float | None],
    of_logarithm: bool = False,
    number: Callable[[float], str] = number_text,
) -> str:
    """Write the mean over seeds with its 95 % interval, or the value of a single one.

    Args:
        values: None is left out.
        of_logarithm: the geometric mean, as in `interval_over_seeds`.
        number: writes one number.
    """
    known = [value for value in values if value is not None]
    if not known:
        return NOTHING
    interval = interval_over_seeds(known, of_logarithm)
    limits = f" ({number(interval.low)}, {number(interval.high)})"
    return f"{number(interval.mean)}{limits if interval.n > 1 else ''}"
