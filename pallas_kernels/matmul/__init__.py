from pallas_kernels.matmul.api import blockwise_matmul, selected_backend

__all__ = ["blockwise_matmul", "selected_backend"]
