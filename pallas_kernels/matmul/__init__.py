from pallas_kernels.matmul.api import blockwise_matmul, selected_backend
from pallas_kernels.matmul.reference import dot, flatten_many_rows

__all__ = ["blockwise_matmul", "dot", "flatten_many_rows", "selected_backend"]
