"""Formats inside of attention: its probabilities, and keys and values in formats that find their
scales themselves. All linears stay in float32."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.formats.rows import Row
from fp8rl_jax.config.formats import parse_format
from fp8rl_jax.config.recipe import ForwardFormats

PROBABILITY, CACHE = ("probability",), ("key", "value")


@dataclass(frozen=True)
class AttentionRow(Row):
    """A format of these roles of attention."""

    roles: tuple[str, ...] = PROBABILITY

    @property
    def both(self) -> ForwardFormats:
        return ForwardFormats(**dict.fromkeys(self.roles, parse_format(self.name)))

    @property
    def flows(self) -> tuple[str, ...]:
        """Of the mismatch; a trainer has no cache whose format could be the rollout's."""
        return ("both", "unified") if self.roles == PROBABILITY else ("both",)


ATTENTION = (
    *(AttentionRow(name) for name in ("e4m3", "e5m2")),
    *(AttentionRow(name, roles=CACHE) for name in ("mxfp8", "nvfp4_rows", "mxfp4")),
)
