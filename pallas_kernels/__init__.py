"""Low-precision operations for JAX, one folder each. They need JAX and jaxtyping.

Every operation has one public function with `backend="auto" | "reference" | "cpu" | "hopper"`.
The reference is plain XLA, runs on every device and is the definition of correct. A backend asked
for by name that cannot run raises `BackendError`; under "cpu" an operation that has no kernel for
CPUs (`pallas_kernels.native`) runs its reference.

`pallas_kernels.invariant` has products and sums whose rows have the same bits in every batch,
`pallas_kernels.exact` products, sums and attention whose bits do not depend on the order of their
terms.
"""

from pallas_kernels.attention import attention
from pallas_kernels.backend import BackendError
from pallas_kernels.cache_write import write_cache
from pallas_kernels.decode_attention import KeyValues, decode_attention
from pallas_kernels.grouped_matmul import align_groups, grouped_matmul, grouped_outer_product
from pallas_kernels.matmul import blockwise_matmul, blockwise_outer_product
from pallas_kernels.qtensor import Format, QTensor, ScaledOperand
from pallas_kernels.quantize import (
    Blocks,
    quantize_blocks,
    quantize_both,
    quantize_rms_norm,
    quantize_swiglu,
    regroup,
)

__all__ = [
    "BackendError",
    "Blocks",
    "Format",
    "KeyValues",
    "QTensor",
    "ScaledOperand",
    "align_groups",
    "attention",
    "blockwise_matmul",
    "blockwise_outer_product",
    "decode_attention",
    "grouped_matmul",
    "grouped_outer_product",
    "quantize_blocks",
    "quantize_both",
    "quantize_rms_norm",
    "quantize_swiglu",
    "regroup",
    "write_cache",
]
