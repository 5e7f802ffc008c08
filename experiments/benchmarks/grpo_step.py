"""A GRPO step, its parts apart: ours for each recipe, and tunix's."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from experiments.benchmarks.contest import contest
from experiments.benchmarks.peer import Peer, PeerSpec
from experiments.benchmarks.record import result
from experiments.benchmarks.rounds import Plan
from experiments.benchmarks.step import OPTIMIZER, Shared, make_step
from experiments.benchmarks.workloads import Workload, random_prompts
from fp8rl_jax.weights.hf_config import read_policy_config
from fp8rl_jax.weights.resolve import resolve_model

SETTINGS = {
    "rollout": "Session.rollout; the samples of a prompt share its prefill; two "
    "log-probabilities of each token; texts",
    "update": "Session.update: one, no KL, no old log-probabilities, AdamW behind clipping at "
    "norm 1, float32 masters; metrics",
    "loss": "token mean",
    "sync": "cast, quantization and decode layout of all weights",
    "logging": "none",
}


def grpo_step(
    workload: Workload, plan: Plan, peers: Sequence[PeerSpec] = (), threads: int = 1
) -> dict[str, Any]:
    """Times steps of `workload.step`.

    Args:
        peers: started with the same prompts and the same weights; only for a workload of a named
            model.
        threads: processors of each peer.
    """
    tokens, shared = workload.step.tokens, Shared()
    with ExitStack() as stack:
        started = [
            stack.enter_context(Peer(spec, _settings(workload), threads, tokens)) for spec in peers
        ]
        ours = {recipe: make_step(workload, recipe, shared) for recipe in workload.step_recipes}
        return result("grpo_step", workload, workload.step, contest(ours, SETTINGS, started, plan))


def _settings(workload: Workload) -> dict[str, Any]:
    """What a peer needs to do the same step."""
    directory, shape = resolve_model(workload.model), workload.step
    config = read_policy_config(directory)
    return {
        **asdict(shape),
        "prompts": random_prompts(shape, config.vocab_size).tokens.tolist(),
        "model": str(directory),
        "config": asdict(config),
        "learning_rate": OPTIMIZER.learning_rate,
    }
