"""Run by test_expert_mesh.py on 8 devices: a mixture of experts on several meshes, against one
device."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np

from fp8rl_jax.config.recipe import get_recipe
from fp8rl_jax.config.run import MeshConfig
from fp8rl_jax.models.config import ExpertsConfig, PolicyConfig
from fp8rl_jax.models.forms import rollout_policy, trainer_policy
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

CONFIG = PolicyConfig(
    "qwen3_moe",
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    experts=ExpertsConfig(
        count=4, per_token=2, intermediate_size=256, normalize=True, dense_layers=(0,)
    ),
)
RECIPE = get_recipe("fp8-rollout")


def hidden(policy, tokens):
    return forward(policy, constrain(tokens, "batch", None)).hidden


def loss(policy, tokens):
    return jnp.mean(forward(policy, constrain(tokens, "batch", None)).hidden[..., :7] ** 2)


def eight_bit_loss(policy, tokens):
    return loss(trainer_policy(policy, get_recipe("jet-rl"), jnp.float32), tokens)


LOSSES = {"gradient": loss, "eight_bit_gradient": eight_bit_loss}
MESHES = {
    "data 2 expert 2 tensor 2": (MeshConfig(2, 1, 2, 2), LOSSES),
    "fsdp 2 expert 4": (MeshConfig(1, 2, 1, 4), ("gradient",)),
    "fsdp 2 tensor 4": (MeshConfig(1, 2, 4), ()),
}
"""With the losses whose gradients are compared there."""


def far(a, b) -> float:
    """Largest absolute difference over two trees, in parts of the largest value of the second."""
    pairs = [
        (np.asarray(x), np.asarray(y))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    ]
    return float(
        max(np.abs(x - y).max() for x, y in pairs) / max(np.abs(y).max() for _, y in pairs)
    )


def off(a, b) -> float:
    """Root mean square of the differences over two trees, in parts of the second's."""
    flat = [np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]) for tree in (a, b)]
    return float(np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[1]))


MEASURES = {"gradient": far, "eight_bit_gradient": off}


def quantized(policy):
    return rollout_policy(policy, RECIPE, jnp.float32, unroll=False)[0]


def main() -> None:
    policy = init_policy(CONFIG, jax.random.key(0))
    policy = to_host(jax.tree.map(lambda x: x * 5 if x.ndim > 2 else x, policy))
    tokens = jax.random.randint(jax.random.key(1), (8, 6), 0, CONFIG.vocab_size, jnp.int32)
    odd = tokens[:3]
    alone, odd_alone = jax.jit(hidden)(policy, tokens), jax.jit(hidden)(policy, odd)
    gradients = {of: jax.jit(jax.grad(loss))(policy, tokens) for of, loss in LOSSES.items()}
    eight_bit = jax.jit(quantized)(policy)
    eight_bit_alone = jax.jit(hidden)(eight_bit, tokens)
    answers = {}
    for name, (sizes, compared) in MESHES.items():
        mesh = make_mesh(sizes)
        shardings = policy_shardings(policy, mesh)
        placed, rows = shard_policy(policy, mesh), to_global(tokens, batch_sharding(mesh))
        with jax.set_mesh(mesh):
            sharded = {
                of: jax.jit(jax.grad(LOSSES[of]), out_shardings=shardings)(placed, rows)
                for of in compared
            }
            synced = jax.jit(
                quantized, out_shardings=policy_shardings(jax.eval_shape(quantized, policy), mesh)
            )(placed)
            eight_bit_out = jax.jit(hidden)(synced, rows)
            answers[name] = {
                "forward": far(jax.jit(hidden)(placed, rows), alone),
                "odd": far(jax.jit(hidden)(placed, odd), odd_alone),
                "gradients": {
                    of: {
                        part: MEASURES[of](
                            getattr(found.layers, part), getattr(gradients[of].layers, part)
                        )
                        for part in ("q_proj", "router", "experts", "gate_proj")
                    }
                    for of, found in sharded.items()
                },
                "quantized": np.abs(eight_bit_out - eight_bit_alone).max(-1).ravel().tolist(),
                "sync_equal": far(synced, eight_bit) == 0,
                "up_proj": [*synced.layers.experts.up_proj.value.quantized.values.sharding.spec],
                "up_proj_scales": [
                    *synced.layers.experts.up_proj.value.quantized.scales.sharding.spec
                ],
                "router": [*placed.layers.router.value.sharding.spec],
            }
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
