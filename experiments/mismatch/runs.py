"""The runs: trained where they are missing, and read."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.mismatch.variants import ROOT, RUN_FILES, VARIANTS
from fp8rl_jax.errors import UserError
from fp8rl_jax.report.runs import Run, find_runs, flatten, read_runs

DIGITS = {
    "mismatch/k3": 6,
    "mismatch/kl": 6,
    "mismatch/logprob_abs_diff_mean": 6,
    "mismatch/logprob_abs_diff_max": 6,
    "mismatch/token_mult_prob_error": 8,
    "mismatch/pearson": 8,
    "reward/mean": 6,
    "entropy": 6,
}
"""What is kept of each step, and with how many significant digits."""
EVALUATION = ("eval/accuracy", "eval/accuracy_low", "eval/accuracy_high")
OWN = ("output", "recipe", "seed", "resume")
"""Keys in which runs of one study differ."""


@dataclass(frozen=True)
class Place:
    """A variant and a seed, and where its run is."""

    variant: str
    seed: int
    directory: Path


def train(place: Place, threads: int, report=print) -> None:
    """Trains a run, or what is left of it; does nothing for one that is finished.

    Args:
        threads: processors that it may use.

    Raises:
        UserError: `fp8rl` failed.
    """
    if (place.directory / "model").exists():
        return
    # without a checkpoint nothing can be gone on from
    resume = any((place.directory / "checkpoints").glob("[0-9]*"))
    if not resume and place.directory.exists():
        shutil.rmtree(place.directory)
    output = os.path.relpath(place.directory, ROOT)
    flags = [*VARIANTS[place.variant], "--seed", str(place.seed), "--output", output]
    report(f"{place.variant}, seed {place.seed} ...")
    _fp8rl("train", [*flags, *(["--resume"] if resume else [])], threads)


def warm_start(threads: int) -> str:
    """Makes the policy that all runs start from, if it is not there, and returns its fingerprint."""
    weights = ROOT / settings()["model.path"] / "model.safetensors"
    if not weights.exists():
        _fp8rl("sft", [], threads)
    return hashlib.sha256(weights.read_bytes()).hexdigest()[:16]


def settings() -> dict[str, Any]:
    """The run files' own keys, the later file over the earlier, flattened."""
    found: dict[str, Any] = {}
    for file in RUN_FILES:
        found |= flatten(tomllib.loads((ROOT / file).read_text()))
    return found


def read(place: Place, start: str) -> dict[str, Any]:
    """A finished run's part of results.json.

    Raises:
        UserError: the run is not whole, or was made with other run files.
    """
    (run,) = read_runs(find_runs([place.directory]))
    for key, value in settings().items():
        if key not in OWN and run.config.get(key, value) != value:
            raise UserError(
                f"{place.directory}: was trained with {key} = {run.config[key]!r}, the run files have {value!r}; remove it"
            )
    steps, _ = run.series("mismatch/k3")
    wanted = run.config["trainer.steps"]
    if steps != list(range(wanted)):
        raise UserError(f"{place.directory}: has {len(steps)} of {wanted} steps; remove it to train it again")
    return {
        "commit": run.environment["commit"],
        "start": start,
        "evaluation": {"step": run.series(EVALUATION[0])[0], **{key: run.series(key)[1] for key in EVALUATION}},
        "steps": {key: _rounded(run, key, digits) for key, digits in DIGITS.items()},
    }


def _rounded(run: Run, key: str, digits: int) -> list[float]:
    return [float(f"{value:.{digits}g}") for value in run.series(key)[1]]


def _fp8rl(command: str, flags: list[str], threads: int) -> None:
    words = [sys.executable, "-m", "fp8rl_jax.cli.main", command, *(str(ROOT / file) for file in RUN_FILES), *flags]
    processors = sorted(os.sched_getaffinity(0))[:threads]
    ended = subprocess.run(
        words, capture_output=True, text=True, check=False, cwd=ROOT, env=os.environ | _path(),
        preexec_fn=lambda: os.sched_setaffinity(0, processors),
    )  # fmt: skip
    if ended.returncode:
        lines = [line for line in ended.stderr.splitlines() if "error" in line] or ended.stderr.splitlines() or ["no message"]
        raise UserError(f"fp8rl {command} {' '.join(flags)}: {lines[-1].removeprefix('fp8rl: error: ')}")


def _path() -> dict[str, str]:
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{ROOT}{os.pathsep}{before}" if before else str(ROOT)}
