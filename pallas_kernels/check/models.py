"""Linear layers and attention of the models whose shapes kernels are compiled for and timed at,
from their configurations."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes; `intermediate` is an expert's where there are `experts`, each token taking
    `chosen` of them."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int = 0
    chosen: int = 0

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of each kind of linear layer, an expert's included."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q": (q, self.hidden),
            "kv": (kv, self.hidden),
            "o": (self.hidden, q),
            "gate": (self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }


QWEN3_8B = Shape("qwen3-8b", 4096, 12288, 32, 8, 128)
LLAMA31_8B = Shape("llama-3.1-8b", 4096, 14336, 32, 8, 128)
QWEN3_32B = Shape("qwen3-32b", 5120, 25600, 64, 8, 128)
QWEN3_30B_A3B = Shape("qwen3-30b-a3b", 2048, 768, 32, 4, 128, experts=128, chosen=8)
DENSE = (QWEN3_8B, LLAMA31_8B, QWEN3_32B)
