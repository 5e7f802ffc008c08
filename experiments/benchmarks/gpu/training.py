"""Part `step`: a whole GRPO step with FP8 KV, and a layer's training step, at Qwen3-8B's shape: FP8
against bfloat16.

These are long enough to be timed from outside, by the benchmarks that time them on any device.
Weights are random. A whole 8B model with float32 masters, gradients and two moments does not fit
into one card, so there are as many layers as fit, and the output head shares the embedding: it is a
larger part of a step than in the whole model.

A step's programs take longer to compile than everything else here, so they are jobs of their own
before it: each runs a recipe's rollout, or its whole step. They run one at a time, since XLA times
its libraries' products while it compiles, and the bfloat16 side is made of those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from experiments.benchmarks.gpu.figures import STEP
from experiments.benchmarks.gpu.jobs import Job, Setting
from experiments.benchmarks.grpo import Shared, grpo_step, make_step
from experiments.benchmarks.rounds import Laps, Plan
from experiments.benchmarks.trained_layer import trained_layer
from experiments.benchmarks.workloads import Shape, Workload, qwen3_config
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.policy import parameter_count

RECIPES = ("bf16", "fp8-e2e-kv")
LAYER = "layer"
PARTS = ("rollout", "update")
# masters, gradients, two moments, and weights of two recipes' trainers and samplers
BYTES_A_PARAMETER = 24
PART_OF_MEMORY = 0.6  # the rest: activations, logits, caches


def jobs(setting: Setting) -> list[Job]:
    """The programs of both recipes' steps, the steps in turns, and the layer."""
    job = partial(
        Job, sources=(__name__, "pallas_kernels", "fp8rl_jax"), operation="step", seconds=240.0
    )
    step = job(STEP, lambda: grpo_step(workload_of(setting), plan_of(setting)), seconds=300.0)
    return [
        *programs(job, setting, RECIPES),
        step,
        job(LAYER, lambda: trained_layer(workload_of(setting), plan_of(setting))),
    ]


def programs(job: Callable[..., Job], setting: Setting, recipes: tuple[str, ...]) -> list[Job]:
    """Make the jobs that compile what these recipes' steps run."""
    return [
        job(f"programs: {recipe}, {part}", partial(compile_step, setting, recipes, recipe, part))
        for recipe in recipes
        for part in PARTS
    ]


def compile_step(
    setting: Setting, recipes: tuple[str, ...], recipe: str, last: str
) -> dict[str, Any]:
    """Run a recipe's step from its beginning to its part `last`, to fill the cache of programs.

    The steps of the recipes before it come first, as in `grpo_step`: the state that they leave has
    the same shardings by other names, and is another program's argument.
    """
    workload, laps, shared = workload_of(setting), Laps(), Shared()
    *before, step = [
        make_step(workload, name, shared) for name in recipes[: recipes.index(recipe) + 1]
    ]
    for other in before:
        other(0)
    laps.end("before", shared.state)
    if last == "update":
        step(0)
    else:
        step.session.load(shared.state)
        step.sample(0)
    laps.end(last)
    return {"compiled": laps.seconds}


def plan_of(setting: Setting) -> Plan:
    return Plan(1, 1) if setting.tiny else Plan(5, 1)


def workload_of(setting: Setting) -> Workload:
    return tiny_workload() if setting.tiny else workload_for(device_memory())


def device_memory() -> int:
    """Bytes that JAX may use of the card."""
    return jax.devices()[0].memory_stats()["bytes_limit"]


def layers_for(memory: int, embedding: int, layer: int) -> int:
    """How many layers of so many parameters fit beside the embedding, of 36."""
    return max(1, min(36, int(memory * PART_OF_MEMORY / BYTES_A_PARAMETER - embedding) // layer))


def workload_for(memory: int) -> Workload:
    """Qwen3-8B with the layers that fit into `memory` bytes."""
    config = qwen3_config(4096, 12288, num_layers=2, num_heads=32)
    two, one = parameter_count(config), parameter_count(replace(config, num_layers=1))
    layers = layers_for(memory, 2 * one - two, two - one)
    return Workload(
        name=f"Qwen3-8B's shape, {layers} of 36 layers, tied head",
        config=replace(config, num_layers=layers),
        compute_dtype="bfloat16",
        step=Shape(prompts=8, samples=8, prompt_tokens=512, new_tokens=512),
        layer=Shape(prompts=8, samples=1, prompt_tokens=512, new_tokens=512),
        step_recipes=RECIPES,
        layer_recipes=RECIPES,
        micro_batch_prompts=1,
        remat=True,
        absolute=True,
    )


def tiny_workload() -> Workload:
    shape = Shape(prompts=2, samples=2, prompt_tokens=8, new_tokens=3)
    return Workload(
        name="tiny",
        config=PolicyConfig(
            "qwen3", 320, 32, 48, 1, 2, 1, 16, tie_word_embeddings=True, max_position_embeddings=128
        ),
        compute_dtype="float32",
        step=shape,
        layer=shape,
        step_recipes=RECIPES,
        layer_recipes=RECIPES,
        absolute=True,
    )
