from pallas_kernels.cache_write.api import move_tokens, write_cache
from pallas_kernels.cache_write.reference import scatter

__all__ = ["move_tokens", "scatter", "write_cache"]
