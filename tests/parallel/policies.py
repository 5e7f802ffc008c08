"""Small policies for the sharding tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fp8rl_jax.config.recipe import TensorFormat
from fp8rl_jax.models.config import PolicyConfig
from fp8rl_jax.models.policy import LINEARS, Policy, init_policy
from fp8rl_jax.precision import quantize_weight

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
    """The same policy with every linear an e4m3 QTensor of 128x128 blocks."""
    graph = jax.tree.map(lambda x: x, policy)
    for name in LINEARS:
        weight = getattr(graph.layers, name).weight
        weight.set_value(quantize_weight(weight.get_value(), TensorFormat("e4m3", (128, 128))))
    return graph


def make_tokens(rows: int = 8, width: int = 12) -> jax.Array:
    """[rows, width] int32."""
    return jax.random.randint(jax.random.key(1), (rows, width), 0, CONFIG.vocab_size, jnp.int32)
