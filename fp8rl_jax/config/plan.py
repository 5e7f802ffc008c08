"""Settings of the memory plan."""

from __future__ import annotations

import math
from dataclasses import dataclass

DEVICE_BYTES = {"h100": 80_000_000_000, "h200": 141_000_000_000}
"""Memory of cards that plan.device may name."""


@dataclass(frozen=True)
class PlanConfig:
    """What a device can hold: `fp8rl plan`, and the check before a run."""

    device: str = ""
    """Card (h100, h200) or bytes, such as 141e9, of one device; empty: what the device reports."""
    check: bool = True
    """Refuse a run whose plan exceeds the device's memory, before anything large is loaded."""

    def problems(self) -> list[str]:
        """Faults, one line each; empty where all is well."""
        try:
            known = (
                not self.device or self.device in DEVICE_BYTES or 0 < float(self.device) < math.inf
            )
        except ValueError:
            known = False
        names = ", ".join(DEVICE_BYTES)
        return (
            []
            if known
            else [f"plan.device = {self.device!r}: give one of {names}, or bytes, as in 141e9"]
        )
