from pallas_kernels.attention.api import attention
from pallas_kernels.attention.reference import (
    CHUNK,
    CHUNK_FROM,
    PROBABILITY_FACTOR,
    KeyBlock,
    TokenBlock,
    Tokens,
    attend_in_chunks,
    attention_mask,
    window_mask,
)

__all__ = [
    "CHUNK",
    "CHUNK_FROM",
    "PROBABILITY_FACTOR",
    "KeyBlock",
    "TokenBlock",
    "Tokens",
    "attend_in_chunks",
    "attention",
    "attention_mask",
    "window_mask",
]
