"""What is compared: names, the flags of their runs, and the orders that others report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fp8rl_jax.config.recipe import RECIPES

ROOT = Path(__file__).parents[2]
RUN_FILES = ("experiments/runs/demo.toml", "experiments/runs/mismatch.toml")
EXACT = ("bf16", "jet-rl")
"""Recipes whose rollout can be made equal to their trainer bit for bit."""

VARIANTS: dict[str, tuple[str, ...]] = {
    **{name: ("--recipe", name) for name in RECIPES},
    **{f"{name}-exact": ("--recipe", name, "--precision.exact") for name in EXACT},
}
"""Name -> flags of its run, over the run files."""

KIND = {
    "rollout only": ("fp8-rollout", "fp8-kv", "fp8-rl"),
    "end to end": ("fp8-e2e", "fp8-e2e-kv", "jet-rl", "infir2"),
    "bf16": ("bf16",),
    "exact": tuple(f"{name}-exact" for name in EXACT),
}


@dataclass(frozen=True)
class Claim:
    """`above` has the larger mismatch of the two, by `source`."""

    above: str
    below: str
    source: str


CLAIMS = (
    Claim("fp8-rollout", "fp8-e2e", "verl and NeMo RL: rollout-only above end to end (FP8-RL, arXiv 2601.18150)"),
    Claim("fp8-e2e", "bf16", "verl and NeMo RL: end to end above bf16 (the same)"),
    Claim("fp8-kv", "fp8-rollout", "verl: an FP8 KV cache alone above FP8 linears alone (the same)"),
    Claim("fp8-rl", "fp8-kv", "verl: both above the cache alone (the same)"),
)
