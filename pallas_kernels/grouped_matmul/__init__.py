from pallas_kernels.grouped_matmul.api import align_groups, grouped_matmul, grouped_outer_product
from pallas_kernels.grouped_matmul.reference import dot, outer_product

__all__ = ["align_groups", "dot", "grouped_matmul", "grouped_outer_product", "outer_product"]
