"""Dose and response: `python -m experiments.study`.

How far may a rollout be from its trainer before learning suffers, and what helps? study.toml beside
this file has all that was fixed beforehand (plan.py says how it is read); every cell of it is a run
of an ablation's arm. Seed by seed and cell by cell, what has been run is on disk at once, and the
same command goes on from there.

    python -m experiments.study --hours 2   # runs what is missing, then writes the page
    python -m experiments.study --seeds 4 5 # of these seeds; others may be run beside it
    python -m experiments.study --pilot     # the first seed of a few cells, into pilot.json
    python -m experiments.study --page      # docs/study.md and its picture from the record
"""

from __future__ import annotations

import resource
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.benchmarks.machine import facts
from experiments.command import run_command
from experiments.record import changed, read
from experiments.study.page import write_pages
from experiments.study.plan import Cell, Plan, read_plan
from fp8rl_jax.ablation.record import OVER, run_entry, run_state
from fp8rl_jax.ablation.runner import Runner
from fp8rl_jax.errors import UserError

SERIES = (
    "reward/mean",
    "rollout/entropy",
    "optim/grad_norm",
    "clip_ratio/region_mean",
    "correction/clip_frac",
    "correction/reject_frac",
    "mismatch/k3",
    "mismatch/policy_kl_error",
    "mismatch/kl",
    "mismatch/pearson",
    "eval/accuracy",
)
"""Metrics of which a run's every value is kept."""


@dataclass(frozen=True)
class Arguments:
    """Run what is missing of the study, and write its page."""

    plan: str = "experiments/study/study.toml"
    """Its file."""
    output: str = "experiments/results/study"
    """Directory of runs.json and pilot.json; cells that are there are kept."""
    docs: str = "docs"
    """Directory of study.md and study.svg."""
    hours: float = 10.0
    """After these no other run begins."""
    seeds: tuple[int, ...] = ()
    """Run these alone; none: all. Commands with other seeds may run at the same time."""
    pilot: bool = False
    """Run the pilot's cells of the first seed, and write no page."""
    page: bool = False
    """Run nothing."""

    def problems(self) -> list[str]:
        """Every value that cannot work, one line each; empty where all is well."""
        return [] if self.hours > 0 else [f"--hours: {self.hours} must be above 0"]


def missing(
    plan: Plan, runs: dict[str, Any], pilot: bool, only: tuple[int, ...] = ()
) -> list[tuple[Cell, int]]:
    """Give the runs that the record has not, seed by seed.

    Raises:
        UserError: one that it has was made with other settings, or a seed is none of the plan's.
    """
    if others := set(only) - set(plan.seeds):
        raise UserError(f"--seeds: {min(others)} is none of {', '.join(map(str, plan.seeds))}")
    cells, todo = plan.cells, []
    seeds = only or (plan.seeds[:1] if pilot else plan.seeds)
    for seed in seeds:
        for cell in [cells[name] for name in plan.file.pilot] if pilot else cells.values():
            kept = runs.get(f"{cell.name}-{seed}")
            if kept is None:
                todo.append((cell, seed))
            elif kept["settings"] != cell.digest:
                raise UserError(
                    f"{cell.name}-{seed}: its settings are others than when it was run; put them "
                    "back, give the cell another name, or take the run out of the record"
                )
    return todo


def run_cell(plan: Plan, cell: Cell, seed: int) -> dict[str, Any]:
    """Run a cell's seed, with its warm start where that is missing; give what is kept of it."""
    design = plan.designs[cell.length]
    name, directory = design.run_name(cell.arm, seed), design.directory
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    runner = Runner(design)
    start = design.start_name(seed)
    if start and not (directory / start / "model").exists():
        runner.run_one(start)
    try:
        runner.run_one(name)
    except UserError as error:  # one that could not go on is an outcome; one that was killed is not
        if "killed by" in str(error) or run_state(design, cell.arm, seed).status not in OVER:
            raise
        print(error, file=sys.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    entry = run_entry(design, cell.arm, seed, SERIES)
    entry |= {
        "settings": cell.digest,
        "cpu_seconds": round(after.ru_utime - before.ru_utime, 1),
        "seconds": round(time.monotonic() - began, 1),
    }
    entry["by_problem"].pop("problems", None)  # the same for all, and long
    shutil.rmtree(directory / name / "checkpoints", ignore_errors=True)
    return entry


def run(arguments: Arguments) -> None:
    """Run after run, as long as there is time."""
    began, plan = time.monotonic(), read_plan(Path(arguments.plan))
    path = Path(arguments.output) / ("pilot.json" if arguments.pilot else "runs.json")
    runs = (read(path) or {}).get("runs", {})
    todo = [] if arguments.page else missing(plan, runs, arguments.pilot, arguments.seeds)
    while todo and time.monotonic() - began < 3600 * arguments.hours:
        cell, seed = todo.pop(0)
        print(f"{cell.name}-{seed}", file=sys.stderr)
        entry = run_cell(plan, cell, seed)
        with changed(path) as record:
            record.setdefault("runs", {})[f"{cell.name}-{seed}"] = entry
            record["made"] = facts("experiments.study")
    if todo:
        print(f"{len(todo)} runs are left; the same command goes on", file=sys.stderr)
    if not arguments.pilot:
        write_pages(plan, read(path) or {"runs": {}}, Path(arguments.docs))


def main(argv: list[str]) -> int:
    """Exit code: 0, or 2 for a fault in what was given."""
    return run_command("study", Arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
