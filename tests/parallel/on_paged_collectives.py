"""Run by test_paged_mesh.py on 8 devices: what the devices exchange in the decode loop of the paged
engine."""

from __future__ import annotations

import json
import re
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from tiny_models import LLAMA

from fp8rl_jax.config.recipe import RECIPES
from fp8rl_jax.config.run import MeshConfig, PagedConfig
from fp8rl_jax.models.policy import init_policy
from fp8rl_jax.parallel import batch_sharding, make_mesh, shard_policy, to_global
from fp8rl_jax.rollout.engine import PagedEngine, pad_prompts
from fp8rl_jax.rollout.paged import host
from fp8rl_jax.rollout.sampling import Sampling

MESHES = ({"fsdp": 8}, {"data": 2, "expert": 2, "tensor": 2})
SAMPLING = Sampling(24)
_COLLECTIVE = re.compile(
    r" = (.*) (?:all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


def main() -> None:
    policy = init_policy(LLAMA, jax.random.key(0))
    found = {}
    for sizes in MESHES:
        mesh = make_mesh(MeshConfig(**sizes))
        with jax.set_mesh(mesh):
            found[" ".join(sizes)] = [exchanged(policy, mesh, count) for count in (8, 16)]
    print(json.dumps(found))


def exchanged(policy, mesh, count: int) -> list[int]:
    """Numbers of each array that is exchanged, for so many prompts and two slots a part."""
    rng = np.random.default_rng(0)
    tokens = [rng.integers(1, 256, 5).tolist() for _ in range(count)]
    prompts = to_global(pad_prompts(tokens, list(range(count)), 9), batch_sharding(mesh))
    config = PagedConfig(slots=2, page_size=4, prefill_tokens=8)
    engine = PagedEngine(RECIPES["bf16"], jnp.float32, unroll=False, paged=config)
    engine.sync(shard_policy(policy, mesh))
    layout, parts = engine._layout(engine.policy, prompts, 3, SAMPLING)
    served = host._gathered(engine.policy)
    order = jnp.tile(jnp.arange(count // parts, dtype=jnp.int32), parts)
    keys = host._row_keys(jax.random.key(1), prompts.ids, samples=3)
    queue = host._queue(prompts, order, keys, None, None, longest=24)
    state, _ = host._begin(served, queue, None, SAMPLING, 3, layout, False, False)
    program = host._run.lower(served, queue, state, SAMPLING, jnp.int32(7), layout, 0).compile()
    shapes = [
        shape
        for line in program.as_text().splitlines()
        if (collective := _COLLECTIVE.search(line))
        for shape in re.findall(r"\[([\d,]*)\]", collective[1])
    ]
    return sorted(prod(map(int, shape.split(","))) if shape else 1 for shape in shapes)


if __name__ == "__main__":
    main()
