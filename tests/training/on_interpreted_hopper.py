"""Rollouts and the trainer's pass over them with Hopper's kernels, which a CPU interprets: `python
-m training.on_interpreted_hopper CASE` from tests/.

Prints the largest difference of a token's log-probability, of so many. A process of its own: a
kernel that waits for what never comes hangs, and the interpreter wants a process prepared for it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from rollout.tiny import CONFIG

from fp8rl_jax.config.recipe import PrecisionConfig, get_recipe
from fp8rl_jax.config.rl import RLConfig
from fp8rl_jax.config.training import LoraConfig
from fp8rl_jax.models.config import ExpertsConfig
from fp8rl_jax.models.lora import init_adapters, join
from fp8rl_jax.models.policy import init_policy
from fp8rl_jax.precision import Compute
from fp8rl_jax.precision.exact import HopperCompute
from fp8rl_jax.rollout.engine import LocalEngine, pad_prompts
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.training.step import Batch, StepConfig, batch_logprobs
from pallas_kernels.backend import tracing_for
from pallas_kernels.check.interpret import prepare

DENSE = replace(
    CONFIG, hidden_size=64, intermediate_size=96, num_layers=1, num_heads=2, num_kv_heads=1
)
DENSE = replace(DENSE, head_dim=64, vocab_size=150)
EXPERTS = replace(DENSE, architecture="qwen3_moe", experts=ExpertsConfig(4, 2, 96, normalize=True))
# model, recipe, dtype, prompts' lengths, samples of each, tokens
CASES = {
    "one flow": (DENSE, "jet-rl", "bfloat16", (9, 4), 2, 3),
    "experts": (EXPERTS, "jet-rl", "bfloat16", (9, 4), 2, 2),
    "experts without FP8": (EXPERTS, "bf16", "float16", (5, 7), 2, 2),
    "an adapter": (DENSE, "bf16", "bfloat16", (9, 4), 2, 2),
    # the trainer has more rows than the kernel of a decode step takes
    "many rows": (DENSE, "bf16", "bfloat16", (7,), 50, 3),
    # more keys than a chunk of the decode kernel has
    "long": (DENSE, "bf16", "bfloat16", (530, 3), 1, 2),
    # what the others would show if the trainer took XLA's products
    "plain products": (DENSE, "bf16", "bfloat16", (9, 4), 2, 2),
}


def policy_of(name: str, config):
    policy = init_policy(config, jax.random.key(0))
    policy = jax.tree.map(lambda x: x * 4.0 if x.ndim > 1 and x.shape[-1] > 32 else x, policy)
    if name != "an adapter":
        return policy
    adapters = init_adapters(config, LoraConfig(rank=4), jax.random.key(2))
    keys = iter(jax.random.split(jax.random.key(3), 99))
    moved = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape), adapters)
    return join(moved, policy)


def main(name: str) -> None:
    prepare()
    config, recipe, dtype, lengths, samples, tokens = CASES[name]
    recipe = get_recipe(recipe, PrecisionConfig(exact=True))
    policy, rng = policy_of(name, config), np.random.default_rng(0)
    drawn = [rng.integers(1, config.vocab_size, n).tolist() for n in lengths]
    prompts = pad_prompts(drawn, list(range(len(lengths))), max(lengths))
    with tracing_for(2), plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        engine = LocalEngine(recipe, jnp.dtype(dtype), unroll=True, backend="hopper")
        engine.sync(policy)
        rollout = engine.generate(prompts, samples, Sampling(tokens), jax.random.key(1))
        batch = Batch(
            prompts.tokens,
            prompts.lengths,
            rollout.tokens,
            rollout.mask,
            rollout.policy_logprobs,
            jnp.ones(len(rollout.tokens)),
        )
        step = StepConfig(
            recipe, RLConfig(), dtype, temperature=1.0, logprob_chunk=64, backend="hopper"
        )
        if name == "plain products":
            HopperCompute.product = Compute.product
        trained = batch_logprobs(policy, batch, step)
    mask = np.asarray(rollout.mask)
    apart = np.abs(np.asarray(trained) - np.asarray(rollout.policy_logprobs))[mask]
    print(json.dumps({"difference": float(apart.max()), "tokens": int(mask.sum())}))


if __name__ == "__main__":
    main(sys.argv[1])
