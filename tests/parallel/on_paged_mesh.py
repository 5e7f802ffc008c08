"""Run by test_paged_mesh.py on 8 devices: continuous batching on meshes, beside one device."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from tiny_models import LLAMA

from fp8rl_jax.config.recipe import RECIPES, recipe
from fp8rl_jax.config.run import MeshConfig, PagedConfig
from fp8rl_jax.config.training import LoraConfig
from fp8rl_jax.models.lora import build_adapters, join
from fp8rl_jax.models.policy import init_policy
from fp8rl_jax.parallel import (
    batch_sharding,
    batch_shards,
    make_mesh,
    shard_policy,
    to_global,
    to_host,
)
from fp8rl_jax.rollout.engine import LocalEngine, PagedEngine, pad_prompts
from fp8rl_jax.rollout.partial import advance, begin, divide
from fp8rl_jax.rollout.sampling import Sampling

MESHES = ({"fsdp": 8}, {"data": 2, "expert": 2, "tensor": 2})
SAMPLING = Sampling(24, stop_token_ids=tuple(range(5, 15)))
KEY = jax.random.key(1)


def main() -> None:
    policy, rng = init_policy(LLAMA, jax.random.key(0)), np.random.default_rng(0)
    lengths = (3, 7, 5, 9, 2, 4, 8, 1)
    prompts = pad_prompts([rng.integers(1, 256, n).tolist() for n in lengths], list(range(8)), 9)
    alone = LocalEngine(RECIPES["bf16"], jnp.float32, unroll=False)
    alone.sync(policy)
    wanted = jax.device_get(alone.generate(prompts, 3, SAMPLING, KEY))
    turns, _ = conversation(alone, prompts)
    found = {}
    for sizes in MESHES:
        mesh = make_mesh(MeshConfig(**sizes))
        with jax.set_mesh(mesh):
            paged = PagedConfig(slots=2, page_size=4, prefill_tokens=8)
            engine = PagedEngine(RECIPES["bf16"], jnp.float32, unroll=False, paged=paged)
            engine.sync(shard_policy(policy, mesh))
            placed = to_global(prompts, batch_sharding(mesh))
            first = to_host(engine.generate(placed, 3, SAMPLING, KEY).tokens)
            # the second deals the prompts anew, by what the first found
            made = engine.generate(placed, 3, SAMPLING, KEY)
            same = bool((first == wanted.tokens).all())
            parts = made.tokens.sharding.shard_shape(made.tokens.shape)[0]
            made = to_host(made)
            carried = in_two_pieces(engine, prompts, mesh)
            said, reused = conversation(engine, prompts, batch_sharding(mesh))
        gap = np.abs(made.policy_logprobs - wanted.policy_logprobs).max()
        same &= bool((made.tokens == wanted.tokens).all() and (made.mask == wanted.mask).all())
        same &= bool((carried == wanted.tokens).all() and (said == turns).all())
        found[" ".join(sizes)] = [same, float(gap), parts, reused]
    told = {
        "simulated": simulated(adapted(policy), prompts),
        "quantized": quantized(policy, prompts),
    }
    print(json.dumps({"meshes": found, **told}))


def quantized(policy, prompts):
    """Whether the last mesh samples one device's tokens where inputs are quantized along the side
    that tensor splits, in groups of two devices or with a scale over the row; by recipe, with the
    largest difference of log-probabilities."""
    told, mesh = {}, make_mesh(MeshConfig(**MESHES[-1]))
    for name in ("fp8-rollout", "nvfp4-rollout"):
        alone = LocalEngine(RECIPES[name], jnp.float32, unroll=False)
        alone.sync(policy)
        wanted = jax.device_get(alone.generate(prompts, 3, SAMPLING, KEY))
        with jax.set_mesh(mesh):
            engine = PagedEngine(RECIPES[name], jnp.float32, unroll=False)
            engine.sync(shard_policy(policy, mesh))
            out = to_host(
                engine.generate(to_global(prompts, batch_sharding(mesh)), 3, SAMPLING, KEY)
            )
        gap = float(np.abs(out.policy_logprobs - wanted.policy_logprobs).max())
        told[name] = bool((out.tokens == wanted.tokens).all()), gap
    return told


def adapted(policy):
    """The policy with an adapter of each linear, which changes what it says."""
    rng = np.random.default_rng(1)
    adapters = build_adapters(
        LLAMA,
        LoraConfig(rank=3, alpha=6.0),
        lambda _, *shapes: [rng.normal(size=s).astype(np.float32) / 16 for s in shapes],
    )
    return join(adapters, policy)


def simulated(policy, prompts):
    """Whether a simulated cache and cast probabilities give the tokens of one device on the last
    mesh, whose vocabulary is split, of both engines, and the supports that these were drawn from;
    and the largest difference of log-probabilities."""
    names = {"query": "e4m3-1x12", "key": "e4m3-1x12", "value": "e5m2-1x10", "probability": "e4m3"}
    mine = recipe("bf16", "mine", **{f"rollout.{role}": name for role, name in names.items()})
    alone = LocalEngine(mine, jnp.float32, unroll=False)
    alone.sync(policy)
    truncated = replace(SAMPLING, top_k=8, support_size=8)
    wanted = jax.device_get(alone.generate(prompts, 3, truncated, KEY))
    mesh, same, gap = make_mesh(MeshConfig(**MESHES[-1])), True, 0.0
    with jax.set_mesh(mesh):
        for made in (LocalEngine, PagedEngine):
            engine = made(mine, jnp.float32, unroll=False)
            engine.sync(shard_policy(policy, mesh))
            placed = to_global(prompts, batch_sharding(mesh))
            out = to_host(engine.generate(placed, 3, truncated, KEY))
            same &= bool((out.tokens == wanted.tokens).all())
            same &= bool((out.support.ids == wanted.support.ids)[wanted.mask].all())
            gap = max(gap, float(np.abs(out.policy_logprobs - wanted.policy_logprobs).max()))
    return same, gap


def in_two_pieces(engine, prompts, mesh):
    """Tokens of completions that are interrupted as soon as half of the prompts have theirs."""
    progress = begin(prompts, KEY, 3, SAMPLING, 0)
    for enough in (4, 8):
        enough = max(enough, batch_shards(mesh))
        placed = to_global(progress, batch_sharding(mesh))
        rows, _ = to_host(engine.go_on(placed, SAMPLING, enough))
        progress = advance(progress, rows, engine.version)
        ended, _ = divide(progress, enough, batch_shards(mesh))
        assert len(ended.prompts.ids) == enough
    return progress.rows.tokens


def conversation(engine, prompts, sharding=None):
    """The tokens of a second turn, in which one conversation stands in the place of another's part
    of the batch; and how many of its tokens the first had left in the cache."""
    with engine.conversations(9 + 24 + 1):
        placed = prompts if sharding is None else to_global(prompts, sharding)
        first = to_host(engine.generate(placed, 1, SAMPLING, KEY))
        rows = zip(prompts.tokens, prompts.lengths, first.tokens, first.mask, strict=True)
        said = [[*one[:n].tolist(), *more[mask].tolist(), 7] for one, n, more, mask in rows]
        ids = prompts.ids.tolist()
        said[0], said[7], ids[0], ids[7] = said[7], said[0], ids[7], ids[0]
        batch = pad_prompts(said, ids, 9 + 24 + 1)
        placed = batch if sharding is None else to_global(batch, sharding)
        second = to_host(engine.generate(placed, 1, SAMPLING, jax.random.key(2)))
    return second.tokens, int(second.metrics.get("rollout/reused_tokens", 0))


if __name__ == "__main__":
    main()
