from pallas_kernels.cache_write.api import write_cache

__all__ = ["write_cache"]
