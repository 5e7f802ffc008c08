from pallas_kernels.matmul.api import blockwise_matmul, selected_backend
from pallas_kernels.matmul.reference import dot, rows_of

__all__ = ["blockwise_matmul", "dot", "rows_of", "selected_backend"]
