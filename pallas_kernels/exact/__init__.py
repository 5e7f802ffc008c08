"""Arithmetic whose result does not depend on the order of its sums; `numbers` says how, `products` multiplies with it."""

from pallas_kernels.exact.gradient import with_gradient_of
from pallas_kernels.exact.numbers import exp, integers, log, rounded, sigmoid, total
from pallas_kernels.exact.products import MAX_TERMS, Integers, add_scaled, attend, dot, grouped_dot, to_integers

__all__ = [
    "MAX_TERMS",
    "Integers",
    "add_scaled",
    "attend",
    "dot",
    "exp",
    "grouped_dot",
    "integers",
    "log",
    "rounded",
    "sigmoid",
    "to_integers",
    "total",
    "with_gradient_of",
]
