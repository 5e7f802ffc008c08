"""The rewards of one batch of completions, and what went wrong with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int


def metrics_of(turns: Sequence[Mapping[str, Any] | None]) -> dict[str, Float32[np.ndarray, " B"]]:
    """Return {name: value of each turn} of the metrics that turns brought, 0 where one has none."""
    given = [(turn or {}).get("metrics", {}) for turn in turns]
    names = dict.fromkeys(name for metrics in given for name in metrics)
    return {
        name: np.array([metrics.get(name, 0.0) for metrics in given], np.float32) for name in names
    }


@dataclass(frozen=True)
class Scores:
    """Rewards of B completions."""

    rewards: Float32[np.ndarray, " B"]
    """Weighted sum of the components; 0 where scoring failed."""
    components: dict[str, Float32[np.ndarray, " B"]]
    """Scores of each reward before its weight, and an environment's metrics; 0 where scoring
    failed."""
    correct: Bool[np.ndarray, " B"]
    """Score of at least 1 by the reward that decides; accuracy is the mean."""
    failed: Bool[np.ndarray, " B"]
    """Samples without a score of their own: errors and timeouts."""
    errors: int
    """Samples whose reward raised, returned no finite number, or ended its process."""
    timeouts: int
    """Samples that outlived the timeout."""
    first_error: str
    """What went wrong first, for the log; empty where nothing did."""
    seconds: float
    """From submission to the last score."""
    turns: list[dict[str, Any] | None] = field(default_factory=list)
    """What an environment made of each completion: observation, reward, done, and of some metrics;
    None where that failed, empty elsewhere."""

    @classmethod
    def join(cls, parts: Sequence[Scores]) -> Scores:
        """Join the scores of several calls, one after the other."""
        names = dict.fromkeys(name for part in parts for name in part.components)
        return cls(
            rewards=np.concatenate([part.rewards for part in parts]),
            components={
                # an environment's metrics, where all turns of a part failed
                name: np.concatenate(
                    [part.components.get(name, np.zeros_like(part.rewards)) for part in parts]
                )
                for name in names
            },
            correct=np.concatenate([part.correct for part in parts]),
            failed=np.concatenate([part.failed for part in parts]),
            errors=sum(part.errors for part in parts),
            timeouts=sum(part.timeouts for part in parts),
            first_error=next((part.first_error for part in parts if part.first_error), ""),
            seconds=sum(part.seconds for part in parts),
            turns=[turn for part in parts for turn in part.turns],
        )

    def take(self, rows: Int[np.ndarray, " b"]) -> Scores:
        """Take the scores of some completions; counts and times stay those of all."""
        return replace(
            self,
            rewards=self.rewards[rows],
            components={name: scores[rows] for name, scores in self.components.items()},
            correct=self.correct[rows],
            failed=self.failed[rows],
            turns=[self.turns[row] for row in rows] if self.turns else [],
        )

    def failure_text(self) -> str:
        """Say how many rewards failed, and the first error; empty where none did."""
        failed = int(self.failed.sum())
        return (
            f"{failed} of {len(self.failed)} rewards failed: {self.first_error}" if failed else ""
        )

    def metrics(self) -> dict[str, float]:
        """Return the counts, the time, and mean and standard deviation of each reward.

        rewards/<name>/mean and /std (ddof 0) are over the samples that have a score.
        """
        values = {
            "reward/errors": self.errors,
            "reward/timeouts": self.timeouts,
            "time/reward": self.seconds,
        }
        for name, scores in self.components.items():
            scored = (
                scores[~self.failed].astype(np.float64) if not self.failed.all() else np.zeros(1)
            )
            values |= {
                f"rewards/{name}/mean": float(scored.mean()),
                f"rewards/{name}/std": float(scored.std()),
            }
        return values
