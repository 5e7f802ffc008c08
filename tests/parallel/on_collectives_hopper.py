"""Run by test_collectives.py: bytes that a device sends over tensor in a step of the paged engine's
decode loop, in the program that is compiled for Hopper, and those of its FP8 weights."""

from __future__ import annotations

import json

from fp8rl_jax.config.run import MeshConfig, PlanConfig, RolloutConfig, RunConfig
from fp8rl_jax.models.config import ExpertsConfig, PolicyConfig
from fp8rl_jax.training.ahead import compile_for, lower_rollout
from fp8rl_jax.training.plan import mesh_sizes
from pallas_kernels.check.compile import activate_toolchain

SHAPE = PolicyConfig(
    "qwen3_moe",
    vocab_size=512,
    hidden_size=512,
    intermediate_size=512,
    num_layers=1,
    num_heads=4,
    num_kv_heads=4,
    head_dim=64,
    experts=ExpertsConfig(count=4, per_token=2, intermediate_size=256, normalize=True),
)
CONFIG = RunConfig(
    recipe="fp8-rl",
    compute_dtype="bfloat16",
    mesh=MeshConfig(data=2, tensor=2),
    rollout=RolloutConfig(8, 4, 64, 64, decode_layers="scan", engine="paged"),
    plan=PlanConfig("h200"),
)


def main() -> None:
    activate_toolchain()
    found = compile_for(lower_rollout, SHAPE, CONFIG, mesh_sizes(CONFIG.mesh))
    attention = 4 * SHAPE.hidden_size * SHAPE.num_heads * SHAPE.head_dim
    experts = 3 * SHAPE.hidden_size * SHAPE.experts.intermediate_size * SHAPE.experts.count
    print(json.dumps({"sent": found.a_step["tensor"], "weights": [attention, experts]}))


if __name__ == "__main__":
    main()
