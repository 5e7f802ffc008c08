"""Run by test_apart.py in two processes of 2 devices: a session whose rollout has half of each
process's. Arguments: coordinator, number of processes, number of this one. Prints what it measures
as JSON."""

import json
import sys

import jax

import fp8rl_jax as fp8rl
from fp8rl_jax.config.run import MeshConfig, RolloutMeshConfig

coordinator, processes, process = sys.argv[1:]
jax.distributed.initialize(coordinator, int(processes), int(process))
policy, tokenizer = fp8rl.byte_policy(
    hidden_size=64, intermediate_size=96, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16
)
session = fp8rl.Session(
    policy,
    tokenizer,
    mesh=MeshConfig(data=1, fsdp=2, rollout=RolloutMeshConfig(data=2)),
    exact=False,
    compute_dtype="float32",
    samples_per_prompt=2,
    max_new_tokens=6,
    learning_rate=1e-2,
)
rows = []
for _ in range(2):
    rollout = session.rollout(["ab=", "cde=", "f="])
    metrics = session.update(rollout, [len(set(text)) for text in rollout.texts])
    rows.append(metrics | {"texts": rollout.texts})
print(json.dumps({"rows": rows}))
