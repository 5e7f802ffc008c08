"""Run by test_formats_mesh.py on 8 devices: models in formats with quantizers of their own, against
one device."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from parallel.on_eight_devices import far

from fp8rl_jax.config.recipe import recipe as changed
from fp8rl_jax.config.run import MeshConfig
from fp8rl_jax.models.config import ExpertsConfig, PolicyConfig
from fp8rl_jax.models.forms import rollout_policy, trainer_policy
from fp8rl_jax.models.forward import forward
from fp8rl_jax.models.policy import init_policy
from fp8rl_jax.parallel import (
    batch_sharding,
    constrain,
    make_mesh,
    shard_policy,
    to_global,
    to_host,
)
from fp8rl_jax.precision import QTensor

# of 96 columns two devices have 48 each, one and a half groups of 32
MOE = PolicyConfig(
    "qwen3_moe",
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    experts=ExpertsConfig(count=4, per_token=2, intermediate_size=96, normalize=True),
)
DENSE = replace(MOE, architecture="qwen3", experts=None)
# parts of two devices are whole blocks: linears that share an input are multiplied as one
BLOCKS = replace(DENSE, num_kv_heads=4, head_dim=64, intermediate_size=256)
SHAPES = {"nvfp4": DENSE, "bf16": BLOCKS, "jet-rl": BLOCKS}
RECIPES = {
    "bf16": {},
    "jet-rl": {"exact": False},
    "mxfp8": {},
    # dense: tokens of an expert are grouped on each device by themselves, and under scales that are
    # no powers of two other groups are other values; nearest: what is drawn is a hash of the
    # gradient, whose last bits depend on the order of sums
    "nvfp4": {
        "gradient_rounding": "nearest",
        "first_layers_in_compute": 0,
        "last_layers_in_compute": 0,
    },
    "int4-qat": {"rollout.weight": "int4-1x32", "trainer.weight": "int4-1x32"},
}


def codes(policy) -> dict[str, QTensor]:
    tensors = policy.stack.tensors()
    return {
        name: weight.value.quantized
        for name, weight in tensors.items()
        if hasattr(weight.value, "quantized")
    }


def main() -> None:
    tokens = jax.random.randint(jax.random.key(1), (8, 6), 0, MOE.vocab_size, jnp.int32)
    mesh, answers = make_mesh(MeshConfig(1, 2, 2, 2)), {}
    for name, changes in RECIPES.items():
        recipe = changed(name, **changes)
        policy = init_policy(SHAPES.get(name, MOE), jax.random.key(0))
        policy = jax.tree.map(lambda x: x * 5 if x.ndim > 2 else x, policy)

        def loss(policy, tokens, recipe=recipe):
            made = trainer_policy(policy, recipe, jnp.dtype("float32"))
            return jnp.mean(forward(made, constrain(tokens, "batch", None)).hidden[..., :7] ** 2)

        run = jax.jit(jax.value_and_grad(loss))
        serve = jax.jit(lambda p, r=recipe: codes(rollout_policy(p, r, jnp.float32, False)[0]))
        alone, served = run(policy, tokens), serve(policy)
        placed = shard_policy(to_host(policy), mesh)
        with jax.set_mesh(mesh):
            sharded = run(placed, to_global(tokens, batch_sharding(mesh)))
            there = serve(placed)
        answers[name] = {
            "linears": len(served),
            "codes": all(
                np.array_equal(*(np.asarray(x).view(np.uint8) for x in pair))
                for pair in zip(jax.tree.leaves(served), jax.tree.leaves(there), strict=True)
            ),
            "spread": sum(not x.values.sharding.is_fully_replicated for x in there.values()),
            "loss": abs(float(sharded[0] / alone[0]) - 1),
            "gradient": far(sharded[1], alone[1]),
        }
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
