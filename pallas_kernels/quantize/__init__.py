from pallas_kernels.quantize.api import dequantize_blocks, quantize_blocks

__all__ = ["dequantize_blocks", "quantize_blocks"]
