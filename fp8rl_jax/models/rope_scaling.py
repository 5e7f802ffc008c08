"""Rescaling of the rotary frequencies, by which a model reads further than it was first trained
on."""

from __future__ import annotations

import dataclasses

from fp8rl_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class LinearRopeScaling:
    """Position interpolation, `rope_type: "linear"`: every wavelength is stretched by `factor`
    (arXiv 2306.15595)."""

    factor: float

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise UserError(f"rope_scaling.factor must be at least 1, got {self.factor}")


@dataclasses.dataclass(frozen=True)
class Llama3RopeScaling:
    """Llama 3.1's rescaling of the rotary frequencies, `rope_type: "llama3"` (arXiv:2407.21783,
    section 3.1).

    Wavelengths above `original_max_position_embeddings / low_freq_factor` are stretched by
    `factor`, those below `original_max_position_embeddings / high_freq_factor` are kept, those
    between are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        if (
            self.factor < 1
            or self.low_freq_factor <= 0
            or self.original_max_position_embeddings <= 0
        ):
            raise UserError(
                "rope_scaling must have factor >= 1 and positive frequencies and positions, got "
                f"{self}"
            )
        if self.high_freq_factor <= self.low_freq_factor:
            raise UserError(
                f"rope_scaling.high_freq_factor ({self.high_freq_factor}) must be above "
                f"low_freq_factor ({self.low_freq_factor})"
            )
