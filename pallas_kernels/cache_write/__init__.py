from pallas_kernels.cache_write.api import move_tokens, write_cache

__all__ = ["move_tokens", "write_cache"]
