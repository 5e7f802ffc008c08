"""Do exact runs stay exact? `python -m experiments.identity --output FILE`.

Trains with precision.exact as it is by default, and writes the largest difference of a
log-probability between trainer and rollout of every step: 200 steps of the demo and of the demo
with experts, 20 of SmolLM2-135M, under one precision flow. Warm starts that are missing are made.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from experiments.benchmarks.machine import facts
from experiments.command import run_command
from experiments.record import read, write
from fp8rl_jax.ablation.record import read_rows
from fp8rl_jax.errors import UserError

DIFFERENCE = "mismatch/logprob_abs_diff_max"
_DEMO, _MOE = "experiments/runs/demo.toml", "experiments/runs/moe_demo.toml"
RUNS = {
    "demo": ((_DEMO,), 200, ("bf16", "jet-rl")),
    "moe_demo": ((_DEMO, _MOE), 200, ("jet-rl",)),
    "smollm2": (("experiments/runs/smollm2_addition.toml",), 20, ("jet-rl",)),
}
"""Files of a run, steps, and recipes."""


@dataclass(frozen=True)
class Arguments:
    """Differences between trainer and rollout over whole runs."""

    output: str = "experiments/results/exact/identity.json"
    """File of the results; runs that are in it already are kept."""
    runs: tuple[str, ...] = field(default=tuple(RUNS))
    """Which of demo, moe_demo and smollm2."""
    directory: str = "runs/identity"
    """Where the runs go."""

    def problems(self) -> list[str]:
        """A line for each run that there is not."""
        return [
            f"--runs: {name!r} is none of {', '.join(RUNS)}"
            for name in self.runs
            if name not in RUNS
        ]


def main(argv: list[str]) -> int:
    """Exit code: 0, or 2 for a fault in what was given."""
    return run_command("identity", Arguments, run, argv)


def run(arguments: Arguments) -> None:
    """Train, write and print.

    Raises:
        UserError: a run failed, or was not exact from its start.
    """
    path = Path(arguments.output)
    record = read(path) or {"runs": {}}
    found = record["runs"]
    for name in arguments.runs:
        files, steps, recipes = RUNS[name]
        for recipe in recipes:
            if (label := f"{name} {recipe}") in found:
                continue
            found[label] = _trained(files, recipe, steps, f"{arguments.directory}/{name}-{recipe}")
            write(path, record | {"made": facts("experiments.identity")})
            print(f"{label}: {max(found[label]['differences'])} in {steps} steps", flush=True)


def _trained(files: tuple[str, ...], recipe: str, steps: int, output: str) -> dict:
    model = tomllib.loads(Path(files[-1]).read_text())["model"].get("path", "")
    if model.startswith("runs/") and not Path(model).exists():
        _fp8rl("sft", *files)
    flags = ["--recipe", recipe, "--trainer.steps", str(steps), "--output", output]
    _fp8rl("train", *files, *flags, "--evaluation.every", "0", "--checkpoint.every", "0")
    settings = tomllib.loads((Path(output) / "config.toml").read_text())
    if settings["precision"]["exact"] is not True:
        raise UserError(f"{output}: the run is not exact by default on this machine")
    differences = [row[DIFFERENCE] for row in read_rows(Path(output)) if DIFFERENCE in row]
    if len(differences) != steps:
        raise UserError(f"{output}: {len(differences)} steps are recorded, not {steps}")
    return {"compute_dtype": settings["compute_dtype"], "differences": differences}


def _fp8rl(*words: str) -> None:
    command = [sys.executable, "-m", "fp8rl_jax.cli.main", *words]
    if subprocess.run(command, check=False).returncode:
        raise UserError(f"fp8rl {' '.join(words)} failed")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
