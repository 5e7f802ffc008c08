"""Meshes that a run cannot use."""

from __future__ import annotations

from dataclasses import replace

import pytest
from jax.sharding import AbstractMesh, AxisType
from tiny_models import LLAMA

from fp8rl_jax.config.run import RolloutConfig, RunConfig
from fp8rl_jax.config.tasks import TaskConfig
from fp8rl_jax.config.training import SftConfig, TrainerConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.parallel import AXES
from fp8rl_jax.training.checks import check_mesh


def mesh_of(sizes: dict[str, int]) -> AbstractMesh:
    return AbstractMesh(
        tuple(sizes.get(axis, 1) for axis in AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES)
    )


@pytest.mark.parametrize(
    ("sizes", "trainer", "message"),
    [
        (
            {"fsdp": 4},
            {"micro_batch_prompts": 2},
            r"trainer.micro_batch_prompts = 2 .*multiple of 4",
        ),
        ({"fsdp": 4}, {"updates_per_rollout": 4}, r"updates_per_rollout = 2 does not divide"),
        ({"expert": 4}, {}, r"mesh.expert = 4: the model has no experts"),
    ],
)
def test_a_run_is_refused_that_its_mesh_cannot_split(sizes, trainer, message):
    mesh = mesh_of(sizes)
    run = RunConfig(rollout=RolloutConfig(prompts_per_step=8), trainer=TrainerConfig(**trainer))
    with pytest.raises(UserError, match=message):
        check_mesh(run, LLAMA, mesh)
    packed = replace(run, trainer=replace(run.trainer, packing=True))
    if "expert" not in sizes:
        check_mesh(packed, LLAMA, mesh)


@pytest.mark.parametrize(
    ("sft", "key"),
    [
        (SftConfig(batch_size=6), "sft.batch_size = 6"),
        (SftConfig(batch_size=12, micro_batch_rows=6), "sft.micro_batch_rows = 6"),
    ],
)
def test_rows_of_text_divide_by_the_mesh(sft, key):
    mesh = mesh_of({"fsdp": 4})
    rollout = RolloutConfig(prompts_per_step=8)
    run = RunConfig(rollout=rollout, sft=sft, task=TaskConfig(kind="text"))
    with pytest.raises(UserError, match=f"{key} does not divide"):
        check_mesh(run, LLAMA, mesh)
