"""What devices send each other, and what memory takes, in programs compiled for Hopper on a machine
without one: `python -m experiments.collectives`.

Updates and rollouts of Qwen3's shapes, for meshes of H200s, by XLA's own partitioner. Bytes are
those that one device sends over a ring: of an update, and of a step of the decode loop. It needs
`make toolchain`. Programs that the record has stay as they are unless `--again`; each takes a
minute or two.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from experiments.benchmarks.machine import facts
from experiments.command import run_command
from experiments.record import read, write
from fp8rl_jax.config.run import MeshConfig, PlanConfig, RolloutConfig, RunConfig
from fp8rl_jax.config.training import TrainerConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.training.ahead import compile_for, lower_rollout, lower_update
from fp8rl_jax.training.plan import memory_plan, mesh_sizes
from fp8rl_jax.weights.hf_config import read_policy_config
from pallas_kernels.check.compile import activate_toolchain

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "experiments" / "results" / "collectives.json"
SHAPES = ROOT / "experiments" / "shapes"
SIZES = (8, 512, 512)
"""Completions of a prompt, tokens of a prompt, tokens of a completion."""


@dataclass(frozen=True)
class Program:
    """One program: of an update, or of a rollout by an engine."""

    what: str
    recipe: str
    shape: str
    mesh: dict[str, int]
    prompts: int = 32

    @property
    def name(self) -> str:
        sizes = " x ".join(f"{axis} {size}" for axis, size in self.mesh.items())
        return f"{self.what}, {self.recipe}, {self.shape}, {sizes}"


EIGHT = ({"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}, {"tensor": 8})
EXPERTS = {"fsdp": 2, "expert": 2, "tensor": 2}
PROGRAMS = (
    *(Program("update", "bf16", "qwen3-8b", mesh) for mesh in EIGHT[:2]),
    *(Program("update", "jet-rl", "qwen3-8b", mesh) for mesh in EIGHT[:2]),
    Program("update", "bf16", "qwen3-32b", {"fsdp": 32}, 128),
    *(
        Program(f"{engine} rollout", "fp8-rl", "qwen3-8b", mesh)
        for engine in ("static", "paged")
        for mesh in EIGHT
    ),
    *(Program("update", recipe, "qwen3-30b-a3b", EXPERTS) for recipe in ("bf16", "jet-rl")),
    Program("static rollout", "fp8-rl", "qwen3-30b-a3b", EXPERTS),
    # a width of 768 in four parts, and blocks of 128: experts are gathered at each product
    Program("static rollout", "fp8-rl", "qwen3-30b-a3b", {"expert": 2, "tensor": 4}),
    Program("paged rollout", "fp8-rl", "qwen3-30b-a3b", {"fsdp": 4, "tensor": 2}),
)


@dataclass(frozen=True)
class Arguments:
    """Programs compiled for H200s, and what they send."""

    only: str = ""
    """Programs whose name has this in it; empty: all."""
    again: bool = False
    """Compile what the record has, too."""
    layers: bool = False
    """Instead of all that, how long it takes to compile an update for 64 devices, by the number of
    layers."""
    output: str = str(RECORD.relative_to(ROOT))
    """Record that is added to."""


def configured(program: Program) -> tuple[PolicyConfig, RunConfig]:
    """The shape and the run's configuration of a program."""
    engine = program.what.rpartition(" ")[0] or "static"
    config = RunConfig(
        recipe=program.recipe,
        compute_dtype="bfloat16",
        mesh=replace(MeshConfig(data=1), **program.mesh),
        rollout=RolloutConfig(program.prompts, *SIZES, decode_layers="scan", engine=engine),
        trainer=TrainerConfig(remat="layer"),
        plan=PlanConfig("h200"),
    )
    return read_policy_config(SHAPES / program.shape), config


def planned(program: Program) -> int | None:
    """What `fp8rl plan` counts for a program's temporaries; None of the paged engine, of which
    cache and weights are no temporaries."""
    if program.what == "paged rollout":
        return None
    phases = ("backward", "optimizer") if program.what == "update" else ("rollout",)
    plan = memory_plan(*configured(program))
    return max(sum(plan.phases[phase].values()) for phase in phases)


def compiled(program: Program) -> dict[str, Any]:
    """Compile a program, and read what it sends and holds."""
    shape, config = configured(program)
    lower = lower_update if program.what == "update" else lower_rollout
    found = compile_for(lower, shape, config, mesh_sizes(config.mesh))
    return {
        "what": program.what,
        "recipe": program.recipe,
        "shape": program.shape,
        "mesh": program.mesh,
        "batch": [program.prompts, *SIZES],
        **asdict(found),
    }


def compile_seconds(layers: int) -> float:
    """Seconds of this process's CPU to lower and compile an update of so many of Qwen3-8B's layers
    for 64 devices."""
    program = Program("update", "jet-rl", "qwen3-8b", {"data": 8, "fsdp": 8}, 64)
    shape, config = configured(program)
    began = time.process_time()
    sizes = mesh_sizes(config.mesh)
    compile_for(lower_update, replace(shape, num_layers=layers), config, sizes)
    return round(time.process_time() - began, 1)


def run(arguments: Arguments) -> None:
    """Compile what is asked for, and add it to the record."""
    path = Path(arguments.output)
    if arguments.layers:
        compile_seconds(1)  # what is loaded and traced once
        record = read(path) or {}
        record["compile_seconds"] = {layers: compile_seconds(layers) for layers in (9, 18, 36)}
        write(path, record)
        return
    if not any(arguments.only in program.name for program in PROGRAMS):
        names = "; ".join(program.name for program in PROGRAMS)
        raise UserError(f"--only: {arguments.only!r} is in none of: {names}")
    kept = (read(path) or {}).get("programs", {})
    plans = {program.name: {"planned": planned(program)} for program in PROGRAMS}
    for program in PROGRAMS:
        if arguments.only not in program.name or (program.name in kept and not arguments.again):
            continue
        kept[program.name] = found = compiled(program)
        total = {part: sum(found[part].values()) for part in ("once", "a_step")}
        print(f"{program.name}: {total} bytes sent", flush=True)
        _write(path, kept, plans)
    _write(path, kept, plans)


def _write(path: Path, kept: dict[str, Any], plans: dict[str, dict[str, int | None]]) -> None:
    """The record, with the present plans of all programs."""
    ordered = {name: kept[name] | plan for name, plan in plans.items() if name in kept}
    found = read(path) or {}
    found |= {"made": facts("experiments.collectives", []), "programs": ordered}
    write(path, found)


def main() -> int:
    """Run the command."""
    activate_toolchain()
    return run_command("collectives", Arguments, run, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
