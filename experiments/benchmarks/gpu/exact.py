"""Part `exact`: whether a row's bits depend on the batch on this card, and what exact mode costs.

On a machine without a card kernels are interpreted, which shows that what they write down is
batch-invariant. What only a card shows: that its tensor cores give a product the same bits wherever
it stands, and XLA's programs of elements too.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from experiments.benchmarks.gpu.figures import EXACT
from experiments.benchmarks.gpu.jobs import Job, Setting
from experiments.benchmarks.gpu.training import plan_of, programs, workload_of
from experiments.benchmarks.grpo import grpo_step, make_step
from experiments.benchmarks.workloads import Shape, Workload
from experiments.invariant import OPERATIONS, differences, draw
from fp8rl_jax.models.config import ExpertsConfig

SEEDS, MOST_ROWS = 3, 600
RECIPES = ("jet-rl-plain", "jet-rl-exact")
STEPS = 2  # of a run: the second has other weights


def jobs(setting: Setting) -> list[Job]:
    """Operations at random shapes, runs of two steps, and the step in turns with a plain one."""
    job = partial(
        Job, sources=(__name__, "pallas_kernels", "fp8rl_jax"), operation="exact", seconds=240.0
    )
    names = list(OPERATIONS)[:1] if setting.tiny else OPERATIONS
    operations = [job(f"shapes: {name}", partial(shapes, setting, name)) for name in names]
    runs = [
        job(f"run: {recipe}, {kind}", partial(run, setting, recipe, kind))
        for kind, recipe in (("dense", "jet-rl"), ("dense", "bf16"), ("experts", "jet-rl"))
    ]
    step = job(EXACT, partial(compare_steps, setting), seconds=300.0)
    runs = runs[:1] if setting.tiny else runs
    return [*operations, *runs, *programs(job, setting, RECIPES), step]


def shapes(setting: Setting, name: str) -> dict[str, Any]:
    """An operation of exact mode in other companies, places, layouts, loops and programs."""
    seeds, most = (1, 60) if setting.tiny else (SEEDS, MOST_ROWS)
    failed = {}
    for seed in range(seeds):
        case = draw(name, seed, jnp.dtype("bfloat16"), most)
        if found := differences(case):
            failed[case.shape] = found
        jax.clear_caches()
    return {"seeds": seeds, "failed": failed, "passed": not failed}


def run(setting: Setting, recipe: str, kind: str) -> dict[str, Any]:
    """Steps whose rollout and trainer must agree bit for bit."""
    step = make_step(_workload(setting, kind), f"{recipe}-exact")
    largest = []
    for number in range(STEPS):
        step.session.sync(step.prompts)
        metrics = step.learn(step.sample(number))
        largest.append(float(metrics["mismatch/logprob_abs_diff_max"]))
    return {"largest_difference": largest, "passed": not any(largest)}


def compare_steps(setting: Setting) -> dict[str, Any]:
    """Time steps that are exact and steps that are not, in turns."""
    return grpo_step(replace(workload_of(setting), step_recipes=RECIPES), plan_of(setting))


def _workload(setting: Setting, kind: str) -> Workload:
    """A few layers, with more rows in the trainer than a decode step has, and prompts of more than
    a chunk of keys."""
    workload = workload_of(setting)
    config, step = workload.config, workload.step
    if not setting.tiny:
        config = replace(
            config,
            num_layers=2,
            hidden_size=1024,
            intermediate_size=1536,
            vocab_size=32_000,
            num_heads=8,
            num_kv_heads=4,
        )
        step = Shape(prompts=4, samples=4, prompt_tokens=700, new_tokens=100)
    if kind == "experts":
        experts = ExpertsConfig(16, 4, 384, normalize=True)
        config = replace(config, architecture="qwen3_moe", experts=experts)
    return replace(workload, config=config, step=step, step_recipes=(), remat=False)
