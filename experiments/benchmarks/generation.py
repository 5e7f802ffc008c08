"""Rollout alone: our sampler, recipe by recipe, and other libraries' on the same prompts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import jax

from experiments.benchmarks.contest import contest
from experiments.benchmarks.peer import Peer, PeerSpec
from experiments.benchmarks.record import result
from experiments.benchmarks.rounds import Plan, Side
from experiments.benchmarks.step import Laps, check_full, make_engine
from experiments.benchmarks.workloads import Workload, random_prompts
from fp8rl_jax.config.run import MeshConfig
from fp8rl_jax.models.policy import Policy
from fp8rl_jax.parallel import batch_sharding, make_mesh, shard_policy, to_global
from fp8rl_jax.rollout.calibration import calibrate_on_prompts
from fp8rl_jax.rollout.engine import Prompts
from fp8rl_jax.rollout.sampling import Sampling
from fp8rl_jax.weights.resolve import resolve_model

SETTINGS = {
    "rollout": "LocalEngine.generate, temperature 1, whole vocabulary, no stop token",
    "logprobs": "two of each token",
}


def generation(
    workload: Workload, plan: Plan, peers: Sequence[PeerSpec] = (), threads: int = 1
) -> dict[str, Any]:
    """Times the rollout of `workload.generation`.

    Args:
        peers: started with the same prompts and the same weights; only for a workload of a named
            model.
        threads: processors of each peer.
    """
    shape, policy, mesh = workload.generation, workload.load_policy(), make_mesh(MeshConfig())
    prompts = random_prompts(shape, policy.config.vocab_size)
    with ExitStack() as stack:
        stack.enter_context(jax.set_mesh(mesh))
        started = [
            stack.enter_context(
                Peer(spec, _settings(workload, prompts, threads), threads, shape.tokens)
            )
            for spec in peers
        ]
        policy, placed = shard_policy(policy, mesh), to_global(prompts, batch_sharding(mesh))
        ours = {
            recipe: _sampler(workload, policy, placed, recipe)
            for recipe in workload.generation_recipes
        }
        return result("generation", workload, shape, contest(ours, SETTINGS, started, plan))


def _sampler(workload: Workload, policy: Policy, prompts: Prompts, recipe: str) -> Side:
    engine = make_engine(workload, recipe)
    engine.sync(policy, calibrate_on_prompts(policy, prompts, engine.recipe, engine.dtype))
    sampling = Sampling(workload.generation.new_tokens)

    def run(number: int) -> dict[str, float]:
        laps = Laps()
        rollout = engine.generate(
            prompts, workload.generation.samples, sampling, jax.random.key(number)
        )
        laps.end("gen", rollout.tokens)
        check_full(rollout)
        return {"seconds": laps.seconds["seconds"]}

    return run


def _settings(workload: Workload, prompts: Prompts, threads: int) -> dict[str, Any]:
    """What a peer needs to do the same."""
    return {
        "model": str(resolve_model(workload.model)),
        "prompts": prompts.tokens.tolist(),
        "new_tokens": workload.generation.new_tokens,
        "threads": threads,
    }
