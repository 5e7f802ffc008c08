"""Batch-invariant products by the CPU kernel, which adds in the order of the terms; the rest as the
reference."""

from __future__ import annotations

from pallas_kernels.invariant.reference import grouped_dot, row_sum
from pallas_kernels.matmul import cpu
from pallas_kernels.rounding import rounded

__all__ = ["dot", "grouped_dot", "row_sum"]


def dot(x, w, out_dtype):
    return rounded(cpu.dot(x, w), out_dtype)
