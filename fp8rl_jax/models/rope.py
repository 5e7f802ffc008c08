"""Rotary positions: the frequencies of a head's dimensions, and what stretches them for texts
longer than those of pretraining (arXiv 2104.09864)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from fp8rl_jax.errors import UserError


@dataclass(frozen=True)
class RopeScaling(ABC):
    """How frequencies are rescaled; one class for each `rope_type` of Hugging Face.

    Raises:
        UserError: a factor below 1, or other numbers that mean nothing, by the key's name.
    """

    rope_type: ClassVar[str]
    factor: float

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise UserError(f"rope_scaling.factor must be at least 1, got {self.factor}")

    @property
    def amplitude(self) -> float:
        """What cos and sin are multiplied by."""
        return 1.0

    @abstractmethod
    def rescaled(self, frequencies: Float[Array, " half"], theta: float) -> Float[Array, " half"]:
        """Rescale the frequencies theta^(-i / half)."""


@dataclass(frozen=True)
class LinearRopeScaling(RopeScaling):
    """Position interpolation, `rope_type: "linear"`: every wavelength is stretched by `factor`
    (arXiv 2306.15595)."""

    rope_type: ClassVar[str] = "linear"

    def rescaled(self, frequencies, theta):
        return frequencies / self.factor


@dataclass(frozen=True)
class DynamicRopeScaling(RopeScaling):
    """NTK-aware interpolation of a length, `rope_type: "dynamic"`.

    The base grows with the text where that is longer than max_position_embeddings. No policy here
    runs over more, and up to there the frequencies are those without rescaling.
    """

    rope_type: ClassVar[str] = "dynamic"

    def rescaled(self, frequencies, theta):
        return frequencies


@dataclass(frozen=True)
class Llama3RopeScaling(RopeScaling):
    """Llama 3.1's rescaling, `rope_type: "llama3"` (arXiv:2407.21783, section 3.1).

    Wavelengths above `original_max_position_embeddings / low_freq_factor` are stretched by
    `factor`, those below `original_max_position_embeddings / high_freq_factor` are kept, those
    between are interpolated.
    """

    rope_type: ClassVar[str] = "llama3"
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low_freq_factor <= 0 or self.original_max_position_embeddings <= 0:
            raise UserError(
                f"rope_scaling must have positive frequencies and positions, got {self}"
            )
        if self.high_freq_factor <= self.low_freq_factor:
            raise UserError(
                f"rope_scaling.high_freq_factor ({self.high_freq_factor}) must be above "
                f"low_freq_factor ({self.low_freq_factor})"
            )

    def rescaled(self, frequencies, theta):
        wavelength = 2 * math.pi / frequencies
        turns = self.original_max_position_embeddings / wavelength
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = jnp.clip(blend, 0.0, 1.0)
        return frequencies * (blend + (1 - blend) / self.factor)


@dataclass(frozen=True)
class YarnRopeScaling(RopeScaling):
    """YaRN, `rope_type: "yarn"` (arXiv 2309.00071, section 3.2).

    Dimensions that turn more than `beta_fast` times over the original positions are kept, those
    that turn less than `beta_slow` times are stretched by `factor`, those between are interpolated
    by their number. cos and sin are multiplied by `attention_factor`, by default
    0.1 ln(factor) + 1, or as DeepSeek-V3 has it by the quotient of two such numbers with `mscale`
    and `mscale_all_dim` before the logarithm. With `truncate` the borders are whole dimensions.
    """

    rope_type: ClassVar[str] = "yarn"
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.original_max_position_embeddings < 1:
            raise UserError(
                "rope_scaling.original_max_position_embeddings must be positive, got "
                f"{self.original_max_position_embeddings}"
            )
        if not 0 < self.beta_slow <= self.beta_fast:
            raise UserError(
                f"rope_scaling.beta_slow ({self.beta_slow}) must be positive and not above "
                f"beta_fast ({self.beta_fast})"
            )
        for key in ("attention_factor", "mscale", "mscale_all_dim"):
            value = getattr(self, key)
            if value is not None and value < 0:
                raise UserError(f"rope_scaling.{key} must not be negative, got {value}")

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    @property
    def score_factor(self) -> float:
        """What DeepSeek's attention scores are multiplied by, besides: `mscale_all_dim` is for all
        dimensions of queries and keys, rotated or not."""
        return self._magnitude(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _magnitude(self, scale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * scale * math.log(self.factor) + 1.0

    def rescaled(self, frequencies, theta):
        half = len(frequencies)

        def dimension(turns: float) -> float:
            """The pair of dimensions that turns so often over the original positions."""
            positions = self.original_max_position_embeddings
            return half * math.log(positions / (turns * 2 * math.pi)) / math.log(theta)

        first, last = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        # transformers' bounds: the upper one is of a head's dimensions, not of their pairs
        first, last = max(first, 0), min(last, 2 * half - 1)
        width = last - first or 0.001
        stretched = jnp.clip((jnp.arange(half, dtype=jnp.float32) - first) / width, 0.0, 1.0)
        return frequencies * (1 - stretched) + frequencies / self.factor * stretched


ROPE_SCALINGS: dict[str, type[RopeScaling]] = {
    kind.rope_type: kind
    for kind in (LinearRopeScaling, DynamicRopeScaling, Llama3RopeScaling, YarnRopeScaling)
}


def base_frequencies(theta: float, rotary_dim: int) -> Float[Array, " half"]:
    """Compute theta^(-i / half), float32: the angle of each pair of dimensions, per position."""
    half = rotary_dim // 2
    return theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
