"""The mesh, the sharding rules, and runs of several processes."""

from fp8rl_jax.parallel.mesh import AXES, make_mesh
from fp8rl_jax.parallel.rules import DEFAULT_RULES, ShardingRules, constrain, scale_spec

__all__ = ["AXES", "DEFAULT_RULES", "ShardingRules", "constrain", "make_mesh", "scale_spec"]
