"""Settings of calibrated clipping; the formulas are in rl/objectives.py."""

from __future__ import annotations

from dataclasses import dataclass

from fp8rl_jax.config.checks import above, at_least, report, unless


@dataclass(frozen=True)
class ClipCalibrationConfig:
    """Calibrated clipping (arXiv 2609.22870): the bounds of the ratio where the trainer computes in
    FP8, found by passes that do not. Off by default; needs several updates a rollout, because with
    one the ratio is 1."""

    enabled: bool = False
    """Clip at bounds that are calibrated. 1 - rl.clip_low and 1 + rl.clip_high then say what would
    be clipped in the compute dtype, and the calibrated bounds clip as much of the FP8 ratios."""
    every: int = 20
    """Steps between calibrations, the first of them in step 0; each costs two forwards in the
    compute dtype. The paper's 20."""
    smoothing: float = 0.5
    """Part of the old bound that a calibration keeps, below 1. The paper smooths, too; its
    coefficient could not be read."""
    start_low: float | None = None
    """Lower bound before the first calibration; unset: 1 - rl.clip_low. The paper's 0.6."""
    start_high: float | None = None
    """Upper bound before the first calibration; unset: 1 + rl.clip_high. The paper's 1.8."""
    lowest: float = 0.1
    """The lower bound is never below this, whatever a batch says."""
    highest: float = 10.0
    """The upper bound is never above this."""

    def __post_init__(self) -> None:
        key = "rl.clip_calibration"
        report(
            at_least(f"{key}.every", self.every, 1),
            at_least(f"{key}.smoothing", self.smoothing, 0.0),
            unless(
                not self.smoothing >= 1,
                f"{key}.smoothing: {self.smoothing!r} must be below 1, or no calibration has an "
                "effect",
            ),
            None
            if self.start_low is None
            else above(f"{key}.start_low", self.start_low, 0.0, at_most=1.0),
            None
            if self.start_high is None
            else at_least(f"{key}.start_high", self.start_high, 1.0),
            above(f"{key}.lowest", self.lowest, 0.0, at_most=1.0),
            at_least(f"{key}.highest", self.highest, 1.0),
        )

    def start(self, clip_low: float, clip_high: float) -> tuple[float, float]:
        """The bounds before the first calibration."""
        low = 1 - clip_low if self.start_low is None else self.start_low
        return low, 1 + clip_high if self.start_high is None else self.start_high
