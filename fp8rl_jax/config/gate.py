"""Settings of `fp8rl gate`: what the mismatch of a run's first rollout may be."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.config.schema import at_least

LIMITS = ("max_k3", "max_token_mult_prob_error", "max_full_kl", "min_pearson")


@dataclass(frozen=True)
class GateConfig:
    """Limits of the mismatch, and on what it is measured."""

    max_k3: float | None = 1e-3
    """Largest mismatch/k3; NeMo RL wants its gen_kl_error, the same number, below 1e-3."""
    max_token_mult_prob_error: float | None = 1.05
    """Largest mismatch/token_mult_prob_error, E[exp |d|]; NeMo RL looks closer above this."""
    max_full_kl: float | None = None
    """Largest KL(rollout || trainer) over the full vocabulary, nats a token, mean over `rows`."""
    min_pearson: float | None = None
    """Smallest correlation of the two sides' probabilities of the sampled tokens."""
    prompts: int = 0
    """Prompts that are sampled, from the start of the problems; 0: rollout.prompts_per_step."""
    rows: int = 4
    """Completions whose whole distributions are compared, and where a limit is missed their layers;
    0: none, and a device needs no room for a second and a third copy of the model."""
    json: str = ""
    """Also write everything that was measured to this file."""

    def problems(self) -> list[str]:
        """List every value that cannot work, one line each; empty where all is well."""
        faults = [
            at_least("gate.prompts", self.prompts, 0),
            at_least("gate.rows", self.rows, 0),
            *(
                f"gate.{name} = {limit} must be a finite number"
                for name in LIMITS
                if (limit := getattr(self, name)) is not None and not math.isfinite(limit)
            ),
        ]
        if self.max_full_kl is not None and not self.rows:
            faults.append("gate.max_full_kl: needs rows to be compared; raise gate.rows")
        return [fault for fault in faults if fault]

    def missed(self, numbers: Mapping[str, float]) -> Iterator[str]:
        """Say which limits are missed; a number that is not finite misses each of its limits.

        Args:
            numbers: by the names of the limits behind "max_" and "min_".
        """
        for name in LIMITS:
            limit, (side, _, number) = getattr(self, name), name.partition("_")
            if limit is None:
                continue
            value = numbers[number]
            if not (value <= limit if side == "max" else value >= limit):
                yield f"{number} {value:.3g} is {'above' if side == 'max' else 'below'} {limit:g}"


@dataclass(frozen=True)
class GateRun(RunConfig):
    """A run's settings, and what its mismatch may be."""

    gate: GateConfig = GateConfig()
