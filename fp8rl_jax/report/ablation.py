"""What an ablation found, as one HTML page and as text, from its record `ablation.json`.

The verdicts are the record's; the curves are read from the run directories that it names. A run
that failed or collapsed is listed with the reason, and its curve ends with a cross.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.cells import cell_len, set_cell_size

from fp8rl_jax.errors import UserError
from fp8rl_jax.report.charts import (
    ARM_COLOURS,
    CURVES,
    THROUGHPUT,
    curve_chart,
    differences_chart,
    step_seconds,
    timing_chart,
)
from fp8rl_jax.report.comparison import misfit
from fp8rl_jax.report.page import (
    NOTHING,
    arms_with_keys,
    estimate_text,
    lines_text,
    median_of,
    number_text,
    page_template,
    phase_rows,
    power_text,
    save_page,
    scripted,
)
from fp8rl_jax.report.runs import Arm, Run, read_runs
from fp8rl_jax.statistics import t_interval

VERSION = 2
WIDTH = 100
"""Columns of the text where no terminal says how many it has, and of its paragraphs at most."""
_GAP = 2
BROKEN = ("failed", "collapsed")
_NUMBER, _MAYBE = (int, float), (int, float, type(None))
_RUN = {
    **{"seed": int, "directory": str, "status": str, "why": str, "outcome": _MAYBE},
    **{"series": dict, "devices": list, "commit": (str, type(None))},
}
_PATTERN = {
    **dict.fromkeys(("name", "question", "baseline", "judge", "methods", "command", "made"), str),
    "metric": {"name": str, "better": str, "margin": _NUMBER},
    "alpha": _NUMBER,
    "look": [int],
    "seeds": [int],
    "arms": [{"name": str, "recipe": str, "compute_dtype": str, "settings": dict, "runs": [_RUN]}],
    "comparisons": [
        {
            "arm": str,
            "sentence": str,
            "difference": {"mean": _MAYBE, "low": _MAYBE, "high": _MAYBE, "n": int},
            "verdict": str,
            "detectable": _MAYBE,
            "correlation": _MAYBE,
        }
    ],
}


@dataclass(frozen=True)
class Ablation:
    """A record and the runs that it names, read."""

    record: dict[str, Any]
    arms: list[Arm]
    """In the record's order; of each, the runs that left metrics."""
    seeds: list[list[int]]
    """Of these runs."""
    notes: list[str]
    """What the curves lack, one line each."""


def write_page(record: Path) -> Path:
    """Write the page of an ablation beside its record.

    Args:
        record: the file `ablation.json`.

    Returns:
        The page, `ablation.html`.

    Raises:
        UserError: the record or a run's file is damaged, or the page cannot be written.
    """
    return save_page(_render(_read(record)), record.with_suffix(".html"), "make room for it")


def text(record: Path) -> str:
    """Say what the page says, as wide as the terminal; where there is none, in 100 columns.

    Args:
        record: the file `ablation.json`.

    Raises:
        UserError: the record or a run's file is damaged.
    """
    ablation, width = _read(record), shutil.get_terminal_size((WIDTH, 24)).columns
    facts = ablation.record

    def wrapped(line: str, indent: str = "  ") -> list[str]:
        # an estimate and its interval stay in one piece
        whole = re.sub(r"\S+ \([-+\d][^()]*\)", lambda found: found[0].replace(" ", "\xa0"), line)
        lines = textwrap.wrap(
            whole,
            min(width, WIDTH),
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        return [each.replace("\xa0", " ") for each in lines]

    lines = wrapped(": ".join(filter(None, (facts["name"], facts["question"]))))
    lines += ["", *(part for sentence in _verdicts(facts) for part in wrapped(sentence))]
    for table in _tables(_rows(ablation), width):
        lines += ["", *table]
    if broken := _not_finished(facts):
        lines += ["", "runs that did not finish:"]
        for arm, seed, status, why in broken:
            lines += wrapped(f"- {arm}, seed {seed}: {status}: {why}")
    lines += ["", *(part for note in ablation.notes for part in wrapped(f"note: {note}"))]
    lines += wrapped(facts["methods"], "")
    return "\n".join(lines).rstrip()


def _read(path: Path) -> Ablation:
    try:
        record = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON: {error}") from None
    if not isinstance(record, dict) or record.get("version") != VERSION:
        raise UserError(f"{path}: not written by this version's `fp8rl ablate`; run it again")
    fault = misfit(record, _PATTERN, "")
    if not fault and not record["metric"]["margin"] > 0:
        fault = "metric.margin is not positive"
    if not fault and record["baseline"] not in [arm["name"] for arm in record["arms"]]:
        fault = f"baseline {record['baseline']!r} is no arm"
    if fault:
        raise UserError(f"{path}: {fault}; run `fp8rl ablate` again")
    return _with_runs(path, record)


def _with_runs(path: Path, record: dict[str, Any]) -> Ablation:
    """Read the runs of a record; of those whose directories are gone, what the record has of them.
    The page of one that has not finished does without its curves where they cannot be read."""
    runs: dict[tuple[str, int], Run] = {}
    gone = 0
    notes = list(_mixed(record))
    for arm in record["arms"]:
        for row in arm["runs"]:
            directory = path.parent / row["directory"]
            is_finished = row["status"] == "finished"
            try:
                if (directory / "metrics.jsonl").is_file():
                    (runs[arm["name"], row["seed"]],) = read_runs([directory])
                elif row["series"]:
                    runs[arm["name"], row["seed"]] = _recorded(path, arm, row)
                    gone += 1
                elif is_finished:
                    notes.append(f"no curves of {row['directory']}: it has no metrics.jsonl")
            except UserError as error:
                if is_finished:
                    raise
                notes.append(f"no curves of {row['directory']}: {str(error).splitlines()[0]}")
    if gone:
        notes.append(
            f"curves of {gone} runs are from this record: their directories have no metrics.jsonl"
        )
    recipes = list(dict.fromkeys(arm["recipe"] for arm in record["arms"]))
    of_colour: Counter[int] = Counter()
    arms, seeds = [], []
    for arm in record["arms"]:
        rows = sorted(arm["runs"], key=lambda row: row["seed"])
        rows = [row for row in rows if (arm["name"], row["seed"]) in runs]
        colour = recipes.index(arm["recipe"]) % ARM_COLOURS
        arms.append(
            Arm(
                arm["name"],
                [runs[arm["name"], row["seed"]] for row in rows],
                colour,
                of_colour[colour],
                frozenset(i for i, row in enumerate(rows) if row["status"] in BROKEN),
            )
        )
        of_colour[colour] += 1
        seeds.append([row["seed"] for row in rows])
    return Ablation(record, arms, seeds, notes)


def _recorded(path: Path, arm: dict[str, Any], row: dict[str, Any]) -> Run:
    """A run as the record's series have it.

    Raises:
        UserError: a series is damaged.
    """
    metrics: dict[int, dict[str, Any]] = {}
    for key, series in row["series"].items():
        fault = misfit(series, {"steps": [int], "values": [_MAYBE]}, key)
        if not fault and len(series["steps"]) != len(series["values"]):
            fault = f"{key} has not as many steps as values"
        if fault:
            raise UserError(
                f"{path}: series of {row['directory']}: {fault}; run `fp8rl ablate` again"
            )
        for step, value in zip(series["steps"], series["values"], strict=True):
            if value is not None:
                metrics.setdefault(step, {"step": step})[key] = value
    config = {"recipe": arm["recipe"], "compute_dtype": arm["compute_dtype"], "seed": row["seed"]}
    rows = [metrics[step] for step in sorted(metrics)]
    return Run(row["directory"], path.parent / row["directory"], rows, [], config, "", {}, [])


def _mixed(record: dict[str, Any]) -> Iterator[str]:
    """Say where runs that are compared were not made alike."""
    whole = [run for arm in record["arms"] for run in arm["runs"] if run["outcome"] is not None]
    for what, values in (
        ("devices", {", ".join(map(str, run["devices"])) for run in whole}),
        ("commits", {str(run["commit"]) for run in whole}),
    ):
        if len(values) > 1:
            yield f"runs were made with different {what}: {'; '.join(sorted(values))}"


def _render(ablation: Ablation) -> str:
    record, arms = ablation.record, ablation.arms
    first, others = (*CURVES[:3], THROUGHPUT), CURVES[3:]
    charts = [
        *(curve_chart(curve, arms) for curve in first),
        timing_chart(arms),
        *(curve_chart(curve, arms) for curve in others),
    ]
    shown = [
        ", ".join(filter(None, (facts["name"], _unquantized(facts)))) for facts in record["arms"]
    ]
    keys = {
        arm["name"]: arm | {"shown": name}
        for arm, name in zip(arms_with_keys(arms), shown, strict=True)
    }
    return page_template("ablation.html").render(
        title=record["name"],
        record=record,
        arms=list(keys.values()),
        verdicts=[
            (keys.get(row["arm"]), sentence)
            for row, sentence in zip(record["comparisons"], _verdicts(record), strict=True)
        ],
        rows=_rows(ablation),
        charts=[chart for chart in charts if chart.svg],
        phases=phase_rows(arms),
        differences=differences_chart(record, arms),
        broken=_not_finished(record),
        lines=lines_text(arms),
        differing=_settings(record),
        notes=ablation.notes,
        **scripted(charts, ablation.seeds),
    )


def _unquantized(arm: dict[str, Any]) -> str:
    """What the recipe bf16 is in float32 compute, which its name contradicts; empty for others."""
    is_plain = arm["recipe"] == "bf16" and arm["compute_dtype"] == "float32"
    return "unquantized (float32)" if is_plain else ""


def _verdicts(record: dict[str, Any]) -> list[str]:
    return [row["sentence"] for row in record["comparisons"]]


def _rows(ablation: Ablation) -> list[dict[str, str]]:
    """Make the table: a row an arm, means over seeds with 95 % intervals."""
    record = ablation.record
    compared = {row["arm"]: row for row in record["comparisons"]}
    margin = record["metric"]["margin"]
    # of problems that are right or not
    is_share = record["metric"].get("over") == "seeds_and_problems"
    bounds = {"least": 0.0, "most": 1.0} if is_share else {}
    rows = []
    for facts, arm in zip(record["arms"], ablation.arms, strict=True):
        states = Counter(run["status"] for run in facts["runs"])
        finished = f"{states.pop('finished', 0)} of {len(facts['runs'])}"
        others = [f"{count} {status}" for status, count in states.items()]
        outcomes = [run["outcome"] for run in facts["runs"] if run["outcome"] is not None]
        difference = "baseline" if facts["name"] == record["baseline"] else NOTHING
        comparison = compared.get(facts["name"], {})
        if comparison:
            limits = comparison["difference"]
            difference = _estimate(limits["mean"], limits["low"], limits["high"], margin)
        outcome = t_interval(outcomes, **bounds)
        rows.append(
            {
                "Arm": facts["name"],
                "Recipe": _unquantized(facts) or facts["recipe"],
                "Compute dtype": facts["compute_dtype"],
                "Seeds finished": ", ".join([finished, *others]),
                record["metric"]["name"]: _estimate(
                    outcome.mean, outcome.low, outcome.high, margin
                ),
                f"Difference to {record['baseline']}": difference,
                "Sees, in 80 %": _estimate(comparison.get("detectable"), None, None, margin),
                "Correlation of pairs": number_text(comparison.get("correlation")),
                **_served(record, facts),
                "k3, geometric mean": _mismatch(arm.runs),
                "Tokens/s": estimate_text([median_of(run, THROUGHPUT.key, 1) for run in arm.runs]),
                "Seconds a step": estimate_text(step_seconds(arm)),
                "Peak memory, GiB": _memory(arm.runs),
            }
        )
    dropped = [label for label in rows[0] if all(row[label] == NOTHING for row in rows)]
    if all(row["Recipe"] == row["Arm"] for row in rows):
        dropped.append("Recipe")
    return [{label: row[label] for label in row if label not in dropped} for row in rows]


def _served(record: dict[str, Any], facts: dict[str, Any]) -> dict[str, str]:
    """Held-out accuracy under the arm's own recipe, where another judges."""
    if not record["judge"]:
        return {}
    served = [run["series"].get("eval/accuracy", {}).get("values", []) for run in facts["runs"]]
    of = t_interval([values[-1] for values in served if values], least=0.0, most=1.0)
    text = _estimate(of.mean, of.low, of.high, record["metric"]["margin"])
    return {"eval/accuracy, as served": text}


def _estimate(mean: float | None, low: float | None, high: float | None, margin: float) -> str:
    """Write an estimate as `statistics.sentence` does: with one decimal more than the margin."""
    if mean is None or not math.isfinite(mean):
        return NOTHING
    decimals = max(0, 1 - math.floor(math.log10(margin)))
    first, *limits = (
        f"{round(x, decimals) + 0.0:.{decimals}f}"
        for x in (mean, low, high)
        if x is not None and math.isfinite(x)
    )
    return f"{first} ({', '.join(limits)})" if len(limits) == 2 else first


def _mismatch(runs: list[Run]) -> str:
    """Write the mean over a run's steps, averaged over seeds: the geometric mean, as charts
    have it, where no seed has zero."""
    means = [sum(values) / len(values) for run in runs if (values := run.series("mismatch/k3")[1])]
    return estimate_text(means, all(mean > 0 for mean in means), power_text)


def _memory(runs: list[Run]) -> str:
    peaks = [max(values) for run in runs if (values := run.series("perf/memory_peak_gib")[1])]
    return number_text(max(peaks)) if any(peaks) else NOTHING


def _not_finished(record: dict[str, Any]) -> list[tuple[str, int, str, str]]:
    """List the runs that have not finished: (arm, seed, status, why)."""
    return [
        (arm["name"], run["seed"], run["status"], run["why"] or NOTHING)
        for arm in record["arms"]
        for run in arm["runs"]
        if run["status"] != "finished"
    ]


def _settings(record: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """List the settings that arms have of their own, each with its value by arm."""
    keys = sorted({key for arm in record["arms"] for key in arm["settings"]})
    return [
        (
            key,
            [
                json.dumps(arm["settings"][key], ensure_ascii=False)
                if key in arm["settings"]
                else NOTHING
                for arm in record["arms"]
            ],
        )
        for key in keys
    ]


def _tables(rows: list[dict[str, str]], width: int) -> Iterator[list[str]]:
    """Write arms side by side, a line for each number of theirs, as many as fit; no cell is broken,
    so one alone may be wider."""
    label, *numbers = rows[0]
    first = max(map(cell_len, ["", *numbers])) + _GAP
    cells = [[row[name] for name in (label, *numbers)] for row in rows]
    widths = [max(map(cell_len, column)) + _GAP for column in cells]
    while cells:
        fit = 1
        while fit < len(cells) and first + sum(widths[: fit + 1]) - _GAP <= width:
            fit += 1
        beside = [[set_cell_size(name, first) for name in ("", *numbers)]]
        for column, size in zip(cells[:fit], widths, strict=False):
            beside.append([set_cell_size(cell, size) for cell in column])
        yield ["".join(line).rstrip() for line in zip(*beside, strict=True)]
        cells, widths = cells[fit:], widths[fit:]
