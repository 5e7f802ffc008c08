"""The rewards of one batch of completions, and what went wrong with them."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32


@dataclass(frozen=True)
class Scores:
    """Rewards of B completions."""

    rewards: Float32[np.ndarray, " B"]
    """0 where scoring failed."""
    correct: Bool[np.ndarray, " B"]
    """Score of at least 1; accuracy is the mean."""
    failed: Bool[np.ndarray, " B"]
    """Samples without a score of their own: errors and timeouts."""
    errors: int
    """Samples whose reward raised, returned no finite number, or ended its process."""
    timeouts: int
    """Samples that outlived the timeout."""
    first_error: str | None
    """What went wrong first, for the log."""
    seconds: float
    """From submission to the last score."""

    def metrics(self) -> dict[str, float]:
        """The counts and the time under their metric names."""
        return {"reward/errors": self.errors, "reward/timeouts": self.timeouts, "time/reward": self.seconds}


class ScoreJob:
    """The samples of one call and what is known of their scores."""

    def __init__(self, samples: list[tuple[Any, ...]], partial_credit: bool):
        self.future: Future[Scores] = Future()
        self.future.set_running_or_notify_cancel()
        self.samples = samples
        self.partial_credit = partial_credit
        self.started = time.monotonic()
        self.remaining = len(samples)
        self.values = np.zeros(len(samples), np.float64)
        self.failed = np.zeros(len(samples), bool)
        self.timeouts = 0
        self.first_error: str | None = None

    def record(self, row: int, score: float, error: str | None, timed_out: bool = False) -> None:
        self.remaining -= 1
        self.values[row] = score
        if error is not None:
            self.failed[row] = True
            self.timeouts += timed_out
            self.first_error = self.first_error or error

    def scores(self) -> Scores:
        # Compared in float64: float32 would round 0.99999999 to 1.
        correct = (self.values >= 1.0) & ~self.failed
        rewards = self.values if self.partial_credit else correct
        return Scores(
            rewards=rewards.astype(np.float32),
            correct=correct,
            failed=self.failed,
            errors=int(self.failed.sum()) - self.timeouts,
            timeouts=self.timeouts,
            first_error=self.first_error,
            seconds=time.monotonic() - self.started,
        )
