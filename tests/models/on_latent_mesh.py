"""Run by test_deepseek.py on 8 devices: latent attention on a mesh, against one device."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
from tiny_models import DEEPSEEK

from fp8rl_jax.config.run import MeshConfig
from fp8rl_jax.models.forward import forward
from fp8rl_jax.models.policy import init_policy
from fp8rl_jax.parallel import (
    batch_sharding,
    constrain,
    make_mesh,
    policy_shardings,
    shard_policy,
    to_global,
    to_host,
)

CONFIG = dataclasses.replace(
    DEEPSEEK, num_layers=1, experts=dataclasses.replace(DEEPSEEK.mixture, dense_layers=())
)


ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "kv_a_layernorm", "o_proj")


def loss(policy, tokens):
    return jnp.mean(forward(policy, constrain(tokens, "batch", None)).hidden[..., :7] ** 2)


def far(a, b) -> float:
    """Largest absolute difference, in parts of the largest value of the second."""
    return float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(np.asarray(b)).max())


def main() -> None:
    policy = init_policy(CONFIG, jax.random.key(0))
    policy = to_host(jax.tree.map(lambda x: x * 5 if x.ndim > 2 else x, policy))
    tokens = jax.random.randint(jax.random.key(1), (8, 6), 0, CONFIG.vocab_size, jnp.int32)
    value, gradient = jax.jit(jax.value_and_grad(loss))(policy, tokens)
    mesh = make_mesh(MeshConfig(2, 2, 2))
    placed, rows = shard_policy(policy, mesh), to_global(tokens, batch_sharding(mesh))
    with jax.set_mesh(mesh):
        layout = None, policy_shardings(policy, mesh)
        found = jax.jit(jax.value_and_grad(loss), out_shardings=layout)(placed, rows)
    found_of, tensors = found[1].layers.tensors(), gradient.layers.tensors()
    answers = {
        "loss": far(found[0], value),
        "gradient": {name: far(found_of[name].value, tensors[name].value) for name in ATTENTION},
        "places": {
            name: [*weight.value.sharding.spec] for name, weight in placed.layers.tensors().items()
        },
    }
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
