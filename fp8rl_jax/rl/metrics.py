"""Metrics that add: what a micro-batch measures, kept apart as sums until the whole batch is in.

A mean of means weighs a micro-batch of 10 tokens like one of 1000. So a metric travels as a pytree
of sums, is added over micro-batches (with `+`, or stacked by `lax.scan` and then reduced), and
becomes a number once, at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from fp8rl_jax.rl.masked import Mask, masked_count, masked_max, masked_sum, safe_divide


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mean:
    """numerator / denominator, summed apart."""

    numerator: Float[Array, "*stack"]
    denominator: Float[Array, "*stack"]

    @classmethod
    def of(cls, values: Shaped[Array, "*axes"], mask: Mask) -> Mean:
        """Mean of `values` over the entries where `mask` is set."""
        return cls(masked_sum(values, mask), masked_count(mask))

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.numerator + other.numerator, self.denominator + other.denominator)

    def reduce(self) -> Mean:
        """Adds up a stack along its leading axis."""
        return Mean(self.numerator.sum(0), self.denominator.sum(0))

    @property
    def value(self) -> Float[Array, ""]:
        """The mean; 0 where nothing was counted."""
        return safe_divide(self.numerator, self.denominator)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Maximum:
    """The largest of non-negative values; 0 where there was none."""

    maximum: Float[Array, "*stack"]

    @classmethod
    def of(cls, values: Float[Array, "*axes"], mask: Mask) -> Maximum:
        """Maximum of `values` over the entries where `mask` is set."""
        return cls(masked_max(values, mask))

    def __add__(self, other: Maximum) -> Maximum:
        return Maximum(jnp.maximum(self.maximum, other.maximum))

    def reduce(self) -> Maximum:
        """Maximum of a stack along its leading axis."""
        return Maximum(self.maximum.max(0))

    @property
    def value(self) -> Float[Array, ""]:
        return self.maximum


Metrics = dict[str, Mean | Maximum]


def add_metrics(first: Metrics, second: Metrics) -> Metrics:
    """The metrics of two micro-batches together. Raises ValueError where they do not have the same
    names."""
    if first.keys() != second.keys():
        raise ValueError(
            f"metrics of one side only: {', '.join(sorted(first.keys() ^ second.keys()))}"
        )
    return {name: metric + second[name] for name, metric in first.items()}


def reduce_metrics(stacked: Metrics) -> Metrics:
    """The metrics of all micro-batches together, from the stack along a leading axis that
    `lax.scan` makes."""
    return {name: metric.reduce() for name, metric in stacked.items()}


def metric_values(
    metrics: Mapping[str, Mean | Maximum | Float[Array, ""]],
) -> dict[str, Float[Array, ""]]:
    """Plain numbers, once everything has been added; what is one already, as all of
    `mismatch_metrics`, stays as it is."""
    return {
        name: metric.value if isinstance(metric, Mean | Maximum) else metric
        for name, metric in metrics.items()
    }
