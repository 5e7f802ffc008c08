"""The mesh, the sharding rules, and runs of several processes."""

from fp8rl_jax.parallel.checksum import checksums, marks, mixed, place_hash
from fp8rl_jax.parallel.distributed import (
    check_same,
    gather_text,
    initialize,
    is_main_process,
    leave_on_failure,
    shared_faults,
    sum_over_processes,
    to_global,
    to_host,
)
from fp8rl_jax.parallel.mesh import AXES, make_mesh, mesh_text
from fp8rl_jax.parallel.placement import (
    batch_sharding,
    batch_shards,
    check_batch,
    placed_shapes,
    policy_shardings,
    replicated,
    shard_policy,
    split_batch,
)
from fp8rl_jax.parallel.rules import (
    DECODE_RULES,
    DEFAULT_RULES,
    ShardingRules,
    by_parts,
    constrain,
    left_inside,
    left_to_xla,
    scale_spec,
    splitting_axes,
)
from fp8rl_jax.parallel.watch import PROGRESS

__all__ = [
    "AXES",
    "DECODE_RULES",
    "DEFAULT_RULES",
    "PROGRESS",
    "ShardingRules",
    "batch_sharding",
    "batch_shards",
    "by_parts",
    "check_batch",
    "check_same",
    "checksums",
    "constrain",
    "gather_text",
    "initialize",
    "is_main_process",
    "leave_on_failure",
    "left_inside",
    "left_to_xla",
    "make_mesh",
    "marks",
    "mesh_text",
    "mixed",
    "place_hash",
    "placed_shapes",
    "policy_shardings",
    "replicated",
    "scale_spec",
    "shard_policy",
    "shared_faults",
    "split_batch",
    "splitting_axes",
    "sum_over_processes",
    "to_global",
    "to_host",
]
