from pallas_kernels.grouped_matmul.api import align_groups, grouped_matmul, grouped_outer_product

__all__ = ["align_groups", "grouped_matmul", "grouped_outer_product"]
