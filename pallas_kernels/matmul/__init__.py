from pallas_kernels.matmul.api import blockwise_matmul

__all__ = ["blockwise_matmul"]
