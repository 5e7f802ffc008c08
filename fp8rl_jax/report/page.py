"""The report: what the runs of one comparison did, as one HTML file that needs no network and no
script."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from fp8rl_jax.errors import UserError
from fp8rl_jax.report.charts import (
    ARM_COLOURS,
    CURVES,
    DASHES,
    PHASES,
    curve_chart,
    phase_seconds,
    timing_chart,
)
from fp8rl_jax.report.comparison import Panel, panel, read_comparison
from fp8rl_jax.report.runs import Run, find_comparisons, find_runs, read_runs

_SHOWN_SAMPLES = 4
_SHOWN_CHARACTERS = 2000
NOTHING = "–"


def write_report(directories: list[Path], output: Path) -> Path:
    """Write the page about the runs and comparisons in `directories` (see `find_runs`).

    Returns `output`, the page.

    Raises:
        UserError: there is no run, a run's files are damaged, or the page cannot be written.
    """
    runs = read_runs(find_runs(directories))
    page = render(runs, [read_comparison(path) for path in find_comparisons(directories)])
    unfinished = output.with_name(f"{output.name}.tmp")
    try:
        unfinished.write_text(page, encoding="utf-8")
        os.replace(unfinished, output)
    except OSError as error:
        raise UserError(
            f"{output}: cannot be written: {error.strerror}; name another file with --output"
        ) from error
    return output


def render(runs: list[Run], comparisons: Sequence[dict[str, Any]] = ()) -> str:
    """Render the page as text; all text from the runs' files is escaped."""
    environment = Environment(
        loader=PackageLoader("fp8rl_jax.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    panels = [panel(number, results) for number, results in enumerate(comparisons)]
    phases = [phase_seconds(run) for run in runs]
    labels = [
        label
        for label in [*PHASES.values(), "other"]
        if any(label in seconds for seconds in phases)
    ]
    return environment.get_template("page.html").render(
        title=_title(runs, panels),
        arms=[_arm(index, run) for index, run in enumerate(runs)],
        headline=[headline(run) for run in runs],
        charts=[curve_chart(curve, runs) for curve in CURVES] if runs else [],
        timing=timing_chart(runs) if runs else None,
        phases=[
            (_phase_number(label), label, [_number(row.get(label)) for row in phases])
            for label in labels
        ],
        differences=config_differences(runs),
        samples=[sample_pairs(run) for run in runs],
        panels=panels,
    )


def headline(run: Run) -> dict[str, str]:
    """Make one row of the first table.

    A tenth of a run is at least one step; a value that was never logged is a dash.
    """
    steps = len(set(run.series("reward/mean")[0] or run.series("step")[0]))
    planned = run.config.get("trainer.steps", steps)
    seconds = run.series("time/step")[1]
    return {
        "Recipe": str(run.config.get("recipe", NOTHING)),
        "Compute dtype": str(run.config.get("compute_dtype", NOTHING)),
        "Steps": f"{steps}" if steps == planned else f"{steps} of {planned}",
        "Reward, first → last tenth": _first_to_last_tenth(run, "reward/mean"),
        "Held-out accuracy, first → last": _accuracy(run),
        "Mismatch k3, last tenth": _number(_tenths(run, "mismatch/k3")[1]),
        "Completion tokens, first → last tenth": _first_to_last_tenth(
            run, "completions/mean_length"
        ),
        "Seconds a step, median": _number(statistics.median(seconds) if seconds else None),
    }


def config_differences(runs: list[Run]) -> list[tuple[str, list[str]]]:
    """Configuration keys that are not the same in every run, each with its value by run."""
    keys = sorted({key for run in runs for key in run.config})
    rows = [
        (key, [json.dumps(run.config[key]) if key in run.config else NOTHING for run in runs])
        for key in keys
    ]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


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


def _title(runs: list[Run], panels: list[Panel]) -> str:
    if not runs:
        return panels[0].title if len(panels) == 1 else f"{len(panels)} comparisons"
    return " and ".join(run.label for run in runs) if len(runs) < 3 else f"{len(runs)} runs"


def _arm(index: int, run: Run) -> dict[str, Any]:
    dashes = " ".join(str(length) for length in DASHES[index // ARM_COLOURS % len(DASHES)])
    return {"run": run, "colour": index % ARM_COLOURS, "dashes": dashes}


def _phase_number(label: str) -> int:
    return [*PHASES.values(), "other"].index(label)


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


def _first_to_last_tenth(run: Run, key: str) -> str:
    first, last = _tenths(run, key)
    return NOTHING if first is None else f"{_number(first)} → {_number(last)}"


def _accuracy(run: Run) -> str:
    rows = [row for row in run.metrics if "eval/accuracy" in row]
    shown = []
    for row in [rows[0], rows[-1]] if rows else []:
        low, high = row.get("eval/accuracy_low"), row.get("eval/accuracy_high")
        interval = "" if low is None or high is None else f" ({100 * low:.1f}–{100 * high:.1f})"
        shown.append(f"{100 * row['eval/accuracy']:.1f} %{interval}")
    return " → ".join(shown) or NOTHING


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3g}"
