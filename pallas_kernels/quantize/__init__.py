from pallas_kernels.quantize.api import dequantize_blocks, quantize_blocks, quantize_both, regroup
from pallas_kernels.quantize.fused import quantize_rms_norm, quantize_swiglu

__all__ = ["dequantize_blocks", "quantize_blocks", "quantize_both", "quantize_rms_norm", "quantize_swiglu", "regroup"]
