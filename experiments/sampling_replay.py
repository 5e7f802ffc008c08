"""What truncated sampling does to the importance ratio, before and after its supports are replayed:
`python -m experiments.sampling_replay --output FILE`.

For each recipe and each truncation a model answers a few prompts, once. The trainer scores these
tokens with the same weights twice: over the whole vocabulary, as it does by default, and over each
token's support (rl.correction.truncated_sampling = "replay"). Either is divided by the
log-probability with which the token was sampled. The policies are the same, so that the ratio
should be 1: over the vocabulary its mean is the mass that truncation kept, over the supports what
numerics alone leave, as they do where nothing is truncated. huggingface/trl #7269 has this table of
Qwen2.5-1.5B under vLLM.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.benchmarks.machine import facts
from experiments.command import run_command
from experiments.record import write
from fp8rl_jax import rl
from fp8rl_jax.parallel import to_host
from fp8rl_jax.training.experience import Experience
from fp8rl_jax.training.learner import step_config
from fp8rl_jax.training.session import Session
from fp8rl_jax.training.step import batch_logprobs
from fp8rl_jax.weights.load import load
from fp8rl_jax.weights.resolve import resolve_model

TRUNCATIONS: dict[str, dict[str, Any]] = {
    "top_p = 0.8": {"top_p": 0.8},
    "top_p = 0.95": {"top_p": 0.95},
    "top_k = 20": {"top_k": 20},
    "min_p = 0.1": {"min_p": 0.1},
    "none": {},
}
PROMPTS = (
    "Tell me a story about a lighthouse.",
    "What would you do with a day off in autumn?",
    "Describe a city that floats.",
    "Why do people collect old maps?",
    "Write a letter from a cat to its owner.",
    "Name a good gift for a gardener, and say why.",
    "What does the sea sound like at night?",
    "Invent a game for three players.",
)


@dataclass(frozen=True)
class Arguments:
    """Rollouts under truncated sampling, scored twice, and one JSON file."""

    output: str
    """JSON file."""
    model: str = "smollm2-135m"
    """As `fp8rl compare` takes it."""
    recipes: tuple[str, ...] = ("bf16", "fp8-rl")
    """Each samples and scores by itself, what it does not quantize in float32."""
    samples: int = 4
    """Completions of each prompt."""
    new_tokens: int = 32
    """Longest completion."""
    support_size: int = 128
    """rollout.support_size."""


def ratios(session: Session, rollout: Experience) -> dict[str, Any]:
    """Measure the ratios of one rollout of a session that replays supports; of one that is not
    truncated over the vocabulary alone."""
    config = step_config(session.config, session.recipe)
    batch = rollout.batch(config.rl)
    found, sides = {}, {"vocabulary": None}
    if batch.support is not None:
        sides["support"] = batch.support
    for name, support in sides.items():
        with jax.set_mesh(session.mesh):
            trained = batch_logprobs(session.weights, replace(batch, support=support), config)
        difference = trained - batch.rollout_logprobs
        _, _, metrics = rl.correction(difference, batch.mask, config.rl.correction)
        values = {key: float(x) for key, x in rl.metric_values(metrics).items()}
        ratio = np.exp(np.asarray(difference, np.float64))[np.asarray(batch.mask)]
        found[name] = {
            "mean": values["correction/ratio_mean"],
            "median": float(np.median(ratio)),
            "outside": values["correction/ratio_outside_frac"],
        }
    mask, sampled = to_host((batch.mask, rollout.rollout))
    # of a token, behaviour = policy / kept mass
    kept = np.exp(sampled.policy_logprobs.astype(np.float64) - sampled.behaviour_logprobs)[mask]
    of_supports = {
        name.removeprefix("rollout/"): value
        for name, value in rollout.metrics().items()
        if name.startswith("rollout/support_")
    }
    return found | {"tokens": int(mask.sum()), "kept_mass": float(kept.mean())} | of_supports


def run(arguments: Arguments) -> None:
    """Measure and write the record."""
    policy, tokenizer = load(resolve_model(arguments.model))
    made = partial(
        Session,
        policy,
        tokenizer,
        compute_dtype="float32",
        samples_per_prompt=arguments.samples,
        max_new_tokens=arguments.new_tokens,
        truncated_sampling="replay",
        support_size=arguments.support_size,
        decode_layers="scan",
        **{"precision.exact": False, "rl.correction.method": "token_tis"},
    )
    rows = []
    for recipe in arguments.recipes:
        for name, truncation in TRUNCATIONS.items():
            session = made(recipe, **truncation)
            measured = ratios(session, session.rollout(PROMPTS, key=jax.random.key(0)))
            rows.append({"recipe": recipe, "truncation": name} | measured)
            print(rows[-1], flush=True)
    given = asdict(arguments) | {"model": Path(arguments.model).name}
    del given["output"]  # a path of this machine
    found = {"arguments": given, "prompts": len(PROMPTS), "rows": rows}
    write(Path(arguments.output), facts("experiments.sampling_replay") | found)


if __name__ == "__main__":
    sys.exit(run_command("sampling_replay", Arguments, run, sys.argv[1:]))
