"""Run by test_adapter_mesh.py on 8 devices: a mixture with adapters everywhere, against one
device."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
from parallel.on_eight_devices import far, specs

from fp8rl_jax.config.recipe import get_recipe
from fp8rl_jax.config.run import MeshConfig
from fp8rl_jax.config.training import LoraConfig, OptimizerConfig
from fp8rl_jax.models.config import ExpertsConfig, PolicyConfig
from fp8rl_jax.models.forms import quantized_base
from fp8rl_jax.models.forward import forward
from fp8rl_jax.models.lora import build_adapters, join, merge, split
from fp8rl_jax.models.policy import init_policy
from fp8rl_jax.parallel import (
    batch_sharding,
    checksums,
    constrain,
    make_mesh,
    shard_policy,
    to_global,
    to_host,
)
from fp8rl_jax.rollout.engine import LocalEngine
from fp8rl_jax.training.state import make_optimizer, sharded_state

CONFIG = PolicyConfig(
    "qwen3_moe",
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    experts=ExpertsConfig(count=4, per_token=2, intermediate_size=256, normalize=True),
)
LORA = LoraConfig(rank=3, alpha=6.0)
RECIPE = get_recipe("fp8-rollout")


def loss(adapters, base, tokens):
    return jnp.mean(
        forward(join(adapters, base), constrain(tokens, "batch", None)).hidden[..., :7] ** 2
    )


def main() -> None:
    policy = init_policy(CONFIG, jax.random.key(0))
    policy = jax.tree.map(lambda x: x * 5 if x.ndim > 2 else x, policy)
    base = jax.jit(lambda p: quantized_base(p, RECIPE, jnp.float32))(policy)
    rng = np.random.default_rng(0)
    adapters = build_adapters(
        CONFIG, LORA, lambda _, *shapes: [rng.normal(size=s).astype(np.float32) / 4 for s in shapes]
    )
    tokens = jax.random.randint(jax.random.key(1), (8, 6), 0, CONFIG.vocab_size, jnp.int32)
    run = jax.jit(jax.value_and_grad(loss))
    value, gradient = run(adapters, base, tokens)
    mesh = make_mesh(MeshConfig(1, 2, 2, 2))
    placed = shard_policy(to_host(join(adapters, base)), mesh)
    with jax.set_mesh(mesh):
        state = sharded_state(placed, make_optimizer(OptimizerConfig(), 1), mesh)
        trained, frozen = split(state.policy)
        sharded_value, sharded_gradient = run(
            trained, frozen, to_global(tokens, batch_sharding(mesh))
        )
        merged = merge(placed, mesh)
        engine = LocalEngine(RECIPE, jnp.float32, unroll=False)
        engine.sync(state.policy)
    base_shared = zip(
        jax.tree.leaves(split(engine.policy)[1]), jax.tree.leaves(split(placed)[1]), strict=True
    )
    moments = {
        name: spec
        for name, spec in specs(state.optimizer).items()
        if ".mu." in name or "mu[" in name
    }
    answers = {
        "loss": abs(float(sharded_value / value) - 1),
        "gradient": {name: far(sharded_gradient[name], gradient[name]) for name in gradient},
        "adapters": specs(trained),
        "merged": all(
            np.array_equal(*pair)
            for pair in zip(
                *map(jax.tree.leaves, (to_host(merged), merge(to_host(placed)))), strict=True
            )
        ),
        "merged_like_policy": specs(merged) == specs(shard_policy(to_host(policy), mesh)),
        "moments": sorted(map(str, moments.values())) == sorted(map(str, specs(trained).values())),
        "base_untouched": all(one is other for one, other in base_shared),
        "checksums": np.array_equal(to_host(checksums(frozen)), checksums(base)),
        "other_checksums": np.array_equal(
            checksums(policy), checksums(jax.tree.map(lambda x: x[::-1], policy))
        ),
    }
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
