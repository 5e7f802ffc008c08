from pallas_kernels.matmul.api import (
    along,
    blockwise_matmul,
    blockwise_matmuls,
    blockwise_outer_product,
    dot,
    in_blocks,
    keeps_quantized,
    packs,
    selected_backend,
    unserved,
)
from pallas_kernels.matmul.cpu import Panels, pack
from pallas_kernels.matmul.reference import flatten_many_rows

__all__ = [
    "Panels",
    "along",
    "blockwise_matmul",
    "blockwise_matmuls",
    "blockwise_outer_product",
    "dot",
    "flatten_many_rows",
    "in_blocks",
    "keeps_quantized",
    "pack",
    "packs",
    "selected_backend",
    "unserved",
]
