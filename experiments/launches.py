"""How many kernels a layer launches, in programs compiled for Hopper on a machine without one:
`python -m experiments.launches`.

A decode step of the static engine, and an update of one micro-batch, of Qwen3-8B's width with 2 and
with 4 layers: half of the difference is a layer's. An instruction of the compiled program counts as
one launch; a call of a library or a product split over its contraction may be more. It needs `make
toolchain`. Programs that the record has stay as they are unless `--again`; each takes a minute or
two.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.benchmarks.machine import facts
from experiments.collectives import Program, configured
from experiments.command import run_command
from experiments.record import read, write
from fp8rl_jax.parallel.collectives import instructions
from fp8rl_jax.training.ahead import compiled_program, lower_rollout, lower_update
from fp8rl_jax.training.plan import mesh_sizes
from pallas_kernels.check.compile import activate_toolchain

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "experiments" / "results" / "launches.json"
LAYERS = (2, 4)
PROGRAMS = tuple(
    Program(what, recipe, "qwen3-8b", {"data": 1}, prompts=8)
    for what in ("static rollout", "update")
    for recipe in ("bf16", "fp8-rl", "jet-rl")
    if (what, recipe) != ("update", "fp8-rl")  # which is that of bf16
)
FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("while", "conditional", "call", "async-start", "opt-barrier", "partition-id", "replica-id"),
}
"""Instructions that launch nothing of their own."""


@dataclass(frozen=True)
class Arguments:
    """Launches of a layer."""

    again: bool = False
    """Compile what the record has, too."""
    output: str = str(RECORD.relative_to(ROOT))
    """Record that is added to."""


def launches(text: str) -> tuple[Counter, Counter]:
    """Count what a compiled program launches, by the kind of instruction, of calls by what they
    call.

    Args:
        text: of `jax.stages.Compiled.as_text`.

    Returns:
        Outside of loops whose number of rounds the program does not say, and in a round of these.
    """
    once, a_round = Counter(), Counter()
    for each in instructions(text):
        if each.opcode in FREE or each.opcode.endswith(("-done", "-update")):
            continue
        kind = each.target if each.opcode == "custom-call" else each.opcode
        (a_round if each.loops else once)[kind] += each.times
    return once, a_round


def of_layer(program: Program) -> dict[str, Any]:
    """Compile a program twice, and find what a layer launches by kind."""
    found = []
    for layers in LAYERS:
        shape, config = configured(program)
        config = replace(config, rollout=replace(config.rollout, decode_layers="unroll"))
        lower = lower_update if program.what == "update" else lower_rollout
        shape = replace(shape, num_layers=layers)
        text, _ = compiled_program(lower, shape, config, mesh_sizes(config.mesh))
        once, a_round = launches(text)
        found.append(once if program.what == "update" else a_round)
    few, many = found
    kinds = {kind: (many[kind] - few[kind]) / (LAYERS[1] - LAYERS[0]) for kind in many}
    by_kind = {kind: count for kind, count in sorted(kinds.items()) if count}
    return {
        "what": program.what,
        "recipe": program.recipe,
        "a layer": sum(by_kind.values()),
        "by kind": by_kind,
        "beside layers": few.total() - LAYERS[0] * sum(by_kind.values()),
    }


def run(arguments: Arguments) -> None:
    """Count what is left, and write the record behind each program."""
    activate_toolchain()
    path = Path(arguments.output)
    known = (read(path) or {}).get("programs", [])
    found = {} if arguments.again else {(each["what"], each["recipe"]): each for each in known}
    for program in PROGRAMS:
        key = program.what, program.recipe
        if key in found:
            continue
        found[key] = of_layer(program)
        print(json.dumps(found[key]), flush=True)
        record = {"made": facts("experiments.launches", []), "programs": [*found.values()]}
        write(path, record)


if __name__ == "__main__":
    sys.exit(run_command("launches", Arguments, run, sys.argv[1:]))
