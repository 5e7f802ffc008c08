from pallas_kernels.attention.api import attention
from pallas_kernels.attention.reference import (
    CHUNK,
    CHUNK_FROM,
    Keys,
    TokenKeys,
    Tokens,
    attend_in_chunks,
    in_window,
    sees,
)

__all__ = [
    "CHUNK",
    "CHUNK_FROM",
    "Keys",
    "TokenKeys",
    "Tokens",
    "attend_in_chunks",
    "attention",
    "in_window",
    "sees",
]
