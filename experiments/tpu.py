"""Which programs XLA compiles for a TPU, on a machine without one: `python -m experiments.tpu`.

Every recipe's update and its rollout by both engines, of Qwen3-0.6B's width with 2 layers, for four
chips of a v5e and of a v6e. libtpu compiles (`make compile-tpu` installs it); nothing runs, so that
this says which programs there are and what memory they plan, not whether they are right or fast. A
compiler that gives up ends its process: each chip and recipe has one of its own, and what it left
begins in another. Programs that the record has stay as they are unless `--again`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from experiments.benchmarks.machine import facts
from experiments.command import run_command
from experiments.record import write
from fp8rl_jax.config.chips import CHIPS
from fp8rl_jax.config.recipe import RECIPES
from fp8rl_jax.config.run import MeshConfig, PlanConfig, RolloutConfig, RunConfig, TrainerConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.training.ahead import Lower, compile_for, lacks_compiler, lower_rollout, lower_update
from fp8rl_jax.training.plan import mesh_sizes
from fp8rl_jax.weights.hf_config import read_policy_config

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "experiments" / "results" / "tpu.json"
SHAPE, LAYERS, DEVICES = "qwen3-0.6b", 2, 4
PROGRAMS: dict[str, tuple[Lower, str]] = {
    "update": (lower_update, "static"),
    "static rollout": (lower_rollout, "static"),
    "paged rollout": (lower_rollout, "paged"),
}
TPUS = tuple(name for name, chip in CHIPS.items() if chip.tpu)


@dataclass(frozen=True)
class Arguments:
    """Compile programs for TPUs."""

    chips: tuple[str, ...] = TPUS
    """By name."""
    recipes: tuple[str, ...] = ()
    """Of which programs are compiled; default: all."""
    again: bool = False
    """Compile what the record has, too."""
    output: str = str(RECORD.relative_to(ROOT))
    """Record that is added to."""
    one: str = ""
    """CHIP/RECIPE/PROGRAM: compile from this program of the recipe on, in this process, and print a
    line each."""

    def problems(self) -> list[str]:
        """Every value that cannot work, one line each; empty where all is well."""
        found = [
            f"--chips: {name} is none of {', '.join(TPUS)}" for name in {*self.chips} - {*TPUS}
        ]
        unknown = {*self.recipes} - {*RECIPES}
        return found + [f"--recipes: {name} is none of {', '.join(RECIPES)}" for name in unknown]


def compile_one(chip: str, recipe: str, program: str) -> int:
    """Compile a program; returns the bytes of memory that it plans beside arguments and results."""
    lower, engine = PROGRAMS[program]
    config = RunConfig(
        recipe=recipe,
        mesh=MeshConfig(data=DEVICES),
        rollout=RolloutConfig(
            engine=engine,
            prompts_per_step=8,
            samples_per_prompt=4,
            max_prompt_tokens=128,
            max_new_tokens=128,
        ),
        trainer=TrainerConfig(remat="layer"),
        plan=PlanConfig(chip),
    )
    shape = read_policy_config(ROOT / "experiments" / "shapes" / SHAPE)
    shape = replace(shape, num_layers=LAYERS)
    return compile_for(lower, shape, config, mesh_sizes(config.mesh), chip).temporary


def compile_from(chip: str, recipe: str, program: str) -> None:
    """Compile the programs from this one on, and print each as it is done."""
    names = [*PROGRAMS]
    for name in names[names.index(program) :]:
        try:
            found: dict[str, Any] = {"temporary": compile_one(chip, recipe, name)}
        except Exception as error:  # whatever the compiler, or what lowers for it, objects to
            lines = str(error).strip().splitlines() or [""]
            found = {"fault": f"{type(error).__name__}: {lines[0]}"[:300]}
        print(json.dumps({"program": name} | found), flush=True)


def of_recipe(chip: str, recipe: str) -> dict[str, dict[str, Any]]:
    """What each program of a recipe came to."""
    found: dict[str, dict[str, Any]] = {}
    while left := [name for name in PROGRAMS if name not in found]:
        child = subprocess.run(
            [sys.executable, "-m", "experiments.tpu", "--one", f"{chip}/{recipe}/{left[0]}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        lines = [
            json.loads(line) for line in child.stdout.splitlines() if line.startswith('{"program"')
        ]
        found |= {line.pop("program"): line for line in lines}
        if child.returncode:
            left = [name for name in PROGRAMS if name not in found]
            found[left[0]] = {"fault": _last_words(child.stderr)}
    return found


def _last_words(text: str) -> str:
    """What a compiler wrote before it gave up, without what differs from run to run."""
    fatal = [line for line in text.splitlines() if line[:1] == "F" and "] " in line]
    lines = [line.partition("] ")[2] for line in fatal] or text.strip().splitlines()[-1:]
    return (lines or ["it ended without a word"])[0][:300]


def run(arguments: Arguments) -> None:
    """Compile what is asked for, and add it to the record."""
    if arguments.one:
        compile_from(*arguments.one.split("/"))
        return
    if why := lacks_compiler(arguments.chips[0]):
        raise UserError(why)
    path = Path(arguments.output)
    record = json.loads(path.read_text()) if path.exists() else {"programs": {}}
    for chip in arguments.chips:
        for recipe in arguments.recipes or RECIPES:
            name = f"{chip}/{recipe}"
            if name in record["programs"] and not arguments.again:
                continue
            record["programs"][name] = found = of_recipe(chip, recipe)
            words = (f"{what}: {each.get('fault', 'compiled')}" for what, each in found.items())
            print(f"{name}: {'; '.join(words)}", file=sys.stderr)
            record |= {
                "shape": [SHAPE, LAYERS],
                "devices": DEVICES,
                "libtpu": version("libtpu"),
                "made": facts("experiments.tpu"),
            }
            write(path, record)


def main(argv: list[str]) -> int:
    """Exit code: 0, or 2 for a fault in what was given."""
    return run_command("tpu", Arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
