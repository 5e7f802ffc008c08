from pallas_kernels.matmul.api import blockwise_matmul, dot, packs, selected_backend
from pallas_kernels.matmul.cpu import Panels, pack
from pallas_kernels.matmul.reference import flatten_many_rows

__all__ = [
    "Panels",
    "blockwise_matmul",
    "dot",
    "flatten_many_rows",
    "pack",
    "packs",
    "selected_backend",
]
