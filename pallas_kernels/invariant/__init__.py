from pallas_kernels.invariant.api import (
    OPERATION,
    check_available,
    dot,
    grouped_dot,
    is_available,
    isolated,
    row_sum,
)

__all__ = [
    "OPERATION",
    "check_available",
    "dot",
    "grouped_dot",
    "is_available",
    "isolated",
    "row_sum",
]
