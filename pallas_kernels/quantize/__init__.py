from pallas_kernels.quantize.api import dequantize_blocks, quantize_blocks, quantize_both, regroup

__all__ = ["dequantize_blocks", "quantize_blocks", "quantize_both", "regroup"]
