from pallas_kernels.quantize.api import dequantize_blocks, quantize_blocks, quantize_both, regroup
from pallas_kernels.quantize.fused import quantize_rms_norm, quantize_swiglu
from pallas_kernels.quantize.reference import block_amax, expand, largest

__all__ = [
    "block_amax",
    "dequantize_blocks",
    "expand",
    "largest",
    "quantize_blocks",
    "quantize_both",
    "quantize_rms_norm",
    "quantize_swiglu",
    "regroup",
]
