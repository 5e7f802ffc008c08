"""Arithmetic whose result does not depend on the order of its sums; `numbers` says how, `products`
multiplies with it."""

from pallas_kernels.exact.gradient import with_gradient_of
from pallas_kernels.exact.numbers import cut, exp, log, once, scoped, sigmoid, total, wide
from pallas_kernels.exact.products import (
    Integers,
    add_scaled,
    attend,
    dot,
    grouped_dot,
    to_integers,
)

__all__ = [
    "Integers",
    "add_scaled",
    "attend",
    "cut",
    "dot",
    "exp",
    "grouped_dot",
    "log",
    "once",
    "scoped",
    "sigmoid",
    "to_integers",
    "total",
    "wide",
    "with_gradient_of",
]
