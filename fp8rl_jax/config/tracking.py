"""Where a run's numbers go, besides metrics.jsonl and the console, which are always written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class TrackingConfig:
    """Trackers and the record of sampled completions."""

    samples: int = 4
    """Completions of each step kept in samples.jsonl, with prompt, answer and reward; 0: none."""
    tensorboard: bool = False
    """Write TensorBoard events to <output>/tensorboard; needs the extra [trackers]."""
    wandb: bool = False
    """Log to Weights & Biases; needs the extra [trackers]."""
    wandb_project: str = "fp8rl"
    """Weights & Biases project."""
    wandb_name: str = ""
    """Weights & Biases run name; empty: the name of the run directory."""
    wandb_mode: Literal["online", "offline"] = "online"
    """offline: keep the run on disk until `wandb sync` sends it."""

    def problems(self) -> list[str]:
        """Every value that cannot work, one line each; empty where all is well."""
        found = []
        if self.samples < 0:
            found.append(f"tracking.samples = {self.samples} must not be negative")
        if self.wandb and not self.wandb_project:
            found.append("tracking.wandb_project is empty; name the project that gets the run")
        return found
