"""What a comparison finds: of every operation, of every layer, and first of each cause."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fp8rl_jax.compare.operations import Verdict
from fp8rl_jax.compare.statistics import Difference


@dataclass(frozen=True)
class OperationResult:
    """One operation: the free run's difference, its own, and why it has one."""

    name: str
    output: Difference
    own: Difference
    verdict: Verdict


@dataclass(frozen=True)
class LayerResult:
    """input: the hidden states that enter; rerouted: part of the tokens whose experts differ, None
    without experts."""

    name: str
    input: Difference
    operations: tuple[OperationResult, ...]
    rerouted: float | None


@dataclass(frozen=True)
class First:
    """The first operation that differs for one cause, such as "layers.3.q_proj"; where: in the
    prompt, the completion or both."""

    name: str
    cause: str
    detail: str
    where: str


@dataclass(frozen=True)
class Comparison:
    """All that was found.

    Attributes:
        logprobs: `logprob_differences` of the completions' tokens.
        scored: these log-probabilities, of side a and of side b, float32 [rows, tokens].
        first: of each cause, in the order of `CAUSES`, where it is met first. Where a format
            differs, the first reduction may well come earlier, and is of no weight beside it.
        only_a, only_b: linears and cache operands that this side alone quantizes.
    """

    start: OperationResult
    layers: tuple[LayerResult, ...]
    end: tuple[OperationResult, ...]
    logprobs: dict[str, float | int | None]
    scored: tuple[np.ndarray, np.ndarray]
    first: tuple[First, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether no bit of anything differs."""
        return not self.first
