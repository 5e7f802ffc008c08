"""Small policies for the sharding tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fp8rl_jax.config.recipe import RECIPES
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.forms import rollout_policy
from fp8rl_jax.models.policy import Policy, init_policy

# 192 columns in 128-blocks: the last block is half of one, and no shard boundary falls on a block
# boundary
CONFIG = PolicyConfig(
    "qwen3",
    vocab_size=96,
    hidden_size=192,
    intermediate_size=512,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
)


def make_policy(config: PolicyConfig = CONFIG) -> Policy:
    """Random weights."""
    return init_policy(config, jax.random.key(0))


def quantized(policy: Policy) -> Policy:
    """The same policy with every linear in e4m3 blocks of 128x128, and its input in 1x128."""
    return rollout_policy(policy, RECIPES["fp8-rollout"], jnp.float32, unroll=False)[0]


def make_tokens(rows: int = 8, width: int = 12) -> jax.Array:
    """[rows, width] int32."""
    return jax.random.randint(jax.random.key(1), (rows, width), 0, CONFIG.vocab_size, jnp.int32)
