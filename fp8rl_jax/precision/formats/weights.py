"""Formats of weights alone."""

from __future__ import annotations

from pallas_kernels import Format


class WeightFormat(Format):
    """A format of weights: a recipe that has it of anything else is refused."""
