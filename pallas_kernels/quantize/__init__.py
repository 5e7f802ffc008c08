from pallas_kernels.quantize.api import (
    Blocks,
    dequantize,
    quantize_blocks,
    quantize_both,
    quantize_rms_norm,
    quantize_swiglu,
    regroup,
    round_blocks,
)
from pallas_kernels.quantize.reference import amax, block_amax, expand_scales, reciprocal

__all__ = [
    "Blocks",
    "amax",
    "block_amax",
    "dequantize",
    "expand_scales",
    "quantize_blocks",
    "quantize_both",
    "quantize_rms_norm",
    "quantize_swiglu",
    "reciprocal",
    "regroup",
    "round_blocks",
]
