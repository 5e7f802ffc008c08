"""What an ablation's directory holds, and what follows from it: ablation.json.

OUTPUT/ablation.json       the record: arms, runs, outcomes, comparisons (version 2)
OUTPUT/design.json         fingerprints of the file and of the code, settings that were `auto`
OUTPUT/ARM-SEED/           a run directory of `fp8rl train`
OUTPUT/start/              that of the warm start, where there is one
OUTPUT/configs/, logs/     each run's configuration, and what it said
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fp8rl_jax.ablation.design import Arm, Design
from fp8rl_jax.durable import locked, write_durably
from fp8rl_jax.errors import UserError
from fp8rl_jax.statistics import (
    Comparison,
    Interval,
    Look,
    compare_arms,
    sentence,
)
from fp8rl_jax.training.tracking import as_json

Status = Literal["finished", "failed", "collapsed", "running", "missing"]
OVER = ("finished", "collapsed", "failed")
"""States that are outcomes."""
JUDGED = "judged.json"
"""What the judge found of a run's model: metrics judged/*, and the row of evaluations.jsonl."""
KEPT = (
    "reward/mean",
    "reward/frac_zero_std",
    "advantages/frac_zero",
    "entropy",
    "rollout/entropy",
    "mismatch/k3",
    "mismatch/logprob_abs_diff_max",
    "mismatch/is_clip_frac",
    "eval/accuracy",
    "eval/loss",
    "optim/grad_norm",
    "optim/skipped_steps",
    "optim/rejected",
    "correction/clip_frac",
    "correction/reject_frac",
    "stability/loss_spikes",
    "stability/grad_norm_spikes",
    "sharpness/0.001",
    "sync/changed",
    "sync/arrived",
    "sync/noise",
    "sync/cosine",
    "rollout/decode_steps",
    "rollout/stale_tokens",
    "fp8/sat_frac_q",
    "fp8/sat_frac_k",
    "fp8/sat_frac_v",
)
"""Metrics of which the record keeps every value that there is, so that it says what was found
without the runs."""
_NUMBERS = re.compile(r"\[\n[-+.\deE,\s]+\]")


@dataclass(frozen=True)
class RunState:
    """How far a run is, from what it left on disk."""

    status: Status
    why: str = ""
    outcome: float | None = None
    step: int = 0
    """Steps done."""
    row: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The last row of metrics.jsonl; of a run that is whole, the last value of every metric."""
    by_problem: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of a run that is whole and measured by problem, the row of evaluations.jsonl."""
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """All of metrics.jsonl."""


def write_json(path: Path, value: Any) -> None:
    """Write a file that is whole at any moment; numbers of a list stand in one line."""
    text = _NUMBERS.sub(lambda found: "".join(found[0].split()), json.dumps(value, indent=1))
    write_durably(path, text + "\n")


def read_rows(directory: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Read a file of JSON lines; none where it is not there, and without a line that is cut off."""
    rows = []
    with contextlib.suppress(OSError, ValueError):
        for line in (directory / file).read_text(encoding="utf-8").splitlines():
            rows.append(json.loads(line))
    return rows


def read_judged(directory: Path) -> dict[str, Any]:
    """Read what the judge found; nothing where it has not judged."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((directory / JUDGED).read_text(encoding="utf-8"))
    return {}


def _is_locked(path: Path) -> bool:
    if not path.exists():
        return False
    with locked(path) as lock:
        return lock is None


def note(design: Design, name: str) -> dict[str, Any]:
    """Read what the runner noted of a run: {"why": of its failure, "seconds": it took}."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((design.directory / "logs" / f"{name}.json").read_text())
    return {}


def has_model(design: Design, name: str) -> bool:
    """Whether a run has written its model, which is the last that it does."""
    return (design.directory / name / "model" / "config.json").exists()


def run_state(design: Design, arm: Arm, seed: int) -> RunState:
    """Tell how far a run is."""
    name = design.run_name(arm, seed)
    rows = read_rows(design.directory / name)
    return dataclasses.replace(_state(design, arm, name, rows), rows=rows)


def _state(design: Design, arm: Arm, name: str, rows: list[dict[str, Any]]) -> RunState:
    last = rows[-1] if rows else {}
    step, steps = last.get("step", -1) + 1, design.steps(arm)
    # an evaluation after the last step has a row of its own
    is_whole = step > steps if design.evaluates(arm) else step == steps
    judged = read_judged(design.directory / name) if design.file.judge else {}
    if is_whole and has_model(design, name) and (judged or not design.file.judge):
        return _outcome(design, design.directory / name, rows, judged)
    step = min(step, steps)
    if _is_locked(design.directory / "logs" / f"{name}.lock"):
        return RunState("running", "", None, step, last)
    if why := note(design, name).get("why"):
        return RunState("failed", why, None, step, last)
    return RunState(
        "missing", f"stopped at step {step} of {steps}" if step else "not started", None, step, last
    )


def _outcome(
    design: Design, directory: Path, rows: list[dict[str, Any]], judge: dict[str, Any]
) -> RunState:
    """The state of a run that is whole."""
    metric, collapse = design.file.metric.name, design.file.collapse
    merged = {key: value for row in rows for key, value in row.items()}
    step = merged["step"]
    merged |= {key: value for key, value in judge.items() if key.startswith("judged/")}
    by_problem = {}
    if design.file.metric.by_problem:
        is_judged = metric.startswith("judged/")
        evaluations = [judge] if is_judged else read_rows(directory, "evaluations.jsonl")
        by_problem = {
            key: each[key]
            for each in evaluations[-1:]
            if is_judged or each["step"] == step
            for key in ("problems", "samples", "correct")
        }

    def failed(name: str) -> RunState | None:
        if name not in merged:
            return RunState("failed", f"no {name} in metrics.jsonl", None, step, merged)
        value = merged[name]
        if value is None or not math.isfinite(value):
            return RunState("failed", f"{name} is not finite at the end", None, step, merged)
        return None

    judged = collapse.metric or metric
    if fault := failed(metric) or failed(judged):
        return fault
    if design.file.metric.over_problems and not by_problem:
        why = f"no row of step {step} in evaluations.jsonl"
        return RunState("failed", why, None, step, merged)
    low, high = collapse.below, collapse.above
    ends = merged[judged]
    if low is not None and ends < low:
        why = f"{judged} ended at {ends:.4g}, below {low:g}"
        return RunState("collapsed", why, merged[metric], step, merged, by_problem)
    if high is not None and ends > high:
        why = f"{judged} ended at {ends:.4g}, above {high:g}"
        return RunState("collapsed", why, merged[metric], step, merged, by_problem)
    return RunState("finished", "", merged[metric], step, merged, by_problem)


def make_record(
    design: Design,
    resolved: dict[str, dict[str, Any]],
    known: Mapping[str, dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Make the record of what there is now, as ablation.json has it.

    Comparisons are those of the last look that all its runs have reached; before the first there
    are none.

    Args:
        resolved: of each arm, settings that were `auto`.
        known: runs whose directories are gone, by their names, as `run_entry` had them.
    """
    known = known or {}
    runs = {
        arm.name: [
            known.get(design.run_name(arm, seed)) or run_entry(design, arm, seed)
            for seed in design.seeds
        ]
        for arm in design.arms
    }
    states = {
        arm: [
            RunState(run["status"], run["why"], run["outcome"], by_problem=run["by_problem"])
            for run in each
        ]
        for arm, each in runs.items()
    }
    looks, file = design.file.looks, design.file
    reached = [
        look
        for look in range(1, looks + 1)
        if all(s.status in OVER for each in states.values() for s in each[: design.seeds_at(look)])
    ]
    look = reached[-1] if reached else 0
    shared = shared_settings(resolved)
    return {
        "version": 2,
        "name": design.name,
        "question": file.question,
        "baseline": file.baseline,
        "metric": {
            "name": file.metric.name,
            "better": file.metric.better,
            "margin": file.metric.margin,
            "over": file.metric.over,
        },
        "judge": file.judge,
        "collapse": vars(file.collapse) | {"metric": file.collapse.metric or file.metric.name},
        "alpha": file.alpha,
        "look": [look, looks],
        "seeds": list(design.seeds),
        "resolved": shared,
        "arms": [
            {
                "name": arm.name,
                "recipe": arm.config.recipe,
                "compute_dtype": arm.config.compute_dtype,
                "settings": arm.settings
                | {k: v for k, v in resolved.get(arm.name, {}).items() if k not in shared},
                "runs": runs[arm.name],
            }
            for arm in design.arms
        ],
        "comparisons": _comparisons(design, states, look) if look else [],
        "methods": methods(design),
        "command": f"fp8rl ablate {design.source}",
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        **_fingerprint(design, [run for each in runs.values() for run in each]),
    }


def kept_behaviour(design: Design) -> dict[str, Any] | None:
    """Read the fingerprint of the code that began the runs (`behaviour`); None where they are older
    than it, or none is there."""
    return _kept(design).get("behaviour")


def _kept(design: Design) -> dict[str, Any]:
    """design.json; empty where it is not there."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((design.directory / "design.json").read_text())
    return {}


def behaviour_mark(behaviour: Mapping[str, Any] | None) -> str | None:
    """Give what a run keeps of the fingerprint of its code, so that it gets no other; None without
    one."""
    text = json.dumps(behaviour, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16] if behaviour else None


def _fingerprint(design: Design, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The fingerprint of the design's arms, where it is that of every run."""
    behaviour = kept_behaviour(design)
    if behaviour is None or {run.get("behaviour") for run in runs} != {behaviour_mark(behaviour)}:
        return {}
    names = {"start", *(arm.name for arm in design.arms)}
    golden = {name: found for name, found in behaviour["golden"].items() if name in names}
    return {"fingerprint": behaviour | {"golden": golden}}


def shared_settings(resolved: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Give the settings that were `auto` and are the same for all arms."""
    first = next(iter(resolved.values()), {})
    return {
        key: value
        for key, value in first.items()
        if all(each.get(key) == value for each in resolved.values())
    }


def run_entry(design: Design, arm: Arm, seed: int, kept: Sequence[str] = KEPT) -> dict[str, Any]:
    """Give what a record keeps of a run, from its directory, with every value of metrics `kept`."""
    name, state = design.run_name(arm, seed), run_state(design, arm, seed)
    directory, series = design.directory / name, {}
    for metric in kept:
        known = [row for row in state.rows if row.get(metric) is not None]
        series[metric] = {
            "steps": [row["step"] for row in known],
            "values": [_digits(row[metric]) for row in known],
        }
    made: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        made = json.loads((directory / "run.json").read_text(encoding="utf-8"))
    judged = {name: value for name, value in state.row.items() if name.startswith("judged/")}
    return {
        "seed": seed,
        "directory": name,
        "status": state.status,
        "why": state.why,
        "outcome": state.outcome,
        "commit": made.get("commit"),
        "behaviour": behaviour_mark(kept_behaviour(design)),
        "devices": made.get("devices", []),
        "series": {name: values for name, values in series.items() if values["steps"]},
        "judged": judged,
        "by_problem": state.by_problem,
    }


def _digits(value: float) -> float:
    return float(f"{value:.5g}")


def _comparisons(
    design: Design, states: dict[str, list[RunState]], look: int
) -> list[dict[str, Any]]:
    metric, count = design.file.metric, design.seeds_at(look)
    assert metric.margin is not None
    compared = compare_arms(
        {arm: [state.outcome for state in each[:count]] for arm, each in states.items()},
        design.file.baseline,
        metric.margin,
        alpha=design.file.alpha,
        better=metric.better,
        collapsed={
            arm: [state.status == "collapsed" for state in each[:count]]
            for arm, each in states.items()
        },
        look=Look(look, design.file.looks),
        resolution=_resolution(design, states),
        by_problem=_by_problem(design, states, count) if metric.over_problems else None,
        span=1.0 if metric.by_problem else math.inf,
    )
    return [
        as_json(dataclasses.asdict(each)) | {"sentence": sentence(each, metric.margin)}
        for each in compared.values()
    ]


def _resolution(design: Design, states: dict[str, list[RunState]]) -> float | None:
    """The smallest difference that two accuracies can have; None of other metrics."""
    if not design.file.metric.by_problem:
        return None
    answers = [
        len(state.by_problem["correct"]) * state.by_problem["samples"]
        for each in states.values()
        for state in each
        if state.by_problem
    ]
    return 1 / max(answers) if answers else None


def _by_problem(
    design: Design, states: dict[str, list[RunState]], count: int
) -> dict[str, np.ndarray] | None:
    """Each arm's outcome on each problem, float [seeds, problems]; None where no run has one.

    Raises:
        UserError: runs were measured on different problems.
    """
    kept = {
        design.run_name(arm, seed): state.by_problem
        for arm in design.arms
        for seed, state in zip(design.seeds[:count], states[arm.name], strict=False)
        if state.outcome is not None
    }
    if not kept:
        return None
    first = next(iter(kept))
    for name, row in kept.items():
        if row["problems"] != kept[first]["problems"]:
            raise UserError(
                f"{design.directory}: {name} and {first} were measured on different problems, "
                'which cannot be paired; give metric.over = "seeds"'
            )
    width = len(kept[first]["correct"])

    def values(state: RunState) -> np.ndarray:
        if not state.by_problem:
            return np.full(width, math.nan)
        correct = np.array(state.by_problem["correct"], float)
        if design.file.metric.name.endswith("/pass_at_k"):
            return (correct > 0).astype(float)
        return correct / state.by_problem["samples"]

    return {arm: np.stack([values(s) for s in each[:count]]) for arm, each in states.items()}


def read_comparison(row: Mapping[str, Any]) -> Comparison:
    """Read a comparison of a record back."""
    limits: dict[str, Any] = {"mean": math.nan, "low": -math.inf, "high": math.inf}
    given = {key: value for key, value in row["difference"].items() if value is not None}
    fields: dict[str, Any] = {key: value for key, value in row.items() if key != "sentence"}
    fields["difference"] = Interval(**limits | given)
    return Comparison(**fields)


def methods(design: Design) -> str:
    """Write the paragraph for a paper: what was run, compared and fixed beforehand."""
    file, arms = design.file, [arm.name for arm in design.arms]
    metric, collapse = file.metric, file.collapse
    on_text = design.base.task.kind == "text"
    dtypes = sorted({arm.config.compute_dtype for arm in design.arms})
    rules = [
        f"{word} {bound:g}"
        for word, bound in (("below", collapse.below), ("above", collapse.above))
        if bound is not None
    ]
    lines = [
        f"We trained {len(arms)} arms ({', '.join(arms)}) with {len(design.seeds)} seeds each, in "
        f"{' and '.join(dtypes)} compute.",
        "Runs of one seed share "
        + ("text, its order" if on_text else "problems, their order, sampling keys")
        + " and initial weights"
        + {
            "none": ".",
            "shared": "; all start from one supervised warm start.",
            "per_seed": "; each seed has its own supervised warm start.",
        }[file.start],
        f"The primary outcome is the last value of {metric.name} ({metric.better} is better)"
        + (
            f"; every trained model was judged under the recipe {file.judge}."
            if file.judge
            else "."
        ),
        f"Arms are compared with {file.baseline} by paired differences, {_over(design)}, with "
        f"Holm's correction over arms at alpha = {file.alpha:g}"
        + (
            f" and {file.looks} looks with O'Brien-Fleming-like alpha spending."
            if file.looks > 1
            else "."
        ),
        f"An arm is called no worse where the interval excludes a loss of more than "
        f"{metric.margin:g}. {_beforehand(design)}",
    ]
    lines.append(
        "These intervals hold where differences spread symmetrically; where an arm is now and then "
        "much worse, few seeds flatter it (docs/statistics.md has how much). A study with this "
        "spread sees, in 80 % of all cases, the true difference that stands beside each arm."
    )
    if rules:
        judged = collapse.metric or metric.name
        lines.append(f"A run counts as collapsed where {judged} ends {' or '.join(rules)}.")
    lines.append("Runs that failed or collapsed are reported, and none was left out.")
    return " ".join(lines)


def _beforehand(design: Design) -> str:
    """What was fixed before the first run, in a sentence."""
    raised = _kept(design).get("raised_from")
    if not raised:
        return "Margin, number of seeds and looks were fixed beforehand."
    way = " to ".join(map(str, [*raised, len(design.seeds)]))
    return (
        f"Margin and looks were fixed beforehand. The number of seeds was raised from {way} while "
        "the study went on, which the intervals do not account for."
    )


def _over(design: Design) -> str:
    """What the intervals are over, in words."""
    over_problems = design.file.metric.over_problems
    if len(design.seeds) == 1:
        return "with an interval over held-out problems alone, since there is one seed"
    if not over_problems:
        return "with Student's t over seeds"
    return (
        "with Student's t over seeds and held-out problems, crossed random factors (degrees of "
        "freedom: Satterthwaite)"
    )
