"""What arrives of an update, and what is learned from it: `python -m experiments.arrival`.

It runs an ablation (experiments/ablations/smollm2_addition.toml) run by run, seed by seed, and asks
of each run's float32 masters how well they do as other policies serve them:

    masters             the float32 masters themselves, nothing quantized
    bfloat16            the masters rounded to bfloat16, nothing else
    fp8                 FP8 linears and KV cache (`fp8-rl`) from the float32 masters
    bfloat16, then fp8  FP8 linears and KV cache from the masters rounded to bfloat16

All four are computed in float32, so that roundings of the weights are all that differs. What has
been measured is on disk at once, and the same command goes on from there; a run's checkpoint and
weights are removed behind it. The ablation's own record has the arms of which all seeds are there.
Several commands can share a record, side by side, each on runs that no other one is at.
"""

from __future__ import annotations

import gc
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.benchmarks.machine import facts
from experiments.command import run_command
from experiments.record import changed, read, write
from fp8rl_jax.ablation.behaviour import differences
from fp8rl_jax.ablation.design import Arm, Design, read_design
from fp8rl_jax.ablation.record import (
    behaviour_mark,
    kept_behaviour,
    make_record,
    run_entry,
)
from fp8rl_jax.ablation.runner import Runner
from fp8rl_jax.durable import locked
from fp8rl_jax.errors import UserError
from fp8rl_jax.models.policy import Policy
from fp8rl_jax.training.evaluation import evaluate
from fp8rl_jax.training.keys import sample_key
from fp8rl_jax.training.session import Session
from fp8rl_jax.training.setup import build, reward_pool
from pallas_kernels.rounding import rounded

SERVED = {
    "masters": ("bf16", "float32"),
    "bfloat16": ("bf16", "bfloat16"),
    "fp8": ("fp8-rl", "float32"),
    "bfloat16, then fp8": ("fp8-rl", "bfloat16"),
}
"""Recipe that serves, and what the masters are rounded to before."""


@dataclass(frozen=True)
class Arguments:
    """Run an ablation, and evaluate each run's masters as other policies serve them."""

    ablation: str = "experiments/ablations/smollm2_addition.toml"
    """Its file."""
    output: str = "experiments/results/arrival/results.json"
    """The record; runs that it has are kept."""
    record: str = "experiments/results/ablations/smollm2_addition.json"
    """Where the ablation's own record goes."""
    hours: float = 2.5
    """After these no other run begins."""
    arms: tuple[str, ...] = ()
    """Of the ablation's; default: all, seed by seed."""

    def problems(self) -> list[str]:
        """Every value that cannot work, one line each; empty where all is well."""
        return [] if self.hours > 0 else [f"--hours: {self.hours} must be above 0"]


def served(design: Design, arm: Arm, seed: int) -> dict[str, float]:
    """Held-out accuracy of a run's masters, by what serves them."""
    config = design.run_config(arm, seed)
    setup = build(replace(config, resume=True))
    setup.session.restore(setup.directory / "checkpoints")
    masters, accuracies = setup.session.policy, {}
    del setup.session.serving
    examples = setup.held_out.examples[: config.evaluation.examples]
    plain = replace(
        config,
        compute_dtype="float32",
        model=replace(config.model, dither=False),
        precision=replace(config.precision, weight_source=None, weight_rounding=None),
    )
    with reward_pool(setup) as pool:
        for name, (recipe, dtype) in SERVED.items():
            session = Session(
                _rounded(masters, dtype), setup.session.tokenizer, recipe, config=plain
            )
            session.sync(session.encoder.batch(examples[: config.evaluation.batch_size]))
            found = evaluate(session, pool, examples, config.evaluation, sample_key(seed, 0))
            accuracies[name] = float(found.metrics["eval/accuracy"])
            del session
            gc.collect()
    return accuracies


def _rounded(policy: Policy, dtype: str) -> Policy:
    return jax.tree.map(lambda x: rounded(x, jnp.dtype(dtype)).astype(jnp.float32), policy)


def of_one_code(
    runs: Mapping[str, Mapping[str, Any]],
    behaviours: Mapping[str, Mapping[str, Any] | None],
    now: Mapping[str, Any] | None,
) -> dict[str, dict[str, Any]]:
    """Give the runs as an ablation's record has them.

    A fingerprint of a design with more arms, or with another last bit, has another mark: where it
    differs in nothing from the present one, its runs get that one's.

    Args:
        runs: by name, with the marks of their fingerprints.
        behaviours: the fingerprints, by mark.
        now: the present one.
    """
    alike = {mark for mark, of in behaviours.items() if of and now and not differences(of, now)}
    return {
        name: {key: value for key, value in entry.items() if key != "served"}
        | ({"behaviour": behaviour_mark(now)} if entry["behaviour"] in alike else {})
        for name, entry in runs.items()
    }


def run(arguments: Arguments) -> None:
    """Run by run, as long as there is time."""
    began, path = time.monotonic(), Path(arguments.output)
    design = read_design(arguments.ablation, "")
    if unknown := set(arguments.arms) - {arm.name for arm in design.arms}:
        raise UserError(f"--arms: {', '.join(sorted(unknown))}: none of the ablation's")
    runner = Runner(design)
    left = 0
    arms = [arm for arm in design.arms if not arguments.arms or arm.name in arguments.arms]
    for seed, arm in product(design.seeds, arms):
        name = design.run_name(arm, seed)
        with locked(design.directory / "locks" / name) as ours:
            if ours is None or name in (read(path) or {}).get("runs", {}):
                continue  # another command is at it, or it is done
            if time.monotonic() - began > 3600 * arguments.hours:
                left += 1
                continue
            print(name, file=sys.stderr)
            runner.run_one(name)
            entry = run_entry(design, arm, seed) | {"served": served(design, arm, seed)}
            with changed(path) as record:
                record.setdefault("behaviours", {})[entry["behaviour"]] = kept_behaviour(design)
                record.setdefault("runs", {})[name] = entry
                record["made"] = facts("experiments.arrival")
        # gigabytes; what is told of the run is in its files of rows
        shutil.rmtree(design.directory / name / "checkpoints")
        for weights in (design.directory / name / "model").glob("*.safetensors"):
            weights.unlink()
        jax.clear_caches()
    record = read(path) or {"runs": {}}
    whole = [
        arm
        for arm in design.arms
        if all(design.run_name(arm, seed) in record["runs"] for seed in design.seeds)
    ]
    runner.prepare()
    known = of_one_code(record["runs"], record.get("behaviours", {}), kept_behaviour(design))
    write(
        Path(arguments.record),
        make_record(replace(design, arms=tuple(whole)), runner.resolved, known),
    )
    if left:
        print(f"{left} runs are left; the same command goes on", file=sys.stderr)


def main(argv: list[str]) -> int:
    """Exit code: 0, or 2 for a fault in what was given."""
    return run_command("arrival", Arguments, run, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
