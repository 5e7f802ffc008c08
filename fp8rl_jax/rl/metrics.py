"""Sums and means over the tokens that count, and metrics that add up over micro-batches.

Padding may hold anything, NaN and infinity included: masked entries are replaced before they are
used, never multiplied by zero. What is not masked is never cleaned: a NaN or an infinity at a real
token reaches the result.

A mean of means weighs a micro-batch of 10 tokens like one of 1000. So a metric travels as a pytree
of sums, is added over micro-batches (with `+`, or stacked by `lax.scan` and then reduced), and
becomes a number at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

Mask = Bool[Array, "*axes"] | Float[Array, "*axes"]
"""True or non-zero where an entry counts."""

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before they are exponentiated, as in verl: one bad token cannot
overflow a batch."""


def masked_sum(
    values: Shaped[Array, "*axes"], mask: Mask, axis: int | None = None
) -> Float[Array, "*rest"]:
    """Add the entries that count; 0 where none does."""
    return jnp.sum(jnp.where(mask.astype(bool), values, 0).astype(jnp.float32), axis=axis)


def masked_count(mask: Mask, axis: int | None = None) -> Float[Array, "*rest"]:
    """Count the entries that count, as float32."""
    return jnp.sum(mask.astype(bool), axis=axis, dtype=jnp.float32)


def masked_mean(
    values: Shaped[Array, "*axes"], mask: Mask, axis: int | None = None
) -> Float[Array, "*rest"]:
    """Average the entries that count; 0 where none does."""
    return safe_divide(masked_sum(values, mask, axis), masked_count(mask, axis))


def masked_max(
    values: Float[Array, "*axes"], mask: Mask, axis: int | None = None
) -> Float[Array, "*rest"]:
    """Find the maximum of non-negative entries; 0 where none counts."""
    return jnp.max(jnp.where(mask.astype(bool), values, 0.0), axis=axis, initial=0.0)


def safe_divide(
    numerator: Float[Array, "*axes"], denominator: Float[Array, "*axes"]
) -> Float[Array, "*axes"]:
    """Divide; 0 where the denominator is exactly 0, and NaN passes through."""
    empty = denominator == 0
    return jnp.where(empty, 0.0, numerator / jnp.where(empty, 1.0, denominator))


def clamp_log_ratio(log_ratio: Float[Array, "*axes"]) -> Float[Array, "*axes"]:
    """Clamp log-ratios to +-LOG_RATIO_LIMIT; NaN passes through."""
    return jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def k3(log_ratio: Float[Array, "*axes"]) -> Float[Array, "*axes"]:
    """Estimate KL(p || q) from a sample of p: exp(x) - 1 - x with x = log q - log p.

    Schulman's k3 ("Approximating KL divergence", 2020, http://joschu.net/blog/kl-approx.html):
    unbiased, and never negative but for rounding. expm1 keeps its digits where the policies are
    close.
    """
    return jnp.expm1(log_ratio) - log_ratio


def check_shapes(mask: Mask, **arrays: Array | None) -> None:
    """Raise ValueError for the first array whose shape is not the mask's.

    Nothing may broadcast by accident. None has no shape and passes.
    """
    for name, array in arrays.items():
        if array is not None and jnp.shape(array) != jnp.shape(mask):
            raise ValueError(
                f"{name} has shape {jnp.shape(array)}, but the mask has {jnp.shape(mask)}"
            )


def per_token(values: Float[Array, " B"] | Float[Array, "B T"], mask: Mask) -> Float[Array, "B T"]:
    """Broadcast one value a completion to its tokens; one value a token stays as it is.

    Raises ValueError where the values fit the [B, T] mask in neither way.
    """
    if jnp.shape(values) == jnp.shape(mask)[:1]:
        return jnp.broadcast_to(values[:, None], jnp.shape(mask))
    check_shapes(mask, advantages=values)
    return values


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mean:
    """numerator / denominator, summed apart."""

    numerator: Float[Array, "*stack"]
    denominator: Float[Array, "*stack"]

    @classmethod
    def of(cls, values: Shaped[Array, "*axes"], mask: Mask) -> Mean:
        """Average `values` over the entries where `mask` is set."""
        return cls(masked_sum(values, mask), masked_count(mask))

    def __add__(self, other: Mean | Maximum) -> Mean:
        assert isinstance(other, Mean)
        return Mean(self.numerator + other.numerator, self.denominator + other.denominator)

    def reduce(self) -> Mean:
        """Add up a stack along its leading axis."""
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
        """Find the maximum of `values` over the entries where `mask` is set."""
        return cls(masked_max(values, mask))

    def __add__(self, other: Mean | Maximum) -> Maximum:
        assert isinstance(other, Maximum)
        return Maximum(jnp.maximum(self.maximum, other.maximum))

    def reduce(self) -> Maximum:
        """Find the maximum of a stack along its leading axis."""
        return Maximum(self.maximum.max(0))

    @property
    def value(self) -> Float[Array, ""]:
        """The maximum; 0 where nothing was counted."""
        return self.maximum


Metrics = dict[str, Mean | Maximum]


def add_metrics(first: Metrics, second: Metrics) -> Metrics:
    """Add the metrics of two micro-batches.

    Raises ValueError where they do not have the same names.
    """
    if first.keys() != second.keys():
        raise ValueError(
            f"metrics of one side only: {', '.join(sorted(first.keys() ^ second.keys()))}"
        )
    return {name: metric + second[name] for name, metric in first.items()}


def reduce_metrics(stacked: Metrics) -> Metrics:
    """Add up the metrics of all micro-batches, stacked along a leading axis by `lax.scan`."""
    return {name: metric.reduce() for name, metric in stacked.items()}


def metric_values(
    metrics: Mapping[str, Mean | Maximum | Float[Array, ""]],
) -> dict[str, Float[Array, ""]]:
    """Turn metrics into plain numbers, once everything has been added.

    What is a number already, as all of `mismatch_metrics`, stays as it is.
    """
    return {
        name: metric.value if isinstance(metric, Mean | Maximum) else metric
        for name, metric in metrics.items()
    }
