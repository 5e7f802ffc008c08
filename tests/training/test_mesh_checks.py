"""Meshes that a run cannot use."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from jax.sharding import AbstractMesh, AxisType
from tiny_models import LLAMA

from fp8rl_jax.config.files import read_config
from fp8rl_jax.config.run import MeshConfig, RolloutConfig, RolloutMeshConfig, RunConfig
from fp8rl_jax.config.tasks import TaskConfig
from fp8rl_jax.config.training import SftConfig, TrainerConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.parallel import AXES, make_rollout_mesh
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
    ("own", "message"),
    [
        ({"data": 3}, r"prompts_per_step = 8 does not divide by mesh.rollout.data x expert = 3"),
        ({"data": 1, "expert": 2}, r"mesh.rollout.expert = 2: the model has no experts"),
    ],
)
def test_a_rollout_of_its_own_splits_the_prompts(own, message):
    mesh = MeshConfig(rollout=RolloutMeshConfig(**own))
    run = RunConfig(rollout=RolloutConfig(prompts_per_step=8), mesh=mesh)
    with pytest.raises(UserError, match=message):
        check_mesh(run, LLAMA, mesh_of({}))


@pytest.mark.parametrize(
    ("own", "devices", "message"),
    [
        ({"data": 3}, (0, 0, 0, 1, 1, 1), r"= 3 devices .*multiple of the 2 processes"),
        ({"data": 2, "tensor": 2}, (0, 0, 1, 1), "each of which has 2 devices and keeps at least"),
    ],
)
def test_each_process_has_devices_for_both(own, devices, message):
    devices = [SimpleNamespace(process_index=i) for i in devices]
    with pytest.raises(UserError, match=message):
        make_rollout_mesh(MeshConfig(rollout=RolloutMeshConfig(**own)), devices)


AHEAD = {
    "mesh": {"rollout": {"data": 1}},
    "rollout": {"steps_ahead": 1},
    "rl": {"correction": {"method": "token_tis"}},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mesh": {"rollout": {"data": 0}}}, "the rollout has no devices of its own to sample on"),
        ({"mesh": {"rollout": {"data": 0, "tensor": 2}}}, "mesh.rollout.data: 0 gives the rollout"),
        ({"rl": {"correction": {"method": "none"}}}, "nothing corrects for completions of older"),
        ({"precision": {"exact": True}}, "with precision.exact no bit may differ, and those of"),
        ({"rollout": {"steps_ahead": 2}}, "rollout.steps_ahead = 2 must be 0 or 1"),
        ({"lora": {"rank": 4}}, "mesh.rollout: adapters are served beside the trainer's base"),
        ({"rl": {"dynamic_sampling": {"enabled": True}}}, "how often a step samples would hang"),
        ({"rl": {"acceptance": {"enabled": True}}}, "would be of weights that were taken back"),
        ({"rollout": {"engine": "vllm"}}, "mesh.rollout: vLLM has devices of its own"),
        (
            {"rollout": {"engine": "paged", "paged": {"extra_prompts": 2}}},
            "mesh.rollout: what is carried over stays on the trainer's devices",
        ),
    ],
)
def test_what_a_rollout_of_its_own_cannot_do_is_refused(change, message):
    assert not read_config(RunConfig, AHEAD).problems()
    with pytest.raises(UserError, match=message):
        read_config(RunConfig, AHEAD, change)


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
